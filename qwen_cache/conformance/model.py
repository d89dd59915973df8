"""The promises of a forward: a batch of mixed sizes is its samples alone, as stock diffusers computes them.

A model adapter is a function `adapter(transformer) -> forward`. `transformer` is a stock `QwenImageTransformer2DModel`
in float32 on the CPU, in training mode; the adapter may change, copy or convert it. `forward(batch)` returns the
velocity `[B, N, 64]`, of which the first rows of each sample, its target's, are compared. With N image tokens and L
text tokens in the largest of B samples, `batch` has

    latents             [B, N, 64]  target and controls of each sample, one after another, then padding
    img_shapes          of each sample: (1, h, w) of the target, then of each control
    prompt_embeds       [B, L, D]   padded at the end
    prompt_embeds_mask  [B, L]      bool
    sigma               [B]         the noise level, 0 to 1: diffusers' `timestep`

Padding is filled with large numbers, which must not matter. Gradients are compared through `latents` and
`prompt_embeds`. The faults that each promise notices were found in published trainers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from diffusers import QwenImageTransformer2DModel
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Batch = dict[str, Any]
Forward = Callable[[Batch], Tensor]
Adapter = Callable[[Any], Forward]
Sides = list[tuple[int, int]]
"""Height and width in tokens: of the target, then of each control."""
CONFIG: dict[str, Any] = {
    "in_channels": 64,
    "out_channels": 16,
    "num_layers": 3,
    "num_attention_heads": 2,
    "attention_head_dim": 32,
    "joint_attention_dim": 48,
    "axes_dims_rope": (4, 14, 14),
}
TOLERANCE = 1e-4
"""Relative, float32. Sums in another order differ by about 2·2^-24·sqrt(k·n) for n layers of k products: 1e-5 with 1000
products and 60 layers. The faults that this suite is for change outputs by 1e-3 or more."""
FILL = 1e3


@dataclass(frozen=True)
class Sample:
    """An unpadded sample."""

    img_shapes: list[tuple[int, int, int]]
    latents: Tensor
    prompt_embeds: Tensor
    sigma: Tensor
    weights: Tensor
    """The weights of the target's outputs in the loss."""


@dataclass(frozen=True)
class Result:
    """One sample: the velocity of its target, and the gradients of the loss by its inputs."""

    velocity: Tensor
    latents: Tensor
    prompt_embeds: Tensor


def stock_transformer(**changes: Any) -> QwenImageTransformer2DModel:
    """Random weights, with queries and keys long enough for sharp attention, so that faults change the output."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = QwenImageTransformer2DModel(**{**CONFIG, **changes})
        for name, parameter in model.named_parameters():
            if "norm_" in name:
                torch.nn.init.constant_(parameter, 1.5)
            elif parameter.ndim == 1:
                torch.nn.init.normal_(parameter, std=0.2)
            else:
                torch.nn.init.normal_(parameter, std=1 / math.sqrt(parameter.shape[1]))
    return model.train()


def samples_of(*specification: tuple[Sides, int]) -> list[Sample]:
    """Random samples of these sides and text lengths."""
    generator = torch.Generator().manual_seed(1)

    def sample(sides: Sides, text: int) -> Sample:
        tokens = [height * width for height, width in sides]
        return Sample(
            [(1, height, width) for height, width in sides],
            torch.randn(sum(tokens), CONFIG["in_channels"], generator=generator),
            torch.randn(text, CONFIG["joint_attention_dim"], generator=generator),
            torch.rand((), generator=generator),
            torch.randn(tokens[0], 4 * CONFIG["out_channels"], generator=generator),
        )

    return [sample(sides, text) for sides, text in specification]


def batch_of(samples: list[Sample], fill: float) -> Batch:
    """The samples with padding of this value."""
    lengths = torch.tensor([len(sample.prompt_embeds) for sample in samples])
    return {
        "latents": pad_sequence([s.latents for s in samples], batch_first=True, padding_value=fill),
        "img_shapes": [list(sample.img_shapes) for sample in samples],
        "prompt_embeds": pad_sequence([s.prompt_embeds for s in samples], batch_first=True, padding_value=fill),
        "prompt_embeds_mask": torch.arange(int(lengths.max())) < lengths[:, None],
        "sigma": torch.stack([sample.sigma for sample in samples]),
    }


def run(forward: Forward, samples: list[Sample], fill: float = FILL) -> list[Result]:
    """The results of the samples as one batch."""
    batch = batch_of(samples, fill)
    latents, prompt_embeds = (batch[name].requires_grad_() for name in ("latents", "prompt_embeds"))
    velocity = forward(batch)
    targets = [velocity[i, : len(sample.weights)] for i, sample in enumerate(samples)]
    loss = sum((target * sample.weights).sum() for target, sample in zip(targets, samples, strict=True))
    assert isinstance(loss, Tensor)
    loss.backward()  # type: ignore[no-untyped-call]
    assert latents.grad is not None
    assert prompt_embeds.grad is not None
    gradients = zip(targets, latents.grad, prompt_embeds.grad, samples, strict=True)
    return [Result(t.detach(), x[: len(s.latents)], c[: len(s.prompt_embeds)]) for t, x, c, s in gradients]


def stock_alone(model: QwenImageTransformer2DModel, samples: list[Sample]) -> list[Result]:
    """The results of stock diffusers, one sample at a time, without padding and mask; the weights get no gradients."""

    def forward(batch: Batch) -> Tensor:
        velocity: Tensor = model(
            hidden_states=batch["latents"],
            encoder_hidden_states=batch["prompt_embeds"],
            timestep=batch["sigma"],
            img_shapes=batch["img_shapes"],
            return_dict=False,
        )[0]
        return velocity

    model.requires_grad_(False)
    results = [run(forward, [sample])[0] for sample in samples]
    model.requires_grad_(True)
    return results


def assert_same(found: list[Result], expected: list[Result]) -> None:
    """AssertionError that names the sample and what differs."""
    for i, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for name in ("velocity", "latents", "prompt_embeds"):
            a, b = getattr(ours, name).double(), getattr(theirs, name).double()
            error = float((a - b).norm() / b.norm())
            what = name if name == "velocity" else f"the gradient by {name}"
            assert error < TOLERANCE, f"sample {i}: {what} is off by {error:.1g} of its norm"


# ---- the promises ----------------------------------------------------------------------------------------------------

EDIT: tuple[Sides, int] = ([(6, 4), (4, 6)], 7)
TWO: tuple[Sides, int] = ([(8, 10), (6, 6)], 7)


def _same_as_stock(adapter: Adapter, *specification: tuple[Sides, int], **config: Any) -> None:
    model, samples = stock_transformer(**config), samples_of(*specification)
    expected = stock_alone(model, samples)
    assert_same(run(adapter(model), samples), expected)


def one_sample(adapter: Adapter) -> None:
    """One sample without padding is stock's: weights, activation functions, RoPE of target and controls."""
    _same_as_stock(adapter, EDIT)


def no_control(adapter: Adapter) -> None:
    """A sample without control, text to image, is stock's."""
    _same_as_stock(adapter, ([(6, 4)], 7))


def nothing_to_pad(adapter: Adapter) -> None:
    """Samples of one size and one text length: a mask that is true everywhere changes nothing."""
    _same_as_stock(adapter, EDIT, EDIT)


def text_padding(adapter: Adapter) -> None:
    """A longer prompt in the batch changes nothing: padded text is not attended to, and moves no image's RoPE."""
    _same_as_stock(adapter, (EDIT[0], 3), (EDIT[0], 11), (EDIT[0], 1))


def image_padding(adapter: Adapter) -> None:
    """A larger image in the batch changes nothing: padded image tokens are not attended to."""
    _same_as_stock(adapter, EDIT, TWO)


def swapped_sides(adapter: Adapter) -> None:
    """Portrait and landscape of as many tokens: each sample has a RoPE of its own."""
    _same_as_stock(adapter, ([(8, 12), (8, 12)], 6), ([(12, 8), (12, 8)], 6))


def larger_control(adapter: Adapter) -> None:
    """Text positions begin after the largest image of the sample, also where that is a control."""
    _same_as_stock(adapter, ([(2, 2), (13, 3)], 4), ([(9, 4), (2, 2)], 4))


def control_counts(adapter: Adapter) -> None:
    """One, two and no controls in one batch; each image has its own frame index."""
    _same_as_stock(adapter, EDIT, ([(4, 4), (2, 6), (5, 5)], 8), ([(6, 6)], 3))


def padding_content(adapter: Adapter) -> None:
    """The content of the padding changes nothing."""
    model, samples = stock_transformer(), samples_of(EDIT, ([(8, 10)], 11))
    forward = adapter(model)
    assert_same(run(forward, samples, fill=0.0), run(forward, samples, fill=FILL))


def gradient_checkpointing(adapter: Adapter) -> None:
    """With gradient checkpointing, in training mode, the masks are still there."""
    model, samples = stock_transformer(), samples_of((EDIT[0], 3), ([(8, 10), (6, 6)], 11))
    expected = stock_alone(model, samples)
    model.enable_gradient_checkpointing()
    assert_same(run(adapter(model), samples), expected)


def zero_cond_t(adapter: Adapter) -> None:
    """Edit-2511: controls are modulated as at noise level 0, whatever the sizes in the batch are."""
    _same_as_stock(adapter, EDIT, TWO, ([(4, 4), (2, 6), (5, 5)], 8), zero_cond_t=True)


PROMISES: dict[str, Callable[[Adapter], None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        one_sample,
        no_control,
        nothing_to_pad,
        text_padding,
        image_padding,
        swapped_sides,
        larger_control,
        control_counts,
        padding_content,
        gradient_checkpointing,
        zero_cond_t,
    )
}
