"""The difference mask finds what was edited, and nothing else: on photographs edited where we know it."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from functools import cache
from itertools import islice

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFilter, ImageOps

from qwen_cache.experimental.masks import difference_mask

from .support.marks import slow
from .support.photographs import photograph

PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "rocket.jpg",
    "motorcycle_left.png",
    "ihc.png",
    "china.jpg",
    "flower.jpg",
)
CELL = 16
Random = np.random.Generator


@cache
def scene(name: str) -> Image.Image:
    """A photograph with sides of whole cells, the longer one 384 pixels."""
    photo = photograph(name)
    scale = 384 / max(photo.size) / CELL
    return photo.resize((round(photo.width * scale) * CELL, round(photo.height * scale) * CELL))


def silhouette(size: tuple[int, int], random: Random) -> Image.Image:
    """A rectangle, an ellipse or a polygon, of random size, at a random place."""
    shape = Image.new("L", size)
    draw = ImageDraw.Draw(shape)
    width, height = (int(side * random.uniform(0.2, 0.5)) for side in size)
    x, y = int(random.integers(0, size[0] - width)), int(random.integers(0, size[1] - height))
    match random.integers(3):
        case 0:
            draw.rectangle((x, y, x + width, y + height), fill=255)
        case 1:
            draw.ellipse((x, y, x + width, y + height), fill=255)
        case _:
            angles, radii = np.sort(random.uniform(0, 2 * np.pi, 8)), random.uniform(0.35, 0.5, 8)
            corners = [
                (x + width * (0.5 + radius * np.cos(angle)), y + height * (0.5 + radius * np.sin(angle)))
                for angle, radius in zip(angles, radii, strict=True)
            ]
            draw.polygon(corners, fill=255)
    return shape


def pasted(image: Image.Image, random: Random) -> Image.Image:
    others = [scene(name) for name in PHOTOGRAPHS if scene(name) is not image]
    return others[int(random.integers(len(others)))].resize(image.size)


def recoloured(image: Image.Image, random: Random) -> Image.Image:
    hue, saturation, value = (np.asarray(band).astype(int) for band in image.convert("HSV").split())
    bands = ((hue + random.integers(60, 196)) % 256, np.minimum(saturation + 90, 255), value)
    return Image.merge("HSV", [Image.fromarray(band.astype(np.uint8)) for band in bands]).convert("RGB")


def removed(image: Image.Image, random: Random) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(30))


def redone(image: Image.Image, random: Random) -> Image.Image:
    """The same image, as another program would give it back: moved by a pixel, other tones, a JPEG."""
    down, right = ((0, 1), (1, 0), (1, 1), (-1, 0), (0, -1), (-1, 1))[random.integers(6)]
    pixels = np.pad(np.asarray(image).astype(float), ((1, 1), (1, 1), (0, 0)), mode="edge")
    moved = np.roll(pixels, (down, right), (0, 1))[1:-1, 1:-1]
    return jpeg(from_pixels(moved * random.uniform(0.85, 1.15, 3) + random.uniform(-12, 12, 3)))


def from_pixels(pixels: np.ndarray) -> Image.Image:
    return Image.fromarray(np.clip(np.rint(pixels), 0, 255).astype(np.uint8))


def jpeg(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=85)
    return Image.open(file).convert("RGB")


def iou(found: np.ndarray, shape: Image.Image) -> float:
    height, width = shape.height // CELL, shape.width // CELL
    truth = np.asarray(shape).reshape(height, CELL, width, CELL).mean((1, 3)) > 127.5
    return float((truth & (found > 0.5)).sum() / (truth | (found > 0.5)).sum())


def edits(edit: Callable[[Image.Image, Random], Image.Image]) -> Iterator[tuple[Image.Image, Image.Image, Image.Image]]:
    """Control, target and where it was edited, without those of which nobody could see where."""
    for seed in range(1000):
        random = np.random.default_rng(seed)
        control = scene(PHOTOGRAPHS[seed % len(PHOTOGRAPHS)])
        shape = silhouette(control.size, random)
        target = Image.composite(edit(control, random), control, shape)
        seen = np.abs(np.asarray(target).astype(int) - np.asarray(control)).max(-1) > 12
        if seen[np.asarray(shape) > 127].mean() > 0.75:
            yield control, redone(target, random), shape


@pytest.mark.parametrize(("edit", "count"), [(pasted, 4), *(slow(edit, 9) for edit in (pasted, recoloured, removed))])
def test_finds_an_edit_under_shift_tone_and_compression(
    edit: Callable[[Image.Image, Random], Image.Image], count: int
) -> None:
    found = []
    for control, target, shape in islice(edits(edit), count):
        difference = difference_mask(target, control, CELL)
        assert difference.mask is not None, difference.reason
        assert difference.mask.dtype == np.float32
        assert difference.mask.shape == (control.height // CELL, control.width // CELL)
        assert 0 <= difference.mask.min() <= difference.mask.max() <= 1
        found.append(iou(difference.mask, shape))
    assert np.mean(found) >= 0.7
    assert min(found) >= 0.5


@pytest.mark.parametrize("name", ["chelsea.png", slow("coffee.png"), slow("rocket.jpg")])
def test_finds_what_is_recoloured_although_nothing_else_has_its_colour(name: str) -> None:
    """A curve of tones could do it to the whole image, and nobody would see the difference."""
    photo = ImageOps.grayscale(scene(name))
    random = np.random.default_rng(0)
    shape, light = silhouette(photo.size, random), np.asarray(photo)[..., None] / 255
    red, blue = (
        from_pixels(light * np.array(lit) + np.array(own))
        for lit, own in (
            ((120, 24, 12), (90, 20, 10)),
            ((12, 36, 120), (10, 30, 90)),
        )
    )
    control, target = (Image.composite(thing, photo.convert("RGB"), shape) for thing in (red, blue))
    difference = difference_mask(redone(target, random), control)
    assert difference.mask is not None
    assert iou(difference.mask, shape) >= 0.7


@pytest.mark.parametrize("name", [PHOTOGRAPHS[0], *map(slow, PHOTOGRAPHS[1:])])
def test_no_mask_without_an_edit(name: str) -> None:
    random, control = np.random.default_rng(0), scene(name)
    same = difference_mask(control, control)
    assert (same.mask, same.reason) == (None, "identical")
    assert difference_mask(jpeg(control), control).reason == "identical"
    for deviation in (10, 25):
        noisy = from_pixels(np.asarray(control) + random.normal(0, deviation, (control.height, control.width, 3)))
        assert difference_mask(noisy, control).reason == "identical"
    again = difference_mask(redone(control, random), control)
    assert again.mask is None


SEPIA = np.array([[0.393, 0.769, 0.189], [0.349, 0.686, 0.168], [0.272, 0.534, 0.131]])
TONES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "sepia": lambda image: from_pixels(np.asarray(image) @ SEPIA.T),
    "grey": lambda image: ImageOps.grayscale(image).convert("RGB"),
    "inverted": ImageOps.invert,
    "half inverted": lambda image: from_pixels(0.6 * 255 - 0.2 * np.asarray(image).astype(float)),
    "darker midtones": lambda image: from_pixels(255 * (np.asarray(image) / 255) ** 1.8),
}


@pytest.mark.slow
@pytest.mark.parametrize("tone", TONES)
def test_a_change_of_tone_is_global(tone: str) -> None:
    for name in PHOTOGRAPHS:
        toned = TONES[tone](scene(name))
        for target in (toned, redone(toned, np.random.default_rng(3))):
            difference = difference_mask(target, scene(name))
            assert (difference.mask, difference.reason) == (None, "global"), name


def test_a_change_of_tone_of_a_nearly_black_image_is_global() -> None:
    """Only its stars are left by a careful fit; gain and offset explain them too, so that they are no edit."""
    control = scene("hubble_deep_field.jpg")
    target = redone(TONES["half inverted"](control), np.random.default_rng(0))
    assert difference_mask(target, control).reason == "global"


def test_another_image_is_global() -> None:
    for one, other in (("astronaut.png", "chelsea.png"), ("coffee.png", "china.jpg"), ("ihc.png", "flower.jpg")):
        assert difference_mask(scene(one), scene(other)).reason == "global"


def test_a_control_of_another_size_is_scaled_to_the_target() -> None:
    """The mask is in the target's frame: wherever the control's pixels were."""
    control, target, shape = next(edits(pasted))
    larger = control.resize((control.width * 3 // 2, control.height * 3 // 2))
    difference = difference_mask(target, larger)
    assert difference.mask is not None
    assert iou(difference.mask, shape) >= 0.7


def test_a_cell_says_how_much_of_it_is_edited() -> None:
    """An edit that ends in the middle of a cell fills half of it."""
    control = scene("chelsea.png")
    target = control.copy()
    target.paste((20, 200, 40), (2 * CELL, 2 * CELL, 6 * CELL + CELL // 2, 8 * CELL))
    mask = difference_mask(target, control, CELL).mask
    assert mask is not None
    assert mask[3:7, 3:5].min() == 1
    assert 0.3 < mask[3:7, 6].mean() < 0.8
    assert mask[:, 8:].max() == 0


def test_refuses_a_target_that_cells_do_not_fill() -> None:
    with pytest.raises(ValueError, match="multiples of 16, found 40×32"):
        difference_mask(Image.new("RGB", (40, 32)), Image.new("RGB", (40, 32)))
