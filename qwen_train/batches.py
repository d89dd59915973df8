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
from torch.nn.utils.rnn import pad_sequence

from qwen_cache.config import TrainConfig
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.sample import ImgShapes, token_count
from qwen_train.flow import NoiseSchedule, draw_u

AHEAD = 2  # batches in preparation while one is trained


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
        self, cache: Cache, config: TrainConfig, schedule: NoiseSchedule, *, rank: int = 0, world_size: int = 1
    ) -> None:
        self.cache, self.config, self.schedule, self.rank, self.world_size = cache, config, schedule, rank, world_size

    def batch(self, position: int) -> Batch:
        """This process's batch when `position` samples have been trained by all."""
        begin = position + self.rank * self.config.batch_size
        positions = range(begin, begin + self.config.batch_size)
        return collate([self.draw(i) for i in positions], self.config.edit_mask_weight)

    def draw(self, position: int) -> Drawn:
        """The sample at `position` with everything that chance decides."""
        config = self.config
        epoch, place = divmod(position, len(self.cache))
        sample = self.cache[int(_order(config.seed, epoch, len(self.cache))[place])]
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
        with ThreadPoolExecutor(1, "batches") as thread:
            try:
                while True:
                    while len(waiting) <= AHEAD:
                        waiting.append(thread.submit(self.batch, position))
                        position += self.config.batch_size * self.world_size
                    yield waiting.popleft().result()
            finally:
                thread.shutdown(cancel_futures=True)


def collate(drawn: Sequence[Drawn], edit_mask_weight: float = 1.0) -> Batch:
    """Pad samples of any sizes into one batch."""
    clean, noise, weight, text = [], [], [], []
    for item in drawn:
        sample, tensors = item.sample, item.sample.row.meta.tensors
        parts = [sample[name].float() for name in ("image_latents", "control_latents") if name in tensors]
        target, controls = len(parts[0]), sum(len(part) for part in parts[1:])
        clean.append(torch.cat(parts))
        noise.append(torch.cat([item.noise, torch.zeros(controls, item.noise.shape[1])]))
        mask = sample["edit_mask"] if "edit_mask" in tensors else torch.ones(target)
        weight.append(torch.cat([1 + (edit_mask_weight - 1) * mask, torch.zeros(controls)]))
        text.append(sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"])
    text_mask = pad_sequence([torch.ones(len(t), dtype=torch.bool) for t in text], batch_first=True)
    targets = [torch.arange(len(c)) < len(item.noise) for c, item in zip(clean, drawn, strict=True)]
    return Batch(
        keys=tuple(item.sample.key for item in drawn),
        img_shapes=tuple(item.sample.img_shapes for item in drawn),
        clean=pad_sequence(clean, batch_first=True),
        noise=pad_sequence(noise, batch_first=True),
        is_target=pad_sequence(targets, batch_first=True),
        weight=pad_sequence(weight, batch_first=True),
        sigma=torch.tensor([item.sigma for item in drawn], dtype=torch.float32),
        prompt_embeds=pad_sequence(text, batch_first=True),
        prompt_embeds_mask=None if text_mask.all() else text_mask,
    )


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, samples: int) -> npt.NDArray[np.int64]:
    """The order of an epoch: a Philox stream of its own, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch])).permutation(samples)
