"""What a published cache consists of: its manifest, index and shards as they are, a card, a gallery, public settings.

Every shard that is sent is checked against its name first. Nothing of this machine is published: of the settings only
those that say how a source is read, and no address but that of a dataset on the hub (`saved_settings.py`). Prompts,
names of samples, thumbnails and latents are what a cache is; the caller says so before the upload.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

import yaml

from qwen_cache.encode.saved_settings import public_model, public_settings
from qwen_cache.errors import ConfigError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, open_recipes
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.manifest import MANIFEST_NAME, SHARD_PATTERN, Manifest, Shard
from qwen_cache.settings.load import CONFIG_NAME, load_config
from qwen_cache.share.card import CARD, Licences, checked_base, make_card
from qwen_cache.share.gallery import GALLERY, make_gallery
from qwen_cache.storage.hub_repository import Published, State, check_repository_name
from qwen_cache.storage.remembered import file_digest
from qwen_cache.storage.remote import LocalCopies

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
    """What a push does to a repository."""

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
    """What turns the repository into the cache; ConfigError if it holds something else."""
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
    """Where a shard is; ShardError if it is missing."""
    found = next((path for path in directory.shard_paths(folder, shard.name) if path.is_file()), None)
    if found is None:
        raise directory.missing_shard(folder, shard.name)
    return found


def _settings(folder: Path) -> tuple[bytes | None, str | None]:
    """The public part of the settings of the build, and the model's repository, if it is on the hub."""
    if not (folder / CONFIG_NAME).is_file():
        return None, None
    config = load_config(folder / CONFIG_NAME)
    public = public_settings(config)
    data = yaml.safe_dump(public, sort_keys=False, allow_unicode=True).encode("utf-8") if public else None
    return data, public_model(config)
