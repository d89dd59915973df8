"""Facts about many small files, remembered in the user's cache folder, so that unchanged files are not read again.

A file is looked up by its location and its version: on a disk its size, times and inode, on a server what a listing or
a request says. So a changed file is not found. A file that changed while it was read, or just before, is not remembered
(`storage/remembered.py`), and neither is one without a version.

Each source has one store, which holds what its last use needed and is always written whole. A store that is damaged or
of another kind is ignored; where none can be written, files are read each time. Stores beyond `LIMIT` bytes in all are
removed, the least recently used first.
"""

from __future__ import annotations

import os
import struct
import time
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import xxhash

from qwen_cache.errors import QwenCacheError
from qwen_cache.storage.durable import cache_home, sync, whole_file
from qwen_cache.storage.mapped import read_file
from qwen_cache.storage.remembered import file_state, is_settled, is_trusted
from qwen_cache.storage.url import Url

LIMIT = 2_000_000_000  # bytes of all stores: forty million images
LISTED = 100  # files in one remote folder: from here on a listing costs less than a request for each
CHECKSUM = 16  # bytes of xxh3-128, at the end of a store
ENTRY = struct.Struct("<16sI")  # which file, and the length of what is known of it


class RememberedFiles:
    """The known facts about files, from last time and from now; thread-safe."""

    def __init__(self, kind: str, store: Path | None = None) -> None:
        """`kind` names what is stored, with the versions of the code behind it. Without `store` nothing is kept."""
        self._header = f"{kind}\n".encode()
        self._store = store
        self._known = self._load() if is_trusted() else _Known()
        self._is_used = bytearray(len(self._known))
        self._new: dict[bytes, bytes] = {}
        self._versions: dict[Url, str] = {}

    @staticmethod
    def of(kind: str, place: Path | Url, detail: str = "") -> RememberedFiles:
        """The files of a place, such as a source; `detail` separates parts of it."""
        text = "\0".join([kind, str(place) if isinstance(place, Url) else os.path.realpath(place), detail])
        try:
            store = cache_home() / "files" / xxhash.xxh3_128_hexdigest(text.encode("utf-8", "surrogateescape"))
        except RuntimeError:  # a user without a home
            store = None
        return RememberedFiles(kind, store)

    @contextmanager
    def saved(self) -> Iterator[None]:
        """Store what is used inside the block; if it ends with an error, keep what was known too."""
        try:
            yield
        except BaseException:
            self._is_used[:] = bytes([True]) * len(self._known)
            self._save()
            raise
        self._save()

    def read(self, role: str, place: str, files: Sequence[Path | Url], read: Callable[[], bytes]) -> bytes:
        """What `read` returns for `place` in `files`, or what it returned last time if none of them has changed."""
        name, settled = self.name(role, place, files)
        data = self.recall(name) if name else None
        if data is None:
            data = read()
            if not settled or self.name(role, place, files)[0] != name:
                return data
        if name:
            self.keep(name, data)
        return data

    def recall(self, name: bytes) -> bytes | None:
        """What is known by this name."""
        position = self._known.find(name)
        return None if position is None else self._known.value(position)

    def keep(self, name: bytes, value: bytes) -> None:
        position = self._known.find(name)
        if position is not None and self._known.value(position) == value:
            self._is_used[position] = True
        else:
            self._new[name] = value

    def name(self, role: str, place: str, files: Iterable[Path | Url]) -> tuple[bytes | None, bool]:
        """The name of what is read at `place` from `files` as they are now, and whether all of them are settled.

        The name is None if there is no file, or if one has no version.
        """
        versions: list[object] = []
        settled, now = True, time.time_ns()
        for file in files:
            if isinstance(file, Url):
                versions.append(self._version(file))
            else:
                try:
                    state = file_state(file)
                except OSError:  # reading it says what is wrong
                    return None, False
                versions.append(state)
                settled, place = settled and is_settled(state, now), os.path.join(os.getcwd(), place)
        if not all(versions) or not versions:
            return None, False
        return xxhash.xxh3_128_digest(f"{role}\0{place}\0{versions}".encode("utf-8", "surrogateescape")), settled

    def list_folders(self, urls: Iterable[Url]) -> None:
        """List each remote folder with many of these files, unless their versions are from a listing already."""
        folders: dict[str, set[Url]] = defaultdict(set)
        for url in urls:
            if not url.listed:
                folders[str(url).rpartition("/")[0]].add(url)
        for folder, files in folders.items():
            if len(files) >= LISTED:
                with suppress(QwenCacheError, FileNotFoundError):
                    listing = Url(folder).find(deep=False)
                    self._versions |= {each: listing.get(str(each).rpartition("/")[2], "") for each in files}

    def _version(self, url: Url) -> str:
        """The version of a remote file, asked for once; "" if there is none."""
        if url not in self._versions:
            try:
                self._versions[url] = url.version()
            except (FileNotFoundError, QwenCacheError):  # reading it says what is wrong
                self._versions[url] = ""
        return self._versions[url]

    def _load(self) -> _Known:
        """The contents of the store; nothing if it is missing, damaged, or of another kind."""
        with suppress(OSError, struct.error):
            if self._store is None or self._store.stat().st_size > LIMIT:
                return _Known()
            data = read_file(self._store)
            end = len(data) - CHECKSUM
            if data.startswith(self._header) and xxhash.xxh3_128_digest(data[:end]) == data[end:]:
                return _Known(data, len(self._header), end)
        return _Known()

    def _save(self) -> None:
        """Write the store if it changes; a folder that cannot be written to only costs time."""
        if self._store is None or not (self._new or self._known):
            return
        with suppress(OSError):
            if not self._new and all(self._is_used) and self._store.exists():
                os.utime(self._store)
                return
            self._store.parent.mkdir(parents=True, exist_ok=True)
            with whole_file(self._store, shared=True) as temporary, open(temporary, "wb") as file:
                checksum = xxhash.xxh3_128()
                for piece in self._pieces():
                    checksum.update(piece)
                    file.write(piece)
                file.write(checksum.digest())
                file.flush()
                sync(file)
            _remove_oldest(self._store.parent)

    def _pieces(self) -> Iterator[bytes]:
        """The bytes of the store, without its checksum."""
        yield self._header
        for position, is_used in enumerate(self._is_used):
            if is_used and (name := self._known.name(position)) not in self._new:
                value = self._known.value(position)
                yield ENTRY.pack(name, len(value)) + value
        for name, value in self._new.items():
            yield ENTRY.pack(name, len(value)) + value


class _Known:
    """The entries of a store by name: 16 bytes each beside the bytes of the store, where a dict takes 300."""

    def __init__(self, data: bytes = b"", begin: int = 0, end: int = 0) -> None:
        places = array("Q")
        while begin < end:
            places.append(begin)
            begin += ENTRY.size + ENTRY.unpack_from(data, begin)[1]
        self._data, names = data, array("Q", (_first_half(data, place) for place in places))
        order = np.argsort(np.frombuffer(names, np.uint64), kind="stable")
        self._halves = array("Q", np.frombuffer(names, np.uint64)[order].tobytes())
        self._places = array("Q", np.frombuffer(places, np.uint64)[order].tobytes())

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: bytes) -> int | None:
        """The position of a name."""
        half = _first_half(name, 0)
        position = bisect_left(self._halves, half)
        while position < len(self) and self._halves[position] == half:
            if self.name(position) == name:
                return position
            position += 1
        return None

    def name(self, position: int) -> bytes:
        name: bytes = ENTRY.unpack_from(self._data, self._places[position])[0]
        return name

    def value(self, position: int) -> bytes:
        place = self._places[position]
        begin = place + ENTRY.size
        return self._data[begin : begin + ENTRY.unpack_from(self._data, place)[1]]


def _first_half(data: bytes, begin: int) -> int:
    return int.from_bytes(data[begin : begin + 8], "big")


def _remove_oldest(folder: Path) -> None:
    """Remove the least recently used stores, until all have at most LIMIT bytes."""
    files = sorted(((status := path.stat()).st_mtime_ns, status.st_size, path) for path in folder.iterdir())
    too_much = sum(size for _, size, _ in files) - LIMIT
    for _, size, path in files:
        if too_much > 0:
            path.unlink()
            too_much -= size
