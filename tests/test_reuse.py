"""`cache.reuse`: a sample that another cache has is copied, checked, and not encoded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_cache import open_cache

from .support.caches import build, contents, plan
from .support.commands import refused, run
from .support.fake_lanes import FakeLanes
from .support.server import BUCKET
from .support.sources import change_prompt


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def test_what_another_cache_has_is_copied(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    assert build(pairs, tmp_path / "theirs", model).code == 0
    count = len(fast[0].encoded)
    for path in pairs.rglob("*.*"):
        path.rename(path.with_name(f"renamed-{path.name}"))  # a key does not cover names
    change_prompt_of_one(pairs)
    found = plan(pairs, tmp_path / "mine", model, "--reuse", str(tmp_path / "theirs"))
    assert (found["to_encode"], found["to_copy"], found["reused"]) == (
        1,
        count - 1,
        {str(tmp_path / "theirs"): count - 1},
    )
    assert found["bytes_to_write"] > found["bytes"]  # which is of what is encoded
    result = build(pairs, tmp_path / "mine", model, "--reuse", str(tmp_path / "theirs"))
    assert result.code == 0, result.stderr
    assert f"{count - 1} samples copied from" in result.stderr
    assert f"1 encoded, {count - 1} copied" in result.stderr
    assert [len(lanes.encoded) for lanes in fast] == [count, 1]
    assert build(pairs, tmp_path / "alone", model).code == 0
    assert contents(tmp_path / "mine") == contents(tmp_path / "alone")
    assert run("qwen-cache", "verify", tmp_path / "mine").code == 0


def change_prompt_of_one(pairs: Path) -> None:
    caption = next(iter(sorted(pairs.rglob("*.txt"))))
    caption.write_text("another prompt", encoding="utf-8")


def test_nothing_is_encoded_if_everything_is_there(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    assert build(pairs, tmp_path / "theirs", model).code == 0
    change_prompt(pairs)
    assert build(pairs, tmp_path / "others", model).code == 0
    both = ("--reuse", str(tmp_path / "others"), "--reuse", str(tmp_path / "theirs"))
    assert build(pairs, tmp_path / "mine", model, *both).code == 0
    assert len(fast) == 2  # no encoders were loaded for the last one
    assert contents(tmp_path / "mine") == contents(tmp_path / "others")
    other_recipe = plan(pairs, tmp_path / "new", model, *both, "--set", "data.upscale=false")
    assert other_recipe["to_copy"] == 0


def test_a_damaged_copy_is_refused_and_named(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    theirs = tmp_path / "theirs"
    assert build(pairs, theirs, model).code == 0
    (shard,) = theirs.glob("*.tar")
    entry = open_cache(theirs)[0].row.entry
    data = bytearray(shard.read_bytes())
    data[entry.data] ^= 1
    shard.write_bytes(data)
    reuse = ("--reuse", str(theirs))
    refused(build(pairs, tmp_path / "mine", model, *reuse), "a sample to copy is damaged", shard.name, "cache.reuse")
    assert not (tmp_path / "mine" / "cache.json").exists()
    assert build(pairs, tmp_path / "mine", model).code == 0


def test_caches_that_cannot_be_reused(pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]) -> None:
    mine = tmp_path / "mine"
    assert build(pairs, mine, model).code == 0
    (tmp_path / "link").symlink_to(mine)
    change_prompt(pairs)
    refused(build(pairs, mine, model, "--reuse", str(tmp_path / "link")), "cannot reuse itself")
    refused(build(pairs, mine, model, "--reuse", str(tmp_path / "nowhere")), "there is no cache to reuse", "nowhere")
    assert build(pairs, tmp_path / "v1", model, "--format", "v1").code == 0
    refused(build(pairs, mine, model, "--reuse", str(tmp_path / "v1")), "another format version", "migrate")
    shutil.rmtree(tmp_path / "v1")


@pytest.mark.slow
def test_a_bucket_is_reused(
    s3: tuple[str, int], pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    url = f"s3://{BUCKET}/reused"
    assert build(pairs, tmp_path / "alone", model).code == 0
    assert run("qwen-cache", "merge", tmp_path / "alone", "--out", url).code == 0
    assert build(pairs, tmp_path / "mine", model, "--reuse", url).code == 0
    assert contents(tmp_path / "mine") == contents(tmp_path / "alone")
    assert build(pairs, f"s3://{BUCKET}/mine", model, "--reuse", url).code == 0  # type: ignore[arg-type]
    assert len(fast) == 1
