"""Update a dataset to a list of rows, in one commit: shared by `build`, `migrate`, `merge` and `import`.

A shard is kept as long as all of its samples are; otherwise it is rewritten, because stock readers take every sample of
every shard. New shards are written in one order, into staging.
"""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.format import directory
from qwen_cache.format.identity import content_hash, dataset_identity, recipe_id
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index, record_reader, write_index
from qwen_cache.format.manifest import MANIFEST_NAME, IndexFile, Manifest, Recipe
from qwen_cache.format.shard import Entry, check_tensors, tensor_bytes
from qwen_cache.format.staging import Staging, keys_in
from qwen_cache.storage.durable import link_or_copy, move
from qwen_cache.storage.mapped import map_file
from qwen_cache.storage.url import Url


@dataclass(frozen=True)
class Existing:
    """The current dataset of a folder, with all recipes."""

    manifest: Manifest
    rows: list[IndexRow]

    def of_recipe(self, name: str) -> dict[str, IndexRow]:
        """The rows of the recipe `name`, by key."""
        recipe = self.manifest.recipes.get(name)
        id_ = recipe and recipe.id
        return {row.meta.key: row for row in self.rows if row.meta.recipe == id_}

    @property
    def recipes(self) -> dict[str, dict[str, Any]]:
        """The recipes by name."""
        return {name: recipe.recipe for name, recipe in self.manifest.recipes.items()}

    @property
    def listed(self) -> list[ListedSample]:
        """The rows as entries of a new dataset."""
        return [ListedSample(row.name, row.meta.key, row.source_rows) for row in self.rows]

    @property
    def recipe_names(self) -> dict[str, str]:
        """The names of the recipes by their ids."""
        return {recipe.id: name for name, recipe in self.manifest.recipes.items()}

    def others(self, name: str) -> list[ListedSample]:
        """The rows of all recipes except `name`."""
        mine = self.of_recipe(name)
        return [row for row in self.listed if row.key not in mine]

    def check_name(self, name: str, recipe: dict[str, Any], where: Path) -> None:
        """ConfigError if the cache has an equal recipe under another name."""
        same = [other for other, known in self.recipes.items() if recipe_id(known) == recipe_id(recipe)]
        if same and same != [name]:
            what = f"this cache has the same recipe under the name {same[0]!r}"
            raise ConfigError(what, where=where, do=f"set cache.recipe={same[0]}")


@dataclass(frozen=True)
class ListedSample:
    """A row of the new dataset."""

    name: str
    key: str
    source_rows: int = 1


@dataclass(frozen=True)
class Update:
    """The new dataset, and the samples to write for it."""

    folder: Path
    existing: Existing
    format_version: int
    rows: list[ListedSample]
    kept: dict[str, IndexRow]
    """Samples that stay in their shards, by key."""
    moved: dict[str, IndexRow]
    """Samples that stay but whose shards do not, by key."""
    order: list[str]
    """The keys to write, in their order in the new shards."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Shards that a repair replaces by ones with the same samples, each with the key of its last sample."""

    @property
    def is_nothing(self) -> bool:
        """Whether the dataset is up to date already."""
        same_version = self.format_version == self.existing.manifest.format_version
        return same_version and not self.damaged and self.rows == self.existing.listed


def read_existing(folder: Path | Url, format_version: int) -> Existing:
    """The dataset in `folder`; an empty one of `format_version` if there is none."""
    if isinstance(folder, Path) and not (folder / MANIFEST_NAME).exists():
        return Existing(Manifest.empty(format_version), [])
    manifest, index = directory.load(folder)
    where = str(folder / INDEX_NAME)
    table = read_index(index, manifest.format_version, where, manifest.index.samples)
    read = record_reader(table)
    return Existing(manifest, [index_row(read(i), manifest.format_version, where) for i in range(table.num_rows)])


def plan_update(
    folder: Path,
    existing: Existing,
    format_version: int,
    rows: Sequence[ListedSample],
    order: Iterable[str] | None = None,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Update:
    """Plan which samples stay, which move to other shards, and which have to be written.

    `order` has the keys of `rows` in their order in new shards; by default the order of `rows`. No sample stays in a
    `damaged` shard.
    """
    keys = {row.key for row in rows} if format_version == existing.manifest.format_version else set()
    staying = {row.meta.key: row for row in existing.rows if row.meta.key in keys}
    count = Counter(row.shard for row in staying.values())
    whole = {shard.name for shard in existing.manifest.shards if count[shard.name] == shard.samples}
    whole -= damaged.keys()
    kept = {key: row for key, row in staying.items() if row.shard in whole}
    moved = {key: row for key, row in staying.items() if key not in kept}
    in_order = [row.key for row in rows] if order is None else order
    to_write = [key for key in in_order if key not in kept]
    return Update(folder, existing, format_version, list(rows), kept, moved, to_write, damaged)


def by_position(manifest: Manifest, rows: Iterable[IndexRow]) -> list[str]:
    """The keys of `rows` in their order in the shards of `manifest`."""
    number = {shard.name: i for i, shard in enumerate(manifest.shards)}
    return [row.meta.key for row in sorted(rows, key=lambda row: (number[row.shard], row.entry.offset))]


def open_staging(update: Update, name: str, shard_size: int, linked: Iterable[Path] = ()) -> Staging:
    """The staging folder `name`, with its shards of an earlier run, shards that a crash left under their final names,
    and the shards `linked` from other caches."""
    folder = staging_folder(update.folder, name, update.format_version)
    folder.mkdir(parents=True, exist_ok=True)
    for path in directory.unlisted_shards(update.folder, update.existing.manifest):
        move(path, folder / path.name)
    for path in linked:
        if directory.find_shard(path.parent, path.name, lambda found: _link(found, folder)) is None:
            raise directory.missing_shard(path.parent, path.name)
    return Staging(folder, update.order, update.format_version, shard_size, frozenset(update.damaged.values()))


def staging_folder(folder: Path, name: str, format_version: int) -> Path:
    return folder / directory.STAGING / f"{name}-v{format_version}"


def _link(shard: Path, folder: Path) -> Path:
    map_file(shard)  # no pipe or device is copied
    link_or_copy(shard, folder / shard.name)
    return folder / shard.name


def replaced_shards(folder: Path, keys: Set[str], format_version: int) -> dict[Path, set[str]]:
    """The replaced shards that contain a sample of `keys`, each with all of its keys; they are not hashed."""
    paths = sorted((folder / directory.REPLACED).glob("*.tar")) if keys else []
    found = {path: keys_in(path, format_version) for path in paths}
    return {path: keys_of_shard for path, keys_of_shard in found.items() if not keys.isdisjoint(keys_of_shard)}


@dataclass(frozen=True)
class Finished:
    """Samples of an update that are on the disk already, by key."""

    interrupted: frozenset[str] = frozenset()
    """In the staging of an interrupted run, or in shards that it could no longer add to the dataset."""
    replaced: frozenset[str] = frozenset()
    """In shards that the dataset no longer uses, and not among `interrupted`."""


def finished_samples(folder: Path, existing: Existing, name: str, keys: Set[str]) -> Finished:
    """Which samples of `keys` an update with the staging `name` would copy. Reads headers only, writes nothing.

    A shard with damaged tensors is found when it is copied: its samples are written again.
    """
    if not keys:
        return Finished()
    version = existing.manifest.format_version
    interrupted = Staging.finished(staging_folder(folder, name, version), version)
    for path in directory.unlisted_shards(folder, existing.manifest):
        interrupted |= keys_in(path, version)
    missing = keys - interrupted
    replaced = set[str]().union(*replaced_shards(folder, missing, version).values())
    return Finished(frozenset(keys & interrupted), frozenset(missing & replaced))


def copy_if_there(update: Update, staging: Staging, key: str) -> bool:
    """Append a sample that an earlier run left, or that is in a shard that does not stay; False if it is in neither."""
    if (left := staging.left_over(key)) is not None:
        staging.add_copy(*left)
    elif (row := update.moved.get(key)) is not None:
        shard = directory.map_shard(update.folder, row.shard)
        if row.shard in update.damaged:  # its archive is not trusted, its tensors have their hashes
            check_tensors(row.entry, shard, str(update.folder / row.shard))
            staging.add(row.meta, dict(tensor_bytes(row.entry, shard)))
        else:
            staging.add_copy(row.entry, shard, update.folder / row.shard)
    else:
        return False
    return True


def carry_out(
    update: Update,
    staging: Staging,
    write: Callable[[str], None],
    recipes: dict[str, dict[str, Any]],
    written_by: dict[str, str],
    on_sample: Callable[[int], None],
) -> Manifest:
    """Append every missing sample with `write(key)`, then commit.

    `on_sample` is called with a number of finished samples: first those of an earlier run together, then one by one.
    """
    try:
        on_sample(staging.position)
        for key in update.order[staging.position :]:
            if not copy_if_there(update, staging, key):
                write(key)
            on_sample(1)
        return commit_update(update, staging, recipes, written_by)
    finally:
        staging.close()


def commit_update(
    update: Update, staging: Staging, recipes: dict[str, dict[str, Any]], written_by: dict[str, str]
) -> Manifest:
    """Commit the update, with `recipes` by name; all samples of `order` must be in staging."""
    shards = staging.finish()
    positions: dict[str, tuple[str, Entry]] = {
        entry.meta.key: (shard.name, entry) for shard, entries in shards for entry in entries
    }
    positions |= {key: (row.shard, row.entry) for key, row in update.kept.items()}
    rows = [IndexRow(row.name, *positions[row.key], row.source_rows) for row in update.rows]
    index = write_index(rows, update.format_version)
    new = {shard.name: shard for shard, _ in shards}
    kept = {row.shard for row in update.kept.values()} | new.keys()  # a shard that is built again keeps its place
    old = update.existing.manifest
    names = {shard.name for shard in old.shards}
    manifest = replace(
        old,
        format_version=update.format_version,
        recipes=_described(recipes, rows),
        index=IndexFile(len(rows), len(index), content_hash(index)),
        shards=(
            *(new.get(shard.name, shard) for shard in old.shards if shard.name in kept),
            *(shard for shard, _ in shards if shard.name not in names),
        ),
        written_by=written_by,
    )
    directory.commit(update.folder, manifest, index, [staging.folder / shard.name for shard, _ in shards])
    with suppress(OSError):  # the dataset is complete; `gc` removes what stays
        shutil.rmtree(staging.folder)
    return manifest


def _described(recipes: dict[str, dict[str, Any]], rows: Iterable[IndexRow]) -> dict[str, Recipe]:
    keys = defaultdict[str, list[str]](list)
    for row in rows:
        keys[row.meta.recipe].append(row.meta.key)
    mine = {name: keys[recipe_id(recipe)] for name, recipe in recipes.items()}
    return {name: Recipe(recipe, len(mine[name]), dataset_identity(mine[name])) for name, recipe in recipes.items()}
