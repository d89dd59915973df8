"""Losses and gradients that are not finite: stop the run, or skip the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qwen_cache.console import console
from qwen_cache.errors import TrainError
from qwen_train.signals import any_process

MOST_IN_A_ROW = 10
"""Left out one after the other: chance does not do that, so what is wrong is the model by now."""


@dataclass
class LeftOut:
    """What `train.on_nan` says about values that are not numbers."""

    skip: bool
    in_a_row: int = 0

    def decide(self, accelerator: Any, what: str, value: float, keys: Sequence[str]) -> bool:
        """Whether `what`, of the samples `keys`, is to be left out here because it is no number in some process.

        TrainError when the run should stop.
        """
        mine = not math.isfinite(value)
        if mine and not self.skip:
            raise TrainError(
                f"{what} is not a number",
                found=f"{value} for the samples {', '.join(keys)}",
                do="lower optimizer.learning_rate, look at these samples with `qwen-cache inspect`, or leave them out "
                "with train.on_nan=skip",
            )
        if not self.skip or not any_process(accelerator, mine):
            self.in_a_row = 0
            return False
        self.in_a_row += 1
        if mine:
            console().print(f"left out: {what} is {value} for the samples {', '.join(keys)}")
        if self.in_a_row == MOST_IN_A_ROW:
            raise TrainError(
                f"{what} is not a number, for the {MOST_IN_A_ROW}th time in a row",
                found=f"last for the samples {', '.join(keys)}",
                do="lower optimizer.learning_rate, and go on with --resume from the newest checkpoint",
            )
        return True
