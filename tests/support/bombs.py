"""Indexes of some kilobytes that decode to far more."""

from __future__ import annotations

import io
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


def _replaced(table: pa.Table, name: str, values: pa.Array) -> pa.Table:
    return table.set_column(table.schema.get_field_index(name), name, values)


def _parquet(table: pa.Table, **options: object) -> bytes:
    sink = io.BytesIO()
    pq.write_table(table, sink, compression="zstd", store_schema=False, **options)
    return sink.getvalue()
