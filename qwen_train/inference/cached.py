"""Generation from a cache: a sample's embeddings and control latents replace its prompt and images.

Only the transformer is needed: diffusers' own, or the one in training, which takes the stock call too. The loop
repeats the stock pipelines' operations one by one, so equal noise and inputs give an equal result. Validation uses it
too, so it imports neither a pipeline nor a VAE. Refused: an ambiguous sample name; and guidance, if the cache lacks
the empty prompt, which is the only negative prompt that it can have.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import numpy as np
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.models.family import Family
from qwen_train.data.checks import no_empty_prompt
from qwen_train.flow import NoiseSchedule

TOKENS_PER_SLOT = 4
"""Latents of Qwen-Image-2.1 for a token of its text encoder: 2×2."""


@torch.no_grad()
def generate_cached(
    sample: Sample,
    transformer: Any,
    scheduler: Any,
    *,
    family: Family,
    num_inference_steps: int,
    true_cfg_scale: float = 1.0,
    sigmas: Sequence[float] | None = None,
    use_kv_cache: bool = True,
    latents: Float[Tensor, "S 64"],
    device: torch.device,
    dtype: torch.dtype,
    on_step: Callable[[int], object] | None = None,
) -> Float[Tensor, "S 64"]:
    """The target latents that the stock pipeline would generate from the cached embeddings and control latents.

    `latents` is the initial noise. A `true_cfg_scale` above 1 guides away from the empty prompt. With `use_kv_cache`,
    Qwen-Image-2.1 keeps keys and values of text and control images from the first step on. `on_step` gets the number of
    finished steps and ends the generation by returning True. Raises TrainError for guidance without an empty prompt.
    """
    tokens = token_count(sample.img_shapes[:1])
    levels = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps) if sigmas is None else sigmas
    mu = NoiseSchedule.of_config(scheduler.config).mu(tokens)
    scheduler.set_timesteps(sigmas=levels, device=device, mu=mu)
    scheduler.set_begin_index(0)
    latents = latents[None].to(device, dtype)
    controls = sample["control_latents"][None].to(latents) if len(sample.img_shapes) > 1 else latents[:, :0]
    prompts = [prompt.to(latents) for prompt in prompts_of(sample, true_cfg_scale)]
    parts = [(transformer, sample, prompt, controls) for prompt in prompts]
    joint = family.joint_sequence
    conditions = [JointCondition(*each, use_kv_cache) if joint else Condition(*each) for each in parts]
    for step, t in enumerate(scheduler.timesteps, 1):
        sigma = t.expand(1).to(dtype) / 1000
        velocity, *others = [condition.velocity(latents, sigma) for condition in conditions]
        for negative in others:
            velocity = conditions[0].guided(velocity, negative, true_cfg_scale)
        latents = scheduler.step(velocity, t, latents, return_dict=False)[0].to(dtype)
        if on_step is not None and on_step(step) is True:
            break
    return latents[0]


def prompts_of(sample: Sample, true_cfg_scale: float) -> Iterator[Float[Tensor, "L D"]]:
    """The embeddings of the prompt and, with guidance, of the empty prompt."""
    yield sample["prompt_embeds"]
    if true_cfg_scale > 1:
        if "empty_prompt_embeds" not in sample:
            found = f"true_cfg_scale={true_cfg_scale}"
            raise no_empty_prompt("guidance", f"sample {sample.name}", found, "true_cfg_scale=1")
        yield sample["empty_prompt_embeds"]


@dataclass
class Condition:
    """One prompt and the controls of a sample, for a transformer of the 20B family."""

    transformer: Any
    sample: Sample
    prompt: Float[Tensor, "L D"]
    controls: Float[Tensor, "1 Sc 64"]

    def velocity(self, latents: Float[Tensor, "1 S 64"], sigma: Float[Tensor, " 1"]) -> Float[Tensor, "1 S 64"]:
        """The transformer's prediction for the target."""
        velocity: Tensor = self.transformer(
            hidden_states=torch.cat([latents, self.controls], dim=1),
            encoder_hidden_states=self.prompt[None],
            timestep=sigma,
            img_shapes=[list(self.sample.img_shapes)],
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    @staticmethod
    def guided(velocity: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance, at the length of `velocity`."""
        guided: Tensor = negative + scale * (velocity - negative)
        rescaled: Tensor = guided * (velocity.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        return rescaled


@dataclass
class JointCondition(Condition):
    """One prompt and the controls of a sample, for a transformer of Qwen-Image-2.1."""

    use_kv_cache: bool
    """Keep keys and values of text and controls after the first step."""
    _kept: QwenImage21KVCache | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._rows, is_image = rows_with_slots(self.sample, self.prompt)
        slots = is_image.new_ones(token_count(self.sample.img_shapes[:1]) // TOKENS_PER_SLOT)
        self._img_mask = torch.cat([is_image, slots])[None].to(self.prompt.device)

    def velocity(self, latents: Float[Tensor, "1 S 64"], sigma: Float[Tensor, " 1"]) -> Float[Tensor, "1 S 64"]:
        target, *controls = self.sample.img_shapes
        mode, model = None, getattr(self.transformer, "module", self.transformer)  # DistributedDataParallel's
        if self.use_kv_cache and model.config.causal_condition:
            mode = "cached" if self._kept else "extract"
            self._kept = self._kept or QwenImage21KVCache(len(model.transformer_blocks))
        velocity: Tensor = self.transformer(
            hidden_states=torch.cat([self.controls, latents], dim=1),
            encoder_hidden_states=self._rows[None],
            timestep=sigma,
            img_shapes=[[*controls, target]],
            img_mask=self._img_mask,
            kv_cache=self._kept,
            kv_cache_mode=mode,
            return_dict=False,
        )[0]
        return velocity[:, -latents.shape[1] :]

    @staticmethod
    def guided(velocity: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance."""
        return negative + scale * (velocity - negative)


def rows_with_slots(sample: Sample, text: Float[Tensor, "L D"]) -> tuple[Float[Tensor, "N D"], Bool[Tensor, " N"]]:
    """The cached rows of text with empty rows at the controls' slots, and which rows are slots.

    What the text encoder gave there does not matter: the transformer replaces these rows by the controls' latents.
    """
    rows, is_image, begin = [], [], 0
    for position, (_, h, w) in zip(sample.row.meta.image_positions, sample.img_shapes[1:], strict=True):
        slots = h * w // TOKENS_PER_SLOT
        rows += [text[begin:position], text.new_zeros(slots, text.shape[1])]
        is_image += [False] * (position - begin) + [True] * slots
        begin = position
    rows.append(text[begin:])
    is_image += [False] * (len(text) - begin)
    return torch.cat(rows), torch.tensor(is_image)


def guidance_from_cache(negative_prompt: str | None, true_cfg_scale: float) -> float:
    """The `true_cfg_scale` for a cached sample: 1 without a negative prompt, as in the pipelines."""
    if negative_prompt:
        raise ConfigError(
            "the empty prompt is the only negative prompt in a cache",
            found=f"predict.negative_prompt={negative_prompt!r}",
            do='set predict.negative_prompt="", or generate from the images with --image',
        )
    return 1.0 if negative_prompt is None else true_cfg_scale


def initial_latents(sample: Sample, seed: int, dtype: torch.dtype, family: Family) -> Float[Tensor, "S 64"]:
    """The noise that the stock pipeline samples for the target from `torch.Generator().manual_seed(seed)`.

    It is sampled in the pipeline's dtype, as there, and on the CPU, so that it is equal for every device.
    """
    (_, h, w), channels = sample.img_shapes[0], family.latent_channels
    patch = isqrt(LATENT_CHANNELS // channels)
    shape = (1, 1, channels, patch * h, patch * w)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return noise.view(channels, h, patch, w, patch).permute(1, 3, 0, 2, 4).reshape(h * w, LATENT_CHANNELS)
