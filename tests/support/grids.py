"""The position of an image in a grid of images."""

from __future__ import annotations

import numpy as np
from PIL import Image

Box = tuple[int, int, int, int]


def box_of(image: Image.Image, whole: Image.Image) -> Box:
    """The box of the image in `whole`, equal in every pixel; it must occur once."""
    pixels, part = np.asarray(whole), np.asarray(image)
    h, w = part.shape[:2]
    begins = pixels[: len(pixels) - h + 1, : pixels.shape[1] - w + 1]
    y, x = np.nonzero(np.logical_and.reduce([begins[..., i] == value for i, value in enumerate(part[0, 0])]))
    for down, right in ((0, w // 2), (0, w - 1), (h // 2, 0), (h // 2, w // 2), (h - 1, w - 1)):
        equal = (pixels[y + down, x + right] == part[down, right]).all(axis=-1)
        y, x = y[equal], x[equal]
    boxes = [
        (left, top, left + w, top + h)
        for left, top in zip(x.tolist(), y.tolist(), strict=True)
        if np.array_equal(pixels[top : top + h, left : left + w], part)
    ]
    assert len(boxes) == 1, boxes
    return boxes[0]
