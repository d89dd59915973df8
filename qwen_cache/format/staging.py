"""The shards of a build that is not committed yet, in a folder that a kill leaves behind and the next build goes on
with.

Samples are written in one order, fixed by the plan. What an earlier run left is adopted as it stands while it is the
beginning of that order, so that an interrupted build gives the same bytes as an uninterrupted one; any other whole
sample in it is copied when its turn comes.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from qwen_cache.errors import FormatError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.manifest import SHARD_PATTERN, Shard
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import Entry, ShardWriter, check_tensors, recover, scan_shard
from qwen_cache.format.shards import map_file
from qwen_cache.storage.durable import replace

OPEN = "open.tar"


class Staging:
    """Writes the samples `order` (their keys), of which the first `position` are already there."""

    def __init__(self, folder: Path, order: Sequence[str], format_version: int, shard_size: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.order, self.format_version, self.shard_size = folder, order, format_version, shard_size
        self.position = 0
        self.sealed: list[tuple[Shard, list[Entry]]] = []
        self.writer: ShardWriter | None = None
        self._left: dict[str, tuple[Path, Entry]] = {}
        self._adopt()

    def left_over(self, key: str) -> tuple[Entry, memoryview] | None:
        """A whole sample that an earlier run left, and the bytes of its shard."""
        path, entry = self._left.get(key, (None, None))
        return (entry, map_file(path)) if path and entry else None

    def add(self, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> None:
        self._next(meta.key).add(meta, tensors)
        self._seal_if_full()

    def add_copy(self, entry: Entry, shard: memoryview, where: object = "what an earlier run left") -> None:
        """Append a sample as it lies in the shard `where`, once every tensor in it is what was written."""
        check_tensors(entry, shard, str(where))
        self._next(entry.meta.key).add_copy(entry, shard[entry.offset : entry.offset + entry.length])
        self._seal_if_full()

    def finish(self) -> list[tuple[Shard, list[Entry]]]:
        """Seal what is open; every shard of `order`, in this folder under its name."""
        assert self.position == len(self.order)
        if self.writer:
            self._seal(self.writer)
        return self.sealed

    def close(self) -> None:
        """Leave everything for a later run."""
        if self.writer:
            self.writer.close()

    def _next(self, key: str) -> ShardWriter:
        assert key == self.order[self.position]
        self.position += 1
        self.writer = self.writer or ShardWriter(self.folder / OPEN, self.format_version)
        return self.writer

    def _seal_if_full(self) -> None:
        if self.writer and self.writer.size >= self.shard_size:
            self._seal(self.writer)

    def _seal(self, writer: ShardWriter) -> None:
        self.sealed.append(writer.seal(self.folder))
        self.writer = None

    def _adopt(self) -> None:
        """Take over what is the beginning of `order`; remember the rest by key."""
        shards = (path for path in sorted(self.folder.glob("*.tar")) if SHARD_PATTERN.fullmatch(path.name))
        paths = [path for path in shards if path.is_file() and not path.is_symlink()]  # no pipe, no folder
        sealed: dict[str, list[tuple[Path, list[Entry]]]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for path, entries in zip(paths, pool.map(self._whole, paths), strict=True):
                if entries:
                    sealed.setdefault(entries[0].meta.key, []).append((path, entries))
        while (found := self._expected(sealed)) is not None:
            path, entries = found
            sealed[entries[0].meta.key].remove(found)
            self.sealed.append((Shard(path.name, len(entries), path.stat().st_size), entries))
            self.position += len(entries)
        self._adopt_open()
        for path, entries in itertools.chain(*sealed.values()):
            self._left |= {entry.meta.key: (path, entry) for entry in entries}

    def _whole(self, path: Path) -> list[Entry]:
        """The samples of a shard that has the bytes of its name; none when it is damaged or of another version."""
        try:
            data = map_file(path)
            return list(scan_shard(data, path.name, self.format_version)) if content_hash(data) == path.stem else []
        except (FormatError, OSError, ValueError):  # ValueError: an empty file cannot be mapped
            return []

    def _expected(self, sealed: Mapping[str, list[tuple[Path, list[Entry]]]]) -> tuple[Path, list[Entry]] | None:
        """A sealed shard that holds exactly what comes next; `sealed` is by first key."""
        key = self.order[self.position] if self.position < len(self.order) else ""
        return next((shard for shard in sealed.get(key, ()) if self._is_next(shard[1])), None)

    def _is_next(self, entries: Sequence[Entry]) -> bool:
        return [e.meta.key for e in entries] == list(self.order[self.position : self.position + len(entries)])

    def _adopt_open(self) -> None:
        path = self.folder / OPEN
        entries = recover(map_file(path), self.format_version) if path.is_file() else []
        if entries and self._is_next(entries):
            self.writer = ShardWriter(path, self.format_version, entries)
            self.position += len(entries)
            self._seal_if_full()
        elif entries:
            kept = self.folder / f"left-{len(list(self.folder.glob('left-*.tar')))}.tar"
            replace(path, kept)
        for path in filter(Path.is_file, self.folder.glob("left-*.tar")):
            self._left |= {entry.meta.key: (path, entry) for entry in recover(map_file(path), self.format_version)}
