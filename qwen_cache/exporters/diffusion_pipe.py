"""Caches for diffusion-pipe with at most one control: the mirror of `qwen_cache.importers.diffusion_pipe`.

Read in tdrussell/diffusion-pipe 8f83dbf: utils/cache.py, utils/dataset.py and models/qwen_image.py. With
`--trust_cache` its training opens no image. Below `cache/qwen_image` it reads, for samples of width / height = AR:

    metadata/grouping_keys.json            [[AR, 1], …]
    metadata/grouped_metadata_<AR>_1/      a saved `datasets.Dataset` of the samples, by image_spec
    cache_<AR>x<width>x<height>x1/latents/     pieces in the order of that dataset after its own shuffle
    ar_frames_<AR>_1/text_embeddings_1/        pieces in the order of that dataset

It deletes pieces whose fingerprint is not that of the dataset, and adopts those that have none yet. The empty prompt of
`uncond_text_embeddings_1` is without images there; it is left to diffusion-pipe, which loads its text encoder for it
once.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from qwen_cache.exporters.target import ALWAYS, Export, NamedSample, Refusal, Tool, images_of
from qwen_cache.extras import require
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta

MULTIPLE = 32
"""Sides of its sizes are multiples of this."""
SHARD_BYTES = 10_000_000_000


def refusing(samples: Iterable[SampleMeta]) -> Callable[[SampleMeta], Refusal | None]:
    """One control of the target's size, or none, the same for all; one size for each ratio of width and height.

    Where samples differ, most of them decide.
    """
    counts = Counter(tuple(meta.img_shapes) for meta in samples if _is_alone_or_paired(meta))
    with_control = sum(count * (1 if len(shapes) > 1 else -1) for shapes, count in counts.items()) > 0
    sizes: dict[str, tuple[int, int, int]] = {}
    for (target, *others), _ in counts.most_common():
        if bool(others) == with_control:
            sizes.setdefault(_ratio(target), target)

    def refusal(meta: SampleMeta) -> Refusal | None:
        target, *others = meta.img_shapes
        if len(others) > 1:
            return Refusal(f"it has {len(others)} controls, and diffusion-pipe has at most one", "leave it out")
        if others and others[0] != target:
            what = "its control has another size than its target, which diffusion-pipe does not have"
            return Refusal(what, "build a cache of controls that were cropped to their targets' sizes")
        if bool(others) != with_control:
            what = "it has no control, unlike most samples" if with_control else "it has a control, unlike most samples"
            return Refusal(what, "export samples with and without control from two caches")
        if sizes[_ratio(target)] != target:
            what = "it has the ratio of width and height of other samples, and another size"
            return Refusal(what, "build a cache with one size for each ratio")
        return None

    return refusal


def _is_alone_or_paired(meta: SampleMeta) -> bool:
    """Whether diffusion-pipe can hold the images of a sample."""
    target, *others = meta.img_shapes
    return others in ([], [target])


def write(export: Export) -> None:
    """The cache, and a dataset.toml that names it."""
    groups = defaultdict[tuple[int, int, int], list[int]](list)
    for i in range(len(export.samples)):
        groups[export.samples[i].sample.img_shapes[0]].append(i)
    _, h, w = next(iter(groups))
    resolution = round(PIXELS_PER_TOKEN * math.sqrt(h * w))
    cache = export.folder / "cache" / "qwen_image"
    (cache / "metadata").mkdir(parents=True)
    for shape, members in groups.items():
        _write_group(export, cache, shape, members, resolution)
    keys = [[shape[2] / shape[1], 1] for shape in groups]
    (cache / "metadata" / "grouping_keys.json").write_text(json.dumps(keys), encoding="utf-8")
    (export.folder / "dataset.toml").write_text(_toml(export, resolution, keys), encoding="utf-8")


def _write_group(export: Export, cache: Path, shape: tuple[int, int, int], members: list[int], resolution: int) -> None:
    """The samples of one ratio of width and height."""
    require("datasets")
    import datasets

    ratio = shape[2] / shape[1]
    named = [export.samples[i] for i in members]
    metadata = datasets.Dataset.from_dict(
        {
            "image_spec": [_image_spec(export, each) for each in named],
            "mask_file": [None] * len(named),
            "caption": [[each.sample.prompt] for each in named],
            "ar_bucket": [[ratio, 1.0]] * len(named),
            "size_bucket": [None] * len(named),
            "is_video": [False] * len(named),
        }
    )
    metadata.save_to_disk(str(cache / "metadata" / f"grouped_metadata_{_ratio(shape)}_1"))
    bucket = (ratio, *_size(ratio, resolution), 1)
    order = datasets.Dataset.from_dict({"i": list(range(len(named)))}).shuffle(seed=_seed(bucket))["i"]
    folder = cache / f"cache_{_ratio(shape)}x{bucket[1]}x{bucket[2]}x1" / "latents"
    _write_pieces(folder, (_latents(export, named[i]) for i in order))
    folder = cache / f"ar_frames_{_ratio(shape)}_1" / "text_embeddings_1"
    _write_pieces(folder, (_embeddings(export, each) for each in named))


def _latents(export: Export, named: NamedSample) -> dict[str, Any]:
    target, *controls = images_of(named.sample)
    tensors = {"latents": target, **({"control_latents": controls[0]} if controls else {})}
    export.on_sample()
    return {**tensors, "image_spec": _image_spec(export, named), "mask": None, "caption": [named.sample.prompt]}


def _embeddings(export: Export, named: NamedSample) -> dict[str, Any]:
    embeds = named.sample["prompt_embeds"].clone()  # a view of the shard would save all of it
    return {"prompt_embeds": embeds, "image_spec": _image_spec(export, named)}


def _image_spec(export: Export, named: NamedSample) -> list[str | None]:
    """The tar and the image: nothing opens it."""
    return [None, str(export.final / f"{named.stem}.png")]


def _ratio(shape: tuple[int, int, int]) -> str:
    return f"{shape[2] / shape[1]:.3f}"


def _size(ratio: float, resolution: int) -> tuple[int, int]:
    """Width and height in pixels that it computes for a ratio."""
    width = math.sqrt(resolution**2 * ratio)
    sides = width, resolution**2 / width
    return int(round(sides[0] / MULTIPLE) * MULTIPLE), int(round(sides[1] / MULTIPLE) * MULTIPLE)


def _seed(value: object) -> int:
    """Its seed for a size."""
    return int(hashlib.md5(str(value).encode(), usedforsecurity=False).hexdigest(), 16) % 10**9


def _write_pieces(folder: Path, items: Iterable[dict[str, Any]]) -> None:
    """Its container: files of `torch.save`, one after another, with their places in an SQLite database."""
    folder.mkdir(parents=True)
    with closing(sqlite3.connect(folder / "metadata.db")) as database:
        database.execute("CREATE TABLE fingerprint(value)")
        database.execute("CREATE TABLE items(shard, shard_index)")
        number, size, index = -1, SHARD_BYTES, 0
        for item in items:
            if size >= SHARD_BYTES:
                number, size, index = number + 1, 0, 0
                database.execute(f"CREATE TABLE shard_{number:d}(offset, size)")
            buffer = io.BytesIO()
            torch.save(item, buffer)
            with open(folder / f"shard_{number}.bin", "ab") as file:
                file.write(buffer.getbuffer())
            database.execute(f"INSERT INTO shard_{number:d} VALUES (?, ?)", (size, buffer.tell()))
            database.execute("INSERT INTO items VALUES (?, ?)", (number, index))
            size, index = size + buffer.tell(), index + 1
        database.commit()


def _toml(export: Export, resolution: int, keys: list[list[float]]) -> str:
    ratios = ", ".join(str(ratio) for ratio, _ in keys)
    lines = [
        "# for a run with --trust_cache; without it diffusion-pipe looks for images, and there are none",
        f"resolutions = [{resolution}]",
        "enable_ar_bucket = true",
        f"ar_buckets = [{ratios}]",
        "",
        "[[directory]]",
        f"path = {json.dumps(str(export.final))}",
        "num_repeats = 1",
    ]
    return "\n".join(lines) + "\n"


TOOL = Tool("diffusion-pipe", ALWAYS, refusing, write, "train.py --trust_cache, with dataset = '{folder}/dataset.toml'")
