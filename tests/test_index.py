"""The index is read row by row from its columns' buffers, with the same values as by pyarrow, in bounded memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qwen_cache import open_cache
from qwen_cache.errors import IndexFileError
from qwen_cache.format import index
from qwen_cache.format.identity import HASHED_BLOCK, content_hash, copy_hashed
from qwen_cache.format.index import (
    LEAST_BOUND,
    bound,
    decoded_bytes,
    index_schema,
    read_claims,
    read_index,
    record_reader,
    write_index,
)

from .support import bombs
from .support.paths import ROOT

EXAMPLE = ROOT / "schemas" / "examples" / "valid" / "cache.v2"

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

    @settings(max_examples=20)
    @given(st.lists(st.fixed_dictionaries({f.name: values(f.type) for f in schema}), min_size=1, max_size=5), st.data())
    def check(records: list[dict[str, Any]], data: st.DataObject) -> None:
        records = 3 * records  # more than a byte of a bitmap has bits
        table = pa.Table.from_pylist(records, schema)
        begin = data.draw(st.integers(0, len(records)))
        for each in (table, table.slice(begin), pa.concat_tables([table, table.slice(begin)])):
            read = record_reader(each)
            assert [read(i) for i in range(each.num_rows)] == each.to_pylist()

    check()


# ---- what a file claims, before it is decoded ------------------------------------------------------------------------

OPTIONS: dict[str, dict[str, Any]] = {
    "as written": {"compression": "zstd"},
    "plain": {"compression": "none", "use_dictionary": False},
    "second page version": {"compression": "snappy", "data_page_version": "2.0", "write_page_checksum": True},
    "many pages": {"compression": "gzip", "data_page_size": 64, "write_batch_size": 3, "dictionary_pagesize_limit": 80},
    "row groups, page index": {"row_group_size": 7, "write_page_index": True, "store_schema": False},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_an_index_of_any_writer_is_read(options: dict[str, Any]) -> None:
    """Whatever pages, encodings and codecs it uses, its values are the same, and its claims bound its size."""
    table = pa.concat_tables([pq.read_table(EXAMPLE / "index.parquet")] * 5)
    sink = io.BytesIO()
    pq.write_table(table, sink, **options)
    claims = read_claims(memoryview(sink.getvalue()), LEAST_BOUND)
    assert (claims.rows, claims.columns) == (30, 59)
    stored = pq.ParquetFile(io.BytesIO(sink.getvalue())).read()
    assert claims.bytes >= stored.nbytes or options.get("use_dictionary", True)
    assert read_index(sink.getvalue(), 2, "an index", 30).equals(table.combine_chunks())


@pytest.mark.parametrize("format_version", [1, 2])
def test_an_index_without_rows_is_read(format_version: int) -> None:
    table = read_index(write_index([], format_version), format_version, "an index", 0)
    assert table.equals(index_schema(format_version).empty_table())


def refusal(data: bytes, samples: int) -> str:
    with pytest.raises(IndexFileError) as refused:
        read_index(data, 2, "an index", samples)
    assert refused.value.rule == "F7"
    return refused.value.fault


def test_another_number_of_rows_is_refused_before_they_are_read() -> None:
    data = (EXAMPLE / "index.parquet").read_bytes()
    assert refusal(data, 7) == "index and manifest have different numbers of samples (expected 7, found 6) [F7]"


@pytest.mark.parametrize("cut", [0, 3, 8, 9, 5000])
def test_a_file_without_its_end_is_refused(cut: int) -> None:
    data = (EXAMPLE / "index.parquet").read_bytes()
    expected = "this is not a Parquet file that can be read: it does not end with a footer [F7]"
    assert refusal(data[: len(data) - cut] if cut else b"", 6) == expected


def test_pages_that_contradict_the_footer_are_refused() -> None:
    """Every byte of the footer and of the first pages: pyarrow never sees another number of values or bytes."""
    data = (EXAMPLE / "index.parquet").read_bytes()
    good = read_claims(memoryview(data), LEAST_BOUND)
    footer = int.from_bytes(data[-8:-4], "little")
    for at in [*range(4, 60, 3), *range(len(data) - 8 - footer, len(data) - 8, 700)]:
        for value in (0, 0x7F, 0xFF):
            with suppress(ValueError):
                changed = read_claims(memoryview(data[:at] + bytes([value]) + data[at + 1 :]), LEAST_BOUND)
                assert changed.bytes < good.bytes + (1 << 20)


BOMBS: dict[str, tuple[int, Callable[[Path], bytes]]] = {
    "a dictionary": (1000, lambda path: bombs.dictionary(path, 1000, 100_000, "prompt")),
    "a dictionary in a struct": (1000, lambda path: bombs.dictionary(path, 1000, 100_000, "image_latents.codec")),
    "a list": (1, lambda path: bombs.numbers(path, 1_000_000)),
    "a page": (1, lambda path: bombs.page(path, 10_000_000)),
}


@pytest.mark.parametrize("kind", BOMBS)
def test_an_index_that_decodes_to_too_much_is_refused(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is decoded, but for a dictionary of a column, which is not applied; `test_fuzz` limits the memory."""
    samples, make = BOMBS[kind]
    data = make(EXAMPLE / "index.parquet")
    assert len(data) < 50_000
    monkeypatch.setattr(index, "LEAST_BOUND", 1 << 20)
    if kind != "a dictionary":
        monkeypatch.delattr(pq.ParquetFile, "iter_batches")
    found = refusal(data, samples)
    assert found.startswith(
        f"the index decodes to too many bytes (expected at most {bound(len(data))} bytes from {len(data)}, f"
    )


def test_row_groups_that_claim_the_same_pages_are_refused() -> None:
    """Or an index of a megabyte would take hours."""
    assert read_claims(memoryview(bombs.overlapping(100, 1)), LEAST_BOUND).rows == 1
    assert "its columns overlap" in refusal(bombs.overlapping(20_000, 60_000), 60_000)


def test_texts_that_are_prefixes_of_each_other_are_refused() -> None:
    """No header tells what they decode to."""
    data = bombs.prefixes(EXAMPLE / "index.parquet", 100, 1000)
    expected = "a page has an encoding or a number of values that is not supported"
    assert refusal(data, 100) == f"this is not a Parquet file that can be read: {expected} [F7]"


def test_the_writer_writes_nothing_that_readers_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long prompt for every sample: without a dictionary, the file is as large as what it decodes to."""
    row = next(open_cache(EXAMPLE).rows())
    entry = replace(row.entry, meta=replace(row.meta, prompt="x" * 5000))
    rows = [replace(row, entry=entry)] * 100
    small = write_index(rows, 2)
    monkeypatch.setattr(index, "LEAST_BOUND", 1 << 12)
    assert bound(len(small)) > decoded_bytes(read_index(small, 2, "an index", 100))
    monkeypatch.setattr(index, "MAX_RATIO", 10)
    assert bound(len(small)) < 5000 * 100 < bound(len(write_index(rows, 2)))
    assert read_index(write_index(rows, 2), 2, "an index", 100)["prompt"].to_pylist() == ["x" * 5000] * 100
    assert "decodes to too many bytes" in refusal(small, 100)


@pytest.mark.parametrize("size", [0, 1, HASHED_BLOCK - 1, HASHED_BLOCK, 2 * HASHED_BLOCK + 5])
def test_a_hashed_copy_is_the_copy_and_its_hash(size: int) -> None:
    source, target = bytes(i * i % 251 for i in range(size)), bytearray(size)
    assert copy_hashed(memoryview(source), memoryview(target)) == content_hash(source)
    assert bytes(target) == source


@pytest.mark.parametrize("size", [0, 5, HASHED_BLOCK, HASHED_BLOCK + 9])
def test_a_target_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        copy_hashed(memoryview(bytes(8)), memoryview(bytearray(size)))
