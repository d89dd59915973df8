"""Local copies of remote shards, bounded in size; the least recently used are removed first.

A local copy is a sparse file that fills sample by sample, as samples are requested. There is no bookkeeping to get
wrong: bytes are checked against the index before they are written and whenever they are read, so torn writes, killed
processes and two processes that fill one file are harmless. No process shrinks a copy that another one may have mapped:
the size that a manifest claims is part of the copy's name, so a false claim makes another file.
"""

from __future__ import annotations

import mmap
import os
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.errors import QwenCacheError
from qwen_cache.settings.cache import LOCAL_COPIES_SIZE, CacheConfig
from qwen_cache.storage.durable import LockHeldError, cache_home, locked, unless_in_use, write_at

OPEN_COPIES = 64  # each holds two file descriptors; the usual limit is 1024
TOUCH_AFTER = 60.0  # seconds: the precision of "least recently used"
SUFFIX = ".part"
LOCK = ".lock"


@dataclass(frozen=True)
class LocalCopies:
    """The folder for copies of remote shards, and the bytes of disk space that they may take."""

    folder: Path
    size: int

    @classmethod
    def of(cls, folder: str | Path | None = None, size: int = LOCAL_COPIES_SIZE) -> LocalCopies:
        """Copies in `folder`, by default in the user's cache folder."""
        return cls(Path(folder).expanduser() if folder else cache_home() / "shards", size)

    @classmethod
    def of_settings(cls, config: CacheConfig) -> LocalCopies:
        """Copies as `cache.local_copies` and `cache.local_copies_size` say."""
        return cls.of(config.local_copies, config.local_copies_size)

    def open(self, name: str, size: int) -> Copy:
        """The copy of the shard `name` of `size` bytes; an empty one if there is none yet."""
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return Copy(self.folder / f"{name}.{size}{SUFFIX}", size)

    def evict(self) -> None:
        """Remove the least recently used copies until they take 0.9 of the bound; one process at a time does this.

        Processes that read a removed copy are not disturbed; its disk space is freed when they close it. Windows keeps
        copies that a process has open, so there the copies may exceed the bound.
        """
        with suppress(LockHeldError), _explained(self.folder), locked(self.folder / LOCK):
            copies = [(path.stat(), path) for path in self.folder.glob(f"*{SUFFIX}")]
            total = sum(_disk_bytes(stat) for stat, _ in copies)
            for stat, path in sorted(copies, key=lambda each: each[0].st_mtime_ns):
                if total <= 0.9 * self.size:
                    break
                with unless_in_use():
                    path.unlink(missing_ok=True)
                    total -= _disk_bytes(stat)


class Copy:
    """A sparse file with the requested samples of a shard, and its mapping."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        weakref.finalize(self, os.close, self._file)
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self.data = memoryview(mmap.mmap(self._file, size, access=mmap.ACCESS_COPY))
        self._touched = 0.0

    def has(self, offset: int) -> bool:
        """Whether the first byte of the sample at `offset` has been written: cheap, and only a hint.

        A sample begins with a file name, so its first byte is not zero. Not read through the mapping where the system
        allows: in memory (tmpfs), that needs a page, and without space the process would end (SIGBUS).
        """
        first = os.pread(self._file, 1, offset) if hasattr(os, "pread") else self.data[offset : offset + 1]
        return any(first)

    def write(self, begin: int, data: memoryview) -> None:
        """Store a sample, its first byte last."""
        with _explained(self.path):
            write_at(self._file, begin + 1, data[1:])
            write_at(self._file, begin, data[:1])

    def is_removed(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def touch(self) -> None:
        """Mark the copy as used."""
        if time.monotonic() - self._touched > TOUCH_AFTER:
            with suppress(FileNotFoundError):  # another process has removed it
                os.utime(self.path)
            self._touched = time.monotonic()


def _disk_bytes(stat: os.stat_result) -> int:
    """The disk space of a file: on Windows its whole length."""
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn a disk error into one that names the settings to change."""
    try:
        yield
    except OSError as error:
        raise QwenCacheError(
            "the local copy of a shard cannot be stored",
            where=path,
            found=error.strerror,
            do="set cache.local_copies to a folder on a disk with space, or lower cache.local_copies_size",
        ) from error
