"""Enlarged targets, and controls that are shifted or zoomed against their targets: found whatever the edit is, in
`init`, `build --check`, `build` and `inspect`; none in aligned pairs or references, older caches are not measured."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image, ImageOps

from qwen_cache import open_cache
from qwen_cache.sources.alignment import measure

from .support.caches import build
from .support.commands import run
from .support.paths import ROOT, load_tool
from .support.photographs import photograph

bench: Any = load_tool("bench_alignment")
FAULTS, EDITS, planted, recoloured = bench.FAULTS, bench.EDITS, bench.planted, bench.recoloured
PHOTOGRAPHS = ("astronaut.png", "chelsea.png", "coffee.png", "china.jpg", "rocket.jpg")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_measured_whatever_the_edit_is(fault: str) -> None:
    """Every edit with each fault, and every photograph with each fault and with each edit."""
    size, (x, y, scale) = (640, 448), FAULTS[fault]
    pairs = [planted(name, size, fault) for name in PHOTOGRAPHS]
    for i, (edit, change) in enumerate(EDITS.items(), start=[*FAULTS].index(fault)):
        target, control = pairs[i % len(pairs)]
        found = measure([change(target.copy()), control], [size, size], crop=False).controls[0]
        name = PHOTOGRAPHS[i % len(pairs)]
        assert found, (name, edit)
        assert found.shift == pytest.approx((x, y), abs=0.45), (name, edit)
        assert found.zoom == pytest.approx((scale - 1, scale - 1), abs=0.004), (name, edit)
        assert (found.displacement(size) >= 0.5) == (fault != "aligned"), (name, edit)


def test_what_is_not_the_same_image_is_not_measured() -> None:
    size = (512, 512)
    images = {name: photograph(name).resize(size) for name in PHOTOGRAPHS}
    for name, image in images.items():
        others = [other for each, other in images.items() if each != name]
        others += [ImageOps.mirror(image), image.crop((0, 0, 360, 360)).resize(size), Image.new("RGB", size, "grey")]
        assert set(measure([image, *others], [size] * (1 + len(others)), crop=False).controls) == {None}
        assert measure([image, image], [size, (512, 480)], crop=False).controls == (None,)  # of another shape


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair for each fault, one with a reference image, and one of half the size."""
    folder, size = tmp_path_factory.mktemp("pairs"), (256, 256)
    pairs = {fault.replace(" ", "_"): planted("coffee.png", size, fault) for fault in FAULTS}
    pairs["reference"] = planted("astronaut.png", size, "aligned")[0], photograph("chelsea.png").resize(size)
    small = photograph("chelsea.png").resize((128, 128))
    pairs["small"] = small.copy(), small
    for number, (name, (target, control)) in enumerate(pairs.items()):
        for role, image in (("target_images", recoloured(target)), ("control_images", control)):
            (folder / role).mkdir(exist_ok=True)
            image.putpixel((0, 0), (number, 0, 0))  # each its own content
            image.save(folder / role / f"{name}.png")
        (folder / "target_images" / f"{name}.txt").write_text(f"recolour the middle of {name}")
    return folder


SIZE = ("--set", "data.vae_image_size=65536")
MISALIGNED = {"shift_1", "shift_4", "shift_16", "zoom", "zoom_out"}


def test_a_build_finds_and_keeps_what_may_hurt(source: Path, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    shards, model = tmp_path / "shards", tiny_model("edit-plus")
    planned = build(source, shards, model, *SIZE, "--dry-run", "--check", "--json")
    assert planned.code == 1  # there is work
    before = json.loads(planned.stdout)["measured"]
    assert {each["name"] for each in before["misaligned"]} == MISALIGNED
    assert before["enlarged"] == [{"name": "small", "factor": 2.0}]

    made = build(source, shards, model, *SIZE)
    assert "5 controls are shifted or zoomed against their targets, by up to 16 px: shift_16, " in made.stderr
    assert "1 targets are scaled up to the size that is trained, by up to 2×: small" in made.stderr
    for advice in "align them", "use larger images", "`qwen-cache inspect --html FILE` shows them":
        assert f"  → {advice}" in made.stderr
    report = json.loads(run("qwen-cache", "inspect", shards, "--json").stdout)["recipes"]["default"]
    assert report["measured"]["most_misaligned"] == before["misaligned"]
    assert [report["measured"][name] for name in ("samples", "measured", "pairs", "misaligned", "enlarged")] == [
        8,
        8,
        7,
        5,
        1,
    ]
    names = {flag: {report["names"][key] for key in keys} for flag, keys in report["flags"].items()}
    assert (names["misaligned_control"], names["enlarged_target"]) == (MISALIGNED, {"small"})
    assert run("qwen-cache", "verify", shards).code == 0
    assert "shift_16: control 1 16 px left" in run("qwen-cache", "inspect", shards).stdout
    assert "control 1 is no copy of it" in run("qwen-cache", "inspect", shards, "--sample", "reference").stdout

    # The whole source again, from the cache alone; the rows are listed.
    again = build(source, shards, model, *SIZE, "--dry-run", "--check")
    assert again.code == 0
    assert "zoom_out: control 1 is " in again.stderr
    assert "small: the target is scaled up 2×" in again.stderr

    run("qwen-cache", "inspect", shards, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert page.count("control 1 on target: ") == 5
    assert "5 of 7 compared controls are misaligned, by up to 16 px; 1 of 8 targets scaled up, by up to 2×" in page


def test_init_looks_at_some_pairs(source: Path, tmp_path: Path) -> None:
    written = run("qwen-cache", "init", source, "--out", tmp_path / "qwen.yaml", *SIZE)
    assert written.code == 0, written.stderr
    assert "5 of 8 samples looked at: controls are shifted or zoomed against their targets" in written.stderr
    assert (
        "1 of 8 samples looked at: targets are scaled up to the size that is trained, by up to 2×: small"
        in written.stderr
    )


def test_what_an_older_version_made_is_not_measured(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """Nor what is migrated, nor what is copied from such a cache; a sample that is encoded beside them is."""
    cache = ROOT / "schemas" / "examples" / "valid" / "cache.v2"
    assert "not measured: built by an older version, imported or migrated" in run("qwen-cache", "inspect", cache).stdout
    old, new, model = tmp_path / "old", tmp_path / "new", tiny_model("edit-plus")
    no_mask = ("--set", "data.edit_mask=none")
    assert build(pairs, old, model, *no_mask, "--format", "v1").code == 0
    assert run("qwen-cache", "migrate", "v1", "v2", old).code == 0
    (pairs / "target_images" / "cat.txt").write_text("another prompt")
    assert build(pairs, new, model, *no_mask, "--reuse", old).code == 0
    assert {each.row.name for each in open_cache(new) if each.row.meta.measured} == {"cat"}
    described = run("qwen-cache", "inspect", new, "--sample", "china").stdout
    assert "not measured" in described
    assert "3 samples not measured" in run("qwen-cache", "inspect", new).stdout
