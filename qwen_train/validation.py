"""Validation on held-out samples: their loss.

Noise and noise levels depend only on a sample's key, so losses are comparable between runs with any seed and settings,
and training's random state is not touched. A run that holds out no samples is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import xxhash
from jaxtyping import Float
from torch import Tensor

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.models.family import Family
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ValidationConfig
from qwen_train.data.batches import Batch, Batches, NoiseDraw, NoisedSample, collate
from qwen_train.run_folder import LEVELS, LOSS, LOSSES


@dataclass(frozen=True)
class Validation:
    """The samples for validation, in the order of their keys, and the settings."""

    samples: tuple[Sample, ...]
    config: ValidationConfig
    edit_mask_weight: float
    family: Family

    def measures_loss(self, step: int) -> bool:
        return self.config.validation_steps is not None and step % self.config.validation_steps == 0

    def losses(self, loss_of: Callable[[Batch], Tensor], accelerator: Any) -> dict[str, float]:
        """The mean loss over the samples of all processes: overall, and per quarter of the noise levels.

        One sample at a time: a sample's loss then does not depend on others, and it takes less memory than training.
        """
        sums = torch.zeros(LEVELS, dtype=torch.float64)
        for sample, is_filler in rank_samples(self.samples, accelerator):
            for level, noised in enumerate(noised_samples(sample)):
                loss = float(loss_of(collate([noised], self.edit_mask_weight, family=self.family)))
                sums[level] += 0.0 if is_filler else loss
        sums = accelerator.reduce(sums.to(accelerator.device)) if accelerator.num_processes > 1 else sums
        means = (sums / len(self.samples)).tolist()
        return {LOSS: sum(means) / LEVELS, **dict(zip(LOSSES, means, strict=True))}


def make_validation(config: Config, batches: Batches) -> Validation | None:
    """The validation that qwen.yaml schedules; None without any."""
    settings = config.validation
    if settings.validation_steps is None:
        return None
    samples = held_out(config, batches, settings.num_samples)
    return Validation(samples, settings, config.train.edit_mask_weight, batches.family)


def held_out(config: Config, batches: Batches, count: int) -> tuple[Sample, ...]:
    """The first `count` held-out samples in the order of their keys; ConfigError without any."""
    if not config.train.validation_split:
        raise ConfigError(
            "validation needs held-out samples, and there are none",
            found=f"train.validation_split={config.train.validation_split}",
            do="set train.validation_split, such as 0.05, or remove the section validation",
        )
    samples = tuple(batches.cache[i] for i in held_out_by_key(batches)[:count])
    if not samples:
        raise ConfigError(
            "validation needs held-out samples, and the only ones are of a cache with teacher: true",
            found=f"train.validation_split={config.train.validation_split}",
            do="raise train.validation_split",
        )
    return samples


def held_out_by_key(batches: Batches) -> list[int]:
    """The held-out samples in the order of their keys, which does not depend on the order of the cache.

    Those of a teacher's cache are neither trained nor measured: their images are not what is learnt.
    """
    keys = batches.cache.column("key").take(batches.validation).to_pylist()
    held_out = [int(i) for _, i in sorted(zip(keys, batches.validation, strict=True))]
    return [i for i in held_out if not batches.cache.of_cache(i).teacher]


@contextmanager
def evaluating(transformer: Any) -> Iterator[None]:
    """Disable dropout and gradients while entered."""
    transformer.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        transformer.train()


def rank_samples(samples: Sequence[Sample], accelerator: Any) -> Iterator[tuple[Sample, bool]]:
    """The samples of this rank, and whether each is a filler, whose result is discarded.

    Fillers give every rank the same number of samples: ranks that hold shards of the weights must run in step.
    """
    for first in range(0, len(samples), accelerator.num_processes):
        i = first + accelerator.process_index
        yield samples[i % len(samples)], i >= len(samples)


def generator_of(sample: Sample, use: str) -> torch.Generator:
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{use} {sample.key}".encode()) >> 1)


def noise(sample: Sample, generator: torch.Generator) -> Float[Tensor, "S 64"]:
    """Noise for the target, whether the sample has one or it is to be generated."""
    return torch.randn(token_count(sample.img_shapes[:1]), LATENT_CHANNELS, generator=generator)


def noised_samples(sample: Sample) -> Iterator[NoisedSample]:
    """The sample at each of its noise levels, at an offset within their quarters that depends on its key."""
    generator = generator_of(sample, "loss")
    offset = float(torch.rand((), generator=generator))
    for level in range(LEVELS):
        draw = NoiseDraw((level + offset) / LEVELS, noise(sample, generator))
        yield NoisedSample(sample, (draw,), without_caption=False)
