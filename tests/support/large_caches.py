"""A manifest and an index of any number of samples, made from columns, for what reads the index alone.

There are no shards, and keys are not those of the content: `verify` would refuse such a cache.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from qwen_cache.format.identity import content_hash, recipe_id
from qwen_cache.format.index import index_schema
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe, Shard

RECIPE = {"encoder_version": 2, "pipeline": "QwenImageEditPlusPipeline", "dtype": "float32"}
SIZES = ((20, 14), (16, 16), (14, 20), (12, 22))
"""Height and width in tokens of the targets, in turn."""


def hashes(random: np.random.Generator, count: int) -> pa.Array:
    """Random hashes of 32 digits."""
    digits = np.frombuffer(b"0123456789abcdef", np.uint8)[random.integers(0, 16, (count, 32))]
    return pa.array([row.decode() for row in digits.view("S32").ravel()])


def write_large(folder: Path, count: int, prompts: tuple[str, ...] = ("Edit number {}.",)) -> Path:
    """A cache of `count` edits: sizes and `prompts` in turn, numbered; every 100th repeats the target before it."""
    random, numbers = np.random.default_rng(0), np.arange(count)
    shapes = np.array(SIZES, np.int32)[numbers % len(SIZES)]
    tokens, texts = shapes.prod(1), 20 + numbers % 7
    control = np.tile(np.array([1, 16, 16], np.int32), (count, 1))
    both = np.concatenate([np.ones((count, 1), np.int32), shapes, control], 1)
    targets, shard = hashes(random, count), content_hash(b"shard")
    sources = numbers - (numbers % 100 == 99)
    columns = {
        "key": hashes(random, count),
        "recipe": pa.array([recipe_id(RECIPE)] * count),
        "name": pa.array([f"photo-{i}" for i in range(count)]),
        "prompt": pa.array([prompts[i % len(prompts)].format(i) for i in range(count)]),
        "img_shapes": lists(lists(both.ravel(), 3), 2),
        "prefix_length": pa.array(np.zeros(count, np.int32)),
        "phrase": lists(lists(np.zeros(0, np.int32), 2), 0, count),
        "edit_mask_from": pa.nulls(count, pa.string()),
        "image_positions": lists(np.zeros(0, np.int32), 0, count),
        "text_length": pa.array(texts.astype(np.int32)),
        "target": targets.take(pa.array(sources)),
        "controls": lists(hashes(random, count), 1),
        "mask": pa.nulls(count, pa.string()),
        "source_rows": pa.array(np.ones(count, np.int32)),
        "shard": pa.array([f"{shard}.tar"] * count),
        "offset": pa.array(numbers * 4096),
        "length": pa.array(np.full(count, 4096)),
    }
    for name, rows, width in (("image_latents", tokens, 64), ("control_latents", 256, 64), ("prompt_embeds", texts, 8)):
        columns[name] = tensors(np.broadcast_to(rows, count), width)
    schema = index_schema(2)
    columns |= {field.name: pa.nulls(count, field.type) for field in schema if field.name not in columns}
    table = pa.Table.from_arrays([columns[field.name] for field in schema], schema=schema)
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "index.parquet", compression="zstd")
    index = (folder / "index.parquet").read_bytes()
    manifest = Manifest(
        2,
        {"default": Recipe(RECIPE, count, content_hash(b"keys"))},
        IndexFile(count, len(index), content_hash(index)),
        (Shard(f"{shard}.tar", count, 4096 * count),),
        {"qwen-cache": "0.1.0"},
    )
    (folder / "cache.json").write_bytes(manifest.to_bytes())
    return folder


def lists(values: pa.Array | npt.NDArray[np.int32], length: int, count: int | None = None) -> pa.Array:
    """Lists of equal length."""
    values = values if isinstance(values, pa.Array) else pa.array(values)
    number = len(values) // length if count is None else count
    return pa.ListArray.from_arrays(pa.array(length * np.arange(number + 1, dtype=np.int32)), values)


def tensors(rows: npt.NDArray[np.int64], width: int) -> pa.Array:
    """The column of a tensor `[rows, width]` of float32."""
    count = len(rows)
    shape = np.stack([rows, np.full(count, width)], 1).astype(np.int32)
    digest = content_hash(b"tensor")
    fields = {
        "dtype": pa.array(["F32"] * count),
        "shape": lists(shape.ravel(), 2),
        "offset": pa.array(np.zeros(count, np.int64)),
        "length": pa.array(4 * shape.astype(np.int64).prod(1)),
        "xxh3_128": pa.array([digest] * count),
        "codec": pa.nulls(count, pa.string()),
    }
    return pa.StructArray.from_arrays(list(fields.values()), list(fields))


if __name__ == "__main__":
    write_large(Path(sys.argv[1]), int(sys.argv[2]))
