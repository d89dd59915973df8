"""Real photographs."""

from __future__ import annotations

from functools import cache
from importlib.resources import files

from PIL import Image


def photograph(name: str) -> Image.Image:
    """A real photograph that ships with scikit-learn or scikit-image, in RGB, to change at will."""
    return _decoded(name).copy()


@cache
def _decoded(name: str) -> Image.Image:
    folder = files("sklearn.datasets") / "images" if name in ("china.jpg", "flower.jpg") else files("skimage") / "data"
    with (folder / name).open("rb") as file:
        return Image.open(file).convert("RGB")
