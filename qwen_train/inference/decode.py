"""Decode the latents of a run's validation images: `qwen-train decode`, and `validation.vae_device`.

Each image in a file of latents gets a PNG beside the file. Any device will do, at any time. Existing PNGs are skipped,
and new ones are written atomically. Damaged files, and files without metadata about their images, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from io import BytesIO
from math import prod
from pathlib import Path

import torch
from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.encode.vae import VaeThatFits, check_decoder, decode_latents, load_vae, parts_of
from qwen_cache.errors import TrainError
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.sizes import Size
from qwen_cache.storage.files import write_durably
from qwen_cache.storage.remembered import check_safetensors
from qwen_train.run import VALIDATION, image_titles, png_of


@dataclass(frozen=True)
class Latents:
    """One image of a latents file."""

    file: Path
    tokens: slice
    size: Size
    png: Path
    title: str
    """The sample's name and, where a file has several images, the guidance of this one."""


@dataclass(frozen=True)
class Decoder:
    """The VAE of a model, which is loaded with the first image; ModelError if it decodes other latents."""

    model: ModelFolder
    device: torch.device
    dtype: torch.dtype

    def __post_init__(self) -> None:
        check_decoder(self.model)  # now, not after hours of training

    @cached_property
    def vae(self) -> VaeThatFits:
        return load_vae(self.model, self.device, self.dtype)

    def decode(self, image: Latents) -> Image.Image:
        """Write the PNG of an image."""
        with safe_open(image.file, framework="pt") as file:
            pixels = decode_latents(self.vae, file.get_tensor("latents")[image.tokens][None], image.size)
        data = BytesIO()
        pixels.save(data, "PNG")
        write_durably(image.png, data.getvalue())
        return pixels


def not_decoded(files: Iterable[Path]) -> list[Latents]:
    """The images in these files that have no PNG; TrainError for a file that is not one of latents."""
    return [image for file in files for image in latents_in(file) if not image.png.exists()]


def latents_in(path: Path) -> Iterator[Latents]:
    """The images in a file; the first PNG has the file's name, the others also a number."""
    try:
        check_safetensors(path, TrainError)
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            shapes = json.loads(metadata["img_shapes"])
            parts, titles = list(parts_of(shapes)), titles_of(metadata, len(shapes), path.stem)
            tokens = file.get_slice("latents").get_shape()[0]
    except (OSError, SafetensorError, LookupError, TypeError, ValueError, RecursionError) as error:
        raise TrainError(
            f"these are not the latents of a run: {error}",
            where=path,
            do=f"name the output folder of a run, or a folder or file in its {VALIDATION}/",
        ) from None
    if sum(map(prod, shapes)) != tokens:
        raise TrainError(
            "the number of latents does not fit the images", where=path, expected=f"{shapes}", found=f"{tokens}"
        )
    for number, (part, size) in enumerate(parts):
        yield Latents(path, part, size, png_of(path, number), titles[number])


def titles_of(metadata: Mapping[str, str], count: int, otherwise: str) -> list[str]:
    """The name of each image of a file; ValueError if what differs between them is missing of some."""
    name, titles = metadata.get("name") or otherwise, image_titles(metadata)
    if titles == [""]:
        return [name] * count
    return [f"{name}, {title}" for title, _ in zip(titles, range(count), strict=True)]
