"""The size of each image, from the sizes of the originals and the user's policy; integers only.

By default the pipelines' own rule: each image keeps its aspect ratio up to the rounding of its sides to 32 pixels.
A first control or a rejected image of its target's shape gets exactly its target's size, so that the pair stays aligned
under every policy.
Nothing is cropped unless `data.resize_mode` says so; nothing is enlarged if `data.upscale` is off. Refuses images that
a fixed resolution would distort, and images that are too small without enlarging.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.sample import PIXELS_PER_TOKEN, ImgShapes
from qwen_cache.models.family import VAE_IMAGE_SIZE
from qwen_cache.settings.sections import DataConfig

Size = tuple[int, int]
"""Width and height in pixels, PIL's order."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom, as PIL takes it."""

ROUNDING = 32  # the pipelines' own: twice the 16 pixels of a token, so that they accept all of these sizes
MAX_ASPECT_RATIO = 200  # beyond it, Qwen2.5-VL's image processor raises
MASK_SHAPE = 0.01  # a mask may have another size than its target, but not another shape
REJECTED_TARGET = ("the rejected image is the target", "name another image, or leave one of them out")
"""The problem of a row whose two images have the same bytes, and advice."""
SAME_SHAPE = 0.03  # rounding to 32 pixels changes an aspect ratio by this much at about a megapixel


@dataclass(frozen=True)
class Resolution:
    """The user's policy: pixel budgets, or fixed resolutions (then there are no budgets)."""

    areas: tuple[int, ...] = (VAE_IMAGE_SIZE,)
    fixed: tuple[Size, ...] = ()
    all: bool = False
    """One sample for each of them, instead of only for the largest that an image fills."""
    resize_mode: str | None = None
    upscale: bool = True

    @staticmethod
    def of(data: DataConfig) -> Resolution:
        """The policy of `data`; ConfigError if its settings contradict each other."""
        _check_settings(data)
        fixed = tuple(sorted(set(data.resolution or ())))
        areas = () if fixed else tuple(sorted(set(data.vae_image_size or [VAE_IMAGE_SIZE])))
        every = data.resolutions_per_sample == "all" and len(areas or fixed) > 1
        return Resolution(areas, fixed, every, data.resize_mode, data.upscale)

    def recipe(self) -> dict[str, Any]:
        """The recipe's entries: only what differs from one budget for all."""
        areas = list(self.areas) if len(self.areas) > 1 else self.areas[0] if self.areas else None
        value = {
            "vae_image_size": areas,
            "resolution": [list(size) for size in self.fixed] or None,
            "resolutions_per_sample": "all" if self.all else None,
            "resize_mode": self.resize_mode if self.crop else None,  # every resize stretches
            "upscale": None if self.upscale else False,
        }
        return {name: each for name, each in value.items() if each is not None}

    @property
    def crop(self) -> bool:
        return self.resize_mode == "crop"


@dataclass(frozen=True)
class SourceImage:
    """An original: its name in errors, and its size."""

    where: str
    size: Size


def sizes_of(
    images: Sequence[SourceImage], resolution: Resolution, rejected: SourceImage | None = None
) -> list[tuple[Size, ...]]:
    """The sizes of target, controls and the rejected image, if there is one, in that order: one tuple for each sample.

    SourceError names the image that cannot get such a size.
    """
    target, first = images[0], images[1:2]
    aligned = [target, *(control for control in first if same_shape(control.size, target.size))]
    same = [*aligned, *([rejected] if rejected and same_shape(rejected.size, target.size) else [])]
    filled = min(image.size[0] for image in same), min(image.size[1] for image in same)
    choose = _fixed if resolution.fixed else _budgets
    choices = []
    for area, size in choose(target, filled, resolution):
        others = images[len(aligned) :]
        own = [_within(area, other, None if resolution.upscale else other.size) for other in others]
        own += [size if rejected in same else _as_target(rejected, area, resolution)] if rejected else []
        choices.append((*[size] * len(aligned), *own))
    return list(dict.fromkeys(choices))


def sizes_to_generate(controls: Sequence[SourceImage], size: Size | None, resolution: Resolution) -> tuple[Size, ...]:
    """The sizes of an image to generate and of its controls; `size` is that of the image, if it is given.

    Without `size`, it is that of a target of the last control's shape, which is the pipelines' own choice; without
    controls, a square. SourceError names a control that cannot get its size.
    """
    if not controls:
        return (size or _square(resolution),)
    nearest = replace(resolution, all=False)
    (own, *others), *_ = sizes_of([controls[-1], *controls], nearest)
    return (size or own, *others)


def _square(resolution: Resolution) -> Size:
    """The largest budget as a square, or the largest fixed resolution of the nearest shape."""
    if not resolution.fixed:
        return calculate_dimensions(resolution.areas[-1], (1, 1))
    return min(resolution.fixed, key=lambda size: (_distortion(size, (1, 1)), -size[0]))


def same_shape(one: Size, two: Size) -> bool:
    """True if the aspect ratios are equal up to rounding."""
    return abs(math.log(one[0] * two[1] / (one[1] * two[0]))) <= math.log1p(SAME_SHAPE)


def mask_fault(mask: Size, target: Size) -> tuple[str, str] | None:
    """The problem of a mask that has another shape than its target, and advice."""
    if abs(mask[0] * target[1] / (mask[1] * target[0]) - 1) <= MASK_SHAPE:
        return None
    return f"the mask is {_text(mask)}, its target {_text(target)}", "make the mask at the size of the target"


def calculate_dimensions(area: int, size: Size, where: str | None = None) -> Size:
    """Width and height of about `area` pixels with the aspect ratio of `size`, both multiples of 32.

    The formula of diffusers' `calculate_dimensions` (pipelines/qwenimage/pipeline_qwenimage_edit_plus.py). SourceError
    if the result is too elongated for Qwen2.5-VL.
    """
    ratio = size[0] / size[1]
    exact_width = math.sqrt(area * ratio)
    width, height = round(exact_width / ROUNDING) * ROUNDING, round(exact_width / ratio / ROUNDING) * ROUNDING
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise SourceError(
            "the image is too elongated",
            where=where,
            expected=f"sides of at most {MAX_ASPECT_RATIO}:1 at {area} pixels, in steps of {ROUNDING}",
            found=f"{size[0]}×{size[1]}, which becomes {width}×{height}",
            do="crop it",
        )
    return width, height


def crop_box(image: Size, size: Size) -> Box:
    """The largest centred box of an image with exactly the aspect ratio of `size`."""
    left = max(0.0, (image[0] - image[1] * size[0] / size[1]) / 2)
    top = max(0.0, (image[1] - image[0] * size[1] / size[0]) / 2)
    return left, top, image[0] - left, image[1] - top


def img_shapes(sizes: Sequence[Size]) -> ImgShapes:
    """`(1, h, w)` in tokens of 16 pixels, for images of these sizes in pixels."""
    return tuple((1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN) for width, height in sizes)


def _budgets(target: SourceImage, filled: Size, resolution: Resolution) -> list[tuple[int, Size]]:
    """Budgets, each with the target's size: all of them, or the largest that `filled` fills, else the smallest."""
    fills = [area for area in resolution.areas if area <= filled[0] * filled[1]]
    areas = resolution.areas if resolution.all else fills[-1:] or resolution.areas[:1]
    return [(area, _within(area, target, None if resolution.upscale else filled)) for area in areas]


def _fixed(target: SourceImage, filled: Size, resolution: Resolution) -> list[tuple[int, Size]]:
    """Fixed resolutions of the nearest shape: all of them, or the largest that `filled` fills, else the smallest."""
    nearest = min(resolution.fixed, key=lambda size: _distortion(size, target.size))
    if resolution.resize_mode is None and not same_shape(nearest, target.size):
        raise SourceError(
            "data.resolution has no entry of the image's shape",
            where=target.where,
            expected=f"an aspect ratio within {SAME_SHAPE:.0%} of {_text(nearest)}, the nearest",
            found=_text(target.size),
            do="set data.resize_mode=crop or stretch, add a resolution, or crop the image",
        )
    sizes = [size for size in resolution.fixed if size[0] * nearest[1] == size[1] * nearest[0]]
    fills = [size for size in sizes if size[0] <= filled[0] and size[1] <= filled[1]]
    if not (fills or resolution.upscale):
        raise SourceError(
            "target or first control is too small for data.resolution, and data.upscale is off",
            where=target.where,
            expected=f"at least {_text(sizes[0])}",
            found=_text(filled),
            do="set data.upscale=true, add a smaller resolution, or leave the image out",
        )
    chosen = (sizes if resolution.upscale else fills) if resolution.all else fills[-1:] or sizes[:1]
    return [(width * height, (width, height)) for width, height in chosen]


def _as_target(image: SourceImage, area: int, resolution: Resolution) -> Size:
    """The size that an image would have as a target, with about the pixels of `area`."""
    if not resolution.fixed:
        return _within(area, image, None if resolution.upscale else image.size)
    choices = _fixed(image, image.size, replace(resolution, all=True))
    return min(choices, key=lambda choice: abs(choice[0] - area))[1]


def _within(area: int, image: SourceImage, limit: Size | None) -> Size:
    """The size of an image under a budget; no side larger than that of `limit`."""
    width, height = calculate_dimensions(area, image.size, image.where)
    if limit is None:
        return width, height
    width, height = min(width, limit[0] // ROUNDING * ROUNDING), min(height, limit[1] // ROUNDING * ROUNDING)
    if not (width and height):
        raise SourceError(
            "the image is too small, and data.upscale is off",
            where=image.where,
            expected=f"sides of at least {ROUNDING} pixels",
            found=_text(limit),
            do="set data.upscale=true, or leave the image out",
        )
    return width, height


def _distortion(size: Size, image: Size) -> float:
    """The distortion of an image at that size, the same for stretching and shrinking."""
    return abs(math.log(size[0] * image[1] / (size[1] * image[0])))


def _text(size: Size) -> str:
    return f"{size[0]}×{size[1]}"


def _check_settings(data: DataConfig) -> None:
    if data.resolution is None:
        if data.resize_mode == "stretch":
            what = "data.resize_mode=stretch is for data.resolution; a pixel budget keeps the aspect ratio"
            raise ConfigError(what, do="leave it out, or set data.resolution")
        return
    if data.vae_image_size is not None:
        do = "leave one of them out: vae_image_size keeps each image's aspect ratio, resolution does not"
        raise ConfigError("data.resolution and data.vae_image_size contradict each other", do=do)
    for size in data.resolution:
        if any(side % ROUNDING for side in size):
            near = tuple(max(ROUNDING, round(side / ROUNDING) * ROUNDING) for side in size)
            raise ConfigError(
                f"data.resolution: sides are multiples of {ROUNDING} pixels, as the pipelines make them",
                found=_text(size),
                do=f"did you mean {list(near)}?",
            )
