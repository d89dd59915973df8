"""LoRA by peft on the transformer, and its file: `pytorch_lora_weights.safetensors` as diffusers' pipelines load it.

The file's metadata holds rank, alpha, rsLoRA and DoRA, which a loader would otherwise have to guess, and a checksum.
Refused: a file that was changed after it was written, and an adapter whose shape or scale differs from the settings.
Initialisations that change the base weights (PiSSA, OLoRA) are not offered: the file would fit no published base.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import peft
from peft.utils import get_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.fields import parse_json
from qwen_cache.settings.train import LoraConfig
from qwen_cache.storage.checksums import check_safetensors, sealed
from qwen_cache.storage.durable import write_durably
from qwen_train.lora.files import find_start
from qwen_train.model.sharding import assign

PREFIX = "transformer"
METADATA_KEY = "lora_adapter_metadata"  # where diffusers' loader reads rank and alpha
ORIGIN = "trained_on"
"""Key in that JSON text: the model, its pipeline and the identity of the cache."""
SCALE = ("r", "lora_alpha", "use_rslora", "use_dora")
"""The metadata without which an adapter's weights are meaningless."""


def add_lora(transformer: Any, config: LoraConfig) -> None:
    """Freeze the transformer and add the adapter, in float32; ConfigError for settings that do not fit."""
    if config.use_dora and getattr(transformer, "hf_quantizer", None) is not None:
        raise ConfigError("train.lora.use_dora is for unquantised weights", do="set train.lora.use_dora=false")
    transformer.requires_grad_(False)
    settings = peft.LoraConfig(
        r=config.rank,
        lora_alpha=config.lora_alpha if config.lora_alpha is not None else config.rank,
        lora_dropout=config.lora_dropout,
        target_modules=config.target_modules,
        init_lora_weights=config.init_lora_weights,
        use_rslora=config.use_rslora,
        use_dora=config.use_dora,
    )
    check_targets(transformer, config.target_modules)
    try:
        transformer.add_adapter(settings)
    except (ValueError, re.error) as error:
        raise ConfigError(
            f"train.lora.target_modules: {error}",
            do="name linear layers of the transformer, such as to_q",
        ) from None
    for parameter in transformer.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.float()


def check_targets(transformer: Any, targets: list[str] | str) -> None:
    """Raise ConfigError unless every listed name is a module; peft accepts a list if one of them is."""
    names = [name for name, _ in transformer.named_modules()]
    for target in targets if isinstance(targets, list) else []:
        if not any(name == target or name.endswith(f".{target}") for name in names):
            raise ConfigError(
                "train.lora.target_modules: no such module",
                found=target,
                do="name linear layers of the transformer, such as to_q",
            )


def has_lora(transformer: Any) -> bool:
    return bool(getattr(transformer, "peft_config", None))


def lora_weights(transformer: Any) -> dict[str, Tensor]:
    """The adapter's weights by name; not copies."""
    weights: dict[str, Tensor] = get_peft_model_state_dict(transformer)
    return weights


def write_lora(transformer: Any, weights: Mapping[str, Tensor], path: Path, origin: Mapping[str, Any]) -> None:
    """Write the adapter with these weights, atomically; `origin` names the model and cache it was trained on."""
    settings = transformer.peft_config["default"].to_dict()
    metadata = {f"{PREFIX}.{name}": sorted(v) if isinstance(v, set) else v for name, v in settings.items()}
    text = json.dumps(metadata | ({ORIGIN: dict(origin)} if origin else {}), indent=2, sort_keys=True)
    prefixed = {f"{PREFIX}.{name}": tensor for name, tensor in weights.items()}
    write_durably(path, *sealed(save(prefixed, {METADATA_KEY: text})))


def settings_in(header: Mapping[str, str] | None, key: str = METADATA_KEY) -> dict[str, Any]:
    """The JSON object under `key` in a file's metadata; {} without one, ValueError for something else."""
    settings = parse_json((header or {}).get(key, "{}"))
    if not isinstance(settings, dict):
        raise ValueError(f"{key} in its metadata is not a JSON object")  # noqa: TRY004 (callers name the file)
    return settings


def origin_of(path: Path) -> dict[str, Any]:
    """The model and cache recorded in a LoRA file; {} for a file of another trainer."""
    with safe_open(path, framework="np") as file, suppress(ValueError):
        origin = settings_in(file.metadata()).get(ORIGIN)
        return origin if isinstance(origin, dict) else {}
    return {}


def start_from(transformer: Any, path: Path) -> None:
    """Start from an existing LoRA, a file or its folder; ConfigError or TrainError if it cannot be read."""
    file = find_start(path)
    try:
        check_safetensors(file, TrainError)
        load_lora(transformer, file)
    except (OSError, ValueError, SafetensorError) as error:
        raise TrainError(f"the LoRA cannot be read: {error}", where=file) from None


def load_lora(transformer: Any, path: Path) -> None:
    """Load an adapter into the one added by `add_lora`; TrainError unless shape and scale are equal."""
    with safe_open(path, framework="pt") as file:
        metadata = settings_in(file.metadata())
        weights = {name.removeprefix(f"{PREFIX}."): file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    _check_scale(metadata, transformer.peft_config["default"].to_dict(), path)
    expected = lora_weights(transformer)
    wrong = sorted(
        name
        for name in expected.keys() | weights.keys()
        if name not in expected or name not in weights or expected[name].shape != weights[name].shape
    )
    if wrong:
        raise TrainError(
            "the LoRA has other target modules or another rank",
            where=path,
            found=wrong[0],
            do="use the same train.lora",
        )
    for name, target in expected.items():
        assign(target, weights[name])


def _check_scale(metadata: Mapping[str, Any], settings: Mapping[str, Any], path: Path) -> None:
    """Raise TrainError for another scale: unlike wrong shapes, it would silently train another function."""
    for name in SCALE:
        saved = metadata.get(f"{PREFIX}.{name}", settings[name])
        if saved != settings[name]:
            raise TrainError(
                f"the LoRA has another {name}",
                where=path,
                expected=settings[name],
                found=saved,
                do="use the train.lora that it was trained with",
            )
