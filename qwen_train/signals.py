"""Signals: SIGINT and SIGTERM finish the step, save and stop; SIGUSR1 saves, and training continues.

On Windows, SIGBREAK (Ctrl-Break) takes the place of SIGTERM, which no process can send there; SIGUSR1 does not exist.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch

STOPPING = ("SIGINT", "SIGTERM", "SIGBREAK")


class Signals:
    """While entered, the first SIGINT or SIGTERM sets `stop`, a second raises KeyboardInterrupt, SIGUSR1 asks to save.

    Signals that the system lacks are ignored.
    """

    def __init__(self) -> None:
        self.stop = False
        self._save = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        for name, handler in (dict.fromkeys(STOPPING, self._on_stop) | {"SIGUSR1": self._on_save}).items():
            if (number := getattr(signal, name, None)) is not None:
                self._before[number] = signal.signal(number, handler)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take_save(self) -> bool:
        """Whether SIGUSR1 has arrived since the last call."""
        requested, self._save = self._save, False
        return requested

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True


def any_process(accelerator: Any, flag: bool) -> bool:
    """Whether `flag` is set in any process, so that all processes act on it at the same point."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device)) > 0)
