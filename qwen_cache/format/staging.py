"""The shards of a build before its commit, in a folder that survives a kill and that the next build continues.

Samples are written in the order of the plan. In a local folder, shards of an earlier run are adopted unchanged as long
as they are the beginning of that order, so an interrupted build gives the same bytes as an uninterrupted one. In object
storage, where a shard costs its upload, any is adopted whose samples are all wanted. Other complete samples of an
earlier run are copied at their position in the order. A shard is sealed at its size; a repair seals it after the sample
that was the last of the damaged one.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from qwen_cache.errors import FormatError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.manifest import SHARD_PATTERN, Shard
from qwen_cache.format.remote import STAGING, Stored, build_name, put_shard
from qwen_cache.format.remote_build import RemoteBuild
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import Entry, ShardWriter, check_tensors, recover, scan_shard
from qwen_cache.storage.durable import make_folder, move, replace
from qwen_cache.storage.mapped import NotAFileError, map_file
from qwen_cache.storage.url import Url

OPEN = "open.tar"


def staging_folder(folder: Path, name: str, format_version: int) -> Path:
    """Where the shards of the unfinished build `name` are, in the folder of its cache."""
    return folder / STAGING / build_name(name, format_version)


def store_shard(destination: Path | Url, name: str, path: Path, stored: Stored, format_version: int) -> None:
    """Hand over a sealed shard to the unfinished build `name` of the cache at `destination`, from any machine.

    In a folder, the file is moved into its staging; in object storage it goes to its final place, with its part, and
    the local file is removed.
    """
    if isinstance(destination, Url):
        put_shard(destination, build_name(name, format_version), path, stored, format_version)
        path.unlink(missing_ok=True)
    else:
        folder = staging_folder(destination, name, format_version)
        make_folder(folder)
        move(path, folder / stored[0].name)


class Staging:
    """Writes the samples with the keys `order`, except those of adopted shards: `to_write` has the others, in order.

    A shard is sealed at `shard_size` bytes, or if there are `last` keys, after each of these. With `remote`, `folder`
    is local, and sealed shards go to object storage from there.
    """

    def __init__(
        self,
        folder: Path,
        order: Sequence[str],
        format_version: int,
        shard_size: int,
        last: Set[str] = frozenset(),
        remote: RemoteBuild | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.order, self.format_version, self.shard_size = folder, order, format_version, shard_size
        self.last, self.remote = last, remote
        self._missing = list(order)  # in no adopted shard
        self.sealed: list[Stored] = []
        self.writer: ShardWriter | None = None
        self._written = 0  # of `_missing`
        self._left: dict[str, tuple[Path, Entry]] = {}
        self._adopt()

    @property
    def to_write(self) -> list[str]:
        """The keys to add, in this order."""
        return self._missing[self._written :]

    @property
    def position(self) -> int:
        """How many samples of `order` are there."""
        return len(self.order) - len(self._missing) + self._written

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
        if path and entry:
            return entry, map_file(path)
        return self.remote.left_over(key) if self.remote else None

    def add(self, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> None:
        self._next(meta.key).add(meta, tensors)
        self._seal_if_full()

    def add_copy(self, entry: Entry, shard: memoryview, where: object = "what an earlier run left") -> None:
        """Append a sample unchanged from the mapped `shard`, after a check of its tensors; `where` is for errors."""
        check_tensors(entry, shard, str(where))
        self._next(entry.meta.key).add_copy(entry, shard[entry.offset : entry.offset + entry.length])
        self._seal_if_full()

    def finish(self) -> list[Stored]:
        """Seal the open shard; returns all shards, which are in this folder or in object storage under their names."""
        assert not self.to_write
        if self.writer:
            self._seal(self.writer)
        if self.remote:
            self.remote.uploads.wait()
        position = {key: i for i, key in enumerate(self.order)}
        self.sealed.sort(key=lambda stored: position[stored[1][0].meta.key])
        return self.sealed

    def close(self) -> None:
        """Leave everything for a later run to continue."""
        if self.writer:
            self.writer.close()
        if self.remote:
            self.remote.close()

    def _next(self, key: str) -> ShardWriter:
        assert key == self._missing[self._written]
        self._written += 1
        self.writer = self.writer or ShardWriter(self.folder / OPEN, self.format_version)
        return self.writer

    def _seal_if_full(self) -> None:
        if self.writer is None:
            return
        last = self.writer.entries[-1].meta.key
        if last in self.last if self.last else self.writer.size >= self.shard_size:
            self._seal(self.writer)

    def _seal(self, writer: ShardWriter) -> None:
        stored = writer.seal(self.folder)
        self.sealed.append(stored)
        self.writer = None
        if self.remote:
            self.remote.uploads.add(self.folder / stored[0].name, stored)

    def _adopt(self) -> None:
        """Adopt existing shards; remember all other samples by key."""
        paths = [path for path in sorted(self.folder.glob("*.tar")) if SHARD_PATTERN.fullmatch(path.name)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = list(zip(paths, pool.map(self._valid_entries, paths), strict=True))
        shards = {path: entries for path, entries in found if entries}
        for path in self._adopt_any(shards, self.remote) if self.remote else self._adopt_beginning(shards):
            del shards[path]
        self._adopt_open()
        for file, entries in shards.items():
            self._left |= {entry.meta.key: (file, entry) for entry in entries}

    def _adopt_beginning(self, shards: Mapping[Path, list[Entry]]) -> list[Path]:
        """Adopt the shards that are the beginning of `order`; returns them."""
        by_first_key: dict[str, list[Path]] = {}
        for file, entries in shards.items():
            by_first_key.setdefault(entries[0].meta.key, []).append(file)
        adopted, position = list[Path](), 0
        while position < len(self.order):
            candidates = by_first_key.get(self.order[position], [])
            path = next((each for each in candidates if _is_at(shards[each], self.order, position)), None)
            if path is None:
                break
            entries = shards[path]
            self.sealed.append((Shard(path.name, len(entries), path.stat().st_size), entries))
            adopted.append(path)
            position += len(entries)
        self._missing = list(self.order[position:])
        return adopted

    def _adopt_any(self, shards: Mapping[Path, list[Entry]], remote: RemoteBuild) -> list[Path]:
        """Adopt every shard, uploaded or here, whose samples are all missing; returns those that are here."""
        missing = set(self.order)
        adopted = list[Path]()
        for stored in remote.stored:
            keys = {entry.meta.key for entry in stored[1]}
            if keys <= missing:
                remote.adopt(stored)
                self.sealed.append(stored)
                missing -= keys
            else:
                remote.keep(stored)
        for file, entries in shards.items():
            keys = {entry.meta.key for entry in entries}
            if keys <= missing:
                self.sealed.append((Shard(file.name, len(entries), file.stat().st_size), entries))
                remote.uploads.add(file, self.sealed[-1])
                adopted.append(file)
                missing -= keys
        self._missing = [key for key in self.order if key in missing]
        return adopted

    def _valid_entries(self, path: Path) -> list[Entry]:
        """The samples of a shard; none if its bytes do not match its name, or it has another format version."""
        try:
            data = map_file(path, follow_links=False)
            return list(scan_shard(data, path.name, self.format_version)) if content_hash(data) == path.stem else []
        except (FormatError, NotAFileError):  # pipes, links and folders among them
            return []

    def _adopt_open(self) -> None:
        """Continue the open shard if its samples are next in `order`; else keep its samples by key."""
        path = self.folder / OPEN
        entries = _recovered(path, self.format_version)
        if entries and _is_at(entries, self._missing, 0):
            self.writer = ShardWriter(path, self.format_version, entries)
            self._written = len(entries)
            self._seal_if_full()
        elif entries:
            kept = self.folder / f"left-{len(list(self.folder.glob('left-*.tar')))}.tar"
            replace(path, kept)
        for path in self.folder.glob("left-*.tar"):
            self._left |= {entry.meta.key: (path, entry) for entry in _recovered(path, self.format_version)}


def _is_at(entries: Sequence[Entry], keys: Sequence[str], position: int) -> bool:
    """Whether `keys` has those of `entries` at a position."""
    return [entry.meta.key for entry in entries] == list(keys[position : position + len(entries)])


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
