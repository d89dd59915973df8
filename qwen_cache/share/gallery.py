"""The gallery of a published cache: some samples with their prompts, as one JPEG of the thumbnails in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO

import numpy as np
from PIL import Image

from qwen_cache.format.cache import Cache, Sample
from qwen_cache.html.grid import make_grid
from qwen_cache.inspect.images import stored_thumbnails

GALLERY = "gallery.jpg"
SAMPLES = 8
HEIGHT = 192
"""Pixels of a row: that of the thumbnails, which are not enlarged."""
QUALITY = 85
LONGEST_PROMPT = 300
"""Letters; a caption of a thousand words would hide the images."""


def make_gallery(caches: Sequence[Cache]) -> bytes | None:
    """The file; None for caches without thumbnails."""
    samples = [sample for cache in caches for sample in _spread(cache, SAMPLES // len(caches) or 1)][:SAMPLES]
    if not samples:
        return None
    images = [stored_thumbnails(sample) for sample in samples]
    controls = [len(each) - ("image_latents" in sample) for sample, each in zip(samples, images, strict=True)]
    most = max(controls)
    titles = [f"control {i}" if most > 1 else "control" for i in range(1, most + 1)] + ["target"]
    rows = list[list[Image.Image | None]]()
    for sample, each in zip(samples, images, strict=True):
        targets = each[:1] if "image_latents" in sample else []
        shown = each[len(targets) :]
        row: list[Image.Image | None] = [*shown, *[None] * (most - len(shown))]
        rows.append([*row, *targets] if targets else [*row, None])
    grid = make_grid(titles, rows, [_shortened(sample.prompt) for sample in samples], HEIGHT)
    data = BytesIO()
    grid.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def _spread(cache: Cache, count: int) -> list[Sample]:
    """Samples with thumbnails, evenly from the whole cache."""
    if "thumbnails" not in cache.table.column_names:
        return []
    positions = np.flatnonzero(np.asarray(cache.table["thumbnails"].is_valid()))
    chosen = positions[np.linspace(0, len(positions) - 1, min(count, len(positions))).astype(int)]
    return [cache[int(position)] for position in chosen]


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= LONGEST_PROMPT else prompt[: LONGEST_PROMPT - 1] + "…"
