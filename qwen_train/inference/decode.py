"""`qwen-train decode`: decode the latents of a run's validation images.

Each image in a file of latents gets a PNG beside the file. Any device will do, at any time. Existing PNGs are skipped,
and new ones are written atomically. Damaged files, and files without metadata about their images, are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from qwen_cache.console import counting
from qwen_cache.encode.decode import decode_latents, load_vae, parts_of
from qwen_cache.errors import TrainError
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.sizes import Size
from qwen_cache.storage.checksums import check_safetensors
from qwen_cache.storage.durable import write_durably
from qwen_train.latents import VALIDATION, latents_files


@dataclass(frozen=True)
class Latents:
    """One image of a latents file."""

    file: Path
    tokens: slice
    size: Size
    png: Path


def decode_folder(folder: Path, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> list[Path]:
    """Decode the latents of the run in `folder`, or of another folder or file; the new PNGs."""
    images = [item for file in latents_files(folder) for item in latents_in(file)]
    missing = [item for item in images if not item.png.exists()]
    if not missing:
        return []
    vae = load_vae(model, device, dtype)
    with counting("decoding", len(missing)) as advance:
        for item in missing:
            with safe_open(item.file, framework="pt") as file:
                image = decode_latents(vae, file.get_tensor("latents")[item.tokens][None], item.size)
            data = BytesIO()
            image.save(data, "PNG")
            write_durably(item.png, data.getvalue())
            advance(1)
    return [item.png for item in missing]


def latents_in(path: Path) -> Iterator[Latents]:
    """The images in a file; the first PNG has the file's name, the others also a number."""
    try:
        check_safetensors(path, TrainError)
        with safe_open(path, framework="pt") as file:
            shapes = json.loads((file.metadata() or {})["img_shapes"])
            parts = list(parts_of(shapes))
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
    for number, (part, size) in enumerate(parts, 1):
        name = f"{path.stem}.png" if number == 1 else f"{path.stem}-{number}.png"
        yield Latents(path, part, size, path.with_name(name))
