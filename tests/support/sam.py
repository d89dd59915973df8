"""A SAM with random weights."""

from __future__ import annotations

from typing import Any

import torch
from transformers import SamConfig, SamModel

SIDE, PATCH = 64, 16


def tiny_sam() -> Any:
    torch.manual_seed(0)
    config = SamConfig(
        vision_config={
            "hidden_size": 16,
            "output_channels": 16,
            "num_hidden_layers": 1,
            "num_attention_heads": 2,
            "image_size": SIDE,
            "patch_size": PATCH,
            "global_attn_indexes": [0],
            "num_pos_feats": 8,
            "initializer_range": 0.02,
        },
        prompt_encoder_config={"hidden_size": 16, "image_size": SIDE, "patch_size": PATCH},
        mask_decoder_config={"hidden_size": 16, "mlp_dim": 16, "num_attention_heads": 2, "iou_head_hidden_dim": 16},
    )
    return shaken(SamModel(config))


def shaken(model: Any) -> Any:
    """Replace initial zeros by random weights, so that every input matters."""
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.5 * torch.randn_like(weight))
    return model.requires_grad_(False).eval()
