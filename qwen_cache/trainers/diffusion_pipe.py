"""Files of diffusion-pipe, read and written."""

from __future__ import annotations

import hashlib
import io
import json
import math
import os
import re
import sqlite3
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_cache.errors import SourceError
from qwen_cache.extras import require
from qwen_cache.format.sample import PIXELS_PER_TOKEN, SampleMeta
from qwen_cache.storage.files import open_file
from qwen_cache.trainers.files import (
    ALWAYS,
    Export,
    FoundSample,
    ImportedSample,
    NamedSample,
    Options,
    Refusal,
    Tool,
    check_tensor,
    images_of,
    load_pickled,
    pack_latents,
)

# ---- diffusion pipe --------------------------------------------------------------------------------------------------
# Caches of diffusion-pipe for Qwen-Image and Qwen-Image-Edit with one control: shards of pickles with an SQLite index.
#
# Read in tdrussell/diffusion-pipe, utils/cache.py (0b78c6b), utils/dataset.py (0784ca8) and models/qwen_image.py
# (41fa128). Below `<dataset>/cache/qwen_image` there is one folder per size:
#
#     cache_<size>/latents/            metadata.db, shard_<N>.bin: latents [16, 1, H, W], optional control_latents of
#                                      the same shape, mask, image_spec, caption (a list)
#     cache_<size>/text_embeddings_1/  the same pair of files: prompt_embeds [L, D], image_spec; one per caption
#
# Where sizes come from `enable_ar_bucket` (8f83dbf), all sizes of a ratio of width and height share their embeddings,
# in another order: `ar_frames_<ratio>_<frames>/text_embeddings_1/`; image_spec says which belong together.
#
# metadata.db has `items(shard, shard_index)` and for each shard `shard_<N>(offset, size)`; each piece is a file of
# `torch.save`. Embeddings follow the order of the latents and their captions, which image_spec confirms. Latents are
# the mode, normalised; embeddings are unpadded. The empty prompt was encoded without the control image
# (`uncond_text_embeddings_1`), so it is not imported. A loss mask is refused: the format cannot store it.

INDEX = "metadata.db"
SIZE_FOLDER = re.compile(r"cache_(?P<ratio>[\d.]+)x\d+x\d+x(?P<frames>\d+)")
NAMES = {"latents": "image_latents", "control_latents": "control_latents"}


@dataclass(frozen=True)
class Pieces:
    """The pieces of one metadata.db, in order: file, offset and size of each."""

    folder: Path
    locations: tuple[tuple[Path, int, int], ...]

    def load(self, i: int) -> dict[str, Any]:
        path, offset, size = self.locations[i]
        where = f"{path}: bytes {offset} to {offset + size}"
        available = path.stat().st_size if path.is_file() else 0
        if offset + size > available:
            raise SourceError("a shard is shorter than its index says", where=where, found=f"{available} bytes")
        with open(path, "rb") as file:
            file.seek(offset)
            data = file.read(size)
        value = load_pickled(io.BytesIO(data), where)
        if not isinstance(value, dict):
            raise SourceError("not a sample", where=where, expected="dict", found=type(value).__name__)
        return value


def find(folder: Path, options: Options) -> Iterator[FoundSample | SourceError]:
    """The samples below `folder`, one for each caption, sorted by size."""
    indexes = sorted(folder.rglob(f"latents/{INDEX}"))
    if not indexes:
        raise SourceError(
            "not a cache of diffusion-pipe", where=folder, expected=f"cache_<size>/latents/{INDEX}", found="none"
        )
    for index in indexes:
        try:
            latents = open_pieces(index)
            text = _text_of(index.parents[1], latents)
        except SourceError as error:
            yield error
            continue
        yield from _bucket(latents, text)


def _bucket(latents: Pieces, text: Pieces) -> Iterator[FoundSample | SourceError]:
    """The samples of one size. The captions of an image are in its piece, so all pieces are opened once."""
    begin = 0
    for i in range(len(latents.locations)):
        try:
            captions = latents.load(i).get("caption")
        except SourceError as error:
            yield error
            captions = None
        if not isinstance(captions, list) or not all(isinstance(caption, str) for caption in captions):
            yield SourceError(
                f"piece {i} has no captions, so from there on embeddings cannot be assigned",
                where=latents.folder,
                do="make the cache again with --regenerate_cache",
            )
            return
        for k, caption in enumerate(captions):
            yield _found_sample(latents, i, text, begin + k, caption)
        begin += len(captions)
    if begin != len(text.locations):
        yield SourceError(
            "the embeddings do not belong to the latents' captions",
            where=text.folder,
            expected=f"{begin} pieces",
            found=len(text.locations),
            do="let diffusion-pipe finish the cache with --cache_only",
        )


def _found_sample(latents: Pieces, i: int, text: Pieces, j: int, caption: str) -> FoundSample:
    name = f"{latents.folder.parent.name}/{i}-{j}"
    return FoundSample(name, f"{latents.folder}: piece {i}", lambda: _read(latents, i, text, j, caption))


def _read(latents: Pieces, i: int, text: Pieces, j: int, caption: str) -> ImportedSample:
    where = f"{latents.folder}: piece {i}"
    if j >= len(text.locations):
        raise SourceError("its embeddings are missing", where=where, do="let diffusion-pipe finish the cache")
    images, embeds = latents.load(i), text.load(j)
    if list(images.get("image_spec") or ()) != list(embeds.get("image_spec") or (None,)):
        raise SourceError(
            "latents and embeddings are of different images",
            where=where,
            expected=images.get("image_spec"),
            found=embeds.get("image_spec"),
            do="make the cache again with --regenerate_cache",
        )
    if images.get("mask") is not None:
        do = "make the cache again without mask_path, or skip these samples with --on-error skip"
        raise SourceError("it has a loss mask, which this format cannot store", where=where, do=do)
    packed = {
        name: pack_latents(check_tensor(images.get(name), "[C, F, H, W]", f"{where}: {name}"), f"{where}: {name}")
        for name in NAMES
        if name == "latents" or name in images
    }
    tensors = {NAMES[name]: tokens for name, (tokens, _) in packed.items()}
    tensors["prompt_embeds"] = check_tensor(embeds.get("prompt_embeds"), "[L, D]", f"{text.folder}: piece {j}")
    return ImportedSample(caption, tuple(shape for _, shape in packed.values()), tensors)


def open_pieces(index: Path) -> Pieces:
    """The pieces that a metadata.db lists; SourceError if it cannot be read."""
    folder = index.parent
    try:
        os.close(open_file(index))  # no pipe or device is opened by SQLite
        with closing(sqlite3.connect(f"{index.absolute().as_uri()}?mode=ro", uri=True)) as database:
            items = _rows(database, "items", "shard, shard_index")
            numbers = {shard for shard, _ in items}
            if not all(isinstance(number, int) for number in numbers):
                raise SourceError("a shard has no number", where=index)
            shards = {n: _rows(database, f"shard_{n:d}", "offset, size") for n in numbers}
        locations = tuple((folder / f"shard_{n}.bin", *shards[n][i]) for n, i in items)
        if any(not isinstance(number, int) or number < 0 for _, *numbers in locations for number in numbers):
            raise SourceError("an offset or a size is not a number", where=index)
    except (sqlite3.Error, OSError, LookupError, TypeError, UnicodeDecodeError) as error:
        raise SourceError(f"not an index of diffusion-pipe: {error}", where=index) from None
    return Pieces(folder, locations)


def _rows(database: sqlite3.Connection, table: str, columns: str) -> list[Any]:
    """Rows of a table that is stored: a view may compute forever."""
    if not database.execute("SELECT 1 FROM sqlite_schema WHERE name = ? AND rootpage > 0", (table,)).fetchone():
        raise sqlite3.DatabaseError(f"it has no table {table}")
    return database.execute(f"SELECT {columns} FROM {table} ORDER BY rowid").fetchall()


def _text_of(bucket: Path, latents: Pieces) -> Pieces:
    """The embeddings of a size, in the order of its latents and their captions."""
    indexes = sorted(bucket.glob(f"text_embeddings_*/{INDEX}"))
    size = SIZE_FOLDER.fullmatch(bucket.name)
    shared_folder = bucket.with_name(f"ar_frames_{size['ratio']}_{size['frames']}" if size else "ar_frames")
    shared = sorted(shared_folder.glob(f"text_embeddings_*/{INDEX}"))
    found = indexes or shared
    if len(found) != 1:
        raise SourceError(
            "a cache of Qwen-Image has the embeddings of one text encoder",
            where=bucket,
            expected=f"text_embeddings_1/{INDEX}",
            found=", ".join(path.parent.name for path in found) or "none",
        )
    text = open_pieces(found[0])
    if indexes:
        return text
    places: dict[tuple[object, ...], list[tuple[Path, int, int]]] = defaultdict(list)
    for i, location in enumerate(text.locations):
        places[tuple(text.load(i).get("image_spec") or ())].append(location)
    specs = (tuple(latents.load(i).get("image_spec") or ()) for i in range(len(latents.locations)))
    return Pieces(text.folder, tuple(location for spec in specs for location in places.get(spec, ())))


# ---- diffusion pipe --------------------------------------------------------------------------------------------------
# Caches for diffusion-pipe with at most one control: the mirror of `qwen_cache.trainers.diffusion_pipe`.
#
# Read in tdrussell/diffusion-pipe 8f83dbf: utils/cache.py, utils/dataset.py and models/qwen_image.py. With
# `--trust_cache` its training opens no image. Below `cache/qwen_image` it reads, for samples of width / height = AR:
#
#     metadata/grouping_keys.json            [[AR, 1], …]
#     metadata/grouped_metadata_<AR>_1/      a saved `datasets.Dataset` of the samples, by image_spec
#     cache_<AR>x<width>x<height>x1/latents/     pieces in the order of that dataset after its own shuffle
#     ar_frames_<AR>_1/text_embeddings_1/        pieces in the order of that dataset
#
# It deletes pieces whose fingerprint is not that of the dataset, and adopts those that have none yet. The empty prompt
# of `uncond_text_embeddings_1` is without images there; it is left to diffusion-pipe, which loads its text encoder for
# it once.

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
    """True if diffusion-pipe can hold the images of a sample."""
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
    seed = int(hashlib.md5(str(bucket).encode(), usedforsecurity=False).hexdigest(), 16) % 10**9  # its own
    order = datasets.Dataset.from_dict({"i": list(range(len(named)))}).shuffle(seed=seed)["i"]
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
