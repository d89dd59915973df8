"""Digests that are remembered: an unchanged file is not read again, and a changed one always is."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_cache.storage import remembered as module
from qwen_cache.storage.remembered import remembered

from .support.caches import build

LONG_AGO = time.time_ns() - 3600 * 10**9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "qwen-cache" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


def digest(path: Path, kind: str = "text") -> tuple[str, int]:
    """The digest, here the content itself, and how often the file was read for it."""
    reads = []
    text = remembered(kind, [path], lambda: reads.append(path) or path.read_text())  # type: ignore[func-returns-value]
    return text, len(reads)


def test_an_unchanged_file_is_read_once(file: Path) -> None:
    assert [digest(file) for _ in range(3)] == [("first", 1), ("first", 0), ("first", 0)]
    assert digest(file, "another kind") == ("first", 1)
    assert digest(file.rename(file.with_name("moved"))) == ("first", 1)


def rewrite(file: Path) -> None:
    file.write_bytes(b"other")


def replace_keeping_size_and_time(file: Path) -> None:
    file.with_name("new").write_bytes(b"other")
    os.utime(file.with_name("new"), ns=(LONG_AGO, LONG_AGO))
    os.replace(file.with_name("new"), file)


def keep_time_but_grow(file: Path) -> None:
    file.write_bytes(b"others")
    os.utime(file, ns=(LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("change", [rewrite, replace_keeping_size_and_time, keep_time_but_grow])
def test_a_changed_file_is_read_again(file: Path, change: Callable[[Path], None]) -> None:
    digest(file)
    change(file)
    assert digest(file) == (file.read_text(), 1)


def test_a_file_that_was_just_written_is_not_remembered(file: Path) -> None:
    """A second change in the same tick of the file system's clock would not show."""
    file.write_bytes(b"newer")
    assert [digest(file) for _ in range(2)] == [("newer", 1)] * 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file: Path) -> None:
    remembered("text", [file], lambda: rewrite(file) or "of half of each")  # type: ignore[func-returns-value]
    os.utime(file, ns=(LONG_AGO + 10**9, LONG_AGO + 10**9))
    assert digest(file) == ("other", 1)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"digest": "x"}', b"\xff"])
def test_a_damaged_entry_is_computed_again(file: Path, home: Path, damage: bytes) -> None:
    digest(file)
    (entry,) = home.iterdir()
    entry.write_bytes(damage)
    assert [digest(file) for _ in range(2)] == [("first", 1), ("first", 0)]


def test_without_a_folder_to_write_to_it_is_computed_each_time(file: Path, home: Path) -> None:
    home.parent.parent.mkdir()
    home.parent.write_text("not a folder")
    assert [digest(file) for _ in range(2)] == [("first", 1)] * 2


def test_a_second_build_reads_no_weights(
    tmp_path: Path, pairs: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SETTLED_NS", -(10**12))  # as if the model had been there for a while
    reads: list[Path] = []
    from qwen_cache.encode import recipe

    read = recipe._hash_file
    monkeypatch.setattr(recipe, "_hash_file", lambda path, on_bytes: reads.append(path) or read(path, on_bytes))
    counts = []
    for _ in range(2):
        assert build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--dry-run").code == 0
        counts.append(len(reads))
    assert counts[0] > 0
    assert counts[1] == counts[0]
