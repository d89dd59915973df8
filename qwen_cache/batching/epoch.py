"""The samples of an epoch and their order: a pure function of the seed and the number of the epoch.

Each part of a mixture comes as often as its weight says: weight 1 is once, weight 2.5 is twice, and half of the part a
third time. That half moves on with every epoch, so after any number of epochs the samples of a part have come equally
often, to within one. Weights are rounded to whole samples, at least one per part.

Where samples are alternatives, such as captions of one image, they take turns: each time an image comes, the next one
stands for it, in an order of the image's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ORDER = 0  # the random stream that shuffles an epoch; streams from 1 are free for the caller
ROUND = 1 << 32  # the random stream that shuffles a part
TURNS = 1 << 33  # the random stream that shuffles alternatives


@dataclass(frozen=True)
class Begin:
    """Where in a run a plan begins: all 0, unless the run has trained by another plan before."""

    epoch: int = 0
    samples: int = 0
    """Samples that were trained before."""
    position: int = 0
    """The first position of the plan, so that no two samples of a run share one."""
    batches: int = 0
    """Batches that were trained before, where the plan knows."""


BEGIN = Begin()


@dataclass(frozen=True)
class MixturePart:
    """Samples of equal weight."""

    samples: IntArray
    """The indices of the samples."""
    weight: float = 1.0
    begins: IntArray | None = None
    """Where the alternatives of each image begin in `samples`, which repeats those that come more often. None: none are
    alternatives."""

    def __len__(self) -> int:
        """How many samples an epoch has with weight 1."""
        return len(self.samples if self.begins is None else self.begins)

    @property
    def per_epoch(self) -> int:
        """How many samples of this part an epoch has."""
        return max(1, round(len(self) * self.weight)) if len(self) else 0


class Epochs:
    """The endless sequence of epochs; each has `len` samples."""

    def __init__(self, parts: Sequence[MixturePart], seed: int) -> None:
        self.parts, self.seed = tuple(parts), seed
        self.order = lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return sum(part.per_epoch for part in self.parts)

    def _order(self, epoch: int) -> IntArray:
        """The indices of the samples of an epoch, in order."""
        samples = np.concatenate([self._of_part(i, epoch) for i in range(len(self.parts))])
        return samples[random(self.seed, epoch, ORDER).permutation(len(samples))]

    def _of_part(self, i: int, epoch: int) -> IntArray:
        part, count = self.parts[i], len(self.parts[i])
        repeats, rest = divmod(part.per_epoch, max(1, count))
        if part.begins is None and not rest:
            return np.tile(part.samples, repeats)
        ring = random(self.seed, i, ROUND).permutation(count)  # each epoch takes the next `rest` of it
        again = ring[(epoch * rest + np.arange(rest)) % count] if rest else ring[:0]
        chosen = np.concatenate([np.tile(np.arange(count), repeats), again])
        samples, positions = part.samples, chosen
        if part.begins is not None:
            taken = (epoch * rest - np.argsort(ring) + count - 1) // max(1, count)  # from the ring in earlier epochs
            turns = epoch * repeats + taken[chosen] + np.repeat(np.arange(repeats + 1), [count] * repeats + [rest])
            lengths = np.diff(part.begins, append=len(samples))
            samples, positions = self._in_turns(i), part.begins[chosen] + turns % lengths[chosen]
        order: IntArray = samples[positions]
        return order

    def _in_turns(self, i: int) -> IntArray:
        """The alternatives, those of each image in a random order."""
        part = self.parts[i]
        assert part.begins is not None
        images = np.searchsorted(part.begins, np.arange(len(part.samples)), side="right")
        ordered: IntArray = part.samples[np.lexsort((random(self.seed, i, TURNS).random(len(images)), images))]
        return ordered


def random(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """A generator with its own Philox stream, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, 0, stream]))
