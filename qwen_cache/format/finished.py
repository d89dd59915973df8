"""Samples that need no encoder: left by an interrupted run, or in shards that the dataset no longer uses.

Only headers and indexes are read, and nothing is written; a damaged sample is found when it is copied.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.format import directory
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.remote import build_name, read_parts, read_replaced
from qwen_cache.format.remote_build import scratch_folders
from qwen_cache.format.staging import Staging, keys_in, staging_folder
from qwen_cache.storage.remote import Url
from qwen_cache.storage.stores import store_of


def replaced_shards(folder: Path | Url, keys: Set[str], format_version: int) -> dict[Path, set[str]]:
    """The replaced shards that contain a sample of `keys`, each with all of its keys; they are not hashed.

    None for object storage, where they stay beside the others: the staging finds them.
    """
    if isinstance(folder, Url):
        return {}
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


def finished_samples(folder: Path | Url, manifest: Manifest, name: str, keys: Set[str]) -> Finished:
    """Which samples of `keys` an update with the staging `name` would copy. Reads headers only, writes nothing.

    A shard with damaged tensors is found when it is copied: its samples are written again.
    """
    if not keys:
        return Finished()
    version = manifest.format_version
    if isinstance(folder, Url):
        return _finished_remotely(folder, manifest, name, keys)
    interrupted = Staging.finished(staging_folder(folder, name, version), version)
    for path in directory.unlisted_shards(folder, manifest):
        interrupted |= keys_in(path, version)
    missing = keys - interrupted
    replaced = set[str]().union(*replaced_shards(folder, missing, version).values())
    return Finished(frozenset(keys & interrupted), frozenset(missing & replaced))


def _finished_remotely(folder: Url, manifest: Manifest, name: str, keys: Set[str]) -> Finished:
    version, here = manifest.format_version, store_of(folder).listing(folder)
    parts = read_parts(folder, build_name(name, version), here, version)
    interrupted = {entry.meta.key for _, entries in parts for entry in entries}
    for scratch in scratch_folders(folder, name, version):
        interrupted |= Staging.finished(scratch, version)
    stored = read_replaced(folder, manifest, here, keys - interrupted, version)
    replaced = {entry.meta.key for _, entries in stored for entry in entries}
    return Finished(frozenset(keys & interrupted), frozenset(keys & replaced - interrupted))
