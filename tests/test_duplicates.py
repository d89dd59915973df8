"""Near-duplicate targets among real photographs are found after common changes of the file; other images are not."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageEnhance

from qwen_cache import open_cache
from qwen_cache.inspect import flags
from qwen_cache.inspect.flags import Signature, near_duplicates, spikes, thumbnail_signature
from qwen_cache.sources.images import cut_thumbnails, join_thumbnails, thumbnail

from .support.caches import build
from .support.commands import run
from .support.photographs import photograph

PHOTOGRAPHS = ("china.jpg", "flower.jpg", "chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")


def saved(image: Image.Image, quality: int) -> Image.Image:
    data = BytesIO()
    image.save(data, "JPEG", quality=quality)
    return Image.open(data)


def cropped(image: Image.Image, fraction: float) -> Image.Image:
    x, y = round(image.width * fraction), round(image.height * fraction)
    return image.crop((x, y, image.width - x, image.height - y))


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "compressed": lambda image: saved(image, 20),
    "smaller": lambda image: image.resize((image.width // 2, image.height // 2)),
    "tiny": lambda image: image.resize((image.width // 8, image.height // 8)),
    "darker": lambda image: ImageEnhance.Brightness(image).enhance(0.5),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.1),
    "softer": lambda image: ImageEnhance.Contrast(image).enhance(0.7),
    "harder": lambda image: ImageEnhance.Contrast(image).enhance(1.2),
    "grey": lambda image: image.convert("L"),
    "cropped": lambda image: cropped(image, 0.005),
    "all together": lambda image: saved(cropped(ImageEnhance.Brightness(image).enhance(0.8), 0.005), 30),
}


def signature(image: Image.Image) -> Signature:
    """The signature of the image's thumbnail in a cache."""
    shape = (1, max(1, image.height // 16), max(1, image.width // 16))
    data = join_thumbnails([thumbnail(image.convert("RGB"), shape)]) or b""
    return thumbnail_signature(cut_thumbnails(data, [shape], "here")[0])


@pytest.mark.parametrize("change", CHANGES)
def test_photographs_are_told_apart_and_recognised(change: str) -> None:
    signatures = [signature(photograph(name)) for name in PHOTOGRAPHS]
    assert near_duplicates(signatures) == []
    changed = [signature(CHANGES[change](photograph(name))) for name in PHOTOGRAPHS]
    assert near_duplicates([*signatures, *changed]) == [[i, i + len(PHOTOGRAPHS)] for i in range(len(PHOTOGRAPHS))]


def discs(random: np.random.Generator, draw: ImageDraw.ImageDraw) -> None:
    x, y, size = random.integers([0, 0, 15], [150, 150, 40])
    draw.ellipse((int(x), int(y), int(x + size), int(y + size)), fill=tuple(map(int, random.integers(0, 200, 3))))


def dots(random: np.random.Generator, draw: ImageDraw.ImageDraw) -> None:
    for x, y in random.integers(0, 180, (3, 2)).tolist():
        draw.ellipse((x, y, x + 12, y + 12), fill="black")


def lines(random: np.random.Generator, draw: ImageDraw.ImageDraw) -> None:
    for i in range(random.integers(1, 4)):
        draw.text((10, 60 + 20 * i), "".join(random.choice(list("abcdefgh "), 24)), fill="black")


def light(random: np.random.Generator, draw: ImageDraw.ImageDraw) -> None:
    dark, bright = random.integers([0, 120], [80, 255])
    for x in range(384):  # from a corner
        draw.line((x, 0, 0, x), fill=(round(dark + (bright - dark) * x / 383),) * 3, width=3)


def nothing(random: np.random.Generator, draw: ImageDraw.ImageDraw) -> None:
    draw.rectangle((0, 0, 192, 192), fill=tuple(map(int, random.integers(0, 255, 3))))


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("turned", [0, 90])
@pytest.mark.parametrize("painted", [discs, dots, lines, light, nothing])
def test_a_common_background_makes_no_duplicates(painted: Callable[..., None], turned: int) -> None:
    random, signatures = np.random.default_rng(0), []
    for _ in range(100):
        image = Image.new("RGB", (192, 192), "white")
        painted(random, ImageDraw.Draw(image))
        signatures.append(signature(image.rotate(turned)))
    assert sum(map(len, near_duplicates(signatures))) <= 4  # among a hundred random images, a few are


def test_the_colour_tells_shapes_apart() -> None:
    shapes = []
    for colour in ("red", "green", "blue", "gold"):
        image = Image.new("RGB", (192, 192), "white")
        ImageDraw.Draw(image).ellipse((40, 50, 140, 130), fill=colour)
        shapes.append(signature(image))
    assert near_duplicates(shapes) == []
    assert near_duplicates([*shapes, signature(saved(image, 30))]) == [[3, 4]]
    assert near_duplicates([shapes[0], signature(image.convert("L"))]) == [[0, 1]]


def at(angle: float, random: np.random.Generator) -> Signature:
    """A signature between two others, at this angle in degrees from one of them."""
    one, other = random.normal(0, 1, (2, 12, 12))
    levels = 128 + 25 * (np.cos(np.radians(angle)) * one + np.sin(np.radians(angle)) * other)
    return np.stack([levels, np.full_like(levels, 128), np.full_like(levels, 128)], axis=-1).round().astype(np.uint8)


def test_a_chain_is_no_group() -> None:
    """Each is 12 degrees from the next: neighbours match, images two steps apart do not."""
    chain = [at(12 * i, np.random.default_rng(0)) for i in range(6)]
    assert near_duplicates(chain) == [[0, 1], [2, 3], [4, 5]]
    assert near_duplicates([chain[0], chain[2], chain[1]]) == [[0, 2]]  # no image is in two groups


@pytest.mark.parametrize("block", [(128, 2048), (3, 5), (1, 1), (7, 1000)])
def test_groups_are_those_of_comparing_one_by_one(monkeypatch: pytest.MonkeyPatch, block: tuple[int, int]) -> None:
    random = np.random.default_rng(0)
    signatures = [at(angle, np.random.default_rng(kind)) for kind in range(9) for angle in (0, 3, 6, 40, 45)]
    signatures += [np.full((12, 12, 3), 128, np.uint8)] * 3
    signatures = [signatures[i] for i in random.permutation(len(signatures))]
    expected, left = [], list(range(len(signatures)))
    while left:
        first, *others = left
        group = [first, *(i for i in others if near_duplicates([signatures[first], signatures[i]]))]
        expected += [group] if group[1:] else []
        left = [i for i in left if i not in group]
    assert len(expected) == 18
    monkeypatch.setattr(flags, "BLOCK_ROWS", block[0])
    monkeypatch.setattr(flags, "BLOCK_COLUMNS", block[1])
    advanced: list[int] = []
    assert near_duplicates(signatures, advanced.append) == expected
    assert sum(advanced) == len(signatures)


def test_inspect_lists_them_group_by_group(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source, model = tmp_path / "data", tiny_model("t2i")
    source.mkdir()
    named = {f"{i} {name}": photograph(name) for i, name in enumerate(PHOTOGRAPHS[:3])}
    named |= {
        "3 again": CHANGES["smaller"](photograph(PHOTOGRAPHS[1])),
        "4 grey": photograph(PHOTOGRAPHS[0]).convert("L"),
    }
    named["5 plain"] = named["6 plain"] = Image.new("RGB", (96, 96), "white")
    named["7 same file"] = named[f"2 {PHOTOGRAPHS[2]}"]
    for name, image in named.items():
        image.save(source / f"{name}.png")
        (source / f"{name}.txt").write_text(f"an image called {name}")
    assert build(source, tmp_path / "shards", model).code == 0
    report = json.loads(run("qwen-cache", "inspect", tmp_path / "shards", "--scan", "--json").stdout)
    keys = report["recipes"]["default"]["flags"]["near_duplicate"]
    cache = open_cache(tmp_path / "shards")
    expected = [f"0 {PHOTOGRAPHS[0]}", "4 grey", f"1 {PHOTOGRAPHS[1]}", "3 again"]
    assert [cache[key].name for key in keys] == expected
    recipe = report["recipes"]["default"]
    groups = [[recipe["names"][key] for key in group] for group in recipe["near_duplicates"]]
    assert groups == [expected[:2], expected[2:]]
    lines = [line.strip() for line in run("qwen-cache", "inspect", tmp_path / "shards", "--scan").stdout.splitlines()]
    first = next(i for i, line in enumerate(lines) if re.fullmatch(r"(flags +)?near duplicate 4", line))
    assert lines[first + 1 : first + 4] == [", ".join(expected[:2]), ", ".join(expected[2:]), ""]


def test_without_thumbnails_there_is_no_flag_for_duplicates(built: Callable[..., Path]) -> None:
    cache = built("edit-plus", ("--set", "cache.thumbnails=false"))
    (recipe,) = json.loads(run("qwen-cache", "inspect", cache, "--scan", "--json").stdout)["recipes"].values()
    assert "near_duplicate" not in recipe["flags"]


def test_a_single_number_on_its_way_to_infinity_is_flagged() -> None:
    usual = [np.nan, *(4.0 + i % 7 for i in range(30))]  # the first sample lacks the tensor
    assert not spikes(np.array(usual)).any()
    assert np.flatnonzero(spikes(np.array([*usual, 1e6]))).tolist() == [31]
    assert not spikes(np.array([1.0, 1e6])).any()
