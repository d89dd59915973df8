"""The order of an epoch and its batches, the same in every process; token budgets that need few batch shapes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError, IndexFileError, TrainError
from qwen_cache.settings.sections import BatchConfig
from qwen_cache.terminal import plural

# ---- epoch -----------------------------------------------------------------------------------------------------------
# The samples of an epoch and their order: a pure function of the seed and the number of the epoch.
#
# Each part of a mixture comes as often as its weight says: weight 1 is once, weight 2.5 is twice, and half of the part
# a third time. That half moves on with every epoch, so after any number of epochs the samples of a part have come
# equally often, to within one. Weights are rounded to whole samples, at least one per part.
#
# Where samples are alternatives, such as captions of one image, they take turns: each time an image comes, the next one
# stands for it, in an order of the image's own.

IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float64]

ORDER = 0  # the random stream that shuffles an epoch; streams from 1 are free for the caller
ROUND = 1 << 32  # the random stream that shuffles a part
TURNS = 1 << 33  # the random stream that shuffles alternatives


@dataclass(frozen=True)
class Begin:
    """The point in a run at which a plan begins: all 0, unless the run has trained by another plan before."""

    epoch: int = 0
    samples: int = 0
    """Samples that were trained before."""
    position: int = 0
    """The first position of the plan, so that no two samples of a run share one."""
    batches: int = 0
    """Batches that were trained before, where the plan knows."""


BEGIN = Begin()


@dataclass(frozen=True)
class MixturePart:
    """Samples of equal weight."""

    samples: IntArray
    """The indices of the samples."""
    weight: float = 1.0
    begins: IntArray | None = None
    """The first alternative of each image in `samples`, which repeats those that come more often. None: none are
    alternatives."""

    def __len__(self) -> int:
        """How many samples an epoch has with weight 1."""
        return len(self.samples if self.begins is None else self.begins)

    @property
    def per_epoch(self) -> int:
        """How many samples of this part an epoch has."""
        return max(1, round(len(self) * self.weight)) if len(self) else 0


class Epochs:
    """The endless sequence of epochs; each has `len` samples."""

    def __init__(self, parts: Sequence[MixturePart], seed: int) -> None:
        self.parts, self.seed = tuple(parts), seed
        self.order = lru_cache(maxsize=2)(self._order)

    def __len__(self) -> int:
        return sum(part.per_epoch for part in self.parts)

    def _order(self, epoch: int) -> IntArray:
        """The indices of the samples of an epoch, in order."""
        samples = np.concatenate([self._of_part(i, epoch) for i in range(len(self.parts))])
        return samples[random(self.seed, epoch, ORDER).permutation(len(samples))]

    def _of_part(self, i: int, epoch: int) -> IntArray:
        part, count = self.parts[i], len(self.parts[i])
        repeats, rest = divmod(part.per_epoch, max(1, count))
        if part.begins is None and not rest:
            return np.tile(part.samples, repeats)
        ring = random(self.seed, i, ROUND).permutation(count)  # each epoch takes the next `rest` of it
        again = ring[(epoch * rest + np.arange(rest)) % count] if rest else ring[:0]
        chosen = np.concatenate([np.tile(np.arange(count), repeats), again])
        samples, positions = part.samples, chosen
        if part.begins is not None:
            taken = (epoch * rest - np.argsort(ring) + count - 1) // max(1, count)  # from the ring in earlier epochs
            turns = epoch * repeats + taken[chosen] + np.repeat(np.arange(repeats + 1), [count] * repeats + [rest])
            lengths = np.diff(part.begins, append=len(samples))
            # The alternatives, those of each image in a random order.
            images = np.searchsorted(part.begins, np.arange(len(samples)), side="right")
            samples = samples[np.lexsort((random(self.seed, i, TURNS).random(len(images)), images))]
            positions = part.begins[chosen] + turns % lengths[chosen]
        order: IntArray = samples[positions]
        return order


def random(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """A generator with its own Philox stream, so epoch 100 costs no more than epoch 0."""
    return np.random.Generator(np.random.Philox(key=[seed % 2**64, epoch], counter=[0, 0, 0, stream]))


# ---- batch plan ------------------------------------------------------------------------------------------------------
# The batch plan: which samples form a batch, from token counts alone, without opening a shard.
#
# An epoch (`epoch`) is a fresh permutation of the samples, cut into windows. Within a window, samples are sorted by
# length, cut into batches, and the batches are shuffled: little is padded, and the order stays random. The exception is
# runs of batches of similar cost, so that processes hardly wait for one another. Every sample is trained once per epoch
# (`drop_last` skips less than a batch, other samples each time), and no batch spans two epochs. The position of a run
# is one number: its consumed samples. Each window has a known number of samples, so the next batch costs the planning
# of one window, in any epoch and for any number of processes.
#
# A padded batch of B samples costs B · (its longest image + its longest text) tokens; a packed batch costs the tokens
# of its samples. Each sample is counted with its own prompt; a dropped caption makes it shorter. A sample that exceeds
# `max_tokens` is refused.

ROUNDING = 1e-6  # batches: three thirds of a batch add up to one batch only within this
UNSORTED_WINDOW = 4096  # samples cut into batches at a time where sorting gains nothing
SUMMARISED = 1 << 16  # samples that a summary of a larger epoch is based on


@dataclass(frozen=True)
class Window:
    """Consecutive samples of an epoch as batches: batch i is `indices[cuts[i] : cuts[i + 1]]`."""

    indices: IntArray
    """Indices into the order of the epoch."""
    cuts: IntArray


@dataclass(frozen=True)
class RankBatch:
    """The batch that one rank trains while every other rank trains a batch of its own."""

    positions: list[int]
    loss_scale: float
    """Weight of this batch's mean loss in the mean of its optimizer step; 1 on average.

    A plain mean of means would give samples of small batches more weight: under a token budget, the large samples.
    """
    consumed_samples: int
    """Samples that all ranks together have trained after this batch."""


@dataclass(frozen=True)
class Summary:
    """Statistics of the batches of an epoch."""

    batches: int
    most_samples: int
    """Samples in the largest batch."""
    tokens: float
    """Tokens per batch on average, padding included."""
    padding: float
    """Fraction of all tokens that is padding."""
    samples: int
    """How many samples the summary is based on: the first of the epoch."""
    in_epoch: int
    """Samples per epoch."""
    wait: float | None
    """Fraction of the time that ranks wait for the one with the most tokens; None for one rank."""

    @property
    def samples_per_batch(self) -> float:
        return self.in_epoch / self.batches

    def __str__(self) -> str:
        based_on = "" if self.samples == self.in_epoch else f", based on the first {self.samples:,} samples"
        wait = "" if self.wait is None else f", ranks wait {100 * self.wait:.1f} %"
        size = f"at most {plural(self.most_samples, 'sample')}, {self.tokens:,.0f} tokens on average"
        return f"{self.batches:,} per epoch of {size}, padding {100 * self.padding:.1f} %{wait}{based_on}"


class BatchPlan:
    """The endless sequence of batches, the same on all ranks.

    The *position* of a sample is epoch · samples per epoch + its index in the order of that epoch. It does not depend
    on the batches, so it seeds everything random about the sample.
    """

    def __init__(
        self,
        tokens: IntArray,
        config: BatchConfig,
        name: Callable[[int], str] = str,
        parts: Sequence[MixturePart] | None = None,
        loss_tokens: IntArray | None = None,
        begin: Begin = BEGIN,
    ) -> None:
        """Plan the samples whose token counts are `tokens` ([2, N]: row 0 target and controls, row 1 text).

        `name` gives a sample's name for error messages. `parts` sets how often samples come in an epoch; by
        default every sample comes once. `loss_tokens` ([N]) is the weight of each sample in the mean loss of an
        optimizer step; by default all weigh the same. `begin` continues a run that another plan began. Raises
        TrainError for a sample that exceeds `max_tokens`,
        ConfigError where `drop_last` cannot apply.
        """
        total = tokens.sum(0)
        if config.max_tokens is not None and total.max(initial=0) > config.max_tokens:
            largest = int(total.argmax())
            image, text = tokens[:, largest].tolist()
            of_parts = f": {image:,} of its images, {text:,} of its text" if text else ""
            more = int((total > config.max_tokens).sum()) - 1
            fewer = "lower train.noise_draws, or" if config.noise_draws > 1 else "or"
            raise TrainError(
                f"sample {name(largest)} alone exceeds train.max_tokens" + (f", and so do {more} more" if more else ""),
                expected=f"at most {config.max_tokens:,} tokens",
                found=f"{image + text:,}{of_parts}",
                do=f"set train.max_tokens={image + text} or more, {fewer} build the cache at a smaller "
                "data.vae_image_size",
            )
        self.tokens, self.config, self.loss_tokens, self.begin = tokens, config, loss_tokens, begin
        self.epochs = Epochs([MixturePart(np.arange(tokens.shape[1]))] if parts is None else parts, config.seed)
        samples = len(self.epochs)
        self.limit = config.batch_size or (max(1, samples) if config.max_tokens else 1)
        self.in_epoch = samples - (samples % self.limit if config.drop_last else 0)
        if config.drop_last and config.max_tokens is not None:
            do = "remove one of them: under a token budget, batches differ in size anyway"
            raise ConfigError("train.drop_last is for a fixed train.batch_size, not for train.max_tokens", do=do)
        if samples and not self.in_epoch:
            raise ConfigError(
                "train.drop_last leaves nothing to train",
                expected=f"{config.batch_size} samples or more, as train.batch_size says",
                found=samples,
                do="lower train.batch_size, or set train.drop_last=false",
            )
        self.bucketed = _bucketed(config)
        # at least two windows per epoch: with one, a small dataset would have nearly the same batches in every epoch
        window = min(config.bucketing_window, -(-samples // 2)) if self.bucketed else UNSORTED_WINDOW
        self.window = max(1, window if config.max_tokens else _whole(window, self.limit, config.balance_window))
        self._windows = lru_cache(maxsize=4)(self._plan)  # batches fetched ahead may belong to the next window

    def batch(self, consumed_samples: int) -> list[int]:
        """The positions of the samples in the next batch after `consumed_samples`; TrainError if none begins there."""
        epoch, index = divmod(consumed_samples - self.begin.samples, self.in_epoch)
        number, offset = divmod(index, self.window)
        window = self._windows(self.begin.epoch + epoch, number)
        i = int(np.searchsorted(window.cuts, offset))
        if window.cuts[i] != offset:
            do = "resume with the program and the settings that wrote the checkpoint, or start a new run"
            raise TrainError("no batch begins here", found=f"{consumed_samples} samples trained", do=do)
        indices: list[int] = window.indices[window.cuts[i] : window.cuts[i + 1]].tolist()
        return [self.begin.position + epoch * len(self.epochs) + index for index in indices]

    def enters_an_epoch(self, consumed_samples: int, batches: int) -> bool:
        """True if the next `batches`, a step, have samples of a later epoch than the sample that was trained last."""
        end = consumed_samples
        for _ in range(batches):
            end += len(self.batch(end))
        last, coming = (each - 1 - self.begin.samples for each in (consumed_samples, end))
        return last >= 0 and coming // self.in_epoch > last // self.in_epoch

    def next_begin(self, consumed_samples: int) -> Begin:
        """The point at which another plan takes over after `consumed_samples`: with the next epoch."""
        epochs, left = divmod(consumed_samples - self.begin.samples, self.in_epoch)
        batches = 0 if self.config.max_tokens else epochs * self._batches_in_epoch() - (-left // self.limit)
        epochs += bool(left)
        return Begin(
            self.begin.epoch + epochs,
            consumed_samples,
            self.begin.position + epochs * len(self.epochs),
            self.begin.batches + batches,
        )

    def rank_batches(
        self, consumed_samples: int, rank: int, world_size: int, per_step: int, *, one_epoch: bool = False
    ) -> Iterator[RankBatch]:
        """The endless batches of `rank`, from an optimizer step that begins after `consumed_samples`.

        A step is the next `per_step` · `world_size` batches, sorted by cost. Sorted batch k goes to rank
        k mod `world_size`, so the ranks train batches of similar cost at the same time. With `one_epoch` they end
        before a later step that enters the next epoch.
        """
        first = consumed_samples
        while True:
            if one_epoch and consumed_samples > first and self.enters_an_epoch(consumed_samples, per_step * world_size):
                return
            batches = []
            for _ in range(per_step * world_size):
                batches.append(self.batch(consumed_samples))
                consumed_samples += len(batches[-1])
            if world_size > 1:
                batches.sort(key=self._cost)
            weights = [self._loss_weight(positions) for positions in batches]
            remaining = sum(map(len, batches))
            for first in range(0, len(batches), world_size):
                remaining -= sum(map(len, batches[first : first + world_size]))
                loss_scale = weights[first + rank] / (sum(weights) / len(batches))
                yield RankBatch(batches[first + rank], loss_scale, consumed_samples - remaining)

    def sample(self, position: int) -> int:
        """The index in the cache of the sample at `position`."""
        epoch, index = divmod(position - self.begin.position, len(self.epochs))
        return int(self.epochs.order(self.begin.epoch + epoch)[index])

    def summary(self, world_size: int = 1, per_step: int = 1) -> Summary:
        """Statistics of the first epoch, for optimizer steps of `per_step` batches on each of `world_size` ranks."""
        windows = range(-(-min(self.in_epoch, SUMMARISED) // self.window))
        epoch = self.begin.epoch
        plans = [self._plan(epoch, number) for number in windows]
        tokens = [self.tokens[:, self.epochs.order(epoch)[plan.indices]] for plan in plans]
        sizes = np.concatenate([np.diff(plan.cuts) for plan in plans])
        valid = np.concatenate([each.sum(0) for each in tokens])
        costs = np.concatenate([self._costs(each, plan.cuts) for each, plan in zip(tokens, plans, strict=True)])
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
        indices = np.arange(begin, min(begin + self.window, self.in_epoch))
        tokens = self.tokens[:, self.epochs.order(epoch)[indices]]
        generator = random(self.config.seed, epoch, 1 + number)
        if not self.bucketed:
            window = Window(indices, self._cut(tokens))
        else:
            order = _by_similar_length(tokens, self._fill(tokens))
            window = Window(indices[order], self._cut(tokens[:, order]))
            window = _reordered(window, generator.permutation(len(window.cuts) - 1))
        cost, before = self._costs(tokens[:, window.indices - begin], window.cuts), self._batches_before(epoch, number)
        return _reordered(window, _runs(cost, self.config.balance_window, before, generator))

    def _batches_before(self, epoch: int, number: int) -> int:
        """How many batches come before a window, where that is known without planning them all; else 0."""
        if self.config.max_tokens:
            return 0
        epochs = epoch - self.begin.epoch
        return self.begin.batches + epochs * self._batches_in_epoch() + number * (self.window // self.limit)

    def _batches_in_epoch(self) -> int:
        """How many batches an epoch has, without a token budget."""
        return -(-self.in_epoch // self.limit)

    def _cost(self, positions: Sequence[int]) -> int:
        tokens = self.tokens[:, [self.sample(position) for position in positions]]
        return int(self._costs(tokens, np.array([0, len(positions)]))[0])

    def _costs(self, tokens: IntArray, cuts: IntArray) -> IntArray:
        """The cost of each batch in tokens; the samples have `tokens`."""
        if _is_padded(self.config):
            return padded_tokens(tokens, cuts)
        return np.add.reduceat(tokens.sum(0), cuts[:-1])

    def _loss_weight(self, positions: Sequence[int]) -> int:
        """The weight of a batch in the mean loss of its step."""
        if self.loss_tokens is None:
            return len(positions)
        return int(self.loss_tokens[[self.sample(position) for position in positions]].sum())

    def _cut(self, tokens: IntArray) -> IntArray:
        """The bounds of batches that each take as many of the next samples as fit."""
        budget = self.config.max_tokens
        padded = budget is not None and _is_padded(self.config)
        ends = _padded_ends if padded else _packed_ends
        end: list[int] = ends(tokens, self.limit, budget or int(tokens.sum())).tolist()
        cuts = [0]
        while cuts[-1] < len(end):
            cuts.append(end[cuts[-1]])
        return np.array(cuts)

    def _fill(self, tokens: IntArray) -> FloatArray:
        """The fraction of a batch that each sample fills."""
        filled: FloatArray = np.full(tokens.shape[1], 1 / self.limit)
        return np.maximum(filled, tokens.sum(0) / self.config.max_tokens) if self.config.max_tokens else filled


def index_token_counts(table: pa.Table, where: object) -> IntArray:
    """Token counts `[2, N]` of the samples of a cache, from its index: row 0 target and controls, row 1 text.

    FormatError F7 where a sample has none.
    """
    target, controls = index_target_tokens(table, where), tensor_rows(table["control_latents"], where)
    text = table["text_length"].fill_null(0).to_numpy().astype(np.int64)
    if min(target.min(initial=1), text.min(initial=1)) < 1:
        raise IndexFileError("a sample has no tokens", where=where)
    return np.stack([target + controls, text])


def index_target_tokens(table: pa.Table, where: object) -> IntArray:
    """Token counts `[N]` of the targets of a cache's samples, or of the images to generate, from its index."""
    tokens = tensor_rows(table["image_latents"], where)
    to_generate = table["image_latents"].is_null().to_numpy()
    if to_generate.any() and "img_shapes" in table.column_names:
        target = pc.list_element(table["img_shapes"], 0)
        sides = (pc.list_element(target, i).to_numpy().astype(np.int64) for i in range(3))
        tokens = np.where(to_generate, math.prod(sides), tokens)
    return tokens


def tensor_rows(column: pa.ChunkedArray, where: object) -> IntArray:
    """`[N]`: the rows of a tensor in each sample, from its column of an index; 0 where a sample has no such tensor."""
    try:
        first_sizes = pc.list_element(pc.struct_field(column, "shape"), 0)
        rows: IntArray = pc.fill_null(first_sizes, 0).to_numpy().astype(np.int64)
    except pa.ArrowException as error:
        raise IndexFileError(f"the token counts cannot be read: {error}", where=where) from None
    return rows


def row_tokens(
    tokens: IntArray, *, joint: bool, noise_draws: int = 1, target_tokens: IntArray | None = None
) -> IntArray:
    """Token counts `[2, N]` as a batch computes them: of images and text, or with `joint` of both in one row and 0.

    `tokens` are those of the cache. With several noise draws the `target_tokens` `[N]` count once for each.
    """
    if target_tokens is not None and noise_draws > 1:
        tokens = tokens + np.stack([(noise_draws - 1) * target_tokens, np.zeros_like(target_tokens)])
    return np.stack([tokens.sum(0), np.zeros_like(tokens[0])]) if joint else tokens


def pair_tokens(tokens: IntArray, rejected: IntArray, config: BatchConfig) -> IntArray:
    """Token counts `[2, N]` of samples with two rows in a batch each: `tokens` and `rejected`, `[2, N]` as well.

    A padded batch pads both rows to its longest, so each counts as the longer one.
    """
    both = np.stack([tokens, rejected])
    count: IntArray = 2 * both.max(0) if _is_padded(config) else both.sum(0)
    return count


def sequence_settings(config: BatchConfig) -> dict[str, Any]:
    """The settings that determine the sequence of batches, None for those without effect: a resumed run needs them."""
    return {
        "train.batch_size": config.batch_size or (None if config.max_tokens else 1),
        "train.max_tokens": config.max_tokens,
        "train.layout": ("padded" if _is_padded(config) else "packed") if _in_groups(config) else None,
        "train.drop_last": config.drop_last if _in_groups(config) else None,
        "train.bucketing_window": config.bucketing_window if _bucketed(config) else None,
        "train.balance_window": config.balance_window if config.balance_window > 1 else None,
        "train.validation_split": config.validation_split or None,
        "train.captions": config.captions if config.captions != "all" else None,
        "train.noise_draws": config.noise_draws if config.noise_draws > 1 else None,
    }


def padded_tokens(tokens: IntArray, cuts: IntArray) -> IntArray:
    """The tokens of each batch, padding included."""
    longest = np.maximum.reduceat(tokens, cuts[:-1], axis=1).sum(0)
    cost: IntArray = longest * np.diff(cuts)
    return cost


def _bucketed(config: BatchConfig) -> bool:
    """True if samples are batched by length: only where padding would be needed otherwise."""
    return _is_padded(config) and config.bucketing_window > 1 and _in_groups(config)


def _is_padded(config: BatchConfig) -> bool:
    """True if rows are padded; "auto" is, until training chooses for its device."""
    return config.layout != "packed"


def _in_groups(config: BatchConfig) -> bool:
    """True if a batch can have more than one sample."""
    return config.batch_size != 1 and (config.batch_size or config.max_tokens) is not None


def _whole(window: int, batch: int, run: int) -> int:
    """The window rounded down to whole batches, and to whole runs of batches where that changes it little."""
    runs = window // (batch * run)
    return batch * (runs * run if runs >= 4 else max(1, window // batch))


def _by_similar_length(tokens: IntArray, fill: FloatArray) -> IntArray:
    """An order in which neighbours are similar in both lengths, image and text.

    Sort by the length with the larger spread, split into halves, and repeat for each half down to single batches; a
    token of either length costs the same. Adjacent halves sort the other length in opposite directions, so that a batch
    across their border is hardly longer. The sort is stable: samples of equal size stay in random order.

    For example, 8 samples a to h in batches of 2, with their tokens of image and text:

        (a 10 8) (b 40 8) (c 10 2) (d 40 2) (e 10 6) (f 40 6) (g 10 4) (h 40 4)
        image lengths are spread further, by 30:   a c e g | b d f h
        text, ascending left, descending right:    c g | e a | b f | h d
    """
    n = tokens.shape[1]
    order, begin, down = np.arange(n), np.array([0]), np.zeros((2, 1), bool)
    while True:
        end, groups, rows = np.append(begin[1:], n), np.arange(len(begin)), tokens[:, order]
        spread = np.maximum.reduceat(rows, begin, axis=1) - np.minimum.reduceat(rows, begin, axis=1)
        by = (spread[1] > spread[0]).astype(np.int64)
        group = np.repeat(groups, end - begin)
        length = rows[by[group], np.arange(n)] * np.where(down[by, groups], -1, 1)[group]
        order = order[np.argsort(group * 2 * (tokens.max() + 1) + length, kind="stable")]
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
    """The end of a batch that begins at each sample: its size bit by bit, from maxima over 2, 4, 8, … samples."""
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
    """The end of a batch that begins at each sample, without padding."""
    until = np.concatenate([[0], np.cumsum(tokens.sum(0))])
    n = tokens.shape[1]
    fits = np.searchsorted(until, until[:-1] + budget, side="right") - 1
    return np.minimum(np.minimum(fits, np.arange(n) + samples), n)


def _runs(cost: IntArray, length: int, before: int, generator: np.random.Generator) -> IntArray:
    """An order of batches in runs of `length` of similar cost; the order of runs, and within runs, is random.

    `before` batches come before these. A run begins where the number of the batch is a multiple of `length`, so batches
    that ranks train at the same time belong to one run if the world size divides `length`.
    """
    n = len(cost)
    if n <= length or length == 1:
        return np.arange(n)
    lengths = np.diff(np.unique(np.concatenate([[0], np.arange(-before % length, n, length), [n]])))
    by_cost = generator.permutation(len(lengths))  # the run with the cheapest batches, the second cheapest, …
    runs = np.split(np.argsort(cost, kind="stable"), np.cumsum(lengths[by_cost])[:-1])
    return np.concatenate([np.sort(runs[rank]) for rank in np.argsort(by_cost)])


def _reordered(window: Window, order: IntArray) -> Window:
    """The same batches in another order."""
    sizes, batches = np.diff(window.cuts), np.split(window.indices, window.cuts[1:-1])
    return Window(np.concatenate([batches[i] for i in order]), np.concatenate([[0], np.cumsum(sizes[order])]))


def _wait(costs: IntArray, world_size: int, per_step: int) -> float:
    """The fraction of the time that ranks wait for one another, if time is proportional to tokens."""
    step = world_size * per_step
    costs = np.resize(costs, -(-len(costs) // step) * step)  # the last step continues into the next epoch
    at_once = np.sort(costs.reshape(-1, step)).reshape(-1, world_size)
    return float(1 - at_once.sum() / (world_size * at_once.max(1).sum()))


# ---- budgets ---------------------------------------------------------------------------------------------------------
# Help to choose `train.max_tokens`: batch statistics under a few token budgets.
#
# They come from the plan that a run with this budget makes, with every other setting at its default; for millions of
# samples, from the first of an epoch (`BatchPlan.summary`). No budget is below the largest sample, which would not fit.

LARGEST_SAMPLES = (1, 2, 4, 8)  # how many of the largest samples a budget has room for
TOKEN_STEP = 1024  # tokens


@dataclass(frozen=True)
class Budget:
    """The batches of an epoch under one `train.max_tokens`, in `train.layout=padded`."""

    max_tokens: int
    samples_per_batch: float
    padding: float
    """Fraction of all tokens that is padding."""
    padding_by_chance: float
    """The same for batches at random (`train.bucketing_window=1`); `inspect --json` prints it by this name."""


def budgets(tokens: IntArray) -> list[Budget]:
    """Budgets for samples with `tokens` ([2, N], as for `BatchPlan`), without those that give equal batches."""
    largest = int(tokens.sum(0).max(initial=0))
    candidates = [_budget(tokens, round_budget(largest, samples)) for samples in LARGEST_SAMPLES if largest]
    changes = (replace(later, max_tokens=earlier.max_tokens) != earlier for earlier, later in pairwise(candidates))
    return candidates[:1] + [budget for budget, differs in zip(candidates[1:], changes, strict=True) if differs]


def round_budget(largest: int, samples: int) -> int:
    """Room for `samples` of the largest samples and less than an eighth of another: a multiple of 1024 where samples
    are large enough, else of a smaller power of two."""
    step = min(TOKEN_STEP, 1 << max(largest // 8, 1).bit_length() - 1)
    return -(-largest * samples // step) * step


def _budget(tokens: IntArray, max_tokens: int) -> Budget:
    planned, at_random = (
        BatchPlan(tokens, config).summary()
        for config in (BatchConfig(max_tokens=max_tokens), BatchConfig(max_tokens=max_tokens, bucketing_window=1))
    )
    return Budget(max_tokens, planned.samples_per_batch, planned.padding, at_random.padding)
