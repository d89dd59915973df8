"""Broken twins: the project with one fault each, which the simulated device must report.

`BROKEN` names them; each is a context manager that patches the project and restores it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import fields, replace
from typing import Any
from unittest.mock import patch

import torch

from .build import extension

OFFLOADING = "qwen_cache/models/devices.py"
ACTIVATIONS = "qwen_train/model/saved_tensors.py"


@contextmanager
def waits_missing(place: str, *, default_stream: bool) -> Iterator[None]:
    """`wait_event` does nothing in the lines of `place`, for the default stream or for all others."""
    extension().break_waits(default_stream, place)
    try:
        yield
    finally:
        extension().break_waits(default_stream, "")


def batches_changed(change: Callable[[Any, Any], Any]) -> AbstractContextManager[Any]:
    """`Batch.to` returns what `change` makes of the batch on the CPU and the one on the device."""
    from qwen_train.data.batches import Batch

    to = Batch.to
    return patch.object(Batch, "to", lambda self, *arguments: change(self, to(self, *arguments)))


def reuse_memory(batch: Any, moved: Any) -> Any:
    for field in fields(batch):
        tensor = getattr(batch, field.name)
        if isinstance(tensor, torch.Tensor) and tensor.is_pinned():
            tensor.fill_(1)
    return moved


BROKEN: dict[str | None, Callable[[], AbstractContextManager[Any]]] = {
    None: nullcontext,
    "weights used before they arrive": lambda: waits_missing(OFFLOADING, default_stream=True),
    "weights replaced while they are used": lambda: waits_missing(OFFLOADING, default_stream=False),
    "activations used before they arrive, and freed before they left": lambda: waits_missing(
        ACTIVATIONS, default_stream=True
    ),
    "activations copied before they are computed": lambda: waits_missing(ACTIVATIONS, default_stream=False),
    "memory of a batch reused at once": lambda: batches_changed(reuse_memory),
    "noise left on the CPU": lambda: batches_changed(lambda batch, moved: replace(moved, noise=batch.noise)),
    "noise on the other device": lambda: batches_changed(
        lambda batch, moved: replace(moved, noise=batch.noise.to("simu:1"))
    ),
}
