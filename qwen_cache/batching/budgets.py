"""What there is to know before `train.max_tokens` is chosen: what batches under a few budgets would be like.

By the very plan that a run with such a budget makes, every other setting at its default; of millions of samples, by the
first of an epoch (`BatchPlan.summary`). No budget is below the largest sample, which could not be trained under one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from qwen_cache.batching.batch_plan import BatchPlan
from qwen_cache.batching.epoch import IntArray
from qwen_cache.settings.batching import BatchConfig

LARGEST_SAMPLES = (1, 2, 4, 8)  # that a budget has room for
ROUND = 1024  # tokens


@dataclass(frozen=True)
class Budget:
    """The batches of an epoch under one `train.max_tokens`, in `train.layout=padded`."""

    max_tokens: int
    samples_per_batch: float
    padding: float
    """The share of all tokens that is padding."""
    padding_by_chance: float
    """The same, were samples batched as they come (`train.bucketing_window=1`) and not by size."""


def budgets(tokens: IntArray) -> list[Budget]:
    """For samples that have `tokens` ([2, N], as `BatchPlan` takes them), until there are too few for a larger one."""
    largest = int(tokens.sum(0).max(initial=0))
    found = [_budget(tokens, round_budget(largest, samples)) for samples in LARGEST_SAMPLES if largest]
    more = (replace(later, max_tokens=earlier.max_tokens) != earlier for earlier, later in pairwise(found))
    return found[:1] + [budget for budget, gains in zip(found[1:], more, strict=True) if gains]


def round_budget(largest: int, samples: int) -> int:
    """Room for so many of the largest samples and less than an eighth of another: a multiple of 1024, where samples are
    large enough, else of a smaller power of two."""
    step = min(ROUND, 1 << max(largest // 8, 1).bit_length() - 1)
    return -(-largest * samples // step) * step


def _budget(tokens: IntArray, max_tokens: int) -> Budget:
    planned, chance = (
        BatchPlan(tokens, config).summary()
        for config in (BatchConfig(max_tokens=max_tokens), BatchConfig(max_tokens=max_tokens, bucketing_window=1))
    )
    return Budget(max_tokens, planned.samples_per_batch, planned.padding, chance.padding)
