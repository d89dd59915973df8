"""Latents to images, as the stock pipelines end: for everything that shows cached or generated images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image

from qwen_cache.encode.latents import latent_space, vae_class
from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.encoders import load_whole
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.sizes import Size


def parts_of(img_shapes: Iterable[Sequence[int]]) -> Iterator[tuple[slice, Size]]:
    """The token range and the pixel size of each image in concatenated latents."""
    begin = 0
    for frames, h, w in img_shapes:
        end = begin + frames * h * w
        yield slice(begin, end), (w * PIXELS_PER_TOKEN, h * PIXELS_PER_TOKEN)
        begin = end


def load_vae(model: ModelFolder, device: torch.device, dtype: torch.dtype) -> VaeThatFits:
    """The VAE alone, for `decode_latents`."""
    return VaeThatFits(load_whole(vae_class(model), model.component("vae"), torch_dtype=dtype).to(device))


def decode_images(
    vae: Any, latents: Float[torch.Tensor, "S 64"], img_shapes: Iterable[Sequence[int]]
) -> list[Image.Image]:
    """All images of packed latents, such as the controls of a cached sample."""
    return [decode_latents(vae, latents[tokens][None], size) for tokens, size in parts_of(img_shapes)]


@torch.inference_mode()
def decode_latents(vae: Any, latents: Float[torch.Tensor, "1 S 64"], size: Size) -> Image.Image:
    """The image of packed latents, decoded on the VAE's device as in the pipelines; RGBA where the VAE has it."""
    return latent_space(vae).decode(vae, latents, size)
