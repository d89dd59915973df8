"""The text encoder in a folder: Qwen2.5-VL or Qwen3-VL, by the `model_type` of its config.

Any other type, and a config that cannot be read, is a ModelError that names both.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from qwen_cache.errors import ModelError
from qwen_cache.models.folder import read_config
from qwen_cache.models.loading import explained, load_whole

MODELS: dict[str, type[Any]] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
"""Model classes by `model_type`."""
OLD_NAMES = {"rope_scaling", "rope_theta", "torch_dtype"}
"""What files of earlier versions of transformers call some values."""
NOT_VALUES = {"auto_map", "attn_implementation", "experts_implementation", "fusion_config", "transformers_weights"}
"""Settings by which transformers runs other code, or loads another file than `fingerprint` hashes."""


def text_encoder_type(name: str | PathLike[str]) -> str:
    """The `model_type` in the `config.json` of a folder; ModelError if it is not one of `MODELS`."""
    return known_type(read_config(Path(name) / "config.json").get("model_type"), name)


def known_type(model_type: object, where: object | None = None) -> str:
    """`model_type` if it is one of `MODELS`; else ModelError."""
    if not isinstance(model_type, str) or model_type not in MODELS:
        raise ModelError(
            "not a Qwen2.5-VL or Qwen3-VL",
            where=where,
            expected=f"model_type {' or '.join(MODELS)}",
            found=model_type or "no model_type",
        )
    return model_type


def model_config(settings: Mapping[str, Any], where: object) -> Any:
    """The configuration of a text encoder with this config.json, without what would run code or load other files.

    Attention is torch's: a config.json may name another one, such as a kernel that would be downloaded from the hub.
    """
    kind = MODELS[known_type(settings.get("model_type"), where)]
    with explained(kind.config_class.__name__, where):
        config = kind.config_class.from_dict(_values(settings, kind.config_class))
    config._attn_implementation = "sdpa"
    return config


def _values(settings: Mapping[str, Any], kind: Any) -> dict[str, Any]:
    """The settings that are values of this class or of those in it, and no names of code or files."""
    own = {field.name for field in dataclasses.fields(kind)} | OLD_NAMES
    kept = {
        name: value
        for name, value in settings.items()
        if name in own or not (name.startswith("_") or name in NOT_VALUES or hasattr(kind, name))
    }
    inside = {name: each for name, each in kind.sub_configs.items() if isinstance(kept.get(name), dict)}
    return kept | {name: _values(kept[name], each) for name, each in inside.items()}


def load_text_encoder(folder: Path, dtype: torch.dtype) -> Any:
    """The frozen text encoder in `folder`, with its `lm_head`; ModelError if it is another model or incomplete.

    The config is read here: for one that it cannot read, transformers would make random weights of the 7B model's size.
    """
    config = model_config(read_config(folder / "config.json"), folder)
    kind = MODELS[config.model_type]
    return load_whole(kind, folder, config=config, dtype=dtype, attn_implementation=config._attn_implementation)
