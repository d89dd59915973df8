"""Merge: a new cache from the samples of several caches, or from some samples of one.

Shards whose samples are all selected are linked, not copied. A sample in several caches is taken from the first one:
under the same key, processors give different last digits. Every copied sample is checked. Caches of different format
versions are refused, and different recipes of one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache, open_recipes
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.shard import compress
from qwen_cache.format.update import (
    ListedSample,
    Update,
    by_position,
    carry_out,
    open_staging,
    plan_update,
    read_existing,
)
from qwen_cache.storage.local_copies import LocalCopies
from qwen_cache.storage.url import Url

SHOWN = 10  # names that an error lists


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


@dataclass(frozen=True)
class Merge:
    """The plan of one cache."""

    update: Update
    recipes: dict[str, dict[str, Any]]
    origins: dict[str, tuple[Cache, IndexRow]]
    """The cache and the row that each sample is taken from, by key."""


@dataclass(frozen=True)
class Sources:
    """The caches to merge, one for each recipe, and their selected samples."""

    caches: list[Cache]
    selected: list[tuple[Cache, IndexRow]]


def read_sources(sources: Sequence[Path | Url], select: Selection, copies: LocalCopies) -> Sources:
    """The samples of `sources` to merge; `copies` holds those of remote caches.

    Raises ConfigError if a name or pattern of `select` matches no sample.
    """
    caches = [cache for source in sources for cache in open_recipes(source, copies).values()]
    return Sources(caches, list(_selected(caches, select)))


def plan_merge(given: Sources, target: Path) -> Merge:
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
    rows = existing.listed
    origins: dict[str, tuple[Cache, IndexRow]] = {}
    present = {row.key for row in rows}
    taken: dict[int, list[IndexRow]] = {}
    for cache, row in given.selected:
        if row.meta.key not in present:
            present.add(row.meta.key)
            taken.setdefault(id(cache), []).append(row)
            rows.append(ListedSample(row.name, row.meta.key, row.source_rows))
            origins[row.meta.key] = cache, row
    order = [key for cache in caches for key in by_position(cache.manifest, taken.get(id(cache), []))]
    return Merge(plan_update(target, existing, max(versions), rows, order), recipes, origins)


def merge(
    plan: Merge,
    shard_size: int,
    compression: str | None,
    version: str,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write and commit as qwen-cache `version`; the caller holds `directory.writing(plan.update.folder)`.

    Samples are stored with `compression` (`none` or `zstd`); None keeps the stored bytes.
    """
    linked = _whole_shards(plan, compression)
    staging = open_staging(plan.update, f"merge-{compression or 'as-it-lies'}", shard_size, linked)

    def write(key: str) -> None:
        cache, row = plan.origins[key]
        if compression is None:
            staging.add_copy(row.entry, cache.shards.bytes_of(row), cache.folder / row.shard)
        else:
            sample = cache[key]
            staging.add(*compress(row.meta, {name: sample.buffer(name) for name in row.meta.tensors}, compression))

    return carry_out(plan.update, staging, write, plan.recipes, {"qwen-cache": version}, on_sample)


def _selected(caches: Sequence[Cache], select: Selection) -> Iterator[tuple[Cache, IndexRow]]:
    unused = {*select.names, *select.patterns}
    for cache in caches:
        for row in cache.rows():
            matching = select.matching(row.name)
            unused -= matching
            if matching or select.is_everything:
                yield cache, row
    if unused:
        some = ", ".join(sorted(unused)[:SHOWN]) + (f" and {len(unused) - SHOWN} more" if len(unused) > SHOWN else "")
        do = "select samples by their name in the source: the column `name` of index.parquet"
        raise ConfigError("no sample has such a name", found=some, do=do)


def _is_stored_as(row: IndexRow, compression: str) -> bool:
    """Whether a sample is stored with `compression`. One that zstd did not make smaller is compressed again."""
    return any(spec.codec for spec in row.meta.tensors.values()) == (compression == "zstd")


def _whole_shards(plan: Merge, compression: str | None) -> list[Path]:
    """Local shards whose samples are all selected, new to the target, and stored with `compression` already."""
    kept = [(c, row) for c, row in plan.origins.values() if compression is None or _is_stored_as(row, compression)]
    selected = Counter((cache.folder, row.shard) for cache, row in kept)
    manifests = {cache.folder: cache.manifest for cache, _ in plan.origins.values()}
    whole = (
        (folder, shard.name)
        for folder, manifest in manifests.items()
        for shard in manifest.shards
        if isinstance(folder, Path) and selected[folder, shard.name] == shard.samples
    )
    return [folder / name for folder, name in whole]
