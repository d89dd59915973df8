"""Which rows a source leaves out: a column `left_out` of a table, or left_out.txt in a folder of images.

A row left out is neither a row nor a problem, but keeps its place and its name, so that no other row is renamed.
left_out.txt has the name of a target per line, without extension; lines that begin with `#` are comments. A name that
begins with `#` or a double quote, has white space around it or a control character, is written as a string of JSON.
Refuses a value that is neither yes nor no, and a line that names nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from qwen_cache.errors import Problem

COLUMN, LIST = "left_out", "left_out.txt"
YES, NO = ("true", "1", "yes", "x"), ("", "false", "0", "no")
NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f\x85\u2028\u2029\ud800-\udfff]")
"""Characters that a line of a text file cannot hold, or not visibly."""
LINE = re.compile(r"[^\n]*\n|[^\n]+")


def is_yes(value: Any) -> bool | None:
    """The value of a cell of the column; None if it is neither yes nor no."""
    number = int(value) if isinstance(value, float) and value.is_integer() else value
    text = "" if value is None else str(number).strip().lower()
    return True if text in YES else False if text in NO else None


@dataclass(frozen=True)
class Line:
    """A line of left_out.txt that is no comment, by its number from 1."""

    number: int
    name: str | None
    """None if it is not a string of JSON, though it begins as one."""


def lines_of(text: str) -> list[Line]:
    """The lines that name a target."""
    lines = enumerate((line.strip() for line in text.split("\n")), 1)
    return [Line(number, _name(line)) for number, line in lines if line and not line.startswith("#")]


def _name(line: str) -> str | None:
    if not line.startswith('"'):
        return line
    try:
        name = json.loads(line)
    except ValueError:
        return None
    return name if isinstance(name, str) else None


def wrong_lines(lines: Iterable[Line], targets: Collection[str], where: object) -> list[Problem]:
    """The problems of the lines that name no target."""
    problems = []
    for line in lines:
        place = f"{where}:{line.number}"
        if line.name is None:
            do = "write the name as a string of JSON, or without double quotes"
            problems.append(Problem(place, "the double quote is not closed", do))
        elif line.name not in targets:
            stem = line.name.rpartition(".")[0]
            do = f"write {stem}, without the extension" if stem in targets else "correct the name, or remove the line"
            problems.append(Problem(place, f"there is no target {line.name!r} to leave out", do))
    return problems


def changed_list(text: str, names: Collection[str], *, is_left_out: bool) -> str:
    """The list with these names at its end, unless it has them, or without them; other lines keep their bytes."""
    wanted, listed = dict.fromkeys(names), {line.number: line.name for line in lines_of(text)}
    if not is_left_out:
        kept = (line for number, line in enumerate(LINE.findall(text), 1) if listed.get(number) not in wanted)
        return "".join(kept)
    end = "\r\n" if "\r\n" in text else "\n"
    new = [_written(name) + end for name in wanted if name not in set(listed.values())]
    return text + (end if new and text and not text.endswith("\n") else "") + "".join(new)


def _written(name: str) -> str:
    is_plain = name == name.strip() and not name.startswith(("#", '"')) and not NOT_PLAIN.search(name)
    return name if is_plain else json.dumps(name)
