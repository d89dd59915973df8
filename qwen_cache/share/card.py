"""The dataset card of a published cache: metadata for the hub, and Markdown.

All of it comes from manifest, index and the licences that the user states; nothing from the prompts. The licence of the
model holds for what its encoders return, so one that restricts use is that of the repository, whatever else is given.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from huggingface_hub import DatasetCard, DatasetCardData

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.models.family import PIPELINES, family_of_recipe
from qwen_cache.share.gallery import GALLERY
from qwen_cache.terminal import human_bytes, plural
from qwen_cache.text import plain

CARD = "README.md"
REPOSITORY = "https://github.com/qwen-cache/qwen-cache"
FREE = "apache-2.0"
"""The licence of a model that restricts nobody."""
HUB_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
NOT_STATED = "not stated: ask the owner of this repository before you use it"
BOUNDS = ("1K", "10K", "100K", "1M", "10M", "100M", "1B")
"""Of the hub's categories of sizes: a thousand, and each ten times the one before."""
SIZES_SHOWN = 6
LONG = ("template", "picture_template")
"""Entries of a recipe that are long texts; cache.json has them."""


@dataclass(frozen=True)
class Licences:
    """What the user states."""

    dataset: str | None = None
    """An identifier of the hub, such as cc-by-4.0."""
    source: str | None = None
    """Of images and prompts, in any words."""

    def __post_init__(self) -> None:
        if self.dataset and not HUB_LICENCE.fullmatch(self.dataset):
            expected = "an identifier of the hub, such as cc-by-4.0 or other"
            raise ConfigError("--license is no identifier of a licence", expected=expected, found=self.dataset)


def make_card(
    repo: str,
    manifest: Manifest,
    caches: Mapping[str, Cache],
    licences: Licences,
    base_model: str | None,
    has_gallery: bool,
) -> str:
    """The text of README.md; `caches` are those of each recipe."""
    name, samples = repo.rpartition("/")[2], sum(map(len, caches.values()))
    data = DatasetCardData(
        pretty_name=name,
        task_categories=_tasks(caches.values()),
        size_categories=_size_category(samples),
        tags=["qwen-image", "qwen-cache", "latents", "embeddings"],
        viewer=False,  # tensors in tars
        **_licence_data(caches.values(), licences),
    )
    size = human_bytes(sum(shard.bytes for shard in manifest.shards))
    parts = [f"# {name}", _introduction(samples, size)]
    parts += [f"![Samples with their prompts]({GALLERY})"] if has_gallery else []
    parts += ["## Use it", *_usage(repo, base_model)]
    for recipe, cache in caches.items():
        of = "" if len(caches) == 1 else f" of recipe {plain(recipe)}"
        parts += [f"## Samples{of}", _table(_samples(cache)), f"## Recipe{of}", _table(_recipe(cache, base_model))]
    parts += ["## Licences", _table(_licences(caches.values(), licences))]
    parts += ["## Is it what it says?", _check(repo)]
    return str(DatasetCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(parts) + "\n"))


# ---- metadata --------------------------------------------------------------------------------------------------------


def _tasks(caches: Iterable[Cache]) -> list[str]:
    counts = _controls(caches)
    tasks = ["image-to-image"] if any(counts) else []
    return tasks + (["text-to-image"] if 0 in counts else [])


def _size_category(samples: int) -> str:
    digits = len(str(samples))
    if digits <= 3:
        return "n<1K"
    return f"{BOUNDS[digits - 4]}<n<{BOUNDS[digits - 3]}" if digits - 3 < len(BOUNDS) else "1B<n<10B"


def _restricting(caches: Iterable[Cache]) -> dict[str, str]:
    """Licences of models that restrict their use, each with a link."""
    found = {}
    for cache in caches:
        family = family_of_recipe(cache.recipe.recipe)
        licence = str(cache.recipe.recipe.get("license") or family.licence)
        if licence != FREE:
            model = family.pipelines[0].models[0]
            found[licence] = f"https://huggingface.co/{model}/blob/main/LICENSE"
    return found


def _licence_data(caches: Iterable[Cache], licences: Licences) -> dict[str, Any]:
    for licence, link in _restricting(caches).items():
        return {"license": "other", "license_name": licence, "license_link": link}
    return {"license": licences.dataset} if licences.dataset else {}


# ---- text ------------------------------------------------------------------------------------------------------------


def _introduction(samples: int, size: str) -> str:
    return (
        f"{plural(samples, 'sample')}, {size}, to fine-tune Qwen-Image models: of each image the latents of the VAE, "
        f"of each prompt the embeddings of the text encoder, in the format of [qwen-cache]({REPOSITORY}). Training "
        "needs neither of the two networks.\n\n"
        "The VAE decodes the latents to the images, nearly as they were, and the index has the prompts: what holds for "
        "the images and prompts holds for this dataset."
    )


def _usage(repo: str, base_model: str | None) -> Iterator[str]:
    yield "Read it, sample by sample; only what is read is fetched:"
    yield (
        "```python\nfrom qwen_cache import open_cache\n\n"
        f'cache = open_cache("hf://datasets/{repo}")\nsample = cache[0]\n'
        'print(sample.prompt, sample["prompt_embeds"].shape)\n```'
    )
    yield "Train on it:"
    yield f"```sh\nqwen-train run hf://datasets/{repo} --model {base_model or 'MODEL'}\n```"
    yield "`@` and a commit after the name always give the same dataset, also while this repository changes."


def _samples(cache: Cache) -> Iterator[tuple[str, str]]:
    yield "", "value"
    yield "samples", str(len(cache))
    yield "control images", ", ".join(f"{n}: {plural(k, 'sample')}" for n, k in sorted(_controls([cache]).items()))
    sizes = _target_sizes(cache).most_common()
    shown = ", ".join(f"{width}×{height}: {count}" for (width, height), count in sizes[:SIZES_SHOWN])
    yield "sizes", shown + (f", and {plural(len(sizes) - SIZES_SHOWN, 'size')} more" if sizes[SIZES_SHOWN:] else "")
    for column, what in (
        ("edit_mask", "with an edit mask"),
        ("empty_prompt_embeds", "with the embeddings of the empty prompt"),
    ):
        if column in cache.table.column_names:
            yield what, str(len(cache) - cache.table[column].null_count)
    yield "identity", f"`{cache.identity}`"


def _recipe(cache: Cache, base_model: str | None) -> Iterator[tuple[str, str]]:
    yield "", "value"
    recipe = cache.recipe.recipe
    if base_model:
        yield "model", f"[{base_model}](https://huggingface.co/{base_model})"
    yield "id", f"`{cache.recipe.id}`"
    for name, value in recipe.items():
        if name not in LONG:
            shown = value if isinstance(value, str) else json.dumps(value)
            yield f"`{_inline(name)}`", f"`{_inline(shown)}`"


def _licences(caches: Iterable[Cache], licences: Licences) -> Iterator[tuple[str, str]]:
    yield "of", "licence"
    restricting = _restricting(caches)
    for licence, link in restricting.items():
        yield "model", f"[{_inline(licence)}]({link}): it holds for this dataset and for what is trained on it"
    if not restricting:
        yield "model", FREE
    yield "images and prompts", _inline(licences.source or NOT_STATED)
    yield "this dataset", licences.dataset or ("that of the model" if restricting else NOT_STATED)


def _check(repo: str) -> str:
    return (
        "The first command checks every byte. The second encodes 20 random samples again, if you have the images and "
        "the model, and compares.\n\n"
        f"```sh\nqwen-cache verify hf://datasets/{repo}\n"
        f"qwen-cache verify hf://datasets/{repo} --re-encode 20 --source IMAGES --model MODEL\n```"
    )


def _table(rows: Iterator[tuple[str, str]]) -> str:
    head, *body = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    return "\n".join([head, "| --- | --- |", *body])


def _inline(text: object) -> str:
    """Text on one line, without what would end code or begin a link or HTML."""
    return " ".join(plain(text).replace("`", "'").replace("<", "‹").replace(">", "›").split())


# ---- counts, from columns --------------------------------------------------------------------------------------------


def _controls(caches: Iterable[Cache]) -> Counter[int]:
    """The number of samples for each number of controls."""
    counts = Counter[int]()
    for cache in caches:
        counts.update(_counted(pc.list_value_length(cache.table["controls"])))
    return counts


def _target_sizes(cache: Cache) -> Counter[tuple[int, int]]:
    """The number of samples for each width and height of the target, in pixels."""
    table = cache.table
    if cache.format_version == 1:
        height, width = table["height"], table["width"]
    else:
        first = pc.list_element(table["img_shapes"], 0)
        height, width = (pc.multiply(pc.list_element(first, i), PIXELS_PER_TOKEN) for i in (1, 2))
    pairs = pc.add(pc.multiply(pc.cast(width, pa.int64()), 1 << 31), height)
    return Counter({(pair >> 31, pair & ((1 << 31) - 1)): count for pair, count in _counted(pairs).items()})


def _counted(values: Any) -> dict[int, int]:
    numbers, counts = np.unique(np.asarray(values), return_counts=True)
    return {int(number): int(count) for number, count in zip(numbers, counts, strict=True)}


def checked_base(name: str) -> str:
    """ConfigError unless it is OWNER/NAME."""
    if name.count("/") != 1:
        do = f"name the repository that it is, or comes from: --base-model {next(iter(PIPELINES.values())).models[0]}"
        raise ConfigError("the base model is no repository on the hub", expected="OWNER/NAME", found=name, do=do)
    return name
