"""What a cache holds, as numbers (`summarise`) and for people (`print_overview`). Opens no shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.console import human_bytes, plural
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_cache
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.format.remote import location
from qwen_cache.format.sample import BYTES_PER_ELEMENT, PIXELS_PER_TOKEN, token_count

if TYPE_CHECKING:
    from rich.console import Console

BAR_WIDTH = 24
SHOWN = 12  # rows of a histogram


def summarise(path: str | Path) -> dict[str, Any]:
    """Everything that `inspect` says, as one JSON value; behind a URL, nothing of what is not part of the dataset."""
    folder = location(path)
    staged = sorted((folder / directory.STAGING).rglob("*.tar")) if isinstance(folder, Path) else []
    if isinstance(folder, Path) and staged and not (folder / MANIFEST_NAME).exists():
        size = sum(path.stat().st_size for path in staged)
        return {"cache": str(folder), "state": "partial", "staged_bytes": size, "recipes": {}}
    manifest, _ = directory.load(folder)
    overview = {
        "cache": str(folder),
        "state": "complete",
        "format_version": manifest.format_version,
        "written_by": manifest.written_by,
        "shards": len(manifest.shards),
        "bytes": sum(shard.bytes for shard in manifest.shards),
        "recipes": {name: _recipe(open_cache(folder, recipe=name)) for name in sorted(manifest.recipes)},
    }
    if isinstance(folder, Path):
        overview["garbage_bytes"] = sum(path.stat().st_size for path in directory.leftovers(folder, manifest))
    return overview


def _recipe(cache: Cache) -> dict[str, Any]:
    rows = list(cache.rows())
    return {
        "samples": len(rows),
        "identity": cache.identity,
        "recipe": cache.recipe.recipe,
        "resolutions": _counts(_resolution(row, 0) for row in rows),
        "controls": _counts(len(row.meta.img_shapes) - 1 for row in rows),
        "edit_masks": sum("edit_mask" in row.meta.tensors for row in rows),
        "text_tokens": _spread([row.meta.text_length for row in rows]),
        "image_tokens": _spread([token_count(row.meta.img_shapes) for row in rows]),
        "tensor_bytes": _tensor_bytes(rows),
        "saved": _saved(rows),
    }


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

    out = out or Console(highlight=False)
    if overview["state"] == "partial":
        size = human_bytes(overview["staged_bytes"])
        state = f"[yellow]partial[/]: {size} encoded; the same build command goes on"
        out.print(f"[bold]{overview['cache']}[/]  {state}")
        return
    size = human_bytes(overview["bytes"])
    shards = plural(overview["shards"], "shard")
    out.print(f"[bold]{overview['cache']}[/]  format v{overview['format_version']}, {shards}, {size}")
    if overview.get("garbage_bytes"):
        out.print(f"{human_bytes(overview['garbage_bytes'])} are not part of the dataset; `qwen-cache gc` removes them")
    for name, recipe in overview["recipes"].items():
        _print_recipe(out, name, recipe)


def _print_recipe(out: Any, name: str, recipe: dict[str, Any]) -> None:
    from rich.columns import Columns
    from rich.table import Table

    made = recipe["recipe"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_row("recipe", f"[bold]{name}[/]  {made['pipeline']}, {made['dtype']}")
    if "imported_from" in made:
        facts.add_row("imported", f"from {made['imported_from']}; claimed to be of {made['claimed']['model']}")
    facts.add_row("samples", f"{recipe['samples']}, {recipe['edit_masks']} with an edit mask")
    for kind in ("image", "text"):
        spread = recipe[f"{kind}_tokens"]
        if spread:
            facts.add_row(f"{kind} tokens", f"{spread['min']} to {spread['max']}, median {spread['median']}")
    facts.add_row("identity", recipe["identity"])
    for what, how_much in _savings(recipe["saved"]):
        facts.add_row(what, how_much)
    out.print(facts)
    sizes = {tensor: human_bytes(count) for tensor, count in recipe["tensor_bytes"].items()}
    tables = [
        _histogram("target", recipe["resolutions"]),
        _histogram("controls", recipe["controls"]),
        _two_columns("tensor", "size", sizes),
    ]
    out.print(Columns(tables, padding=(1, 3)))


def _savings(saved: dict[str, int]) -> list[tuple[str, str]]:
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
        table.add_row(value, "█" * max(1, round(BAR_WIDTH * count / largest)), str(count))
    if len(counts) > SHOWN:
        table.add_row(f"{len(counts) - SHOWN} others", "", str(sum(list(counts.values())[SHOWN:])))
    return table


def _two_columns(title: str, second: str, values: dict[str, str]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False)
    for name, value in values.items():
        table.add_row(name, value)
    return table
