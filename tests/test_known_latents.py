"""A sample of which only the prompt or one image is new takes the latents of its other images from a cache."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from qwen_cache import open_cache
from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format.manifest import SHARD_PATTERN
from qwen_cache.service.engine import Engine, State
from qwen_cache.sources.rows import Row
from qwen_cache.storage.remote import Url

from .support.caches import build, contents, plan
from .support.commands import refused, run
from .support.server import BUCKET, Server, serving
from .support.serving import row, service_job
from .support.sources import change_prompt
from .support.waiting import HANG


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the VAE's batches."""
    batches: list[int] = []
    encode = VaeEncoder.encode

    def counted(self: VaeEncoder, batch: Any) -> Any:
        batches.append(len(batch))
        return encode(self, batch)

    monkeypatch.setattr(VaeEncoder, "encode", counted)
    return batches


def test_new_prompts_need_no_vae(
    pairs: Path, tmp_path: Path, model: Path, encoded: list[int], built: Callable[..., Path]
) -> None:
    """With equal bytes to a build from nothing, also of thumbnails, and from another cache."""
    shutil.copytree(built("edit-plus"), tmp_path / "shards")
    for path in pairs.rglob("*.txt"):
        path.write_text(f"another prompt for {path.stem}", encoding="utf-8")
    encoded.clear()
    found = plan(pairs, tmp_path / "shards", model)
    assert (found["to_encode"], found["text_only"]) == (4, 4)
    reused = build(pairs, tmp_path / "mine", model, "--reuse", str(tmp_path / "shards"))
    assert "4 samples of which only the text is encoded" in reused.stderr
    assert build(pairs, tmp_path / "shards", model).code == 0
    assert sum(encoded) == 0
    assert build(pairs, tmp_path / "alone", model).code == 0
    assert sum(encoded) > 0
    assert contents(tmp_path / "mine") == contents(tmp_path / "alone")
    assert run("qwen-cache", "verify", tmp_path / "shards").code == 0


@pytest.mark.slow
def test_latents_elsewhere_are_read_by_their_ranges(
    s3: tuple[str, int], pairs: Path, tmp_path: Path, model: Path, encoded: list[int]
) -> None:
    """Latents of a bucket that is built, and of a cache on another server."""
    bucket = f"s3://{BUCKET}/latents"
    assert build(pairs, tmp_path / "shards", model).code == build(pairs, bucket, model).code == 0
    known = {
        sample.row.meta.tensors[name].stored_bytes
        for sample in open_cache(tmp_path / "shards")
        for name in ("image_latents", "control_latents")
    }
    for path in pairs.rglob("*.txt"):
        path.write_text(f"another prompt for {path.stem}", encoding="utf-8")
    assert build(pairs, tmp_path / "alone", model).code == 0
    encoded.clear()
    with serving(Server(tmp_path / "shards")) as server:
        assert build(pairs, tmp_path / "mine", model, "--reuse", server.url).code == 0
    asked = {end - begin for name, begin, end in server.requests if SHARD_PATTERN.fullmatch(name)}
    assert asked
    assert asked <= known
    assert plan(pairs, bucket, model)["text_only"] == 4
    assert build(pairs, bucket, model).code == 0
    assert sum(encoded) == 0
    assert contents(tmp_path / "mine") == contents(tmp_path / "alone")
    assert by_key(Url(bucket)) == by_key(tmp_path / "alone")


@pytest.mark.slow
def test_a_new_control_is_the_only_image_that_is_encoded(
    pairs: Path, tmp_path: Path, model: Path, encoded: list[int]
) -> None:
    """The second control of two, whose first keeps its place among the latents; without thumbnails."""
    bare = ("--set", "cache.thumbnails=false")
    assert build(pairs, tmp_path / "shards", model, *bare).code == 0
    path = pairs / "control_images" / "cat_control_1.png"
    with Image.open(path) as image:
        image.load()
    ImageOps.invert(image).save(path)
    encoded.clear()
    assert build(pairs, tmp_path / "shards", model, *bare).code == 0
    assert sum(encoded) == 1
    found = plan(pairs, tmp_path / "shards", model, *bare)
    assert found["to_encode"] == 0
    assert build(pairs, tmp_path / "alone", model, *bare).code == 0
    ours, alone = (by_key(tmp_path / name) for name in ("shards", "alone"))
    assert ours == alone


def served(job: BuildJob, *rows: Row) -> Counter[str]:
    """The counts of a server that encoded these rows, one after another."""
    with Engine(job, load_lanes, job.config.serve) as engine:
        for each in rows:
            (status,) = engine.submit(engine.plan(each), 1)
            assert engine.reached(status.key, State.ENCODED).result(HANG).problem is None
    return engine.observer.counts


def test_a_server_takes_them_from_its_cache_and_from_others(tmp_path: Path, model: Path, encoded: list[int]) -> None:
    """With the bytes of encoding them; damaged ones are encoded again."""
    two = replace(row(1), controls=(row(2).controls[0], row(1).controls[0]))
    served(service_job(model, tmp_path / "pool"), row(1), two)
    served(service_job(model, tmp_path / "others"), row(3))
    encoded.clear()
    job = service_job(model, tmp_path / "pool", f'cache.reuse=["{tmp_path / "others"}"]')
    new = [replace(each, prompt="make it green") for each in (two, row(3), row(4))]
    assert served(job, *new)["reused"] == 5
    assert sum(encoded) == 2, "the images of the last row"
    served(service_job(model, tmp_path / "alone"), row(1), two, *new)
    assert by_key(tmp_path / "pool") == by_key(tmp_path / "alone")
    other = open_cache(tmp_path / "others")[0].row
    shard = tmp_path / "others" / other.shard
    data = bytearray(shard.read_bytes())
    data[other.entry.tensor_offsets()["image_latents"]] ^= 1
    shard.write_bytes(data)
    job = service_job(model, tmp_path / "new", f'cache.reuse=["{tmp_path / "others"}"]')
    assert served(job, new[1])["reused"] == 1, "the control"


def by_key(folder: Path | Url) -> dict[str, dict[str, bytes]]:
    return {
        sample.key: {name: bytes(sample.buffer(name)) for name in sample.row.meta.tensors}
        for sample in open_cache(folder)
    }


def test_damaged_latents_are_not_taken(pairs: Path, tmp_path: Path, model: Path) -> None:
    assert build(pairs, tmp_path / "shards", model).code == 0
    (shard,) = (path for path in (tmp_path / "shards").iterdir() if SHARD_PATTERN.fullmatch(path.name))
    sample = next(each for each in open_cache(tmp_path / "shards") if each.name == "flower")
    offset = sample.row.entry.tensor_offsets()["image_latents"]
    with open(shard, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)
        file.seek(offset)
        file.write(bytes([byte[0] ^ 1]))
    change_prompt(pairs)
    refused(build(pairs, tmp_path / "shards", model), "image_latents", "does not have the bytes that were written")
