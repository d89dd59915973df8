"""The VAE lane: one image in, its normalised and packed latents out, through the stock VAE of the model.

It computes what the pipelines condition on (`latents`): Lanczos resize from the original pixels, the mode of the
posterior, normalised and packed. The convolutions of AutoencoderKLQwenImage run in two dimensions (`single_frame`).
Images of one shape can be encoded together, and an image too large for the device runs in tiles (`tiles`); both change
only the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from PIL import Image
from torch import nn

from qwen_cache.encode.latents import latent_space, vae_class
from qwen_cache.encode.single_frame import for_single_frames
from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.models.devices import has_streams, join_on_device
from qwen_cache.models.encoders import load_whole
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.sizes import Size


def encoder_parts(vae: Any) -> list[nn.Module]:
    """What encodes; a build needs no decoder, which stays on the host."""
    return [vae.encoder, vae.quant_conv]


class VaeEncoder:
    """The model's VAE on its own device. `batch_pixels` bounds the pixels that are encoded together."""

    def __init__(self, model: ModelFolder, device: torch.device, dtype: torch.dtype, batch_pixels: int = 1) -> None:
        vae = load_whole(vae_class(model), model.component("vae"), torch_dtype=dtype)
        self.space = latent_space(vae)
        for part in encoder_parts(for_single_frames(vae)):
            part.to(device)
        self.vae = VaeThatFits(vae)
        self.device, self.dtype, self.batch_pixels = device, dtype, batch_pixels

    def pixels(self, image: Image.Image, size: Size) -> Float[torch.Tensor, "1 C 1 H W"]:
        """The VAE's input for an image in `space.mode` at `size` (width, height) pixels, on the CPU.

        Any thread may call it.
        """
        pixels = self.space.pixels(image, size).to(self.dtype)
        return pixels.pin_memory() if has_streams(self.device) else pixels

    def encode(self, images: Sequence[Float[torch.Tensor, "1 C 1 H W"]]) -> list[Float[torch.Tensor, " S 64"]]:
        """The latents of images of one shape, on the CPU; a single image that does not fit runs in tiles."""
        return self._encode(self.vae, images)

    def encode_beside(self, images: Sequence[Float[torch.Tensor, "1 C 1 H W"]]) -> list[Float[torch.Tensor, " S 64"]]:
        """The same beside another lane on the device, and never in tiles."""
        return self._encode(self.vae.vae, images)

    @torch.inference_mode()
    def _encode(self, vae: Any, images: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        pixels = join_on_device(images, self.device)
        packed = self.space.encode(vae, pixels)
        return [latents.clone() for latents in packed.cpu()]
