"""The costs of many samples: the page has the table that the script prints, from the sizes that the program has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from torch.utils.flop_counter import FlopCounterMode

from qwen_cache.format import directory
from qwen_cache.format.manifest import IndexFile, Manifest, Shard
from qwen_cache.settings.sections import CacheConfig
from qwen_cache.storage import remote

from .support.full_size import EDIT, REAL
from .support.paths import ROOT, load_tool

costs: Any = load_tool("scale_costs")


def test_the_page_has_the_table_of_the_script() -> None:
    page = (ROOT / "docs" / "howto" / "use-more-machines.md").read_text(encoding="utf-8")
    assert f"\n\n{costs.tables()[0]}\n" in page


def test_its_sizes_are_those_of_model_and_program() -> None:
    real = REAL["num_layers"], REAL["num_attention_heads"], REAL["attention_head_dim"], REAL["joint_attention_dim"]
    assert real == (costs.LAYERS, costs.HEADS, costs.HEAD_DIM, costs.TEXT_WIDTH)
    ((shapes, text),) = [(each.img_shapes, each.text_tokens) for each in EDIT]
    assert ([h * w for _, h, w in shapes], text) == ([costs.KINDS[0].latents] * 2, costs.KINDS[0].text)
    assert CacheConfig().shard_size == costs.SHARD
    assert costs.BLOCK == remote.BLOCK
    of_one, of_none = (
        len(Manifest(2, {}, IndexFile(0, 0, "0" * 32), (Shard(f"{'0' * 32}.tar", 84, 10**9),) * n).to_bytes())
        for n in (1, 0)
    )
    assert 0.8 * directory.MAX_MANIFEST < costs.SHARDS_OF_A_MANIFEST * (of_one - of_none) < directory.MAX_MANIFEST


def test_the_flops_of_a_step_are_those_that_torch_counts() -> None:
    """FLOPs that a block of the stock transformer adds, with frozen weights, on 2300 tokens without data."""
    kind = costs.Kind("small", 1024, 256, 0)
    forward, whole = zip(*(flops(layers, kind.text) for layers in (1, 2)), strict=True)
    assert forward[1] - forward[0] == pytest.approx(1e12 * per_layer(kind, 1, 1), rel=0.01)
    assert whole[1] - whole[0] == pytest.approx(1e12 * per_layer(kind, 2, 3), rel=0.01)
    assert kind.train_tflop == pytest.approx(costs.LAYERS * (per_layer(kind, 1, 1) + per_layer(kind, 2, 3)))


def per_layer(kind: Any, linear: int, attention: int) -> float:
    return float(linear * kind.linear_tflop + attention * kind.attention_tflop) / int(costs.LAYERS)


def flops(layers: int, text: int) -> tuple[int, int]:
    """FLOPs of the forward pass, and of forward and backward to the inputs."""
    with torch.device("meta"):
        model = QwenImageTransformer2DModel.from_config({**REAL, "num_layers": layers}).requires_grad_(False)
        images = torch.empty(1, 2048, 64, requires_grad=True)
        embeds, timestep = torch.empty(1, text, costs.TEXT_WIDTH, requires_grad=True), torch.empty(1)
        mask = torch.ones(1, text, dtype=torch.bool)
    sizes = [[(1, 32, 32), (1, 32, 32)]]
    with FlopCounterMode(display=False) as counter:
        (found,) = model(images, embeds, mask, timestep, sizes, return_dict=False)
        forward = counter.get_total_flops()
        found.sum().backward()
    return forward, counter.get_total_flops()
