"""The parts that importers and exporters share: a tool's files within bounds, and what a tool can hold."""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch

from qwen_cache.errors import SourceError, first_line
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import ImgShapes, SampleMeta
from qwen_cache.storage.files import open_file

# ---- source ----------------------------------------------------------------------------------------------------------
# The interface of importers, and safe reading of other trainers' files: no code in them is ever run.
#
# An importer is `find(folder, options)`: it yields a FoundSample for each sample of a folder, without keeping tensors,
# and a SourceError for each that cannot be used. Pickles are opened only by torch, with `weights_only=True`. Unpacked
# latents are packed as in diffusers' Qwen-Image pipelines.

LATENT_CHANNELS = 16
EXACT_IN = {torch.float16: torch.float32, torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
"""The smallest dtype of the format that represents a source dtype exactly."""

UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile)
"""Errors of torch.load for files that are truncated or of another kind."""


@dataclass(frozen=True)
class Options:
    """Facts that some tools do not store, so that the user must give them."""

    image_sizes: tuple[tuple[int, int], ...] = ()
    """All sizes of the images: (height, width) in tokens of 16 pixels."""
    captions: Path | None = None
    """The folder of the .txt files with the captions."""


@dataclass(frozen=True)
class ImportedSample:
    """One sample: its tensors by the names of the format, unpadded and packed, in the dtype of their file.

    `empty_prompt_embeds` is optional, and complete: with the prefix that it shares with the prompt.
    """

    prompt: str
    img_shapes: ImgShapes
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class FoundSample:
    """A sample in the imported folder; `read` loads its files, and raises SourceError if they are invalid."""

    name: str
    where: str
    read: Callable[[], ImportedSample]


def load_pickled(file: Path | BinaryIO, where: str) -> Any:
    """The value in a file of `torch.save`, if it consists of tensors and plain values; SourceError otherwise."""
    again = "make this sample's cache again"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch guesses why a file is damaged; our error follows
            if not isinstance(file, Path):
                return torch.load(file, map_location="cpu", weights_only=True)
            with open(open_file(file), "rb") as opened:
                return torch.load(opened, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SourceError("a file of this sample is missing", where=where, do=again) from None
    except pickle.UnpicklingError as error:
        what = "the file contains more than tensors, and code in a pickle is never run"
        raise SourceError(what, where=where, found=first_line(error), do=again) from None
    except UNREADABLE as error:
        raise SourceError("cannot be read", where=where, found=first_line(error), do=again) from None


def check_tensor(value: Any, shape: str, where: str) -> torch.Tensor:
    """`value`, if it is a dense float tensor with as many axes as `shape`, such as `[S, 64]`; SourceError otherwise."""
    axes = shape.count(",") + 1
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.device.type != "cpu"  # a tensor on the meta device has no values, wherever it is loaded
        or value.dtype not in EXACT_IN
        or value.ndim != axes
        or 0 in value.shape
    ):
        is_tensor = isinstance(value, torch.Tensor)
        raise SourceError(
            "not a tensor of the expected kind",
            where=where,
            expected=f"{shape} in float16, bfloat16 or float32",
            found=f"{list(value.shape)} in {value.dtype} on {value.device}" if is_tensor else type(value).__name__,
        )
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise SourceError(
            "a tensor is larger than its storage in the file",
            where=where,
            expected=f"{value.numel() * value.element_size()} bytes",
            found=value.untyped_storage().nbytes(),
        )
    return value


def unpad(embeds: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """The rows of `embeds` `[L, D]` that `mask` `[L]` keeps; SourceError unless it is ones followed by zeros."""
    kept = mask != 0
    length = int(kept.sum())
    if mask.shape != embeds.shape[:1] or not length or not bool(kept[:length].all()):
        raise SourceError(
            "the mask does not fit the embeddings",
            where=where,
            expected=f"{len(embeds)} entries: ones, then zeros",
            found=f"{length} ones in {list(mask.shape)}",
        )
    return embeds[:length]


def pack_latents(latents: torch.Tensor, where: str) -> tuple[torch.Tensor, tuple[int, int, int]]:
    """Latents `[16, 1, H, W]` as tokens `[S, 64]` and their `(1, h, w)`.

    A token is a 2×2 patch in the order (channel, row, column); tokens are in raster order.
    """
    channels, frames, height, width = latents.shape
    if channels != LATENT_CHANNELS or frames != 1 or height % 2 or width % 2:
        raise SourceError(
            "not the latents of one image",
            where=where,
            expected=f"[{LATENT_CHANNELS}, 1, H, W] with even H and W",
            found=list(latents.shape),
        )
    h, w = height // 2, width // 2
    patches = latents.reshape(channels, h, 2, w, 2).permute(1, 3, 0, 2, 4)
    return patches.reshape(h * w, channels * 4), (1, h, w)


# ---- target ----------------------------------------------------------------------------------------------------------
# The interface of exporters, and what they share.
#
# An exporter is a `Tool`: which tensors it holds, which samples it refuses, and `write`, which fills a new folder.

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
    """The files that `Tool.write` writes."""

    samples: Sequence[NamedSample]
    folder: Path
    """The folder that is being filled."""
    final: Path
    """The path that it will have, absolute: for settings files that name it."""
    takes_controls: bool
    """True if the cache is of an editing model."""
    zero_cond_t: bool
    """True if the transformer is one like Edit-2511's, for tools that store it with each sample."""
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
    """The next step with the export: a line to run there."""
    unused: Mapping[str, str] = field(default_factory=dict)
    """Tensors that its training has no use for, each with the reason: they are left out without a question."""


def images_of(sample: Sample) -> list[torch.Tensor]:
    """The latents `[16, 1, H, W]` of the target and of each control: tokens of 2×2 patches, unpacked.

    The inverse of `qwen_cache.trainers.files.pack_latents`.
    """
    tokens = [sample["image_latents"]]
    if "control_latents" in sample:
        sizes = [h * w for _, h, w in sample.img_shapes[1:]]
        tokens += torch.split(sample["control_latents"], sizes)
    return [_unpacked(each, h, w) for each, (_, h, w) in zip(tokens, sample.img_shapes, strict=True)]


def _unpacked(tokens: torch.Tensor, h: int, w: int) -> torch.Tensor:
    patches = tokens.reshape(h, w, tokens.shape[1] // 4, 2, 2)
    return patches.permute(2, 0, 3, 1, 4).reshape(-1, 1, 2 * h, 2 * w).contiguous()
