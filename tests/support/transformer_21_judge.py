"""The judge of Qwen-Image-2.1's transformer on batches of mixed sizes: stock diffusers, one draw at a time.

The stock model gets each sample alone, in its own convention: text with a slot of anything for every four latent tokens
of a condition image, `img_mask` at these slots and at the target's. Losses and padding are as in `transformer_judge`.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Transformer2DModel
from peft import LoraConfig
from torch import Tensor

from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel

from .once import copies_of
from .transformer_judge import Run, padded, trainable_gradients, untrained

TINY_21 = {
    "in_channels": 16,
    "out_channels": 8,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "context_in_dim": 48,
    "axes_dims_rope": (4, 14, 14),
}
LORA_21 = LoraConfig(
    r=4,
    lora_alpha=4,
    init_lora_weights=False,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "img_mlp.proj", "img_mlp.gate_layer", "img_mlp.out"],
)
Specification = tuple[list[tuple[int, int]], list[int], int]
"""Sides of the condition images and of the target, the text rows before each condition image, and the text length."""


# ---- models and batches ----------------------------------------------------------------------------------------------


def stock_model(**config: Any) -> QwenImage21Transformer2DModel:
    """Random weights, with queries and keys long enough for sharp attention: so that its errors change the output."""
    torch.manual_seed(0)
    model: QwenImage21Transformer2DModel = _stock_models(**config)()
    return model


@cache
def _stock_models(**config: Any) -> Callable[[], Any]:
    with torch.random.fork_rng():
        model = QwenImage21Transformer2DModel(**{**TINY_21, **config})
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
            elif "norm_" in name:
                torch.nn.init.constant_(parameter, 1.5)
            else:
                torch.nn.init.normal_(parameter, std=0.2)
    return copies_of(model)


def multi_res_model(stock: Any, layout: str = "padded") -> QwenImage21MultiResTransformer2DModel:
    model: QwenImage21MultiResTransformer2DModel
    model = untrained(QwenImage21MultiResTransformer2DModel, json.dumps(dict(stock.config)))()
    model.load_state_dict(stock.state_dict())
    model.layout = layout
    return model


@dataclass(frozen=True)
class Sample:
    """A sample with K draws: conditions `[Sc, 16]`, draws `[K, S, 16]`, text `[L, 48]`, sigma `[K]`."""

    images: list[tuple[int, int, int]]
    positions: list[int]
    conditions: Tensor
    draws: Tensor
    text: Tensor
    sigma: Tensor
    loss_weight: Tensor

    @property
    def image(self) -> Tensor:
        return torch.cat([self.conditions, *self.draws])

    def with_draw(self, k: int) -> Sample:
        return replace(self, draws=self.draws[[k]], sigma=self.sigma[[k]], loss_weight=self.loss_weight[[k]])


def random_samples(*specification: Specification, draws: int = 1, dtype: torch.dtype = torch.float32) -> list[Sample]:
    generator = torch.Generator().manual_seed(1)
    samples = []
    for sides, positions, text_length in specification:
        counts = [height * width for height, width in sides]
        numbers = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        samples.append(
            Sample(
                images=[(1, height, width) for height, width in sides],
                positions=positions,
                conditions=numbers(sum(counts[:-1]), 16),
                draws=numbers(draws, counts[-1], 16),
                text=numbers(text_length, 48),
                sigma=torch.rand(draws, generator=generator),
                loss_weight=numbers(draws, counts[-1], 8),
            )
        )
    return samples


def batch_of(samples: list[Sample], fill: float = 1e3) -> dict[str, Any]:
    lengths = torch.tensor([len(sample.text) for sample in samples])
    sigma = torch.stack([sample.sigma for sample in samples])
    return {
        "hidden_states": padded([sample.image for sample in samples], fill),
        "encoder_hidden_states": padded([sample.text for sample in samples], fill),
        "encoder_hidden_states_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        "timestep": sigma if sigma.shape[1] > 1 else sigma[:, 0],
        "img_shapes": [sample.images for sample in samples],
        "image_positions": [sample.positions for sample in samples],
    }


def stock_batch(sample: Sample) -> dict[str, Any]:
    """The arguments of the stock model for a sample with one draw."""
    slots = [height * width // 4 for _, height, width in sample.images]
    bounds = [0, *sample.positions, len(sample.text)]
    rows, mask = [], []
    for i, (begin, end) in enumerate(itertools.pairwise(bounds)):
        anything = torch.full((slots[i] if i < len(sample.positions) else 0, 48), 7.0, dtype=sample.text.dtype)
        rows += [sample.text[begin:end], anything]
        mask += [False] * (end - begin) + [True] * len(anything)
    return {
        "hidden_states": sample.image[None],
        "encoder_hidden_states": torch.cat(rows)[None],
        "timestep": sample.sigma,
        "img_shapes": [sample.images],
        "img_mask": torch.tensor([mask + [True] * slots[-1]]),
    }


# ---- the judge -------------------------------------------------------------------------------------------------------


def run_singly(stock: Any, samples: list[Sample], **arguments: Any) -> Run:
    """Each draw of each sample alone; the outputs of a sample's draws one after another."""
    outputs, totals = [], {}
    for sample in samples:
        rows = []
        for k in range(len(sample.draws)):
            stock.zero_grad()
            single = sample.with_draw(k)
            output = stock(**stock_batch(single), return_dict=False, **arguments)[0][0, -sample.draws.shape[1] :]
            (output * single.loss_weight[0]).sum().backward()
            rows.append(output.detach())
            for name, gradient in trainable_gradients(stock).items():
                totals[name] = totals.get(name, 0) + gradient
        outputs.append(torch.cat(rows))
    return Run(outputs, totals)


STOCK_RUNS: dict[str, Run] = {}


def stock_run(specification: Sequence[Specification], draws: int = 1) -> Run:
    """`run_singly` of the stock model on these random samples, which is made once."""
    key = repr((specification, draws))
    if key not in STOCK_RUNS:
        STOCK_RUNS[key] = run_singly(stock_model(), random_samples(*specification, draws=draws))
    return STOCK_RUNS[key]


def run_in_float32(stock: Any, samples: list[Sample]) -> Run:
    """The output of a bfloat16 model if only weights and inputs were rounded. `stock` becomes float32."""
    inputs = [
        replace(
            s,
            conditions=s.conditions.float(),
            draws=s.draws.float(),
            text=s.text.float(),
            sigma=s.sigma.bfloat16().float(),
            loss_weight=s.loss_weight.float(),
        )
        for s in samples
    ]
    return run_singly(stock.float(), inputs)


def run_batched(model: Any, samples: list[Sample], fill: float = 1e3, **arguments: Any) -> Run:
    model.zero_grad()
    output = model(**{**batch_of(samples, fill), **arguments}).sample
    weights = [torch.cat([torch.ones(len(s.conditions), 8), *s.loss_weight]) for s in samples]
    (output * padded(weights, 1.0)).sum().backward()
    rows = []
    for sample, row in zip(samples, output, strict=True):
        begin, end = len(sample.conditions), len(sample.image)
        assert not row[end:].any(), "padded outputs are not zero"
        assert not row[:begin].any(), "outputs at condition images are not zero"
        rows.append(row[begin:end].detach())
    return Run(rows, trainable_gradients(model))


CASES_21: dict[str, list[Specification]] = {
    "mixed sizes": [([(4, 4), (6, 4)], [3], 5), ([(6, 6), (8, 10)], [4], 9), ([(5, 4), (3, 8)], [2], 7)],
    "equal token counts, swapped sides": [([(8, 12), (8, 12)], [2], 6), ([(12, 8), (12, 8)], [4], 6)],
    "none, one, two and three condition images": [
        ([(6, 6)], [], 7),
        ([(6, 4), (4, 6)], [3], 5),
        ([(2, 6), (6, 6), (4, 4)], [2, 6], 8),
        ([(2, 4), (5, 4), (3, 8), (4, 4)], [1, 1, 4], 6),
    ],
    "text lengths differ, image sizes do not": [
        ([(4, 6), (6, 4)], [2], 3),
        ([(4, 6), (6, 4)], [5], 11),
        ([(4, 6), (6, 4)], [1], 1),
        ([(4, 6), (6, 4)], [0], 1),
    ],
    "nothing to pad": [([(4, 6), (6, 4)], [2], 5), ([(6, 4), (4, 6)], [2], 5)],
    "a condition image larger than its target": [([(14, 4), (2, 2)], [1], 4), ([(2, 2), (10, 4)], [3], 6)],
}
MIXED_21 = CASES_21["mixed sizes"]
SWAPPED_21 = CASES_21["equal token counts, swapped sides"]
COUNTS_21 = CASES_21["none, one, two and three condition images"]
TEXTS_21 = CASES_21["text lengths differ, image sizes do not"]
