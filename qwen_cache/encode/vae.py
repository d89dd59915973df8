"""The VAE lane: one image in, its normalised and packed latents out, through the stock modules.

It computes what the pipelines condition on: Lanczos resize from the original pixels, the mode of the posterior,
`(z - latents_mean) / latents_std`, and packing of 2×2 patches. Its convolutions run in two dimensions (`single_frame`).
Images of one shape can be encoded together, and an image too large for the device runs in tiles (`tiles`); both change
only the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPlusPipeline
from jaxtyping import Float
from PIL import Image

from qwen_cache.encode.single_frame import for_single_frames
from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import load_whole
from qwen_cache.sources.sizes import Size


class VaeEncoder:
    """AutoencoderKLQwenImage on its own device. `batch_pixels` bounds the pixels that are encoded together."""

    def __init__(self, model: ModelFolder, device: torch.device, dtype: torch.dtype, batch_pixels: int = 1) -> None:
        vae = load_whole(AutoencoderKLQwenImage, model.component("vae"), torch_dtype=dtype)
        vae = for_single_frames(vae).to(device)
        # the stock pipeline without its other parts: its own preprocessing, normalisation and packing
        self.pipeline = QwenImageEditPlusPipeline(None, vae, None, None, None, None)
        self.pipeline.vae = VaeThatFits(vae)
        self.device, self.dtype, self.batch_pixels = device, dtype, batch_pixels

    def pixels(self, image: Image.Image, size: Size) -> Float[torch.Tensor, "1 3 1 H W"]:
        """The VAE's input for an RGB image at `size` (width, height) pixels, on the CPU. Any thread may call it."""
        width, height = size
        pixels: torch.Tensor = self.pipeline.image_processor.preprocess(image, height, width).unsqueeze(2)
        pixels = pixels.to(self.dtype)
        return pixels.pin_memory() if self.device.type == "cuda" else pixels

    @torch.inference_mode()
    def encode(self, images: Sequence[Float[torch.Tensor, "1 3 1 H W"]]) -> list[Float[torch.Tensor, " S 64"]]:
        """The latents of images of one shape, on the CPU."""
        pixels = torch.cat([image.to(self.device, non_blocking=True) for image in images])
        latents = self.pipeline._encode_vae_image(pixels, generator=None)
        count, channels, _, h, w = latents.shape
        packed: torch.Tensor = self.pipeline._pack_latents(latents, count, channels, h, w)
        return [latents.clone() for latents in packed.cpu()]
