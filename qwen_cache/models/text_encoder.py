"""The text encoder in a folder: Qwen2.5-VL or Qwen3-VL, by the `model_type` of its config.

Any other type, and a config that cannot be read, is a ModelError that names both.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig, Qwen2_5_VLForConditionalGeneration, Qwen3VLForConditionalGeneration

from qwen_cache.errors import ModelError, first_line
from qwen_cache.models.folder import read_config
from qwen_cache.models.loading import load_whole

MODELS: dict[str, type[Any]] = {
    "qwen2_5_vl": Qwen2_5_VLForConditionalGeneration,
    "qwen3_vl": Qwen3VLForConditionalGeneration,
}
"""Model classes by `model_type`."""


def text_encoder_type(name: str | PathLike[str]) -> str:
    """The `model_type` in the `config.json` of a folder or repository; ModelError if it is not one of `MODELS`."""
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
    except OSError as error:
        what = f"the config of the text encoder cannot be read: {first_line(error)}"
        raise ModelError(what, where=name, do="name a folder or repository of Qwen2.5-VL or Qwen3-VL") from None
    return known_type(config.get("model_type"), name)


def known_type(model_type: object, where: object | None = None) -> str:
    """`model_type` if it is one of `MODELS`; else ModelError."""
    if model_type not in MODELS:
        raise ModelError(
            "not a Qwen2.5-VL or Qwen3-VL",
            where=where,
            expected=f"model_type {' or '.join(MODELS)}",
            found=model_type or "no model_type",
        )
    return str(model_type)


def load_text_encoder(folder: Path, dtype: torch.dtype) -> Any:
    """The frozen text encoder in `folder`, with its `lm_head`; ModelError if it is another model or incomplete.

    Attention is torch's: a config.json may name another one, such as a kernel that would be downloaded from the hub.
    The config is read here: for one that it cannot read, transformers would make random weights of the 7B model's size.
    """
    settings = read_config(folder / "config.json")
    kind = MODELS[known_type(settings.get("model_type"), folder)]
    config = kind.config_class.from_dict(settings)
    return load_whole(kind, folder, config=config, dtype=dtype, attn_implementation="sdpa")
