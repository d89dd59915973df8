"""A VAE on images too large for its device: tile by tile, with the latents and pixels of the whole.

All full-size layers of the VAEs of Qwen-Image and Qwen-Image-2.1 are local: each output depends on a window of inputs.
So a tile runs with a margin as wide as its windows reach, which is then cut off; nothing is blended. The mid block,
whose attention is global, runs on the whole image at the size of the latents. Takes a VAE after `for_single_frames`,
which refuses more than one frame; refuses a VAE with other full-size layers, or with patches of pixels in place of
pixels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product
from math import floor, prod
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import (
    QwenImageCausalConv3d,
    QwenImageResample,
    QwenImageResidualBlock,
    QwenImageRMS_norm,
    QwenImageUpBlock,
    QwenImageUpsample,
)
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import (
    QwenImage21AvgDown3D,
    QwenImage21CausalConv3d,
    QwenImage21DupUp3D,
    QwenImage21Resample,
    QwenImage21ResidualBlock,
    QwenImage21ResidualDownBlock,
    QwenImage21ResidualUpBlock,
    QwenImage21RMS_norm,
    QwenImage21UpBlock,
    QwenImage21Upsample,
)
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_outputs import AutoencoderKLOutput
from jaxtyping import Float
from torch import nn

from qwen_cache.encode.single_frame import for_single_frames
from qwen_cache.errors import ModelError

HEIGHT, WIDTH = -2, -1
TILE = 512  # pixels: at 2048² a tenth of the memory
"""The convolutions then see 1.4 times as many pixels in the encoder of Qwen-Image, and 2 times in that of 2.1."""
SMALLER = "use a smaller resolution, or a device with more memory"


@dataclass(frozen=True)
class VaeThatFits:
    """Stands in for `vae` in a pipeline: a single image that does not fit into its device's memory is run in tiles."""

    vae: Any
    tile: int = TILE
    always_tiles: bool = False
    """Encode an image in tiles whether it fits or not."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)

    def encode(self, pixels: torch.Tensor) -> AutoencoderKLOutput:
        if not self.always_tiles:
            try:
                encoded: AutoencoderKLOutput = self.vae.encode(pixels)
                return encoded
            except torch.OutOfMemoryError:
                if len(pixels) > 1:
                    raise
        return AutoencoderKLOutput(
            DiagonalGaussianDistribution(encode_in_tiles(for_single_frames(self.vae), pixels, self.tile))
        )

    def decode(self, latents: torch.Tensor, return_dict: bool = True) -> Any:
        try:
            return self.vae.decode(latents, return_dict=return_dict)
        except torch.OutOfMemoryError:
            if len(latents) > 1:
                raise
        sample = decode_in_tiles(for_single_frames(self.vae), latents, self.tile)
        return DecoderOutput(sample) if return_dict else (sample,)


def encode_in_tiles(vae: Any, pixels: Float[torch.Tensor, "B C 1 H W"], tile: int) -> Float[torch.Tensor, "B c 1 h w"]:
    """The moments of the posterior, as from `vae.encode`; a tile contributes `tile`×`tile` pixels."""
    check_tileable(vae)
    encoder = vae.encoder
    local = nn.Sequential(encoder.conv_in, *encoder.down_blocks)
    features = in_tiles(local, pixels, tile // vae.spatial_compression_ratio)
    features = encoder.nonlinearity(encoder.norm_out(encoder.mid_block(features)))
    moments: torch.Tensor = vae.quant_conv(encoder.conv_out(features))
    return moments


def decode_in_tiles(vae: Any, latents: Float[torch.Tensor, "B z 1 h w"], tile: int) -> Float[torch.Tensor, "B C 1 H W"]:
    """The pixels in -1..1, as from `vae.decode`; a tile contributes `tile`×`tile` pixels."""
    check_tileable(vae)
    decoder = vae.decoder
    features = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    blocks = [FirstFrame(each) if type(each) is QwenImage21ResidualUpBlock else each for each in decoder.up_blocks]
    local = nn.Sequential(*blocks, decoder.norm_out, decoder.nonlinearity, decoder.conv_out)
    return in_tiles(local, features, tile).clamp_(-1, 1)


def in_tiles(local: nn.Module, x: Float[torch.Tensor, "B c 1 h w"], tile: int) -> Float[torch.Tensor, "B d 1 H W"]:
    """`local(x)`, computed for `tile`×`tile` outputs at a time."""
    rows, columns = (list(spans(windows(local, axis), x.shape[axis], tile)) for axis in (HEIGHT, WIDTH))
    whole: torch.Tensor | None = None
    for row, column in product(rows, columns):
        output = local(x[..., row.needed, column.needed])
        if whole is None:
            whole = output.new_empty(*output.shape[:3], rows[-1].made.stop, columns[-1].made.stop)
        whole[..., row.made, column.made] = output[..., row.kept, column.kept]
    assert whole is not None
    return whole


def check_tileable(vae: Any) -> None:
    """ModelError if the VAE's convolutions see patches of pixels."""
    patch = vae.config.get("patch_size") or 1
    if patch > 1:
        raise ModelError(
            "the VAE cannot be run in tiles: it works on patches of pixels",
            expected="patch_size 1 or none",
            found=patch,
            do=SMALLER,
        )


class FirstFrame(nn.Module):
    """A decoder's block on the first frame: its shortcut, made for videos, would otherwise add frames after it."""

    def __init__(self, block: QwenImage21ResidualUpBlock) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Float[torch.Tensor, "B c 1 h w"]) -> Float[torch.Tensor, "B d 1 H W"]:
        output: torch.Tensor = self.block(x, first_chunk=True)
        return output


CONTAINERS = {
    *(QwenImageResample, QwenImageResidualBlock, QwenImageUpBlock),
    *(QwenImage21Resample, QwenImage21ResidualBlock, QwenImage21UpBlock),
    *(QwenImage21ResidualDownBlock, QwenImage21ResidualUpBlock, FirstFrame),
    *(nn.ModuleList, nn.Sequential),
}
POINTWISE = {QwenImageRMS_norm, QwenImage21RMS_norm, nn.Dropout, nn.Identity, nn.SiLU}
SHORTCUTS = {QwenImage21AvgDown3D, QwenImage21DupUp3D}
"""Beside the other layers of their block, whose windows contain theirs: they halve or double the size like those."""


# ---- the inputs of a tile --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Window:
    """Along one axis, output i comes from the `size` inputs that begin at `stride * i - before`."""

    size: int
    stride: Fraction
    before: int


@dataclass(frozen=True)
class Span:
    """A tile along one axis: the inputs it runs on, the outputs it contributes, and their range in its own output."""

    needed: slice
    made: slice
    kept: slice


def spans(path: Sequence[Window], size: int, tile: int) -> Iterator[Span]:
    """The tiles that cover the outputs of `path` for `size` inputs.

    A tile ends at the end of the image if it reaches that far, so that the modules pad it as they pad the whole. It
    begins at a multiple of the stride, so that its outputs are among those of the whole, and ends at one, so that
    halves of it are whole numbers.
    """
    if tile < 1:
        raise ValueError("a tile is smaller than one value at the coarsest level")
    stride = prod((window.stride for window in path), start=Fraction(1))
    outputs = floor(size / stride)
    for start in range(0, outputs, tile):
        stop = min(start + tile, outputs)
        first, last = reach(path, start, stop)
        begin = max(first // stride.numerator * stride.numerator, 0)
        end = min(-(-last // stride.numerator) * stride.numerator, size)
        skipped = start - int(begin / stride)
        yield Span(slice(begin, end), slice(start, stop), slice(skipped, skipped + stop - start))


def reach(path: Sequence[Window], start: int, stop: int) -> tuple[int, int]:
    """The range of inputs on which the outputs `start` to `stop` of `path` depend."""
    for window in reversed(path):
        start = floor(window.stride * start) - window.before
        stop = floor(window.stride * (stop - 1)) - window.before + window.size
    return start, stop


def windows(local: nn.Module, axis: int) -> list[Window]:
    """The windows of all layers of `local`, in order; a shortcut of one point among them widens nothing."""
    without = CONTAINERS | POINTWISE | SHORTCUTS
    return [window_of(module, axis) for module in local.modules() if type(module) not in without]


def window_of(module: nn.Module, axis: int) -> Window:
    pad = {WIDTH: 0, HEIGHT: 2}[axis]  # as torch.nn.functional.pad takes it, the last axis first
    match module:
        case QwenImageCausalConv3d() | QwenImage21CausalConv3d():
            return Window(module.kernel_size[axis], Fraction(module.stride[axis]), module._padding[pad])
        case nn.Conv2d():
            return Window(module.kernel_size[axis], Fraction(module.stride[axis]), int(module.padding[axis]))
        case nn.ZeroPad2d():
            return Window(1, Fraction(1), module.padding[pad])
        case QwenImageUpsample(mode="nearest-exact") | QwenImage21Upsample(mode="nearest-exact"):
            return Window(1, 1 / Fraction(module.scale_factor[axis]), 0)
    raise ModelError(
        f"the VAE cannot be run in tiles: a {type(module).__name__} in it may reach further than a tile",
        do=SMALLER,
    )
