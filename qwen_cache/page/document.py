"""The page of `qwen-cache inspect --html`: one file that needs no network, and says what `inspect --json` says.

Two JSON documents lie in it: `overview`, which is `inspect --json`, and `samples`, a row for each sample, which a few
lines of JavaScript search, filter and show, a hundred at a time. Pictures are in the page while they are few, else in a
folder beside it. Whatever a source says, such as a prompt, is text in it, never markup.
"""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from qwen_cache.console import counting, human_bytes, plural
from qwen_cache.format.cache import Sample, open_cache
from qwen_cache.format.directory import write_durably
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import PIXELS_PER_TOKEN, token_count
from qwen_cache.inspect import SHOWN, binned, savings
from qwen_cache.page.flags import FLAGS
from qwen_cache.page.look import SCRIPT, STYLE

COLUMNS = ("key", "name", "prompt", "sizes", "text_tokens", "image_tokens", "edit_mask_from", "recipe", "pictures")
PICTURED_WITHIN = 200  # samples: some 10 MB; with more, a page would take long to open
LINKS = 12  # of a flag; the list below has all
ROW, CHART_WIDTH, LABEL, COUNT = 20, 340, 110, 48  # of a chart: the height of a row, and the widths of all its parts
SAFE = str.maketrans({"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"})  # so that no text can end a script

POLICY = "default-src 'none'; img-src data: file: 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may load: nothing from the network, unless the page itself is there, with its pictures beside it."""

Draw = Callable[[Sample], Sequence[tuple[str, bytes]]]
"""What makes the pictures of a sample, each a title and a JPEG."""


def write_page(path: Path, overview: Mapping[str, Any], draw: Draw | None = None, gallery: int = 0) -> None:
    """Replace `path` by the page about what `summarise` said, with pictures of at most `gallery` samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = list(sample_rows(overview["cache"], overview["recipes"]))
    if draw:
        add_pictures(rows, overview["cache"], draw, gallery, path)
    write_durably(path, page(overview, rows).encode("utf-8"))


def page(overview: Mapping[str, Any], rows: Sequence[Sequence[Any]]) -> str:
    """The whole document."""
    title = escape(Path(overview["cache"].rstrip("/")).name or overview["cache"])
    recipes = "".join(recipe_section(name, recipe) for name, recipe in overview["recipes"].items())
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{title}</h1>{table(cache_facts(overview))}{recipes}{listing() if rows else ''}"
        f"{data('overview', overview)}{data('samples', {'columns': COLUMNS, 'rows': rows})}"
        f"<script>{SCRIPT}</script></body></html>\n"
    )


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
    if folder:
        folder.mkdir(exist_ok=True)
    caches = {recipe: open_cache(cache, recipe=recipe) for recipe in {row[COLUMNS.index("recipe")] for row in rows}}
    with counting("decoding", len(chosen)) as advance:
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
        f'<div class="charts">{"".join(charts)}</div>{flag_section(recipe["flags"])}'
    )


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


def flag_section(flags: Mapping[str, Sequence[str]]) -> str:
    """What is odd about which samples; what was not looked for is said."""
    parts = []
    for flag, keys in flags.items():
        links = " ".join(f'<a href="#{key}"><code>{key[:8]}</code></a>' for key in keys[:LINKS])
        more = f" and {len(keys) - LINKS:,} more" if len(keys) > LINKS else ""
        if keys:
            parts.append(f"<dt>{escape(FLAGS[flag])} <b>{len(keys):,}</b></dt><dd>{links}{more}</dd>")
    shown = f"<dl>{''.join(parts)}</dl>" if parts else "<p>Nothing stands out.</p>"
    missing = (
        ""
        if FLAGS.keys() <= flags.keys()
        else "<p>Edit masks and numbers were not looked at: <code>--scan</code> does.</p>"
    )
    return f"<h3>Flags</h3>{shown}{missing}"


def table(facts: Iterable[tuple[str, str]]) -> str:
    """Pairs of a name and a value."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f"<table>{lines}</table>"


def bar_chart(title: str, counts: Mapping[str, int]) -> str:
    """An SVG with a bar for each of them, the last for all that have no room; nothing when there are none."""
    if not counts:
        return ""
    bars = list(counts.items())[:SHOWN]
    if len(counts) > SHOWN:
        bars.append((f"{len(counts) - SHOWN} others", sum(list(counts.values())[SHOWN:])))
    longest = (CHART_WIDTH - LABEL - COUNT) / max(count for _, count in bars)
    lines = "".join(_bar(i * ROW, label, count, count * longest) for i, (label, count) in enumerate(bars))
    return (
        f'<figure><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {CHART_WIDTH} {ROW * len(bars)}" '
        f'role="img" aria-label="{escape(title)}">{lines}</svg></figure>'
    )


def _bar(top: int, label: str, count: int, length: float) -> str:
    middle = top + ROW - 6
    return (
        f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>'
        f'<rect x="{LABEL}" y="{top + 3}" width="{length:.1f}" height="{ROW - 6}" rx="2"></rect>'
        f'<text x="{LABEL + length + 6:.1f}" y="{middle}">{count:,}</text>'
    )
