"""`inspect --mask-head` (experimental): the samples whose edit mask differs most from the mask head's.

Either the pair is misaligned, described wrongly or edited everywhere, or the head is wrong: `--save-images` shows it. A
head of another encoder, and a cache without masks or attention, are errors. Only the image needs a model: the VAE.
"""

from __future__ import annotations

import heapq
from array import array
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from rich.table import Table

from qwen_cache.errors import ConfigError
from qwen_cache.experimental.masks import (
    Disagreement,
    MaskHead,
    disagreements,
    encoder_of,
    head_mask_of,
    load_head,
    mask_of,
    masked_positions,
    no_masked_samples,
)
from qwen_cache.format.cache import Sample, open_recipes
from qwen_cache.format.index import KEY_DIGITS
from qwen_cache.html.grid import make_grid
from qwen_cache.inspect.flags import overlaid
from qwen_cache.inspect.summary import Survey
from qwen_cache.models.devices import choose_device, torch_dtype
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.storage.remote import LocalCopies
from qwen_cache.terminal import counting, plural, results, verbatim

MAX_IMAGE_ROWS = 24
"""Samples in the image: more cannot be seen at a glance."""
TITLES = ("control", "target", "mask of the cache", "mask of the head")
MAX_FLAGGED_IOU = 0.2
"""In the tests, heads have an IoU of 0.45 or more with masks of the right phrase, of 0.15 or less with another's."""


@dataclass(frozen=True)
class DoubtfulMasks:
    """The masks with the lowest IoU with the mask head's, of all masks that were compared."""

    head: MaskHead
    compared: int
    mean_iou: float
    top: list[Disagreement]
    """The lowest IoU first."""
    recipes: list[str]
    """The names of the recipes whose attention the head can read."""

    def to_json(self) -> dict[str, Any]:
        listed = [each.to_json() for each in self.top]
        return {"masks_compared": self.compared, "mean_iou": self.mean_iou, "disagreements": listed}


def review_masks(path: str, head: Path, top: int, device: str, image: Path | None, settings: Config) -> DoubtfulMasks:
    """The `top` most doubtful masks of the cache at `path`; writes a PNG of them where `image` names one."""
    torch_device = choose_device(device, "--vae-device")
    if image is None:
        return find_doubtful(path, head, torch_device, top, LocalCopies.of_settings(settings.cache))
    if image.suffix.lower() != ".png" or image.is_dir():
        raise ConfigError("this names no PNG", where="--save-images", expected="a file such as masks.png", found=image)
    make_folder(image.parent)
    vae = open_model(settings.model.path, ("vae",), settings.model.revision, vae=settings.model.vae)
    doubtful = find_doubtful(path, head, torch_device, top, LocalCopies.of_settings(settings.cache))
    save_images(doubtful, image, vae, torch_device, torch_dtype(settings.predict.dtype))
    return doubtful


def find_doubtful(path: str, head_path: Path, device: torch.device, top: int, copies: LocalCopies) -> DoubtfulMasks:
    """The `top` most doubtful masks, of all recipes whose attention the head can read."""
    head, metadata = load_head(head_path)
    caches = open_recipes(path, copies)
    readable = [cache for cache in caches.values() if encoder_of(cache.recipe.recipe) == metadata.encoder]
    if not readable:
        raise ConfigError(
            "this mask head was trained on the attention of another encoder, template or image size",
            where=head_path,
            do="train one on this cache: `qwen-train mask-head`",
        )
    total = sum(len(masked_positions(cache)) for cache in readable)
    if not total:
        raise no_masked_samples(readable[0])
    shared = array("d")
    with counting("comparing", total) as advance:

        def noted(each: Disagreement) -> Disagreement:
            shared.append(each.iou)
            advance(1)
            return each

        compared = chain.from_iterable(disagreements(cache, head.to(device)) for cache in readable)
        lowest = heapq.nsmallest(top, map(noted, compared), lambda each: (each.iou, each.sample.name, each.sample.key))
    return DoubtfulMasks(head, total, fmean(shared), lowest, [cache.recipe_name for cache in readable])


def flagged(survey: Survey, doubtful: DoubtfulMasks) -> Survey:
    """The survey, with the flag `doubtful_mask` for masks that hardly overlap the head's."""
    keys = [each.sample.key for each in doubtful.top if each.iou < MAX_FLAGGED_IOU]
    recipes = dict(survey.recipes)
    for name in doubtful.recipes:
        recipe = recipes[name]
        positions = recipe.positions(keys)
        recipes[name] = replace(recipe, flagged=recipe.flagged.with_flag("doubtful_mask", positions))
    return replace(survey, recipes=recipes)


def print_doubtful(doubtful: DoubtfulMasks) -> None:
    """The masks as a table, on stdout."""
    out = results()
    compared = plural(doubtful.compared, "mask")
    out.print(f"\n[bold]doubtful masks[/]  {compared} compared with the head's, mean IoU {doubtful.mean_iou:.2f}")
    table = Table(box=None, header_style="dim")
    for name in ("IoU", "mask", "head's"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("from", "key"):
        table.add_column(name, no_wrap=True)
    table.add_column("name", overflow="fold")
    for each in doubtful.top:
        numbers = (f"{each.iou:.2f}", f"{each.area:.1%}", f"{each.head_area:.1%}")
        table.add_row(*numbers, verbatim(each.origin), each.sample.key[:KEY_DIGITS], verbatim(each.sample.name))
    out.print(table)


# ---- the image -------------------------------------------------------------------------------------------------------


def save_images(
    doubtful: DoubtfulMasks, path: Path, model: ModelFolder, device: torch.device, dtype: torch.dtype
) -> None:
    """Write a PNG with a row for each mask: control, target, and the target under either mask."""
    from qwen_cache.encode.vae import load_vae  # seconds, and the table needs no VAE

    vae, shown = load_vae(model, device, dtype), doubtful.top[:MAX_IMAGE_ROWS]
    rows = []
    with counting("decoding", len(shown)) as advance:
        for each in shown:
            control, target = decode_pair(vae, each.sample)
            masks = mask_of(each.sample), head_mask_of(doubtful.head, each.sample)
            rows.append([control, target, *(overlaid(target, mask.numpy()) for mask in masks)])
            advance(1)
    data = BytesIO()
    make_grid(TITLES, rows, [caption(each) for each in shown]).save(data, "PNG")
    write_durably(path, data.getvalue())


def decode_pair(vae: Any, sample: Sample) -> tuple[Image.Image, Image.Image]:
    """The first control, which the attention refers to, and the target."""
    from qwen_cache.encode.vae import decode_images

    (control,) = decode_images(vae, sample["control_latents"], sample.img_shapes[1:2])
    (target,) = decode_images(vae, sample["image_latents"], sample.img_shapes[:1])
    return control, target


def caption(each: Disagreement) -> str:
    """The sample's name and prompt, and below them how the masks differ."""
    numbers = f"IoU {each.iou:.2f}; {each.area:.1%} in the mask ({each.origin}), {each.head_area:.1%} in the head's"
    return f"{each.sample.name}: {each.sample.prompt}\n{numbers}"
