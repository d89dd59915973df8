"""The keys of many samples in 24 bytes each: where a key is, and which occur twice.

A key is found by bisection; a column of keys, all at once. Refused: a key that is not an xxh3-128.
"""

from __future__ import annotations

from bisect import bisect_left
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from qwen_cache.errors import IndexFileError
from qwen_cache.format.identity import HASH_PATTERN

IntArray = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]  # [N, 2]: the first and the last 64 bits of each hash
DIGITS = 32
AT_ONCE = 1 << 16  # hashes decoded at a time
_NIBBLES = np.full(256, 255, np.uint8)
_NIBBLES[np.frombuffer(b"0123456789abcdef", np.uint8)] = np.arange(16)


def hash_words(hashes: pa.ChunkedArray, where: object) -> Words:
    """`[N, 2]`: the hashes of a column, which are 32 hexadecimal digits each; else IndexFileError."""
    words: Words = np.empty((len(hashes), 2), np.uint64)
    begin = 0
    for chunk in hashes.chunks:
        for first in range(0, len(chunk), AT_ONCE):
            piece = chunk.slice(first, AT_ONCE)
            words[begin : begin + len(piece)] = _decoded(piece, where)
            begin += len(piece)
    return words


def _decoded(hashes: pa.StringArray, where: object) -> Words:
    _, offsets, text = hashes.buffers()
    ends = np.frombuffer(offsets, np.int32)[hashes.offset : hashes.offset + len(hashes) + 1]
    if hashes.null_count or (np.diff(ends) != DIGITS).any():
        raise IndexFileError("a key is not an xxh3-128", where=where)
    digits = _NIBBLES[np.frombuffer(text or b"", np.uint8)[ends[0] : ends[-1]]]
    if digits.max(initial=0) > 15:
        raise IndexFileError("a key is not an xxh3-128", where=where)
    return (digits[0::2] << 4 | digits[1::2]).view(">u8").reshape(-1, 2).astype(np.uint64)


def first_of_each(words: Words) -> npt.NDArray[np.bool_]:
    """`[N]`: whether no earlier hash is the same."""
    order = np.lexsort((words[:, 1], words[:, 0]))  # keeps the order of equal ones
    in_order, is_first = words[order], np.ones(len(words), bool)
    is_first[order[1:]] = (in_order[1:] != in_order[:-1]).any(axis=1)
    return is_first


class Keys:
    """The positions of keys: `words` are those of the samples at `positions`, by default from 0 on."""

    def __init__(self, words: Words, positions: IntArray | None = None) -> None:
        order = np.argsort(words[:, 0], kind="stable")
        high = words[order, 0]
        if (high[1:] == high[:-1]).any():
            order = np.lexsort((words[:, 1], words[:, 0]))
            high = words[order, 0]
        self._high, self._low = high, words[order, 1]
        self._positions: IntArray = order if positions is None else positions[order]

    def __len__(self) -> int:
        return len(self._high)

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self.find(key) >= 0

    @cached_property
    def _bisected(self) -> tuple[memoryview, memoryview]:
        """The words as Python's numbers: comparing NumPy's takes three times as long."""
        return memoryview(self._high), memoryview(self._low)

    def find(self, key: str) -> int:
        """The position of a key, the first of several; -1 if there is none."""
        if not HASH_PATTERN.fullmatch(key):
            return -1
        highs, lows = self._bisected
        high, low = int(key[:16], 16), int(key[16:], 16)
        at = bisect_left(highs, high)
        while at < len(highs) and highs[at] == high:
            if lows[at] == low:
                return int(self._positions[at])
            at += 1
        return -1

    def find_all(self, words: Words) -> IntArray:
        """`[N]`: the position of each key, -1 where there is none."""
        found: IntArray = np.full(len(words), -1, np.int64)
        order = np.argsort(words[:, 0], kind="stable")  # in order, each search is near the last one
        at = np.searchsorted(self._high, words[order, 0])
        wanted = np.arange(len(words))
        while len(wanted):
            inside = at < len(self._high)
            wanted, at = wanted[inside], at[inside]
            same = self._high[at] == words[order[wanted], 0]
            wanted, at = wanted[same], at[same]
            equal = self._low[at] == words[order[wanted], 1]
            found[order[wanted[equal]]] = self._positions[at[equal]]
            wanted, at = wanted[~equal], at[~equal] + 1  # other keys with the same first half
        return found

    def repeated(self) -> IntArray:
        """The positions of keys that occurred before, in no order."""
        same = (self._high[1:] == self._high[:-1]) & (self._low[1:] == self._low[:-1])
        repeated: IntArray = self._positions[1:][same]
        return repeated
