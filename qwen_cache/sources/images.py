"""Images: opening and checking them, JPEG XL, and thumbnails."""

from __future__ import annotations

import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from io import BytesIO
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError
from PIL.AvifImagePlugin import AvifImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.PpmImagePlugin import PpmImageFile
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLEFORMAT, TiffImageFile
from PIL.WebPImagePlugin import WebPImageFile

from qwen_cache.errors import SourceError, ThumbnailError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.sources.sizes import Size
from qwen_cache.storage.files import read_file

# ---- jpeg xl ---------------------------------------------------------------------------------------------------------
# The header of a JPEG XL file (ISO/IEC 18181-1, sections D.2 and D.3): size, orientation, whether it is an animation.
#
# The installed parser decodes every pixel when it opens a file, and hides that a file is an animation. So the header is
# read first. Raises ValueError for bytes without such a header.

CODESTREAM, CONTAINER = b"\xff\x0a", b"\0\0\0\x0cJXL \r\n\x87\n"
HEADER_BYTES = 64  # more than all fields up to the animation take together
RATIOS = {1: (1, 1), 2: (12, 10), 3: (4, 3), 4: (3, 2), 5: (16, 9), 6: (5, 4), 7: (2, 1)}
"""Width to height, where a header gives only the height."""


@dataclass(frozen=True)
class Header:
    width: int
    """Pixels of the stored image, before `orientation` is applied."""
    height: int
    orientation: int
    """The orientation of EXIF: from 5 on, width and height are swapped."""
    animated: bool


def read_header(data: bytes) -> Header:
    """The header of a codestream or of a container."""
    bits = _Bits(_codestream(data)[len(CODESTREAM) :][:HEADER_BYTES])
    width, height = _size(bits)
    if bits.take(1) or not bits.take(1):  # all values are the defaults, or there are no extra fields
        return Header(width, height, 1, False)
    orientation = 1 + bits.take(3)
    if bits.take(1):
        _size(bits)  # the intrinsic size, which viewers may scale to
    if bits.take(1):
        _preview_size(bits)
    return Header(width, height, orientation, bool(bits.take(1)))


class _Bits:
    """The bits of a header, the lowest of each byte first."""

    def __init__(self, data: bytes) -> None:
        self.value, self.left = int.from_bytes(data, "little"), 8 * len(data)

    def take(self, count: int) -> int:
        self.left -= count
        if self.left < 0:
            raise ValueError("the header of a JPEG XL file ends early")
        taken = self.value & ((1 << count) - 1)
        self.value >>= count
        return taken

    def one_of(self, *choices: tuple[int, int]) -> int:
        """A number by a selector of two bits: an offset, and the count of bits to add to it."""
        offset, count = choices[self.take(2)]
        return offset + self.take(count)


def _size(bits: _Bits) -> tuple[int, int]:
    by_eight = bits.take(1)

    def side() -> int:
        return 8 * (1 + bits.take(5)) if by_eight else bits.one_of((1, 9), (1, 13), (1, 18), (1, 30))

    height = side()
    return _width(bits, height) or side(), height


def _preview_size(bits: _Bits) -> None:
    by_eight = bits.take(1)

    def side() -> int:
        if by_eight:
            return 8 * bits.one_of((16, 0), (32, 0), (1, 5), (33, 9))
        return bits.one_of((1, 6), (65, 8), (321, 10), (1345, 12))

    _width(bits, side()) or side()


def _width(bits: _Bits, height: int) -> int:
    """The width, if it follows from the height; 0 if it is stored."""
    wide, high = RATIOS.get(bits.take(3), (0, 1))
    return height * wide // high


def _codestream(data: bytes) -> bytes:
    """The first bytes of the codestream."""
    streams = [data] if data.startswith(CODESTREAM) else _boxes(data) if data.startswith(CONTAINER) else []
    first = next(chain(streams), b"")
    if not first.startswith(CODESTREAM):
        raise ValueError("no JPEG XL codestream")
    return first


def _boxes(data: bytes) -> Iterator[bytes]:
    """The beginnings of the boxes of a container that hold a codestream, or a part of it."""
    begin = 0
    while begin + 8 <= len(data):
        size, kind, content = int.from_bytes(data[begin : begin + 4], "big"), data[begin + 4 : begin + 8], begin + 8
        if size == 1:
            size, content = int.from_bytes(data[content : content + 8], "big"), content + 8
        if kind in (b"jxlc", b"jxlp"):
            content += 4 if kind == b"jxlp" else 0  # the number of the part
            yield data[content : content + len(CODESTREAM) + HEADER_BYTES]
        if size < content - begin:  # 0 means up to the end of the file
            return
        begin += size


# ---- images ----------------------------------------------------------------------------------------------------------
# Decode an image to the pixels that people see: 8-bit RGB, RGBA, or 8-bit grey for a mask (white = edited).
#
# EXIF orientation is applied; transparency is kept in RGBA, and else composited over white (over black for a mask, so
# that transparent pixels are not edited); grey of more than 8 bits, and floats from 0 to 1, are scaled to 8 bits, never
# clipped; what a TIFF says of its samples (bits, sign, whether white is 0) is honoured; palette, CMYK, LAB, YCbCr and
# 1-bit images are converted. ICC profiles are ignored, as the stock pipelines use the pixel values as stored.
#
# Refuses, with a `SourceError` that names the file: files that are damaged or in none of `FORMATS`, more than
# `MAX_PIXELS`, sides beyond 1:200 (the limit of Qwen2.5-VL), several frames or pages (which one was meant? an MPO from
# a phone is a photo with extras and counts as one), values without an agreed white, and a mask whose white is 1 instead
# of 255. No other parser of Pillow sees the bytes, whatever this process has loaded: its parser of PostScript would run
# Ghostscript on them. HEIC and JPEG XL need a package of `PLUGINS`, whose parser sees only files of that kind. An error
# never shows the bytes of a file that is not an image; it may be any file of this machine.

PARSERS = (
    *(PngImageFile, JpegImageFile, WebPImageFile, AvifImageFile, TiffImageFile, BmpImageFile, GifImageFile),
    PpmImageFile,  # PGM too: masks and depth of 16 bits in research datasets
)
FORMATS = [str(parser.format) for parser in PARSERS]
"""The formats that are read, by Pillow's names: what cameras, browsers, editors and published datasets write. An MPO
counts as JPEG. Importing a parser registers it; were one missing, `Image.open` would load all that Pillow has."""
KNOWN = (
    (b"\x89PNG", "PNG"),
    (b"\xff\xd8\xff", "JPEG"),
    (b"GIF8", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%!PS", "PostScript"),
    (b"\xc5\xd0\xd3\xc6", "PostScript"),
    (b"%PDF", "PDF"),
    (b"8BPS", "Photoshop (PSD)"),
    (b"\0\0\0\x0cjP  ", "JPEG 2000"),
    (b"\xff\x4f\xff\x51", "JPEG 2000"),
    (CONTAINER, "JPEG XL"),
    (CODESTREAM, "JPEG XL"),
    (b"\0\0\1\0", "an icon (ICO)"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML, perhaps SVG"),
    (b"<!doctype html", "an HTML page"),
    (b"<html", "an HTML page"),
    (b"PK\3\4", "ZIP"),
    (b"\x1f\x8b", "gzip"),
    (b"version https://git-lfs", "a pointer of Git LFS, which `git lfs pull` replaces by the file"),
)
"""The first bytes of files that are found in place of images, in lower case where they are text; none is a secret."""
BRANDS = {
    **dict.fromkeys((b"avif", b"avis"), "AVIF"),
    **dict.fromkeys((b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1"), "HEIC"),
}
"""Brands of ISO media files, of which a file lists several: AVIF counts first; all others are videos."""
PLUGINS = {"HEIC": ("pillow_heif", "pillow-heif"), "JPEG XL": ("pillow_jxl", "pillow-jxl-plugin")}
"""Formats that are read where a package is installed: its module, and its name for pip."""
MAX_PIXELS = 178_956_970
"""The most pixels of an image: Pillow's default, stated here because any code in the process may change Pillow's. The
largest sensors have 151 million; decoding takes 0.7 GB per image and some seconds."""
MAX_ASPECT_RATIO = 200
"""Beyond this, Qwen2.5-VL's image processor raises."""

_DAMAGE = (OSError, SyntaxError, ValueError, EOFError, LookupError, TypeError, RuntimeError, struct.error, zlib.error)
"""Errors of Pillow's decoders on bytes that contradict their header."""

_ON_ITS_SIDE = (5, 6, 7, 8)
"""EXIF orientations that swap width and height."""
_EXIF_IN_PNG = (b"eXIf", b"Raw profile type", b"adobe.xmp")
"""Markers of a PNG that may have an orientation."""

_PNG_DEPTH = 24
"""The offset at which a PNG has its bits per channel."""
_UNSIGNED, _SIGNED = 1, 2
"""Values of TIFF's SampleFormat."""

_opening = threading.Lock()
"""Warning filters are global to the process: only one thread at a time may change them."""


def upright_size(data: bytes, where: str) -> tuple[int, int]:
    """Width and height as `open_rgb` gives them, from the header alone."""
    with _refusals(data, where):
        if _reads(data, "JPEG XL"):
            return _jpeg_xl_size(data)
        with _open(data) as image:
            if image.format in ("TIFF", "HEIC"):  # it is upright already
                return image.size
            # a PNG may have it after its pixels; Pillow decodes them to read it, so only ask if there is a marker
            end = data[data.rfind(b"IDAT") :] if image.format == "PNG" else b""
            all_ahead = image.format == "PNG" and not any(name in end for name in _EXIF_IN_PNG)
            exif = Image.Image.getexif(image) if all_ahead else image.getexif()
            turned = exif.get(ExifTags.Base.Orientation) in _ON_ITS_SIDE
            return (image.height, image.width) if turned else image.size


def has_other_profile(data: bytes, where: str) -> bool:
    """True if the image has a colour profile other than sRGB, by its header; profiles are ignored."""
    if _reads(data, "JPEG XL"):  # whose parser decodes all pixels first
        return False
    with _refusals(data, where), _open(data) as image:
        profile = image.info.get("icc_profile") or b""
    return bool(profile) and not any(name in profile for name in (b"sRGB", "sRGB".encode("utf-16-be")))


def open_rgb(data: bytes, where: str) -> Image.Image:
    """The image in `data` as RGB, upright, with white behind what is transparent; `where` names it in errors."""
    return opaque(_decode(data, where))


def opaque(image: Image.Image) -> Image.Image:
    """The image as RGB, with white behind what is transparent."""
    return _over("white", image).convert("RGB")


def open_rgba(data: bytes, where: str) -> Image.Image:
    """The image in `data` as RGBA, upright; alpha is 255 everywhere if the file has no transparency."""
    return _decode(data, where).convert("RGBA")


def over_white(image: Image.Image) -> Image.Image:
    """An RGBA image over white, as Qwen-Image-2.1's pipeline shows it to the text encoder; others as they are.

    The pipeline does so after it has resized all four channels, and so must the caller.
    """
    if image.mode != "RGBA":
        return image
    white = Image.new("RGB", image.size, "white")
    white.paste(image, mask=image.getchannel("A"))
    return white


def open_rgb_file(path: Path) -> Image.Image:
    """`open_rgb` for a file from the command line."""
    return open_rgb(_bytes_of(path), str(path))


def open_rgba_file(path: Path) -> Image.Image:
    """`open_rgba` for a file from the command line."""
    return open_rgba(_bytes_of(path), str(path))


def _bytes_of(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise SourceError(f"cannot be read: {error.strerror}", where=path) from None


def open_mask(data: bytes, where: str) -> Image.Image:
    """The mask in `data` as grey: white is edited, black is not, transparent counts as black, colours by luminance."""
    image = _over("black", _decode(data, where))
    mask = image if image.mode == "L" else image.convert("RGB").convert("L")
    if mask.getextrema() in {(0, 1), (1, 1)}:
        raise SourceError(
            "the mask is all but black",
            where=where,
            expected="0 (kept) to 255 (edited)",
            found="0 and 1 only",
            do="multiply its values by 255 and save it again",
        )
    return mask


def _decode(data: bytes, where: str) -> Image.Image:
    """Every pixel decoded, upright, at 8 bits per channel, in whatever mode the file has."""
    with _refusals(data, where):
        with _open(data) as image:
            image.verify()  # checks a PNG's checksums; the file must be opened again afterwards
        with _open(data) as image:
            _check_shape(image, where)
            samples = _samples_of(image, data, where)
            upright = ImageOps.exif_transpose(image)
    if upright.size != (header := upright_size(data, where)):
        raise SourceError(
            "the pixels of the file contradict its header",
            where=where,
            expected=f"{header[0]}×{header[1]}",
            found=f"{upright.width}×{upright.height}",
            do="save it again, as PNG",
        )
    return _eight_bits(upright, samples, where) if upright.mode == "F" or upright.mode.startswith("I") else upright


@contextmanager
def _refusals(data: bytes, where: str) -> Iterator[None]:
    """Raise Pillow's errors as SourceErrors that name the file."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise SourceError("the image is too large to decode", where=where, found=error, do="make it smaller") from error
    except UnidentifiedImageError as error:
        raise _unidentified(data, where) from error
    except _DAMAGE as error:
        raise SourceError(
            "the image is damaged or incomplete", where=where, found=error, do="copy or download the file again"
        ) from error


def _unidentified(data: bytes, where: str) -> SourceError:
    kind = _kind_of(data)
    if kind in PLUGINS and not _is_installed(kind):
        package = PLUGINS[kind][1]
        do = f"pip install {package}, or save it as PNG, JPEG or WebP"
        return SourceError(f"{kind} images need the package {package}", where=where, do=do)
    if kind in FORMATS:
        what = "the image is damaged or incomplete"
        if kind == "TIFF":  # Pillow says the same of a kind of TIFF that it does not know
            what += ", or a kind of TIFF that is not read"
        found, do = f"a {kind} whose header cannot be read", "copy or download it again, or save it again as PNG"
        return SourceError(what, where=where, found=found, do=do)
    return SourceError(
        "this is not an image in a supported format",
        where=where,
        expected=", ".join(FORMATS),
        found=kind,
        do="save it as PNG, JPEG or WebP, or fetch it again",
    )


def _kind_of(data: bytes) -> str:
    """The kind of a file, by its first bytes, without showing them."""
    start = data[:64].lstrip(b"\xef\xbb\xbf\r\n\t ").lower()
    if data[4:8] == b"ftyp":
        size = min(int.from_bytes(data[:4], "big"), 256)  # of the first box, which lists the brands
        brands = {BRANDS.get(data[begin : begin + 4]) for begin in range(8, max(size, 12), 4)}
        return next((kind for kind in ("AVIF", "HEIC") if kind in brands), "a video")
    if data.startswith(b"RIFF") and data[8:12] == b"WEBP":
        return "WEBP"
    found = (kind for magic, kind in KNOWN if data.startswith(magic) or start.startswith(magic))
    return next(found, f"{len(data)} bytes of another kind" if data else "an empty file")


def _open(data: bytes) -> Image.Image:
    """`Image.open` without its warning at half of the pixel limit; beyond the limit it raises."""
    if _reads(data, "JPEG XL"):
        return _open_jpeg_xl(data)
    if _reads(data, "HEIC"):
        from pillow_heif import HeifImageFile

        image: Image.Image = HeifImageFile(io.BytesIO(data))  # libheif has rotated it; its EXIF says so
        image.format = "HEIC"
    else:
        with _opening, warnings.catch_warnings():
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
    try:
        _check_pixels(image.width, image.height)
    except Image.DecompressionBombError:
        image.close()
        raise
    return image


def _reads(data: bytes, kind: str) -> bool:
    """True if the bytes are of this kind of `PLUGINS`, and its package is installed."""
    return _kind_of(data) == kind and _is_installed(kind)


@cache
def _is_installed(kind: str) -> bool:
    return find_spec(PLUGINS[kind][0]) is not None


def _open_jpeg_xl(data: bytes) -> Image.Image:
    _jpeg_xl_size(data)  # before the parser, which decodes at once
    from pillow_jxl.JpegXLImagePlugin import JXLImageFile

    image: Any = JXLImageFile(io.BytesIO(data))
    if image.jpeg:  # the JPEG that it was made from, not rotated
        image = ImageOps.exif_transpose(image)
    image.info.pop("exif", None)  # libjxl has rotated all others, and left the tag as it was
    image.format, image.is_animated = "JPEG XL", read_header(data).animated
    return cast(Image.Image, image)


def _jpeg_xl_size(data: bytes) -> tuple[int, int]:
    """Width and height as they are decoded, within the pixel limit."""
    header = read_header(data)
    _check_pixels(header.width, header.height)
    turned = header.orientation in _ON_ITS_SIDE
    return (header.height, header.width) if turned else (header.width, header.height)


def _check_pixels(width: int, height: int) -> None:
    if (pixels := width * height) > MAX_PIXELS:
        raise Image.DecompressionBombError(f"Image size ({pixels} pixels) exceeds limit of {MAX_PIXELS} pixels")


def _check_shape(image: Image.Image, where: str) -> None:
    width, height = image.size
    if max(width, height) > MAX_ASPECT_RATIO * min(width, height):
        raise SourceError(
            "the image is too elongated for Qwen2.5-VL",
            where=where,
            expected=f"sides of at most 1:{MAX_ASPECT_RATIO}",
            found=f"{width}×{height}",
            do="crop it",
        )
    frames = getattr(image, "n_frames", 1)
    animated = image.format == "JPEG XL" and getattr(image, "is_animated", False)
    if animated or (frames > 1 and image.format != "MPO"):
        raise SourceError(
            "the file holds more than one image",
            where=where,
            expected="one frame or page",
            found="an animation" if animated else frames,
            do="save the right one as a file of its own",
        )


class Samples(NamedTuple):
    """The meaning of the numbers of an image with one channel."""

    white: int
    """The number of the lightest grey; 0 is the darkest."""
    is_inverted: bool = False
    """True if 0 is white instead."""


def _samples_of(image: Image.Image, data: bytes, where: str) -> Samples:
    """The meaning of the numbers in an opened file; SourceError for one that Pillow would pass over.

    Pillow unpacks a TIFF of 12 bits to 0…4095 in the mode for 16 bits, and honours the photometric interpretation up
    to 8 bits. Of a PNG with 2 or 4 bits it expands the grey values, and not the one that is transparent.
    """
    samples = Samples(1 if image.mode == "F" else 65535)
    if image.format == "PNG" and isinstance(image.info.get("transparency"), int) and image.mode == "L":
        image.info["transparency"] *= 255 // ((1 << data[_PNG_DEPTH]) - 1)
    if not isinstance(image, TiffImageFile):
        return samples
    depth = max(image.tag_v2.get(BITSPERSAMPLE, (1,)))
    kinds = set(image.tag_v2.get(SAMPLEFORMAT, (_UNSIGNED,)))
    if kinds & {_SIGNED} and image.mode in ("L", "RGB"):
        what, do = "the numbers of the TIFF have a sign", "save it with numbers without a sign"
        raise SourceError(what, where=where, expected="SampleFormat 1", found=_SIGNED, do=do)
    if image.mode != "F" and depth <= 16:  # programs that write 32 bits keep numbers of 16 in them
        samples = Samples((1 << (depth - (_SIGNED in kinds))) - 1)
    return samples._replace(is_inverted=image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0)


def _eight_bits(image: Image.Image, samples: Samples, where: str) -> Image.Image:
    """Grey of more than 8 bits, or floats, to 8 bits by scaling: Pillow's own `convert` would clip beyond 255."""
    values, white = np.asarray(image), samples.white
    darkest, lightest = values.min(), values.max()
    if not 0 <= darkest <= lightest <= white:  # not true for NaN either
        raise SourceError(
            "the pixel values have no agreed white",
            where=where,
            expected=f"0 to {white}",
            found=f"{darkest:g} to {lightest:g}",
            do="save it with 8 or 16 bits per channel",
        )
    scaled = values * (255 / white)
    grey = Image.fromarray(np.rint(255 - scaled if samples.is_inverted else scaled).astype(np.uint8))
    if "transparency" in image.info:  # a PNG can declare one grey value transparent
        grey.putalpha(Image.fromarray(np.where(values == image.info["transparency"], 0, 255).astype(np.uint8)))
    return grey


def _over(background: str, image: Image.Image) -> Image.Image:
    """`image` without transparency: composited over `background` if it has any."""
    if not image.has_transparency_data:
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, background), image.convert("RGBA"))


# ---- thumbnails ------------------------------------------------------------------------------------------------------
# Small copies of a sample's images in the cache, for people to look at: the tensor `thumbnails`.
#
# All images are side by side, the target first: in one JPEG, or in one WebP with alpha if any of them is transparent.
# The size of each follows from its size in tokens, so the strip can be cut into images again. Refuses a strip that
# cannot be read or has another size, before its pixels are decoded. A sample with more images than fit into a strip has
# no thumbnails.

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
    """True if an RGBA image is transparent anywhere; others never are."""
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
