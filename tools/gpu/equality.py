"""Batches of mixed sizes, padded and packed, against stock diffusers on each sample alone.

In bfloat16, with two blocks of the real width and all shortcuts that the device has. Outputs, and gradients of the
attention's weights, are compared with float32 on the same rounded weights; ours may be at most AS_FAR times as far from
it as stock is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen_cache.settings.load import load_config

from . import models
from .measure import Card, Cases, Row, forget

AS_FAR = 2.0
"""The bound of tests/support/judge.py, which derives it."""
BLOCKS = 2
FILL = 1e3  # in padding: large numbers that would show
SIDES: dict[str, list[tuple[list[tuple[int, int]], int]]] = {
    "20b": [([(64, 64), (64, 64)], 352), ([(32, 48), (32, 32)], 210), ([(42, 78), (78, 42), (24, 24)], 530)],
    "2.1": [([(64, 64), (64, 64)], 134), ([(32, 48)], 60), ([(78, 42), (24, 24), (42, 78)], 220)],
}
"""Sides in tokens of the images of each sample, in the order of the transformer, and its text tokens."""


@dataclass(frozen=True)
class Sample:
    """Random numbers: image `[S, 64]`, text `[L, D]`, a noise level, and a loss's weights for the target's outputs."""

    shapes: list[tuple[int, int, int]]
    positions: list[int]
    image: Tensor
    text: Tensor
    sigma: Tensor
    weight: Tensor

    def to(self, dtype: torch.dtype) -> Sample:
        values = (value.to(dtype) for value in (self.image, self.text, self.sigma, self.weight))
        return Sample(self.shapes, self.positions, *values)


@dataclass(frozen=True)
class Computed:
    """The target's outputs of each sample, and gradients by parameter, summed over the samples."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]


def cases(part: str, card: Card) -> Cases:
    for family in models.FAMILIES:
        compared: dict[str, Row] = {}
        for name in ("batches of one", "padded", "packed"):
            yield f"{family}, {name}", lambda n=name, f=family, c=compared: compare_once(c, f, card)[n]


def compare_once(compared: dict[str, Row], family: str, card: Card) -> dict[str, Row]:
    if not compared:
        compared |= compare(family, card)
    return compared


def compare(family: str, card: Card) -> dict[str, Row]:
    """For each way to compute a batch: how far it and stock are from float32, and their ratio."""
    forget(card)
    config, samples = models.config_of(family, card, BLOCKS), random_samples(family, card)
    stock = models.random_weights(config, load_config(None, []), card, kind=stock_class_of(config)).to(card.device)
    exact_samples = [sample.to(torch.float32) for sample in samples]
    reference = run_stock(stock, samples, family)
    ours = models.random_weights(config, load_config(None, []), card).to(card.device)
    ours.load_state_dict(stock.state_dict())
    exact = run_stock(stock.float(), exact_samples, family)
    ways: dict[str, Callable[[], Computed]] = {
        "batches of one": lambda: total([run_batch(ours, [sample], "padded") for sample in samples]),
        "padded": lambda: run_batch(ours, samples, "padded"),
        "packed": lambda: run_batch(ours, samples, "packed"),
    }
    return {name: distances(way(), reference, exact) for name, way in ways.items()}


def stock_class_of(config: dict[str, Any]) -> Any:
    import diffusers

    return getattr(diffusers, config["_class_name"])


def random_samples(family: str, card: Card) -> list[Sample]:
    config, random = models.config_of(family, card), torch.Generator().manual_seed(1)
    width, smaller = config[models.FAMILIES[family].text_width_key], 8 if card.small else 1

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).bfloat16().to(card.device)

    samples = []
    for sides, text in SIDES[family]:
        shapes = [(1, 2 * max(1, height // smaller // 2), 2 * max(1, width // smaller // 2)) for height, width in sides]
        counts, rows = [height * width for _, height, width in shapes], max(8, text // smaller)
        target = counts[-1] if models.FAMILIES[family].target_last else counts[0]
        positions = [rows * (i + 1) // len(shapes) for i in range(len(shapes) - 1)] if family == "2.1" else []
        sigma = torch.rand((), generator=random).bfloat16().to(card.device)
        samples.append(
            Sample(shapes, positions, numbers(sum(counts), 64), numbers(rows, width), sigma, numbers(target, 64))
        )
    return samples


# ---- the ways --------------------------------------------------------------------------------------------------------


def watched(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The weights whose gradients are compared: the attention's."""
    return {name: each for name, each in model.named_parameters() if ".attn." in name and each.ndim > 1}


def begin(model: torch.nn.Module) -> None:
    model.requires_grad_(False)
    model.zero_grad()
    for parameter in watched(model).values():
        parameter.requires_grad_(True)


def gradients(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.float() for name, p in watched(model).items() if p.grad is not None}


def targets(output: Tensor, sample: Sample, *, last: bool) -> Tensor:
    """The outputs `[S, 64]` at the target of a sample."""
    length, count = len(sample.image), len(sample.weight)
    return output[length - count : length] if last else output[:count]


def run_stock(stock: Any, samples: Sequence[Sample], family: str) -> Computed:
    """Each sample alone."""
    computed, last = [], models.FAMILIES[family].target_last
    for sample in samples:
        begin(stock)
        arguments = stock_arguments(sample) if last else {"encoder_hidden_states": sample.text[None]}
        output = stock(
            hidden_states=sample.image[None],
            timestep=sample.sigma[None],
            img_shapes=[sample.shapes],
            return_dict=False,
            **arguments,
        )[0][0]
        row = output[-len(sample.weight) :] if last else output[: len(sample.weight)]
        (row * sample.weight).sum().backward()
        computed.append(Computed([row.detach()], gradients(stock)))
    return total(computed)


def stock_arguments(sample: Sample) -> dict[str, Tensor]:
    """The text of Qwen-Image-2.1 in stock's convention: a slot of anything for every four tokens of an image."""
    slots = [height * width // 4 for _, height, width in sample.shapes]
    bounds = [0, *sample.positions, len(sample.text)]
    rows, mask = [], []
    for i, (start, end) in enumerate(itertools.pairwise(bounds)):
        count = slots[i] if i < len(sample.positions) else 0
        rows += [sample.text[start:end], sample.text.new_full((count, sample.text.shape[1]), 7.0)]
        mask += [False] * (end - start) + [True] * count
    is_image = torch.tensor([mask + [True] * slots[-1]], device=sample.text.device)
    return {"encoder_hidden_states": torch.cat(rows)[None], "img_mask": is_image}


def run_batch(model: Any, samples: Sequence[Sample], layout: str) -> Computed:
    """All samples in one batch of ours, padded with large numbers."""
    begin(model)
    model.layout = layout
    lengths = torch.tensor([len(sample.text) for sample in samples])
    positions = {"image_positions": [sample.positions for sample in samples]}
    last = models.FAMILIES["2.1"].transformer == model._stock_class.__name__
    output = model(
        hidden_states=padded([sample.image for sample in samples]),
        encoder_hidden_states=padded([sample.text for sample in samples]),
        encoder_hidden_states_mask=torch.arange(int(lengths.max())) < lengths[:, None] if len(samples) > 1 else None,
        timestep=torch.stack([sample.sigma for sample in samples]),
        img_shapes=[sample.shapes for sample in samples],
        return_dict=False,
        **(positions if last else {}),
    )[0]
    rows = [targets(row, sample, last=last) for row, sample in zip(output, samples, strict=True)]
    torch.stack([(row * sample.weight).sum() for row, sample in zip(rows, samples, strict=True)]).sum().backward()
    return Computed([row.detach() for row in rows], gradients(model))


def padded(rows: list[Tensor]) -> Tensor:
    return pad_sequence(rows, batch_first=True, padding_value=FILL)


def total(each: Sequence[Computed]) -> Computed:
    names = set().union(*(computed.gradients for computed in each))
    summed = {name: torch.stack([c.gradients[name] for c in each if name in c.gradients]).sum(0) for name in names}
    return Computed([output for computed in each for output in computed.outputs], summed)


# ---- comparing -------------------------------------------------------------------------------------------------------


def distances(ours: Computed, stock: Computed, exact: Computed) -> Row:
    found: Row = {}
    for kind in ("outputs", "gradients"):
        values = [distance(kind, each, exact) for each in (ours, stock)]
        found |= {f"{kind}_ours": values[0], f"{kind}_stock": values[1], f"{kind}_ratio": values[0] / values[1]}
    within = max(found["outputs_ratio"], found["gradients_ratio"]) <= AS_FAR
    return {**found, "limit": AS_FAR, "within": within}


def distance(kind: str, computed: Computed, exact: Computed) -> float:
    """The largest relative distance of a sample's outputs, or of a parameter's gradient."""
    if kind == "outputs":
        return max(relative(a, b) for a, b in zip(computed.outputs, exact.outputs, strict=True))
    reached = [name for name, gradient in exact.gradients.items() if gradient.any()]
    return max(relative(computed.gradients[name], exact.gradients[name]) for name in reached)


def relative(a: Tensor, b: Tensor) -> float:
    return float((a.float() - b.float()).norm() / b.float().norm())
