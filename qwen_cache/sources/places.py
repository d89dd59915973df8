"""Files and folders, local or at any URL that fsspec reads.

Paths in a table are relative to its folder. A remote table may name other URLs, but no file of this machine.
"""

from __future__ import annotations

import io
import os
import posixpath
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import QwenCacheError, SourceError
from qwen_cache.storage.url import Url, location

Location = Path | Url


@dataclass(frozen=True)
class File:
    """An image in a file of its own."""

    path: Location

    def __str__(self) -> str:
        return str(self.path)

    def read(self) -> bytes:
        return read_bytes(self.path)


def read_bytes(path: Location) -> bytes:
    """The bytes of a file. SourceError if this file alone cannot be read; a server that does not answer stops all."""
    try:
        return path.read_bytes()
    except FileNotFoundError as error:
        do = "put the file there, or correct the path (in a table it starts at the table's folder)"
        raise SourceError("the file does not exist", where=path, do=do) from error
    except OSError as error:
        raise SourceError("the file cannot be read", where=path, found=error.strerror, do="restore it") from error
    except QwenCacheError as error:
        if isinstance(error.__cause__, PermissionError):  # S3 answers 403 for a missing file without the right to list
            what = "the file does not exist, or may not be read"
            raise SourceError(what, where=path, do="correct the path, or the rights") from error
        raise


def read_range(path: Location, begin: int, end: int) -> bytes:
    """The bytes from `begin` to `end` of a file; SourceError if it has become shorter."""
    try:
        if isinstance(path, Url):
            return path.read_range(begin, end)
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
    except OSError as error:
        raise SourceError("the file cannot be read", where=path, found=error.strerror, do="restore it") from error
    if len(data) < end - begin:
        raise SourceError("the file is shorter than it was", where=path, do="restore it, and build again")
    return data


class RangeFile(io.RawIOBase):
    """A remote file with random access by byte ranges."""

    def __init__(self, url: Url) -> None:
        size = url.size()
        if size is None:
            raise SourceError("the server does not say how large the file is", where=url, do="copy it to a disk")
        self.url, self.length, self.position = url, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def readinto(self, buffer: Any) -> int:
        end = min(self.position + len(buffer), self.length)
        data = self.url.read_range(self.position, end) if self.position < end else b""
        buffer[: len(data)] = data
        self.position += len(data)
        return len(data)


def file_at(path: Location) -> Location:
    """A file as a name in its folder; a URL without a name would be queried with a trailing slash."""
    return path if isinstance(path, Path) else parent(path) / base_name(path)


def parent(path: Location) -> Location:
    """The folder of a file."""
    return path.parent if isinstance(path, Path) else Url(str(path).rpartition("/")[0])


def base_name(path: Location) -> str:
    return path.name if isinstance(path, Path) else str(path).rstrip("/").rpartition("/")[2]


def suffix(path: Location) -> str:
    """`.csv`, in lower case."""
    return posixpath.splitext(base_name(path))[1].lower()


def resolve(folder: Location, text: str) -> Location:
    """The file that `text` names in a table in `folder`."""
    if isinstance(folder, Path) and "://" not in text:
        return folder / text
    named = location(text) if "://" in text else Path(text)
    if isinstance(named, Url):
        return file_at(named)
    if named.is_absolute():
        raise SourceError(
            f"a remote table names a file of this machine: {text}",
            where=folder,
            do="name it relative to the table",
        )
    protocol, _, path = str(folder).partition("://")
    return file_at(Url(f"{protocol}://{posixpath.normpath(posixpath.join(path, text))}"))


def name_in(folder: Location, text: str) -> str:
    """The name of a sample whose target is `text` in a table in `folder`."""
    stem = posixpath.splitext(text)[0]
    if "://" in text:
        return stem.partition("://")[2]
    return os.path.relpath(folder / stem, folder) if isinstance(folder, Path) else posixpath.normpath(stem)


@dataclass(frozen=True)
class Folder:
    """A folder and its contents, without hidden files."""

    path: Location
    files: list[str]
    folders: list[str]
    below: Callable[[str], list[str]]
    """The files below one of its folders, or below itself (`.`), as sorted relative paths."""

    def having(self, ending: str) -> list[Location]:
        """The files directly in it with this ending."""
        return [self.path / name for name in self.files if name.lower().endswith(ending)]


def open_folder(path: Location, probed: Iterable[str] = ()) -> Folder:
    """The folder at `path`; SourceError if there is none. If a server lists nothing, the files `probed` are tried."""
    if isinstance(path, Url):
        return _remote_folder(path, probed)
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise SourceError("the folder cannot be read", where=path, found=error.strerror) from error
    folders = [name for name in names if (path / name).is_dir()]
    files = [name for name in names if name not in set(folders)]
    return Folder(path, files, folders, lambda name: sorted(_walk(path / name)))


def _walk(folder: Path) -> Iterator[str]:
    def refuse(error: OSError) -> None:
        raise SourceError("the folder cannot be read", where=error.filename, found=error.strerror) from error

    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith("."):
                yield Path(root, name).relative_to(folder).as_posix()


class _ListingUrl(Url):
    """A URL whose server lists its files."""

    def find(self) -> list[str]:
        def ask(files: Any, path: str) -> list[str]:
            files.invalidate_cache()
            start = path.rstrip("/") + "/"
            return [str(name).removeprefix(start) for name in files.find(path.rstrip("/"))]

        return self._call(ask, "listing")


def _remote_folder(url: Url, probed: Iterable[str]) -> Folder:
    try:
        paths = _ListingUrl(str(url)).find()
    except FileNotFoundError:
        paths = []
    paths = paths or [name for name in probed if (url / name).is_file()]
    if not paths:
        do = "correct the address, or name a table (.csv, .jsonl, .json, .parquet): it needs no listing"
        raise SourceError("there is no such folder, or the server does not list it", where=url, do=do)
    visible = sorted(path for path in paths if not re.search(r"(^|/)\.", path))

    def below(name: str) -> list[str]:
        start = "" if name == "." else name + "/"
        return [path.removeprefix(start) for path in visible if path.startswith(start)]

    files = [path for path in visible if "/" not in path]
    return Folder(url, files, sorted({path.partition("/")[0] for path in visible if "/" in path}), below)
