"""LoRA by peft on the transformer, and its file: `pytorch_lora_weights.safetensors` as diffusers' pipelines load it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import peft
import torch
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import save

from qwen_cache.config import LoraConfig
from qwen_cache.format.directory import write_durably
from qwen_cache.format.errors import ConfigError, TrainError

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
PREFIX = "transformer"
METADATA_KEY = "lora_adapter_metadata"  # where diffusers' loader looks for rank and alpha


def add_lora(transformer: Any, config: LoraConfig) -> list[torch.nn.Parameter]:
    """Freeze the transformer and add the adapter; its parameters, in float32."""
    transformer.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.lora_alpha if config.lora_alpha is not None else config.rank,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        init_lora_weights="gaussian",  # as diffusers' own trainers
    )
    check_targets(transformer, config.target_modules)
    try:
        transformer.add_adapter(settings)
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"train.lora.target_modules: {error}",
            do="name linear layers of the transformer, such as to_q or img_mlp.net.2",
        ) from None
    parameters = [p for p in transformer.parameters() if p.requires_grad]
    for parameter in parameters:
        parameter.data = parameter.data.float()
    return parameters


def check_targets(transformer: Any, targets: list[str] | str) -> None:
    """Every listed name is a module; peft is content when one of them is."""
    names = [name for name, _ in transformer.named_modules()]
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                "train.lora.target_modules: no such module",
                found=target,
                do="name linear layers of the transformer, such as to_q or img_mlp.net.2",
            )


def save_lora(transformer: Any, path: Path) -> None:
    """Write the adapter, atomically."""
    weights = {
        f"{PREFIX}.{name}": tensor.contiguous() for name, tensor in get_peft_model_state_dict(transformer).items()
    }
    settings = transformer.peft_config["default"].to_dict()
    metadata = {f"{PREFIX}.{name}": sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
    text = json.dumps(metadata, indent=2, sort_keys=True)
    write_durably(path, save(weights, {METADATA_KEY: text}))


def load_lora(transformer: Any, path: Path) -> None:
    """Read an adapter of the same shape into the one that `add_lora` made."""
    with safe_open(path, framework="pt") as file:
        weights = {name.removeprefix(f"{PREFIX}."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    expected = get_peft_model_state_dict(transformer)
    wrong = sorted(
        name
        for name in expected.keys() | weights.keys()
        if name not in expected or name not in weights or expected[name].shape != weights[name].shape
    )
    if wrong:
        raise TrainError(
            "the LoRA is not of these target modules and this rank",
            where=path,
            found=wrong[0],
            do="use the same train.lora",
        )
    set_peft_model_state_dict(transformer, weights)
