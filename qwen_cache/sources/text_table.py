"""Text tables in UTF-8: CSV, also with semicolons or tabs, JSON Lines, JSON; and prompts alone, one per line."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from qwen_cache.errors import Notice, Problem, SourceError, first_line
from qwen_cache.sources.columns import Record, find_columns, read_rows
from qwen_cache.sources.places import Location, TableFolder, base_name, parent, read_bytes, suffix
from qwen_cache.sources.rows import Draft, Needs
from qwen_cache.sources.table_text import CSV, DELIMITERS, csv_reader, delimiter_of, texts_of_rows
from qwen_cache.text import RepeatedKeyError, parse_json

Item = tuple[str, Any, Problem | None]
"""A row of JSON: its location, its value, and why it cannot be used."""


def read_text_table(path: Location, needs: Needs) -> Iterator[Problem | Notice | Draft]:
    text = _read_text(path)
    names, records = (READERS | {PROMPTS: _lines})[suffix(path)](path, text)
    if not records:
        raise SourceError("the table has no rows", where=path, expected="one row per sample", do="name another source")
    columns = find_columns(names, path, needs)
    if suffix(path) == ".csv" and (delimiter := delimiter_of(text)) != ",":
        what = f"rows of a .csv have their cells separated by {DELIMITERS[delimiter]}, not commas"
        yield Notice(what, (base_name(path),), "save it with commas if this is wrong", len(records))
    yield from read_rows(records, columns, TableFolder(parent(path), needs.allow_urls), {})


def _read_text(path: Location) -> str:
    data = read_bytes(path)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(
            "the table is not UTF-8 text",
            where=f"{path}:{line}",
            expected="UTF-8",
            found=f"the bytes {data[error.start : error.end]!r}",
            do="save it as UTF-8 (spreadsheets call it “CSV UTF-8”)",
        ) from error


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
