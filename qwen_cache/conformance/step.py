"""The promises of a training step: the loss of a batch is that of its samples alone, each at its noise level.

A step adapter is a function `adapter(transformer) -> step`. `transformer` and the batch are those of a model adapter
(`qwen_cache.conformance.model`), but `latents` are clean and there is no `sigma`: `step(batch)` samples noise with the
trainer's own code, and returns a dictionary:

    noise   [B, N, 64]  the noise; the rows of each sample's target are compared
    sigma   [B]         the noise level, 0 to 1
    loss    [B]         the mean squared error of each sample, before a weight by its noise level

Which levels are sampled, and how often, is the trainer's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from qwen_cache.conformance.model import (
    EDIT,
    FILL,
    TOLERANCE,
    TWO,
    Batch,
    Sample,
    Sides,
    batch_of,
    samples_of,
    stock_alone,
    stock_transformer,
)

Step = Callable[[Batch], Mapping[str, Tensor]]
Adapter = Callable[[Any], Step]


def take(step: Step, samples: list[Sample]) -> dict[str, Tensor]:
    """The step's output for the samples as one batch; AssertionError for other shapes or noise levels."""
    batch = batch_of(samples, FILL)
    del batch["sigma"]
    taken = {name: tensor.detach() for name, tensor in step(batch).items()}
    for name, shape in {"noise": batch["latents"].shape, "sigma": (len(samples),), "loss": (len(samples),)}.items():
        assert taken[name].shape == shape, f"{name} has the shape {[*taken[name].shape]}, not {[*shape]}"
    levels = taken["sigma"]
    assert bool(((levels >= 0) & (levels <= 1)).all()), f"noise levels outside 0 to 1: {levels.tolist()}"
    return taken


def stock_loss(model: Any, sample: Sample, noise: Tensor, sigma: Tensor) -> float:
    """The mean squared error of stock diffusers for the sample alone: rectified flow (arXiv 2209.03003)."""
    rows = len(sample.weights)
    target, noise = sample.latents[:rows], noise[:rows]
    noisy = torch.cat([(1 - sigma) * target + sigma * noise, sample.latents[rows:]])
    (result,) = stock_alone(model, [replace(sample, latents=noisy, sigma=sigma)])
    return float((result.velocity - (noise - target)).square().mean())


def _same_as_stock(adapter: Adapter, *specification: tuple[Sides, int]) -> None:
    samples = samples_of(*specification)
    taken = take(adapter(stock_transformer()), samples)
    values = zip(samples, taken["noise"], taken["sigma"], taken["loss"].tolist(), strict=True)
    for i, (sample, noise, sigma, loss) in enumerate(values):
        expected = stock_loss(stock_transformer(), sample, noise, sigma)
        assert abs(loss - expected) < TOLERANCE * expected, f"the loss of sample {i} is {loss:.4g}, not {expected:.4g}"


# ---- the promises ----------------------------------------------------------------------------------------------------


def own_loss(adapter: Adapter) -> None:
    """The target alone is noised and in the loss, to the level that the model is told; the velocity is noise - data."""
    _same_as_stock(adapter, EDIT)


def loss_without_padding(adapter: Adapter) -> None:
    """Other sizes, text lengths and counts of controls in the batch do not change a sample's loss."""
    _same_as_stock(adapter, EDIT, TWO, ([(6, 6)], 3))


def own_noise(adapter: Adapter) -> None:
    """Each sample of a batch, and of the next one, has noise and a noise level of its own."""
    step, samples = adapter(stock_transformer()), samples_of(*[EDIT] * 4)
    steps = [take(step, samples) for _ in range(2)]
    noise = [tuple(rows[: len(samples[0].weights)].flatten().tolist()) for taken in steps for rows in taken["noise"]]
    assert len(set(noise)) == len(noise), "two samples have the same noise"
    levels = [level for taken in steps for level in taken["sigma"].tolist()]
    assert len(set(levels)) == len(levels), f"two samples have the same noise level: {levels}"


PROMISES: dict[str, Callable[[Adapter], None]] = {
    check.__name__.replace("_", " "): check for check in (own_loss, loss_without_padding, own_noise)
}
