"""A cache in object storage, written: shards as they are sealed, then one conditional write of the manifest.

A shard goes to its final place at once, with a *part* beside the unfinished build: `.staging/<build>/<hash>.parquet`,
the rows of that shard, from which any machine continues. The commit puts `index-<hash>.parquet`, which stays, then
`cache.json`, if it is still the one that the build read, then the copy `index.parquet`, and removes the parts. Shards
that the manifest no longer names stay until `gc`, which spares those of builds that wrote a file within a grace period.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Event

import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import ConflictError, FormatError, ShardError
from qwen_cache.format.identity import HASH_PATTERN
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index, record_reader, write_index
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN, Manifest, Shard, parse_manifest
from qwen_cache.format.shard import END_OF_ARCHIVE, Entry
from qwen_cache.storage.remote import Location, Url
from qwen_cache.storage.stores import NEVER, Listing, store_of

STAGING = ".staging"  # shards of unfinished builds; in object storage, the rows of their shards
PARQUET = ".parquet"
UPLOADS = 2  # shards at a time: one alone may wait for its last bytes while the network idles
WAITING = 2  # sealed shards that wait for their upload before the encoders do
STAGED = UPLOADS + WAITING + 1  # shards on this disk at most: one more is being written
READERS = 16  # parts read at a time
ENCODED_AGAIN = "it encodes their samples again. `gc --grace-hours 0` is for a cache that nobody writes to"

Stored = tuple[Shard, list[Entry]]
"""A shard and its samples, in the order of the archive."""


def index_name(manifest: Manifest) -> str:
    """The name under which the index of a manifest stays."""
    return f"index-{manifest.index.xxh3_128}{PARQUET}"


def build_name(name: str, format_version: int) -> str:
    """The name of an unfinished build among those of its cache."""
    return f"{name}-v{format_version}"


# ---- shards and parts ------------------------------------------------------------------------------------------------


def put_shard(
    folder: Url, build: str, path: Path | None, stored: Stored, format_version: int, stop: Event = NEVER
) -> None:
    """Upload the sealed shard at `path`, and its part for the unfinished `build`; only the part if it has no path."""
    store, (shard, _) = store_of(folder), stored
    part = part_path(folder, build, shard), part_bytes(stored, format_version)
    if path is None:
        store.put(*part)
    else:
        store.put_file(folder / shard.name, path, dict([part]), stop)  # the part first, so `gc` spares the shard


def copy_shard(source: Url, folder: Url, build: str, stored: Stored, format_version: int) -> bool:
    """Copy a shard within a store, without downloading it, and put its part; False if the store cannot."""
    if not store_of(folder).copy(source, folder / stored[0].name):
        return False
    put_shard(folder, build, None, stored, format_version)
    return True


def part_path(folder: Url, build: str, shard: Shard) -> Url:
    return folder / STAGING / build / f"{shard.xxh3_128}{PARQUET}"


def part_bytes(stored: Stored, format_version: int) -> bytes:
    """The part of a shard: its rows, without names."""
    shard, entries = stored
    return write_index([IndexRow("", shard.name, entry) for entry in entries], format_version)


def read_parts(folder: Url, build: str, here: Listing, format_version: int) -> list[Stored]:
    """The shards of an unfinished build, as its parts have them; without those that are not there whole."""
    names = [path for path in here.files if path.startswith(f"{STAGING}/{build}/") and path.endswith(PARQUET)]

    def read(name: str) -> Stored | None:
        with suppress(FormatError, FileNotFoundError):  # torn by nobody: but a part is only a hint
            data = (folder / name).read_bytes()
            rows = list(_rows(data, format_version, str(folder / name)))
            return _stored(rows, here)
        return None

    with ThreadPoolExecutor(READERS, "parts") as pool:
        return [stored for stored in pool.map(read, sorted(names)) if stored]


def read_replaced(folder: Url, manifest: Manifest, here: Listing, keys: Set[str], format_version: int) -> list[Stored]:
    """The shards with a sample of `keys` that are still there but no longer in the manifest, by earlier indexes."""
    names = [path for path in here.files if _is_index(path) and path != index_name(manifest)]
    listed, found = {shard.name for shard in manifest.shards}, dict[str, Stored]()
    for name in names if keys else ():
        with suppress(FormatError, FileNotFoundError):
            data = (folder / name).read_bytes()
            by_shard = dict[str, list[IndexRow]]()
            for row in _rows(data, format_version, str(folder / name), keys):
                by_shard.setdefault(row.shard, []).append(row)
            for shard, rows in by_shard.items():
                if shard not in listed and (stored := _stored(rows, here)):
                    found[shard] = stored
    return [found[name] for name in sorted(found)]


def _is_index(path: str) -> bool:
    name = path.removeprefix("index-").removesuffix(PARQUET)
    return path == f"index-{name}{PARQUET}" and HASH_PATTERN.fullmatch(name) is not None


def _rows(data: bytes, format_version: int, where: str, keys: Set[str] | None = None) -> Iterator[IndexRow]:
    """The rows of an index or a part; with `keys`, those of the shards that hold one of them."""
    import pyarrow.parquet as pq

    samples = pq.ParquetFile(pa.BufferReader(data)).metadata.num_rows
    table = read_index(data, format_version, where, samples)
    if keys is not None:
        wanted = table["shard"].filter(pc.is_in(table["key"], pa.array(sorted(keys), pa.string())))
        table = table.filter(pc.is_in(table["shard"], wanted.unique())).combine_chunks()
    read = record_reader(table)
    return (index_row(read(position), format_version, where) for position in range(table.num_rows))


def _stored(rows: Sequence[IndexRow], here: Listing) -> Stored | None:
    """The shard of all its rows; None if it is not there, or has another size than they say."""
    rows = sorted(rows, key=lambda row: row.entry.offset)
    names = {row.shard for row in rows}
    if len(names) != 1 or not SHARD_PATTERN.fullmatch(name := names.pop()) or name not in here.files:
        return None
    end = 0
    for row in rows:
        if row.entry.offset != end:
            return None
        end += row.entry.length
    size = end + len(END_OF_ARCHIVE)
    return (Shard(name, len(rows), size), [row.entry for row in rows]) if here.files[name].size == size else None


class Uploads:
    """Uploads sealed shards of one unfinished build in the background, and removes the local files.

    `add` waits while `WAITING` shards do, so that the local disk never holds more than a few.
    """

    def __init__(self, folder: Url, build: str, format_version: int, here: Listing) -> None:
        self.folder, self.build, self.format_version = folder, build, format_version
        self.parts: list[Stored] = []
        """The shards of this build that have a part."""
        self._here = {path: file.size for path, file in here.files.items()}
        self._pool = ThreadPoolExecutor(UPLOADS, "upload")
        self._running: list[Future[None]] = []
        self._stop = Event()

    def add(self, path: Path | None, stored: Stored) -> None:
        """Begin to upload a shard, or without `path` the part of one that is there; raises what an earlier one met."""
        while len(self._running) >= UPLOADS + WAITING or (self._running and self._running[0].done()):
            self._running.pop(0).result()
        self.parts.append(stored)
        self._running.append(self._pool.submit(self._upload, path, stored))

    def _upload(self, path: Path | None, stored: Stored) -> None:
        if self._stop.is_set():
            raise CancelledError
        shard = stored[0]
        is_there = self._here.get(shard.name) == shard.bytes
        put_shard(self.folder, self.build, None if is_there else path, stored, self.format_version, self._stop)
        if path is not None:
            path.unlink(missing_ok=True)

    def wait(self) -> None:
        """Wait until every shard is there."""
        while self._running:
            self._running.pop(0).result()

    def stop(self) -> None:
        """End as soon as possible; what is not uploaded stays on the disk."""
        self._stop.set()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def remove_parts(self, committed: Set[str]) -> None:
        """Remove the parts of shards whose samples are all `committed`; those of builds beside this one stay."""
        done = [shard for shard, entries in self.parts if {entry.meta.key for entry in entries} <= committed]
        store_of(self.folder).delete([part_path(self.folder, self.build, shard) for shard in done])


# ---- the commit ------------------------------------------------------------------------------------------------------


def commit(folder: Url, manifest: Manifest, index: bytes, replaces: Manifest) -> None:
    """Make `manifest` and its index the dataset, if that is still `replaces`; all shards must be there.

    Raises ConflictError if another build has committed meanwhile, ShardError if a shard is missing, before the swap or
    after it: `gc` without a grace period may remove what nobody has committed yet.
    """
    store, here, url = store_of(folder), store_of(folder).listing(folder), folder / MANIFEST_NAME
    old = url.read_bytes() if MANIFEST_NAME in here.files else None
    data = manifest.to_bytes()
    if old != data:
        found = parse_manifest(old, str(url)) if old else Manifest.empty(replaces.format_version)
        if found != replaces:
            raise conflict(folder)
        for shard, is_there in _lost(manifest, here):
            what, do = "a shard of this build is missing", "run the same command again: it encodes its samples again"
            raise ShardError(what, where=folder / shard.name, expected=f"{shard.bytes} bytes", found=is_there, do=do)
    if not store.swap(url, old, data, {folder / index_name(manifest): index}, {folder / INDEX_NAME: index}):
        raise conflict(folder)
    here = store.listing(folder)
    if index_name(manifest) not in here.files:
        store.put(folder / index_name(manifest), index)
    if lost := _lost(manifest, here):
        what = f"{len(lost)} shards were removed while this build committed them"
        raise ShardError(what, where=folder, found=lost[0][1], do=f"run the same command again: {ENCODED_AGAIN}")


def finish_commit(folder: Url) -> None:
    """The last step of a commit, after a kill: make `index.parquet` a copy of the index that the manifest names."""
    store, here = store_of(folder), store_of(folder).listing(folder).files
    if MANIFEST_NAME not in here:
        return
    manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes(), str(folder / MANIFEST_NAME))
    kept, copy = here.get(index_name(manifest)), here.get(INDEX_NAME)
    if kept and (copy is None or copy.tag != kept.tag):
        source, target = folder / index_name(manifest), folder / INDEX_NAME
        if not store.copy(source, target):
            store.put(target, source.read_bytes())


def conflict(folder: Location) -> ConflictError:
    """The error for a dataset that changed while a build was running."""
    return ConflictError(
        "another build has committed to this cache since this one read it",
        where=folder,
        do="run the same command again: its shards are reused. Builds of different sources replace each other's "
        "samples: give each its own cache",
    )


def _lost(manifest: Manifest, here: Listing) -> list[tuple[Shard, str]]:
    """The shards that are not there whole, each with what is there in its place."""
    sizes = [(shard, here.files[shard.name].size if shard.name in here.files else None) for shard in manifest.shards]
    return [
        (shard, "no such file" if size is None else f"{size} bytes") for shard, size in sizes if size != shard.bytes
    ]


# ---- gc --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Garbage:
    """The files that `gc` would remove, with sizes, and those that it spares because a running build may need it."""

    files: Mapping[str, int]
    spared: Mapping[str, int]


def find_garbage(folder: Url, grace: float) -> Garbage:
    """The files of ours below `folder` that the dataset does not need, by path.

    Spared: files younger than `grace` seconds, and all files of an unfinished build, its shards too, with a file as
    young as that.
    """
    here = store_of(folder).listing(folder)
    needed = _needed(folder)  # after the listing: what is committed meanwhile is in one of the two
    ours = {
        path: file
        for path, file in here.files.items()
        if (SHARD_PATTERN.fullmatch(path) or _is_index(path) or path.startswith(f"{STAGING}/")) and path not in needed
    }
    young = {path for path, file in here.files.items() if here.now - file.modified < grace}
    alive = {path.split("/")[1] for path in young if path.startswith(f"{STAGING}/")}
    parts = {path for path in ours if path.startswith(f"{STAGING}/") and path.split("/")[1] in alive}
    shards = {f"{path.rpartition('/')[2].removesuffix(PARQUET)}.tar" for path in parts}
    spared = {path for path in ours if path in young or path in parts or path in shards}
    sizes = {path: ours[path].size for path in sorted(ours)}
    return Garbage(
        {path: size for path, size in sizes.items() if path not in spared},
        {path: size for path, size in sizes.items() if path in spared},
    )


def _needed(folder: Url) -> set[str]:
    try:
        manifest = parse_manifest((folder / MANIFEST_NAME).read_bytes(), str(folder / MANIFEST_NAME))
    except FileNotFoundError:
        return set()
    return {index_name(manifest), *(shard.name for shard in manifest.shards)}


def remove_garbage(folder: Url, paths: Iterable[str]) -> list[str]:
    """Remove files that `find_garbage` found, except those that a build has committed since; returns their paths.

    Raises ShardError for what a build committed just before it was removed: the build may have looked too early to
    notice.
    """
    needed = _needed(folder)
    removed = [path for path in paths if path not in needed]
    store_of(folder).delete([folder / path for path in removed])
    if lost := sorted(_needed(folder).intersection(removed)):
        what, found = "files were removed that a build has committed meanwhile", f"{len(lost)}, such as {lost[0]}"
        raise ShardError(what, where=folder, found=found, do=f"run that build again: {ENCODED_AGAIN}")
    return removed
