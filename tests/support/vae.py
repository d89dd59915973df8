"""A VAE with random weights, and random inputs for it."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from torch import Tensor


def random_vae(**config: Any) -> Any:
    """The structure of the trained VAE with random weights."""
    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(**config).eval().requires_grad_(False)
    vae.decoder.conv_out.weight *= 4  # so that pixels exceed the range and are clamped
    return vae


def image(height: int, width: int) -> Tensor:
    return torch.rand(1, 3, 1, height, width, generator=torch.Generator().manual_seed(1)) * 2 - 1


def noise(height: int, width: int) -> Tensor:
    return torch.randn(1, 16, 1, height // 8, width // 8, generator=torch.Generator().manual_seed(2))
