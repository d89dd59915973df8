"""Blocks whose frozen weights stay in the host's memory, and come to the device for as long as they compute.

While one computes, the next one's weights are on their way, on a stream of their own: two blocks are on the device at
most. What is trained, a LoRA, is there all the time. Results are the same. Refused, in `check_settings`:
what would keep the copies of all blocks alive, or moves weights itself.
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
"""Of the blocks that are offloaded, so many are on the device at once."""
BITSANDBYTES = ("nf4", "bitsandbytes")
Place = tuple[nn.Module, str]
"""A module, and the name of one of its own parameters."""


def check_settings(config: Config, transformer: Mapping[str, Any]) -> None:
    """Refuse what offloading cannot go together with, for a transformer of that config.json."""
    settings, layers, name = config.train, transformer["num_layers"], "train.offload_blocks"
    quantised = str(transformer.get("quantization_config", {}).get("quant_method", config.model.quantization))
    if settings.offload_blocks > layers:
        raise ConfigError(f"{name} is more than there are", expected=f"at most {layers}", found=settings.offload_blocks)
    excluded = {
        "train.method=full": (settings.method == "full", "trained weights stay on the device"),
        "train.fsdp=true": (settings.fsdp, "FSDP2 moves the weights itself"),
        "train.compile=true": (settings.compile, "a compiled block holds on to its weights"),
        f"{quantised} weights": (quantised in BITSANDBYTES, "bitsandbytes keeps its weights where they are"),
        f"train.gradient_checkpointing={str(settings.gradient_checkpointing).lower()}": (
            int(settings.gradient_checkpointing) != 1,
            "a block whose activations are kept keeps its weights on the device too",
        ),
    }
    for setting, (given, reason) in excluded.items():
        if given:
            raise ConfigError(f"{name} and {setting} exclude each other: {reason}", do=f"{OFF}, or change the other")


def chosen(layers: int, count: int) -> list[int]:
    """Which blocks: spread evenly, so that while one is copied, those between compute."""
    return [layers * i // count for i in range(count)]


def offload_blocks(transformer: Any, count: int, device: torch.device) -> Any:
    """The transformer on `device`, but for the frozen weights of `count` of its blocks."""
    blocks = list(transformer.transformer_blocks)
    blocks = [blocks[i] for i in chosen(len(blocks), count)]
    places = [list(frozen_places(block)) for block in blocks]
    weights = [[module._parameters[name] for module, name in of_block] for of_block in places]
    for module, name in (place for of_block in places for place in of_block):
        module._parameters[name] = None  # so that they are not moved
    transformer.to(device)
    host = Host([[in_host_memory(weight, device) for weight in of_block] for of_block in weights], device)
    for i, (block, of_block) in enumerate(zip(blocks, places, strict=True)):
        put(of_block, host.weights[i])
        block.register_forward_pre_hook(functools.partial(_enter, host, i, of_block))
        block.register_forward_hook(functools.partial(_leave, host, i, of_block), always_call=True)
    return transformer


def frozen_places(block: nn.Module) -> Iterator[Place]:
    for module in block.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and not parameter.requires_grad:
                yield module, name


def put(places: Sequence[Place], weights: Sequence[Any]) -> None:
    """In place of the parameters themselves, not of their data: autograd keeps what computed."""
    for (module, name), weight in zip(places, weights, strict=True):
        module._parameters[name] = weight


def in_host_memory(weight: Any, device: torch.device) -> nn.Parameter:
    """A frozen parameter that the device can fetch by itself: its memory is pinned for CUDA."""
    weight = weight.detach().cpu()
    if device.type == "cuda":
        weight = of_each(weight, Tensor.pin_memory)
    return nn.Parameter(weight, requires_grad=False)


def of_each(weight: Tensor, change: Any) -> Tensor:
    """What `change` makes of a tensor, or of those that a quantised one consists of."""
    if is_traceable_wrapper_subclass(weight):
        return transform_subclass(weight, lambda _, inner: of_each(inner, change))
    changed: Tensor = change(weight)
    return changed


def _enter(host: Host, i: int, places: Sequence[Place], *_: Any) -> None:
    put(places, host.take(i))


def _leave(host: Host, i: int, places: Sequence[Place], *_: Any) -> None:
    """After an error too: recomputation ends by one when it has what it needs."""
    put(places, host.weights[i])


class Host:
    """The weights of blocks in the host's memory, and copies on the device of the one or two that are next."""

    def __init__(self, weights: list[list[nn.Parameter]], device: torch.device) -> None:
        self.weights, self.device = weights, device
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self.coming: dict[int, tuple[list[Tensor], Any]] = {}
        self.last = -1

    def take(self, i: int) -> list[Tensor]:
        """The copies of block `i`, for its caller to keep; those of the next begin to come."""
        copies, arrived = self.coming.get(i) or self._copy(i)
        if arrived is not None:
            torch.cuda.current_stream(self.device).wait_event(arrived)
            for copy in copies:
                of_each(copy, self._used_here)
        following = self._after(i)
        self.coming = {j: coming for j, coming in self.coming.items() if j == following}
        if following not in self.coming:
            self.coming[following] = (copies, None) if following == i else self._copy(following)
        self.last = i
        return copies

    def _after(self, i: int) -> int:
        """Forwards through the blocks, then backwards; where it turns, the same again."""
        backwards = i < self.last or (i == self.last and i > 0)
        return max(i - 1, 0) if backwards else min(i + 1, len(self.weights) - 1)

    def _copy(self, i: int) -> tuple[list[Tensor], Any]:
        """Copies under way, and the event by which they have arrived."""
        if self.stream is None:
            return [of_each(weight, self._to_device) for weight in self.weights[i]], None
        with torch.cuda.stream(self.stream):
            copies = [of_each(weight, self._to_device) for weight in self.weights[i]]
            return copies, self.stream.record_event()

    def _to_device(self, tensor: Tensor) -> Tensor:
        return tensor.detach().to(self.device, non_blocking=True, copy=True)

    def _used_here(self, tensor: Tensor) -> Tensor:
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return tensor
