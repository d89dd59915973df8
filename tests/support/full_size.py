"""The real models' sizes: transformers with a batch for each, and the encoders."""

from __future__ import annotations

import json
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage
from transformers import Qwen2_5_VLConfig

from qwen_cache.models.family import QWEN_IMAGE_21
from qwen_train.memory.sizes import SampleSize

from .paths import load_tool

bench: Any = load_tool("bench_memory")
REAL = bench.transformer_config(layers=60, heads=24, head_dim=128, width=3584, out_channels=16)
EDIT = [SampleSize(((1, 64, 64), (1, 64, 64)), 1500)]
REAL_21 = bench.transformer_config(layers=32, heads=32, head_dim=128, width=4096, family=QWEN_IMAGE_21)
EDIT_21 = [SampleSize(((1, 64, 64), (1, 64, 64)), 120, (7,))]
SEVEN_B = json.dumps(
    Qwen2_5_VLConfig(
        text_config={
            "vocab_size": 152064,
            "hidden_size": 3584,
            "intermediate_size": 18944,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
        },
        vision_config={
            "depth": 32,
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 3584,
            "fullatt_block_indexes": [7, 15, 23, 31],
        },
    ).to_dict()
)
"""config.json of the text encoder of Qwen-Image, the 7B."""
with torch.device("meta"):
    VAE = json.dumps({**AutoencoderKLQwenImage().config, "_class_name": "AutoencoderKLQwenImage"})
"""config.json of its VAE, whose sizes are diffusers' defaults."""
