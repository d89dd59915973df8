"""Python's cyclic garbage collector, off while millions of objects are made that stay and form no cycles.

Searching them repeatedly takes a third of the time of reading a source. Not for decoding images, which may form cycles
that hold their pixels.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_gc() -> Iterator[None]:
    """Turn the collector off inside the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
