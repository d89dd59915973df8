"""Files by URL: names, protocols, reading by ranges, and copies on a local disk."""

from __future__ import annotations

import mmap
import os
import re
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from errno import EINVAL
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, stop_after_delay, wait_random_exponential

from qwen_cache.errors import ConfigError, QwenCacheError, TooLargeError
from qwen_cache.extras import install_command
from qwen_cache.settings.sections import LOCAL_COPIES_SIZE, CacheConfig
from qwen_cache.storage import bounds
from qwen_cache.storage.files import LockHeldError, cache_home, locked, unless_in_use, write_at
from qwen_cache.text import one_line

if TYPE_CHECKING:
    from typing_extensions import TypeIs

# ---- protocols -------------------------------------------------------------------------------------------------------
# The protocols of URLs: servers of files, and archives of them. Others of fsspec are refused.
#
# fsspec knows protocols that run templates and name any file of this machine (`reference`), open local repositories
# (`git`, `dvc`), or hand the work to other programs (`dask`, `jupyter`). A URL is often copied from somewhere.

SERVERS = {
    *("http", "https", "webdav", "ftp", "sftp", "ssh", "smb"),
    *("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "ocilake", "oss", "tos", "tosfs"),
    *("hf", "hdfs", "webhdfs", "lakefs", "github", "gdrive", "dropbox", "box", "dbfs", "memory"),
}
ARCHIVES = {"zip", "tar"}
"""Around a file: `zip://images::https://example.com/a.zip`."""
LOCAL = {"file", "local"}


def refused_protocol(address: str) -> str | None:
    """The first protocol of a URL, or of a chain of them, that is not read; None if all are."""
    for part in address.split("::"):
        protocol, separator, _ = part.partition("://")
        if not separator:  # fsspec takes a single word for a protocol, and anything else for a local path
            protocol = part if re.fullmatch("[a-z]+", part) else "file"
        if protocol not in SERVERS | ARCHIVES | LOCAL:
            return protocol
    return None


# ---- url -------------------------------------------------------------------------------------------------------------
# Remote files by fsspec (s3://, gs://, hf://, https://, …), read by byte ranges, with retries.
#
# Nothing is written here: that is `storage/stores.py`. What a server may send and how long it may take is bounded:
# `storage/bounds.py`.

URL = re.compile(r"([a-z][a-z0-9+.-]*)(://|::)")
LIKE_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):/+")
"""With one slash or capital letters, which would be a local folder."""
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "hf": "hf"}
"""The extra of this package that a protocol needs."""
BLOCK = 8_000_000  # bytes per request: the most that a broken connection loses; under 0.1 s at 1 Gbit/s
ATTEMPTS = 5
FIRST_WAIT = 0.5  # the longest first wait in seconds; every failure doubles it: about four seconds in all
HTTP = ("http", "https")
FETCHERS = 16  # concurrent requests: at 100 ms each, 100 samples of 6 MB per second
GROUP = 8 * FETCHERS * BLOCK  # bytes: 1 GB

T = TypeVar("T")


@dataclass(frozen=True, order=True)
class Url:
    """An address below `root`, with the methods of `pathlib.Path` that reading a cache needs."""

    root: str
    path: str = ""
    listing: Mapping[str, str] = field(default_factory=dict, compare=False, repr=False)
    """Versions of the files below `root`, by path, where the folder has been listed. It stays in this process."""

    def __str__(self) -> str:
        return f"{self.root.rstrip('/')}/{self.path}" if self.path else self.root

    def __truediv__(self, part: str) -> Url:
        return replace(self, path=f"{self.path}/{part}" if self.path else part)

    def __reduce__(self) -> tuple[Any, ...]:
        return Url, (self.root, self.path)

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]

    def read_bytes(self, most: int = bounds.WHOLE_FILE) -> bytes:
        """The whole file. FileNotFoundError if it does not exist, TooLargeError if it has more than `most` bytes.

        A file of less than a block is read in one request.
        """
        step = min(BLOCK, most + 1)
        first: bytes = self.call(lambda files, path: _cat(files, path, 0, step), "reading")
        if len(first) < step:
            return first
        if len(first) > step:
            raise self._no_ranges(f"{step} bytes")
        size = self.size()
        if size is None:
            do = "copy it to a local disk, or to a server that does, such as nginx or S3"
            raise QwenCacheError("the server does not say how large the file is", where=self, do=do)
        if size > most:
            do = "copy it to a local disk, or check what wrote it"
            raise TooLargeError(
                "the file is too large", where=self, expected=f"at most {most} bytes", found=size, do=do
            )
        return first + self.read_range(step, size)

    def read_range(self, begin: int, end: int) -> bytes:
        """Bytes `begin` to `end`, by blocks: a broken connection loses only one of them."""
        return b"".join(self._read_block(start, min(start + BLOCK, end)) for start in range(begin, end, BLOCK))

    def _read_block(self, begin: int, end: int) -> bytes:
        def read(files: Any, path: str) -> bytes:
            data = _cat(files, path, begin, end)
            if len(data) < end - begin:
                raise EOFError(f"{len(data)} of {end - begin} bytes came")
            return data

        data = self.call(read, f"reading the bytes {begin} to {end}")
        if len(data) > end - begin:
            raise self._no_ranges(f"{end - begin} bytes")
        return data

    def _no_ranges(self, expected: str) -> QwenCacheError:
        return QwenCacheError(
            "the server does not answer requests for a range of bytes",
            where=self,
            expected=expected,
            found="more",
            do="copy the files to a local disk, or to a server that does, such as nginx or S3",
        )

    def require_ranges(self) -> None:
        """QwenCacheError if the server ignores byte ranges."""
        self.read_range(0, 1)

    def size(self) -> int | None:
        """The file's size in bytes, None if the server does not report it; FileNotFoundError if it does not exist."""

        def ask(files: Any, path: str) -> int | None:
            files.invalidate_cache()
            size: int | None = files.info(path, **_within(files, bounds.seconds_for(0))).get("size")
            return size

        return self.call(ask, "asking for its size")

    @property
    def listed(self) -> str:
        """The version of this file in the listing that the address comes from; "" if there is none."""
        return self.listing.get(self.path, "")

    def version(self) -> str:
        """A text that changes with the content of this file, from the listing or the server; "" if neither has one."""

        def ask(files: Any, path: str) -> str:
            files.invalidate_cache()
            return _version(files.info(path, **_within(files, bounds.seconds_for(0))))

        return self.listed or self.call(ask, "asking for its version")

    def is_file(self) -> bool:
        try:
            self.size()
        except FileNotFoundError:
            return False
        return True

    exists = is_file

    def glob(self, pattern: str) -> list[Url]:
        """The files in this folder that match `pattern`; none if the server does not list folders."""

        def ask(files: Any, path: str) -> list[str]:
            files.invalidate_cache()
            within = _within(files, bounds.PAGE_SECONDS)
            return [str(each).rstrip("/").rpartition("/")[2] for each in files.ls(path, detail=False, **within)]

        with suppress(FileNotFoundError, QwenCacheError):
            return [self / name for name in self.call(ask, "listing") if fnmatchcase(name, pattern)]
        return []

    def find(self, *, deep: bool = True) -> dict[str, str]:
        """The paths of all files below this folder, or only of those in it, with their versions ("" if unknown).

        FileNotFoundError or none if the server does not list them. TooLargeError for more names than fit into memory;
        servers of HTTP could list folders without end.
        """

        def ask(files: Any, path: str) -> dict[str, str]:
            files.invalidate_cache()
            top = path.rstrip("/")
            if "http" in ([files.protocol] if isinstance(files.protocol, str) else files.protocol):
                return {name.removeprefix(top + "/"): "" for name in _walk(files, top)}
            entries: Iterable[Any] = files.find(top, detail=True).values() if deep else files.ls(top, detail=True)
            found = ((str(each["name"]).removeprefix(top + "/"), each) for each in entries)
            return {name: _version(each) for name, each in found if each["type"] != "directory"}

        return self.call(ask, "listing")

    def download(self, size: int) -> memoryview:
        """The first `size` bytes, mapped from an unnamed file in the folder for temporary files (TMPDIR)."""
        if not size:  # the system refuses to map an empty file
            return memoryview(b"")
        with tempfile.TemporaryFile() as file, ThreadPoolExecutor(FETCHERS, "download") as pool:
            self.read_range(size - 1, size)  # the size is another's claim
            file.truncate(size)

            def fill(begin: int) -> None:
                write_at(file.fileno(), begin, self.read_range(begin, min(begin + BLOCK, size)))

            for group in range(0, size, GROUP):  # a pool keeps all that it was given
                for _ in pool.map(fill, range(group, min(group + GROUP, size), BLOCK)):
                    pass
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))

    def call(self, operation: Callable[[Any, str], T], what: str, patience: float = bounds.PATIENCE) -> T:
        """`operation(file system, path)`, retried after transient errors; FileNotFoundError is raised as it is.

        No attempt begins later than `patience` seconds after the first. The file system is looked up every time: fsspec
        caches one per process, so a fork gets its own connections.
        """
        from fsspec.core import url_to_fs

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS) | stop_after_delay(patience),
            wait=wait_random_exponential(FIRST_WAIT),
            retry=retry_if_exception(_is_transient),
            reraise=True,
        )

        def call() -> T:
            files, base = url_to_fs(self.root, **_options(self.root))
            try:
                return operation(files, f"{base.rstrip('/')}/{self.path}")
            except Exception as raised:
                if (error := _true_cause(raised)) is raised:
                    raise
                raise error from None

        try:
            return retrying(call)
        except (FileNotFoundError, QwenCacheError):
            raise
        except Exception as error:
            raise self._refusal(error, what, retrying.statistics["attempt_number"]) from error

    def _refusal(self, error: Exception, what: str, attempts: int) -> QwenCacheError:
        reason = one_line(f"{type(error).__name__}: {error}".removesuffix(": "))
        if isinstance(error, TimeoutError):
            reason = bounds.silence()
        protocol = self.root.partition(":")[0]
        if isinstance(error, ImportError):
            extra = EXTRAS.get(protocol)
            do = install_command(extra) if extra else "install what is missing"
            return QwenCacheError(f"{protocol}:// needs a package that is missing", where=self, found=reason, do=do)
        if isinstance(error, PermissionError) or _status(error) in (401, 403) or _is_about_credentials(error):
            do = "check credentials and address: many servers answer 403 for files that do not exist"
            return QwenCacheError(f"{what} is refused", where=self, found=reason, do=do)
        if _is_final(error):
            return QwenCacheError(f"{what} is not possible", where=self, found=reason, do="check the address")
        do = "check the connection and run the same command again; it keeps what is done"
        times = "once" if attempts == 1 else f"{attempts} times"
        return QwenCacheError(f"{what} failed {times}", where=self, found=reason, do=do)


def _options(address: str) -> dict[str, Any]:
    """fsspec's options for an address. They are part of its key for instances: other users of fsspec in this process
    keep theirs."""
    protocols = [protocol for protocol in HTTP if f"{protocol}://" in address]
    if not protocols:
        return {}
    from qwen_cache.storage.http_client import bounded_client

    return {protocol: {"get_client": bounded_client} for protocol in protocols}


def _within(files: Any, seconds: float) -> dict[str, float]:
    """The option that ends a call after `seconds`; file systems without asyncio have none."""
    from fsspec.asyn import AsyncFileSystem

    return {"timeout": seconds} if isinstance(files, AsyncFileSystem) else {}


def _cat(files: Any, path: str, begin: int, end: int) -> bytes:
    """The bytes from `begin` to `end`: fewer at the end of the file, one more from a server without ranges."""
    data: bytes = files.cat_file(path, start=begin, end=end, **_within(files, bounds.seconds_for(end - begin)))
    return data


def _version(info: Mapping[str, Any]) -> str:
    """A text that changes with the content of a file, by what the server says of it; "" if it says nothing of the kind.

    S3 and HTTP have an ETag, Google Cloud a generation, the hub a hash of the content. A weak ETag may stand for files
    that differ in bytes. The time is there for a file that was replaced while it was read and then restored.
    """
    etag = str(info.get("ETag") or info.get("etag") or "")
    marks = [info.get("generation"), info.get("blob_id"), info.get("xet_hash"), "" if etag.startswith("W/") else etag]
    if not any(marks):
        return ""
    times = [info.get("LastModified"), info.get("Last-Modified"), info.get("mtime")]
    return "|".join(str(each) for each in [info.get("size"), *marks, *times] if each)


def _walk(files: Any, top: str) -> Iterator[str]:
    """The files below `top`, by one page after the other; TooLargeError when all names together are too large."""
    folders, left = [top], bounds.LISTING
    while folders:
        folder = folders.pop()
        try:
            page = files.ls(folder, detail=True, **_within(files, bounds.PAGE_SECONDS))
        except FileNotFoundError:
            if folder == top:
                raise
            continue  # a link that leads nowhere
        for name, kind in ((str(each["name"]).rstrip("/"), each["type"]) for each in page):
            if (left := left - len(name)) < 0:
                do = "name a table (.csv, .jsonl, .json, .parquet): it needs no listing"
                what = "the listing of this folder is too large"
                raise TooLargeError(what, where=top, expected=f"at most {bounds.LISTING} bytes", do=do)
            if kind == "directory" and name != folder:
                folders.append(name)
            elif kind != "directory":
                yield name


def _is_transient(error: BaseException) -> bool:
    """True if another attempt may succeed."""
    return isinstance(error, Exception) and not isinstance(error, FileNotFoundError) and not _is_final(error)


def _is_final(error: Exception) -> bool:
    """True if another attempt cannot succeed."""
    kinds = (QwenCacheError, PermissionError, IsADirectoryError, NotADirectoryError, ImportError, ValueError, TypeError)
    status = _status(error)
    return (
        isinstance(error, (*kinds, NotImplementedError))
        or (status is not None and 400 <= status < 500 and status not in (408, 425, 429))
        or (isinstance(error, OSError) and error.errno == EINVAL)  # s3fs, for a request that S3 finds invalid
        or _is_about_credentials(error)
    )


def _true_cause(error: Exception) -> Exception:
    """The error itself, or the cause of a FileNotFoundError: fsspec raises that for unreachable HTTP servers too."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or not isinstance(cause, Exception):
        return error
    unreachable = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    return cause if unreachable or _status(cause) not in (None, 404, 410) else error


def _is_about_credentials(error: Exception) -> bool:
    """True if botocore or google.auth raised it; recognised by name, because they may not be installed."""
    return "Credentials" in type(error).__name__


def _status(error: Exception) -> int | None:
    """The HTTP status, from the attributes that fsspec's clients use."""
    named = ((error, "status"), (getattr(error, "response", None), "status_code"), (error, "code"))
    values = (getattr(where, name, None) for where, name in named)  # lazily: aiohttp warns about its own `code`
    return next((status for status in values if isinstance(status, int)), None)


Location = Path | Url
"""A file or folder on this machine, or behind an address."""


def is_remote(place: Location) -> TypeIs[Url]:
    """True for what is behind an address, False for what is on this machine."""
    return isinstance(place, Url)


def location(address: str | Location) -> Location:
    """An address as a local path (also for `file://`) or a URL; ConfigError for a protocol that is not read."""
    if not isinstance(address, str):
        return address
    match = URL.match(address)
    if not match and (scheme := LIKE_URL.match(address)) and scheme[1].lower() in SERVERS:
        correct = f"{scheme[1].lower()}://{address[scheme.end() :]}"
        do = f"write {correct}; a local folder of this name is ./{address}"
        raise ConfigError("nearly a URL", where=address, do=do)
    if match and match[1] in ("file", "local") and match[2] == "://":
        return Path(address[match.end() :])
    if match and (protocol := refused_protocol(address)):
        expected, do = "https, s3, gs, hf, …, or zip and tar around them", "copy the files to a disk or such a server"
        raise ConfigError("this protocol is not supported", where=address, expected=expected, found=protocol, do=do)
    return Url(address) if match else Path(address)


# ---- local copies ----------------------------------------------------------------------------------------------------
# Local copies of remote shards, bounded in size; the least recently used are removed first.
#
# A local copy is a sparse file that fills sample by sample, as samples are requested. There is no bookkeeping to get
# wrong: bytes are checked against the index before they are written and whenever they are read, so torn writes, killed
# processes and two processes that fill one file are harmless. No process shrinks a copy that another one may have
# mapped: the size that a manifest claims is part of the copy's name, so a false claim makes another file.

OPEN_COPIES = 64  # each holds two file descriptors; the usual limit is 1024
TOUCH_AFTER = 60.0  # seconds: the precision of "least recently used"
SUFFIX = ".part"
LOCK = ".lock"


@dataclass(frozen=True)
class LocalCopies:
    """The folder for copies of remote shards, and the bytes of disk space that they may take."""

    folder: Path
    size: int

    @classmethod
    def of(cls, folder: str | Path | None = None, size: int = LOCAL_COPIES_SIZE) -> LocalCopies:
        """Copies in `folder`, by default in the user's cache folder."""
        return cls(Path(folder).expanduser() if folder else cache_home() / "shards", size)

    @classmethod
    def of_settings(cls, config: CacheConfig) -> LocalCopies:
        """Copies as `cache.local_copies` and `cache.local_copies_size` say."""
        return cls.of(config.local_copies, config.local_copies_size)

    def open(self, name: str, size: int) -> Copy:
        """The copy of the shard `name` of `size` bytes; an empty one if there is none yet."""
        with _explained(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            return Copy(self.folder / f"{name}.{size}{SUFFIX}", size)

    def evict(self) -> None:
        """Remove the least recently used copies until they take 0.9 of the bound; one process at a time does this.

        Processes that read a removed copy are not disturbed; its disk space is freed when they close it. Windows keeps
        copies that a process has open, so there the copies may exceed the bound.
        """
        with suppress(LockHeldError), _explained(self.folder), locked(self.folder / LOCK):
            copies = [(path.stat(), path) for path in self.folder.glob(f"*{SUFFIX}")]
            total = sum(_disk_bytes(stat) for stat, _ in copies)
            for stat, path in sorted(copies, key=lambda each: each[0].st_mtime_ns):
                if total <= 0.9 * self.size:
                    break
                with unless_in_use():
                    path.unlink(missing_ok=True)
                    total -= _disk_bytes(stat)


class Copy:
    """A sparse file with the requested samples of a shard, and its mapping."""

    def __init__(self, path: Path, size: int) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644)
        weakref.finalize(self, os.close, self._file)
        if os.fstat(self._file).st_size < size:
            os.ftruncate(self._file, size)
        self.data = memoryview(mmap.mmap(self._file, size, access=mmap.ACCESS_COPY))
        self._touched = 0.0

    def has(self, offset: int) -> bool:
        """True if the first byte of the sample at `offset` has been written: cheap, and only a hint.

        A sample begins with a file name, so its first byte is not zero. Not read through the mapping where the system
        allows: in memory (tmpfs), that needs a page, and without space the process would end (SIGBUS).
        """
        first = os.pread(self._file, 1, offset) if hasattr(os, "pread") else self.data[offset : offset + 1]
        return any(first)

    def write(self, begin: int, data: memoryview) -> None:
        """Store a sample, its first byte last."""
        with _explained(self.path):
            write_at(self._file, begin + 1, data[1:])
            write_at(self._file, begin, data[:1])

    def is_removed(self) -> bool:
        return os.fstat(self._file).st_nlink == 0

    def touch(self) -> None:
        """Mark the copy as used."""
        if time.monotonic() - self._touched > TOUCH_AFTER:
            with suppress(FileNotFoundError):  # another process has removed it
                os.utime(self.path)
            self._touched = time.monotonic()


def _disk_bytes(stat: os.stat_result) -> int:
    """The disk space of a file: on Windows its whole length."""
    return stat.st_blocks * 512 if hasattr(stat, "st_blocks") else stat.st_size


@contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Turn a disk error into one that names the settings to change."""
    try:
        yield
    except OSError as error:
        raise QwenCacheError(
            "the local copy of a shard cannot be stored",
            where=path,
            found=error.strerror,
            do="set cache.local_copies to a folder on a disk with space, or lower cache.local_copies_size",
        ) from error
