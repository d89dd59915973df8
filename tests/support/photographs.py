"""Real photographs."""

from __future__ import annotations

from functools import cache
from importlib.metadata import distribution

from PIL import Image


def photograph(name: str) -> Image.Image:
    """A real photograph that ships with scikit-learn or scikit-image, in RGB, to change at will."""
    return _decoded(name).copy()


@cache
def _decoded(name: str) -> Image.Image:
    of_sklearn = name in ("china.jpg", "flower.jpg")
    package, folder = ("scikit-learn", "sklearn/datasets/images") if of_sklearn else ("scikit-image", "skimage/data")
    with Image.open(distribution(package).locate_file(f"{folder}/{name}")) as image:  # without an import, which is long
        return image.convert("RGB")
