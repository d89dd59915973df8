"""A cache in numbers: counts by size, length and family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.batching import budgets, index_token_counts, row_tokens
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_recipes
from qwen_cache.format.index import INDEX_NAME, REJECTED, REJECTED_SHAPE, SLIDER
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.measured import Findings, findings, times
from qwen_cache.format.remote import STAGING
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SLIDER_EMBEDS, TENSORS
from qwen_cache.inspect.flags import (
    Digests,
    Flagged,
    Integers,
    batches,
    count_into,
    digests,
    distinct,
    images,
    index_flags,
    integers,
    reading,
    scan_flags,
    take,
    tensors,
)
from qwen_cache.models.family import family_of_recipe
from qwen_cache.storage.remote import LocalCopies, Location, is_remote, location
from qwen_cache.terminal import human_bytes, plural

# ---- count -----------------------------------------------------------------------------------------------------------
# The samples of a recipe counted: sizes, tokens, bytes, and what is encoded and stored once (`count_recipe`).
#
# Read from the index alone, in one pass over batches of its columns. Hashes are compared whole, so the counts are
# exact.

MAX_BINS = 12  # of a histogram
WORST = 12  # misaligned controls and enlarged targets that are named
SIZE_COLUMNS = ("img_shapes", "height", "width", "height_control", "width_control")
COLUMNS = (
    *("target", "controls", "text_length", "source_rows", "edit_mask_from", "prefix_length"),
    *(REJECTED, REJECTED_SHAPE, *SLIDER),
    *SIZE_COLUMNS,
    *TENSORS[2],
)

Bin = tuple[float, float, int]
"""Lower edge, upper edge (excluded), count."""


def _is_there(batch: pa.RecordBatch, name: str) -> npt.NDArray[np.bool_]:
    """`[N]`: which samples have a value in a column that the index may lack."""
    there = batch[name].is_valid() if name in batch.schema.names else pa.repeat(False, len(batch))
    return np.asarray(there.to_numpy(zero_copy_only=False), bool)


@dataclass
class Counts:
    """The sums of a pass over the batches of an index."""

    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Sizes of the target, or the image to generate: (height, width) in tokens."""
    controls: Counter[int] = field(default_factory=Counter)
    texts: Counter[int] = field(default_factory=Counter)
    images: Counter[int] = field(default_factory=Counter)
    tokens: Counter[int] = field(default_factory=Counter)
    masks_from: Counter[str] = field(default_factory=Counter)
    tensor_bytes: Counter[str] = field(default_factory=Counter)
    saved: Counter[str] = field(default_factory=Counter)
    to_generate: int = 0
    edit_masks: int = 0
    rejected: int = 0
    sliders: int = 0
    digests: list[Digests] = field(default_factory=list)
    """The sizes of each image that was encoded."""
    shapes: list[npt.NDArray[np.uint64]] = field(default_factory=list)
    """Shapes of the same images: height and width in one number."""
    lists: dict[int, list[npt.NDArray[np.uint64]]] = field(default_factory=dict)
    """The digests of the controls of the samples that have some, by their number, as `[N, 2 · number]`."""

    def add(self, batch: pa.RecordBatch) -> None:
        found, texts = images(batch), integers(batch["text_length"])
        first = found.shapes[found.first]
        packed = Counter[int]()
        count_into(packed, first[:, 1] << 32 | first[:, 2])
        self.sizes.update({(size >> 32, size & 0xFFFFFFFF): count for size, count in packed.items()})
        for tally, values in (
            (self.controls, found.counts - 1),
            (self.texts, texts),
            (self.images, found.tokens),
            (self.tokens, texts + found.tokens),
        ):
            count_into(tally, values)
        self.to_generate += batch["target"].null_count
        self.saved["repeated_rows"] += int((integers(batch["source_rows"]) - 1).sum())
        if "edit_mask_from" in batch.schema.names:
            self.edit_masks += len(batch) - batch["edit_mask"].null_count
            origins = pc.value_counts(batch["edit_mask_from"].drop_null()).to_pylist()
            self.masks_from.update({each["values"]: each["counts"] for each in origins if each["values"]})

        for name in (name for name in TENSORS[2] if name in batch.schema.names):
            stored = tensors(batch[name])
            if len(stored.nbytes):
                self.tensor_bytes[name] += int(stored.nbytes.sum())
                self.saved["compression_bytes"] += int((stored.nbytes - stored.stored_bytes).sum())
            if name == "prompt_embeds" and "prefix_length" in batch.schema.names:
                widths = integers(pc.list_element(stored.shapes, 1))
                row_bytes = widths * stored.element_sizes
                sharing = 1 + sum(_is_there(batch, each) for each in SLIDER_EMBEDS)
                self.saved["prefix_bytes"] += int((integers(batch["prefix_length"]) * row_bytes * sharing).sum())

        targets, controls = batch["target"], batch["controls"]
        numbers = integers(pc.list_value_length(controls))
        if (numbers != found.counts - 1).any():
            raise ValueError("there are not as many sizes as images")
        of_controls = digests(controls.flatten())
        has_target, is_control = targets.is_valid().to_numpy(zero_copy_only=False), np.ones(len(found.shapes), bool)
        is_control[found.first] = False
        sizes = (found.shapes[:, 1] << 32 | found.shapes[:, 2]).astype(np.uint64)
        self.digests += [digests(targets.drop_null()), of_controls]
        self.shapes += [sizes[found.first[has_target]], sizes[is_control]]
        self.sliders += int(_is_there(batch, SLIDER[0]).sum())
        if REJECTED in batch.schema.names:
            worse, shapes = batch[REJECTED].drop_null(), batch[REJECTED_SHAPE].drop_null()
            if len(worse) != len(shapes) or (integers(pc.list_value_length(shapes)) != 3).any():
                raise ValueError("rejected_shape is not [1, h, w] for each rejected image")
            sides = integers(shapes.flatten()).reshape(-1, 3)
            self.rejected += len(worse)
            self.digests.append(digests(worse))
            self.shapes.append((sides[:, 1] << 32 | sides[:, 2]).astype(np.uint64))
        of_each = np.repeat(numbers, numbers)
        for number in np.unique(numbers[numbers > 0]).tolist():
            rows = of_controls[of_each == number].reshape(-1, 2 * number)
            self.lists.setdefault(number, []).append(rows)

    def savings(self) -> dict[str, int]:
        """Work and bytes that the cache saves, because equal things are encoded and stored once."""
        encoded = np.concatenate([np.empty((0, 2), np.uint64), *self.digests])
        shapes = np.concatenate([np.empty(0, np.uint64), *self.shapes])
        lists = [np.concatenate(rows) for rows in self.lists.values()]
        return {
            "repeated_rows": self.saved["repeated_rows"],
            "vae_passes": len(encoded) - distinct(np.column_stack([encoded, shapes])),
            "prefix_passes": sum(len(rows) - distinct(rows) for rows in lists),
            "prefix_bytes": self.saved["prefix_bytes"],
            "compression_bytes": self.saved["compression_bytes"],
        }


def count_recipe(cache: Cache) -> dict[str, Any]:
    """The samples of a recipe as in the report of `inspect`, without flags."""
    counts, family = Counts(), family_of_recipe(cache.recipe.recipe)
    with reading(cache.folder):
        for batch in batches(cache.table, COLUMNS):
            counts.add(batch)
        saved, measured = counts.savings(), findings(cache.table)
    ratios = Counter[float]()
    for (h, w), count in counts.sizes.items():
        ratios[round(w / h, 2)] += count
    return {
        "family": family.name,
        "license": family.licence,
        "samples": len(cache),
        "identity": cache.identity,
        "recipe": cache.recipe.recipe,
        "resolutions": _sorted({resolution(h, w): count for (h, w), count in counts.sizes.items()}),
        "controls": _sorted(counts.controls),
        "to_generate": counts.to_generate,
        "edit_masks": counts.edit_masks,
        "rejected_images": counts.rejected,
        "directions_of_sliders": counts.sliders,
        "edit_masks_from": _sorted(counts.masks_from),
        "measured": measured_counts(cache, measured),
        "text_tokens": _spread(counts.texts),
        "image_tokens": _spread(counts.images),
        "histograms": {
            "width_over_height": histogram(ratios, 0.01),
            "text_tokens": histogram(counts.texts),
            "all_tokens": histogram(counts.tokens),
        },
        "batches": _batches(cache),
        "tensor_bytes": {name: counts.tensor_bytes[name] for name in TENSORS[2] if name in counts.tensor_bytes},
        "saved": saved,
    }


def measured_counts(cache: Cache, found: Findings) -> dict[str, Any]:
    """The findings in the images of a recipe: counts, and the worst `WORST` of each kind."""
    worst = replace(
        found,
        **{
            name: getattr(found, name)[:WORST]
            for name in ("enlarged", "factors", "misaligned", "controls", "alignments", "pixels")
        },
    ).to_json(lambda positions: take(cache, "name", positions))
    return {
        "samples": found.samples,
        "measured": found.measured,
        "pairs": found.pairs,
        "misaligned": len(found.misaligned),
        "enlarged": len(found.enlarged),
        "most_misaligned": worst["misaligned"],
        "most_enlarged": worst["enlarged"],
    }


def measured_line(measured: Mapping[str, Any]) -> str:
    """The findings in the images on one line; empty without a target."""
    if not measured["samples"]:
        return ""
    if not measured["measured"]:
        return "not measured: built by an older version, imported or migrated"
    misaligned, enlarged = measured["most_misaligned"], measured["most_enlarged"]
    parts = [f"{measured['misaligned']:,} of {measured['pairs']:,} compared controls are misaligned"]
    parts[0] += f", by up to {misaligned[0]['pixels']:.3g} px" if misaligned else ""
    parts += [f"{measured['enlarged']:,} of {measured['measured']:,} targets scaled up"]
    parts[1] += f", by up to {times(enlarged[0]['factor'])}" if enlarged else ""
    others = measured["samples"] - measured["measured"]
    return "; ".join([*parts, *([f"{others:,} samples not measured"] if others else [])])


def resolution(h: int, w: int) -> str:
    """Width and height in pixels of an image of `h` rows of `w` tokens."""
    return f"{w * PIXELS_PER_TOKEN}×{h * PIXELS_PER_TOKEN}"


def _batches(cache: Cache) -> list[dict[str, float]]:
    """Samples per batch and padding under a few token budgets; none of samples that are not for training."""
    if cache.table["target"].null_count:
        return []
    tokens = index_token_counts(cache.table, cache.folder / INDEX_NAME)
    joint = family_of_recipe(cache.recipe.recipe).joint_sequence
    return [asdict(budget) for budget in budgets(row_tokens(tokens, joint=joint))]


def _sorted(counts: Mapping[Any, int]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(counts.items(), key=lambda item: (-item[1], item[0]))}


def _spread(counts: Mapping[int, int]) -> dict[str, int]:
    """Minimum, median and maximum of the values with these counts."""
    if not counts:
        return {}
    values = np.array(sorted(counts))
    numbers = np.array([counts[value] for value in values.tolist()])
    middle = np.searchsorted(np.cumsum(numbers), numbers.sum() // 2, side="right")
    spread = {"min": values[0], "median": values[middle], "max": values[-1], "total": (values * numbers).sum()}
    return {name: int(value) for name, value in spread.items()}


def histogram(counts: Mapping[Any, int], unit: float = 1) -> list[Bin]:
    """At most `MAX_BINS` bins of values with these counts; a bin is 1, 2 or 5 times a power of ten wide.

    The values are multiples of `unit`.
    """
    if not counts:
        return []
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    units = Counter[int]()
    for value, count in counts.items():
        units[round(value / unit)] += count
    step = next(step for step in steps if max(units) // step - min(units) // step < MAX_BINS)
    binned = Counter[int]()
    for value, count in units.items():
        binned[value // step] += count
    return [
        (round(i * step * unit, 6), round((i + 1) * step * unit, 6), binned[i])
        for i in range(min(binned), max(binned) + 1)
    ]


# ---- summary ---------------------------------------------------------------------------------------------------------
# The contents of a cache: counted, flagged, and as one JSON value (`survey`); and its parts as lines of text.
#
# Shards are opened only to read tensors, in a scan for odd ones. Importing this imports no torch.

HIGH_PADDING = 0.05  # of all tokens: above this, another layout is worth it
STALE = ("new", "changed", "renamed_or_moved", "removed")
"""The counts of samples in a comparison with a source that say why a cache is stale."""
BATCH_COLUMNS = ("train.max_tokens", "samples per batch", "padding", "at random")

SourceComparison = Callable[[Location, Manifest | None], Mapping[str, Any]]
"""Compares a cache with its source: `state`, and the counts under `source`. The manifest is None while no build has
finished."""


@dataclass(frozen=True)
class RecipeSurvey:
    """The content of a cache under one recipe."""

    cache: Cache
    counted: dict[str, Any]
    """The recipe's part of the report, without the flags."""
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


def survey(
    path: str | Path, *, scan: bool = False, compare: SourceComparison | None = None, copies: LocalCopies | None = None
) -> Survey:
    """Everything that `inspect` reports; of a remote cache, without `garbage_bytes`.

    `scan` reads every tensor, for the flags that the index alone cannot give. `compare` compares the cache with a
    source. `copies` stores remote samples, by default in the user's cache folder.
    """
    folder = location(path)
    staged = [] if is_remote(folder) else sorted((folder / STAGING).rglob("*.tar"))
    if not is_remote(folder) and staged and not (folder / MANIFEST_NAME).exists():
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
    if not is_remote(folder):
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
    worse = f", {recipe['rejected_images']:,} with a rejected image" if recipe["rejected_images"] else ""
    sliders = recipe["directions_of_sliders"]
    worse += f", {sliders:,} with the direction of a slider" if sliders else ""
    return f"{recipe['samples']:,}, {recipe['edit_masks']:,} with an edit mask{worse}{generated}"


def savings_rows(saved: Mapping[str, int]) -> list[tuple[str, str]]:
    """The savings of the cache, as rows of two cells, without rows that would say 0."""
    kinds = {"vae_passes": "VAE run", "prefix_passes": "prefix run"}
    runs = [plural(saved[kind], words) for kind, words in kinds.items() if saved[kind]]
    stored = []
    if saved["prefix_bytes"]:
        stored.append(f"{human_bytes(saved['prefix_bytes'])} of other prompts: their prefix is the prompt's")
    if saved["repeated_rows"]:
        stored.append(f"{plural(saved['repeated_rows'], 'row')} of the source with the same content as another")
    if saved["compression_bytes"]:
        stored.append(f"{human_bytes(saved['compression_bytes'])} by compression")
    lines = [("" if i else "space saved", line) for i, line in enumerate(stored)]
    return lines + ([("time saved", f"{' and '.join(runs)} of images that were encoded before")] if runs else [])
