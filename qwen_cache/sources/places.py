"""The places of sources: folders, URLs, datasets of the hub, and the files that they name."""

from __future__ import annotations

import io
import os
import posixpath
import re
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from pathlib import Path, PureWindowsPath
from typing import Any, BinaryIO
from urllib.parse import unquote

import yaml

from qwen_cache.errors import QwenCacheError, SourceError, TooLargeError
from qwen_cache.extras import install_command
from qwen_cache.storage.bounds import WHOLE_FILE
from qwen_cache.storage.files import open_file
from qwen_cache.storage.remote import Location, Url, is_remote, location, refused_protocol
from qwen_cache.text import one_line

# ---- places ----------------------------------------------------------------------------------------------------------
# Files and folders, local or at any URL that fsspec reads.
#
# A local file is opened only if it is a regular one: a pipe or a device may never end. Links to folders are followed,
# except back into a folder that contains them.
#
# Paths in a table are relative to its folder. A local table may name any file and any URL; a remote one only its own
# server (on the Hugging Face hub: its own repository), and what `data.allow_urls` lists: never a file of this machine,
# a chain of addresses (`zip://a::…`), or, with the rights and from the network of whoever builds, another server.

Location = Location

IMAGE_EXTENSIONS = (
    *(".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".gif", ".heic", ".heif", ".hif", ".jxl"),
    *(".jpe", ".jfif", ".apng", ".ppm", ".pgm", ".pbm", ".pnm"),
)
OTHER_IMAGES = (
    *(".tga", ".psd", ".exr", ".hdr", ".jp2", ".j2k", ".jxr", ".dds", ".qoi", ".ico", ".icns", ".svg", ".eps", ".pdf"),
    *(".dng", ".cr2", ".cr3", ".nef", ".arw", ".raf", ".orf", ".rw2", ".xcf", ".kra", ".mov", ".mp4"),
)
"""Extensions of images, and files like them, that are not read."""

MAX_FILE = 1 << 31  # bytes read at once: an uncompressed image of the most pixels, 16 bits and alpha has 1.4 GB
MAX_NAME = 4096  # bytes of a path, URL or name in a tar: the limit of Linux
MAX_PATHS_TO_A_FOLDER = 100  # by links; links to links to links have more paths than anybody can read
PLAIN_PATH = re.compile(r"(?:[^/\\:.][^/\\:]*/)*[^/\\:.][^/\\:]*")
"""A relative path that every system and `Path` leave as it is: no empty, hidden or upward part, and no drive."""
FILE_URL = re.compile(r"[a-z][a-z0-9+.-]*://[^/]*/.")
"""A URL with a path: `https://x` alone would be split into a folder `https:/`, which is a local one."""


@lru_cache(1 << 12)
def _shared(text: str) -> str:
    """An equal text of an earlier row: rows about one image follow each other."""
    return text


class File:
    """An image in a file of its own. A local path is kept as text: a `Path` takes 300 bytes more."""

    __slots__ = ("_place",)

    def __init__(self, path: Location | str) -> None:
        """`path` as text is a local one, as `str(Path(…))` writes it."""
        self._place = path if isinstance(path, Url) else _shared(str(path))

    @property
    def local(self) -> str | None:
        """The path as text; None for a URL."""
        return self._place if isinstance(self._place, str) else None

    @property
    def path(self) -> Location:
        return Path(self._place) if isinstance(self._place, str) else self._place

    def __str__(self) -> str:
        return str(self._place)

    def __repr__(self) -> str:
        return f"File({self.path!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, File) and self._place == other._place

    def __hash__(self) -> int:
        return hash(self._place)

    @property
    def files(self) -> tuple[Location, ...]:
        return (self.path,)

    def read(self) -> bytes:
        return read_bytes(self.path)


def read_bytes(path: Location | str, limit: int = MAX_FILE) -> bytes:
    """The bytes of a file. SourceError if this file alone cannot be read, or has more bytes than `limit`; a server that
    does not answer stops all."""
    try:
        if isinstance(path, Url):
            return path.read_bytes(min(limit, WHOLE_FILE))
        with open_regular(path) as file:
            _check_size(os.fstat(file.fileno()).st_size, limit, path)
            return file.read()
    except FileNotFoundError as error:
        do = "put the file there, or correct the path (in a table it starts at the table's folder)"
        raise SourceError("the file does not exist", where=path, do=do) from error
    except OSError as error:
        raise SourceError("the file cannot be read", where=path, found=error.strerror, do="restore it") from error
    except TooLargeError as error:
        raise SourceError(error.what, where=path, expected=error.expected, found=error.found, do=error.do) from None
    except QwenCacheError as error:
        if isinstance(error.__cause__, PermissionError):  # S3 answers 403 for a missing file without the right to list
            what = "the file does not exist, or may not be read"
            raise SourceError(what, where=path, do="correct the path, or the rights") from error
        raise


def _check_size(size: int, limit: int, path: Location | str) -> None:
    if size > limit:
        expected, do = f"at most {limit} bytes", "name the right file, or leave it out"
        raise SourceError("the file is too large", where=path, expected=expected, found=size, do=do)


@contextmanager
def open_regular(path: Path | str) -> Iterator[BinaryIO]:
    """A local file, for reading; OSError for a folder, and for a pipe, a device or a socket, without waiting for it."""
    with open(open_file(path), "rb") as file:
        yield file


def read_range(path: Location, begin: int, end: int) -> bytes:
    """The bytes from `begin` to `end` of a file; SourceError if it has become shorter."""
    _check_size(end - begin, MAX_FILE, path)
    try:
        if is_remote(path):
            return path.read_range(begin, end)
        with open_regular(path) as file:
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
    return parent(path) / base_name(path) if is_remote(path) else path


def parent(path: Location) -> Location:
    """The folder of a file."""
    return Url(str(path).rpartition("/")[0]) if is_remote(path) else path.parent


def base_name(path: Location) -> str:
    return str(path).rstrip("/").rpartition("/")[2] if is_remote(path) else path.name


def suffix(path: Location) -> str:
    """`.csv`, in lower case."""
    return posixpath.splitext(base_name(path))[1].lower()


def overlooked(name: str) -> str:
    """A name without the differences that people overlook: capitals, composed accents, zeros before a number."""
    return re.sub(r"\d+", lambda match: match[0].lstrip("0") or "0", unicodedata.normalize("NFC", name).casefold())


def similar_file(path: str) -> str | None:
    """The file that a path which does not exist may stand for, if there is one.

    Written with backslashes, as part of an address (`%20`), with other capitals or accents, with another ending, or
    with the folders of another machine.
    """
    folder, name = os.path.split(path)
    slashes = path.replace("\\", "/")
    others = [slashes, unquote(path), unquote(slashes), os.path.join(folder, PureWindowsPath(name).name)]
    found = (_nearly(os.path.normpath(each)) for each in dict.fromkeys([path, *others]))
    return next((each for each in found if each and os.path.isfile(each)), None)


def _nearly(path: str) -> str | None:
    """The path, with each part that is not there as a name that is; None if there is none."""
    if os.path.exists(path):
        return path
    folder, name = os.path.split(path)
    there = _nearly(folder) if folder else "."
    if there is None or not os.path.isdir(there):
        return None
    names = _names(there, os.stat(there).st_mtime_ns)
    near = names.get(overlooked(name)) or names.get(overlooked(posixpath.splitext(name)[0]) + ".")
    return os.path.join(folder and there, near) if near else None


@lru_cache(4)
def _names(folder: str, _: int) -> dict[str, str]:
    """The names in a folder by what people do not overlook: whole, and without ending; as of its time of change."""
    try:
        names = sorted(os.listdir(folder))
    except OSError:
        return {}
    by_stem = {overlooked(posixpath.splitext(name)[0]) + ".": name for name in reversed(names)}
    return by_stem | {overlooked(name): name for name in reversed(names)}


def check_name(name: str, where: object) -> None:
    """SourceError for a name that is too long to be one."""
    if (length := len(name.encode("utf-8", "surrogatepass"))) > MAX_NAME:
        expected, do = f"at most {MAX_NAME} bytes", "correct it"
        raise SourceError("the name is too long", where=where, expected=expected, found=length, do=do)


@dataclass(frozen=True)
class TableFolder:
    """The folder of a table, which the paths in it start from."""

    path: Location
    allow_urls: tuple[str, ...] = ()
    """URLs that a remote table may name besides its own server: their first parts, up to a `/`."""

    def file(self, text: str) -> Location:
        """The file that `text` names; SourceError if the table may not name it."""
        check_name(text, self.path)
        if not is_remote(self.path):
            named = self._located(text) if "://" in text else Path(text)
            return file_at(named) if is_remote(named) else self.path / named
        # A server, a bucket, or a repository of the Hugging Face hub.
        parts = str(self.path).split("/")
        repository = 5 if parts[2:3] and parts[2] in ("datasets", "spaces", "buckets") else 4
        server = "/".join(parts[: repository if parts[0] == "hf:" else 3])
        if "::" in text:
            raise self._refusal("names a chain of addresses", text, "name the image itself, relative to the table")
        if any(_begins(text, allowed) for allowed in (server, *self.allow_urls)):
            return file_at(self._located(text))
        if text.startswith(("/", "\\", "file:", "local:")) or PureWindowsPath(text).is_absolute():
            raise self._refusal("names a file of this machine", text, "name it relative to the table")
        if "://" in text:
            other = "/".join(text.split("/", 3)[:3]) + "/"
            do = f"if you trust the table, allow it: --set 'data.allow_urls=[\"{other}\"]'"
            raise self._refusal("names another server than its own", text, do)
        if "::" in str(self.path):  # in an archive, below the table's folder
            return Url(str(self.path), posixpath.normpath(f"/{text}").lstrip("/"))
        inside = posixpath.normpath("/" + posixpath.join(str(self.path)[len(server) :].strip("/"), text))
        return file_at(Url(server + inside))

    def image(self, text: str) -> File:
        """An image that `text` names, as by `file`; a `Path` for each of a million would take most of the time."""
        if os.sep == "/" and not is_remote(self.path) and PLAIN_PATH.fullmatch(text) and len(text) <= MAX_NAME // 4:
            return File(os.path.join(self.path, text) if self.path.parts else text)
        return File(self.file(text))

    def _located(self, text: str) -> Location:
        if protocol := refused_protocol(text):
            raise SourceError(f"{protocol}:// is not supported", where=self.path, found=text, do="correct the address")
        return location(text)

    def _refusal(self, what: str, text: str, do: str) -> SourceError:
        return SourceError(f"a remote table {what}: {text}", where=self.path, do=do)

    def name(self, text: str) -> str:
        """The name of a sample whose target is `text`."""
        stem = posixpath.splitext(text)[0]
        if "://" in text:
            return stem.partition("://")[2]
        folder = self.path
        if os.sep == "/" and PLAIN_PATH.fullmatch(stem):
            return stem
        return posixpath.normpath(stem) if is_remote(folder) else os.path.relpath(folder / stem, folder)


def allowed_file(text: str, allowed: Iterable[str]) -> Location | None:
    """The file at an address that begins with one of `allowed`; None for other texts, and for a chain of addresses."""
    if "::" in text or len(text) > MAX_NAME or refused_protocol(text) or not any(_begins(text, it) for it in allowed):
        return None
    return file_at(location(text))


def _begins(url: str, allowed: str) -> bool:
    """True if a URL is below `allowed`. Up to a `/`, every program understands a URL as the same server."""
    below = url.startswith(allowed if allowed.endswith("/") else allowed + "/")
    return below and bool(FILE_URL.match(url)) and ".." not in re.split(r"[/\\]", unquote(url))


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
    if is_remote(path):
        return _remote_folder(path, probed)
    try:
        names = sorted(name for name in os.listdir(path) if not name.startswith("."))
    except OSError as error:
        raise SourceError("the folder cannot be read", where=path, found=error.strerror) from error
    folders = [name for name in names if (path / name).is_dir()]
    files = [name for name in names if name not in set(folders)]
    return Folder(path, files, folders, cache(lambda name: sorted(_walk(path / name, [] if name == "." else [path]))))


def _walk(folder: Path, above: Iterable[Path] = ()) -> Iterator[str]:
    """The files below a folder, by relative paths. Links to folders are followed, except into a folder that contains
    them, or that is one of `above`: its files have names without the link.
    """
    paths_to: Counter[tuple[int, int]] = Counter()
    waiting = [(folder, "", frozenset(map(_identity, above)))]
    while waiting:
        here, start, containing = waiting.pop()
        try:
            if (identity := _identity(here)) in containing:
                continue
            entries = list(os.scandir(here))
        except OSError as error:
            raise SourceError("the folder cannot be read", where=here, found=error.strerror) from error
        paths_to[identity] += 1
        if paths_to[identity] > MAX_PATHS_TO_A_FOLDER:
            what = f"links lead to this folder by more than {MAX_PATHS_TO_A_FOLDER} paths"
            raise SourceError(what, where=here, do="remove the links between folders")
        for entry in entries:
            name = entry.name
            if name[0] == ".":
                continue
            if _is_folder(entry):
                waiting.append((here / name, f"{start}{name}/", containing | {identity}))
            else:
                yield start + name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino


def _remote_folder(url: Url, probed: Iterable[str]) -> Folder:
    top = Url(str(url))
    try:
        listing = top.find()
    except FileNotFoundError:
        listing = {}
    paths = list(listing) or [name for name in probed if (url / name).is_file()]
    if not paths:
        do = "correct the address, or name a table (.csv, .jsonl, .json, .parquet): it needs no listing"
        raise SourceError("there is no such folder, or the server does not list it", where=url, do=do)
    for path in paths:
        check_name(path, url)
    visible = sorted(path for path in paths if not re.search(r"(^|/)\.", path))

    def below(name: str) -> list[str]:
        start = "" if name == "." else name + "/"
        return [path.removeprefix(start) for path in visible if path.startswith(start)]

    files = [path for path in visible if "/" not in path]
    folders = sorted({path.partition("/")[0] for path in visible if "/" in path})
    return Folder(replace(top, listing=listing), files, folders, below)


# ---- hub -------------------------------------------------------------------------------------------------------------
# Datasets on the Hugging Face hub by name: the files of one split, as `datasets` finds them.
#
# `hf://datasets/OWNER/NAME`, or with `@REVISION`. Configurations and splits are those of the dataset's page. Files are
# read from the commit that is found, by ranges, and none is downloaded first. `datasets` runs no code of a dataset, and
# refuses one that is a script; files outside the dataset's repository are refused here.

DATASET = re.compile(r"hf://datasets/((?:[\w.-]+/)?[\w.-]+)(?:@([^/]+))?/*")


def is_dataset(url: Url) -> bool:
    """True if an address names a dataset, and not a folder or a file in it."""
    return DATASET.fullmatch(str(url)) is not None


def dataset_files(url: Url, config_name: str | None) -> dict[str, list[Location]]:
    """The files of each split, in order; SourceError if there is no such dataset or configuration."""
    match = DATASET.fullmatch(str(url))
    assert match is not None
    by_split = _resolved(url, match[1], match[2], config_name)
    own = re.compile(rf"hf://datasets/{re.escape(match[1])}@[^/]+/(?!(.*/)?\.\.(/|$)).+")
    for name in (name for names in by_split.values() for name in names if not own.fullmatch(name)):
        do = "name the files that you want to read"
        raise SourceError("the dataset names a file outside its repository", where=url, found=name, do=do)
    return {split: [file_at(Url(name)) for name in names] for split, names in by_split.items()}


def _resolved(url: Url, name: str, revision: str | None, config_name: str | None) -> dict[str, list[str]]:
    """Addresses by split. The folder that `datasets` makes for its tables is not needed afterwards."""
    try:
        from datasets import load_dataset_builder
    except ImportError as error:
        what = "a dataset on the hub needs a package that is missing"
        raise QwenCacheError(what, where=url, found=error, do=install_command("hf")) from error
    remote = f"hf://datasets/{name}"  # so written, it is never a local folder of that name
    try:
        with tempfile.TemporaryDirectory() as folder:
            builder: Any = load_dataset_builder(remote, config_name, revision=revision, cache_dir=folder)
            return {str(split): list(map(str, files)) for split, files in (builder.config.data_files or {}).items()}
    except (ConnectionError, TimeoutError) as error:
        what, do = "asking the hub for the dataset failed", "check the connection, and run the same command again"
        raise QwenCacheError(what, where=url, found=_said(error), do=do) from error
    except (OSError, ValueError, RuntimeError, LookupError, TypeError, AttributeError, yaml.YAMLError) as error:
        do = "check the name; another configuration: --set data.config_name=NAME"
        raise SourceError("the dataset cannot be read", where=url, found=_said(error), do=do) from error


def _said(error: Exception) -> str:
    return one_line(str(error))[:300]
