"""`qwen-train mask-head`: learn from the masks of a cache to read them from attention. No encoder is loaded.

The cache must have both: `build --edit-mask diff --set cache.store_attention=true`. Samples of the same target are on
one side, trained or held out, whatever order they are in. Refused are a cache without attention, without masks, or with
too few targets to hold any out, and a loss that is not finite; then nothing is written. Experimental.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch.nn.functional import interpolate

from qwen_cache.console import console, plural, progress
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Cache
from qwen_cache.grounding.cached import Masked, masked, nothing_masked
from qwen_cache.grounding.head import About, TrainSettings, encoder_of, iou, save_head, train_head
from qwen_cache.settings.train import MaskHeadConfig
from qwen_train.data.split import split

AVERAGED = 1000
"""Masks that the best constant mask is made of, at most: more would not change it."""
LEVELS = 16
"""At which the mean of the masks is cut off, to find the best."""


@dataclass(frozen=True)
class Trained:
    """What became of it: mean IoUs on `held_out` masks, of the head and of one mask for all images."""

    head: str
    trained: int
    held_out: int
    iou: float
    constant_mask_iou: float

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        found = f"IoU {self.iou:.2f} on {plural(self.held_out, 'mask')} held out"
        text = f"{self.head}: {found}; one mask for all images would have {self.constant_mask_iou:.2f}"
        return text if self.iou > self.constant_mask_iou else f"{text}\n  → train on more masks, or set mask_head.steps"


def train_mask_head(cache: Cache, settings: MaskHeadConfig, device: torch.device, out: Path) -> Trained:
    """Train a head, and save it to `out`."""
    if out.is_dir():
        raise ConfigError("a folder has this name", where=out, do="give another name with --out")
    if not (positions := masked(cache)):
        raise nothing_masked(cache)
    targets = cache.table["target"].take(positions).to_pylist()
    parts = split(targets, settings.validation_split, "mask_head.validation_split")
    learned, judged = (Masked(cache, [positions[i] for i in part]) for part in parts)
    out.parent.mkdir(parents=True, exist_ok=True)
    without_looking = constant_mask_iou(learned, judged, settings.mask_size)
    console().print(f"[bold]trains[/] on {plural(len(learned), 'mask')}, {len(judged)} held out, on {device}")
    how = TrainSettings(
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

        head, found = train_head(learned, judged, how, settings.seed, report, learned.shapes)
    save_head(head, out, About(encoder_of(cache.recipe.recipe)))
    return Trained(str(out), len(learned), len(judged), found, without_looking)


def constant_mask_iou(learned: Masked, judged: Masked, size: int) -> float:
    """The mean IoU on `judged` of the one mask for all images that does best on `learned`.

    It is the mean of the masks, cut off at some level: what one knows of where edits are without looking.
    """
    known = [learned.mask(i) for i in range(0, len(learned), math.ceil(len(learned) / AVERAGED))]
    mean = torch.stack([interpolate(mask[None, None], (size, size), mode="area") for mask in known]).mean(0)

    def found(level: float, masks: list[torch.Tensor]) -> float:
        return fmean(iou(interpolate(mean, mask.shape, mode="bilinear")[0, 0] - level + 0.5, mask) for mask in masks)

    best = max((float(mean.max()) * i / LEVELS for i in range(LEVELS + 1)), key=lambda level: found(level, known))
    return found(best, [judged.mask(i) for i in range(len(judged))])
