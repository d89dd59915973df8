"""An image turned by quarters, without losing a pixel: the bytes of a new file of the same kind.

A JPEG and a WebP keep their pixels as they are; their EXIF says how they are turned, which every part of this program
follows (`sources/images.py`). The pixels of a PNG are turned themselves, since few programs look for EXIF in one. The
result is decoded and compared. Refuses, with a SourceError, what that would change, and other kinds of files.
"""

from __future__ import annotations

import io
import struct

from PIL import ExifTags, Image, ImageChops, ImageOps
from PIL.PngImagePlugin import PngImageFile, PngInfo
from PIL.WebPImagePlugin import WebPImageFile

from qwen_cache.errors import SourceError
from qwen_cache.sources.images import open_rgba

CLOCKWISE = {1: 6, 6: 3, 3: 8, 8: 1, 2: 7, 7: 4, 4: 5, 5: 2}
"""The orientation of EXIF after a quarter turn clockwise."""
TRANSPOSED = {1: Image.Transpose.ROTATE_270, 2: Image.Transpose.ROTATE_180, 3: Image.Transpose.ROTATE_90}
"""Pillow's name, which counts anticlockwise, of a number of quarter turns clockwise."""
ORIENTATION, SHORT = int(ExifTags.Base.Orientation), 3
EXIF = b"Exif\0\0"
MOST_APP1 = 0xFFFF - 2  # bytes of a segment of a JPEG
START, APP0, APP1, SCAN = 0xD8, 0xE0, 0xE1, 0xDA
"""Markers of a JPEG."""
XMP = "XML:com.adobe.xmp"


def rotated(data: bytes, where: str, turns: int) -> bytes:
    """The image in `data`, turned by 1 to 3 quarters clockwise."""
    before = open_rgba(data, where)
    try:
        if data.startswith(b"\xff\xd8"):
            new = _jpeg(data, turns, where)
        elif data.startswith(b"RIFF") and data[8:12] == b"WEBP":
            new = _webp(data, turns)
        elif data.startswith(b"\x89PNG"):
            new = _png(data, turns, where)
        else:
            do = "save it as PNG first"
            raise SourceError("a file of this kind is not turned here", where=where, expected="JPEG, PNG, WebP", do=do)
    except (struct.error, IndexError) as error:
        do = "save it again, as PNG"
        raise SourceError("what the file says of itself is damaged", where=where, found=error, do=do) from error
    after, expected = open_rgba(new, where), before.transpose(TRANSPOSED[turns])
    if after.size != expected.size or ImageChops.difference(after, expected).getbbox(alpha_only=False):
        do = "turn it in an image editor"
        raise SourceError("this image cannot be turned without changing it", where=where, do=do)
    return new


def _png(data: bytes, turns: int, where: str) -> bytes:
    depth, colour = data[24], data[25]
    if depth == 16 and colour:
        do = "turn it in an image editor"
        raise SourceError("colours of 16 bits would be cut to 8", where=where, expected="8 bits", found=depth, do=do)
    with PngImageFile(io.BytesIO(data)) as image:
        image.load()
        texts = PngInfo()
        for name, text in image.text.items():
            if name != XMP:  # which may have an orientation too
                texts.add_text(name, text)
        upright = ImageOps.exif_transpose(image)
        exif = upright.getexif()
        out = io.BytesIO()
        upright.transpose(TRANSPOSED[turns]).save(out, "PNG", pnginfo=texts, **({"exif": exif} if exif else {}))
    return out.getvalue()


def _jpeg(data: bytes, turns: int, where: str) -> bytes:
    """The file with another orientation in the first segment of EXIF, or in a new one."""
    place = position = 2
    while data[position] == 0xFF and data[position + 1] != SCAN:
        marker, (size,) = data[position + 1], struct.unpack(">H", data[position + 2 : position + 4])
        content, end = data[position + 4 : position + 2 + size], position + 2 + size
        if marker == APP1 and content.startswith(EXIF):
            return data[:position] + _segment(_turned(content[len(EXIF) :], turns), where) + data[end:]
        if marker == APP0:
            place = end
        position = end
    return data[:place] + _segment(_turned(b"", turns), where) + data[place:]


def _segment(exif: bytes, where: str) -> bytes:
    content = EXIF + exif
    if len(content) > MOST_APP1:
        do = "remove what a program has added to it"
        raise SourceError("the EXIF of this image is full", where=where, found=f"{len(content)} bytes", do=do)
    return bytes([0xFF, APP1]) + struct.pack(">H", len(content) + 2) + content


def _webp(data: bytes, turns: int) -> bytes:
    """The file with another orientation in its chunk of EXIF, or in a new one."""
    chunks, position = list[tuple[bytes, bytes]](), 12
    while position + 8 <= len(data):
        name, (size,) = data[position : position + 4], struct.unpack("<I", data[position + 4 : position + 8])
        chunks.append((name, data[position + 8 : position + 8 + size]))
        position += 8 + size + size % 2
    names = [name for name, _ in chunks]
    if b"VP8X" not in names:  # which says that there is EXIF, and how large the image is
        has_alpha = names[0] == b"VP8L" and chunks[0][1][4] & 0x10
        with WebPImageFile(io.BytesIO(data)) as image:
            sides = b"".join(struct.pack("<I", side - 1)[:3] for side in image.size)
        chunks.insert(0, (b"VP8X", bytes([0x10 if has_alpha else 0, 0, 0, 0]) + sides))
        names.insert(0, b"VP8X")
    flags = chunks[0][1]
    chunks[0] = b"VP8X", bytes([flags[0] | 0x08]) + flags[1:]
    if b"EXIF" in names:
        at = names.index(b"EXIF")
        old = chunks[at][1]
        prefix = EXIF if old.startswith(EXIF) else b""
        chunks[at] = b"EXIF", prefix + _turned(old[len(prefix) :], turns)
    else:
        at = max(i for i, name in enumerate(names) if name in (b"VP8 ", b"VP8L"))
        chunks.insert(at + 1, (b"EXIF", _turned(b"", turns)))
    parts = (name + struct.pack("<I", len(each)) + each + b"\0" * (len(each) % 2) for name, each in chunks)
    body = b"WEBP" + b"".join(parts)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def _turned(exif: bytes, turns: int) -> bytes:
    """EXIF, a TIFF without images, with another orientation; every other byte stays where it is."""
    exif = exif or b"MM\0*" + struct.pack(">IHI", 8, 0, 0)
    order = "<" if exif.startswith(b"II") else ">"
    (begin,) = struct.unpack(f"{order}I", exif[4:8])
    (count,) = struct.unpack(f"{order}H", exif[begin : begin + 2])
    places = [begin + 2 + 12 * i for i in range(count)]
    fields = {struct.unpack(f"{order}H", exif[place : place + 2])[0]: place for place in places}
    old = 1
    if (place := fields.get(ORIENTATION)) is not None:
        (old,) = struct.unpack(f"{order}H", exif[place + 8 : place + 10])
    new = old if old in CLOCKWISE else 1
    for _ in range(turns):
        new = CLOCKWISE[new]
    field = struct.pack(f"{order}HHIHH", ORIENTATION, SHORT, 1, new, 0)
    if place is not None:
        return exif[:place] + field + exif[place + 12 :]
    # The list of fields again, with this one, behind everything else.
    exif += b"\0" * (len(exif) % 2)
    listed = sorted([*(exif[each : each + 12] for each in places), field], key=lambda each: _tag(each, order))
    end = places[-1] + 12 if places else begin + 2
    more = struct.pack(f"{order}H", len(listed)) + b"".join(listed) + exif[end : end + 4]
    return exif[:4] + struct.pack(f"{order}I", len(exif)) + exif[8:] + more


def _tag(field: bytes, order: str) -> int:
    return int(struct.unpack(f"{order}H", field[:2])[0])
