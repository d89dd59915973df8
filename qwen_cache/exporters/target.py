"""The interface of exporters, and what they share.

An exporter is a `Tool`: which tensors it holds, which samples it refuses, and `write`, which fills a new folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import SampleMeta

ALWAYS = frozenset({"image_latents", "control_latents", "prompt_embeds"})
"""Tensors that every tool holds."""
FOR_PEOPLE = frozenset({"attention", "thumbnails"})
"""Tensors that no training depends on; they are left out without a question."""


class NamedSample(NamedTuple):
    """A sample and the stem of its files, unique within the export."""

    stem: str
    sample: Sample


@dataclass(frozen=True)
class Export:
    """What `Tool.write` writes."""

    samples: Sequence[NamedSample]
    folder: Path
    """The folder that is being filled."""
    final: Path
    """Where it will be, absolute: for settings files that name it."""
    takes_controls: bool
    """Whether the cache is of an editing model."""
    zero_cond_t: bool
    """Whether the transformer is one like Edit-2511's, for tools that store it with each sample."""
    on_sample: Callable[[], None]


@dataclass(frozen=True)
class Refusal:
    """Why a tool cannot hold a sample, and what to do."""

    what: str
    do: str


@dataclass(frozen=True)
class Tool:
    """A trainer that caches are exported for."""

    title: str
    holds: frozenset[str]
    """The tensors that its files hold."""
    refusing: Callable[[Iterable[SampleMeta]], Callable[[SampleMeta], Refusal | None]]
    """A function that says of one sample after another why the tool cannot hold it, beside those that it can."""
    write: Callable[[Export], None]
    command: str
    """What to do with the export: a line to run there."""


def images_of(sample: Sample) -> list[torch.Tensor]:
    """The latents `[16, 1, H, W]` of the target and of each control: tokens of 2×2 patches, unpacked.

    The inverse of `qwen_cache.importers.source.pack_latents`.
    """
    tokens = [sample["image_latents"]]
    if "control_latents" in sample:
        sizes = [h * w for _, h, w in sample.img_shapes[1:]]
        tokens += torch.split(sample["control_latents"], sizes)
    return [_unpacked(each, h, w) for each, (_, h, w) in zip(tokens, sample.img_shapes, strict=True)]


def _unpacked(tokens: torch.Tensor, h: int, w: int) -> torch.Tensor:
    patches = tokens.reshape(h, w, tokens.shape[1] // 4, 2, 2)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, 1, 2 * h, 2 * w).contiguous()
