"""Images to latents and back: whole and in tiles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from inspect import signature
from itertools import product
from math import floor, prod
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, AutoencoderKLQwenImage21
from diffusers.image_processor import VaeImageProcessor
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
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import conv2d

from qwen_cache.errors import ModelError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.devices import has_streams, join_on_device
from qwen_cache.models.folder import ModelFolder, read_config
from qwen_cache.models.loading import load_whole
from qwen_cache.sources.sizes import Size

# ---- single frame ----------------------------------------------------------------------------------------------------
# The VAE of Qwen-Image on images, with 2-D convolutions in place of its causal 3-D ones.
#
# A causal convolution over three frames pads a single image with two zero frames in front, so only the last slice of
# its kernel meets nonzero values: a 2-D convolution with that slice is the same function. The rest of the stock VAE is
# unchanged. Refuses more than one frame; leaves any other VAE as it is.


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

    def reset_parameters(self) -> None:
        """No random weights, which would be replaced at once."""

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


# ---- tiles -----------------------------------------------------------------------------------------------------------
# A VAE on images too large for its device: tile by tile, with the latents and pixels of the whole.
#
# All full-size layers of the VAEs of Qwen-Image and Qwen-Image-2.1 are local: each output depends on a window of
# inputs. So a tile runs with a margin as wide as its windows reach, which is then cut off; nothing is blended. The mid
# block, whose attention is global, runs on the whole image at the size of the latents. Takes a VAE after
# `for_single_frames`, which refuses more than one frame; refuses a VAE with other full-size layers, or with patches of
# pixels in place of pixels.

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


# ---- latents ---------------------------------------------------------------------------------------------------------
# The latent spaces of the VAEs: pixels to the tokens that a cache stores, and tokens to an image, as in diffusers.
#
# A token has 64 numbers and stands for 16×16 pixels, whatever the VAE. AutoencoderKLQwenImage has 16 channels at an
# eighth of the size, so a token is a patch of 2×2; AutoencoderKLQwenImage21 has 64 channels at a sixteenth, and
# transparency. The arithmetic is that of the stock pipelines, operation by operation and in the VAE's dtype, so that
# results are bitwise theirs. Refuses any other VAE.

PROCESSOR = VaeImageProcessor(vae_scale_factor=PIXELS_PER_TOKEN)
"""Resizes with Lanczos and scales to -1..1; the stock pipelines of both VAEs have it with this factor."""


@dataclass(frozen=True)
class LatentSpace:
    """The differences between the VAEs."""

    mode: str
    """The mode of the images that it encodes and decodes, as Pillow names it."""
    patch: int
    """A token is `patch`×`patch` latents."""
    denormalise: Callable[[Tensor, Tensor, Tensor], Tensor]
    """A function of latents, mean and standard deviation. The same function in both, but not with the same rounding."""

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
    return _class_in(model.component("vae"))


def _class_in(folder: Path) -> type[Any]:
    file = folder / "config.json"
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
    """Mean and standard deviation of each channel of `z`, in its dtype and on its device."""
    mean, std = vae.config.latents_mean, vae.config.latents_std
    return torch.tensor(mean).view(1, -1, 1, 1, 1).to(z), torch.tensor(std).view(1, -1, 1, 1, 1).to(z)


# ---- vae -------------------------------------------------------------------------------------------------------------
# The VAE lane: one image in, its normalised and packed latents out, through the stock VAE of the model.
#
# It computes what the pipelines condition on (`latents`): Lanczos resize from the original pixels, the mode of the
# posterior, normalised and packed. The convolutions of AutoencoderKLQwenImage run in two dimensions (`single_frame`).
# Images of one shape can be encoded together, and an image too large for the device runs in tiles (`tiles`); both
# change only the rounding.


def encoder_parts(vae: Any) -> list[nn.Module]:
    """The part that encodes; a build needs no decoder, which stays on the host."""
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


# ---- decode ----------------------------------------------------------------------------------------------------------
# Latents to images, as the stock pipelines end: for everything that shows cached or generated images.


def parts_of(img_shapes: Iterable[Sequence[int]]) -> Iterator[tuple[slice, Size]]:
    """The token range and the pixel size of each image in concatenated latents."""
    begin = 0
    for frames, h, w in img_shapes:
        end = begin + frames * h * w
        yield slice(begin, end), (w * PIXELS_PER_TOKEN, h * PIXELS_PER_TOKEN)
        begin = end


def load_vae(model: ModelFolder, device: torch.device, dtype: torch.dtype) -> VaeThatFits:
    """The VAE alone, for `decode_latents`; ModelError if it decodes other latents than the model's."""
    check_decoder(model)
    folder = model.decoding_vae
    return VaeThatFits(load_whole(_class_in(folder), folder, torch_dtype=dtype).to(device))


def load_vaes(model: ModelFolder, dtype: torch.dtype) -> tuple[Any, Any | None]:
    """The VAE that encodes, and one that decodes if it is another; neither has the half that it does not need.

    ModelError if the other one decodes other latents.
    """
    check_decoder(model)
    vae = load_whole(vae_class(model), model.component("vae"), torch_dtype=dtype)
    if model.other_vae is None:
        return vae, None
    other = load_whole(_class_in(model.other_vae), model.other_vae, torch_dtype=dtype)
    vae.decoder, other.encoder = nn.Identity(), nn.Identity()
    return vae, other


def check_decoder(model: ModelFolder) -> None:
    """ModelError if another VAE is to decode the model's latents, and is made for others."""
    if model.other_vae is None:
        return
    own, other = _latent_values(model.component("vae")), _latent_values(model.other_vae)
    differ = next((name for name in own if own[name] != other[name]), None)
    if differ is not None:
        raise ModelError(
            f"this VAE decodes other latents than the model's: they differ in {differ}",
            where=model.other_vae / "config.json",
            expected=own[differ],
            found=other[differ],
            do="name a VAE with the encoder of the model's, or leave --vae and model.vae out",
        )


def _latent_values(folder: Path) -> dict[str, Any]:
    """The values that a decoder must share with an encoder: channels, mean and standard deviation of each."""
    config, kind = read_config(folder / "config.json"), _class_in(folder)
    defaults = signature(kind.__init__).parameters
    values = {name: config.get(name, defaults[name].default) for name in ("z_dim", "latents_mean", "latents_std")}
    channels = range(values["z_dim"])
    of_channels = {f"{name}[{i}]": values[name][i] for name in ("latents_mean", "latents_std") for i in channels}
    return {"the number of latent channels": values["z_dim"], **of_channels}


def decode_images(
    vae: Any, latents: Float[torch.Tensor, "S 64"], img_shapes: Iterable[Sequence[int]]
) -> list[Image.Image]:
    """All images of packed latents, such as the controls of a cached sample."""
    return [decode_latents(vae, latents[tokens][None], size) for tokens, size in parts_of(img_shapes)]


@torch.inference_mode()
def decode_latents(vae: Any, latents: Float[torch.Tensor, "1 S 64"], size: Size) -> Image.Image:
    """The image of packed latents, decoded on the VAE's device as in the pipelines; RGBA where the VAE has it."""
    return latent_space(vae).decode(vae, latents, size)
