"""Tars of images, as `webdataset` packs them: the members of one sample have one name up to its first dot.

    KEY.target.png or KEY.png    the target
    KEY.control.png, KEY.control_1.png, KEY.mask.png, KEY.rejected.png the other images
    KEY.txt or KEY.json          the prompt; the .json is read only where there is no .txt, and only for its prompts
    KEY.positive_prompt.txt, KEY.negative_prompt.txt  the direction of a slider; or keys of KEY.json

Column names may stand for `target`, `control`, … (KEY.edited_image.jpg), and `data.columns` may name any part, with or
without its extension. A tar is scanned for the offsets of its members when it is new or has changed, and images are
read from there. Refuses a part that no sample has; and, as a problem that names tar and member: a name that leads out
of the tar, a link or another special file, and two members for one image or prompt.

webdataset's own iteration would not do: it reads every member whole and does not say where it is, skips links, and
takes a damaged header for the end of the tar.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import starmap
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from qwen_cache.errors import Notice, Problem, SourceError
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources.places import (
    IMAGE_EXTENSIONS,
    RangeFile,
    TableFolder,
    check_name,
    open_regular,
    parent,
    read_range,
)
from qwen_cache.sources.rows import (
    COLUMNS,
    GENERIC,
    LEFT_OUT,
    LIST_COLUMNS,
    MAX_TEXT,
    NO_CONTROL,
    SLIDER,
    Columns,
    Draft,
    Needs,
    Record,
    check_named,
    find_columns,
    given,
    read_rows,
    role_of,
    setting,
)
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import BLOCK, Location, is_remote
from qwen_cache.text import parse_json


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

    @property
    def files(self) -> tuple[Location, ...]:
        return (self.tar,)

    def read(self) -> bytes:
        return read_range(self.tar, self.begin, self.begin + self.size)


PART_BEGINS = "what follows the first dot of a name is its part"
Values = dict[str, Any]
"""The members of a sample by column: images, and text as a member and its kind."""


class Parts:
    """The parts that `data.columns` names, and the parts that the members of the tars have."""

    def __init__(self, columns: ColumnsConfig) -> None:
        self.given = given(columns)
        if "phrase" in self.given:
            do = "mark the words in the prompt with [[ ]], and set data.marked_phrases: true"
            raise SourceError("a tar has no part for the phrase", found=f"data.columns.phrase={columns.phrase}", do=do)
        self.seen: dict[str, None] = {}
        self.columns = {
            name.lower(): f"{role}_{number}" if number else role
            for role, names in self.given.items()
            for number, name in enumerate(names)
        }

    def column(self, name: str) -> tuple[str, str]:
        """The column of a member, and its kind, `image`, `text`, `json` or `key`; "" for other members."""
        part = _part(name).lower()
        stem, _, extension = part.rpartition(".")
        self.seen[part] = None
        named = next((each for each in (part, stem) if each in self.columns), None)
        column = self.columns.get(named or "")
        if f".{extension}" in IMAGE_EXTENSIONS:
            return (column or self._recognised(stem or "target"), "image") if column != "prompt" else ("", "")
        role = column or role_of(stem)[0] or ""
        if extension == "txt" and role in SLIDER:
            return (role, "text") if column or role not in self.given else ("", "")
        if extension not in ("txt", "json") or (column or role_of(stem or "prompt")[0]) != "prompt":
            return "", ""
        if extension == "txt":
            return ("prompt", "text") if column or "prompt" not in self.given else ("", "")
        return "json", "json" if column or "prompt" not in self.given else "key"

    def _recognised(self, stem: str) -> str:
        role, number = role_of(stem)
        if role in self.given:
            return ""
        return role + (f"_{number}" if number else "") if role else stem

    def needs(self, needs: Needs) -> Needs:
        """`needs` with the columns that the members got. The name of the prompt may be a key of KEY.json instead."""
        images = {role: names for role, names in self.given.items() if role != "prompt"}
        controls = [f"control_{number}" if number else "control" for number in range(len(images.get("control", ())))]
        own = {role: controls if role == "control" else names and role for role, names in images.items()}
        return replace(needs, columns=ColumnsConfig.model_validate(own))

    def check(self, where: Location) -> None:
        """SourceError if no member has a part that `data.columns` names."""
        stems = (part.rpartition(".")[0] for part in self.seen)
        images = {role: [name.lower() for name in names] for role, names in self.given.items() if role != "prompt"}
        check_named(images, list(dict.fromkeys([*self.seen, *filter(None, stems)])), where, "part")


def read_tars(paths: Iterable[Location], needs: Needs) -> Iterator[Problem | Notice | Draft]:
    """The samples of tars, in order."""
    parts, tars = Parts(needs.columns), list(paths)
    first = tars[0] if tars else None
    memory = RememberedFiles.of("tars 1", first or Path(), "\0".join(map(str, tars)))
    with memory.saved():
        samples = [sample for path in tars for sample in _read_tar(path, parts, memory)]
        yield from _read_samples(samples, first, parts, needs, memory)


def _read_samples(
    found: Sequence[Problem | Notice | tuple[Location, str, Values]],
    first: Location | None,
    parts: Parts,
    needs: Needs,
    memory: RememberedFiles,
) -> Iterator[Problem | Notice | Draft]:
    yield from (each for each in found if isinstance(each, Notice))
    samples = [each for each in found if not isinstance(each, Notice)]
    names = {name: None for sample in samples if isinstance(sample, tuple) for name in sample[2]}
    if first is None or not samples:
        do = "name another source"
        raise SourceError("there is no sample in the tar", where=first, expected="KEY.png and KEY.txt", do=do)
    if not names:
        yield from (problem for problem in samples if isinstance(problem, Problem))
        return
    parts.check(first)
    given = dict.fromkeys("prompts" if name in ("prompt", "json") else name for name in names)
    given |= dict.fromkeys(SLIDER) if "json" in names and not parts.given.keys() & {*SLIDER} else {}
    if needs.prompt and "prompts" not in given:
        has_dots = any(part.endswith((".txt", ".json")) for part in parts.seen)
        do = f"{PART_BEGINS}: rename them" if has_dots else "add it"
        do += f", or name the right part: {setting('prompt', 'NAME')}"
        seen = ", ".join(parts.seen)
        raise SourceError("no part holds the prompt", where=first, expected="KEY.txt or KEY.json", found=seen, do=do)
    columns = find_columns([*given], first, parts.needs(needs), "part", list(parts.seen))
    columns |= {role: [] for role in LEFT_OUT}  # a tar has no such part
    key = needs.columns.prompt
    records = (each if isinstance(each, Problem) else _record(*each, columns, needs, key, memory) for each in samples)
    used = {"prompt", "json", *(name for named in columns.values() for name in named)}
    yield from (
        _without_role(member.member)
        for each in samples
        if isinstance(each, tuple)
        for name, member in each[2].items()
        if name not in used
    )
    yield from read_rows(records, columns, TableFolder(parent(first)), {})


def _without_role(member: str) -> Notice:
    do = f"{PART_BEGINS}: rename them, or name the part in data.columns"
    return Notice("members of the tars have no role", (member,), do)


def _read_tar(
    path: Location, parts: Parts, memory: RememberedFiles
) -> Iterator[Problem | Notice | tuple[Location, str, Values]]:
    samples: dict[str, Values] = {}
    invalid: set[str] = set()
    members = memory.read("members", str(path), [path], lambda: json.dumps(list(_members(path))).encode())
    for info in starmap(Listed, json.loads(members)):
        fault: tuple[str, str] | None = None
        key, (column, kind) = _key(info.name), parts.column(info.name)
        if info.name.startswith("/") or ".." in info.name.split("/"):
            fault = "the name leads out of the tar", "pack it again with plain relative names"
        elif not info.is_plain:
            fault = "this is not a plain file", "pack the file itself, not a link to it"
        elif column in samples.get(key, {}):
            do = f"remove the wrong one, or name the right part: {setting(column.partition('_')[0], _part(info.name))}"
            fault = f"there are two for the {column} of {key}", do
        if fault:
            invalid.add(key)
            yield Problem(f"{path}:{info.name}", *fault)
        elif column:
            member = Member(path, info.name, info.begin, info.size)
            samples.setdefault(key, {})[column] = member if kind == "image" else (member, kind)
        else:
            yield _without_role(info.name)
    for key, values in samples.items():
        if key not in invalid:
            yield path, key, values


@contextmanager
def _opened(path: Location) -> Iterator[BinaryIO]:
    try:
        remote = is_remote(path)
        with io.BufferedReader(RangeFile(path), BLOCK) if is_remote(path) else open_regular(path) as file:
            yield file
    except FileNotFoundError as error:
        raise SourceError("the file does not exist", where=path, do="correct the path") from error
    except (tarfile.TarError, OSError, ValueError, EOFError, MemoryError, OverflowError) as error:
        do = "copy or download it again" if remote else "pack it again, without compression"
        raise SourceError("the tar is damaged or incomplete", where=path, found=error, do=do) from error


class Listed(NamedTuple):
    """A member of a tar, as its header describes it."""

    name: str
    begin: int
    size: int
    is_plain: bool
    """True if it is a file, and no link, device or sparse file."""


def _members(path: Location) -> Iterator[Listed]:
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
                yield Listed(info.name, info.offset_data, info.size, info.isreg() and not info.issparse())
        file.seek(tar.offset)
        if file.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):  # tarfile mistakes damage for the end
            raise EOFError(f"at byte {tar.offset} there is neither a member nor the end")


def _part(member: str) -> str:
    """The part of a member's name that says what it holds: `target.png` of `cats/017.target.png`."""
    return member.rpartition("/")[2].partition(".")[2]


def _key(name: str) -> str:
    folder, slash, base = name.removeprefix("./").rpartition("/")
    return folder + slash + base.partition(".")[0]


def _record(
    path: Location,
    key: str,
    values: Values,
    columns: Columns,
    needs: Needs,
    prompt_key: str | None,
    memory: RememberedFiles,
) -> Record | Problem:
    """A sample, with the text of its prompt."""
    where = f"{path}:{key}"
    member, kind = values.get("prompt") or values.get("json") or (None, "")
    if needs.target and (name := columns["target"][0]) not in values:
        plain = f" (or {key}.png, …)" if name == "target" else ""
        return Problem(where, f"there is no {key}.{name}.png{plain}", "add it, or remove the sample")
    controls = columns["control"]
    if needs.no_control == "stated" and controls and not any(name in values for name in controls):
        return Problem(where, f"there is no {key}.{controls[0]}.png", f"add it, or {NO_CONTROL}")
    if member is None:
        if needs.prompt:
            return Problem(where, f"there is no {key}.txt or {key}.json", "add the prompt, or remove the sample")
        return where, {**values, "prompts": [""]}
    direction = {}
    try:
        text = _text(member, memory)
        if kind == "text":
            prompts = [text]
        else:
            fields = parse_json(text)
            prompts = _prompts_in(fields, prompt_key if kind == "key" else None)
            direction = {role: fields[role] for role in SLIDER if role in fields and columns[role] == [role]}
        for role in SLIDER:
            if role in values and isinstance(values[role], tuple):
                member, _ = values[role]
                direction[role] = _text(member, memory)
    except (SourceError, ValueError) as error:
        return Problem(
            where, f"the prompt in .{_part(member.member)} cannot be read: {error}", "save it as UTF-8 text, or JSON"
        )
    return where, {**values, "prompts": prompts, **direction}


def _text(member: Member, memory: RememberedFiles) -> str:
    """The text of a member; ValueError or SourceError if it is none, or longer than any prompt."""
    if member.size > MAX_TEXT:
        raise ValueError(f"{member.size} bytes are too long for a prompt")
    return memory.read("prompt", str(member), member.files, member.read).decode("utf-8-sig")


def _prompts_in(fields: Any, key: str | None) -> Any:
    """The prompts of KEY.json: the value of `key`, which may be a list, or else of the one key for prompts."""
    known = (key.lower(),) if key else (*COLUMNS["prompt"], *GENERIC["prompt"])
    names = [name for name in fields if name.lower() in known] if isinstance(fields, dict) else []
    if len(names) != 1:
        found = ", ".join(names) or (f"none of {', '.join(map(str, fields))}" if isinstance(fields, dict) else "none")
        raise ValueError(f"expected one of {', '.join(known)}, found {found}")
    value = fields[names[0]]
    return value if names[0].lower() in LIST_COLUMNS or (key and isinstance(value, list)) else [value]
