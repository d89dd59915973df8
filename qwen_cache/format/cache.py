"""Reading a cache: shards, samples by position, by key, by name, and alone."""

from __future__ import annotations

import difflib
import errno
import json
import os
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import (
    ChecksumError,
    CodecError,
    ConfigError,
    DisagreementError,
    IndexFileError,
    MemberError,
    QwenCacheError,
    SampleKeyError,
    ShardError,
)
from qwen_cache.extras import install_command
from qwen_cache.format import directory
from qwen_cache.format.directory import load_index
from qwen_cache.format.identity import Slider, content_hash, copy_hashed
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, record_reader
from qwen_cache.format.manifest import MANIFEST_NAME, Fields, Manifest, Recipe
from qwen_cache.format.rows import KeyedRows, Keys, hash_words, taken
from qwen_cache.format.sample import (
    WITHOUT_PREFIX,
    ImgShape,
    ImgShapes,
    SampleMeta,
    TensorSpec,
    decode,
    parse_sample,
)
from qwen_cache.format.shard import ALIGNMENT, MAX_HEADER, Entry, check_tensors, safetensors_header, tensor_data
from qwen_cache.settings.sections import LOCAL_COPIES_SIZE, CacheConfig
from qwen_cache.storage.files import is_cut_short
from qwen_cache.storage.remote import FETCHERS, OPEN_COPIES, Copy, LocalCopies, Location, Url, is_remote, location

if TYPE_CHECKING:
    import torch

# ---- shards ----------------------------------------------------------------------------------------------------------
# The bytes of shards: mapped from a local folder, from local copies of a remote cache, or read by ranges.

OPEN_SHARDS = 64  # kept mapped for the next sample; mapping one again takes about 10 µs


class SampleBytes(Protocol):
    """The source of a sample's bytes."""

    @property
    def folder(self) -> Location: ...

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview: ...

    def renew(self, row: IndexRow) -> bool: ...


class LocalShards:
    """The shards of a local folder, mapped."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._listed = {shard.name for shard in manifest.shards}
        self._open: OrderedDict[str, memoryview] = OrderedDict()

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The mapped shard of a sample."""
        return self.map(row.shard)

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample; fewer if it ends before."""
        return self.map(row.shard)[begin:end]

    def map(self, name: str) -> memoryview:
        """A mapped shard; ShardError if it is missing or not in the manifest."""
        data = self._open.pop(name, None)
        if data is None:
            directory.shard_paths(self.folder, name)  # refuses names that lead out of the folder
            if name not in self._listed:
                raise ShardError("the index names a shard that is not in the manifest", where=self.folder / name)
            data = self._map(name)
        self._open[name] = data
        while len(self._open) > OPEN_SHARDS:
            self._open.popitem(last=False)  # tensors that still use it keep the mapping alive
        return data

    def _map(self, name: str) -> memoryview:
        try:
            return directory.map_shard(self.folder, name)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
        self._open.clear()
        try:
            return directory.map_shard(self.folder, name)
        except OSError as error:
            if error.errno != errno.ENOMEM:
                raise
            raise QwenCacheError(
                "the system maps no more shards: tensors that are views of them keep too many mapped",
                where=self.folder / name,
                found=error.strerror,
                do="keep copies of tensors (`tensor.clone()`), or raise vm.max_map_count or `ulimit -v`",
            ) from None

    def renew(self, row: IndexRow) -> bool:
        """False: there is no other copy of a sample."""
        return False

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Does nothing: local files need no fetching."""

    def stop_prefetch(self) -> None:
        """Does nothing."""


class RemoteShards:
    """The shards of a remote cache. Safe to use from many threads; after a fork, the child starts with a new state."""

    def __init__(self, folder: Url, manifest: Manifest, copies: LocalCopies) -> None:
        self.folder, self.copies = folder, copies
        self._sizes = {shard.name: shard.bytes for shard in manifest.shards}
        self._begin()

    def _begin(self) -> None:
        self._process = os.getpid()
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(FETCHERS, "fetch")
        self._open: OrderedDict[str, Copy] = OrderedDict()
        self._fetching: dict[tuple[Copy, int], Future[None]] = {}
        self._written = self.copies.size  # bytes since the copies were last counted; so the first fetch counts them
        self._has_ranges = False

    def bytes_of(self, row: IndexRow) -> memoryview:
        """The mapped copy of a sample's shard, once the sample has been fetched."""
        copy = self._copy(row)
        if not copy.has(row.entry.offset):
            self._request(row, copy).result()
        return copy.data

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample, which is fetched."""
        return self.bytes_of(row)[begin:end]

    def renew(self, row: IndexRow) -> bool:
        """Fetch a sample again whose bytes do not match the index; ChecksumError if they still do not."""
        self._fetch(row, self._copy(row))
        return True

    def prefetch(self, rows: Iterable[IndexRow]) -> None:
        """Start to fetch the samples that have no copy yet; a failure is raised when the sample is read."""
        for row in rows:
            copy = self._copy(row)
            if not copy.has(row.entry.offset):
                self._request(row, copy)

    def stop_prefetch(self) -> None:
        """Cancel requested fetches that have not started."""
        for future in list(self._fetching.values()):
            future.cancel()

    def _request(self, row: IndexRow, copy: Copy) -> Future[None]:
        sample = copy, row.entry.offset
        with self._lock:
            future = self._fetching.get(sample)
            if future is None:
                future = self._fetching[sample] = self._pool.submit(self._fetch, row, copy)
        future.add_done_callback(lambda _: self._fetching.pop(sample, None))
        return future

    def _fetch(self, row: IndexRow, copy: Copy) -> None:
        if not self._has_ranges:
            manifest = self.folder / MANIFEST_NAME  # a small file: without ranges, the server would send whole shards
            manifest.require_ranges()
            self._has_ranges = True
        entry, where = row.entry, self.folder / row.shard
        data = memoryview(self._read(row.shard, entry.offset, entry.offset + entry.length))
        check_tensors(entry.moved(0), data, str(where), row.label)
        copy.write(entry.offset, data)
        with self._lock:
            self._written += data.nbytes
            crowded = self._written > self.copies.size / 50  # so five processes cannot exceed the bound by much
            self._written = 0 if crowded else self._written
        if crowded:
            self.copies.evict()
            with self._lock:  # removed copies are closed, so that their disk space is freed
                for name in [name for name, copy in self._open.items() if copy.is_removed()]:
                    del self._open[name]

    def _read(self, name: str, begin: int, end: int) -> bytes:
        data = directory.find_shard(self.folder, name, lambda url: url.read_range(begin, end))
        if data is None:
            raise directory.missing_shard(self.folder, name)
        return data

    def _copy(self, row: IndexRow) -> Copy:
        if self._process != os.getpid():
            self._begin()
        directory.shard_paths(self.folder, row.shard)  # refuses names that lead out of a folder
        size = self._sizes.get(row.shard, 0)
        if row.entry.offset < 0 or row.entry.offset + row.entry.length > size:
            what = f"sample {row.label} reaches beyond its shard"
            raise DisagreementError(what, where=self.folder / row.shard, expected=f"at most {size} bytes")
        with self._lock:
            copy = self._open.pop(row.shard, None)
            if copy is None or copy.is_removed():
                copy = self.copies.open(row.shard, size)
            self._open[row.shard] = copy
            while len(self._open) > OPEN_COPIES:
                self._open.popitem(last=False)  # tensors that still use it keep the mapping alive
        copy.touch()
        return copy


def shards_of(folder: Location, manifest: Manifest, copies: LocalCopies) -> LocalShards | RemoteShards:
    """The shards of a cache, with those on this machine mapped, and `copies` of others."""
    return RemoteShards(folder, manifest, copies) if is_remote(folder) else LocalShards(folder, manifest)


class RangedShards:
    """The shards of a remote cache, for a few tensors of a sample: their ranges are read, and not kept."""

    def __init__(self, folder: Url, manifest: Manifest) -> None:
        self.folder = folder
        self._listed = {shard.name for shard in manifest.shards}
        self._has_ranges = False

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        """These bytes of the shard of a sample; ShardError if it is missing or not in the manifest."""
        directory.shard_paths(self.folder, row.shard)  # refuses names that lead out of the folder
        if row.shard not in self._listed:
            raise ShardError("the index names a shard that is not in the manifest", where=self.folder / row.shard)
        if not self._has_ranges:
            (self.folder / MANIFEST_NAME).require_ranges()  # a small file: otherwise, whole shards would be sent
            self._has_ranges = True
        data = directory.find_shard(self.folder, row.shard, lambda url: url.read_range(begin, end))
        if data is None:
            raise directory.missing_shard(self.folder, row.shard)
        return memoryview(bytearray(data))  # torch warns of bytes, which cannot be written

    def renew(self, row: IndexRow) -> bool:
        """False: nothing is kept that could be damaged."""
        return False


# ---- cache -----------------------------------------------------------------------------------------------------------
# Read a cache: `open_cache`, samples by position or key, tensors without a copy.
#
# Tensors are views of the mapped shard: nothing is read before it is used, and each access to a tensor checks its bytes
# against its hash. A remote cache is read through local copies (`local_copies`). Only torch tensors need torch;
# `Sample.numpy` gives the same values as NumPy arrays.

ROWS_KEPT = 1 << 14  # parsed rows in memory, at 4 kB each; more than most fine-tuning datasets have
NUMPY_DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}


def open_cache(
    path: str | Location,
    *,
    recipe: str | None = None,
    local_copies: str | Path | None = None,
    local_copies_size: int = LOCAL_COPIES_SIZE,
) -> Cache:
    """Open the cache at `path`: a folder, or any URL that fsspec reads.

    If a cache holds several recipes of one source (other models, other resolutions), `recipe` must name one. Samples of
    a remote cache are stored in the folder `local_copies` (by default in the user's cache folder), up to
    `local_copies_size` bytes. Raises FormatError if there is no cache, its version is unknown, or it contradicts
    itself; QwenCacheError if the recipe is ambiguous or unknown, or a remote file cannot be read.
    """
    return _open(path, recipe, LocalCopies.of(local_copies, local_copies_size))


def open_configured(config: CacheConfig, path: str | Location | None = None, *, commit: Path | None = None) -> Cache:
    """Open `config.path`, or `path` instead, with the recipe and the local copies of `config`.

    `commit` is a folder with manifest and index of an earlier commit, to open the cache as it was then.
    """
    return _open(config.path if path is None else path, config.recipe, LocalCopies.of_settings(config), commit)


def open_recipes(path: str | Location, copies: LocalCopies) -> dict[str, Cache]:
    """A cache for every recipe, by its name, sorted."""
    folder = location(path)
    manifest, table = load_index(folder)
    return {name: _of_recipe(folder, manifest, table, name, copies) for name in sorted(manifest.recipes)}


def _open(path: str | Location, recipe: str | None, copies: LocalCopies, commit: Path | None = None) -> Cache:
    folder = location(path)
    manifest, table = load_index(folder if commit is None else commit)
    names = sorted(manifest.recipes)
    if recipe is None and len(names) == 1:
        recipe = names[0]
    if recipe is None or recipe not in manifest.recipes:
        what = "this cache holds several recipes; name one of them" if recipe is None else f"no recipe {recipe!r} here"
        raise QwenCacheError(what, where=folder, expected=" or ".join(names), do="set cache.recipe")
    cache = _of_recipe(folder, manifest, table, recipe, copies)
    cache.commit = commit
    return cache


def _of_recipe(folder: Location, manifest: Manifest, table: pa.Table, name: str, copies: LocalCopies) -> Cache:
    if table["recipe"].unique().to_pylist() != [manifest.recipes[name].id]:
        is_ours = pc.fill_null(pc.equal(table["recipe"], manifest.recipes[name].id), False)
        table = taken(table, np.flatnonzero(is_ours.to_numpy()))
    if table.num_rows != manifest.recipes[name].samples:
        raise IndexFileError(
            f"index and manifest have different numbers of samples of recipe {name!r}",
            where=folder / INDEX_NAME,
            expected=manifest.recipes[name].samples,
            found=table.num_rows,
        )
    return Cache(folder, manifest, name, table, copies)


class Cache:
    """An opened cache, as `open_cache` returns it: the samples of one recipe, in the order of the source.

    `len(cache)` is their number; `cache[0]`, `cache[-1]` and `cache[key]` are samples, read when used.
    It can be pickled, without its open files.
    """

    def __init__(
        self, folder: Location, manifest: Manifest, recipe_name: str, table: pa.Table, copies: LocalCopies
    ) -> None:
        self.folder, self.manifest, self.recipe_name, self.table = folder, manifest, recipe_name, table
        self.copies = copies
        self.commit: Path | None = None
        """The folder of manifest and index, if that is not the cache itself."""
        self._record = record_reader(table)
        self._rows: dict[int, IndexRow] = {}
        self.shards = shards_of(folder, manifest, copies)

    @property
    def format_version(self) -> int:
        """1 or 2."""
        return self.manifest.format_version

    @property
    def recipe(self) -> Recipe:
        """How the samples were made, their number, and the hash of their keys."""
        return self.manifest.recipes[self.recipe_name]

    @property
    def identity(self) -> str:
        """The hash of all keys in order, for one recipe."""
        return self.recipe.identity

    @property
    def prompt_embeds_width(self) -> int:
        """`D`, the width of the text encoder, from the first sample."""
        return self.row(0).meta.tensors["prompt_embeds"].shape[1]

    def __len__(self) -> int:
        return int(self.table.num_rows)

    def __iter__(self) -> Iterator[Sample]:
        return (self[i] for i in range(len(self)))

    def __getitem__(self, which: int | str) -> Sample:
        """A sample by position (negative from the end) or key.

        Raises IndexError or KeyError if it does not exist, FormatError if its index row contradicts itself.
        """
        if isinstance(which, str):
            if (position := self.keys.find(which)) < 0:
                raise KeyError(f"no sample with the key {which!r} in {self.folder}")
        elif -len(self) <= which < len(self):
            position = which % len(self)
        else:
            raise IndexError(f"sample {which} of {len(self)}")
        return Sample(self.row(position), self.shards)

    def prefetch(self, positions: Iterable[int]) -> None:
        """Start to fetch the samples at `positions` (from 0) in the background; does nothing for a local cache."""
        self.shards.prefetch(self.row(position) for position in positions)

    def stop_prefetch(self) -> None:
        """Cancel fetches of `prefetch` that have not started."""
        self.shards.stop_prefetch()

    def row(self, position: int) -> IndexRow:
        """The index row of the sample at `position`, from 0; FormatError if it contradicts itself."""
        if (row := self._rows.get(position)) is None:
            row = index_row(self._record(position), self.format_version, str(self.folder / INDEX_NAME))
            if len(self._rows) < ROWS_KEPT:
                self._rows[position] = row
        return row

    def rows(self) -> Iterator[IndexRow]:
        """The index rows of all samples, in order; FormatError for a row that contradicts itself."""
        where = str(self.folder / INDEX_NAME)
        for batch in self.table.to_batches(max_chunksize=1024):
            for record in batch.to_pylist():
                yield index_row(record, self.format_version, where)

    @property
    def keyed_rows(self) -> KeyedRows:
        """The index rows by key, parsed when asked for."""
        where = str(self.folder / INDEX_NAME)
        return KeyedRows(self.table, self.format_version, where, np.arange(len(self)))

    def shard(self, name: str) -> memoryview:
        """The mapped bytes of a shard of a local cache; QwenCacheError for a remote cache."""
        if isinstance(self.shards, RemoteShards):
            raise QwenCacheError("whole shards of a remote cache cannot be read", where=self.folder, found=name)
        return self.shards.map(name)

    def __reduce__(self) -> tuple[Callable[..., Cache], tuple[Any, ...]]:
        return _open, (self.folder, self.recipe_name, self.copies, self.commit)

    @cached_property
    def keys(self) -> Keys:
        """The positions of the samples by key; SampleKeyError if a key occurs twice."""
        where = self.folder / INDEX_NAME
        keys = Keys(hash_words(self.table["key"], where))
        if len(keys.repeated()):
            raise SampleKeyError("a key occurs twice in the index", where=where)
        return keys


@dataclass(frozen=True)
class Sample:
    """One sample. `sample["image_latents"]` is a torch tensor, `sample.numpy("image_latents")` a NumPy array.

    With S image tokens of the target, Sr of the rejected image, Sc of all controls, L, L0, Lp and Ln tokens of the
    prompt, the empty prompt, and the positive and negative prompt of a slider's direction (those of the controls
    included), and D the width of the text encoder, the tensors are:

        image_latents           [S, 64]    normalised and packed (2×2 patches), in raster order; with a target only
        rejected_latents        [Sr, 64]   the same for the image that is worse than the target; optional
        control_latents         [Sc, 64]   the same for all controls, one after another; with controls only
        prompt_embeds           [L, D]     unpadded
        empty_prompt_embeds     [L0, D]    for caption dropout; optional
        slider_positive_embeds  [Lp, D]    of the positive prompt of a slider's direction; optional
        slider_negative_embeds  [Ln, D]    of its negative prompt; both are there, or neither
        edit_mask               [S]        the edited fraction of each token, float32 in 0..1; optional
        attention               [C, h, w]  experimental: of the phrase on the first control, float16 in 0..1; optional
        thumbnails              [n]        the bytes of a JPEG or WebP, uint8; optional

    C is layers × heads; h×w is the text encoder's grid. Latents and embeddings are bfloat16 or float32.

    A tensor is checked whenever it is read. Raises KeyError if the sample does not have it, ChecksumError or CodecError
    (both FormatErrors) if its bytes are damaged, QwenCacheError for a torch tensor if torch is not installed.
    """

    row: IndexRow
    _shards: SampleBytes

    @property
    def key(self) -> str:
        """The xxh3-128 of content and recipe, as 32 hexadecimal digits."""
        return self.row.meta.key

    @property
    def name(self) -> str:
        """The name in the source."""
        return self.row.name

    @property
    def prompt(self) -> str:
        """The instruction, without marks of a phrase."""
        return self.row.meta.prompt

    @property
    def seed(self) -> int | None:
        """The seed of the noise to generate the image from; None if the source has none."""
        return self.row.meta.inputs.seed

    def __contains__(self, name: str) -> bool:
        """True if the sample has this tensor."""
        return name in self.row.meta.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor as it is stored, without reading it: `WITHOUT_PREFIX` are without their shared rows."""
        return self.row.meta.tensors[name].shape

    def dtype(self, name: str) -> str:
        """The dtype of a tensor by safetensors' name, such as BF16, without reading it."""
        return self.row.meta.tensors[name].dtype

    @property
    def img_shapes(self) -> ImgShapes:
        """`(1, h, w)` in tokens of 16×16 pixels: the target, or the image to generate, then each control."""
        return self.row.meta.img_shapes

    @property
    def rejected_shape(self) -> ImgShape | None:
        """`(1, h, w)` in tokens of 16×16 pixels: the rejected image; None if the sample has none."""
        return self.row.meta.rejected_shape

    @property
    def slider(self) -> Slider | None:
        """The positive and the negative prompt of a slider's direction; None if the sample has none."""
        return self.row.meta.slider

    def buffer(self, name: str) -> memoryview:
        """The checked bytes of a tensor, as in `stored`; a view of the shard unless the tensor is compressed."""
        return self._read(name)

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        """Copy a tensor to `out` and check it; `out` is contiguous, on the CPU, of the same shape and of any dtype.

        For the stored dtype the check is almost free: copy and hash read memory once. Raises ValueError for another
        shape, and the errors of any read.
        """
        _require_torch(name)
        import torch

        prefix = self._shared_rows(name)
        if prefix:
            out[:prefix] = self.stored("prompt_embeds")[:prefix]
            out = out[prefix:]
        spec = self.row.meta.tensors[name]
        if out.shape != spec.shape:
            raise ValueError(f"{name} is {list(spec.shape)}, not {list(out.shape)}")
        if out.dtype == _torch_dtype(spec):
            self._read(name, out.view(-1).view(torch.uint8).numpy().data)
        else:
            out.copy_(self.stored(name))

    def _read(self, name: str, target: memoryview | None = None) -> memoryview:
        if name not in self.row.meta.tensors:
            raise KeyError(f"sample {self.row.label} has no {name!r}; it has {', '.join(self.row.meta.tensors)}")
        try:
            return self._checked(name, target)
        except (ChecksumError, CodecError):  # a local copy of a remote shard may be damaged
            if not self._shards.renew(self.row):
                raise
            return self._checked(name, target)

    def _checked(self, name: str, target: memoryview | None) -> memoryview:
        """The bytes of a tensor after a check of their hash, also copied to `target`; ChecksumError, CodecError."""
        spec, offset = self.row.meta.tensors[name], self.row.entry.tensor_offsets()[name]
        stored = self._shards.part(self.row, offset, offset + spec.stored_bytes)
        if stored.nbytes != spec.stored_bytes:
            size = f"{stored.nbytes} of {spec.stored_bytes} bytes"
            raise self._damaged(name, "reaches beyond its shard", found=size)
        if is_cut_short(stored):  # reading it would end the process
            raise self._damaged(name, "cannot be read: its shard became shorter")
        data = stored
        if spec.codec is not None:
            data = decode(stored, spec, f"{self._where()}: {name} of sample {self.row.label}")
        digest = content_hash(data) if target is None else copy_hashed(data, target)
        if digest != spec.xxh3_128:
            what = "does not have the bytes that were written"
            raise self._damaged(name, what, expected=spec.xxh3_128, found=digest)
        return data

    def _damaged(self, name: str, what: str, *, expected: str | None = None, found: str | None = None) -> ChecksumError:
        what = f"{name} of sample {self.row.label} {what}"
        return ChecksumError(what, where=self._where(), expected=expected, found=found)

    def _where(self) -> Location:
        return self._shards.folder / self.row.shard

    def stored(self, name: str) -> torch.Tensor:
        """A tensor as it is stored, without a copy: `WITHOUT_PREFIX` of v2 are without their shared prefix."""
        _require_torch(name)
        import torch

        data, spec = self.buffer(name), self.row.meta.tensors[name]
        return torch.frombuffer(data, dtype=_torch_dtype(spec)).view(spec.shape)

    def stored_numpy(self, name: str) -> npt.NDArray[Any]:
        """Like `stored`, as a read-only array."""
        data, spec = self.buffer(name), self.row.meta.tensors[name]
        array = np.frombuffer(data, NUMPY_DTYPES[spec.dtype]).reshape(spec.shape)
        array.flags.writeable = False
        return array

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor, without a copy; only `WITHOUT_PREFIX` of v2 are joined with their shared prefix."""
        stored = self.stored(name)
        if prefix := self._shared_rows(name):
            import torch

            return torch.cat([self.stored("prompt_embeds")[:prefix], stored])
        return stored

    def numpy(self, name: str) -> npt.NDArray[Any]:
        """`sample[name]` as a read-only NumPy array, without torch; copied where `sample[name]` is.

        bfloat16 is `ml_dtypes.bfloat16`. Raises KeyError if the sample has no such tensor, ChecksumError or CodecError
        if its bytes are damaged.
        """
        if prefix := self._shared_rows(name):
            whole = np.concatenate([self.stored_numpy("prompt_embeds")[:prefix], self.stored_numpy(name)])
            whole.flags.writeable = False
            return whole
        return self.stored_numpy(name)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors by name, each as `sample[name]`."""
        return {name: self[name] for name in self.row.meta.tensors}

    def _shared_rows(self, name: str) -> int:
        """The number of rows of `prompt_embeds` that the stored tensor omits at its beginning."""
        return self.row.meta.prefix_length if name in WITHOUT_PREFIX else 0


def _require_torch(name: str) -> None:
    """QwenCacheError, with a way to read the tensor `name`, if torch is not installed."""
    try:
        import torch  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        what = f"sample[{name!r}] is a torch tensor, and torch is not installed"
        do = f"use sample.numpy({name!r}), or {install_command('build')}"
        raise QwenCacheError(what, do=do) from None


def _torch_dtype(spec: TensorSpec) -> torch.dtype:
    import torch

    return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8}[spec.dtype]


# ---- find ------------------------------------------------------------------------------------------------------------
# Find a sample by its name, its key, or a start of its key that no other sample shares.

SHOWN = 5
"""Samples listed in a message."""
COMPARED = 100_000
"""Names of a cache in which similar ones are looked for: about a second."""


def find_sample(caches: Sequence[Cache], text: str) -> tuple[Cache, Sample]:
    """The sample with this name or key, else the only one whose key starts so, and its cache; ConfigError otherwise.

    `caches` has one cache for each recipe of a folder.
    """
    matches = [
        (cache, position)
        for cache in caches
        for position in _positions(pc.or_(pc.equal(cache.table["name"], text), pc.equal(cache.table["key"], text)))
    ]
    if not matches and text:
        matches = [
            (cache, position)
            for cache in caches
            for position in _positions(pc.starts_with(cache.table["key"], text.lower()))
        ]
    where = caches[0].folder
    if len(matches) > 1:
        first = [(cache.table["name"][i].as_py(), cache.table["key"][i].as_py()) for cache, i in matches[:SHOWN]]
        found = _some([f"{name} ({key})" for name, key in first], len(matches))
        raise ConfigError("several samples match", where=where, found=found, do="give the full key")
    if not matches:
        some = [name for cache in caches for name in pc.unique(cache.table["name"].slice(0, COMPARED)).to_pylist()]
        names, count = (
            list(dict.fromkeys(some)),
            sum(pc.count_distinct(cache.table["name"]).as_py() for cache in caches),
        )
        near = difflib.get_close_matches(text, names, SHOWN)
        do = (
            f"did you mean {_some(near, len(near))}?"
            if near
            else f"name one, such as {_some(names, count)}; index.parquet lists all"
        )
        raise ConfigError("no sample has this name, key or start of a key", where=where, found=text, do=do)
    ((cache, position),) = matches
    return cache, cache[position]


def _positions(found: pa.ChunkedArray) -> list[int]:
    """The positions at which an array is true."""
    positions: list[int] = np.flatnonzero(found.to_numpy()).tolist()
    return positions


def _some(listed: Sequence[str], count: int) -> str:
    return ", ".join(listed[:SHOWN]) + (f" and {count - SHOWN} more" if count > SHOWN else "")


# ---- one sample ------------------------------------------------------------------------------------------------------
# One sample as a safetensors file, as the server sends it: uncompressed tensors that stock `safetensors` reads.
#
# The metadata of the sample (the member `<key>.json` of a shard) is in the file's `__metadata__`, under "sample".

METADATA = "sample"


@dataclass(frozen=True)
class OneSample:
    """The bytes of a sample that did not come from the shards of a cache, in place of these."""

    folder: Path
    data: memoryview

    def part(self, row: IndexRow, begin: int, end: int) -> memoryview:
        return self.data[begin:end]

    def renew(self, row: IndexRow) -> bool:
        return False


def sample_file(meta: SampleMeta, tensors: Mapping[str, memoryview], format_version: int) -> list[bytes | memoryview]:
    """The pieces of the file: its header, then the bytes of each tensor; `tensors` are as they are stored."""
    plain = {name: decode(tensors[name], spec, meta.key) for name, spec in meta.tensors.items()}
    meta = uncompressed(meta)
    header = json.loads(safetensors_header(meta.tensors)[8:])
    header = {"__metadata__": {METADATA: meta.to_bytes(format_version).decode()}, **header}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)
    return [len(text).to_bytes(8, "little") + text, *plain.values()]


def uncompressed(meta: SampleMeta) -> SampleMeta:
    """The metadata of the sample with its tensors stored as they are."""
    specs = {name: replace(spec, codec=None, compressed_bytes=None) for name, spec in meta.tensors.items()}
    return replace(meta, tensors=specs)


def parse_sample_file(data: memoryview, where: str, format_version: int) -> Entry:
    """The sample in such a file, as an entry whose offsets are those of the file; every hash is checked.

    FormatError if the file is cut short, contradicts itself, or is of another format version.
    """
    length = int.from_bytes(data[:8], "little") if data.nbytes >= 8 else data.nbytes
    if length > min(2 * MAX_HEADER, data.nbytes - 8):
        raise MemberError("the safetensors header reaches beyond the file", where=where, found=length)
    claimed = Fields.of_json(data[8 : 8 + length], where, MemberError).left
    metadata = claimed.pop("__metadata__", None)
    text = metadata.get(METADATA) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise MemberError("the file has no metadata of a sample", where=where)
    meta = parse_sample(text.encode(), where, format_version)
    expected = json.loads(safetensors_header(meta.tensors)[8:])
    if json.dumps(claimed, sort_keys=True) != json.dumps(expected, sort_keys=True):
        raise MemberError("the safetensors header and the metadata disagree", where=where, expected=expected)
    begin, stored = 8 + length, sum(spec.stored_bytes for spec in meta.tensors.values())
    if data.nbytes - begin != stored:
        what = "the file has another length than its tensors"
        raise ChecksumError(what, where=where, expected=begin + stored, found=data.nbytes)
    entry = Entry(meta, 0, data.nbytes, begin)
    check_tensors(entry, data, where)
    return entry


def parse_members(metadata: memoryview, tensors: memoryview, where: str, format_version: int) -> Entry:
    """A sample from the bytes of its two members, as an entry whose offsets are those of the second; FormatError."""
    meta = parse_sample(metadata, where, format_version)
    return Entry(meta, 0, tensors.nbytes, tensor_data(tensors, meta, where))
