"""Promises of `cache.commit_every`: a cache that can be read while it is built, and that only grows until the end.

The judge is the build that commits once.
"""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from qwen_cache import open_cache
from qwen_cache.encode import write
from qwen_cache.format import directory, update
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest

from .support.caches import build
from .support.commands import refused, run
from .support.crash import Crash, crash_after
from .support.fake_lanes import FakeLanes

NAMES = ("cat", "china", "cup", "flower")
EVERY = ("--set", "cache.commit_every=3")
Row = tuple[str, str, int]


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def write_table(pairs: Path, prompts: int, skip: str = "") -> Path:
    """Each pair under this many prompts, in the order of the prompts."""
    path = pairs / "table.jsonl"
    rows = [
        {"target": f"target_images/{name}.png", "control": f"control_images/{name}.png", "prompt": f"{name}, {i}"}
        for i in range(prompts)
        for name in NAMES
        if f"{name}, {i}" != skip
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def rows_of(folder: Path) -> list[Row]:
    return [(row.name, row.meta.key, row.source_rows) for row in open_cache(folder).rows()]


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> list[list[Row]]:
    """The rows of the cache after each commit; `verify` accepts each."""
    made: list[list[Row]] = []
    commit = directory.commit

    def recording(folder: Path, *arguments: Any) -> None:
        commit(folder, *arguments)
        checked = run("qwen-cache", "verify", folder)
        assert checked.code == 0, checked.stdout + checked.stderr
        made.append(rows_of(folder))

    monkeypatch.setattr(update.directory, "commit", recording)
    return made


def test_each_commit_adds_samples_and_the_last_gives_the_dataset(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], commits: list[list[Row]]
) -> None:
    table = write_table(pairs, 2)
    assert build(table, tmp_path / "many", model, *EVERY).code == 0
    assert [len(rows) for rows in commits] == [3, 6, 8]
    assert all(set(earlier) <= set(later) for earlier, later in itertools.pairwise(commits))
    assert build(table, tmp_path / "one", model).code == 0
    assert commits[-2] == commits[-1]
    assert open_cache(tmp_path / "many").identity == open_cache(tmp_path / "one").identity
    assert len(fast) == 2
    assert not list((tmp_path / "many" / ".staging").iterdir())


def test_a_build_that_dies_after_a_commit_leaves_it_and_continues(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    table, out, commit = write_table(pairs, 2), tmp_path / "shards", write.commit_early

    def dying(*arguments: Any) -> None:
        commit(*arguments)
        raise Crash

    with monkeypatch.context() as patch:
        patch.setattr(write, "commit_early", dying)
        with pytest.raises(Crash):
            build(table, out, model, *EVERY)
    cache = open_cache(out)
    assert len(cache) == 3
    for sample in cache:
        sample.tensors()
    assert run("qwen-cache", "verify", out).code == 0
    encoded = set(fast[0].encoded)
    assert build(table, out, model, *EVERY).code == 0
    assert len(fast[1].encoded) == 5
    assert encoded & set(fast[1].encoded) == set()
    assert build(table, tmp_path / "one", model).code == 0
    assert rows_of(out) == rows_of(tmp_path / "one")


def test_a_commit_of_another_build_in_between_is_noticed(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = directory.commit

    def overtaken(folder: Path, manifest: Manifest, *rest: Any) -> None:
        commit(folder, manifest, *rest)
        (folder / MANIFEST_NAME).write_bytes(replace(manifest, written_by={"qwen-cache": "another"}).to_bytes())

    monkeypatch.setattr(update.directory, "commit", overtaken)
    result = build(write_table(pairs, 2), tmp_path / "shards", model, *EVERY)
    refused(result, "another build has committed to this cache since this one read it")
    assert len(open_cache(tmp_path / "shards")) == 3


def test_samples_that_are_replaced_stay_until_the_last_commit(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], commits: list[list[Row]]
) -> None:
    """One sample is removed, so its neighbours move; the images of others have changed; and there are new ones."""
    out = tmp_path / "shards"
    assert build(write_table(pairs, 2), out, model).code == 0
    before = rows_of(out)
    shutil.copy(pairs / "target_images" / "cat.png", pairs / "target_images" / "cup.png")
    table = write_table(pairs, 4, skip="flower, 0")
    commits.clear()
    assert build(table, out, model, *EVERY).code == 0
    assert build(table, tmp_path / "one", model).code == 0
    *early, last, one = commits
    assert [len(rows) for rows in early] == [11, 14]
    for rows in early:
        assert rows[: len(before)] == before
    names = {name for name, _, _ in before}
    assert not names & {name for name, _, _ in early[-1][len(before) :]}
    assert last == one == rows_of(out)


def test_what_cannot_only_add_is_committed_once(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes], commits: list[list[Row]]
) -> None:
    """Another recipe of the same name, a repair, and a cache that has lost a shard."""
    table, out = write_table(pairs, 2), tmp_path / "shards"
    small = ("--set", "cache.shard_size=1")
    assert build(table, out, model, *small).code == 0
    other = ("--set", "data.vae_image_size=9216", "--replace")
    assert build(table, out, model, *small, *other, *EVERY).code == 0
    assert len(commits) == 2
    shard = next(out.glob("*.tar"))
    data = bytearray(shard.read_bytes())
    data[-2000] ^= 1
    shard.write_bytes(data)
    assert build(table, out, model, *small, *other[:2], "--repair", "--set", "cache.commit_every=1").code == 0
    assert len(commits) == 3
    for shard in list(out.glob("*.tar"))[:4]:
        shard.unlink()
    assert build(table, out, model, *small, *other[:2], *EVERY).code == 0
    assert [len(rows) for rows in commits] == [8, 8, 8, 8]


@pytest.mark.slow
def test_a_build_that_dies_anywhere_leaves_a_cache_that_only_grew(
    pairs: Path, tmp_path: Path, model: Path, fast: list[FakeLanes]
) -> None:
    """The first build, and one that adds, replaces and drops."""
    assert build(write_table(pairs, 1), tmp_path / "base", model).code == 0
    base = set(rows_of(tmp_path / "base"))
    shutil.copy(pairs / "target_images" / "cat.png", pairs / "target_images" / "cup.png")
    table = write_table(pairs, 2, skip="flower, 0")
    options = ("--set", "cache.commit_every=2")
    assert build(table, tmp_path / "one", model).code == 0
    final = rows_of(tmp_path / "one")
    for first in (True, False):
        count, died = 0, True
        while died:
            out = tmp_path / "out"
            if not first:
                shutil.copytree(tmp_path / "base", out)
            with pytest.MonkeyPatch.context() as patch:
                crash_after(count, patch)
                try:
                    died = build(table, out, model, *options).code != 0
                except Crash:
                    died = True
            if (out / "cache.json").exists():
                found = set(rows_of(out))
                assert found == set(final) or (set() if first else base) <= found <= base | set(final)
                for sample in open_cache(out):
                    sample.tensors()
            assert build(table, out, model, *options).code == 0
            assert run("qwen-cache", "verify", out).code == 0
            assert rows_of(out) == final, f"died at operation {count}"
            shutil.rmtree(out)
            count += 1
        assert count > 20
