"""A cache in any PyTorch training loop: a map-style dataset, batches of mixed sizes, a Hugging Face dataset.

    from torch.utils.data import DataLoader
    from qwen_cache.torch import CacheDataset, collate

    loader = DataLoader(CacheDataset("shards"), batch_size=4, shuffle=True, num_workers=2, collate_fn=collate)

Every tensor is checked by its hash when it is read. Batches of worker processes are written into shared memory, once,
which is used again when nobody has the batch.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from qwen_cache.batching import BatchPlan, RankBatch, index_token_counts
from qwen_cache.errors import ConfigError
from qwen_cache.extras import require
from qwen_cache.format.cache import Sample, open_cache
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.sample import WITHOUT_PREFIX
from qwen_cache.settings.sections import BatchConfig

# ---- torch -----------------------------------------------------------------------------------------------------------

__all__ = ["CacheBatches", "CacheDataset", "collate"]

TENSORS = (
    *("image_latents", "control_latents", "prompt_embeds", "empty_prompt_embeds", "edit_mask"),
    *("rejected_latents", "slider_positive_embeds", "slider_negative_embeds"),
)
"""The tensors that training needs; a sample without controls, for example, lacks one."""
DROPOUT = 1 << 34  # the random stream of caption dropout, beside those of qwen_cache.batching

Item = dict[str, Any]


class CacheDataset(Dataset[Item]):
    """The samples of a cache, in the order of the source, for any `DataLoader` and sampler; it pickles.

    An item has `key`, `name`, `prompt`, `img_shapes` (`(1, h, w)` in tokens of 16×16 pixels: the target, then each
    control) and the `tensors` that the sample has, as views of the mapped shard: `image_latents` `[S, 64]`,
    `control_latents` `[Sc, 64]`, `prompt_embeds` `[L, D]`, `empty_prompt_embeds` `[L0, D]`, `edit_mask` `[S]`, and
    `image_positions` where the embeddings lack the rows of image tokens (Qwen-Image-2.1). One with a rejected image has
    its `rejected_latents` `[Sr, 64]` and `rejected_shape`, and one with the direction of a slider
    `slider_positive_embeds` `[Lp, D]` and `slider_negative_embeds` `[Ln, D]`. `Sample` says more.

    Raises the errors of `open_cache`, and of reading a `Sample`.
    """

    def __init__(self, path: str | Path, *, recipe: str | None = None, tensors: Sequence[str] = TENSORS) -> None:
        self.cache, self.tensors = open_cache(path, recipe=recipe), tuple(tensors)

    def __len__(self) -> int:
        return len(self.cache)

    def __getitem__(self, index: int) -> Item:
        return as_item(self.cache[index], self.tensors)

    def to_hf_dataset(self) -> Any:
        """A `datasets.Dataset` with a row for each sample, whose tensors are read when a row is used.

        ModuleNotFoundError if `datasets` is not installed.
        """
        require("datasets")
        import datasets

        columns = self.cache.table.select(["key", "name"])
        return datasets.Dataset(columns).with_transform(self._read_rows)

    def _read_rows(self, rows: Mapping[str, Sequence[str]]) -> Mapping[str, Sequence[Any]]:
        if "key" not in rows:
            return rows  # of `filter` and others with `input_columns`
        items = [as_item(self.cache[key], self.tensors) for key in rows["key"]]
        names = dict.fromkeys(name for item in items for name in item)
        return {name: [item.get(name) for item in items] for name in names}


def as_item(sample: Sample, tensors: Sequence[str] = TENSORS) -> Item:
    """A sample as a dictionary: what describes it, and those of `tensors` that it has."""
    item: Item = {
        "key": sample.key,
        "name": sample.name,
        "prompt": sample.prompt,
        "img_shapes": sample.img_shapes,
    }
    if positions := sample.row.meta.image_positions:
        item["image_positions"] = positions
    if sample.rejected_shape:
        item["rejected_shape"] = sample.rejected_shape
    return item | {name: sample[name] for name in tensors if name in sample}


# ---- batches ---------------------------------------------------------------------------------------------------------


def collate(items: Sequence[Mapping[str, Any]]) -> Item:
    """Items of any sizes as one padded batch, for `DataLoader(collate_fn=collate)`.

    With N image tokens (target, then controls) and L text tokens in the largest of B items:

        latents             [B, N, 64]   clean; zero where there is no token
        latents_mask        [B, N]       bool: the tokens of target and controls
        is_target           [B, N]       bool: the tokens of the target
        prompt_embeds       [B, L, D]
        prompt_embeds_mask  [B, L]       bool
        edit_mask           [B, N]       1 for targets without one; only if an item has one

    `keys`, `prompts`, `img_shapes` and, where items have them, `image_positions` are lists, of lists of numbers instead
    of tuples, as `DataLoader` makes them anyway. Rejected images and directions of sliders are left out: an item has
    them. ConfigError for an item without `image_latents`: an image to generate, which cannot be trained.
    """
    return _batch([_OfItem(item) for item in items])


class CacheBatches(IterableDataset[Item]):
    """The batches of `collate` by the trainer's own plan: shuffled, with little padding, each sample once per epoch.

    For `DataLoader(CacheBatches(…), batch_size=None)` with any number of workers, which does not change the batches.
    `batch_size` limits the samples of a batch, `max_tokens` its tokens, padding included; without either a batch is one
    sample. `caption_dropout` is the fraction of samples with the empty prompt. Several processes train different
    batches: `rank` and `world_size` are those of torch.distributed, or of torchrun's environment. The batches are
    endless, or end when each process has trained `epochs` times its share.

    A batch also has `loss_scale`, the weight of its mean loss in the mean over all processes, and `consumed_samples`,
    the position: `load_state_dict({"consumed_samples": n})` on a new object continues after that batch exactly.
    torchdata's StatefulDataLoader does so by itself.

    Raises the errors of `open_cache`, ConfigError for useless settings, TrainError for a sample beyond `max_tokens`.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        drop_last: bool = False,
        seed: int = 0,
        caption_dropout: float = 0.0,
        epochs: int | None = None,
        recipe: str | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.cache = open_cache(path, recipe=recipe)
        self.seed, self.caption_dropout, self.epochs = seed, caption_dropout, epochs
        here = _processes()
        self.rank, self.world_size = here[0] if rank is None else rank, here[1] if world_size is None else world_size
        self._config = BatchConfig(batch_size=batch_size, max_tokens=max_tokens, drop_last=drop_last, seed=seed)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError("no such rank", expected=f"0 to {self.world_size - 1}", found=self.rank)
        if not 0 <= caption_dropout <= 1:
            raise ConfigError("caption_dropout is a fraction", expected="0 to 1", found=caption_dropout)
        if not len(self.cache):
            raise ConfigError("the cache is empty", where=self.cache.folder)
        where = f"{self.cache.folder / INDEX_NAME}"
        if targets := self.cache.table["target"].null_count:
            do = "train on another cache: these samples are images to generate"
            raise ConfigError("samples without a target cannot be trained", where=where, found=targets, do=do)
        if caption_dropout and (missing := self.cache.table["empty_prompt_embeds"].null_count):
            do = "set caption_dropout=0, or build the cache from the images"
            raise ConfigError("samples lack the embeddings of the empty prompt", where=where, found=missing, do=do)
        self._consumed, self._batches = 0, 0
        self._plan: BatchPlan | None = None

    @property
    def plan(self) -> BatchPlan:
        """The batches of all processes."""
        if self._plan is None:
            tokens = index_token_counts(self.cache.table, self.cache.folder / INDEX_NAME)
            self._plan = BatchPlan(tokens, self._config, lambda i: self.cache.row(i).label)
        return self._plan

    def __iter__(self) -> Iterator[Item]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        for rank_batch in self._rank_batches():
            if (self._batches - 1) % workers == number:
                yield self._read(rank_batch)

    def state_dict(self) -> dict[str, int]:
        """The position after the newest batch."""
        return {"consumed_samples": self._consumed, "batches": self._batches}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue at a position, of `state_dict` or of a batch, with the same settings and number of processes."""
        self._consumed, self._batches = int(state["consumed_samples"]), int(state.get("batches", 0))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_plan": None}

    def _rank_batches(self) -> Iterator[RankBatch]:
        """The batches of this process, counted."""
        end = None if self.epochs is None else self.epochs * self.plan.in_epoch
        batches = self.plan.rank_batches(self._consumed, self.rank, self.world_size, per_step=1)
        while end is None or self._consumed < end:
            rank_batch = next(batches)
            self._consumed, self._batches = rank_batch.consumed_samples, self._batches + 1
            yield rank_batch

    def _read(self, rank_batch: RankBatch) -> Item:
        samples = [
            _OfSample(self.cache[self.plan.sample(position)], without_caption=self._drops_caption(position))
            for position in rank_batch.positions
        ]
        batch = _batch(samples)
        batch.update(loss_scale=rank_batch.loss_scale, consumed_samples=rank_batch.consumed_samples)
        return batch

    def _drops_caption(self, position: int) -> bool:
        if not self.caption_dropout:
            return False
        stream = np.random.Philox(key=[self.seed % 2**64, position], counter=[0, 0, 0, DROPOUT])
        return bool(np.random.Generator(stream).random() < self.caption_dropout)


def _processes() -> tuple[int, int]:
    """The rank of this process and the number of all."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


class _OfItem:
    """An item of a dataset as part of a batch."""

    def __init__(self, item: Mapping[str, Any]) -> None:
        self.described = {name: value for name, value in item.items() if value is not None}
        self.text = "prompt_embeds"

    def shape(self, name: str) -> tuple[int, ...] | None:
        return self.described[name].shape if name in self.described else None

    def dtype(self, name: str) -> torch.dtype:
        dtype: torch.dtype = self.described[name].dtype
        return dtype

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        out.copy_(self.described[name])


class _OfSample:
    """A sample as part of a batch: tensors are copied and checked in one pass."""

    def __init__(self, sample: Sample, *, without_caption: bool) -> None:
        self._sample, self.described = sample, as_item(sample, ())
        self.text = "empty_prompt_embeds" if without_caption else "prompt_embeds"

    def shape(self, name: str) -> tuple[int, ...] | None:
        if name not in self._sample:
            return None
        rows, *rest = self._sample.shape(name)
        prefix = self._sample.row.meta.prefix_length if name in WITHOUT_PREFIX else 0
        return (rows + prefix, *rest)

    def dtype(self, name: str) -> torch.dtype:
        return {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}[self._sample.dtype(name)]

    def copy_into(self, name: str, out: torch.Tensor) -> None:
        self._sample.copy_into(name, out)


def _batch(parts: Sequence[_OfItem | _OfSample]) -> Item:
    """The batch that `collate` describes."""
    described = [part.described for part in parts]
    targets = [_rows(part, "image_latents") for part in parts]
    if 0 in targets:
        found = described[targets.index(0)].get("name")
        do = "leave it out: it is an image to generate"
        raise ConfigError("a sample without image_latents cannot be trained", found=found, do=do)
    images = [n + _rows(part, "control_latents") for n, part in zip(targets, parts, strict=True)]
    texts = [_rows(part, part.text) for part in parts]
    first, (_, width) = parts[0], parts[0].shape("prompt_embeds") or (0, 0)
    shape = len(parts), max(images)
    batch = empty_batch(
        {
            "latents": ((*shape, 64), first.dtype("image_latents")),
            "latents_mask": (shape, torch.bool),
            "is_target": (shape, torch.bool),
            "prompt_embeds": ((len(parts), max(texts), width), first.dtype("prompt_embeds")),
            "prompt_embeds_mask": ((len(parts), max(texts)), torch.bool),
            **({"edit_mask": (shape, torch.float32)} if any(part.shape("edit_mask") for part in parts) else {}),
        }
    )
    for name, lengths in (("latents_mask", images), ("is_target", targets), ("prompt_embeds_mask", texts)):
        torch.lt(torch.arange(batch[name].shape[1]), torch.tensor(lengths)[:, None], out=batch[name])
    # Copy the tensors of the parts, and zero the padding.
    latents, prompt_embeds, masks = batch["latents"], batch["prompt_embeds"], batch.get("edit_mask")
    if masks is not None:
        masks.copy_(batch["is_target"])
    for i, part in enumerate(parts):
        part.copy_into("image_latents", latents[i, : targets[i]])
        if images[i] > targets[i]:
            part.copy_into("control_latents", latents[i, targets[i] : images[i]])
        part.copy_into(part.text, prompt_embeds[i, : texts[i]])
        latents[i, images[i] :], prompt_embeds[i, texts[i] :] = 0, 0
        if masks is not None and part.shape("edit_mask"):
            part.copy_into("edit_mask", masks[i, : targets[i]])
    batch["keys"] = [item["key"] for item in described]
    batch["prompts"] = [item["prompt"] for item in described]
    batch["img_shapes"] = [[list(shape) for shape in item["img_shapes"]] for item in described]
    if any("image_positions" in item for item in described):
        batch["image_positions"] = [list(item.get("image_positions", ())) for item in described]
    return batch


def _rows(part: _OfItem | _OfSample, name: str) -> int:
    """The number of tokens; 0 where there are none."""
    shape = part.shape(name)
    return shape[0] if shape else 0


# ---- shared batches --------------------------------------------------------------------------------------------------
# Batches of `DataLoader`'s workers in memory that is used again: new memory costs several times what a copy does.
#
# A worker fills a block of shared memory and sends where it is; the block itself is sent once. The parent gets tensors
# over the block, and the worker uses it again when the last of them ends, as its first byte says. So a batch that is
# kept stays as it is, and costs a block. Blocks end with their worker.
#
# Only what is in the block travels like this: a tensor that was added to the batch, or a copy of the batch in another
# dictionary, is sent as torch sends it.

ALIGNMENT = 64  # bytes; of tensors in a block, and of the first byte, which is 1 while the parent uses the block
GROWTH = 1.25  # so that batches of growing sizes do not make a new block each

Place = tuple[int, torch.dtype, tuple[int, ...]]
"""The place of a tensor in a block: its offset, dtype and shape."""


@dataclass(eq=False)
class Block:
    """Shared memory of a worker."""

    name: bytes
    memory: torch.Tensor


@dataclass
class Filling:
    """One batch in a block."""

    block: Block
    is_sent: bool = False

    def end(self) -> None:
        """No tensor of it is left in the worker: without it being sent, nobody else has them."""
        if not self.is_sent:
            self.block.memory[0] = 0

    def place(self, value: object) -> Place | None:
        """The place of a tensor in the block; None for anything that is not there, or not contiguous."""
        if not isinstance(value, torch.Tensor) or not value.numel() or not value.is_contiguous():
            return None
        begin = self.block.memory.data_ptr()
        if value.untyped_storage().data_ptr() != begin:
            return None
        return value.data_ptr() - begin, value.dtype, tuple(value.shape)


def aligned(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """The bytes of a tensor in a block."""
    return -(-math.prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT


def used(memory: npt.NDArray[np.uint8], end: Callable[..., None], *arguments: object) -> torch.Tensor:
    """The bytes as a tensor; `end` is called when neither it nor a view of it is left."""
    array = memory[:]
    weakref.finalize(array, end, *arguments).atexit = False
    return torch.from_numpy(array)


def view(memory: torch.Tensor, begin: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return memory[begin : begin + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


# ---- in the worker ---------------------------------------------------------------------------------------------------

_known: list[Block] = []
"""The blocks of this worker that its parent has."""


class SharedBatch(dict[str, Any]):
    """A batch with tensors in a block, for a worker to send."""

    filling: Filling


def empty_batch(sizes: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Any]:
    """Uninitialised tensors of these shapes and dtypes, to which more may be added; of a worker in a block."""
    if get_worker_info() is None:
        return {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in sizes.items()}
    batch, begin = SharedBatch(), ALIGNMENT
    batch.filling = Filling(_unused(ALIGNMENT + sum(aligned(*size) for size in sizes.values())))
    memory = used(batch.filling.block.memory.numpy(), batch.filling.end)
    for name, (shape, dtype) in sizes.items():
        batch[name] = view(memory, begin, dtype, shape)
        begin += aligned(shape, dtype)
    return batch


def _unused(size: int) -> Block:
    """A block of at least `size` bytes, which is used from now on."""
    free = [block for block in _known if not block.memory[0]]
    block = next((block for block in free if len(block.memory) >= size), None)
    if block is None:
        storage = torch.UntypedStorage._new_shared(int(GROWTH * size), device="cpu")  # type: ignore[no-untyped-call]
        block = Block(os.urandom(16), torch.empty(0, dtype=torch.uint8).set_(storage))
        if free:  # too small: the parent exchanges it
            block.name = free[0].name
            _known.remove(free[0])
    block.memory[0] = 1
    return block


def _send(batch: SharedBatch) -> tuple[Callable[..., dict[str, Any]], tuple[Any, ...]]:
    """The object that is pickled in place of the batch. A copy that is sent too is sent as torch does it."""
    block, is_sent = batch.filling.block, batch.filling.is_sent
    places = {} if is_sent else {name: batch.filling.place(value) for name, value in batch.items()}
    in_block = {name: place for name, place in places.items() if place}
    if not in_block:
        return dict, (dict(batch),)
    memory = None if block in _known else block.memory
    if memory is not None:
        _known.append(block)
    batch.filling.is_sent = True
    others = {name: value for name, value in batch.items() if name not in in_block}
    return _receive, (block.name, os.getpid(), memory, list(batch), in_block, others)


ForkingPickler.register(SharedBatch, _send)

# ---- in its parent ---------------------------------------------------------------------------------------------------

_blocks: dict[bytes, npt.NDArray[np.uint8]] = {}
"""The blocks of the workers of this process, by name."""


def _receive(
    name: bytes,
    worker: int,
    memory: torch.Tensor | None,
    names: list[str],
    in_block: Mapping[str, Place],
    others: Mapping[str, Any],
) -> dict[str, Any]:
    """The batch, as an ordinary dictionary."""
    if memory is not None:
        for process in multiprocessing.active_children():
            if process.pid == worker and name not in _blocks:
                weakref.finalize(process, _blocks.pop, name, None).atexit = False
        _blocks[name] = memory.numpy()
    block = _blocks[name]
    data = used(block, block.__setitem__, 0, 0)
    return {name: view(data, *in_block[name]) if name in in_block else others[name] for name in names}
