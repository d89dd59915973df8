"""Transformers of the real models' sizes, and a batch for each."""

from __future__ import annotations

from typing import Any

from qwen_cache.models.family import QWEN_IMAGE_21
from qwen_train.memory.predict import SampleSize

from .paths import load_tool

bench: Any = load_tool("bench_memory")
REAL = bench.transformer_config(layers=60, heads=24, head_dim=128, width=3584, out_channels=16)
EDIT = [SampleSize(((1, 64, 64), (1, 64, 64)), 1500)]
REAL_21 = bench.transformer_config(layers=32, heads=32, head_dim=128, width=4096, family=QWEN_IMAGE_21)
EDIT_21 = [SampleSize(((1, 64, 64), (1, 64, 64)), 120, (7,))]
