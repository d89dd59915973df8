"""This trainer as an example for `qwen_cache.conformance`, and as its test.

pytest --pyargs qwen_cache.conformance --model-adapter qwen_train.conformance:padded
pytest --pyargs qwen_cache.conformance --step-adapter qwen_train.conformance:step
pytest --pyargs qwen_cache.conformance --loader-adapter qwen_train.conformance:batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor

from qwen_cache.format.sample import token_count
from qwen_cache.torch import CacheBatches
from qwen_train.data.batches import Batch
from qwen_train.flow import NoiseSchedule, sample_u
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.training.loss import compute_loss


def padded(transformer: Any) -> Callable[[dict[str, Any]], Tensor]:
    """`QwenImageMultiResTransformer2DModel` with rows of equal length."""
    return _forward(transformer, "padded")


def packed(transformer: Any) -> Callable[[dict[str, Any]], Tensor]:
    """`QwenImageMultiResTransformer2DModel` with all tokens in one row."""
    return _forward(transformer, "packed")


def _forward(transformer: Any, layout: str) -> Callable[[dict[str, Any]], Tensor]:
    model = QwenImageMultiResTransformer2DModel.from_stock(transformer)
    model.layout = layout

    def forward(batch: dict[str, Any]) -> Tensor:
        inputs = (batch[name] for name in ("latents", "prompt_embeds", "prompt_embeds_mask", "sigma", "img_shapes"))
        velocity: Tensor = model(*inputs).sample
        return velocity

    return forward


def step(transformer: Any) -> Callable[[dict[str, Any]], dict[str, Tensor]]:
    """`compute_loss` of each sample of a batch, with noise levels as the model's scheduler shifts them."""
    model = QwenImageMultiResTransformer2DModel.from_stock(transformer)
    schedule, generator = NoiseSchedule(), Generator()

    def losses(given: dict[str, Any]) -> dict[str, Tensor]:
        shapes, clean = given["img_shapes"], given["latents"]
        targets = torch.tensor([token_count(images[:1]) for images in shapes])
        is_target = torch.arange(clean.shape[1]) < targets[:, None]
        levels = [schedule.sigma(sample_u(generator, "logit_normal"), int(tokens)) for tokens in targets]
        batch = Batch(
            keys=(),
            labels=(),
            img_shapes=tuple(map(tuple, shapes)),
            clean=clean,
            noise=torch.randn(clean.shape, generator=generator),
            is_target=is_target,
            weight=is_target.float(),
            sigma=torch.tensor(levels),
            sample_weight=torch.ones(len(shapes)),
            prompt_embeds=given["prompt_embeds"],
            prompt_embeds_mask=given["prompt_embeds_mask"],
        )
        alone = [replace(batch, sample_weight=len(shapes) * one) for one in torch.eye(len(shapes))]
        loss = torch.stack([compute_loss(model, each) for each in alone])
        return {"noise": batch.noise, "sigma": batch.sigma, "loss": loss}

    return losses


def batches(folder: Path, caption_dropout: float) -> Iterable[dict[str, Any]]:
    """`CacheBatches` of one epoch."""
    return CacheBatches(folder, batch_size=3, caption_dropout=caption_dropout, epochs=1)
