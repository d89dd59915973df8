"""What a run is told or runs into on its way: signals, and losses that are not numbers.

SIGINT and SIGTERM, as job queues and people send them: finish the step, save, then stop. SIGUSR1: save, and go on.
Windows has no SIGUSR1, and SIGBREAK (Ctrl-Break) where others have SIGTERM, which no process there can send. A
loss that is NaN or infinite names its samples; it stops the run, or its batch is left out of the step, in every
process at once and without a trace in gradients or optimizer.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any, Self

import torch

STOPPING = ("SIGINT", "SIGTERM", "SIGBREAK")


class Signals:
    """While entered, the first SIGINT or SIGTERM sets `stop`, and a second one stops at once; SIGUSR1 asks to save.

    A signal that the system does not have is left out.
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
        """Whether to save, said once for each time that it was asked since."""
        asked, self._save = self._save, False
        return asked

    def _on_stop(self, number: int, frame: FrameType | None) -> None:
        if self.stop:
            raise KeyboardInterrupt
        self.stop = True

    def _on_save(self, number: int, frame: FrameType | None) -> None:
        self._save = True


def any_process(accelerator: Any, flag: bool) -> bool:
    """Whether `flag` is set in any process: what one of them does, all have to do at the same place."""
    if accelerator.num_processes == 1:
        return flag
    return bool(accelerator.reduce(torch.tensor(float(flag), device=accelerator.device)) > 0)
