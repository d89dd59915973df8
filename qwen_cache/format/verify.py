"""Check a whole cache: structure, every hash, every shape, every number.

Each fault is an error of `errors.RULES`, with the rule of schemas/FORMAT.md that it breaks and the fix; nothing is
repaired. A remote cache is downloaded again without the local copies, two shards on the disk at a time.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.errors import (
    ChecksumError,
    CountError,
    DisagreementError,
    FormatError,
    ManifestError,
    NotFiniteError,
    RecipeError,
    SampleKeyError,
    ShapeError,
    ShardError,
    StrayFileError,
    ThumbnailError,
)
from qwen_cache.format import directory
from qwen_cache.format.codec import decode
from qwen_cache.format.identity import content_hash, dataset_identity
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest, Shard
from qwen_cache.format.sample import UNIT_RANGE
from qwen_cache.format.shard import Entry, scan_shard, tensor_bytes
from qwen_cache.format.shards import map_file
from qwen_cache.storage.url import Url, location

REMOTE_SHARDS = 2  # on the disk at a time: one is downloaded while the other is hashed


def verify_cache(path: str | Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[FormatError]:
    """Every fault of the cache at `path`, a folder or a URL; an empty list if it is valid.

    `on_bytes` is called with the number of bytes of each checked shard. Faults are returned, not raised. Raises
    ManifestError (a FormatError) if there is no cache, QwenCacheError if a server cannot be read.
    """
    folder = location(path)
    if not (folder / MANIFEST_NAME).is_file():
        what = f"no {MANIFEST_NAME} here, so this is not a cache"
        do = "run `qwen-cache build`" if isinstance(folder, Path) else "check the address"
        raise ManifestError(what, where=folder, do=do)
    if isinstance(folder, Url):
        (folder / MANIFEST_NAME).require_ranges()
    try:
        manifest, index = directory.load(folder)
        table = read_index(index, manifest.format_version, str(folder / INDEX_NAME), manifest.index.samples)
    except FormatError as error:
        return [error]
    rows, faults = _index_rows(table.to_pylist(), manifest, folder)
    faults += _index_faults(rows, manifest, folder)
    by_shard: dict[str, list[IndexRow]] = {shard.name: [] for shard in manifest.shards}
    for row in rows:
        by_shard.setdefault(row.shard, []).append(row)
    with ThreadPoolExecutor(os.cpu_count() if isinstance(folder, Path) else REMOTE_SHARDS) as pool:
        version = manifest.format_version
        of_shards = pool.map(lambda s: list(_shard_faults(folder, version, s, by_shard[s.name])), manifest.shards)
        for shard, of_shard in zip(manifest.shards, of_shards, strict=True):
            faults += of_shard
            on_bytes(shard.bytes)
    return faults + list(_stray_faults(folder, manifest))


def _stray_faults(folder: Path | Url, manifest: Manifest) -> Iterator[FormatError]:
    """Files that stock readers of `*.tar` would take for shards; `gc` removes only those with the name of a shard."""
    ours = {path.name for path in directory.unlisted_shards(folder, manifest)}
    archives: list[Path | Url] = [*folder.glob("*.tar")]
    for path in sorted(archives, key=lambda path: path.name):
        if path.name not in {shard.name for shard in manifest.shards}:
            fix = None if path.name in ours and isinstance(folder, Path) else "move it out of the folder"
            yield StrayFileError("this file is not in the manifest", where=path, do=fix)


def _index_rows(
    records: list[dict[str, Any]], manifest: Manifest, folder: Path | Url
) -> tuple[list[IndexRow], list[FormatError]]:
    rows, faults = [], []
    for record in records:
        try:
            rows.append(index_row(record, manifest.format_version, str(folder / INDEX_NAME)))
        except FormatError as error:
            faults.append(error)
    return rows, faults


def _index_faults(rows: Sequence[IndexRow], manifest: Manifest, folder: Path | Url) -> Iterator[FormatError]:
    where = folder / INDEX_NAME
    for key, count in Counter(row.meta.key for row in rows).items():
        if count > 1:
            yield SampleKeyError(f"key {key} occurs {count} times", where=where)
    recipes = {recipe.id for recipe in manifest.recipes.values()}
    shards = {shard.name for shard in manifest.shards}
    for row in rows:
        if row.meta.recipe not in recipes:
            yield RecipeError(f"{row.meta.key} belongs to a recipe that is not in the manifest", where=where)
        if row.shard not in shards:
            yield ShardError(f"{row.meta.key} is in {row.shard}, which is not in the manifest", where=where)
    yield from _position_faults(rows, manifest, where)
    for name, recipe in manifest.recipes.items():
        mine = [row.meta.key for row in rows if row.meta.recipe == recipe.id]
        if (len(mine), dataset_identity(mine)) != (recipe.samples, recipe.identity):
            what = f"the samples of recipe {name!r} differ from those of the index"
            yield RecipeError(what, where=folder / MANIFEST_NAME)


def _position_faults(rows: Sequence[IndexRow], manifest: Manifest, where: Path | Url) -> Iterator[FormatError]:
    """Samples whose embeddings hold text alone, with controls but without the positions of their images."""
    text_alone = {recipe.id for recipe in manifest.recipes.values() if recipe.recipe.get("text_rows_only") is True}
    for row in rows:
        controls, positions = len(row.meta.img_shapes) - 1, row.meta.image_positions
        if row.meta.recipe in text_alone and len(positions) != controls:
            what = f"{row.meta.key} lacks image_positions"
            yield ShapeError(what, where=where, expected=controls, found=len(positions))


def _shard_faults(
    folder: Path | Url, format_version: int, shard: Shard, rows: Sequence[IndexRow]
) -> Iterator[FormatError]:
    """The faults of one shard, from its bytes alone, compared with its rows of the index."""
    try:
        path = directory.shard_path(folder, shard.name)
        size = path.stat().st_size if isinstance(path, Path) else path.size()
        if size not in (shard.bytes, None):
            yield ShardError("the shard has another size", where=path, expected=shard.bytes, found=size)
            return
        data = map_file(path) if isinstance(path, Path) else path.download(shard.bytes)
        if (digest := content_hash(data)) != shard.xxh3_128:
            yield ShardError("the bytes do not match the name of the shard", where=path, found=digest)
        indexed, samples = {row.meta.key: row.entry for row in rows}, 0
        for entry in scan_shard(data, str(path), format_version):
            samples += 1
            if indexed.pop(entry.meta.key, None) != entry:
                what = f"sample {entry.meta.key} differs from the index, or is not in it"
                yield DisagreementError(what, where=path)
            yield from _tensor_faults(entry, data, path)
        if samples != shard.samples:
            yield CountError(
                "the manifest has another number of samples", where=path, expected=shard.samples, found=samples
            )
        for key in indexed:
            yield DisagreementError(f"sample {key} of the index is not in its shard", where=path)
    except FormatError as error:
        yield error


def _tensor_faults(entry: Entry, data: memoryview, path: Path | Url) -> Iterator[FormatError]:
    for name, stored in tensor_bytes(entry, data):
        spec, what = entry.meta.tensors[name], f"{name} of {entry.meta.key}"
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
    """Whether the first and last markers are a JPEG's (ISO/IEC 10918-1, SOI and EOI); `verify` does not decode it."""
    return bytes(data[:3]) == b"\xff\xd8\xff" and bytes(data[-2:]) == b"\xff\xd9"


def _is_webp(data: memoryview) -> bool:
    """Whether the header is that of a WebP in the extended format (RFC 9649) with alpha, of as many bytes."""
    header = bytes(data[:21])
    named = header[:4] == b"RIFF" and header[8:16] == b"WEBPVP8X"
    return named and len(header) == 21 and bool(header[20] & 0x10) and _riff_size(header) == len(data)


def _riff_size(header: bytes) -> int:
    return 8 + int.from_bytes(header[4:8], "little")


def _in_unit_range(data: memoryview, dtype: str) -> bool:
    values: npt.NDArray[Any] = np.frombuffer(data, {"F16": np.float16, "F32": np.float32}[dtype])
    return bool(np.all((values >= 0) & (values <= 1)))


def _is_finite(data: memoryview, dtype: str) -> bool:
    """No NaN and no Inf: their exponents are all ones."""
    words: npt.NDArray[Any] = np.frombuffer(data, np.uint32 if dtype == "F32" else np.uint16)
    exponent = {"BF16": 0x7F80, "F16": 0x7C00, "F32": 0x7F800000}[dtype]
    return not bool(np.any((words & exponent) == exponent))
