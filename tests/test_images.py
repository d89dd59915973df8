"""Images of every kind become the pixels that people see, compared with arithmetic in numpy and not with Pillow."""

from __future__ import annotations

import io
import json
import os
import struct
import subprocess
import sys
import time
import warnings
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import starmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import skimage
import sklearn
from diffusers import QwenImage21Pipeline
from diffusers.image_processor import VaeImageProcessor
from PIL import Image, ImageCms, features

from qwen_cache.encode.vae import PROCESSOR
from qwen_cache.errors import SourceError
from qwen_cache.sources import images
from qwen_cache.sources import images as jpeg_xl
from qwen_cache.sources.images import FORMATS, open_mask, open_rgb, open_rgba, over_white, upright_size
from qwen_cache.sources.places import IMAGE_EXTENSIONS

from .support.waiting import HANG

SKLEARN = Path(sklearn.__file__).parent / "datasets/images"
SKIMAGE = Path(skimage.__file__).parent / "data"


@cache
def photo() -> np.ndarray:
    """A real photograph, cut to 48×32 and not symmetrical in any way."""
    with Image.open(SKLEARN / "china.jpg") as image:
        return np.asarray(image.resize((48, 32)))


@cache
def alpha() -> np.ndarray:
    """Every opacity from 0 to 255, in no simple pattern."""
    return np.random.default_rng(1).permutation(np.arange(48 * 32) % 256).reshape(32, 48).astype(np.uint8)


def encoded(image: Image.Image | np.ndarray, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    (Image.fromarray(image) if isinstance(image, np.ndarray) else image).save(buffer, kind, **options)
    return buffer.getvalue()


def rgb(data: bytes) -> np.ndarray:
    image = open_rgb(data, "a.png")
    assert image.mode == "RGB"
    return np.asarray(image).astype(int)


def mask(data: bytes) -> np.ndarray:
    image = open_mask(data, "a_mask.png")
    assert image.mode == "L"
    return np.asarray(image).astype(int)


def over(background: int, colour: np.ndarray, opacity: np.ndarray) -> np.ndarray:
    share = opacity[..., None] / 255
    return colour * share + background * (1 - share)


def luminance(colour: np.ndarray) -> np.ndarray:
    return colour @ np.array([0.299, 0.587, 0.114])  # ITU-R 601


def grey_as_rgb(grey: np.ndarray) -> np.ndarray:
    return np.stack([grey] * 3, axis=-1)


def refusal(open_it: Callable[[bytes, str], Any], data: bytes) -> str:
    with pytest.raises(SourceError) as caught:
        open_it(data, "data/a.png")
    assert caught.value.where == "data/a.png"
    assert caught.value.do
    return str(caught.value)


@pytest.mark.parametrize(
    ("kind", "options"),
    [("PNG", {}), ("BMP", {}), ("TIFF", {}), ("TIFF", {"compression": "tiff_lzw"}), ("WEBP", {"lossless": True})],
)
def test_lossless_files_keep_every_pixel(kind: str, options: dict[str, Any]) -> None:
    assert (rgb(encoded(photo(), kind, **options)) == photo()).all()


@pytest.mark.parametrize(
    "path",
    [
        *(SKLEARN / name for name in ("china.jpg", "flower.jpg")),
        *(SKIMAGE / name for name in ("astronaut.png", "coffee.png", "chelsea.png", "rocket.jpg")),
    ],
    ids=lambda path: path.name,
)
def test_photographs_as_they_are(path: Path) -> None:
    assert (rgb(path.read_bytes()) == skimage.io.imread(path)).all()


UPRIGHT = {  # how the stored array must be turned, from the EXIF standard's row and column of the first pixel
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a.transpose(1, 0, 2)[::-1, ::-1],
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@pytest.mark.parametrize("orientation", UPRIGHT)
@pytest.mark.parametrize("kind", ["PNG", "TIFF", "WEBP", "JPEG"])
def test_exif_orientation_is_applied_once(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(photo(), kind, exif=exif, **options)
    # a JPEG's own pixels are those of the same file without the tag
    stored = photo() if kind != "JPEG" else np.asarray(Image.open(io.BytesIO(encoded(photo(), kind))))
    expected = UPRIGHT[orientation](stored)
    assert (rgb(data) == expected).all()
    assert np.abs(mask(data) - luminance(expected)).max() <= 1
    assert open_rgb(data, "a").getexif().get(0x0112, 1) == 1  # nobody downstream can turn it again


def test_16_bit_grey_is_turned_too() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.arange(48 * 32, dtype=np.uint16).reshape(32, 48) * 42
    assert np.abs(mask(encoded(stored, exif=exif)) - np.rot90(stored, -1) / 257).max() <= 0.5


def test_alpha_is_laid_over_white_and_for_a_mask_over_black() -> None:
    data = encoded(np.dstack([photo(), alpha()]))
    assert np.abs(rgb(data) - over(255, photo(), alpha())).max() <= 1
    assert np.abs(mask(data) - luminance(over(0, photo(), alpha()))).max() <= 2


def test_a_mask_painted_as_transparency_counts_what_is_opaque_and_bright() -> None:
    white = np.full_like(photo(), 255)
    assert np.abs(mask(encoded(np.dstack([white, alpha()]))) - alpha()).max() <= 1


def test_grey_with_alpha() -> None:
    grey = photo()[..., 0]
    data = encoded(np.dstack([grey, alpha()]))
    assert np.abs(rgb(data) - over(255, grey_as_rgb(grey), alpha())).max() <= 1
    assert np.abs(mask(data) - over(0, grey[..., None], alpha())[..., 0]).max() <= 1


def test_grey_and_one_bit() -> None:
    grey = photo()[..., 1]
    assert (rgb(encoded(grey)) == grey_as_rgb(grey)).all()
    assert (mask(encoded(grey)) == grey).all()
    for kind in ("PNG", "TIFF"):
        data = encoded(Image.fromarray(grey > 100), kind)
        assert (rgb(data) == grey_as_rgb((grey > 100) * 255)).all()
        assert (mask(data) == (grey > 100) * 255).all()


def palette_image() -> tuple[Image.Image, np.ndarray, np.ndarray]:
    colours = np.random.default_rng(2).integers(0, 256, (16, 3), dtype=np.uint8)
    indices = (photo()[..., 0] // 16).astype(np.uint8)
    image = Image.fromarray(indices)
    image.putpalette(colours.tobytes())
    return image, colours[indices], indices


def test_palettes_without_and_with_transparency() -> None:
    image, colours, indices = palette_image()
    assert (rgb(encoded(image)) == colours).all()
    assert np.abs(mask(encoded(image)) - luminance(colours)).max() <= 1
    one = np.where(indices == 5, 0, 255)
    assert (rgb(encoded(image, transparency=5)) == over(255, colours, one)).all()
    assert (rgb(encoded(image, "GIF", transparency=5)) == over(255, colours, one)).all()
    opacities = np.linspace(0, 255, 16).astype(np.uint8)
    data = encoded(image, transparency=opacities.tobytes())
    assert np.abs(rgb(data) - over(255, colours, opacities[indices])).max() <= 1
    assert np.abs(mask(data) - luminance(over(0, colours, opacities[indices]))).max() <= 2


def test_a_transparent_colour_in_a_png_without_alpha() -> None:
    key = tuple(int(value) for value in photo()[3, 4])
    hidden = (photo() == key).all(axis=-1)
    assert (rgb(encoded(photo(), transparency=key)) == np.where(hidden[..., None], 255, photo())).all()
    deep = np.arange(48 * 32, dtype=np.uint16).reshape(32, 48) * 42
    data = encoded(deep, transparency=4200)
    assert np.abs(rgb(data)[..., 0] - np.where(deep == 4200, 255, deep / 257)).max() <= 0.5
    assert np.abs(mask(data) - np.where(deep == 4200, 0, deep / 257)).max() <= 0.5


@pytest.mark.parametrize(
    ("kind", "dtype"), [("PNG", "<u2"), ("TIFF", "<u2"), ("TIFF", ">u2"), ("TIFF", "<i4"), ("PPM", "<i4")]
)
def test_16_bits_are_scaled_not_clipped(kind: str, dtype: str) -> None:
    deep = np.linspace(0, 65535, 48 * 32).round().astype(np.uint16).reshape(32, 48)
    data = encoded(deep.astype(dtype), kind)
    assert np.abs(rgb(data)[..., 2] - deep / 257).max() <= 0.5
    assert np.abs(mask(data) - deep / 257).max() <= 0.5
    assert rgb(data).max() == 255


def test_floats_from_0_to_1() -> None:
    values = (photo()[..., 0] / 255).astype(np.float32)
    assert (rgb(encoded(values, "TIFF")) == grey_as_rgb(photo()[..., 0])).all()
    assert (mask(encoded(values, "TIFF")) == photo()[..., 0]).all()


@pytest.mark.parametrize(
    ("values", "found"),
    [
        (np.array([[0, 1.5]], np.float32), "expected 0 to 1, found 0 to 1.5"),
        (np.array([[-0.5, 1]], np.float32), "expected 0 to 1, found -0.5 to 1"),
        (np.array([[0, np.nan]], np.float32), "expected 0 to 1, found nan to nan"),
        (np.array([[0, 70000]], np.int32), "expected 0 to 65535, found 0 to 70000"),
        (np.array([[-1, 5]], np.int32), "expected 0 to 65535, found -1 to 5"),
    ],
)
def test_numbers_without_an_agreed_white_are_refused(values: np.ndarray, found: str) -> None:
    for open_it in (open_rgb, open_mask):
        message = refusal(open_it, encoded(values, "TIFF"))
        assert "no agreed white" in message
        assert found in message


def tiff(photometric: int, bits: int, sample_format: int, data: bytes) -> bytes:
    """A TIFF of 64×64 with these tags, which Pillow does not write."""
    tags = [(256, 4, 64), (257, 4, 64), (258, 3, bits), (259, 3, 1), (262, 3, photometric), (273, 4, 134)]
    tags += [(277, 3, 1), (278, 4, 64), (279, 4, len(data)), (339, 3, sample_format)]
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, value) for tag, kind, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + data


RAMP = np.tile(np.arange(64, dtype="<u2") * 4, (64, 1))
"""From 0 to 252."""
NIBBLES = (RAMP * 257 >> 4).reshape(-1, 2).astype(int)
TWELVE = np.stack([NIBBLES[:, 0] >> 4, (NIBBLES[:, 0] & 15) << 4 | NIBBLES[:, 1] >> 8, NIBBLES[:, 1] & 255], 1)
TIFFS = {
    "16 bits": (1, 16, 1, RAMP * 257),
    "16 bits, 0 is white": (0, 16, 1, 65535 - RAMP * 257),
    "float, 0 is white": (0, 32, 3, 1 - RAMP.astype("<f4") / 255),
    "8 bits, 0 is white": (0, 8, 1, 255 - RAMP.astype("u1")),
    "16 bits with a sign": (1, 16, 2, RAMP * 257 >> 1),
    "12 bits": (1, 12, 1, TWELVE.astype("u1")),
    "32 bits": (1, 32, 1, (RAMP * 257).astype("<u4")),
}


@pytest.mark.parametrize("kind", TIFFS)
def test_what_a_tiff_says_of_its_samples_is_honoured(kind: str) -> None:
    """Images and masks have the same pixels as those of the file with 8 bits."""
    photometric, bits, sample_format, pixels = TIFFS[kind]
    data = tiff(photometric, bits, sample_format, pixels.tobytes())
    assert (np.asarray(open_mask(data, "m")) == RAMP).all()
    assert (np.asarray(open_rgb(data, "i"))[..., 0] == RAMP).all()


@pytest.mark.parametrize(
    ("kind", "message"),
    [((1, 8, 2, 2), "numbers of the TIFF have a sign"), ((0, 12, 1, 2), "a kind of TIFF that is not read")],
)
def test_a_tiff_that_is_not_read_is_not_called_damaged(kind: tuple[int, int, int, int], message: str) -> None:
    with pytest.raises(SourceError, match=message):
        open_rgb(tiff(*kind[:3], bytes(64 * 64 * kind[3])), "i")


@pytest.mark.parametrize(("depth", "transparent", "other"), [(1, 1, 0), (2, 2, 1), (4, 7, 2)])
def test_transparent_grey_of_few_bits(depth: int, transparent: int, other: int) -> None:
    """A PNG declares it by the value in the file, which Pillow expands in the pixels alone."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    row = b"".join(bytes([sum(value << i for i in range(0, 8, depth))]) * depth for value in (transparent, other))
    header = struct.pack(">IIBBBBB", 16, 4, depth, 0, 0, 0, 0)
    pixels = zlib.compress((b"\0" + row) * 4)
    chunks = (b"IHDR", header), (b"tRNS", struct.pack(">H", transparent)), (b"IDAT", pixels), (b"IEND", b"")
    image = open_rgba(b"\x89PNG\r\n\x1a\n" + b"".join(starmap(chunk, chunks)), "i")
    grey = other * 255 // ((1 << depth) - 1)
    assert [image.getpixel((x, 0))[3] for x in (0, 8)] == [0, 255]  # type: ignore[index]
    assert image.getpixel((8, 0)) == (grey, grey, grey, 255)


def test_cmyk() -> None:
    ink = np.dstack([255 - photo(), np.full(photo().shape[:2], 40, np.uint8)])
    expected = (255 - ink[..., :3].astype(float)) * (255 - ink[..., 3:]) / 255
    image = Image.fromarray(ink, "CMYK")
    assert np.abs(rgb(encoded(image, "TIFF")) - expected).max() <= 1
    data = encoded(image, "JPEG", quality=100, subsampling=0)
    assert b"Adobe" in data  # Adobe's CMYK JPEGs store inverted inks, and so does Pillow
    assert np.abs(rgb(data) - expected).max() <= 6
    assert np.abs(mask(data) - luminance(expected)).max() <= 6


def test_lab_and_ycbcr() -> None:
    to_lab = ImageCms.buildTransform(ImageCms.createProfile("sRGB"), ImageCms.createProfile("LAB"), "RGB", "LAB")
    lab = ImageCms.applyTransform(Image.fromarray(photo()), to_lab)
    assert lab is not None
    for data in (encoded(lab, "TIFF"), encoded(Image.fromarray(photo()).convert("YCbCr"), "TIFF")):
        assert np.abs(rgb(data) - photo()).mean() < 1.5
        assert np.abs(mask(data) - luminance(photo())).mean() < 1.5


def test_icc_profiles_change_nothing() -> None:
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    assert (rgb(encoded(photo(), icc_profile=profile)) == photo()).all()


def test_a_masks_white_is_edited_whatever_its_colours() -> None:
    original = np.zeros((8, 8, 3), np.uint8)
    original[2:5, 3:6] = 255
    assert (mask(encoded(original)) == original[..., 0]).all()
    assert (mask(encoded(np.zeros((8, 8), np.uint8))) == 0).all()


@pytest.mark.parametrize("lowest", [0, 1])
def test_a_mask_of_zeros_and_ones_is_refused(lowest: int) -> None:
    values = np.full((8, 8), lowest, np.uint8)
    values[0, 0] = 1
    assert "expected 0 (kept) to 255 (edited), found 0 and 1 only" in refusal(open_mask, encoded(values))
    assert rgb(encoded(values)).max() == 1  # as an image it is nearly black, and fine


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "AVIF"])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_refused(kind: str, share: float) -> None:
    if kind == "AVIF" and not features.check("avif"):
        pytest.skip("this Pillow has no AVIF")
    whole = encoded(photo(), kind)
    for open_it in (open_rgb, open_mask):
        message = refusal(open_it, whole[: int(len(whole) * share)])
        assert "damaged or incomplete" in message or "not an image" in message


@pytest.mark.skipif(not features.check("avif"), reason="this Pillow has no AVIF")
def test_a_damaged_avif_is_refused() -> None:
    data = bytearray(encoded(photo(), "AVIF"))
    pixels = data.index(b"mdat") + 4
    data[pixels : pixels + 40] = bytes(40)
    assert "damaged or incomplete (found Failed to decode" in refusal(open_rgb, bytes(data))


def test_a_truncated_photograph_is_refused_with_pillows_words() -> None:
    data = (SKLEARN / "flower.jpg").read_bytes()
    message = refusal(open_rgb, data[: len(data) // 2])
    assert message.startswith("data/a.png: the image is damaged or incomplete (found image file is truncated")


def test_a_flipped_bit_in_a_png_is_refused_even_where_pillow_decodes_it() -> None:
    whole = encoded(Image.open(SKLEARN / "china.jpg").resize((160, 120)))
    decoded = 0
    for position in range(len(whole) - 120, len(whole) - 20):  # the end of the pixels, before the last chunk
        data = bytearray(whole)
        data[position] ^= 1
        assert "damaged or incomplete" in refusal(open_rgb, bytes(data))
        try:
            Image.open(io.BytesIO(data)).load()
        except (OSError, SyntaxError):
            continue
        decoded += 1
    assert decoded > 0


def tiff_with(compression: int) -> bytes:
    """A TIFF that claims another compression than it has."""
    data = bytearray(encoded(photo(), "TIFF"))
    tag = data.index(b"\x03\x01\x03\x00\x01\x00\x00\x00") + 8
    data[tag : tag + 2] = compression.to_bytes(2, "little")
    return bytes(data)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "BMP", "GIF", "TIFF"])
def test_a_supported_format_whose_header_cannot_be_read_is_damaged(kind: str) -> None:
    data = encoded(photo(), kind)[:12] if kind != "TIFF" else tiff_with(9)
    assert f"(found a {kind} whose header cannot be read)" in refusal(open_rgb, data)


POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
SUPPORTED = "PNG, JPEG, WEBP, AVIF, TIFF, BMP, GIF, PPM"


@pytest.mark.parametrize(
    ("data", "found"),
    [
        (b"", "an empty file"),
        (b"\n <HTML><body>404", "an HTML page"),
        (POSTSCRIPT, "PostScript"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a pointer of Git LFS, which `git lfs pull` replaces"),
        (b"\0\0\0\x18ftypisom\0\0\0\0", "a video"),
        (b"root:x:0:0:root:/root:/bin/bash\n", "32 bytes of another kind"),
    ],
)
def test_what_is_no_image_is_refused_by_what_it_is_and_never_shown(data: bytes, found: str) -> None:
    message = refusal(open_rgb, data)
    expected = f"not an image in a supported format (expected {SUPPORTED}, found {found}"
    assert message.startswith(f"data/a.png: this is {expected}")
    assert "root" not in message


def test_a_folder_takes_files_of_every_supported_format() -> None:
    known, by_a_package = Image.registered_extensions(), {".heic", ".heif", ".hif", ".jxl"}
    assert {known[extension] for extension in IMAGE_EXTENSIONS if extension not in by_a_package} == {*FORMATS} - {"MPO"}
    assert by_a_package < {*IMAGE_EXTENSIONS}


HEIC = b"\0\0\0\x1cftypmif1\0\0\0\0mif1heicmiaf"
JPEG_XL = jpeg_xl.CODESTREAM + b"\x0f\x07" + bytes(20)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            HEIC,
            "HEIC images need the package pillow-heif\n  → pip install pillow-heif, or save it as PNG, JPEG or WebP",
        ),
        (JPEG_XL, "JPEG XL images need the package pillow-jxl-plugin\n  → pip install pillow-jxl-plugin, or save it"),
        (jpeg_xl.CONTAINER, "JPEG XL images need the package pillow-jxl-plugin\n  → pip install pillow-jxl-plugin"),
        (HEIC.replace(b"heic", b"avif"), "the image is damaged or incomplete (found a AVIF whose header"),
    ],
)
def test_a_format_whose_package_is_missing_is_named(data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "find_spec", lambda name: None)
    images._is_installed.cache_clear()
    for open_it in (open_rgb, open_mask, upright_size):
        assert refusal(open_it, data).startswith(f"data/a.png: {message}")
    images._is_installed.cache_clear()


def test_heic_as_it_was_encoded() -> None:
    pillow_heif = pytest.importorskip("pillow_heif")
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = pillow_heif.from_pillow(Image.fromarray(photo()))
    buffer = io.BytesIO()
    stored.save(buffer, quality=-1, chroma=444, matrix_coefficients=0, exif=exif.tobytes())
    data = buffer.getvalue()
    assert (rgb(data) == UPRIGHT[6](photo())).all()
    assert upright_size(data, "a.heic") == (32, 48)
    assert open_rgb(data, "a.heic").getexif().get(0x0112, 1) == 1
    for cut in (20, len(data) // 2):
        assert "damaged or incomplete" in refusal(open_rgb, data[:cut])
    stored.add_from_pillow(Image.fromarray(photo()))
    stored.save(buffer := io.BytesIO())
    assert "more than one image (expected one frame or page, found 2)" in refusal(open_rgb, buffer.getvalue())


def test_jpeg_xl_as_it_was_encoded(tmp_path: Path) -> None:
    pytest.importorskip("pillow_jxl")
    for size in ((48, 32), (1, 1), (33, 17), (190, 2), (3000, 20)):
        for container in (False, True):
            image = Image.fromarray(photo()).resize(size)
            data = encoded(image, "JXL", lossless=True, use_container=container, effort=1)
            assert upright_size(data, "a.jxl") == size
            assert (rgb(data) == np.asarray(image)).all()
    assert "damaged or incomplete" in refusal(open_rgb, data[: len(data) // 2])
    exif = Image.Exif()
    exif[0x0112] = 6
    turned = encoded(photo(), "JXL", lossless=True, exif=exif.tobytes())
    assert (rgb(turned) == photo()).all()
    (tmp_path / "a.jpg").write_bytes(encoded(photo(), "JPEG", exif=exif))
    jpeg = Image.open(tmp_path / "a.jpg")
    data = encoded(jpeg, "JXL", lossless_jpeg=True)
    assert upright_size(data, "a.jxl") == (32, 48)
    assert (rgb(data) == rgb((tmp_path / "a.jpg").read_bytes())).all()


def bits(*fields: tuple[int, int]) -> bytes:
    """A JPEG XL codestream that begins with these numbers, each with its count of bits."""
    value = shift = 0
    for number, count in fields:
        value, shift = value | number << shift, shift + count
    return jpeg_xl.CODESTREAM + value.to_bytes(40, "little")


PREVIEWS = {"by eight": [(1, 1), (0, 2), (1, 3)], "by one": [(0, 1), (1, 2), (7, 8), (0, 3), (0, 2), (7, 6)]}


@pytest.mark.parametrize("preview", PREVIEWS)
@pytest.mark.parametrize("animated", [False, True])
def test_the_header_of_a_jpeg_xl_file(preview: str, animated: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 pixels high, 3:2, turned, to be shown at 20×7, with a preview; the fields of ISO/IEC 18181-1."""
    size, intrinsic = [(1, 1), (7, 5), (4, 3)], [(0, 1), (0, 2), (6, 9), (0, 3), (0, 2), (19, 9)]
    data = bits(*size, (0, 1), (1, 1), (5, 3), (1, 1), *intrinsic, (1, 1), *PREVIEWS[preview], (animated, 1))
    assert jpeg_xl.read_header(data) == jpeg_xl.Header(96, 64, 6, animated)
    box = (8 + 4 + len(data)).to_bytes(4, "big") + b"jxlp" + bytes(4) + data
    assert jpeg_xl.read_header(jpeg_xl.CONTAINER + bytes([0, 0, 0, 12]) + b"ftypjxl " + box).animated == animated
    monkeypatch.setattr(images, "_is_installed", lambda kind: True)
    assert upright_size(data, "a.jxl") == (64, 96)


@pytest.mark.parametrize("data", [bits()[:4], jpeg_xl.CONTAINER + bytes(30), jpeg_xl.CONTAINER + b"\0\0\0\1jxlc"])
def test_a_jpeg_xl_without_its_header_is_damaged(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "_is_installed", lambda kind: True)
    assert "damaged or incomplete (found " in refusal(open_rgb, data)


def test_a_jpeg_xl_bomb_never_reaches_the_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which would decode it at once."""
    decoder = SimpleNamespace(JXLImageFile=lambda file: pytest.fail("decoded"))
    monkeypatch.setitem(sys.modules, "pillow_jxl", SimpleNamespace(JpegXLImagePlugin=decoder))
    monkeypatch.setitem(sys.modules, "pillow_jxl.JpegXLImagePlugin", decoder)
    monkeypatch.setattr(images, "_is_installed", lambda kind: True)
    data = bits((0, 1), (3, 2), (19_999, 30), (1, 3), (1, 1))
    for open_it in (open_rgb, upright_size):
        assert "too large to decode (found Image size (400000000 pixels) exceeds" in refusal(open_it, data)


def bmp_with(compression: int, content: bytes) -> bytes:
    data = bytearray(encoded(photo(), "BMP"))
    data[30:34] = compression.to_bytes(4, "little")
    return bytes(data[:54]) + content


HOSTILE = [
    POSTSCRIPT,
    b"\xc5\xd0\xd3\xc6" + (32).to_bytes(4, "little") + len(POSTSCRIPT).to_bytes(4, "little") + bytes(20) + POSTSCRIPT,
    b"%PDF-1.7\n",
    b"\xd7\xcd\xc6\x9a" + bytes(36),  # WMF
    *(tiff_with(kind) for kind in (2, 3, 4, 5, 6, 7, 8, 9, 32773, 32809, 34676, 34712, 34925, 50000, 50001)),
    bmp_with(4, encoded(photo(), "JPEG")),
    bmp_with(5, encoded(photo())),
    encoded(photo(), "JPEG") + POSTSCRIPT,
    encoded(photo(), "MPO", save_all=True, append_images=[Image.new("RGB", (8, 8))])[:-600] + POSTSCRIPT,
    encoded(photo(), "ICO"),
    encoded(photo(), "GIF")[:-9] + POSTSCRIPT,
    encoded(photo(), "WEBP")[:40] + POSTSCRIPT,
]
PROGRAMS = ("gs", "gswin64c", "djpeg", "convert", "magick", "xdg-open", "display")
OPENED_BY_A_PROCESS = """
import json, sys
from PIL import Image
Image.init()  # as other code in the process may have done: now Pillow knows every parser
from qwen_cache.errors import SourceError
from qwen_cache.sources.images import open_mask, open_rgb, upright_size
started, messages = [], []
events = ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.fork", "os.startfile")
sys.addaudithook(lambda event, arguments: started.append(event) if event in events else None)
for data in map(bytes.fromhex, json.load(sys.stdin)):
    for open_it in (open_rgb, open_mask, upright_size):
        try:
            open_it(data, "a.png")
            messages.append("")
        except SourceError as error:
            messages.append(str(error))
print(json.dumps([started, messages]))
"""


def test_no_image_starts_a_program(tmp_path: Path) -> None:
    """Least of all PostScript, which Pillow's own parser hands to Ghostscript."""
    for name in PROGRAMS:
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
        (tmp_path / name).chmod(0o755)
    process = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", OPENED_BY_A_PROCESS],
        input=json.dumps([data.hex() for data in HOSTILE]),
        env={**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        check=True,
        timeout=HANG,
    )
    started, messages = json.loads(process.stdout)
    assert (started, (tmp_path / "started").exists()) == ([], False)
    assert len(messages) == 3 * len(HOSTILE)
    assert all("found PostScript" in message for message in messages[:6])
    assert all("not an image in a supported format" in message for message in messages[6:12])


def png_of(width: int, height: int) -> bytes:
    """A PNG whose header claims a size; it has no pixels."""
    data = bytearray(encoded(Image.new("1", (1, 1))))
    data[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
    data[29:33] = zlib.crc32(data[12:29]).to_bytes(4, "big")
    return bytes(data)


def test_a_decompression_bomb_is_refused_whatever_pillows_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = "too large to decode (found Image size (400000000 pixels) exceeds limit of 178956970 pixels"
    assert limit in refusal(open_rgb, png_of(20000, 20000))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)  # as other code in the process may do
    assert limit in refusal(open_rgb, png_of(20000, 20000))


@pytest.mark.slow
def test_a_large_image_is_fine_and_does_not_warn() -> None:
    data = encoded(Image.new("1", (10000, 9000), 1))  # 90 MP: above Pillow's warning, below its error
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert open_mask(data, "a").size == (10000, 9000)


def test_threads_do_not_disturb_each_others_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(stream: io.BytesIO, opening: Callable[..., Image.Image] = Image.open, **options: Any) -> Image.Image:
        time.sleep(0.01)
        return opening(stream, **options)

    monkeypatch.setattr(Image, "open", slowly)
    before = list(warnings.filters)
    data = encoded(photo())
    with ThreadPoolExecutor(4) as pool:
        assert [image.size for image in pool.map(lambda _: open_rgb(data, "a"), range(8))] == [(48, 32)] * 8
    assert warnings.filters == before


@pytest.mark.parametrize(("size", "fine"), [((400, 2), True), ((2, 400), True), ((402, 2), False), ((2, 402), False)])
def test_sides_beyond_1_to_200_are_refused(size: tuple[int, int], fine: bool) -> None:
    data = encoded(Image.new("RGB", size))
    if fine:
        assert open_rgb(data, "a").size == size
    else:
        assert f"expected sides of at most 1:200, found {size[0]}×{size[1]}" in refusal(open_rgb, data)


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG", "TIFF"])
def test_several_frames_or_pages_are_refused(kind: str) -> None:
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "green", "blue")]
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:])
    assert "more than one image (expected one frame or page, found 3)" in refusal(open_rgb, data)


def test_the_photo_of_an_mpo_is_used() -> None:
    first, second = Image.fromarray(photo()), Image.new("RGB", (8, 8))
    data = encoded(first, "MPO", save_all=True, append_images=[second], quality=95)
    assert rgb(data).shape == photo().shape
    assert np.abs(rgb(data) - photo()).mean() < 6


# ---- with transparency -----------------------------------------------------------------------------------------------


def rgba(data: bytes) -> np.ndarray:
    image = open_rgba(data, "a.png")
    assert image.mode == "RGBA"
    return np.asarray(image).astype(int)


def opaque(colours: np.ndarray) -> np.ndarray:
    return np.dstack([colours, np.full(colours.shape[:2], 255)])


def test_rgba_keeps_every_channel() -> None:
    """Also the colours of pixels that nobody sees, as the stock pipeline shows them to its VAE."""
    assert (rgba(encoded(np.dstack([photo(), alpha()]))) == np.dstack([photo(), alpha()])).all()
    grey = photo()[..., 0]
    assert (rgba(encoded(np.dstack([grey, alpha()]))) == np.dstack([grey_as_rgb(grey), alpha()])).all()


def test_an_image_without_transparency_is_opaque() -> None:
    image, colours, _ = palette_image()
    grey = photo()[..., 1]
    for data, expected in (
        (encoded(photo()), photo()),
        (encoded(image), colours),
        (encoded(grey), grey_as_rgb(grey)),
        (encoded(Image.fromarray(grey > 100)), grey_as_rgb((grey > 100) * 255)),
        (encoded((grey / 255).astype(np.float32), "TIFF"), grey_as_rgb(grey)),
    ):
        assert (rgba(data) == opaque(expected)).all()
    ink = Image.fromarray(np.dstack([255 - photo(), np.zeros(photo().shape[:2], np.uint8)]), "CMYK")
    for each in (ink, Image.fromarray(photo()).convert("YCbCr"), Image.fromarray(photo()).convert("LAB")):
        data = encoded(each, "TIFF")
        assert (rgba(data) == opaque(rgb(data))).all()


def test_transparency_of_every_kind_is_kept() -> None:
    image, colours, indices = palette_image()
    one = np.where(indices == 5, 0, 255)
    assert (rgba(encoded(image, transparency=5)) == np.dstack([colours, one])).all()
    opacities = np.linspace(0, 255, 16).astype(np.uint8)
    data = encoded(image, transparency=opacities.tobytes())
    assert (rgba(data) == np.dstack([colours, opacities[indices]])).all()
    key = tuple(int(value) for value in photo()[3, 4])
    hidden = (photo() == key).all(axis=-1)
    assert (rgba(encoded(photo(), transparency=key))[..., 3] == np.where(hidden, 0, 255)).all()
    deep = np.arange(48 * 32, dtype=np.uint16).reshape(32, 48) * 42
    assert (rgba(encoded(deep, transparency=4200))[..., 3] == np.where(deep == 4200, 0, 255)).all()
    assert np.abs(rgba(encoded(deep, transparency=4200))[..., 1] - deep / 257).max() <= 0.5


def test_rgba_is_upright_and_refuses_what_rgb_refuses() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    stored = np.dstack([photo(), alpha()])
    assert (rgba(encoded(stored, exif=exif)) == np.rot90(stored, -1)).all()
    assert "damaged or incomplete" in refusal(open_rgba, encoded(stored)[:-200])


def with_palette_transparency() -> Image.Image:
    image, _, _ = palette_image()
    return Image.open(io.BytesIO(encoded(image, transparency=np.linspace(0, 255, 16).astype(np.uint8).tobytes())))


OF_EVERY_MODE = {
    "RGBA": lambda: Image.fromarray(np.dstack([photo(), alpha()])),
    "LA": lambda: Image.fromarray(np.dstack([photo()[..., 0], alpha()])),
    "P": with_palette_transparency,
    "RGB": lambda: Image.fromarray(photo()),
    "L": lambda: Image.fromarray(photo()[..., 0]),
}


class ShownError(Exception):
    """Ends the stock pipeline at its text encoder's processor."""


def shown_by_the_pipeline(image: Image.Image) -> Image.Image:
    """The view of a resized image that the stock pipeline gives its text encoder."""

    class Pipeline:
        _execution_device = None
        prompt_template_ti2i = "{}"

        def processor(self, images: list[Image.Image], **_: Any) -> None:
            raise ShownError(images)

    with pytest.raises(ShownError) as caught:
        QwenImage21Pipeline._get_qwen_prompt_embeds(Pipeline(), "a prompt", [image])
    (shown,) = caught.value.args[0]
    return shown


@pytest.mark.parametrize("mode", OF_EVERY_MODE)
@pytest.mark.parametrize("size", [(64, 32), (32, 96)])
def test_what_the_vae_and_the_text_encoder_see_is_that_of_the_stock_pipeline(mode: str, size: tuple[int, int]) -> None:
    """The VAE all four channels; the text encoder the same resized image, over white."""
    original = OF_EVERY_MODE[mode]()
    assert original.mode == mode
    options = {"transparency": original.info["transparency"]} if mode == "P" else {}
    ours = open_rgba(encoded(original, **options), "a.png")
    stock, theirs = VaeImageProcessor(vae_scale_factor=16, vae_latent_channels=64), original.convert("RGBA")
    width, height = size
    expected = stock.preprocess(theirs, width=width, height=height)
    assert expected.shape == (1, 4, height, width)
    assert (PROCESSOR.preprocess(ours, width=width, height=height) == expected).all()
    shown = over_white(ours.resize(size, Image.Resampling.LANCZOS))
    assert (shown.mode, shown.size) == ("RGB", size)
    assert shown.tobytes() == shown_by_the_pipeline(stock.resize(theirs, width=width, height=height)).tobytes()


def test_over_white_leaves_an_image_without_alpha_as_it_is() -> None:
    image = Image.fromarray(photo())
    assert over_white(image) is image
