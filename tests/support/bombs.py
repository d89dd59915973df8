"""Indexes of some kilobytes that decode to far more."""

from __future__ import annotations

import io
from collections.abc import Set
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq


def dictionary(index: Path, rows: int, length: int, column: str) -> bytes:
    """`rows` times the first row of `index`, with one text of `length` bytes in `column`, or in `struct.field`."""
    table = pq.read_table(index).slice(0, 1).take(pa.array([0] * rows))
    long = pa.DictionaryArray.from_arrays(pa.array([0] * rows, pa.int32()), ["x" * length])
    name, _, field = column.partition(".")
    if field:
        tensor = table[name].combine_chunks()
        fields = [long if each.name == field else tensor.field(i) for i, each in enumerate(tensor.type)]
        table = _replaced(table, name, pa.StructArray.from_arrays(fields, [each.name for each in tensor.type]))
    else:
        table = _replaced(table, name, long)
    return _parquet(table)


def page(index: Path, length: int) -> bytes:
    """One row whose prompt has `length` bytes, in a compressed page."""
    return _parquet(
        _replaced(pq.read_table(index).slice(0, 1), "prompt", pa.array(["x" * length])), use_dictionary=False
    )


def prefixes(index: Path, rows: int, length: int) -> bytes:
    """`rows` times a prompt of `length` bytes, each encoded as the prefix of the one before."""
    table = pq.read_table(index).slice(0, 1).take(pa.array([0] * rows))
    table = _replaced(table, "prompt", pa.array(["x" * length] * rows))
    return _parquet(table, use_dictionary=False, column_encoding={"prompt": "DELTA_BYTE_ARRAY"})


def numbers(index: Path, count: int) -> bytes:
    """One row with a list of `count` times the same number."""
    values = pa.ListArray.from_arrays([0, count], pa.repeat(pa.scalar(7, pa.int32()), count))
    return _parquet(_replaced(pq.read_table(index).slice(0, 1), "image_positions", values))


def overlapping(pages: int, groups: int) -> bytes:
    """A footer of which all `groups` claim the same `pages`, which hold one value together."""
    last = _struct({1: 0, 2: 0, 3: 0, 5: _struct({1: 1, 2: 0})})
    data = b"PAR1" + _struct({1: 0, 2: 0, 3: 0, 5: _struct({1: 0, 2: 0})}) * (pages - 1) + last
    column = _struct({1: 1, 4: 0, 5: 1, 7: len(data) - 4, 9: 4}, big={5, 7, 9})
    group = _struct({1: bytes([0x1C]) + _struct({3: column}), 3: 1}, lists={1}, big={3})
    listed = bytes([0xFC]) + _varint(groups) + group * groups
    footer = _struct({3: groups, 4: listed}, lists={4}, big={3})
    return data + footer + len(footer).to_bytes(4, "little") + b"PAR1"


def _struct(fields: dict[int, int | bytes], lists: Set[int] = frozenset(), big: Set[int] = frozenset()) -> bytes:
    """In Thrift's compact protocol: i32 or i64 (`big`), and structs or lists, which are bytes already."""
    data, before = b"", 0
    for number, value in fields.items():
        kind = (9 if number in lists else 12) if isinstance(value, bytes) else 6 if number in big else 5
        data += bytes([(number - before) << 4 | kind])
        data += value if isinstance(value, bytes) else _varint(2 * value)
        before = number
    return data + b"\0"


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def _parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", store_schema=False, **options)
    return sink.getvalue()
