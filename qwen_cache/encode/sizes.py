"""How large each picture becomes: the pipelines' own rule, integers only.

One rule for target and controls, in training as in inference, so that a pair of the same size stays aligned: each
picture keeps its aspect ratio up to the rounding of its sides to 32 pixels; nothing is cropped.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from qwen_cache.format.errors import SourceError
from qwen_cache.format.sample import PIXELS_PER_TOKEN, ImgShapes

Size = tuple[int, int]
"""Width and height in pixels, PIL's order."""

ROUNDING = 32
MAX_ASPECT_RATIO = 200  # beyond it, Qwen2.5-VL's image processor raises


def calculate_dimensions(area: int, size: Size) -> Size:
    """Width and height of about `area` pixels with the aspect ratio of `size`, both multiples of 32.

    The formula of diffusers' `calculate_dimensions` (pipelines/qwenimage/pipeline_qwenimage_edit_plus.py). SourceError
    when the result is more elongated than Qwen2.5-VL takes.
    """
    ratio = size[0] / size[1]
    exact_width = math.sqrt(area * ratio)
    width, height = round(exact_width / ROUNDING) * ROUNDING, round(exact_width / ratio / ROUNDING) * ROUNDING
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise SourceError(
            "the picture is too elongated",
            expected=f"sides of at most {MAX_ASPECT_RATIO}:1 at {area} pixels, in steps of {ROUNDING}",
            found=f"{size[0]}×{size[1]}, which becomes {width}×{height}",
            do="crop it",
        )
    return width, height


def img_shapes(sizes: Sequence[Size]) -> ImgShapes:
    """`(1, h, w)` in units of 16 pixels for pictures of these sizes in pixels."""
    return tuple((1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN) for width, height in sizes)
