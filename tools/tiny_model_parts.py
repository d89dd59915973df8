"""Parts shared by the tiny models of make_tiny_model.py: tokenizer, scheduler, random weights as large as trained ones.

Equal generators give equal weights. `fill` preserves the scale of a signal from layer to layer. A tokenizer has one
token for each word of the templates that it is trained on, and takes any text.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch import nn
from transformers import Qwen2Tokenizer

# In Qwen2.5-VL's order, which is the order of their ids.
SPECIAL_TOKENS = [
    *("<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>", "<|box_end|>"),
    *("<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>"),
    *("<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
]

TEXT_WIDTH = 64

# The VAEs carry one channel with this constant beside the colours. It is far larger than they are, and so keeps the
# length that RMS norms divide by nearly equal; otherwise they would remove each pixel's brightness.
CONSTANT = 32.0
TRACE = 0.02  # the fraction of all other channels that each layer adds to them, so that every weight matters


def train_tokenizer(templates: Sequence[str]) -> Qwen2Tokenizer:
    """A byte-level BPE with one token for each word of `templates`, as in the trained tokenizer."""
    return Qwen2Tokenizer(
        eos_token="<|im_end|>", padding_side="right", model_max_length=131072, extra_special_tokens=SPECIAL_TOKENS
    ).train_new_from_iterator(
        templates,
        vocab_size=2000,  # more than the templates have merges: training ends when every word is one token
        show_progress=False,
    )


def vision_token_ids(tokenizer: Qwen2Tokenizer) -> dict[str, int]:
    """The ids of the vision tokens, as a text encoder's configuration names them."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{name}_token_id": tokenizer.convert_tokens_to_ids(f"<|{token}|>") for name, token in names.items()}


def make_scheduler() -> FlowMatchEulerDiscreteScheduler:
    return FlowMatchEulerDiscreteScheduler(
        num_train_timesteps=1000,
        shift=1.0,
        use_dynamic_shifting=True,
        base_shift=0.5,
        max_shift=0.9,
        base_image_seq_len=256,
        max_image_seq_len=8192,
        shift_terminal=0.02,
        time_shift_type="exponential",
    )


def fill(model: nn.Module, generator: torch.Generator) -> nn.Module:
    """Random weights that preserve the scale of a signal from layer to layer, so that nothing fades or saturates."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            noise = torch.randn(parameter.shape, generator=generator)
            if isinstance(module, nn.Embedding):
                parameter.data = noise
            elif name == "bias":
                parameter.data = 0.1 * noise
            elif isinstance(module, nn.Linear | nn.Conv2d | nn.Conv3d):
                parameter.data = noise * parameter[0].numel() ** -0.5
            else:  # the gain of a norm
                parameter.data = 1 + 0.05 * noise
    return model


def set_diagonal(conv: nn.Conv2d | nn.Conv3d, diagonal: torch.Tensor, bias: torch.Tensor) -> None:
    conv.weight.data = torch.diag(diagonal).reshape(conv.weight.shape)
    conv.bias.data = bias


def write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
