"""A row may hold a rejected image beside its target: encoded as a target is, kept by every command, and refused where
it has no place. A row without one is as before."""

from __future__ import annotations

import csv
import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

from qwen_cache import open_cache, webdataset
from qwen_cache.encode.known_latents import ImageRows
from qwen_cache.errors import SourceError
from qwen_cache.format.cache import LocalShards
from qwen_cache.inspect.flags import stored_images
from qwen_cache.service.client import Client
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.detect import Content, read_content, reading
from qwen_cache.sources.images import thumbnail_size
from qwen_cache.sources.sizes import Resolution, SourceImage, sizes_of
from qwen_cache.torch import CacheDataset, collate

from .support.caches import build, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes
from .support.judge import assert_same, by_name, image, plain_latents, plain_tokens, stock_pipeline
from .support.serving import png, running, service_job

TinyModel = Callable[[str], Path]
ROWS: dict[str, dict[str, tuple[str, tuple[int, int]]]] = {
    "same shape": {"target": ("china.jpg", (150, 100)), "control": ("flower.jpg", (100, 150))},
    "other shape": {"target": ("flower.jpg", (100, 150)), "control": ("china.jpg", (150, 100))},
    "text to image": {"target": ("coffee.png", (128, 128))},
    "none": {"target": ("china.jpg", (150, 100)), "control": ("flower.jpg", (100, 150))},
}
"""The images of each row: a photograph, and its size."""
ROWS["same shape"]["rejected"] = "coffee.png", (300, 200)
ROWS["other shape"]["rejected"] = "chelsea.png", (160, 107)
ROWS["text to image"]["rejected"] = "china.jpg", (300, 90)


def write_source(folder: Path, *, exchanged: bool = False) -> Path:
    """A table of `ROWS`; `exchanged` rows have their rejected image as the target, and the other way round."""
    folder.mkdir()
    rows = []
    for name, of_roles in ROWS.items():
        row = {"prompt": f"make it {name}"} | {role: f"{name} {role}.png" for role in of_roles}
        for role, photo in of_roles.items():
            image(*photo).save(folder / row[role])
        if exchanged and "rejected" in row:
            row |= {"target": row["rejected"], "rejected": row["target"]}
        rows.append(row)
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_source(tmp_path_factory.mktemp("rejected") / "source")


@pytest.fixture(scope="module")
def cache(source: Path, model: Path) -> Path:
    result = build(source, source.parent / "shards", model)
    assert result.code == 0, result.stderr
    return source.parent / "shards"


# ---- the cache -------------------------------------------------------------------------------------------------------


def test_it_is_encoded_as_a_target_is(cache: Path, model: Path) -> None:
    """In the size that it would have as a target; in that of the target, if both have one shape."""
    vae, samples = stock_pipeline(model, "edit-plus").vae, by_name(open_cache(cache))
    for name, of_roles in ROWS.items():
        sample = samples[f"{name} target"]
        stored = {"target": "image_latents", "control": "control_latents", "rejected": "rejected_latents"}
        shapes = {"target": sample.img_shapes[0], "control": sample.img_shapes[-1], "rejected": sample.rejected_shape}
        for role, (photograph, size) in of_roles.items():
            _, h, w = shapes[role] or (0, 0, 0)
            assert_same(
                sample[stored[role]], plain_tokens(plain_latents(vae, image(photograph, size), (16 * w, 16 * h)))
            )
            assert [((16 * w, 16 * h),)] == sizes_of([SourceImage(role, size)], Resolution((16384,)))
        assert ("rejected_latents" in sample) == ("rejected" in of_roles) == (sample.rejected_shape is not None)
        assert list(sample.row.meta.tensors)[:2] == (
            ["image_latents", "rejected_latents" if "rejected" in of_roles else "control_latents"]
        )


def test_rows_without_one_keep_their_keys(cache: Path, source: Path, model: Path, tmp_path: Path) -> None:
    table, rows = source / "without.jsonl", (source / "metadata.jsonl").read_text(encoding="utf-8").splitlines()
    fewer = [{name: value for name, value in json.loads(row).items() if name != "rejected"} for row in rows]
    table.write_text("\n".join(map(json.dumps, fewer)), encoding="utf-8")
    planned = plan(table, cache, model)
    table.unlink()
    assert (planned["cached"], planned["to_encode"], planned["text_only"]) == (1, 3, 3)
    assert planned["reasons"] == {"rejected": 3}
    only = tmp_path / "only"
    assert run("qwen-cache", "merge", cache, "--select", "none*", "--out", only).code == 0
    assert not {"rejected", "rejected_shape", "rejected_latents"} & set(open_cache(only).table.column_names)
    assert {"rejected", "rejected_shape", "rejected_latents"} <= set(open_cache(cache).table.column_names)
    assert open_cache(only)[0].row.meta == by_name(open_cache(cache))["none target"].row.meta


def test_the_plan_counts_it_and_latents_that_a_cache_has_are_not_encoded_again(
    cache: Path, source: Path, model: Path, tmp_path: Path
) -> None:
    shapes = [sample.row.meta.stored_shapes for sample in open_cache(cache)]
    tokens = sum(h * w for of_sample in shapes for _, h, w in of_sample)
    assert plan(source, tmp_path / "new", model)["image_tokens"] == tokens
    exchanged = write_source(tmp_path / "exchanged", exchanged=True)
    found = plan(exchanged, cache, model)
    assert (found["cached"], found["to_encode"], found["text_only"]) == (1, 3, 3)
    assert build(exchanged, tmp_path / "shards", model, "--reuse", str(cache)).code == 0
    before, after = (sorted(open_cache(each), key=lambda it: it.prompt) for each in (cache, tmp_path / "shards"))
    for one, other in zip(before, after, strict=True):
        if one.rejected_shape:
            assert torch.equal(one["rejected_latents"], other["image_latents"])
            assert torch.equal(one["image_latents"], other["rejected_latents"])
    as_targets = [
        {**json.loads(row), "rejected": None} for row in (exchanged / "metadata.jsonl").read_text().splitlines()
    ]
    (exchanged / "metadata.jsonl").write_text("\n".join(map(json.dumps, as_targets)), encoding="utf-8")
    assert plan(exchanged, cache, model)["text_only"] == 3


def test_a_service_finds_its_latents_in_a_cache(cache: Path) -> None:
    opened = open_cache(cache)
    found = ImageRows(opened.keyed_rows, LocalShards(opened.folder, opened.manifest))
    for sample in opened:
        inputs = sample.row.meta.inputs
        images = [("image_latents", inputs.target, sample.img_shapes[0])]
        images += [("control_latents", inputs.controls[0], sample.img_shapes[1])] if inputs.controls else []
        images += [("rejected_latents", inputs.rejected, sample.rejected_shape)] if sample.rejected_shape else []
        for name, digest, (_, h, w) in images:
            read = found.find(digest or "", (16 * w, 16 * h))
            assert read is not None
            assert torch.equal(read(), sample[name])


def test_merge_compresses_it_and_verify_finds_a_changed_bit(cache: Path, tmp_path: Path) -> None:
    out = tmp_path / "shards"
    assert run("qwen-cache", "merge", cache, "--out", out, "--compression", "zstd").code == 0
    for one, other in zip(open_cache(cache), open_cache(out), strict=True):
        assert one.key == other.key
        for name, tensor in one.tensors().items():
            assert torch.equal(tensor, other[name])
    assert run("qwen-cache", "verify", out).code == 0
    row = next(sample.row for sample in open_cache(out) if sample.rejected_shape)
    path, place = out / row.shard, row.entry.tensor_offsets()["rejected_latents"] + 100
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.unlink()
    path.write_bytes(data)
    result = run("qwen-cache", "verify", out, "--json")
    findings = json.loads(result.stdout)["findings"]
    assert result.code == 1
    assert {finding["rule"] for finding in findings} <= {"F6", "F14", "F18"}
    assert any("rejected_latents of " in finding["what"] for finding in findings)


def test_a_damaged_one_is_repaired(source: Path, model: Path, tmp_path: Path, fast: list[FakeLanes]) -> None:
    out = tmp_path / "shards"
    assert build(source, out, model).code == 0
    row = next(sample.row for sample in open_cache(out) if sample.rejected_shape)
    path, place = out / row.shard, row.entry.tensor_offsets()["rejected_latents"]
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)
    assert build(source, out, model, "--repair").code == 0
    assert fast[-1].encoded == [row.name]
    assert run("qwen-cache", "verify", out).code == 0


def test_every_reader_gives_it(cache: Path) -> None:
    samples = {sample.key: sample for sample in open_cache(cache)}
    items = list(CacheDataset(cache))
    for item in (*items, *webdataset.open(cache)):
        sample = samples[item["key"]]
        assert item.get("rejected_shape") == sample.rejected_shape
        assert ("rejected_latents" in item) == ("rejected_latents" in sample)
        if sample.rejected_shape:
            assert torch.equal(item["rejected_latents"], sample["rejected_latents"])
    batch = collate(items)
    without = [{name: value for name, value in item.items() if "rejected" not in name} for item in items]
    assert all(torch.equal(value, collate(without)[name]) for name, value in batch.items() if name.endswith("latents"))


def test_inspect_shows_it_beside_the_target(cache: Path) -> None:
    sample = by_name(open_cache(cache))["other shape target"]
    shown = {each.title: Image.open(io.BytesIO(each.data)) for each in stored_images(sample)}
    assert list(shown) == ["control", "target", "rejected"]
    shapes = dict(zip(shown, (sample.img_shapes[1], sample.img_shapes[0], sample.rejected_shape), strict=True))
    assert {title: each.size for title, each in shown.items()} == {
        title: thumbnail_size(shape) for title, shape in shapes.items() if shape
    }
    assert "3 with a rejected image" in run("qwen-cache", "inspect", cache).stdout
    assert "rejected" in run("qwen-cache", "inspect", cache, "--sample", sample.key).stdout


def test_it_is_refused_where_it_has_no_place(cache: Path, source: Path, model: Path, tmp_path: Path) -> None:
    names = "same shape target, other shape target, text to image target"
    refused(run("qwen-cache", "migrate", "v2", "v1", cache, "--out", tmp_path / "v1"), "rejected images", names)
    found = "3 rows, such as same shape target"
    refused(build(source, tmp_path / "v1", model, "--format", "v1"), "format v1 cannot hold rejected images", found)
    export = "qwen-cache", "export", cache, "--to", "musubi", "--out", tmp_path / "musubi"
    do = "add --leave-out rejected_latents"
    refused(run(*export), "musubi-tuner cannot hold rejected_latents of 3 samples", do)
    assert run(*export, "--leave-out", "rejected_latents", "--leave-out", "empty_prompt_embeds").code == 0


def test_a_server_takes_it(source: Path, model: Path, tmp_path: Path, fast: list[FakeLanes]) -> None:
    with running(service_job(model, tmp_path / "pool")) as url, Client(url, patience=600) as client:
        images = {"target": png(1), "controls": [png(2)], "rejected": png(3, (64, 96))}
        sample = client.encode("make it red", **images)  # type: ignore[arg-type]
        assert sample.rejected_shape == (1, 10, 6)
        assert sample["rejected_latents"].shape == (60, 64)
        assert build(source, tmp_path / "here", model).code == 0
        result = run("qwen-cache", "build", source, "--at", url, "--out", tmp_path / "there")
        assert result.code == 0, result.stderr
    here, there = (open_cache(tmp_path / name) for name in ("here", "there"))
    assert [sample.key for sample in here] == [sample.key for sample in there]
    assert here.table.column_names == there.table.column_names


# ---- sources ---------------------------------------------------------------------------------------------------------


def read(source: Path, **settings: Any) -> Content:
    return read_content(source, **reading(DataConfig.model_validate({"allow_no_control": True, **settings})))


def shades(content: Content) -> list[tuple[Any, ...]]:
    """The red of target, rejected image and controls of each row, whose images have one colour."""

    def shade(image: Any) -> int | None:
        return None if image is None else Image.open(io.BytesIO(image.read())).convert("RGB").getpixel((0, 0))[0]

    assert content.problems == []
    return [(shade(row.target), shade(row.rejected), *map(shade, row.controls)) for row in content.rows]


def plain(shade: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (32, 32), (shade, 0, 0)).save(file, "PNG")
    return file.getvalue()


def fill(folder: Path, files: dict[str, int | str]) -> Path:
    """Images of one colour, and texts."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(plain(content) if isinstance(content, int) else content.encode())
    return folder


TABLES = {
    "image,rejected,prompt\n1.png,2.png,a\n": {},
    "chosen,rejected,prompt\n1.png,2.png,a\n": {},
    "image_w,image_l,caption\n1.png,2.png,a\n": {},
    "win,lose,prompt\n1.png,2.png,a\n": {},
    "preferred_image,dispreferred_image,prompt\n1.png,2.png,a\n": {},
    "better,worse,prompt\n1.png,2.png,a\n": {"columns": {"target": "better", "rejected": "worse"}},
    "jpg_0,jpg_1,label_0,caption\n1.png,2.png,1,a\n": {},
    "jpg_0,jpg_1,label_0,label_1,caption\n2.png,1.png,0.0,1.0,a\n": {},
    "image_0,image_1,label_0,caption\n1.png,2.png,1,a\n2.png,1.png,0.5,tie\n": {},
}


@pytest.mark.parametrize("text", TABLES, ids=lambda text: text.partition(",prompt")[0].partition(",caption")[0])
def test_tables_name_it_as_the_field_does(text: str, tmp_path: Path) -> None:
    fill(tmp_path, {"1.png": 1, "2.png": 2, "a.csv": text})
    content = read(tmp_path / "a.csv", **TABLES[text])
    assert shades(content) == [(1, 2)]
    assert content.left_out == text.count("tie")
    [row] = csv.DictReader(io.StringIO(text.split("\n2.png,1.png,0.5")[0]))
    values = {name: plain(int(value[0])) if value.endswith(".png") else value for name, value in row.items()}
    values |= {name: float(value) for name, value in row.items() if name.startswith("label")}
    pq.write_table(pa.table({name: [value] for name, value in values.items()}), tmp_path / "a.parquet")
    assert shades(read(tmp_path / "a.parquet", **TABLES[text])) == [(1, 2)]


FOLDERS: dict[str, tuple[dict[str, int | str], dict[str, Any]]] = {
    "beside the target": ({"a.png": 1, "a.txt": "a", "a_rejected.png": 2}, {}),
    "its folder": ({"target_images/a.png": 1, "target_images/a.txt": "a", "rejected/a.jpg": 2}, {}),
    "below the targets": ({"a.png": 1, "a.txt": "a", "rejected/a.png": 2}, {}),
    "chosen": ({"chosen/a.png": 1, "chosen/a.txt": "a", "rejected/a.png": 2}, {}),
    "by name": ({"x/a.png": 1, "x/a.txt": "a", "y/a.png": 2}, {"columns": {"target": "x", "rejected": "y"}}),
    "ignored": ({"a.png": 1, "a.txt": "a", "rejected/a.png": 2}, {"columns": {"target": ".", "rejected": []}}),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_has_it_by_its_name(name: str, tmp_path: Path) -> None:
    files, settings = FOLDERS[name]
    if name == "ignored":
        content = read(fill(tmp_path, files | {"rejected/a.txt": "b"}), **settings)
        assert [row.rejected for row in content.rows] == [None, None]
        return
    assert shades(read(fill(tmp_path, files), **settings)) == [(1, 2)]


def test_a_folder_of_edits_has_it_beside_controls_and_masks(tmp_path: Path) -> None:
    """Also where the row that has none is its neighbour."""
    files: dict[str, int | str] = {"control_images/a.png": 3, "control_images/a_control_1.png": 4}
    files |= {"target_images/a.png": 1, "target_images/a.txt": "a", "rejected_images/a.png": 2}
    files |= {"target_images/b.png": 5, "target_images/b.txt": "b", "control_images/b.png": 6}
    assert shades(read(fill(tmp_path, files), allow_no_control=False)) == [(1, 2, 3, 4), (5, None, 6)]


def test_a_tar_has_it_as_a_part(tmp_path: Path) -> None:
    for better, settings in (("target", {}), ("chosen", {}), ("a", {"columns": {"target": "a", "rejected": "b"}})):
        worse = "b" if better == "a" else "rejected"
        with tarfile.open(tmp_path / f"{better}.tar", "w") as tar:
            for name, data in {f"k.{better}.png": plain(1), f"k.{worse}.png": plain(2), "k.txt": b"a"}.items():
                info = tarfile.TarInfo(name)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        assert shades(read(tmp_path / f"{better}.tar", **settings)) == [(1, 2)]


PROBLEMS = {
    "target,rejected,prompt\n1.png,1.png,a\n": "1: the rejected image is the target",
    "target,rejected,prompt\n1.png,3.png,a\n": "the rejected image 3.png does not exist",
    "target,rejected,prompt\n1.png,bad.png,a\n": "bad.png",
    "target,rejceted,prompt\n1.png,2.png,a\n": "the column 'rejceted' is unknown, and resembles 'rejected'",
    "target,chosen,rejected,prompt\n1.png,1.png,2.png,a\n": "two columns hold the same target: 'target' and 'chosen'",
    "jpg_0,jpg_1,label_0,prompt\n1.png,2.png,0.7,a\n": "the label 'label_0' is '0.7', expected 1, 0 or 0.5",
    "jpg_0,jpg_1,prompt\n1.png,2.png,a\n": "no column holds the target",
}


@pytest.mark.parametrize("text", PROBLEMS)
def test_what_cannot_be_a_pair_is_a_problem(text: str, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    source = fill(tmp_path / "data", {"1.png": 1, "2.png": 2, "bad.png": "no image", "a.csv": text}) / "a.csv"
    result = build(source, tmp_path / "shards", model, "--set", "data.allow_no_control=true", "--dry-run")
    assert result.code == 2
    assert PROBLEMS[text].replace("3.png", f"{source.parent / '3.png'}") in " ".join(result.stderr.split())


def test_an_image_to_generate_has_none(tmp_path: Path) -> None:
    fill(tmp_path, {"1.png": 1, "2.png": 2, "a.csv": "target,rejected,prompt\n,2.png,a\n1.png,2.png,b\n"})
    content = read_content(tmp_path / "a.csv", **{**reading(DataConfig()), "to_generate": True})
    assert [(row.prompt, row.rejected is None) for row in content.rows] == [("b", False)]
    assert [problem.what for problem in content.problems] == ["there is a rejected image, and no target"]


@pytest.mark.parametrize(
    ("resolution", "sizes"),
    [
        (Resolution((65536,)), [((320, 224), (192, 352))]),
        (Resolution((65536,), upscale=False), [((288, 192), (96, 160))]),
        (Resolution((16384, 65536)), [((160, 96), (96, 160))]),  # the budget that the target fills
        (Resolution((16384, 65536), all=True), [((160, 96), (96, 160)), ((320, 224), (192, 352))]),
        (Resolution(fixed=((192, 128), (96, 176), (192, 352))), [((192, 128), (96, 176))]),
    ],
)
def test_its_size_follows_the_policy_of_targets(resolution: Resolution, sizes: list[Any]) -> None:
    target, other = SourceImage("target", (300, 200)), SourceImage("other", (100, 180))
    assert sizes_of([target], resolution, other) == sizes
    for found in sizes_of([target], resolution, SourceImage("same shape", (180, 120))):
        assert found[0] == found[1]
    with pytest.raises(SourceError, match="no entry of the image's shape") as error:
        sizes_of([target], Resolution(fixed=((192, 128),)), other)
    assert error.value.where == "other"
