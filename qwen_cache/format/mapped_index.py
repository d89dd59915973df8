"""The index of a cache as a table: a small one in memory, a large one mapped from a file.

That file, in the user's cache folder, has the rows in Arrow's own format, so a process maps it and reads what it uses:
ten million rows take hardly any memory of their own. Its name is the hash of index.parquet, so it is never stale; its
own hash is checked whenever it is opened, and a damaged one is made again. Where it cannot be written, the index is
read into memory. Files beyond `LIMIT` bytes in all are removed, the least recently used first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa
import xxhash

from qwen_cache.format import directory
from qwen_cache.format.identity import HASHED_BLOCK
from qwen_cache.format.index import INDEX_NAME, SEED, index_schema, read_batches, read_index
from qwen_cache.format.manifest import Manifest
from qwen_cache.storage.files import NotAFileError, cache_home, map_file, unless_in_use, whole_file
from qwen_cache.storage.remote import Url

IN_MEMORY = 1 << 16  # rows; they take 80 MB
LIMIT = 40_000_000_000  # bytes of all files: three indexes of ten million rows
ABANDONED = 24 * 3600  # seconds after which a temporary file is that of a killed process
CHECKSUM = 16  # bytes of xxh3-128, at the end of a file
SUFFIX = ".arrow"


def load_index(folder: Path | Url) -> tuple[Manifest, pa.Table]:
    """The manifest and the index that it names; FormatError if they are missing or invalid."""
    manifest, data = directory.load(folder)
    return manifest, index_table(manifest, data, str(folder / INDEX_NAME))


def index_table(manifest: Manifest, data: bytes | memoryview, where: str) -> pa.Table:
    """The table of the index `data`, which is the one that `manifest` names; FormatError F7 if it cannot be read."""
    version, samples = manifest.format_version, manifest.index.samples
    path = _path(manifest)
    if samples <= IN_MEMORY or path is None:
        return read_index(data, version, where, samples)
    table = _mapped(path, version)
    if table is None:
        schema, batches = read_batches(data, version, where, samples)
        try:
            _write(path, schema, batches)
            table = _mapped(path, version)
        except OSError:  # no space, or no right to write
            table = None
    return read_index(data, version, where, samples) if table is None else table


def _path(manifest: Manifest) -> Path | None:
    try:
        return cache_home() / "indexes" / f"{manifest.index.xxh3_128}-v{manifest.format_version}{SUFFIX}"
    except RuntimeError:  # a user without a home
        return None


def _mapped(path: Path, format_version: int) -> pa.Table | None:
    """The table in a file, mapped; None if there is none, or it is damaged."""
    try:
        data = map_file(path, follow_links=False)
    except (OSError, NotAFileError):
        return None
    end = data.nbytes - CHECKSUM
    if end <= 0 or _digest(data[:end]) != data[end:]:
        return None
    try:
        table = pa.ipc.open_file(pa.py_buffer(data[:end])).read_all()
    except pa.ArrowException:
        return None
    if table.schema != index_schema(format_version, seeds=SEED in table.column_names):  # of another program version
        return None
    with suppress(OSError):
        os.utime(path)
    return table


def _write(path: Path, schema: pa.Schema, batches: Iterator[pa.RecordBatch]) -> None:
    """Write the rows and their hash. It is not synced: after a crash, the hash tells whether it is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, shared=True) as temporary:
        with pa.OSFile(str(temporary), "wb") as file, pa.ipc.new_file(file, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)
        digest = _digest(map_file(temporary))
        with open(temporary, "ab") as end:
            end.write(digest)
    _remove_oldest(path)


def _digest(data: memoryview) -> bytes:
    state = xxhash.xxh3_128()
    for begin in range(0, data.nbytes, HASHED_BLOCK):
        state.update(data[begin : begin + HASHED_BLOCK])
    return state.digest()


def _remove_oldest(kept: Path) -> None:
    """Remove the least recently used files until all have at most `LIMIT` bytes, but not `kept`.

    Processes that have mapped a removed file are not disturbed.
    """
    found = []
    for path in kept.parent.iterdir():
        with suppress(FileNotFoundError):
            found.append((path.stat(), path))
    total = sum(status.st_size for status, _ in found)
    for status, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
        is_abandoned = path.suffix == ".tmp" and time.time() - status.st_mtime > ABANDONED
        if is_abandoned or (total > LIMIT and path != kept and path.suffix == SUFFIX):
            with unless_in_use(), suppress(FileNotFoundError):
                path.unlink()
                total -= status.st_size
