"""The VAE in tiles: what it makes of a whole image, at the memory of a tile.

The judge is the stock VAE on the whole, in float64, where nothing but another function differs; the gradient says how
far around a tile a value is seen.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Pipeline, QwenImageEditPlusPipeline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_cache.encode import vae as tiles
from qwen_cache.encode.vae import (
    HEIGHT,
    WIDTH,
    FirstFrame,
    VaeThatFits,
    decode_in_tiles,
    encode_in_tiles,
    for_single_frames,
    reach,
    spans,
    windows,
)
from qwen_cache.errors import ModelError
from tests.support.judge import EXACT, TOLERANCE, assert_same, relative, without_float32
from tests.support.marks import slow
from tests.support.vae import image, noise, random_vae, random_vae_21


@dataclass(frozen=True)
class Kind:
    """A VAE, and inputs for it."""

    vae: Callable[..., Any]
    channels: int
    z: int
    scale: int
    several: tuple[int, int]
    """Height and width of an image of several tiles whose halo ends within it."""

    def image(self, height: int, width: int) -> Tensor:
        return image(height, width, self.channels)

    def noise(self, height: int, width: int) -> Tensor:
        return noise(height, width, self.z, self.scale)


QWEN_IMAGE, QWEN_IMAGE_21 = Kind(random_vae, 3, 16, 8, (192, 192)), Kind(random_vae_21, 4, 64, 16, (32, 528))

SIZES = [(192, 192), (96, 288), (304, 80), (32, 32), (176, 240), (32, 528)]  # height, width
FAST = [((96, 288), 64), ((32, 528), 64), ((32, 32), 64)]
SIZES_AND_TILES = [
    pytest.param(size, tile, marks=[] if (size, tile) in FAST else pytest.mark.slow)
    for size in SIZES
    for tile in (64, 128)
]


@pytest.fixture(scope="module", params=[QWEN_IMAGE, QWEN_IMAGE_21], ids=["20B", "2.1"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


@pytest.fixture(scope="module")
def stock(kind: Kind) -> Any:
    return kind.vae(base_dim=8)


@pytest.fixture(scope="module")
def ours(stock: Any) -> Any:
    return for_single_frames(copy.deepcopy(stock))


@pytest.fixture(scope="module")
def exact(kind: Kind) -> tuple[Any, Any]:
    """The stock one and ours, in float64: what is left is no rounding."""
    stock = kind.vae(base_dim=4).double()
    return stock, for_single_frames(copy.deepcopy(stock))


def encoder_part(vae: Any) -> nn.Module:
    """The part before the mid block."""
    return nn.Sequential(vae.encoder.conv_in, *vae.encoder.down_blocks)


def decoder_part(vae: Any) -> nn.Module:
    """The part after the mid block."""
    last = (vae.decoder.norm_out, vae.decoder.nonlinearity, vae.decoder.conv_out)
    blocks = [FirstFrame(block) if hasattr(block, "avg_shortcut") else block for block in vae.decoder.up_blocks]
    return nn.Sequential(*blocks, *last)


def error(ours: Tensor, stock: Tensor) -> float:
    assert (ours.shape, ours.dtype) == (stock.shape, stock.dtype)
    return relative(ours, stock)


# ---- equal to the whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "tile"), SIZES_AND_TILES)
def test_moments_are_those_of_the_whole(size: tuple[int, int], tile: int, kind: Kind, exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    pixels = kind.image(*size).double()
    whole = stock.encode(pixels).latent_dist.parameters
    assert error(encode_in_tiles(ours, pixels, tile), whole) < EXACT


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("size", "tile"), SIZES_AND_TILES)
def test_pixels_are_those_of_the_whole(size: tuple[int, int], tile: int, kind: Kind, exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    latents = kind.noise(*size).double()
    with without_float32():
        whole = stock.decode(latents).sample
        assert (whole.abs() == 1).any()
        assert error(decode_in_tiles(ours, latents, tile), whole) < EXACT


@pytest.mark.slow
def test_the_real_size_in_tiles_is_the_whole() -> None:
    stock = random_vae().double()
    ours = for_single_frames(copy.deepcopy(stock))
    pixels, latents = image(32, 192).double(), noise(32, 160).double()
    with without_float32():
        assert error(encode_in_tiles(ours, pixels, 96), stock.encode(pixels).latent_dist.parameters) < EXACT
        assert error(decode_in_tiles(ours, latents, 96), stock.decode(latents).sample) < EXACT


@pytest.mark.fast_cases(1)
def test_bfloat16_is_as_near_to_the_exact_result_as_the_whole(kind: Kind) -> None:
    whole = kind.vae(base_dim=4).bfloat16()
    ours, exact = for_single_frames(copy.deepcopy(whole)), copy.deepcopy(whole).double()
    pixels, latents = kind.image(96, 160).bfloat16(), kind.noise(96, 160).bfloat16()
    truth = exact.encode(pixels.double()).latent_dist.parameters, exact.decode(latents.double()).sample
    assert_same(encode_in_tiles(ours, pixels, 64), whole.encode(pixels).latent_dist.parameters, truth[0])
    assert_same(decode_in_tiles(ours, latents, 64), whole.decode(latents).sample, truth[1])


def test_an_image_within_one_tile_is_bit_for_bit_the_same(kind: Kind, ours: Any) -> None:
    """So that tiles can always be on: then it is the same call."""
    pixels, latents = kind.image(96, 128), kind.noise(96, 128)
    assert torch.equal(encode_in_tiles(ours, pixels, 128), ours.encode(pixels).latent_dist.parameters)
    assert torch.equal(decode_in_tiles(ours, latents, 128), ours.decode(latents).sample)


@pytest.mark.fast_cases(1)
def test_every_image_of_a_batch_is_tiled(kind: Kind, exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    pixels = torch.cat([kind.image(96, 160), kind.image(96, 160).flip(-1)]).double()
    both = encode_in_tiles(ours, pixels, 64)
    for one, moments in zip(pixels.split(1), both.split(1), strict=True):
        assert error(moments, stock.encode(one).latent_dist.parameters) < EXACT


def test_tiles_cover_everything_once(kind: Kind, stock: Any) -> None:
    encoder, decoder = (windows(part(stock), WIDTH) for part in (encoder_part, decoder_part))
    for size, tile in [*product([8, 56, 256], [8, 24, 64, 192, 1000]), (1000, 192)]:
        for path, outputs in ((encoder, size // kind.scale), (decoder, kind.scale * size)):
            covered = [i for span in spans(path, size, tile) for i in range(outputs)[span.made]]
            assert covered == list(range(outputs)), (size, tile)


# ---- as far as it is seen, and no further ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "part", "size", "place"),
    [
        slow(QWEN_IMAGE, encoder_part, 176, (11, 12)),
        (QWEN_IMAGE, decoder_part, 28, (115, 108)),
        (QWEN_IMAGE_21, encoder_part, 352, (11, 12)),
        slow(QWEN_IMAGE_21, decoder_part, 32, (259, 252)),
    ],
)
def test_the_halo_is_as_wide_as_the_gradient(kind: Kind, part: Any, size: int, place: tuple[int, int]) -> None:
    """The inputs that an output depends on are those that it has a gradient of, on both axes."""
    local = part(kind.vae(base_dim=2)).double()
    channels = next(m for m in local.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)).in_channels
    x = torch.randn(1, channels, 1, size, size, dtype=torch.float64).requires_grad_()
    local(x)[..., place[0], place[1]].sum().backward()
    seen = x.grad.abs().sum((0, 1, 2))
    for axis, others, at in ((HEIGHT, 1, place[0]), (WIDTH, 0, place[1])):
        first, *_, last = seen.sum(others).nonzero().flatten().tolist()
        assert reach(windows(local, axis), at, at + 1) == (first, last + 1)
        assert 0 < first < last < size - 1


def narrower(before: int, after: int) -> Any:
    def mutant(path: Any, start: int, stop: int) -> tuple[int, int]:
        first, last = reach(path, start, stop)
        return first + before, last - after

    return mutant


@pytest.mark.parametrize(("before", "after"), [(1, 0), slow(0, 1), slow(8, 8)])
def test_a_narrower_halo_would_be_noticed(
    before: int, after: int, kind: Kind, exact: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above sees one missing step of the coarsest level, and padding between tiles all the more."""
    stock, ours = exact
    pixels = kind.image(*kind.several).double()
    monkeypatch.setattr(tiles, "reach", narrower(kind.scale * before, kind.scale * after))
    whole = stock.encode(pixels).latent_dist.parameters
    assert error(encode_in_tiles(ours, pixels, 64), whole) > 1e6 * EXACT


@pytest.mark.slow
@pytest.mark.parametrize("mutant", [narrower(1, 0), narrower(0, 1)])
def test_a_narrower_halo_of_the_decoder_would_be_noticed(
    mutant: Any, kind: Kind, exact: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of the latents less, which weighs little where it is furthest away."""
    stock, ours = exact
    latents = kind.noise(*kind.several).double()
    monkeypatch.setattr(tiles, "reach", mutant)
    with without_float32():
        assert error(decode_in_tiles(ours, latents, 64), stock.decode(latents).sample) > 10 * EXACT


@pytest.mark.fast_cases(1)
def test_the_largest_tensor_is_one_of_a_tile(kind: Kind, ours: Any) -> None:
    """The largest tensor does not grow with the image."""
    largest: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            largest[-1] = max(largest[-1], made.numel() if isinstance(made, Tensor) else 0)
            return made

    for run in (lambda pixels: encode_in_tiles(ours, pixels, 64), ours.encode):
        for width in (32 * kind.scale, 64 * kind.scale):
            pixels = kind.image(32, width)
            largest.append(0)
            with Watch():
                run(pixels)
    of_a_tile, of_a_tile_again, whole, twice_as_wide = largest
    assert of_a_tile == of_a_tile_again < whole < twice_as_wide


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "config"),
    [(QWEN_IMAGE, {}), (QWEN_IMAGE_21, {"is_residual": False})],  # with residual blocks, 2.1 has no such attention
)
def test_a_vae_that_sees_everything_early_is_refused(kind: Kind, config: dict[str, Any]) -> None:
    vae = kind.vae(base_dim=4, attn_scales=[0.5], **config)
    with pytest.raises(ModelError, match=r"cannot be run in tiles: a QwenImage(21)?AttentionBlock in it may reach"):
        encode_in_tiles(vae, kind.image(64, 64), 32)


def test_a_vae_without_residual_blocks_runs_too() -> None:
    stock = random_vae_21(is_residual=False).double()
    pixels, latents = image(32, 528, 4).double(), noise(32, 528, 64, 16).double()
    with without_float32():
        assert error(encode_in_tiles(stock, pixels, 64), stock.encode(pixels).latent_dist.parameters) < EXACT
        assert error(decode_in_tiles(stock, latents, 64), stock.decode(latents).sample) < EXACT


def test_a_vae_of_patches_is_refused() -> None:
    """A tile of its pixels would not be one of its inputs. A patch of one pixel is none."""
    vae = random_vae_21(patch_size=2, in_channels=16, out_channels=16)
    with pytest.raises(ModelError, match="patches of pixels") as caught:
        encode_in_tiles(vae, image(64, 64, 4), 32)
    assert caught.value.found == 2
    with pytest.raises(ModelError, match="patches of pixels"):
        decode_in_tiles(vae, noise(64, 64, 64, 16), 32)
    assert encode_in_tiles(random_vae_21(patch_size=1), image(64, 64, 4), 32).shape == (1, 128, 1, 4, 4)


def test_a_module_that_nobody_knows_is_refused(kind: Kind, stock: Any) -> None:
    vae = copy.deepcopy(stock)
    vae.decoder.norm_out = nn.InstanceNorm3d(8)
    with pytest.raises(ModelError, match="a InstanceNorm3d in it may reach further than a tile\n  → use a smaller"):
        decode_in_tiles(vae, kind.noise(64, 64), 32)


def test_a_tile_smaller_than_a_value_of_the_latents_is_refused(kind: Kind, ours: Any) -> None:
    with pytest.raises(ValueError, match="smaller than one value"):
        encode_in_tiles(ours, kind.image(32, 32), 4)


# ---- in the pipelines ------------------------------------------------------------------------------------------------


class Small:
    """A VAE on a device that has no memory for a whole image."""

    def __init__(self, vae: Any) -> None:
        self.vae = vae

    def __getattr__(self, name: str) -> Any:
        return getattr(self.vae, name)

    def encode(self, pixels: Tensor) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")

    def decode(self, latents: Tensor, return_dict: bool = True) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory.")


STOCK = {QWEN_IMAGE: QwenImageEditPlusPipeline, QWEN_IMAGE_21: QwenImage21Pipeline}


def in_pipeline(vae: Any, kind: Kind) -> Any:
    """The part of a pipeline that its VAE needs."""
    return SimpleNamespace(vae=vae, latent_channels=kind.z)


@pytest.mark.fast_cases(1)
def test_an_image_that_does_not_fit_goes_through_a_pipeline_in_tiles(kind: Kind, stock: Any) -> None:
    pixels, latents = kind.image(64, 96), kind.noise(64, 96)
    whole = STOCK[kind]._encode_vae_image(in_pipeline(stock, kind), pixels, None)
    fits = VaeThatFits(Small(copy.deepcopy(stock)), 64)
    assert error(STOCK[kind]._encode_vae_image(in_pipeline(fits, kind), pixels, None), whole) < TOLERANCE
    sample = stock.decode(latents).sample
    for decoded in (fits.decode(latents).sample, fits.decode(latents, return_dict=False)[0]):
        assert error(decoded, sample) < TOLERANCE


def test_an_image_that_fits_goes_whole_and_several_that_do_not_are_left_to_the_caller(kind: Kind, ours: Any) -> None:
    pixels = kind.image(96, 160)
    whole = ours.encode(pixels).latent_dist.mode()
    assert torch.equal(VaeThatFits(ours, 64).encode(pixels).latent_dist.mode(), whole)
    several = VaeThatFits(Small(ours), 64)
    with pytest.raises(torch.OutOfMemoryError):
        several.encode(torch.cat([pixels, pixels]))
    with pytest.raises(torch.OutOfMemoryError):
        several.decode(torch.cat([kind.noise(32, 32)] * 2))
