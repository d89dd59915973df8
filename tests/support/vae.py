"""VAEs with random weights, and random inputs for them."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from torch import Tensor


def random_vae(kind: type[Any] = AutoencoderKLQwenImage, **config: Any) -> Any:
    """The structure of a trained VAE with random weights."""
    torch.manual_seed(0)
    vae = kind(**config).eval().requires_grad_(False)
    vae.decoder.conv_out.weight *= 4  # so that pixels exceed the range and are clamped
    return vae


def random_vae_21(base_dim: int = 4, **config: Any) -> Any:
    """The same of Qwen-Image-2.1."""
    return random_vae(AutoencoderKLQwenImage21, base_dim=base_dim, decoder_base_dim=base_dim, **config)


def image(height: int, width: int, channels: int = 3) -> Tensor:
    return torch.rand(1, channels, 1, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def noise(height: int, width: int, channels: int = 16, scale: int = 8) -> Tensor:
    return torch.randn(1, channels, 1, height // scale, width // scale, generator=torch.Generator().manual_seed(2))
