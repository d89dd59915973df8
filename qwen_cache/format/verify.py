"""Check a whole cache: structure, every hash, every shape, every number.

Each fault becomes a finding with the rule of schemas/FORMAT.md that it breaks and the cure; nothing is mended.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.format import directory
from qwen_cache.format.cache import map_file
from qwen_cache.format.errors import FormatError
from qwen_cache.format.identity import content_hash, dataset_identity
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index
from qwen_cache.format.manifest import MANIFEST_NAME, Manifest, Shard
from qwen_cache.format.shard import scan_shard, tensor_bytes

RESTORE = "restore the shard from a copy, or delete it and run `qwen-cache build` again"
COLLECT = "run `qwen-cache gc`"


@dataclass(frozen=True)
class Finding:
    """One fault."""

    rule: str
    where: str
    what: str
    do: str

    def to_json(self) -> dict[str, str]:
        return {"rule": self.rule, "where": self.where, "what": self.what, "do": self.do}

    def __str__(self) -> str:
        return f"{self.where}: {self.what} [{self.rule}]\n  → {self.do}"


def verify_cache(folder: Path, on_bytes: Callable[[int], None] = lambda _: None) -> list[Finding]:
    """Every fault of the cache; `on_bytes` hears how many bytes were checked.

    Raises FormatError F1 where there is no cache at all.
    """
    if not (folder / MANIFEST_NAME).is_file():
        raise FormatError(
            "F1", f"no {MANIFEST_NAME} here, so this is not a cache", where=folder, do="run `qwen-cache build`"
        )
    try:
        manifest, index = directory.load(folder)
        table = read_index(index, manifest.format_version, str(folder / INDEX_NAME))
    except FormatError as error:
        return [_finding(error)]
    rows, findings = _index_rows(table.to_pylist(), manifest, folder)
    findings += _index_faults(rows, manifest, folder)
    by_shard: dict[str, list[IndexRow]] = {shard.name: [] for shard in manifest.shards}
    for row in rows:
        by_shard.setdefault(row.shard, []).append(row)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        faults = pool.map(lambda shard: list(_shard_faults(folder, shard, by_shard[shard.name])), manifest.shards)
        for shard, found in zip(manifest.shards, faults, strict=True):
            findings += found
            on_bytes(shard.bytes)
    stray = directory.unlisted_shards(folder, manifest)
    return findings + [Finding("F17", str(path), "the dataset does not name this file", COLLECT) for path in stray]


def _index_rows(
    records: list[dict[str, Any]], manifest: Manifest, folder: Path
) -> tuple[list[IndexRow], list[Finding]]:
    rows, findings = [], []
    for record in records:
        try:
            rows.append(index_row(record, manifest.format_version, str(folder / INDEX_NAME)))
        except FormatError as error:
            findings.append(_finding(error))
    return rows, findings


def _index_faults(rows: Sequence[IndexRow], manifest: Manifest, folder: Path) -> Iterator[Finding]:
    where, do = str(folder / INDEX_NAME), "restore the index from a copy, or build again into an empty folder"
    times = Counter(row.meta.key for row in rows)
    for key in (key for key, count in times.items() if count > 1):
        yield Finding("F10", where, f"key {key} stands twice", do)
    known = {recipe.id: name for name, recipe in manifest.recipes.items()}
    listed = {shard.name for shard in manifest.shards}
    for row in rows:
        if row.meta.recipe not in known:
            yield Finding("F5", where, f"{row.meta.key} is of a recipe that the manifest does not have", do)
        if row.shard not in listed:
            yield Finding("F6", where, f"{row.meta.key} lies in {row.shard}, which the manifest does not name", do)
    for name, recipe in manifest.recipes.items():
        mine = [row.meta.key for row in rows if row.meta.recipe == recipe.id]
        if (len(mine), dataset_identity(mine)) != (recipe.samples, recipe.identity):
            yield Finding(
                "F5", str(folder / MANIFEST_NAME), f"samples of recipe {name!r} are not those of the index", do
            )


def _shard_faults(folder: Path, shard: Shard, rows: Sequence[IndexRow]) -> Iterator[Finding]:
    """Faults of one shard, seen from its bytes and not from the index."""
    try:
        path = directory.shard_path(folder, shard.name)
        if path.stat().st_size != shard.bytes:
            found = f"the shard has {path.stat().st_size} bytes, expected {shard.bytes}"
            yield Finding("F6", str(path), found, RESTORE)
            return
        data = map_file(path)
        if (digest := content_hash(data)) != shard.xxh3_128:
            yield Finding("F6", str(path), f"the bytes are not those that were written: hash {digest}", RESTORE)
        indexed = {row.meta.key: row.entry for row in rows}
        for entry in scan_shard(data, str(path)):
            if indexed.pop(entry.meta.key, None) != entry:
                what = f"sample {entry.meta.key} is not what the index says, or is not in it"
                yield Finding("F16", str(path), what, RESTORE)
            for name, piece in tensor_bytes(entry, data):
                spec = entry.meta.tensors[name]
                if content_hash(piece) != spec.xxh3_128:
                    yield Finding("F14", str(path), f"{name} of {entry.meta.key} does not have its hash", RESTORE)
                elif not _is_finite(piece, spec.dtype):
                    yield Finding("F15", str(path), f"{name} of {entry.meta.key} has NaN or Inf", "build it again")
        for key in indexed:
            yield Finding("F16", str(path), f"sample {key} of the index is not in its shard", RESTORE)
    except FormatError as error:
        yield _finding(error)


def _is_finite(data: memoryview, dtype: str) -> bool:
    """No NaN and no Inf: their exponents are all ones."""
    words: npt.NDArray[Any] = np.frombuffer(data, np.uint16 if dtype == "BF16" else np.uint32)
    exponent = 0x7F80 if dtype == "BF16" else 0x7F800000
    return not bool(np.any((words & exponent) == exponent))


def _finding(error: FormatError) -> Finding:
    return Finding(error.rule, str(error.where), error.fault.replace(f" [{error.rule}]", ""), error.do or RESTORE)
