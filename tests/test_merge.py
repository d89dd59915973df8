"""`merge`: every sample of several caches once, or the selected samples of one, all of them checked."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from qwen_cache import open_cache

from .support.caches import build, contents
from .support.commands import Result, run
from .support.crash import Crash, crash_after
from .support.fake_lanes import FakeLanes

Built = Callable[..., Path]
SHARDS = ("--set", "cache.shard_size=80kB")  # more shards than one


def merge(out: Path, *arguments: str | Path) -> Result:
    return run("qwen-cache", "merge", *arguments, "--out", out, *SHARDS)


@pytest.fixture(scope="module")
def whole(built: Built) -> Path:
    """cat, china, cup and flower, in several shards."""
    return built("edit-plus", SHARDS)


@pytest.fixture
def parts(whole: Path, tmp_path: Path) -> tuple[Path, Path]:
    """Two caches that share one sample, as two machines might have made them."""
    assert merge(tmp_path / "a", whole, "--select", "c[ah]*").code == 0
    assert merge(tmp_path / "b", whole, "--select", "china", "--select", "flower", "--select", "cup").code == 0
    return tmp_path / "a", tmp_path / "b"


def test_two_caches_become_one_with_each_sample_once(whole: Path, parts: tuple[Path, Path], tmp_path: Path) -> None:
    assert [sample.name for sample in open_cache(parts[0])] == ["cat", "china"]
    assert [sample.name for sample in open_cache(parts[1])] == ["china", "cup", "flower"]
    result = merge(tmp_path / "both", *parts)
    assert result.code == 0, result.stderr
    assert run("qwen-cache", "verify", tmp_path / "both").code == 0
    both, expected = open_cache(tmp_path / "both"), open_cache(whole)
    assert [sample.key for sample in both] == [sample.key for sample in expected]
    assert both.identity == expected.identity
    for one, other in zip(both, expected, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other.tensors())


def test_merging_again_changes_nothing_and_adding_keeps_existing_samples(
    parts: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "both"
    assert merge(out, parts[0]).code == 0
    before = contents(out)
    again = merge(out, parts[0])
    assert (again.code, contents(out)) == (0, before)
    assert "nothing to do" in again.stderr
    assert merge(out, parts[1]).code == 0
    assert [sample.name for sample in open_cache(out)] == ["cat", "china", "cup", "flower"]
    assert before.keys() - {"cache.json", "index.parquet"} <= contents(out).keys()


def test_of_one_key_the_first_cache_wins_and_the_target_before_all(
    pairs: Path,
    tmp_path: Path,
    tiny_model: Callable[[str], Path],
    fast: list[FakeLanes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Other processors give other digits under one key."""
    places, noise = (tmp_path / "one", tmp_path / "two"), FakeLanes._noise
    for place in places:
        monkeypatch.setattr(
            FakeLanes, "_noise", staticmethod(lambda seed, shape, by=place.name: noise(seed + by, shape))
        )
        assert build(pairs, place, tiny_model("edit-plus")).code == 0
    one, two = (shards_of(place) for place in places)
    for first, second, expected in ((places[0], places[1], one), (places[1], places[0], two)):
        out = tmp_path / f"{first.name} first"
        assert merge(out, first, second).code == 0
        assert merge(out, second).code == 0
        assert shards_of(out) == expected
    assert not one & two


def test_a_measured_sample_is_preferred_to_one_that_is_not(
    whole: Path, pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one is a sample that an older version has encoded; among measured samples the first cache wins."""
    older, newer, out = (tmp_path / name for name in ("older", "newer", "out"))
    monkeypatch.setattr("qwen_cache.encode.lanes.measure", lambda *_, **__: None)
    assert build(pairs, older, tiny_model("edit-plus"), *SHARDS).code == 0
    assert {sample.row.meta.measured for sample in open_cache(older)} == {None}
    assert merge(newer, whole, "--select", "c[ah]*").code == 0
    assert merge(out, older, newer).code == 0
    assert run("qwen-cache", "verify", out).code == 0
    measured = {sample.name: sample.row.meta.measured for sample in open_cache(out)}
    assert measured == {sample.name: None for sample in open_cache(older)} | {
        sample.name: sample.row.meta.measured for sample in open_cache(newer)
    }
    assert None not in {measured[sample.name] for sample in open_cache(newer)}


def shards_of(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*.tar")}


def test_whole_shards_are_linked_and_not_copied(whole: Path, tmp_path: Path) -> None:
    assert merge(tmp_path / "copy", whole).code == 0
    for shard in open_cache(whole).manifest.shards:
        assert (tmp_path / "copy" / shard.name).stat().st_ino == (whole / shard.name).stat().st_ino


def test_the_merged_cache_is_up_to_date_for_build(
    parts: tuple[Path, Path], pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    assert merge(tmp_path / "both", *parts).code == 0
    plan = json.loads(build(pairs, tmp_path / "both", tiny_model("edit-plus"), "--dry-run", "--json").stdout)
    assert (plan["cached"], plan["to_encode"]) == (4, 0)


def test_names_from_a_file_are_exact(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "names.txt").write_text("cup\n\nflower\n")
    assert merge(tmp_path / "some", whole, "--select", f"@{tmp_path / 'names.txt'}").code == 0
    assert [sample.name for sample in open_cache(tmp_path / "some")] == ["cup", "flower"]
    (tmp_path / "names.txt").write_text("c*\n")
    result = merge(tmp_path / "none", whole, "--select", f"@{tmp_path / 'names.txt'}")
    assert result.code == 2
    assert "no sample has such a name (found c*)" in result.stderr
    assert not (tmp_path / "none").exists()
    assert "the list cannot be read" in merge(tmp_path / "none", whole, "--select", "@nowhere.txt").stderr


def test_compression_can_be_turned_on_and_off(whole: Path, tmp_path: Path) -> None:
    assert merge(tmp_path / "small", whole, "--compression", "zstd").code == 0
    assert merge(tmp_path / "plain", tmp_path / "small", "--compression", "none").code == 0
    small, plain = open_cache(tmp_path / "small"), open_cache(tmp_path / "plain")
    assert sum(s.bytes for s in small.manifest.shards) < sum(s.bytes for s in plain.manifest.shards)
    assert [s.name for s in plain.manifest.shards] == [s.name for s in open_cache(whole).manifest.shards]
    for one, other in zip(small, open_cache(whole), strict=True):
        assert all(torch.equal(one[name], other[name]) for name in other.tensors())
    assert run("qwen-cache", "verify", tmp_path / "small").code == 0


def test_the_settings_set_the_compression_and_shards_stored_with_it_are_linked(whole: Path, tmp_path: Path) -> None:
    assert merge(tmp_path / "small", whole, "--set", "cache.compression=zstd").code == 0
    assert merge(tmp_path / "again", tmp_path / "small", "--compression", "zstd").code == 0
    for shard in open_cache(tmp_path / "small").manifest.shards:
        assert (tmp_path / "again" / shard.name).stat().st_ino == (tmp_path / "small" / shard.name).stat().st_ino
    assert all(sample.row.meta.tensors["prompt_embeds"].codec for sample in open_cache(tmp_path / "again"))


@pytest.mark.slow
def test_a_merge_that_dies_anywhere_continues(whole: Path, parts: tuple[Path, Path], tmp_path: Path) -> None:
    keys = [sample.key for sample in open_cache(whole)]
    count, died = 0, True
    while died:
        out, died = tmp_path / f"out-{count}", False
        with pytest.MonkeyPatch.context() as patch:
            crash_after(count, patch)
            try:
                assert merge(out, *parts).code == 0
            except Crash:
                died = True
        assert merge(out, *parts).code == 0
        assert [sample.key for sample in open_cache(out)] == keys, f"died at operation {count}"
        assert run("qwen-cache", "gc", out).code == 0
        assert run("qwen-cache", "verify", out).code == 0
        count += 1
    assert count > 10


@pytest.mark.parametrize("select", [(), ("--select", "c*")], ids=["linked", "copied"])
def test_damage_is_never_copied(select: tuple[str, ...], whole: Path, tmp_path: Path) -> None:
    broken = Path(shutil.copytree(whole, tmp_path / "broken"))
    sample = next(sample for sample in open_cache(broken) if sample.name == "cup")
    path = broken / sample.row.shard
    data = bytearray(path.read_bytes())
    data[sample.row.entry.tensor_offsets()["prompt_embeds"]] ^= 1
    path.write_bytes(data)
    result = merge(tmp_path / "out", broken, *select)
    assert result.code == 2
    assert f"{path}: prompt_embeds of sample {sample.key} does not have the bytes that were written" in result.stderr
    assert not (tmp_path / "out" / "cache.json").exists()


def test_incompatible_caches_are_refused(whole: Path, built: Built, tmp_path: Path) -> None:
    other = merge(tmp_path / "x", whole, built("edit-plus", ("--format", "v1")))
    assert other.code == 2
    assert "these caches have different format versions" in other.stderr
    assert "run `qwen-cache migrate`" in other.stderr
    recipe = merge(tmp_path / "x", whole, built("edit-plus", ("--dtype", "bfloat16")))
    assert recipe.code == 2
    assert "two different recipes are called 'default'" in recipe.stderr
    assert "cannot be merged into itself" in merge(whole, whole).stderr
    assert "nothing: no such folder" in merge(tmp_path / "x", whole, tmp_path / "nothing").stderr
