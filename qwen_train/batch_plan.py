"""Which samples form a batch: planned from token counts alone, without opening a shard.

An epoch is a fresh permutation of the samples, cut into windows. In a window samples of like size are put side by side
and cut into batches, whose order is then drawn anew: little is padded, and what comes when is left to chance. Every
sample is trained once in each epoch (`drop_last` leaves out less than a batch, drawn anew each time), and no batch
reaches from one epoch into the next. Where a run is, is one number: how many samples were trained. Each window has a
known number of them, so the batch that follows costs the plan of one window, in any epoch.

A padded batch of B samples costs B · (its longest image + its longest text) tokens; a packed one what its samples have.
Each is counted with its own prompt: a dropped caption makes it shorter. Refused is a sample that exceeds `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.config import TrainConfig
from qwen_cache.format.errors import ConfigError, IndexFileError, TrainError

IntArray = npt.NDArray[np.int64]
"""Token counts are `[2, N]`: of the pictures (target and controls), then of the text."""

ROUNDING = 1e-6  # of a batch: thirds of one, added up, are whole ones only so
UNSORTED_WINDOW = 4096  # samples that are cut into batches at a time, where sorting would gain nothing
SUMMARISED = 1 << 16  # samples that stand for an epoch of millions


@dataclass(frozen=True)
class Window:
    """Consecutive places of an epoch as batches: batch i is `places[cuts[i] : cuts[i + 1]]`."""

    places: IntArray
    cuts: IntArray


@dataclass(frozen=True)
class Turn:
    """What one process trains while every other trains a batch of its own."""

    positions: list[int]
    share: float
    """What the mean of this batch counts, against 1 on average, in the mean over the samples of its optimizer step.

    A mean of means would let a sample count for more, the fewer come with it: under a budget of tokens, the large ones.
    """
    done: int
    """How many samples all processes have trained after it."""


@dataclass(frozen=True)
class Summary:
    """What the batches of an epoch are like."""

    batches: int
    most_samples: int
    tokens: float
    """Of a batch on average, padding included."""
    padding: float
    """The share of all tokens that is padding."""
    samples: int
    """Which the epoch's first so many say."""
    in_epoch: int

    @property
    def samples_per_batch(self) -> float:
        return self.in_epoch / self.batches

    def __str__(self) -> str:
        about = "" if self.samples == self.in_epoch else f", by the first {self.samples:,} samples"
        return (
            f"{self.batches:,} per epoch of at most {self.most_samples:,} samples, {self.tokens:,.0f} tokens on "
            f"average, padding {100 * self.padding:.1f} %{about}"
        )


class BatchPlan:
    """The endless sequence of batches, which all processes share.

    A sample in an epoch has a *position*: epoch · N + its place in that epoch's permutation. It does not depend on the
    batches, so what chance decides about a sample is drawn from it.
    """

    def __init__(self, tokens: IntArray, config: TrainConfig, name: Callable[[int], str] = str) -> None:
        """`name` says in errors what a sample is called."""
        _check_budget(tokens, config, name)
        samples = tokens.shape[1]
        self.tokens, self.config = tokens, config
        self.limit = config.batch_size or (max(1, samples) if config.max_tokens else 1)
        self.in_epoch = samples - (samples % self.limit if config.drop_last else 0)
        _check_drop_last(config, samples, self.in_epoch)
        self.bucketed = _bucketed(config)
        # two windows at least, or the samples of a small set would be batched with the same others in every epoch
        window = min(config.shuffle_window, -(-samples // 2)) if self.bucketed else UNSORTED_WINDOW
        self.window = max(1, window if config.max_tokens else max(1, window // self.limit) * self.limit)
        self._windows = lru_cache(maxsize=4)(self._plan)  # what is fetched ahead may be of the next one

    def batch(self, done: int) -> list[int]:
        """The positions of the samples in the batch that follows when `done` samples have been trained."""
        epoch, place = divmod(done, self.in_epoch)
        number, offset = divmod(place, self.window)
        window = self._windows(epoch, number)
        i = int(np.searchsorted(window.cuts, offset))
        if window.cuts[i] != offset:
            do = "resume with the program and the settings that wrote the checkpoint, or start anew"
            raise TrainError("no batch begins here", found=f"{done} samples trained", do=do)
        places: list[int] = window.places[window.cuts[i] : window.cuts[i + 1]].tolist()
        return [epoch * self.tokens.shape[1] + place for place in places]

    def turns(self, done: int, rank: int, world_size: int, per_step: int) -> Iterator[Turn]:
        """What the process `rank` trains, without end, when an optimizer step of `per_step` turns begins after `done`.

        Batch k is that of process k mod `world_size`; the sequence runs on through the ends of steps and epochs.
        """
        while True:
            before, ends, batches = done, [], []
            for _ in range(per_step * world_size):
                batches.append(self.batch(done))
                done += len(batches[-1])
                ends.append(done)
            mean = (done - before) / len(batches)
            for first in range(0, len(batches), world_size):
                positions = batches[first + rank]
                yield Turn(positions, len(positions) / mean, ends[first + world_size - 1])

    def sample(self, position: int) -> int:
        """Which sample of the cache has that position."""
        epoch, place = divmod(position, self.tokens.shape[1])
        return int(self._order(epoch)[place])

    def summary(self) -> Summary:
        """Of the first epoch."""
        windows = range(-(-min(self.in_epoch, SUMMARISED) // self.window))
        plans = [self._plan(0, number) for number in windows]
        counts = [self.tokens[:, self._order(0)[plan.places]] for plan in plans]
        sizes = np.concatenate([np.diff(plan.cuts) for plan in plans])
        valid = np.concatenate([count.sum(0) for count in counts])
        costs = [padded_tokens(count, plan.cuts) for count, plan in zip(counts, plans, strict=True)]
        cost = np.concatenate(costs).sum() if self.config.layout == "padded" else valid.sum()
        return Summary(
            batches=round(len(sizes) * self.in_epoch / len(valid)),
            most_samples=int(sizes.max()),
            tokens=float(cost / len(sizes)),
            padding=float(1 - valid.sum() / cost),
            samples=len(valid),
            in_epoch=self.in_epoch,
        )

    def _plan(self, epoch: int, number: int) -> Window:
        begin = number * self.window
        places = np.arange(begin, min(begin + self.window, self.in_epoch))
        tokens = self.tokens[:, self._order(epoch)[places]]
        if not self.bucketed:
            return Window(places, self._cut(tokens))
        order = _alike(tokens, self._fill(tokens))
        window = Window(places[order], self._cut(tokens[:, order]))
        return _shuffled(window, _random(self.config.seed, epoch, 1 + number))

    def _cut(self, tokens: IntArray) -> IntArray:
        """Where batches begin and end in samples of that order: each takes all that it can."""
        budget = self.config.max_tokens
        padded = budget is not None and self.config.layout == "padded"
        ends = _padded_ends if padded else _packed_ends
        end: list[int] = ends(tokens, self.limit, budget or int(tokens.sum())).tolist()
        cuts = [0]
        while cuts[-1] < len(end):
            cuts.append(end[cuts[-1]])
        return np.array(cuts)

    def _fill(self, tokens: IntArray) -> npt.NDArray[np.float64]:
        """The part of a batch that each sample takes."""
        filled: npt.NDArray[np.float64] = np.full(tokens.shape[1], 1 / self.limit)
        return np.maximum(filled, tokens.sum(0) / self.config.max_tokens) if self.config.max_tokens else filled

    def _order(self, epoch: int) -> IntArray:
        return _permutation(self.config.seed, epoch, self.tokens.shape[1])


def index_token_counts(table: pa.Table, where: object) -> IntArray:
    """Of every sample of a cache, from its index; FormatError F7 where one has none."""

    def rows(name: str) -> pa.ChunkedArray:
        return pc.list_element(pc.struct_field(table[name], "shape"), 0)

    try:
        columns = rows("image_latents"), rows("control_latents"), table["text_length"]
        target, controls, text = (pc.fill_null(column, 0).to_numpy().astype(np.int64) for column in columns)
    except pa.ArrowException as error:
        raise IndexFileError(f"the token counts cannot be read: {error}", where=where) from None
    if min(target.min(initial=1), text.min(initial=1)) < 1:
        raise IndexFileError("a sample has no tokens", where=where)
    return np.stack([target + controls, text])


def sequence_settings(config: TrainConfig) -> dict[str, Any]:
    """The settings that decide which batch comes when, None where one has no say: a resumed run must share them."""
    return {
        "train.batch_size": config.batch_size or (None if config.max_tokens else 1),
        "train.max_tokens": config.max_tokens,
        "train.layout": config.layout if _in_groups(config) else None,
        "train.drop_last": config.drop_last if _in_groups(config) else None,
        "train.shuffle_window": config.shuffle_window if _bucketed(config) else None,
    }


def padded_tokens(tokens: IntArray, cuts: IntArray) -> IntArray:
    """What each batch costs, padding included."""
    longest = np.maximum.reduceat(tokens, cuts[:-1], axis=1).sum(0)
    cost: IntArray = longest * np.diff(cuts)
    return cost


def _bucketed(config: TrainConfig) -> bool:
    """Whether samples of like size are put side by side: where something would be padded otherwise."""
    return config.layout == "padded" and config.shuffle_window > 1 and _in_groups(config)


def _in_groups(config: TrainConfig) -> bool:
    """Whether a batch can have more than one sample."""
    return config.batch_size != 1 and (config.batch_size or config.max_tokens) is not None


def _check_budget(tokens: IntArray, config: TrainConfig, name: Callable[[int], str]) -> None:
    """TrainError where the largest sample does not fit."""
    total = tokens.sum(0)
    if config.max_tokens is None or total.max(initial=0) <= config.max_tokens:
        return
    largest = int(total.argmax())
    image, text = tokens[:, largest].tolist()
    more = int((total > config.max_tokens).sum()) - 1
    raise TrainError(
        f"sample {name(largest)} alone exceeds train.max_tokens" + (f", and so do {more} more" if more else ""),
        expected=f"at most {config.max_tokens:,} tokens",
        found=f"{image + text:,}: {image:,} of its pictures, {text:,} of its text",
        do=f"set train.max_tokens={image + text} or more, or build the cache at a smaller data.vae_image_size",
    )


def _check_drop_last(config: TrainConfig, samples: int, in_epoch: int) -> None:
    if config.drop_last and config.max_tokens is not None:
        do = "leave one of them out: under a budget of tokens no two batches are of one size anyway"
        raise ConfigError("train.drop_last is for a fixed train.batch_size, not for train.max_tokens", do=do)
    if samples and not in_epoch:
        raise ConfigError(
            "train.drop_last leaves nothing to train",
            expected=f"{config.batch_size} samples or more, as train.batch_size says",
            found=samples,
            do="lower train.batch_size, or set train.drop_last=false",
        )


def _alike(tokens: IntArray, fill: npt.NDArray[np.float64]) -> IntArray:
    """An order in which neighbours are alike in both lengths.

    It is halved, and each half again, by the length in which its samples are further apart, down to single batches; a
    token costs the same in either. Where two halves meet the other length goes up in one and down in the next, so that
    a batch that reaches over is little wider. Samples of one size stay in the order of chance.
    """
    n = tokens.shape[1]
    order, begin, down = np.arange(n), np.array([0]), np.zeros((2, 1), bool)
    while True:
        end, parts, rows = np.append(begin[1:], n), np.arange(len(begin)), tokens[:, order]
        spread = np.maximum.reduceat(rows, begin, axis=1) - np.minimum.reduceat(rows, begin, axis=1)
        by = (spread[1] > spread[0]).astype(np.int64)
        part = np.repeat(parts, end - begin)
        length = rows[by[part], np.arange(n)] * np.where(down[by, parts], -1, 1)[part]
        order = order[np.argsort(part * 2 * (tokens.max() + 1) + length, kind="stable")]
        filled = np.concatenate([[0], np.cumsum(fill[order])])
        batches = filled[end] - filled[begin]
        halved = batches > 1 + ROUNDING
        if not halved.any():
            return order
        half = np.maximum(1, np.rint(batches / 2))[halved]
        middle = np.searchsorted(filled, filled[begin[halved]] + half + ROUNDING, side="right") - 1
        middle = np.minimum(middle, end[halved] - 1)
        begin = np.sort(np.concatenate([begin, middle]))
        down = np.repeat(down, 1 + halved, axis=1)
        down[1 - by[halved], (np.cumsum(1 + halved) - 1)[halved]] ^= True


def _padded_ends(tokens: IntArray, samples: int, budget: int) -> IntArray:
    """Where a batch that begins at each sample ends: its size bit by bit, from the maxima over 2, 4, 8, … samples."""
    n = tokens.shape[1]
    begin, last = np.arange(n), n - 1
    samples = min(samples, budget // int(tokens.sum(0).min()))
    longest = [tokens]
    while (half := 1 << len(longest) - 1) * 2 <= min(samples, n):
        longest.append(np.maximum(longest[-1], longest[-1][:, np.minimum(begin + half, last)]))
    end, lengths = begin.copy(), np.zeros_like(tokens)
    for bit in reversed(range(len(longest))):
        more = np.maximum(lengths, longest[bit][:, np.minimum(end, last)])
        size = end + (1 << bit) - begin
        fits = (begin + size <= n) & (size <= samples) & (more[0] + more[1] <= budget // size)
        end += fits.astype(np.int64) << bit
        lengths = np.where(fits, more, lengths)
    return end


def _packed_ends(tokens: IntArray, samples: int, budget: int) -> IntArray:
    """Where a batch that begins at each sample ends, when nothing is padded."""
    until = np.concatenate([[0], np.cumsum(tokens.sum(0))])
    n = tokens.shape[1]
    fits = np.searchsorted(until, until[:-1] + budget, side="right") - 1
    return np.minimum(np.minimum(fits, np.arange(n) + samples), n)


def _shuffled(window: Window, random: np.random.Generator) -> Window:
    """The same batches in another order."""
    sizes = np.diff(window.cuts)
    order = random.permutation(len(sizes))
    places = np.split(window.places, window.cuts[1:-1])
    return Window(np.concatenate([places[i] for i in order]), np.concatenate([[0], np.cumsum(sizes[order])]))


@lru_cache(maxsize=2)
def _permutation(seed: int, epoch: int, samples: int) -> IntArray:
    return _random(seed, epoch, 0).permutation(samples)


def _random(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """A Philox stream of its own, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, 0, stream]))
