"""Merge: the samples of several caches, or some of the samples of one, as a cache of their own.

Shards that are wanted whole are linked, not copied; a sample that two caches share is taken from the first, because two
kinds of processors give it other last digits under one key. Everything that is taken is checked on the way in. Refuses
caches of different format versions, and different recipes of one name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_recipes
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.shard import compress
from qwen_cache.format.update import Listed, Update, by_place, carry_out, open_staging, plan_update, read_existing
from qwen_cache.storage.local_copies import LocalCopies
from qwen_cache.storage.url import Url

SHOWN = 10  # names that an error lists


@dataclass(frozen=True)
class Selection:
    """Samples by name: exact names, and shell patterns (`cats/*`). With neither it is everything."""

    names: frozenset[str] = frozenset()
    patterns: tuple[str, ...] = ()

    @classmethod
    def of(cls, values: Sequence[str]) -> Selection:
        """Patterns as they are typed; `@file` has one exact name per line."""
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
    """What is to be one cache."""

    update: Update
    recipes: dict[str, dict[str, Any]]
    places: dict[str, tuple[Cache, IndexRow]]
    """By key: where a sample is taken from."""


def plan_merge(sources: Sequence[Path | Url], target: Path, select: Selection, copies: LocalCopies) -> Merge:
    """The samples of `sources` that `select` names, in `target`, which keeps what it already holds.

    `copies` is where remote samples are kept. Raises ConfigError when the caches do not go together, or when something
    in `select` selects nothing.
    """
    caches = [cache for source in sources for cache in open_recipes(source, copies).values()]
    versions = {cache.format_version for cache in caches}
    existing = read_existing(target, max(versions))
    if len(versions | {existing.manifest.format_version}) > 1:
        found = ", ".join(f"{cache.folder}: v{cache.format_version}" for cache in caches)
        raise ConfigError("these caches are of different format versions", found=found, do="run `qwen-cache migrate`")
    recipes = existing.recipes
    for cache in caches:
        if recipes.setdefault(cache.recipe_name, cache.recipe.recipe) != cache.recipe.recipe:
            raise ConfigError(
                f"two different recipes are called {cache.recipe_name!r}",
                where=cache.folder,
                do="merge them into different folders: a training run reads one recipe",
            )
    rows = existing.listed
    places: dict[str, tuple[Cache, IndexRow]] = {}
    there = {row.key for row in rows}
    for cache, row in _selected(caches, select):
        if row.meta.key not in there | places.keys():
            rows.append(Listed(row.name, row.meta.key, row.source_rows))
            places[row.meta.key] = cache, row
    order = [key for cache in caches for key in by_place(cache.manifest, _taken_from(cache, places))]
    return Merge(plan_update(target, existing, max(versions), rows, order), recipes, places)


def merge(
    plan: Merge,
    shard_size: int,
    compression: str | None,
    version: str,
    on_sample: Callable[[int], None] = lambda _: None,
) -> Manifest:
    """Write and commit as qwen-cache `version`; the caller holds `directory.writing(plan.update.folder)`.

    `compression` (`none` or `zstd`) is how samples shall be stored; None takes everything as it lies.
    """
    linked = _whole_shards(plan, compression)
    staging = open_staging(plan.update, f"merge-{compression or 'as-it-lies'}", shard_size, linked)

    def write(key: str) -> None:
        cache, row = plan.places[key]
        if compression is None:
            staging.add_copy(row.entry, cache.shards.bytes_of(row), cache.folder / row.shard)
        else:
            sample = cache[key]
            staging.add(*compress(row.meta, {name: sample.buffer(name) for name in row.meta.tensors}, compression))

    return carry_out(plan.update, staging, write, plan.recipes, {"qwen-cache": version}, on_sample)


def _taken_from(cache: Cache, places: Mapping[str, tuple[Cache, IndexRow]]) -> list[IndexRow]:
    return [row for source, row in places.values() if source is cache]


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
        do = "a sample is selected by what the source calls it: the column `name` of index.parquet"
        raise ConfigError("no sample has such a name", found=some, do=do)


def _lies_as(row: IndexRow, compression: str) -> bool:
    """Whether a sample is stored so already; one that compression made nothing smaller of is tried again."""
    return any(spec.codec for spec in row.meta.tensors.values()) == (compression == "zstd")


def _whole_shards(plan: Merge, compression: str | None) -> list[Path]:
    """Shards of which every sample is wanted as it lies, and not there already."""
    taken = [(c, row) for c, row in plan.places.values() if compression is None or _lies_as(row, compression)]
    wanted = Counter((cache.folder, row.shard) for cache, row in taken)
    manifests = {cache.folder: cache.manifest for cache, _ in plan.places.values()}
    whole = (
        (folder, shard.name)
        for folder, manifest in manifests.items()
        for shard in manifest.shards
        if isinstance(folder, Path) and wanted[folder, shard.name] == shard.samples
    )
    return [directory.shard_path(folder, name) for folder, name in whole]
