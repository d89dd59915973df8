"""The position of an image in a grid of images."""

from __future__ import annotations

import numpy as np
from PIL import Image

Box = tuple[int, int, int, int]


def box_of(image: Image.Image, whole: Image.Image) -> Box:
    """The box of the image in `whole`, equal in every pixel; it must occur once."""
    pixels, part = np.asarray(whole).astype(int), np.asarray(image).astype(int)
    h, w = part.shape[:2]
    corners = (pixels[: -h or None, : -w or None] == part[0, 0]).all(axis=-1)
    boxes = [
        (int(x), int(y), int(x) + w, int(y) + h)
        for y, x in np.argwhere(corners)
        if np.array_equal(pixels[y, x : x + w], part[0]) and np.array_equal(pixels[y : y + h, x : x + w], part)
    ]
    assert len(boxes) == 1, boxes
    return boxes[0]
