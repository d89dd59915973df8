"""The latent spaces of the VAEs: pixels to the tokens that a cache stores, and tokens to an image, as in diffusers.

A token has 64 numbers and stands for 16×16 pixels, whatever the VAE. AutoencoderKLQwenImage has 16 channels at an
eighth of the size, so a token is a patch of 2×2; AutoencoderKLQwenImage21 has 64 channels at a sixteenth, and
transparency. The arithmetic is that of the stock pipelines, operation by operation and in the VAE's dtype, so that
results are bitwise theirs. Refuses any other VAE.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image
from torch import Tensor

from qwen_cache.errors import ModelError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.folder import ModelFolder, read_config
from qwen_cache.sources.sizes import Size

PROCESSOR = VaeImageProcessor(vae_scale_factor=PIXELS_PER_TOKEN)
"""Resizes with Lanczos and scales to -1..1; the stock pipelines of both VAEs have it with this factor."""


@dataclass(frozen=True)
class LatentSpace:
    """What differs between the VAEs."""

    mode: str
    """Of the images that it encodes and decodes, as Pillow names it."""
    patch: int
    """A token is `patch`×`patch` latents."""
    denormalise: Callable[[Tensor, Tensor, Tensor], Tensor]
    """Of latents, mean and standard deviation. The same function in both, but not with the same rounding."""

    def pixels(self, image: Image.Image, size: Size) -> Float[Tensor, "1 C 1 H W"]:
        """The VAE's input for an image in `mode`, resized to `size` (width, height) pixels."""
        if image.mode != self.mode:
            raise ValueError(f"this VAE encodes {self.mode} images, found {image.mode}")
        width, height = size
        pixels: Tensor = PROCESSOR.preprocess(image, height, width).unsqueeze(2)
        return pixels

    def encode(self, vae: Any, pixels: Float[Tensor, "B C 1 H W"]) -> Float[Tensor, "B S 64"]:
        """The normalised mode of the posterior, packed."""
        z = vae.encode(pixels).latent_dist.mode()
        mean, std = _mean_and_std(vae, z)
        return self.pack((z - mean) / std)

    def decode(self, vae: Any, latents: Float[Tensor, "1 S 64"], size: Size) -> Image.Image:
        """The image of packed latents, decoded on the VAE's device in its dtype."""
        z = self.unpack(latents, size).to(vae.device, vae.dtype)
        image = vae.decode(self.denormalise(z, *_mean_and_std(vae, z)), return_dict=False)[0][:, :, 0]
        decoded: Image.Image = PROCESSOR.postprocess(image, output_type="pil")[0]
        return decoded

    def pack(self, z: Float[Tensor, "B c 1 h w"]) -> Float[Tensor, "B S 64"]:
        """Latents as tokens, in raster order; within a token the order is channel, row, column."""
        count, channels, _, h, w = z.shape
        patches = z.view(count, channels, h // self.patch, self.patch, w // self.patch, self.patch)
        return patches.permute(0, 2, 4, 1, 3, 5).reshape(count, -1, channels * self.patch**2).contiguous()

    def unpack(self, latents: Float[Tensor, "B S 64"], size: Size) -> Float[Tensor, "B c 1 h w"]:
        """Tokens of an image of `size` pixels as latents: the inverse of `pack`."""
        (count, _, numbers), (columns, rows) = latents.shape, (side // PIXELS_PER_TOKEN for side in size)
        patches = latents.reshape(count, rows, columns, numbers // self.patch**2, self.patch, self.patch)
        z = patches.permute(0, 3, 1, 4, 2, 5)
        return z.reshape(count, -1, 1, rows * self.patch, columns * self.patch)


LATENT_SPACES: dict[type[Any], LatentSpace] = {
    AutoencoderKLQwenImage: LatentSpace("RGB", 2, lambda z, mean, std: z / (1.0 / std) + mean),
    AutoencoderKLQwenImage21: LatentSpace("RGBA", 1, lambda z, mean, std: z * std + mean),
}


def latent_space(vae: Any) -> LatentSpace:
    """The latent space of a VAE, or of one that is wrapped as `vae.vae`."""
    while hasattr(vae, "vae"):
        vae = vae.vae
    return LATENT_SPACES[type(vae)]


def vae_class(model: ModelFolder) -> type[Any]:
    """The class of the model's VAE, by its `config.json`; ModelError if it is not supported."""
    file = model.component("vae") / "config.json"
    return supported_vae(read_config(file).get("_class_name"), file)


def supported_vae(name: object, where: object) -> type[Any]:
    """The class of a VAE by its name; ModelError if it is not supported."""
    classes = {kind.__name__: kind for kind in LATENT_SPACES}
    if str(name) not in classes:
        raise ModelError(
            "this VAE is not supported",
            where=where,
            expected=" or ".join(classes),
            found=name,
            do="use a model of the Qwen-Image family",
        )
    return classes[str(name)]


def _mean_and_std(vae: Any, z: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of `z`, in its dtype and on its device."""
    mean, std = vae.config.latents_mean, vae.config.latents_std
    return torch.tensor(mean).view(1, -1, 1, 1, 1).to(z), torch.tensor(std).view(1, -1, 1, 1, 1).to(z)
