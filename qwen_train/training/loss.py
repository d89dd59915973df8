"""The loss of a batch, and losses that are not finite."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from qwen_cache.errors import TrainError
from qwen_cache.settings.sections import DpoConfig, TrainConfig
from qwen_cache.terminal import console
from qwen_cache.text import escaped
from qwen_train.data.batches import Batch
from qwen_train.flow import flow_loss, interpolate, pseudo_huber, sample_errors, scheduled_huber_c
from qwen_train.lora.adapter import TRAINED, without
from qwen_train.training.processes import all_gather_object, any_process

# ---- loss ------------------------------------------------------------------------------------------------------------
# The loss of a batch: the transformer's prediction, its target, and the error between them.
#
# `flow` has the formulas. The target is the velocity of the data, or, for taught samples, what the model predicts
# without its LoRA, or, for sliders, what it predicts moved in the direction of two prompts. With `train.dpo` the loss
# compares the errors of two images with those that the model makes without its LoRA.


def compute_loss(transformer: Any, batch: Batch, settings: TrainConfig | None = None) -> Tensor:
    """The flow-matching loss of a batch, which is on the transformer's device; the squared error without `settings`.

    Of a batch with a reference (`with_reference`) it is `preference_loss`.
    """
    velocity = predict_velocity(transformer, batch)
    if settings and batch.reference is not None:
        return preference_loss(velocity, batch.reference, batch, settings.dpo)
    error_of = element_error(settings, batch) if settings else torch.square
    return flow_loss(velocity, batch.clean, batch.noise, batch.weight, batch.sample_weight, batch.target, error_of)


def predict_velocity(transformer: Any, batch: Batch) -> Float[Tensor, "B S 64"]:
    """The velocity that the transformer predicts for the batch at its noise levels."""
    sigma = batch.sigma if batch.token_sigma is None else batch.token_sigma
    noisy = interpolate(batch.clean, batch.noise, sigma, batch.is_target)
    layout = {} if batch.image_positions is None else {"image_positions": batch.image_positions}
    velocity: Tensor = transformer(
        hidden_states=noisy.to(batch.prompt_embeds.dtype),
        encoder_hidden_states=batch.prompt_embeds,
        encoder_hidden_states_mask=batch.prompt_embeds_mask,
        timestep=batch.sigma,
        img_shapes=batch.img_shapes,
        return_dict=False,
        **layout,
    )[0]
    return velocity


def element_error(settings: TrainConfig, batch: Batch) -> Callable[[Tensor], Tensor]:
    """The function of `train.loss_type`, for the noise levels of the batch."""
    if settings.loss_type == "mse":
        return torch.square
    if settings.loss_type == "l1":
        return torch.abs
    if settings.huber_schedule == "constant":
        return partial(pseudo_huber, c=settings.huber_c)
    sigma = batch.sigma if batch.token_sigma is None else batch.token_sigma
    return partial(pseudo_huber, c=scheduled_huber_c(settings.huber_c, sigma.reshape(len(sigma), -1)))


def zero_loss(transformer: Any, batch: Batch) -> Tensor:
    """The loss of a skipped batch: zero, with zero gradients, computed on zeros.

    Processes wait for one another's gradients, so the backward pass cannot be skipped.
    """
    latents, prompt_embeds = torch.zeros_like(batch.clean), torch.zeros_like(batch.prompt_embeds)
    zeros = replace(batch, clean=latents, noise=latents, prompt_embeds=prompt_embeds, target=None, reference=None)
    return 0 * compute_loss(transformer, zeros)


def with_teacher(transformer: Any, batch: Batch, settings: TrainConfig, accelerator: Accelerator) -> Batch:
    """The batch with the velocity that the model predicts without the LoRA as the target of its taught samples.

    One more pass, of these samples alone and without gradients. It goes past DDP, so processes need not have taught
    samples at the same time. Under FSDP2 each pass gathers the weights from all, so if one has some, all take part.
    """
    rows = batch.taught
    if not any(entry.teacher for entry in settings.caches):
        return batch
    if not (any_process(accelerator, bool(rows)) if settings.fsdp else rows):
        return batch
    with torch.no_grad(), without(transformer, TRAINED):
        taught = predict_velocity(transformer, batch.part(rows or (0,))).float()
    target = batch.noise - batch.clean
    for row, velocity in zip(rows, taught, strict=bool(rows)):
        target[row, : len(velocity)] = velocity
    return replace(batch, target=target)


def preference_loss(
    velocity: Float[Tensor, "B S 64"], reference: Float[Tensor, "B S 64"], batch: Batch, dpo: DpoConfig
) -> Float[Tensor, ""]:
    """Diffusion-DPO in its flow-matching form, the mean over pairs: rows 2i are targets, rows 2i + 1 rejected images.

        e, r = the mean squared errors of `velocity` and of `reference` against noise - clean, of each row (`flow`)
    and `pair_losses` of them, times `sample_weight`. Equation 14 of arXiv 2311.12908 (Wallace et al.), for the velocity
    as in Flow-DPO (arXiv 2501.13918, Liu et al.), with a weight of the noise level that is constant. Their factors are
    in `beta`: diffusers' script has -beta_dpo / 2 before the bracket, which stands for T · omega, and Flow-DPO
    -beta / 2 before sums over all values; ours are means over tokens and channels, as diffusers'. So `beta` is
    beta_dpo / 2. The terms with `label_smoothing` and `rpo_alpha` are TRL's.
    """
    errors = sample_errors(velocity, batch.noise - batch.clean, batch.weight)
    gained = errors - sample_errors(reference, batch.noise - batch.clean, batch.weight)
    return (batch.sample_weight[::2] * pair_losses(errors[::2], gained[::2] - gained[1::2], dpo)).mean()


def pair_losses(errors: Float[Tensor, "*N"], gained: Float[Tensor, "*N"], dpo: DpoConfig) -> Float[Tensor, "*N"]:
    """The losses of pairs whose targets have these `errors`, by how much more those `gained` than the rejected images.

        gained = (e_target - r_target) - (e_rejected - r_rejected)
        z      = -beta · gained
        loss   = -(1 - label_smoothing) · log sigmoid(z) - label_smoothing · log sigmoid(-z) + rpo_alpha · e_target

    A positive z prefers the target more than the reference does.
    """
    assert dpo.beta is not None
    z = -dpo.beta * gained
    preferred = -(1 - dpo.label_smoothing) * logsigmoid(z) - dpo.label_smoothing * logsigmoid(-z)
    return preferred + dpo.rpo_alpha * errors


def with_reference(transformer: Any, batch: Batch, settings: TrainConfig) -> Batch:
    """With `train.dpo`, the batch with what the model predicts for it without the LoRA.

    One more pass, of all rows in the same layout and without gradients. It goes past DDP, which has no part in it.
    """
    if settings.dpo.beta is None:
        return batch
    with torch.no_grad(), without(transformer, TRAINED):
        return replace(batch, reference=predict_velocity(transformer, batch).float())


def with_direction(transformer: Any, batch: Batch, settings: TrainConfig, accelerator: Accelerator) -> Batch:
    """With `train.slider.direction=prompts`, the batch with the velocity that the LoRA learns at its strength s:

        target = v(prompt) + s · guidance_strength · [v(positive prompt) - v(negative prompt)]

    v is what the model predicts without the LoRA for the same noised latents: three more passes, without gradients. The
    LoRA learns the target for the row's own prompt, so s and -s learn opposite changes. The objective of Concept
    Sliders (arXiv 2311.12092, Gandikota et al.) with the velocity in place of the noise: at a given level one is linear
    in the other. The latents of samples without target are `denoised`.
    """
    if batch.direction is None:
        return batch
    texts = batch.direction
    with torch.no_grad(), without(transformer, TRAINED):
        if batch.path is not None:
            batch = denoised(transformer, batch, batch.path, settings, accelerator)
        rows = (batch, *(replace(batch, **text._asdict()) for text in texts))
        own, positive, negative = (predict_velocity(transformer, each).float() for each in rows)
    moved = batch.strength * settings.slider.guidance_strength * (positive - negative)
    return replace(batch, target=own + moved)


def denoised(
    transformer: Any, batch: Batch, path: Float[Tensor, "B N"], settings: TrainConfig, accelerator: Accelerator
) -> Batch:
    """The batch with the latents that the model generates from its noise for its own prompts, by Euler steps.

    They are `clean` and `noise` of the batch at once, so that it has them at any noise level. Under FSDP2 each pass
    gathers the weights from all processes, so all take as many as the one with the most.
    """
    steps = path.shape[1] - 1
    passes = max(all_gather_object(steps)) if settings.fsdp else steps
    latents = batch.noise
    for i in range(passes):
        at = min(i, steps)
        noised = replace(batch, clean=torch.where(batch.is_target[..., None], latents, batch.clean), noise=latents)
        velocity = predict_velocity(transformer, replace(noised, sigma=path[:, at])).float()
        if i < steps:
            latents = latents + (path[:, i + 1] - path[:, i])[:, None, None] * velocity * batch.is_target[..., None]
    return replace(batch, clean=torch.where(batch.is_target[..., None], latents, batch.clean), noise=latents)


# ---- nonfinite -------------------------------------------------------------------------------------------------------
# Losses and gradients that are not finite: stop the run, or skip the batch or step.
#
# Every process decides the same, and a skipped batch leaves no trace in gradients or optimizer.

MAX_CONSECUTIVE = 10
"""Skips in a row that stop the run: this many are no coincidence, so the weights are damaged by now."""


@dataclass
class NonFiniteGuard:
    """Applies `train.on_nan` to losses, or to gradient norms: a loss that is finite does not end a row of gradients
    that are not."""

    skip: bool
    consecutive: int = 0

    def skips(self, accelerator: Any, what: str, value: float, labels: Sequence[str]) -> bool:
        """True if to skip `what`, computed on the samples `labels`, because it is not finite in some process.

        Raises TrainError if the run must stop.
        """
        mine = not math.isfinite(value)
        if mine and not self.skip:
            raise TrainError(
                f"{what} is not a number",
                found=f"{value} for the samples {', '.join(labels)}",
                do="lower optimizer.learning_rate, look at them with `qwen-cache inspect --sample NAME`, or skip such "
                "batches with train.on_nan=skip",
            )
        if not self.skip or not any_process(accelerator, mine):
            self.consecutive = 0
            return False
        self.consecutive += 1
        if mine:  # no other process knows these samples
            console(always=True).print(
                f"skipped: {what} is {value} for the samples {escaped(', '.join(labels))}", markup=False
            )
        if self.consecutive == MAX_CONSECUTIVE:
            raise TrainError(
                f"{what} is not a number, for the {MAX_CONSECUTIVE}th time in a row",
                found=f"last for the samples {', '.join(labels)}",
                do="lower optimizer.learning_rate, and continue with --resume from the newest checkpoint",
            )
        return True
