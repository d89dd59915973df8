"""The page of `qwen-cache inspect --html`: one file that needs no network, and says what `inspect --json` says.

Two JSON documents lie in it: `overview`, which is `inspect --json`, and `samples`, a row for each sample, which a few
lines of JavaScript search, filter and show, a hundred at a time. Pictures are in the page while they are few, else in a
folder beside it. Whatever a source says, such as a prompt, is text in it, never markup.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from qwen_cache.console import counting, human_bytes, plural
from qwen_cache.format.cache import open_cache
from qwen_cache.format.directory import write_durably
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.inspect import BATCHES, about_batches, against_source, batch_row, binned, savings
from qwen_cache.page.charts import bar_chart
from qwen_cache.page.flags import FLAGS
from qwen_cache.page.frame import table, whole_page
from qwen_cache.page.look import LISTING
from qwen_cache.page.pictures import Draw

COLUMNS = ("key", "name", "prompt", "sizes", "text_tokens", "image_tokens", "edit_mask_from", "recipe", "pictures")
PICTURED_WITHIN = 200  # samples: some 10 MB; with more, a page would take long to open
LINKS = 12  # of a flag; the list below has all
SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})  # so that no text can end a script


def write_page(path: Path, overview: Mapping[str, Any], draw: Draw | None = None, gallery: int = 0) -> None:
    """Replace `path` by the page about what `summarise` said, with pictures of at most `gallery` samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(sample_rows(overview["cache"], overview["recipes"]))
    if draw:
        add_pictures(rows, overview["cache"], draw, gallery, path)
    write_durably(path, page(overview, rows).encode("utf-8"))


def page(overview: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> str:
    """The whole document."""
    title = Path(overview["cache"].rstrip("/")).name or overview["cache"]
    recipes = "".join(recipe_section(name, recipe) for name, recipe in overview["recipes"].items())
    documents = data("overview", overview) + data("samples", {"columns": COLUMNS, "rows": rows})
    return whole_page(title, f"{table(cache_facts(overview))}{recipes}{listing() if rows else ''}{documents}", LISTING)


def data(name: str, value: Any) -> str:
    """A JSON document in the page."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":")).translate(SAFE)
    return f'<script type="application/json" id="{name}">{text}</script>'


# ---- samples ---------------------------------------------------------------------------------------------------------


def sample_rows(cache: str, recipes: Iterable[str]) -> Iterator[list[Any]]:
    """What the list shows of every sample, by `COLUMNS`; no pictures yet."""
    for recipe in recipes:
        for row in open_cache(cache, recipe=recipe).rows():
            yield sample_row(row, recipe)


def sample_row(row: IndexRow, recipe: str) -> list[Any]:
    meta = row.meta
    sizes = [[w * PIXELS_PER_TOKEN, h * PIXELS_PER_TOKEN] for _, h, w in meta.img_shapes]
    tokens = (meta.text_length, token_count(meta.img_shapes))
    return [meta.key, row.name, meta.prompt, sizes, *tokens, meta.edit_mask_from, recipe, []]


def add_pictures(rows: Sequence[list[Any]], cache: str, draw: Draw, gallery: int, path: Path) -> None:
    """Pictures of some of them, evenly chosen: pairs of a title and where it is, in the page or beside it."""
    chosen = evenly(len(rows), gallery)
    folder = None if len(chosen) <= PICTURED_WITHIN else path.with_name(f"{path.stem}_files")
    caches = {recipe: open_cache(cache, recipe=recipe) for recipe in {row[COLUMNS.index("recipe")] for row in rows}}
    with counting("drawing", len(chosen)) as advance:
        for i in chosen:
            key, recipe = rows[i][0], rows[i][COLUMNS.index("recipe")]
            drawn = enumerate(draw(caches[recipe][key]))
            rows[i][-1] = [[title, _place(jpeg, folder, f"{key}-{n}.jpg")] for n, (title, jpeg) in drawn]
            advance(1)


def evenly(count: int, most: int) -> list[int]:
    """At most `most` of `count` positions, the first and the last among them where there is room for two."""
    if count <= most:
        return list(range(count))
    return [i * (count - 1) // max(most - 1, 1) for i in range(most)]


def _place(jpeg: bytes, folder: Path | None, name: str) -> str:
    if folder is None:
        return f"data:image/jpeg;base64,{b64encode(jpeg).decode('ascii')}"
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(jpeg)
    return f"{folder.name}/{name}"


def listing() -> str:
    """The empty list with its filters; the script fills it."""
    return (
        '<h2 id="list">Samples</h2><form id="filters"><input type="search" id="search" aria-label="Search" '
        'placeholder="Search prompts, names, keys"><select id="size" aria-label="Resolution"></select>'
        '<select id="flag" aria-label="Flags"></select><select id="recipe" aria-label="Recipe"></select></form>'
        '<p class="pager"><button id="before">Before</button> <span id="range" role="status"></span> '
        '<button id="after">After</button></p><noscript>The list needs JavaScript.</noscript>'
        '<div id="samples-shown"></div>'
    )


# ---- overview --------------------------------------------------------------------------------------------------------


def cache_facts(overview: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield "cache", overview["cache"]
    if overview["state"] == "partial":
        yield "state", f"partial: {human_bytes(overview['staged_bytes'])} encoded; the same build command goes on"
        return
    if "source" in overview:
        yield "state", against_source(overview)
    yield "format", f"v{overview['format_version']}"
    yield "size", f"{human_bytes(overview['bytes'])} in {plural(overview['shards'], 'shard')}"
    yield "written by", ", ".join(f"{name} {version}" for name, version in overview["written_by"].items())
    if overview.get("garbage_bytes"):
        yield "garbage", f"{human_bytes(overview['garbage_bytes'])}, which `qwen-cache gc` removes"


def recipe_section(name: str, recipe: Mapping[str, Any]) -> str:
    made, histograms = recipe["recipe"], recipe["histograms"]
    charts = [
        bar_chart("target sizes", recipe["resolutions"]),
        bar_chart("width over height", binned(histograms["width_over_height"])),
        bar_chart("text tokens", binned(histograms["text_tokens"])),
        bar_chart("all tokens, of text, target and controls", binned(histograms["all_tokens"])),
        bar_chart("controls of a sample", recipe["controls"]),
        bar_chart("edit masks, by where they come from", recipe["edit_masks_from"]),
    ]
    settings = escape(json.dumps(made, indent=1, ensure_ascii=False))
    return (
        f"<h2>Recipe {escape(name)}</h2>{table(recipe_facts(recipe))}"
        f"<details><summary>The whole recipe</summary><pre>{settings}</pre></details>"
        f'<div class="charts">{"".join(charts)}</div>{batch_section(recipe["batches"])}{flag_section(recipe["flags"])}'
    )


def batch_section(batches: Sequence[Mapping[str, float]]) -> str:
    """What batches would be like under a few budgets; nothing where there are no samples."""
    if not batches:
        return ""
    head = "".join(f"<th>{title}</th>" for title in BATCHES)
    rows = ("".join(f"<td>{cell}</td>" for cell in batch_row(budget)) for budget in batches)
    lines = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<h3>Batches</h3><table><tr>{head}</tr>{lines}</table><p>{about_batches(batches)}</p>"


def recipe_facts(recipe: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    made = recipe["recipe"]
    yield "pipeline", f"{made['pipeline']}, {made['dtype']}"
    weights = [f"{part} {made[part]}" for part in ("vae", "text_encoder", "processor") if made.get(part)]
    if weights:
        yield "fingerprints", ", ".join(weights)
    if "imported_from" in made:
        yield "imported", f"from {made['imported_from']}; claimed to be of {made['claimed']['model']}"
    yield "samples", f"{recipe['samples']:,}, {recipe['edit_masks']:,} with an edit mask"
    yield "identity", recipe["identity"]
    sizes = (f"{tensor} {human_bytes(count)}" for tensor, count in recipe["tensor_bytes"].items())
    yield "tensors", ", ".join(sizes)
    yield from savings(recipe["saved"])


def _not_looked_for(flags: Iterable[str]) -> str:
    if "extreme_numbers" not in flags:
        return "Edit masks, numbers and pictures that look alike were not looked for: <code>--scan</code> does."
    return "" if "near_duplicate" in flags else "Without thumbnails nothing is known of pictures that look alike."


def flag_section(flags: Mapping[str, Sequence[str]]) -> str:
    """What is odd about which samples; what was not looked for is said."""
    parts = []
    for flag, keys in flags.items():
        links = " ".join(f'<a href="#{key}"><code>{key[:8]}</code></a>' for key in keys[:LINKS])
        more = f" and {len(keys) - LINKS:,} more" if len(keys) > LINKS else ""
        if keys:
            parts.append(f"<dt>{escape(FLAGS[flag])} <b>{len(keys):,}</b></dt><dd>{links}{more}</dd>")
    shown = f"<dl>{''.join(parts)}</dl>" if parts else "<p>Nothing stands out.</p>"
    missing = f"<p>{_not_looked_for(flags)}</p>" if _not_looked_for(flags) else ""
    return f"<h3>Flags</h3>{shown}{missing}"
