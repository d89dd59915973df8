"""Waiting for what comes, however busy the machine is."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 1800.0
"""Seconds after which a test that waits for something has hung, however busy the machine is."""


def wait_until(condition: Callable[[], object]) -> None:
    """Wait, however busy the machine is, but not for ever."""
    last = time.monotonic() + HANG
    while not condition():
        assert time.monotonic() < last, "this never comes"
        time.sleep(0.02)
