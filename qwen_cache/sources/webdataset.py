"""Tars of images, as `webdataset` packs them: the members of one sample have one name up to its first dot.

    KEY.target.png or KEY.png    the target; KEY.control.png, KEY.control_1.png, KEY.mask.png the other images
    KEY.txt or KEY.json          the prompt; the .json is read only where there is no .txt, and only for its prompt

Column names may stand for `target`, `control`, … (KEY.edited_image.jpg). A tar is scanned once for the offsets of its
members, and images are read from there. Refuses, as a problem that names tar and member: a name that leads out of the
tar, a link or another special file, and two members for one image or prompt.
"""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from qwen_cache.errors import Problem, SourceError
from qwen_cache.format.fields import parse_json
from qwen_cache.sources.columns import COLUMNS, LIST_COLUMNS, Record, find_columns, read_rows, role_of
from qwen_cache.sources.pairs import IMAGE_EXTENSIONS
from qwen_cache.sources.places import (
    MAX_TEXT,
    Location,
    RangeFile,
    TableFolder,
    check_name,
    open_regular,
    parent,
    read_range,
)
from qwen_cache.sources.rows import Draft, Needs
from qwen_cache.storage.url import BLOCK, Url


@dataclass(frozen=True)
class Member:
    """An image in a tar."""

    tar: Location
    member: str
    begin: int
    size: int

    def __str__(self) -> str:
        return f"{self.tar}:{self.member}"

    @property
    def name(self) -> str:
        return _key(self.member)

    def read(self) -> bytes:
        return read_range(self.tar, self.begin, self.begin + self.size)


def read_tars(paths: Iterable[Location], needs: Needs) -> Iterator[Problem | Draft]:
    """The samples of tars, in order."""
    records: list[Record | Problem] = []
    needed_columns = {"target": needs.target, "prompts": needs.prompt, "control": needs.control}
    names = dict.fromkeys(name for name, needed in needed_columns.items() if needed)
    first: Location | None = None
    for path in paths:
        first = first or path
        for record in _read_tar(path):
            records.append(record)
            names |= dict.fromkeys(record[1]) if isinstance(record, tuple) else {}
    if first is None or not records:
        do = "name another source"
        raise SourceError("there is no sample in the tar", where=first, expected="KEY.png and KEY.txt", do=do)
    columns = find_columns(names, first, needs)
    return read_rows(records, columns, TableFolder(parent(first)), {})


def _read_tar(path: Location) -> Iterator[Record | Problem]:
    samples: dict[str, dict[str, Any]] = {}
    invalid: set[str] = set()
    for info in _members(path):
        fault = _fault(info)
        key, (column, kind) = _key(info.name), _column(info.name)
        if fault is None and column in samples.get(key, {}):
            fault = f"there are two for the {column} of {key}", "remove the wrong one"
        if fault:
            invalid.add(key)
            yield Problem(f"{path}:{info.name}", f"{path}:{info.name}: {fault[0]}", fault[1])
        elif column:
            member = Member(path, info.name, info.offset_data, info.size)
            samples.setdefault(key, {})[column] = member if kind == "image" else (member, kind)
    for key, values in samples.items():
        if key not in invalid:
            yield _record(path, key, values)


@contextmanager
def _opened(path: Location) -> Iterator[BinaryIO]:
    try:
        remote = isinstance(path, Url)
        with io.BufferedReader(RangeFile(path), BLOCK) if isinstance(path, Url) else open_regular(path) as file:
            yield file
    except FileNotFoundError as error:
        raise SourceError("the file does not exist", where=path, do="correct the path") from error
    except (tarfile.TarError, OSError, ValueError, EOFError, MemoryError, OverflowError) as error:
        do = "copy or download it again" if remote else "pack it again, without compression"
        raise SourceError("the tar is damaged or incomplete", where=path, found=error, do=do) from error


def _members(path: Location) -> Iterator[tarfile.TarInfo]:
    """The members except folders and hidden files; SourceError for a damaged tar, or a shard of a cache."""
    with _opened(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
        for info in tar:
            check_name(info.name, f"{path}:{info.name[:60]}…")
            if info.name.endswith(".safetensors"):
                raise SourceError(
                    "this is a shard of a cache, or of tensors, and holds no images",
                    where=f"{path}:{info.name}",
                    do="name the images that it was made from",
                )
            if not info.isdir() and not info.name.rpartition("/")[2].startswith("."):
                yield info
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile mistakes damage for the end
            raise EOFError(f"at byte {tar.offset} there is neither a member nor the end")


def _fault(info: tarfile.TarInfo) -> tuple[str, str] | None:
    if info.name.startswith("/") or ".." in info.name.split("/"):
        return "the name leads out of the tar", "pack it again with plain relative names"
    if not info.isreg() or info.issparse():
        return "this is not a plain file", "pack the file itself, not a link to it"
    return None


def _key(name: str) -> str:
    folder, slash, base = name.removeprefix("./").rpartition("/")
    return folder + slash + base.partition(".")[0]


def _column(name: str) -> tuple[str, str]:
    """The column of a member, and its kind, `image`, `text` or `json`; "" for other members."""
    stem, _, extension = ("." + name.rpartition("/")[2].partition(".")[2].lower()).rpartition(".")
    column = stem.removeprefix(".")
    if f".{extension}" in IMAGE_EXTENSIONS:
        role, number = role_of(column or "target")
        return (role + (f"_{number}" if number else "") if role else column), "image"
    if extension in ("txt", "json") and role_of(column or "prompt")[0] == "prompt":
        return ("prompt", "text") if extension == "txt" else ("json", "json")
    return "", ""


def _record(path: Location, key: str, values: dict[str, Any]) -> Record | Problem:
    """A sample, with the text of its prompt."""
    where = f"{path}:{key}"
    described, written = values.pop("json", None), values.pop("prompt", None)
    if "target" not in values:
        return Problem(where, f"{path} has no {key}.target.png (or {key}.png, …)", "add it, or remove the sample")
    if described is None and written is None:
        return Problem(where, f"{path} has no {key}.txt or {key}.json", "add the prompt, or remove the sample")
    member, kind = written or described
    try:
        if member.size > MAX_TEXT:
            raise ValueError(f"{member.size} bytes are too long for a prompt")
        text = member.read().decode("utf-8-sig")
        prompt = [text] if kind == "text" else _prompts_in(parse_json(text))
    except (SourceError, ValueError) as error:
        return Problem(where, f"the prompt {member} cannot be read: {error}", "save it as UTF-8 text, or JSON")
    return where, {**values, "prompts": prompt}


def _prompts_in(fields: Any) -> Any:
    names = [name for name in fields if name.lower() in COLUMNS["prompt"]] if isinstance(fields, dict) else []
    if len(names) != 1:
        raise ValueError(f"expected one of {', '.join(COLUMNS['prompt'])}, found {', '.join(names) or 'none'}")
    return fields[names[0]] if names[0].lower() in LIST_COLUMNS else [fields[names[0]]]
