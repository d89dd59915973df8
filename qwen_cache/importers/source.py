"""What every importer yields, and what they share: reading other people's files without running what is in them.

An importer is `find(folder, options)`: it lists the samples of a folder without keeping a tensor, and yields a
SourceError for each that cannot be used. `Found.read` reads one. Pickles are opened by torch with `weights_only=True`
and by nothing else; latents that are not packed yet are packed as diffusers' Qwen-Image pipelines pack.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from qwen_cache.errors import SourceError
from qwen_cache.format.sample import ImgShapes

LATENT_CHANNELS = 16
EXACT_IN = {torch.float16: torch.float32, torch.bfloat16: torch.bfloat16, torch.float32: torch.float32}
"""The smallest dtype of the format that holds every number of another one exactly."""

UNREADABLE = (RuntimeError, EOFError, OSError, ValueError, LookupError, TypeError, AttributeError, zipfile.BadZipFile)
"""What torch.load raises about files that are cut off or were never its own."""


@dataclass(frozen=True)
class Options:
    """What some tools do not store and the user has to say."""

    image_sizes: tuple[tuple[int, int], ...] = ()
    """(height, width) in tokens of 16 pixels: all that occur."""
    captions: Path | None = None
    """A folder of .txt files."""


@dataclass(frozen=True)
class Imported:
    """One sample: tensors by the names of the format, unpadded and packed, in the dtype of their file.

    `empty_prompt_embeds` is whole, and may be missing.
    """

    prompt: str
    img_shapes: ImgShapes
    tensors: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Found:
    """A sample that is there; `read` opens its files and raises SourceError when they are not what they must be."""

    name: str
    where: str
    read: Callable[[], Imported]


def load_pickled(file: Path | BinaryIO, where: str) -> Any:
    """What `torch.save` wrote, as long as it is made of tensors and plain values."""
    again = "make this sample's cache again"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a damaged file torch guesses at causes; ours is the error below
            return torch.load(file, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise SourceError("a file of this sample is missing", where=where, do=again) from None
    except pickle.UnpicklingError as error:
        what = "not a file of tensors alone, and no code of a pickle is ever run"
        raise SourceError(what, where=where, found=_first_line(error), do=again) from None
    except UNREADABLE as error:
        raise SourceError("cannot be read", where=where, found=_first_line(error), do=again) from None


def check_tensor(value: Any, shape: str, where: str) -> torch.Tensor:
    """`value`, when it is a dense tensor of floats with as many axes as `shape` (`[S, 64]`) has names."""
    axes = shape.count(",") + 1
    if (
        not isinstance(value, torch.Tensor)
        or value.layout != torch.strided
        or value.dtype not in EXACT_IN
        or value.ndim != axes
        or 0 in value.shape
    ):
        is_tensor = isinstance(value, torch.Tensor)
        raise SourceError(
            "not a tensor of the expected kind",
            where=where,
            expected=f"{shape} in float16, bfloat16 or float32",
            found=f"{list(value.shape)} in {value.dtype}" if is_tensor else type(value).__name__,
        )
    if value.untyped_storage().nbytes() < value.numel() * value.element_size():
        raise SourceError(
            "a tensor claims more numbers than its file has",
            where=where,
            expected=f"{value.numel() * value.element_size()} bytes",
            found=value.untyped_storage().nbytes(),
        )
    return value


def unpad(embeds: torch.Tensor, mask: torch.Tensor, where: str) -> torch.Tensor:
    """The rows of `embeds` `[L, D]` that `mask` `[L]` keeps: ones, and then zeros."""
    kept = mask != 0
    length = int(kept.sum())
    if mask.shape != embeds.shape[:1] or not length or not bool(kept[:length].all()):
        raise SourceError(
            "the mask does not fit the embeddings",
            where=where,
            expected=f"{len(embeds)} entries: ones, and then zeros",
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


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
