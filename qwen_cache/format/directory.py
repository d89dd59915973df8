"""A cache's folder or URL: manifest, index and shards; the commit; an index as a map."""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import xxhash

from qwen_cache.errors import (
    ConfigError,
    IndexFileError,
    ManifestError,
    NoCacheError,
    QwenCacheError,
    ShardError,
    TooLargeError,
)
from qwen_cache.format import remote
from qwen_cache.format.identity import HASHED_BLOCK, content_hash
from qwen_cache.format.index import INDEX_NAME, index_schema, read_batches, read_index
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN, VERSIONS, Manifest, parse_manifest
from qwen_cache.format.remote import STAGING
from qwen_cache.storage.files import (
    LockHeldError,
    NoLocksError,
    NotAFileError,
    cache_home,
    is_link,
    locked,
    make_folder,
    map_file,
    move,
    open_file,
    read_file,
    replace,
    sync_folder,
    unless_in_use,
    whole_file,
    write_durably,
)
from qwen_cache.storage.remote import Location, Url, is_remote
from qwen_cache.storage.stores import store_of
from qwen_cache.terminal import naming

# ---- directory -------------------------------------------------------------------------------------------------------
# The cache as a directory: exclusive writing and atomic commits.
#
# cache.json is the commit point. Shards are named by their content, and complete before they get their name; a new
# index is `index-<hash>.parquet` until the manifest that names it is in place. A crash anywhere leaves the old dataset
# or the new one. A commit moves replaced shards to `.replaced/`, where a run that still reads them finds them until
# `gc` removes them; readers take no lock, and open a shard wherever it is at that moment.

T = TypeVar("T")
Folder = TypeVar("Folder", Path, Url, Location)  # a Path gives Paths, a Url gives Urls

REPLACED = ".replaced"  # shards of earlier manifests
LOCK = ".lock"
LOOKS = 3  # at every place, before a file counts as missing: a commit moves it away while `gc` moves it back
LARGEST_IN_MEMORY = 1 << 26  # bytes of a remote index; a larger one is downloaded to a file
MAX_MANIFEST = 1 << 26  # bytes: room for 400,000 shards; parsing hostile JSON takes up to 30 times as much memory


def load(folder: Location) -> tuple[Manifest, memoryview]:
    """The manifest and its index, which is mapped; also while another process commits.

    FormatError if they are missing or invalid.
    """
    looks = Counter[bytes]()
    for _ in range(10):  # a commit between two of these reads makes them disagree, or moves the index
        data = _read_manifest(folder)
        if data is None:
            raise no_manifest(folder)
        manifest, index_found = parse_manifest(data, str(folder / MANIFEST_NAME)), "no file"
        for path in (folder / INDEX_NAME, pending_index(folder, manifest)):
            try:
                index = _map_index(path, manifest.index.bytes)
            except TooLargeError:
                index_found = "a larger file"
                continue
            if index is None:
                continue
            if (len(index), content_hash(index)) == (manifest.index.bytes, manifest.index.xxh3_128):
                return manifest, index
            index_found = "another hash"
        looks[data] += 1
        if looks[data] == LOOKS and _read_manifest(folder) == data:
            break
    raise IndexFileError(
        "the index is not the one that the manifest names",
        where=folder / INDEX_NAME,
        expected=manifest.index.xxh3_128,
        found=index_found,
    )


def read_manifest(folder: Location) -> Manifest | None:
    """The manifest as it is now, without the index; None if there is none, FormatError if it is invalid."""
    data = _read_manifest(folder)
    return None if data is None else parse_manifest(data, str(folder / MANIFEST_NAME))


def shard_paths(folder: Folder, name: str) -> tuple[Folder, Folder]:
    """The possible paths of a shard; FormatError if its name could lead out of the folder."""
    if not SHARD_PATTERN.fullmatch(name):
        raise ShardError("not the name of a shard", where=folder, expected="<xxh3-128>.tar", found=name)
    return folder / name, folder / REPLACED / name


def find_shard(folder: Folder, name: str, use: Callable[[Folder], T]) -> T | None:
    """`use(path)` for the path where the shard is; None if there is none, or `use` raises FileNotFoundError for all.

    A commit or `gc` may move the shard at any moment, so nothing is looked up first, and every path is tried again.
    """
    for path in shard_paths(folder, name) * LOOKS:
        try:
            return use(path)
        except (FileNotFoundError, NotADirectoryError):
            pass
        except NotAFileError as error:
            raise ShardError(str(error.strerror), where=path) from None
    return None


def map_shard(folder: Path, name: str) -> memoryview:
    """The mapped bytes of a shard; ShardError if it is missing."""
    data = find_shard(folder, name, map_file)
    if data is None:
        raise missing_shard(folder, name)
    return data


def missing_shard(folder: Location, name: str) -> ShardError:
    """The error for a shard that a reader needs and that is nowhere: lost, or replaced and removed meanwhile."""
    with suppress(QwenCacheError):
        data = _read_manifest(folder)
        if data and name not in {shard.name for shard in parse_manifest(data).shards}:
            what = "the cache was changed while it was read: its manifest no longer names this shard, and it is removed"
            return ShardError(what, where=folder / name, do="run the command again: it reads the cache as it is now")
    return ShardError("a shard of the manifest is missing", where=folder / name)


def shards_here(folder: Location, manifest: Manifest) -> set[str]:
    """The names of the shards that exist; for a remote cache, all shards of its manifest, without a request."""
    names = {shard.name for shard in manifest.shards}
    if is_remote(folder):
        return names
    return {name for name in names if find_shard(folder, name, _exists)}


def intact_shards(folder: Location, manifest: Manifest) -> set[str]:
    """The names of the shards that exist; in object storage, by one listing, those with their size."""
    if not is_remote(folder):
        return shards_here(folder, manifest)
    files = store_of(folder).listing(folder).files if manifest.shards else {}
    return {each.name for each in manifest.shards if each.name in files and files[each.name].size == each.bytes}


def _exists(path: Path) -> bool:
    with suppress(NotAFileError), naming(path):
        os.close(open_file(path))
        return True
    return False


@contextmanager
def writing(folder: Location) -> Iterator[None]:
    """Lock the directory for writing; QwenCacheError immediately if another process has the lock.

    In object storage nothing is locked: the commit is conditional.
    """
    if is_remote(folder):
        remote.finish_commit(folder)
        yield
        return
    try:
        make_folder(folder)
    except (FileExistsError, NotADirectoryError):
        raise ConfigError("not a folder", where=folder, do="choose another with --out") from None
    # Links among the files that we write and delete could lead to any file of the user.
    ours = [folder / name for name in (LOCK, STAGING, REPLACED)]
    for path in (*ours, *folder.glob(".*.tmp"), *(folder / STAGING).rglob("*"), *(folder / REPLACED).rglob("*")):
        if is_link(path):
            raise QwenCacheError("a symbolic link where this program writes", where=path, do="remove it")
    try:
        with locked(folder / LOCK):
            _finish_commit(folder)
            yield
    except LockHeldError as held:
        what, do = "another process is writing to this cache", "wait for it, or stop it first"
        raise QwenCacheError(what, where=folder, found=held.holder, do=do) from None
    except NoLocksError as error:
        what, do = "files cannot be locked here, so two writers could not be kept apart", "write to a local disk"
        raise QwenCacheError(what, where=folder, found=error.strerror, do=do) from None


def is_same(source: Location, target: Location) -> bool:
    """True if both are one folder of this machine, however it is spelled and through whatever links, or one URL."""
    if is_remote(source) or is_remote(target):
        return str(source).rstrip("/") == str(target).rstrip("/")
    return target.exists() and source.exists() and os.path.samefile(source, target)


def commit(
    folder: Location, manifest: Manifest, index: bytes, shards: Sequence[Path], replaces: Manifest | None = None
) -> None:
    """Atomically make `shards` (sealed, elsewhere in the folder), `index` and `manifest` the dataset.

    In object storage, `shards` are there already, and ConflictError is raised if the dataset is no longer `replaces`
    (None: there was none). Raises ConfigError for more shards than a manifest has room for.
    """
    data = manifest.to_bytes()
    if len(data) > MAX_MANIFEST:
        what, do = "too many shards for one cache", "set a larger cache.shard_size"
        raise ConfigError(what, where=folder, found=len(manifest.shards), do=do)
    if is_remote(folder):
        remote.commit(folder, manifest, index, replaces or Manifest.empty(manifest.format_version))
        return
    for path in shards:
        move(path, folder / path.name)  # synced with the rename of the index
    write_durably(pending_index(folder, manifest), index)
    write_durably(folder / MANIFEST_NAME, data)
    _finish_commit(folder)


def _finish_commit(folder: Path) -> None:
    """The steps after the commit point, also after a crash: rename the index and move replaced shards."""
    data = _read_manifest(folder)
    if data is None:
        return
    manifest = parse_manifest(data, str(folder / MANIFEST_NAME))
    pending = pending_index(folder, manifest)
    if pending.exists():
        for path in unlisted_shards(folder, manifest):
            make_folder(folder / REPLACED)
            with unless_in_use():  # if it stays, readers still find it, and `gc` removes it
                os.replace(path, folder / REPLACED / path.name)
                # A shard that came back is a link to that file: between links to one file, replace does nothing.
                path.unlink(missing_ok=True)
        if (folder / REPLACED).is_dir():
            sync_folder(folder / REPLACED)  # first: once the index has its name, nothing moves the shards any more
        with unless_in_use():  # `load` finds it under either name
            replace(pending, folder / INDEX_NAME)
        sync_folder(folder)


def unlisted_shards(folder: Folder, manifest: Manifest) -> list[Folder]:
    """Shards in the folder that are not in the manifest."""
    listed = {shard.name for shard in manifest.shards}
    shards = (path for path in folder.glob("*.tar") if SHARD_PATTERN.fullmatch(path.name))
    return sorted((path for path in shards if path.name not in listed), key=lambda path: path.name)


def pending_index(folder: Folder, manifest: Manifest) -> Folder:
    return folder / f"index-{manifest.index.xxh3_128}.parquet"


def leftovers(folder: Path, manifest: Manifest) -> list[Path]:
    """Every file of ours that the manifest does not need."""
    needed = _only_replaced(folder, manifest)
    hidden = [path for name in (STAGING, REPLACED) for path in sorted((folder / name).rglob("*")) if path.is_file()]
    temporary = [*folder.glob(".*.tmp"), *folder.glob(f"index-{'[0-9a-f]' * 32}.parquet")]
    return [*unlisted_shards(folder, manifest), *(path for path in hidden if path not in needed), *sorted(temporary)]


def garbage(folder: Path, manifest: Manifest) -> dict[Path, int]:
    """The bytes of every leftover, without those that a writer has just removed or renamed."""
    sizes = {}
    for path in leftovers(folder, manifest):
        with suppress(FileNotFoundError):
            sizes[path] = path.lstat().st_size
    return sizes


def _only_replaced(folder: Path, manifest: Manifest) -> set[Path]:
    """Shards of the dataset that exist only in `.replaced/`, where readers find them too."""
    return {folder / REPLACED / shard.name for shard in manifest.shards if not (folder / shard.name).is_file()}


def collect_garbage(folder: Path, *, dry_run: bool) -> dict[Path, int]:
    """Remove files that the dataset does not need, also those of abandoned builds; returns the files and their sizes.

    With `dry_run` nothing is removed. On Windows, files that a process has open stay until a later call.
    """
    if not folder.is_dir():
        raise NoCacheError("no such folder", where=folder)
    with writing(folder):
        data = _read_manifest(folder)
        manifest = parse_manifest(data, str(folder / MANIFEST_NAME)) if data else Manifest.empty(VERSIONS[-1])
        sizes = garbage(folder, manifest)
        if not dry_run:
            for path in sizes:
                with unless_in_use():
                    path.unlink()
            for path in filter(Path.is_file, _only_replaced(folder, manifest)):
                move(path, folder / path.name)
    return {path: size for path, size in sizes.items() if dry_run or not path.exists()}


def no_manifest(folder: Location) -> ManifestError:
    """The error for a folder without cache.json."""
    if is_remote(folder):
        return NoCacheError(f"no {MANIFEST_NAME} here: not a cache", where=folder, do="check the address")
    if not folder.is_dir():
        do = "give the folder of a cache; `qwen-cache build` makes one from images"
        return NoCacheError("no such folder", where=folder, do=do)
    if any((folder / STAGING).rglob("*.tar")):
        do = "run the same `qwen-cache build` again to continue"
        return NoCacheError("this cache is not finished", where=folder, do=do)
    do = "give the folder of a cache; `qwen-cache build` makes one from images"
    return NoCacheError(f"no {MANIFEST_NAME} here: not a cache", where=folder, do=do)


def _read_manifest(folder: Location) -> bytes | None:
    """The bytes of cache.json; None if there is none, ManifestError if it is larger than any."""
    try:
        return _read(folder / MANIFEST_NAME, MAX_MANIFEST)
    except TooLargeError:
        expected = f"at most {MAX_MANIFEST} bytes"
        where = folder / MANIFEST_NAME
        raise ManifestError("the manifest is too large", where=where, expected=expected) from None


def _map_index(path: Location, size: int) -> memoryview | None:
    """A file of `size` bytes, None if it does not exist; TooLargeError if it has more bytes."""
    if is_remote(path) and size <= LARGEST_IN_MEMORY:
        found = _read(path, size)
        return None if found is None else memoryview(found)
    try:
        if is_remote(path):
            return path.download(size) if path.size() in (size, None) else memoryview(b"")
        data = map_file(path)
    except FileNotFoundError:
        return None
    except NotAFileError as error:
        raise ManifestError(str(error.strerror), where=path) from None
    if data.nbytes > size:
        raise TooLargeError("the file is too large", where=path, expected=f"at most {size} bytes")
    return data


def _read(path: Location, most: int) -> bytes | None:
    """A file, None if it does not exist; TooLargeError if it has more than `most` bytes."""
    try:
        if is_remote(path):
            return path.read_bytes(most)
        if len(data := read_file(path, most + 1)) > most:
            raise TooLargeError("the file is too large", where=path, expected=f"at most {most} bytes")
        return data
    except FileNotFoundError:
        return None
    except NotAFileError as error:
        raise ManifestError(str(error.strerror), where=path) from None


# ---- mapped index ----------------------------------------------------------------------------------------------------
# The index of a cache as a table: a small one in memory, a large one mapped from a file.
#
# That file, in the user's cache folder, has the rows in Arrow's own format, so a process maps it and reads what it
# uses: ten million rows take hardly any memory of their own. Its name is the hash of index.parquet, so it is never
# stale; its own hash is checked whenever it is opened, and a damaged one is made again. Where it cannot be written, the
# index is read into memory. Files beyond `LIMIT` bytes in all are removed, the least recently used first.

ROWS_IN_MEMORY = 1 << 16  # rows; they take 80 MB
LIMIT = 40_000_000_000  # bytes of all files: three indexes of ten million rows
ABANDONED = 24 * 3600  # seconds after which a temporary file is that of a killed process
CHECKSUM = 16  # bytes of xxh3-128, at the end of a file
SUFFIX = ".arrow"


def load_index(folder: Location) -> tuple[Manifest, pa.Table]:
    """The manifest and the index that it names; FormatError if they are missing or invalid."""
    manifest, data = load(folder)
    return manifest, index_table(manifest, data, str(folder / INDEX_NAME))


def index_table(manifest: Manifest, data: bytes | memoryview, where: str) -> pa.Table:
    """The table of the index `data`, which is the one that `manifest` names; FormatError F7 if it cannot be read."""
    version, samples = manifest.format_version, manifest.index.samples
    try:
        path = cache_home() / "indexes" / f"{manifest.index.xxh3_128}-v{version}{SUFFIX}"
    except RuntimeError:  # a user without a home
        return read_index(data, version, where, samples)
    if samples <= ROWS_IN_MEMORY:
        return read_index(data, version, where, samples)
    table = _map_table(path, version)
    if table is None:
        schema, batches = read_batches(data, version, where, samples)
        try:
            _write(path, schema, batches)
            table = _map_table(path, version)
        except OSError:  # no space, or no right to write
            table = None
    return read_index(data, version, where, samples) if table is None else table


def _map_table(path: Path, format_version: int) -> pa.Table | None:
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
    if table.schema != index_schema(format_version, table.column_names):  # of another program version
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
