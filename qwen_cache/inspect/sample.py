"""Everything about one sample (`describe`), as `inspect --sample` shows it.

A key that names no sample, or several, is an error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qwen_cache.format.cache import Sample, find_sample, open_recipes
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.inspect.tensors import numbers, statistics
from qwen_cache.storage.remote import LocalCopies


def describe(path: str | Path, key: str, copies: LocalCopies | None = None) -> dict[str, Any]:
    """Everything about one sample, as a JSON value. Reads its tensors and checks their hashes."""
    cache, sample = find_sample(list(open_recipes(path, copies or LocalCopies.of()).values()), key)
    row, meta, offsets = sample.row, sample.row.meta, sample.row.entry.tensor_offsets()
    return {
        "key": meta.key,
        "name": row.name,
        "recipe": cache.recipe_name,
        "prompt": meta.prompt,
        "phrase": [meta.prompt[begin:end] for begin, end in meta.phrase],
        "images": [f"{w * PIXELS_PER_TOKEN}×{h * PIXELS_PER_TOKEN}" for _, h, w in meta.img_shapes],
        "img_shapes": [list(shape) for shape in meta.img_shapes],
        "prefix_length": meta.prefix_length,
        "image_positions": list(meta.image_positions),
        "edit_mask_from": meta.edit_mask_from,
        "inputs": meta.inputs.to_json(),
        "source_rows": row.source_rows,
        "shard": row.shard,
        "offset": row.entry.offset,
        "length": row.entry.length,
        "tensors": {
            name: spec.to_json() | {"offset": offsets[name], "bytes": spec.nbytes} | _statistics(sample, name)
            for name, spec in meta.tensors.items()
        },
    }


def _statistics(sample: Sample, name: str) -> dict[str, float]:
    """The statistics of a tensor; none of thumbnails, which are the bytes of an image file."""
    return {} if name == "thumbnails" else statistics(numbers(sample, name))
