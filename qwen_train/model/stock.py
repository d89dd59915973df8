"""diffusers' own class of a transformer, by `_class_name` in its config.json. Other classes are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_cache.errors import ModelError

STOCK_CLASSES = ("QwenImageTransformer2DModel", "QwenImage21Transformer2DModel")
"""The transformers that LoRAs are merged into and images are generated with: 20B, and Qwen-Image-2.1."""


def stock_class(folder: Path) -> Any:
    """The class in diffusers of the transformer in `folder`; ModelError for another one, or without a config.json."""
    import diffusers

    path = folder / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        name = config.get("_class_name")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"the transformer's configuration cannot be read: {error}", where=path) from None
    if name not in STOCK_CLASSES:
        raise ModelError(
            "not a Qwen-Image transformer",
            where=path,
            expected=" or ".join(STOCK_CLASSES),
            found=name,
            do="name another model, with --model",
        )
    return getattr(diffusers, name)
