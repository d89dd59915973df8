"""Remote files: whatever fsspec reads (s3://, gs://, hf://, https://, …), by byte ranges, with retries.

Nothing is ever written to a URL.
"""

from __future__ import annotations

import mmap
import re
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from errno import EINVAL
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_random_exponential

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.storage.durable import write_at

URL = re.compile(r"([a-z][a-z0-9+.-]*)(://|::)")
EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "http": "http", "https": "http", "hf": "hf"}
"""What of `pip install 'qwen-cache[…]'` a protocol needs."""
BLOCK = 8_000_000  # of one request: what a broken connection costs at most, and 0.1 s of a 1 Gbit/s line
ATTEMPTS = 5
FIRST_WAIT = 0.5  # seconds at most, doubled by every failure: four seconds in all on average
FETCHERS = 16  # requests at once: at 100 ms each, 100 samples of 6 MB per 1 s

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
        """QwenCacheError where the server ignores ranges."""
        self.read_range(0, 1)

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
                write_at(file.fileno(), begin, self.read_range(begin, min(begin + BLOCK, size)))

            for _ in pool.map(fill, range(0, size, BLOCK)):
                pass
            return memoryview(mmap.mmap(file.fileno(), size, access=mmap.ACCESS_COPY))

    def _call(self, operation: Callable[[Any, str], T], what: str) -> T:
        """`operation(file system, path)`, repeated after errors that may pass; FileNotFoundError as it is.

        The file system is looked up every time: fsspec keeps one for each process, so a fork gets its own connections.
        """
        from fsspec.core import url_to_fs

        retrying = Retrying(
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_random_exponential(FIRST_WAIT),
            retry=retry_if_exception(_may_pass),
            reraise=True,
        )

        def call() -> T:
            files, base = url_to_fs(self.root)
            try:
                return operation(files, f"{base.rstrip('/')}/{self.path}")
            except Exception as raised:
                if (error := _true_cause(raised)) is raised:
                    raise
                raise error from None

        try:
            return retrying(call)
        except FileNotFoundError:
            raise
        except Exception as error:
            raise self._refusal(error, what, retrying.statistics["attempt_number"]) from error

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


def _may_pass(error: BaseException) -> bool:
    """Whether the operation is worth another attempt."""
    return isinstance(error, Exception) and not isinstance(error, FileNotFoundError) and not _is_final(error)


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
