"""The memory between commands, in the user's cache folder: digests of files, checksums of weights."""

from __future__ import annotations

import json
import os
import struct
import time
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import xxhash

from qwen_cache.errors import QwenCacheError
from qwen_cache.storage.files import cache_home, open_file, read_file, sync, whole_file, write_durably
from qwen_cache.storage.remote import Location, Url, is_remote
from qwen_cache.terminal import naming
from qwen_cache.text import RepeatedKeyError, parse_json

# ---- remembered ------------------------------------------------------------------------------------------------------
# Digests of large files, remembered in the user's cache folder, so that an unchanged file is not read again.
#
# A file counts as unchanged while its path, size, times of modification and change, and inode are: an archive or a copy
# can set the first time, but no program the second (it takes setting the clock, or writing to the disk itself). A file
# that was modified in the last seconds before it was read is not remembered: another change in the same tick of its
# clock would not show. The device number is left out: it differs between machines that share a network disk. Where
# nothing can be remembered, digests are computed each time; a damaged entry is computed again. A bit that flips on the
# disk changes none of a file's times, so it shows only when the file is read again.

BLOCK = 1 << 20  # bytes; larger blocks are not hashed faster
SETTLED_NS = 2_000_000_000  # the coarsest clock of a common file system, FAT's, ticks every 2 seconds

_distrusted = ContextVar("_distrusted", default=False)


@contextmanager
def rehashing(on: bool = True) -> Iterator[None]:
    """If `on`, ignore what was remembered inside the block, and remember what is computed instead."""
    token = _distrusted.set(on)
    try:
        yield
    finally:
        _distrusted.reset(token)


def is_trusted() -> bool:
    """True if this is outside of `rehashing`."""
    return not _distrusted.get()


def remembered_digest(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """`file_digest`, remembered; `on_bytes` is called only if the file is read."""
    return remembered("xxh3-128", [path], lambda: file_digest(path, on_bytes))


def known_digest(path: Path) -> str:
    """`remembered_digest` of a file that is not read: empty if the digest of its contents is not remembered."""
    return remembered("xxh3-128", [path], lambda: "")


def file_digest(path: Path, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """The xxh3-128 of a regular file, as 32 hexadecimal digits; `on_bytes` gets the number of bytes just read."""
    digest = xxhash.xxh3_128()
    with naming(path), open(open_file(path), "rb", buffering=0) as file:
        update_from(file, digest, on_bytes)
    return digest.hexdigest()


def update_from(file: IO[bytes], digest: xxhash.xxh3_128, on_bytes: Callable[[int], None] = lambda _: None) -> None:
    """Add the rest of an open file to `digest`."""
    block = memoryview(bytearray(BLOCK))
    while count := file.readinto(block):  # type: ignore[attr-defined]  # files in binary mode have it
        digest.update(block[:count])
        on_bytes(count)


def remembered(kind: str, files: Sequence[Path], compute: Callable[[], str]) -> str:
    """The digest of these files' contents that `compute` returns; if none has changed, the one of last time.

    `kind` names the function of the contents. Any number of processes may ask at once. An empty digest is not
    remembered. Raises what `compute` raises, and OSError for a missing file.
    """
    states, now = [file_state(path) for path in files], time.time_ns()
    name = xxhash.xxh3_128_hexdigest(json.dumps([kind, *(str(path.resolve()) for path in files)]).encode())
    with suppress(OSError, ValueError, KeyError, TypeError, RuntimeError):
        known = json.loads(_entry(name).read_text(encoding="utf-8"))
        if is_trusted() and known == _checked(states, known["digest"]):
            return str(known["digest"])
    digest = compute()
    settled = all(is_settled(state, now) for state in states)
    if digest and settled and states == [file_state(path) for path in files]:
        with suppress(OSError, RuntimeError):  # no folder, or none that can be written to, costs time alone
            write_entry(_entry(name), _checked(states, digest))
    return digest


def _checked(states: list[list[int]], digest: str) -> dict[str, object]:
    return with_checksum({"files": states, "digest": digest})


def with_checksum(entry: dict[str, Any]) -> dict[str, Any]:
    """An entry with the hash of all that it has."""
    return entry | {"xxh3_128": xxhash.xxh3_128_hexdigest(json.dumps(entry).encode())}


def write_entry(path: Path, entry: dict[str, Any]) -> None:
    """Write an entry as a whole, also where other processes write the same one; OSError if that is not possible."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(path, shared=True) as temporary, open(temporary, "wb") as file:
        file.write(json.dumps(entry).encode())
        file.flush()
        sync(file)


def file_state(path: Path) -> list[int]:
    """The state that every change of a file changes: its size, times of modification and change in ns, and inode."""
    stat = os.stat(path)
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]


def is_settled(state: list[int], now: int) -> bool:
    """True if a file of this state was last changed long enough before `now` (ns) that another change would show."""
    return max(state[1:3]) + SETTLED_NS < now


def _entry(name: str) -> Path:
    """RuntimeError for a user without a home."""
    return cache_home() / "digests" / f"{name}.json"


# ---- remembered files ------------------------------------------------------------------------------------------------
# Facts about many small files, remembered in the user's cache folder, so that unchanged files are not read again.
#
# A file is looked up by its location and its version: on a disk its size, times and inode, on a server what a listing
# or a request says. So a changed file is not found. A file that changed while it was read, or just before, is not
# remembered (`storage/remembered.py`), and neither is one without a version.
#
# Each source has one store, which holds what its last use needed and is always written whole. A store that is damaged
# or of another kind is ignored; where none can be written, files are read each time. Stores beyond `LIMIT` bytes in all
# are removed, the least recently used first.

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
    def of(kind: str, place: Location, detail: str = "") -> RememberedFiles:
        """The files of a place, such as a source; `detail` separates parts of it."""
        text = "\0".join([kind, str(place) if is_remote(place) else os.path.realpath(place), detail])
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

    def read(self, role: str, place: str, files: Sequence[Location], read: Callable[[], bytes]) -> bytes:
        """The bytes that `read` returns for `place` in `files`, or returned last time if none of them has changed."""
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
        """The value known by this name."""
        position = self._known.find(name)
        return None if position is None else self._known.value(position)

    def keep(self, name: bytes, value: bytes) -> None:
        position = self._known.find(name)
        if position is not None and self._known.value(position) == value:
            self._is_used[position] = True
        else:
            self._new[name] = value

    def name(self, role: str, place: str, files: Iterable[Location]) -> tuple[bytes | None, bool]:
        """The name of what is read at `place` from `files` as they are now, and whether all of them are settled.

        The name is None if there is no file, or if one has no version.
        """
        versions: list[object] = []
        settled, now = True, time.time_ns()
        for file in files:
            if is_remote(file):
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


# ---- checksums -------------------------------------------------------------------------------------------------------
# Checksums of files that this project writes and reads again: one list for a folder, or an entry in one file.
#
# A folder has `checksums.json`: size and xxh3-128 of all its files, and the hash of its own bytes. A safetensors file
# that is used on its own has its hash in its header, as `qwen_cache.xxh3_128` in `__metadata__`, which other programs
# ignore. In both, the digits of a file's own hash count as zeros. Found: a changed byte, a missing file, an additional
# file that a loader would read. Not found: forgery, and changes of a safetensors file without that entry.

NAME = "checksums.json"
KEY = "qwen_cache.xxh3_128"
ZEROS = "0" * 32
"""In place of the digits of a file's own hash while it is hashed."""
LOADED = (".safetensors", ".json")
"""Endings of the files that loaders look for in a folder."""
LONGEST_HEADER = 100_000_000  # bytes, as in the safetensors library
CHANGED = "this file was changed after it was written"
UNLISTED = f"{NAME} does not list this file"
RESTORE = f"restore it from a copy; if another program changed it on purpose, delete {KEY} from its metadata"


@dataclass(frozen=True)
class Fault:
    """A fault of a file in a folder."""

    what: str
    where: Path
    expected: str | None = None
    found: str | None = None

    def error(self, kind: type[QwenCacheError], do: str) -> QwenCacheError:
        return kind(self.what, where=self.where, expected=self.expected, found=self.found, do=do)


# ---- a file's own hash -----------------------------------------------------------------------------------------------


def with_own_hash(text: str) -> bytes:
    """The file of `text`, whose last 32 zeros become the xxh3-128 of the file with these zeros."""
    before, _, after = text.rpartition(ZEROS)
    return f"{before}{xxhash.xxh3_128_hexdigest(text.encode())}{after}".encode()


def own_hash(data: bytes, claimed: str) -> str:
    """The hash that a file of `with_own_hash` must contain: that of its bytes with the last `claimed` as zeros."""
    before, _, after = data.rpartition(claimed.encode())
    return xxhash.xxh3_128_hexdigest(before + ZEROS.encode() + after)


# ---- folders ---------------------------------------------------------------------------------------------------------


def write_checksums(folder: Path) -> None:
    """Write `checksums.json` for all files of `folder`, which must be complete."""
    files = {
        name: {"bytes": path.stat().st_size, "xxh3_128": file_digest(path)} for name, path in _files(folder).items()
    }
    text = json.dumps({"files": files, "xxh3_128": ZEROS}, indent=1, sort_keys=True) + "\n"
    write_durably(folder / NAME, with_own_hash(text))


def find_fault(folder: Path, digest: Callable[[Path], str] = file_digest) -> Fault | None:
    """The first fault of a folder with `checksums.json`, or None; `digest` returns the xxh3-128 of a file."""
    path = folder / NAME
    try:
        data = read_file(path)
        listed = parse_json(data)
        claimed = str(listed["xxh3_128"])
        if (found := own_hash(data, claimed)) != claimed:
            return Fault(CHANGED, path, f"xxh3-128 {claimed}", found)
        expected = {name: (entry["bytes"], entry["xxh3_128"]) for name, entry in listed["files"].items()}
        here = _files(folder)
        for name in sorted(expected.keys() - here.keys()):
            return Fault("a file is missing", folder / name)
        for name in sorted(here.keys() - expected):
            if name.endswith(LOADED):
                return Fault(UNLISTED, here[name])
        for name, (size, claimed) in expected.items():
            if (found_size := here[name].stat().st_size) != size:
                return Fault(CHANGED, here[name], f"{size} bytes", f"{found_size}")
            if (found := digest(here[name])) != claimed:
                return Fault(CHANGED, here[name], f"xxh3-128 {claimed}", found)
        return None
    except FileNotFoundError as error:
        return Fault("a file is missing", Path(error.filename or path))
    except OSError as error:
        return Fault(f"this file cannot be read: {error.strerror}", Path(error.filename or path))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return Fault("this is not a list of checksums", path)


def _files(folder: Path) -> dict[str, Path]:
    """Every file in the folder except the list, by its relative path."""
    files = {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}
    files.pop(NAME, None)
    return files


# ---- safetensors files -----------------------------------------------------------------------------------------------


def sealed(data: bytes) -> tuple[bytes, memoryview]:
    """A safetensors file, given whole, with its checksum and with sorted metadata; in two parts, to copy no tensor.

    The library writes metadata in any order, and equal content must give equal files.
    """
    end = 8 + int.from_bytes(data[:8], "little")
    header, body = json.loads(data[8:end]), memoryview(data)[end:]
    metadata = sorted({**header.pop("__metadata__", {}), KEY: ZEROS}.items())
    text = json.dumps({"__metadata__": dict(metadata), **header}, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors are aligned to 8 bytes
    begin = len(text).to_bytes(8, "little") + text
    digest = xxhash.xxh3_128(begin)
    digest.update(body)
    return begin.replace(_zip_entry(ZEROS), _zip_entry(digest.hexdigest())), body


def check_safetensors(path: Path, error: type[QwenCacheError]) -> None:
    """Raise `error` if the checksum in the header of a safetensors file does not match its bytes.

    A file without a checksum, of any kind, cannot be checked. Raises `error` for a header with a key twice too, and
    OSError if the file cannot be read.
    """
    with open(open_file(path), "rb") as file:
        begin = _begin(file)
        try:
            claimed = str(parse_json(begin[8:])["__metadata__"][KEY])
        except RepeatedKeyError as fault:
            do = "save it again, or get it again from where it is from"
            raise error(f"its header cannot be read: {fault}", where=path, do=do) from None
        except (ValueError, LookupError, TypeError):  # no checksum, or another kind of file
            return
        digest = xxhash.xxh3_128(begin.replace(_zip_entry(claimed), _zip_entry(ZEROS)))
        update_from(file, digest)
    if (found := digest.hexdigest()) != claimed:
        raise error(CHANGED, where=path, expected=f"xxh3-128 {claimed}", found=found, do=RESTORE)


def _begin(file: IO[bytes]) -> bytes:
    """The length of the header, and the header; less for another kind of file."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    return length + file.read(size) if size <= LONGEST_HEADER else length


def _zip_entry(digest: str) -> bytes:
    return f'"{KEY}":"{digest}"'.encode()
