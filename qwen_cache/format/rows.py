"""The rows of an index by key and by name, in the memory that millions of them may take."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import IndexFileError
from qwen_cache.format.identity import HASH_PATTERN
from qwen_cache.format.index import OPTIONAL, ROW_GROUP, IndexRow, index_row, record_reader
from qwen_cache.format.manifest import Manifest

# ---- keys ------------------------------------------------------------------------------------------------------------
# The keys of many samples in 24 bytes each: where a key is, and which occur twice.
#
# A key is found by bisection; a column of keys, all at once. Refused: a key that is not an xxh3-128.

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
            _, offsets, text = piece.buffers()
            ends = np.frombuffer(offsets, np.int32)[piece.offset : piece.offset + len(piece) + 1]
            if piece.null_count or (np.diff(ends) != DIGITS).any():
                raise IndexFileError("a key is not an xxh3-128", where=where)
            digits = _NIBBLES[np.frombuffer(text or b"", np.uint8)[ends[0] : ends[-1]]]
            if digits.max(initial=0) > 15:
                raise IndexFileError("a key is not an xxh3-128", where=where)
            words[begin : begin + len(piece)] = (digits[0::2] << 4 | digits[1::2]).view(">u8").reshape(-1, 2)
            begin += len(piece)
    return words


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


# ---- rows ------------------------------------------------------------------------------------------------------------
# The rows of an index as columns: looked up by key, listed by name, and taken into a new index.
#
# No row is a Python object before it is asked for, so ten million rows take the memory of their keys and positions.


@dataclass(frozen=True)
class ListedSample:
    """A row of a new dataset."""

    name: str
    key: str
    source_rows: int = 1


LISTED = pa.schema([("name", pa.string()), ("key", pa.string()), ("source_rows", pa.int32())])


class ListedSamples(Collection[ListedSample]):
    """The rows of a new dataset, as columns."""

    def __init__(self, table: pa.Table) -> None:
        self.table = table.select(LISTED.names)

    @classmethod
    def of(cls, rows: Iterable[ListedSample]) -> ListedSamples:
        """The listing of `rows`, which are not kept."""
        if isinstance(rows, ListedSamples):
            return rows
        rows, parts = iter(rows), [LISTED.empty_table()]
        while some := list(islice(rows, ROW_GROUP)):
            columns = {name: [getattr(row, name) for row in some] for name in LISTED.names}
            parts.append(pa.table(columns, LISTED))
        return cls(pa.concat_tables(parts))

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[ListedSample]:
        for batch in self.table.to_batches(ROW_GROUP):
            yield from map(ListedSample, *(column.to_pylist() for column in batch.columns))

    def __contains__(self, row: object) -> bool:
        return any(row == each for each in self)

    def __add__(self, other: ListedSamples) -> ListedSamples:
        return ListedSamples(pa.concat_tables([self.table, other.table]))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ListedSamples) and bool(self.table.equals(other.table))

    __hash__ = None  # type: ignore[assignment]

    def words(self, where: object) -> Words:
        """`[N, 2]`: the keys as numbers."""
        return hash_words(self.table["key"], where)

    def keys(self, which: IntArray) -> list[str]:
        """The keys of some rows."""
        keys: list[str] = self.table["key"].take(pa.array(which)).to_pylist()
        return keys


class KeyedRows(Mapping[str, IndexRow]):
    """The rows of an index at some positions, by their keys; each is parsed whenever it is asked for.

    FormatError for a row that contradicts itself.
    """

    def __init__(self, table: pa.Table, format_version: int, where: str, positions: IntArray) -> None:
        self.table, self.format_version, self.where, self.positions = table, format_version, where, positions

    @property
    def words(self) -> Words:
        """`[N, 2]`: the keys as numbers."""
        return hash_words(self.column("key"), self.where)

    @cached_property
    def found(self) -> Keys:
        """The positions of the keys in the table."""
        return Keys(self.words, self.positions)

    @cached_property
    def row(self) -> Callable[[int], IndexRow]:
        """The row at a position in the table."""
        read = record_reader(self.table)
        return lambda position: index_row(read(position), self.format_version, self.where)

    def at(self, positions: IntArray) -> KeyedRows:
        """The rows at other positions of the same table."""
        return KeyedRows(self.table, self.format_version, self.where, positions)

    def column(self, name: str) -> pa.ChunkedArray:
        """The values of these rows."""
        return taken(self.table.select([name]), self.positions)[name]

    def __getitem__(self, key: str) -> IndexRow:
        if (position := self.found.find(key)) < 0:
            raise KeyError(key)
        return self.row(position)

    def __contains__(self, key: object) -> bool:
        return key in self.found

    def __len__(self) -> int:
        return len(self.positions)

    def __iter__(self) -> Iterator[str]:
        return self.each("key")

    def each(self, name: str) -> Iterator[Any]:
        """The values of a column, which are not all in memory."""
        for begin in range(0, len(self), ROW_GROUP):
            yield from self.at(self.positions[begin : begin + ROW_GROUP]).column(name).to_pylist()

    def in_order(self) -> Iterator[IndexRow]:
        """The rows in the order of the table."""
        return (self.row(int(position)) for position in self.positions)

    def without(self, keys: Iterable[str]) -> KeyedRows:
        """The rows with other keys."""
        removed = pc.is_in(self.column("key"), pa.array(list(keys), pa.string())).to_numpy()
        return self.at(self.positions[~removed])

    def where_in(self, **values: Iterable[str | None]) -> KeyedRows:
        """The rows whose columns have one of these values each."""
        chosen = np.ones(len(self.table), bool)
        for name, allowed in values.items():
            found = pc.is_in(self.table[name], pa.array(list(set(allowed)), pa.string()))
            chosen &= found.to_numpy()
        return self.at(self.positions[chosen[self.positions]])


def listed(rows: KeyedRows) -> ListedSamples:
    """Rows of an index as those of a new dataset."""
    return ListedSamples(taken(rows.table.select(LISTED.names), rows.positions))


def shard_numbers(manifest: Manifest, rows: KeyedRows) -> IntArray:
    """`[N]`: for each row the position of its shard in the manifest, -1 for none."""
    names = pa.array([shard.name for shard in manifest.shards], pa.string())
    numbers: IntArray = pc.fill_null(pc.index_in(rows.column("shard"), names), -1).to_numpy().astype(np.int64)
    return numbers


def taken(table: pa.Table, positions: IntArray) -> pa.Table:
    """The rows at `positions`, in that order. Rows that follow each other are not copied."""
    if not len(positions):
        return table.schema.empty_table()
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    begins, ends = positions[np.r_[0, breaks]], positions[np.r_[breaks - 1, len(positions) - 1]] + 1
    if len(begins) <= max(16, len(positions) // 256):
        runs = zip(begins.tolist(), ends.tolist(), strict=True)
        return pa.concat_tables([table.slice(begin, end - begin) for begin, end in runs])
    order = np.argsort(positions, kind="stable")
    in_order, pieces, first = positions[order], [], 0
    for batch in table.to_batches():  # taking from a table with chunks would join them first
        begin, end = np.searchsorted(in_order, [first, first + batch.num_rows])
        if begin < end:
            pieces.append(batch.take(pa.array(in_order[begin:end] - first)))
        first += batch.num_rows
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    parts = [pa.Table.from_batches(pieces).combine_chunks().take(pa.array(back))]
    return pa.concat_tables(parts)


def fitted(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """The table with or without the columns of `OPTIONAL`, as `schema` has them."""
    for name in (name for name in OPTIONAL if name in schema.names and name not in table.schema.names):
        table = table.append_column(schema.field(name), pa.nulls(table.num_rows, schema.field(name).type))
    return table.select(schema.names)
