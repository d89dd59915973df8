"""Block offloading: frozen weights stay in host memory, and are on the device only while their block computes.

The device has two buffers for a block, allocated once: while one block computes, the next is copied into the other one
on its own stream. The host's memory is pinned, so that copies are asynchronous. The trained LoRA is always on the
device. Results are the same. `check_settings` refuses settings that would keep the weights of more blocks, or that move
weights themselves.

diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference, so it is not used. It moves every
parameter of a block, the LoRA included. It prefetches in the order of the first forward pass, but gradient
checkpointing recomputes the blocks in reverse. It offloads after a forward that returns, but recomputation ends a
block's forward by an exception. And it offloads all blocks, not a chosen number.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from qwen_cache.errors import ConfigError
from qwen_cache.models.devices import device_module, has_streams
from qwen_cache.settings.load import Config

OFF = "set train.offload_blocks=0"
ON_DEVICE = 2
"""The number of offloaded blocks that the device has memory for."""
ALIGNMENT = 256  # bytes; as CUDA's allocator aligns tensors at least, so that kernels load them as vectors
BITSANDBYTES = ("nf4", "bitsandbytes")
ParameterSlot = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


def check_settings(config: Config, transformer: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings, or a config.json, that offloading cannot be combined with."""
    settings, layers, name = config.train, transformer["num_layers"], "train.offload_blocks"
    quantised = str(transformer.get("quantization_config", {}).get("quant_method", config.model.quantization))
    if settings.offload_blocks > layers:
        raise ConfigError(
            f"{name} exceeds the number of blocks", expected=f"at most {layers}", found=settings.offload_blocks
        )
    excluded = {
        "train.method=full": (settings.method == "full", "trained weights stay on the device"),
        "train.fsdp=true": (settings.fsdp, "FSDP2 moves the weights itself"),
        "train.compile=true": (settings.compile, "a compiled block holds on to its weights"),
        f"{quantised} weights": (quantised in BITSANDBYTES, "bitsandbytes weights cannot be moved"),
        f"train.gradient_checkpointing={str(settings.gradient_checkpointing).lower()}": (
            int(settings.gradient_checkpointing) != 1,
            "a block whose activations are kept keeps its weights on the device too",
        ),
    }
    for setting, (given, reason) in excluded.items():
        if given:
            raise ConfigError(f"{name} and {setting} exclude each other: {reason}", do=f"{OFF}, or change the other")


def offloaded_indices(layers: int, count: int) -> list[int]:
    """The offloaded blocks, spread evenly: while one is copied, those in between compute."""
    return [layers * i // count for i in range(count)]


def offload_blocks(transformer: Any, count: int, device: torch.device) -> Any:
    """Move the transformer to `device`, except for the frozen weights of `count` of its blocks.

    Outside of its block's pass an offloaded weight has no data: it is on "meta".
    """
    blocks = list(transformer.transformer_blocks)
    blocks = [blocks[i] for i in offloaded_indices(len(blocks), count)]
    slots = [list(frozen_slots(block)) for block in blocks]
    in_host_memory = []
    for block_slots in slots:  # block by block, so that the loaded weights are freed in between
        weights = [module._parameters[name].detach() for module, name in block_slots]  # type: ignore[union-attr]
        set_parameters(block_slots, [None] * len(weights))  # so that transformer.to does not move them
        in_host_memory.append(HostBlock(weights, pinned=has_streams(device)))
    transformer.to(device)
    offloaded = OffloadedBlocks(in_host_memory, device)
    for i, (block, block_slots) in enumerate(zip(blocks, slots, strict=True)):
        set_parameters(block_slots, in_host_memory[i].without_data)
        block.register_forward_pre_hook(functools.partial(_enter, offloaded, i, block_slots))
        block.register_forward_hook(functools.partial(_leave, offloaded, i, block_slots), always_call=True)
    return transformer


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

    def __init__(self, blocks: list[HostBlock], device: torch.device) -> None:
        self.blocks, self.device = blocks, device
        self.stream = device_module(device).Stream(device) if has_streams(device) else None
        size = max(block.size for block in blocks)
        self.buffers = [
            Buffer(torch.empty(size, dtype=torch.uint8, device=device)) for _ in range(min(ON_DEVICE, len(blocks)))
        ]
        self.last = -1

    def take(self, i: int) -> list[Tensor]:
        """The weights of block `i` on the device, valid until the block after the next; begins to copy the next one.

        A buffer is free by then: autograd finishes the backward pass of a block before it recomputes the one before.
        """
        buffer = self._buffer_of(i) or self._copy(i, self.buffers[0])
        if buffer.arrived is not None:
            self._computing().wait_event(buffer.arrived)
        following = self._after(i)
        if self._buffer_of(following) is None:
            self._copy(following, next(other for other in self.buffers if other is not buffer))
        self.last = i
        return self.blocks[i].weights_in(buffer.memory)

    def _after(self, i: int) -> int:
        """The block that runs after `i`: forwards, then backwards; at the turn, the same block again."""
        backwards = i < self.last or (i == self.last and i > 0)
        return max(i - 1, 0) if backwards else min(i + 1, len(self.blocks) - 1)

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
