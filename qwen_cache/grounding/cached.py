"""Experimental: never run on the real encoder's attention. A cache as training data of a mask head.

Samples with attention and a mask, and the disagreements of those masks with a head. Masks that a head predicted are
left out: they are neither training data nor ground truth.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

import torch

from qwen_cache.errors import QwenCacheError
from qwen_cache.format.cache import Cache
from qwen_cache.format.cache import Sample as CachedSample
from qwen_cache.grounding.head import MaskHead, Sample, iou, predict_mask


@dataclass(frozen=True)
class MaskedSamples(Sequence[Sample]):
    """Samples of a cache for a head: attention `[C, h, w]` and mask `[H, W]`, each read on access."""

    cache: Cache
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> MaskedSamples: ...
    def __getitem__(self, i: int | slice) -> Sample | MaskedSamples:
        if isinstance(i, slice):
            return MaskedSamples(self.cache, self.positions[i])
        return self.cache[self.positions[i]]["attention"], self.mask(i)

    def mask(self, i: int) -> torch.Tensor:
        """The mask `[H, W]` alone."""
        return mask_of(self.cache[self.positions[i]])

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of the attention, from the index."""
        return [self.cache.row(position).meta.tensors["attention"].shape for position in self.positions]


def masked_positions(cache: Cache) -> list[int]:
    """The positions of the samples with attention and a mask that is not from a head."""
    if cache.format_version == 1:
        return []
    attention, origin = (cache.table[name] for name in ("attention", "edit_mask_from"))
    rows = zip(attention.is_valid().to_pylist(), origin.to_pylist(), strict=True)
    return [i for i, (is_there, made_by) in enumerate(rows) if is_there and made_by not in (None, "head")]


def no_masked_samples(cache: Cache) -> QwenCacheError:
    """The reason why a cache has no such samples, as an error to raise."""
    what = "no sample of this cache has both attention and a mask that is not from a head"
    do = "run `qwen-cache build` again with --edit-mask diff --set cache.store_attention=true"
    if cache.format_version == 1:
        what, do = "format v1 has neither attention nor masks", f"{do} --format v2, and another --out"
    elif not any(cache.table["attention"].is_valid().to_pylist()):
        what = "no sample of this cache has attention"
    elif not any(cache.table["edit_mask"].is_valid().to_pylist()):
        what = "no sample of this cache has a mask"
    return QwenCacheError(what, where=cache.folder, do=do)


# ---- where head and mask disagree ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """The IoU of a sample's mask and the head's prediction, and the fraction of the cells that each covers."""

    sample: CachedSample
    iou: float
    area: float
    head_area: float

    @property
    def origin(self) -> str:
        """The origin of the sample's mask."""
        return str(self.sample.row.meta.edit_mask_from)

    def to_json(self) -> dict[str, Any]:
        """As in `inspect --json`."""
        sample = self.sample
        description = {"name": sample.name, "key": sample.key, "prompt": sample.prompt, "edit_mask_from": self.origin}
        return description | {"iou": self.iou, "area": self.area, "head_area": self.head_area}


def disagreements(cache: Cache, head: MaskHead) -> Iterator[Disagreement]:
    """Disagreements of all masked samples, in the order of the cache."""
    for position in masked_positions(cache):
        sample = cache[position]
        mask, predicted = mask_of(sample), head_mask_of(head, sample)
        yield Disagreement(sample, iou(predicted, mask), _area(mask), _area(predicted))


def mask_of(sample: CachedSample) -> torch.Tensor:
    """The cached mask, `[H, W]`."""
    _, height, width = sample.img_shapes[0]
    return sample["edit_mask"].view(height, width)


def head_mask_of(head: MaskHead, sample: CachedSample) -> torch.Tensor:
    """The head's prediction from a sample's attention, `[H, W]` on the cells of its mask."""
    _, height, width = sample.img_shapes[0]
    return predict_mask(head, sample["attention"], (height, width)).cpu()


def _area(mask: torch.Tensor) -> float:
    return float((mask > 0.5).float().mean())
