"""Thumbnails of cached samples, decoded by the VAE: the only part of the page that needs torch and a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from io import BytesIO
from typing import Any

import torch
from PIL import Image

from qwen_cache.config import load_config
from qwen_cache.doubtful_masks import overlaid
from qwen_cache.encode.decode import decode_pictures, load_vae
from qwen_cache.encode.devices import choose_device
from qwen_cache.format.cache import Sample
from qwen_cache.model_folder import open_model

THUMBNAIL = 256  # pixels of the longer side
QUALITY = 85

Picture = tuple[str, bytes]
"""What it shows, and a JPEG."""


def drawing(model: str | None, device: str) -> Callable[[Sample], list[Picture]]:
    """What draws samples, with the VAE of a model, the one of qwen.yaml where none is named."""
    place, settings = choose_device(device, "--vae-device"), load_config(None, model__path=model)
    folder = open_model(settings.model.path, ("vae",), settings.model.revision)
    return partial(thumbnails, load_vae(folder, place, getattr(torch, settings.predict.dtype)))


def thumbnails(vae: Any, sample: Sample) -> list[Picture]:
    """The controls, the target, and the target under its edit mask where it has one."""
    return [(title, _jpeg(picture)) for title, picture in decoded(vae, sample)]


def decoded(vae: Any, sample: Sample) -> Iterator[tuple[str, Image.Image]]:
    shapes = sample.img_shapes
    if shapes[1:]:
        controls = decode_pictures(vae, sample["control_latents"], shapes[1:])
        yield from ((f"control {i}" if shapes[2:] else "control", each) for i, each in enumerate(controls, 1))
    (target,) = decode_pictures(vae, sample["image_latents"], shapes[:1])
    yield "target", target
    if "edit_mask" in sample.row.meta.tensors:
        yield "edit mask", overlaid(target, sample["edit_mask"].view(shapes[0][1:]))


def _jpeg(picture: Image.Image) -> bytes:
    small = picture.convert("RGB")
    small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
    data = BytesIO()
    small.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()
