"""The settings of `train` in qwen.yaml that decide which samples form a batch, and when it comes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qwen_cache.settings.section import Positive, Section


class BatchConfig(Section):
    """What planning batches needs to know of `train` in qwen.yaml."""

    batch_size: Positive | None = None
    """Samples in one forward pass on one device; 1 where neither this nor max_tokens is given."""
    max_tokens: Positive | None = None
    """Tokens in one forward pass on one device: of text, target and controls, padding included. Both limits bind."""
    shuffle_window: Positive = 4096
    """Of so many samples of a shuffled epoch, half of it at most, those alike in size are batched; 1: by chance."""
    balanced_over: Positive = 8
    """Batches that cost alike come in runs of so many: as many processes, or a divisor, hardly wait; 1: no runs."""
    drop_last: bool = False
    """Leave out the samples that do not fill the last batch of an epoch; else that batch is smaller."""
    layout: Literal["padded", "packed"] = "padded"
    """padded: rows of equal length. packed: one row of valid tokens, no padding computed. Equal results."""
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Which part of the samples is never trained; the hash of its target picture decides, so it stays that part."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Order, noise, timesteps and dropout follow from it."""
