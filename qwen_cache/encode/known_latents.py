"""Latents that caches have: a sample of which only the prompt or one image is new takes the others from there.

With equal recipes, an image at one size has the same latents in every sample. They are checked by their hashes. From
object storage a build reads the range of the tensor: 0.5 MB for a megapixel (4,096 tokens × 64 × 2 bytes). A service
uses local caches alone, as it reads latents between two samples.

The text encoder reads the images again for each new prompt, unless the row before had the same ones: the keys and
values to continue from are not stored. For an image at a megapixel they would be 77 MB (28 layers × 2 × 512 values × 2
bytes × 1,350 rows).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.encode.builder import BuildJob, other_caches
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.format.cache import LocalShards, RangedShards, Sample, SampleBytes
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.index import REJECTED, REJECTED_SHAPE
from qwen_cache.format.rows import IntArray, KeyedRows, Keys, Words, hash_words
from qwen_cache.format.update import Existing
from qwen_cache.sources.sizes import Size, img_shapes
from qwen_cache.storage.remote import is_remote

if TYPE_CHECKING:
    import torch

ImageAt = tuple[str, tuple[int, ...]]
"""The hash of an image file, and `(1, h, w)` in tokens."""


@dataclass(frozen=True)
class KnownLatents:
    """The places of the latents of images."""

    caches: Sequence[tuple[KeyedRows, SampleBytes]] = ()
    places: dict[ImageAt, tuple[int, int]] = field(default_factory=dict)
    """The number of a cache, and the position of a row in it."""

    @classmethod
    def of(cls, job: BuildJob, existing: Existing, samples: Sequence[PlannedSample]) -> KnownLatents:
        """The latents of the images of `samples`, in the cache itself and in those of `cache.reuse`."""
        found = cls(list(_caches(job, existing)) if samples else [])
        wanted = {image for sample in samples for image in _images(sample)} if found.caches else set()
        for number, (rows, _) in enumerate(found.caches):
            for image, position in _positions(rows, wanted):
                found.places.setdefault(image, (number, position))
        return found

    def covers(self, sample: PlannedSample) -> bool:
        """True if the latents of all images of a sample are known."""
        return bool(sample.images) and all(image in self.places for image in _images(sample))

    def find(self, digest: str, size: Size) -> Callable[[], torch.Tensor] | None:
        """A function that reads the latents `[S, 64]` of an image at a size in pixels; None if they are not known.

        It raises FormatError if they are damaged.
        """
        (shape,) = img_shapes([size])
        place = self.places.get((digest, shape))
        if place is None:
            return None
        (rows, shards), position = self.caches[place[0]], place[1]
        return lambda: _read(Sample(rows.row(position), shards), digest, shape)


class ImageRows:
    """Every image of the rows of a local cache, in 24 bytes each: for a service, which is asked for images one by one.

    A build knows all of them beforehand, and looks for them in one pass.
    """

    def __init__(self, rows: KeyedRows, shards: LocalShards) -> None:
        self._rows, self._shards = rows, shards
        targets, controls, shapes = (
            rows.column(name).combine_chunks() for name in ("target", "controls", "img_shapes")
        )
        has_rejected = REJECTED in rows.table.column_names
        rejected = rows.column(REJECTED).combine_chunks() if has_rejected else pa.nulls(len(rows), pa.string())
        of_rejected = np.flatnonzero(rejected.is_valid().to_numpy(zero_copy_only=False))
        ends = shapes.offsets.to_numpy()[1:]
        of_target = np.flatnonzero(targets.is_valid().to_numpy(zero_copy_only=False))
        of_controls = np.asarray(pc.list_parent_indices(controls))
        at_end = (ends - controls.offsets.to_numpy()[1:])[of_controls] + np.arange(len(of_controls))  # after the target
        digests = pa.chunked_array([targets.drop_null(), pc.list_flatten(controls), rejected.drop_null()], pa.string())
        chosen = np.concatenate([shapes.offsets.to_numpy()[:-1][of_target], at_end])
        sizes = np.asarray(pc.list_flatten(pc.list_flatten(shapes)), np.int64).reshape(-1, 3)[chosen]
        if has_rejected:
            of_each = rows.column(REJECTED_SHAPE).combine_chunks()
            sizes = np.concatenate([sizes, np.asarray(pc.list_flatten(of_each), np.int64).reshape(-1, 3)])
        self._found = Keys(
            _with_sizes(hash_words(digests, rows.where), sizes), np.concatenate([of_target, of_controls, of_rejected])
        )

    def find(self, digest: str, size: Size) -> Callable[[], torch.Tensor] | None:
        """The latents, as from `KnownLatents.find`."""
        (shape,) = img_shapes([size])
        words = _with_sizes(hash_words(pa.chunked_array([[digest]], pa.string()), ""), np.array([shape]))
        (position,) = self._found.find_all(words)
        if position < 0:
            return None
        return lambda: _read(Sample(self._rows.row(int(self._rows.positions[position])), self._shards), digest, shape)


def _with_sizes(words: Words, sizes: IntArray) -> Words:
    """`[N, 2]`: the hashes of images as numbers, changed by their sizes `[N, 3]`."""
    words[:, 1] ^= (sizes[:, 1] << 32 | sizes[:, 2]).astype(np.uint64)
    return words


def _read(sample: Sample, digest: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The latents of one of its images."""
    meta, begin = sample.row.meta, 0
    if (meta.inputs.target, meta.img_shapes[0]) == (digest, shape):
        return sample.stored("image_latents")
    if (meta.inputs.rejected, meta.rejected_shape) == (digest, shape):
        return sample.stored("rejected_latents")
    images = zip(meta.inputs.controls, meta.img_shapes[1:], strict=True)
    for image in images:
        if image == (digest, shape):
            break
        begin += image[1][1] * image[1][2]
    return sample.stored("control_latents")[begin : begin + shape[1] * shape[2]]


def _images(sample: PlannedSample) -> Iterator[ImageAt]:
    for _, digest, size in sample.images:
        yield digest, img_shapes([size])[0]


def _caches(job: BuildJob, existing: Existing) -> Iterator[tuple[KeyedRows, SampleBytes]]:
    """The caches that may have them, those of this machine before those elsewhere."""
    others, folder = other_caches(job), job.folder
    own = RangedShards(folder, existing.manifest) if is_remote(folder) else LocalShards(folder, existing.manifest)
    found: list[tuple[KeyedRows, SampleBytes]] = [(existing.rows, own), *others.local, *others.ranged]
    return of_recipe(job, sorted(found, key=lambda each: isinstance(each[1], RangedShards)))


Shards = TypeVar("Shards", bound=SampleBytes)


def of_recipe(job: BuildJob, caches: Sequence[tuple[KeyedRows, Shards]]) -> Iterator[tuple[KeyedRows, Shards]]:
    """The rows of each cache with the recipe of a job, and its shards. Format v1 has no sizes to find latents by."""
    recipe = recipe_id(job.recipe)
    for rows, shards in caches if job.format_version > 1 else []:
        if len(mine := rows.where_in(recipe=[recipe])):
            yield mine, shards


def _positions(rows: KeyedRows, wanted: Set[ImageAt]) -> Iterator[tuple[ImageAt, int]]:
    """The images among `wanted` that these rows have, each with the position of its row."""
    asked = pa.array(list({digest for digest, _ in wanted}), pa.string())
    has_any = pc.is_in(rows.column("target"), asked).to_numpy()
    optional = [name for name in (REJECTED, REJECTED_SHAPE) if name in rows.table.column_names]
    if optional:
        has_any |= pc.is_in(rows.column(REJECTED), asked).to_numpy()
    of_rows = rows.column("controls").combine_chunks()
    found = pc.is_in(pc.list_flatten(of_rows), asked).to_numpy(zero_copy_only=False)
    has_any[np.asarray(pc.list_parent_indices(of_rows))[found]] = True
    chosen = rows.at(rows.positions[np.flatnonzero(has_any)])
    columns = (chosen.each(name) for name in ("target", "controls", "img_shapes", *optional))
    for position, target, controls, shapes, *rejected in zip(chosen.positions.tolist(), *columns, strict=True):
        images = [*([target] if target else []), *controls]
        sized = [*zip(images, shapes[len(shapes) - len(images) :], strict=True)]
        sized += [(rejected[0], rejected[1])] if rejected and rejected[0] else []
        for digest, shape in sized:
            if (image := (digest, tuple(shape))) in wanted:
                yield image, position
