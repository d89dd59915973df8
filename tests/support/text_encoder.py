"""Inputs of text encoders, and the outputs of the stock one; a tiny Qwen3-VL."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoTokenizer, Qwen3VLConfig, Qwen3VLForConditionalGeneration
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .judge import PHOTOGRAPHS, Size, image
from .paths import load_tool

SIZES: list[Size] = [(128, 96), (84, 140), (112, 112), (160, 64)]


def images(count: int) -> list[Image.Image]:
    """Photographs at sizes for the text encoder, all different."""
    return [image(name, size) for name, size in zip(PHOTOGRAPHS, SIZES[:count], strict=False)]


@torch.no_grad()
def stock_embeds(pipeline: Any, controls: list[Image.Image], prompt: str) -> Tensor:
    """`[L, D]`: one prompt by itself, from the first token on."""
    arguments = {"image": controls if len(controls) > 1 else controls[0]} if controls else {}
    embeds, mask = pipeline.encode_prompt(prompt, **arguments)
    assert mask is None
    return embeds[0]


@contextmanager
def recording(model: type[nn.Module]) -> Iterator[list[dict[str, Any]]]:
    """The named arguments of every call of a `model`, ours or stock."""
    calls: list[dict[str, Any]] = []
    forward = model.forward
    signature = inspect.signature(forward)

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        calls.append(signature.bind(self, *args, **kwargs).arguments)
        return forward(self, *args, **kwargs)

    with patch.object(model, "forward", record):
        yield calls


def save_tiny_qwen3_vl(model: Path, processor: Path, tokenizer: Path) -> None:
    """A random Qwen3-VL and its processor in folders, with the tokenizer of another.

    Unlike the tiny Qwen2.5-VL, its heads are wider than the hidden size, three share a key, and 30 give attention. The
    gains of queries and keys vary, so that attention without these norms is far away; scores reach 16, and rows peak.
    """
    tool: Any = load_tool("make_tiny_model")
    words = AutoTokenizer.from_pretrained(tokenizer)
    generator = torch.Generator().manual_seed(3)
    names = {"image": "<|image_pad|>", "video": "<|video_pad|>"}
    names |= {f"vision_{end}": f"<|vision_{end}|>" for end in ("start", "end")}
    text = {
        "vocab_size": len(words),
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [4, 2, 2]},
        "pad_token_id": words.pad_token_id,
    }
    vision = {
        "depth": 3,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 48,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0, 2],
    }
    ids = {f"{name}_token_id": words.convert_tokens_to_ids(token) for name, token in names.items()}
    config = Qwen3VLConfig(text_config=text, vision_config=vision, dtype="float32", **ids)
    whole = tool.fill(Qwen3VLForConditionalGeneration(config), generator)
    for layer in whole.model.language_model.layers:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data = 2 + 0.6 * torch.randn(16, generator=generator)
    whole.save_pretrained(model)
    words.save_pretrained(processor)
    settings = Qwen2VLImageProcessorPil(patch_size=16, min_pixels=1024, max_pixels=16777216).to_dict()
    settings |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "processor_class": "Qwen3VLProcessor"}
    settings["image_processor_type"] = "Qwen2VLImageProcessorFast"
    tool.write_json(processor / "preprocessor_config.json", settings)
