"""Promises of a repair: the damaged samples are encoded again, and nothing else; the cache is what it was."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_cache import open_cache
from qwen_cache.errors import ChecksumError
from qwen_cache.format.cache import Sample

from .support.caches import build, contents
from .support.commands import Result, refused, run
from .support.crash import Crash, crash_after
from .support.fake_lanes import FakeLanes
from .support.marks import slow
from .support.sources import change_target

TWO = ("--set", "cache.shard_size=80000")
"""Two shards of two samples: cat and china, cup and flower."""
SMALL = ("--set", "data.vae_image_size=9216", "--set", "cache.recipe=small")


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


@pytest.fixture
def out(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> Path:
    """A cache of two shards of two samples."""
    assert build(pairs, tmp_path / "shards", model, *TWO).code == 0
    assert [len(list(tmp_path.rglob("*.tar")))] == [2]
    return tmp_path / "shards"


def sample(out: Path, name: str, recipe: str | None = None) -> Sample:
    return next(each for each in open_cache(out, recipe=recipe) if each.name == name)


def flip(out: Path, position: int, shard: str) -> None:
    """Damage one byte of a shard."""
    data = bytearray((out / shard).read_bytes())
    data[position] ^= 1
    (out / shard).write_bytes(data)


def flip_tensor(out: Path, name: str, recipe: str | None = None) -> str:
    """Damage a tensor of the sample; returns the name of its shard."""
    row = sample(out, name, recipe).row
    flip(out, row.entry.tensor_offsets()["control_latents"] + 5, row.shard)
    return row.shard


def repair(pairs: Path, out: Path, model: Path, *options: str) -> Result:
    """With another shard size: the new shards have the samples of the old ones all the same."""
    return build(pairs, out, model, "--repair", *options)


# ---- what is repaired ------------------------------------------------------------------------------------------------


def tensor_of_one(out: Path) -> None:
    flip_tensor(out, "china")


def tensors_of_two(out: Path) -> None:
    flip_tensor(out, "china")
    flip_tensor(out, "cup")


def missing(out: Path) -> None:
    (out / sample(out, "cat").row.shard).unlink()


def cut(out: Path) -> None:
    """The first sample of the shard is whole."""
    row = sample(out, "flower").row
    with open(out / row.shard, "r+b") as file:
        file.truncate(row.entry.data + 100)


def emptied(out: Path) -> None:
    (out / sample(out, "cat").row.shard).write_bytes(b"")


def header(out: Path) -> None:
    row = sample(out, "china").row
    flip(out, row.entry.offset, row.shard)


def padding(out: Path) -> None:
    flip(out, -1, sample(out, "china").row.shard)


def folder(out: Path) -> None:
    path = out / sample(out, "cat").row.shard
    path.unlink()
    path.mkdir()


@pytest.mark.parametrize(
    ("damage", "encoded"),
    [
        (tensor_of_one, ["china"]),
        (tensors_of_two, ["china", "cup"]),
        slow(missing, ["cat", "china"]),
        slow(cut, ["flower"]),
        slow(emptied, ["cat", "china"]),
        slow(header, []),
        slow(padding, []),
    ],
)
def test_the_damaged_samples_are_encoded_again_and_no_others(
    damage: Callable[[Path], None],
    encoded: list[str],
    pairs: Path,
    out: Path,
    model: Path,
    fast: list[FakeLanes],
) -> None:
    before = contents(out)
    damage(out)
    change = pairs / "target_images" / "new"  # what a build would do besides is left to it
    for suffix in (".png", ".txt"):
        shutil.copy(pairs / "target_images" / f"cat{suffix}", change.with_suffix(suffix))
    shutil.copy(pairs / "control_images" / "cup.png", pairs / "control_images" / "new.png")
    found = run("qwen-cache", "verify", out)
    assert found.code == 1
    assert "or run the same `qwen-cache build` with --repair: it encodes the damaged samples again" in found.stderr
    dry = repair(pairs, out, model, "--dry-run", "--check", "--json")
    assert dry.code == 1
    plan = json.loads(dry.stdout)
    assert ([each["name"] for each in plan["samples"]], plan["to_encode"]) == (encoded, len(encoded))
    assert plan["reasons"] == ({"damaged": len(encoded)} if encoded else {})
    result = repair(pairs, out, model, "--json")
    assert result.code == 0, result.stderr
    assert json.loads(result.stdout)["encoded"] == len(encoded)
    assert [lanes.encoded for lanes in fast[1:]] == ([encoded] if encoded else [])
    assert contents(out) == before
    assert run("qwen-cache", "verify", out).code == 0
    assert not any((out / ".replaced").glob("*.tar"))


def test_it_says_what_it_does(pairs: Path, out: Path, model: Path, fast: list[FakeLanes]) -> None:
    whole = repair(pairs, out, model)
    assert whole.code == 0
    assert f"nothing to do: no sample of recipe 'default' in {out} is damaged\n" in whole.stderr
    tensor_of_one(out)
    assert f"nothing to do: {out} already holds this source\n" in build(pairs, out, model, *TWO).stderr
    result = repair(pairs, out, model)
    assert "repair   1 damaged sample in 1 damaged shard, 1 to encode; all other samples stay\n" in result.stderr
    assert "         china: damaged\n" in result.stderr
    assert ": 1 encoded\n" in result.stderr


def test_a_reader_names_the_repair(out: Path) -> None:
    flip_tensor(out, "china")
    with pytest.raises(ChecksumError, match="or run the same `qwen-cache build` with --repair: it encodes the damaged"):
        sample(out, "china").tensors()


@pytest.mark.slow
def test_a_repair_that_dies_anywhere_is_finished_by_the_next(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes], tmp_path: Path
) -> None:
    before, count, died = contents(out), 0, True
    tensors_of_two(out)
    while died:
        copy = Path(shutil.copytree(out, tmp_path / f"copy-{count}"))
        with pytest.MonkeyPatch.context() as patch:
            crash_after(count, patch)
            try:
                died = repair(pairs, copy, model).code != 0
            except Crash:
                died = True
        assert repair(pairs, copy, model).code == 0
        assert contents(copy) == before, f"died at operation {count}"
        count += 1
    assert count > 10


@pytest.mark.slow
def test_the_encoders_give_the_bytes_that_were_lost(pairs: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model, *TWO).code == 0
    before = contents(out)
    tensors_of_two(out)
    assert repair(pairs, out, model).code == 0
    assert contents(out) == before


# ---- what cannot be repaired -----------------------------------------------------------------------------------------


def test_a_sample_whose_source_is_another_one_is_named(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    for name in ("cat", "china", "flower"):
        shard = flip_tensor(out, name)
    cats = out / sample(out, "cat").row.shard
    before = contents(out)
    change_target(pairs)
    (pairs / "target_images" / "china.txt").write_text("make it grey")
    for path in pairs.rglob("cat*"):
        path.unlink()
    told = (
        "2 problems in the damaged samples:\n"
        f"  {cats}: cat is damaged, and the source no longer has it\n"
        "    → put it back, or drop the sample with --on-error skip\n"
        f"  {cats}: china is damaged, and its source has changed since (target, prompt)\n"
        "    → restore the old source, or drop the sample with --on-error skip: the next build encodes the new one\n"
        "error: nothing will be encoded until these are fixed (found 2 problems)\n"
    )
    for options in ((), ("--dry-run",)):
        refused(repair(pairs, out, model, *options), told)
    assert contents(out) == before
    result = repair(pairs, out, model, "--on-error", "skip")
    assert result.code == 0, result.stderr
    assert "repair   3 damaged samples in 2 damaged shards, 1 to encode; all other samples stay\n" in result.stderr
    assert fast[-1].encoded == ["flower"]
    assert [each.name for each in open_cache(out)] == ["cup", "flower"]
    assert run("qwen-cache", "verify", out).code == 0
    assert (out / shard).is_file()
    assert build(pairs, out, model, *TWO).code == 0
    assert fast[-1].encoded == ["china"]


def test_an_image_that_cannot_be_read_is_a_problem_of_the_source(pairs: Path, out: Path, model: Path) -> None:
    flip_tensor(out, "china")
    path = pairs / "target_images" / "china.png"
    path.write_bytes(path.read_bytes()[:-500])
    refused(repair(pairs, out, model), "1 problem in the damaged samples:\n", f"{path}: the image is damaged")


def test_a_validation_cache_that_is_not_there_cannot_be_repaired(pairs: Path, out: Path, model: Path) -> None:
    prompt = ("--set", 'validation.prompts=["a cat"]')
    refused(repair(pairs, out, model, "--only-validation", *prompt), "validation: no cache.json here: not a cache")


def test_shards_of_another_recipe_are_named_and_left_to_it(
    pairs: Path, out: Path, model: Path, fast: list[FakeLanes]
) -> None:
    assert build(pairs, out, model, *TWO, *SMALL).code == 0
    before = contents(out)
    small, ours = flip_tensor(out, "cup", "small"), flip_tensor(out, "cup", "default")
    told = (
        f"error: {out / small}: this shard is damaged and holds only samples of other recipes (found small) [F6]\n"
        "  → run `qwen-cache build --repair` with the settings of that recipe and --set cache.recipe=small\n"
    )
    assert repair(pairs, out, model, "--dry-run").code == 1
    for encoded in ([["cup"]], []):
        loaded, result = len(fast), repair(pairs, out, model)
        assert (result.code, [lanes.encoded for lanes in fast[loaded:]]) == (1, encoded)
        assert told in result.stderr
    assert contents(out)[ours] == before[ours]
    assert repair(pairs, out, model, *SMALL).code == 0
    assert contents(out) == before
    (out / small).unlink()
    lost = build(pairs, out, model, *TWO)
    what = f"{out / small}: a shard with samples of another recipe is missing (found samples of recipe 'small') [F6]"
    do = "restore it from a copy, or run `qwen-cache build --repair` with the settings of that recipe"
    refused(lost, f"error: {what}\n  → {do}\n")
    (out / ours).unlink()
    assert repair(pairs, out, model).code == 1
    assert repair(pairs, out, model, *SMALL).code == 0
    assert contents(out) == before


def test_a_sample_of_another_recipe_in_a_shared_shard_is_a_problem(
    pairs: Path, out: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    assert build(pairs, out, model, *TWO, *SMALL).code == 0
    mixed = tmp_path / "mixed"
    assert run("qwen-cache", "merge", out, "--select", "c[hu]*", "--out", mixed).code == 0
    (path,) = mixed.glob("*.tar")
    flip_tensor(mixed, "cup", "small")
    flip_tensor(mixed, "china", "default")
    told = f"  {path}: cup is damaged, and belongs to another recipe in this shard, small\n"
    do = "    → restore the shard from a copy, or drop the sample with --on-error skip and build that recipe again\n"
    refused(repair(pairs, mixed, model), told + do)
    assert repair(pairs, mixed, model, "--on-error", "skip").code == 0
    names = {recipe: [each.name for each in open_cache(mixed, recipe=recipe)] for recipe in ("default", "small")}
    assert names == {"default": ["china", "cup"], "small": ["china"]}
    assert run("qwen-cache", "verify", mixed).code == 0


def test_a_repair_needs_the_settings_of_the_cache(pairs: Path, out: Path, tmp_path: Path, model: Path) -> None:
    wrong = f"error: {out}: --repair needs the model and the settings that the cache was built with"
    do = f"add `--config {out / 'qwen.yaml'}`, which has those of the last build"
    refused(repair(pairs, out, model, "--dtype", "bfloat16"), f"{wrong} (found dtype float32 → bfloat16)\n  → {do}\n")
    another = repair(pairs, out, model, "--set", "cache.recipe=other", "--dtype", "bfloat16")
    refused(another, f"error: {out}: this cache has no recipe 'other' (found default)\n  → name one of")
    assert run("qwen-cache", "build", pairs, "--repair", "--config", out / "qwen.yaml").code == 0
    both = "--repair keeps the recipe, and --replace replaces it\n  → give only one of them\n"
    refused(repair(pairs, out, model, "--replace"), both)
    refused(repair(pairs, tmp_path / "nothing", model), "nothing: no cache.json here: not a cache")
    assert build(pairs, out, model, *SMALL).code == 0  # now the file has the settings of this recipe
    do = f"give those of recipe 'default'; {out / 'qwen.yaml'} does not have them"
    refused(repair(pairs, out, model, "--dtype", "bfloat16"), f"{wrong} (found dtype float32 → bfloat16)\n  → {do}\n")
    refused(repair(pairs, out, model, "--set", "cache.recipe=small"), f"{wrong} (found ", "which has those of the last")
