"""Strict reading of JSON: every key is taken by name and type, and unknown keys are refused.

A key whose value has `"must_understand": false` may be ignored; repeated keys, NaN and Infinity are not valid JSON.
JSON that is not of the format is read by `qwen_cache.text`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from qwen_cache.errors import FormatError, ManifestError, UnknownKeyError
from qwen_cache.format.identity import HASH_PATTERN, canonical_json
from qwen_cache.text import each_key_once


class Fields:
    """A JSON object, read key by key; `finish` refuses keys that were not read."""

    def __init__(self, value: Any, where: str, error: type[FormatError] = ManifestError) -> None:
        if not isinstance(value, dict):
            raise error("a JSON object is expected here", where=where, found=type(value).__name__)
        self.left, self.where, self.error = dict(value), where, error

    @classmethod
    def of_json(cls, data: bytes | memoryview, where: str, error: type[FormatError]) -> Fields:
        try:
            text = bytes(data).decode("utf-8")  # json.loads would accept UTF-16 and lone surrogates
            value = json.loads(text, object_pairs_hook=each_key_once, parse_constant=_refuse_constant)
            canonical_json(value)  # "\ud800", 1e999 and deep nesting can be read, but not written or hashed
        except (ValueError, RecursionError) as fault:  # UnicodeError is a ValueError
            raise error(f"this is not valid JSON: {fault}", where=where) from None
        return cls(value, where, error)

    def take(self, key: str, kind: type) -> Any:
        if key not in self.left:
            raise self.error(f'the key "{key}" is missing', where=self.where)
        value = self.left.pop(key)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            raise self.error(
                f'"{key}" is of the wrong type', where=self.where, expected=kind.__name__, found=type(value).__name__
            )
        return value

    def count(self, key: str) -> int:
        value = self.take(key, int)
        if not 0 <= value < 1 << 63:
            raise self.error(f'"{key}" must be from 0 to 2⁶³ - 1', where=self.where, found=value)
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
            raise self.error(f'"{key}" is not an xxh3-128', where=self.where, expected=expected, found=value)
        return value

    def finish(self) -> dict[str, Any]:
        """The remaining keys, all ignorable; UnknownKeyError for any other."""
        for key, value in self.left.items():
            if not (isinstance(value, Mapping) and value.get("must_understand") is False):
                raise UnknownKeyError(
                    f'unknown key "{key}", which is not marked as ignorable',
                    where=self.where,
                )
        return self.left


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a JSON number")
