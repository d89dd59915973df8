"""A cache as a dataset of the hub: its card, its gallery, and the files that `push` sends."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import yaml
from huggingface_hub import DatasetCard, DatasetCardData
from PIL import Image

from qwen_cache.encode.recipe import public_model, public_settings
from qwen_cache.errors import ConfigError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample, open_recipes
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN, Manifest, Shard
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SLIDER_EMBEDS
from qwen_cache.html.grid import make_grid
from qwen_cache.inspect.flags import stored_thumbnails
from qwen_cache.models.family import PIPELINES, family_of_recipe
from qwen_cache.settings.load import CONFIG_NAME, load_saved
from qwen_cache.storage.hub_repository import Published, State, check_repository_name
from qwen_cache.storage.remembered import file_digest
from qwen_cache.storage.remote import LocalCopies
from qwen_cache.terminal import human_bytes, plural
from qwen_cache.text import plain

# ---- gallery ---------------------------------------------------------------------------------------------------------
# The gallery of a published cache: some samples with their prompts, as one JPEG of the thumbnails in the cache.

GALLERY = "gallery.jpg"
SAMPLES = 8
HEIGHT = 192
"""Pixels of a row: that of the thumbnails, which are not enlarged."""
QUALITY = 85
LONGEST_PROMPT = 300
"""Letters; a caption of a thousand words would hide the images."""


def make_gallery(caches: Sequence[Cache]) -> bytes | None:
    """The file; None for caches without thumbnails."""
    samples = [sample for cache in caches for sample in _spread(cache, SAMPLES // len(caches) or 1)][:SAMPLES]
    if not samples:
        return None
    images = [stored_thumbnails(sample) for sample in samples]
    most = max(len(sample.img_shapes) - 1 for sample in samples)
    with_rejected = any(sample.rejected_shape for sample in samples)
    titles = [f"control {i}" if most > 1 else "control" for i in range(1, most + 1)] + ["target"]
    titles += ["rejected"] if with_rejected else []
    rows = list[list[Image.Image | None]]()
    for sample, each in zip(samples, images, strict=True):
        targets = each[:1] if "image_latents" in sample else []
        shown = each[len(targets) : len(targets) + len(sample.img_shapes) - 1]
        worse = each[len(targets) + len(shown) :]
        row: list[Image.Image | None] = [*shown, *[None] * (most - len(shown))]
        row.append(targets[0] if targets else None)
        rows.append([*row, worse[0] if worse else None] if with_rejected else row)
    grid = make_grid(titles, rows, [_shortened(sample.prompt) for sample in samples], HEIGHT)
    data = BytesIO()
    grid.save(data, "JPEG", quality=QUALITY)
    return data.getvalue()


def _spread(cache: Cache, count: int) -> list[Sample]:
    """Samples with thumbnails, evenly from the whole cache."""
    if "thumbnails" not in cache.table.column_names:
        return []
    positions = np.flatnonzero(np.asarray(cache.table["thumbnails"].is_valid()))
    chosen = positions[np.linspace(0, len(positions) - 1, min(count, len(positions))).astype(int)]
    return [cache[int(position)] for position in chosen]


def _shortened(prompt: str) -> str:
    return prompt if len(prompt) <= LONGEST_PROMPT else prompt[: LONGEST_PROMPT - 1] + "…"


# ---- card ------------------------------------------------------------------------------------------------------------
# The dataset card of a published cache: metadata for the hub, and Markdown.
#
# All of it comes from manifest, index and the licences that the user states; nothing from the prompts. The licence of
# the model holds for what its encoders return, so one that restricts use is that of the repository, whatever else is
# given.

CARD = "README.md"
REPOSITORY = "https://github.com/qwen-cache/qwen-cache"
FREE = "apache-2.0"
"""The licence of a model that restricts nobody."""
HUB_LICENCE = re.compile(r"[a-z0-9][a-z0-9.-]*")
NOT_STATED = "not stated: ask the owner of this repository before you use it"
BOUNDS = ("1K", "10K", "100K", "1M", "10M", "100M", "1B")
"""The bounds of the hub's categories of sizes: a thousand, and each ten times the one before."""
SIZES_SHOWN = 6
LONG = ("template", "picture_template")
"""Entries of a recipe that are long texts; cache.json has them."""


@dataclass(frozen=True)
class Licences:
    """The licences that the user states."""

    dataset: str | None = None
    """An identifier of the hub, such as cc-by-4.0."""
    source: str | None = None
    """The licence of images and prompts, in any words."""

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
        (SLIDER_EMBEDS[0], "with the direction of a slider"),
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


# ---- contents --------------------------------------------------------------------------------------------------------
# What a published cache consists of: its manifest, index and shards as they are, a card, a gallery, public settings.
#
# Every shard that is sent is checked against its name first. Nothing of this machine is published: of the settings only
# those that say how a source is read, and no address but that of a dataset on the hub. Prompts,
# names of samples, thumbnails and latents are what a cache is; the caller says so before the upload.

ADDRESS = re.compile(r"hf://datasets/(.+?)/*")
OURS = re.compile(r"index(-[0-9a-f]{32})?\.parquet|" + SHARD_PATTERN.pattern + "|" + re.escape(GALLERY))
"""Files of a cache that a push may remove."""
NO_DATA = re.compile(r"\.gitattributes|README\.md|" + re.escape(GALLERY))
"""Files of a repository that may be replaced, although it is no cache."""


@dataclass(frozen=True)
class SharedCache:
    """A cache as it will be published."""

    folder: Path
    manifest: Manifest
    samples: int
    has_thumbnails: bool
    published: Published


@dataclass(frozen=True)
class Changes:
    """The effect of a push on a repository."""

    send: dict[str, Path | bytes]
    remove: tuple[str, ...]
    there: tuple[str, ...]
    """Shards that it has already."""


def repository_name(address: str) -> str:
    """OWNER/NAME of `hf://datasets/OWNER/NAME`, or as it is typed; ConfigError if it cannot be a repository's."""
    match = ADDRESS.fullmatch(address)
    name = match[1] if match else address
    if name.count("/") != 1 or "@" in name or "://" in name:
        expected, do = "hf://datasets/OWNER/NAME", "a branch is named with --revision"
        raise ConfigError("not the name of a dataset on the hub", expected=expected, found=address, do=do)
    return check_repository_name(name)


def share(
    folder: Path,
    repo: str,
    licences: Licences,
    *,
    base_model: str | None = None,
    with_gallery: bool = True,
    with_card: bool = True,
) -> SharedCache:
    """The files of the repository `repo` for the cache in `folder`; without `with_card` its README.md stays."""
    manifest, index = directory.load(folder)
    caches = open_recipes(folder, LocalCopies.of())
    if not caches or not any(map(len, caches.values())):
        raise ConfigError("this cache has no samples", where=folder, do="build it first")
    gallery = make_gallery(list(caches.values())) if with_gallery else None
    settings, model = _settings(folder)
    base = checked_base(base_model) if base_model else model
    text = make_card(repo, manifest, caches, licences, base, gallery is not None)
    files: dict[str, Path | bytes] = {CARD: text.encode("utf-8")} if with_card else {}
    files |= {GALLERY: gallery} if gallery else {}
    files |= {CONFIG_NAME: settings} if settings else {}
    files |= {MANIFEST_NAME: manifest.to_bytes(), INDEX_NAME: bytes(index)}
    files |= {shard.name: _path(folder, shard) for shard in manifest.shards}
    samples = sum(map(len, caches.values()))
    return SharedCache(folder, manifest, samples, any(map(has_thumbnails, caches.values())), Published(files, text))


def has_thumbnails(cache: Cache) -> bool:
    names = cache.table.column_names
    return "thumbnails" in names and cache.table["thumbnails"].null_count < len(cache)


def changes(shared: SharedCache, state: State, repo: str) -> Changes:
    """The changes that turn the repository into the cache; ConfigError if it holds something else."""
    others = [name for name in state.files if not NO_DATA.fullmatch(name)]
    if others and MANIFEST_NAME not in state.files:
        found = ", ".join(others[:3]) + (", …" if others[3:] else "")
        raise ConfigError("this repository holds something else", where=repo, found=found, do="name another")
    sizes = {shard.name: shard.bytes for shard in shared.manifest.shards}
    there = tuple(name for name, size in sizes.items() if state.files.get(name) == size)
    files = shared.published.files
    send = {name: data for name, data in files.items() if name not in there}
    return Changes(send, tuple(name for name in state.files if OURS.fullmatch(name) and name not in files), there)


def check_shards(shared: SharedCache, names: Collection[str], on_bytes: Callable[[int], None]) -> None:
    """ShardError for a shard that does not have the bytes that its name and the manifest say."""
    for shard in shared.manifest.shards:
        if shard.name in names:
            path = _path(shared.folder, shard)
            if path.stat().st_size != shard.bytes or (digest := file_digest(path, on_bytes)) != shard.xxh3_128:
                found = f"{path.stat().st_size} bytes" if path.stat().st_size != shard.bytes else digest
                raise ShardError("the bytes do not match the name of the shard", where=path, found=found)


def _path(folder: Path, shard: Shard) -> Path:
    """The place of a shard; ShardError if it is missing."""
    found = next((path for path in directory.shard_paths(folder, shard.name) if path.is_file()), None)
    if found is None:
        raise directory.missing_shard(folder, shard.name)
    return found


def _settings(folder: Path) -> tuple[bytes | None, str | None]:
    """The public part of the settings of the build, and the model's repository, if it is on the hub."""
    if not (folder / CONFIG_NAME).is_file():
        return None, None
    config = load_saved(folder / CONFIG_NAME)
    public = public_settings(config)
    data = yaml.safe_dump(public, sort_keys=False, allow_unicode=True).encode("utf-8") if public else None
    return data, public_model(config)
