"""Batches of cached samples: each is a pure function of the cache, the settings and the number of consumed samples.

`split` holds out samples for validation; `batch_plan` groups the others into batches and assigns them to ranks. Noise,
timestep and caption dropout of a sample are seeded by its position in the epochs, so they do not depend on its batch or
rank. The state of a run is one number, the consumed samples: any number of processes can continue from it. A thread
prepares the next batches while the model computes.

There is no control dropout: all embeddings of an edit, including the empty prompt's, were encoded with the images, so
a sample without its control latents would never occur at inference.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any, Literal, NamedTuple

import torch
import xxhash
from jaxtyping import Bool, Float
from torch import Tensor

from qwen_cache.batching import BEGIN, Begin, RankBatch
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import LATENT_CHANNELS, SLIDER_EMBEDS, WITHOUT_PREFIX, ImgShapes, token_count
from qwen_cache.models.devices import accelerator, has_streams, to_device
from qwen_cache.models.family import QWEN_IMAGE, Family
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.planned import Planned
from qwen_train.data.samples import Samples
from qwen_train.flow import NoiseSchedule, sample_u, weighting

AHEAD = 2  # batches in preparation while one is trained
TRIES = 10_000  # of a noise level within the bounds: 0.1 s; a level that takes more has no place in the distribution
OF_IMAGE_TOKENS = ("clean", "noise", "is_target", "weight", "token_sigma")
"""The tensors `[B, S, …]` of a batch."""
FETCHED_AHEAD = 8  # further batches whose samples are being fetched, for a remote cache


class Text(NamedTuple):
    """The embeddings of a prompt of each sample, L tokens of width D, and their mask; None if none is padded."""

    prompt_embeds: Float[Tensor, "B L D"]
    prompt_embeds_mask: Bool[Tensor, "B L"] | None

    def to(self, device: torch.device, dtype: torch.dtype) -> Text:
        """Move the embeddings; the mask stays on the CPU, as that of a batch."""
        return self._replace(prompt_embeds=to_device(self.prompt_embeds, device).to(dtype))


@dataclass(frozen=True)
class Batch:
    """Padded samples: B of them, S image tokens (then padding), L text tokens of width D, K noise draws.

    With `train.dpo` a sample has two rows, one after the other: with its target, and with its rejected image.

    The images of a sample are in the order of its family's transformer: the target and then each control, or each
    control and then the target, once for each noise draw.
    """

    keys: tuple[str, ...]
    labels: tuple[str, ...]
    """The name of the samples in messages (`IndexRow.label`)."""
    img_shapes: tuple[ImgShapes, ...]
    """The images of each sample in that order, the target once."""
    clean: Float[Tensor, "B S 64"]
    noise: Float[Tensor, "B S 64"]
    is_target: Bool[Tensor, "B S"]
    weight: Float[Tensor, "B S"]
    """The weight of each token in the loss: 0 for controls and padding."""
    sigma: Float[Tensor, " B"] | Float[Tensor, "B K"]
    """The noise level of each sample; with several draws, of each draw."""
    sample_weight: Float[Tensor, " B"]
    """The weight of each sample in the mean loss (`flow_loss`)."""
    prompt_embeds: Float[Tensor, "B L D"]
    prompt_embeds_mask: Bool[Tensor, "B L"] | None
    """True for valid tokens; None if no text is padded."""
    token_sigma: Float[Tensor, "B S"] | None = None
    """The noise level of each token; only with several draws."""
    image_positions: tuple[tuple[int, ...], ...] | None = None
    """For each control of a sample the text tokens before it; None for the 20B family, whose text has image tokens."""
    taught: tuple[int, ...] = ()
    """The rows whose target is the teacher's velocity (`train.caches[].teacher`)."""
    target: Float[Tensor, "B S 64"] | None = None
    """The velocity to predict, where that is not `noise - clean`; set once the teacher's is known."""
    reference: Float[Tensor, "B S 64"] | None = None
    """The velocity that the model predicts without its LoRA, with `train.dpo`; set once it is known."""
    strength: float = 1.0
    """The strength of the LoRA, with `train.slider`: 1 or -1."""
    direction: tuple[Text, Text] | None = None
    """The positive and the negative prompts of a slider, with `train.slider.direction=prompts`."""
    path: Float[Tensor, "B N"] | None = None
    """For samples without target, the noise levels on the way from pure noise, 1, to that of the sample."""
    loss_scale: float = 1.0
    """The factor of its loss in that of its optimizer step, 1 on average (`RankBatch.loss_scale`)."""
    consumed_samples: int = 0
    """Samples that all processes have trained after this batch."""

    def to(self, device: torch.device, dtype: torch.dtype) -> Batch:
        """Move to `device`: embeddings in `dtype`, other tensors in their own, the text mask left on the CPU.

        The transformer reads the mask on the CPU; from an accelerator it would have to wait for it.
        """
        moved: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        moved = {n: to_device(t, device) for n, t in moved.items() if isinstance(t, Tensor)}
        moved |= {"prompt_embeds": moved["prompt_embeds"].to(dtype), "prompt_embeds_mask": self.prompt_embeds_mask}
        if self.direction:
            moved["direction"] = tuple(text.to(device, dtype) for text in self.direction)
        return replace(self, **moved)

    @property
    def image_tokens(self) -> int:
        """The image tokens that are computed: the target counts once for each noise draw."""
        return sum(map(self._tokens_of, self.img_shapes))

    def _tokens_of(self, shapes: ImgShapes) -> int:
        further = 0 if self.token_sigma is None else self.sigma.shape[1] - 1
        return token_count(shapes) + (further * token_count(shapes[-1:]) if further else 0)

    def part(self, rows: Sequence[int]) -> Batch:
        """Some rows, without the padding that only the others need; their target is `noise - clean`."""
        chosen, longest = list(rows), max(self._tokens_of(self.img_shapes[row]) for row in rows)
        mask = None if self.prompt_embeds_mask is None else self.prompt_embeds_mask[chosen]
        texts = self.prompt_embeds.shape[1] if mask is None else int(mask.sum(dim=1).max())
        mask = None if mask is None or mask[:, :texts].all() else mask[:, :texts]
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        part: dict[str, Any] = {name: value[chosen] for name, value in values.items() if isinstance(value, Tensor)}
        part |= {name: part[name][:, :longest] for name in OF_IMAGE_TOKENS if name in part}
        part |= {"prompt_embeds": part["prompt_embeds"][:, :texts], "prompt_embeds_mask": mask}
        for name in ("keys", "labels", "img_shapes", "image_positions"):
            part[name] = values[name] and tuple(values[name][row] for row in chosen)
        return replace(self, **part | {"taught": (), "target": None, "reference": None})


class Buffers:
    """Reusable memory for the large tensors of a batch; pinned if an accelerator copies from it.

    Fresh pages cost more than the copy into them, and malloc takes fresh pages for every tensor above 32 MB. Reuse
    doubles the speed of such batches (tools/bench_stream.py).
    """

    def __init__(self) -> None:
        self._memory: dict[str, Tensor] = {}
        self._read: torch.Event | None = None
        device = accelerator()
        self._pinned = device is not None and has_streams(device)

    def empty(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor in the memory of the last one of that name."""
        if self._read:
            self._read.synchronize()
        size = math.prod(shape) * dtype.itemsize
        if name not in self._memory or len(self._memory[name]) < size:
            self._memory[name] = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        return self._memory[name][:size].view(dtype).view(shape)

    def release(self) -> None:
        """Allow reuse once the accelerator has finished its queued work, such as copies from this memory."""
        if self._pinned:
            self._read = torch.accelerator.current_stream().record_event()


@dataclass(frozen=True)
class NoiseDraw:
    """A noise level and noise sampled for a target of S tokens."""

    sigma: float
    noise: Float[Tensor, "S 64"]
    weighting: float = 1.0
    """The loss weight of the noise level."""


@dataclass(frozen=True)
class NoisedSample:
    """A sample with the noise draws and the caption dropout sampled for it."""

    sample: Sample
    draws: tuple[NoiseDraw, ...]
    without_caption: bool
    taught: bool = False
    """True if its target is the teacher's velocity."""
    loss_weight: float = 1.0
    """`train.caches[].loss_weight` of its cache."""
    is_rejected: bool = False
    """True if the rejected image is in the place of the target."""
    path: tuple[float, ...] = ()
    """For a sample without target, the noise levels from 1 to that of its draw."""

    @property
    def latents(self) -> str:
        """The tensor of the image that is noised."""
        return "rejected_latents" if self.is_rejected else "image_latents"

    @property
    def img_shapes(self) -> ImgShapes:
        """The shapes of the images: the one that is noised, then the controls."""
        shapes, rejected = self.sample.img_shapes, self.sample.rejected_shape
        return (rejected, *shapes[1:]) if self.is_rejected and rejected else shapes

    @property
    def label(self) -> str:
        """Its name in messages."""
        return f"{self.sample.row.label} (rejected)" if self.is_rejected else self.sample.row.label

    def rejected(self, state: Tensor) -> NoisedSample:
        """The same with the rejected image, at the same noise level.

        Its noise is sampled from the `state` of the generator from which the target's was: so it is the same tensor if
        both have equally many tokens, and else other numbers from that state.
        """
        generator = torch.Generator()
        generator.set_state(state)
        noise = torch.randn(self.sample.shape("rejected_latents"), generator=generator)
        return replace(self, draws=(replace(self.draws[0], noise=noise),), is_rejected=True)

    @property
    def weighting(self) -> float:
        """The loss weight of the sample: the mean over its draws."""
        return sum(draw.weighting for draw in self.draws) / len(self.draws)

    def relative(self, draw: NoiseDraw) -> float:
        """The loss weight of a draw relative to the sample's; 1 if that is 0, as it can be at pure noise."""
        return draw.weighting / self.weighting if self.weighting else 1.0


class Batches:
    """The endless sequence of batches of one process (`rank` of `world_size`)."""

    def __init__(
        self,
        cache: Samples,
        config: TrainConfig,
        schedule: NoiseSchedule,
        *,
        rank: int = 0,
        world_size: int = 1,
        begin: Begin = BEGIN,
    ) -> None:
        """The batches from `begin` of a run on."""
        self.cache, self.config, self.rank, self.world_size = cache, config, rank, world_size
        shift = schedule.shift if config.timestep_shift is None else config.timestep_shift
        self.schedule = replace(schedule, shift=shift)
        planned = Planned.of(cache, config, begin)
        self.training, self.validation = planned.training, planned.validation
        """The trained and the held-out samples, as positions in the cache."""
        self.family, self.plan, self.has_targets = planned.family, planned.plan, planned.has_targets

    def batch(self, consumed_samples: int) -> Batch:
        """This rank's batch when an optimizer step begins after `consumed_samples`."""
        return self._make(next(self._rank_batches(consumed_samples)))

    def _rank_batches(self, consumed_samples: int) -> Iterator[RankBatch]:
        config = self.config
        per_step, follow = config.gradient_accumulation_steps, config.follow
        return self.plan.rank_batches(consumed_samples, self.rank, self.world_size, per_step, one_epoch=follow)

    def _make(self, rank_batch: RankBatch, buffers: Buffers | None = None) -> Batch:
        config, strength = self.config, 1.0
        samples = [self.rows(position) for position in rank_batch.positions]
        if config.slider.direction:
            strength, stop = self._slider(rank_batch.positions[0])
            samples = [rows[-1:] if strength < 0 else rows[:1] for rows in samples]
            if not self.has_targets:
                samples = [[self._on_the_way(row, stop) for row in rows] for rows in samples]
        rows = [row for each in samples for row in each]
        weights, directed = (config.edit_mask_weight, config.loss_reduction), config.slider.direction == "prompts"
        batch = collate(rows, *weights, buffers, family=self.family, directed=directed)
        consumed = rank_batch.consumed_samples
        return replace(batch, strength=strength, loss_scale=rank_batch.loss_scale, consumed_samples=consumed)

    def _slider(self, position: int) -> tuple[float, int]:
        """The strength of a slider in the batch that begins at `position`, and the steps before its noise level."""
        digest = xxhash.xxh3_64_intdigest(f"{self.config.seed} slider {position}".encode())
        return 1.0 if digest % 2 else -1.0, digest // 2 % self.config.slider.num_inference_steps

    def _on_the_way(self, item: NoisedSample, stop: int) -> NoisedSample:
        """A sample without target after `stop` steps of its generation: the noise is where it begins."""
        tokens, steps = token_count(item.img_shapes[:1]), self.config.slider.num_inference_steps
        path = tuple(self.schedule.levels(steps, tokens)[: stop + 1])
        of_level = weighting(self.config.weighting, path[-1], self.config.snr_gamma)
        return replace(item, path=path, draws=(replace(item.draws[0], sigma=path[-1], weighting=of_level),))

    def _prefetch(self, rank_batch: RankBatch) -> None:
        """Begin to fetch the samples of a remote cache."""
        self.cache.prefetch(self.plan.sample(position) for position in rank_batch.positions)

    def sample_noise(self, position: int) -> NoisedSample:
        """The sample at `position`, with its noise draws and caption dropout.

        The first draw is the same for any number of draws.
        """
        return self.rows(position)[0]

    def rows(self, position: int) -> list[NoisedSample]:
        """`sample_noise`, and the same for the rejected image if that is trained."""
        config = self.config
        number = self.plan.sample(position)
        sample, cache = self.cache[number], self.cache.of_cache(number)
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{config.seed} {position}".encode()) >> 1)
        sigma = self._sample_sigma(sample, generator)
        without_caption = float(torch.rand((), generator=generator)) < config.caption_dropout
        state = generator.get_state()
        draws = [self._draw(sample, sigma, generator)]
        while len(draws) < config.noise_draws:
            draws.append(self._draw(sample, self._sample_sigma(sample, generator), generator))
        noised = NoisedSample(sample, tuple(draws), without_caption, cache.teacher, cache.loss_weight)
        return [noised, noised.rejected(state)] if config.trains_rejected else [noised]

    def _sample_sigma(self, sample: Sample, generator: torch.Generator) -> float:
        """A noise level within the bounds of the settings: sampled again while it is outside."""
        config, tokens = self.config, token_count(sample.img_shapes[:1])
        for _ in range(TRIES):
            u = sample_u(
                generator,
                config.timestep_sampling,
                logit_mean=config.logit_mean,
                logit_std=config.logit_std,
                mode_scale=config.mode_scale,
            )
            sigma = self.schedule.sigma(u, tokens)
            if config.min_timestep <= 1000 * sigma <= config.max_timestep:
                return sigma
        raise ConfigError(
            f"{TRIES} timesteps were sampled, and none is between train.min_timestep and train.max_timestep",
            found=f"{config.min_timestep} and {config.max_timestep}, timestep_sampling {config.timestep_sampling}",
            do="set them further apart, or train.timestep_sampling=uniform",
        )

    def _draw(self, sample: Sample, sigma: float, generator: torch.Generator) -> NoiseDraw:
        """Noise, and the loss weight of the noise level."""
        noise = torch.randn(token_count(sample.img_shapes[:1]), LATENT_CHANNELS, generator=generator)
        return NoiseDraw(sigma, noise, weighting(self.config.weighting, sigma, self.config.snr_gamma))

    def starting_at(self, consumed_samples: int) -> Generator[Batch]:
        """The endless batches after `consumed_samples`, where an optimizer step begins, prepared ahead by one thread.

        With `train.follow` they end before a later step that enters the next epoch, which may be of another commit.
        A batch is valid until the next one is requested, which reuses its memory.
        """
        rank_batches = self._rank_batches(consumed_samples)
        planned: deque[RankBatch] = deque()
        pending: deque[tuple[Future[Batch], Buffers]] = deque()
        free = deque(Buffers() for _ in range(AHEAD + 1))
        with ThreadPoolExecutor(1, "batches") as thread:
            try:
                while True:
                    while len(pending) <= AHEAD:
                        for rank_batch in islice(rank_batches, FETCHED_AHEAD + 1 - len(planned)):
                            planned.append(rank_batch)
                            thread.submit(self._prefetch, rank_batch)
                        if not planned:
                            break
                        buffers = free.popleft()
                        pending.append((thread.submit(self._make, planned.popleft(), buffers), buffers))
                    if not pending:
                        return
                    batch, buffers = pending.popleft()
                    yield batch.result()
                    buffers.release()
                    free.append(buffers)
            finally:
                thread.shutdown(cancel_futures=True)
                self.cache.stop_prefetch()


@dataclass(frozen=True)
class TokenPlaces:
    """The places of the tokens of a sample's images in its row of a batch."""

    controls: slice
    draws: tuple[slice, ...]
    """The target, once for each noise draw."""
    length: int

    @classmethod
    def of(cls, img_shapes: ImgShapes, draws: int, *, target_last: bool) -> TokenPlaces:
        target, controls = token_count(img_shapes[:1]), token_count(img_shapes[1:])
        first = controls if target_last else 0
        ends = [first + (i + 1) * target for i in range(draws)]
        at = slice(0, controls) if target_last else slice(draws * target, draws * target + controls)
        return cls(at, tuple(slice(end - target, end) for end in ends), controls + draws * target)

    @property
    def targets(self) -> slice:
        """All draws together."""
        return slice(self.draws[0].start, self.draws[-1].stop)


def collate(
    noised: Sequence[NoisedSample],
    edit_mask_weight: float = 1.0,
    loss_reduction: Literal["per_sample", "per_token"] = "per_sample",
    buffers: Buffers | None = None,
    *,
    family: Family = QWEN_IMAGE,
    directed: bool = False,
) -> Batch:
    """Pad samples of any sizes into one batch, in `buffers` if given; the large tensors are written once per draw.

    If it is `directed`, the batch has the two prompts of the slider of each sample.
    """
    buffers = buffers or Buffers()
    samples, count = [item.sample for item in noised], len(noised[0].draws)
    places = [TokenPlaces.of(item.img_shapes, count, target_last=family.target_last) for item in noised]
    longest = max(place.length for place in places)
    size = len(noised), longest, LATENT_CHANNELS
    clean, noise = (buffers.empty(name, size, torch.float32) for name in ("clean", "noise"))
    weight, is_target = torch.zeros(size[:2]), torch.zeros(size[:2], dtype=torch.bool)
    token_sigma = torch.zeros(size[:2]) if count > 1 else None
    for i, (item, sample, place) in enumerate(zip(noised, samples, places, strict=True)):
        has_mask = "edit_mask" in sample and not item.is_rejected
        mask = sample["edit_mask"] if has_mask else torch.ones(len(item.draws[0].noise))
        target = clean[i, place.draws[0]]
        if item.path:
            target.zero_()
        else:
            sample.copy_into(item.latents, target)
        if "control_latents" in sample:
            sample.copy_into("control_latents", clean[i, place.controls])
        noise[i, : place.targets.start], noise[i, place.targets.stop :], clean[i, place.length :] = 0, 0, 0
        for draw, at in zip(item.draws, place.draws, strict=True):
            if at != place.draws[0]:
                clean[i, at] = target
            noise[i, at] = draw.noise
            weight[i, at] = (1 + (edit_mask_weight - 1) * mask) * item.relative(draw)
            if token_sigma is not None:
                token_sigma[i, at] = draw.sigma
        is_target[i, place.targets] = True
    text = _collated([(item.sample, _text_name(item)) for item in noised], "prompt_embeds", buffers)
    sigma = torch.tensor([[draw.sigma for draw in item.draws] for item in noised], dtype=torch.float32)
    loss_tokens = [len(item.draws[0].noise) for item in noised] if loss_reduction == "per_token" else [1] * len(noised)
    return Batch(
        keys=tuple(sample.key for sample in samples),
        labels=tuple(item.label for item in noised),
        img_shapes=tuple(in_order(item.img_shapes, family) for item in noised),
        clean=clean,
        noise=noise,
        is_target=is_target,
        weight=weight,
        sigma=sigma if count > 1 else sigma[:, 0],
        sample_weight=_sample_weights(noised, loss_tokens),
        prompt_embeds=text.prompt_embeds,
        prompt_embeds_mask=text.prompt_embeds_mask,
        direction=_directions(samples, buffers) if directed else None,
        path=torch.tensor([item.path for item in noised]) if noised[0].path else None,
        token_sigma=token_sigma,
        image_positions=tuple(s.row.meta.image_positions for s in samples) if family.text_rows_only else None,
        taught=tuple(i for i, item in enumerate(noised) if item.taught),
    )


def in_order(img_shapes: ImgShapes, family: Family) -> ImgShapes:
    """The images as the family's transformer takes them."""
    return (*img_shapes[1:], img_shapes[0]) if family.target_last else img_shapes


def _sample_weights(noised: Sequence[NoisedSample], loss_tokens: Sequence[int]) -> Float[Tensor, " B"]:
    """The weight of each sample: those of its noise level and cache, times its `loss_tokens` relative to their mean."""
    mean, each = sum(loss_tokens) / len(loss_tokens), [item.weighting * item.loss_weight for item in noised]
    return torch.tensor([weight * n / mean for weight, n in zip(each, loss_tokens, strict=True)])


def _text_name(item: NoisedSample) -> str:
    return "empty_prompt_embeds" if item.without_caption else "prompt_embeds"


def _directions(samples: Sequence[Sample], buffers: Buffers) -> tuple[Text, Text]:
    """The positive and the negative prompts of sliders."""
    positive, negative = (_collated([(each, name) for each in samples], name, buffers) for name in SLIDER_EMBEDS)
    return positive, negative


def _collated(texts: Sequence[tuple[Sample, str]], buffer: str, buffers: Buffers) -> Text:
    """The tensors of these names as padded rows, in the memory of that `buffer`."""
    lengths = [_length(sample, name) for sample, name in texts]
    first = texts[0][0].row.meta.tensors["prompt_embeds"]
    dtype = {"BF16": torch.bfloat16, "F32": torch.float32}[first.dtype]
    embeds = buffers.empty(buffer, (len(texts), max(lengths), first.shape[1]), dtype)
    for row, (sample, name), length in zip(embeds, texts, lengths, strict=True):
        sample.copy_into(name, row[:length])
        row[length:] = 0
    return Text(embeds, None if min(lengths) == max(lengths) else _valid_mask(lengths, max(lengths)))


def _length(sample: Sample, name: str) -> int:
    """The tokens of a prompt, the shared prefix included."""
    return sample.shape(name)[0] + (sample.row.meta.prefix_length if name in WITHOUT_PREFIX else 0)


def _valid_mask(lengths: Sequence[int], longest: int) -> Bool[Tensor, "B N"]:
    return torch.arange(longest) < torch.tensor(lengths)[:, None]
