"""Batches out of a cache: each is a pure function of the cache, the settings and how many samples came before it.

`batch_plan` says which samples form a batch; the processes take them in turns. Noise, timestep and caption dropout of
a sample come from a generator of its position, its place in the epoch, so they do not depend on the batch or the
process in which it is trained. The state of a run is one number, the samples that were trained: any number of
processes can go on from there. A thread prepares the next batches while the model works.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import xxhash
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.config import TrainConfig
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.index import INDEX_NAME
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_train.batch_plan import BatchPlan, Turn, index_token_counts
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
    share: float = 1.0
    """What its mean loss counts, against 1 on average, in that of its optimizer step (`Turn.share`)."""
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
        if isinstance(cache, Feed):
            self.plan = BatchPlan(cache.token_counts, config, cache.names.__getitem__)
        else:
            tokens = index_token_counts(cache.table, cache.folder / INDEX_NAME)
            self.plan = BatchPlan(tokens, config, lambda i: cache.row(i).name)

    def batch(self, done: int) -> Batch:
        """This process's batch when an optimizer step begins after `done` samples."""
        return self._make(next(self._turns(done)))

    def _turns(self, done: int) -> Iterator[Turn]:
        return self.plan.turns(done, self.rank, self.world_size, self.config.gradient_accumulation_steps)

    def _make(self, turn: Turn) -> Batch:
        batch = collate([self.draw(position) for position in turn.positions], self.config.edit_mask_weight)
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
        return Drawn(sample, self.schedule.sigma(u, tokens), noise, without_caption)

    def starting_at(self, done: int) -> Generator[Batch]:
        """The batches after `done` trained samples, without end, prepared ahead by one thread.

        They begin with an optimizer step.
        """
        turns = self._turns(done)
        planned: deque[Turn] = deque()
        waiting: deque[Future[Batch]] = deque()
        with ThreadPoolExecutor(1, "batches") as thread:
            try:
                while True:
                    while len(waiting) <= AHEAD:
                        while len(planned) <= FETCHED_AHEAD:
                            planned.append(next(turns))
                            thread.submit(self._prefetch, planned[-1])
                        waiting.append(thread.submit(self._make, planned.popleft()))
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
