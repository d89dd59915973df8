"""Floating-point operations of a training step and of a denoising step, counted without data on torch's device "meta".

Products that are needed, and no others: no padding, no recomputation of checkpointed blocks, and for the backward pass
of attention four products, though kernels compute the scores again. Blocks are equal, so two and three are counted and
the rest is extrapolated. Casts, norms and the unpacking of quantised weights count nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.flop_counter import FlopCounterMode

from qwen_cache.models.devices import LiveBytes
from qwen_cache.models.family import family_of_transformer
from qwen_cache.settings.load import Config
from qwen_train.memory.sizes import SampleSize
from qwen_train.memory.step import on_meta, peak_of_step, training_model

FEW, MORE = 2, 3


def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    """Two products of every query with every key."""
    batch, heads, queries, width = query
    return int(2 * batch * heads * queries * key[2] * (width + value[3]))


def attention_backward(gradient: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return 2 * attention(query, key, value)


KERNELS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
}
"""The kernel that the prediction of memory runs on "meta", which torch does not count."""


def of_training(config: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> float:
    """Forward and backward of one batch."""
    return extrapolated(config, settings, batch)


def of_forward(config: dict[str, Any], settings: Config, sample: SampleSize) -> float:
    """The forward pass of one sample."""
    with patch("torch.autograd.backward", lambda *_: None):
        return extrapolated(config, settings, [sample])


def of_block(config: dict[str, Any], settings: Config, sample: SampleSize, *, backward: bool) -> float:
    """One block that is not the last."""
    without = nullcontext() if backward else patch("torch.autograd.backward", lambda *_: None)
    with without:
        few, more = counted(config, settings, [sample])
    return more - few


def extrapolated(config: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> float:
    few, more = counted(config, settings, batch)
    return few + (more - few) * (config["num_layers"] - FEW)


def counted(config: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> list[int]:
    """With `FEW` and with `MORE` blocks."""
    plain = {"layout": "packed", "gradient_checkpointing": 0, "tabulated_modulation": False, "compile": False}
    settings = settings.model_copy(update={"train": settings.train.model_copy(update=plain)})
    return [of_blocks(layers, config, settings, batch) for layers in (FEW, MORE)]


def of_blocks(layers: int, config: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> int:
    # "cpu" has a call of attention for each segment; an accelerator's single call joins what does not see each other
    model = training_model(on_meta({**config, "num_layers": layers}, settings), settings, "cpu")
    every_call = patch.object(LiveBytes, "repeats", False)
    with every_call, FlopCounterMode(display=False, custom_mapping=KERNELS) as counter:
        peak_of_step(model, batch, settings.train, family_of_transformer(config))
    return int(counter.get_total_flops())
