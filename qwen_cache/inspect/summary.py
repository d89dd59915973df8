"""The contents of a cache: counted, flagged, and as one JSON value (`summarise`); and its parts as lines of text.

Shards are opened only to read tensors, in a scan for odd ones. Importing this imports no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_recipes
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.remote import STAGING
from qwen_cache.inspect.columns import Integers, take
from qwen_cache.inspect.count import count_recipe
from qwen_cache.inspect.flags import Flagged, index_flags, scan_flags
from qwen_cache.storage.remote import LocalCopies, Url, location
from qwen_cache.terminal import human_bytes, plural

HIGH_PADDING = 0.05  # of all tokens: above this, another layout is worth it
STALE = ("new", "changed", "renamed_or_moved", "removed")
"""The counts of samples in a comparison with a source that say why a cache is stale."""
BATCH_COLUMNS = ("train.max_tokens", "samples per batch", "padding", "at random")

SourceComparison = Callable[[Path | Url, Manifest | None], Mapping[str, Any]]
"""Compares a cache with its source: `state`, and the counts under `source`. The manifest is None while no build has
finished."""


@dataclass(frozen=True)
class RecipeSurvey:
    """What a cache holds under one recipe."""

    cache: Cache
    counted: dict[str, Any]
    """As in the report, without the flags."""
    flagged: Flagged

    def names(self, positions: Integers) -> list[str]:
        """The names of the samples at these positions."""
        return take(self.cache, "name", positions)

    def keys(self, positions: Integers) -> list[str]:
        """The keys of the samples at these positions."""
        return take(self.cache, "key", positions)

    def positions(self, keys: Sequence[str]) -> Integers:
        """The positions of the samples with these keys, in their order, without keys of other recipes."""
        column = self.cache.table["key"]
        found = np.flatnonzero(pc.is_in(column, value_set=pa.array(keys, column.type)).to_numpy())
        by_key = dict(zip(self.keys(found), found.tolist(), strict=True))
        return np.array([by_key[key] for key in keys if key in by_key], np.int64)

    def to_json(self) -> dict[str, Any]:
        flags = {flag: self.keys(positions) for flag, positions in self.flagged.flags.items()}
        some = np.flatnonzero(self.flagged.bits(len(self.cache)))
        names = dict(zip(self.keys(some), self.names(some), strict=True))
        groups = [self.keys(group) for group in self.flagged.groups]
        return {**self.counted, "flags": flags, "near_duplicates": groups, "names": names}


@dataclass(frozen=True)
class Survey:
    """Everything that `inspect` reports, with the caches that it read: a page shows exactly what was counted."""

    overview: dict[str, Any]
    """The report without its recipes."""
    recipes: dict[str, RecipeSurvey]

    def to_json(self) -> dict[str, Any]:
        """The report as one JSON value; with the key of every flagged sample, so it may be long."""
        return {**self.overview, "recipes": {name: recipe.to_json() for name, recipe in self.recipes.items()}}


def summarise(
    path: str | Path, *, scan: bool = False, compare: SourceComparison | None = None, copies: LocalCopies | None = None
) -> dict[str, Any]:
    """Everything that `inspect` reports, as one JSON value; of a remote cache, without `garbage_bytes`.

    `scan` reads every tensor, for the flags that the index alone cannot give. `compare` compares the cache with a
    source. `copies` stores remote samples, by default in the user's cache folder.
    """
    return survey(path, scan=scan, compare=compare, copies=copies).to_json()


def survey(
    path: str | Path, *, scan: bool = False, compare: SourceComparison | None = None, copies: LocalCopies | None = None
) -> Survey:
    """`summarise`, with the flagged samples by their positions, and the caches that it read."""
    folder = location(path)
    staged = sorted((folder / STAGING).rglob("*.tar")) if isinstance(folder, Path) else []
    if isinstance(folder, Path) and staged and not (folder / MANIFEST_NAME).exists():
        size = sum(path.stat().st_size for path in staged)
        source = compare(folder, None) if compare else {}
        return Survey({"cache": printable(folder), "state": "partial", **source, "staged_bytes": size}, {})
    caches = open_recipes(folder, copies or LocalCopies.of())
    manifest = next(iter(caches.values())).manifest if caches else directory.load(folder)[0]
    overview = {
        "cache": printable(folder),
        "state": "complete",
        **(compare(folder, manifest) if compare else {}),
        "format_version": manifest.format_version,
        "written_by": manifest.written_by,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
    }
    if isinstance(folder, Path):
        overview["garbage_bytes"] = sum(directory.garbage(folder, manifest).values())
    return Survey(overview, {name: survey_recipe(cache, scan) for name, cache in caches.items()})


def survey_recipe(cache: Cache, scan: bool) -> RecipeSurvey:
    """The samples of one recipe, counted and flagged."""
    scanned = scan_flags(cache) if scan else Flagged({})
    flags = {**index_flags(cache), **scanned.flags}
    return RecipeSurvey(cache, count_recipe(cache), Flagged(flags, scanned.groups))


def printable(name: object) -> str:
    """The name with replacement characters where it is not UTF-8, so that it can be printed and written as JSON."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def labelled_bins(bins: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Counts by label: `20–40`, or the value itself where a bin holds a single one."""
    return {f"{low:,}" if high - low == 1 else f"{low:,}–{high:,}": count for low, high, count in bins}


def partial_state(overview: Mapping[str, Any]) -> str:
    """The state of a cache that no build has finished, as one line."""
    state = f"{human_bytes(overview['staged_bytes'])} encoded; run the same build command to continue"
    return f"{state}, then compare it with {overview['source']['path']}" if "source" in overview else state


def source_state(overview: Mapping[str, Any]) -> str:
    """The result of the comparison with a source, as one line."""
    source = overview["source"]
    which = f"{source['path']}, by recipe {source['recipe']}"
    if overview["state"] == "complete":
        return f"complete: it holds all of {which}"
    counts = [f"{source[what]} {what.replace('_', ' ')}" for what in STALE if source[what]]
    counts += [plural(source["problems"], "problem")] if source["problems"] else []
    return f"stale against {which}: {', '.join(counts)}; `qwen-cache build --dry-run` lists them"


def import_origin(recipe: Mapping[str, Any]) -> str:
    """The trainer and the model of an imported recipe; `claimed` can be any JSON value."""
    claimed = recipe.get("claimed")
    model = claimed.get("model") if isinstance(claimed, dict) else None
    return f"from {recipe['imported_from']}; claimed model: {model or 'none'}"


def batch_row(budget: Mapping[str, float]) -> tuple[str, str, str, str]:
    """One row of the table of batches, in the order of `BATCH_COLUMNS`."""
    padding, at_random = (f"{100 * budget[name]:.1f} %" for name in ("padding", "padding_by_chance"))
    return f"{budget['max_tokens']:,}", f"{budget['samples_per_batch']:.1f}", padding, at_random


def batch_note(batches: Sequence[Mapping[str, float]]) -> str:
    """The line below the table of batches."""
    high = max(budget["padding"] for budget in batches) > HIGH_PADDING
    advice = "; train.layout=packed pads nothing" if high else ""
    return f"padding: its fraction of all tokens; at random: with train.bucketing_window=1{advice}"


def sample_counts(recipe: Mapping[str, Any]) -> str:
    """The number of samples, how many of them have an edit mask, and how many are images to generate, if any."""
    generated = f", {recipe['to_generate']:,} to generate: without target" if recipe["to_generate"] else ""
    return f"{recipe['samples']:,}, {recipe['edit_masks']:,} with an edit mask{generated}"


def savings_rows(saved: Mapping[str, int]) -> list[tuple[str, str]]:
    """What the cache saves, as rows of two cells, without rows that would say 0."""
    kinds = {"vae_passes": "VAE run", "prefix_passes": "prefix run"}
    runs = [plural(saved[kind], words) for kind, words in kinds.items() if saved[kind]]
    stored = []
    if saved["prefix_bytes"]:
        stored.append(f"{human_bytes(saved['prefix_bytes'])} of empty prompts: their prefix is the prompt's")
    if saved["repeated_rows"]:
        stored.append(f"{plural(saved['repeated_rows'], 'row')} of the source with the same content as another")
    if saved["compression_bytes"]:
        stored.append(f"{human_bytes(saved['compression_bytes'])} by compression")
    lines = [("" if i else "space saved", line) for i, line in enumerate(stored)]
    return lines + ([("time saved", f"{' and '.join(runs)} of images that were encoded before")] if runs else [])
