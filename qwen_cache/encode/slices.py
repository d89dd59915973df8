"""Slices: the rows of a source cut into runs, so that independent machines can build it.

The source alone decides the cut: of its n usable rows, in order, slice k of N has those from `(k-1)·n/N` to `k·n/N`.
Rows left out are not usable: leaving one out moves the cuts, and drops its sample, as deleting it would.
Slices may share a cache: each build replaces the samples of its own rows, keeps those of the other slices, and drops
those of which the source has no row. So all slices together make the cache that one build would, in the order of the
source. They may also have a cache each, for `qwen-cache merge`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError
from qwen_cache.format.rows import ListedSamples, first_of_each, taken

T = TypeVar("T")


@dataclass(frozen=True)
class SourceSlice:
    """Slice `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> SourceSlice:
        """The slice that `3/16` names."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        parsed = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= parsed.number <= parsed.count:
            expected = "NUMBER/COUNT from 1/1 on, such as 3/16"
            raise ConfigError("not a slice of the source", expected=expected, found=text)
        return parsed

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, items: Sequence[T]) -> list[T]:
        """This slice of `items`. The lengths of any two slices differ by at most one."""
        begin, end = ((self.number - 1 + i) * len(items) // self.count for i in range(2))
        return list(items[begin:end])


@dataclass(frozen=True)
class SlicedSource:
    """The rows of a source, by name, as a build of one slice knows them."""

    positions: Mapping[str, int]
    """The position of every usable row."""
    own: frozenset[str]
    """The rows of the slice."""
    is_complete: bool
    """Whether every row is usable. If not, a sample whose row is missing may belong to an unusable one."""

    def keeps(self, name: str) -> bool:
        """Whether a sample of this name is left as it is: the row of another slice, or of nobody knows which."""
        return name not in self.own and (name in self.positions or not self.is_complete)

    def in_order(self, samples: ListedSamples) -> ListedSamples:
        """The samples in the order of the source, each key once; those of no row are last."""
        found = pc.index_in(samples.table["name"], pa.array(list(self.positions), pa.string()))
        order = np.argsort(pc.fill_null(found, len(self.positions)).to_numpy(), kind="stable")
        in_order = ListedSamples(taken(samples.table, order))
        return ListedSamples(taken(in_order.table, np.flatnonzero(first_of_each(in_order.words("the source")))))
