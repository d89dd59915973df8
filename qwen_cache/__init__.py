"""Read an embedding cache: `open_cache(folder)` gives its samples in order, by position or by key.

from qwen_cache import open_cache

cache = open_cache("shards")
sample = cache[0]
sample.prompt, sample.img_shapes, sample["image_latents"]

The names in `__all__` are the public API; every other module may change without notice (docs/explanation/status.md).
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import FormatError, QwenCacheError
from qwen_cache.extras import __version__

if TYPE_CHECKING:
    from qwen_cache.experimental.attention import FrozenQwen
    from qwen_cache.experimental.masks import difference_mask
    from qwen_cache.format.cache import Cache, Sample, open_cache
    from qwen_cache.format.verify import verify_cache

__all__ = [
    "Cache",
    "FormatError",
    "FrozenQwen",
    "QwenCacheError",
    "Sample",
    "__version__",
    "difference_mask",
    "open_cache",
    "verify_cache",
]

_HOMES = {
    "Cache": "qwen_cache.format.cache",
    "FrozenQwen": "qwen_cache.experimental.attention",
    "Sample": "qwen_cache.format.cache",
    "difference_mask": "qwen_cache.experimental.masks",
    "open_cache": "qwen_cache.format.cache",
    "verify_cache": "qwen_cache.format.verify",
}
"""Imported on first use: pyarrow takes half a second, torch several."""


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
