"""Caches behind a URL: whatever fsspec reads (s3://, gs://, hf://, https://, …), by byte ranges, with local copies.

A local copy of a shard is a sparse file that fills sample by sample, as samples are asked for. It has no bookkeeping
that could be wrong: bytes enter it only with the hashes of the index, and are hashed again whenever they are read, so
a torn write, a killed process and two processes that fill one file are all harmless. Copies may take so much of the
disk and no more; the least recently used go first. Nothing is ever written to a URL.
"""

from __future__ import annotations

import mmap
import os
import random
import re
import tempfile
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from errno import EINVAL
from fnmatch import fnmatchcase
from itertools import count
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, TypeVar

from qwen_cache.format import directory
from qwen_cache.format.errors import ConfigError, DisagreementError, QwenCacheError, ShardError
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.shard import Entry, check_tensors
from qwen_cache.storage.durable import LockHeldError, cache_home, locked, unless_in_use

if TYPE_CHECKING:
    from qwen_cache.format.index import IndexRow

LOCAL_COPIES_SIZE = 100_000_000_000
URL = re.compile(r"([a-z][a-z0-9+.-]*)(://|::)")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "hf": "hf"}
"""What of `pip install 'qwen-cache[…]'` a protocol needs."""
BLOCK = 8_000_000  # of one request: what a broken connection costs at most, and 0.1 s of a 1 Gbit/s line
ATTEMPTS = 5
FIRST_WAIT = 0.25  # seconds, doubled by every failure: four seconds in all
FETCHERS = 16  # requests at once: at 100 ms each, 100 samples of 6 MB per 1 s
OPEN_COPIES = 64  # each holds two file descriptors; the usual limit is 1024
TOUCH_AFTER = 60.0  # seconds: how exactly "least recently used" is known
SUFFIX = ".part"
LOCK = ".lock"
WRITING = Lock()

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Url:
    """An address behind `root`. It has what reading a cache needs of `pathlib.Path`."""

    root: str
    path: str = ""

    def __str__(self) -> str:
        return f"{self.root.rstrip('/')}/{self.path}" if self.path else self.root

    def __truediv__(self, part: str) -> Url:
        return Url(self.root, f"{self.path}/{part}" if self.path else part)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def read_bytes(self) -> bytes:
        """The whole file; FileNotFoundError when there is none. Up to a block it is read at one moment."""
        first: bytes = self._call(lambda files, path: files.cat_file(path, start=0, end=BLOCK), "reading")
        rest = self.read_range(BLOCK, self.size() or BLOCK) if len(first) == BLOCK else b""
        return first + rest

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end`, by blocks: a connection that breaks loses one of them."""
        return b"".join(self._read_block(start, min(start + BLOCK, end)) for start in range(begin, end, BLOCK))

    def _read_block(self, begin: int, end: int) -> bytes:
        def read(files: Any, path: str) -> bytes:
            data: bytes = files.cat_file(path, start=begin, end=end)
            if len(data) < end - begin:
                raise EOFError(f"{len(data)} of {end - begin} bytes came")
            return data

        data = self._call(read, f"reading the bytes {begin} to {end}")
        if len(data) > end - begin:
            raise QwenCacheError(
                "the server does not answer requests for a range of bytes",
                where=self,
                expected=f"{end - begin} bytes",
                found=f"{len(data)} bytes",
                do="copy the cache to a local disk, or to a server that does, such as nginx or S3",
            )
        return data

    def require_ranges(self) -> None:
        """QwenCacheError where the server ignores ranges; asked of a small file, for it would send a whole shard."""
        (self / MANIFEST_NAME).read_range(0, 1)

    def size(self) -> int | None:
        """The bytes of the file, where the server says it; FileNotFoundError when there is none."""

        def ask(files: Any, path: str) -> int | None:
            files.invalidate_cache()
            size: int | None = files.info(path).get("size")
            return size

        return self._call(ask, "asking for its size")

    def is_file(self) -> bool:
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    def glob(self, pattern: str) -> list[Url]:
        """Files in this folder by name; none where the server does not list them."""

        def ask(files: Any, path: str) -> list[str]:
            files.invalidate_cache()
            return [str(found).rstrip("/").rpartition("/")[2] for found in files.ls(path, detail=False)]

        with suppress(FileNotFoundError, QwenCacheError):
            return [self / name for name in self._call(ask, "listing") if fnmatchcase(name, pattern)]
        return []

    def download(self, size: int) -> memoryview:
        """The first `size` bytes, mapped out of a file without a name in the folder for temporary files (TMPDIR)."""
        with tempfile.TemporaryFile() as file, ThreadPoolExecutor(FETCHERS, "download") as pool:
            file.truncate(size)

            def fill(begin: int) -> None:
                _write(file.fileno(), begin, self.read_range(begin, min(begin + BLOCK, size)))

            for _ in pool.map(fill, range(0, size, BLOCK)):
                pass
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))

    def _call(self, operation: Callable[[Any, str], T], what: str) -> T:
        """`operation(file system, path)`, again after what may pass; FileNotFoundError as it is.

        The file system is looked up every time: fsspec keeps one for each process, so a fork gets its own connections.
        """
        from fsspec.core import url_to_fs

        for attempt in count(1):
            try:
                files, base = url_to_fs(self.root)
                return operation(files, f"{base.rstrip('/')}/{self.path}")
            except Exception as raised:
                error = _true_cause(raised)
                if isinstance(error, FileNotFoundError):
                    raise
                if attempt == ATTEMPTS or _is_final(error):
                    raise self._refusal(error, what, attempt) from error
                time.sleep(FIRST_WAIT * 2 ** (attempt - 1) * random.uniform(0.5, 1.5))
        raise AssertionError("unreachable")

    def _refusal(self, error: Exception, what: str, attempts: int) -> QwenCacheError:
        reason = f"{type(error).__name__}: {error}".removesuffix(": ")
        protocol = self.root.partition(":")[0]
        if isinstance(error, ImportError):
            extra = EXTRAS.get(protocol)
            do = f"pip install 'qwen-cache[{extra}]'" if extra else "install what is missing"
            return QwenCacheError(f"{protocol}:// needs a package that is missing", where=self, found=reason, do=do)
        if isinstance(error, PermissionError) or _status(error) in (401, 403) or _is_about_credentials(error):
            do = "check the credentials, and that the address is right: many servers hide so what does not exist"
            return QwenCacheError(f"{what} is refused", where=self, found=reason, do=do)
        if _is_final(error):
            return QwenCacheError(f"{what} is not possible", where=self, found=reason, do="check the address")
        do = "check the connection; what has been fetched is kept, so the same command goes on from there"
        return QwenCacheError(f"{what} failed {attempts} times", where=self, found=reason, do=do)


def _is_final(error: Exception) -> bool:
    """Whether trying again cannot help."""
    kinds = (PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError, TypeError)
    status = _status(error)
    return (
        isinstance(error, (*kinds, NotImplementedError))
        or (status is not None and 400 <= status < 500 and status not in (408, 425, 429))
        or (isinstance(error, OSError) and error.errno == EINVAL)  # as s3fs calls a request that S3 finds invalid
        or _is_about_credentials(error)
    )


def _true_cause(error: Exception) -> Exception:
    """What is wrong when a file is said to be missing: fsspec's HTTP says so of a server that does not answer, too."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    unreachable = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return cause if unreachable or _status(cause) not in (None, 404, 410) else error


def _is_about_credentials(error: Exception) -> bool:
    """Of botocore or google.auth, which may not be installed."""
    return "Credentials" in type(error).__name__


def _status(error: Exception) -> int | None:
    """The HTTP status, by the names that the clients under fsspec give it."""
    named = ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code"))
    found = (getattr(where, name, None) for where, name in named)  # one by one: aiohttp warns of its own `code`
    return next((status for status in found if isinstance(status, int)), None)


def location(address: str | Path | Url) -> Path | Url:
    """Where an address leads: a local path (`file://` too), or a URL."""
    if not isinstance(address, str):
        return address
    match = URL.match(address)
    if match and match[1] in ("file", "local") and match[2] == "://":
        return Path(address[match.end() :])
    return Url(address) if match else Path(address)


def local_folder(address: str) -> Path:
    """A folder that can be written to; ConfigError when the address leads anywhere else."""
    folder = location(address)
    if isinstance(folder, Url):
        raise ConfigError(
            "a cache is built and changed on a local disk only",
            where=folder,
            do="do it in a local folder, and copy that: shards and index first, cache.json last",
        )
    return folder


@dataclass(frozen=True)
class LocalCopies:
    """Where copies of remote shards lie, and how many bytes of the disk they may take."""

    folder: Path
    size: int

    @classmethod
    def of(cls, folder: str | Path | None, size: int) -> LocalCopies:
        """In `folder`; by default in the user's cache folder."""
        return cls(Path(folder).expanduser() if folder else cache_home() / "shards", size)

    def open(self, name: str, size: int) -> Copy:
        """The copy of a shard; an empty one where there is none yet."""
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return Copy(self.folder / (name + SUFFIX), size)

    def evict(self) -> None:
        """Remove the least recently used copies, to a tenth below the bound; one process at a time does it.

        Who still reads a removed copy does so undisturbed; the disk gets its bytes back after that. Windows keeps the
        copies that a process has open, so there they may take more.
        """
        with suppress(LockHeldError), _explained(self.folder), locked(self.folder / LOCK):
            found = [(path.stat(), path) for path in self.folder.glob(f"*{SUFFIX}")]
            total = sum(_disk_bytes(stat) for stat, _ in found)
            for stat, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
                if total <= 0.9 * self.size:
                    break
                with unless_in_use():
                    path.unlink(missing_ok=True)
                    total -= _disk_bytes(stat)


class Copy:
    """A sparse file with the bytes of a shard that have been asked for, and its mapping."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        weakref.finalize(self, os.close, self._file)
        if os.fstat(self._file).st_size != size:
            os.ftruncate(self._file, size)
        self.data = memoryview(mmap.mmap(self._file, size, access=mmap.ACCESS_COPY))
        self._touched = 0.0

    def has(self, entry: Entry) -> bool:
        """Whether the first byte of a sample is there: cheaper than hashing zeros, and no more than a hint.

        A sample begins with the name of a file, so with no zero.
        """
        return any(self.data[entry.offset : entry.offset + 1])

    def write(self, begin: int, data: memoryview) -> None:
        """Store a sample, its first byte last."""
        with _explained(self.path):
            _write(self._file, begin + 1, data[1:])
            _write(self._file, begin, data[:1])

    def is_removed(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def touch(self) -> None:
        """Note that the copy is in use."""
        if time.monotonic() - self._touched > TOUCH_AFTER:
            with suppress(FileNotFoundError):  # another process has removed it
                os.utime(self.path)
            self._touched = time.monotonic()


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
        if not copy.has(row.entry):
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
            if not copy.has(row.entry):
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
            self.folder.require_ranges()
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


def _write(file: int, begin: int, data: bytes | memoryview) -> None:
    """Write at `begin`, from any number of threads."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, begin) if hasattr(os, "pwrite") else _write_there(file, begin, left)
        left, begin = left[written:], begin + written


def _write_there(file: int, begin: int, data: memoryview) -> int:
    """As `pwrite`, which Windows lacks; a fork, which could leave the lock to nobody, it lacks as well."""
    with WRITING:
        os.lseek(file, begin, os.SEEK_SET)
        return os.write(file, data)


def _disk_bytes(stat: os.stat_result) -> int:
    """What a file takes: on Windows all of its length."""
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Say of a disk's error which setting cures it."""
    try:
        yield
    except OSError as error:
        raise QwenCacheError(
            "the local copy of a shard cannot be kept",
            where=path,
            found=error.strerror,
            do="set cache.local_copies to a folder on a disk with room, or cache.local_copies_size to less",
        ) from error
