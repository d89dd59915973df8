"""Batches out of a cache: each is a pure function of the cache, the seed and its position.

Samples are numbered by position: position p is sample p mod n of epoch p // n, in an order drawn for that epoch.
Noise, timestep and caption dropout of a position come from its own generator, so they do not depend on the batch or
the process in which it is trained. The state of a run is one number. A thread prepares the next batches while the
model works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import xxhash
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.config import TrainConfig
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_train.flow import NoiseSchedule, draw_u
from qwen_train.on_the_fly import Feed

AHEAD = 2  # batches in preparation while one is trained
FETCHED_AHEAD = 8  # more batches whose samples are on their way, where the cache lies behind a URL


@dataclass(frozen=True)
class Batch:
    """Padded samples. Image tokens are the target's, then each control's, then padding."""

    keys: tuple[str, ...]
    img_shapes: tuple[ImgShapes, ...]
    clean: Float[Tensor, "B S 64"]
    noise: Float[Tensor, "B S 64"]
    is_target: Bool[Tensor, "B S"]
    weight: Float[Tensor, "B S"]
    """Of each token in the loss: 0 for controls and padding."""
    sigma: Float[Tensor, " B"]
    prompt_embeds: Float[Tensor, "B L D"]
    prompt_embeds_mask: Bool[Tensor, "B L"] | None
    """None when no text is padded."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """On `device`; embeddings in `dtype`, noise and weights as they are, the text mask on the CPU.

        The transformer reads the mask there: on an accelerator it would have to wait for it.
        """
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: t.to(device, non_blocking=True) for n, t in moved.items() if isinstance(t, Tensor)}
        moved |= {"prompt_embeds": moved["prompt_embeds"].to(dtype), "prompt_embeds_mask": self.prompt_embeds_mask}
        return replace(self, **moved)

    @property
    def image_tokens(self) -> int:
        return sum(token_count(shapes) for shapes in self.img_shapes)


@dataclass(frozen=True)
class Drawn:
    """A sample as it is trained at one position."""

    sample: Sample
    sigma: float
    noise: Float[Tensor, "S 64"]
    without_caption: bool


class Batches:
    """The endless sequence of batches of one process (`rank` of `world_size`)."""

    def __init__(
        self, cache: Cache | Feed, config: TrainConfig, schedule: NoiseSchedule, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.cache, self.config, self.schedule, self.rank, self.world_size = cache, config, schedule, rank, world_size

    def batch(self, position: int) -> Batch:
        """This process's batch when `position` samples have been trained by all."""
        return collate([self.draw(i) for i in self._positions(position)], self.config.edit_mask_weight)

    def prefetch(self, position: int) -> None:
        """Begin to fetch the samples of that batch, where the cache lies behind a URL."""
        self.cache.prefetch(self._index(i) for i in self._positions(position))

    def _positions(self, position: int) -> range:
        begin = position + self.rank * self.config.batch_size
        return range(begin, begin + self.config.batch_size)

    def _index(self, position: int) -> int:
        """Which sample of the cache is trained at `position`."""
        epoch, place = divmod(position, len(self.cache))
        return int(_order(self.config.seed, epoch, len(self.cache))[place])

    def draw(self, position: int) -> Drawn:
        """The sample at `position` with everything that chance decides."""
        config = self.config
        sample = self.cache[self._index(position)]
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{config.seed} {position}".encode()) >> 1)
        u = draw_u(
            generator,
            config.timestep_sampling,
            logit_mean=config.logit_mean,
            logit_std=config.logit_std,
            mode_scale=config.mode_scale,
        )
        without_caption = float(torch.rand((), generator=generator)) < config.caption_dropout
        tokens = token_count(sample.img_shapes[:1])
        noise = torch.randn(tokens, sample.row.meta.tensors["image_latents"].shape[1], generator=generator)
        return Drawn(sample, self.schedule.sigma(u, tokens), noise, without_caption)

    def starting_at(self, position: int) -> Generator[Batch]:
        """The batches after `position` trained samples, without end, prepared ahead by one thread."""
        waiting: deque[Future[Batch]] = deque()
        step = self.config.batch_size * self.world_size
        with ThreadPoolExecutor(1, "batches") as thread:
            try:
                for ahead in range(FETCHED_AHEAD):
                    thread.submit(self.prefetch, position + ahead * step)
                while True:
                    while len(waiting) <= AHEAD:
                        thread.submit(self.prefetch, position + FETCHED_AHEAD * step)
                        waiting.append(thread.submit(self.batch, position))
                        position += step
                    yield waiting.popleft().result()
            finally:
                thread.shutdown(cancel_futures=True)
                self.cache.stop_prefetch()


def collate(drawn: Sequence[Drawn], edit_mask_weight: float = 1.0) -> Batch:
    """Pad samples of any sizes into one batch; every tensor is copied once, to its place."""
    samples = [item.sample for item in drawn]
    targets = [token_count(sample.img_shapes[:1]) for sample in samples]
    images = [token_count(sample.img_shapes) for sample in samples]
    texts = [_text_tokens(item) for item in drawn]
    first = samples[0].row.meta.tensors
    embeds_dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[first["prompt_embeds"].dtype]
    clean = _padded(images, first["image_latents"].shape[1], torch.float32)
    noise = _padded(targets, drawn[0].noise.shape[1], torch.float32, max(images))
    weight = torch.zeros(len(drawn), max(images))
    prompt_embeds = _padded(texts, first["prompt_embeds"].shape[1], embeds_dtype)
    for i, (item, sample) in enumerate(zip(drawn, samples, strict=True)):
        target, tensors = targets[i], sample.row.meta.tensors
        sample.copy_into("image_latents", clean[i, :target])
        if "control_latents" in tensors:
            sample.copy_into("control_latents", clean[i, target : images[i]])
        noise[i, :target] = item.noise
        mask = sample["edit_mask"] if "edit_mask" in tensors else torch.ones(target)
        weight[i, :target] = 1 + (edit_mask_weight - 1) * mask
        sample.copy_into(_text_name(item), prompt_embeds[i, : texts[i]])
    return Batch(
        keys=tuple(sample.key for sample in samples),
        img_shapes=tuple(sample.img_shapes for sample in samples),
        clean=clean,
        noise=noise,
        is_target=_below(targets, max(images)),
        weight=weight,
        sigma=torch.tensor([item.sigma for item in drawn], dtype=torch.float32),
        prompt_embeds=prompt_embeds,
        prompt_embeds_mask=None if min(texts) == max(texts) else _below(texts, max(texts)),
    )


def _text_name(item: Drawn) -> str:
    return "empty_prompt_embeds" if item.without_caption else "prompt_embeds"


def _text_tokens(item: Drawn) -> int:
    meta = item.sample.row.meta
    return meta.tensors[_text_name(item)].shape[0] + (meta.prefix_length if item.without_caption else 0)


def _padded(lengths: Sequence[int], width: int, dtype: torch.dtype, longest: int = 0) -> Float[Tensor, "B N W"]:
    """Rows to be filled up to `lengths`; zero from there on."""
    rows = torch.empty(len(lengths), longest or max(lengths), width, dtype=dtype)
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    return rows


def _below(lengths: Sequence[int], longest: int) -> Bool[Tensor, "B N"]:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """The order of an epoch: a Philox stream of its own, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch])).permutation(samples)
