"""The sizes of a batch, and what they decide about the memory of a step. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from qwen_cache.batching import padded_tokens, row_tokens
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_cache.models.family import Family
from qwen_cache.settings.sections import TrainConfig


class SampleSize(NamedTuple):
    """The size of a sample, as the index of a cache has it."""

    img_shapes: ImgShapes
    """The target, then the controls."""
    text_tokens: int
    image_positions: tuple[int, ...] = ()
    """For each control the text tokens before it; none for the 20B family."""
    to_generate: bool = False
    """True if it has no target, so that a slider generates its image first."""


def tokens_of(batch: Sequence[SampleSize], settings: TrainConfig, family: Family) -> int:
    """The tokens of a batch, as `train.max_tokens` counts them."""
    counts = [(token_count(sample.img_shapes), sample.text_tokens) for sample in batch]
    tokens = row_tokens(
        np.array(counts).T,
        joint=family.joint_sequence,
        noise_draws=settings.noise_draws,
        target_tokens=np.array([token_count(sample.img_shapes[:1]) for sample in batch]),
    )
    return int(padded_tokens(tokens, np.array([0, len(batch)]))[0] if settings.layout != "packed" else tokens.sum())


# ---- what is linear --------------------------------------------------------------------------------------------------


class Parts(NamedTuple):
    """The tokens of a batch by what is done with them, and its samples."""

    controls: int
    targets: int
    """Once for each noise draw."""
    text: int
    image_padding: int
    """Between the images of each sample and the longest of them; the same for text, and for text and images."""
    text_padding: int
    row_padding: int
    samples: int

    @classmethod
    def of(cls, batch: Sequence[SampleSize], draws: int, family: Family) -> Parts:
        controls = [token_count(sample.img_shapes[1:]) for sample in batch]
        targets = [draws * token_count(sample.img_shapes[:1]) for sample in batch]
        texts = [sample.text_tokens for sample in batch]
        images = [a + b for a, b in zip(controls, targets, strict=True)]
        rows = [a + b for a, b in zip(images, texts, strict=True)]
        of_image, of_text, of_row = (len(batch) * max(each) - sum(each) for each in (images, texts, rows))
        of_row = of_row if family.joint_sequence else 0
        return cls(sum(controls), sum(targets), sum(texts), of_image, of_text, of_row, len(batch))


ROWS = 32
"""Products in 8 bits take a multiple of these rows (`qwen_cache/models/quantization.py`), so others are copied."""


@dataclass(frozen=True)
class BatchKind:
    """A kind of batches: in all batches of one kind a step makes the same tensors, each of a size linear in `Parts`."""

    several: bool
    """More than one sample."""
    ragged: bool
    """Their sizes may differ, which in the padded layout takes masks."""
    image_aligned: bool = True
    """The rows of image tokens are a multiple of `ROWS`; in a joint sequence, those of the draws."""
    text_aligned: bool = True
    """The rows of text are; in a joint sequence, the rows of everything."""

    @classmethod
    def of(cls, batch: Sequence[SampleSize], settings: TrainConfig, family: Family, *, in_8_bits: bool) -> BatchKind:
        """The kind of a batch; `in_8_bits` says whether products are."""
        several, padded = len(batch) > 1, settings.layout != "packed"
        ragged = several and (not padded or len({Parts.of([each], 1, family) for each in batch}) > 1)
        if not in_8_bits:
            return cls(several, ragged)
        parts = Parts.of(batch, settings.noise_draws, family)
        image, text = parts.controls + parts.targets, parts.text
        if family.joint_sequence:
            image, text = parts.targets, image + text + (parts.row_padding if padded else 0)
        elif padded:
            image, text = image + parts.image_padding, text + parts.text_padding
        return cls(several, ragged, image % ROWS == 0, text % ROWS == 0)
