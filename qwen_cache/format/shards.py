"""Where a cache reads its bytes: shards of a folder, mapped, or of a URL, through local copies."""

from __future__ import annotations

import mmap
import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Protocol

from qwen_cache.errors import DisagreementError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.shard import check_tensors
from qwen_cache.storage.local_copies import OPEN_COPIES, Copy, LocalCopies
from qwen_cache.storage.url import FETCHERS, Url

OPEN_SHARDS = 64  # each mapping holds a file descriptor; the usual limit is 1024


class SampleBytes(Protocol):
    """Where a sample reads its bytes."""

    @property
    def folder(self) -> Path | Url: ...

    def bytes_of(self, row: IndexRow) -> memoryview: ...

    def renew(self, row: IndexRow) -> bool: ...


class LocalShards:
    """The shards of a folder, mapped."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: OrderedDict[str, memoryview] = OrderedDict()

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The shard of a sample."""
        return self.map(row.shard)

    def map(self, name: str) -> memoryview:
        data = self._open.pop(name, None)
        if data is None:
            data = map_file(directory.shard_path(self.folder, name))
        self._open[name] = data
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)  # tensors that still use it keep the mapping alive
        return data

    def renew(self, row: IndexRow) -> bool:
        """False: there is no other place to read a sample from."""
        return False

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Nothing: what the disk has is here."""

    def stop_prefetch(self) -> None:
        """Nothing."""


class RemoteShards:
    """The shards of a cache behind a URL. Usable from many threads; after a fork, the child begins anew."""

    def __init__(self, folder: Url, manifest: Manifest, copies: LocalCopies) -> None:
        self.folder, self.copies = folder, copies
        self._sizes = {shard.name: shard.bytes for shard in manifest.shards}
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, "fetch")
        self._open: OrderedDict[str, Copy] = OrderedDict()
        self._coming: dict[tuple[Copy, int], Future[None]] = {}
        self._written = self.copies.size  # since the copies were last counted: count them at the first fetch
        self._has_ranges = False

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The copy of a sample's shard, mapped, after the sample has come."""
        copy = self._copy(row)
        if not copy.has(row.entry.offset):
            self._request(row, copy).result()
        return copy.data

    def renew(self, row: IndexRow) -> bool:
        """Fetch a sample once more, whose bytes are not those of the index; ChecksumError when they still are not."""
        self._fetch(row, self._copy(row))
        return True

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Begin to fetch the samples that are not here; a failure shows when the sample is read."""
        for row in rows:
            copy = self._copy(row)
            if not copy.has(row.entry.offset):
                self._request(row, copy)

    def stop_prefetch(self) -> None:
        """Give up what has been asked for and has not begun."""
        for future in list(self._coming.values()):
            future.cancel()

    def _request(self, row: IndexRow, copy: Copy) -> Future[None]:
        place = copy, row.entry.offset
        with self._lock:
            future = self._coming.get(place)
            if future is None:
                future = self._coming[place] = self._pool.submit(self._fetch, row, copy)
        future.add_done_callback(lambda _: self._coming.pop(place, None))
        return future

    def _fetch(self, row: IndexRow, copy: Copy) -> None:
        if not self._has_ranges:
            (self.folder / MANIFEST_NAME).require_ranges()  # of a small file: without ranges, a whole shard would come
            self._has_ranges = True
        entry, where = row.entry, self.folder / row.shard
        data = memoryview(self._read(row.shard, entry.offset, entry.offset + entry.length))
        check_tensors(entry.moved(0), data, str(where))
        copy.write(entry.offset, data)
        with self._lock:
            self._written += data.nbytes
            crowded = self._written > self.copies.size / 50  # so that five processes cannot pass the bound by much
            self._written = 0 if crowded else self._written
        if crowded:
            self.copies.evict()
            self._drop_removed()

    def _read(self, name: str, begin: int, end: int) -> bytes:
        for url in directory.shard_places(self.folder, name):
            with suppress(FileNotFoundError):
                return url.read_range(begin, end)
        raise ShardError("a shard that the manifest names is missing", where=self.folder / name)

    def _copy(self, row: IndexRow) -> Copy:
        if self._process != os.getpid():
            self._begin()
        directory.shard_places(self.folder, row.shard)  # refuses names that lead out of a folder
        size = self._sizes.get(row.shard, 0)
        if row.entry.offset < 0 or row.entry.offset + row.entry.length > size:
            what = f"sample {row.meta.key} reaches beyond its shard"
            raise DisagreementError(what, where=self.folder / row.shard, expected=f"at most {size} bytes")
        with self._lock:
            copy = self._open.pop(row.shard, None)
            if copy is None or copy.is_removed():
                copy = self.copies.open(row.shard, size)
            self._open[row.shard] = copy
            while len(self._open) > OPEN_COPIES:
                self._open.popitem(last=False)  # tensors that still use it keep the mapping alive
        copy.touch()
        return copy

    def _drop_removed(self) -> None:
        """Let go of removed copies, so that the disk gets their bytes back."""
        with self._lock:
            for name in [name for name, copy in self._open.items() if copy.is_removed()]:
                del self._open[name]


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped privately; torch warns of tensors over read-only memory, so it is copy-on-write."""
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:  # which the system refuses to map
            return memoryview(b"")
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
