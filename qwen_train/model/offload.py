"""Block offloading: frozen weights stay in host memory, and are on the device only while their block computes.

While one block computes, the weights of the next are copied on their own stream: at most two blocks are on the device.
The trained LoRA always is. Results are the same. `check_settings` refuses settings that would keep the copies of all
blocks alive, or that move weights themselves.

diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference, so it is not used. It moves every
parameter of a block, the LoRA included. It prefetches in the order of the first forward pass, but gradient
checkpointing recomputes the blocks in reverse. It offloads after a forward that returns, but recomputation ends a
block's forward by an exception. And it offloads all blocks, not a chosen number.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass, transform_subclass

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config

OFF = "set train.offload_blocks=0"
ON_DEVICE = 2
"""The largest number of offloaded blocks on the device at once."""
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
    """Move the transformer to `device`, except for the frozen weights of `count` of its blocks."""
    blocks = list(transformer.transformer_blocks)
    blocks = [blocks[i] for i in offloaded_indices(len(blocks), count)]
    slots = [list(frozen_slots(block)) for block in blocks]
    weights = [[module._parameters[name] for module, name in block_slots] for block_slots in slots]
    for module, name in (slot for block_slots in slots for slot in block_slots):
        module._parameters[name] = None  # so that transformer.to does not move it
    transformer.to(device)
    host = HostWeights([[to_host(weight, device) for weight in block_weights] for block_weights in weights], device)
    for i, (block, block_slots) in enumerate(zip(blocks, slots, strict=True)):
        set_parameters(block_slots, host.weights[i])
        block.register_forward_pre_hook(functools.partial(_enter, host, i, block_slots))
        block.register_forward_hook(functools.partial(_leave, host, i, block_slots), always_call=True)
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


def to_host(weight: Any, device: torch.device) -> nn.Parameter:
    """A frozen parameter in host memory, pinned for CUDA so that the device copies it asynchronously."""
    weight = weight.detach().cpu()
    if device.type == "cuda":
        weight = map_tensors(weight, Tensor.pin_memory)
    return nn.Parameter(weight, requires_grad=False)


def map_tensors(weight: Tensor, change: Any) -> Tensor:
    """Apply `change` to a tensor, or to each of the tensors inside a quantised one."""
    if is_traceable_wrapper_subclass(weight):
        return transform_subclass(weight, lambda _, inner: map_tensors(inner, change))
    changed: Tensor = change(weight)
    return changed


def _enter(host: HostWeights, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    set_parameters(slots, host.take(i))


def _leave(host: HostWeights, i: int, slots: Sequence[ParameterSlot], *_: Any) -> None:
    """Called after an exception too: recomputation raises one as soon as it has what it needs."""
    set_parameters(slots, host.weights[i])


class HostWeights:
    """The weights of all offloaded blocks in host memory, and device copies of the next one or two."""

    def __init__(self, weights: list[list[nn.Parameter]], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.in_transit: dict[int, tuple[list[Tensor], Any]] = {}
        self.last = -1

    def take(self, i: int) -> list[Tensor]:
        """The device copies of block `i`, owned by the caller; begins to copy the next block."""
        copies, arrived = self.in_transit.get(i) or self._copy(i)
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            for copy in copies:
                map_tensors(copy, self._used_here)
        following = self._after(i)
        self.in_transit = {j: copy for j, copy in self.in_transit.items() if j == following}
        if following not in self.in_transit:
            self.in_transit[following] = (copies, None) if following == i else self._copy(following)
        self.last = i
        return copies

    def _after(self, i: int) -> int:
        """The block that runs after `i`: forwards, then backwards; at the turn, the same block again."""
        backwards = i < self.last or (i == self.last and i > 0)
        return max(i - 1, 0) if backwards else min(i + 1, len(self.weights) - 1)

    def _copy(self, i: int) -> tuple[list[Tensor], Any]:
        """Copies in transit, and the event that marks their arrival."""
        if self.stream is None:
            return [map_tensors(weight, self._to_device) for weight in self.weights[i]], None
        with torch.cuda.stream(self.stream):
            copies = [map_tensors(weight, self._to_device) for weight in self.weights[i]]
            return copies, self.stream.record_event()

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, non_blocking=True, copy=True)

    def _used_here(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor
