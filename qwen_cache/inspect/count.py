"""The samples of a recipe counted: sizes, tokens, bytes, and what is encoded and stored once (`count_recipe`).

Read from the index alone, in one pass over batches of its columns. Hashes are compared whole, so the counts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.batching import budgets, index_token_counts, row_tokens
from qwen_cache.format.cache import Cache
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.sample import PIXELS_PER_TOKEN, TENSORS
from qwen_cache.inspect.columns import (
    Digests,
    Images,
    batches,
    count_into,
    digests,
    distinct,
    images,
    integers,
    reading,
    tensors,
)
from qwen_cache.models.family import family_of_recipe

MAX_BINS = 12  # of a histogram
SIZE_COLUMNS = ("img_shapes", "height", "width", "height_control", "width_control")
COLUMNS = (
    *("target", "controls", "text_length", "source_rows", "edit_mask_from", "prefix_length"),
    *SIZE_COLUMNS,
    *TENSORS[2],
)

Bin = tuple[float, float, int]
"""Lower edge, upper edge (excluded), count."""


@dataclass
class Counts:
    """What a pass over the batches of an index adds up."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Of the target, or the image to generate: (height, width) in tokens."""
    controls: Counter[int] = field(default_factory=Counter)
    texts: Counter[int] = field(default_factory=Counter)
    images: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    masks_from: Counter[str] = field(default_factory=Counter)
    tensor_bytes: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    to_generate: int = 0
    edit_masks: int = 0
    digests: list[Digests] = field(default_factory=list)
    """Of each image that was encoded."""
    shapes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Of the same images: height and width in one number."""
    lists: dict[int, list[npt.NDArray[np.uint64]]] = field(default_factory=dict)
    """The digests of the controls of the samples that have some, by their number, as `[N, 2 · number]`."""

    def add(self, batch: pa.RecordBatch) -> None:
        found, texts = images(batch), integers(batch["text_length"])
        first = found.shapes[found.first]
        packed = Counter[int]()
        count_into(packed, first[:, 1] << 32 | first[:, 2])
        self.sizes.update({(size >> 32, size & 0xFFFFFFFF): count for size, count in packed.items()})
        for tally, values in (
            (self.controls, found.counts - 1),
            (self.texts, texts),
            (self.images, found.tokens),
            (self.tokens, texts + found.tokens),
        ):
            count_into(tally, values)
        self.to_generate += batch["target"].null_count
        self.saved["repeated_rows"] += int((integers(batch["source_rows"]) - 1).sum())
        if "edit_mask_from" in batch.schema.names:
            self.edit_masks += len(batch) - batch["edit_mask"].null_count
            origins = pc.value_counts(batch["edit_mask_from"].drop_null()).to_pylist()
            self.masks_from.update({each["values"]: each["counts"] for each in origins if each["values"]})
        self._add_tensors(batch)
        self._add_digests(batch, found)

    def _add_tensors(self, batch: pa.RecordBatch) -> None:
        for name in (name for name in TENSORS[2] if name in batch.schema.names):
            stored = tensors(batch[name])
            if len(stored.nbytes):
                self.tensor_bytes[name] += int(stored.nbytes.sum())
                self.saved["compression_bytes"] += int((stored.nbytes - stored.stored_bytes).sum())
            if name == "prompt_embeds" and "prefix_length" in batch.schema.names:
                widths = integers(pc.list_element(stored.shapes, 1))
                row_bytes = widths * stored.element_sizes
                self.saved["prefix_bytes"] += int((integers(batch["prefix_length"]) * row_bytes).sum())

    def _add_digests(self, batch: pa.RecordBatch, found: Images) -> None:
        targets, controls = batch["target"], batch["controls"]
        numbers = integers(pc.list_value_length(controls))
        if (numbers != found.counts - 1).any():
            raise ValueError("there are not as many sizes as images")
        of_controls = digests(controls.flatten())
        has_target, is_control = targets.is_valid().to_numpy(zero_copy_only=False), np.ones(len(found.shapes), bool)
        is_control[found.first] = False
        sizes = (found.shapes[:, 1] << 32 | found.shapes[:, 2]).astype(np.uint64)
        self.digests += [digests(targets.drop_null()), of_controls]
        self.shapes += [sizes[found.first[has_target]], sizes[is_control]]
        of_each = np.repeat(numbers, numbers)
        for number in np.unique(numbers[numbers > 0]).tolist():
            rows = of_controls[of_each == number].reshape(-1, 2 * number)
            self.lists.setdefault(number, []).append(rows)

    def savings(self) -> dict[str, int]:
        """Work and bytes that the cache saves, because equal things are encoded and stored once."""
        encoded = np.concatenate([np.empty((0, 2), np.uint64), *self.digests])
        shapes = np.concatenate([np.empty(0, np.uint64), *self.shapes])
        lists = [np.concatenate(rows) for rows in self.lists.values()]
        return {
            "repeated_rows": self.saved["repeated_rows"],
            "vae_passes": len(encoded) - distinct(np.column_stack([encoded, shapes])),
            "prefix_passes": sum(len(rows) - distinct(rows) for rows in lists),
            "prefix_bytes": self.saved["prefix_bytes"],
            "compression_bytes": self.saved["compression_bytes"],
        }


def count_recipe(cache: Cache) -> dict[str, Any]:
    """The samples of a recipe as in the report of `inspect`, without flags."""
    counts, family = Counts(), family_of_recipe(cache.recipe.recipe)
    with reading(cache.folder):
        for batch in batches(cache.table, COLUMNS):
            counts.add(batch)
        saved = counts.savings()
    ratios = Counter[float]()
    for (h, w), count in counts.sizes.items():
        ratios[round(w / h, 2)] += count
    return {
        "family": family.name,
        "license": family.licence,
        "samples": len(cache),
        "identity": cache.identity,
        "recipe": cache.recipe.recipe,
        "resolutions": _sorted({resolution(h, w): count for (h, w), count in counts.sizes.items()}),
        "controls": _sorted(counts.controls),
        "to_generate": counts.to_generate,
        "edit_masks": counts.edit_masks,
        "edit_masks_from": _sorted(counts.masks_from),
        "text_tokens": _spread(counts.texts),
        "image_tokens": _spread(counts.images),
        "histograms": {
            "width_over_height": histogram(ratios, 0.01),
            "text_tokens": histogram(counts.texts),
            "all_tokens": histogram(counts.tokens),
        },
        "batches": _batches(cache),
        "tensor_bytes": {name: counts.tensor_bytes[name] for name in TENSORS[2] if name in counts.tensor_bytes},
        "saved": saved,
    }


def resolution(h: int, w: int) -> str:
    """Width and height in pixels of an image of `h` rows of `w` tokens."""
    return f"{w * PIXELS_PER_TOKEN}×{h * PIXELS_PER_TOKEN}"


def _batches(cache: Cache) -> list[dict[str, float]]:
    """Samples per batch and padding under a few token budgets; none of samples that are not for training."""
    if cache.table["target"].null_count:
        return []
    tokens = index_token_counts(cache.table, cache.folder / INDEX_NAME)
    joint = family_of_recipe(cache.recipe.recipe).joint_sequence
    return [asdict(budget) for budget in budgets(row_tokens(tokens, joint=joint))]


def _sorted(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def _spread(counts: Mapping[int, int]) -> dict[str, int]:
    """Of the values with these counts."""
    if not counts:
        return {}
    values = np.array(sorted(counts))
    numbers = np.array([counts[value] for value in values.tolist()])
    middle = np.searchsorted(np.cumsum(numbers), numbers.sum() // 2, side="right")
    spread = {"min": values[0], "median": values[middle], "max": values[-1], "total": (values * numbers).sum()}
    return {name: int(value) for name, value in spread.items()}


def histogram(counts: Mapping[Any, int], unit: float = 1) -> list[Bin]:
    """At most `MAX_BINS` bins of values with these counts; a bin is 1, 2 or 5 times a power of ten wide.

    The values are multiples of `unit`.
    """
    if not counts:
        return []
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    units = Counter[int]()
    for value, count in counts.items():
        units[round(value / unit)] += count
    step = next(step for step in steps if max(units) // step - min(units) // step < MAX_BINS)
    binned = Counter[int]()
    for value, count in units.items():
        binned[value // step] += count
    return [
        (round(i * step * unit, 6), round((i + 1) * step * unit, 6), binned[i])
        for i in range(min(binned), max(binned) + 1)
    ]
