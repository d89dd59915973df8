"""Images side by side in one PNG."""

from __future__ import annotations

import unicodedata
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from functools import cache

from PIL import Image, ImageDraw, ImageFont

HEIGHT = 384
LARGEST_ENLARGEMENT = 2
WIDEST = 2
"""Largest width of a thumbnail, in heights: a wider one would leave little room for the others."""
LEAST_WIDTH = 600
"""Least width of the grid, so that a caption below small images has about ten words in a line."""
MARGIN, GAP, CAPTION_GAP, ROW_GAP = 24, 12, 10, 32
BACKGROUND, TITLE_COLOUR, CAPTION_COLOUR = "#fafafa", "#777777", "#222222"
TITLE_SIZE, CAPTION_SIZE = 22, 24
LONGEST_LINE = 60 * CAPTION_SIZE
"""About 120 letters; longer lines are hard to read."""
SYSTEM_FONTS = (
    *("NotoSansCJK-Regular.ttc", "NotoSansCJKsc-Regular.otf", "NotoSans-Regular.ttf", "DejaVuSans.ttf"),
    *("wqy-zenhei.ttc", "PingFang.ttc", "Arial Unicode.ttf", "msyh.ttc", "YuGothM.ttc", "malgun.ttf", "arial.ttf"),
    *("NotoSansArabic-Regular.ttf", "NotoSansHebrew-Regular.ttf", "NotoSansThai-Regular.ttf"),
    *("NotoSansDevanagari-Regular.ttf", "Nirmala.ttf"),
)
"""Fonts of Linux, macOS and Windows, those with the most letters first; Pillow finds their folders."""
NO_LETTER = "\U0010ffff"
"""A character that every font renders as its empty box."""

Font = ImageFont.FreeTypeFont


def make_grid(
    titles: Sequence[str],
    rows: Sequence[Sequence[Image.Image | None]],
    captions: Sequence[str],
    height: int = HEIGHT,
) -> Image.Image:
    """One image: the titles, then each row with its caption below; no thumbnail is higher than `height` pixels."""
    filled = [i for i in range(len(titles)) if any(row[i] for row in rows)]
    heads = [written(titles[i], WIDEST * height, TITLE_SIZE, TITLE_COLOUR) for i in filled]
    thumbnails = [[thumbnail(image, height) if (image := row[i]) else None for i in filled] for row in rows]
    widths = [max(cell.width for cell in column if cell) for column in zip(heads, *thumbnails, strict=True)]
    inner = max(sum(widths) + GAP * (len(widths) - 1), LEAST_WIDTH)
    strips = [(side_by_side(heads, widths), CAPTION_GAP)]
    for images, caption in zip(thumbnails, captions, strict=True):
        strips.append((side_by_side(images, widths), CAPTION_GAP))
        strips.append((written(caption, min(inner, LONGEST_LINE), CAPTION_SIZE, CAPTION_COLOUR), ROW_GAP))
    outer = 2 * MARGIN - ROW_GAP + sum(strip.height + gap for strip, gap in strips)
    whole = Image.new("RGB", (inner + 2 * MARGIN, outer), BACKGROUND)
    top = MARGIN
    for strip, gap in strips:
        whole.paste(strip, (MARGIN, top))
        top += strip.height + gap
    return whole


def thumbnail(image: Image.Image, height: int) -> Image.Image:
    """The image in RGB, over the grid's background, as large as the limits allow."""
    scale = min(height / image.height, WIDEST * height / image.width, LARGEST_ENLARGEMENT)
    size = max(round(image.width * scale), 1), max(round(image.height * scale), 1)
    if image.mode == "RGBA":
        image = Image.alpha_composite(Image.new("RGBA", image.size, BACKGROUND), image)
    return image.convert("RGB").resize(size, Image.Resampling.LANCZOS)


def side_by_side(images: Sequence[Image.Image | None], widths: Sequence[int]) -> Image.Image:
    """One row: each image centred in its column."""
    height = max((image.height for image in images if image), default=0)
    strip = Image.new("RGB", (sum(widths) + GAP * max(len(widths) - 1, 0), height), BACKGROUND)
    left = 0
    for image, width in zip(images, widths, strict=True):
        if image:
            strip.paste(image, (left + (width - image.width) // 2, (height - image.height) // 2))
        left += width + GAP
    return strip


# ---- text ------------------------------------------------------------------------------------------------------------


def written(text: str, width: int, size: int, colour: str) -> Image.Image:
    """The whole text in lines of at most `width` pixels; the image is as wide as the longest line."""
    font = font_for(text, size)
    lines = list(wrapped(text, font, width))
    ascent, descent = font.getmetrics()
    pitch = round((ascent + descent) * 1.15)
    strip = Image.new("RGB", (min(round(max(map(font.getlength, lines))) + 1, width), pitch * len(lines)), BACKGROUND)
    for i, line in enumerate(lines):
        ImageDraw.Draw(strip).text((0, i * pitch), line, colour, font)
    return strip


def wrapped(text: str, font: Font, width: int) -> Iterator[str]:
    """The lines of a text: its own, wrapped between words, or within a word that is too long for a line."""
    for paragraph in text.strip().splitlines() or [""]:
        line = ""
        for word in paragraph.split():
            longer = f"{line} {word}" if line else word
            if font.getlength(longer) > width and line:
                yield line
                longer = word
            while font.getlength(longer) > width and len(longer) > 1:
                count = fitting(longer, font, width)
                yield longer[:count]
                longer = longer[count:]
            line = longer
        yield line


def fitting(text: str, font: Font, width: int) -> int:
    """How many letters of an overlong text fit into a line; at least one."""
    return 1 + bisect_left(range(2, len(text)), True, key=lambda count: font.getlength(text[:count]) > width)


def font_for(text: str, size: int) -> Font:
    """The first font with every letter of the text, else the font that lacks the fewest."""
    letters = {letter for letter in text if unicodedata.category(letter)[0] not in "CMZ"}
    best, fewest = None, 0
    for font in fonts(size):
        lacking = sum(bitmap(font, letter) == bitmap(font, NO_LETTER) for letter in letters)
        if best is None or lacking < fewest:
            best, fewest = font, lacking
        if not lacking:
            break
    assert best is not None
    return best


def fonts(size: int) -> Iterator[Font]:
    """Pillow's own font, then those of the system; a generator, because finding each takes a while."""
    own = ImageFont.load_default(size)
    assert isinstance(own, Font)
    yield own
    for name in SYSTEM_FONTS:
        if (font := system_font(name, size)) is not None:
            yield font


@cache
def system_font(name: str, size: int) -> Font | None:
    try:
        return ImageFont.truetype(name, size)
    except OSError:
        return None


def bitmap(font: Font, letter: str) -> bytes:
    return bytes(font.getmask(letter))
