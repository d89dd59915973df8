"""Running out of a device's memory while training, as an error that says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from qwen_cache.errors import DeviceError

EXPANDABLE = "expandable_segments:True"
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")  # the name since torch 2.9, and before


@contextmanager
def memory_for_training(device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a DeviceError with torch's own figures and the ways out."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        fragments = device.type == "cuda" and not any(
            EXPANDABLE in os.environ.get(name, "") for name in ALLOCATOR_SETTINGS
        )
        # batches of many sizes leave pieces of memory that no other size fits into
        setting = f"set {ALLOCATOR_SETTINGS[0]}={EXPANDABLE} if batches differ in size; " if fragments else ""
        raise DeviceError(
            f"{device} has too little memory for this run",
            found=" ".join(str(error).split()),
            do=f"{setting}`qwen-train plan --gpu-memory SIZE` names settings that fit; checkpoints are kept, continue "
            "with --resume",
        ) from None
