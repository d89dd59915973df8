"""Never run on the real encoder: where a phrase attends in an image, without a cache.

Images are resized, the phrase is put into the prompt template and attention is read as in a build; of several images
the first is grounded. A head turns the attention into a mask, and SAM refines it; without a head, the result is a heat
map and is reported as one. Only the text encoder of the model is loaded. Text-to-image models, SAM without a head,
heads of another encoder, and an output that would overwrite an input are errors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate, max_pool2d

from qwen_cache.errors import ConfigError
from qwen_cache.experimental.attention import FrozenQwen, load_sam, refine, spans_of_phrases
from qwen_cache.experimental.masks import load_head, predict_mask
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.devices import choose_device, torch_dtype
from qwen_cache.models.encoders import load_processor, load_text_encoder
from qwen_cache.models.family import VAE_IMAGE_SIZE
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.sources.images import open_rgb_file
from qwen_cache.sources.sizes import Size, calculate_dimensions
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.terminal import plural

RED = (255, 0, 0)
OPACITY = 0.5  # of the red where the mask is 1: the image still shows through
OUTLINES_PER_SIDE = 300  # widths of the outline: visible in a large image, thin in a small one
UNDECIDED = (0.1, 0.9)


@dataclass(frozen=True)
class GroundingQuery:
    """A prompt, and the phrase in it to ground; None: the words marked by [[ ]], or all."""

    prompt: str
    phrase: str | None = None

    @classmethod
    def of(cls, phrase: str | None, prompt: str | None) -> GroundingQuery:
        """A phrase within a prompt, or one of them alone. Raises ConfigError where the prompt lacks the phrase."""
        query = cls(phrase or "") if prompt is None else cls(prompt, phrase)
        if not query.prompt.strip():
            raise ConfigError("no phrase to ground", do='give --phrase "the red car", or --prompt')
        spans_of_phrases(query.prompt, query.phrase)
        return query


def write_mask(
    config: Config, paths: Sequence[Path], query: GroundingQuery, out: Path, head: Path | None, sam: Path | None
) -> tuple[dict[str, Any], str]:
    """Write the mask of the first image, and the image with the mask as overlay; what was written, as JSON and text."""
    overlaid = out.with_stem(f"{out.stem}-overlay")
    _check_out(out, overlaid, paths)
    if sam is not None and head is None:
        raise ConfigError("--sam refines the mask of a head", do="give --head, or leave out --sam")
    images = [open_rgb_file(path) for path in paths]
    mask_head = load_head(head)[0] if head else None
    named, parts = config.model, ("text_encoder", "processor")
    model = open_model(named.path, parts, named.revision, text_encoder=named.text_encoder)
    _check_images(model, len(images))
    device = choose_device(config.cache.text_device, "--text-device", preferred=1)
    segmenter = load_sam(sam).to(device) if sam else None

    attention = phrase_attention(model, device, config, images, query)
    mask = predict_mask(mask_head, attention, _grid(images[0].size)) if mask_head else heat_map(attention)
    if segmenter is None:
        mask = interpolate(mask[None, None], images[0].size[::-1], mode="bilinear", antialias=True)[0, 0]
    else:
        mask = refine(segmenter, images[0], mask.logit(1e-6))
    grey = (mask.cpu().clamp(0, 1) * 255).round().byte().numpy()
    _write_pngs({out: Image.fromarray(grey), overlaid: overlay(images[0], grey)})
    facts = {"mask": str(out), "overlay": str(overlaid), "is_mask": mask_head is not None}
    summary = _summary(grey / 255, is_mask=mask_head is not None)
    return facts | {"masked": float(np.mean(grey > 127))}, f"{out}, {overlaid}: {summary}"


def phrase_attention(
    model: ModelFolder, device: torch.device, config: Config, images: Sequence[Image.Image], query: GroundingQuery
) -> torch.Tensor:
    """The attention of the phrase on the first image, `[C, h, w]`, as a cache stores it."""
    template, data = model.template, config.data
    if model.family.one_condition_image:
        area = (data.vae_image_size or [VAE_IMAGE_SIZE])[-1]
    else:
        area = data.condition_image_size or template.condition_image_size
    resized = [image.resize(calculate_dimensions(area, image.size), Image.Resampling.LANCZOS) for image in images]
    dtype = torch_dtype(config.cache.dtype)
    weights = load_text_encoder(model.component("text_encoder"), dtype, model.text_encoder_file)
    encoder = FrozenQwen(weights, load_processor(model), template=template).to(device)
    return encoder.ground(resized, query.prompt, query.phrase).attention[0][0].cpu()


def heat_map(attention: torch.Tensor) -> torch.Tensor:
    """The mean over channels of `[C, h, w]`, each scaled to sum to 1, stretched to 0..1: `[h, w]`."""
    mean = (attention / attention.sum((-2, -1), keepdim=True).clamp(min=1e-12)).mean(0)
    return (mean - mean.min()) / (mean.max() - mean.min()).clamp(min=1e-12)


def overlay(image: Image.Image, mask: NDArray[np.uint8]) -> Image.Image:
    """The image with the mask and its outline in red; unchanged where the mask is 0."""
    opacity = (OPACITY * mask).astype(np.uint8)
    opacity[_outline(mask > 127, max(1, max(image.size) // OUTLINES_PER_SIDE))] = 255
    shown = image.copy()
    shown.paste(RED, (0, 0), Image.fromarray(opacity))
    return shown


def _outline(inside: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """The pixels inside that are at most `width` from a pixel outside."""
    near = torch.from_numpy(~inside).float()[None]
    near = max_pool2d(max_pool2d(near, (2 * width + 1, 1), 1, (width, 0)), (1, 2 * width + 1), 1, (0, width))
    outline: NDArray[np.bool_] = inside & (near[0] > 0).numpy()
    return outline


def _grid(size: Size) -> tuple[int, int]:
    """Rows and columns of the image tokens that the transformer has for an image of this size."""
    width, height = calculate_dimensions(VAE_IMAGE_SIZE, size)
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def _summary(mask: NDArray[np.float64], *, is_mask: bool) -> str:
    """The masked fraction of the image, its bounding box, and the undecided fraction."""
    inside = Image.fromarray(mask > 0.5)
    box = inside.getbbox()
    box_text = f", from ({box[0]}, {box[1]}) to ({box[2]}, {box[3]}) of {inside.width}×{inside.height}" if box else ""
    if not is_mask:
        what = "a heat map of the attention, not a mask: give --head for one"
        return f"{what}; above half of its range: {np.mean(mask > 0.5):.1%}{box_text}"
    low, high = UNDECIDED
    undecided = f"undecided ({low} to {high}): {np.mean((low < mask) & (mask < high)):.1%}"
    return f"masked: {np.mean(mask > 0.5):.1%}{box_text}; {undecided}"


# ---- inputs and outputs ----------------------------------------------------------------------------------------------


def _check_images(model: ModelFolder, count: int) -> None:
    if not model.takes_controls:
        raise ConfigError(
            f"{model.pipeline} generates from text alone: its text encoder takes no images",
            where=model.name,
            do="name an Edit model with --model",
        )
    if model.max_controls is not None and count > model.max_controls:
        what = f"{model.pipeline} takes {plural(model.max_controls, 'image')}"
        raise ConfigError(what, found=count, do="leave out some --image")


def _check_out(out: Path, overlaid: Path, images: Sequence[Path]) -> None:
    if out.suffix.lower() != ".png":
        raise ConfigError("a mask is a PNG", where="--out", expected="a name that ends with .png", found=out)
    given = {path.resolve() for path in images}
    if taken := next((path for path in (out, overlaid) if path.resolve() in given), None):
        raise ConfigError("the output would overwrite an input image", where=taken, do="give another name with --out")


def _write_pngs(images: dict[Path, Image.Image]) -> None:
    """Encode all images before the first write, so that none is left half written."""
    encoded = {}
    for path, image in images.items():
        data = BytesIO()
        image.save(data, "PNG")
        encoded[path] = data.getvalue()
    for path, content in encoded.items():
        make_folder(path.parent)
        write_durably(path, content)
