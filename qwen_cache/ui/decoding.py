"""Images of the opened folders, decoded by many threads at once in limited memory."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from threading import Condition, Lock

from PIL import Image

from qwen_cache.sources.images import upright_size

M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""
PIXELS = 100_000_000
"""Of the images that are decoded at once. Each pixel takes about 8 bytes until it is scaled down, so that is 0.8 GB."""


def return_large_blocks() -> None:
    """Let this process return freed blocks of a megabyte and more to the system, where malloc is glibc's.

    Otherwise each of the threads that answer requests, up to 40, keeps what its largest image took.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


class Room:
    """A number of pixels that users share, first come, first served; what is larger than all of it gets all of it."""

    def __init__(self, pixels: int) -> None:
        self.pixels, self.used = pixels, 0
        self._turn, self._changed = Lock(), Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait for that many, and use them within the block."""
        pixels = min(pixels, self.pixels)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self.used + pixels <= self.pixels)
            self.used += pixels
        try:
            yield
        finally:
            with self._changed:
                self.used -= pixels
                self._changed.notify()


ROOM = Room(PIXELS)


@contextmanager
def decoded(data: bytes, where: str, decode: Callable[[bytes, str], Image.Image]) -> Iterator[Image.Image]:
    """An image, by a function of `sources/images.py`, in the block; SourceError if it cannot be decoded."""
    width, height = upright_size(data, where)
    with ROOM.taken(width * height):
        yield decode(data, where)
