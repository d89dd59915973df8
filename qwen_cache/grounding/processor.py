"""Experimental. Images as inputs of Qwen2.5-VL or Qwen3-VL, without torchvision, and the transformation of each.

For code with its own image processor: the values are those of `Qwen2VLImageProcessorPil`, and `meta_data` maps a mask
back to the original. Each side is scaled separately to a multiple of two patches (28 pixels for Qwen2.5-VL, 32 for
Qwen3-VL), without padding. Refuses arrays other than H×W×3 of uint8.
"""

from __future__ import annotations

from collections.abc import Sequence
from os import PathLike
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.errors import SourceError

ImageLike = Image.Image | NDArray[Any]


class QwenImageProcessor:
    """`preprocess` for one image or several; without an `image_processor` for Qwen2.5-VL, with stock size limits."""

    def __init__(self, image_processor: Qwen2VLImageProcessorPil | None = None) -> None:
        self.image_processor = image_processor or Qwen2VLImageProcessorPil()

    @classmethod
    def from_pretrained(cls, name: str | PathLike[str]) -> QwenImageProcessor:
        """A processor with the patch size, size limits and normalisation of a folder or repository."""
        return cls(Qwen2VLImageProcessorPil.from_pretrained(name))

    def preprocess(self, image: ImageLike | Sequence[ImageLike]) -> dict[str, Any]:
        """`pixel_values` `[patches, D]`, `image_grid_thw` `[images, 3]`, `image_sizes` and `meta_data`.

        D is 3 · 2 · `patch_size`²: 1176 for Qwen2.5-VL, 1536 for Qwen3-VL. `image_sizes` has the original `(h, w)` of
        each image; `meta_data` is a dict for a single image, and a list of dicts for a list.
        """
        is_single = isinstance(image, Image.Image | np.ndarray)
        images = to_pil(image)
        sizes = [(each.height, each.width) for each in images]
        inputs = self.image_processor.preprocess(images, return_tensors="pt")
        patch_size = self.image_processor.patch_size
        resized = [(h * patch_size, w * patch_size) for _, h, w in inputs["image_grid_thw"].tolist()]
        transformations = [meta_data(size, shape) for size, shape in zip(sizes, resized, strict=True)]
        return {**inputs, "image_sizes": sizes, "meta_data": transformations[0] if is_single else transformations}


def to_pil(images: ImageLike | Sequence[ImageLike]) -> list[Image.Image]:
    """One image or several, in RGB."""
    if isinstance(images, Image.Image | np.ndarray):
        return [_to_pil(images)]
    return [_to_pil(each) for each in images]


def _to_pil(image: ImageLike) -> Image.Image:
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != 3:
        raise SourceError(
            "an array is not an image",
            expected="uint8 of shape (height, width, 3)",
            found=f"{image.dtype} of shape {image.shape}",
        )
    return Image.fromarray(image)


def meta_data(original: tuple[int, int], resized: tuple[int, int]) -> dict[str, Any]:
    """The transformation of an image, in the keys that other image processors use."""
    shape = {"height": resized[0], "width": resized[1]}
    return {
        "original_shape": {"height": original[0], "width": original[1]},
        "image_shape": shape,
        "scale_factor": (resized[0] / original[0], resized[1] / original[1]),
        "padding": dict.fromkeys(("before_height", "after_height", "before_width", "after_width"), 0),
        "padded_shape": dict(shape),
    }
