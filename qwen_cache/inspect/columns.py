"""The columns of an index as NumPy arrays, a batch of rows at a time, so that no sample becomes a Python object.

`inspect` counts with these. They are not checked against each other, as `Cache.row` and `verify` do; a value that is
missing or of the wrong form is an IndexFileError.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import IndexFileError
from qwen_cache.format.cache import Cache
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.sample import BYTES_PER_ELEMENT, PIXELS_PER_TOKEN
from qwen_cache.storage.remote import Url

ROWS = 1 << 16
"""Rows of a batch: some 50 MB of arrays, and enough that the time for Python's part does not matter."""
HASH_DIGITS = 32
ELEMENT_SIZES = np.array(list(BYTES_PER_ELEMENT.values()))
NIBBLES = np.full(256, 255, np.uint8)
NIBBLES[list(b"0123456789abcdef")] = range(16)

Integers = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Digests = npt.NDArray[np.uint64]
"""`[N, 2]`: hashes of 128 bits."""


@dataclass(frozen=True)
class Images:
    """The images of N samples, one after another: of each the target, or the image to generate, then its controls."""

    counts: Integers
    """`[N]`: the images of each sample, 1 or more."""
    shapes: Integers
    """`[M, 3]`: 1, height and width of each image in tokens."""

    @property
    def first(self) -> Integers:
        """`[N]`: the position of each sample's first image."""
        first: Integers = np.cumsum(self.counts) - self.counts
        return first

    @property
    def tokens(self) -> Integers:
        """`[N]`: the image tokens of each sample."""
        tokens: Integers = np.add.reduceat(self.shapes.prod(1), self.first) if len(self.counts) else self.counts
        return tokens


@dataclass(frozen=True)
class Tensors:
    """One tensor of the samples that have it."""

    shapes: pa.Array
    """A list for each."""
    element_sizes: Integers
    nbytes: Integers
    stored_bytes: Integers


def batches(table: pa.Table, columns: Sequence[str], rows: int = ROWS) -> Iterator[pa.RecordBatch]:
    """Consecutive rows of these columns, as far as the table has them."""
    names = [name for name in columns if name in table.column_names]
    yield from table.select(names).to_batches(max_chunksize=rows)


@contextmanager
def reading(folder: Path | Url) -> Iterator[None]:
    """Errors in the columns of a cache's index as IndexFileErrors."""
    try:
        yield
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise IndexFileError(f"a column of the index cannot be read: {error}", where=folder / INDEX_NAME) from None


def integers(column: pa.Array) -> Integers:
    """A column of integers; ValueError where one is missing."""
    if column.null_count:
        raise ValueError("a number is null")
    values: Integers = column.to_numpy(zero_copy_only=False).astype(np.int64)
    return values


def images(batch: pa.RecordBatch) -> Images:
    """The images of a batch with the columns of sizes, of either format version."""
    if "img_shapes" not in batch.schema.names:
        return _images_in_pixels(batch)
    listed = batch["img_shapes"]
    counts, shapes = integers(pc.list_value_length(listed)), listed.flatten()
    sides = integers(pc.list_value_length(shapes))
    if (counts < 1).any() or (sides != 3).any():
        raise ValueError("img_shapes is not a list of [1, h, w]")
    return Images(counts, integers(shapes.flatten()).reshape(-1, 3))


def _images_in_pixels(batch: pa.RecordBatch) -> Images:
    counts = 1 + integers(pc.list_value_length(batch["height_control"]))
    if (counts != 1 + integers(pc.list_value_length(batch["width_control"]))).any():
        raise ValueError("height_control and width_control have different lengths")
    shapes = np.ones((int(counts.sum()), 3), np.int64)
    found = Images(counts, shapes)
    is_control = np.ones(len(shapes), bool)
    is_control[found.first] = False
    for axis, side in ((1, "height"), (2, "width")):
        shapes[found.first, axis] = integers(batch[side])
        shapes[is_control, axis] = integers(batch[f"{side}_control"].flatten())
    if (shapes[:, 1:] % PIXELS_PER_TOKEN).any():
        raise ValueError(f"sides must be multiples of {PIXELS_PER_TOKEN}")
    shapes[:, 1:] //= PIXELS_PER_TOKEN
    return found


def tensors(column: pa.Array) -> Tensors:
    """The tensors of a column, without the rows that have none."""
    column = column.filter(column.is_valid())
    shapes, dtypes = pc.struct_field(column, "shape"), pc.struct_field(column, "dtype")
    known = integers(pc.index_in(dtypes, value_set=pa.array(list(BYTES_PER_ELEMENT))))
    sizes = ELEMENT_SIZES[known]
    nbytes = sizes * _products(shapes)
    codecs, lengths = pc.struct_field(column, "codec"), integers(pc.struct_field(column, "length"))
    compressed = codecs.is_valid().to_numpy(zero_copy_only=False)
    return Tensors(shapes, sizes, nbytes, np.where(compressed, lengths, nbytes))


def _products(lists: pa.Array) -> Integers:
    """The product of each list; 1 for an empty list."""
    lengths, values = integers(pc.list_value_length(lists)), integers(lists.flatten())
    products, some = np.ones(len(lengths), np.int64), lengths > 0
    if some.any():
        products[some] = np.multiply.reduceat(values, (np.cumsum(lengths) - lengths)[some])
    return products


def digests(column: pa.Array) -> Digests:
    """The hashes of a column of text without nulls."""
    column = column.cast(pa.string())
    if column.null_count or (len(column) and pc.any(pc.not_equal(pc.binary_length(column), HASH_DIGITS)).as_py()):
        raise ValueError("a hash is not an xxh3-128")
    if not len(column):
        return np.empty((0, 2), np.uint64)
    begin = np.frombuffer(column.buffers()[1], np.int32)[column.offset]
    text = np.frombuffer(column.buffers()[2], np.uint8)[begin : begin + HASH_DIGITS * len(column)]
    digits = NIBBLES[text].reshape(len(column), HASH_DIGITS)
    if digits.max() > 15:
        raise ValueError("a hash is not an xxh3-128")
    found: Digests = (digits[:, ::2] << 4 | digits[:, 1::2]).view(">u8").astype(np.uint64)
    return found


def distinct(rows: npt.NDArray[np.uint64]) -> int:
    """The number of distinct rows of `[N, k]`."""
    if not len(rows):
        return 0
    ordered = rows[np.lexsort(rows.T)]
    return 1 + int((ordered[1:] != ordered[:-1]).any(axis=1).sum())


def count_into(tally: Counter[int], values: Integers) -> None:
    """Add how often each value occurs."""
    found, counts = np.unique(values, return_counts=True)
    for value, count in zip(found.tolist(), counts.tolist(), strict=True):
        tally[value] += count


def take(cache: Cache, column: str, positions: Sequence[int] | Integers) -> list[Any]:
    """The values of a column at these positions, in their order."""
    chunks, wanted = cache.table[column].chunks, np.asarray(positions, np.int64)
    ends = np.cumsum([len(chunk) for chunk in chunks])
    of_chunk = np.searchsorted(ends, wanted, side="right")
    taken: list[Any] = [None] * len(wanted)
    for i in np.unique(of_chunk).tolist():
        where = np.flatnonzero(of_chunk == i)
        within = wanted[where] - (ends[i] - len(chunks[i]))
        for place, value in zip(where.tolist(), chunks[i].take(pa.array(within)).to_pylist(), strict=True):
            taken[place] = value
    return taken
