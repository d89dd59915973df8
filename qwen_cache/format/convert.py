"""Migrating v1 to v2, and merging caches."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample, open_recipes
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import SEED, IndexRow
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.measured import MEASURED
from qwen_cache.format.remote import build_name, copy_shard, read_parts
from qwen_cache.format.rows import IntArray, KeyedRows, first_of_each, listed, shard_numbers
from qwen_cache.format.sample import TENSORS, SampleMeta, shared_rows
from qwen_cache.format.shard import compress
from qwen_cache.format.update import Update, by_position, carry_out, open_staging, plan_update, read_existing
from qwen_cache.storage.remote import LocalCopies, Location, Url, is_remote
from qwen_cache.storage.stores import store_of

# ---- migrate ---------------------------------------------------------------------------------------------------------
# Migrate: the same samples in another format version, without the encoders.
#
# Both versions describe a sample equally, so keys and recipes stay the same. Every tensor is checked before it is
# rewritten, one sample at a time; the old dataset stays valid until the commit, and an interrupted run continues where
# it stopped. The migration of a v1 build is, byte for byte, what a v2 build writes. Samples with an edit mask, a
# rejected image or the direction of a slider, and images to generate, cannot become v1.

AFTER_PROMPT = 5
"""Tokens of every template after the prompt (`<|im_end|>\\n<|im_start|>assistant\\n`); they are never shared rows."""
SHOWN = 10  # names that an error lists


def plan_migration(source: Location, target: Location, old: int, new: int) -> Update:
    """Plan to write the dataset in `source`, of format version `old`, as version `new` to `target` (may be `source`).

    Raises ConfigError if `source` has another version, `target` holds another dataset, or `new` cannot hold it.
    """
    given = read_existing(source, new)
    if given.manifest.format_version not in (old, new):
        version = f"v{given.manifest.format_version}"
        raise ConfigError("this cache has another format version", where=source, expected=f"v{old}", found=version)
    if new == 1 and (other := [name for name, it in given.manifest.recipes.items() if "family" in it.recipe]):
        family = given.manifest.recipes[other[0]].recipe["family"]
        raise ConfigError(f"format v1 cannot hold a cache of {family}", where=source, do="stay with v2")
    if new == 1:  # loses thumbnails, which are for people only, but nothing else
        rows, table = given.rows, given.rows.table
        only_v2 = [name for name in (*TENSORS[2], SEED) if name not in (*TENSORS[1], "thumbnails")]
        lost = [table[name].is_valid() for name in only_v2 if name in table.column_names]
        lost += [table["target"].is_null()]
        lost += [pc.greater(pc.list_value_length(table["phrase"]), 0)] if "phrase" in table.column_names else []
        unfit = np.logical_or.reduce([each.to_numpy() for each in lost])
        names = rows.at(rows.positions[unfit[rows.positions]]).column("name").to_pylist()
        if names:
            more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
            raise ConfigError(
                f"format v{new} has no edit masks, attention, seeds, rejected images, directions of sliders or images "
                "to generate, but this cache does",
                where=source,
                found=", ".join(names[:SHOWN]) + more,
                do=f"stay with v{given.manifest.format_version}, or build without them",
            )
    in_place = directory.is_same(source, target)
    existing = given if in_place else read_existing(target, new)
    update = plan_update(target, existing, new, given.listed, by_position(given.manifest, given.rows))
    if not in_place and len(existing) and not update.is_nothing:
        raise ConfigError("this folder holds another dataset", where=target, do="choose an empty folder with --out")
    return replace(update, vae_encoders=given.manifest.vae_encoders)


def migrate(
    source: Location,
    update: Update,
    shard_size: int,
    compression: str,
    version: str,
    copies: LocalCopies,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write and commit `update` as qwen-cache `version`; the caller holds `directory.writing(update.folder)`."""
    manifest, _ = directory.load(source)
    caches = list(open_recipes(source, copies).values())
    staging = open_staging(update, "migrate", shard_size, copies=copies)

    def write(key: str) -> None:
        cache = next(cache for cache in caches if key in cache.keys)
        staging.add(*compress(*converted(cache[key], update.format_version), compression))

    recipes = {name: recipe.recipe for name, recipe in manifest.recipes.items()}
    return carry_out(update, staging, write, recipes, {**manifest.written_by, "qwen-cache": version}, on_sample)


def converted(sample: Sample, format_version: int) -> tuple[SampleMeta, dict[str, memoryview]]:
    """A sample as `format_version` stores it: the empty prompt whole (1), or without its shared rows (2)."""
    specs = {name: spec for name, spec in sample.row.meta.tensors.items() if name in TENSORS[format_version]}
    meta = replace(sample.row.meta, tensors=specs, measured=None if format_version == 1 else sample.row.meta.measured)
    tensors = {name: sample.buffer(name) for name in specs}
    if "empty_prompt_embeds" not in tensors:
        return meta, tensors
    width = meta.tensors["prompt_embeds"].shape[1]
    row_bytes = meta.tensors["prompt_embeds"].element_size * width
    shared = tensors["prompt_embeds"][: meta.prefix_length * row_bytes]
    whole = memoryview(bytes(shared) + bytes(tensors["empty_prompt_embeds"]))
    prefix = shared_rows(tensors["prompt_embeds"], whole, row_bytes, least=AFTER_PROMPT) if format_version > 1 else 0
    stored = whole[prefix * row_bytes :]
    shape = (stored.nbytes // row_bytes, width)
    spec = replace(meta.tensors["empty_prompt_embeds"], shape=shape, xxh3_128=content_hash(stored))
    return (
        replace(meta, prefix_length=prefix, tensors={**meta.tensors, "empty_prompt_embeds": spec}),
        {**tensors, "empty_prompt_embeds": stored},
    )


# ---- merge -----------------------------------------------------------------------------------------------------------
# Merge: a new cache from the samples of several caches, or from some samples of one.
#
# Shards whose samples are all selected are linked, not copied; within object storage, the store copies them. A sample
# in several caches is taken from the first one whose images were measured, else from the first one: under the same key,
# processors give different last digits. What the target has stays as it is. Every copied sample is checked. Caches of
# different format versions are refused, and different recipes of one name.

COPIES = 8  # shards copied within a store at a time; no byte of them passes this machine


@dataclass(frozen=True)
class Selection:
    """Samples by name: exact names, and shell patterns (`cats/*`). With neither, everything is selected."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[str]) -> Selection:
        """The selection of `--select`: patterns, and `@file` with a name per line. ConfigError if it cannot be read."""
        files = [Path(value[1:]) for value in values if value.startswith("@")]
        try:
            lines = [line for path in files for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, UnicodeError) as error:
            raise ConfigError(f"--select: the list cannot be read: {error}") from None
        return cls(frozenset(filter(None, lines)), tuple(value for value in values if not value.startswith("@")))

    @property
    def is_everything(self) -> bool:
        return not self.names and not self.patterns

    def matching(self, name: str) -> set[str]:
        """The names and patterns that select `name`."""
        return ({name} & self.names) | {pattern for pattern in self.patterns if fnmatchcase(name, pattern)}


@dataclass(frozen=True, eq=False)
class Merge:
    """The plan of one cache."""

    update: Update
    recipes: dict[str, dict[str, Any]]
    taken: list[tuple[Cache, KeyedRows]]
    """The samples that are taken from each cache."""

    def origin(self, key: str) -> tuple[Cache, IndexRow]:
        """The cache and the row that a sample is taken from."""
        return next((cache, rows[key]) for cache, rows in self.taken if key in rows)


@dataclass(frozen=True, eq=False)
class Sources:
    """The caches to merge, one for each recipe, and their selected samples."""

    selected: list[tuple[Cache, KeyedRows]]

    @property
    def caches(self) -> list[Cache]:
        return [cache for cache, _ in self.selected]


def read_sources(sources: Sequence[Location], select: Selection, copies: LocalCopies) -> Sources:
    """The samples of `sources` to merge; `copies` holds those of remote caches.

    Raises ConfigError if a name or pattern of `select` matches no sample.
    """
    caches = [cache for source in sources for cache in open_recipes(source, copies).values()]
    unused, selected = {*select.names, *select.patterns}, []
    for cache in caches:
        rows, chosen = cache.keyed_rows, array("q")
        for position, name in enumerate(() if select.is_everything else rows.each("name")):
            if matching := select.matching(name):
                unused -= matching
                chosen.append(position)
        selected.append((cache, rows if select.is_everything else rows.at(np.array(chosen))))
    if unused:
        some = ", ".join(sorted(unused)[:SHOWN]) + (f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else "")
        do = "select samples by their name in the source: the column `name` of index.parquet"
        raise ConfigError("no sample has such a name", found=some, do=do)
    return Sources(selected)


def plan_merge(given: Sources, target: Location) -> Merge:
    """Plan to add samples to `target`, which keeps its own; ConfigError if the caches are incompatible."""
    caches, versions = given.caches, {cache.format_version for cache in given.caches}
    existing = read_existing(target, max(versions))
    if len(versions | {existing.manifest.format_version}) > 1:
        each = ", ".join(f"{cache.folder}: v{cache.format_version}" for cache in caches)
        raise ConfigError("these caches have different format versions", found=each, do="run `qwen-cache migrate`")
    recipes = existing.recipes
    for cache in caches:
        if recipes.setdefault(cache.recipe_name, cache.recipe.recipe) != cache.recipe.recipe:
            raise ConfigError(
                f"two different recipes are called {cache.recipe_name!r}",
                where=cache.folder,
                do="merge them into different folders: a training run reads one recipe",
            )
    # Samples that `existing`, or a cache that is preferred, has are not taken.
    every = [existing.rows, *(rows for _, rows in given.selected)]
    ranks = [np.zeros(len(existing.rows)), *(2.0 - _is_measured(rows) for _, rows in given.selected)]
    preferred = np.argsort(np.concatenate(ranks), kind="stable")
    is_first = np.empty(len(preferred), bool)
    is_first[preferred] = first_of_each(np.concatenate([rows.words for rows in every])[preferred])
    _, *of_cache = np.split(is_first, np.cumsum([len(rows) for rows in every])[:-1])
    selected = zip(given.selected, of_cache, strict=True)
    taken = [(cache, rows.at(rows.positions[new])) for (cache, rows), new in selected]
    rows = sum((listed(rows) for _, rows in taken), existing.listed)
    order = [key for cache, rows in taken for key in by_position(cache.manifest, rows)]
    encoders = {vae: encoder for cache in caches for vae, encoder in cache.manifest.vae_encoders.items()}
    update = replace(plan_update(target, existing, max(versions), rows, order), vae_encoders=encoders)
    return Merge(update, recipes, taken)


def _is_measured(rows: KeyedRows) -> npt.NDArray[np.bool_]:
    """`[N]`: which samples have a measurement."""
    if MEASURED not in rows.table.column_names:
        return np.zeros(len(rows), bool)
    return np.asarray(rows.column(MEASURED).is_valid(), bool)


def merge(
    plan: Merge,
    shard_size: int,
    compression: str | None,
    version: str,
    copies: LocalCopies,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write and commit as qwen-cache `version`; the caller holds `directory.writing(plan.update.folder)`.

    Samples are stored with `compression` (`none` or `zstd`); None keeps the stored bytes.
    """
    whole, name = _whole_shards(plan, compression), f"merge-{compression or 'unchanged'}"
    if is_remote(plan.update.folder):
        _copy_shards(plan, plan.update.folder, name, {url for url in whole if is_remote(url)})
    linked = [path for path in whole if not is_remote(path)]
    staging = open_staging(plan.update, name, shard_size, linked, copies)

    def write(key: str) -> None:
        cache, row = plan.origin(key)
        if compression is None:
            staging.add_copy(row.entry, cache.shards.bytes_of(row), cache.folder / row.shard)
        else:
            sample = cache[key]
            staging.add(*compress(row.meta, {name: sample.buffer(name) for name in row.meta.tensors}, compression))

    return carry_out(plan.update, staging, write, plan.recipes, {"qwen-cache": version}, on_sample)


def _whole_shards(plan: Merge, compression: str | None) -> list[Location]:
    """Shards whose samples are all selected, new to the target, and stored with `compression` already."""
    counts = dict[Location, IntArray]()
    for cache, rows in plan.taken:
        if compression is not None:  # samples that zstd did not make smaller are compressed again
            is_compressed = np.zeros(len(rows), bool)
            names = rows.table.column_names
            for name in (name for name in TENSORS[rows.format_version] if name in names):
                is_compressed |= pc.struct_field(rows.column(name), "codec").is_valid().to_numpy()
            rows = rows.at(rows.positions[is_compressed == (compression == "zstd")])
        numbers = shard_numbers(cache.manifest, rows)
        count = np.bincount(numbers[numbers >= 0], minlength=len(cache.manifest.shards))
        counts[cache.folder] = counts.get(cache.folder, 0) + count
    manifests = {cache.folder: cache.manifest for cache, _ in plan.taken}
    return [
        folder / shard.name
        for folder, manifest in manifests.items()
        for shard, selected in zip(manifest.shards, counts[folder], strict=True)
        if selected == shard.samples
    ]


def _copy_shards(plan: Merge, target: Url, name: str, whole: Set[Url]) -> None:
    """Copy shards within one store, without downloading them; those of other stores are copied by samples."""
    version = plan.update.format_version
    build, here = build_name(name, version), store_of(target).listing(target)
    copied = {shard.name for shard, _ in read_parts(target, build, here, version)}
    shards = {cache.folder / shard.name: shard for cache, _ in plan.taken for shard in cache.manifest.shards}

    def copy(url: Url) -> None:
        of_store = [(cache, rows) for cache, rows in plan.taken if is_remote(cache.folder)]
        here = [rows.where_in(shard=[url.name]) for cache, rows in of_store if cache.folder / url.name == url]
        entries = (row.entry for rows in here for row in rows.in_order())
        stored = shards[url], sorted(entries, key=lambda entry: entry.offset)
        copy_shard(url, target, build, stored, version)

    with ThreadPoolExecutor(COPIES, "copy") as pool:
        list(pool.map(copy, sorted(url for url in whole if url.name not in copied)))
