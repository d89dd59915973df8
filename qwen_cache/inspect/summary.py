"""What a cache holds, as numbers (`summarise`) and for people (`print_overview`); one sample whole (`describe`).

No shard is opened, but for what is asked of tensors: a scan for odd ones, or the numbers of one sample. Importing this
imports no torch. Refused is a key that names no sample, or several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qwen_cache.batching.batch_plan import index_token_counts
from qwen_cache.batching.budgets import budgets
from qwen_cache.console import human_bytes, plural
from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample, open_recipes
from qwen_cache.format.index import INDEX_NAME, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.format.tensor import BYTES_PER_ELEMENT
from qwen_cache.inspect.flags import index_flags, scan_flags
from qwen_cache.inspect.tensors import numbers, statistics
from qwen_cache.storage.local_copies import LocalCopies
from qwen_cache.storage.url import Url, location

SHOWN = 12  # rows of a histogram
MUCH_PADDING = 0.05  # of all tokens: more than that is worth another layout
BATCHES = ("train.max_tokens", "samples per batch", "padding", "by chance")

Bin = tuple[float, float, int]
"""From, up to but not with, and how many."""
Compare = Callable[[Path | Url, Manifest | None], Mapping[str, Any]]
"""What a source says of a cache: its `state`, and as `source` why (`against_source`); no manifest: it is not done."""
Opened = Mapping[str, tuple[Cache, Sequence[IndexRow]]]
"""By the name of its recipe."""


def summarise(
    path: str | Path, *, scan: bool = False, compare: Compare | None = None, copies: LocalCopies | None = None
) -> dict[str, Any]:
    """Everything that `inspect` says, as one JSON value; behind a URL, nothing of what is not part of the dataset.

    `scan` reads every tensor, for the flags that the index cannot tell; `compare` looks at a source; `copies` is where
    remote samples are kept, in the user's cache folder by default.
    """
    return survey(path, scan=scan, compare=compare, copies=copies)[0]


def survey(
    path: str | Path, *, scan: bool = False, compare: Compare | None = None, copies: LocalCopies | None = None
) -> tuple[dict[str, Any], Opened]:
    """The same, and what it was told from, so that a page shows the very dataset that it counts."""
    folder = location(path)
    staged = sorted((folder / directory.STAGING).rglob("*.tar")) if isinstance(folder, Path) else []
    if isinstance(folder, Path) and staged and not (folder / MANIFEST_NAME).exists():
        size = sum(path.stat().st_size for path in staged)
        against = compare(folder, None) if compare else {}
        return {"cache": legible(folder), "state": "partial", **against, "staged_bytes": size, "recipes": {}}, {}
    manifest, _ = directory.load(folder)
    caches = open_recipes(folder, copies or LocalCopies.of())
    opened = {name: (cache, list(cache.rows())) for name, cache in caches.items()}
    overview = {
        "cache": legible(folder),
        "state": "complete",
        **(compare(folder, manifest) if compare else {}),
        "format_version": manifest.format_version,
        "written_by": manifest.written_by,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "recipes": {name: _recipe(*each, scan) for name, each in opened.items()},
    }
    if isinstance(folder, Path):
        overview["garbage_bytes"] = sum(path.stat().st_size for path in directory.leftovers(folder, manifest))
    return overview, opened


def legible(name: object) -> str:
    """A name that can be printed and stand in JSON: with replacement characters for what is not UTF-8."""
    return str(name).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _recipe(cache: Cache, rows: Sequence[IndexRow], scan: bool) -> dict[str, Any]:
    texts, images = [row.meta.text_length for row in rows], [token_count(row.meta.img_shapes) for row in rows]
    shapes = [row.meta.img_shapes[0] for row in rows]
    return {
        "samples": len(rows),
        "identity": cache.identity,
        "recipe": cache.recipe.recipe,
        "resolutions": _counts(_resolution(row, 0) for row in rows),
        "controls": _counts(len(row.meta.img_shapes) - 1 for row in rows),
        "edit_masks": sum("edit_mask" in row.meta.tensors for row in rows),
        "edit_masks_from": _counts(row.meta.edit_mask_from for row in rows if row.meta.edit_mask_from),
        "text_tokens": _spread(texts),
        "image_tokens": _spread(images),
        "histograms": {
            "width_over_height": bins([round(w / h, 2) for _, h, w in shapes], 0.01),
            "text_tokens": bins(texts),
            "all_tokens": bins([text + image for text, image in zip(texts, images, strict=True)]),
        },
        "batches": _batches(cache),
        "tensor_bytes": _tensor_bytes(rows),
        "saved": _saved(rows),
        "flags": index_flags(rows) | (scan_flags(cache, rows) if scan else {}),
    }


def _batches(cache: Cache) -> list[dict[str, float]]:
    """What batches would be like."""
    return [asdict(budget) for budget in budgets(index_token_counts(cache.table, cache.folder / INDEX_NAME))]


def _saved(rows: Sequence[IndexRow]) -> dict[str, int]:
    """What is there once instead of many times."""
    pictures = [
        (digest, shape)
        for row in rows
        for digest, shape in zip((row.meta.inputs.target, *row.meta.inputs.controls), row.meta.img_shapes, strict=False)
    ]
    edited = [row.meta.inputs.controls for row in rows if row.meta.inputs.controls]
    return {
        "repeated_rows": sum(row.source_rows - 1 for row in rows),
        "vae_passes": len(pictures) - len(set(pictures)),
        "prefix_passes": len(edited) - len(set(edited)),
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


def bins(values: Sequence[float], unit: float = 1) -> list[Bin]:
    """How many of the values, multiples of `unit`, lie where: at most `SHOWN` bins, 1, 2 or 5 times a power of ten."""
    if not values:
        return []
    steps = (factor * 10**power for power in range(20) for factor in (1, 2, 5))
    units = [round(value / unit) for value in values]
    step = next(step for step in steps if max(units) // step - min(units) // step < SHOWN)
    counts = Counter(value // step for value in units)
    return [
        (round(i * step * unit, 6), round((i + 1) * step * unit, 6), counts[i])
        for i in range(min(counts), max(counts) + 1)
    ]


def binned(histogram: Iterable[Sequence[Any]]) -> dict[str, int]:
    """A histogram of bins with names: `20–40`, or the value where each bin is a single one."""
    return {f"{low:,}" if high - low == 1 else f"{low:,}–{high:,}": count for low, high, count in histogram}


def _tensor_bytes(rows: Sequence[IndexRow]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for row in rows:
        sizes.update({name: spec.nbytes for name, spec in row.meta.tensors.items()})
    return dict(sizes)


def _prefix_bytes(row: IndexRow) -> int:
    spec = row.meta.tensors["prompt_embeds"]
    return row.meta.prefix_length * spec.shape[1] * BYTES_PER_ELEMENT[spec.dtype]


def about_partial(overview: Mapping[str, Any]) -> str:
    """What is to be said of a cache that no build has finished."""
    said = f"{human_bytes(overview['staged_bytes'])} encoded; the same build command goes on"
    return f"{said}, then it can be compared with {overview['source']['path']}" if "source" in overview else said


def against_source(overview: Mapping[str, Any]) -> str:
    """What the comparison with a source found, in words."""
    source = overview["source"]
    which = f"{source['path']}, by recipe {source['recipe']}"
    if overview["state"] == "complete":
        return f"complete: it holds all of {which}"
    counts = [f"{source[what]} {what}" for what in ("new", "changed", "removed") if source[what]]
    counts += [plural(source["problems"], "problem")] if source["problems"] else []
    return f"stale against {which}: {', '.join(counts)}; `qwen-cache build --dry-run` says which"


def imported(recipe: Mapping[str, Any]) -> str:
    """Where an imported recipe comes from, in words; what it claims can be anything."""
    claimed = recipe.get("claimed")
    model = claimed.get("model") if isinstance(claimed, dict) else None
    return f"from {recipe['imported_from']}; claimed to be of {model or 'no model'}"


def batch_row(budget: Mapping[str, float]) -> tuple[str, str, str, str]:
    """By `BATCHES`, in words."""
    padding, by_chance = (f"{100 * budget[name]:.1f} %" for name in ("padding", "padding_by_chance"))
    return f"{budget['max_tokens']:,}", f"{budget['samples_per_batch']:.1f}", padding, by_chance


def about_batches(batches: Sequence[Mapping[str, float]]) -> str:
    """What is to be said below the table."""
    much = max(budget["padding"] for budget in batches) > MUCH_PADDING
    cure = "; train.layout=packed pads nothing" if much else ""
    return f"padding is a share of all tokens; by chance: with train.bucketing_window=1{cure}"


def savings(saved: dict[str, int]) -> list[tuple[str, str]]:
    """What was saved, in words; nothing of what was not."""
    runs = [plural(saved[f"{kind}_passes"], f"{kind} run") for kind in ("vae", "prefix") if saved[f"{kind}_passes"]]
    lines = [("not stored", f"{human_bytes(saved['prefix_bytes'])} of empty prompts: their prefix is the prompt's")]
    if saved["repeated_rows"]:
        lines.append(("", f"{plural(saved['repeated_rows'], 'row')} of the source with the content of another"))
    if saved["compression_bytes"]:
        lines.append(("", f"{human_bytes(saved['compression_bytes'])} by compression"))
    return lines + ([("not computed", f"{' and '.join(runs)} over images seen before")] if runs else [])


# ---- one sample ------------------------------------------------------------------------------------------------------


def find(path: str | Path, key: str, copies: LocalCopies) -> tuple[str, Sample]:
    """The recipe and the sample that is called `key`, or whose key begins so, of all recipes."""
    caches = open_recipes(path, copies)
    pairs = {name: [cache.table[column].to_pylist() for column in ("key", "name")] for name, cache in caches.items()}
    every = [(recipe, k, called) for recipe, columns in pairs.items() for k, called in zip(*columns, strict=True)]
    found = [(recipe, k) for recipe, k, called in every if key in (k, called)]
    found = found or [(recipe, k) for recipe, k, _ in every if k.startswith(key)]
    if len(found) != 1:
        what = f"{plural(len(found), 'sample')} of this cache are called like this, or have a key that begins so"
        raise ConfigError(
            what, where=location(path), found=key, do="name one: `qwen-cache inspect --html FILE` lists all"
        )
    name, whole = found[0]
    return name, caches[name][whole]


def describe(path: str | Path, key: str, copies: LocalCopies | None = None) -> dict[str, Any]:
    """Everything about one sample, as a JSON value; its tensors are read, and checked."""
    recipe, sample = find(path, key, copies or LocalCopies.of())
    row, meta, offsets = sample.row, sample.row.meta, sample.row.entry.tensor_offsets()
    return {
        "key": meta.key,
        "name": row.name,
        "recipe": recipe,
        "prompt": meta.prompt,
        "phrase": [meta.prompt[begin:end] for begin, end in meta.phrase],
        "images": [_resolution(row, i) for i in range(len(meta.img_shapes))],
        "img_shapes": [list(shape) for shape in meta.img_shapes],
        "prefix_length": meta.prefix_length,
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
    """Of numbers that mean something: those of a JPEG do not."""
    return {} if name == "thumbnails" else statistics(numbers(sample, name))
