"""Batches out of a cache: each is a pure function of the cache, the settings and how many samples came before it.

`split` says which samples are never trained, `batch_plan` which of the others form a batch; the processes share them.
Noise, timestep and caption dropout of a sample come from a generator of its position, its place in the epoch, so they
do not depend on the batch or the process in which it is trained. The state of a run is one number, the samples that
were trained: any number of processes can go on from there. A thread prepares the next batches while the model works.

There is no dropout of controls: all embeddings of an edit, the empty prompt's too, are of a text that shows the
images, so a sample without its control latents would be one that no pipeline ever draws.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import numpy as np
import torch
import xxhash
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.batching.batch_plan import BatchPlan, Turn
from qwen_cache.batching.epoch import IntArray
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_cache.settings.train import TrainConfig
from qwen_train.data.samples import Samples
from qwen_train.data.split import split
from qwen_train.flow import NoiseSchedule, draw_u, weighting

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
    counts: Float[Tensor, " B"]
    """What each sample counts in the mean loss (`flow_loss`)."""
    prompt_embeds: Float[Tensor, "B L D"]
    prompt_embeds_mask: Bool[Tensor, "B L"] | None
    """None when no text is padded."""
    share: float = 1.0
    """What its loss counts, against 1 on average, in that of its optimizer step (`Turn.share`)."""
    done: int = 0
    """How many samples all processes have trained after it."""

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


class Buffers:
    """Memory for the large tensors of a batch, used again for another; pinned, where a GPU copies from it.

    Fresh pages cost more than what is copied into them, and malloc takes fresh ones for every tensor above 32 MB: such
    batches come at twice the speed without them (tools/bench_stream.py).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._read: torch.Event | None = None

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor to be filled, where the last one of that name was."""
        if self._read:
            self._read.synchronize()
        size = math.prod(shape) * dtype.itemsize
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = torch.empty(size, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._memory[name][:size].view(dtype).view(shape)

    def hand_back(self) -> None:
        """They may be filled anew, as soon as the GPU has done what it was asked for: to copy them, for one."""
        if torch.cuda.is_available():
            self._read = torch.cuda.current_stream().record_event()


@dataclass(frozen=True)
class Drawn:
    """A sample as it is trained at one position."""

    sample: Sample
    sigma: float
    noise: Float[Tensor, "S 64"]
    without_caption: bool
    weighting: float = 1.0
    """What its noise level counts in the loss."""


class Batches:
    """The endless sequence of batches of one process (`rank` of `world_size`)."""

    def __init__(
        self, cache: Samples, config: TrainConfig, schedule: NoiseSchedule, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.cache, self.config, self.schedule, self.rank, self.world_size = cache, config, schedule, rank, world_size
        self.training, self.validation = training_and_validation(cache, config)
        """Which samples of the cache are trained, and which never are."""
        counts = target_tokens(cache) if config.loss_reduction == "per_token" else None
        self.plan = BatchPlan(cache.token_counts(), config, cache.name, cache.parts(self.training), counts)

    def batch(self, done: int) -> Batch:
        """This process's batch when an optimizer step begins after `done` samples."""
        return self._make(next(self._turns(done)))

    def _turns(self, done: int) -> Iterator[Turn]:
        return self.plan.turns(done, self.rank, self.world_size, self.config.gradient_accumulation_steps)

    def _make(self, turn: Turn, buffers: Buffers | None = None) -> Batch:
        drawn = [self.draw(position) for position in turn.positions]
        batch = collate(drawn, self.config.edit_mask_weight, self.config.loss_reduction, buffers)
        return replace(batch, share=turn.share, done=turn.done)

    def _prefetch(self, turn: Turn) -> None:
        """Begin to fetch the samples, where the cache lies behind a URL."""
        self.cache.prefetch(self.plan.sample(position) for position in turn.positions)

    def draw(self, position: int) -> Drawn:
        """The sample at `position` with everything that chance decides."""
        config = self.config
        sample = self.cache[self.plan.sample(position)]
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
        sigma = self.schedule.sigma(u, tokens)
        return Drawn(sample, sigma, noise, without_caption, weighting(config.weighting, sigma))

    def starting_at(self, done: int) -> Generator[Batch]:
        """The batches after `done` trained samples, without end, prepared ahead by one thread.

        They begin with an optimizer step. A batch lasts until the next is asked for: then its memory is used again.
        """
        turns = self._turns(done)
        planned: deque[Turn] = deque()
        waiting: deque[tuple[Future[Batch], Buffers]] = deque()
        free = deque(Buffers() for _ in range(AHEAD + 1))
        with ThreadPoolExecutor(1, "batches") as thread:
            try:
                while True:
                    while len(waiting) <= AHEAD:
                        while len(planned) <= FETCHED_AHEAD:
                            planned.append(next(turns))
                            thread.submit(self._prefetch, planned[-1])
                        buffers = free.popleft()
                        waiting.append((thread.submit(self._make, planned.popleft(), buffers), buffers))
                    batch, buffers = waiting.popleft()
                    yield batch.result()
                    buffers.hand_back()
                    free.append(buffers)
            finally:
                thread.shutdown(cancel_futures=True)
                self.cache.stop_prefetch()


def training_and_validation(samples: Samples, config: TrainConfig) -> tuple[IntArray, IntArray]:
    """Which samples are trained, and which are held out."""
    if not config.validation_split or not len(samples):
        return np.arange(len(samples)), np.arange(0)
    if not samples.has_index:
        raise ConfigError(
            "train.validation_split goes by the index of a cache, which --encode-on-the-fly does not have",
            do="build a cache: `qwen-cache build`",
        )
    return split(samples.column("target").to_pylist(), config.validation_split)


def target_tokens(samples: Samples) -> IntArray:
    """`[N]`: image tokens of the targets."""
    if not samples.has_index:
        raise ConfigError(
            "train.loss_reduction=per_token goes by the index of a cache, which --encode-on-the-fly does not have",
            do="build a cache: `qwen-cache build`, or set train.loss_reduction=per_sample",
        )
    return samples.target_tokens()


def collate(
    drawn: Sequence[Drawn],
    edit_mask_weight: float = 1.0,
    loss_reduction: Literal["per_sample", "per_token"] = "per_sample",
    buffers: Buffers | None = None,
) -> Batch:
    """Pad samples of any sizes into one batch, in `buffers` if given; every tensor is copied once, to its place."""
    buffers = buffers or Buffers()
    samples = [item.sample for item in drawn]
    targets = [token_count(sample.img_shapes[:1]) for sample in samples]
    images = [token_count(sample.img_shapes) for sample in samples]
    texts = [_text_tokens(item) for item in drawn]
    first = samples[0].row.meta.tensors
    embeds_dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[first["prompt_embeds"].dtype]
    size = len(drawn), max(images), first["image_latents"].shape[1]
    clean = _padded(images, buffers.empty("clean", size, torch.float32))
    noise = _padded(targets, buffers.empty("noise", size, torch.float32))
    weight = torch.zeros(len(drawn), max(images))
    size = len(drawn), max(texts), first["prompt_embeds"].shape[1]
    prompt_embeds = _padded(texts, buffers.empty("prompt_embeds", size, embeds_dtype))
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
        counts=_counts(drawn, targets if loss_reduction == "per_token" else [1] * len(drawn)),
        prompt_embeds=prompt_embeds,
        prompt_embeds_mask=None if min(texts) == max(texts) else _below(texts, max(texts)),
    )


def _counts(drawn: Sequence[Drawn], of_mean: Sequence[int]) -> Float[Tensor, " B"]:
    """What each sample counts in the loss: its noise level's weighting, times its part of the mean over `of_mean`."""
    mean = sum(of_mean) / len(of_mean)
    return torch.tensor([item.weighting * n / mean for item, n in zip(drawn, of_mean, strict=True)])


def _text_name(item: Drawn) -> str:
    return "empty_prompt_embeds" if item.without_caption else "prompt_embeds"


def _text_tokens(item: Drawn) -> int:
    meta = item.sample.row.meta
    return meta.tensors[_text_name(item)].shape[0] + (meta.prefix_length if item.without_caption else 0)


def _padded(lengths: Sequence[int], rows: Float[Tensor, "B N W"]) -> Float[Tensor, "B N W"]:
    """`rows` that are to be filled up to `lengths`; zero from there on."""
    for row, length in zip(rows, lengths, strict=True):
        row[length:] = 0
    return rows


def _below(lengths: Sequence[int], longest: int) -> Bool[Tensor, "B N"]:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]
