"""Digests of large files, remembered in the user's cache folder, so that an unchanged file is not read again.

A file counts as unchanged while its path, size, times of modification and change, inode and device are: an archive or a
copy can set the first time, but no program the second. A file that was modified in the last seconds before it was read
is not remembered: another change in the same tick of its clock would not show.
Where nothing can be remembered, digests are computed each time; a damaged entry is computed again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import xxhash

from qwen_cache.storage.durable import cache_home, sync, whole_file

SETTLED_NS = 2_000_000_000  # the coarsest clock of a common file system, FAT's, ticks every 2 seconds


def remembered(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The digest of these files' contents that `compute` returns; if none has changed, the one of last time.

    `kind` names the function of the contents. Any number of processes may ask at once. An empty digest is not
    remembered. Raises what `compute` raises, and OSError for a missing file.
    """
    states, now = [_state(path) for path in files], time.time_ns()
    name = xxhash.xxh3_128_hexdigest(json.dumps([kind, *(str(path.resolve()) for path in files)]).encode())
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        known = json.loads(_entry(name).read_text(encoding="utf-8"))
        if known["files"] == states:
            return str(known["digest"])
    digest = compute()
    settled = all(max(times) + SETTLED_NS < now for _, *times, _, _ in states)
    if digest and settled and states == [_state(path) for path in files]:
        _remember(name, {"files": states, "digest": digest})
    return digest


def _state(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev]


def _entry(name: str) -> Path:
    """RuntimeError for a user without a home."""
    return cache_home() / "digests" / f"{name}.json"


def _remember(name: str, value: dict[str, object]) -> None:
    """Write the entry atomically; a folder that cannot be written to, or a missing one, costs time alone."""
    with suppress(OSError, RuntimeError):
        entry = _entry(name)
        entry.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(entry, shared=True) as temporary, open(temporary, "wb") as file:
            file.write(json.dumps(value).encode())
            file.flush()
            sync(file)
