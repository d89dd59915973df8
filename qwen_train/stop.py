"""SIGINT and SIGTERM, as job queues and people send them: finish the step, save, then stop."""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self


class StopSignals:
    """While entered, the first signal sets `requested`; a second one stops at once."""

    def __init__(self) -> None:
        self.requested = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._before[number] = signal.signal(number, self._request)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
