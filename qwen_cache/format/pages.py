"""What a Parquet file takes in memory, before pyarrow allocates what its footer and the headers of its pages claim.

Both are Thrift's compact protocol (https://github.com/apache/parquet-format, parquet.thrift), read here as pyarrow
reads them: a field of another type than the specification's is refused, an unknown field is skipped. Every refusal is a
ValueError. pyarrow's own access to a footer from Python ends the process where statistics contradict the schema.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

TAIL = 8  # bytes after the footer: its length, and PAR1
PER_VALUE = 16  # bytes: an int64, and the levels and the offset of a value
MOST_ITEMS, MOST_FIELDS, DEEPEST = 1 << 16, 64, 12  # of a list, of a struct, of structs in structs: above any real file

BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(3, 13)  # 1 and 2 are true and false
INTEGERS = {I16: 15, I32: 31, I64: 63}  # bits of their absolute values

# parquet.thrift: by the id of a field its type, [the type of its items], or the fields of a struct; {} skips a struct.
SIZE_STATISTICS, GEOSPATIAL = {1: I64, 2: [I64], 3: [I64]}, {1: {}, 2: [I32]}
TYPE, PATH, CODEC, VALUES, COMPRESSED, DATA, DICTIONARY = 1, 3, 4, 5, 7, 9, 11
COLUMN = {TYPE: I32, 2: [I32], PATH: [BINARY], CODEC: I32, VALUES: I64, 6: I64, COMPRESSED: I64, 8: [{}]}
COLUMN |= {DATA: I64, 10: I64, DICTIONARY: I64, 12: {}, 13: [{}], 14: I64, 15: I32, 16: SIZE_STATISTICS, 17: GEOSPATIAL}
COLUMNS, ROWS, META = 1, 3, 3
GROUP = {COLUMNS: [{1: BINARY, 2: I64, META: COLUMN, 4: I64, 5: I32, 6: I64, 7: I32}], 2: I64, ROWS: I64, 4: [{}]}
GROUPS = 4
FOOTER = {1: I32, 2: [{}], ROWS: I64, GROUPS: [GROUP | {5: I64, 6: I64, 7: I16}], 5: [{}], 6: BINARY, 7: [{}]}
PAGE_SIZE, PAGE_STORED, DATA_PAGE, DICTIONARY_PAGE, DATA_PAGE_V2, COUNT = 2, 3, 5, 7, 8, 1
PAGE = {1: I32, PAGE_SIZE: I32, PAGE_STORED: I32, 4: I32, 6: {}, DICTIONARY_PAGE: {COUNT: I32}}
PAGE |= {DATA_PAGE: {COUNT: I32, 2: I32}, DATA_PAGE_V2: {COUNT: I32, 2: I32, 3: I32, 4: I32}}
ENCODING = {DATA_PAGE: 2, DATA_PAGE_V2: 4}
BYTE_ARRAY, DELTA_BYTE_ARRAY = 6, 7  # a type; an encoding in which a value repeats the last one in a few bytes
CODECS = {0: None, 1: "snappy", 2: "gzip", 4: "brotli", 6: "zstd", 7: "lz4_raw"}


@dataclass(frozen=True)
class Claims:
    """The rows and columns of a file, and the bytes that its columns take at most when they are decoded.

    Dictionaries of columns that are not nested count as such: pyarrow can keep them.
    """

    rows: int
    columns: int
    bytes: int


def read_claims(data: memoryview, limit: int) -> Claims:
    """The claims of a Parquet file, with `bytes` exact up to `limit`; ValueError unless footer and pages agree.

    Takes time that grows with the size of the file and with `limit`, whatever the file claims. pyarrow.ArrowException
    or OSError if a dictionary cannot be decompressed.
    """
    length = int.from_bytes(data[-TAIL:-4], "little")
    if bytes(data[-4:]) != b"PAR1" or not 0 < length <= data.nbytes - TAIL:
        raise ValueError("it does not end with a footer")
    footer, _ = _struct(data[-TAIL - length : -TAIL], 0, FOOTER)
    groups: list[dict[int, Any]] = footer.get(GROUPS, [])
    counts = {len(group.get(COLUMNS, ())) for group in groups}
    if len(counts) > 1 or footer.get(ROWS) != sum(group.get(ROWS, -1) for group in groups):
        raise ValueError("its row groups do not fit its footer")
    columns = [column.get(META, {}) for group in groups for column in group[COLUMNS]]
    if sum(max(0, column.get(COMPRESSED, 0)) for column in columns if column.get(VALUES) != 0) > data.nbytes:
        raise ValueError("its columns overlap")
    size = 0
    for column in columns:
        if size <= limit:
            size += _column_bytes(data, column, limit - size)
    return Claims(footer[ROWS], max(counts, default=0), size)


def _column_bytes(data: memoryview, column: dict[int, Any], limit: int) -> int:
    if column.get(VALUES) == 0:  # its offsets may be anything, and no page is read
        return 0
    begin = min(column.get(DATA, -1), column.get(DICTIONARY) or 1 << 63)
    nested_text = column.get(TYPE) == BYTE_ARRAY and len(column.get(PATH, ())) > 1
    size, values, longest = 0, 0, 0
    for page, stored in _pages(data, begin, begin + column.get(COMPRESSED, -1)):
        [(kind, header)] = [(kind, page[kind]) for kind in (DICTIONARY_PAGE, *ENCODING) if kind in page] or [(0, {})]
        count = header.get(COUNT, 0 if not kind else -1)
        if count < 0 or header.get(ENCODING.get(kind)) == DELTA_BYTE_ARRAY:
            raise ValueError("a page has an encoding or a number of values that is not supported")
        size += page[PAGE_SIZE] + PER_VALUE * count
        if kind != DICTIONARY_PAGE:
            values += count
        elif nested_text and size <= limit:
            longest = _longest(stored, page[PAGE_SIZE], column.get(CODEC, -1), count)
    if values != column.get(VALUES):
        raise ValueError(f"a column has {values} values, and its footer claims {column.get(VALUES)}")
    return size + values * longest


def _longest(stored: memoryview, size: int, codec: int, count: int) -> int:
    """The length of the longest text of a dictionary: texts, each after its length as u32."""
    if codec not in CODECS:
        raise ValueError("a column has an unknown codec")
    plain = memoryview(pa.decompress(pa.py_buffer(stored), size, CODECS[codec]) if CODECS[codec] else stored)
    longest = position = 0
    for _ in range(count):
        length = int.from_bytes(plain[position : position + 4], "little")
        longest, position = max(longest, length), position + 4 + length
        if position > plain.nbytes:
            raise ValueError("a dictionary reaches beyond its page")
    return longest


def _pages(data: memoryview, position: int, end: int) -> Iterator[tuple[dict[int, Any], memoryview]]:
    """The header and the stored bytes of each page of a column."""
    if not 0 <= position <= end <= data.nbytes:
        raise ValueError("a column is outside the file")
    while position < end:
        page, position = _struct(data, position, PAGE)
        position += (stored := page.get(PAGE_STORED, -1))
        if min(page.get(PAGE_SIZE, -1), stored, end - position) < 0:
            raise ValueError("a page is outside its column")
        yield page, data[position - stored : position]


def _struct(data: memoryview, position: int, known: dict[int, Any], depth: int = 0) -> tuple[dict[int, Any], int]:
    """The known fields of a struct by their ids, and the position after it."""
    fields: dict[int, Any] = {}
    last = 0
    for _ in range(MOST_FIELDS):
        head, position = _byte(data, position)
        if not head:
            return fields, position
        kind = head & 15
        if head >> 4:
            last += head >> 4
        else:
            last, position = _integer(data, position, I16)
        if last in fields:
            raise ValueError("a field is given twice")
        value, position = _value(data, position, kind, known.get(last), depth)
        if last in known:
            fields[last] = value
    raise ValueError("a struct has too many fields")


def _value(data: memoryview, position: int, kind: int, known: Any, depth: int) -> tuple[Any, int]:
    """A value of the type `kind`, and the position after it."""
    expected = {dict: STRUCT, list: LIST, int: known, type(None): kind}[type(known)]
    if kind != expected or depth > DEEPEST:
        raise ValueError("a field has another type than in Parquet")
    if kind in INTEGERS:
        return _integer(data, position, kind)
    if kind == STRUCT:
        return _struct(data, position, known or {}, depth + 1)
    if kind in (LIST, SET):
        return _list(data, position, known[0] if known else None, depth + 1)
    if kind == BINARY:
        size, position = _varint(data, position)
        return None, position + size
    sizes = {1: 0, 2: 0, BYTE: 1, DOUBLE: 8}  # a boolean is in its type
    if kind not in sizes:
        raise ValueError("a field has a type that Parquet does not use")
    return None, position + sizes[kind]


def _list(data: memoryview, position: int, known: Any, depth: int) -> tuple[list[Any], int]:
    head, position = _byte(data, position)
    count, kind = head >> 4, head & 15
    if count == 15:
        count, position = _varint(data, position)
    if count > min(MOST_ITEMS, data.nbytes - position):
        raise ValueError("a list has too many items")
    items = []
    for _ in range(count):
        item, position = _value(data, position, BYTE if kind in (1, 2) else kind, known, depth)
        items.append(item)
    return items, position


def _byte(data: memoryview, position: int) -> tuple[int, int]:
    if position >= data.nbytes:
        raise ValueError("a header reaches beyond the file")
    return data[position], position + 1


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte, position = _byte(data, position)
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position
    raise ValueError("a number does not end")


def _integer(data: memoryview, position: int, kind: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    if (value := value >> 1 ^ -(value & 1)).bit_length() > INTEGERS[kind]:
        raise ValueError("a number is too large")
    return value, position
