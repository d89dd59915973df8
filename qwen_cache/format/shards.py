"""The bytes of shards: mapped from a local folder, from local copies of a remote cache, or read by ranges."""

from __future__ import annotations

import errno
import os
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Protocol

from qwen_cache.errors import DisagreementError, QwenCacheError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.shard import check_tensors
from qwen_cache.storage.remote import FETCHERS, OPEN_COPIES, Copy, LocalCopies, Url

OPEN_SHARDS = 64  # kept mapped for the next sample; mapping one again takes about 10 µs


class SampleBytes(Protocol):
    """The source of a sample's bytes."""

    @property
    def folder(self) -> Path | Url: ...

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview: ...

    def renew(self, row: IndexRow) -> bool: ...


class LocalShards:
    """The shards of a local folder, mapped."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._listed = {shard.name for shard in manifest.shards}
        self._open: OrderedDict[str, memoryview] = OrderedDict()

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The mapped shard of a sample."""
        return self.map(row.shard)

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample; fewer if it ends before."""
        return self.map(row.shard)[begin:end]

    def map(self, name: str) -> memoryview:
        """A mapped shard; ShardError if it is missing or not in the manifest."""
        data = self._open.pop(name, None)
        if data is None:
            directory.shard_paths(self.folder, name)  # refuses names that lead out of the folder
            if name not in self._listed:
                raise ShardError("the index names a shard that is not in the manifest", where=self.folder / name)
            data = self._map(name)
        self._open[name] = data
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)  # tensors that still use it keep the mapping alive
        return data

    def _map(self, name: str) -> memoryview:
        try:
            return directory.map_shard(self.folder, name)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        self._open.clear()
        try:
            return directory.map_shard(self.folder, name)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise QwenCacheError(
                "the system maps no more shards: tensors that are views of them keep too many mapped",
                where=self.folder / name,
                found=error.strerror,
                do="keep copies of tensors (`tensor.clone()`), or raise vm.max_map_count or `ulimit -v`",
            ) from None

    def renew(self, row: IndexRow) -> bool:
        """False: there is no other copy of a sample."""
        return False

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Does nothing: local files need no fetching."""

    def stop_prefetch(self) -> None:
        """Does nothing."""


class RemoteShards:
    """The shards of a remote cache. Safe to use from many threads; after a fork, the child starts with a new state."""

    def __init__(self, folder: Url, manifest: Manifest, copies: LocalCopies) -> None:
        self.folder, self.copies = folder, copies
        self._sizes = {shard.name: shard.bytes for shard in manifest.shards}
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, "fetch")
        self._open: OrderedDict[str, Copy] = OrderedDict()
        self._fetching: dict[tuple[Copy, int], Future[None]] = {}
        self._written = self.copies.size  # bytes since the copies were last counted; so the first fetch counts them
        self._has_ranges = False

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The mapped copy of a sample's shard, once the sample has been fetched."""
        copy = self._copy(row)
        if not copy.has(row.entry.offset):
            self._request(row, copy).result()
        return copy.data

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample, which is fetched."""
        return self.bytes_of(row)[begin:end]

    def renew(self, row: IndexRow) -> bool:
        """Fetch a sample again whose bytes do not match the index; ChecksumError if they still do not."""
        self._fetch(row, self._copy(row))
        return True

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Start to fetch the samples that have no copy yet; a failure is raised when the sample is read."""
        for row in rows:
            copy = self._copy(row)
            if not copy.has(row.entry.offset):
                self._request(row, copy)

    def stop_prefetch(self) -> None:
        """Cancel requested fetches that have not started."""
        for future in list(self._fetching.values()):
            future.cancel()

    def _request(self, row: IndexRow, copy: Copy) -> Future[None]:
        sample = copy, row.entry.offset
        with self._lock:
            future = self._fetching.get(sample)
            if future is None:
                future = self._fetching[sample] = self._pool.submit(self._fetch, row, copy)
        future.add_done_callback(lambda _: self._fetching.pop(sample, None))
        return future

    def _fetch(self, row: IndexRow, copy: Copy) -> None:
        if not self._has_ranges:
            manifest = self.folder / MANIFEST_NAME  # a small file: without ranges, the server would send whole shards
            manifest.require_ranges()
            self._has_ranges = True
        entry, where = row.entry, self.folder / row.shard
        data = memoryview(self._read(row.shard, entry.offset, entry.offset + entry.length))
        check_tensors(entry.moved(0), data, str(where), row.label)
        copy.write(entry.offset, data)
        with self._lock:
            self._written += data.nbytes
            crowded = self._written > self.copies.size / 50  # so five processes cannot exceed the bound by much
            self._written = 0 if crowded else self._written
        if crowded:
            self.copies.evict()
            self._drop_removed()

    def _read(self, name: str, begin: int, end: int) -> bytes:
        data = directory.find_shard(self.folder, name, lambda url: url.read_range(begin, end))
        if data is None:
            raise directory.missing_shard(self.folder, name)
        return data

    def _copy(self, row: IndexRow) -> Copy:
        if self._process != os.getpid():
            self._begin()
        directory.shard_paths(self.folder, row.shard)  # refuses names that lead out of a folder
        size = self._sizes.get(row.shard, 0)
        if row.entry.offset < 0 or row.entry.offset + row.entry.length > size:
            what = f"sample {row.label} reaches beyond its shard"
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
        """Close removed copies, so that their disk space is freed."""
        with self._lock:
            for name in [name for name, copy in self._open.items() if copy.is_removed()]:
                del self._open[name]


class RangedShards:
    """The shards of a remote cache, for a few tensors of a sample: their ranges are read, and not kept."""

    def __init__(self, folder: Url, manifest: Manifest) -> None:
        self.folder = folder
        self._listed = {shard.name for shard in manifest.shards}
        self._has_ranges = False

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample; ShardError if it is missing or not in the manifest."""
        directory.shard_paths(self.folder, row.shard)  # refuses names that lead out of the folder
        if row.shard not in self._listed:
            raise ShardError("the index names a shard that is not in the manifest", where=self.folder / row.shard)
        if not self._has_ranges:
            (self.folder / MANIFEST_NAME).require_ranges()  # a small file: otherwise, whole shards would be sent
            self._has_ranges = True
        data = directory.find_shard(self.folder, row.shard, lambda url: url.read_range(begin, end))
        if data is None:
            raise directory.missing_shard(self.folder, row.shard)
        return memoryview(bytearray(data))  # torch warns of bytes, which cannot be written

    def renew(self, row: IndexRow) -> bool:
        """False: nothing is kept that could be damaged."""
        return False
