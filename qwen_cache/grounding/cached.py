"""A cache as a mask head sees it: attention and masks of its samples, and where the head sees an edit elsewhere.

What a head has made of the same attention is no mask here: nothing is learned from it, and nothing is judged by it.
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
class Masked(Sequence[Sample]):
    """Samples of a cache as a head learns them: attention `[C, h, w]` and mask `[H, W]`, each read when it is asked."""

    cache: Cache
    positions: Sequence[int]

    def __len__(self) -> int:
        return len(self.positions)

    @overload
    def __getitem__(self, i: int) -> Sample: ...
    @overload
    def __getitem__(self, i: slice) -> Masked: ...
    def __getitem__(self, i: int | slice) -> Sample | Masked:
        if isinstance(i, slice):
            return Masked(self.cache, self.positions[i])
        return self.cache[self.positions[i]]["attention"], self.mask(i)

    def mask(self, i: int) -> torch.Tensor:
        """`[H, W]`, without the attention."""
        return mask_of(self.cache[self.positions[i]])

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the attention, from the index."""
        return [self.cache.row(position).meta.tensors["attention"].shape for position in self.positions]


def masked(cache: Cache) -> list[int]:
    """The positions of the samples that have attention, and a mask that no head has made."""
    if cache.format_version == 1:
        return []
    attention, origin = (cache.table[name] for name in ("attention", "edit_mask_from"))
    rows = zip(attention.is_valid().to_pylist(), origin.to_pylist(), strict=True)
    return [i for i, (is_there, made_by) in enumerate(rows) if is_there and made_by not in (None, "head")]


def nothing_masked(cache: Cache) -> QwenCacheError:
    """Why a cache has no such samples."""
    what = "no sample of this cache has both attention and a mask that no head has made"
    do = "run `qwen-cache build` again with --edit-mask diff --set cache.store_attention=true"
    if cache.format_version == 1:
        what, do = "format v1 has neither attention nor masks", f"{do} --format v2, and another --out"
    elif not any(cache.table["attention"].is_valid().to_pylist()):
        what = "no sample of this cache has attention"
    elif not any(cache.table["edit_mask"].is_valid().to_pylist()):
        what = "no sample of this cache has a mask"
    return QwenCacheError(what, where=cache.folder, do=do)


# ---- where a head sees it elsewhere ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Disagreement:
    """How much the mask of a sample and the head's have in common, and which share of the cells each of them covers."""

    sample: CachedSample
    iou: float
    area: float
    head_area: float

    @property
    def origin(self) -> str:
        """What the mask of the sample was made of."""
        return str(self.sample.row.meta.edit_mask_from)

    def to_json(self) -> dict[str, Any]:
        """As in `inspect --json`."""
        sample = self.sample
        named = {"name": sample.name, "key": sample.key, "prompt": sample.prompt, "edit_mask_from": self.origin}
        return named | {"iou": self.iou, "area": self.area, "head_area": self.head_area}


def disagreements(cache: Cache, head: MaskHead) -> Iterator[Disagreement]:
    """Of all masked samples, in the order of the cache."""
    for position in masked(cache):
        sample = cache[position]
        mask, seen = mask_of(sample), head_mask_of(head, sample)
        yield Disagreement(sample, iou(seen, mask), _area(mask), _area(seen))


def mask_of(sample: CachedSample) -> torch.Tensor:
    """The mask that is cached, `[H, W]`."""
    _, height, width = sample.img_shapes[0]
    return sample["edit_mask"].view(height, width)


def head_mask_of(head: MaskHead, sample: CachedSample) -> torch.Tensor:
    """What the head makes of a sample's attention, on the cells of its mask."""
    _, height, width = sample.img_shapes[0]
    return predict_mask(head, sample["attention"], (height, width)).cpu()


def _area(mask: torch.Tensor) -> float:
    return float((mask > 0.5).float().mean())
