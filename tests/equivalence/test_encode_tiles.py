"""The VAE in tiles: what it makes of a whole image, at the memory of a tile.

The judge is the stock VAE on the whole, in float64, where nothing but another function differs; the gradient says how
far around a tile a value is seen.
"""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from diffusers import QwenImageEditPlusPipeline
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from qwen_cache.encode import tiles
from qwen_cache.encode.single_frame import for_single_frames
from qwen_cache.encode.tiles import HEIGHT, WIDTH, VaeThatFits, decode_in_tiles, encode_in_tiles, reach, spans, windows
from qwen_cache.errors import ModelError
from tests.support.judge import EXACT, TOLERANCE, assert_same, relative, without_float32
from tests.support.vae import image, noise, random_vae

SIZES = [(192, 192), (96, 288), (304, 80), (32, 32), (176, 240)]  # height, width
FAST = [((96, 288), 64), ((304, 80), 64), ((192, 192), 128), ((32, 32), 64)]
SIZES_AND_TILES = [
    pytest.param(size, tile, marks=[] if (size, tile) in FAST else pytest.mark.slow)
    for size in SIZES
    for tile in (64, 128)
]


@pytest.fixture(scope="module")
def stock() -> Any:
    return random_vae(base_dim=8)


@pytest.fixture(scope="module")
def ours(stock: Any) -> Any:
    return for_single_frames(copy.deepcopy(stock))


@pytest.fixture(scope="module")
def exact() -> tuple[Any, Any]:
    """The stock one and ours, in float64: what is left is no rounding."""
    stock = random_vae(base_dim=4).double()
    return stock, for_single_frames(copy.deepcopy(stock))


def encoder_part(vae: Any) -> nn.Module:
    """What is before the mid block."""
    return nn.Sequential(vae.encoder.conv_in, *vae.encoder.down_blocks)


def decoder_part(vae: Any) -> nn.Module:
    """What is after the mid block."""
    last = (vae.decoder.norm_out, vae.decoder.nonlinearity, vae.decoder.conv_out)
    return nn.Sequential(*vae.decoder.up_blocks, *last)


def error(ours: Tensor, stock: Tensor) -> float:
    assert (ours.shape, ours.dtype) == (stock.shape, stock.dtype)
    return relative(ours, stock)


# ---- equal to the whole ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "tile"), SIZES_AND_TILES)
def test_moments_are_those_of_the_whole(size: tuple[int, int], tile: int, exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    pixels = image(*size).double()
    whole = stock.encode(pixels).latent_dist.parameters
    assert error(encode_in_tiles(ours, pixels, tile), whole) < EXACT


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("size", "tile"), SIZES_AND_TILES)
def test_pixels_are_those_of_the_whole(size: tuple[int, int], tile: int, exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    latents = noise(*size).double()
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


def test_bfloat16_is_as_near_to_the_exact_result_as_the_whole(stock: Any) -> None:
    whole = copy.deepcopy(stock).bfloat16()
    ours, exact = for_single_frames(copy.deepcopy(whole)), copy.deepcopy(whole).double()
    pixels, latents = image(96, 224).bfloat16(), noise(96, 224).bfloat16()
    truth = exact.encode(pixels.double()).latent_dist.parameters, exact.decode(latents.double()).sample
    assert_same(encode_in_tiles(ours, pixels, 64), whole.encode(pixels).latent_dist.parameters, truth[0])
    assert_same(decode_in_tiles(ours, latents, 64), whole.decode(latents).sample, truth[1])


def test_an_image_within_one_tile_is_bit_for_bit_the_same(ours: Any) -> None:
    """So that tiles can always be on: then it is the same call."""
    pixels, latents = image(96, 128), noise(96, 128)
    assert torch.equal(encode_in_tiles(ours, pixels, 128), ours.encode(pixels).latent_dist.parameters)
    assert torch.equal(decode_in_tiles(ours, latents, 128), ours.decode(latents).sample)


def test_every_image_of_a_batch_is_tiled(exact: tuple[Any, Any]) -> None:
    stock, ours = exact
    pixels = torch.cat([image(96, 160), image(96, 160).flip(-1)]).double()
    both = encode_in_tiles(ours, pixels, 64)
    for one, moments in zip(pixels.split(1), both.split(1), strict=True):
        assert error(moments, stock.encode(one).latent_dist.parameters) < EXACT


@pytest.mark.parametrize("tile", [8, 24, 64, 192, 1000])
@pytest.mark.parametrize("size", [8, 56, 256, 1000])
def test_tiles_cover_everything_once(size: int, tile: int, stock: Any) -> None:
    for local, outputs in ((encoder_part(stock), size // 8), (decoder_part(stock), 8 * size)):
        covered = [i for span in spans(windows(local, WIDTH), size, tile) for i in range(outputs)[span.made]]
        assert covered == list(range(outputs))


# ---- as far as it is seen, and no further ----------------------------------------------------------------------------


@pytest.mark.parametrize(("part", "size", "place"), [(encoder_part, 176, (11, 12)), (decoder_part, 28, (115, 108))])
def test_the_halo_is_as_wide_as_the_gradient(part: Any, size: int, place: tuple[int, int]) -> None:
    """The inputs that an output depends on are those that it has a gradient of, on both axes."""
    local = part(random_vae(base_dim=4)).double()
    channels = next(m for m in local.modules() if isinstance(m, nn.Conv3d)).in_channels
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


@pytest.mark.parametrize("mutant", [narrower(8, 0), narrower(0, 8), narrower(64, 64)])
def test_a_narrower_halo_would_be_noticed(mutant: Any, exact: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above sees one missing step of the coarsest level, and padding between tiles all the more."""
    stock, ours = exact
    pixels = image(192, 192).double()
    monkeypatch.setattr(tiles, "reach", mutant)
    whole = stock.encode(pixels).latent_dist.parameters
    assert error(encode_in_tiles(ours, pixels, 64), whole) > 1e6 * EXACT


@pytest.mark.parametrize("mutant", [narrower(1, 0), narrower(0, 1)])
def test_a_narrower_halo_of_the_decoder_would_be_noticed(
    mutant: Any, exact: tuple[Any, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One value of the latents less, which weighs little where it is furthest away."""
    stock, ours = exact
    latents = noise(192, 192).double()
    monkeypatch.setattr(tiles, "reach", mutant)
    with without_float32():
        assert error(decode_in_tiles(ours, latents, 64), stock.decode(latents).sample) > 100 * EXACT


def test_the_largest_tensor_is_one_of_a_tile(ours: Any) -> None:
    """It does not grow with the image."""
    largest: list[int] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = function(*args, **(kwargs or {}))
            largest[-1] = max(largest[-1], made.numel() if isinstance(made, Tensor) else 0)
            return made

    for run in (lambda pixels: encode_in_tiles(ours, pixels, 64), ours.encode):
        for width in (256, 512):
            largest.append(0)
            with Watch():
                run(image(32, width))
    of_a_tile, of_a_tile_again, whole, twice_as_wide = largest
    assert of_a_tile == of_a_tile_again < whole < twice_as_wide


# ---- refused ---------------------------------------------------------------------------------------------------------


def test_a_vae_that_sees_everything_early_is_refused() -> None:
    vae = random_vae(base_dim=4, attn_scales=[0.5])
    with pytest.raises(ModelError, match="cannot be run in tiles: a QwenImageAttentionBlock in it may reach further"):
        encode_in_tiles(vae, image(64, 64), 32)


def test_a_module_that_nobody_knows_is_refused(stock: Any) -> None:
    vae = copy.deepcopy(stock)
    vae.decoder.norm_out = nn.InstanceNorm3d(8)
    with pytest.raises(ModelError, match="a InstanceNorm3d in it may reach further than a tile\n  → use a smaller"):
        decode_in_tiles(vae, noise(64, 64), 32)


def test_a_tile_smaller_than_a_value_of_the_latents_is_refused(ours: Any) -> None:
    with pytest.raises(ValueError, match="smaller than one value"):
        encode_in_tiles(ours, image(32, 32), 4)


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


def test_an_image_that_does_not_fit_goes_through_a_pipeline_in_tiles(stock: Any, ours: Any) -> None:
    pixels, latents = image(96, 160), noise(96, 160)
    pipeline = QwenImageEditPlusPipeline(None, stock, None, None, None, None)
    whole = pipeline._encode_vae_image(pixels, generator=None)
    pipeline.vae = VaeThatFits(Small(copy.deepcopy(stock)), 64)
    assert error(pipeline._encode_vae_image(pixels, generator=None), whole) < TOLERANCE
    sample = stock.decode(latents).sample
    for decoded in (pipeline.vae.decode(latents).sample, pipeline.vae.decode(latents, return_dict=False)[0]):
        assert error(decoded, sample) < TOLERANCE


def test_an_image_that_fits_goes_whole_and_several_that_do_not_are_left_to_the_caller(ours: Any) -> None:
    pixels = image(96, 160)
    whole = ours.encode(pixels).latent_dist.mode()
    assert torch.equal(VaeThatFits(ours, 64).encode(pixels).latent_dist.mode(), whole)
    several = VaeThatFits(Small(ours), 64)
    with pytest.raises(torch.OutOfMemoryError):
        several.encode(torch.cat([pixels, pixels]))
    with pytest.raises(torch.OutOfMemoryError):
        several.decode(torch.cat([noise(32, 32)] * 2))
