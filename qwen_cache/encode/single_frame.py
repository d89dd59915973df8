"""The VAE of Qwen-Image on images, with 2-D convolutions in place of its causal 3-D ones.

A causal convolution over three frames pads a single image with two zero frames in front, so only the last slice of its
kernel meets nonzero values: a 2-D convolution with that slice is the same function. The rest of the stock VAE is
unchanged. Refuses more than one frame; leaves any other VAE as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageCausalConv3d
from torch import nn
from torch.nn.functional import conv2d


class SingleFrameConv(QwenImageCausalConv3d):  # type: ignore[misc]  # diffusers is not typed for mypy
    """A QwenImageCausalConv3d on its first frame: the last temporal slice of its kernel."""

    def __init__(self, causal: QwenImageCausalConv3d) -> None:
        _, height, width = causal.kernel_size
        horizontal, _, vertical, *_ = causal._padding  # as torch.nn.functional.pad takes it, the last axis first
        padding = (0, vertical, horizontal)
        super().__init__(causal.in_channels, causal.out_channels, (1, height, width), causal.stride, padding)
        self.weight = nn.Parameter(causal.weight.detach()[:, :, -1:].clone(), requires_grad=False)
        self.bias = nn.Parameter(causal.bias.detach(), requires_grad=False)
        self.padding_2d = (vertical, horizontal)

    def forward(self, x: torch.Tensor, cache_x: torch.Tensor | None = None) -> torch.Tensor:
        """`[B, C, 1, H, W]` to `[B, C', 1, H', W']`; there is no earlier frame, so nothing is cached."""
        if x.shape[2] != 1 or cache_x is not None:
            raise ValueError(f"this VAE was made for single images, found {x.shape[2]} frames")
        return conv2d(x[:, :, 0], self.weight[:, :, 0], self.bias, self.stride[1:], self.padding_2d).unsqueeze(2)


def for_single_frames(vae: Any) -> Any:
    """Replace the causal convolutions of `vae` in place, except those between frames, which one frame never reaches."""
    for module in list(vae.modules()):
        for name, child in list(module.named_children()):
            if type(child) is QwenImageCausalConv3d and name != "time_conv":
                setattr(module, name, SingleFrameConv(child))
    return vae
