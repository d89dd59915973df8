"""How large images become, over all sizes and policies: the pipelines' rule by default, aligned pairs, nothing
enlarged or bent beyond what was allowed, and settings that contradict each other refused."""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus
from hypothesis import assume, example, given
from hypothesis import strategies as st

from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.settings.load import load_config
from qwen_cache.sources.sizes import Resolution, Size, SourceImage, crop_box, sizes_of

sides = st.integers(33, 6000)
sizes = st.tuples(sides, sides).filter(lambda size: max(size) <= 10 * min(size))
areas = st.integers(256 * 256, 2048 * 2048)
resolutions = st.tuples(st.integers(2, 64), st.integers(2, 64)).map(lambda size: (32 * size[0], 32 * size[1]))


def images(*originals: Size) -> list[SourceImage]:
    return [SourceImage(f"image {i}", size) for i, size in enumerate(originals)]


def policy(**settings: Any) -> Resolution:
    return Resolution.of(load_config(None, data=settings).data)


def sizes_or_error(originals: list[Size], resolution: Resolution) -> tuple[list[tuple[Size, ...]], str]:
    """The sizes of the images, or the error for one that cannot get such a size."""
    try:
        return sizes_of(images(*originals), resolution), ""
    except SourceError as error:
        return [], str(error)


def ratio(size: Size) -> Fraction:
    return Fraction(*size)


def bend(one: Size, two: Size) -> float:
    """How much wider or narrower one is than the other, never below 1."""
    quotient = ratio(one) / ratio(two)
    return float(max(quotient, 1 / quotient))


# ---- the pipelines' own ----------------------------------------------------------------------------------------------


@given(st.lists(sizes, min_size=1, max_size=4), areas)
def test_by_default_each_image_has_the_size_that_the_pipelines_give_it(originals: list[Size], area: int) -> None:
    """A first control of the target's shape excepted: it has the target's size."""
    stock = [pipeline_qwenimage_edit_plus.calculate_dimensions(area, w / h) for w, h in originals]
    [found] = sizes_of(images(*originals), policy(vae_image_size=area))
    for i, (ours, expected) in enumerate(zip(found, stock, strict=True)):
        if i == 1 and bend(originals[0], originals[1]) < 1.03:
            assert ours == found[0]
        elif i != 1 or bend(originals[0], originals[1]) > 1.031:
            assert ours == tuple(expected)


def test_the_model_s_own_size_is_that_of_the_pipelines() -> None:
    [found] = sizes_of(images((640, 427)), policy())
    area = pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE
    assert found == (pipeline_qwenimage_edit_plus.calculate_dimensions(area, 640 / 427),)


# ---- pairs -----------------------------------------------------------------------------------------------------------

policies = st.builds(
    dict,
    vae_image_size=st.lists(areas, min_size=1, max_size=3),
    resolutions_per_sample=st.sampled_from(["nearest", "all"]),
    upscale=st.booleans(),
) | st.builds(
    dict,
    resolution=st.lists(resolutions, min_size=1, max_size=3),
    resize_mode=st.sampled_from(["crop", "stretch"]),
    resolutions_per_sample=st.sampled_from(["nearest", "all"]),
    upscale=st.booleans(),
)


@given(sizes, st.integers(1, 8), policies)
@example((4000, 3000), 3, {"vae_image_size": 1024 * 1024, "upscale": False})
def test_a_first_control_of_its_target_s_shape_has_its_target_s_size(
    target: Size, smaller: int, settings: dict[str, Any]
) -> None:
    """Trap 22: under every policy, whichever of the two is the smaller original."""
    control = (max(1, target[0] // smaller), max(1, target[1] // smaller))
    assume(bend(control, target) < 1.03 and min(control) >= 32)
    for originals in ([target, control], [control, target]):
        found, error = sizes_or_error(originals, policy(**settings))
        assert found or ("too small" in error and not settings["upscale"])
        assert all(one == two for one, two in found)


@pytest.mark.parametrize(
    ("target", "control"),
    [
        ((1184, 880), (4000, 3000)),  # a target that a pipeline generated from the control, rounded to 16
        ((1376, 768), (1920, 1080)),
        ((1000, 667), (999, 667)),
    ],
)
def test_a_target_that_was_rounded_once_already_is_still_aligned(target: Size, control: Size) -> None:
    for area in (256 * 256, 512 * 512, 1024 * 1024, 1328 * 1328):
        [found] = sizes_of(images(target, control), policy(vae_image_size=area))
        assert found[0] == found[1]


def test_a_control_of_another_shape_and_later_controls_keep_their_own() -> None:
    [found] = sizes_of(images((1024, 1024), (1920, 1080), (1000, 1001)), policy(vae_image_size=512 * 512))
    assert found == ((512, 512), (672, 384), (512, 512))
    [found] = sizes_of(images((1024, 1024), (1000, 1001), (1920, 1080)), policy(resolution=[512, 512]))
    assert found == ((512, 512), (512, 512), (672, 384))


# ---- never enlarged --------------------------------------------------------------------------------------------------


@given(st.lists(sizes, min_size=1, max_size=4), policies.map(lambda settings: {**settings, "upscale": False}))
def test_without_upscale_no_side_of_any_image_is_enlarged(originals: list[Size], settings: dict[str, Any]) -> None:
    found, error = sizes_or_error(originals, policy(**settings))
    # under a budget everything of 32 pixels has a size
    assert found or ("too small" in error and "resolution" in settings)
    for sample in found:
        for original, size in zip(originals, sample, strict=True):
            assert size[0] <= original[0]
            assert size[1] <= original[1]


@given(sizes)
def test_an_image_below_the_budget_keeps_its_own_size_rounded_down(original: Size) -> None:
    assume(original[0] * original[1] < 1900 * 1900)
    [found] = sizes_of(images(original), policy(vae_image_size=2048 * 2048, upscale=False))
    assert found == ((original[0] - original[0] % 32, original[1] - original[1] % 32),)


# ---- multiples of 32, and the shape ----------------------------------------------------------------------------------


@given(st.lists(sizes, min_size=1, max_size=4), policies)
def test_every_side_is_a_positive_multiple_of_32(originals: list[Size], settings: dict[str, Any]) -> None:
    found, _ = sizes_or_error(originals, policy(**settings))
    assert all(side > 0 and side % 32 == 0 for sample in found for size in sample for side in size)
    assert len(found) == len(set(found))


@given(sizes, areas, st.booleans())
def test_a_budget_moves_no_side_by_more_than_a_step(original: Size, area: int, upscale: bool) -> None:
    """From where the exact aspect ratio puts it."""
    [[found]] = sizes_of(images(original), policy(vae_image_size=area, upscale=upscale))
    scale = (area / (original[0] * original[1])) ** 0.5
    if not upscale:
        scale = min(scale, 1)
    for side, exact in zip(found, (original[0] * scale, original[1] * scale), strict=True):
        assert abs(side - exact) < (16.001 if upscale else 32)


@given(sizes, st.lists(resolutions, min_size=1, max_size=6))
def test_a_fixed_resolution_is_the_one_of_the_nearest_shape_or_the_image_is_refused(
    original: Size, several: list[Size]
) -> None:
    nearest = min(bend(size, original) for size in several)
    found, error = sizes_or_error([original], policy(resolution=several))
    if error:
        assert "image 0: data.resolution has no entry of the image's shape" in error
        assert nearest > 1.0299
    else:
        [[size]] = found
        assert size in several
        assert bend(size, original) == pytest.approx(nearest)
        assert nearest < 1.0301


@given(sizes, resolutions)
def test_what_is_cut_out_is_the_middle_with_the_exact_shape(original: Size, size: Size) -> None:
    left, top, right, bottom = crop_box(original, size)
    assert left >= 0
    assert top >= 0
    assert left == 0 or top == 0  # as much as there is
    assert (left + right, top + bottom) == pytest.approx(original)
    assert (right - left) / (bottom - top) == pytest.approx(size[0] / size[1])


# ---- several ---------------------------------------------------------------------------------------------------------


@given(sizes, st.lists(areas, min_size=1, max_size=4))
def test_the_nearest_budget_is_the_largest_that_the_target_fills(original: Size, several: list[int]) -> None:
    filled = [area for area in several if area <= original[0] * original[1]]
    [found] = sizes_of(images(original), policy(vae_image_size=several))
    assert [found] == sizes_of(images(original), policy(vae_image_size=max(filled) if filled else min(several)))


@given(st.lists(sizes, min_size=1, max_size=3), st.lists(areas, min_size=1, max_size=4), st.booleans())
def test_all_is_what_each_budget_gives_alone(originals: list[Size], several: list[int], upscale: bool) -> None:
    each = [policy(vae_image_size=area, upscale=upscale) for area in several]
    alone = {size for one in each for size in sizes_of(images(*originals), one)}
    together = policy(vae_image_size=several, resolutions_per_sample="all", upscale=upscale)
    assert set(sizes_of(images(*originals), together)) == alone


@pytest.mark.parametrize(
    ("original", "upscale", "nearest", "every"),
    [
        ((3000, 2000), True, (768, 512), [(384, 256), (768, 512)]),
        ((500, 333), True, (384, 256), [(384, 256), (768, 512)]),
        ((500, 333), False, (384, 256), [(384, 256)]),
        ((300, 200), True, (384, 256), [(384, 256), (768, 512)]),
        ((200, 300), True, (512, 768), [(512, 768)]),
    ],
)
def test_of_fixed_resolutions_of_one_shape_the_largest_that_is_filled_or_each(
    original: Size, upscale: bool, nearest: Size, every: list[Size]
) -> None:
    settings = {"resolution": [[768, 512], [384, 256], [512, 768]], "upscale": upscale}
    assert sizes_of(images(original), policy(**settings)) == [(nearest,)]
    assert sizes_of(images(original), policy(**settings, resolutions_per_sample="all")) == [(size,) for size in every]


# ---- the recipe ------------------------------------------------------------------------------------------------------


def test_the_recipe_says_only_what_differs_from_one_budget() -> None:
    assert policy().recipe() == {"vae_image_size": 1024 * 1024}
    assert policy(vae_image_size=[4096]).recipe() == policy(vae_image_size=4096).recipe() == {"vae_image_size": 4096}
    assert policy(upscale=True, resolutions_per_sample="all").recipe() == policy().recipe()
    assert policy(upscale=False).recipe() == {"vae_image_size": 1024 * 1024, "upscale": False}
    assert policy(vae_image_size=[9, 4, 9]).recipe() == policy(vae_image_size=[4, 9]).recipe()
    assert policy(resolution=[64, 32]).recipe() == {"resolution": [[64, 32]]}
    assert policy(resolution=[64, 32], resize_mode="crop").recipe() == {"resolution": [[64, 32]], "resize_mode": "crop"}
    # which images are refused changes no tensor
    assert policy(resolution=[64, 32], resize_mode="stretch").recipe() == policy(resolution=[64, 32]).recipe()


@given(policies, policies)
def test_policies_of_one_recipe_give_every_image_the_same_sizes(one: dict[str, Any], two: dict[str, Any]) -> None:
    ours, theirs = policy(**one), policy(**two)
    same = all(
        sizes_or_error([original], ours)[0] == sizes_or_error([original], theirs)[0]
        for original in [(100, 100), (3000, 2000), (700, 1500)]
    )
    assert same or ours.recipe() != theirs.recipe()


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"resolution": [512, 500]}, "multiples of 32 pixels, as the pipelines make them (found 512×500)\n  → did you"),
        ({"resolution": [[512, 512], [8, 64]]}, "(found 8×64)\n  → did you mean [32, 64]?"),
        (
            {"resolution": [512, 512], "vae_image_size": 262144},
            "data.resolution and data.vae_image_size contradict each other\n  → leave one of them out",
        ),
        ({"resize_mode": "stretch"}, "data.resize_mode=stretch is for data.resolution; a pixel budget keeps"),
        ({"resize_mode": "pad"}, "data.resize_mode: not a valid value (expected crop or stretch, found pad)"),
        ({"vae_image_size": 0}, "data.vae_image_size.0: not a valid value (expected greater than 0, found 0)"),
        ({"vae_image_size": []}, "data.vae_image_size: List should have at least 1 item"),
        ({"resolution": 512}, "data.resolution: not a valid value (expected a list, found 512)"),
        ({"resolutions_per_sample": "both"}, "data.resolutions_per_sample: not a valid value (expected nearest or all"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        policy(**settings)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "originals", "said"),
    [
        (
            {"resolution": [[512, 512], [768, 512]]},
            [(1920, 1080)],
            "image 0: data.resolution has no entry of the image's shape (expected an aspect ratio within 3% of "
            "768×512, the nearest, found 1920×1080)\n  → set data.resize_mode=crop or stretch, add",
        ),
        (
            {"resolution": [512, 512], "upscale": False},
            [(1000, 1000), (500, 500)],
            "image 0: target or first control is too small for data.resolution, and data.upscale is off "
            "(expected at least 512×512, found 500×500)\n  → set data.upscale=true",
        ),
        (
            {"upscale": False},
            [(400, 400), (900, 31)],
            "image 1: the image is too small, and data.upscale is off (expected sides of at least 32 pixels, "
            "found 900×31)\n  → set data.upscale=true, or leave the image out",
        ),
        ({}, [(400, 400), (4000, 10)], "image 1: the image is too elongated (expected sides of at most 200:1"),
    ],
)
def test_images_that_cannot_be_brought_there_are_named(
    settings: dict[str, Any], originals: list[Size], said: str
) -> None:
    with pytest.raises(SourceError) as caught:
        sizes_of(images(*originals), policy(**settings))
    assert said in str(caught.value)
