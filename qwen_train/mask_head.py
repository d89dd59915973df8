"""`qwen-train mask-head`: learn from the masks of a cache to read them from attention. No encoder is loaded.

What it trains on is a cache with both: `qwen-cache build --edit-mask diff --set cache.attention=true`. Samples of the
same target are on one side, trained or held out, whatever order they are in. Refused is a cache without attention, or
without masks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import torch
from torch import Tensor

from qwen_cache.config import MaskHeadConfig
from qwen_cache.console import console, plural, progress
from qwen_cache.format.cache import Cache
from qwen_cache.format.errors import TrainError
from qwen_cache.grounding.head import (
    About,
    MaskHead,
    Sample,
    TrainSettings,
    encoder_of,
    iou,
    predict_mask,
    save_head,
    train_head,
)
from qwen_train.data.split import split


@dataclass(frozen=True)
class Masked(Sequence[Sample]):
    """Samples of a cache as a head learns them: attention `[C, h, w]` and mask `[H, W]`, each read when it is asked."""

    cache: Cache
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[Sample]: ...
    def __getitem__(self, i: int | slice) -> Sample | Sequence[Sample]:
        if isinstance(i, slice):
            return Masked(self.cache, self.positions[i])
        sample = self.cache[self.positions[i]]
        _, height, width = sample.img_shapes[0]
        return sample["attention"], sample["edit_mask"].view(height, width)

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the attention, from the index."""
        return [self.cache.row(position).meta.tensors["attention"].shape for position in self.positions]


@dataclass(frozen=True)
class Disagreement:
    """How little the head's mask and the cache's have in common."""

    name: str
    key: str
    iou: float
    edit_mask_from: str


def train_mask_head(cache: Cache, settings: MaskHeadConfig, device: torch.device, out: Path) -> tuple[float, MaskHead]:
    """Train, save to `out`; the mean IoU of held-out samples, and the head."""
    positions = masked(cache)
    targets = cache.table["target"].take(positions).to_pylist()
    training, held_out = split(targets, settings.validation_split, "mask_head.validation_split")
    learned, judged = (Masked(cache, [positions[int(i)] for i in part]) for part in (training, held_out))
    console().print(f"[bold]trains[/]  on {plural(len(learned), 'mask')}, {len(judged)} held out, on {device}")
    with progress() as bar:
        task = bar.add_task("training", total=settings.steps, count="")

        def report(step: int, loss: float) -> None:
            bar.update(task, completed=step + 1, count=f"{step + 1}/{settings.steps}, loss {loss:.3f}")

        how = TrainSettings(
            steps=settings.steps,
            batch_size=settings.batch_size,
            lr=settings.learning_rate,
            base=settings.base,
            size=settings.size,
            device=str(device),
        )
        head, found = train_head(learned, judged, how, settings.seed, report, learned.shapes)
    save_head(head, out, About(encoder_of(cache.recipe.recipe)))
    return found, head


def masked(cache: Cache) -> list[int]:
    """The positions of samples that have both; TrainError where there are none."""
    if cache.format_version == 1:
        raise TrainError("format v1 has no masks", where=cache.folder, do="build with --format v2")
    found = {}
    for name, do in (("attention", "--set cache.attention=true"), ("edit_mask", "--edit-mask diff")):
        column = cache.table[name]
        found[name] = {i for i, is_valid in enumerate(column.is_valid().to_pylist()) if is_valid}
        if not found[name]:
            raise TrainError(
                f"no sample of this cache has {name}", where=cache.folder, do=f"run `qwen-cache build {do}`"
            )
    if not (both := sorted(found["attention"] & found["edit_mask"])):
        raise TrainError("no sample of this cache has both mask and attention", where=cache.folder)
    return both


def disagreements(cache: Cache, head: MaskHead) -> list[Disagreement]:
    """All masked samples, those first in which the head sees the edit elsewhere: misaligned, or described wrongly."""
    positions = masked(cache)
    found = []
    for position, (attention, mask) in zip(positions, Masked(cache, positions), strict=True):
        row = cache.row(position)
        same = iou(predict_mask(head, attention, _size(mask)).cpu(), mask)
        found.append(Disagreement(row.name, row.meta.key, same, str(row.meta.edit_mask_from)))
    return sorted(found, key=lambda each: (each.iou, each.name))


def _size(mask: Tensor) -> tuple[int, int]:
    return mask.shape[0], mask.shape[1]
