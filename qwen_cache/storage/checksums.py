"""Checksums of files that this project writes and reads again: one list for a folder, or an entry in one file.

A folder has `checksums.json`: size and xxh3-128 of all its files, and the hash of its own bytes. A safetensors file
that is used on its own has its hash in its header, as `qwen_cache.xxh3_128` in `__metadata__`, which other programs
ignore. In both, the digits of a file's own hash count as zeros. Found: a changed byte, a missing file, an additional
file that a loader would read. Not found: forgery, and changes of a safetensors file without that entry.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Set
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import xxhash

from qwen_cache.errors import QwenCacheError
from qwen_cache.json_text import RepeatedKeyError, parse_json
from qwen_cache.storage.durable import write_durably
from qwen_cache.storage.mapped import open_file, read_file
from qwen_cache.storage.remembered import file_digest, update_from

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
    """What is wrong with a file of a folder."""

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
        return _fault_of_names(folder, expected.keys(), here) or next(
            (fault for name in expected if (fault := _fault_of_file(here[name], *expected[name], digest))), None
        )
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


def _fault_of_names(folder: Path, expected: Set[str], here: dict[str, Path]) -> Fault | None:
    for name in sorted(expected - here.keys()):
        return Fault("a file is missing", folder / name)
    for name in sorted(here.keys() - expected):
        if name.endswith(LOADED):
            return Fault(UNLISTED, here[name])
    return None


def _fault_of_file(path: Path, size: int, claimed: str, digest: Callable[[Path], str]) -> Fault | None:
    if (found_size := path.stat().st_size) != size:
        return Fault(CHANGED, path, f"{size} bytes", f"{found_size}")
    return None if (found := digest(path)) == claimed else Fault(CHANGED, path, f"xxh3-128 {claimed}", found)


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
    return begin.replace(_entry(ZEROS), _entry(digest.hexdigest())), body


def check_safetensors(path: Path, error: type[QwenCacheError]) -> None:
    """Raise `error` if the checksum in the header of a safetensors file does not match its bytes.

    A file without a checksum, of any kind, cannot be checked. Raises `error` for a header with a key twice too, and
    OSError if the file cannot be read.
    """
    with open(open_file(path), "rb") as file:
        begin = _begin(file)
        try:
            claimed = _claimed(begin)
        except RepeatedKeyError as fault:
            do = "save it again, or get it again from where it is from"
            raise error(f"its header cannot be read: {fault}", where=path, do=do) from None
        if claimed is None:
            return
        digest = xxhash.xxh3_128(begin.replace(_entry(claimed), _entry(ZEROS)))
        update_from(file, digest)
    if (found := digest.hexdigest()) != claimed:
        raise error(CHANGED, where=path, expected=f"xxh3-128 {claimed}", found=found, do=RESTORE)


def _begin(file: IO[bytes]) -> bytes:
    """The length of the header, and the header; less for another kind of file."""
    length = file.read(8)
    size = int.from_bytes(length, "little")
    return length + file.read(size) if size <= LONGEST_HEADER else length


def _claimed(begin: bytes) -> str | None:
    """The checksum in a header; None without one, or in a file of another kind. RepeatedKeyError for a key twice."""
    try:
        return str(parse_json(begin[8:])["__metadata__"][KEY])
    except RepeatedKeyError:
        raise
    except (ValueError, LookupError, TypeError):
        return None


def _entry(digest: str) -> bytes:
    return f'"{KEY}":"{digest}"'.encode()
