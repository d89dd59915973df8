"""A grid that compares images with and without a LoRA: controls, without, with, target; one row per prompt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image

from qwen_cache.html.grid import HEIGHT, make_grid


@dataclass(frozen=True)
class Row:
    """The images of one row; a missing image leaves its cell empty."""

    controls: tuple[Image.Image, ...] = ()
    without_lora: Image.Image | None = None
    with_lora: Image.Image | None = None
    target: Image.Image | None = None


def titled(row: Row) -> list[tuple[str, Image.Image]]:
    """The images of a row that exist, each with its title, in the order of the columns."""
    titles = ["control"] if len(row.controls) == 1 else [f"control {i}" for i in range(1, len(row.controls) + 1)]
    named = [*zip(titles, row.controls, strict=True), ("without LoRA", row.without_lora), ("with LoRA", row.with_lora)]
    return [(title, image) for title, image in [*named, ("target", row.target)] if image is not None]


def compare_grid(rows: Sequence[Row], captions: Sequence[str], height: int = HEIGHT) -> Image.Image:
    """A line of titles, then each row with its caption below; see `make_grid`."""
    controls = max((len(row.controls) for row in rows), default=0)
    titles = ["control"] if controls == 1 else [f"control {i}" for i in range(1, controls + 1)]
    table = [
        [*row.controls, *[None] * (controls - len(row.controls)), row.without_lora, row.with_lora, row.target]
        for row in rows
    ]
    return make_grid([*titles, "without LoRA", "with LoRA", "target"], table, captions, height)
