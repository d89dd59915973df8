"""A cache as a stock webdataset pipeline, from a folder or a bucket: samples are decoded and checked as they stream.

    import webdataset as wds
    from qwen_cache import webdataset
    from qwen_cache.torch import collate

    dataset = webdataset.open("s3://bucket/shards", shuffle=1000).batched(4, collation_fn=collate)
    loader = wds.WebLoader(dataset, batch_size=None, num_workers=2)

Shards are split among processes and workers, and read from their beginning to their end: as fast as a disk or a network
can be, but in an order that is only locally random. `qwen_cache.torch.CacheBatches` shuffles the whole cache.
"""

from __future__ import annotations

import io
import itertools
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import webdataset as wds
from webdataset.cache import StreamingOpen

from qwen_cache.errors import ArchiveError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, OneSample, Sample, open_cache, parse_members
from qwen_cache.format.index import IndexRow
from qwen_cache.storage.files import open_file
from qwen_cache.storage.remote import BLOCK, Url, is_remote
from qwen_cache.torch import TENSORS, Item, as_item

__all__ = ["open"]


def open(
    path: str | Path,
    *,
    recipe: str | None = None,
    shuffle: int = 0,
    seed: int = 0,
    tensors: tuple[str, ...] = TENSORS,
) -> wds.WebDataset:
    """A `webdataset.WebDataset` of the samples of a cache, as `qwen_cache.torch.CacheDataset` has them, without `name`.

    `shuffle` is the number of samples in the buffer that are shuffled, after the shards; 0 keeps the order of the
    shards. Each epoch is shuffled differently while its iterator's process lives (`persistent_workers=True`).

    Raises the errors of `open_cache`; while it streams, FormatError for a damaged shard or sample.
    """
    cache = open_cache(path, recipe=recipe)
    names = cache.table["shard"].unique().to_pylist()
    dataset = wds.WebDataset(
        [str(cache.folder / name) for name in names],
        shardshuffle=len(names) if shuffle else False,
        detshuffle=True,
        seed=seed,
        nodesplitter=wds.split_by_node,
        empty_check=False,
    )
    stages = [isinstance(stage, StreamingOpen) for stage in dataset.pipeline]
    dataset.pipeline[stages.index(True)] = ShardOpener(cache)
    dataset = dataset.compose(SampleDecoder(cache, tensors))
    return dataset.compose(wds.detshuffle(shuffle, seed=seed)) if shuffle else dataset


class ShardOpener:
    """The stage that opens shards: of the manifest only, also those that a commit has replaced meanwhile."""

    def __init__(self, cache: Cache) -> None:
        self.folder, self.sizes = cache.folder, {shard.name: shard.bytes for shard in cache.manifest.shards}

    def __call__(self, urls: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
        for entry in urls:
            name = str(entry["url"]).rpartition("/")[2]
            with self._open(name) as stream:
                yield {"url": entry["url"], "stream": stream}

    def _open(self, name: str) -> BinaryIO:
        if is_remote(self.folder):
            return io.BufferedReader(_RemoteShard(self.folder / name, self.sizes[name]), BLOCK)
        file: BinaryIO | None = directory.find_shard(self.folder, name, lambda path: os.fdopen(open_file(path), "rb"))
        if file is None:
            raise directory.missing_shard(self.folder, name)
        if (size := os.fstat(file.fileno()).st_size) != self.sizes[name]:
            file.close()
            where = self.folder / name
            raise ShardError("the shard has another size", where=where, expected=self.sizes[name], found=size)
        return file


class _RemoteShard(io.RawIOBase):
    """A remote shard as a file, read by ranges: a broken connection loses one of them."""

    def __init__(self, url: Url, size: int) -> None:
        self._url, self._size, self._position = url, size, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if self._position == end:
            return 0
        piece = self._url.read_range(self._position, end)
        buffer[: len(piece)] = piece
        self._position += len(piece)
        return len(piece)


class SampleDecoder:
    """The stage that makes the two members of a sample an item; those of other recipes are left out."""

    def __init__(self, cache: Cache, tensors: tuple[str, ...]) -> None:
        self.version, self.tensors = cache.format_version, tensors
        self.keys = cache.keys if len(cache.manifest.recipes) > 1 else None
        self.samples = {shard.name: shard.samples for shard in cache.manifest.shards}

    def __call__(self, members: Iterable[dict[str, Any]]) -> Iterator[Item]:
        for where, group in itertools.groupby(members, key=lambda each: str(each["__url__"])):
            found = 0
            for each in group:
                found += 1
                if self.keys is None or self.keys.find(each["__key__"]) >= 0:
                    yield self._item(each)
            if found != (expected := self.samples[where.rpartition("/")[2]]):  # to a tar, a damaged header is the end
                raise ShardError("the shard ends early", where=where, expected=f"{expected} samples", found=found)

    def _item(self, members: dict[str, Any]) -> Item:
        where = members["__url__"]
        if not {"json", "safetensors"} <= members.keys():
            what, expected = "a sample is two members of one key", "<key>.json, then <key>.safetensors"
            raise ArchiveError(what, where=where, expected=expected, found=", ".join(members))
        data = memoryview(bytearray(members["safetensors"]))
        entry = parse_members(memoryview(members["json"]), data, where, self.version)
        sample = Sample(IndexRow("", Path(where).name, entry), OneSample(Path(where).parent, data))
        item = as_item(sample, self.tensors)
        del item["name"]
        return {"__key__": members["__key__"], "__url__": where, **item}
