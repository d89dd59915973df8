"""Time, utilisation and memory of training steps, against the FLOPs that they need and the memory that is predicted.

A step is that of `qwen-train run` on a batch that is already on the device: loss, backward, clipping, AdamW. What
`predict_memory` says does not fit is not tried; a few blocks of the same width then give an extrapolated time.
Weights are random, so losses mean nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from bench_memory import random_batch
from torch.utils._triton import has_triton

from qwen_cache.settings.load import Config, load_config
from qwen_train.data.batches import Batch
from qwen_train.memory.prediction import RESERVED, Memory, attention_bytes, host_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import with_layout
from qwen_train.training.loss import compute_loss
from qwen_train.training.optimizers import make_optimizer
from qwen_train.weights import compute_dtype, recomputed_blocks, trainable

from . import flops, models
from .measure import SIMULATED, Card, Cases, Row, UnavailableError, forget, need_host_memory, peaks, timed

FEW_BLOCKS = (12, 6)
"""Blocks of a model that fits where the whole one does not; the difference gives the time of one block."""
Images = tuple[tuple[int, int], ...]
"""Sides in pixels: of the target, then of the controls."""
SQUARE: Images = ((1024, 1024), (1024, 1024))
HALF: Images = ((512, 512), (512, 512))
MIXED: tuple[Images, ...] = (
    SQUARE,
    HALF,
    ((768, 1344), (768, 1344)),
    ((1344, 768), (1344, 768), (1344, 768)),
)


@dataclass(frozen=True)
class Step:
    """A training step: settings of `qwen-train run`, and the images of each sample of its batch."""

    name: str
    settings: tuple[str, ...] = ()
    samples: tuple[Images, ...] = (SQUARE,)
    family: str = "20b"
    text: int | None = None
    """Text tokens of each sample; None for those of an edit."""


def layouts(name: str, *samples: Images) -> list[Step]:
    return [Step(f"{name}, {layout}", (f"train.layout={layout}",), samples) for layout in ("padded", "packed")]


FP8, NF4, INT8 = "model.quantization=fp8", "model.quantization=nf4", "model.quantization=int8"
CONVROT, W8A8 = "model.quantization=int8_convrot", "model.quantization=fp8_w8a8"
BACKWARD_IN_BF16 = "train.quantized_backward=false"
COMPILED = "train.compile=true"
ACTIVATIONS = "train.offload_activations=true"
TABULATED = "train.tabulated_modulation=true"
STEPS: dict[str, list[Step]] = {
    "bf16": [Step("1024²"), Step("512²", samples=(HALF,))],
    "fp8": [Step("fp8", (FP8,)), Step("fp8, tabulated modulation", (FP8, TABULATED))],
    "int8": [Step("int8", (INT8,))],
    "products": [
        Step("bf16, compiled", (COMPILED,)),
        Step("int8_convrot", (CONVROT,)),
        Step("int8_convrot, compiled", (CONVROT, COMPILED)),
        Step("int8_convrot, compiled, backward in bf16", (CONVROT, COMPILED, BACKWARD_IN_BF16)),
        Step("fp8_w8a8", (W8A8,)),
        Step("fp8_w8a8, compiled", (W8A8, COMPILED)),
        Step("fp8_w8a8, compiled, backward in bf16", (W8A8, COMPILED, BACKWARD_IN_BF16)),
    ],
    "nf4": [Step("nf4", (NF4,)), Step("nf4, tabulated modulation", (NF4, TABULATED))],
    "offload": [
        Step("30 blocks offloaded", ("train.offload_blocks=30",)),
        Step("60 blocks offloaded", ("train.offload_blocks=60",)),
        Step("30 blocks offloaded, tabulated modulation", ("train.offload_blocks=30", TABULATED)),
        Step("60 blocks offloaded, compiled", ("train.offload_blocks=60", COMPILED)),
        Step("60 blocks offloaded, every second block", ("train.offload_blocks=60", "train.gradient_checkpointing=2")),
        Step("activations offloaded", (ACTIVATIONS,)),
        Step("60 blocks and activations offloaded, compiled", ("train.offload_blocks=60", ACTIVATIONS, COMPILED)),
        Step("60 blocks and activations offloaded, × 4", ("train.offload_blocks=60", ACTIVATIONS), (SQUARE,) * 4),
    ],
    "tabulated": [Step("tabulated modulation", (TABULATED,))],
    "layouts": [
        *layouts("512² × 8", *[HALF] * 8),
        *layouts("1024² × 2", SQUARE, SQUARE),
        *layouts("mixed sizes × 4", *MIXED),
    ],
    "checkpointing": [
        Step("every second block", ("train.gradient_checkpointing=2",)),
        Step("no block", ("train.gradient_checkpointing=false",)),
    ],
    "compile": [
        Step("compiled", (COMPILED,)),
        Step("compiled, flash attention", (COMPILED, "train.attention=flash")),
        Step("compiled, 512²", (COMPILED,), (HALF,)),
        Step("compiled, every second block", (COMPILED, "train.gradient_checkpointing=2")),
        Step("compiled, no block", (COMPILED, "train.gradient_checkpointing=false")),
        Step("compiled, mixed sizes × 4", (COMPILED,), MIXED),
        Step("compiled, Qwen-Image-2.1", (COMPILED,), family="2.1"),
    ],
    "2.1": [
        Step("Qwen-Image-2.1", family="2.1"),
        Step("Qwen-Image-2.1, four draws", ("train.noise_draws=4",), family="2.1"),
    ],
    "full": [
        Step("20B, full", ("train.method=full",)),
        Step("Qwen-Image-2.1, full", ("train.method=full",), family="2.1"),
    ],
}
"""By the name of a part. Each is bf16, a LoRA of rank 16 and 1024² with one control, unless it says otherwise."""


def cases(part: str, card: Card) -> Cases:
    for step in STEPS[part.partition("/")[2]]:
        yield step.name, lambda step=step: measure(step, card)


# ---- one case --------------------------------------------------------------------------------------------------------


def measure(step: Step, card: Card) -> Row:
    """The whole model if it fits; else a few blocks of it, with the extrapolated time."""
    config = models.config_of(step.family, card)
    settings = settings_of(step, card, config)
    check(settings, card)
    batch = [models.edit(step.family, card, *images, text=step.text) for images in step.samples]
    predicted = predict(config, settings, batch)
    if on_host := host_bytes(config, settings, batch):
        need_host_memory(on_host, "offloading")
    if fits(predicted, card):
        row = measure_blocks(config, settings, batch, predicted, card)
        row["seconds_whole"] = row["seconds"]
    else:
        row = extrapolate(step, batch, predicted, card)
    needed = flops.of_training(config, settings, batch)
    tokens = sum(sum(math.prod(shape) for shape in it.img_shapes) + it.text_tokens for it in batch)
    described = {"settings": list(step.settings), "samples": len(batch), "tokens": tokens, "tflop": needed / 1e12}
    return {**described, **row, "tflops": needed / row["seconds_whole"] / 1e12}


def predict(config: dict[str, Any], settings: Config, batch: Sequence[SampleSize]) -> Memory:
    """The memory of a step; compiled blocks that are recomputed keep their attention."""
    memory, layers = predict_memory(config, settings, batch), int(config["num_layers"])
    if settings.train.compile is not True or settings.train.offload_blocks or settings.train.offload_activations:
        return memory
    kept = len(recomputed_blocks(settings.train.gradient_checkpointing, layers)) * attention_bytes(
        config, settings, batch
    )
    return replace(memory, activations=memory.activations + kept)


def fits(predicted: Memory, card: Card) -> bool:
    """True if a step fits the free memory, of which this process has taken its context already."""
    return predicted.total - RESERVED <= card.memory


def settings_of(step: Step, card: Card, config: dict[str, Any]) -> Config:
    """The settings of a step; a small model has as large a share of its blocks offloaded."""
    real = models.REAL[step.family]["num_layers"]
    return with_layout(load_config(None, offload_share(step, config["num_layers"], real)), card.device)


def check(settings: Config, card: Card) -> None:
    """UnavailableError for what this kind of device lacks."""
    if settings.train.compile is True and (card.device.type == SIMULATED or not has_triton()):
        raise UnavailableError(f"torch.compile has no Triton for {card.device.type}")


def extrapolate(step: Step, batch: Sequence[SampleSize], whole: Memory, card: Card) -> Row:
    """The row of a few blocks; `seconds_whole` is the time that all blocks would take."""
    rows, layers = [], models.config_of(step.family, card)["num_layers"]
    for blocks in FEW_BLOCKS if not card.small else (4, 2):
        config = models.config_of(step.family, card, blocks)
        settings = with_layout(load_config(None, offload_share(step, blocks, layers)), card.device)
        predicted = predict(config, settings, batch)
        if not fits(predicted, card):
            sizes = f"{whole.total / 1e9:.1f} GB, {blocks} blocks of it {predicted.total / 1e9:.1f} GB"
            raise UnavailableError(f"it takes {sizes} (predicted), and {card.memory / 1e9:.1f} GB are free")
        rows.append(measure_blocks(config, settings, batch, predicted, card))
    more, few = rows
    per_block = (more["seconds"] - few["seconds"]) / (more["blocks"] - few["blocks"])
    seconds = more["seconds"] + per_block * (layers - more["blocks"])
    return {**more, "seconds_whole": max(seconds, more["seconds"]), "needed": whole.total}


def offload_share(step: Step, blocks: int, layers: int) -> list[str]:
    """The settings with as large a share of offloaded blocks."""
    name = "train.offload_blocks="
    return [
        f"{name}{round(int(each.removeprefix(name)) * blocks / layers)}" if each.startswith(name) else each
        for each in step.settings
    ]


def measure_blocks(
    config: dict[str, Any], settings: Config, batch: Sequence[SampleSize], predicted: Memory, card: Card
) -> Row:
    """Time and peaks of a transformer of this config, on a batch that stays on the device."""
    left = forget(card)
    dtype = compute_dtype(settings.train)
    data = random_batch(config, settings, batch).to(card.device, dtype)
    model = models.for_training(config, settings, card, data.sigma)
    work = training_step(model, data, settings, card)
    work()  # allocates the optimizer's state
    forget(card)
    row = timed(work, card, warm_up=1 + 2 * (settings.train.compile is True))
    expected = {"predicted": predicted.total - predicted.reserved, "predicted_reserved": predicted.total}
    return {"blocks": config["num_layers"], **row, **expected, **peaks(card, left)}


def training_step(model: Any, batch: Batch, settings: Config, card: Card) -> Callable[[], None]:
    """The step of `qwen_train.train`, without its checks and its log."""
    parameters = trainable(model)
    optimizer, _ = make_optimizer(settings, parameters)
    dtype = compute_dtype(settings.train)

    @torch.autocast(card.device.type, dtype, enabled=dtype == torch.bfloat16)
    def transformer(**arguments: Any) -> Any:
        return model(**arguments)

    def step() -> None:
        loss = compute_loss(transformer, batch)
        float(loss.detach())
        loss.backward()
        float(torch.nn.utils.clip_grad_norm_(parameters, settings.train.max_grad_norm or math.inf))
        optimizer.step()
        optimizer.zero_grad()

    return step
