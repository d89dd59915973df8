"""The index is read row by row from its columns' buffers, with the same values as by pyarrow."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_cache.format.identity import HASHED_BLOCK, content_hash, copy_hashed
from qwen_cache.format.index import index_schema, record_reader

INTEGERS = {pa.int32(): st.integers(-(2**31), 2**31 - 1), pa.int64(): st.integers(-(2**63), 2**63 - 1)}


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """Any value of a column of that type, or none."""
    if pa.types.is_struct(kind):
        some: st.SearchStrategy[Any] = st.fixed_dictionaries({field.name: values(field.type) for field in kind})
    elif pa.types.is_list(kind):
        some = st.lists(values(kind.value_type), max_size=3)
    else:
        some = st.text(max_size=8) if pa.types.is_string(kind) else INTEGERS[kind]
    return st.none() | some


@pytest.mark.parametrize("format_version", [1, 2])
def test_every_record_is_the_one_of_pyarrow(format_version: int) -> None:
    """With nulls anywhere, and for a table that begins within its buffers or has several chunks."""
    schema = index_schema(format_version)

    @settings(max_examples=40)
    @given(
        st.lists(st.fixed_dictionaries({f.name: values(f.type) for f in schema}), min_size=1, max_size=12), st.data()
    )
    def check(records: list[dict[str, Any]], data: st.DataObject) -> None:
        table = pa.Table.from_pylist(records, schema)
        begin = data.draw(st.integers(0, len(records)))
        for each in (table, table.slice(begin), pa.concat_tables([table, table.slice(begin)])):
            read = record_reader(each)
            assert [read(i) for i in range(each.num_rows)] == each.to_pylist()

    check()


@pytest.mark.parametrize("size", [0, 1, HASHED_BLOCK - 1, HASHED_BLOCK, 2 * HASHED_BLOCK + 5])
def test_a_hashed_copy_is_the_copy_and_its_hash(size: int) -> None:
    source, target = bytes(i * i % 251 for i in range(size)), bytearray(size)
    assert copy_hashed(memoryview(source), memoryview(target)) == content_hash(source)
    assert bytes(target) == source


@pytest.mark.parametrize("size", [0, 5, HASHED_BLOCK, HASHED_BLOCK + 9])
def test_a_target_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        copy_hashed(memoryview(bytes(8)), memoryview(bytearray(size)))
