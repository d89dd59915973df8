"""Latents to images, as the stock pipelines end: for everything that shows cached or generated images."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image

from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import load_whole
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
    return VaeThatFits(load_whole(AutoencoderKLQwenImage, model.component("vae"), torch_dtype=dtype).to(device))


def decode_images(
    vae: Any, latents: Float[torch.Tensor, "S 64"], img_shapes: Iterable[Sequence[int]]
) -> list[Image.Image]:
    """All images of packed latents, such as the controls of a cached sample."""
    return [decode_latents(vae, latents[tokens][None], size) for tokens, size in parts_of(img_shapes)]


@torch.inference_mode()
def decode_latents(vae: Any, latents: Float[torch.Tensor, "1 S 64"], size: Size) -> Image.Image:
    """The image of packed latents, decoded on the VAE's device as in the pipelines."""
    width, height = size
    scale = vae.spatial_compression_ratio
    z = QwenImagePipeline._unpack_latents(latents, height, width, scale).to(vae.device, vae.dtype)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(z) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    image = vae.decode(z / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]
    decoded: Image.Image = VaeImageProcessor(vae_scale_factor=2 * scale).postprocess(image, output_type="pil")[0]
    return decoded
