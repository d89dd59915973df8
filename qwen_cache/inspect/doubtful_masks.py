"""`inspect --mask-head`: the samples whose mask is least like what a mask head makes of their attention.

There the pair is misaligned, described wrongly or edited all over, or the head is wrong: an image of them tells.
Refused are a head of another encoder, and a cache without masks or attention. Only the VAE is loaded, for the image.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import BytesIO
from itertools import chain
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from qwen_cache.console import counting, plural
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample, open_recipes
from qwen_cache.format.identity import recipe_id
from qwen_cache.grounding.cached import Disagreement, disagreements, head_mask_of, mask_of, masked, nothing_masked
from qwen_cache.grounding.head import MaskHead, encoder_of, load_head
from qwen_cache.image_grid import make_grid
from qwen_cache.inspect.images import overlaid
from qwen_cache.models.devices import choose_device
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.storage.durable import write_durably
from qwen_cache.storage.local_copies import LocalCopies

ROWS_SHOWN = 24
"""Rows: more are no longer seen at a glance."""
TITLES = ("control", "target", "mask of the cache", "mask of the head")
HARDLY = 0.2
"""IoU. Heads have 0.45 and more with masks of the right phrase in the tests, and 0.15 or less with those of another."""
DIGITS = 12  # of a key in the table, enough to name a sample


@dataclass(frozen=True)
class Doubtful:
    """Of all that were compared, those that have least in common with what the head makes of them."""

    head: MaskHead
    compared: int
    mean_iou: float
    worst: list[Disagreement]
    recipes: list[str]
    """The names of those that the head can read."""

    def to_json(self) -> dict[str, Any]:
        listed = [each.to_json() for each in self.worst]
        return {"masks_compared": self.compared, "mean_iou": self.mean_iou, "disagreements": listed}


def review(path: str, head: Path, worst: int, device: str, pictures: Path | None, settings: Config) -> Doubtful:
    """What `inspect` is asked for; also writes the images, if there shall be any."""
    place = choose_device(device, "--vae-device")
    if pictures is None:
        return find_doubtful(path, head, place, worst, LocalCopies.of_settings(settings.cache))
    if pictures.suffix.lower() != ".png" or pictures.is_dir():
        raise ConfigError(
            "this names no PNG", where="--save-images", expected="a file such as worst.png", found=pictures
        )
    pictures.parent.mkdir(parents=True, exist_ok=True)
    vae = open_model(settings.model.path, ("vae",), settings.model.revision)
    doubtful = find_doubtful(path, head, place, worst, LocalCopies.of_settings(settings.cache))
    save_images(doubtful, pictures, vae, place, getattr(torch, settings.predict.dtype))
    return doubtful


def find_doubtful(path: str, head_path: Path, device: torch.device, worst: int, copies: LocalCopies) -> Doubtful:
    """Of all recipes whose attention the head can read."""
    head, about = load_head(head_path)
    caches = open_recipes(path, copies)
    readable = [cache for cache in caches.values() if encoder_of(cache.recipe.recipe) == about.encoder]
    if not readable:
        raise ConfigError(
            "this mask head was trained on the attention of another encoder, template or image size",
            where=head_path,
            do="train one on this cache: `qwen-train mask-head`",
        )
    total = sum(len(masked(cache)) for cache in readable)
    if not total:
        raise nothing_masked(readable[0])
    found = []
    with counting("comparing", total) as advance:
        for each in chain.from_iterable(disagreements(cache, head.to(device)) for cache in readable):
            found.append(each)
            advance(1)
    found.sort(key=lambda each: (each.iou, each.sample.name, each.sample.key))
    names = [cache.recipe_name for cache in readable]
    return Doubtful(head, total, fmean(each.iou for each in found), found[:worst], names)


def flagged(overview: Mapping[str, Any], doubtful: Doubtful) -> dict[str, Any]:
    """What `inspect` says, with those of the worst masks flagged that hardly lie where the head's do."""
    found = [each.sample.row.meta for each in doubtful.worst if each.iou < HARDLY]
    recipes = dict(overview["recipes"])
    for name in doubtful.recipes:
        recipe, identifier = recipes[name], recipe_id(recipes[name]["recipe"])
        keys = [meta.key for meta in found if meta.recipe == identifier]
        recipes[name] = {**recipe, "flags": {**recipe["flags"], "doubtful_mask": keys}}
    return {**overview, "recipes": recipes}


def print_doubtful(doubtful: Doubtful, out: Console | None = None) -> None:
    """As a table, on stdout."""
    out = out or Console(highlight=False)
    compared = plural(doubtful.compared, "mask")
    out.print(f"\n[bold]doubtful masks[/]  {compared} compared with the head's, mean IoU {doubtful.mean_iou:.2f}")
    table = Table(box=None, header_style="dim")
    for name in ("IoU", "mask", "head's"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("from", "key"):
        table.add_column(name, no_wrap=True)
    table.add_column("name", overflow="fold")
    for each in doubtful.worst:
        numbers = (f"{each.iou:.2f}", f"{each.area:.1%}", f"{each.head_area:.1%}")
        table.add_row(*numbers, each.origin, each.sample.key[:DIGITS], escape(each.sample.name))
    out.print(table)


# ---- an image of them -----------------------------------------------------------------------------------------------


def save_images(doubtful: Doubtful, path: Path, model: ModelFolder, device: torch.device, dtype: torch.dtype) -> None:
    """A PNG of the first of them: control, target, and both masks laid over the target."""
    from qwen_cache.encode.decode import load_vae  # seconds, and the table needs no VAE

    vae, shown = load_vae(model, device, dtype), doubtful.worst[:ROWS_SHOWN]
    rows = []
    with counting("decoding", len(shown)) as advance:
        for each in shown:
            control, target = decoded(vae, each.sample)
            masks = mask_of(each.sample), head_mask_of(doubtful.head, each.sample)
            rows.append([control, target, *(overlaid(target, mask.numpy()) for mask in masks)])
            advance(1)
    data = BytesIO()
    make_grid(TITLES, rows, [caption(each) for each in shown]).save(data, "PNG")
    write_durably(path, data.getvalue())


def decoded(vae: Any, sample: Sample) -> tuple[Image.Image, Image.Image]:
    """The first control, at which the prompt's attention looks, and the target."""
    from qwen_cache.encode.decode import decode_images

    (control,) = decode_images(vae, sample["control_latents"], sample.img_shapes[1:2])
    (target,) = decode_images(vae, sample["image_latents"], sample.img_shapes[:1])
    return control, target


def caption(each: Disagreement) -> str:
    """What it is, and below it how the masks differ."""
    numbers = f"IoU {each.iou:.2f}; {each.area:.1%} in the mask ({each.origin}), {each.head_area:.1%} in the head's"
    return f"{each.sample.name}: {each.sample.prompt}\n{numbers}"
