"""Reading a cache: `open_cache`, its samples by position or key, their tensors without a copy.

Tensors are views of the mapped shard; nothing is read until they are touched, and the bytes of a tensor are checked
against its hash when it is asked for. Importing this imports no torch; asking for a tensor does.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from qwen_cache.format import directory
from qwen_cache.format.codec import decode
from qwen_cache.format.errors import ChecksumError, IndexFileError, QwenCacheError, SampleKeyError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index
from qwen_cache.format.manifest import Manifest, Recipe
from qwen_cache.format.sample import ImgShapes

if TYPE_CHECKING:
    import torch

OPEN_SHARDS = 64  # each mapping holds a file descriptor; the usual limit is 1024


def open_cache(path: str | Path, *, recipe: str | None = None) -> Cache:
    """Open the cache in the folder `path`.

    A cache can hold several recipes of one source (another model, another resolution); then `recipe` must name one.
    Raises FormatError when the folder is not a cache, is of an unknown version, or contradicts itself.
    """
    folder = Path(path)
    manifest, index = directory.load(folder)
    name = _choose(manifest, recipe, folder)
    table = read_index(index, manifest.format_version, str(folder / INDEX_NAME))
    if len(manifest.recipes) > 1:
        table = table.filter(pa.compute.equal(table["recipe"], manifest.recipes[name].id)).combine_chunks()
    if table.num_rows != manifest.recipes[name].samples:
        raise IndexFileError(
            f"the index does not have the samples of recipe {name!r} that the manifest counts",
            where=folder / INDEX_NAME,
            expected=manifest.recipes[name].samples,
            found=table.num_rows,
        )
    return Cache(folder, manifest, name, table)


class Cache:
    """An opened cache: a sequence of samples in the order of the source; pickles without its open files."""

    def __init__(self, folder: Path, manifest: Manifest, recipe_name: str, table: pa.Table) -> None:
        self.folder, self.manifest, self.recipe_name, self.table = folder, manifest, recipe_name, table
        self._shards: OrderedDict[str, memoryview] = OrderedDict()

    @property
    def format_version(self) -> int:
        return self.manifest.format_version

    @property
    def recipe(self) -> Recipe:
        return self.manifest.recipes[self.recipe_name]

    @property
    def identity(self) -> str:
        """The hash of all keys in order."""
        return self.recipe.identity

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, which: int | str) -> Sample:
        """A sample by its position (negative counts from the end) or by its key."""
        return Sample(self.row(self._position(which)), self.shard)

    def row(self, position: int) -> IndexRow:
        """What the index says of the sample at `position`, checked for consistency."""
        record = self.table.slice(position, 1).to_pylist()[0]
        return index_row(record, self.format_version, str(self.folder / INDEX_NAME))

    def rows(self) -> Iterator[IndexRow]:
        """What the index says of every sample."""
        where = str(self.folder / INDEX_NAME)
        for batch in self.table.to_batches(max_chunksize=1024):
            for record in batch.to_pylist():
                yield index_row(record, self.format_version, where)

    def shard(self, name: str) -> memoryview:
        """The bytes of a shard, mapped."""
        data = self._shards.pop(name, None)
        if data is None:
            data = map_file(directory.shard_path(self.folder, name))
        self._shards[name] = data
        while len(self._shards) > OPEN_SHARDS:
            self._shards.popitem(last=False)  # tensors that still use it keep the mapping alive
        return data

    def __reduce__(self) -> tuple[Callable[..., Cache], tuple[Any, ...]]:
        return _reopen, (self.folder, self.recipe_name)

    def _position(self, which: int | str) -> int:
        if isinstance(which, str):
            if which not in self._positions:
                raise KeyError(f"no sample with the key {which!r} in {self.folder}")
            return self._positions[which]
        if not -len(self) <= which < len(self):
            raise IndexError(f"sample {which} of {len(self)}")
        return which % len(self)

    @cached_property
    def _positions(self) -> dict[str, int]:
        keys = self.table["key"].to_pylist()
        positions = {key: i for i, key in enumerate(keys)}
        if len(positions) != len(keys):
            raise SampleKeyError("a key stands twice in the index", where=self.folder / INDEX_NAME)
        return positions


@dataclass(frozen=True)
class Sample:
    """One sample. `sample["image_latents"]` and the like are torch tensors; `tensors()` is all of them."""

    row: IndexRow
    _shard: Callable[[str], memoryview]

    @property
    def key(self) -> str:
        return self.row.meta.key

    @property
    def name(self) -> str:
        """What the source calls it."""
        return self.row.name

    @property
    def prompt(self) -> str:
        return self.row.meta.prompt

    @property
    def img_shapes(self) -> ImgShapes:
        """`(1, h, w)` in units of 16 pixels: the target, then each control."""
        return self.row.meta.img_shapes

    def buffer(self, name: str) -> memoryview:
        """The bytes of a tensor, checked against their hash; a view of the shard, unless they are compressed."""
        meta, entry = self.row.meta, self.row.entry
        if name not in meta.tensors:
            raise KeyError(f"sample {self.key} has no {name!r}; it has {', '.join(meta.tensors)}")
        spec, offset = meta.tensors[name], entry.tensor_offsets()[name]
        stored = self._shard(self.row.shard)[offset : offset + spec.stored_bytes]
        what = f"{name} of sample {self.key}"
        if stored.nbytes != spec.stored_bytes:
            found = f"{stored.nbytes} of {spec.stored_bytes} bytes"
            raise ChecksumError(f"{what} reaches beyond its shard", where=self.row.shard, found=found)
        data = decode(stored, spec, f"{self.row.shard}: {what}")
        if (found := content_hash(data)) != spec.xxh3_128:
            raise ChecksumError(
                f"{what} does not have the bytes that were written",
                where=self.row.shard,
                expected=spec.xxh3_128,
                found=found,
            )
        return data

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, without a copy."""
        import torch

        data = self.buffer(name)
        spec = self.row.meta.tensors[name]
        dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[spec.dtype]
        return torch.frombuffer(data, dtype=dtype).view(spec.shape)

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor: without a copy, but for `empty_prompt_embeds`, which v2 stores without its shared prefix."""
        import torch

        prefix = self.row.meta.prefix_length
        if name == "empty_prompt_embeds" and prefix:
            return torch.cat([self.stored("prompt_embeds")[:prefix], self.stored(name)])
        return self.stored(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name."""
        return {name: self[name] for name in self.row.meta.tensors}


def map_file(path: Path) -> memoryview:
    """The bytes of a file, mapped privately; torch warns of tensors over read-only memory, so it is copy-on-write."""
    with open(path, "rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _reopen(folder: Path, recipe: str) -> Cache:
    return open_cache(folder, recipe=recipe)


def _choose(manifest: Manifest, recipe: str | None, folder: Path) -> str:
    names = sorted(manifest.recipes)
    if recipe is None and len(names) == 1:
        return names[0]
    if recipe not in manifest.recipes:
        what = (
            "this cache holds several recipes, so one must be named" if recipe is None else f"no recipe {recipe!r} here"
        )
        raise QwenCacheError(what, where=folder, expected=" or ".join(names), do="set cache.recipe")
    assert recipe is not None
    return recipe
