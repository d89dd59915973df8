"""`qwen-cache ground`: where in an image does a model's text encoder look for some words? Tried outside of any cache.

Images are resized, words are framed and attention is read as in a build; with several images it is about the first.
With a head it becomes a mask, and with SAM a sharper one; without, it is a heat map, and is called that. Of the model
only the text encoder is loaded. Refuses text-to-image models, SAM without a head, heads of another encoder, and to
write over an image that it was given.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch.nn.functional import interpolate, max_pool2d
from transformers import Qwen2_5_VLForConditionalGeneration

from qwen_cache.console import console, plural
from qwen_cache.errors import ConfigError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.grounding.frozen_qwen import FrozenQwen, spans_of_phrases
from qwen_cache.grounding.head import load_head, predict_mask
from qwen_cache.grounding.refine import load_sam, refine
from qwen_cache.models.devices import choose_device
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.models.loading import load_whole
from qwen_cache.models.processor import load_processor
from qwen_cache.models.template import TEMPLATES, VAE_IMAGE_SIZE
from qwen_cache.settings.load import Config
from qwen_cache.sources.images import open_rgb_file
from qwen_cache.sources.sizes import Size, calculate_dimensions
from qwen_cache.storage.durable import write_durably

RED = (255, 0, 0)
OPACITY = 0.5  # of the red where the mask is 1: what is below can still be seen
OUTLINES = 300  # of which the longer side of an image is as wide: seen in a large photograph, thin in a small one
UNDECIDED = (0.1, 0.9)


@dataclass(frozen=True)
class Words:
    """A text, and the phrase in it that is meant: when it is None the marked words, or all."""

    text: str
    phrase: str | None = None

    @classmethod
    def of(cls, phrase: str | None, prompt: str | None) -> Words:
        """A phrase within a prompt, or one of them alone; an error where the phrase cannot be found."""
        words = cls(phrase or "") if prompt is None else cls(prompt, phrase)
        if not words.text.strip():
            raise ConfigError("there are no words to look for", do='give --phrase "the red car", or --prompt')
        spans_of_phrases(words.text, words.phrase)
        return words


def run_ground(
    config: Config, images: Sequence[Path], words: Words, out: Path, head: Path | None = None, sam: Path | None = None
) -> int:
    """Write the mask of the first image, and the image with the mask over it; the exit code."""
    overlaid = out.with_stem(f"{out.stem}-overlay")
    _check_out(out, overlaid, images)
    if sam is not None and head is None:
        raise ConfigError("SAM sharpens a mask, and without a head there is none", do="give --head, or leave out --sam")
    pictures = [open_rgb_file(path) for path in images]
    trained = load_head(head)[0] if head else None
    model = open_model(config.model.path, ("text_encoder", "processor"), config.model.revision)
    _check_images(model, len(pictures))
    device = choose_device(config.cache.text_device, "--text-device", preferred=1)
    segmenter = load_sam(sam).to(device) if sam else None

    attention = look(model, device, config, pictures, words)
    mask = predict_mask(trained, attention, _cells(pictures[0].size)) if trained else heat_map(attention)
    if segmenter is None:
        mask = interpolate(mask[None, None], pictures[0].size[::-1], mode="bilinear", antialias=True)[0, 0]
    else:
        mask = refine(segmenter, pictures[0], mask.logit(1e-6))
    grey = (mask.cpu().clamp(0, 1) * 255).round().byte().numpy()
    _write_pngs({out: Image.fromarray(grey), overlaid: overlay(pictures[0], grey)})
    found = _summary(grey / 255, is_mask=trained is not None)
    console().print("[bold green]done[/]:", end=" ")
    console().print(f"{out}, {overlaid}: {found}", markup=False)
    return 0


def look(
    model: ModelFolder, device: torch.device, config: Config, pictures: Sequence[Image.Image], words: Words
) -> torch.Tensor:
    """The attention of the words on the first image, `[C, h, w]`, as a cache has it."""
    template = TEMPLATES[model.pipeline]
    area = config.data.condition_image_size or template.condition_image_size
    resized = [image.resize(calculate_dimensions(area, image.size), Image.Resampling.LANCZOS) for image in pictures]
    dtype = getattr(torch, config.cache.dtype)
    whole = load_whole(Qwen2_5_VLForConditionalGeneration, model.part("text_encoder"), dtype=dtype)
    encoder = FrozenQwen(whole, load_processor(model), template=template).to(device)
    return encoder.ground(resized, words.text, words.phrase).attention[0][0].cpu()


def heat_map(attention: torch.Tensor) -> torch.Tensor:
    """The mean over the channels of `[C, h, w]`, which count the same however much they attend, stretched to 0..1."""
    mean = (attention / attention.sum((-2, -1), keepdim=True).clamp(min=1e-12)).mean(0)
    return (mean - mean.min()) / (mean.max() - mean.min()).clamp(min=1e-12)


def overlay(image: Image.Image, mask: NDArray[np.uint8]) -> Image.Image:
    """The image, red where the mask is, and its outline: untouched where the mask is 0."""
    opacity = (OPACITY * mask).astype(np.uint8)
    opacity[_outline(mask > 127, max(1, max(image.size) // OUTLINES))] = 255
    shown = image.copy()
    shown.paste(RED, (0, 0), Image.fromarray(opacity))
    return shown


def _outline(inside: NDArray[np.bool_], width: int) -> NDArray[np.bool_]:
    """What is inside and not farther than `width` from what is not."""
    near = torch.from_numpy(~inside).float()[None]
    near = max_pool2d(max_pool2d(near, (2 * width + 1, 1), 1, (width, 0)), (1, 2 * width + 1), 1, (0, width))
    outline: NDArray[np.bool_] = inside & (near[0] > 0).numpy()
    return outline


def _cells(size: Size) -> tuple[int, int]:
    """Rows and columns of the tokens of an image that large, as the transformer sees it."""
    width, height = calculate_dimensions(VAE_IMAGE_SIZE, size)
    return height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN


def _summary(mask: NDArray[np.float64], *, is_mask: bool) -> str:
    """What of the image is masked, where that is, and how sharp it is."""
    inside = Image.fromarray(mask > 0.5)
    box = inside.getbbox()
    place = f", from ({box[0]}, {box[1]}) to ({box[2]}, {box[3]}) of {inside.width}×{inside.height}" if box else ""
    if not is_mask:
        what = "a heat map of the attention, not a mask: give --head for one"
        return f"{what}; above half of its range: {np.mean(mask > 0.5):.1%}{place}"
    low, high = UNDECIDED
    undecided = f"undecided ({low} to {high}): {np.mean((low < mask) & (mask < high)):.1%}"
    return f"masked: {np.mean(mask > 0.5):.1%}{place}; {undecided}"


# ---- what is read and written ----------------------------------------------------------------------------------------


def _check_images(model: ModelFolder, count: int) -> None:
    if not model.takes_controls:
        raise ConfigError(
            f"{model.pipeline} draws from words alone: its text encoder is shown no images",
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
        raise ConfigError("an image would be written over", where=taken, do="give another name with --out")


def _write_pngs(pictures: dict[Path, Image.Image]) -> None:
    """Encode all before the first is written; none is ever half written."""
    encoded = {}
    for path, image in pictures.items():
        data = BytesIO()
        image.save(data, "PNG")
        encoded[path] = data.getvalue()
    for path, content in encoded.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_durably(path, content)
