"""`migrate`: the same samples in the other version, without the encoders, wherever it is interrupted."""

from __future__ import annotations

import json
import math
import random
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.format.identity import Inputs, content_hash, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.format.update import Existing, by_position, commit_update, open_staging, plan_update, read_existing

from .support.caches import build, contents
from .support.commands import Result, refused, run
from .support.crash import Crash, crash_after

Built = Callable[..., Path]
SHARD_SIZE = 80_000  # more shards than one
SHARDS = ("--set", f"cache.shard_size={SHARD_SIZE}")

NO_THUMBNAILS = ("--set", "cache.thumbnails=false")  # which v1 never knew
EMPTY_PROMPT = ("--set", "data.allow_empty_prompt=true")


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> Callable[[str], Path]:
    """A cache of v1 or v2 from a source without masks and with an empty prompt, never to be changed."""
    from .support.sources import write_pairs

    source = write_pairs(tmp_path_factory.mktemp("plain") / "data")
    (source / "control_images" / "cup_mask.png").unlink()
    (source / "target_images" / "cup.txt").write_text("")
    made: dict[str, Path] = {}

    def make(version: str) -> Path:
        if version not in made:
            built = tmp_path_factory.mktemp("caches") / version
            options = ("--format", version, *SHARDS, *EMPTY_PROMPT, *NO_THUMBNAILS)
            result = build(source, built, tiny_model("edit-plus"), *options)
            assert result.code == 0, result.stderr
            made[version] = built if version == "v1" else without_measured(built, built.with_name("unmeasured"))
        return made[version]

    return make


def without_measured(cache: Path, out: Path) -> Path:
    """A cache with the same samples in the same order, without what only the images can tell."""
    built, samples = open_cache(cache), list(open_cache(cache))
    rows = [ListedSample(each.row.name, each.key, each.row.source_rows) for each in samples]
    order = by_position(built.manifest, read_existing(cache, 2).rows)
    update = plan_update(out, Existing.empty(2), 2, rows, order)
    update = replace(update, vae_encoders=built.manifest.vae_encoders)
    staging = open_staging(update, "unmeasured", SHARD_SIZE)
    for key in order:
        meta = built[key].row.meta
        staging.add(replace(meta, measured=None), {name: built[key].buffer(name) for name in meta.tensors})
    commit_update(update, staging, {"default": built.recipe.recipe}, built.manifest.written_by)
    return out


def migrate(old: str, new: str, cache: Path, *options: str | Path) -> Result:
    return run("qwen-cache", "migrate", old, new, cache, *SHARDS, *options)


@pytest.mark.parametrize(("old", "new"), [("v1", "v2"), ("v2", "v1")])
def test_the_result_is_byte_for_byte_what_a_build_writes(
    old: str, new: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    shards = Path(shutil.copytree(plain(old), tmp_path / "shards"))
    result = migrate(old, new, shards)
    assert result.code == 0, result.stderr
    assert len(open_cache(shards).manifest.shards) > 1
    assert run("qwen-cache", "gc", shards).code == 0
    assert contents(shards) == contents(plain(new))
    assert migrate(new, old, shards).code == 0
    assert run("qwen-cache", "gc", shards).code == 0
    assert contents(shards) == contents(plain(old))


def test_with_out_the_old_cache_stays_as_it_is(plain: Callable[[str], Path], tmp_path: Path) -> None:
    before = contents(plain("v1"))
    assert migrate("v1", "v2", plain("v1"), "--out", tmp_path / "new").code == 0
    assert contents(tmp_path / "new") == contents(plain("v2"))
    assert contents(plain("v1")) == before
    again = migrate("v1", "v2", plain("v1"), "--out", tmp_path / "new")
    assert again.code == 0
    assert "nothing to do" in again.stderr


def test_a_migrated_cache_is_up_to_date_for_build(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Except samples with a mask, which v1 does not have: `build` reports them."""
    shards = tmp_path / "shards"
    first = build(pairs, shards, tiny_model("edit-plus"), "--format", "v1")
    assert "1 edit mask skipped: format v1 has none" in first.stderr
    assert migrate("v1", "v2", shards).code == 0
    found = build(pairs, shards, tiny_model("edit-plus"), "--dry-run", "--json")
    plan = json.loads(found.stdout)
    assert (plan["cached"], plan["new_masks"], plan["to_encode"]) == (3, 1, 0)
    assert [(sample["name"], sample["reasons"]) for sample in plan["samples"]] == [("cup", ["mask"])]


def test_v1_refuses_edit_masks_and_names_the_samples(built: Built, tmp_path: Path) -> None:
    result = migrate("v2", "v1", built("edit-plus"), "--out", tmp_path / "new")
    assert result.code == 2
    what = "format v1 has no edit masks, attention, seeds, rejected images, directions of sliders or images to generate"
    assert f"{what}, but this cache does (found cup)" in result.stderr
    assert not (tmp_path / "new" / "cache.json").exists()


def test_compressed_tensors_are_restored_for_v1(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """And compressed again on the way back if the settings say so."""
    on = ("--set", "cache.compression=zstd")
    assert migrate("v1", "v2", plain("v1"), "--out", tmp_path / "two", *on).code == 0
    specs = [spec for sample in open_cache(tmp_path / "two") for spec in sample.row.meta.tensors.values()]
    assert any(spec.codec for spec in specs)
    assert migrate("v2", "v1", tmp_path / "two", "--out", tmp_path / "one").code == 0
    assert contents(tmp_path / "one") == contents(plain("v1"))


@pytest.mark.slow
@pytest.mark.parametrize("in_place", [True, False])
def test_a_migration_that_dies_anywhere_continues_to_the_same_bytes(
    in_place: bool, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    whole, chance = contents(plain("v2")), random.Random(0)
    old = [{name: tensor.clone() for name, tensor in s.tensors().items()} for s in open_cache(plain("v1"))]
    count, died = 0, True
    while died:
        source = Path(shutil.copytree(plain("v1"), tmp_path / f"v1-{count}"))
        out = source if in_place else tmp_path / f"out-{count}"
        died = False
        with pytest.MonkeyPatch.context() as patch:
            crash_after(count, patch)
            try:
                assert migrate("v1", "v2", source, "--out", out).code == 0
            except Crash:
                died = True
        for path in out.rglob("open.tar"):
            with open(path, "r+b") as file:
                file.truncate(chance.randint(0, path.stat().st_size))
        if in_place:
            for sample, tensors in zip(open_cache(out), old, strict=True):  # v1 or v2, and always whole
                assert all(torch.equal(sample[name], tensors[name]) for name in tensors)
        assert migrate("v1", "v2", source, "--out", out).code == 0
        assert run("qwen-cache", "gc", out).code == 0
        assert contents(out) == whole, f"died at operation {count}"
        shutil.rmtree(source)
        count += 1
    assert count > 20


def test_staged_shards_of_one_version_are_not_used_for_the_other(plain: Callable[[str], Path], tmp_path: Path) -> None:
    """A commit to v2 that dies before its manifest leaves v2 shards at the top; v1 must not list them as its own."""
    assert run("qwen-cache", "merge", plain("v1"), "--out", tmp_path / "some", "--select", "c[au]*", *SHARDS).code == 0
    for path in plain("v2").glob("*.tar"):
        shutil.copy(path, tmp_path / "some")
    assert run("qwen-cache", "merge", plain("v1"), "--out", tmp_path / "some", *SHARDS).code == 0
    assert len(open_cache(tmp_path / "some")) == 4
    assert run("qwen-cache", "verify", tmp_path / "some").code == 0


def test_a_damaged_tensor_is_never_copied(plain: Callable[[str], Path], tmp_path: Path) -> None:
    shards = Path(shutil.copytree(plain("v1"), tmp_path / "shards"))
    sample = open_cache(shards)[2]
    path = shards / sample.row.shard
    data = bytearray(path.read_bytes())
    data[sample.row.entry.tensor_offsets()["empty_prompt_embeds"] + 3] ^= 1
    path.write_bytes(data)
    result = migrate("v1", "v2", shards)
    assert result.code == 2
    damaged = f"empty_prompt_embeds of sample {sample.row.label}"
    assert f"{damaged} does not have the bytes that were written" in result.stderr
    assert open_cache(shards).format_version == 1


def test_one_folder_under_two_names_is_one_folder(
    plain: Callable[[str], Path], tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """`migrate` is then in place; what would mix a result with its source is refused before anything is written."""
    shards, link = Path(shutil.copytree(plain("v1"), tmp_path / "shards")), tmp_path / "link"
    link.symlink_to(shards)
    before = contents(shards)
    for program, target in (("merge", link), ("merge", tmp_path / "x" / ".." / "shards")):
        (tmp_path / "x").mkdir(exist_ok=True)
        merged = run("qwen-cache", program, shards, "--out", target)
        refused(merged, f"{target}: a cache cannot be merged into itself", "choose another folder with --out")
    imported = run("qwen-cache", "import", "musubi", shards, "--out", link, "--model", "Qwen/Qwen-Image-Edit-2509")
    refused(imported, f"{shards}: a cache cannot be imported into itself", "choose another folder with --out")
    built = build(shards, link, tiny_model("edit-plus"))
    refused(built, f"{link}: the cache would be among the images that it is made from", "choose another folder")
    assert contents(shards) == before
    result = migrate("v1", "v2", link, "--out", shards)
    assert result.code == 0, result.stderr
    assert contents(plain("v2")).items() <= contents(shards).items()
    assert open_cache(shards).format_version == 2


def test_wrong_requests_are_refused(plain: Callable[[str], Path], built: Built, tmp_path: Path) -> None:
    assert "nothing: no such folder" in migrate("v1", "v2", tmp_path / "nothing").stderr
    assert not (tmp_path / "nothing").exists()
    shutil.copytree(built("edit-plus"), tmp_path / "other")
    taken = migrate("v1", "v2", plain("v1"), "--out", tmp_path / "other")
    assert taken.code == 2
    assert "this folder holds another dataset" in taken.stderr
    assert migrate("v3", "v2", plain("v1")).code == 2
    compressed = migrate("v2", "v1", plain("v2"), "--out", tmp_path / "x", "--set", "cache.compression=zstd")
    assert "format v1 has no compression (found cache.compression=zstd)" in compressed.stderr


def big_samples(folder: Path, count: int) -> Path:
    """A v1 cache of `count` samples of two megabytes."""
    recipe = {"pipeline": "QwenImageEditPlusPipeline", "dtype": "bfloat16"}
    made = []
    for i in range(count):
        wanted = {"image_latents": (64, 64), "control_latents": (64, 64)}
        wanted |= {"prompt_embeds": (128, 4096), "empty_prompt_embeds": (120, 4096)}
        data = {name: memoryview(bytes([i]) * (2 * math.prod(shape))) for name, shape in wanted.items()}
        specs = {name: TensorSpec("BF16", shape, content_hash(data[name])) for name, shape in wanted.items()}
        inputs = Inputs(content_hash(bytes([i])), (content_hash(b"control"),), None)
        made.append((SampleMeta(recipe_id(recipe), inputs, "", ((1, 8, 8), (1, 8, 8)), 0, specs), data))
    rows = [ListedSample(f"sample {i}", meta.key) for i, (meta, _) in enumerate(made)]
    update = plan_update(folder, read_existing(folder, 1), 1, rows)
    staging = open_staging(update, "big", 10_000_000)
    for meta, data in made:
        staging.add(meta, data)
    commit_update(update, staging, {"default": recipe}, {})
    return folder


def test_memory_does_not_grow_with_the_dataset(tmp_path: Path) -> None:
    peaks = []
    for count in (3, 3, 12):  # the first one pays for imports
        cache = big_samples(tmp_path / f"{len(peaks)}", count)
        tracemalloc.start()
        assert migrate("v1", "v2", cache).code == 0
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    sample = 2 * 120 * 4096
    assert peaks[2] < peaks[1] + sample
