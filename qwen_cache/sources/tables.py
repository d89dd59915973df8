"""Tables as text: CSV, TSV and JSON lines, read and written in place byte for byte."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

from qwen_cache.errors import Notice, Problem, SourceError, first_line
from qwen_cache.sources.places import IMAGE_EXTENSIONS, TableFolder, base_name, parent, read_bytes, suffix
from qwen_cache.sources.rows import Draft, Needs, Record, find_columns, read_rows
from qwen_cache.storage.remote import Location, is_remote
from qwen_cache.text import RepeatedKeyError, parse_json

# ---- table text ------------------------------------------------------------------------------------------------------
# A text table as text: where each value stands, so that an edit changes that value and keeps every other byte.
#
# Rows are named as their problems are: `t.csv:12`, `t.jsonl:12`, `t.json[11]`. A new column is added to the end of the
# rows that get a value, and in CSV to all. What is written is read again: SourceError if that gives anything else.

Values = Mapping[str, Any]
"""New values by column."""
Edit = tuple[int, int, str]
"""The characters from here to there, and what replaces them."""

SPACE = re.compile(r"[ \t\n\r]*")
DELIMITERS = {",": "commas", ";": "semicolons", "\t": "tabs"}
"""The separators of a CSV's cells, by the words for them."""
CELLS = {
    each: re.compile(rf' *(?:"[^"]*(?:""[^"]*)*"|[^"{each}][^{each}]*|)(?={each}|\Z)', re.DOTALL) for each in DELIMITERS
}
"""A cell as `csv` reads it, strict and without the spaces before it, by what separates cells."""
QUOTED = {each: re.compile(rf'[{each}"\r\n]|^\s|\s\Z') for each in DELIMITERS}
"""Characters that a cell may hold only in quotes."""
_json = json.JSONDecoder()


def delimiter_of(text: str) -> str:
    """The separator of a CSV's cells: a comma, unless only another one makes columns of its first line."""
    for delimiter in DELIMITERS:
        with suppress(csv.Error):
            if len(next(csv_reader(io.StringIO(text, newline=""), delimiter), [])) > 1:
                return delimiter
    return ","


def csv_reader(lines: Iterable[str], delimiter: str) -> Any:
    """The rows of a CSV; csv.Error for quotes that are not closed, which would silently swallow the rest."""
    return csv.reader(lines, delimiter=delimiter, strict=True, skipinitialspace=True)


class TableText(Protocol):
    """The rows of a table."""

    @property
    def path(self) -> Path: ...

    @property
    def text(self) -> str: ...

    def values(self, where: str) -> dict[str, Any] | None:
        """The values of a row as the table's reader gives them; None if no row is there."""
        ...

    def edits(self, changes: Mapping[str, Values]) -> Iterator[Edit]:
        """How the text changes for new values by row."""
        ...


def open_text(path: Path, text: str) -> TableText:
    return KINDS[suffix(path)](path, text)


def changed(before: TableText, changes: Mapping[str, Values]) -> TableText:
    """The table with new values by row."""
    parts, position = list[str](), 0
    for begin, end, new in sorted(before.edits(changes)):
        parts += [before.text[position:begin], new]
        position = end
    try:
        after = open_text(before.path, "".join([*parts, before.text[position:]]))
        places = _places(before, after)
        is_read = all(
            _has(after.values(places.get(where, where)), {**(before.values(where) or {}), **changes[where]})
            for where in changes
        )
    except (ValueError, csv.Error):
        is_read = False
    if not is_read:
        do = "edit the table in a text editor or a spreadsheet"
        raise SourceError("this cannot be written so that it is read again", where=next(iter(changes)), do=do)
    return after


def _places(before: TableText, after: TableText) -> dict[str, str]:
    """The new places of rows that have moved, as a cell above has other lines."""
    if not (isinstance(before, CsvText) and isinstance(after, CsvText)) or len(before.records) != len(after.records):
        return {}
    moved = zip(before.records, after.records, strict=True)
    return {f"{before.path}:{old}": f"{after.path}:{new}" for old, new in moved if old != new}


def _has(found: dict[str, Any] | None, expected: Values) -> bool:
    """True if a row has these values, whatever its line ends."""
    if found is None:
        return False
    pairs = ((found.get(name), value) for name, value in expected.items())
    return all(there == value or _unix(there) == _unix(value) for there, value in pairs)


def _unix(value: Any) -> Any:
    return value.replace("\r\n", "\n") if isinstance(value, str) else value


# ---- JSON ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Member:
    """A member of a JSON object: where its key begins and ends, and its value."""

    name: str
    begin: int
    name_end: int
    value: int
    end: int


def _skip(text: str, position: int) -> int:
    found = SPACE.match(text, position)
    return found.end() if found else position


def texts_of_rows(text: str) -> list[str]:
    """The texts of the values in a list of JSON."""
    return [_value_text(text, begin) for begin in _begins_of_rows(text)]


def _begins_of_rows(text: str) -> list[int]:
    found, position = list[int](), _skip(text, _skip(text, 0) + 1)
    while text[position] != "]":
        position = _skip(text, position + 1) if found else position
        found.append(position)
        position = _skip(text, _json.raw_decode(text, position)[1])
    return found


def _value_text(text: str, begin: int) -> str:
    """The text of the value that begins here."""
    return text[begin : _json.raw_decode(text, begin)[1]]


def _members(text: str, begin: int) -> tuple[list[Member], int]:
    """The members of the object that begins here, and where it closes."""
    found, position = list[Member](), _skip(text, begin + 1)
    while text[position] != "}":
        start = _skip(text, position + 1) if found else position
        name, name_end = _json.raw_decode(text, start)
        value = _skip(text, _skip(text, name_end) + 1)
        end = _json.raw_decode(text, value)[1]
        found.append(Member(name, start, name_end, value, end))
        position = _skip(text, end)
    return found, position


def _object_edits(text: str, begin: int, values: Values, write: Callable[[Any], str]) -> Iterator[Edit]:
    """New values of the object that begins here; new names stand last, spaced as the others."""
    found, end = _members(text, begin)
    known = {member.name: member for member in found}  # of a name that is there twice, the last one counts
    yield from ((known[name].value, known[name].end, write(value)) for name, value in values.items() if name in known)
    new = [(write(name), write(value)) for name, value in values.items() if name not in known]
    if not found:
        yield begin + 1, end, ", ".join(f"{name}: {value}" for name, value in new)
        return
    last = found[-1]
    gap = text[found[-2].end : last.begin] if found[1:] else f",{text[begin + 1 : last.begin] or ' '}"
    colon = text[last.name_end : last.value]
    yield last.end, last.end, "".join(f"{gap}{name}{colon}{value}" for name, value in new)


@dataclass(frozen=True)
class _JsonText:
    path: Path
    text: str

    @cached_property
    def write(self) -> Callable[[Any], str]:
        """Writes a value as the table writes text: with `\\u` for other letters only if it has no others."""
        return partial(json.dumps, ensure_ascii=self.text.isascii() and "\\u" in self.text)

    def begin(self, where: str) -> int | None:
        """The offset of a row's object."""
        raise NotImplementedError

    def values(self, where: str) -> dict[str, Any] | None:
        begin = self.begin(where)
        value = None if begin is None else parse_json(_value_text(self.text, begin), each_once=False)
        return value if isinstance(value, dict) else None

    def edits(self, changes: Mapping[str, Values]) -> Iterator[Edit]:
        for where, values in changes.items():
            if (begin := self.begin(where)) is not None:
                yield from _object_edits(self.text, begin, values, self.write)


class JsonText(_JsonText):
    @cached_property
    def begins(self) -> list[int]:
        return _begins_of_rows(self.text)

    def begin(self, where: str) -> int | None:
        number = _number(where, f"{self.path}[", "]")
        return self.begins[number] if number is not None and number < len(self.begins) else None


class JsonLinesText(_JsonText):
    @cached_property
    def begins(self) -> list[int]:
        return [0, *(found.end() for found in re.finditer("\n", self.text))]

    def begin(self, where: str) -> int | None:
        number = _number(where, f"{self.path}:")
        if number is None or not 1 <= number <= len(self.begins):
            return None
        begin = _skip(self.text, self.begins[number - 1])
        is_here = number == len(self.begins) or begin < self.begins[number]
        return begin if is_here and self.text[begin : begin + 1] == "{" else None


def _number(where: str, start: str, end: str = "") -> int | None:
    text = where.removeprefix(start).removesuffix(end)
    return int(text) if where == f"{start}{text}{end}" and text.isdecimal() else None


# ---- CSV -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CsvText:
    path: Path
    text: str

    @cached_property
    def delimiter(self) -> str:
        return delimiter_of(self.text)

    @cached_property
    def records(self) -> dict[int, tuple[int, int, list[str]]]:
        """By first line, the header's too: where a record begins and ends, without its line end, and its cells."""
        lines = list(io.StringIO(self.text, newline=""))
        reader = csv_reader(iter(lines), self.delimiter)
        found, line, begin = {}, 0, 0
        for cells in reader:
            text = "".join(lines[line : reader.line_num])
            if cells:
                found[line + 1] = begin, begin + len(text.rstrip("\r\n")), cells
            line, begin = reader.line_num, begin + len(text)
        return found

    @cached_property
    def names(self) -> list[str]:
        return self.records[1][2] if 1 in self.records else []

    def values(self, where: str) -> dict[str, Any] | None:
        number = _number(where, f"{self.path}:")
        if number is None or number < 2 or number not in self.records:
            return None
        cells = self.records[number][2]
        return dict(zip(self.names, cells, strict=True)) if len(cells) == len(self.names) else None

    def edits(self, changes: Mapping[str, Values]) -> Iterator[Edit]:
        new = list(dict.fromkeys(name for values in changes.values() for name in values if name not in self.names))
        by_line = {_number(where, f"{self.path}:"): values for where, values in changes.items()}
        columns = {name: column for column, name in enumerate(self.names)}
        for line in self.records if new else by_line:
            if line is None or line not in self.records:
                continue
            begin, end, cells = self.records[line]
            values = by_line.get(line, {})
            spans = list(self._spans(begin, end))
            if len(spans) == len(cells):  # else a row that cannot be used, for other reasons too
                for name in values.keys() & columns.keys():
                    first, last = spans[columns[name]]
                    old, text = self.text[first:last], values[name]
                    spaces = len(old) - len(old.lstrip(" "))
                    text = text.replace("\n", "\r\n") if "\r\n" in old else text
                    yield first + spaces, last, self._cell(text, like=old)
            added = new if line == 1 else [values.get(name, "") for name in new]
            if added:
                like = self.text[slice(*spans[-1])]
                yield end, end, "".join(self.delimiter + self._cell(text, like) for text in added)

    def _spans(self, begin: int, end: int) -> Iterator[tuple[int, int]]:
        record, position = self.text[begin:end], 0
        while (found := CELLS[self.delimiter].match(record, position)) is not None:
            yield begin + found.start(), begin + found.end()
            position = found.end() + 1
            if position > len(record):
                return

    def _cell(self, text: str, like: str) -> str:
        """A cell in quotes where it needs them, or where a similar one has them and it is not empty."""
        if QUOTED[self.delimiter].search(text) or (text and like.lstrip(" ").startswith('"')):
            return '"' + text.replace('"', '""') + '"'
        return text


CSV = (".csv", ".tsv")
KINDS: dict[str, Callable[[Path, str], TableText]] = {
    **dict.fromkeys(CSV, CsvText),
    ".jsonl": JsonLinesText,
    ".json": JsonText,
}

# ---- text table ------------------------------------------------------------------------------------------------------
# Text tables in UTF-8: CSV, also with semicolons or tabs, JSON Lines, JSON; and prompts alone, one per line.

Item = tuple[str, Any, Problem | None]
"""A row of JSON: its location, its value, and why it cannot be used."""


def read_text_table(path: Location, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    data = read_bytes(path)
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(
            "the table is not UTF-8 text",
            where=f"{path}:{line}",
            expected="UTF-8",
            found=f"the bytes {data[error.start : error.end]!r}",
            do="save it as UTF-8 (spreadsheets call it “CSV UTF-8”)",
        ) from error
    names, records = (READERS | {PROMPTS: _lines})[suffix(path)](path, text)
    if not records:
        raise SourceError("the table has no rows", where=path, expected="one row per sample", do="name another source")
    columns = find_columns(names, path, needs, images=image_columns(names, records, parent(path)))
    if suffix(path) == ".csv" and (delimiter := delimiter_of(text)) != ",":
        what = f"rows of a .csv have their cells separated by {DELIMITERS[delimiter]}, not commas"
        yield Notice(what, (base_name(path),), "save it with commas if this is wrong", len(records))
    yield from read_rows(records, columns, TableFolder(parent(path), needs.allow_urls), {})


LOOKED_AT = 8
"""Rows of a table whose cells are looked at for images: one may be empty, and the rest need not exist either."""


def image_columns(names: Sequence[str], records: Sequence[Record | Problem], folder: Location) -> list[str]:
    """The columns whose first cells are nothing but paths, or lists of paths, of images that exist on this machine."""
    if is_remote(folder):
        return []
    rows = [record[1] for record in records[:LOOKED_AT] if not isinstance(record, Problem)]
    found = []
    for name in dict.fromkeys(names):
        cells = [cell for row in rows for cell in _cells(row.get(name))]
        if cells and all(suffix(Path(cell)) in IMAGE_EXTENSIONS and os.path.isfile(folder / cell) for cell in cells):
            found.append(name)
    return found


def _cells(value: Any) -> list[str]:
    """The texts of a cell that are not empty; "" for each other value."""
    items = value if isinstance(value, list) else [value]
    return [item.strip() if isinstance(item, str) else "" for item in items if item not in ("", None)]


def _csv_records(path: Location, text: str) -> tuple[list[str], list[Record | Problem]]:
    delimiter = delimiter_of(text)
    reader = csv_reader(io.StringIO(text, newline=""), delimiter)
    records: list[Record | Problem] = []
    line = 1
    try:
        names: list[str] = next(reader, [])
        line = reader.line_num + 1
        for cells in reader:
            where, line = f"{path}:{line}", reader.line_num + 1
            if len(cells) == len(names):
                records.append((where, dict(zip(names, cells, strict=True))))
            elif cells:
                what = f"the row has {len(cells)} cells, expected {len(names)} as in the first line"
                do = f"put a prompt that contains {DELIMITERS[delimiter]} in double quotes"
                records.append(Problem(where, what, do))
    except csv.Error as error:
        raise SourceError(
            "the table cannot be read from here on",
            where=f"{path}:{line}",
            found=error,
            do="close every quoted prompt, write a double quote inside it twice, and nothing between its end and the "
            "next cell",
        ) from error
    return names, [it for it in records if isinstance(it, Problem) or any(cell.strip() for cell in it[1].values())]


def _json_records(path: Location, text: str) -> tuple[list[str], list[Record | Problem]]:
    items, each_once = _parsed(path, text)
    if not isinstance(items, list):
        raise SourceError("this is not a table", where=path, expected="a list of objects", found=type(items).__name__)
    if each_once:
        return _objects((f"{path}[{index}]", item, None) for index, item in enumerate(items))
    return _objects(_item(f"{path}[{index}]", row) for index, row in enumerate(texts_of_rows(text)))


def _parsed(path: Location, text: str) -> tuple[Any, bool]:
    """The value of a whole file, and whether each key in it is there once; SourceError if it is not JSON."""
    try:
        try:
            return parse_json(text), True
        except RepeatedKeyError:
            return parse_json(text, each_once=False), False
    except json.JSONDecodeError as error:
        raise _not_json(f"{path}:{error.lineno}", error) from error
    except ValueError as error:
        raise _not_json(str(path), error) from error


def _jsonl_records(path: Location, text: str) -> tuple[list[str], list[Record | Problem]]:
    items = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also break at U+2028, which JSON may hold
        try:
            items += [_item(f"{path}:{number}", line)] if line.strip() else []
        except ValueError as error:
            raise _not_json(f"{path}:{number}", error) from error
    return _objects(items)


def _item(where: str, text: str) -> Item:
    """A row of JSON; ValueError if it is none."""
    try:
        return where, parse_json(text), None
    except RepeatedKeyError as error:
        do = f'keep one of them, or write a list: "{error.key}": […, …]'
        return where, parse_json(text, each_once=False), Problem(where, str(error), do)


def _lines(path: Location, text: str) -> tuple[list[str], list[Record | Problem]]:
    """A prompt per line, without the empty lines."""
    lines = enumerate(text.split("\n"), 1)
    return ["prompt"], [(f"{path}:{number}", {"prompt": line}) for number, line in lines if line.strip()]


def _not_json(where: str, error: ValueError) -> SourceError:
    found = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else first_line(error)
    return SourceError("this is not JSON", where=where, found=found, do="correct the line")


def _objects(items: Iterable[Item]) -> tuple[list[str], list[Record | Problem]]:
    records: list[Record | Problem] = []
    names: dict[str, None] = {}
    for where, item, problem in items:
        if not isinstance(item, dict):
            raise SourceError(
                "this is not a sample", where=where, expected='an object, {"image": …}', found=repr(item)[:60]
            )
        names |= dict.fromkeys(item)
        records.append(problem or (where, item))
    return list(names), records


PROMPTS = ".txt"
READERS: dict[str, Callable[[Location, str], tuple[list[str], list[Record | Problem]]]] = {
    **dict.fromkeys(CSV, _csv_records),
    ".jsonl": _jsonl_records,
    ".json": _json_records,
}
