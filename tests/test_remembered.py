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
from .support.waiting import wait_until

LONG_AGO = time.time_ns() - 3600 * 10**9


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files count as settled at once; the times of a new file are those of its test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(module, "SETTLED_NS", -(10**13))
    return tmp_path / "home" / "qwen-cache" / "digests"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "weights"
    path.write_bytes(b"first")
    os.utime(path, ns=(LONG_AGO, LONG_AGO))
    return path


def tick(file: Path) -> None:
    """Wait until the clock of the file system, which may be coarse, has moved on."""
    before, probe = file.stat().st_ctime_ns, file.with_name("probe")

    def later() -> bool:
        probe.write_bytes(b"")
        return probe.stat().st_ctime_ns > before

    wait_until(later)


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


def keep_size_inode_and_time(file: Path) -> None:
    """An archive that is unpacked over the file does the same."""
    file.write_bytes(b"other")
    os.utime(file, ns=(LONG_AGO, LONG_AGO))


@pytest.mark.parametrize("change", [rewrite, replace_keeping_size_and_time, keep_size_inode_and_time])
def test_a_changed_file_is_read_again(file: Path, change: Callable[[Path], None]) -> None:
    digest(file)
    tick(file)
    change(file)
    assert digest(file) == (file.read_text(), 1)


def test_a_file_that_was_just_written_is_not_remembered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second change in the same tick of the file system's clock would not show, whatever time the file names."""
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(file.with_name("home")))
    file.write_bytes(b"newer")
    os.utime(file, ns=(LONG_AGO, LONG_AGO))
    assert [digest(file) for _ in range(2)] == [("newer", 1)] * 2


def test_a_file_that_changes_while_it_is_read_is_not_remembered(file: Path) -> None:
    tick(file)
    remembered("text", [file], lambda: rewrite(file) or "of half of each")  # type: ignore[func-returns-value]
    assert digest(file) == ("other", 1)


@pytest.mark.parametrize("damage", [b"", b"[]", b'{"digest": "x"}', b"\xff", b"another digest"])
def test_a_damaged_entry_is_computed_again(file: Path, home: Path, damage: bytes) -> None:
    digest(file)
    (entry,) = home.iterdir()
    entry.write_bytes(entry.read_bytes().replace(b"first", b"firrt") if damage == b"another digest" else damage)
    assert [digest(file) for _ in range(2)] == [("first", 1), ("first", 0)]


def test_without_a_folder_to_write_to_it_is_computed_each_time(file: Path, home: Path) -> None:
    home.parent.parent.mkdir()
    home.parent.write_text("not a folder")
    assert [digest(file) for _ in range(2)] == [("first", 1)] * 2


def test_a_user_without_a_home_has_digests_too(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def homeless() -> Path:
        raise RuntimeError("could not determine the home directory")

    monkeypatch.setattr(module, "cache_home", homeless)
    assert [digest(file) for _ in range(2)] == [("first", 1)] * 2


def test_a_second_build_reads_no_weights(
    tmp_path: Path, pairs: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[Path] = []
    read = module.file_digest
    monkeypatch.setattr(module, "file_digest", lambda path, on_bytes: reads.append(path) or read(path, on_bytes))
    counts = []
    for _ in range(2):
        assert build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--dry-run").code == 0
        counts.append(len(reads))
    assert counts[0] > 0
    assert counts[1] == counts[0]
