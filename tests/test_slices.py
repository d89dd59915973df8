"""Promises of `--slice`: independent machines make the cache that one would, and none drops another's samples.

Slices share a cache, or have one each, for `merge`. The judge is the build of the whole source.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_cache import open_cache
from qwen_cache.encode import write
from qwen_cache.encode.plan import SourceSlice
from qwen_cache.errors import ConfigError

from .support.caches import SMALL, build
from .support.commands import Result, run
from .support.fake_lanes import FakeLanes
from .support.server import BUCKET


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def build_slices(source: Path, folder: Path, model: Path, count: int, *options: str) -> list[Result]:
    """Build each slice into `folder`/N."""
    return [build(source, folder / f"{i}", model, "--slice", f"{i}/{count}", *options) for i in range(1, count + 1)]


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 1000])
def test_slices_are_the_whole_in_order_and_equally_long(length: int) -> None:
    cut = [SourceSlice(i, 16).take(range(length)) for i in range(1, 17)]
    assert [item for each in cut for item in each] == list(range(length))
    assert max(map(len, cut)) - min(map(len, cut)) <= 1


@pytest.mark.parametrize("text", ["0/4", "5/4", "3", "3/", "-1/4", "1/0", "1/4/2", ""])
def test_what_is_not_a_slice_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a slice of the source") as error:
        SourceSlice.parse(text)
    assert error.value.found == text
    assert str(SourceSlice.parse("3/16")) == "3/16"


def test_merged_slices_are_the_single_build(
    pairs: Path, tmp_path: Path, model: Path, built: Callable[..., Path]
) -> None:
    """cat, china | cup, flower: with the real encoders."""
    assert [result.code for result in build_slices(pairs, tmp_path / "p", model, 2)] == [0, 0]
    assert [len(open_cache(tmp_path / "p" / str(i))) for i in (1, 2)] == [2, 2]
    assert run("qwen-cache", "merge", *(tmp_path / "p" / str(i) for i in (1, 2)), "--out", tmp_path / "all").code == 0
    merged, single = open_cache(tmp_path / "all"), open_cache(built("edit-plus"))
    assert [(sample.key, sample.name) for sample in merged] == [(sample.key, sample.name) for sample in single]
    assert (merged.identity, merged.recipe) == (single.identity, single.recipe)
    hashes = [
        [{n: t.xxh3_128 for n, t in row.meta.tensors.items()} for row in cache.rows()] for cache in (merged, single)
    ]
    assert hashes[0] == hashes[1]
    checked = build(pairs, tmp_path / "all", model, "--dry-run", "--check")
    assert (checked.code, "4 samples, 4 cached, 0 to encode" in checked.stderr) == (0, True)


def rows_of(folder: Path) -> list[tuple[str, str, int]]:
    return [(row.name, row.meta.key, row.source_rows) for row in open_cache(folder).rows()]


@pytest.mark.parametrize("order", [(1, 2, 3), pytest.param((3, 1, 2), id="any order")])
def test_slices_share_a_cache(
    order: tuple[int, ...], pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    out = tmp_path / "shards"
    for number in order:
        assert build(pairs, out, model, "--slice", f"{number}/3").code == 0
        assert run("qwen-cache", "verify", out).code == 0
    assert [lanes.encoded for lanes in fast] == [[["cat"], ["china"], ["cup", "flower"]][i - 1] for i in order]
    assert build(pairs, tmp_path / "one", model).code == 0
    assert rows_of(out) == rows_of(tmp_path / "one")
    assert open_cache(out).identity == open_cache(tmp_path / "one").identity
    again = build(pairs, out, model, "--slice", "2/3")
    assert (again.code, "nothing to do" in again.stderr) == (0, True)
    checked = build(pairs, out, model, "--dry-run", "--check")
    assert (checked.code, "4 samples, 4 cached, 0 to encode" in checked.stderr) == (0, True)


def test_a_slice_changes_its_own_samples_alone(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    """The slices of a source where each slice has a change, and a sample is removed."""
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    before = {name: key for name, key, _ in rows_of(out)}
    for name in ("cat", "cup"):
        (pairs / "target_images" / f"{name}.txt").write_text("changed")
    for path in pairs.rglob("china*"):
        path.unlink()
    assert build(pairs, out, model, "--slice", "1/3").code == 0
    assert fast[-1].encoded == ["cat"]
    after = {name: key for name, key, _ in rows_of(out)}
    assert list(after) == ["cat", "cup", "flower"]
    assert {name for name, key in after.items() if before[name] != key} == {"cat"}
    assert run("qwen-cache", "verify", out).code == 0


def test_another_recipe_does_not_drop_the_other_slices(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """One recipe has one name, so the samples of the old recipe could not stay beside those of the new one."""
    out, other = tmp_path / "shards", ("--set", "cache.thumbnails=false", "--set", "data.vae_image_size=9216")
    assert build(pairs, out, model).code == 0
    before = (out / "cache.json").read_bytes()
    result = build(pairs, out, model, "--slice", "1/4", *other)
    assert result.code == 2
    assert "4 of 4 cached samples would be encoded again, because the recipe changed" in result.stderr
    assert (out / "cache.json").read_bytes() == before
    assert build(pairs, out, model, "--slice", "1/4", *other, "--replace").code == 0
    assert [name for name, _, _ in rows_of(out)] == ["cat"]
    assert build(pairs, out, model, "--slice", "4/4", *other).code == 0
    assert [name for name, _, _ in rows_of(out)] == ["cat", "flower"]


def test_rows_of_one_content_in_two_slices_are_one_sample(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """The sample has the name of the first row, as in the build of all; a slice counts its own rows alone."""
    for folder in ("target_images", "control_images"):
        for path in (pairs / folder).glob("cat*"):
            shutil.copy(path, path.with_name(path.name.replace("cat", "zebra", 1)))
    assert build(pairs, tmp_path / "one", model).code == 0
    for number in (2, 1):
        assert build(pairs, tmp_path / "shards", model, "--slice", f"{number}/2").code == 0
    both = rows_of(tmp_path / "shards"), rows_of(tmp_path / "one")
    assert [row[:2] for row in both[0]] == [row[:2] for row in both[1]]
    assert sorted(lanes.encoded for lanes in fast[1:]) == [["china"], ["cup", "flower", "zebra"]]


def test_a_sample_of_an_unusable_row_stays(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    """While a row of another slice is unusable, nobody knows which samples the source has lost."""
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    (pairs / "target_images" / "flower.txt").unlink()
    (pairs / "target_images" / "cat.txt").write_text("changed")
    assert build(pairs, out, model, "--slice", "1/4", "--on-error", "skip").code == 0
    assert [name for name, _, _ in rows_of(out)] == ["cat", "china", "cup", "flower"]


@pytest.mark.parametrize(("commit", "count"), [("commit_update", 3), ("commit_early", 2)])
def test_jobs_may_commit_to_one_bucket_at_any_moment(
    commit: str,
    count: int,
    s3: object,
    pairs: Path,
    tmp_path: Path,
    model: Path,
    fast: list[FakeLanes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other slices commit while one is about to; it commits after them, and encodes nothing twice."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    url, original, jobs = f"s3://{BUCKET}/{commit}/shards", getattr(write, commit), iter(range(1, count))

    def build_slice(number: int) -> None:
        every = ["--set", "cache.commit_every=1"] if commit == "commit_early" else []
        options = ["--slice", f"{number}/{count}", "--set", "cache.shard_size=1", *SMALL, *every]
        result = run("qwen-cache", "build", pairs, "--out", url, "--model", model, *options)
        assert result.code == 0, result.stderr

    def after_others(*arguments: Any) -> Any:
        for number in jobs:
            build_slice(number)
        return original(*arguments)

    monkeypatch.setattr(write, commit, after_others)
    build_slice(count)
    assert run("qwen-cache", "verify", url).code == 0
    assert sorted(name for lanes in fast for name in lanes.encoded) == ["cat", "china", "cup", "flower"]
    assert build(pairs, tmp_path / "one", model).code == 0
    ours, one = (open_cache(place) for place in (url, tmp_path / "one"))
    assert [row.name for row in ours.rows()] == [row.name for row in one.rows()]
    assert ours.identity == one.identity


@pytest.mark.slow
def test_a_cut_that_moved_is_followed(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Two rows come in front, so that cat and china, slice 1, are now cup's and flower's neighbours in slice 2."""
    build_slices(pairs, tmp_path, model, 2)
    for name in ("aa", "ab"):
        shutil.copy(pairs / "control_images" / "cup.png", pairs / "control_images" / f"{name}.png")
        shutil.copy(pairs / "target_images" / "cup.png", pairs / "target_images" / f"{name}.png")
        (pairs / "target_images" / f"{name}.txt").write_text(name)
    assert [result.code for result in build_slices(pairs, tmp_path, model, 2)] == [0, 0]
    assert [sample.name for sample in open_cache(tmp_path / "1")] == ["aa", "ab", "cat", "china"]
    assert [sample.name for sample in open_cache(tmp_path / "2")] == ["china", "cup", "flower"]
    assert run("qwen-cache", "merge", tmp_path / "1", tmp_path / "2", "--out", tmp_path / "all").code == 0
    assert build(pairs, tmp_path / "one", model).code == 0
    assert open_cache(tmp_path / "all").identity == open_cache(tmp_path / "one").identity


def test_each_problem_belongs_to_one_slice(pairs: Path, tmp_path: Path, model: Path) -> None:
    """One that shows in the table, and one that shows when the image is read."""
    (pairs / "target_images" / "cat.txt").write_text("")
    (pairs / "target_images" / "flower.png").write_bytes(b"no image")
    plans = build_slices(pairs, tmp_path, model, 3, "--dry-run", "--json")
    found = [[problem["where"] for problem in json.loads(plan.stdout)["problems"]] for plan in plans]
    assert sorted(where for wheres in found for where in wheres) == [
        str(pairs / "target_images" / f"{name}.png") for name in ("cat", "flower")
    ]


def test_a_slice_without_rows_is_done(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Twelve of sixteen jobs for four rows have nothing to do, and do not fail."""
    result = build(pairs, tmp_path / "shards", model, "--slice", "1/16")
    assert result.code == 0
    assert "nothing to do: slice 1/16 of this source has no rows" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()
