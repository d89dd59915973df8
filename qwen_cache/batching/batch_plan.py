"""Which samples form a batch: planned from token counts alone, without opening a shard.

An epoch (`epoch`) is a fresh permutation of the samples, cut into windows. In a window samples of like size are put
side by side and cut into batches, whose order is then drawn anew: little is padded, and what comes when is left to
chance, but for runs of batches that cost alike, for processes that wait for one another. Every sample is trained once
in each epoch (`drop_last` leaves out less than a batch, drawn anew each time), and no batch reaches from one epoch into
the next. Where a run is, is one number: how many samples were trained. Each window has a known number of them, so the
batch that follows costs the plan of one window, in any epoch and for any number of processes.

A padded batch of B samples costs B · (its longest image + its longest text) tokens; a packed one what its samples have.
Each is counted with its own prompt: a dropped caption makes it shorter. Refused is a sample that exceeds `max_tokens`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.batching.epoch import Epochs, FloatArray, IntArray, Part, random
from qwen_cache.console import plural
from qwen_cache.errors import ConfigError, IndexFileError, TrainError
from qwen_cache.settings.batching import BatchConfig

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
    """What the mean of this batch counts, against 1 on average, in the mean of its optimizer step.

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
    wait: float | None
    """Which part of the time processes wait for the one with the most tokens; None where there is but one."""

    @property
    def samples_per_batch(self) -> float:
        return self.in_epoch / self.batches

    def __str__(self) -> str:
        about = "" if self.samples == self.in_epoch else f", by the first {self.samples:,} samples"
        wait = "" if self.wait is None else f", ranks wait {100 * self.wait:.1f} %"
        size = f"at most {plural(self.most_samples, 'sample')}, {self.tokens:,.0f} tokens on average"
        return f"{self.batches:,} per epoch of {size}, padding {100 * self.padding:.1f} %{wait}{about}"


class BatchPlan:
    """The endless sequence of batches, which all processes share.

    A sample in an epoch has a *position*: epoch · samples of an epoch + its place in that one's order. It does not
    depend on the batches, so what chance decides about a sample is drawn from it.
    """

    def __init__(
        self,
        tokens: IntArray,
        config: BatchConfig,
        name: Callable[[int], str] = str,
        parts: Sequence[Part] | None = None,
        counts: IntArray | None = None,
    ) -> None:
        """Of samples that have `tokens` ([2, N]: of the images, target and controls; then of the text).

        `name` says in errors what a sample is called; `parts` how often which come in an epoch, when not all do once;
        `counts` what each counts in the mean of a step, when not all count the same.
        """
        _check_budget(tokens, config, name)
        self.tokens, self.config, self.counts = tokens, config, counts
        self.epochs = Epochs([Part(np.arange(tokens.shape[1]))] if parts is None else parts, config.seed)
        samples = len(self.epochs)
        self.limit = config.batch_size or (max(1, samples) if config.max_tokens else 1)
        self.in_epoch = samples - (samples % self.limit if config.drop_last else 0)
        _check_drop_last(config, samples, self.in_epoch)
        self.bucketed = _bucketed(config)
        # two windows at least, or the samples of a small set would be batched with the same others in every epoch
        window = min(config.bucketing_window, -(-samples // 2)) if self.bucketed else UNSORTED_WINDOW
        self.window = max(1, window if config.max_tokens else _whole(window, self.limit, config.balance_window))
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
        return [epoch * len(self.epochs) + place for place in places]

    def turns(self, done: int, rank: int, world_size: int, per_step: int) -> Iterator[Turn]:
        """What the process `rank` trains, without end, when an optimizer step of `per_step` turns begins after `done`.

        A step is the next `per_step` · `world_size` batches. Of those, processes have at the same time what costs most
        alike: batch k of them, by cost, is that of process k mod `world_size`.
        """
        while True:
            batches = []
            for _ in range(per_step * world_size):
                batches.append(self.batch(done))
                done += len(batches[-1])
            if world_size > 1:
                batches.sort(key=self._cost)
            counts = [self._count(positions) for positions in batches]
            left = sum(map(len, batches))
            for first in range(0, len(batches), world_size):
                left -= sum(map(len, batches[first : first + world_size]))
                share = counts[first + rank] / (sum(counts) / len(batches))
                yield Turn(batches[first + rank], share, done - left)

    def sample(self, position: int) -> int:
        """Which sample of the cache has that position."""
        epoch, place = divmod(position, len(self.epochs))
        return int(self.epochs.order(epoch)[place])

    def summary(self, world_size: int = 1, per_step: int = 1) -> Summary:
        """Of the first epoch."""
        windows = range(-(-min(self.in_epoch, SUMMARISED) // self.window))
        plans = [self._plan(0, number) for number in windows]
        counts = [self.tokens[:, self.epochs.order(0)[plan.places]] for plan in plans]
        sizes = np.concatenate([np.diff(plan.cuts) for plan in plans])
        valid = np.concatenate([count.sum(0) for count in counts])
        costs = np.concatenate([self._costs(count, plan.cuts) for count, plan in zip(counts, plans, strict=True)])
        return Summary(
            batches=round(len(sizes) * self.in_epoch / len(valid)),
            most_samples=int(sizes.max()),
            tokens=float(costs.mean()),
            padding=float(1 - valid.sum() / costs.sum()),
            samples=len(valid),
            in_epoch=self.in_epoch,
            wait=_wait(costs, world_size, per_step) if world_size > 1 else None,
        )

    def _plan(self, epoch: int, number: int) -> Window:
        begin = number * self.window
        places = np.arange(begin, min(begin + self.window, self.in_epoch))
        tokens, chance = self.tokens[:, self.epochs.order(epoch)[places]], random(self.config.seed, epoch, 1 + number)
        if not self.bucketed:
            window = Window(places, self._cut(tokens))
        else:
            alike = _alike(tokens, self._fill(tokens))
            window = Window(places[alike], self._cut(tokens[:, alike]))
            window = _reordered(window, chance.permutation(len(window.cuts) - 1))
        cost = self._costs(tokens[:, window.places - begin], window.cuts)
        return _reordered(window, _runs(cost, self.config.balance_window, self._batches_before(epoch, number), chance))

    def _batches_before(self, epoch: int, number: int) -> int:
        """How many batches there are before a window, where it is known without planning them all; else 0."""
        if self.config.max_tokens:
            return 0
        return epoch * -(-self.in_epoch // self.limit) + number * (self.window // self.limit)

    def _cost(self, positions: Sequence[int]) -> int:
        tokens = self.tokens[:, [self.sample(position) for position in positions]]
        return int(self._costs(tokens, np.array([0, len(positions)]))[0])

    def _costs(self, tokens: IntArray, cuts: IntArray) -> IntArray:
        """In tokens, of the batches of samples that have `tokens`."""
        if self.config.layout == "padded":
            return padded_tokens(tokens, cuts)
        return np.add.reduceat(tokens.sum(0), cuts[:-1])

    def _count(self, positions: Sequence[int]) -> int:
        """What a batch counts in the mean of its step."""
        if self.counts is None:
            return len(positions)
        return int(self.counts[[self.sample(position) for position in positions]].sum())

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

    def _fill(self, tokens: IntArray) -> FloatArray:
        """The part of a batch that each sample takes."""
        filled: FloatArray = np.full(tokens.shape[1], 1 / self.limit)
        return np.maximum(filled, tokens.sum(0) / self.config.max_tokens) if self.config.max_tokens else filled


def index_token_counts(table: pa.Table, where: object) -> IntArray:
    """`[2, N]`: of every sample of a cache, from its index; FormatError F7 where one has none."""
    target, controls = _rows(table, "image_latents", where), _rows(table, "control_latents", where)
    text = table["text_length"].fill_null(0).to_numpy().astype(np.int64)
    if min(target.min(initial=1), text.min(initial=1)) < 1:
        raise IndexFileError("a sample has no tokens", where=where)
    return np.stack([target + controls, text])


def index_target_tokens(table: pa.Table, where: object) -> IntArray:
    """`[N]`: of the target of every sample of a cache, from its index."""
    return _rows(table, "image_latents", where)


def _rows(table: pa.Table, tensor: str, where: object) -> IntArray:
    """Of a tensor in each sample; 0 where there is none."""
    try:
        rows = pc.list_element(pc.struct_field(table[tensor], "shape"), 0)
        found: IntArray = pc.fill_null(rows, 0).to_numpy().astype(np.int64)
    except pa.ArrowException as error:
        raise IndexFileError(f"the token counts cannot be read: {error}", where=where) from None
    return found


def sequence_settings(config: BatchConfig) -> dict[str, Any]:
    """The settings that decide which batch comes when, None where one has no say: a resumed run must share them."""
    return {
        "train.batch_size": config.batch_size or (None if config.max_tokens else 1),
        "train.max_tokens": config.max_tokens,
        "train.layout": config.layout if _in_groups(config) else None,
        "train.drop_last": config.drop_last if _in_groups(config) else None,
        "train.bucketing_window": config.bucketing_window if _bucketed(config) else None,
        "train.balance_window": config.balance_window if config.balance_window > 1 else None,
        "train.validation_split": config.validation_split or None,
    }


def padded_tokens(tokens: IntArray, cuts: IntArray) -> IntArray:
    """What each batch costs, padding included."""
    longest = np.maximum.reduceat(tokens, cuts[:-1], axis=1).sum(0)
    cost: IntArray = longest * np.diff(cuts)
    return cost


def _bucketed(config: BatchConfig) -> bool:
    """Whether samples of like size are put side by side: where something would be padded otherwise."""
    return config.layout == "padded" and config.bucketing_window > 1 and _in_groups(config)


def _in_groups(config: BatchConfig) -> bool:
    """Whether a batch can have more than one sample."""
    return config.batch_size != 1 and (config.batch_size or config.max_tokens) is not None


def _whole(window: int, batch: int, run: int) -> int:
    """The window in whole batches, and in whole runs of them where that leaves out little."""
    runs = window // (batch * run)
    return batch * (runs * run if runs >= 4 else max(1, window // batch))


def _check_budget(tokens: IntArray, config: BatchConfig, name: Callable[[int], str]) -> None:
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
        found=f"{image + text:,}: {image:,} of its images, {text:,} of its text",
        do=f"set train.max_tokens={image + text} or more, or build the cache at a smaller data.vae_image_size",
    )


def _check_drop_last(config: BatchConfig, samples: int, in_epoch: int) -> None:
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


def _alike(tokens: IntArray, fill: FloatArray) -> IntArray:
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


def _runs(cost: IntArray, length: int, before: int, chance: np.random.Generator) -> IntArray:
    """An order of batches in runs of `length` that cost alike; which run comes when, and what is in it when, is chance.

    Runs begin where the number of the batch, of which there are `before`, is a multiple of `length`: what processes
    train at the same time lies within one, when their number divides it.
    """
    n = len(cost)
    if n <= length or length == 1:
        return np.arange(n)
    lengths = np.diff(np.unique(np.concatenate([[0], np.arange(-before % length, n, length), [n]])))
    by_rank = chance.permutation(len(lengths))  # which run has the least tokens, and so on
    runs = np.split(np.argsort(cost, kind="stable"), np.cumsum(lengths[by_rank])[:-1])
    return np.concatenate([np.sort(runs[rank]) for rank in np.argsort(by_rank)])


def _reordered(window: Window, order: IntArray) -> Window:
    """The same batches in another order."""
    sizes, places = np.diff(window.cuts), np.split(window.places, window.cuts[1:-1])
    return Window(np.concatenate([places[i] for i in order]), np.concatenate([[0], np.cumsum(sizes[order])]))


def _wait(costs: IntArray, world_size: int, per_step: int) -> float:
    """Which part of the time processes wait for one another, if it takes what its tokens say."""
    step = world_size * per_step
    costs = np.resize(costs, -(-len(costs) // step) * step)  # the last step goes on into the next epoch
    turns = np.sort(costs.reshape(-1, step)).reshape(-1, world_size)
    return float(1 - turns.sum() / (world_size * turns.max(1).sum()))
