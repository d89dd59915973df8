"""The contents of a cache as one JSON value (`summarise`), and everything about one sample (`describe`).

Shards are opened only to read tensors: in a scan for odd ones, or for the statistics of one sample. Importing this
imports no torch. A key that names no sample, or several, is an error.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen_cache.batching.batch_plan import index_token_counts, row_tokens
from qwen_cache.batching.budgets import budgets
from qwen_cache.console import human_bytes, plural
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample, open_recipes
from qwen_cache.format.find import find_sample
from qwen_cache.format.index import INDEX_NAME, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.remote import STAGING
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.format.tensor import BYTES_PER_ELEMENT
from qwen_cache.inspect.flags import index_flags, scan_flags
from qwen_cache.inspect.tensors import numbers, statistics
from qwen_cache.models.family import family_of_recipe
from qwen_cache.storage.local_copies import LocalCopies
from qwen_cache.storage.url import Url, location

MAX_BINS = 12  # of a histogram
HIGH_PADDING = 0.05  # of all tokens: above this, another layout is worth it
BATCH_COLUMNS = ("train.max_tokens", "samples per batch", "padding", "at random")

Bin = tuple[float, float, int]
"""Lower edge, upper edge (excluded), count."""
SourceComparison = Callable[[Path | Url, Manifest | None], Mapping[str, Any]]
"""Compares a cache with its source: `state`, and the counts under `source`. The manifest is None while no build has
finished."""
OpenRecipes = Mapping[str, tuple[Cache, Sequence[IndexRow]]]
"""Each recipe's cache and its index rows, by the name of the recipe."""


def summarise(
    path: str | Path, *, scan: bool = False, compare: SourceComparison | None = None, copies: LocalCopies | None = None
) -> dict[str, Any]:
    """Everything that `inspect` reports, as one JSON value; of a remote cache, without `garbage_bytes`.

    `scan` reads every tensor, for the flags that the index alone cannot give. `compare` compares the cache with a
    source. `copies` stores remote samples, by default in the user's cache folder.
    """
    return survey(path, scan=scan, compare=compare, copies=copies)[0]


def survey(
    path: str | Path, *, scan: bool = False, compare: SourceComparison | None = None, copies: LocalCopies | None = None
) -> tuple[dict[str, Any], OpenRecipes]:
    """`summarise`, and the caches that it read, so that a page shows exactly the dataset that was counted."""
    folder = location(path)
    staged = sorted((folder / STAGING).rglob("*.tar")) if isinstance(folder, Path) else []
    if isinstance(folder, Path) and staged and not (folder / MANIFEST_NAME).exists():
        size = sum(path.stat().st_size for path in staged)
        source = compare(folder, None) if compare else {}
        return {"cache": printable(folder), "state": "partial", **source, "staged_bytes": size, "recipes": {}}, {}
    manifest, _ = directory.load(folder)
    caches = open_recipes(folder, copies or LocalCopies.of())
    opened = {name: (cache, list(cache.rows())) for name, cache in caches.items()}
    overview = {
        "cache": printable(folder),
        "state": "complete",
        **(compare(folder, manifest) if compare else {}),
        "format_version": manifest.format_version,
        "written_by": manifest.written_by,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "recipes": {name: _recipe(*each, scan) for name, each in opened.items()},
    }
    if isinstance(folder, Path):
        overview["garbage_bytes"] = sum(directory.garbage(folder, manifest).values())
    return overview, opened


def printable(name: object) -> str:
    """The name with replacement characters where it is not UTF-8, so that it can be printed and written as JSON."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _recipe(cache: Cache, rows: Sequence[IndexRow], scan: bool) -> dict[str, Any]:
    texts, images = [row.meta.text_length for row in rows], [token_count(row.meta.img_shapes) for row in rows]
    scanned, near_duplicates = scan_flags(cache, rows) if scan else ({}, [])
    flags = index_flags(rows) | scanned
    shapes, family = [row.meta.img_shapes[0] for row in rows], family_of_recipe(cache.recipe.recipe)
    return {
        "family": family.name,
        "license": family.licence,
        "samples": len(rows),
        "identity": cache.identity,
        "recipe": cache.recipe.recipe,
        "resolutions": _counts(_resolution(row, 0) for row in rows),
        "controls": _counts(len(row.meta.img_shapes) - 1 for row in rows),
        "to_generate": sum(row.meta.inputs.target is None for row in rows),
        "edit_masks": sum("edit_mask" in row.meta.tensors for row in rows),
        "edit_masks_from": _counts(row.meta.edit_mask_from for row in rows if row.meta.edit_mask_from),
        "text_tokens": _spread(texts),
        "image_tokens": _spread(images),
        "histograms": {
            "width_over_height": histogram([round(w / h, 2) for _, h, w in shapes], 0.01),
            "text_tokens": histogram(texts),
            "all_tokens": histogram([text + image for text, image in zip(texts, images, strict=True)]),
        },
        "batches": _batches(cache),
        "tensor_bytes": _tensor_bytes(rows),
        "saved": _savings(rows),
        "flags": flags,
        "near_duplicates": near_duplicates,
        "names": _names(rows, {key for keys in flags.values() for key in keys}),
    }


def _names(rows: Sequence[IndexRow], keys: Container[str]) -> dict[str, str]:
    """The names of the samples with these keys."""
    return {row.meta.key: row.name for row in rows if row.meta.key in keys}


def _batches(cache: Cache) -> list[dict[str, float]]:
    """Samples per batch and padding under a few token budgets; none of samples that are not for training."""
    if cache.table["target"].null_count:
        return []
    tokens = index_token_counts(cache.table, cache.folder / INDEX_NAME)
    joint = family_of_recipe(cache.recipe.recipe).joint_sequence
    return [asdict(budget) for budget in budgets(row_tokens(tokens, joint=joint))]


def _savings(rows: Sequence[IndexRow]) -> dict[str, int]:
    """Work and bytes that the cache saves, because equal things are encoded and stored once."""
    images = [
        (digest, shape)
        for row in rows
        for digest, shape in zip((row.meta.inputs.target, *row.meta.inputs.controls), row.meta.img_shapes, strict=False)
        if digest is not None
    ]
    controls = [row.meta.inputs.controls for row in rows if row.meta.inputs.controls]
    return {
        "repeated_rows": sum(row.source_rows - 1 for row in rows),
        "vae_passes": len(images) - len(set(images)),
        "prefix_passes": len(controls) - len(set(controls)),
        "prefix_bytes": sum(_prefix_bytes(row) for row in rows),
        "compression_bytes": sum(spec.nbytes - spec.stored_bytes for row in rows for spec in row.meta.tensors.values()),
    }


def _resolution(row: IndexRow, i: int) -> str:
    _, h, w = row.meta.img_shapes[i]
    return f"{w * PIXELS_PER_TOKEN}×{h * PIXELS_PER_TOKEN}"


def _counts(values: Iterable[Any]) -> dict[str, int]:
    return {str(value): count for value, count in sorted(Counter(values).items(), key=lambda item: (-item[1], item[0]))}


def _spread(values: Sequence[int]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    middle = ordered[len(ordered) // 2]
    return {"min": ordered[0], "median": middle, "max": ordered[-1], "total": sum(ordered)}


def histogram(values: Sequence[float], unit: float = 1) -> list[Bin]:
    """At most `MAX_BINS` bins of values that are multiples of `unit`; a bin is 1, 2 or 5 times a power of ten wide."""
    if not values:
        return []
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    units = [round(value / unit) for value in values]
    step = next(step for step in steps if max(units) // step - min(units) // step < MAX_BINS)
    counts = Counter(value // step for value in units)
    return [
        (round(i * step * unit, 6), round((i + 1) * step * unit, 6), counts[i])
        for i in range(min(counts), max(counts) + 1)
    ]


def labelled_bins(bins: Iterable[Sequence[Any]]) -> dict[str, int]:
    """Counts by label: `20–40`, or the value itself where a bin holds a single one."""
    return {f"{low:,}" if high - low == 1 else f"{low:,}–{high:,}": count for low, high, count in bins}


def _tensor_bytes(rows: Sequence[IndexRow]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes.update({name: spec.nbytes for name, spec in row.meta.tensors.items()})
    return dict(sizes)


def _prefix_bytes(row: IndexRow) -> int:
    spec = row.meta.tensors["prompt_embeds"]
    return row.meta.prefix_length * spec.shape[1] * BYTES_PER_ELEMENT[spec.dtype]


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
    counts = [f"{source[what]} {what}" for what in ("new", "changed", "removed") if source[what]]
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


# ---- one sample ------------------------------------------------------------------------------------------------------


def describe(path: str | Path, key: str, copies: LocalCopies | None = None) -> dict[str, Any]:
    """Everything about one sample, as a JSON value. Reads its tensors and checks their hashes."""
    cache, sample = find_sample(list(open_recipes(path, copies or LocalCopies.of()).values()), key)
    row, meta, offsets = sample.row, sample.row.meta, sample.row.entry.tensor_offsets()
    return {
        "key": meta.key,
        "name": row.name,
        "recipe": cache.recipe_name,
        "prompt": meta.prompt,
        "phrase": [meta.prompt[begin:end] for begin, end in meta.phrase],
        "images": [_resolution(row, i) for i in range(len(meta.img_shapes))],
        "img_shapes": [list(shape) for shape in meta.img_shapes],
        "prefix_length": meta.prefix_length,
        "image_positions": list(meta.image_positions),
        "edit_mask_from": meta.edit_mask_from,
        "inputs": meta.inputs.to_json(),
        "source_rows": row.source_rows,
        "shard": row.shard,
        "offset": row.entry.offset,
        "length": row.entry.length,
        "tensors": {
            name: spec.to_json() | {"offset": offsets[name], "bytes": spec.nbytes} | _statistics(sample, name)
            for name, spec in meta.tensors.items()
        },
    }


def _statistics(sample: Sample, name: str) -> dict[str, float]:
    """The statistics of a tensor; none of thumbnails, which are the bytes of an image file."""
    return {} if name == "thumbnails" else statistics(numbers(sample, name))
