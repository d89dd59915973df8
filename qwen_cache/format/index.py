"""The index in Parquet: its columns, what its pages may claim, and reading it within bounds."""

from __future__ import annotations

import io
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from qwen_cache.errors import IndexFileError, SampleKeyError
from qwen_cache.format.identity import HASH_PATTERN, Inputs, Slider
from qwen_cache.format.measured import MEASURED, MEASURED_TYPE, parse_measured
from qwen_cache.format.sample import (
    MAX_RATIO,
    PIXELS_PER_TOKEN,
    SLIDER_EMBEDS,
    TENSORS,
    ImgShapes,
    SampleMeta,
    TensorSpec,
    check_shapes,
    parse_phrase,
    parse_positions,
)
from qwen_cache.format.shard import Entry

# ---- pages -----------------------------------------------------------------------------------------------------------
# What a Parquet file takes in memory, before pyarrow allocates what its footer and the headers of its pages claim.
#
# Both are Thrift's compact protocol (https://github.com/apache/parquet-format, parquet.thrift), read here as pyarrow
# reads them: a field of another type than the specification's is refused, an unknown field is skipped. Every refusal is
# a ValueError. pyarrow's own access to a footer from Python ends the process where statistics contradict the schema.

TAIL = 8  # bytes after the footer: its length, and PAR1
PER_VALUE = 16  # bytes: an int64, and the levels and the offset of a value
MOST_ITEMS, MOST_FIELDS, DEEPEST = 1 << 16, 64, 12  # of a list, of a struct, of structs in structs: above any real file

BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, MAP, STRUCT = range(3, 13)  # 1 and 2 are true and false
INTEGERS = {I16: 15, I32: 31, I64: 63}  # bits of their absolute values
SIZES = {1: 0, 2: 0, BYTE: 1, DOUBLE: 8}  # a boolean is in its type

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
    try:
        return _read_claims(data, limit)
    except IndexError:
        raise ValueError("a header reaches beyond the file") from None


def _read_claims(data: memoryview, limit: int) -> Claims:
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
        head = data[position]
        position += 1
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
    expected = known
    if not isinstance(known, int):
        expected = kind if known is None else STRUCT if isinstance(known, dict) else LIST
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
    if kind not in SIZES:
        raise ValueError("a field has a type that Parquet does not use")
    return None, position + SIZES[kind]


def _list(data: memoryview, position: int, known: Any, depth: int) -> tuple[list[Any], int]:
    head, position = data[position], position + 1
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


def _varint(data: memoryview, position: int) -> tuple[int, int]:
    value = data[position]
    if value < 128:  # most are
        return value, position + 1
    value &= 127
    for shift in range(7, 70, 7):
        position += 1
        byte = data[position]
        value |= (byte & 127) << shift
        if byte < 128:
            return value, position + 1
    raise ValueError("a number does not end")


def _integer(data: memoryview, position: int, kind: int) -> tuple[int, int]:
    value, position = _varint(data, position)
    if (value := value >> 1 ^ -(value & 1)).bit_length() > INTEGERS[kind]:
        raise ValueError("a number is too large")
    return value, position


# ---- index -----------------------------------------------------------------------------------------------------------
# index.parquet: one row per sample, enough to plan every batch without opening a shard.
#
# Rows are in the order of the source. Each tensor is a struct column (dtype, shape, offset, length, xxh3_128, codec),
# null if the sample does not have it; offsets are from the beginning of the shard. Format v1 has image sizes in pixels
# instead of `img_shapes` and `prefix_length`. The columns of `OPTIONAL` are there only if a sample has a value.
#
# An index is written and read in row groups, so neither needs memory for all of it. What it decodes to is bounded by
# its size: an index that decodes to more than `MAX_RATIO` times its bytes is refused before it is decoded.

INDEX_NAME = "index.parquet"
LEAST_BOUND = 1 << 26  # bytes that any index may decode to, however small it is
FOOTER_LIMITS = {"thrift_string_size_limit": 1 << 20, "thrift_container_size_limit": 1 << 16}
"""Limits of a footer: ours has strings of 12 kB, 130 elements in its schema, and a row group per `ROW_GROUP` rows."""
ROW_GROUP = 1 << 16  # rows that are written and read at a time: 80 MB
PARSED = 1 << 12  # rows that are Python objects at a time, at 8 kB each
KEY_DIGITS = 12  # of a key in messages: enough to find the sample in a million
SEED, REJECTED, REJECTED_SHAPE, REJECTED_LATENTS = "seed", "rejected", "rejected_shape", "rejected_latents"
SLIDER = ("slider_positive", "slider_negative")
"""The columns of the two prompts of a slider's direction."""

_TENSOR = pa.struct(
    [
        ("dtype", pa.string()),
        ("shape", pa.list_(pa.int32())),
        ("offset", pa.int64()),
        ("length", pa.int64()),
        ("xxh3_128", pa.string()),
        ("codec", pa.string()),
    ]
)
OPTIONAL: dict[str, pa.DataType] = {
    SEED: pa.int64(),
    MEASURED: MEASURED_TYPE,
    REJECTED: pa.string(),
    REJECTED_SHAPE: pa.list_(pa.int32()),
    REJECTED_LATENTS: _TENSOR,
    **dict.fromkeys(SLIDER, pa.string()),
    **dict.fromkeys(SLIDER_EMBEDS, _TENSOR),
}
"""Columns that an index has only if a sample has a value there; none in format v1."""
NULLABLE = {1: {"mask", *TENSORS[1]}, 2: {"target", "mask", "edit_mask_from", *OPTIONAL, *TENSORS[2]}}
_OF_VERSION = {
    1: [
        ("height", pa.int32()),
        ("width", pa.int32()),
        ("height_control", pa.list_(pa.int32())),
        ("width_control", pa.list_(pa.int32())),
    ],
    2: [
        ("img_shapes", pa.list_(pa.list_(pa.int32()))),
        ("prefix_length", pa.int32()),
        ("phrase", pa.list_(pa.list_(pa.int32()))),
        ("edit_mask_from", pa.string()),
        ("image_positions", pa.list_(pa.int32())),
    ],
}


def index_schema(format_version: int, having: Collection[str] = ()) -> pa.Schema:
    """The columns of index.parquet, with those of `OPTIONAL` that are in `having`."""
    absent = OPTIONAL.keys() - having if format_version > 1 else OPTIONAL.keys()
    optional = [(name, kind) for name, kind in OPTIONAL.items() if name not in {*absent, *TENSORS[2]}]
    return pa.schema(
        [
            ("key", pa.string()),
            ("recipe", pa.string()),
            ("name", pa.string()),
            ("prompt", pa.string()),
            *_OF_VERSION[format_version],
            ("text_length", pa.int32()),
            ("target", pa.string()),
            ("controls", pa.list_(pa.string())),
            ("mask", pa.string()),
            *optional,
            ("source_rows", pa.int32()),
            ("shard", pa.string()),
            ("offset", pa.int64()),
            ("length", pa.int64()),
            *((name, _TENSOR) for name in TENSORS[format_version] if name not in absent),
        ]
    )


@dataclass(frozen=True)
class IndexRow:
    """A sample, its name in the source, and its position in a shard."""

    name: str
    shard: str
    entry: Entry
    source_rows: int = 1
    """The number of source rows with this content; it is stored once, and by default trained once in an epoch."""

    @property
    def meta(self) -> SampleMeta:
        return self.entry.meta

    @property
    def label(self) -> str:
        """The name and the first digits of the key, for messages: people know the name, and the key is unique."""
        return f"{self.name} ({self.meta.key[:KEY_DIGITS]})"


def write_index(rows: Sequence[IndexRow], format_version: int) -> bytes:
    """The bytes of index.parquet; equal rows give equal bytes."""
    schema = index_schema(format_version, optional_columns(row.meta for row in rows))
    groups = [rows[begin : begin + ROW_GROUP] for begin in range(0, len(rows), ROW_GROUP)]
    return write_tables(lambda: (table_of(group, format_version, schema) for group in groups), schema)


def optional_columns(samples: Iterable[SampleMeta]) -> set[str]:
    """The columns of `OPTIONAL` that an index of these samples has."""
    found = set[str]()
    for meta in samples:
        found |= {SEED} if meta.inputs.seed is not None else set()
        found |= {MEASURED} if meta.measured is not None else set()
        found |= {REJECTED, REJECTED_SHAPE, REJECTED_LATENTS} if meta.inputs.rejected is not None else set()
        found |= {*SLIDER, *SLIDER_EMBEDS} if meta.slider is not None else set()
    return found


def table_of(rows: Sequence[IndexRow], format_version: int, schema: pa.Schema) -> pa.Table:
    """The table of `rows`."""
    parts = [
        pa.Table.from_pylist([_to_record(row, format_version) for row in rows[begin : begin + PARSED]], schema)
        for begin in range(0, len(rows), PARSED)
    ]
    return pa.concat_tables([schema.empty_table(), *parts])


def write_tables(groups: Callable[[], Iterable[pa.Table]], schema: pa.Schema) -> bytes:
    """The bytes of index.parquet from its row groups: each but the last has `ROW_GROUP` rows.

    `groups` may be called twice.
    """
    data, decoded = _parquet(groups(), schema, compression="zstd")
    if decoded > bound(len(data)):  # the same long prompts everywhere: readers would refuse it
        data, _ = _parquet(groups(), schema, compression="none", use_dictionary=False)
    return data


def _parquet(groups: Iterable[pa.Table], schema: pa.Schema, **options: Any) -> tuple[bytes, int]:
    """The bytes of a Parquet file, and those that it decodes to. Equal rows give equal pages, however they are cut."""
    sink, decoded, is_empty = io.BytesIO(), 0, True
    with pq.ParquetWriter(sink, schema, **options) as writer:
        for group in groups:
            decoded, is_empty = decoded + decoded_bytes(group), False
            writer.write_table(group.combine_chunks(), ROW_GROUP)
        if is_empty:
            writer.write_table(schema.empty_table())
    return sink.getvalue(), decoded


def bound(size: int) -> int:
    """The bytes that an index of `size` bytes may decode to."""
    return max(LEAST_BOUND, MAX_RATIO * size)


def read_index(data: bytes | memoryview, format_version: int, where: str, samples: int) -> pa.Table:
    """The table of `samples` rows; FormatError F7 if it has other columns or rows, or decodes to too many bytes."""
    schema, batches = read_batches(data, format_version, where, samples)
    return pa.Table.from_batches(batches, schema).combine_chunks()


def read_batches(
    data: bytes | memoryview, format_version: int, where: str, samples: int
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Like `read_index`, at most `ROW_GROUP` rows at a time; the schema is checked before the first."""
    refused = (pa.ArrowException, OSError, UnicodeDecodeError, ValueError)

    def explained(error: Exception) -> IndexFileError:
        return IndexFileError(f"this is not a Parquet file that can be read: {error}", where=where)

    def batches(file: pq.ParquetFile, expected: pa.Schema) -> Iterator[pa.RecordBatch]:
        try:
            decoded = 0
            for batch in file.iter_batches(ROW_GROUP, use_threads=False):
                batch.validate(full=True)  # UTF-8, indices and offsets, because `record_reader` reads the buffers
                decoded += decoded_bytes(pa.Table.from_batches([batch]))
                _refuse_bomb(decoded, len(data), where)
                yield batch.cast(expected)
        except refused as error:
            raise explained(error) from None

    try:
        file, expected = _opened(data, format_version, where, samples)
    except refused as error:
        raise explained(error) from None
    return expected, batches(file, expected)


def _opened(
    data: bytes | memoryview, format_version: int, where: str, samples: int
) -> tuple[pq.ParquetFile, pa.Schema]:
    """The file, whose claims are checked, and its schema."""
    claims = read_claims(memoryview(data), bound(len(data)))
    if claims.rows != samples:
        what = "index and manifest have different numbers of samples"
        raise IndexFileError(what, where=where, expected=samples, found=claims.rows)
    _refuse_bomb(claims.bytes, len(data), where)
    file = pq.ParquetFile(pa.BufferReader(data), **FOOTER_LIMITS)
    found = file.schema
    columns = found.to_arrow_schema()
    expected = index_schema(format_version, columns.names)
    if not columns.equals(expected):
        other = ", ".join(f"{field.name}: {field.type}" for field in columns if field not in list(expected))
        raise IndexFileError(
            "the columns are not those of this format version", where=where, expected=expected.names, found=other
        )
    if claims.rows and claims.columns != len(found):
        raise ValueError("a row group has another number of columns than the schema")
    texts = [field.name for field in expected if pa.types.is_string(field.type)]
    # read_table would take 0.1 s to import pyarrow.dataset; pyarrow's threads can abort a short process with torch
    return pq.ParquetFile(pa.BufferReader(data), metadata=file.metadata, read_dictionary=texts), expected


def _refuse_bomb(decoded: int, size: int, where: str) -> None:
    if decoded > bound(size):
        expected = f"at most {bound(size)} bytes from {size}"
        raise IndexFileError("the index decodes to too many bytes", where=where, expected=expected, found=decoded)


def decoded_bytes(table: pa.Table) -> int:
    """The bytes of the table, with every value of a dictionary as often as it occurs."""
    return sum(_decoded_bytes(chunk) for column in table.columns for chunk in column.chunks)


def _decoded_bytes(array: pa.Array) -> int:
    if pa.types.is_struct(array.type):
        return sum(_decoded_bytes(array.field(i)) for i in range(array.type.num_fields))
    if pa.types.is_list(array.type):
        return int(array.nbytes - array.values.nbytes) + _decoded_bytes(array.values)
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary).cast(pa.int64())
        return int(array.indices.nbytes) + (pc.sum(lengths.take(array.indices)).as_py() or 0)
    return int(array.nbytes)


def record_reader(table: pa.Table) -> Callable[[int], dict[str, Any]]:
    """A function that returns the record of a row of `table`, like `table.to_pylist()[row]`.

    It reads the buffers of the columns. Converting one row with pyarrow takes four times as long; converting all of a
    million samples would take gigabytes.
    """
    batches = table.to_batches()
    ends = list(accumulate(batch.num_rows for batch in batches))
    of_batch = cache(lambda number: _batch_reader(batches[number]))  # a reader takes as much memory as 20 rows

    def read(row: int) -> dict[str, Any]:
        number = bisect_right(ends, row)
        return of_batch(number)(row - (ends[number] - batches[number].num_rows))

    return of_batch(0) if len(batches) == 1 else read


def _batch_reader(batch: pa.RecordBatch) -> Callable[[int], dict[str, Any]]:
    columns = [(name, _array_reader(batch.column(i))) for i, name in enumerate(batch.schema.names)]
    return lambda row: {name: read(row) for name, read in columns}


def _array_reader(array: pa.Array) -> Callable[[int], Any]:
    """Reads one value. Arrow's layout: a bitmap of valid values, offsets for types of variable length, then values."""
    read, valid, first = _value_reader(array), array.buffers()[0], array.offset
    if not array.null_count:
        return read
    bits = memoryview(valid)
    return lambda i: read(i) if bits[(first + i) >> 3] >> ((first + i) & 7) & 1 else None


def _value_reader(array: pa.Array) -> Callable[[int], Any]:
    """Reads one non-null value of a type in `index_schema`."""
    kind = array.type
    if pa.types.is_struct(kind):
        fields = [(field.name, _array_reader(array.field(i))) for i, field in enumerate(kind)]
        return lambda i: {name: read(i) for name, read in fields}
    buffer = memoryview(array.buffers()[1] or b"")
    if pa.types.is_float64(kind):
        return buffer.cast("d")[array.offset :].__getitem__
    numbers = buffer.cast("q" if pa.types.is_int64(kind) else "i")[array.offset :]
    if pa.types.is_list(kind):
        item = _array_reader(array.values)
        return lambda i: [item(j) for j in range(numbers[i], numbers[i + 1])]
    if pa.types.is_string(kind):
        text = memoryview(array.buffers()[2] or b"")
        return lambda i: str(text[numbers[i] : numbers[i + 1]], "utf-8")
    return numbers.__getitem__


def index_row(record: dict[str, Any], format_version: int, where: str) -> IndexRow:
    """The row from a record of the table; FormatError if it contradicts itself."""
    where = f"{where}: {record['key']}"
    try:
        return _index_row(record, format_version, where)
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:  # nulls in lists and structs
        raise IndexFileError(f"a row of the index cannot be read: {error}", where=where) from None


def _index_row(record: dict[str, Any], format_version: int, where: str) -> IndexRow:
    present = {name: record[name] for name in TENSORS[format_version] if record.get(name) is not None}
    if missing := [name for name, value in record.items() if value is None and name not in NULLABLE[format_version]]:
        raise IndexFileError(f"{missing[0]} is null", where=where)
    tensors = {name: _tensor_spec(tensor, format_version) for name, tensor in present.items()}
    inputs = Inputs(record["target"], tuple(record["controls"]), record["mask"], record.get(SEED), record.get(REJECTED))
    shapes: ImgShapes
    if format_version == 1:
        heights, widths = [record["height"], *record["height_control"]], [record["width"], *record["width_control"]]
        if any(side % PIXELS_PER_TOKEN for side in (*heights, *widths)):
            raise ValueError(f"sides must be multiples of {PIXELS_PER_TOKEN}")
        sizes = zip(heights, widths, strict=True)
        shapes = tuple((1, h // PIXELS_PER_TOKEN, w // PIXELS_PER_TOKEN) for h, w in sizes)
    else:
        shapes = tuple((int(t), int(h), int(w)) for t, h, w in record["img_shapes"])  # no nulls
    prefix = record.get("prefix_length", 0)
    phrase, mask_from = parse_phrase(record.get("phrase", []), where), record.get("edit_mask_from")
    positions = parse_positions(record.get("image_positions", []), where)
    recipe, prompt = record["recipe"], record["prompt"]
    measured = parse_measured(record[MEASURED], where) if record.get(MEASURED) else None
    of_text = prefix, tensors, phrase, mask_from, positions
    rejected = record.get(REJECTED_SHAPE)
    rejected_shape = (int(rejected[0]), int(rejected[1]), int(rejected[2])) if rejected else None
    prompts = [record.get(name) for name in SLIDER]
    if prompts.count(None) == 1:
        what = "a sample has one of the two prompts of a slider's direction"
        raise IndexFileError(what, where=where, expected=" and ".join(SLIDER), found=SLIDER[prompts[0] is None])
    slider = None if None in prompts else Slider(*map(str, prompts))
    meta = SampleMeta(recipe, inputs, prompt, shapes, *of_text, measured, rejected_shape, slider)
    images = [digest for digest in (inputs.target, inputs.mask, inputs.rejected) if digest is not None]
    hashes = [meta.recipe, *images, *inputs.controls, *(spec.xxh3_128 for spec in tensors.values())]
    if not all(map(HASH_PATTERN.fullmatch, hashes)):
        raise IndexFileError("a hash is not an xxh3-128", where=where)
    if inputs.seed is not None and inputs.seed < 0:
        raise IndexFileError("a seed is negative", where=where, found=inputs.seed)
    if meta.key != record["key"]:
        raise SampleKeyError("the key is not the hash of content and recipe", where=where, expected=meta.key)
    check_shapes(meta, where)
    if meta.text_length != record["text_length"]:
        raise IndexFileError("text_length", where=where, expected=meta.text_length, found=record["text_length"])
    begin = int(next(iter(present.values()))["offset"])
    entry = Entry(meta, int(record["offset"]), int(record["length"]), begin)
    for name, offset in entry.tensor_offsets().items():
        claimed = present[name]["offset"], present[name]["length"]
        within = entry.offset <= offset and offset + tensors[name].stored_bytes <= entry.offset + entry.length
        if claimed != (offset, tensors[name].stored_bytes) or not within:
            raise IndexFileError(f"{name} is outside its sample, or not at its offset", where=where, found=claimed)
    return IndexRow(str(record["name"]), str(record["shard"]), entry, int(record["source_rows"]))


def _tensor_spec(record: dict[str, Any], format_version: int) -> TensorSpec:
    compressed = record["length"] if record["codec"] else None
    if format_version == 1 and record["codec"] is not None:
        raise ValueError("format v1 has no compression")
    return TensorSpec(record["dtype"], tuple(record["shape"]), record["xxh3_128"], record["codec"], compressed)


def _to_record(row: IndexRow, format_version: int) -> dict[str, Any]:
    meta, entry = row.meta, row.entry
    record: dict[str, Any] = {
        "key": meta.key,
        "recipe": meta.recipe,
        "name": row.name,
        "prompt": meta.prompt,
        "text_length": meta.text_length,
        **meta.inputs.to_json(),
        "source_rows": row.source_rows,
        "shard": row.shard,
        "offset": entry.offset,
        "length": entry.length,
    }
    if format_version == 1:
        (_, h, w), *controls = meta.img_shapes
        record |= {"height": h * PIXELS_PER_TOKEN, "width": w * PIXELS_PER_TOKEN}
        record |= {"height_control": [h * PIXELS_PER_TOKEN for _, h, _ in controls]}
        record |= {"width_control": [w * PIXELS_PER_TOKEN for _, _, w in controls]}
    else:
        record |= {"img_shapes": [list(shape) for shape in meta.img_shapes], "prefix_length": meta.prefix_length}
        record |= {"phrase": [list(span) for span in meta.phrase], "edit_mask_from": meta.edit_mask_from}
        record |= {"image_positions": list(meta.image_positions)}
        record |= {MEASURED: meta.measured.to_json() if meta.measured else None}
        record |= {REJECTED_SHAPE: list(meta.rejected_shape) if meta.rejected_shape else None}
        record |= dict(zip(SLIDER, meta.slider or (None, None), strict=True))
    for name, offset in entry.tensor_offsets().items():
        spec = meta.tensors[name]
        record[name] = {**spec.to_json(), "offset": offset, "length": spec.stored_bytes}
    return record
