"""Latents in a cache: the pipelines' sizes and pixels, the posterior's mode, normalised once, packed as they unpack.

The judge is the stock VAE, the stock pipelines' own parts, and the image itself: latents are right when the stock
decoder gives the image back.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKLQwenImage, QwenImageEditPlusPipeline
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from PIL import Image
from torch import Tensor

from qwen_cache.encode.vae import VaeEncoder, for_single_frames
from qwen_cache.errors import SourceError
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.sources.sizes import calculate_dimensions
from tests.support.judge import (
    SEVERAL,
    TOLERANCE,
    VAE_AREA,
    Case,
    Size,
    TinyModel,
    assert_same,
    build_cache,
    by_name,
    case,
    exact_pipeline,
    image,
    plain_latents,
    plain_tokens,
    relative,
    small_options,
    stock_pipeline,
    transformer_inputs,
    without_float32,
)
from tests.support.photographs import photograph

VaeEncoders = Callable[[torch.dtype], VaeEncoder]
LYING = (320, 192)
SIZES: list[Size] = [(32, 32), (128, 128), (160, 96), (96, 160), (32, 416), (416, 32), (224, 192)]


@pytest.fixture(scope="module")
def vae_encoder(tiny_model: TinyModel) -> VaeEncoders:
    @cache
    def load(dtype: torch.dtype) -> VaeEncoder:
        model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
        return VaeEncoder(model, torch.device("cpu"), dtype)

    return load


@pytest.fixture
def pipeline(tiny_model: TinyModel) -> QwenImageEditPlusPipeline:
    return stock_pipeline(tiny_model("edit-plus"), "edit-plus")


def encoded(vae: VaeEncoder, original: Image.Image, size: Size) -> Tensor:
    return vae.encode([vae.pixels(original, size)])[0]


def test_beside_another_lane_nothing_runs_in_tiles(vae_encoder: VaeEncoders, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other lane's memory may be why an image does not fit; without it the image may fit whole."""
    vae = vae_encoder(torch.float32)
    pixels = vae.pixels(photograph("coffee.png"), (128, 128))
    assert torch.equal(vae.encode_beside([pixels])[0], vae.encode([pixels])[0])

    def full(self: Any, *_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(type(vae.vae.vae), "encode", full)
    assert len(vae.encode([pixels])[0]) == 64, "in tiles"
    with pytest.raises(torch.OutOfMemoryError):
        vae.encode_beside([pixels])


# ---- sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("area", [VAE_AREA, 384 * 384])
def test_sizes_are_those_of_the_pipelines(area: int) -> None:
    """Any two sides up to 20000 pixels, thin strips included; what becomes thinner than 1:200 is refused."""
    draw = random.Random(0)
    refused = 0
    for _ in range(5000):
        size = (round(20000 ** draw.random()), round(20000 ** draw.random()))
        stock = pipeline_qwenimage_edit_plus.calculate_dimensions(area, size[0] / size[1])
        assert stock == pipeline_qwenimage_edit.calculate_dimensions(area, size[0] / size[1])[:2]
        if max(stock) > 200 * min(stock):
            refused += 1
            with pytest.raises(SourceError, match=f"found {size[0]}×{size[1]}, which becomes {stock[0]}×{stock[1]}"):
                calculate_dimensions(area, size)
        else:
            assert calculate_dimensions(area, size) == stock
    assert 0 < refused < 2500


# ---- latents ---------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", SIZES)
def test_latents_are_those_of_the_pipeline(
    size: Size, dtype: torch.dtype, vae_encoder: VaeEncoders, tiny_model: TinyModel
) -> None:
    """From an original of another size, by the pipeline's parts and by plain arithmetic."""
    original = image("china.jpg", (333, 517))
    stock = stock_pipeline(tiny_model("edit-plus"), "edit-plus", dtype)
    pixels = stock.image_processor.preprocess(original, size[1], size[0]).unsqueeze(2)
    with torch.no_grad():
        latents = stock._encode_vae_image(pixels.to(dtype), generator=None)
    assert latents.shape == (1, 16, 1, size[1] // 8, size[0] // 8)
    ours, exact = encoded(vae_encoder(dtype), original, size), None
    if dtype == torch.bfloat16:
        exact = plain_tokens(plain_latents(exact_pipeline(tiny_model("edit-plus"), "edit-plus").vae, original, size))
    assert_same(ours, stock._pack_latents(latents, 1, 16, size[1] // 8, size[0] // 8)[0], exact)
    assert_same(ours, plain_tokens(plain_latents(stock.vae, original, size)), exact)


@pytest.mark.parametrize("size", SIZES)
def test_the_pipeline_unpacks_what_is_packed(
    size: Size, vae_encoder: VaeEncoders, pipeline: QwenImageEditPlusPipeline
) -> None:
    """Trap 14: five dimensions, the frame among them, with every number in its place."""
    width, height = size
    original = image("coffee.png", (200, 150))
    packed = encoded(vae_encoder(torch.float32), original, size)
    unpacked = pipeline._unpack_latents(packed[None], height, width, pipeline.vae_scale_factor)
    assert unpacked.shape == (1, 16, 1, height // 8, width // 8)
    expected = plain_latents(pipeline.vae, original, size)
    assert float((unpacked[:, :, 0] - expected).abs().max() / expected.abs().max()) < TOLERANCE


def test_latents_are_the_mode_of_the_posterior_and_no_draw(
    vae_encoder: VaeEncoders, pipeline: QwenImageEditPlusPipeline
) -> None:
    """Trap 13: a draw would be frozen into the cache."""
    original = image("china.jpg", (128, 128))
    vae, (mean, std) = pipeline.vae, mean_and_std(pipeline)
    for seed in (0, 1):
        torch.manual_seed(seed)
        ours = encoded(vae_encoder(torch.float32), original, original.size)
        assert_same(ours, plain_tokens(plain_latents(vae, original, original.size)))
        with torch.no_grad():
            draw = vae.encode(pipeline.image_processor.preprocess(original).unsqueeze(2)).latent_dist.sample()
        assert relative(plain_tokens(((draw - mean) / std)[:, :, 0]), ours) > 0.01


# ---- two dimensions --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def wide_vae() -> AutoencoderKLQwenImage:
    """The structure of the trained one with a twelfth of its channels, and random weights."""
    torch.manual_seed(0)
    return AutoencoderKLQwenImage(base_dim=8).eval().requires_grad_(False)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("size", [(32, 48), (96, 32)])
def test_two_dimensions_give_what_three_give_with_nothing_before_the_image(
    size: Size, wide_vae: AutoencoderKLQwenImage
) -> None:
    """In float64 it is one function; in bfloat16 both round it as much."""
    pixels, latents = torch.randn(2, 3, 1, *size), torch.randn(2, 16, 1, size[0] // 8, size[1] // 8)
    for dtype in (torch.float64, torch.bfloat16):
        stock = copy.deepcopy(wide_vae).to(dtype)
        ours, exact = for_single_frames(copy.deepcopy(stock)), copy.deepcopy(stock).double()
        given = pixels.to(dtype), latents.to(dtype)
        with without_float32():
            for half in (encode_mode, decode_sample):
                x = given[half is decode_sample]
                assert_same(half(ours, x), half(stock, x), half(exact, x.double()))


def encode_mode(vae: Any, pixels: Tensor) -> Tensor:
    return vae.encode(pixels).latent_dist.mode()


def decode_sample(vae: Any, latents: Tensor) -> Tensor:
    return vae.decode(latents).sample


def test_no_convolution_of_a_build_has_three_dimensions(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, ...]] = []
    convolve = torch.nn.Conv3d._conv_forward

    def count(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(self.kernel_size)
        return convolve(self, x, weight, bias)

    monkeypatch.setattr(torch.nn.Conv3d, "_conv_forward", count)
    it = case(SEVERAL["two"], "make it blue")
    build_cache(tmp_path, {"it": it}, tiny_model("edit-plus"), *small_options("edit-plus"))
    assert seen == []


def test_more_frames_than_one_are_refused(wide_vae: AutoencoderKLQwenImage) -> None:
    with pytest.raises(ValueError, match="made for single images, found 4 frames"):
        for_single_frames(copy.deepcopy(wide_vae)).encode(torch.randn(1, 3, 5, 32, 32))


# ---- the image comes back ------------------------------------------------------------------------------------------


def mean_and_std(pipeline: Any) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of the latents, `[16, 1, 1, 1]` each."""
    config = pipeline.vae.config
    return tuple(torch.tensor(values)[:, None, None, None] for values in (config.latents_mean, config.latents_std))


def decode(pipeline: Any, latents: Tensor) -> Tensor:
    """`[H, W, 3]` in -1..1 of normalised `[1, 16, 1, H/8, W/8]`, as the pipelines end."""
    mean, std = mean_and_std(pipeline)
    with torch.no_grad():
        return pipeline.vae.decode(latents * std + mean, return_dict=False)[0][0, :, 0].permute(1, 2, 0)


def psnr(decoded: Tensor, original: Image.Image) -> float:
    """Peak signal-to-noise ratio in dB against `original`, resized to the same pixels."""
    height, width, _ = decoded.shape
    pixels = np.asarray(original.resize((width, height), Image.Resampling.LANCZOS), dtype=np.float32)
    error = (decoded - (torch.from_numpy(pixels) / 127.5 - 1)).square().mean() / 4
    return float(-10 * error.log10())


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("china.jpg", (192, 320)),
        ("chelsea.png", (320, 192)),
        *(
            pytest.param(n, s, marks=pytest.mark.slow)
            for n in ("flower.jpg", "coffee.png")
            for s in (LYING, LYING[::-1])
        ),
    ],
)
def test_decoding_gives_the_image_back(name: str, size: Size, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Traps 11, 13 and 14: upright, unmirrored, normalised once; the tiny VAE keeps averages of 8×8 pixels."""
    control = photograph(name).resize(size)
    cases = {"it": Case(image("astronaut.png", (128, 128)), (control,), "make it blue")}
    folder = tiny_model("edit")
    sample = build_cache(tmp_path, cases, folder, "--dtype", "float32", *small_options("edit"))[0]
    pipeline = stock_pipeline(folder, "edit")
    _, h, w = sample.img_shapes[1]
    assert (h > w) == (size[1] > size[0])
    latents = pipeline._unpack_latents(sample["control_latents"][None], 16 * h, 16 * w, pipeline.vae_scale_factor)
    mean, std = mean_and_std(pipeline)
    decoded = decode(pipeline, latents)
    right = psnr(decoded, control)
    assert right > 16
    wrong = {
        "not normalised": decode(pipeline, latents * std + mean),
        "normalised twice": decode(pipeline, (latents - mean) / std),
        "mirrored": decoded.flip(1),
        "upside down": decoded.flip(0),
        "channels in another order": decode(pipeline, latents.roll(1, dims=1)),
    }
    for what, pixels in wrong.items():
        assert psnr(pixels, control) < right - 3, what


def test_width_and_height_of_a_control_are_not_swapped(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 11: a lying target, a standing and a lying control with equally many tokens."""
    cases = {"it": case([(300, 200), (200, 300), (300, 200)], "make it blue")}
    options = ["--dtype", "float32", *small_options("edit-plus")]
    sample = build_cache(tmp_path, cases, tiny_model("edit-plus"), *options)[0]
    assert sample.img_shapes == ((1, 6, 10), (1, 10, 6), (1, 6, 10))
    vae = stock_pipeline(tiny_model("edit-plus"), "edit-plus").vae
    standing, lying = (
        plain_tokens(plain_latents(vae, control, size))
        for control, size in zip(cases["it"].controls, [(96, 160), (160, 96)], strict=True)
    )
    assert_same(sample["control_latents"], torch.cat([standing, lying]))


@pytest.mark.parametrize("size", [(333, 517), (90, 400)])
def test_a_target_equal_to_its_control_has_equal_latents(size: Size, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 22: one rule for the size of both, so that nothing is shifted. It is the same image in the same call."""
    original = image("china.jpg", size)
    cases = {"it": Case(original, (original,), "change nothing")}
    sample = build_cache(tmp_path, cases, tiny_model("edit"), *small_options("edit"))[0]
    assert sample.img_shapes[0] == sample.img_shapes[1]
    assert torch.equal(sample["image_latents"], sample["control_latents"])


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("variant", ["edit", "edit-plus"])
def test_the_vae_sees_the_pixels_that_the_pipeline_shows_it(
    variant: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Trap 10: resized once, from the original, with antialiasing; a target like a control."""
    seen: list[Tensor] = []
    encode = AutoencoderKLQwenImage.encode

    def record(self: Any, pixels: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(pixels.clone())
        return encode(self, pixels, *arguments, **options)

    originals = [image("china.jpg", (1201, 803)), image("flower.jpg", (333, 517))]
    it = Case(originals[0], (originals[1],), "make it blue")
    pipeline = stock_pipeline(tiny_model(variant), variant)
    with patch.object(AutoencoderKLQwenImage, "encode", record):
        build_cache(tmp_path, {"it": it}, tiny_model(variant), "--dtype", "float32", *small_options(variant))
        for original in originals:
            transformer_inputs(pipeline, [original], it.prompt)
    ours, stock = seen[:2], seen[2:]
    assert len(stock) == 2
    for original, mine, theirs in zip(originals, ours, stock, strict=True):
        assert torch.equal(mine, theirs)
        twice = pipeline.image_processor.preprocess(original.resize((400, 400)), *theirs.shape[3:])
        assert not torch.equal(twice[:, :, None], mine)


# ---- what is the same, and what is not -------------------------------------------------------------------------------


def test_nearly_equal_images_have_their_own_keys(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 20: before and after an edit differ in little, and what the samples are called says nothing."""
    before = image("china.jpg", (150, 100))
    after = before.copy()
    after.putpixel((70, 50), (255, 0, 0))
    cases = {
        "there": Case(after, (before,), "a red dot"),
        "back": Case(before, (after,), "a red dot"),
        "same": Case(before, (before,), "a red dot"),
        "again": Case(after, (before,), "a red dot"),
    }
    options = ["--dtype", "float32", *small_options("edit")]
    samples = by_name(build_cache(tmp_path, cases, tiny_model("edit"), *options))
    assert samples.keys() == {"there", "back", "same"}  # `again` is `there` under another name
    assert len({sample.key for sample in samples.values()}) == 3
    assert torch.equal(samples["there"]["image_latents"], samples["back"]["control_latents"])
    assert not torch.equal(samples["there"]["image_latents"], samples["there"]["control_latents"])
    assert not torch.equal(samples["there"]["prompt_embeds"], samples["back"]["prompt_embeds"])


@pytest.mark.slow
def test_two_builds_on_one_machine_are_equal_to_the_byte(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 13: nothing is sampled, no date or path gets into the files, and the same kernels run."""
    cases = {name: case(sizes, f"make it {name}") for name, sizes in SEVERAL.items()}
    for folder in ("one", "two"):
        build_cache(tmp_path / folder, cases, tiny_model("edit-plus"), *small_options("edit-plus"))
    dataset = (".json", ".parquet", ".tar")
    one, two = (
        {path.name: path.read_bytes() for path in (tmp_path / folder / "shards").iterdir() if path.suffix in dataset}
        for folder in ("one", "two")
    )
    assert sum(name.endswith(".tar") for name in one) == 1
    assert one == two
