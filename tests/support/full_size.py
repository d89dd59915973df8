"""A transformer of the real model's size, and a batch for it."""

from __future__ import annotations

from typing import Any

from qwen_train.memory.predict import SampleSize

from .paths import load_tool

bench: Any = load_tool("bench_memory")
REAL = bench.transformer_config(layers=60, heads=24, head_dim=128, width=3584, out_channels=16)
EDIT: list[SampleSize] = [([(1, 64, 64), (1, 64, 64)], 1500)]
