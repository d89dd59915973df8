"""An unfinished build: shards without a manifest, here and in object storage, and what is finished."""

from __future__ import annotations

import dataclasses
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count, takewhile
from pathlib import Path

from qwen_cache.errors import ConfigError, FormatError, QwenCacheError
from qwen_cache.format import directory
from qwen_cache.format.cache import RemoteShards
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import SHARD_PATTERN, Manifest, Shard
from qwen_cache.format.remote import STAGING, Stored, Uploads, build_name, put_shard, read_parts, read_replaced
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import Entry, ShardWriter, check_tensors, is_as_written, recover, scan_shard, tensor_bytes
from qwen_cache.storage.files import (
    LockHeldError,
    NoLocksError,
    NotAFileError,
    cache_home,
    locked,
    make_folder,
    map_file,
    replace,
)
from qwen_cache.storage.remote import LocalCopies, Location, Url, is_remote
from qwen_cache.storage.stores import store_of

# ---- remote build ----------------------------------------------------------------------------------------------------
# An unfinished build in object storage: what earlier runs left there and on this machine, and the way up.
#
# The shard that is being written, and those that wait for their upload, are in a folder of this machine, in the user's
# cache folder. Each running build has such a folder to itself, and the next one takes over what a killed one left.

LOCK = ".lock"


class RemoteBuild:
    """The unfinished build `name` of the cache at `folder`, whose dataset is `manifest`; `keys` are those to write.

    Raises QwenCacheError if the store cannot be written to.
    """

    def __init__(
        self, folder: Url, name: str, format_version: int, manifest: Manifest, keys: Set[str], copies: LocalCopies
    ) -> None:
        self.folder, build = folder, build_name(name, format_version)
        store = store_of(folder)
        store.check(folder)
        here = store.listing(folder)
        parts = read_parts(folder, build, here, format_version)
        self._have_part = {shard.name for shard, _ in parts}
        replaced = read_replaced(folder, manifest, here, keys, format_version)
        self.stored = [*parts, *(stored for stored in replaced if stored[0].name not in self._have_part)]
        """The shards that are there and not in the dataset."""
        self.uploads = Uploads(folder, build, format_version, here)
        shards = {shard.name: shard for shard in (*manifest.shards, *(shard for shard, _ in self.stored))}
        self.shards = RemoteShards(folder, dataclasses.replace(manifest, shards=tuple(shards.values())), copies)
        self._left: dict[str, IndexRow] = {}
        self._stack = ExitStack()
        self.scratch = self._stack.enter_context(own_folder(folder)) / build

    def adopt(self, stored: Stored) -> None:
        """Take a shard that is there into this build."""
        if stored[0].name in self._have_part:
            self.uploads.parts.append(stored)
        else:
            self.uploads.add(None, stored)

    def keep(self, stored: Stored) -> None:
        """Remember the samples of a shard that cannot be adopted whole."""
        if stored[0].name in self._have_part:
            self.uploads.parts.append(stored)
        self._left |= {entry.meta.key: IndexRow("", stored[0].name, entry) for entry in stored[1]}

    def left_over(self, key: str) -> tuple[Entry, memoryview] | None:
        """A sample of such a shard, and the bytes of the shard's local copy."""
        row = self._left.get(key)
        return (row.entry, self.shards.bytes_of(row)) if row else None

    def remove_left(self) -> None:
        """Remove what processes that were killed have left of this build on this machine, once it is committed."""
        for path in takewhile(Path.is_dir, _folders(self.folder)):
            if path != self.scratch.parent:
                with suppress(LockHeldError, NoLocksError), locked(path / LOCK):
                    shutil.rmtree(path / self.scratch.name, ignore_errors=True)

    def close(self) -> None:
        """End the uploads, and leave the local folder to the next build."""
        self.uploads.stop()
        self._stack.close()


def _folders(folder: Url) -> Iterator[Path]:
    """The local folders of builds of one cache, as many as one asks for."""
    begin = cache_home() / "staging" / content_hash(str(folder).encode())
    return (begin.with_name(f"{begin.name}-{number}") for number in count())


@contextmanager
def own_folder(folder: Url) -> Iterator[Path]:
    """The first local folder that no other process has; several builds of one cache may run on one machine."""
    with ExitStack() as stack:
        for path in _folders(folder):
            make_folder(path)
            try:
                stack.enter_context(locked(path / LOCK))
            except LockHeldError:
                continue
            except NoLocksError as error:
                what = "files cannot be locked here, so two builds could not be kept apart"
                do = "set XDG_CACHE_HOME to a folder on a local disk"
                raise QwenCacheError(what, where=path, found=error.strerror, do=do) from None
            yield path
            return


def scratch_folders(folder: Url, name: str, format_version: int) -> list[Path]:
    """The local folders with shards of the unfinished build `name`, of any process."""
    build = build_name(name, format_version)
    return [path / build for path in takewhile(Path.is_dir, _folders(folder)) if (path / build).is_dir()]


# ---- staging ---------------------------------------------------------------------------------------------------------
# The shards of a build before its commit, in a folder that survives a kill and that the next build continues.
#
# Samples are written in the order of the plan. Complete shards of an earlier run, whichever process wrote them, are
# adopted unchanged if all of their samples are wanted, so an interrupted build of one machine gives the same bytes as
# an uninterrupted one. Other complete samples of an earlier run are copied at their position in the order. A shard is
# sealed at its size; a repair seals it after the sample that was the last of the damaged one.

OPEN = "open.tar"


def staging_folder(folder: Path, name: str, format_version: int) -> Path:
    """The place of the shards of the unfinished build `name`, in the folder of its cache."""
    return folder / STAGING / build_name(name, format_version)


@dataclass(frozen=True)
class Destination:
    """The unfinished build `name` of the cache at `folder`, to which other processes add shards, from any machine."""

    folder: Location
    name: str
    format_version: int
    token: str
    """A file that the build has written into a local folder, so that others see whether theirs is the same."""

    @classmethod
    def of(cls, folder: Location, name: str, format_version: int) -> Destination:
        token = f"shared-{uuid.uuid4().hex}"
        if is_remote(folder):
            return cls(folder, name, format_version, token)
        (staging_folder(folder, name, format_version) / token).touch()
        return cls(folder.absolute(), name, format_version, token)

    @contextmanager
    def opened(self) -> Iterator[Path]:
        """The folder for shards of this process; ConfigError if the folder of the cache is another one here."""
        if is_remote(self.folder):
            with own_folder(self.folder) as own:
                path = own / build_name(self.name, self.format_version)
                shutil.rmtree(path, ignore_errors=True)  # of a process that was killed
                path.mkdir()
                yield path
            return
        path = staging_folder(self.folder, self.name, self.format_version)
        if not (path / self.token).is_file():
            what, do = "this node does not see the folder of the cache", "build into a folder that all nodes share"
            raise ConfigError(what, where=self.folder, do=f"{do}, or into a bucket (--out s3://…)")
        yield path

    def store(self, writer: ShardWriter) -> Stored:
        """Seal a shard and add it to the build: in a folder under its name, in object storage with its part."""
        stored = writer.seal(writer.path.parent)
        self.deliver(stored, writer.path.parent)
        return stored

    def deliver(self, stored: Stored, folder: Path) -> None:
        """Upload the sealed shard in `folder` with its part, and remove it here; nothing for a local cache."""
        if is_remote(self.folder):
            path = folder / stored[0].name
            put_shard(self.folder, build_name(self.name, self.format_version), path, stored, self.format_version)
            path.unlink(missing_ok=True)


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
        self._missing = list(order)  # in no adopted shard, and not left to other processes
        self.sealed: list[Stored] = []
        self.writer: ShardWriter | None = None
        self._written = self._sealed_bytes = 0  # of `_missing`; of the shards since this was opened
        self._left: dict[str, tuple[Path, Entry]] = {}
        self._adopt()

    @property
    def to_write(self) -> list[str]:
        """The keys to add, in this order."""
        return self._missing[self._written :]

    @property
    def size(self) -> int:
        """The bytes that were written since this was opened, with the whole open shard."""
        return self._sealed_bytes + (self.writer.size if self.writer else 0)

    def leave(self, keys: Set[str]) -> None:
        """Leave the samples with these keys to other processes, whose shards come by `add_shard`."""
        self._missing, self._written = [key for key in self.to_write if key not in keys], 0

    def add_shard(self, stored: Stored) -> None:
        """Add a shard that another process has sealed, here or in object storage."""
        self._add(stored)
        if self.remote:
            self.remote.uploads.parts.append(stored)

    @staticmethod
    def finished(folder: Path, format_version: int) -> set[str]:
        """The keys of the samples that an earlier run left in `folder`, without a hash of sealed shards."""
        keys = set[str]()
        for path in folder.glob("*.tar"):
            if SHARD_PATTERN.fullmatch(path.name):
                keys |= keys_in(path, format_version)
            else:
                keys |= {entry.meta.key for entry in _recovered(path, format_version)}
        return keys

    def left_over(self, key: str) -> tuple[Entry, memoryview] | None:
        """A complete sample that an earlier run left, and the bytes of its shard."""
        path, entry = self._left.get(key, (None, None))
        if path and entry:
            return entry, map_file(path)
        return self.remote.left_over(key) if self.remote else None

    def add(self, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> None:
        assert meta.key == self._missing[self._written]
        self._written += 1
        self.writer = self.writer or ShardWriter(self.folder / OPEN, self.format_version)
        self.writer.add(meta, tensors)
        self._seal_if_full()

    def add_copy(self, entry: Entry, shard: memoryview, where: object = "what an earlier run left") -> None:
        """Append a sample of the mapped `shard`, after a check of its tensors; `where` is for errors.

        Whatever is between them there is written again, so that no damage is copied.
        """
        check_tensors(entry, shard, str(where))
        self.add(entry.meta, dict(tensor_bytes(entry, shard)))

    def take(self, keys: Set[str]) -> list[Stored]:
        """Seal the open shard; returns and forgets the shards that have samples of `keys` alone, in their order.

        They are in this folder or in object storage under their names.
        """
        if self.writer:
            self._seal(self.writer)
        if self.remote:
            self.remote.uploads.wait()
        taken, stay = list[Stored](), list[Stored]()
        for stored in self.sealed:
            (taken if all(entry.meta.key in keys for entry in stored[1]) else stay).append(stored)
        self.sealed = stay
        firsts = {entries[0].meta.key for _, entries in taken}
        position = {key: i for i, key in enumerate(self.order) if key in firsts}
        return sorted(taken, key=lambda stored: position[stored[1][0].meta.key])

    def close(self) -> None:
        """Leave everything for a later run to continue."""
        if self.writer:
            self.writer.close()
        if self.remote:
            self.remote.close()

    def _seal_if_full(self) -> None:
        if self.writer is None:
            return
        last = self.writer.entries[-1].meta.key
        if last in self.last if self.last else self.writer.size >= self.shard_size:
            self._seal(self.writer)

    def _seal(self, writer: ShardWriter) -> None:
        stored = writer.seal(self.folder)
        self._add(stored)
        self.writer = None
        if self.remote:
            self.remote.uploads.add(self.folder / stored[0].name, stored)

    def _add(self, stored: Stored) -> None:
        self.sealed.append(stored)
        self._sealed_bytes += stored[0].bytes

    def _adopt(self) -> None:
        """Adopt every shard, uploaded or here, whose samples are all missing; remember all other samples by key."""
        paths = [path for path in sorted(self.folder.glob("*.tar")) if SHARD_PATTERN.fullmatch(path.name)]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            found = [each for each in zip(paths, pool.map(self._valid_entries, paths), strict=True) if each[1]]
        missing = set(self.order)
        for stored in self.remote.stored if self.remote else ():
            assert self.remote
            (self.remote.adopt if self._is_adopted(stored, missing) else self.remote.keep)(stored)
        for file, entries in found:
            stored = Shard(file.name, len(entries), file.stat().st_size), entries
            if not self._is_adopted(stored, missing):
                self._left |= {entry.meta.key: (file, entry) for entry in entries}
            elif self.remote:
                self.remote.uploads.add(file, stored)
        self._missing = [key for key in self.order if key in missing]
        self._adopt_open()

    def _is_adopted(self, stored: Stored, missing: set[str]) -> bool:
        """Adopt the shard if all of its samples are `missing`, which they then are no longer."""
        keys = {entry.meta.key for entry in stored[1]}
        if not keys <= missing:
            return False
        missing -= keys
        self.sealed.append(stored)
        return True

    def _valid_entries(self, path: Path) -> list[Entry]:
        """The samples of a shard; none if its bytes do not match its name, or it has another format version."""
        try:
            data = map_file(path, follow_links=False)
            return list(scan_shard(data, path.name, self.format_version)) if content_hash(data) == path.stem else []
        except (FormatError, NotAFileError):  # pipes, links and folders among them
            return []

    def _adopt_open(self) -> None:
        """Continue the open shard if its samples are next, and as this program writes them; else keep its samples by
        key, and those of other writers."""
        path, version = self.folder / OPEN, self.format_version
        entries = _recovered(path, version)
        are_next = entries and [entry.meta.key for entry in entries] == self._missing[: len(entries)]
        if are_next and all(is_as_written(entry, map_file(path), version) for entry in entries):
            self.writer = ShardWriter(path, version, entries)
            self._written = len(entries)
            self._seal_if_full()
        elif entries:
            replace(path, self.folder / f"left-{uuid.uuid4().hex}.tar")
        for path in self.folder.glob("open-*.tar"):  # renamed: a writer that is out of reach can no longer seal it
            replace(path, self.folder / f"left-{uuid.uuid4().hex}.tar")
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


# ---- finished --------------------------------------------------------------------------------------------------------
# Samples that need no encoder: left by an interrupted run, or in shards that the dataset no longer uses.
#
# Only headers and indexes are read, and nothing is written; a damaged sample is found when it is copied.


def replaced_shards(folder: Location, keys: Set[str], format_version: int) -> dict[Path, set[str]]:
    """The replaced shards that contain a sample of `keys`, each with all of its keys; they are not hashed.

    None for object storage, where they stay beside the others: the staging finds them.
    """
    if is_remote(folder):
        return {}
    paths = sorted((folder / directory.REPLACED).glob("*.tar")) if keys else []
    found = {path: keys_in(path, format_version) for path in paths}
    return {path: keys_of_shard for path, keys_of_shard in found.items() if not keys.isdisjoint(keys_of_shard)}


@dataclass(frozen=True)
class Finished:
    """Samples of an update that are on the disk already, by key."""

    interrupted: frozenset[str] = frozenset()
    """In the staging of an interrupted run, or in shards that it could no longer add to the dataset."""
    replaced: frozenset[str] = frozenset()
    """In shards that the dataset no longer uses, and not among `interrupted`."""


def finished_samples(folder: Location, manifest: Manifest, name: str, keys: Set[str]) -> Finished:
    """Which samples of `keys` an update with the staging `name` would copy. Reads headers only, writes nothing.

    A shard with damaged tensors is found when it is copied: its samples are written again.
    """
    if not keys:
        return Finished()
    version = manifest.format_version
    if is_remote(folder):
        return _finished_remotely(folder, manifest, name, keys)
    interrupted = Staging.finished(staging_folder(folder, name, version), version)
    for path in directory.unlisted_shards(folder, manifest):
        interrupted |= keys_in(path, version)
    missing = keys - interrupted
    replaced = set[str]().union(*replaced_shards(folder, missing, version).values())
    return Finished(frozenset(keys & interrupted), frozenset(missing & replaced))


def _finished_remotely(folder: Url, manifest: Manifest, name: str, keys: Set[str]) -> Finished:
    version, here = manifest.format_version, store_of(folder).listing(folder)
    parts = read_parts(folder, build_name(name, version), here, version)
    interrupted = {entry.meta.key for _, entries in parts for entry in entries}
    for scratch in scratch_folders(folder, name, version):
        interrupted |= Staging.finished(scratch, version)
    stored = read_replaced(folder, manifest, here, keys - interrupted, version)
    replaced = {entry.meta.key for _, entries in stored for entry in entries}
    return Finished(frozenset(keys & interrupted), frozenset(keys & replaced - interrupted))
