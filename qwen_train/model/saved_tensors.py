"""Tensors that autograd saves of a block's pass, in host memory until the backward pass needs them.

- The weights of an offloaded block (`train.offload_blocks`) whose activations are kept, or that is compiled: autograd
  would save them on the device, in a buffer that the next block overwrites. It saves where they are in their block.
- The inputs of a recomputed block (`train.offload_activations`): all that is saved of it. They are copied to the host
  while the block computes, and back while the block after it is in its backward pass. The device holds those of two
  blocks. Those of the last block stay, since the backward pass begins with them.

Copies are on a stream of their own, from and to pinned memory, which is kept for the next pass. No memory of the device
is freed before the pass waits for its copy, so nothing has to be recorded on a stream. Results are the same.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from qwen_cache.models.devices import (
    ALIGNMENT,
    HostMemory,
    OffloadedBlocks,
    device_module,
    has_streams,
    new_stream,
    on_stream,
)


def saving(transformer: Any, block: nn.Module, arguments: Sequence[Any]) -> AbstractContextManager[Any]:
    """The context of a block's pass with these arguments, in which autograd saves weights and inputs as said above."""
    weights, inputs, entered = transformer.offloaded_blocks, transformer.offloaded_inputs, None
    if not torch.is_grad_enabled() or (weights is None and inputs is None):
        return nullcontext()
    if inputs is not None and block in transformer.recomputed_blocks:
        blocks = [each for each in transformer.transformer_blocks if each in transformer.recomputed_blocks]
        rows = arguments[: transformer.ROW_ARGUMENTS]
        entered = inputs.enter(rows, is_first=block is blocks[0], is_last=block is blocks[-1])
    return saved_tensors_hooks(functools.partial(_pack, entered, weights), _unpack)


def _pack(inputs: BlockInputs | None, weights: OffloadedBlocks | None, tensor: Tensor) -> Any:
    saved: Any = inputs.saved(tensor) if inputs else None
    if saved is None and weights:
        saved = weights.saved(tensor)
    return tensor if saved is None else saved


def _unpack(saved: Any) -> Tensor:
    tensor: Tensor = saved if isinstance(saved, Tensor) else saved.unpack()
    return tensor


# ---- inputs ----------------------------------------------------------------------------------------------------------


class OffloadedInputs:
    """The inputs of the recomputed blocks, and the host memory for them."""

    def __init__(self) -> None:
        self.memory: list[tuple[HostMemory, weakref.ref[BlockInputs]]] = []
        """Each with its last user: it is free when that is deleted."""
        self.stream: Any = None
        self.copied: BlockInputs | None = None
        """The block whose copy, in either direction, may be under way."""

    def enter(self, rows: Sequence[Tensor], *, is_first: bool, is_last: bool) -> BlockInputs:
        """The inputs of the block that begins to compute, on their way to the host unless it is the last one; those of
        the block before leave the device."""
        device = rows[0].device
        if self.stream is None and has_streams(device):
            self.stream = new_stream(device)
        before, self.copied = self.copied, None
        if before:
            before.leave()
        before = None if is_first else before  # whose memory is free otherwise
        inputs = BlockInputs(self, rows, before)
        if not is_last:
            inputs.copy_to_host()
            self.copied = inputs
        return inputs

    def host_memory(self, inputs: BlockInputs, size: int) -> HostMemory:
        """Memory of that size for `inputs`: the largest that are free, or new ones if these are too few."""
        free = [i for i, (_, user) in enumerate(self.memory) if user() is None]
        largest = max(free, key=lambda i: self.memory[i][0].size, default=None)
        memory = None if largest is None else self.memory.pop(largest)[0]
        if memory is not None and memory.size < size:
            memory = None  # freed before another is allocated
        memory = memory or HostMemory(size, pinned=self.stream is not None)
        self.memory.append((memory, weakref.ref(inputs)))
        return memory


class BlockInputs:
    """The inputs of one block's pass: on the device, in host memory, or under way."""

    def __init__(self, offloaded: OffloadedInputs, rows: Sequence[Tensor], before: BlockInputs | None) -> None:
        self.offloaded, self.device = offloaded, rows[0].device
        self.rows: list[Tensor | None] = [row.detach() for row in rows]
        self.layouts = [(row.shape, row.dtype) for row in rows]
        self.begins = [0]
        for row in rows:
            end = self.begins[-1] + row.numel() * row.element_size()
            self.begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        self.before = weakref.ref(before) if before else None
        self.host: HostMemory | None = None
        """None on "meta", where there is no data."""
        self.saved_rows: set[int] = set()
        self.copied: Any = None
        """The event of the last copy; None without streams."""

    def saved(self, tensor: Tensor) -> SavedInput | None:
        """The substitute that is saved for the backward pass; None for a tensor that is no input."""
        for i, row in enumerate(self.rows):
            if row is not None and _is_same(tensor, row):
                self.saved_rows.add(i)
                return SavedInput(self, i, tensor.shape)
        return None

    def copy_to_host(self) -> None:
        """Begin to copy the inputs to the host. They stay on the device until `leave`."""
        if self.device.type != "meta":
            self.host = self.offloaded.host_memory(self, self.begins[-1])
            self._copy(range(len(self.rows)), self.host.copy_from)

    def leave(self) -> None:
        """Free the device's memory, after the copy under way."""
        self._wait()
        self.rows = [None] * len(self.rows)

    def take(self, i: int) -> Tensor:
        """Input `i` on the device, which is then the caller's; begins to bring those of the block before."""
        if self.rows[i] is None:
            self._bring([i])
        self._wait()
        row, self.rows[i] = self.rows[i], None
        before = self.before() if self.before else None
        if before:
            before._bring(each for each in before.saved_rows if before.rows[each] is None)
            self.before, self.offloaded.copied = None, before
        assert row is not None
        return row

    def _bring(self, wanted: Iterable[int]) -> None:
        """Begin to copy inputs to the device."""
        wanted = list(wanted)
        for i in wanted:
            shape, dtype = self.layouts[i]
            self.rows[i] = torch.empty(shape, dtype=dtype, device=self.device)
        if self.host is not None:
            self._copy(wanted, self.host.copy_to)

    def _copy(self, wanted: Iterable[int], copy: Callable[[Tensor, int], None]) -> None:
        """Copy inputs by `copy`, after everything that the device was given so far."""
        stream = self.offloaded.stream
        if stream is not None:
            stream.wait_stream(device_module(self.device).current_stream(self.device))
        with on_stream(stream), torch.no_grad():
            for i in wanted:
                row = self.rows[i]
                assert row is not None
                copy(row.reshape(-1).view(torch.uint8), self.begins[i])
            self.copied = stream.record_event() if stream is not None else None

    def _wait(self) -> None:
        """Let the pass wait for the copy under way."""
        if self.copied is not None:
            device_module(self.device).current_stream(self.device).wait_event(self.copied)


def _is_same(tensor: Tensor, row: Tensor) -> bool:
    """True for a tensor with the data of a row, in the same order."""
    return (
        tensor.untyped_storage()._cdata == row.untyped_storage()._cdata
        and (tensor.storage_offset(), tensor.numel(), tensor.dtype) == (row.storage_offset(), row.numel(), row.dtype)
        and tensor.is_contiguous()
        and row.is_contiguous()
    )


@dataclass(frozen=True)
class SavedInput:
    """An input in place of the tensor that autograd saves."""

    inputs: BlockInputs
    i: int
    shape: torch.Size

    def unpack(self) -> Tensor:
        return self.inputs.take(self.i).view(self.shape)
