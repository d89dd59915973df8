"""Blocks of frozen weights in host memory, which are on the device only while they compute.

The device has two buffers for a block, allocated once: while one block computes, the next is copied into the other one
on its own stream. The host's memory is pinned, so that copies are asynchronous. Weights that are trained stay on the
device. Results are the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from qwen_cache.models.devices import device_module, has_streams

ON_DEVICE = 2
"""The number of offloaded blocks that the device has memory for."""
ALIGNMENT = 256  # bytes; as CUDA's allocator aligns tensors at least, so that kernels load them as vectors
ParameterSlot = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""
Order = Callable[[int, int, int], int]
"""The block that runs after block `i`, given the one before (-1: none yet) and the number of blocks."""


def there_and_back(i: int, last: int, count: int) -> int:
    """Forwards, then backwards, as in training; at the turn, the same block again."""
    backwards = i < last or (i == last and i > 0)
    return max(i - 1, 0) if backwards else min(i + 1, count - 1)


def in_a_circle(i: int, last: int, count: int) -> int:
    """Forwards, again and again: after the last block the first one is fetched for the next pass."""
    return (i + 1) % count


class WaitingBlocks:
    """Blocks whose frozen weights are in host memory; `attach` connects them to a device.

    Between the two, the modules have no such parameters, so `model.to(device)` moves everything else.
    """

    def __init__(self, blocks: Iterable[nn.Module], device: torch.device) -> None:
        self.device = device
        self.blocks: list[nn.Module] = []
        self.slots: list[list[ParameterSlot]] = []
        self.in_host_memory: list[HostBlock] = []
        for block in blocks:  # one by one, so that the loaded weights are freed in between
            slots = list(frozen_slots(block))
            weights = [module._parameters[name].detach() for module, name in slots]  # type: ignore[union-attr]
            set_parameters(slots, [None] * len(weights))
            self.blocks.append(block)
            self.slots.append(slots)
            self.in_host_memory.append(HostBlock(weights, pinned=has_streams(device)))

    def attach(self, order: Order) -> None:
        """Let each block take its weights when it computes. Outside of its pass a weight has no data: on "meta"."""
        offloaded = OffloadedBlocks(self.in_host_memory, self.device, order)
        for i, (block, slots) in enumerate(zip(self.blocks, self.slots, strict=True)):
            set_parameters(slots, self.in_host_memory[i].without_data)
            block.register_forward_pre_hook(functools.partial(_enter, offloaded, i, slots))
            block.register_forward_hook(functools.partial(_leave, offloaded, i, slots), always_call=True)


def frozen_slots(block: nn.Module) -> Iterator[ParameterSlot]:
    """The slots of all frozen parameters in a block."""
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                yield module, name


def set_parameters(slots: Sequence[ParameterSlot], weights: Sequence[Any]) -> None:
    """Replace the parameters themselves, not their data: autograd keeps those of the forward pass."""
    for (module, name), weight in zip(slots, weights, strict=True):
        module._parameters[name] = weight


def _enter(offloaded: OffloadedBlocks, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    set_parameters(slots, offloaded.take(i))


def _leave(offloaded: OffloadedBlocks, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    """Called after an exception too: recomputation raises one as soon as it has what it needs."""
    set_parameters(slots, offloaded.blocks[i].without_data)


# ---- a block in host memory ------------------------------------------------------------------------------------------


class HostBlock:
    """The frozen weights of a block as consecutive bytes in host memory, cut into pieces."""

    def __init__(self, weights: Sequence[Tensor], *, pinned: bool) -> None:
        self.without_data = [map_tensors(weight, _on_meta) for weight in weights]
        """The weights on "meta": their shapes and dtypes."""
        flat = torch.empty(self.size, dtype=torch.uint8)
        for copy, weight in zip(self.weights_in(flat), weights, strict=True):
            for to, tensor in zip(inner_tensors(copy), inner_tensors(weight), strict=True):
                to.copy_(tensor)
        sizes = piece_sizes(self.size)
        self.pieces = [torch.empty(size, dtype=torch.uint8, pin_memory=pinned) for size in sizes]
        begins = itertools.accumulate(sizes, initial=0)
        for piece, begin in zip(self.pieces, begins, strict=False):
            values = flat[begin : begin + len(piece)]
            piece[: len(values)] = values

    @cached_property
    def begins(self) -> list[int]:
        """Where each tensor begins; after the last one, the end."""
        begins = [0]
        for tensor in (tensor for weight in self.without_data for tensor in inner_tensors(weight)):
            end = begins[-1] + tensor.numel() * tensor.element_size()
            begins.append(-(-end // ALIGNMENT) * ALIGNMENT)
        return begins

    @property
    def size(self) -> int:
        """Bytes."""
        return self.begins[-1]

    def weights_in(self, memory: Tensor) -> list[Tensor]:
        """The weights as views of `memory`, whose first bytes are those of this block."""
        begins = iter(self.begins)

        def view(tensor: Tensor) -> Tensor:
            begin = next(begins)
            data = memory[begin : begin + tensor.numel() * tensor.element_size()]
            return data.view(tensor.dtype).view(tensor.shape)

        return [map_tensors(weight, view) for weight in self.without_data]

    def copy_to(self, memory: Tensor) -> None:
        """Begin to copy the bytes into the first ones of `memory`."""
        begin = 0
        for piece in self.pieces:
            end = min(begin + len(piece), self.size)
            memory[begin:end].copy_(piece[: end - begin], non_blocking=True)
            begin = end


def piece_sizes(size: int) -> list[int]:
    """Powers of two, the largest first, that sum to `size` bytes or at most a 64th more.

    torch rounds every pinned allocation up to a power of two, and all blocks in one piece would be up to twice as
    large (ATen/core/CachingHostAllocator.h).
    """
    unit = 1 << max(0, size.bit_length() - 7)
    units = -(-size // unit)
    return [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]


def inner_tensors(weight: Tensor) -> list[Tensor]:
    """The plain tensors of which a quantised weight is made; of another weight, itself."""
    tensors: list[Tensor] = []
    map_tensors(weight, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def map_tensors(weight: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Apply `change` to a tensor, or to each of the tensors inside a quantised one."""
    if is_traceable_wrapper_subclass(weight):
        return transform_subclass(weight, lambda _, inner: map_tensors(inner, change))
    return change(weight)


def _on_meta(tensor: Tensor) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")


# ---- two blocks on the device ----------------------------------------------------------------------------------------


@dataclass
class Buffer:
    """Memory of the device for one block, and the block whose bytes are in it, or on their way."""

    memory: Tensor
    block: int = -1
    arrived: Any = None
    """The event of the copy; None without streams."""


class OffloadedBlocks:
    """The offloaded blocks: all of them in host memory, and two, which alternate, on the device."""

    def __init__(self, blocks: list[HostBlock], device: torch.device, order: Order) -> None:
        self.blocks, self.device, self.order = blocks, device, order
        self.stream = device_module(device).Stream(device) if has_streams(device) else None
        size = max(block.size for block in blocks)
        self.buffers = [
            Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(ON_DEVICE, len(blocks)))
        ]
        if self.stream is not None:
            for buffer in self.buffers:  # the last copy may be under way when nobody needs the blocks any more
                buffer.memory.record_stream(self.stream)
        self.last = -1

    def take(self, i: int) -> list[Tensor]:
        """The weights of block `i` on the device, valid until the block after the next; begins to copy the next one.

        A buffer is free by then, in training too: autograd finishes the backward pass of a block before it recomputes
        the one before.
        """
        buffer = self._buffer_of(i) or self._copy(i, self.buffers[0])
        if buffer.arrived is not None:
            self._computing().wait_event(buffer.arrived)
        following = self.order(i, self.last, len(self.blocks))
        if self._buffer_of(following) is None:
            self._copy(following, next(other for other in self.buffers if other is not buffer))
        self.last = i
        return self.blocks[i].weights_in(buffer.memory)

    def _buffer_of(self, i: int) -> Buffer | None:
        return next((buffer for buffer in self.buffers if buffer.block == i), None)

    def _copy(self, i: int, buffer: Buffer) -> Buffer:
        """Begin to copy block `i`, once the device has computed everything that it was given so far."""
        buffer.block = i
        if self.stream is None:
            self.blocks[i].copy_to(buffer.memory)
            return buffer
        self.stream.wait_stream(self._computing())
        with device_module(self.device).stream(self.stream):
            self.blocks[i].copy_to(buffer.memory)
            buffer.arrived = self.stream.record_event()
        return buffer

    def _computing(self) -> Any:
        """The stream of the pass that calls."""
        return device_module(self.device).current_stream(self.device)
