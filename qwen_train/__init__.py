"""Train a transformer of the Qwen-Image family on a cache, and generate images with the result.

The names in `__all__` are the public API; every other module may change without notice (docs/explanation/status.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from qwen_train.flow import NoiseSchedule, flow_loss, interpolate
    from qwen_train.inference.generator import GeneratedImages, Generator
    from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
    from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

__all__ = [
    "GeneratedImages",
    "Generator",
    "NoiseSchedule",
    "QwenImage21MultiResTransformer2DModel",
    "QwenImageMultiResTransformer2DModel",
    "flow_loss",
    "interpolate",
]

_HOMES = {
    "GeneratedImages": "qwen_train.inference.generator",
    "Generator": "qwen_train.inference.generator",
    "NoiseSchedule": "qwen_train.flow",
    "QwenImage21MultiResTransformer2DModel": "qwen_train.model.qwen_image_21",
    "QwenImageMultiResTransformer2DModel": "qwen_train.model.transformer",
    "flow_loss": "qwen_train.flow",
    "interpolate": "qwen_train.flow",
}
"""Imported on first access, since torch takes seconds."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
