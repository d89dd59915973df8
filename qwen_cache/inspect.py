"""What a cache holds, as numbers (`summarise`) and for people (`print_overview`); one sample whole (`describe`).

No shard is opened, but for what is asked of tensors: a scan for odd ones, or the numbers of one sample. Importing this
imports no torch. Refused is a key that names no sample, or several.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.console import human_bytes, plural
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample, open_cache
from qwen_cache.format.errors import ConfigError
from qwen_cache.format.index import INDEX_NAME, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest
from qwen_cache.format.remote import Url, location
from qwen_cache.format.sample import BYTES_PER_ELEMENT, PIXELS_PER_TOKEN, token_count
from qwen_cache.page.flags import index_flags, scan_flags
from qwen_cache.page.tensors import numbers, statistics
from qwen_cache.sampling.batch_plan import index_token_counts
from qwen_cache.sampling.budgets import budgets

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24
SHOWN = 12  # rows of a histogram
MUCH_PADDING = 0.05  # of all tokens: more than that is worth another layout
BATCHES = ("train.max_tokens", "samples per batch", "padding", "by chance")

Bin = tuple[float, float, int]
"""From, up to but not with, and how many."""
Compare = Callable[[Path | Url, Manifest | None], Mapping[str, Any]]
"""What a source says of a cache: its `state`, and as `source` why (`against_source`); no manifest: it is not done."""
Opened = Mapping[str, tuple[Cache, Sequence[IndexRow]]]
"""By the name of its recipe."""


def summarise(path: str | Path, *, scan: bool = False, compare: Compare | None = None) -> dict[str, Any]:
    """Everything that `inspect` says, as one JSON value; behind a URL, nothing of what is not part of the dataset.

    `scan` reads every tensor, for the flags that the index cannot tell; `compare` looks at a source.
    """
    return survey(path, scan=scan, compare=compare)[0]


def survey(path: str | Path, *, scan: bool = False, compare: Compare | None = None) -> tuple[dict[str, Any], Opened]:
    """The same, and what it was told from, so that a page shows the very dataset that it counts."""
    folder = location(path)
    staged = sorted((folder / directory.STAGING).rglob("*.tar")) if isinstance(folder, Path) else []
    if isinstance(folder, Path) and staged and not (folder / MANIFEST_NAME).exists():
        size = sum(path.stat().st_size for path in staged)
        against = compare(folder, None) if compare else {}
        return {"cache": legible(folder), "state": "partial", **against, "staged_bytes": size, "recipes": {}}, {}
    manifest, _ = directory.load(folder)
    caches = {name: open_cache(folder, recipe=name) for name in sorted(manifest.recipes)}
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


def print_overview(overview: dict[str, Any], out: Console | None = None) -> None:
    """The summary as tables, on stdout."""
    from rich.console import Console
    from rich.markup import escape

    out = out or Console(highlight=False)
    cache = f"[bold]{escape(overview['cache'])}[/]"
    if overview["state"] == "partial":
        out.print(f"{cache}  [yellow]partial[/]: {escape(about_partial(overview))}")
        return
    size = human_bytes(overview["bytes"])
    shards = plural(overview["shards"], "shard")
    out.print(f"{cache}  format v{overview['format_version']}, {shards}, {size}")
    if "source" in overview:
        out.print(against_source(overview), markup=False)
    if overview.get("garbage_bytes"):
        out.print(f"{human_bytes(overview['garbage_bytes'])} are not part of the dataset; `qwen-cache gc` removes them")
    for name, recipe in overview["recipes"].items():
        _print_recipe(out, name, recipe)


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


def _print_recipe(out: Any, name: str, recipe: dict[str, Any]) -> None:
    from rich.columns import Columns
    from rich.markup import escape
    from rich.table import Table

    made = recipe["recipe"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    kind = f"{made['pipeline']}, {made['dtype']}"
    facts.add_row("recipe", f"[bold]{escape(name)}[/]  {escape(kind)}")
    if "imported_from" in made:
        facts.add_row("imported", escape(imported(made)))
    facts.add_row("samples", f"{recipe['samples']}, {recipe['edit_masks']} with an edit mask")
    for kind in ("image", "text"):
        spread = recipe[f"{kind}_tokens"]
        if spread:
            facts.add_row(f"{kind} tokens", f"{spread['min']} to {spread['max']}, median {spread['median']}")
    facts.add_row("identity", recipe["identity"])
    for what, how_much in savings(recipe["saved"]):
        facts.add_row(what, how_much)
    flagged = [f"{flag.replace('_', ' ')} {len(keys)}" for flag, keys in recipe["flags"].items() if keys]
    if flagged:
        facts.add_row("flags", f"[yellow]{', '.join(flagged)}[/]; --html or --json names them")
    out.print(facts)
    sizes = {tensor: human_bytes(count) for tensor, count in recipe["tensor_bytes"].items()}
    tables = [
        _histogram("target", recipe["resolutions"]),
        _histogram("text tokens", binned(recipe["histograms"]["text_tokens"])),
        _histogram("controls", recipe["controls"]),
        _two_columns("tensor", "size", sizes),
    ]
    out.print(Columns(tables, padding=(1, 3)))
    if recipe["batches"]:
        out.print()
        out.print(_table(*BATCHES, rows=map(batch_row, recipe["batches"])))
        out.print(f"[dim]{about_batches(recipe['batches'])}[/]")


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
    return f"padding is a share of all tokens; by chance: with train.shuffle_window=1{cure}"


def savings(saved: dict[str, int]) -> list[tuple[str, str]]:
    """What was saved, in words; nothing of what was not."""
    runs = [plural(saved[f"{kind}_passes"], f"{kind} run") for kind in ("vae", "prefix") if saved[f"{kind}_passes"]]
    lines = [("not stored", f"{human_bytes(saved['prefix_bytes'])} of empty prompts: their prefix is the prompt's")]
    if saved["repeated_rows"]:
        lines.append(("", f"{plural(saved['repeated_rows'], 'row')} of the source with the content of another"))
    if saved["compression_bytes"]:
        lines.append(("", f"{human_bytes(saved['compression_bytes'])} by compression"))
    return lines + ([("not computed", f"{' and '.join(runs)} over pictures seen before")] if runs else [])


def _histogram(title: str, counts: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False)
    largest = max(counts.values(), default=1)
    for value, count in list(counts.items())[:SHOWN]:
        table.add_row(value, "█" * max(count > 0, round(BAR_WIDTH * count / largest)), str(count))
    if len(counts) > SHOWN:
        table.add_row(f"{len(counts) - SHOWN} others", "", str(sum(list(counts.values())[SHOWN:])))
    return table


def _two_columns(title: str, second: str, values: dict[str, str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for name, value in values.items():
        table.add_row(name, value)
    return table


# ---- one sample ------------------------------------------------------------------------------------------------------


def find(path: str | Path, key: str) -> tuple[str, Sample]:
    """The recipe and the sample that is called `key`, or whose key begins so, of all recipes."""
    folder = location(path)
    manifest, _ = directory.load(folder)
    caches = {name: open_cache(folder, recipe=name) for name in sorted(manifest.recipes)}
    pairs = {name: [cache.table[column].to_pylist() for column in ("key", "name")] for name, cache in caches.items()}
    every = [(recipe, k, called) for recipe, columns in pairs.items() for k, called in zip(*columns, strict=True)]
    found = [(recipe, k) for recipe, k, called in every if key in (k, called)]
    found = found or [(recipe, k) for recipe, k, _ in every if k.startswith(key)]
    if len(found) != 1:
        what = f"{plural(len(found), 'sample')} of this cache are called like this, or have a key that begins so"
        raise ConfigError(what, where=folder, found=key, do="name one: `qwen-cache inspect --html FILE` lists all")
    name, whole = found[0]
    return name, caches[name][whole]


def describe(path: str | Path, key: str) -> dict[str, Any]:
    """Everything about one sample, as a JSON value; its tensors are read, and checked."""
    recipe, sample = find(path, key)
    row, meta, offsets = sample.row, sample.row.meta, sample.row.entry.tensor_offsets()
    return {
        "key": meta.key,
        "name": row.name,
        "recipe": recipe,
        "prompt": meta.prompt,
        "phrase": [meta.prompt[begin:end] for begin, end in meta.phrase],
        "pictures": [_resolution(row, i) for i in range(len(meta.img_shapes))],
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


def print_sample(sample: Mapping[str, Any], out: Console | None = None) -> None:
    """The same for people, on stdout."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    out = out or Console(highlight=False)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name in ("key", "name", "recipe", "prompt", "source_rows"):
        facts.add_row(name.replace("_", " "), escape(str(sample[name])))
    if sample["phrase"]:
        facts.add_row("phrase", escape(" … ".join(sample["phrase"])))
    target, *controls = sample["pictures"]
    facts.add_row("target", f"{target}  {sample['inputs']['target']}")
    for size, digest in zip(controls, sample["inputs"]["controls"], strict=True):
        facts.add_row("control", f"{size}  {digest}")
    if sample["edit_mask_from"]:
        facts.add_row("edit mask", escape(f"from {sample['edit_mask_from']}  {sample['inputs']['mask'] or ''}"))
    facts.add_row("prefix", f"{plural(sample['prefix_length'], 'token')} shared with the empty prompt")
    facts.add_row("lies in", f"{sample['shard']}, {human_bytes(sample['length'])} from byte {sample['offset']}")
    out.print(facts)
    tensors = sample["tensors"].items()
    out.print()
    out.print(_table("tensor", "dtype", "shape", "bytes", "min", "max", "mean", rows=map(_tensor_row, tensors)))
    places = ((name, tensor["xxh3_128"], str(tensor["offset"]), tensor.get("codec", "")) for name, tensor in tensors)
    out.print()
    out.print(_table("tensor", "xxh3-128", "from byte", "codec", rows=places))


def _tensor_row(item: tuple[str, Mapping[str, Any]]) -> tuple[str, ...]:
    name, tensor = item
    spread = (f"{tensor[which]:.4g}" if which in tensor else "" for which in ("min", "max", "mean"))
    return name, tensor["dtype"], "×".join(map(str, tensor["shape"])), human_bytes(tensor["bytes"]), *spread


def _table(*titles: str, rows: Iterable[Sequence[str]]) -> Any:
    from rich.table import Table

    table = Table(box=None, header_style="dim", padding=(0, 2, 0, 0))
    for title in titles:
        table.add_column(title, no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
