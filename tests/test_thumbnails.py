"""Thumbnails in a cache: the images that were encoded, small, and nothing else depends on them."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from base64 import b64decode
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from qwen_cache import open_cache
from qwen_cache.encode.lanes import EncodedImage, _thumbnails_tensor
from qwen_cache.errors import ThumbnailError
from qwen_cache.format.cache import Sample
from qwen_cache.format.verify import _is_webp
from qwen_cache.inspect import page as document
from qwen_cache.inspect.flags import overlaid, thumbnail_signature
from qwen_cache.sources import images as strips
from qwen_cache.sources.images import cut_thumbnails, join_thumbnails, over_white, thumbnail_size

from .support.caches import build, contents
from .support.commands import run
from .support.pages import Page, page_of
from .support.photographs import photograph

Built = Callable[..., Path]
WITHOUT = ("--set", "cache.thumbnails=false")


def kept(cache: Path) -> Iterator[tuple[Sample, list[Image.Image]]]:
    """Every sample, and its images from its thumbnails."""
    for sample in open_cache(cache):
        yield sample, cut_thumbnails(sample.buffer("thumbnails"), sample.img_shapes, sample.key)


def of_sample(source: Path, sample: Sample) -> list[Image.Image]:
    """The images as Pillow opens them: the target, then the controls."""
    controls = [source / "control_images" / f"{sample.name}{end}.png" for end in ("", "_control_1", "_control_2")]
    files = [source / "target_images" / f"{sample.name}.png", *(path for path in controls if path.exists())]
    return [ImageOps.exif_transpose(Image.open(path)).convert("RGB") for path in files]


def difference(a: Image.Image, b: Image.Image) -> float:
    """On average, of 255."""
    return float(np.abs(np.asarray(a, dtype=float) - np.asarray(b, dtype=float)).mean())


def test_they_are_the_images(pairs: Path, tmp_path: Path, tiny_model: Built) -> None:
    assert build(pairs, tmp_path / "shards", tiny_model("edit-plus")).code == 0
    for sample, thumbnails in kept(tmp_path / "shards"):
        images = of_sample(pairs, sample)
        assert len(thumbnails) == len(images) == len(sample.img_shapes)
        for thumbnail, image, (_, h, w) in zip(thumbnails, images, sample.img_shapes, strict=True):
            assert max(thumbnail.size) == min(192, 16 * max(h, w))
            assert abs(thumbnail.width / thumbnail.height - w / h) < 0.02 * w / h
            assert difference(thumbnail, image.resize(thumbnail.size, Image.Resampling.LANCZOS)) < 8  # of JPEG


def test_of_a_cropped_image_they_show_what_is_encoded(pairs: Path, tmp_path: Path, tiny_model: Built) -> None:
    for path in [*(pairs / "target_images").glob("*.png"), *(pairs / "control_images").glob("*.png")]:
        with Image.open(path) as image:
            wide = ImageOps.expand(image.convert("RGB"), (image.width, 0), "red")
        wide.save(path)
    resolution, no_area = ("--set", "data.resolution=[[64, 64]]"), ("--set", "data.vae_image_size=null")
    options = (*resolution, *no_area, "--set", "data.resize_mode=crop", "--edit-mask", "none")
    assert build(pairs, tmp_path / "shards", tiny_model("edit-plus"), *options).code == 0
    for sample, thumbnails in kept(tmp_path / "shards"):
        target = of_sample(pairs, sample)[0]
        assert difference(thumbnails[0], ImageOps.fit(target, (64, 64), Image.Resampling.LANCZOS)) < 8
        assert difference(thumbnails[0], target.resize((64, 64))) > 16


@pytest.mark.slow
def test_nothing_else_depends_on_them(pairs: Path, tmp_path: Path, tiny_model: Built) -> None:
    """Neither keys nor tensors; what is cached stays as it is when the setting changes."""
    model, on, off = tiny_model("edit-plus"), tmp_path / "on", tmp_path / "off"
    assert build(pairs, on, model).code == 0
    assert build(pairs, off, model, *WITHOUT).code == 0
    for a, b in zip(open_cache(on), open_cache(off), strict=True):
        assert a.key == b.key
        assert a.row.meta.tensors.keys() - {"thumbnails"} == b.row.meta.tensors.keys()
        assert all(a.row.meta.tensors[name] == spec for name, spec in b.row.meta.tensors.items())
    before = contents(off)
    again = build(pairs, off, model)
    assert "nothing to do" in again.stderr
    assert contents(off) == before
    (pairs / "target_images" / "cat.txt").write_text("another prompt")
    assert build(pairs, off, model).code == 0
    assert [sample.name for sample in open_cache(off) if "thumbnails" in sample.row.meta.tensors] == ["cat"]
    assert run("qwen-cache", "verify", off).code == 0


def test_other_masks_leave_them_as_they_are(pairs: Path, tmp_path: Path, tiny_model: Built) -> None:
    shards = tmp_path / "shards"
    assert build(pairs, shards, tiny_model("edit-plus")).code == 0
    before = {sample.name: bytes(sample.buffer("thumbnails")) for sample in open_cache(shards)}
    again = build(pairs, shards, tiny_model("edit-plus"), "--edit-mask", "none")
    assert "with only a new mask" in again.stderr
    assert {sample.name: bytes(sample.buffer("thumbnails")) for sample in open_cache(shards)} == before


def test_v1_has_none(pairs: Path, tmp_path: Path, tiny_model: Built) -> None:
    """Neither when it is built nor when it is made of a v2 that has some, which is no reason to refuse."""
    two, one, options = tmp_path / "two", tmp_path / "one", ("--edit-mask", "none")
    assert build(pairs, two, tiny_model("edit-plus"), *options).code == 0
    assert build(pairs, one, tiny_model("edit-plus"), "--format", "v1", *options).code == 0
    result = run("qwen-cache", "migrate", "v2", "v1", two, "--out", tmp_path / "made")
    assert result.code == 0, result.stderr
    assert contents(tmp_path / "made") == contents(one)


def test_a_page_shows_them_without_a_model(built: Built, tmp_path: Path) -> None:
    """And without torch, whose import would take longer than all else."""
    cache, page = built("edit-plus", ("--edit-mask", "file")), tmp_path / "page.html"
    code = f"import sys; from qwen_cache.cli import app; app(['inspect', {str(cache)!r}, '--html', {str(page)!r}], "
    code += "standalone_mode=False); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    shown = {sample["key"]: sample["images"] for sample in Page(page).samples}
    for sample, (target, *controls) in kept(cache):
        names = ["control 1", "control 2"] if controls[1:] else ["control"]
        masks = ["edit mask"] if "edit_mask" in sample.row.meta.tensors else []
        assert [title for title, _ in shown[sample.key]] == [*names, "target", *masks]
        for (_, data), image in zip(shown[sample.key], [*controls, target], strict=False):
            jpeg = Image.open(BytesIO(b64decode(data.removeprefix("data:image/jpeg;base64,"))))
            assert difference(jpeg, image) < 4
    assert any("edit mask" in dict(images) for images in shown.values())


def test_a_cache_without_them_has_a_page_without_images(built: Built, tmp_path: Path) -> None:
    page = page_of(built("edit-plus", WITHOUT), tmp_path / "page.html", "--thumbnails", "1000")
    assert not any(sample["images"] for sample in page.samples)
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 64, 64), (1, 3, 5), (1, 200, 1), (1, 1, 200), (1, 48, 85)])
def test_they_are_cut_where_they_were_joined(shape: tuple[int, int, int]) -> None:
    shapes = (shape, (1, 4, 6), shape[:1] + shape[:0:-1])
    sizes = [thumbnail_size(each) for each in shapes]
    colours = [(250, 10, 10), (10, 250, 10), (10, 10, 250)]
    made = [Image.new("RGB", size, colour) for size, colour in zip(sizes, colours, strict=True)]
    cut = cut_thumbnails(join_thumbnails(made), shapes, "here")
    assert [each.size for each in cut] == sizes
    for each, colour in zip(cut, colours, strict=True):
        middle = each.getpixel((each.width // 2, each.height // 2))
        assert np.argmax(middle) == np.argmax(colour) or min(each.size) == 1  # JPEG mixes the colours of neighbours


def jpeg(size: tuple[int, int], mode: str = "RGB", kind: str = "JPEG") -> bytes:
    data = BytesIO()
    Image.new(mode, size).save(data, kind)
    return data.getvalue()


def test_a_sample_with_too_many_images_has_none() -> None:
    one = Image.new("RGB", (190, 8))
    assert join_thumbnails([one] * 344) is not None  # 65,360 pixels wide
    assert join_thumbnails([one] * 345) is None
    assert _thumbnails_tensor([EncodedImage(Future(), done(one))] * 345) is None


def done(image: Image.Image) -> Future[Image.Image]:
    future: Future[Image.Image] = Future()
    future.set_result(image)
    return future


def of_size(width: int, height: int) -> bytes:
    """A JPEG whose header says so."""
    data = jpeg((96, 64))
    place = data.index(b"\xff\xc0") + 5
    return data[:place] + struct.pack(">HH", height, width) + data[place + 4 :]


@pytest.mark.parametrize("size", [(65_500, 65_500), (10_000, 10_000)])
def test_a_bomb_is_no_thumbnail(size: tuple[int, int]) -> None:
    """The second is one of which Pillow only warns."""
    with pytest.raises(ThumbnailError) as error:
        cut_thumbnails(of_size(*size), [(1, 4, 6)], "here")
    assert error.value.found == f"{size[0]}×{size[1]} RGB"


@pytest.mark.parametrize(
    "data",
    [b"", b"\xff\xd8\xff", jpeg((96, 64))[:-200], jpeg((96, 65)), jpeg((96, 64), "L"), jpeg((96, 64), kind="PNG")],
    ids=["empty", "a marker", "torn", "another size", "grey", "PNG"],
)
def test_what_is_no_such_jpeg_is_refused(data: bytes) -> None:
    assert len(cut_thumbnails(jpeg((96, 64)), [(1, 4, 6)], "here")) == 1
    with pytest.raises(ThumbnailError) as error:
        cut_thumbnails(data, [(1, 4, 6)], "here")
    assert " at 0x" not in str(error.value)


EXAMPLES = Path(__file__).parents[1] / "schemas" / "examples" / "valid" / "cache.v2"


def test_the_examples_have_thumbnails_that_can_be_cut() -> None:
    with_some = [sample for sample in open_cache(EXAMPLES) if "thumbnails" in sample.row.meta.tensors]
    assert {len(sample.img_shapes) for sample in with_some} == {1, 2}
    for sample in with_some:
        for image in cut_thumbnails(sample.buffer("thumbnails"), sample.img_shapes, sample.key):
            *colours, alpha = image.convert("RGBA").getextrema()
            assert set(colours) == {(128, 128)}
            assert alpha == ((64, 64) if sample.name == "transparent" else (255, 255))


def test_one_sample_whole_says_nothing_of_the_numbers_of_a_jpeg(built: Built) -> None:
    (key, *_) = (sample.key for sample in open_cache(built("edit-plus")))
    said = json.loads(run("qwen-cache", "inspect", built("edit-plus"), "--sample", key, "--json").stdout)
    assert said["tensors"]["thumbnails"].keys() == {"dtype", "shape", "xxh3_128", "offset", "bytes"}


# ---- with transparency -----------------------------------------------------------------------------------------------

SHAPES = [(1, 4, 6), (1, 8, 5)]
LARGE = 1600, 1200  # so that Pillow resizes RGB in two steps, and RGBA in one


def photo(size: tuple[int, int], alpha: bool) -> Image.Image:
    """A photograph; with alpha, from 0 at the left to 255 at the right."""
    image = photograph("china.jpg").resize(size)
    if alpha:
        image.putalpha(Image.linear_gradient("L").rotate(90).resize(size))
    return image


def joined(*alpha: bool) -> bytes:
    images = [photo(LARGE, each) for each in alpha]
    data = join_thumbnails([strips.thumbnail(each, shape) for each, shape in zip(images, SHAPES, strict=True)])
    assert data is not None
    return data


@pytest.mark.parametrize("alpha", [(True, True), (True, False), (False, True)])
def test_a_transparent_image_makes_it_a_webp_with_every_opacity(alpha: tuple[bool, bool]) -> None:
    data = joined(*alpha)
    assert Image.open(BytesIO(data)).format == "WEBP"
    assert _is_webp(memoryview(data))
    cut = cut_thumbnails(memoryview(data), SHAPES, "here")
    for has_alpha, image, shape in zip(alpha, cut, SHAPES, strict=True):
        expected = strips.thumbnail(photo(LARGE, has_alpha), shape).convert("RGBA")
        assert (image.mode, image.size) == ("RGBA", thumbnail_size(shape))
        assert image.getchannel("A").tobytes() == expected.getchannel("A").tobytes()
        assert difference(over_white(image), over_white(expected)) < 8  # of WebP


def test_opaque_images_are_the_same_jpeg_whatever_their_mode() -> None:
    opaque = Image.effect_noise(LARGE, 100).convert("RGB")
    with_alpha = opaque.convert("RGBA")
    expected = join_thumbnails([strips.thumbnail(opaque, shape) for shape in SHAPES])
    assert expected == join_thumbnails([strips.thumbnail(with_alpha, shape) for shape in SHAPES])
    assert joined(False, False)[:3] == b"\xff\xd8\xff"
    still_opaque = [each.convert("RGBA") for each in (strips.thumbnail(opaque, shape) for shape in SHAPES)]
    assert join_thumbnails(still_opaque) == expected  # whose header could not say that there is alpha


def test_a_transparent_sample_with_too_many_images_has_none() -> None:
    one = Image.new("RGBA", (190, 8))
    assert join_thumbnails([one] * 86) is not None  # 16,340 pixels wide
    assert join_thumbnails([one] * 87) is None


def webp(size: tuple[int, int], **options: Any) -> bytes:
    data = BytesIO()
    Image.new("RGBA", size, (1, 2, 3, 4)).save(data, "WEBP", **options)
    return data.getvalue()


def changed(data: bytes, place: int, *values: int) -> bytes:
    return data[:place] + bytes(values) + data[place + len(values) :]


WHOLE = webp((96, 64))
RED = Image.new("RGBA", (96, 64), (255, 0, 0, 9))


@pytest.mark.parametrize(
    "data",
    [
        *(WHOLE[:-20], WHOLE[:29], WHOLE[:12], b"RIFF", webp((96, 65)), webp((95, 64))),
        *(webp((96, 64), lossless=True), changed(WHOLE, 20, 0x00), changed(WHOLE, 20, 0x12)),
        webp((96, 64), save_all=True, append_images=[RED]),
        changed(WHOLE, 60, *bytes(30)),
    ],
    ids=[
        *("torn", "no height", "no size", "a marker", "too high", "too narrow"),
        *("simple", "opaque", "animated", "two images", "damaged"),
    ],
)
def test_what_is_no_such_webp_is_refused(data: bytes) -> None:
    assert len(cut_thumbnails(WHOLE, [(1, 4, 6)], "here")) == 1
    with pytest.raises(ThumbnailError) as error:
        cut_thumbnails(data, [(1, 4, 6)], "here")
    assert " at 0x" not in str(error.value)
    assert "RGBA" in str(error.value.expected)


def test_a_webp_of_another_size_is_not_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow would allocate its pixels, 2 GB here."""
    monkeypatch.setattr(strips, "WebPImageFile", None)
    with pytest.raises(ThumbnailError) as error:
        cut_thumbnails(changed(WHOLE, 24, 0xFE, 0x3F, 0, 0xFE, 0x3F, 0), [(1, 4, 6)], "here")
    assert (error.value.expected, error.value.found) == ("96×64 RGBA", "16383×16383 RGBA")


@pytest.mark.parametrize(
    "data",
    [WHOLE[:-1], WHOLE + b"\0", WHOLE[:20], changed(WHOLE, 20, 0), webp((96, 64), lossless=True), b"RIFF", b""],
    ids=["torn", "longer", "header only", "opaque", "simple", "a marker", "empty"],
)
def test_verify_tells_a_whole_webp(data: bytes) -> None:
    assert _is_webp(memoryview(WHOLE))
    assert not _is_webp(memoryview(data))


@pytest.mark.parametrize("embedded", [True, False])
def test_a_page_shows_transparent_images(embedded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "ONE_FILE_IMAGES", 200 if embedded else 0)
    beside = tmp_path / "page_files"
    shown = {sample["name"]: sample["images"] for sample in page_of(EXAMPLES, tmp_path / "page.html").samples}
    for name, kind in (("no control", "jpeg"), ("transparent", "webp")):
        ((title, source),) = shown[name]
        image = Image.open(BytesIO(b64decode(source.removeprefix(f"data:image/{kind};base64,"))))
        assert (title, image.format, image.mode) == ("target", kind.upper(), "RGBA" if kind == "webp" else "RGB")
        assert image.getpixel((3, 3)) == (128, 128, 128, 64)[: len(image.mode)]
    assert beside.exists() != embedded


def test_images_are_compared_over_white() -> None:
    """The colours of pixels that nobody sees say nothing."""
    image = photo((96, 64), True)
    hidden = np.array(image)
    hidden[hidden[..., 3] == 0, :3] = (255, 0, 0)
    seen = thumbnail_signature(over_white(image))
    assert (thumbnail_signature(Image.fromarray(hidden)) == seen).all()
    assert (thumbnail_signature(image.convert("RGB")) != seen).any()


def test_a_mask_is_shown_over_white() -> None:
    clear = Image.new("RGBA", (8, 8), (0, 0, 0, 0))
    assert overlaid(clear, np.zeros((2, 2), np.float32)).getpixel((0, 0)) == (255, 255, 255)
