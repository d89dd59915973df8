"""Block offloading in training (`qwen_cache/models/devices.py`): frozen weights wait in host memory.

The trained LoRA is always on the device. `check_settings` refuses settings that would keep the weights of more blocks
on the device, or that move weights themselves.

diffusers' group offloading (hooks/group_offloading.py, 0.42) is made for inference, so it is not used. It moves every
parameter of a block, the LoRA included. It prefetches in the order of the first forward pass, but gradient
checkpointing recomputes the blocks in reverse. It offloads after a forward that returns, but recomputation ends a
block's forward by an exception. And it offloads all blocks, not a chosen number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from qwen_cache.errors import ConfigError
from qwen_cache.models.devices import WaitingBlocks, there_and_back
from qwen_cache.settings.load import Config

OFF = "set train.offload_blocks=0"
BITSANDBYTES = ("nf4", "bitsandbytes")


def check_settings(config: Config, transformer: Mapping[str, Any]) -> None:
    """Raise ConfigError for settings, or a config.json, that offloading cannot be combined with."""
    settings, layers, name = config.train, transformer["num_layers"], "train.offload_blocks"
    quantised = str((transformer.get("quantization_config") or {}).get("quant_method", config.model.quantization))
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
    waiting = WaitingBlocks([blocks[i] for i in offloaded_indices(len(blocks), count)], device)
    transformer.to(device)
    waiting.attach(there_and_back)
    return transformer
