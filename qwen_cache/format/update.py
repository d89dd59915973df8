"""Changing a cache: what is kept, what is written, samples that another cache already has, the commit."""

from __future__ import annotations

import shutil
from collections import Counter, defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import xxhash

from qwen_cache.errors import ChecksumError, ConfigError, ConflictError, FormatError
from qwen_cache.format import directory
from qwen_cache.format.cache import LocalShards, RangedShards, RemoteShards, shards_of
from qwen_cache.format.directory import load_index
from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.index import (
    INDEX_NAME,
    OPTIONAL,
    ROW_GROUP,
    IndexRow,
    index_schema,
    optional_columns,
    table_of,
    write_tables,
)
from qwen_cache.format.manifest import MANIFEST_NAME, IndexFile, Manifest, Recipe
from qwen_cache.format.remote import Stored, conflict
from qwen_cache.format.rows import (
    IntArray,
    KeyedRows,
    ListedSample,
    ListedSamples,
    fitted,
    listed,
    shard_numbers,
    taken,
)
from qwen_cache.format.shard import Entry, check_tensors
from qwen_cache.format.staging import RemoteBuild, Staging, staging_folder
from qwen_cache.storage.files import link_or_copy, map_file, move
from qwen_cache.storage.remote import LocalCopies, Location, is_remote, location

# ---- update ----------------------------------------------------------------------------------------------------------
# Update a dataset to a list of rows, in one commit: shared by `build`, `migrate`, `merge` and `import`.
#
# A shard is kept as long as all of its samples are; otherwise it is rewritten, because stock readers take every sample
# of every shard. New shards are written in one order, into staging. Rows that stay are columns from the old index to
# the new one, so adding a sample costs reading and writing the index.


@dataclass(frozen=True, eq=False)
class Existing:
    """The current dataset of a folder, with all recipes."""

    manifest: Manifest
    rows: KeyedRows

    @classmethod
    def empty(cls, format_version: int) -> Existing:
        """No dataset yet."""
        return cls.of(Manifest.empty(format_version), index_schema(format_version).empty_table(), "")

    @classmethod
    def of(cls, manifest: Manifest, table: pa.Table, where: str) -> Existing:
        """The dataset with the index `table`; `where` is for errors."""
        return cls(manifest, KeyedRows(table, manifest.format_version, where, np.arange(len(table))))

    @property
    def table(self) -> pa.Table:
        """The index, in which `rows` has the positions of those that count."""
        return self.rows.table

    def __len__(self) -> int:
        return len(self.rows)

    def only(self, rows: KeyedRows) -> Existing:
        """The dataset with some of its rows alone."""
        return replace(self, rows=rows)

    def of_recipe(self, name: str) -> KeyedRows:
        """The rows of the recipe `name`, by key."""
        recipe = self.manifest.recipes.get(name)
        return self.rows.where_in(recipe=[recipe.id] if recipe else [])

    @property
    def recipes(self) -> dict[str, dict[str, Any]]:
        """The recipes by name."""
        return {name: recipe.recipe for name, recipe in self.manifest.recipes.items()}

    @property
    def listed(self) -> ListedSamples:
        """The rows as entries of a new dataset."""
        return listed(self.rows)

    @property
    def recipe_names(self) -> dict[str, str]:
        """The names of the recipes by their ids."""
        return {recipe.id: name for name, recipe in self.manifest.recipes.items()}

    def others(self, name: str) -> ListedSamples:
        """The rows of all recipes except `name`."""
        mine = np.zeros(len(self.table), bool)
        mine[self.of_recipe(name).positions] = True
        return listed(self.rows.at(self.rows.positions[~mine[self.rows.positions]]))

    @cached_property
    def shard_numbers(self) -> IntArray:
        """`[N]`: for each row of the index the position of its shard in the manifest, -1 for none."""
        return shard_numbers(self.manifest, self.rows.at(np.arange(len(self.table))))

    def of_shard(self) -> dict[str, KeyedRows]:
        """The rows of each shard of the manifest."""
        numbers = self.shard_numbers[self.rows.positions]
        order = np.argsort(numbers, kind="stable")
        shards = self.manifest.shards
        ends = np.searchsorted(numbers[order], np.arange(len(shards) + 1))
        return {
            shard.name: self.rows.at(self.rows.positions[order[ends[i] : ends[i + 1]]])
            for i, shard in enumerate(shards)
        }

    def check_name(self, name: str, recipe: dict[str, Any], where: Location) -> None:
        """ConfigError if the cache has an equal recipe under another name."""
        same = [other for other, known in self.recipes.items() if recipe_id(known) == recipe_id(recipe)]
        if same and same != [name]:
            what = f"this cache has the same recipe under the name {same[0]!r}"
            raise ConfigError(what, where=where, do=f"set cache.recipe={same[0]}")


@dataclass(frozen=True, eq=False)
class Update:
    """The new dataset, and the samples to write for it."""

    folder: Location
    existing: Existing
    format_version: int
    rows: ListedSamples
    kept: IntArray
    """For each row its position in the existing index if the sample stays in its shard, else -1."""
    moved: KeyedRows
    """Samples that stay but whose shards do not, by key."""
    order: list[str]
    """The keys to write, in their order in the new shards."""
    damaged: Mapping[str, str] = field(default_factory=dict)
    """Shards that a repair replaces by ones with the same samples, each with the key of its last sample."""
    vae_encoders: Mapping[str, str] = field(default_factory=dict)
    """The hashes that the manifest gets beside its own (`Manifest.vae_encoders`)."""

    @property
    def is_nothing(self) -> bool:
        """True if the dataset is up to date already."""
        same_version = self.format_version == self.existing.manifest.format_version
        return same_version and not self.damaged and self.rows == self.existing.listed


def read_existing(folder: Location, format_version: int) -> Existing:
    """The dataset in `folder`; an empty one of `format_version` if there is none."""
    if not (folder / MANIFEST_NAME).exists():
        return Existing.empty(format_version)
    manifest, table = load_index(folder)
    return Existing.of(manifest, table, str(folder / INDEX_NAME))


def plan_update(
    folder: Location,
    existing: Existing,
    format_version: int,
    rows: Iterable[ListedSample],
    order: Iterable[str] | None = None,
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Update:
    """Plan which samples stay, which move to other shards, and which have to be written.

    `order` has the keys of the samples that do not stay in their order in new shards, and may have others; by default
    the order of `rows`. No sample stays in a `damaged` shard.
    """
    rows = ListedSamples.of(rows)
    positions: IntArray = np.full(len(rows), -1)
    if format_version == existing.manifest.format_version:
        positions = existing.rows.found.find_all(rows.words(folder))
    stays = _in_whole_shards(existing, positions, damaged)
    to_write = rows.keys(np.flatnonzero(~stays))
    if order is not None:
        wanted = set(to_write)
        to_write = [key for key in order if key in wanted]
    moved = existing.rows.at(np.sort(positions[(positions >= 0) & ~stays]))
    return Update(folder, existing, format_version, rows, np.where(stays, positions, -1), moved, to_write, damaged)


def _in_whole_shards(existing: Existing, positions: IntArray, damaged: Container[str]) -> npt.NDArray[np.bool_]:
    """`[N]`: true for rows at `positions` (-1: none) that are in a shard of which all rows are among them."""
    shards, in_shard = existing.manifest.shards, positions >= 0
    in_shard[in_shard] = existing.shard_numbers[positions[in_shard]] >= 0
    numbers = existing.shard_numbers[positions[in_shard]]
    count = np.bincount(numbers, minlength=len(shards)).tolist()
    is_whole = [n == shard.samples and shard.name not in damaged for n, shard in zip(count, shards, strict=True)]
    in_shard[in_shard] = np.array(is_whole, bool)[numbers]
    return in_shard


def by_position(manifest: Manifest, rows: KeyedRows) -> list[str]:
    """The keys of `rows` in their order in the shards of `manifest`."""
    numbers = shard_numbers(manifest, rows)
    order = np.lexsort((rows.column("offset").to_numpy(), numbers))
    return list(rows.at(rows.positions[order]))


def open_staging(
    update: Update, name: str, shard_size: int, linked: Iterable[Path] = (), copies: LocalCopies | None = None
) -> Staging:
    """The staging of the build `name`, with its shards of an earlier run, shards that a crash left under their final
    names, and the shards `linked` from other caches. `copies` are for samples that move within object storage."""
    version, remote = update.format_version, None
    if is_remote(update.folder):
        keys, manifest = set(update.order), update.existing.manifest
        remote = RemoteBuild(update.folder, name, version, manifest, keys, copies or LocalCopies.of())
        folder = remote.scratch
    else:
        folder = staging_folder(update.folder, name, version)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not is_remote(update.folder):
            for path in directory.unlisted_shards(update.folder, update.existing.manifest):
                move(path, folder / path.name)
        for path in linked:
            if directory.find_shard(path.parent, path.name, lambda found: _link(found, folder)) is None:
                raise directory.missing_shard(path.parent, path.name)
        return Staging(folder, update.order, version, shard_size, frozenset(update.damaged.values()), remote)
    except BaseException:
        if remote:
            remote.close()
        raise


def _link(shard: Path, folder: Path) -> Path:
    map_file(shard)  # no pipe or device is copied
    link_or_copy(shard, folder / shard.name)
    return folder / shard.name


def copy_if_there(update: Update, staging: Staging, key: str) -> bool:
    """Append a sample that an earlier run left, or that is in a shard that does not stay; False if it is in neither."""
    if (left := staging.left_over(key)) is not None:
        staging.add_copy(*left)
    elif (row := update.moved.get(key)) is not None:
        if staging.remote:
            shard = staging.remote.shards.bytes_of(row)
        else:
            assert not is_remote(update.folder)
            shard = directory.map_shard(update.folder, row.shard)
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
        on_sample(len(update.order) - len(staging.to_write))
        for key in staging.to_write:
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
    assert not staging.to_write
    manifest = _commit(update, staging, staging.take(set(staging.order)), recipes, written_by)
    with suppress(OSError):  # the dataset is complete; `gc` removes what stays
        shutil.rmtree(staging.folder)
        if staging.remote:
            staging.remote.remove_left()
    return manifest


def commit_early(
    update: Update,
    staging: Staging,
    shards: Sequence[Stored],
    recipes: dict[str, dict[str, Any]],
    written_by: dict[str, str],
) -> Update:
    """Commit these shards of `staging` beside all that is there, of which no shard is missing; returns the rest."""
    keys, existing = [entry.meta.key for _, entries in shards for entry in entries], update.existing
    is_new = pc.is_in(update.rows.table["key"], pa.array(keys, pa.string())).to_numpy()
    new = ListedSamples(taken(update.rows.table, np.flatnonzero(is_new)))
    positions = np.r_[existing.rows.positions, np.full(len(new), -1)]
    early = replace(update, rows=existing.listed + new, kept=positions)
    manifest = _commit(early, staging, shards, recipes, written_by)
    now = read_existing(update.folder, update.format_version)
    if now.manifest != manifest:
        raise conflict(update.folder)
    kept = update.kept.copy()
    kept[is_new] = len(existing) + np.arange(len(new))
    return replace(update, existing=now, kept=kept, moved=now.rows.at(update.moved.positions))


def record_vae_encoders(update: Update) -> None:
    """Commit the `vae_encoders` of a dataset that is up to date, if its manifest lacks them."""
    old = update.existing.manifest
    manifest = old.with_vae_encoders(update.vae_encoders)
    if manifest != old:
        with suppress(ConflictError):  # the next build does it
            directory.commit(update.folder, manifest, bytes(directory.load(update.folder)[1]), [], old)


def _commit(
    update: Update,
    staging: Staging,
    shards: Sequence[Stored],
    recipes: dict[str, dict[str, Any]],
    written_by: dict[str, str],
) -> Manifest:
    """Commit what is kept, and the new `shards`."""
    written = {entry.meta.key: (shard.name, entry) for shard, entries in shards for entry in entries}
    index = _write_index(update, written, keys := RecipeKeys())
    new = {shard.name: shard for shard, _ in shards}
    old = update.existing.manifest
    stay = np.unique(update.existing.shard_numbers[update.kept[update.kept >= 0]])
    kept = {old.shards[i].name for i in stay} | new.keys()  # a shard that is built again keeps its place
    names = {shard.name for shard in old.shards}
    manifest = replace(
        old,
        format_version=update.format_version,
        recipes={name: keys.described(recipe) for name, recipe in recipes.items()},
        index=IndexFile(len(update.rows), len(index), content_hash(index)),
        shards=(
            *(new.get(shard.name, shard) for shard in old.shards if shard.name in kept),
            *(shard for shard, _ in shards if shard.name not in names),
        ),
        written_by=written_by,
    ).with_vae_encoders(update.vae_encoders)
    directory.commit(update.folder, manifest, index, [staging.folder / shard.name for shard, _ in shards], old)
    if staging.remote:
        staging.remote.uploads.remove_parts(written.keys())
    return manifest


def _write_index(update: Update, written: Mapping[str, tuple[str, Entry]], keys: RecipeKeys) -> bytes:
    """The bytes of the new index; `keys` gets those of its rows."""
    old, kept = update.existing.table, update.kept[update.kept >= 0]
    optional = optional_columns(entry.meta for _, entry in written.values())
    for name in (name for name in OPTIONAL if name in old.column_names):
        optional |= {name} if bool(old[name].is_valid().to_numpy()[kept].any()) else set()
    schema = index_schema(update.format_version, optional)

    def groups() -> Iterator[pa.Table]:
        keys.clear()
        for begin in range(0, len(update.rows), ROW_GROUP):
            group = _row_group(update, slice(begin, begin + ROW_GROUP), written, schema)
            keys.add(group)
            yield group

    return write_tables(groups, schema)


def _row_group(update: Update, which: slice, written: Mapping[str, tuple[str, Entry]], schema: pa.Schema) -> pa.Table:
    """Rows of the new index: columns of the old one where samples stay."""
    rows, kept = update.rows.table[which], update.kept[which]
    stays, table = kept >= 0, schema.empty_table()
    if stays.any():
        table = fitted(taken(update.existing.table, kept[stays]), schema)
    if not stays.all():
        new = ListedSamples(taken(rows, np.flatnonzero(~stays)))
        made = [IndexRow(row.name, *written[row.key], row.source_rows) for row in new]
        table = pa.concat_tables([table, table_of(made, update.format_version, schema)])
        table = taken(table, np.argsort(np.r_[np.flatnonzero(stays), np.flatnonzero(~stays)]))
    for name in ("name", "source_rows"):
        table = table.set_column(schema.get_field_index(name), schema.field(name), rows[name])
    return table


class RecipeKeys:
    """The number of samples of each recipe, and the hash of their keys (`dataset_identity`)."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self._count = Counter[str]()
        self._hash = defaultdict[str, xxhash.xxh3_128](xxhash.xxh3_128)

    def add(self, table: pa.Table) -> None:
        """Add rows of an index."""
        for recipe in table["recipe"].unique().to_pylist():
            keys = table["key"].filter(pc.equal(table["recipe"], recipe)).to_pylist()
            self._hash[recipe].update("\n".join(keys if not self._count[recipe] else ["", *keys]).encode())
            self._count[recipe] += len(keys)

    def described(self, recipe: dict[str, Any]) -> Recipe:
        """A recipe with its samples."""
        id_ = recipe_id(recipe)
        return Recipe(recipe, self._count[id_], self._hash[id_].hexdigest())


# ---- other caches ----------------------------------------------------------------------------------------------------
# Samples of other caches, copied in place of being encoded again: `cache.reuse`.
#
# A key covers the content and the recipe, so an equal key is an equal sample, whatever it is called there. Copies are
# checked by the hashes of their tensors.


@dataclass(frozen=True, eq=False)
class OtherCache:
    """A cache that samples are copied from; `name` is what the user typed."""

    name: str
    existing: Existing
    shards: LocalShards | RemoteShards


@dataclass(frozen=True)
class Copies:
    """How many missing samples a cache has, and their bytes."""

    samples: int
    bytes: int


class OtherCaches:
    """The caches at `names`, for the cache at `folder`.

    ConfigError for one that does not exist, has another format version, or is `folder` itself.
    """

    def __init__(self, names: Sequence[str], folder: Location, format_version: int, copies: LocalCopies) -> None:
        self._caches = [_opened(name, folder, format_version, copies) for name in names]

    def copies(self, keys: Set[str]) -> tuple[frozenset[str], dict[str, Copies]]:
        """Which samples of `keys` are in a cache, and for each cache what would be copied from it."""
        found, by_cache = set[str](), dict[str, Copies]()
        for cache in self._caches:
            here = [key for key in keys - found if key in cache.existing.rows]
            size = sum(cache.existing.rows[key].entry.length for key in here)
            if here:
                by_cache[cache.name] = Copies(len(here), size)
            found.update(here)
        return frozenset(found), by_cache

    def __contains__(self, key: object) -> bool:
        return any(key in cache.existing.rows for cache in self._caches)

    @property
    def local(self) -> list[tuple[KeyedRows, LocalShards]]:
        """The rows and the shards of the caches on this machine."""
        return [(each.existing.rows, each.shards) for each in self._caches if isinstance(each.shards, LocalShards)]

    @property
    def ranged(self) -> list[tuple[KeyedRows, RangedShards]]:
        """The rows and the shards of the others, to read single tensors."""
        remote = [(each.existing, each.shards.folder) for each in self._caches if isinstance(each.shards, RemoteShards)]
        return [(existing.rows, RangedShards(folder, existing.manifest)) for existing, folder in remote]

    def sample(self, key: str) -> tuple[Entry, memoryview, str]:
        """A sample, its shard and where that is; FormatError if it is lost or damaged there."""
        cache = next(cache for cache in self._caches if key in cache.existing.rows)
        row = cache.existing.rows[key]
        where = f"{cache.shards.folder / row.shard}"
        try:
            data = cache.shards.bytes_of(row)
            check_tensors(row.entry, data, where)
        except FormatError as error:
            do = "run `qwen-cache verify` there, or leave that cache out of cache.reuse"
            raise ChecksumError(f"a sample to copy is damaged: {error.fault}", where=where, do=do) from None
        return row.entry, data, where


def _opened(name: str, folder: Location, format_version: int, copies: LocalCopies) -> OtherCache:
    where = location(name)
    if directory.is_same(where, folder):
        raise ConfigError("a cache cannot reuse itself", where=name, do="leave it out of cache.reuse")
    manifest = directory.read_manifest(where)
    if manifest is None:
        raise ConfigError("there is no cache to reuse", where=name, do="correct cache.reuse, or leave it out")
    if manifest.format_version != format_version:
        raise ConfigError(
            "the cache to reuse has another format version",
            where=name,
            expected=f"v{format_version}",
            found=f"v{manifest.format_version}",
            do="run `qwen-cache migrate` on it, or leave it out of cache.reuse",
        )
    existing = read_existing(where, format_version)
    return OtherCache(name, existing, shards_of(where, existing.manifest, copies))
