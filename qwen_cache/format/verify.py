"""Check a whole cache: structure, every hash, every shape, every number.

Each fault is an error of `errors.RULES`, with the rule of schemas/FORMAT.md that it breaks and the fix. Nothing is
repaired here; `build --repair` asks which samples are damaged. A remote cache is downloaded again without the local
copies, two shards on the disk at a time. Time grows with rows, shards and recipes, not with their products; memory with
the index, whose rows are parsed twice and not kept.
"""

from __future__ import annotations

import os
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from qwen_cache.errors import (
    ChecksumError,
    CountError,
    DisagreementError,
    FormatError,
    NotFiniteError,
    QwenCacheError,
    RecipeError,
    SampleKeyError,
    ShapeError,
    ShardError,
    StrayFileError,
    ThumbnailError,
)
from qwen_cache.format import directory
from qwen_cache.format.directory import index_table
from qwen_cache.format.identity import content_hash, dataset_identity
from qwen_cache.format.index import INDEX_NAME, IndexRow
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest, Shard
from qwen_cache.format.rows import KeyedRows
from qwen_cache.format.sample import UNIT_RANGE, decode
from qwen_cache.format.shard import Entry, scan_shard, tensor_bytes
from qwen_cache.format.update import Existing
from qwen_cache.storage.files import is_cut_short, map_file
from qwen_cache.storage.remote import Location, is_remote, location

HASHED = 1 << 23  # bytes between two questions whether a shard is still as long as it was
REMOTE_SHARDS = 2  # on the disk at a time: one is downloaded while the other is hashed
MISSING, STRAY = "a shard of the manifest is missing", "this file is not in the manifest"


def verify_cache(path: str | Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[FormatError]:
    """Every fault of the cache at `path`, a folder or a URL; an empty list if it is valid.

    `on_bytes` is called with the number of bytes of each checked shard. Faults are returned, not raised. Raises
    ManifestError (a FormatError) if there is no cache, QwenCacheError if a server cannot be read, or if another process
    replaced shards meanwhile.
    """
    folder = location(path)
    if not (folder / MANIFEST_NAME).is_file():
        raise directory.no_manifest(folder)
    if is_remote(folder):
        (folder / MANIFEST_NAME).require_ranges()
    try:
        manifest, index = directory.load(folder)
        table = index_table(manifest, index, str(folder / INDEX_NAME))
    except FormatError as error:
        return [error]
    rows = Existing.of(manifest, table, str(folder / INDEX_NAME)).rows
    faults, of_shard = index_faults(rows, manifest, folder)
    with ThreadPoolExecutor(REMOTE_SHARDS if is_remote(folder) else os.cpu_count()) as pool:

        def check(shard: Shard) -> list[FormatError]:
            return list(_shard_faults(folder, manifest.format_version, shard, map(rows.row, of_shard[shard.name])))

        for shard, found in zip(manifest.shards, pool.map(check, manifest.shards), strict=True):
            faults += found
            on_bytes(shard.bytes)

    # Stock readers of `*.tar` would take these files for shards; `gc` removes only those with the name of a shard. In
    # object storage, shards stay where they are until `gc`, and those of an unfinished build are there already.
    ours = {path.name for path in directory.unlisted_shards(folder, manifest)}
    listed = {shard.name for shard in manifest.shards}
    archives: list[Location] = [*folder.glob("*.tar")]
    for archive in sorted(archives, key=lambda each: each.name):
        if archive.name not in listed and (not is_remote(folder) or archive.name not in ours):
            fix = None if archive.name in ours else "move it out of the folder"
            faults.append(StrayFileError(STRAY, where=archive, do=fix))
    moved = any(fault.what in (MISSING, STRAY) for fault in faults)
    if moved and directory.load(folder)[0] != manifest:
        raise QwenCacheError("the cache was changed while it was checked", where=folder, do="run this command again")
    return faults


def damaged_shards(
    folder: Path, existing: Existing, on_bytes: Callable[[int], None] = lambda _: None
) -> dict[str, set[str]]:
    """The damaged or missing shards of a local cache, each with the keys of its samples that cannot be read.

    All other samples of a damaged shard can be read: their tensors, where the index has them, match their hashes.
    """
    version, of_shard = existing.manifest.format_version, existing.of_shard()

    def check(shard: Shard) -> set[str] | None:
        rows = list(of_shard[shard.name].in_order())
        if not any(_shard_faults(folder, version, shard, rows)):
            return None
        try:
            data = directory.map_shard(folder, shard.name)
        except ShardError:
            data = memoryview(b"")
        path = folder / shard.name
        return {row.meta.key for row in rows if any(_tensor_faults(row.entry, row.label, data, path))}

    damaged = {}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for shard, keys in zip(existing.manifest.shards, pool.map(check, existing.manifest.shards), strict=True):
            if keys is not None:
                damaged[shard.name] = keys
            on_bytes(shard.bytes)
    return damaged


def index_faults(
    rows: KeyedRows, manifest: Manifest, folder: Location
) -> tuple[list[FormatError], dict[str, array[int]]]:
    """The faults of the index, and the positions of the valid rows of each shard."""
    where, faults = folder / INDEX_NAME, list[FormatError]()
    recipes = {recipe.id: recipe.recipe for recipe in manifest.recipes.values()}
    of_shard = {shard.name: array("q") for shard in manifest.shards}
    keys = defaultdict[str, list[str]](list)
    for position in range(len(rows)):
        try:
            row = rows.row(position)
        except FormatError as error:
            faults.append(error)
            continue
        key = row.meta.key
        keys[row.meta.recipe].append(key)
        if row.meta.recipe not in recipes:
            faults.append(RecipeError(f"{row.label} belongs to a recipe that is not in the manifest", where=where))
        if row.shard in of_shard:
            of_shard[row.shard].append(position)
        else:
            faults.append(ShardError(f"{row.label} is in {row.shard}, which is not in the manifest", where=where))
        controls, positions = len(row.meta.img_shapes) - 1, row.meta.image_positions
        if recipes.get(row.meta.recipe, {}).get("text_rows_only") is True and len(positions) != controls:
            what = f"{row.label} lacks image_positions"
            faults.append(ShapeError(what, where=where, expected=controls, found=len(positions)))
    for key, times in Counter(key for of_recipe in keys.values() for key in of_recipe).items():
        if times > 1:
            faults.append(SampleKeyError(f"key {key} occurs {times} times", where=where))
    for name, recipe in manifest.recipes.items():
        mine = keys.get(recipe.id, [])
        if (len(mine), dataset_identity(mine)) != (recipe.samples, recipe.identity):
            what = f"the samples of recipe {name!r} differ from those of the index"
            faults.append(RecipeError(what, where=folder / MANIFEST_NAME))
    return faults, of_shard


def _shard_faults(
    folder: Location, format_version: int, shard: Shard, rows: Iterable[IndexRow]
) -> Iterator[FormatError]:
    """The faults of one shard, from its bytes alone, compared with its rows of the index."""
    try:
        found = directory.find_shard(folder, shard.name, lambda path: (path, _read(path, shard)))
        if found is None:
            yield ShardError(MISSING, where=folder / shard.name)
            return
        path, data = found
        state = xxhash.xxh3_128()
        for begin in range(0, data.nbytes, HASHED):
            block = data[begin : begin + HASHED]
            if is_cut_short(block):
                raise ShardError("the shard became shorter while it was read", where=path)
            state.update(block)
        if (digest := state.hexdigest()) != shard.xxh3_128:
            yield ShardError("the bytes do not match the name of the shard", where=path, found=digest)
        indexed, samples = {row.meta.key: row for row in rows}, 0
        for entry in scan_shard(data, str(path), format_version):
            samples += 1
            row = indexed.pop(entry.meta.key, None)
            label = row.label if row else entry.meta.key
            if row is None or row.entry != entry:
                yield DisagreementError(f"sample {label} differs from the index, or is not in it", where=path)
            yield from _tensor_faults(entry, label, data, path)
        if samples != shard.samples:
            yield CountError(
                "the manifest has another number of samples", where=path, expected=shard.samples, found=samples
            )
        for row in indexed.values():
            yield DisagreementError(f"sample {row.label} of the index is not in its shard", where=path)
    except FormatError as error:
        yield error


def _read(path: Location, shard: Shard) -> memoryview:
    """The bytes of a shard; ShardError if it has another size, FileNotFoundError if it is not at `path`."""
    data = memoryview(b"") if is_remote(path) else map_file(path)
    size = path.size() if is_remote(path) else data.nbytes
    if size not in (shard.bytes, None):
        raise ShardError("the shard has another size", where=path, expected=shard.bytes, found=size)
    return path.download(shard.bytes) if is_remote(path) else data


def _tensor_faults(entry: Entry, label: str, data: memoryview, path: Location) -> Iterator[FormatError]:
    """The faults of a sample's tensors; `label` is what messages call the sample."""
    for name, stored in tensor_bytes(entry, data):
        spec, what = entry.meta.tensors[name], f"{name} of {label}"
        try:
            piece = decode(stored, spec, f"{path}: {what}")
        except FormatError as error:
            yield error
            continue
        if content_hash(piece) != spec.xxh3_128:
            yield ChecksumError(f"{what} does not have its hash", where=path)
        elif name == "thumbnails":
            if not _is_jpeg(piece) and not _is_webp(piece):
                yield ThumbnailError(f"{what} are neither a whole JPEG nor a whole WebP with alpha", where=path)
        elif not _is_finite(piece, spec.dtype):
            yield NotFiniteError(f"{what} has NaN or Inf", where=path)
        elif name in UNIT_RANGE and not _in_unit_range(piece, spec.dtype):
            yield NotFiniteError(f"{what} has numbers outside 0 to 1", where=path)


def _is_jpeg(data: memoryview) -> bool:
    """True if the first and last markers are a JPEG's (ISO/IEC 10918-1, SOI and EOI); `verify` does not decode it."""
    return bytes(data[:3]) == b"\xff\xd8\xff" and bytes(data[-2:]) == b"\xff\xd9"


def _is_webp(data: memoryview) -> bool:
    """True if the header is that of a WebP in the extended format (RFC 9649) with alpha, of as many bytes."""
    header = bytes(data[:21])
    named = header[:4] == b"RIFF" and header[8:16] == b"WEBPVP8X"
    size = 8 + int.from_bytes(header[4:8], "little")
    return named and len(header) == 21 and bool(header[20] & 0x10) and size == len(data)


def _in_unit_range(data: memoryview, dtype: str) -> bool:
    values: npt.NDArray[Any] = np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype])
    return bool(np.all((values >= 0) & (values <= 1)))


def _is_finite(data: memoryview, dtype: str) -> bool:
    """No NaN and no Inf: their exponents are all ones."""
    words: npt.NDArray[Any] = np.frombuffer(data, np.uint32 if dtype == "F32" else np.uint16)
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[dtype]
    return not bool(np.any((words & exponent) == exponent))
