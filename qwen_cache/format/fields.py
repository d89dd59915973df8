"""JSON that is read strictly: every key is asked for by name and type, and what is left over is refused.

A key that says of itself `"must_understand": false` may be ignored; repeated keys, NaN and Infinity are not JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qwen_cache.format.errors import FormatError
from qwen_cache.format.identity import HASH_PATTERN

REBUILD = "restore the file from a copy, or run `qwen-cache build` into an empty folder"


class Fields:
    """A JSON object that is taken apart key by key; `finish` refuses what is left over."""

    def __init__(self, value: Any, where: str, rule: str = "F1") -> None:
        if not isinstance(value, dict):
            raise FormatError(
                rule, "a JSON object is expected here", where=where, found=type(value).__name__, do=REBUILD
            )
        self.left, self.where, self.rule = dict(value), where, rule

    @classmethod
    def of_json(cls, data: bytes | memoryview, where: str, rule: str) -> Fields:
        try:
            value = json.loads(bytes(data), object_pairs_hook=_refuse_repeated_keys, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            raise FormatError(rule, f"this is not valid JSON: {error}", where=where, do=REBUILD) from None
        return cls(value, where, rule)

    def take(self, key: str, kind: type) -> Any:
        if key not in self.left:
            raise FormatError(self.rule, f'the key "{key}" is missing', where=self.where, do=REBUILD)
        value = self.left.pop(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise FormatError(
                self.rule,
                f'"{key}" is of the wrong type',
                where=self.where,
                expected=kind.__name__,
                found=type(value).__name__,
                do=REBUILD,
            )
        return value

    def count(self, key: str) -> int:
        value = self.take(key, int)
        if value < 0:
            raise FormatError(self.rule, f'"{key}" must not be negative', where=self.where, found=value, do=REBUILD)
        return int(value)

    def hash(self, key: str) -> str:
        return self._check_hash(key, self.take(key, str))

    def hashes(self, key: str) -> list[str]:
        return [self._check_hash(key, value) for value in self.take(key, list)]

    def hash_or_null(self, key: str) -> str | None:
        value = self.take(key, object)
        return None if value is None else self._check_hash(key, value)

    def _check_hash(self, key: str, value: Any) -> str:
        if not (isinstance(value, str) and HASH_PATTERN.fullmatch(value)):
            expected = "32 lower-case hexadecimal digits"
            raise FormatError(
                self.rule, f'"{key}" is not an xxh3-128', where=self.where, expected=expected, found=value, do=REBUILD
            )
        return value

    def finish(self) -> dict[str, Any]:
        """The keys that may be ignored; any other key that is left is refused."""
        for key, value in self.left.items():
            if not (isinstance(value, Mapping) and value.get("must_understand") is False):
                raise FormatError(
                    "F3",
                    f'the key "{key}" is not known to this program and does not say that it may be ignored',
                    where=self.where,
                    do="upgrade: pip install --upgrade qwen-cache",
                )
        return self.left


def _refuse_repeated_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise ValueError("a key is given twice")
    return value


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
