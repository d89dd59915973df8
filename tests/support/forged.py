"""A cache whose hashes all agree, but whose tensors are not those that its images and prompts give."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from qwen_cache import open_cache
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import IndexRow, write_index
from qwen_cache.format.manifest import IndexFile
from qwen_cache.format.sample import TensorSpec
from qwen_cache.format.shard import ShardWriter

Tensors = dict[str, Any]
"""NumPy arrays by name, as they are stored."""


def forge(cache: Path, out: Path, change: Callable[[str, Tensors], Tensors]) -> Path:
    """A copy of a cache; `change` gets the name of each sample and its tensors, and returns others."""
    out.mkdir()
    if (cache / "qwen.yaml").is_file():
        (out / "qwen.yaml").write_bytes((cache / "qwen.yaml").read_bytes())
    opened = open_cache(cache)
    writer = ShardWriter(out / "open", opened.format_version)
    for sample in opened:
        kinds = {name: spec.dtype for name, spec in sample.row.meta.tensors.items()}
        found = change(sample.name, {name: sample.stored_numpy(name) for name in kinds})
        data = {name: memoryview(np.ascontiguousarray(array).tobytes()) for name, array in found.items()}
        specs = {name: TensorSpec(kinds[name], array.shape, content_hash(data[name])) for name, array in found.items()}
        writer.add(replace(sample.row.meta, tensors=specs), data)
    shard, entries = writer.seal(out)
    index = write_index(
        [IndexRow(sample.name, shard.name, entry) for sample, entry in zip(opened, entries, strict=True)],
        opened.format_version,
    )
    (out / "index.parquet").write_bytes(index)
    listed = IndexFile(len(entries), len(index), content_hash(index))
    (out / "cache.json").write_bytes(replace(opened.manifest, shards=(shard,), index=listed).to_bytes())
    return out
