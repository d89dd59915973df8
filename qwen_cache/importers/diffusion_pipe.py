"""Caches of diffusion-pipe for Qwen-Image and Qwen-Image-Edit with one control: shards of pickles with an SQLite index.

Read in tdrussell/diffusion-pipe, utils/cache.py (0b78c6b), utils/dataset.py (0784ca8) and models/qwen_image.py
(41fa128). Below `<dataset>/cache/qwen_image` there is one folder per size:

    cache_<size>/latents/            metadata.db, shard_<N>.bin: latents [16, 1, H, W], optional control_latents of
                                     the same shape, mask, image_spec, caption (a list)
    cache_<size>/text_embeddings_1/  the same pair of files: prompt_embeds [L, D], image_spec; one per caption

Where sizes come from `enable_ar_bucket` (8f83dbf), all sizes of a ratio of width and height share their embeddings, in
another order: `ar_frames_<ratio>_<frames>/text_embeddings_1/`; image_spec says which belong together.

metadata.db has `items(shard, shard_index)` and for each shard `shard_<N>(offset, size)`; each piece is a file of
`torch.save`. Embeddings follow the order of the latents and their captions, which image_spec confirms. Latents are the
mode, normalised; embeddings are unpadded. The empty prompt was encoded without the control image
(`uncond_text_embeddings_1`), so it is not imported. A loss mask is refused: the format cannot store it.
"""

from __future__ import annotations

import io
import os
import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import SourceError
from qwen_cache.importers.source import FoundSample, ImportedSample, Options, check_tensor, load_pickled, pack_latents
from qwen_cache.storage.files import open_file

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
    return text if indexes else _in_order(text, latents)


def _in_order(text: Pieces, latents: Pieces) -> Pieces:
    """The pieces of `text` whose images are in `latents`, in the order there."""
    places: dict[tuple[object, ...], list[tuple[Path, int, int]]] = defaultdict(list)
    for i, location in enumerate(text.locations):
        places[tuple(text.load(i).get("image_spec") or ())].append(location)
    specs = (tuple(latents.load(i).get("image_spec") or ()) for i in range(len(latents.locations)))
    return Pieces(text.folder, tuple(location for spec in specs for location in places.get(spec, ())))
