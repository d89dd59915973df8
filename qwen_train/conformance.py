"""This trainer as an example for `qwen_cache.conformance`, and as its test.

pytest --pyargs qwen_cache.conformance --model-adapter qwen_train.conformance:padded
pytest --pyargs qwen_cache.conformance --loader-adapter qwen_train.conformance:batches
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor

from qwen_cache.torch import CacheBatches
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel


def padded(transformer: Any) -> Callable[[dict[str, Any]], Tensor]:
    """`QwenImageMultiResTransformer2DModel` with rows of equal length."""
    return _forward(transformer, "padded")


def packed(transformer: Any) -> Callable[[dict[str, Any]], Tensor]:
    """`QwenImageMultiResTransformer2DModel` with all tokens in one row."""
    return _forward(transformer, "packed")


def _forward(transformer: Any, layout: str) -> Callable[[dict[str, Any]], Tensor]:
    model = QwenImageMultiResTransformer2DModel.from_stock(transformer)
    model.layout = layout

    def forward(batch: dict[str, Any]) -> Tensor:
        inputs = (batch[name] for name in ("latents", "prompt_embeds", "prompt_embeds_mask", "sigma", "img_shapes"))
        velocity: Tensor = model(*inputs).sample
        return velocity

    return forward


def batches(folder: Path, caption_dropout: float) -> Iterable[dict[str, Any]]:
    """`CacheBatches` of one epoch."""
    return CacheBatches(folder, batch_size=3, caption_dropout=caption_dropout, epochs=1)
