"""Text and JSON from outside: control characters escaped, long values shortened, each JSON key once."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import Any

# ---- plain text ------------------------------------------------------------------------------------------------------
# Text from outside as text: names, prompts and other programs' messages, made fit for a terminal and for messages.
#
# Control characters move the cursor, clear the screen, and set the window's title and the clipboard; bidirectional
# controls and line separators reorder and fake lines. They are shown escaped, as `\x1b` or `\u202e`, never dropped, so
# that two names that differ look different. JSON has them as its own escapes, and is equal after parsing. Command lines
# for users to paste are quoted for their shell.

SHOWN = 2000
"""Characters of a value in a message: a terminal of 80 × 25. Names, paths and the keys of a batch fit; a longer value
loses its middle."""
_BEYOND_ASCII = "\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[\x00-\x08\x0b-\x1f{_BEYOND_ASCII}]")
_CONTROL_OR_BREAK = re.compile(f"[\x00-\x1f{_BEYOND_ASCII}]")
_NOT_ASCII = re.compile(f"[{_BEYOND_ASCII}]")
_SHORT = {"\n": r"\n", "\r": r"\r", "\t": r"\t"}


def escaped(value: object) -> str:
    """A value on one line: every control character is escaped, line breaks and tabs too."""
    return _CONTROL_OR_BREAK.sub(_escape, str(value))


def plain(value: object) -> str:
    """A value for a message: escaped, and without its middle if it has more than SHOWN characters."""
    text = str(value)
    if (hidden := len(text) - SHOWN) > 0:
        text = f"{text[: SHOWN // 2]} … {hidden} characters … {text[-SHOWN // 2 :]}"
    return escaped(text)


def without_controls(text: str) -> str:
    """Text whose line breaks and tabs are our own: every other control character is escaped."""
    return _CONTROL.sub(_escape, text)


def json_without_controls(document: str) -> str:
    """A JSON document (whose C0 characters are escaped already) with the other ones as JSON escapes."""
    return _NOT_ASCII.sub(lambda match: f"\\u{ord(match[0]):04x}", document)


def one_line(text: str) -> str:
    """A sentence on one line, for the messages of libraries: line breaks and the spaces around them are one space."""
    lines = re.split(r"[\r\n]+", text)  # one pattern with the spaces takes time that grows with their square
    return text if len(lines) == 1 else " ".join(filter(None, (line.strip(" \t") for line in lines)))


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return _SHORT.get(match[0]) or (f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}")


def shell_line(words: Sequence[str]) -> str:
    """A command line as a user types it, with quotes where this system's shell needs them."""
    import subprocess

    return subprocess.list2cmdline(words) if sys.platform == "win32" else shlex.join(words)


# ---- json text -------------------------------------------------------------------------------------------------------
# JSON that somebody else wrote: each key once, and no deeper than code that walks through it.
#
# Python's own reader keeps the last value of a key that is there twice, and the first one is lost without a word.

MAX_DEPTH = 100
"""Far below what Python's recursion survives; tables and metadata have at most five levels."""


class RepeatedKeyError(ValueError):
    """An object has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {json.dumps(key[:60], ensure_ascii=False)} is there twice")
        self.key = key


def parse_json(text: str | bytes, *, each_once: bool = True) -> Any:
    """The value of JSON; ValueError if it is none, or is nested too deeply, RepeatedKeyError for a key twice.

    Without `each_once` the last value of a key counts.
    """
    try:
        value = json.loads(text, object_pairs_hook=each_key_once if each_once else None)
    except RecursionError:
        raise ValueError(f"it is nested more than {MAX_DEPTH} deep") from None
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(MAX_DEPTH):
        inner = (child for each in level for child in (each.values() if isinstance(each, dict) else each))
        level = [child for child in inner if isinstance(child, dict | list)]
        if not level:
            return value
    raise ValueError(f"it is nested more than {MAX_DEPTH} deep")


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs, for json's `object_pairs_hook`; RepeatedKeyError if two have the same key."""
    value = dict(pairs)
    if len(value) != len(pairs):
        raise RepeatedKeyError(repeated(pairs)[0])
    return value


def repeated(pairs: list[tuple[str, Any]]) -> list[str]:
    """The keys that are there twice."""
    seen = set[str]()
    return [key for key, _ in pairs if key in seen or seen.add(key)]  # type: ignore[func-returns-value]


# ---- pydantic's faults -----------------------------------------------------------------------------------------------

EXPECTED = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "an integer"),
    **dict.fromkeys(("float_parsing", "float_type"), "a number"),
    **dict.fromkeys(("bool_parsing", "bool_type"), "true or false"),
    **dict.fromkeys(("list_type", "tuple_type"), "a list"),
    "string_type": "text",
    "dict_type": "an object",
}
"""Pydantic's types of faults, in plain words."""
INPUT = "Input should be "
"""The beginning of most of pydantic's messages."""


def expected_value(fault: Mapping[str, Any]) -> str | None:
    """The value that one of pydantic's faults expected, in plain words; None where its message says something else."""
    kind, message = str(fault["type"]), str(fault["msg"])
    if kind in EXPECTED:
        return EXPECTED[kind]
    return message.removeprefix(INPUT).replace("'", "") if message.startswith(INPUT) else None
