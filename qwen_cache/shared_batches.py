"""Batches of `DataLoader`'s workers in memory that is used again: new memory costs several times what a copy does.

A worker fills a block of shared memory and sends where it is; the block itself is sent once. The parent gets tensors
over the block, and the worker uses it again when the last of them ends, as its first byte says. So a batch that is
kept stays as it is, and costs a block. Blocks end with their worker.

Only what is in the block travels like this: a tensor that was added to the batch, or a copy of the batch in another
dictionary, is sent as torch sends it.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import get_worker_info

ALIGNMENT = 64  # bytes; of tensors in a block, and of the first byte, which is 1 while the parent uses the block
GROWTH = 1.25  # so that batches of growing sizes do not make a new block each

Place = tuple[int, torch.dtype, tuple[int, ...]]
"""Of a tensor in a block: its offset, dtype and shape."""


@dataclass(eq=False)
class Block:
    """Shared memory of a worker."""

    name: bytes
    memory: torch.Tensor


@dataclass
class Filling:
    """One batch in a block."""

    block: Block
    is_sent: bool = False

    def end(self) -> None:
        """No tensor of it is left in the worker: without it being sent, nobody else has them."""
        if not self.is_sent:
            self.block.memory[0] = 0

    def place(self, value: object) -> Place | None:
        """Where a tensor is in the block; None for anything that is not there, or not contiguous."""
        if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
            return None
        begin = self.block.memory.data_ptr()
        if value.untyped_storage().data_ptr() != begin:
            return None
        return value.data_ptr() - begin, value.dtype, tuple(value.shape)


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor in a block."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def used(memory: npt.NDArray[np.uint8], end: Callable[..., None], *arguments: object) -> torch.Tensor:
    """The bytes as a tensor; `end` is called when neither it nor a view of it is left."""
    array = memory[:]
    weakref.finalize(array, end, *arguments).atexit = False
    return torch.from_numpy(array)


def view(memory: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


# ---- in the worker ---------------------------------------------------------------------------------------------------

_known: list[Block] = []
"""The blocks of this worker that its parent has."""


class SharedBatch(dict[str, Any]):
    """A batch with tensors in a block, for a worker to send."""

    filling: Filling


def empty_batch(sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    """Uninitialised tensors of these shapes and dtypes, to which more may be added; of a worker in a block."""
    if get_worker_info() is None:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
    batch, begin = SharedBatch(), ALIGNMENT
    batch.filling = Filling(_unused(ALIGNMENT + sum(aligned(*size) for size in sizes.values())))
    memory = used(batch.filling.block.memory.numpy(), batch.filling.end)
    for name, (shape, dtype) in sizes.items():
        batch[name] = view(memory, begin, dtype, shape)
        begin += aligned(shape, dtype)
    return batch


def _unused(size: int) -> Block:
    """A block of at least `size` bytes, which is used from now on."""
    free = [block for block in _known if not block.memory[0]]
    block = next((block for block in free if len(block.memory) >= size), None)
    if block is None:
        storage = torch.UntypedStorage._new_shared(int(GROWTH * size), device="cpu")  # type: ignore[no-untyped-call]
        block = Block(os.urandom(16), torch.empty(0, dtype=torch.uint8).set_(storage))
        if free:  # too small: the parent exchanges it
            block.name = free[0].name
            _known.remove(free[0])
    block.memory[0] = 1
    return block


def _send(batch: SharedBatch) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """What is pickled in place of the batch. A copy that is sent too is sent as torch does it."""
    block, is_sent = batch.filling.block, batch.filling.is_sent
    places = {} if is_sent else {name: batch.filling.place(value) for name, value in batch.items()}
    in_block = {name: place for name, place in places.items() if place}
    if not in_block:
        return dict, (dict(batch),)
    memory = None if block in _known else block.memory
    if memory is not None:
        _known.append(block)
    batch.filling.is_sent = True
    others = {name: value for name, value in batch.items() if name not in in_block}
    return _receive, (block.name, os.getpid(), memory, list(batch), in_block, others)


ForkingPickler.register(SharedBatch, _send)

# ---- in its parent ---------------------------------------------------------------------------------------------------

_blocks: dict[bytes, npt.NDArray[np.uint8]] = {}
"""The blocks of the workers of this process, by name."""


def _receive(
    name: bytes,
    worker: int,
    memory: torch.Tensor | None,
    names: list[str],
    in_block: Mapping[str, Place],
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The batch, as an ordinary dictionary."""
    if memory is not None:
        for process in multiprocessing.active_children():
            if process.pid == worker and name not in _blocks:
                weakref.finalize(process, _blocks.pop, name, None).atexit = False
        _blocks[name] = memory.numpy()
    block = _blocks[name]
    data = used(block, block.__setitem__, 0, 0)
    return {name: view(data, *in_block[name]) if name in in_block else others[name] for name in names}
