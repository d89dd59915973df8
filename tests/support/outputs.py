"""The output of a transformer for a cached sample, and its relative error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qwen_cache.format.cache import Sample


@torch.no_grad()
def output(transformer: Any, sample: Sample) -> Tensor:
    tensors = [sample[name] for name in ("image_latents", "control_latents") if name in sample.row.meta.tensors]
    velocity: Tensor = transformer(
        hidden_states=torch.cat(tensors)[None],
        encoder_hidden_states=sample["prompt_embeds"][None],
        timestep=torch.tensor([0.6]),
        img_shapes=[list(sample.img_shapes)],
        return_dict=False,
    )[0]
    return velocity


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
