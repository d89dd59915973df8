"""The header of a JPEG XL file (ISO/IEC 18181-1, sections D.2 and D.3): size, orientation, whether it is an animation.

The installed parser decodes every pixel when it opens a file, and hides that a file is an animation. So the header is
read first. Raises ValueError for bytes without such a header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain

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
    """As in EXIF: from 5 on, width and height are swapped."""
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
