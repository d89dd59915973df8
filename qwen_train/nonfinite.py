"""Losses and gradients that are not finite: stop the run, or skip the batch or step.

Every process decides the same, and a skipped batch leaves no trace in gradients or optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwen_cache.errors import TrainError
from qwen_cache.terminal import console
from qwen_cache.text import escaped
from qwen_train.signals import any_process

MAX_CONSECUTIVE = 10
"""Skips in a row that stop the run: this many are no coincidence, so the weights are damaged by now."""


@dataclass
class NonFiniteGuard:
    """Applies `train.on_nan` to losses and gradient norms."""

    skip: bool
    consecutive: int = 0

    def skips(self, accelerator: Any, what: str, value: float, labels: Sequence[str]) -> bool:
        """Whether to skip `what`, computed on the samples `labels`, because it is not finite in some process.

        Raises TrainError if the run must stop.
        """
        mine = not math.isfinite(value)
        if mine and not self.skip:
            raise TrainError(
                f"{what} is not a number",
                found=f"{value} for the samples {', '.join(labels)}",
                do="lower optimizer.learning_rate, look at them with `qwen-cache inspect --sample NAME`, or skip such "
                "batches with train.on_nan=skip",
            )
        if not self.skip or not any_process(accelerator, mine):
            self.consecutive = 0
            return False
        self.consecutive += 1
        if mine:  # no other process knows these samples
            console(always=True).print(
                f"skipped: {what} is {value} for the samples {escaped(', '.join(labels))}", markup=False
            )
        if self.consecutive == MAX_CONSECUTIVE:
            raise TrainError(
                f"{what} is not a number, for the {MAX_CONSECUTIVE}th time in a row",
                found=f"last for the samples {', '.join(labels)}",
                do="lower optimizer.learning_rate, and continue with --resume from the newest checkpoint",
            )
        return True
