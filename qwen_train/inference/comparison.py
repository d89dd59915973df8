"""Images with and without a LoRA beside each other: up to `ROWS` rows as one PNG, more as a page.

The page (`compare.html.jinja`) has names and prompts, in parts of `ROWS` rows. Its images are in a folder beside it, so
that a browser loads them as they are scrolled into view. Writing one form removes the other, which would be out of
date. A file of that name that was not generated here is refused before anything is generated.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from qwen_cache.html.page import relative_url, render
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.terminal import counting
from qwen_train.inference.grid import Row, compare_grid, titled
from qwen_train.inference.images import save_images
from qwen_train.inference.jobs import PAGE_HASH, not_ours, recorded_hash

ROWS = 20
"""Rows of a PNG, and of a part of the page: many programs cannot show a higher PNG."""
THUMBNAIL = 640  # pixels of the longer side: two of them fill a laptop's screen
GENERATOR = "qwen-train predict --compare"
"""The meta entry that identifies our pages; the template has it too."""
IMAGE_NAME = re.compile(r"[0-9]{5}-(control|control-[0-9]+|without-lora|with-lora|target)\.(jpg|webp)")


@dataclass(frozen=True)
class Comparison:
    """A row with its name and prompt."""

    name: str
    prompt: str
    row: Row
    files: Mapping[str, Path] = field(default_factory=dict)
    """The generated files by the titles of their columns."""


def comparison_path(png: Path, rows: int) -> Path:
    """Where `rows` rows are compared: `png`, or a page of that name."""
    return png if rows <= ROWS else png.with_suffix(".html")


def check_comparison(path: Path) -> None:
    """Raise ConfigError if a PNG or page at `path` was not generated here."""
    if path.suffix != ".html":
        recorded_hash(path)
    elif not _is_our_page(path):
        raise not_ours(path)


def save_comparison(path: Path, rows: Iterable[Comparison], count: int) -> None:
    """Write the PNG or the page of at most `count` rows, and remove the other form of an earlier run."""
    if path.suffix == ".html":
        _save_page(path, rows, count)
        png = path.with_suffix(".png")
        if os.path.lexists(png) and recorded_hash(png) == PAGE_HASH:
            png.unlink()
        return
    shown = list(rows)
    grid = compare_grid([each.row for each in shown], [f"{each.name}: {each.prompt}" for each in shown])
    save_images([grid], path)
    page = path.with_suffix(".html")
    if _is_our_page(page):
        page.unlink()
        _remove_images(_image_folder(page), keep=set())


def _save_page(path: Path, rows: Iterable[Comparison], count: int) -> None:
    folder, shown, kept = _image_folder(path), [], set[str]()
    make_folder(folder)
    with counting("comparing", count) as advance:
        for number, each in enumerate(rows, 1):
            images = list(_saved_images(folder, number, each))
            kept |= {image["file"] for image in images}
            shown.append({"number": number, "name": each.name, "prompt": each.prompt, "images": images})
            advance(1)
    page = render("compare.html.jinja", title="With and without the LoRA", rows=shown, part_rows=ROWS)
    write_durably(path, page.encode("utf-8"))
    _remove_images(folder, kept)


def _saved_images(folder: Path, number: int, each: Comparison) -> Iterator[dict[str, Any]]:
    """Write a row's images, and yield what the page needs of them."""
    for title, image in titled(each.row):
        transparent = image.mode == "RGBA"
        small = image.copy() if transparent else image.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        name = f"{number:05}-{title.replace(' ', '-').lower()}.{'webp' if transparent else 'jpg'}"
        data = BytesIO()
        small.save(data, "WEBP" if transparent else "JPEG", quality=90)
        write_durably(folder / name, data.getvalue())
        source = f"{folder.name}/{name}"
        whole = each.files[title].relative_to(folder.parent).as_posix() if title in each.files else source
        size = {"width": small.width, "height": small.height}
        yield {"file": name, "title": title, "source": relative_url(source), "whole": relative_url(whole), **size}


def _image_folder(page: Path) -> Path:
    return page.with_name(f"{page.stem}_files")


def _remove_images(folder: Path, keep: set[str]) -> None:
    """Remove the images of an earlier page, and the folder if nothing is left in it."""
    for path in folder.glob("*"):
        if IMAGE_NAME.fullmatch(path.name) and path.name not in keep:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_our_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'name="generator" content="{GENERATOR}"'.encode() in file.read(1000)
