"""The page of `qwen-cache inspect --html`: one file that needs no network, with all that `inspect --json` reports.

It contains two JSON documents: `overview`, the output of `inspect --json`, and `samples`, a row for each sample. A
script searches, filters and shows the samples, a hundred at a time. A few images are stored in the page itself, many in
a folder beside it. The template `cache.html.jinja` has the markup; this module collects its values. Text of a source,
such as a prompt, stays text. A path that is not a plain file, or is inside a cache, is an error.
"""

from __future__ import annotations

import json
import os
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from qwen_cache.console import counting, human_bytes, plural
from qwen_cache.errors import ConfigError
from qwen_cache.format.index import INDEX_NAME, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.html.charts import Bar, bars
from qwen_cache.html.page import render
from qwen_cache.inspect.flags import FLAGS
from qwen_cache.inspect.images import ImageSource, TitledImage
from qwen_cache.inspect.summary import (
    BATCH_COLUMNS,
    OpenRecipes,
    batch_note,
    batch_row,
    import_origin,
    labelled_bins,
    partial_state,
    sample_counts,
    savings_rows,
    source_state,
)
from qwen_cache.storage.durable import make_folder, write_durably
from qwen_cache.storage.mapped import read_file
from qwen_cache.storage.url import location

COLUMNS = (
    *("key", "name", "prompt", "sizes", "text_tokens", "image_tokens", "edit_mask_from", "to_generate", "recipe"),
    "images",
)
EMBEDDED_IMAGES = 200  # samples: some 10 MB; a larger page opens slowly
MAX_NAME_BYTES = 240  # of the 255 of a file system: the folder beside the page has a longer name
IMAGE_NAME = re.compile(r"[0-9a-f]{32}-[0-9]+\.(jpg|webp)")
ENDINGS = {"jpeg": "jpg", "webp": "webp"}
MAX_LINKS = 12  # per flag; the list below has all samples


def check_page_path(path: Path, cache: str) -> None:
    """Raise ConfigError where a page cannot be written, or would replace something other than a page."""
    try:
        fault = _fault(path, location(cache))
    except OSError as error:  # a folder with too long a name, or without permission to look into it
        fault = str(error.strerror)
    if fault:
        raise ConfigError(f"a page cannot be written here: {fault}", where=path, do="give --html another file")


def _fault(path: Path, cache: object) -> str | None:
    if path.name in ("", "..", "-"):
        return "this names no file"
    if len(os.fsencode(path.name)) > MAX_NAME_BYTES:
        return "its name is too long"
    if path.is_symlink():
        return "this is a symbolic link"
    if path.exists() and not path.is_file():
        return "this is a folder" if path.is_dir() else "this is a device or a pipe"
    if not next(parent for parent in path.absolute().parents if parent.exists()).is_dir():
        return "it would be inside a file"
    if isinstance(cache, Path) and path.parent.resolve().is_relative_to(cache.resolve()):
        return "it would be inside the cache"
    return "a cache has a file of this name" if path.name in (MANIFEST_NAME, INDEX_NAME) else None


def write_page(
    path: Path, overview: Mapping[str, Any], opened: OpenRecipes, source: ImageSource | None = None, thumbnails: int = 0
) -> None:
    """Write the page of what `survey` returned, with images of at most `thumbnails` samples; replace an older one."""
    make_folder(path.parent)
    rows = [sample_row(row, recipe) for recipe, (_, index) in opened.items() for row in index]
    folder = path.with_name(f"{path.stem}_files")
    written = add_images(rows, opened, source, thumbnails, folder) if source else set()
    write_durably(path, page(overview, rows).encode("utf-8"))
    for old in folder.glob("*"):
        if IMAGE_NAME.fullmatch(old.name) and old.name not in written:
            old.unlink()


def page(overview: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> str:
    """The page as HTML."""
    return render(
        "cache.html.jinja",
        title=Path(overview["cache"].rstrip("/")).name or overview["cache"],
        summary=summary_line(overview),
        facts=list(cache_facts(overview)),
        recipes=[recipe_section(name, recipe) for name, recipe in overview["recipes"].items()],
        flags=[flag_section(name, recipe) for name, recipe in overview["recipes"].items()],
        overview=overview,
        samples={"columns": COLUMNS, "rows": rows},
    )


# ---- samples ---------------------------------------------------------------------------------------------------------


def sample_row(row: IndexRow, recipe: str) -> list[Any]:
    """The values of `COLUMNS` for a sample; its images are added later."""
    meta = row.meta
    sizes = [[w * PIXELS_PER_TOKEN, h * PIXELS_PER_TOKEN] for _, h, w in meta.img_shapes]
    tokens = (meta.text_length, token_count(meta.img_shapes))
    seed = "" if meta.inputs.seed is None else f", seed {meta.inputs.seed}"
    to_generate = None if meta.inputs.target else f"to generate{seed}"
    return [meta.key, row.name, meta.prompt, sizes, *tokens, meta.edit_mask_from, to_generate, recipe, []]


def add_images(
    rows: Sequence[list[Any]], opened: OpenRecipes, source: ImageSource, count: int, folder: Path
) -> set[str]:
    """Give `count` evenly chosen rows their images: pairs of a title and a URL, into the page or into `folder`.

    Returns the names of the files in the folder.
    """
    chosen = evenly(len(rows), count)
    names: set[str] = set()
    beside = len(chosen) > EMBEDDED_IMAGES
    with counting("making images", len(chosen)) as advance:
        for i in chosen:
            key, recipe = rows[i][0], rows[i][COLUMNS.index("recipe")]
            found = source(opened[recipe][0][key])
            images = {f"{key}-{n}.{ENDINGS[each.kind]}": each for n, each in enumerate(found)}
            rows[i][-1] = [
                [each.title, _beside(folder, name, each) if beside else _within(each)] for name, each in images.items()
            ]
            names |= images.keys() if beside else set()
            advance(1)
    return names


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, evenly spaced; with two or more, the first and the last are among them."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // max(most - 1, 1) for i in range(most)]


def _within(image: TitledImage) -> str:
    return f"data:image/{image.kind};base64,{b64encode(image.data).decode('ascii')}"


def _beside(folder: Path, name: str, image: TitledImage) -> str:
    make_folder(folder)
    path = folder / name
    if not path.is_file() or read_file(path) != image.data:
        write_durably(path, image.data)
    return f"{quote(os.fsencode(folder.name))}/{name}"


# ---- overview --------------------------------------------------------------------------------------------------------


def summary_line(overview: Mapping[str, Any]) -> str:
    """The number of samples, their size, and what needs attention, on one line."""
    if overview["state"] == "partial":
        return f"partial: {partial_state(overview)}"
    samples = sum(recipe["samples"] for recipe in overview["recipes"].values())
    flagged = {key for recipe in overview["recipes"].values() for keys in recipe["flags"].values() for key in keys}
    parts = [plural(samples, "sample"), human_bytes(overview["bytes"])]
    parts += [source_state(overview)] if "source" in overview else []
    return ", ".join([*parts, f"{len(flagged)} flagged" if flagged else "none flagged"])


def cache_facts(overview: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "cache", overview["cache"]
    if overview["state"] == "partial":
        yield "state", f"partial: {partial_state(overview)}"
        return
    if "source" in overview:
        yield "state", source_state(overview)
    yield "format", f"v{overview['format_version']}"
    yield "size", f"{human_bytes(overview['bytes'])} in {plural(overview['shards'], 'shard')}"
    yield "written by", ", ".join(f"{name} {version}" for name, version in overview["written_by"].items())
    if overview.get("garbage_bytes"):
        yield "garbage", f"{human_bytes(overview['garbage_bytes'])}; `qwen-cache gc` removes it"


def recipe_section(name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The values of `recipe.html.jinja`."""
    return {
        "name": name,
        "facts": list(recipe_facts(recipe)),
        "settings": json.dumps(recipe["recipe"], indent=1, ensure_ascii=False),
        "charts": list(recipe_charts(recipe)),
        "batches": batch_section(recipe["batches"]),
    }


def recipe_charts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, list[Bar]]]:
    """Titles and bars of the charts; a chart may have no bars."""
    histograms = recipe["histograms"]
    yield "target sizes", bars(recipe["resolutions"])
    yield "width over height", bars(labelled_bins(histograms["width_over_height"]))
    yield "text tokens", bars(labelled_bins(histograms["text_tokens"]))
    yield "all tokens: text, target and controls", bars(labelled_bins(histograms["all_tokens"]))
    yield "controls per sample", bars(recipe["controls"])
    yield "edit masks by origin", bars(recipe["edit_masks_from"])


def batch_section(batches: Sequence[Mapping[str, float]]) -> dict[str, Any] | None:
    """The table of batches under a few token budgets; None where there are no samples."""
    if not batches:
        return None
    return {"titles": BATCH_COLUMNS, "lines": [batch_row(budget) for budget in batches], "note": batch_note(batches)}


def flag_section(recipe_name: str, recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of a recipe, and whether tensors and images were checked.

    Each has a description, a count, at most `MAX_LINKS` groups of keys and names (one group, except for
    near-duplicates), and the number of samples not shown.
    """
    flags, names, flagged = recipe["flags"], recipe["names"], []
    for flag, keys in flags.items():
        groups = recipe["near_duplicates"] if flag == "near_duplicate" else [keys[:MAX_LINKS]]
        shown = [[(key, names[key]) for key in group[:MAX_LINKS]] for group in groups[:MAX_LINKS]]
        if keys:
            flagged.append((FLAGS[flag], len(keys), shown, len(keys) - sum(map(len, shown))))
    return {
        "recipe": recipe_name,
        "flagged": flagged,
        "scanned": "extreme_numbers" in flags,
        "compared": "near_duplicate" in flags,
    }


def recipe_facts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = recipe["recipe"]
    yield "pipeline", f"{settings['pipeline']}, {settings['dtype']}"
    weights = [f"{part} {settings[part]}" for part in ("vae", "text_encoder", "processor") if settings.get(part)]
    if weights:
        yield "fingerprints", ", ".join(weights)
    if "imported_from" in settings:
        yield "imported", import_origin(settings)
    yield "model", f"{recipe['family']}, licence {recipe['license']}"
    yield "samples", sample_counts(recipe)
    yield "identity", recipe["identity"]
    sizes = (f"{tensor} {human_bytes(count)}" for tensor, count in recipe["tensor_bytes"].items())
    yield "tensors", ", ".join(sizes)
    yield from savings_rows(recipe["saved"])
