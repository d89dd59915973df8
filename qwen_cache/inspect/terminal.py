"""What `inspect` says, as tables on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from qwen_cache.console import human_bytes, plural

if TYPE_CHECKING:
    from rich.console import Console
from qwen_cache.inspect.summary import (
    BATCHES,
    SHOWN,
    about_batches,
    about_partial,
    against_source,
    batch_row,
    binned,
    imported,
    savings,
)

BAR_WIDTH = 24


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
    target, *controls = sample["images"]
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
