"""The page of `inspect --html` as a parser reads it, and small caches of random numbers to write one from."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import torch

from qwen_cache.format.identity import Inputs, content_hash, recipe_id
from qwen_cache.format.rows import ListedSample
from qwen_cache.format.sample import SampleMeta, TensorSpec
from qwen_cache.format.update import Existing, commit_update, open_staging, plan_update

from .commands import run

RECIPE = {"encoder_version": 2, "pipeline": "QwenImageEditPlusPipeline", "dtype": "float32"}
HOSTILE = (
    "</script><script>alert(1)</script><!-- <img src=https://example.com/a.png> & \"'\u2028 \\u003c"
    " \x1b]0;pwned\x07 \x9b31m \u202e"
)
CELLS = (4, 6)


@dataclass(frozen=True)
class CacheSample:
    """A sample to write."""

    name: str
    prompt: str = "edit it"
    target: str = ""
    controls: tuple[str, ...] = ("before",)
    mask: float | None = None
    scale: float = 1.0
    cells: tuple[int, int] = CELLS
    recipe: str = "default"


def write(
    folder: Path, samples: Sequence[CacheSample], recipe: dict[str, Any] = RECIPE, named: str = "default"
) -> Path:
    """A cache of these samples, with tensors of random numbers; recipes differ by the name that samples give them."""
    recipes = {each.recipe: recipe | {"named": each.recipe} for each in samples} | {"default": recipe}
    random, written = torch.Generator().manual_seed(0), {}
    for each in samples:
        tokens = each.cells[0] * each.cells[1]
        latents = torch.randn(tokens * (1 + len(each.controls)), 64, generator=random)
        tensors = {"image_latents": each.scale * latents[:tokens], "control_latents": latents[tokens:]}
        tensors |= {"prompt_embeds": torch.randn(5, 8, generator=random)}
        if not each.controls:
            del tensors["control_latents"]
        if each.mask is not None:
            tensors["edit_mask"] = torch.tensor([0.0, *[each.mask] * (tokens - 1)])
        data = {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}
        specs = {name: TensorSpec("F32", tuple(t.shape), content_hash(data[name])) for name, t in tensors.items()}
        controls = tuple(content_hash(control.encode()) for control in each.controls)
        inputs = Inputs(content_hash((each.target or each.name).encode()), controls, None)
        shapes, origin = ((1, *each.cells),) * (1 + len(controls)), None if each.mask is None else "difference"
        meta = SampleMeta(recipe_id(recipes[each.recipe]), inputs, each.prompt, shapes, 0, specs, (), origin)
        written[meta.key] = each.name, meta, data
    update = plan_update(folder, Existing.empty(2), 2, [ListedSample(written[key][0], key) for key in written])
    staging = open_staging(update, "page", 1 << 24)
    for _, meta, data in written.values():
        staging.add(meta, {name: memoryview(data[name]) for name in meta.tensors})
    used = {each.recipe: recipes[each.recipe] for each in samples} or {"default": recipe}
    named_recipes = {named if name == "default" else name: each for name, each in used.items()}
    commit_update(update, staging, named_recipes, {"qwen-cache": "0.1.0"})
    return folder


class Page(HTMLParser):
    """The tags, references, ids, JSON documents and chart rows of a page; checks that every tag is closed."""

    VOID = ("meta", "input", "img")

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[tuple[str, str | None]] = []
        self.tags: Counter[str] = Counter()
        self.references: list[str] = []
        self.ids: set[str | None] = set()
        self.texts: dict[str, str] = {}
        self.charts: dict[str, list[str]] = {}
        self.policy: dict[str, str] = {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert not self.open
        self.overview, self.facts = json.loads(self.texts["overview"]), json.loads(self.texts["samples"])
        self.folder = path.parent / unquote(self.facts["folder"]) if self.facts["folder"] else None
        self.files = dict(map(file_of, self.folder.iterdir())) if self.folder else {}
        rows = self.facts["rows"] if self.folder is None else self.in_order("rows")
        self.samples = [dict(zip(self.facts["columns"], row, strict=True)) for row in rows]
        for i, sample in enumerate(self.samples if self.folder else []):
            if sample["images"]:
                sources = self.files[f"images-{i // self.facts['pack']}"][i % self.facts["pack"]]
                sample["images"] = [[title, url] for (title, _), url in zip(sample["images"], sources, strict=True)]

    def in_order(self, kind: str) -> list[Any]:
        """The values of all files of a kind, joined."""
        names = [name for name in self.files if name.startswith(f"{kind}-")]
        return [row for i in range(len(names)) for row in self.files[f"{kind}-{i}"]]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        if values.get("http-equiv") == "Content-Security-Policy":
            rules = (rule.partition(" ") for rule in (values["content"] or "").split("; "))
            self.policy = {name: sources for name, _, sources in rules}
        self.tags[tag] += 1
        self.ids.add(values.get("id"))
        self.references += [values[name] or "" for name in ("src", "href", "srcset", "action") if name in values]
        if tag not in self.VOID:
            self.open.append((tag, values.get("aria-label" if tag == "svg" else "id")))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1][0] in ("script", "style"):
            name = self.open[-1][1] or self.open[-1][0]
            self.texts[name] = self.texts.get(name, "") + data
        chart = next((name for tag, name in self.open if tag == "svg"), None)
        if chart and data.strip():
            self.charts.setdefault(chart, []).append(data)

    def chart(self, title: str) -> dict[str, int]:
        texts = self.charts.get(title, [])
        return {label: int(count.replace(",", "")) for label, count in zip(texts[::2], texts[1::2], strict=True)}


def file_of(path: Path) -> tuple[str, Any]:
    """The name and the value of a file beside a page; it is a call with two JSON values and nothing else."""
    script = path.read_text(encoding="utf-8")
    assert script.startswith("data(")
    assert script.endswith(");\n")
    name, value = json.loads(f"[{script[len('data(') : -len(');') - 1]}]")
    assert path.name == f"{name}.js"
    return name, value


def page_of(cache: Path | str, out: Path, *options: str | Path) -> Page:
    result = run("qwen-cache", "inspect", cache, "--html", out, *options)
    assert result.code == 0, result.stderr
    return Page(out)
