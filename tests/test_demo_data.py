"""The demo data: complete pairs of real photographs, in the sizes and formats of real datasets."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageOps

from qwen_cache.errors import SourceError
from qwen_cache.extras import install_command
from qwen_cache.sources.detect import read_source

TOOL = Path(__file__).parent.parent / "tools" / "make_demo_data.py"


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("make_demo_data", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["make_demo_data"] = module  # its dataclasses look up their annotations there
    spec.loader.exec_module(module)
    yield module
    del sys.modules["make_demo_data"]


@pytest.fixture(scope="module")
def demo(tool, tmp_path_factory) -> Path:
    return tool.make_demo_data(tmp_path_factory.mktemp("demo"))


def image_named(folder: Path, name: str) -> Image.Image:
    """The image of this name, as stored."""
    (path,) = (path for path in folder.glob(f"{name}.*") if path.suffix != ".txt")
    with Image.open(path) as image:
        return image.copy()


def pixels(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"), dtype=np.int16)


def stems(folder: Path, *suffixes: str) -> list[str]:
    return sorted(path.stem for path in folder.iterdir() if path.suffix in suffixes)


def test_every_target_has_its_control_and_prompt_and_no_file_is_left_over(demo):
    targets = stems(demo / "target_images", ".jpg", ".png")
    assert len(targets) >= 12
    assert len(set(targets)) == len(targets)
    assert stems(demo / "target_images", ".txt") == targets
    controls = stems(demo / "control_images", ".jpg", ".png")
    second = [name for name in controls if name.endswith("_control_1")]
    masks = [name for name in controls if name.endswith("_mask")]
    assert (len(second), len(masks)) == (2, 1)
    assert sorted({*controls} - {*second, *masks}) == targets
    assert {name.removesuffix("_control_1").removesuffix("_mask") for name in second + masks} < {*targets}


def test_the_folder_is_a_source(demo):
    rows, problems = read_source(demo, needs_control=True)
    assert problems == []
    assert len(rows) == len(stems(demo / "target_images", ".txt"))
    assert sorted(len(row.controls) for row in rows)[-3:] == [1, 2, 2]
    assert [row.name for row in rows if row.mask] == ["coffee_blue_cup"]


def test_sizes_and_orientations_are_mixed_and_small(demo):
    images = [Image.open(path) for path in demo.rglob("*_images/*") if path.suffix != ".txt"]
    for image in images:
        image.load()
    sizes = {ImageOps.exif_transpose(image).size for image in images}
    assert len(sizes) >= 8
    assert all(max(size) <= 640 for size in sizes)
    assert any(width > height for width, height in sizes)
    assert any(width < height for width, height in sizes)
    assert any(width == height for width, height in sizes)
    for image in images:
        image.close()


def test_all_common_formats_occur(demo):
    controls = demo / "control_images"
    assert image_named(controls, "cameraman_at_sunset").mode == "L"
    assert image_named(demo / "target_images", "china_black_and_white").mode == "L"
    cut_out = image_named(controls, "flower_on_yellow")
    assert cut_out.mode == "RGBA"
    assert cut_out.getchannel("A").getextrema() == (0, 255)
    assert {path.suffix for path in controls.iterdir()} == {".jpg", ".png"}


def test_the_rotated_photograph_is_upright_after_its_exif_flag(demo):
    stored = image_named(demo / "control_images", "astronaut_poster")
    shown = ImageOps.exif_transpose(stored)
    target = image_named(demo / "target_images", "astronaut_poster")
    assert shown.size == target.size == stored.size[::-1]
    with Image.open(distribution("scikit-image").locate_file("skimage/data/astronaut.png")) as astronaut:
        original = pixels(astronaut)[: shown.height, : shown.width]
    assert abs(pixels(shown) - original).mean() < 8  # JPEG's loss


def test_prompts_are_utf8_and_all_different_with_a_chinese_and_a_long_one(demo):
    prompts = [path.read_text(encoding="utf-8").strip() for path in demo.glob("target_images/*.txt")]
    assert all(prompts)
    assert len(set(prompts)) == len(prompts)
    assert any("\u4e00" <= prompt[0] <= "\u9fff" for prompt in prompts)
    assert max(map(len, prompts)) > 300


def test_the_mask_covers_exactly_what_was_edited(demo):
    mask = image_named(demo / "control_images", "coffee_blue_cup_mask")
    before, after = (
        pixels(image_named(demo / folder, "coffee_blue_cup")) for folder in ("control_images", "target_images")
    )
    assert mask.mode == "L"
    assert np.asarray(mask).shape == after.shape[:2] == before.shape[:2]
    inside = np.asarray(mask) == 255
    assert {*np.unique(mask)} == {0, 255}
    assert 0.1 < inside.mean() < 0.5
    changed = (before != after).any(axis=2)
    assert not changed[~inside].any()
    assert changed[inside].mean() > 0.9


def test_targets_follow_their_prompts(demo):
    def pair(name: str) -> tuple[np.ndarray, np.ndarray]:
        return pixels(image_named(demo / "control_images", name)), pixels(image_named(demo / "target_images", name))

    before, after = pair("coffee_upside_down")
    assert (before[::-1, ::-1] == after).all()
    before, after = pair("rocket_mirrored")
    assert abs(before[:, ::-1] - after).mean() < 8
    beside = image_named(demo / "target_images", "cat_beside_astronaut")
    cat, astronaut = (
        pixels(image_named(demo / "control_images", f"cat_beside_astronaut{which}").resize((8, 8)))
        for which in ("", "_control_1")
    )
    seam = beside.width - beside.height  # the astronaut is square
    assert abs(pixels(beside.crop((0, 0, seam, beside.height)).resize((8, 8))) - cat).mean() < 4
    assert abs(pixels(beside.crop((seam, 0, *beside.size)).resize((8, 8))) - astronaut).mean() < 4


@pytest.mark.slow
def test_two_runs_write_the_same_bytes(demo, tmp_path):
    subprocess.run([sys.executable, TOOL, tmp_path], check=True, capture_output=True)
    written, again = (
        {path.relative_to(root): path.read_bytes() for path in root.rglob("*.*")} for root in (demo, tmp_path)
    )
    assert written == again


def test_a_missing_package_is_named_with_its_command(tool):
    with pytest.raises(SourceError) as caught:
        tool.installed("scikit-missing", "a.png")
    assert str(caught.value) == f"scikit-missing is not installed\n  → {install_command('demo')}"
