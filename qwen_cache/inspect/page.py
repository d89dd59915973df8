"""The page of `qwen-cache inspect --html`: it needs no network, and has all that `inspect --json` reports.

A page of few samples is one file. It contains two JSON documents: `overview`, the output of `inspect --json`, and
`samples`, a row for each sample. With more, rows and images are in files of a folder beside the page (`page_files`),
and the overview has no list of flagged samples. Scripts search, filter and show the samples. The template
`cache.html.jinja` has the markup; this module collects its values. Text of a source, such as a prompt, stays text. A
path that is not a plain file, or is inside a cache, is an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qwen_cache.errors import ConfigError
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.html.page import Bar, bars, render
from qwen_cache.inspect.columns import Integers
from qwen_cache.inspect.flags import FLAGS
from qwen_cache.inspect.images import ImageSource, data_url, no_images, stored_images
from qwen_cache.inspect.page_files import files_beside, remove_files
from qwen_cache.inspect.rows import MAX_LINKS, PageSamples, has_thumbnails
from qwen_cache.inspect.summary import (
    BATCH_COLUMNS,
    RecipeSurvey,
    Survey,
    batch_note,
    batch_row,
    import_origin,
    labelled_bins,
    partial_state,
    sample_counts,
    savings_rows,
    source_state,
)
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.storage.remote import location
from qwen_cache.terminal import counting, human_bytes, plural

ONE_FILE = 1000  # samples: half a megabyte without images, and a browser keeps all of their cards
ONE_FILE_IMAGES = 200  # samples: some 10 MB; a larger page opens slowly
MAX_NAME_BYTES = 240  # of the 255 of a file system: the folder beside the page has a longer name
SCRIPTS = ("sample_files.js", "sample_cards.js", "sample_filters.js", "sample_list.js")
FILES_SCRIPTS = ("sample_files.js", "sample_cards.js", "sample_filters.js", "sample_scroll.js", "sample_search.js")


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


def write_page(path: Path, survey: Survey, source: ImageSource | None = None, thumbnails: int = 0) -> None:
    """Write the page of a survey, with images of at most `thumbnails` samples; replace an older one."""
    count = sum(len(recipe.cache) for recipe in survey.recipes.values())
    chosen = evenly(count, thumbnails) if source else np.zeros(0, np.int64)
    if source is stored_images:
        chosen = chosen[has_thumbnails(survey)[chosen]]
    listing, images = PageSamples(survey, chosen), source or no_images
    make_folder(path.parent)
    if count <= ONE_FILE and len(chosen) <= ONE_FILE_IMAGES:
        write_durably(path, page(survey, listing.facts() | {"rows": complete_rows(listing, images)}).encode("utf-8"))
        remove_files(path)
    else:
        with files_beside(path, listing, images) as facts:
            write_durably(path, page(survey, facts).encode("utf-8"))


def page(survey: Survey, samples: Mapping[str, Any]) -> str:
    """The page as HTML; `samples` are the facts of the list, and its rows unless they are in files."""
    overview = survey.overview
    in_files = bool(samples.get("folder"))
    recipes = {name: recipe.counted if in_files else recipe.to_json() for name, recipe in survey.recipes.items()}
    return render(
        "cache.html.jinja",
        title=Path(overview["cache"].rstrip("/")).name or overview["cache"],
        summary=summary_line(survey),
        facts=list(cache_facts(overview)),
        recipes=[recipe_section(name, recipe.counted) for name, recipe in survey.recipes.items()],
        flags=[flag_section(name, recipe) for name, recipe in survey.recipes.items()],
        overview=overview | {"recipes": recipes},
        samples={"folder": None, **samples},
        scripts=FILES_SCRIPTS if in_files else SCRIPTS,
    )


def complete_rows(listing: PageSamples, source: ImageSource) -> list[list[Any]]:
    """All rows of the list, with images as data URLs."""
    rows = listing.rows(0, listing.count)
    with counting("making images", len(listing.with_images)) as advance:
        for i in listing.with_images.tolist():
            rows[i][-1] = [[image.title, data_url(image)] for image in source(listing.sample(i))]
            advance(1)
    return rows


def evenly(count: int, most: int) -> Integers:
    """At most `most` of `count` positions, evenly spaced; with two or more, the first and the last are among them."""
    if count <= most:
        return np.arange(count)
    return np.arange(most) * (count - 1) // max(most - 1, 1)


# ---- overview --------------------------------------------------------------------------------------------------------


def summary_line(survey: Survey) -> str:
    """The number of samples, their size, and what needs attention, on one line."""
    overview = survey.overview
    if overview["state"] == "partial":
        return f"partial: {partial_state(overview)}"
    samples = sum(len(recipe.cache) for recipe in survey.recipes.values())
    flagged = sum(np.count_nonzero(recipe.flagged.bits(len(recipe.cache))) for recipe in survey.recipes.values())
    parts = [f"{samples:,} {'sample' if samples == 1 else 'samples'}", human_bytes(overview["bytes"])]
    parts += [source_state(overview)] if "source" in overview else []
    return ", ".join([*parts, f"{flagged:,} flagged" if flagged else "none flagged"])


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


def flag_section(recipe_name: str, recipe: RecipeSurvey) -> dict[str, Any]:
    """The flags of a recipe, and whether tensors and images were checked.

    Each has a description, a count, at most `MAX_LINKS` groups of keys and names (one group, except for
    near-duplicates), and the number of samples not shown.
    """
    flagged = []
    for flag, positions in recipe.flagged.flags.items():
        groups = recipe.flagged.groups if flag == "near_duplicate" else [positions]
        listed = [group[:MAX_LINKS] for group in groups[:MAX_LINKS]]
        shown = [list(zip(recipe.keys(each), recipe.names(each), strict=True)) for each in listed]
        if len(positions):
            flagged.append((FLAGS[flag], len(positions), shown, len(positions) - sum(map(len, shown))))
    return {
        "recipe": recipe_name,
        "flagged": flagged,
        "scanned": "extreme_numbers" in recipe.flagged.flags,
        "compared": "near_duplicate" in recipe.flagged.flags,
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
