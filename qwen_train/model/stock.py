"""The classes of a transformer by `_class_name` in its config.json: diffusers' own, and ours for training.

Other classes are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qwen_cache.errors import ModelError
from qwen_cache.models.family import FAMILIES
from qwen_cache.models.folder import read_config
from qwen_train.model.qwen_image_21.transformer import QwenImage21MultiResTransformer2DModel
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

STOCK_CLASSES = tuple(family.transformer for family in FAMILIES)
TRAINED_CLASSES = (QwenImageMultiResTransformer2DModel, QwenImage21MultiResTransformer2DModel)


def stock_class(folder: Path) -> Any:
    """The class in diffusers of the transformer in `folder`; ModelError for another one, or without a config.json."""
    import diffusers

    return getattr(diffusers, _class_name(read_config(folder / "config.json"), folder))


def trained_class(config: Mapping[str, Any], where: object = "config.json") -> type[Any]:
    """Our class for a transformer with this config.json; ModelError for another one."""
    name = _class_name(config, where)
    kinds: dict[str, type[Any]] = {each._stock_class.__name__: each for each in TRAINED_CLASSES}
    return kinds[name]


def _class_name(config: Mapping[str, Any], where: object) -> str:
    name = config.get("_class_name")
    if name not in STOCK_CLASSES:
        raise ModelError(
            "not a Qwen-Image transformer",
            where=where,
            expected=" or ".join(STOCK_CLASSES),
            found=name,
            do="name another model, with --model",
        )
    return str(name)
