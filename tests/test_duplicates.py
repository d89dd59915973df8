"""Targets that look alike are found among real photographs, whatever was done to the file; others are left alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageEnhance

from qwen_cache import open_cache
from qwen_cache.page import duplicates
from qwen_cache.page.duplicates import Hash, alike, difference_hash
from qwen_cache.page.flags import spikes

from .conftest import build, photograph, run

PHOTOGRAPHS = ("china.jpg", "flower.jpg", "chelsea.png", "coffee.png", "rocket.jpg", "astronaut.png")
CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "smaller": lambda picture: picture.resize((picture.width // 2, picture.height // 2)),
    "darker": lambda picture: ImageEnhance.Brightness(picture).enhance(0.85),
    "grey": lambda picture: picture.convert("L"),
}


def hash_of(picture: Image.Image) -> Hash:
    made = difference_hash(picture)
    assert made is not None
    return made


def differ(a: Hash, b: Hash) -> int:
    return int(np.unpackbits((a ^ b).view(np.uint8)).sum())


def test_alike_are_those_that_differ_in_seven_bits() -> None:
    """By comparing all with all."""
    random = np.random.default_rng(0)
    hashes = list(random.integers(0, 1 << 16, (200, 8), dtype=np.uint16))
    for i in range(60):  # of some, neighbours at every distance up to 12, also of neighbours
        bits = np.unpackbits(hashes[random.integers(len(hashes))].view(np.uint8))
        bits[random.choice(128, i % 13, replace=False)] ^= 1
        hashes.append(np.packbits(bits).view(np.uint16))
    for part in range(8):  # a bit in each part but one
        hashes.append(hashes[part] ^ np.array([i != part for i in range(8)], np.uint16))
    found = alike(hashes)
    group = {i: number for number, each in enumerate(found) for i in each}
    close = [(i, j) for i in range(len(hashes)) for j in range(i) if differ(hashes[i], hashes[j]) <= 7]
    assert close
    assert all(i in group and group[i] == group.get(j) for i, j in close)
    assert group.keys() == {i for pair in close for i in pair}
    assert len(found) == len(_components(close))


def _components(pairs: list[tuple[int, int]]) -> list[set[int]]:
    parts: list[set[int]] = []
    for pair in pairs:
        touched = [part for part in parts if part & {*pair}]
        parts = [part for part in parts if part not in touched] + [set(pair).union(*touched)]
    return parts


def test_few_comparisons_at_once_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    hashes = list(np.repeat(np.arange(3, dtype=np.uint16), 5)[:, None] * np.full(8, 999, np.uint16))
    expected = alike(hashes)
    assert expected == [[*range(5)], [*range(5, 10)], [*range(10, 15)]]
    monkeypatch.setattr(duplicates, "AT_ONCE", 3)
    assert alike(hashes) == expected


def test_photographs_are_told_apart_and_recognised() -> None:
    hashes = {name: hash_of(photograph(name)) for name in PHOTOGRAPHS}
    for name in hashes:
        for change in CHANGES.values():
            changed = hash_of(change(photograph(name)))
            assert [each for each, other in hashes.items() if alike([changed, other])] == [name]
    assert difference_hash(Image.new("RGB", (64, 64), "red")) is None


def test_inspect_names_them_group_by_group(tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    source, model = tmp_path / "data", tiny_model("t2i")
    source.mkdir()
    named = {f"{i} {name}": photograph(name) for i, name in enumerate(PHOTOGRAPHS[:3])}
    named |= {
        "3 again": CHANGES["smaller"](photograph(PHOTOGRAPHS[1])),
        "4 grey": photograph(PHOTOGRAPHS[0]).convert("L"),
    }
    named["5 plain"] = named["6 plain"] = Image.new("RGB", (96, 96), "white")
    named["7 same file"] = named[f"2 {PHOTOGRAPHS[2]}"]
    for name, picture in named.items():
        picture.save(source / f"{name}.png")
        (source / f"{name}.txt").write_text(f"a picture called {name}")
    assert build(source, tmp_path / "shards", model).code == 0
    said = json.loads(run("qwen-cache", "inspect", tmp_path / "shards", "--scan", "--json").stdout)
    found = said["recipes"]["default"]["flags"]["near_duplicate"]
    cache = open_cache(tmp_path / "shards")
    expected = [f"0 {PHOTOGRAPHS[0]}", "4 grey", f"1 {PHOTOGRAPHS[1]}", "3 again"]
    assert [cache[key].name for key in found] == expected
    assert "near duplicate 4" in run("qwen-cache", "inspect", tmp_path / "shards", "--scan").stdout


def test_without_thumbnails_nothing_is_said_of_duplicates(built: Callable[..., Path]) -> None:
    cache = built("edit-plus", ("--set", "cache.thumbnails=false"))
    (recipe,) = json.loads(run("qwen-cache", "inspect", cache, "--scan", "--json").stdout)["recipes"].values()
    assert "near_duplicate" not in recipe["flags"]


def test_a_single_number_on_its_way_to_infinity_is_seen() -> None:
    usual = {f"{i}": 4.0 + i % 7 for i in range(30)}
    assert spikes(usual.keys(), list(usual.values())) == set()
    assert spikes([*usual, "odd"], [*usual.values(), 1e6]) == {"odd"}
    assert spikes(["a", "odd"], [1.0, 1e6]) == set()
