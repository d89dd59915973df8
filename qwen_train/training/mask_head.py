"""`qwen-train mask-head` (experimental): train a head that predicts edit masks from stored attention, without encoders.

The cache needs masks and attention: `build --edit-mask diff --set cache.store_attention=true`. Samples of the same
target are all trained or all held out, in any order. A cache without attention or masks, or with too few targets to
hold any out, and a loss that is not finite are refused; then nothing is written.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import interpolate

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.experimental.masks import (
    HeadMetadata,
    MaskedSamples,
    TrainSettings,
    encoder_of,
    iou,
    masked_positions,
    no_masked_samples,
    save_head,
    train_head,
)
from qwen_cache.format.cache import Cache
from qwen_cache.settings.sections import MaskHeadConfig
from qwen_cache.storage.files import make_folder
from qwen_cache.terminal import console, plural, progress
from qwen_train.data.planned import split

AVERAGED = 1000
"""The most masks averaged for the best constant mask; more would not change it."""
LEVELS = 16
"""Thresholds tried on the mean mask."""


@dataclass(frozen=True)
class HeadResult:
    """A trained head, and mean IoUs on `held_out` masks: of the head, and of one mask for all images."""

    head: str
    trained: int
    held_out: int
    iou: float
    constant_mask_iou: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        result = f"IoU {self.iou:.2f} on {plural(self.held_out, 'held-out mask')}"
        text = f"{self.head}: {result}; one mask for all images would have {self.constant_mask_iou:.2f}"
        if self.iou > self.constant_mask_iou:
            return text
        return f"{text}\n  → train on more masks, or set mask_head.steps"


def train_mask_head(cache: Cache, settings: MaskHeadConfig, device: torch.device, out: Path) -> HeadResult:
    """Train a head, and save it to `out`; ConfigError or TrainError in the cases that the module's docstring lists."""
    if out.is_dir():
        raise ConfigError("a folder has this name", where=out, do="give another name with --out")
    if not (positions := masked_positions(cache)):
        raise no_masked_samples(cache)
    targets = cache.table["target"].take(positions).to_pylist()
    parts = split(targets, settings.validation_split, "mask_head.validation_split")
    training, held_out = (MaskedSamples(cache, [positions[i] for i in part]) for part in parts)
    make_folder(out.parent)
    baseline = constant_mask_iou(training, held_out, settings.mask_size)
    console().print(f"[bold]training[/] on {plural(len(training), 'mask')}, {len(held_out)} held out, on {device}")
    train_settings = TrainSettings(
        steps=settings.steps,
        batch_size=settings.batch_size,
        lr=settings.learning_rate,
        base=settings.base_channels,
        size=settings.mask_size,
        device=str(device),
    )
    with progress() as bar:
        task = bar.add_task("training", total=settings.steps, count="")

        def report(step: int, loss: float) -> None:
            if not math.isfinite(loss):
                do = "lower mask_head.learning_rate"
                raise TrainError(f"the loss of step {step + 1} is not a number", found=loss, do=do)
            bar.update(task, completed=step + 1, count=f"{step + 1}/{settings.steps}, loss {loss:.3f}")

        head, mean_iou = train_head(training, held_out, train_settings, settings.seed, report, training.shapes)
    save_head(head, out, HeadMetadata(encoder_of(cache.recipe.recipe)))
    return HeadResult(str(out), len(training), len(held_out), mean_iou, baseline)


def constant_mask_iou(training: MaskedSamples, held_out: MaskedSamples, size: int) -> float:
    """The mean IoU on `held_out` of the constant mask that does best on `training`: a baseline that ignores the image.

    It is the mean of the training masks, thresholded at the best level.
    """
    known = [training.mask(i) for i in range(0, len(training), math.ceil(len(training) / AVERAGED))]
    mean = torch.stack([interpolate(mask[None, None], (size, size), mode="area") for mask in known]).mean(0)

    def mean_iou(level: float, masks: list[torch.Tensor]) -> float:
        return fmean(iou(interpolate(mean, mask.shape, mode="bilinear")[0, 0] - level + 0.5, mask) for mask in masks)

    best = max((float(mean.max()) * i / LEVELS for i in range(LEVELS + 1)), key=lambda level: mean_iou(level, known))
    return mean_iou(best, [held_out.mask(i) for i in range(len(held_out))])
