"""The shards of a build before its commit, in a folder that survives a kill and that the next build continues.

Samples are written in the order of the plan. Shards of an earlier run are adopted unchanged as long as they are the
beginning of that order, so an interrupted build gives the same bytes as an uninterrupted one. Other complete samples of
an earlier run are copied at their position in the order. A shard is sealed at its size; a repair seals it after the
sample that was the last of the damaged one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from qwen_cache.errors import FormatError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.manifest import SHARD_PATTERN, Shard
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import Entry, ShardWriter, check_tensors, recover, scan_shard
from qwen_cache.storage.durable import replace
from qwen_cache.storage.mapped import NotAFileError, map_file

OPEN = "open.tar"


class Staging:
    """Writes the samples with the keys `order`; the first `position` of them exist already.

    A shard is sealed at `shard_size` bytes, or if there are `last` keys, after each of these.
    """

    def __init__(
        self, folder: Path, order: Sequence[str], format_version: int, shard_size: int, last: Set[str] = frozenset()
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.order, self.format_version, self.shard_size = folder, order, format_version, shard_size
        self.last = last
        self.position = 0
        self.sealed: list[tuple[Shard, list[Entry]]] = []
        self.writer: ShardWriter | None = None
        self._left: dict[str, tuple[Path, Entry]] = {}
        self._adopt()

    @staticmethod
    def finished(folder: Path, format_version: int) -> set[str]:
        """The keys of the samples that an earlier run left in `folder`, without a hash of sealed shards."""
        keys = set[str]()
        for path in folder.glob("*.tar"):
            if SHARD_PATTERN.fullmatch(path.name):
                keys |= keys_in(path, format_version)
            elif path.name == OPEN or path.match("left-*.tar"):
                keys |= {entry.meta.key for entry in _recovered(path, format_version)}
        return keys

    def left_over(self, key: str) -> tuple[Entry, memoryview] | None:
        """A complete sample that an earlier run left, and the bytes of its shard."""
        path, entry = self._left.get(key, (None, None))
        return (entry, map_file(path)) if path and entry else None

    def add(self, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> None:
        self._next(meta.key).add(meta, tensors)
        self._seal_if_full()

    def add_copy(self, entry: Entry, shard: memoryview, where: object = "what an earlier run left") -> None:
        """Append a sample unchanged from the mapped `shard`, after a check of its tensors; `where` is for errors."""
        check_tensors(entry, shard, str(where))
        self._next(entry.meta.key).add_copy(entry, shard[entry.offset : entry.offset + entry.length])
        self._seal_if_full()

    def finish(self) -> list[tuple[Shard, list[Entry]]]:
        """Seal the open shard; returns all shards, which are in this folder under their names."""
        assert self.position == len(self.order)
        if self.writer:
            self._seal(self.writer)
        return self.sealed

    def close(self) -> None:
        """Leave everything for a later run to continue."""
        if self.writer:
            self.writer.close()

    def _next(self, key: str) -> ShardWriter:
        assert key == self.order[self.position]
        self.position += 1
        self.writer = self.writer or ShardWriter(self.folder / OPEN, self.format_version)
        return self.writer

    def _seal_if_full(self) -> None:
        if not (self.writer and self.position):
            return
        is_last = self.order[self.position - 1] in self.last if self.last else self.writer.size >= self.shard_size
        if is_last:
            self._seal(self.writer)

    def _seal(self, writer: ShardWriter) -> None:
        self.sealed.append(writer.seal(self.folder))
        self.writer = None

    def _adopt(self) -> None:
        """Adopt existing shards that are the beginning of `order`; remember all other samples by key."""
        paths = [path for path in sorted(self.folder.glob("*.tar")) if SHARD_PATTERN.fullmatch(path.name)]
        by_first_key: dict[str, list[tuple[Path, list[Entry]]]] = {}
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for path, entries in zip(paths, pool.map(self._valid_entries, paths), strict=True):
                if entries:
                    by_first_key.setdefault(entries[0].meta.key, []).append((path, entries))
        while (shard := self._next_shard(by_first_key)) is not None:
            path, entries = shard
            by_first_key[entries[0].meta.key].remove(shard)
            self.sealed.append((Shard(path.name, len(entries), path.stat().st_size), entries))
            self.position += len(entries)
        self._adopt_open()
        for path, entries in itertools.chain(*by_first_key.values()):
            self._left |= {entry.meta.key: (path, entry) for entry in entries}

    def _valid_entries(self, path: Path) -> list[Entry]:
        """The samples of a shard; none if its bytes do not match its name, or it has another format version."""
        try:
            data = map_file(path, follow_links=False)
            return list(scan_shard(data, path.name, self.format_version)) if content_hash(data) == path.stem else []
        except (FormatError, NotAFileError):  # pipes, links and folders among them
            return []

    def _next_shard(
        self, by_first_key: Mapping[str, list[tuple[Path, list[Entry]]]]
    ) -> tuple[Path, list[Entry]] | None:
        """A sealed shard with exactly the next samples of `order`; None if there is none."""
        key = self.order[self.position] if self.position < len(self.order) else ""
        return next((shard for shard in by_first_key.get(key, ()) if self._is_next(shard[1])), None)

    def _is_next(self, entries: Sequence[Entry]) -> bool:
        return [e.meta.key for e in entries] == list(self.order[self.position : self.position + len(entries)])

    def _adopt_open(self) -> None:
        """Continue the open shard if its samples are next in `order`; else keep its samples by key."""
        path = self.folder / OPEN
        entries = _recovered(path, self.format_version)
        if entries and self._is_next(entries):
            self.writer = ShardWriter(path, self.format_version, entries)
            self.position += len(entries)
            self._seal_if_full()
        elif entries:
            kept = self.folder / f"left-{len(list(self.folder.glob('left-*.tar')))}.tar"
            replace(path, kept)
        for path in self.folder.glob("left-*.tar"):
            self._left |= {entry.meta.key: (path, entry) for entry in _recovered(path, self.format_version)}


def keys_in(shard: Path, format_version: int) -> set[str]:
    """The keys of the samples of a shard, which is not hashed; none if it cannot be read."""
    with suppress(FormatError, OSError):
        return {entry.meta.key for entry in scan_shard(map_file(shard), shard.name, format_version)}
    return set()


def _recovered(path: Path, format_version: int) -> list[Entry]:
    try:
        return recover(map_file(path, follow_links=False), format_version)
    except (FileNotFoundError, NotAFileError):
        return []
