"""The settings of `train` in qwen.yaml that determine the batches and their order."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from qwen_cache.settings.section import Positive, Section


class BatchConfig(Section):
    """The part of `train` in qwen.yaml that planning batches needs."""

    batch_size: Positive | None = None
    """Samples in one forward pass on one device; 1 if neither this nor max_tokens is given."""
    max_tokens: Positive | None = None
    """Tokens in one forward pass on one device: text, target and controls, padding included. With batch_size, both
    limits apply."""
    bucketing_window: Positive = 4096
    """Samples are shuffled, then batched by length within windows of this many samples (at most half an epoch). 1 turns
    length bucketing off."""
    balance_window: Positive = 8
    """Order batches of similar cost in runs of this length, so that this many ranks (or a divisor) finish together. 1
    turns it off."""
    drop_last: bool = False
    """Drop the samples that do not fill the last batch of an epoch; otherwise this batch is smaller."""
    layout: Literal["auto", "padded", "packed"] = "auto"
    """padded: rows of equal length with a mask. packed: one row of valid tokens, no padding computed and no mask, which
    lets flash attention run. Equal results. auto: packed on an accelerator, padded on the CPU."""
    noise_draws: Positive = 1
    """Timesteps and noises of a sample in one pass: text and control images are computed once, and each draw attends to
    them and to itself. Qwen-Image-2.1 only."""
    captions: Literal["all", "one"] = "all"
    """all: an epoch has every caption of an image. one: it has each image once, with the next of its captions; each of
    them comes as often as the source lists it."""
    validation_split: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Fraction of the samples that is held out. The hash of the target decides, so a sample never changes sides."""
    seed: Annotated[int, Field(ge=0, lt=2**32)] = 0
    """Seed of sample order, noise, timesteps and dropout."""
