"""A grid shows the very images that it was given, each in its place, and every word of the captions."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import pytest
from PIL import Image, ImageChops, ImageDraw, ImageOps

from qwen_cache.html import grid
from qwen_train.inference.images import Row, compare_grid

from .support.grids import Box, box_of
from .support.photographs import photograph

LANCZOS = Image.Resampling.LANCZOS
LONG = "Replace the background by a bright alpine meadow at sunrise, and keep the face exactly as it is. " * 6


def landscape() -> Image.Image:
    return photograph("coffee.png").resize((576, 384))


def portrait() -> Image.Image:
    return photograph("astronaut.png").crop((60, 0, 316, 384))


def overlap(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def ink(image: Image.Image) -> Box | None:
    """The box of all that is not background."""
    return ImageChops.difference(image, Image.new("RGB", image.size, grid.BACKGROUND)).getbbox()


# ---- images --------------------------------------------------------------------------------------------------------


def test_every_image_is_there_unchanged_in_order_and_alone() -> None:
    a, b = landscape(), portrait()
    rows = [
        Row((a, b), ImageOps.invert(a), ImageOps.mirror(a), ImageOps.flip(a)),
        Row((ImageOps.solarize(b),), ImageOps.invert(b), ImageOps.mirror(b), ImageOps.flip(b)),
    ]
    whole = compare_grid(rows, ["first", LONG])
    first, second = (
        [box_of(p, whole) for p in (*row.controls, row.without_lora, row.with_lora, row.target) if p] for row in rows
    )
    for boxes in (first, second):
        assert all(left[2] < right[0] for left, right in pairwise(boxes))
        assert {(box[1], box[3]) for box in boxes} == {(boxes[0][1], boxes[0][1] + 384)}
    assert first[0][3] < second[0][1]
    middles = [[(box[0] + box[2]) // 2 for box in boxes] for boxes in (first, second)]
    columns = [middles[0][i] for i in (0, 2, 3, 4)]  # the second row has no second control
    assert all(abs(x - y) <= 1 for x, y in zip(columns, middles[1], strict=True))
    assert not any(overlap(x, y) for i, x in enumerate(first + second) for y in (first + second)[:i])
    assert all(min(box) >= 0 and box[2] <= whole.width and box[3] <= whole.height for box in first + second)


@pytest.mark.parametrize(
    ("given", "shown"),
    [((1000, 2000), (192, 384)), ((100, 60), (200, 120)), ((2400, 300), (768, 96)), ((576, 384), (576, 384))],
)
def test_thumbnails_are_no_higher_than_asked_and_no_more_than_twice_their_size(
    given: tuple[int, int], shown: tuple[int, int]
) -> None:
    image = photograph("china.jpg").resize(given)
    whole = compare_grid([Row(with_lora=image)], ["x"])
    x0, y0, x1, y1 = box_of(image.resize(shown, LANCZOS), whole)
    assert (x1 - x0, y1 - y0) == shown
    assert compare_grid([Row(with_lora=image)], ["x"], height=90).height < 90 + 150


def test_a_small_image_stands_in_the_middle_of_its_row() -> None:
    small, large = photograph("china.jpg").resize((60, 40)), landscape()
    whole = compare_grid([Row((small,), with_lora=large)], ["x"])
    s, b = box_of(small.resize((120, 80), LANCZOS), whole), box_of(large, whole)
    assert s[1] - b[1] == b[3] - s[3]


def test_columns_that_no_row_fills_are_left_out() -> None:
    a = landscape()
    whole = compare_grid([Row((), a, ImageOps.invert(a))], ["x"])
    assert whole.width < 2 * a.width + 100
    first, second = box_of(a, whole), box_of(ImageOps.invert(a), whole)
    titles = whole.crop((0, 0, whole.width, first[1]))
    for box in (first, second):
        assert ink(titles.crop((box[0], 0, box[2], first[1])))
    one = compare_grid([Row((a,), None, a.convert("L")), Row((), a)], ["x", "y"])
    assert one.width > 3 * a.width


def test_images_of_any_mode_are_shown() -> None:
    a = landscape()
    for mode in ("L", "RGBA", "P", "1", "CMYK"):
        box_of(a.convert(mode).convert("RGB"), compare_grid([Row(target=a.convert(mode))], [mode]))


def test_a_grid_of_nothing_is_still_an_image() -> None:
    assert compare_grid([], []).width > 0
    assert compare_grid([Row()], ["nothing was generated"]).height > compare_grid([], []).height


# ---- captions --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text", [LONG, "x" * 500, "然后" * 250, "short " + "y" * 300 + " end", "one\n\n  two  \nthree"]
)
@pytest.mark.parametrize("width", [60, 600])
def test_all_of_a_caption_is_in_its_lines_and_none_is_too_long(text: str, width: int) -> None:
    font = grid.font_for(text, 24)
    lines = list(grid.wrapped(text, font, width))
    assert "".join("".join(lines).split()) == "".join(text.split())
    assert all(font.getlength(line) <= width for line in lines)
    for line, following in pairwise(lines):
        if " " not in text:  # and else between words alone: then every line is as full as it can be
            assert font.getlength(line + following[:1]) > width
    if width == 600 and text == LONG:
        assert " ".join(lines) == text.strip()


def test_the_lines_are_one_below_the_other() -> None:
    font = grid.font_for(LONG, 24)
    lines = list(grid.wrapped(LONG, font, 600))
    strip = grid.written(LONG, 600, 24, "black")
    pitch = strip.height // len(lines)
    assert len(lines) > 3
    assert strip.height == pitch * len(lines)
    for i, line in enumerate(lines):
        found = ink(strip.crop((0, i * pitch, strip.width, (i + 1) * pitch)))
        alone = Image.new("RGB", (700, 2 * pitch), grid.BACKGROUND)
        ImageDraw.Draw(alone).text((0, 0), line, "black", font)
        assert found == ink(alone)  # whole letters, and nothing of the next line


def test_a_caption_of_500_letters_is_inside_the_grid_below_its_row() -> None:
    a = landscape()
    rows = [Row(with_lora=a), Row(with_lora=ImageOps.invert(a))]
    whole = compare_grid(rows, [LONG[:500], "second"])
    first, second = (box_of(row.with_lora, whole) for row in rows if row.with_lora)
    between = whole.crop((0, first[3], whole.width, second[1]))
    text = grid.written(LONG[:500], whole.width - 2 * grid.MARGIN, grid.CAPTION_SIZE, grid.CAPTION_COLOUR)
    box_of(text, between)
    assert ink(between.crop((0, 0, grid.MARGIN, between.height))) is None


@pytest.mark.parametrize("text", ["🦊🏽‍🚀 ❤️", "", " \n ", "\ud83e", "a\x00b\tc\rd", "اجعل السماء", "ก็", "\u2028"])
@pytest.mark.parametrize("fonts", [grid.SYSTEM_FONTS, ("nowhere.ttf",)])
def test_no_caption_is_too_strange(text: str, fonts: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "SYSTEM_FONTS", fonts)
    a = landscape()
    box_of(a, compare_grid([Row(target=a)], [text]))


@dataclass(frozen=True)
class Letters:
    """A font as far as choosing one goes."""

    has: str

    def getmask(self, letter: str) -> bytes:
        return letter.encode() if letter in self.has else b"box"


def test_the_font_is_the_first_with_every_letter_else_the_one_that_lacks_least(monkeypatch: pytest.MonkeyPatch) -> None:
    own, greek, both = Letters("abc"), Letters("abαβ"), Letters("abcαβ")
    monkeypatch.setattr(grid, "fonts", lambda size: iter([own, greek, both]))
    assert grid.font_for("a b\nc", 24) is own
    assert grid.font_for("ab αβ", 24) is greek
    assert grid.font_for("cα", 24) is both
    assert grid.font_for("cα中", 24) is both
    assert grid.font_for("a中", 24) is own
    assert grid.font_for("α\u200d\ufe0f", 24) is greek  # joiners have no letter of their own


def test_transparent_images_are_over_the_background() -> None:
    """Not the colours that nobody sees."""
    clear = grid.thumbnail(Image.new("RGBA", (8, 8), (255, 0, 0, 0)), 8)
    assert (clear.mode, clear.getpixel((3, 3))) == ("RGB", Image.new("RGB", (1, 1), grid.BACKGROUND).getpixel((0, 0)))
