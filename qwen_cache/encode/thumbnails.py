"""Small copies of a sample's images in the cache, for people to look at: the tensor `thumbnails`.

All images are side by side in one JPEG, the target first. The size of each follows from its size in tokens, so the
JPEG can be cut into images again. Refuses a JPEG that cannot be read or has another size. A sample with more images
than fit into a JPEG has no thumbnails.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile

from qwen_cache.errors import ThumbnailError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.sources.sizes import Size

LONGER_SIDE = 192
QUALITY = 85
MAX_SIDE = 65_500  # pixels of a JPEG's side, the limit of libjpeg


def thumbnail_size(img_shape: tuple[int, int, int]) -> Size:
    """Width and height of the thumbnail of an image of shape `(1, h, w)` in tokens, never larger than the image."""
    _, h, w = img_shape
    longest = min(LONGER_SIDE, PIXELS_PER_TOKEN * max(h, w))
    return max(1, round(longest * w / max(h, w))), max(1, round(longest * h / max(h, w)))


def thumbnail(image: Image.Image, img_shape: tuple[int, int, int]) -> Image.Image:
    """The thumbnail of an image."""
    return image.resize(thumbnail_size(img_shape), Image.Resampling.LANCZOS, reducing_gap=3)


def join_thumbnails(thumbnails: Sequence[Image.Image]) -> bytes | None:
    """One JPEG of all thumbnails; None if it would be too wide."""
    width, height = sum(each.width for each in thumbnails), max(each.height for each in thumbnails)
    if width > MAX_SIDE:
        return None
    strip = Image.new("RGB", (width, height))
    for each, left in zip(thumbnails, accumulate((each.width for each in thumbnails), initial=0), strict=False):
        strip.paste(each, (left, 0))
    data = BytesIO()
    strip.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def cut_thumbnails(
    jpeg: bytes | memoryview, img_shapes: Sequence[tuple[int, int, int]], where: object
) -> list[Image.Image]:
    """The thumbnails, the target first; ThumbnailError if they do not fit images of these shapes."""
    sizes = [thumbnail_size(shape) for shape in img_shapes]
    expected = sum(width for width, _ in sizes), max(height for _, height in sizes)
    try:
        with JpegImageFile(BytesIO(jpeg)) as strip:  # reads only the header, so no size is too large
            if strip.size != expected or strip.mode != "RGB":
                raise ThumbnailError(
                    "these thumbnails have another size",
                    where=where,
                    expected=f"{expected[0]}×{expected[1]} RGB",
                    found=f"{strip.width}×{strip.height} {strip.mode}",
                )
            lefts = accumulate((width for width, _ in sizes), initial=0)
            return [strip.crop((x, 0, x + w, h)) for x, (w, h) in zip(lefts, sizes, strict=False)]
    except (OSError, SyntaxError, ValueError) as error:
        raise ThumbnailError(f"these thumbnails cannot be read: {error}", where=where) from None
