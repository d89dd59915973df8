"""Planted shifts and zooms that `build` finds, by what the edit is, and its false alarms: a table in Markdown.

    python tools/bench_alignment.py

Photographs are those of scikit-image and scikit-learn. A control is the photograph, shifted or zoomed; its target is
the photograph, edited. Found is a control that would be listed: off by half a pixel or more.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import numpy as np
from make_demo_data import photograph
from PIL import Image, ImageFilter

from qwen_cache.format.measured import MISALIGNED
from qwen_cache.sources.alignment import measure

NAMES = (
    *("astronaut.png", "brick.png", "camera.png", "cell.png", "chelsea.png", "china.jpg", "clock_motion.png"),
    *("coffee.png", "coins.png", "flower.jpg", "grass.png", "gravel.png", "hubble_deep_field.jpg", "ihc.png"),
    *("moon.png", "motorcycle_left.png", "page.png", "retina.jpg", "rocket.jpg", "text.png"),
)
SIZE = (512, 512)
MARGIN = 48  # pixels around a planted pair: what is moved in is of the photograph, too
FAULTS = {
    "aligned": (0.0, 0.0, 1.0),
    "shift 1": (1.0, 0.0, 1.0),
    "shift 4": (3.0, -2.6, 1.0),
    "shift 16": (-16.0, 0.0, 1.0),
    "zoom": (0.0, 0.0, 1.01),
    "zoom out": (0.0, 0.0, 0.99),
}
"""Pixels to the right and down, and the scale, of the control's content."""


def planted(name: str, size: tuple[int, int], fault: str) -> tuple[Image.Image, Image.Image]:
    """A photograph, and the same moved and scaled about its centre by Pillow."""
    whole = (
        photograph(name).convert("RGB").resize((size[0] + 2 * MARGIN, size[1] + 2 * MARGIN), Image.Resampling.LANCZOS)
    )
    x, y, scale = FAULTS[fault]
    across, down = whole.width / 2, whole.height / 2
    moves = (1 / scale, 0, across - (across + x) / scale, 0, 1 / scale, down - (down + y) / scale)
    moved = whole.transform(whole.size, Image.Transform.AFFINE, moves, Image.Resampling.BICUBIC)
    box = (MARGIN, MARGIN, MARGIN + size[0], MARGIN + size[1])
    return whole.crop(box), moved.crop(box)


def recoloured(image: Image.Image) -> Image.Image:
    box = (image.width // 4, image.height // 4, 3 * image.width // 4, 3 * image.height // 4)
    red, green, blue = image.crop(box).split()
    image.paste(Image.merge("RGB", (blue, red.point(lambda value: value * 0.7), green)), box)
    return image


def with_object(image: Image.Image) -> Image.Image:
    """Another photograph over 40 % of the image."""
    side = 0.4**0.5
    part = photograph("motorcycle_left.png").resize((int(side * image.width), int(side * image.height)))
    image.paste(part, ((image.width - part.width) // 3, (image.height - part.height) // 2))
    return image


def toned(image: Image.Image) -> Image.Image:
    values = (np.asarray(image) / 255) ** 1.6 * (1.1, 0.9, 0.7) + (0.02, 0.05, 0.1)
    return Image.fromarray((values.clip(0, 1) * 255).astype(np.uint8))


def compressed(image: Image.Image) -> Image.Image:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=40)
    return Image.open(file).convert("RGB")


def noisy(image: Image.Image) -> Image.Image:
    noise = np.random.default_rng(0).normal(0, 10, (image.height, image.width, 3))
    return Image.fromarray((np.asarray(image) + noise).clip(0, 255).astype(np.uint8))


EDITS: dict[str, Callable[[Image.Image], Image.Image]] = {
    "recoloured": recoloured,
    "object": with_object,
    "tone": toned,
    "jpeg": compressed,
    "blur": lambda image: image.filter(ImageFilter.GaussianBlur(2)),
    "noise": noisy,
    "saved smaller": lambda image: compressed(image.resize((image.width * 5 // 6, image.height * 5 // 6))),
}


def listed(name: str, fault: str) -> list[bool]:
    """By edit, true if the control of a planted pair is listed."""
    target, control = planted(name, SIZE, fault)
    found = [measure([edit(target.copy()), control], [SIZE, SIZE], crop=False).controls[0] for edit in EDITS.values()]
    return [each is not None and each.displacement(SIZE) >= MISALIGNED for each in found]


def main() -> int:
    print(f"of {len(NAMES)} photographs | {' | '.join(EDITS)}")
    print(" | ".join(["---"] * (1 + len(EDITS))))
    for fault in FAULTS:
        counts = map(sum, zip(*(listed(name, fault) for name in NAMES), strict=True))
        print(f"{fault} | {' | '.join(map(str, counts))}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
