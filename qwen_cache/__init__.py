"""Read an embedding cache: `open_cache(folder)` gives its samples by position, by key, in order.

from qwen_cache import open_cache

cache = open_cache("shards")
sample = cache[0]
sample.prompt, sample.img_shapes, sample["image_latents"]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qwen_cache.errors import FormatError, QwenCacheError

if TYPE_CHECKING:
    from qwen_cache.format.cache import Cache, Sample, open_cache

__version__ = "0.1.0"
__all__ = ["Cache", "FormatError", "QwenCacheError", "Sample", "open_cache"]


def __getattr__(name: str) -> Any:
    if name in ("Cache", "Sample", "open_cache"):
        from qwen_cache.format import cache  # pyarrow takes half a second: only those who read pay for it

        return getattr(cache, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
