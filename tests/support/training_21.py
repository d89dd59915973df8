"""The loss of Qwen-Image-2.1 written out: stock diffusers, one sample and one noise draw at a time.

Nothing here is ours but the values that were sampled: a batch of mixed layouts has to give the same.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor

from qwen_cache.format.cache import Sample
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.batches import NoiseDraw, NoisedSample


def stock_velocity(stock: Any, sample: Sample, text: Tensor, target: Tensor, sigma: float) -> Tensor:
    """The velocity of the target.

    Text has slots of anything for the condition images, which the stock model overwrites.
    """
    shapes = [*sample.img_shapes[1:], sample.img_shapes[0]]
    slots = [height * width // 4 for _, height, width in shapes]
    bounds = [0, *sample.row.meta.image_positions, len(text)]
    rows, mask = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        anything = torch.full((slots[i] if i < len(slots) - 1 else 0, text.shape[1]), 7.0)
        rows += [text[begin:end], anything]
        mask += [False] * (end - begin) + [True] * len(anything)
    controls = [sample["control_latents"]] if "control_latents" in sample else []
    velocity: Tensor = stock(
        hidden_states=torch.cat([*controls, target])[None],
        encoder_hidden_states=torch.cat(rows)[None],
        timestep=torch.tensor([sigma]),
        img_shapes=[shapes],
        img_mask=torch.tensor([mask + [True] * slots[-1]]),
        return_dict=False,
    )[0][0, -len(target) :]
    return velocity


def draw_loss(stock: Any, item: NoisedSample, draw: NoiseDraw, config: TrainConfig) -> Tensor:
    """Flow matching as published, under the mask of the edit, by the weighting of the noise level."""
    sample, sigma = item.sample, draw.sigma
    text, clean = sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"], sample["image_latents"]
    velocity = stock_velocity(stock, sample, text, (1 - sigma) * clean + sigma * draw.noise, sigma)
    error = element_error(velocity - (draw.noise - clean), sigma, config).mean(-1)
    mask = sample["edit_mask"] if "edit_mask" in sample else torch.ones(len(clean))
    weight = 1 + (config.edit_mask_weight - 1) * mask
    return level_weight(config, sigma) * (error * weight).sum() / weight.sum()


def element_error(difference: Tensor, sigma: float, config: TrainConfig) -> Tensor:
    """torch's own, or the formula of arXiv 2403.16728."""
    if config.loss_type != "huber":
        stock = {"mse": torch.nn.functional.mse_loss, "l1": torch.nn.functional.l1_loss}[config.loss_type]
        return stock(difference, torch.zeros_like(difference), reduction="none")
    c = config.huber_c if config.huber_schedule == "constant" else math.exp(sigma * math.log(config.huber_c))
    return 2 * c * ((difference.double() ** 2 + c**2).sqrt() - c)


def level_weight(config: TrainConfig, sigma: float) -> float:
    """diffusers' weighting, or that of the papers: on the error of the clean image, and on that of the noise."""
    snr = ((1 - sigma) / sigma) ** 2
    if config.weighting == "min_snr":
        return sigma**2 * min(snr, config.snr_gamma)
    if config.weighting == "debiased":
        return (1 - sigma) ** 2 / math.sqrt(snr)
    return float(compute_loss_weighting_for_sd3(config.weighting, torch.tensor([sigma]))[0])


def reference_loss(stock: Any, noised: list[NoisedSample], config: TrainConfig) -> Tensor:
    """The mean over draws, then over samples or over the tokens of targets."""
    losses = [torch.stack([draw_loss(stock, it, draw, config) for draw in it.draws]).mean() for it in noised]
    tokens = [len(it.sample["image_latents"]) if config.loss_reduction == "per_token" else 1 for it in noised]
    return torch.stack([n * loss for n, loss in zip(tokens, losses, strict=True)]).sum() / sum(tokens)
