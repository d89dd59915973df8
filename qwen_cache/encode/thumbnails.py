"""Small copies of a sample's images in the cache, for people to look at: the tensor `thumbnails`.

All images are side by side, the target first: in one JPEG, or in one WebP with alpha if any of them is transparent. The
size of each follows from its size in tokens, so the strip can be cut into images again. Refuses a strip that cannot be
read or has another size, before its pixels are decoded. A sample with more images than fit into a strip has no
thumbnails.
"""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from itertools import accumulate

from PIL import Image
from PIL.JpegImagePlugin import JpegImageFile
from PIL.WebPImagePlugin import WebPImageFile

from qwen_cache.errors import ThumbnailError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.sources.sizes import Size

LONGER_SIDE = 192
QUALITY = 85
MAX_SIDE = 65_500  # pixels of a JPEG's side, the limit of libjpeg
MAX_SIDE_WEBP = 16_383
JPEG = "RGB", "JPEG", MAX_SIDE
ALPHA, ANIMATION = 0x10, 0x02  # flags of a WebP in the extended format


def thumbnail_size(img_shape: tuple[int, int, int]) -> Size:
    """Width and height of the thumbnail of an image of shape `(1, h, w)` in tokens, never larger than the image."""
    _, h, w = img_shape
    longest = min(LONGER_SIDE, PIXELS_PER_TOKEN * max(h, w))
    return max(1, round(longest * w / max(h, w))), max(1, round(longest * h / max(h, w)))


def is_transparent(image: Image.Image) -> bool:
    """Whether an RGBA image is transparent anywhere; others never are."""
    return image.mode == "RGBA" and image.getchannel("A").getextrema() != (255, 255)


def thumbnail(image: Image.Image, img_shape: tuple[int, int, int]) -> Image.Image:
    """The thumbnail of an image: RGBA if the image is transparent anywhere."""
    shown = image.convert("RGB") if image.mode == "RGBA" and not is_transparent(image) else image
    return shown.resize(thumbnail_size(img_shape), Image.Resampling.LANCZOS, reducing_gap=3)


def join_thumbnails(thumbnails: Sequence[Image.Image]) -> bytes | None:
    """One JPEG of all thumbnails, or one WebP if any is transparent; None if it would be too wide."""
    width, height = sum(each.width for each in thumbnails), max(each.height for each in thumbnails)
    mode, kind, widest = ("RGBA", "WEBP", MAX_SIDE_WEBP) if any(map(is_transparent, thumbnails)) else JPEG
    if width > widest:
        return None
    strip = Image.new(mode, (width, height))
    for each, left in zip(thumbnails, accumulate((each.width for each in thumbnails), initial=0), strict=False):
        strip.paste(each.convert(mode), (left, 0))
    data = BytesIO()
    strip.save(data, kind, quality=QUALITY)
    return data.getvalue()


def cut_thumbnails(
    data: bytes | memoryview, img_shapes: Sequence[tuple[int, int, int]], where: object
) -> list[Image.Image]:
    """The thumbnails, the target first; ThumbnailError if they do not fit images of these shapes."""
    sizes = [thumbnail_size(shape) for shape in img_shapes]
    expected = sum(width for width, _ in sizes), max(height for _, height in sizes)
    kind, mode = (WebPImageFile, "RGBA") if bytes(data[:4]) == b"RIFF" else (JpegImageFile, "RGB")
    try:
        if kind is WebPImageFile and (canvas := _webp_canvas(data)) != expected:
            raise _other_size(expected, mode, canvas, mode, where)
        with kind(BytesIO(data)) as strip:  # of a JPEG it reads only the header, so no size is too large
            if strip.size != expected or strip.mode != mode:
                raise _other_size(expected, mode, strip.size, strip.mode, where)
            lefts = accumulate((width for width, _ in sizes), initial=0)
            return [strip.crop((x, 0, x + w, h)) for x, (w, h) in zip(lefts, sizes, strict=False)]
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        raise ThumbnailError(
            f"these thumbnails cannot be read: {error}", where=where, expected="one JPEG (RGB), or one WebP (RGBA)"
        ) from None


def _webp_canvas(data: bytes | memoryview) -> Size:
    """The size of a still image with alpha, from its header: to open a WebP is to allocate all its pixels."""
    header = bytes(data[:30])
    if header[8:16] != b"WEBPVP8X" or len(header) < 30 or header[20] & ANIMATION or not header[20] & ALPHA:
        raise ValueError("this is no WebP of one image with alpha")
    return 1 + int.from_bytes(header[24:27], "little"), 1 + int.from_bytes(header[27:30], "little")


def _other_size(expected: Size, mode: str, found: Size, found_mode: str, where: object) -> ThumbnailError:
    return ThumbnailError(
        "these thumbnails have another size",
        where=where,
        expected=f"{expected[0]}×{expected[1]} {mode}",
        found=f"{found[0]}×{found[1]} {found_mode}",
    )
