"""The exponential moving average (EMA) of the trained weights; it often generates better images than the last step.

    average <- decay · average + (1 - decay) · weights        after each optimizer step n = 1, 2, …

with decay = min(train.ema_decay, n / (9 + n)), and 0 for n = 1, so that the first steps are soon forgotten. These are
the values of diffusers' EMAModel, which is not used itself because its module imports the pipelines.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch


class Ema:
    """The average of `parameters`; `swapped` puts it in their place."""

    def __init__(self, parameters: Sequence[torch.nn.Parameter], decay: float) -> None:
        self.parameters, self.decay = parameters, decay
        self.average = [parameter.detach().clone() for parameter in parameters]
        self.updates = 0

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after an optimizer step to the average."""
        self.updates += 1
        decay = min(self.decay, self.updates / (9 + self.updates)) if self.updates > 1 else 0.0
        torch._foreach_lerp_(self.average, list(self.parameters), 1 - decay)  # in a few kernels for all

    @contextmanager
    def swapped(self) -> Iterator[None]:
        """Swap parameters and average while entered."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for average, parameter in zip(self.average, self.parameters, strict=True):
            kept = parameter.clone()
            parameter.copy_(average)
            average.copy_(kept)
