"""Which samples an epoch has, and in which order: a pure function of the seed and of the epoch's number.

A part of the samples comes as often as its weight says: once at 1; at 2.5 twice, and half of it a third time. That half
is the next one in each epoch, so after any number of epochs no sample came more than once more often than another of
its part. Weights are rounded to whole samples, of which a part has one at least.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ORDER = 0  # stream of random numbers of an epoch; those from 1 on are free for the caller
ROUND = 1 << 32  # stream of a part


@dataclass(frozen=True)
class Part:
    """Samples that come equally often, by their positions."""

    samples: IntArray
    weight: float = 1.0

    @property
    def drawn(self) -> int:
        """How many samples of it an epoch has."""
        return max(1, round(len(self.samples) * self.weight)) if len(self.samples) else 0


class Epochs:
    """The endless sequence of epochs; each has `len` samples."""

    def __init__(self, parts: Sequence[Part], seed: int) -> None:
        self.parts, self.seed = tuple(parts), seed
        self.order = lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return sum(part.drawn for part in self.parts)

    def _order(self, epoch: int) -> IntArray:
        """The samples of an epoch."""
        samples = np.concatenate([self._of_part(i, epoch) for i in range(len(self.parts))])
        return samples[random(self.seed, epoch, ORDER).permutation(len(samples))]

    def _of_part(self, i: int, epoch: int) -> IntArray:
        samples, drawn = self.parts[i].samples, self.parts[i].drawn
        whole, rest = divmod(drawn, max(1, len(samples)))
        if not rest:
            return np.tile(samples, whole)
        around = random(self.seed, i, ROUND).permutation(samples)
        return np.concatenate([np.tile(samples, whole), around[(epoch * rest + np.arange(rest)) % len(around)]])


def random(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """A Philox stream of its own, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, 0, stream]))
