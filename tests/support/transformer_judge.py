"""The judge of the transformer on batches of mixed sizes: stock diffusers on one unpadded sample at a time.

The loss weights every valid token at random; the gradients of the single samples are summed. Padding is filled with
large numbers or NaN, and its outputs are weighted in the loss too: they have to be zero.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from torch import Tensor

from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

from .judge import AS_FAR, TOLERANCE
from .once import copies_of

TINY = {
    "in_channels": 16,
    "out_channels": 4,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 14, 14),
}
MIN_MUTANT_ERROR = 1e-3  # the least error of a mutant in float32, thirty times the tolerance
LORA = LoraConfig(
    r=4,
    lora_alpha=4,
    init_lora_weights=False,
    target_modules=["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"],
)


# ---- models and batches ----------------------------------------------------------------------------------------------


def stock_model(**config: Any) -> QwenImageTransformer2DModel:
    """Random weights, with queries and keys long enough for sharp attention: so that its errors change the output."""
    torch.manual_seed(0)
    model: QwenImageTransformer2DModel = _stock_models(**config)()
    return model


@cache
def _stock_models(**config: Any) -> Callable[[], Any]:
    """A copy takes a sixth of the time of a new one."""
    with torch.random.fork_rng():
        model = QwenImageTransformer2DModel(**{**TINY, **config})
        for name, parameter in model.named_parameters():
            if "norm_" in name:
                torch.nn.init.constant_(parameter, 1.5)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return copies_of(model)


def adapted(model: Any, lora: LoraConfig) -> Any:
    """The frozen model with an adapter of fixed weights."""
    model.requires_grad_(False)
    torch.manual_seed(0)
    model.add_adapter(lora)
    return model


def multi_res_model(stock: QwenImageTransformer2DModel, layout: str = "padded") -> QwenImageMultiResTransformer2DModel:
    model: QwenImageMultiResTransformer2DModel
    model = untrained(QwenImageMultiResTransformer2DModel, json.dumps(dict(stock.config)))()
    model.load_state_dict(stock.state_dict())
    model.layout = layout
    return model


@cache
def untrained(kind: Any, config: str) -> Callable[[], Any]:
    """Makes models of this kind, with any weights."""
    with torch.random.fork_rng():
        return copies_of(kind.from_config(json.loads(config)))


@dataclass(frozen=True)
class Sample:
    images: list[tuple[int, int, int]]
    image: Tensor
    text: Tensor
    sigma: Tensor
    loss_weight: Tensor


@dataclass(frozen=True)
class Run:
    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def random_samples(
    *specification: tuple[list[tuple[int, int]], int], dtype: torch.dtype = torch.float32
) -> list[Sample]:
    """From (height and width of the target and of each control, text length) per sample."""
    generator = torch.Generator().manual_seed(1)
    samples = []
    for sides, text_length in specification:
        tokens = sum(height * width for height, width in sides)
        draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype)  # noqa: E731
        samples.append(
            Sample(
                images=[(1, height, width) for height, width in sides],
                image=draw(tokens, 16),
                text=draw(text_length, 48),
                sigma=torch.rand((), generator=generator),
                loss_weight=draw(tokens, 16),
            )
        )
    return samples


def padded(rows: list[Tensor], fill: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=fill)


def batch_of(samples: list[Sample], fill: float = 1e3) -> dict[str, Any]:
    lengths = torch.tensor([len(sample.text) for sample in samples])
    return {
        "hidden_states": padded([sample.image for sample in samples], fill),
        "encoder_hidden_states": padded([sample.text for sample in samples], fill),
        "encoder_hidden_states_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        "timestep": torch.stack([sample.sigma for sample in samples]),
        "img_shapes": [sample.images for sample in samples],
    }


# ---- the judge -------------------------------------------------------------------------------------------------------


def trainable_gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    """Gradients in float64, zero where the loss has none: the output ignores the last block's text stream."""
    return {
        name: torch.zeros_like(parameter, dtype=torch.float64) if parameter.grad is None else parameter.grad.double()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


def run_singly(stock: QwenImageTransformer2DModel, samples: list[Sample], **arguments: Any) -> Run:
    outputs, totals = [], {}
    for sample in samples:
        stock.zero_grad()
        output = stock(
            hidden_states=sample.image[None],
            encoder_hidden_states=sample.text[None],
            timestep=sample.sigma[None],
            img_shapes=[sample.images],
            return_dict=False,
            **arguments,
        )[0][0]
        (output * sample.loss_weight).sum().backward()
        outputs.append(output.detach())
        for name, gradient in trainable_gradients(stock).items():
            totals[name] = totals.get(name, 0) + gradient
    return Run(outputs, totals)


STOCK_RUNS: dict[str, Run] = {}


def stock_run(specification: Sequence[Any], **config: Any) -> Run:
    """`run_singly` of the stock model with these settings on these random samples, which is made once."""
    key = repr((specification, config))
    if key not in STOCK_RUNS:
        STOCK_RUNS[key] = run_singly(stock_model(**config), random_samples(*specification))
    return STOCK_RUNS[key]


def run_in_float32(stock: QwenImageTransformer2DModel, samples: list[Sample], **arguments: Any) -> Run:
    """The output of a bfloat16 model if only weights and inputs were rounded. `stock` becomes float32."""
    inputs = [
        Sample(s.images, s.image.float(), s.text.float(), s.sigma.bfloat16().float(), s.loss_weight.float())
        for s in samples
    ]
    return run_singly(stock.float(), inputs, **arguments)


def run_batched(
    model: QwenImageMultiResTransformer2DModel, samples: list[Sample], fill: float = 1e3, **arguments: Any
) -> Run:
    model.zero_grad()
    batch = {**batch_of(samples, fill), **arguments}
    output = model(**batch).sample
    (output * padded([sample.loss_weight for sample in samples], 1.0)).sum().backward()
    for sample, row in zip(samples, output, strict=True):
        assert not row[len(sample.image) :].any(), "padded outputs are not zero"
    rows = [row[: len(sample.image)].detach() for sample, row in zip(samples, output, strict=True)]
    return Run(rows, trainable_gradients(model))


def distance(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    error = float((found - expected).norm() / expected.norm())
    return math.inf if math.isnan(error) else error


def output_error(found: Run, expected: Run) -> float:
    """The largest error of a sample."""
    return max(distance(a, b) for a, b in zip(found.outputs, expected.outputs, strict=True))


def gradient_error(found: Run, expected: Run) -> float:
    """The largest error of a parameter."""
    assert found.gradients.keys() == expected.gradients.keys()
    reached = [name for name, gradient in expected.gradients.items() if gradient.any()]
    unreached = expected.gradients.keys() - set(reached)
    assert not any(found.gradients[name].any() for name in unreached), "a gradient where the stock model has none"
    return max(distance(found.gradients[name], expected.gradients[name]) for name in reached)


def assert_equal(found: Run, expected: Run) -> None:
    """Equal within the tolerance of float32."""
    assert output_error(found, expected) < TOLERANCE
    assert gradient_error(found, expected) < TOLERANCE


def assert_as_near(found: Run, stock: Run, exact: Run) -> None:
    """In bfloat16: no further from float32 than the stock model, by the rule of `judge`."""
    assert found.outputs[0].dtype == stock.outputs[0].dtype == torch.bfloat16
    assert output_error(found, exact) <= AS_FAR * output_error(stock, exact)
    assert gradient_error(found, exact) <= AS_FAR * gradient_error(stock, exact)


CASES = {
    "mixed sizes": [([(6, 4), (4, 4)], 5), ([(8, 10), (6, 6)], 9), ([(3, 7), (5, 2)], 7)],
    "equal token counts, swapped sides": [([(8, 12), (8, 12)], 6), ([(12, 8), (12, 8)], 6)],
    "one, two, three and no control images": [
        ([(4, 6), (6, 4)], 5),
        ([(4, 4), (2, 6), (5, 5)], 8),
        ([(4, 4), (2, 3), (5, 5), (3, 6)], 3),
        ([(6, 6)], 7),
    ],
    "text lengths differ, image sizes do not": [([(6, 4), (4, 6)], 3), ([(6, 4), (4, 6)], 11), ([(6, 4), (4, 6)], 1)],
    "nothing to pad": [([(6, 4), (4, 6)], 5), ([(4, 6), (6, 4)], 5)],
    "a control larger than its target": [([(2, 2), (13, 3)], 4), ([(9, 4), (2, 2)], 6)],
}
MIXED = CASES["mixed sizes"]
SWAPPED = CASES["equal token counts, swapped sides"]
TEXTS = CASES["text lengths differ, image sizes do not"]
COUNTS = CASES["one, two, three and no control images"]
