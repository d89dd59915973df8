"""JSON that somebody else wrote: each key once, and no deeper than code that walks through it.

Python's own reader keeps the last value of a key that is there twice, and the first one is lost without a word.
"""

from __future__ import annotations

import json
from typing import Any

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
