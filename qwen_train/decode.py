"""Latents to pictures, as the stock pipelines end: for `predict`, and for what `run` left of its validation.

`qwen-train decode` makes a PNG beside each file of latents, on any device and at any time: what is there already is
not made again, and none is ever half written. Refused are files that do not say what pictures they hold.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from math import prod
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKLQwenImage, QwenImagePipeline
from diffusers.image_processor import VaeImageProcessor
from jaxtyping import Float
from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.console import counting
from qwen_cache.encode.loading import load_whole
from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.format.directory import write_durably
from qwen_cache.format.errors import TrainError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.model_folder import ModelFolder
from qwen_train.validation import FOLDER

Size = tuple[int, int]
"""Width and height in pixels."""


@dataclass(frozen=True)
class Latents:
    """A picture that is still to be decoded: a part of a file of latents."""

    file: Path
    tokens: slice
    size: Size
    png: Path


def decode_folder(folder: Path, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> list[Path]:
    """Decode what the run in `folder` left, or what lies in `folder` itself; the PNGs that were made."""
    found = [item for file in latents_files(folder) for item in latents_in(file)]
    missing = [item for item in found if not item.png.exists()]
    if not missing:
        return []
    vae = load_vae(model, device, dtype)
    with counting("decoding", len(missing)) as advance:
        for item in missing:
            with safe_open(item.file, framework="pt") as file:
                picture = decode_latents(vae, file.get_tensor("latents")[item.tokens][None], item.size)
            data = BytesIO()
            picture.save(data, "PNG")
            write_durably(item.png, data.getvalue())
            advance(1)
    return [item.png for item in missing]


def latents_files(folder: Path) -> list[Path]:
    """Those of a run, or of the folder and the folders in it."""
    place = folder / FOLDER if (folder / FOLDER).is_dir() else folder
    files = sorted(place.rglob("*.safetensors")) if place.is_dir() else []
    if not files:
        raise TrainError(
            "no latents here",
            where=folder,
            expected=f"the output folder of a run with validation.pictures, or one of the folders in its {FOLDER}/",
        )
    return files


def latents_in(path: Path) -> Iterator[Latents]:
    """Of each picture in a file; the first has the name of the file, others a number as well."""
    try:
        with safe_open(path, framework="pt") as file:
            shapes = json.loads((file.metadata() or {})["img_shapes"])
            tokens = file.get_slice("latents").get_shape()[0]
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise TrainError(
            f"these are not latents that a run left: {error}", where=path, do="remove this file, or name another folder"
        ) from None
    if sum(map(prod, shapes)) != tokens:
        raise TrainError("the latents do not fill their pictures", where=path, expected=f"{shapes}", found=f"{tokens}")
    for number, (part, size) in enumerate(parts_of(shapes), 1):
        name = f"{path.stem}.png" if number == 1 else f"{path.stem}-{number}.png"
        yield Latents(path, part, size, path.with_name(name))


def parts_of(img_shapes: Iterable[Sequence[int]]) -> Iterator[tuple[slice, Size]]:
    """Of several pictures' latents, one behind the other: which tokens are each one's, and its size."""
    begin = 0
    for frames, h, w in img_shapes:
        end = begin + frames * h * w
        yield slice(begin, end), (w * PIXELS_PER_TOKEN, h * PIXELS_PER_TOKEN)
        begin = end


def load_vae(model: ModelFolder, device: torch.device, dtype: torch.dtype) -> VaeThatFits:
    """The VAE alone, for `decode_latents`."""
    return VaeThatFits(load_whole(AutoencoderKLQwenImage, model.part("vae"), torch_dtype=dtype).to(device))


def decode_pictures(
    vae: Any, latents: Float[torch.Tensor, "S 64"], img_shapes: Iterable[Sequence[int]]
) -> list[Image.Image]:
    """All pictures of packed latents, such as the controls of a cached sample."""
    return [decode_latents(vae, latents[part][None], size) for part, size in parts_of(img_shapes)]


@torch.inference_mode()
def decode_latents(vae: Any, latents: Float[torch.Tensor, "1 S 64"], size: Size) -> Image.Image:
    """The picture of packed latents, on the VAE's device, as the pipelines end."""
    width, height = size
    scale = vae.spatial_compression_ratio
    z = QwenImagePipeline._unpack_latents(latents, height, width, scale).to(vae.device, vae.dtype)
    mean, std = (
        torch.tensor(values).view(1, -1, 1, 1, 1).to(z) for values in (vae.config.latents_mean, vae.config.latents_std)
    )
    image = vae.decode(z / (1.0 / std) + mean, return_dict=False)[0][:, :, 0]
    picture: Image.Image = VaeImageProcessor(vae_scale_factor=2 * scale).postprocess(image, output_type="pil")[0]
    return picture
