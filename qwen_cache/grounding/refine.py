"""Experimental: never run on the real encoder's attention. Sharpen a mask with SAM or SAM 2.

Segment Anything gets the coarse mask of a mask head twice, as a box and as a mask prompt, but not the words. Loads only
safetensors; refuses a folder of any other model.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate, pad
from transformers import Sam2Model, SamModel

from qwen_cache.errors import ModelError
from qwen_cache.models.encoders import load_whole
from qwen_cache.models.folder import read_config

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""ImageNet statistics in RGB, with which SAM and SAM 2 were trained."""
KINDS: dict[str, type[Any]] = {"sam": SamModel, "sam2": Sam2Model, "sam2_video": Sam2Model}
"""Model classes by `model_type`; published SAM 2 models are sam2_video; an image needs only their image half."""


@dataclass(frozen=True)
class Frame:
    """The square input of the model, with the image scaled to `height` × `width` in its upper left corner."""

    side: int
    height: int
    width: int


def load_sam(folder: Path) -> Any:
    """The frozen model in `folder`; ModelError if it is not SAM."""
    try:
        model_type = read_config(folder / "config.json").get("model_type")
    except ModelError as error:
        raise ModelError("there is no model here", where=folder, found=error.fault, do="name a folder of SAM") from None
    if not isinstance(model_type, str) or model_type not in KINDS:
        raise ModelError("this is not SAM", where=folder, expected=", ".join(KINDS), found=model_type)
    return load_whole(KINDS[model_type], folder, attn_implementation="sdpa")  # not what its config.json names


@torch.no_grad()
def refine(sam: Any, image: Image.Image, coarse_logits: torch.Tensor) -> torch.Tensor:
    """The sharpened mask of `image`, `[H, W]` in 0..1, from logits `[h, w]` of the whole image at any resolution."""
    frame = _frame(sam, image)
    coarse = coarse_logits.to(sam.device, torch.float32)[None, None]
    output = sam(
        pixel_values=_pixel_values(image, frame).to(sam.device, sam.dtype),
        input_boxes=_box(coarse, image, frame).to(sam.dtype),
        input_masks=_mask_prompt(sam, coarse, frame).to(sam.dtype),
        multimask_output=False,
    )
    square = interpolate(output.pred_masks[:, 0].float(), (frame.side, frame.side), mode="bilinear")
    unpadded = square[..., : frame.height, : frame.width]
    return interpolate(unpadded, (image.height, image.width), mode="bilinear")[0, 0].sigmoid()


def _frame(sam: Any, image: Image.Image) -> Frame:
    """SAM keeps the aspect ratio of an image, SAM 2 stretches it to the square."""
    side = sam.config.prompt_encoder_config.image_size
    if sam.config.model_type != "sam":
        return Frame(side, side, side)
    scale = side / max(image.size)
    return Frame(side, int(image.height * scale + 0.5), int(image.width * scale + 0.5))


def _pixel_values(image: Image.Image, frame: Frame) -> torch.Tensor:
    scaled = image.convert("RGB").resize((frame.width, frame.height), Image.Resampling.BILINEAR)
    pixels = torch.from_numpy((np.asarray(scaled) / 255 - MEAN) / STD).float().permute(2, 0, 1)
    return pad(pixels, (0, frame.side - frame.width, 0, frame.side - frame.height))[None]


def _box(coarse: torch.Tensor, image: Image.Image, frame: Frame) -> torch.Tensor:
    """The bounding box of the mask, or else of the whole image, in the frame: `[1, 1, 4]`."""
    inside = interpolate(coarse, (image.height, image.width), mode="bilinear")[0, 0] > 0
    rows, columns = inside.any(1).nonzero().flatten(), inside.any(0).nonzero().flatten()
    x0, y0, x1, y1 = 0, 0, image.width, image.height
    if len(rows):
        x0, y0, x1, y1 = int(columns[0]), int(rows[0]), int(columns[-1]) + 1, int(rows[-1]) + 1
    across, down = frame.width / image.width, frame.height / image.height
    return torch.tensor([[[x0 * across, y0 * down, x1 * across, y1 * down]]], device=coarse.device)


def _mask_prompt(sam: Any, coarse: torch.Tensor, frame: Frame) -> torch.Tensor:
    """The logits in the frame, `[1, 1, S, S]` with S four times the embedding's grid; negative around the image."""
    scaled = interpolate(coarse, (frame.height, frame.width), mode="bilinear")
    outside = min(-1.0, coarse.min().item())
    framed = pad(scaled, (0, frame.side - frame.width, 0, frame.side - frame.height), value=outside)
    size = 4 * frame.side // sam.config.prompt_encoder_config.patch_size
    return interpolate(framed, (size, size), mode="bilinear")
