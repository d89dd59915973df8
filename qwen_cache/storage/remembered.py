"""Digests of large files, remembered in the user's cache folder, so that an unchanged file is not read again.

A file counts as unchanged while its path, size, times of modification and change, and inode are: an archive or a copy
can set the first time, but no program the second (it takes setting the clock, or writing to the disk itself). A file
that was modified in the last seconds before it was read is not remembered: another change in the same tick of its clock
would not show. The device number is left out: it differs between machines that share a network disk.
Where nothing can be remembered, digests are computed each time; a damaged entry is computed again. A bit that flips on
the disk changes none of a file's times, so it shows only when the file is read again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import IO

import xxhash

from qwen_cache.storage.durable import cache_home, sync, whole_file
from qwen_cache.storage.mapped import open_file
from qwen_cache.system_errors import naming

BLOCK = 1 << 20  # bytes; larger blocks are not hashed faster
SETTLED_NS = 2_000_000_000  # the coarsest clock of a common file system, FAT's, ticks every 2 seconds

_distrusted = ContextVar("_distrusted", default=False)


@contextmanager
def rehashing(on: bool = True) -> Iterator[None]:
    """If `on`, ignore what was remembered inside the block, and remember what is computed instead."""
    token = _distrusted.set(on)
    try:
        yield
    finally:
        _distrusted.reset(token)


def is_trusted() -> bool:
    """Whether this is outside of `rehashing`."""
    return not _distrusted.get()


def remembered_digest(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """`file_digest`, remembered; `on_bytes` is called only if the file is read."""
    return remembered("xxh3-128", [path], lambda: file_digest(path, on_bytes))


def file_digest(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The xxh3-128 of a regular file, as 32 hexadecimal digits; `on_bytes` gets the number of bytes just read."""
    digest = xxhash.xxh3_128()
    with naming(path), open(open_file(path), "rb", buffering=0) as file:
        update_from(file, digest, on_bytes)
    return digest.hexdigest()


def update_from(file: IO[bytes], digest: xxhash.xxh3_128, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Add the rest of an open file to `digest`."""
    block = memoryview(bytearray(BLOCK))
    while count := file.readinto(block):  # type: ignore[attr-defined]  # files in binary mode have it
        digest.update(block[:count])
        on_bytes(count)


def remembered(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The digest of these files' contents that `compute` returns; if none has changed, the one of last time.

    `kind` names the function of the contents. Any number of processes may ask at once. An empty digest is not
    remembered. Raises what `compute` raises, and OSError for a missing file.
    """
    states, now = [file_state(path) for path in files], time.time_ns()
    name = xxhash.xxh3_128_hexdigest(json.dumps([kind, *(str(path.resolve()) for path in files)]).encode())
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        known = json.loads(_entry(name).read_text(encoding="utf-8"))
        if is_trusted() and known == _checked(states, known["digest"]):
            return str(known["digest"])
    digest = compute()
    settled = all(is_settled(state, now) for state in states)
    if digest and settled and states == [file_state(path) for path in files]:
        _remember(name, _checked(states, digest))
    return digest


def _checked(states: list[list[int]], digest: str) -> dict[str, object]:
    """An entry, with a checksum of itself."""
    entry: dict[str, object] = {"files": states, "digest": digest}
    return entry | {"xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(entry).encode())}


def file_state(path: Path) -> list[int]:
    """What every change of a file changes: its size, times of modification and change in ns, and inode."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def is_settled(state: list[int], now: int) -> bool:
    """Whether a file of this state was last changed long enough before `now` (ns) that another change would show."""
    return max(state[1:3]) + SETTLED_NS < now


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
