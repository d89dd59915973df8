"""Images of rows for a browser: thumbnails, kept on disk up to a size; whole images; masks as colour and as numbers.

All are decoded by `sources/images.py`, so that what `build` refuses is refused here with the same words. What a browser
gets is encoded again: upright, 8 bits, without metadata. An image is named by where its bytes are and by the times and
sizes of those files, so one that has changed has another name.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock, get_ident

import numpy as np
from PIL import Image

from qwen_cache.errors import SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.sources.detect import Entry
from qwen_cache.sources.images import open_mask, open_rgb, upright_size
from qwen_cache.sources.rows import Readable
from qwen_cache.storage.files import replace, unless_in_use
from qwen_cache.storage.remote import Url
from qwen_cache.ui.decoding import decoded

THUMBNAIL, WHOLE = 288, 4096  # pixels of the longer side: sharp on a screen of twice the density; what phones show
LIMIT = 500_000_000  # bytes of thumbnails on disk: those of some 50,000 images
MASK_COLOUR = (255, 0, 80)
END_OF_JPEG = b"\xff\xd9"


def image_of(entry: Entry, role: str) -> Readable | None:
    """The image of a row by its role: `target`, `mask`, `control-0`, `control-1`, …"""
    if role in ("target", "mask"):
        image: Readable | None = getattr(entry, role)
        return image
    name, _, number = role.partition("-")
    is_there = name == "control" and number.isdecimal() and len(number) < 4 and int(number) < len(entry.controls)
    return entry.controls[int(number)] if is_there else None


def roles_of(entry: Entry) -> list[str]:
    """The roles of a row's images, in the order in which people read an edit."""
    controls = [f"control-{number}" for number in range(len(entry.controls))]
    return [*controls, *(role for role in ("target", "mask") if getattr(entry, role) is not None)]


def version_of(image: Readable) -> str:
    """A name of the bytes of an image that changes with its files; those on servers count as they were listed."""
    files: Sequence[Path | Url] = getattr(image, "files", ())
    states = [str(file) if isinstance(file, Url) else _state(file) for file in files]
    return content_hash(f"{image}\0{states}".encode("utf-8", "surrogateescape"))


def _state(file: Path) -> str:
    with suppress(OSError):
        state = os.stat(file)
        return f"{state.st_mtime_ns} {state.st_size} {state.st_ino}"
    return "missing"


def whole(image: Readable, *, is_mask: bool) -> bytes:
    """A JPEG of an image, or a PNG of a mask, of at most `WHOLE` pixels."""
    with decoded(image.read(), str(image), open_mask if is_mask else open_rgb) as pixels:
        pixels.thumbnail((WHOLE, WHOLE), Image.Resampling.LANCZOS)
    return _encoded(pixels, "PNG") if is_mask else _encoded(pixels, "JPEG", quality=92)


def overlay(image: Readable) -> bytes:
    """A PNG in one colour, which covers as much as the mask is white."""
    with decoded(image.read(), str(image), open_mask) as mask:
        mask.thumbnail((WHOLE // 2, WHOLE // 2), Image.Resampling.BOX)
    coloured = Image.new("RGB", mask.size, MASK_COLOUR)
    coloured.putalpha(mask)
    return _encoded(coloured, "PNG", compress_level=1)


def _encoded(image: Image.Image, form: str, **options: int) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, form, **options)
    return buffer.getvalue()


# ---- masks as numbers ------------------------------------------------------------------------------------------------


def mask_values(entry: Entry) -> tuple[tuple[int, int], bytes, str, bool]:
    """Size of the target, the mask's values there, its content hash ("" without a mask), and whether it was scaled."""
    if entry.target is None:
        raise SourceError("the row has no target to mask", where=entry.where, do="choose another row")
    size = upright_size(entry.target.read(), str(entry.target))
    if entry.mask is None:
        return size, bytes(size[0] * size[1]), "", False
    data = entry.mask.read()
    with decoded(data, str(entry.mask), open_mask) as mask:
        fitted = mask if mask.size == size else mask.resize(size, Image.Resampling.BILINEAR)
    return size, fitted.tobytes(), content_hash(data), fitted is not mask


def deflated(values: bytes) -> bytes:
    return zlib.compress(values, 1)


def mask_png(entry: Entry, body: bytes) -> bytes:
    """The PNG of a mask from its deflated values, one byte a pixel; SourceError unless there is one for each pixel."""
    if entry.target is None:
        raise SourceError("the row has no target to mask", where=entry.where, do="choose another row")
    size = upright_size(entry.target.read(), str(entry.target))
    expected = size[0] * size[1]
    try:
        values = zlib.decompressobj().decompress(body, expected + 1)
    except zlib.error as error:
        raise SourceError("the mask was damaged on its way", where=entry.where, found=error, do="save again") from None
    if len(values) != expected:
        what, do = "the mask does not have the target's size", "open the row again: its image has changed"
        raise SourceError(what, where=entry.where, expected=f"{expected} values", found=len(values), do=do)
    return _encoded(Image.fromarray(np.frombuffer(values, np.uint8).reshape(size[1], size[0])), "PNG")


# ---- thumbnails ------------------------------------------------------------------------------------------------------


class Thumbnails:
    """JPEGs of small images in a folder, the oldest removed first."""

    def __init__(self, folder: Path, limit: int = LIMIT) -> None:
        self.folder, self.limit = folder, limit
        self._lock = Lock()
        self._written = limit  # unknown: the first thumbnail counts them

    def get(self, image: Readable, *, is_mask: bool) -> bytes:
        """The thumbnail of an image; SourceError if it cannot be decoded."""
        name = content_hash(f"{version_of(image)} {is_mask} {THUMBNAIL}".encode())
        path = self.folder / name[:2] / f"{name}.jpg"
        with suppress(OSError):
            data = path.read_bytes()
            if data.endswith(END_OF_JPEG):  # else the power failed while it was written
                return data
        with decoded(image.read(), str(image), open_mask if is_mask else open_rgb) as pixels:
            pixels.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.BOX, reducing_gap=2)
        data = _encoded(pixels, "JPEG", quality=80)
        with suppress(OSError):  # a full disk only costs time
            self._keep(path, data)
        return data

    def _keep(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"{path.name}.{get_ident()}.tmp")
        temporary.write_bytes(data)
        replace(temporary, path)
        with self._lock:
            self._written += len(data)
            if self._written > self.limit // 10:
                self._written = 0
                self._evict()

    def _evict(self) -> None:
        """Remove the oldest until nine tenths of the limit are left."""
        found = [(path.stat(), path) for path in self.folder.glob("*/*")]
        total = sum(state.st_size for state, _ in found)
        for state, path in sorted(found, key=lambda each: each[0].st_mtime_ns):
            if total <= 0.9 * self.limit:
                break
            with unless_in_use():
                path.unlink(missing_ok=True)
                total -= state.st_size
