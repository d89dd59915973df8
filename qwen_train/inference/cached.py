"""Generation from a cache: a sample's embeddings and control latents replace its prompt and images.

Only the transformer is needed. The loop repeats the stock pipelines' operations one by one, so equal noise and inputs
give an equal result. Validation uses it too, so it imports neither a pipeline nor a VAE. Refused: an ambiguous sample
name; and guidance, if the cache lacks the empty prompt, which is the only negative prompt that it can have.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_train.flow import NoiseSchedule

FOLDER = "validation"
"""A run's folder for the latents of validation images, which `qwen-train decode` decodes."""
LEAST_PREFIX = 6
"""The fewest digits of a key that may identify a sample, as in git; fewer are more likely a mistake."""
SHOWN = 5
"""Samples listed in a message."""
HEXADECIMAL = set("0123456789abcdef")


@torch.no_grad()
def generate_cached(
    sample: Sample,
    transformer: Any,
    scheduler: Any,
    *,
    num_inference_steps: int,
    true_cfg_scale: float = 1.0,
    sigmas: Sequence[float] | None = None,
    latents: Float[Tensor, "S 64"],
    device: torch.device,
    dtype: torch.dtype,
    on_step: Callable[[int], object] | None = None,
) -> Float[Tensor, "S 64"]:
    """The target latents that the stock pipeline would generate from the cached embeddings and control latents.

    `latents` is the initial noise. A `true_cfg_scale` above 1 guides away from the empty prompt. `on_step` gets the
    number of finished steps and ends the generation by returning True. Raises TrainError for guidance without an empty
    prompt.
    """
    tokens = token_count(sample.img_shapes[:1])
    levels = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps) if sigmas is None else sigmas
    mu = NoiseSchedule.of_config(scheduler.config).mu(tokens)
    scheduler.set_timesteps(sigmas=levels, device=device, mu=mu)
    scheduler.set_begin_index(0)
    latents = latents[None].to(device, dtype)
    controls = sample["control_latents"][None].to(latents) if len(sample.img_shapes) > 1 else latents[:, :0]
    prompts = [prompt[None].to(latents) for prompt in prompts_of(sample, true_cfg_scale)]
    for step, t in enumerate(scheduler.timesteps, 1):
        image, sigma = torch.cat([latents, controls], dim=1), t.expand(1).to(dtype) / 1000
        velocity, *others = [velocity_of(transformer, image, prompt, sigma, sample.img_shapes) for prompt in prompts]
        for negative in others:
            guided = negative + true_cfg_scale * (velocity - negative)
            velocity = guided * (velocity.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        latents = scheduler.step(velocity[:, :tokens], t, latents, return_dict=False)[0].to(dtype)
        if on_step is not None and on_step(step) is True:
            break
    return latents[0]


def prompts_of(sample: Sample, true_cfg_scale: float) -> Iterator[Float[Tensor, "L D"]]:
    """The embeddings of the prompt and, with guidance, of the empty prompt."""
    yield sample["prompt_embeds"]
    if true_cfg_scale > 1:
        if "empty_prompt_embeds" not in sample:
            raise TrainError(
                "guidance needs the embeddings of the empty prompt, which this cache lacks",
                where=f"sample {sample.name}",
                found=f"true_cfg_scale={true_cfg_scale}",
                do="set true_cfg_scale=1, or run `qwen-cache build` on the images",
            )
        yield sample["empty_prompt_embeds"]


def velocity_of(
    transformer: Any, image: Float[Tensor, "1 S 64"], prompt: Float[Tensor, "1 L D"], sigma: Tensor, shapes: ImgShapes
) -> Float[Tensor, "1 S 64"]:
    """The transformer's prediction for every token."""
    velocity: Tensor = transformer(
        hidden_states=image,
        encoder_hidden_states=prompt,
        timestep=sigma,
        img_shapes=[list(shapes)],
        return_dict=False,
    )[0]
    return velocity


def guidance_from_cache(negative_prompt: str | None, true_cfg_scale: float) -> float:
    """The `true_cfg_scale` for a cached sample: 1 without a negative prompt, as in the pipelines."""
    if negative_prompt:
        raise ConfigError(
            "the empty prompt is the only negative prompt in a cache",
            found=f"predict.negative_prompt={negative_prompt!r}",
            do='set predict.negative_prompt="", or generate from the images with --image',
        )
    return 1.0 if negative_prompt is None else true_cfg_scale


def initial_latents(sample: Sample, seed: int, dtype: torch.dtype) -> Float[Tensor, "S 64"]:
    """The noise that the stock pipeline samples for the target from `torch.Generator().manual_seed(seed)`.

    It is sampled in the pipeline's dtype, as there, and on the CPU, so that it is equal for every device.
    """
    _, h, w = sample.img_shapes[0]
    noise = torch.randn(1, 1, 16, 2 * h, 2 * w, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return noise.view(16, h, 2, w, 2).permute(1, 3, 0, 2, 4).reshape(h * w, 64)


def find_sample(cache: Cache, key: str) -> Sample:
    """The sample with this key, this name, or the only key with this prefix, in this order; else ConfigError."""
    keys, names = (cache.table[column].to_pylist() for column in ("key", "name"))
    if key in keys:
        return cache[keys.index(key)]
    matches = [i for i, name in enumerate(names) if name == key]
    if not matches and len(key) >= LEAST_PREFIX and set(key.lower()) <= HEXADECIMAL:
        matches = [i for i, each in enumerate(keys) if each.startswith(key.lower())]
    if len(matches) == 1:
        return cache[matches[0]]
    if matches:
        listed = [f"{keys[i]} ({names[i]})" for i in matches]
        raise ConfigError("several samples match", where=cache.folder, found=_some(listed), do="give the full key")
    near = difflib.get_close_matches(key, dict.fromkeys(names), SHOWN) or list(dict.fromkeys(names))
    raise ConfigError(
        "no sample of this key or name",
        where=cache.folder,
        expected=f"a name, a key, or the first {LEAST_PREFIX} or more digits of a key",
        found=key,
        do=f"name one of its samples, for example: {_some(near)}; index.parquet lists all",
    )


def _some(listed: Sequence[str]) -> str:
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
