"""Help to choose `train.max_tokens`: batch statistics under a few token budgets.

They come from the plan that a run with this budget makes, with every other setting at its default; for millions of
samples, from the first of an epoch (`BatchPlan.summary`). No budget is below the largest sample, which would not fit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

from qwen_cache.batching.batch_plan import BatchPlan
from qwen_cache.batching.epoch import IntArray
from qwen_cache.settings.batching import BatchConfig

LARGEST_SAMPLES = (1, 2, 4, 8)  # how many of the largest samples a budget has room for
ROUND = 1024  # tokens


@dataclass(frozen=True)
class Budget:
    """The batches of an epoch under one `train.max_tokens`, in `train.layout=padded`."""

    max_tokens: int
    samples_per_batch: float
    padding: float
    """Fraction of all tokens that is padding."""
    padding_by_chance: float
    """The same for batches at random (`train.bucketing_window=1`); `inspect --json` prints it by this name."""


def budgets(tokens: IntArray) -> list[Budget]:
    """Budgets for samples with `tokens` ([2, N], as for `BatchPlan`), without those that give equal batches."""
    largest = int(tokens.sum(0).max(initial=0))
    candidates = [_budget(tokens, round_budget(largest, samples)) for samples in LARGEST_SAMPLES if largest]
    changes = (replace(later, max_tokens=earlier.max_tokens) != earlier for earlier, later in pairwise(candidates))
    return candidates[:1] + [budget for budget, differs in zip(candidates[1:], changes, strict=True) if differs]


def round_budget(largest: int, samples: int) -> int:
    """Room for `samples` of the largest samples and less than an eighth of another: a multiple of 1024 where samples
    are large enough, else of a smaller power of two."""
    step = min(ROUND, 1 << max(largest // 8, 1).bit_length() - 1)
    return -(-largest * samples // step) * step


def _budget(tokens: IntArray, max_tokens: int) -> Budget:
    planned, at_random = (
        BatchPlan(tokens, config).summary()
        for config in (BatchConfig(max_tokens=max_tokens), BatchConfig(max_tokens=max_tokens, bucketing_window=1))
    )
    return Budget(max_tokens, planned.samples_per_batch, planned.padding, at_random.padding)
