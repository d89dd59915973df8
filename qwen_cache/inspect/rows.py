"""The samples of a survey as the page lists them: rows, and the small columns that its filters need.

Made from columns of the index, some rows at a time, so that a page of any number of samples takes little memory.
Positions count the samples of all recipes, one recipe after another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.inspect.columns import Integers, batches, digests, images, integers, reading, take
from qwen_cache.inspect.count import SIZE_COLUMNS, resolution
from qwen_cache.inspect.flags import FLAGS
from qwen_cache.inspect.summary import Survey

COLUMNS = (
    *("key", "name", "prompt", "sizes", "text_tokens", "image_tokens", "edit_mask_from", "to_generate", "recipe"),
    *("flags", "near", "images"),
)
READ = ("key", "name", "prompt", "text_length", "edit_mask_from", "target", "seed", *SIZE_COLUMNS)
MAX_LINKS = 12
"""Samples that are named: per flag, and to each near-duplicate; filters list all."""


class PageSamples:
    """All samples of a survey, in order, and which of them have images on the page."""

    def __init__(self, survey: Survey, with_images: Integers) -> None:
        """`with_images` are the ascending positions of the samples with images."""
        self.recipes, self.with_images = survey.recipes, with_images
        sizes = [len(recipe.cache) for recipe in survey.recipes.values()]
        self.ends: dict[str, int] = dict(zip(survey.recipes, np.cumsum(sizes).tolist(), strict=True))
        self.count = sum(sizes)
        self.groups = [
            group + self.begin(name) for name, recipe in self.recipes.items() for group in recipe.flagged.groups
        ]

    def begin(self, recipe: str) -> int:
        """The position of the first sample of a recipe."""
        return self.ends[recipe] - len(self.recipes[recipe].cache)

    def sample(self, position: int) -> Sample:
        name, begin = next((name, self.begin(name)) for name, end in self.ends.items() if position < end)
        return self.recipes[name].cache[position - begin]

    @cached_property
    def bits(self) -> npt.NDArray[np.uint16]:
        """`[N]`: the flags of each sample, as bits in the order of `FLAGS`."""
        each = [recipe.flagged.bits(len(recipe.cache)) for recipe in self.recipes.values()]
        return np.concatenate([np.empty(0, np.uint16), *each])

    @cached_property
    def has_images(self) -> npt.NDArray[np.bool_]:
        has = np.zeros(self.count, bool)
        has[self.with_images] = True
        return has

    @cached_property
    def group_of(self) -> npt.NDArray[np.int32]:
        """`[N]`: the position of each sample's group of near-duplicates among all groups; -1 for none."""
        found = np.full(self.count if self.groups else 0, -1, np.int32)
        for number, group in enumerate(self.groups):
            found[group] = number
        return found

    @cached_property
    def sizes(self) -> dict[str, int]:
        """How many samples have each size of the target, the most frequent first."""
        counts = Counter[str]()
        for recipe in self.recipes.values():
            counts.update(recipe.counted["resolutions"])
        return dict(counts.most_common())

    def facts(self) -> dict[str, Any]:
        """What the page needs to know at once: columns, counts, and the choices of its filters."""
        flags = {flag: int(np.count_nonzero(self.bits >> i & 1)) for i, flag in enumerate(FLAGS)}
        choices = [("any", int(np.count_nonzero(self.bits)))]
        choices += [("images", len(self.with_images))] if 0 < len(self.with_images) < self.count else []
        choices += sorted(((flag, count) for flag, count in flags.items() if count), key=lambda each: -each[1])
        return {
            "columns": COLUMNS,
            "count": self.count,
            "sizes": list(self.sizes.items()),
            "flags": choices,
            "recipes": [(name, len(recipe.cache)) for name, recipe in self.recipes.items() if len(recipe.cache)],
            "groups": len(self.groups),
        }

    def rows(self, begin: int, end: int) -> list[list[Any]]:
        """The values of `COLUMNS` for samples from `begin` to before `end`, without images."""
        rows = [row for name, table in self._tables(begin, end) for row in self._recipe_rows(name, table)]
        near = self._near(begin, end)
        for i, row in enumerate(rows, begin):
            row += [[flag for bit, flag in enumerate(FLAGS) if self.bits[i] >> bit & 1], near.get(i), []]
        return rows

    def kinds(self, begin: int, end: int) -> tuple[list[list[int]], npt.NDArray[np.uint16]]:
        """The distinct combinations of size, recipe, flags and images of at most 65,536 samples, and each one's.

        A combination has the position of the size in `sizes`, that of the recipe, the flags as bits, and 0 or 1.
        """
        columns, places = [], {size: i for i, size in enumerate(self.sizes)}
        for number, (_, table) in enumerate(self._tables(begin, end)):
            for batch in batches(table, SIZE_COLUMNS):
                found = images(batch)
                shapes, which = np.unique(found.shapes[found.first, 1:], axis=0, return_inverse=True)
                sizes = np.array([places[resolution(h, w)] for h, w in shapes.tolist()])[which.reshape(-1)]
                columns.append(np.column_stack([sizes, np.full(len(batch), number)]))
        both = np.column_stack([np.concatenate(columns), self.bits[begin:end], self.has_images[begin:end]])
        kinds, codes = np.unique(both, axis=0, return_inverse=True)
        return kinds.tolist(), codes.reshape(-1).astype(np.uint16)

    def keys(self) -> npt.NDArray[np.uint64]:
        """`[N]`: the first 16 digits of each key, as a number."""
        parts = [np.empty(0, np.uint64)]
        for recipe in self.recipes.values():
            with reading(recipe.cache.folder):
                parts += [digests(batch["key"])[:, 0] for batch in batches(recipe.cache.table, ("key",))]
        return np.concatenate(parts)

    def _tables(self, begin: int, end: int) -> Iterator[tuple[str, pa.Table]]:
        """Each recipe with its part of the index between two positions."""
        for name, recipe in self.recipes.items():
            first = self.begin(name)
            yield name, recipe.cache.table.slice(max(0, begin - first), max(0, end - max(begin, first)))

    def _recipe_rows(self, name: str, table: pa.Table) -> Iterator[list[Any]]:
        with reading(self.recipes[name].cache.folder):
            for batch in batches(table, READ):
                found = images(batch)
                sides, first = (PIXELS_PER_TOKEN * found.shapes[:, :0:-1]).tolist(), found.first.tolist()
                texts, tokens = integers(batch["text_length"]).tolist(), found.tokens.tolist()
                for i, record in enumerate(_texts(batch)):
                    sizes = sides[first[i] : first[i] + int(found.counts[i])]
                    seed = "" if record["seed"] is None else f", seed {record['seed']}"
                    to_generate = None if record["target"] else f"to generate{seed}"
                    row = [record["key"], record["name"], record["prompt"], sizes, texts[i], tokens[i]]
                    yield [*row, record["edit_mask_from"], to_generate, name]

    def _near(self, begin: int, end: int) -> Mapping[int, tuple[int, list[list[str]], int]]:
        """The near-duplicates of samples by position: number of the group, keys and names of some, number of others."""
        found = {}
        for i in (begin + np.flatnonzero(self.group_of[begin:end] >= 0)).tolist():
            number = int(self.group_of[i])
            others = [each for each in self.groups[number][: MAX_LINKS + 1].tolist() if each != i][:MAX_LINKS]
            found[i] = number + 1, self._named(others), len(self.groups[number]) - 1 - len(others)
        return found

    def _named(self, positions: list[int]) -> list[list[str]]:
        """Keys and names; all positions are of one recipe."""
        name, first = next((name, self.begin(name)) for name, end in self.ends.items() if positions[0] < end)
        within, cache = np.array(positions) - first, self.recipes[name].cache
        return [list(each) for each in zip(take(cache, "key", within), take(cache, "name", within), strict=True)]


def has_thumbnails(survey: Survey) -> npt.NDArray[np.bool_]:
    """`[N]`: which samples of a survey have thumbnails in the cache."""
    parts = [np.zeros(0, bool)]
    for recipe in survey.recipes.values():
        table = recipe.cache.table
        if "thumbnails" in table.column_names:
            stored = (batch["thumbnails"].is_valid() for batch in batches(table, ("thumbnails",)))
            parts += [each.to_numpy(zero_copy_only=False) for each in stored]
        else:
            parts.append(np.zeros(table.num_rows, bool))
    return np.concatenate(parts)


def _texts(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """The columns of a row that are not numbers of its sizes; None for those that its index lacks."""
    names = ("key", "name", "prompt", "edit_mask_from", "target", "seed")
    missing = [None] * len(batch)
    columns = [batch[name].to_pylist() if name in batch.schema.names else missing for name in names]
    for values in zip(*columns, strict=True):
        yield dict(zip(names, values, strict=True))
