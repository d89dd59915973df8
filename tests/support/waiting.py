"""Waiting on a busy machine."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 1800.0
"""Seconds after which a waiting test counts as hung, even on a busy machine."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait until the condition holds, at most `HANG` seconds."""
    last = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < last, "the condition never holds"
        time.sleep(0.02)
