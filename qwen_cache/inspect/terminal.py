"""The summary, and one sample, in a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.format.cache import find_sample, open_recipes
from qwen_cache.format.measured import Alignment
from qwen_cache.format.sample import PIXELS_PER_TOKEN, ImgShape
from qwen_cache.inspect.flags import numbers, statistics, stored_thumbnails
from qwen_cache.inspect.summary import (
    BATCH_COLUMNS,
    MAX_BINS,
    RecipeSurvey,
    Survey,
    batch_note,
    batch_row,
    import_origin,
    labelled_bins,
    measured_line,
    partial_state,
    sample_counts,
    savings_rows,
    source_state,
)
from qwen_cache.storage.remote import LocalCopies
from qwen_cache.terminal import human_bytes, plural, results, verbatim
from qwen_cache.text import escaped

if TYPE_CHECKING:
    from PIL import Image

# ---- sample ----------------------------------------------------------------------------------------------------------
# Everything about one sample (`describe`), as `inspect --sample` shows it.
#
# A key that names no sample, or several, is an error.


def describe(path: str | Path, key: str, copies: LocalCopies | None = None) -> tuple[dict[str, Any], list[Image.Image]]:
    """Everything about one sample, as a JSON value, and its thumbnails. Reads its tensors and checks their hashes."""
    cache, sample = find_sample(list(open_recipes(path, copies or LocalCopies.of()).values()), key)
    row, meta, offsets = sample.row, sample.row.meta, sample.row.entry.tensor_offsets()
    described = {
        "key": meta.key,
        "name": row.name,
        "recipe": cache.recipe_name,
        "prompt": meta.prompt,
        "slider": meta.slider and meta.slider._asdict(),
        "phrase": [meta.prompt[begin:end] for begin, end in meta.phrase],
        "images": [_pixels(shape) for shape in meta.img_shapes],
        "rejected": _pixels(meta.rejected_shape) if meta.rejected_shape else None,
        "img_shapes": [list(shape) for shape in meta.img_shapes],
        "prefix_length": meta.prefix_length,
        "image_positions": list(meta.image_positions),
        "edit_mask_from": meta.edit_mask_from,
        "measured": meta.measured and meta.measured.to_json(),
        "inputs": meta.inputs.to_json(),
        "source_rows": row.source_rows,
        "shard": row.shard,
        "offset": row.entry.offset,
        "length": row.entry.length,
        "tensors": {
            name: spec.to_json()
            | {"offset": offsets[name], "bytes": spec.nbytes}
            | ({} if name == "thumbnails" else statistics(numbers(sample, name)))  # which are an image file
            for name, spec in meta.tensors.items()
        },
    }
    return described, stored_thumbnails(sample) if "thumbnails" in sample else []


def _pixels(shape: ImgShape) -> str:
    _, h, w = shape
    return f"{w * PIXELS_PER_TOKEN}×{h * PIXELS_PER_TOKEN}"


# ---- terminal --------------------------------------------------------------------------------------------------------
# The report of `inspect` as tables on the terminal.

BAR_WIDTH = 24
IMAGE_WIDTH = 32  # characters
NAMES_SHOWN, GROUPS_SHOWN = 6, 6  # of a flag: more belong on the page


def print_survey(survey: Survey, *, in_full: bool = True) -> None:
    """The summary as tables, on stdout; unless `in_full`, of each recipe only the flags."""
    out, overview = results(), survey.overview
    cache = f"[bold]{verbatim(overview['cache'])}[/]"
    if overview["state"] == "partial":
        out.print(f"{cache}  [yellow]partial[/]: {verbatim(partial_state(overview))}")
        return
    size = human_bytes(overview["bytes"])
    shards = plural(overview["shards"], "shard")
    out.print(f"{cache}  format v{overview['format_version']}, {shards}, {size}")
    if "source" in overview:
        out.print(verbatim(source_state(overview)))
    if overview.get("garbage_bytes"):
        out.print(f"{human_bytes(overview['garbage_bytes'])} are not part of the dataset; `qwen-cache gc` removes them")
    for name, recipe in survey.recipes.items():
        if in_full:
            _print_recipe(out, name, recipe)
        else:
            lines = list(flag_lines(recipe)) or ["no flags"]
            out.print(f"{verbatim(name)}: {lines[0]}", *lines[1:], sep="\n")


def _print_recipe(out: Any, name: str, surveyed: RecipeSurvey) -> None:
    from rich.columns import Columns
    from rich.table import Table

    recipe = surveyed.counted
    settings = recipe["recipe"]
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    kind = f"{settings['pipeline']}, {settings['dtype']}"
    kind += f", text encoder in {settings['text_quantization']}" if "text_quantization" in settings else ""
    facts.add_row("recipe", f"[bold]{verbatim(name)}[/]  {verbatim(kind)}")
    facts.add_row("model", f"{recipe['family']}, licence {recipe['license']}")
    if "imported_from" in settings:
        facts.add_row("imported", verbatim(import_origin(settings)))
    facts.add_row("samples", sample_counts(recipe))
    if line := measured_line(recipe["measured"]):
        facts.add_row("images", line)
    for each in recipe["measured"]["most_misaligned"][:NAMES_SHOWN]:
        alignment = Alignment(tuple(each["shift"]), tuple(each["zoom"]))
        facts.add_row("", verbatim(f"{each['name']}: control {each['control']} {alignment}"))
    for kind in ("image", "text"):
        spread = recipe[f"{kind}_tokens"]
        if spread:
            facts.add_row(f"{kind} tokens", f"{spread['min']} to {spread['max']}, median {spread['median']}")
    facts.add_row("identity", recipe["identity"])
    for what, how_much in savings_rows(recipe["saved"]):
        facts.add_row(what, how_much)
    for i, line in enumerate(flag_lines(surveyed)):
        facts.add_row("" if i else "flags", line)
    out.print(facts)
    out.print()
    sizes = Table(title="tensor", title_justify="left", box=None, show_header=False)
    for tensor, count in recipe["tensor_bytes"].items():
        sizes.add_row(tensor, human_bytes(count))
    tables = [
        _histogram("target", recipe["resolutions"]),
        _histogram("text tokens", labelled_bins(recipe["histograms"]["text_tokens"])),
        _histogram("controls", recipe["controls"]),
        sizes,
    ]
    out.print(Columns(tables, padding=(1, 3)))
    if recipe["batches"]:
        out.print()
        out.print(_table(*BATCH_COLUMNS, rows=map(batch_row, recipe["batches"])))
        out.print(f"[dim]{batch_note(recipe['batches'])}[/]")


def flag_lines(recipe: RecipeSurvey) -> Iterator[str]:
    """A line for each flag with the names of its samples, and for each group of near-duplicates; rich's markup."""
    hidden = 0
    for flag, positions in recipe.flagged.flags.items():
        if not len(positions):
            continue
        yield f"[yellow]{flag.replace('_', ' ')} {len(positions)}[/]"
        groups = recipe.flagged.groups if flag == "near_duplicate" else [positions]
        for group in groups[:GROUPS_SHOWN]:
            hidden += max(0, len(group) - NAMES_SHOWN)
            more = ", …" if len(group) > NAMES_SHOWN else ""
            yield "  " + verbatim(", ".join(recipe.names(group[:NAMES_SHOWN]))) + more
        hidden += sum(map(len, groups[GROUPS_SHOWN:]))
    if hidden:
        yield f"[dim]{hidden} more are in --html FILE and --json[/]"


def _histogram(title: str, counts: dict[str, int]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=None, show_header=False)
    largest = max(counts.values(), default=1)
    for value, count in list(counts.items())[:MAX_BINS]:
        table.add_row(value, "█" * max(count > 0, round(BAR_WIDTH * count / largest)), str(count))
    if len(counts) > MAX_BINS:
        table.add_row(f"{len(counts) - MAX_BINS} others", "", str(sum(list(counts.values())[MAX_BINS:])))
    return table


def print_sample(sample: Mapping[str, Any], images: Sequence[Image.Image] = ()) -> None:
    """One sample as tables, on stdout; its prompt in full, and on a terminal with colours its images."""
    from rich.markup import escape
    from rich.table import Table

    out = results()
    if images and out.is_terminal and out.color_system in ("256", "truecolor"):
        shown = Table.grid(padding=(0, 1))
        shown.add_row(*map(_in_colours, images))
        out.print(shown)
    facts = Table.grid(padding=(0, 2))
    facts.add_column(style="dim")
    facts.add_column(overflow="fold")
    for name in ("key", "name", "recipe", "prompt", "source_rows"):
        facts.add_row(name.replace("_", " "), escape(escaped(sample[name])))
    for name, prompt in (sample["slider"] or {}).items():
        facts.add_row(name, escape(escaped(prompt)))
    if sample["phrase"]:
        facts.add_row("phrase", escape(escaped(" … ".join(sample["phrase"]))))
    target, *controls = sample["images"]
    facts.add_row("target", f"{target}  {sample['inputs']['target'] or 'to generate'}")
    if "seed" in sample["inputs"]:
        facts.add_row("seed", str(sample["inputs"]["seed"]))
    for size, digest in zip(controls, sample["inputs"]["controls"], strict=True):
        facts.add_row("control", f"{size}  {digest}")
    if sample["rejected"]:
        facts.add_row("rejected", f"{sample['rejected']}  {sample['inputs']['rejected']}")
    if sample["edit_mask_from"]:
        facts.add_row("edit mask", verbatim(f"from {sample['edit_mask_from']}  {sample['inputs']['mask'] or ''}"))
    if sample["inputs"]["target"]:
        facts.add_row("images", _measured(sample["measured"]))
    facts.add_row("prefix", f"{plural(sample['prefix_length'], 'token')} shared with the empty prompt")
    facts.add_row("stored in", f"{sample['shard']}, {human_bytes(sample['length'])} from byte {sample['offset']}")
    out.print(facts)
    tensors = sample["tensors"].items()
    out.print()
    out.print(_table("tensor", "dtype", "shape", "bytes", "min", "max", "mean", rows=map(_tensor_row, tensors)))
    locations = ((name, tensor["xxh3_128"], str(tensor["offset"]), tensor.get("codec", "")) for name, tensor in tensors)
    out.print()
    out.print(_table("tensor", "xxh3-128", "from byte", "codec", rows=locations))


def _measured(measured: Mapping[str, Any] | None) -> str:
    if measured is None:
        return "not measured"
    found = (each and Alignment(tuple(each["shift"]), tuple(each["zoom"])) for each in measured["controls"])
    controls = (f"control {i} {each or 'is no copy of it'}" for i, each in enumerate(found, 1))
    return ", ".join([f"target scaled by {measured['enlarged']:.3g}", *controls])


def _in_colours(image: Image.Image) -> Any:
    """An image as text: a character has two pixels, one above the other."""
    from PIL import Image as Images
    from rich.style import Style
    from rich.text import Text

    rows = max(1, round(IMAGE_WIDTH * image.height / image.width / 2))
    small: Any = image.convert("RGB").resize((IMAGE_WIDTH, 2 * rows), Images.Resampling.LANCZOS)
    text = Text(no_wrap=True)
    for y in range(0, 2 * rows, 2):
        for x in range(IMAGE_WIDTH):
            above, below = ("#{:02x}{:02x}{:02x}".format(*small.getpixel((x, y + i))) for i in (0, 1))
            text.append("▀", Style(color=above, bgcolor=below))
        text.append("\n")
    return text


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
