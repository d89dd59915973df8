"""Samples of other caches, copied in place of being encoded again: `cache.reuse`.

A key covers the content and the recipe, so an equal key is an equal sample, whatever it is called there. Copies are
checked by the hashes of their tensors.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.errors import ChecksumError, ConfigError, FormatError
from qwen_cache.format import directory
from qwen_cache.format.index import IndexRow
from qwen_cache.format.rows import KeyedRows
from qwen_cache.format.shard import Entry, check_tensors
from qwen_cache.format.shards import LocalShards, RangedShards, RemoteShards
from qwen_cache.format.update import Existing, read_existing
from qwen_cache.storage.remote import LocalCopies, Url, location


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

    def __init__(self, names: Sequence[str], folder: Path | Url, format_version: int, copies: LocalCopies) -> None:
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
        return row.entry, _checked(cache, row, where), where


def _checked(cache: OtherCache, row: IndexRow, where: str) -> memoryview:
    try:
        data = cache.shards.bytes_of(row)
        check_tensors(row.entry, data, where)
    except FormatError as error:
        do = "run `qwen-cache verify` there, or leave that cache out of cache.reuse"
        raise ChecksumError(f"a sample to copy is damaged: {error.fault}", where=where, do=do) from None
    return data


def _opened(name: str, folder: Path | Url, format_version: int, copies: LocalCopies) -> OtherCache:
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
    shards = (
        RemoteShards(where, existing.manifest, copies)
        if isinstance(where, Url)
        else LocalShards(where, existing.manifest)
    )
    return OtherCache(name, existing, shards)
