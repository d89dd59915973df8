"""Resolution policies from end to end: the same latents whichever policy chose a size, all samples of a row kept apart,
images cut and bent only as asked, and a plan that says what will be made, from the files' headers alone."""

from __future__ import annotations

import io
import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image, ImageDraw, ImageFile

from qwen_cache import open_cache
from qwen_cache.encode import plan
from qwen_cache.encode import plan as remembered_images
from qwen_cache.errors import SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.sources import images
from qwen_cache.sources.images import open_rgb, upright_size

from .support.commands import Result, run
from .support.photographs import photograph

TinyModel = Callable[[str], Path]


@pytest.fixture
def model(tiny_model: TinyModel) -> Path:
    return tiny_model("edit-plus")


def build_with(source: Path, out: Path, model: Path, *options: str, **data: Any) -> Result:
    settings = {"condition_image_size": 12544, **data}
    words = [word for name, value in settings.items() for word in ("--set", f"data.{name}={json.dumps(value)}")]
    return run("qwen-cache", "build", source, "--out", out, "--model", model, "--dtype", "float32", *words, *options)


def cache_with(source: Path, out: Path, model: Path, **data: Any) -> Cache:
    result = build_with(source, out, model, **data)
    assert result.code == 0, result.stderr
    assert run("qwen-cache", "verify", out).code == 0
    return open_cache(out)


def by_size(cache: Cache) -> dict[tuple[Any, ...], Sample]:
    return {(sample.name, sample.img_shapes): sample for sample in cache}


def assert_same_tensors(one: Sample, two: Sample) -> None:
    assert one.row.meta.tensors.keys() == two.row.meta.tensors.keys()
    for name in one.row.meta.tensors:
        assert torch.equal(one[name], two[name]), name


def write_pair(folder: Path, target: Image.Image, control: Image.Image, mask: Image.Image | None = None) -> Path:
    for name, original in {"target_images/it": target, "control_images/it": control}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        original.save(folder / f"{name}.png")
    (folder / "target_images/it.txt").write_text("make it grey")
    if mask:
        mask.save(folder / "control_images/it_mask.png")
    return folder


# ---- several budgets -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_budget_of_a_list_gives_what_it_gives_alone(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Bit for bit: all budgets for each sample, or the largest that its target fills."""
    alone: dict[tuple[Any, ...], Sample] = {}
    for area in (9216, 16384):
        alone |= by_size(cache_with(pairs, tmp_path / str(area), model, vae_image_size=area))
    every = cache_with(pairs, tmp_path / "all", model, vae_image_size=[9216, 16384], resolutions_per_sample="all")
    assert len({sample.key for sample in every}) == len(every) == len(alone) == 8
    assert by_size(every).keys() == alone.keys()
    nearest = cache_with(pairs, tmp_path / "nearest", model, vae_image_size=[9216, 16384])
    # of 160×107, 107×160, 120×120 and 150×100 pixels
    filled = {"china": (6, 10), "flower": (10, 6), "cat": (6, 6), "cup": (4, 8)}
    assert {sample.name: sample.img_shapes[0][1:] for sample in nearest} == filled
    for sample in (*every, *nearest):
        assert_same_tensors(sample, alone[sample.name, sample.img_shapes])


@pytest.mark.usefixtures("fast")
def test_both_formats_have_the_same_keys(pairs: Path, tmp_path: Path, model: Path) -> None:
    settings = {"vae_image_size": [4096, 9216], "resolutions_per_sample": "all"}
    for version in ("v1", "v2"):
        (pairs / "control_images/cup_mask.png").unlink(missing_ok=True)  # v1 has no masks
        assert build_with(pairs, tmp_path / version, model, "--format", version, **settings).code == 0
    one, two = (open_cache(tmp_path / version) for version in ("v1", "v2"))
    assert [(sample.key, sample.img_shapes) for sample in one] == [(sample.key, sample.img_shapes) for sample in two]
    assert run("qwen-cache", "migrate", "v1", "v2", tmp_path / "v1", "--out", tmp_path / "migrated").code == 0
    assert [sample.key for sample in open_cache(tmp_path / "migrated")] == [sample.key for sample in two]


def test_a_second_build_with_several_sizes_per_sample_does_nothing(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"vae_image_size": [4096, 9216], "resolutions_per_sample": "all"}
    cache_with(pairs, tmp_path / "shards", model, **settings)
    with monkeypatch.context() as patch:
        patch.setattr(remembered_images, "open_rgb", None)  # headers are enough
        again = build_with(pairs, tmp_path / "shards", model, **settings)
    assert "8 samples, 8 cached, 0 to encode" in again.stderr
    assert "nothing to do" in again.stderr
    (pairs / "target_images/cat.txt").write_text("mirror it")
    planned = build_with(pairs, tmp_path / "shards", model, "--dry-run", "--json", **settings)
    reasons = [(sample["name"], sample["reasons"]) for sample in json.loads(planned.stdout)["samples"]]
    assert reasons == [("cat", ["prompt"])] * 2


# ---- pairs -----------------------------------------------------------------------------------------------------------


def test_a_target_saved_at_another_size_stays_aligned_with_its_control(tmp_path: Path, model: Path) -> None:
    """Trap 22: 160×107 and 240×163 round to different sizes, each by itself."""
    china = photograph("china.jpg")
    source = write_pair(tmp_path / "data", china.resize((160, 107)), china.resize((240, 163)))
    [sample] = cache_with(source, tmp_path / "shards", model, vae_image_size=160 * 112)
    assert sample.img_shapes[0] == sample.img_shapes[1]
    difference = sample["image_latents"] - sample["control_latents"]
    assert difference.norm() < 0.1 * sample["image_latents"].norm()


@pytest.mark.slow
def test_without_upscale_small_images_keep_their_own_size(tmp_path: Path, model: Path) -> None:
    """And are cut nowhere: the latents are those of the image resized to the next multiples of 32 below."""
    china = photograph("china.jpg").resize((100, 75))
    small = china.resize((96, 64), Image.Resampling.LANCZOS)
    [ours] = cache_with(write_pair(tmp_path / "own", china, china), tmp_path / "a", model, upscale=False)
    assert ours.img_shapes == ((1, 4, 6), (1, 4, 6))
    [plain] = cache_with(write_pair(tmp_path / "plain", small, small), tmp_path / "b", model, resolution=[96, 64])
    assert torch.equal(ours["image_latents"], plain["image_latents"])


# ---- fixed sizes -----------------------------------------------------------------------------------------------------


def test_a_fixed_resolution_refuses_another_shape_until_told_what_to_do(
    pairs: Path, tmp_path: Path, model: Path
) -> None:
    result = build_with(pairs, tmp_path / "shards", model, resolution=[96, 96])
    assert result.code == 2
    assert "3 problems" in result.stderr
    china = pairs / "target_images" / "china.png"
    assert (
        f"{china}: data.resolution has no entry of the image's shape (expected an aspect ratio within 3% of 96×96, "
        "the nearest, found 160×107)" in result.stderr
    )
    assert "set data.resize_mode=crop or stretch" in result.stderr
    result = build_with(pairs, tmp_path / "shards", model, "--on-error", "skip", resolution=[96, 96])
    assert result.code == 0
    [cat] = open_cache(tmp_path / "shards")
    assert cat.img_shapes == ((1, 6, 6), (1, 6, 6), (1, 4, 8))  # china.png is its second control, in its own shape


def test_crop_cuts_target_control_and_mask_the_same_way_and_nothing_else(tmp_path: Path, model: Path) -> None:
    """Images are resized as by hand; the text encoder still sees the whole control, as in the pipelines."""
    china, flower = photograph("china.jpg").resize((160, 96)), photograph("flower.jpg").resize((160, 96))
    mask = Image.new("L", (160, 96))
    ImageDraw.Draw(mask).ellipse((20, 20, 90, 80), fill=255)
    middle = (32, 0, 128, 96)
    whole = write_pair(tmp_path / "whole", china, flower, mask)
    by_hand = write_pair(tmp_path / "by hand", china.crop(middle), flower.crop(middle), mask.crop(middle))
    [ours] = cache_with(whole, tmp_path / "a", model, resolution=[96, 96], resize_mode="crop")
    [cut] = cache_with(by_hand, tmp_path / "b", model, resolution=[96, 96])
    [uncut] = cache_with(whole, tmp_path / "c", model, vae_image_size=96 * 160)
    for name in ("image_latents", "control_latents", "edit_mask"):
        assert torch.equal(ours[name], cut[name]), name
    for name in ("prompt_embeds", "empty_prompt_embeds"):
        assert torch.equal(ours[name], uncut[name]), name


def test_stretch_bends_the_whole_image(tmp_path: Path, model: Path) -> None:
    china = photograph("china.jpg").resize((200, 96))
    bent = china.resize((96, 96), Image.Resampling.LANCZOS)
    [ours] = cache_with(
        write_pair(tmp_path / "it", china, china), tmp_path / "a", model, resolution=[96, 96], resize_mode="stretch"
    )
    [plain] = cache_with(write_pair(tmp_path / "bent", bent, bent), tmp_path / "b", model, vae_image_size=9216)
    assert torch.equal(ours["image_latents"], plain["image_latents"])
    assert torch.equal(ours["control_latents"], plain["control_latents"])


def test_each_image_gets_the_fixed_resolution_of_its_shape(pairs: Path, tmp_path: Path, model: Path) -> None:
    several = [[96, 64], [64, 96], [64, 64]]
    cache = cache_with(pairs, tmp_path / "shards", model, resolution=several)
    found = {sample.name: sample.img_shapes[:2] for sample in cache}
    lying, standing, square = (1, 4, 6), (1, 6, 4), (1, 4, 4)
    assert found == {"china": (lying,) * 2, "flower": (standing,) * 2, "cat": (square,) * 2, "cup": (lying,) * 2}


# ---- the plan --------------------------------------------------------------------------------------------------------


def test_a_plan_lists_how_many_samples_have_which_size(pairs: Path, tmp_path: Path, model: Path) -> None:
    settings = {"vae_image_size": [9216, 16384], "resolutions_per_sample": "all"}
    said = build_with(pairs, tmp_path / "shards", model, "--dry-run", **settings).stderr
    assert "8 samples, 0 cached, 8 to encode: 8 new" in said
    assert "targets 128×64: 2, 160×96: 2, 64×128: 1, 96×96: 1, 96×160: 1, 128×128: 1" in " ".join(said.split())
    found = json.loads(build_with(pairs, tmp_path / "shards", model, "--dry-run", "--json", **settings).stdout)
    assert found["reasons"] == {plan.NEW: 8}
    cache = cache_with(pairs, tmp_path / "shards", model, **settings)
    for each in found["target_sizes"]:
        shape = (1, each["height"] // 16, each["width"] // 16)
        assert sum(sample.img_shapes[0] == shape for sample in cache) == each["samples"]
    counts = [each["samples"] for each in found["target_sizes"]]
    assert sum(counts) == 8
    assert counts == sorted(counts, reverse=True)
    more = build_with(
        pairs, tmp_path / "more", model, "--dry-run", resolutions_per_sample="all", vae_image_size=[4096, 9216, 16384]
    )
    assert "12 samples" in more.stderr
    assert ", and 1 size more\n" in more.stderr


def test_contradicting_settings_stop_a_build_before_it_reads_anything(tmp_path: Path) -> None:
    result = build_with(tmp_path / "nowhere", tmp_path / "shards", tmp_path / "none", resolution=[96, 100])
    assert result.code == 2
    assert "data.resolution: sides are multiples of 32 pixels" in result.stderr


# ---- headers ---------------------------------------------------------------------------------------------------------


def encoded(kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    photograph("china.jpg").resize((48, 32)).save(buffer, kind, **options)
    return buffer.getvalue()


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_header_s_size_is_that_of_the_upright_pixels(kind: str, orientation: int) -> None:
    data = encoded(kind, exif=turned(orientation))
    assert upright_size(data, "it") == open_rgb(data, "it").size == ((48, 32) if orientation < 5 else (32, 48))


@pytest.mark.parametrize("kind", ["AVIF", "BMP", "GIF", "PPM"])
def test_other_kinds_of_files_too(kind: str) -> None:
    data = encoded(kind)
    assert upright_size(data, "it") == open_rgb(data, "it").size == (48, 32)


def png_with_exif_after_the_pixels(data: bytes) -> bytes:
    chunks, position = [], 8
    while position < len(data):
        [length] = struct.unpack_from(">I", data, position)
        chunks.append(data[position : position + length + 12])
        position += length + 12
    exif = [chunk for chunk in chunks if chunk[4:8] == b"eXIf"]
    assert len(exif) == 1
    others = [chunk for chunk in chunks if chunk[4:8] != b"eXIf"]
    return data[:8] + b"".join([*others[:-1], *exif, others[-1]])


@pytest.mark.parametrize("orientation", [1, 3, 6])
def test_a_png_may_have_its_orientation_after_its_pixels(orientation: int) -> None:
    data = png_with_exif_after_the_pixels(encoded("PNG", exif=turned(orientation)))
    assert upright_size(data, "it") == open_rgb(data, "it").size == ((32, 48) if orientation == 6 else (48, 32))


def test_pixels_that_are_not_of_the_header_s_size_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a decoder may make of a file: what was planned is what is encoded."""
    monkeypatch.setattr(images, "upright_size", lambda data, where: (32, 48))
    said = "it: the pixels of the file contradict its header .expected 32×48, found 48×32"
    with pytest.raises(SourceError, match=said):
        open_rgb(encoded("PNG"), "it")


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF"])
def test_no_pixel_is_decoded_for_it(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(image: ImageFile.ImageFile) -> None:
        raise AssertionError("pixels were decoded")

    data = encoded(kind)
    monkeypatch.setattr(ImageFile.ImageFile, "load", refuse)
    assert upright_size(data, "it") == (48, 32)
