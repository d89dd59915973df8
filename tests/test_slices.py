"""What `--slice` promises: independent machines make the cache that one would, and none drops another's samples."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_cache import open_cache
from qwen_cache.encode.slices import SourceSlice
from qwen_cache.errors import ConfigError

from .support.caches import build
from .support.commands import Result, run


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


def test_merged_slices_are_the_single_build(pairs: Path, tmp_path: Path, model: Path) -> None:
    """cat | china, cup, flower: with the real encoders."""
    assert [result.code for result in build_slices(pairs, tmp_path / "p", model, 3)] == [0, 0, 0]
    assert [len(open_cache(tmp_path / "p" / str(i))) for i in (1, 2, 3)] == [1, 1, 2]
    assert (
        run("qwen-cache", "merge", *(tmp_path / "p" / str(i) for i in (1, 2, 3)), "--out", tmp_path / "all").code == 0
    )
    assert build(pairs, tmp_path / "one", model).code == 0
    merged, single = open_cache(tmp_path / "all"), open_cache(tmp_path / "one")
    assert [(sample.key, sample.name) for sample in merged] == [(sample.key, sample.name) for sample in single]
    assert (merged.identity, merged.recipe) == (single.identity, single.recipe)
    hashes = [
        [{n: t.xxh3_128 for n, t in row.meta.tensors.items()} for row in cache.rows()] for cache in (merged, single)
    ]
    assert hashes[0] == hashes[1]
    checked = build(pairs, tmp_path / "all", model, "--dry-run", "--check")
    assert (checked.code, "4 samples, 4 cached, 0 to encode" in checked.stderr) == (0, True)


def test_a_slice_does_not_drop_the_others(pairs: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model).code == 0
    before = (out / "cache.json").read_bytes()
    for options in ([], ["--dry-run"]):
        result = build(pairs, out, model, "--slice", "2/4", *options)
        assert result.code == 2
        assert "this folder holds 3 samples of other slices, which a build of 2/4 would drop" in result.stderr
        assert "(found cat, cup, flower)" in result.stderr
        assert f"--out {out}-2, then run `qwen-cache merge`" in result.stderr
    assert (out / "cache.json").read_bytes() == before


def test_one_folder_for_all_slices_is_refused(pairs: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "shards"
    assert build(pairs, out, model, "--slice", "1/2").code == 0
    result = build(pairs, out, model, "--slice", "2/2")
    assert (result.code, "holds 2 samples of other slices" in result.stderr) == (2, True)
    assert build(pairs, out, model, "--slice", "1/2").code == 0, "the same slice again is accepted"


@pytest.mark.slow
def test_a_cut_that_moved_is_followed(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Two rows come in front, so that cat and china, slice 1, are now cup's and flower's neighbours in slice 2."""
    build_slices(pairs, tmp_path, model, 2)
    for name in ("aa", "ab"):
        shutil.copy(pairs / "control_images" / "cup.png", pairs / "control_images" / f"{name}.png")
        shutil.copy(pairs / "target_images" / "cup.png", pairs / "target_images" / f"{name}.png")
        (pairs / "target_images" / f"{name}.txt").write_text(name)
    assert [result.code for result in build_slices(pairs, tmp_path, model, 2)] == [0, 0]
    assert [sample.name for sample in open_cache(tmp_path / "1")] == ["aa", "ab", "cat"]
    assert [sample.name for sample in open_cache(tmp_path / "2")] == ["china", "cup", "flower"]


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
    """Of sixteen jobs for four rows, twelve have nothing to do, and do not fail."""
    result = build(pairs, tmp_path / "shards", model, "--slice", "1/16")
    assert result.code == 0
    assert "nothing to do: slice 1/16 of this source has no rows" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()
