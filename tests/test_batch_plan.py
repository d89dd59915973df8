"""The batch plan: whole epochs, limits that hold, little padding, and one number for the position of a run.

The judges are loops over single samples: what a batch costs, which samples an epoch had, batches filled one by one.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from qwen_cache.batching import BatchPlan, IntArray, RankBatch, _by_similar_length, sequence_settings
from qwen_cache.errors import ConfigError, QwenCacheError, TrainError
from qwen_cache.settings.sections import TrainConfig

from .support.paths import load_tool

wide_mixture = load_tool("bench_batches").wide_mixture  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Case:
    """Some samples and some settings; `str` names it in a failure."""

    tokens: IntArray
    settings: dict[str, Any]

    def plan(self, **changes: Any) -> BatchPlan:
        return BatchPlan(self.tokens, TrainConfig(**{**self.settings, **changes}))

    def __str__(self) -> str:
        return f"{self.tokens.shape[1]} samples, {self.settings}"


def any_case(seed: int) -> Case:
    """A few samples of similar or different sizes, and settings that fit them."""
    chance = random.Random(seed)
    samples, kinds = chance.randint(1, 70), chance.choice([1, 3, 1000])
    tokens = np.array([[chance.randint(1, kinds) * scale for _ in range(samples)] for scale in (40, 3)])
    settings: dict[str, Any] = {
        "seed": chance.randrange(2**32),
        "layout": chance.choice(["padded", "padded", "packed"]),
        "bucketing_window": chance.choice([1, 5, 16, 4096]),
    }
    if chance.random() < 0.5:
        settings["max_tokens"] = int(tokens.sum(0).max() * chance.choice([1, 1.7, 5, 100]))
    if "max_tokens" not in settings or chance.random() < 0.5:
        settings["batch_size"] = chance.randint(1, 9)
    if "max_tokens" not in settings:
        settings["drop_last"] = settings["batch_size"] <= samples and chance.random() < 0.3
    return Case(tokens, settings)


CASES = [any_case(seed) for seed in range(25)]


def each_case(test: Callable[[Case], None]) -> Callable[[], None]:
    """Run a test on every case; a failure names its case."""

    def run() -> None:
        for case in CASES:
            try:
                test(case)
            except BaseException as error:
                error.add_note(str(case))
                raise

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


def epochs(plan: BatchPlan, count: int) -> list[list[list[int]]]:
    """The positions in every batch of the first epochs."""
    found = []
    for epoch in range(count):
        batches, done = [], epoch * plan.in_epoch
        while done < (epoch + 1) * plan.in_epoch:
            batches.append(plan.batch(done))
            done += len(batches[-1])
        found.append(batches)
    return found


def batches_of(plan: BatchPlan) -> Iterator[list[int]]:
    """The positions in every batch, without end."""
    done = 0
    while True:
        yield (batch := plan.batch(done))
        done += len(batch)


def samples_of(plan: BatchPlan, batches: list[list[int]]) -> list[int]:
    return [plan.sample(position) for batch in batches for position in batch]


def cost(tokens: IntArray, samples: list[int], layout: str) -> int:
    """The cost of a batch of these samples."""
    images, texts = ([int(tokens[row, i]) for i in samples] for row in (0, 1))
    return sum(images) + sum(texts) if layout == "packed" else len(samples) * (max(images) + max(texts))


def waste(plan: BatchPlan, batches: list[list[int]], layout: str = "padded") -> float:
    """The fraction of padding, batch by batch."""
    valid, all_tokens = 0, 0
    for batch in batches:
        samples = [plan.sample(position) for position in batch]
        valid += sum(int(plan.tokens[0, i] + plan.tokens[1, i]) for i in samples)
        all_tokens += cost(plan.tokens, samples, layout)
    return 1 - valid / all_tokens


def batch_costs(plan: BatchPlan, batches: list[list[int]]) -> Any:
    return np.array([cost(plan.tokens, samples_of(plan, [batch]), plan.config.layout) for batch in batches])


# ---- whole epochs ----------------------------------------------------------------------------------------------------


@each_case
def test_every_epoch_has_every_sample_once(case: Case) -> None:
    """With drop_last all but the samples of the last batch, which are others in each epoch."""
    plan, n = case.plan(), case.tokens.shape[1]
    left_out = n % case.settings["batch_size"] if case.settings.get("drop_last") else 0
    for epoch, batches in enumerate(epochs(plan, 4)):
        counts = Counter(samples_of(plan, batches))
        assert set(counts.values()) == {1}
        assert len(counts) == n - left_out
        assert {position // n for batch in batches for position in batch} == {epoch}


@each_case
def test_no_batch_exceeds_its_limits(case: Case) -> None:
    """With batch_size alone, only the last batch of an epoch is smaller; with drop_last none is."""
    plan, settings = case.plan(), case.settings
    for batches in epochs(plan, 2):
        sizes = Counter(map(len, batches))
        assert max(sizes) <= settings.get("batch_size", math.inf)
        for batch in batches:
            samples = [plan.sample(position) for position in batch]
            assert cost(case.tokens, samples, settings["layout"]) <= settings.get("max_tokens", math.inf)
        if "max_tokens" not in settings:
            rest = sum(map(len, batches)) % settings["batch_size"]
            assert sum(count for size, count in sizes.items() if size < settings["batch_size"]) == (rest > 0)
            assert not (rest and settings["drop_last"])


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("batch_size", [None, 3])
@pytest.mark.parametrize("seed", range(4))
def test_without_sorting_each_batch_takes_as_many_samples_as_fit(
    seed: int, batch_size: int | None, layout: str
) -> None:
    """Equal to filling batches sample by sample, in the order of the epoch."""
    tokens = wide_mixture(400, seed)
    plan = BatchPlan(
        tokens,
        TrainConfig(
            max_tokens=60_000, batch_size=batch_size, bucketing_window=1, layout=layout, seed=seed, balance_window=1
        ),
    )
    expected: list[list[int]] = [[]]
    for position in range(400):
        more = [*expected[-1], position]
        too_many = len(more) > (batch_size or 400)
        if too_many or cost(tokens, [plan.sample(p) for p in more], layout) > 60_000:
            expected.append([])
        expected[-1].append(position)
    assert epochs(plan, 1) == [expected]
    assert len(set(map(len, expected))) > 1, "too similar to show anything"


def test_batches_are_not_needlessly_small() -> None:
    """On a wide mixture they are nearly full, and half as many as batches at random."""
    tokens = wide_mixture(8192)
    (planned,) = epochs(plan := BatchPlan(tokens, TrainConfig(max_tokens=160_000)), 1)
    (at_random,) = epochs(BatchPlan(tokens, TrainConfig(max_tokens=160_000, bucketing_window=1)), 1)
    costs = [cost(tokens, [plan.sample(position) for position in batch], "padded") for batch in planned]
    assert np.mean(costs) > 0.94 * 160_000
    assert len(planned) < 0.55 * len(at_random)


# ---- chance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{}, {"batch_size": 1}, {"max_tokens": 100_000, "batch_size": 1}], ids=str)
def test_single_samples_come_in_the_order_of_the_permutation(settings: dict[str, Any]) -> None:
    plan = BatchPlan(wide_mixture(50), TrainConfig(**settings, balance_window=1))
    assert epochs(plan, 2) == [[[p] for p in range(50)], [[p] for p in range(50, 100)]]
    orders = [samples_of(plan, batches) for batches in epochs(plan, 20)]
    assert len(set(map(tuple, orders))) == 20


@pytest.mark.parametrize("tokens", [np.full((2, 8), 9), wide_mixture(8)], ids=["one size", "mixed"])
def test_every_sample_comes_at_every_time(tokens: IntArray) -> None:
    """Each of 8 is in each of four batches a quarter of the time; of one size, with each other one time in seven."""
    plan, count = BatchPlan(tokens, TrainConfig(batch_size=2)), 800
    in_batch, pairs = np.zeros((4, 8)), np.zeros((8, 8))
    for batches in epochs(plan, count):
        for i, batch in enumerate(batches):
            a, b = (plan.sample(position) for position in batch)
            in_batch[i, [a, b]] += 1
            pairs[min(a, b), max(a, b)] += 1
    assert np.abs(in_batch / count - 1 / 4).max() < 5 * math.sqrt(1 / 4 * 3 / 4 / count)
    often = pairs[np.triu_indices(8, 1)] / count
    if len(np.unique(tokens)) == 1:
        assert np.abs(often - 1 / 7).max() < 5 * math.sqrt(1 / 7 * 6 / 7 / count)
    else:
        assert often.max() < 0.6, "the same two in most epochs"


def test_in_small_sets_a_sample_meets_others_in_each_epoch() -> None:
    plan = BatchPlan(wide_mixture(200), TrainConfig(batch_size=4))
    batches = [frozenset(samples_of(plan, [batch])) for epoch in epochs(plan, 10) for batch in epoch]
    assert len(set(batches)) > 0.95 * len(batches)


@pytest.mark.parametrize("length", [1, 8])
def test_large_and_small_batches_alternate_at_random(length: int) -> None:
    """Or runs of them do; neither the order of runs nor the order within them depends on the cost."""
    plan = BatchPlan(wide_mixture(8192), TrainConfig(batch_size=4, balance_window=length))
    (batches,) = epochs(plan, 1)
    by_run = batch_costs(plan, batches).reshape(-1, length)
    costs, in_run = by_run.mean(1), np.tile(np.arange(length), len(by_run))
    neighbours = np.corrcoef(costs[1:], costs[:-1])[0, 1]
    in_time = np.corrcoef(costs, np.arange(len(costs)))[0, 1]
    assert max(abs(neighbours), abs(in_time)) < 5 / math.sqrt(len(costs))
    if length > 1:
        within = np.corrcoef(in_run, (by_run - costs[:, None]).flatten())[0, 1]
        assert abs(within) < 5 / math.sqrt(len(in_run))


def test_dropped_samples_are_random() -> None:
    """Not the largest samples in every epoch."""
    plan, count = BatchPlan(wide_mixture(10), TrainConfig(batch_size=4, drop_last=True)), 500
    trained = Counter(itertools.chain(*(samples_of(plan, batches) for batches in epochs(plan, count))))
    assert all(abs(trained[i] / count - 0.8) < 5 * math.sqrt(0.8 * 0.2 / count) for i in range(10))


@each_case
def test_a_batch_is_a_pure_function_of_how_many_samples_came_before(case: Case) -> None:
    """New plans agree, whatever was requested before; another seed does not."""
    batches = [batch for epoch in epochs(case.plan(), 3) for batch in epoch]
    starts = list(itertools.accumulate(map(len, batches), initial=0))[:-1]
    plan, chance = case.plan(), random.Random(0)
    for k in chance.choices(range(len(batches)), k=10):
        np.random.seed(k)
        assert plan.batch(starts[k]) == batches[k]
    if case.tokens.shape[1] > 9:
        other = case.plan(seed=case.settings["seed"] ^ 1)
        first = samples_of(plan, epochs(plan, 1)[0])
        assert first != samples_of(other, epochs(other, 1)[0])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"batch_size": 2}, [[6, 8], [4, 9], [3, 7], [0, 5], [1, 2], [1, 6], [3, 2], [4, 9], [0, 8], [7, 5]]),
        ({"max_tokens": 90}, [[8], [4, 9, 6], [5], [1, 3], [0], [7, 2], [1, 6, 3], [2, 0], [5], [9, 4]]),
    ],
)
def test_a_seed_gives_the_batches_that_it_always_gave(settings: dict[str, Any], expected: list[list[int]]) -> None:
    """Or a run that was begun by an earlier version would be continued with other samples."""
    tokens = np.array([[40, 10, 30, 20, 10, 50, 20, 30, 40, 10], [3, 5, 1, 4, 2, 3, 5, 1, 2, 4]])
    plan, found = BatchPlan(tokens, TrainConfig(**settings, seed=5)), list[list[int]]()
    while len(found) < len(expected):
        found.append(plan.batch(sum(map(len, found))))
    assert [samples_of(plan, [batch]) for batch in found] == expected


def test_a_plan_that_takes_over_goes_on_with_the_next_epoch() -> None:
    """A run continues with another commit of its cache: the order of that epoch, and positions of its own."""
    tokens, settings = wide_mixture(20), TrainConfig(batch_size=3, seed=7)
    whole = BatchPlan(tokens, settings)
    begin = whole.next_begin(40)
    plan, found = BatchPlan(tokens, settings, begin=begin), list[list[int]]()
    while sum(map(len, found)) < 20:
        found.append(plan.batch(40 + sum(map(len, found))))
    assert (begin.epoch, begin.position) == (2, 40)
    assert samples_of(plan, found) == samples_of(whole, epochs(whole, 3)[2])
    assert found == epochs(whole, 3)[2]


# ---- several processes -----------------------------------------------------------------------------------------------


def batches_of_ranks(
    plan: BatchPlan, consumed_samples: int, world_size: int, per_step: int, steps: int
) -> list[list[RankBatch]]:
    """The batches of some optimizer steps: lists of those that all ranks train at once."""
    ranks = [plan.rank_batches(consumed_samples, rank, world_size, per_step) for rank in range(world_size)]
    return [[next(rank) for rank in ranks] for _ in range(steps * per_step)]


@each_case
def test_processes_share_every_step_and_another_number_of_them_continues(case: Case) -> None:
    """Through the ends of windows and epochs: whatever their number, the next batches are trained, each once."""
    chance, expected = random.Random(str(case)), batches_of(case.plan())
    done = 0
    for _ in range(4):
        world_size, per_step, steps = chance.randint(1, 4), chance.randint(1, 3), chance.randint(1, 3)
        batches = batches_of_ranks(case.plan(), done, world_size, per_step, steps)
        for first in range(0, len(batches), per_step):
            step = batches[first : first + per_step]
            positions = [rank.positions for at_once in step for rank in at_once]
            next_ones = list(itertools.islice(expected, len(positions)))
            assert sorted(positions) == sorted(next_ones)
            assert positions == next_ones or world_size > 1
            for at_once in step:
                done += sum(len(rank.positions) for rank in at_once)
                assert {rank.consumed_samples for rank in at_once} == {done}


@each_case
def test_a_step_is_a_mean_over_its_samples_or_over_their_loss_tokens(case: Case) -> None:
    """The result is that of one batch, whichever rank has which samples."""
    chance = np.random.default_rng(0)
    for loss_tokens in (None, chance.integers(1, 9000, case.tokens.shape[1])):
        plan = BatchPlan(case.tokens, TrainConfig(**case.settings), loss_tokens=loss_tokens)
        each = np.ones(case.tokens.shape[1]) if loss_tokens is None else loss_tokens
        for world_size, per_step in ((1, 1), (1, 3), (3, 1), (2, 3)):
            step = list(itertools.chain(*batches_of_ranks(plan, 0, world_size, per_step, 1)))
            means = [rank.loss_scale * mean_of(plan, each, rank.positions) for rank in step]
            together = mean_of(plan, each, [position for rank in step for position in rank.positions])
            assert np.mean(means) == pytest.approx(together, abs=1e-12)


def mean_of(plan: BatchPlan, weights: Any, positions: list[int]) -> float:
    """The weighted mean of a number that differs between samples."""
    return float(np.average(np.sin(positions), weights=weights[[plan.sample(position) for position in positions]]))


def test_batches_of_one_size_have_a_loss_scale_of_exactly_one() -> None:
    """So that the loss of a run with batches of one size is not even rounded."""
    plan = BatchPlan(wide_mixture(42), TrainConfig(batch_size=7))
    assert {rank.loss_scale for at_once in batches_of_ranks(plan, 0, 3, 3, 5) for rank in at_once} == {1.0}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(
    ("world_size", "balance_window", "settings"),
    [
        (2, 8, {"batch_size": 4}),
        (8, 8, {"batch_size": 1}),
        (3, 3, {"batch_size": 3, "layout": "packed"}),
        (2, 8, {"max_tokens": 60_000}),
    ],
)
def test_processes_hardly_wait_for_one_another(world_size: int, balance_window: int, settings: dict[str, Any]) -> None:
    """Over three epochs, which end in the middle of runs and of steps."""
    tokens = wide_mixture(1009)
    found = {}
    for length in (1, balance_window):
        plan, done, spent, needed = BatchPlan(tokens, TrainConfig(**settings, balance_window=length)), 0, 0.0, 0.0
        ranks = [plan.rank_batches(0, rank, world_size, 1) for rank in range(world_size)]
        while done < 3 * 1009:
            at_once = [next(rank) for rank in ranks]
            done = at_once[0].consumed_samples
            costs = batch_costs(plan, [rank.positions for rank in at_once])
            spent, needed = spent + world_size * costs.max(), needed + costs.sum()
            if done <= 1009:
                first_epoch = 1 - needed / spent
        found[length] = 1 - needed / spent
        assert plan.summary(world_size).wait == pytest.approx(first_epoch, abs=0.01)
        assert plan.summary().wait is None
    assert found[balance_window] < 0.05
    assert found[balance_window] < found[1] / 2
    assert found[1] > (0.04 if "max_tokens" in settings else 0.15), "there is nothing to balance"


def test_in_a_step_of_several_batches_ranks_train_similar_ones_at_the_same_time() -> None:
    """A step is the mean of all its batches, so their order is free."""
    for seed in range(10):
        plan = BatchPlan(np.array([[9, 29, 9, 29, 49, 49], [1] * 6]), TrainConfig(batch_size=1, seed=seed))
        batches = batches_of_ranks(plan, 0, 2, 3, 1)
        step = [[plan.tokens[0, plan.sample(rank.positions[0])] for rank in at_once] for at_once in batches]
        assert step == [[9, 9], [29, 29], [49, 49]]
        assert plan.summary(2, 3).wait == 0


def test_the_plan_says_how_long_processes_wait() -> None:
    """By hand: of two processes that train 10 and 30, then 10 and 10 tokens, one waits for 20 of 2 · 40."""
    tokens = np.array([[9, 29, 9, 9], [1, 1, 1, 1]])
    plan = BatchPlan(tokens, TrainConfig(batch_size=1))
    assert plan.summary(2).wait == pytest.approx(20 / 80)
    assert str(plan.summary(2)).endswith("padding 0.0 %, ranks wait 25.0 %")
    assert plan.summary(2, 2).wait == pytest.approx(20 / 80)
    assert plan.summary(4).wait == pytest.approx(60 / 120)
    assert "wait" not in str(plan.summary())


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_wide_mixture_is_padded_by_less_than_5_percent(seed: int) -> None:
    """At batch size 8 with a window of a few thousand; random batches are padded by half, packed ones not at all."""
    tokens = wide_mixture(8192, seed)
    plans = {
        name: BatchPlan(tokens, TrainConfig(batch_size=8, seed=seed, **settings))
        for name, settings in {
            "default": {},
            "2048": {"bucketing_window": 2048},
            "random": {"bucketing_window": 1},
            "packed": {"layout": "packed"},
        }.items()
    }
    found = {
        name: waste(plan, epochs(plan, 1)[0], "packed" if name == "packed" else "padded")
        for name, plan in plans.items()
    }
    assert found["default"] < 0.025
    assert found["2048"] < 0.03
    assert found["random"] > 0.4
    assert found["packed"] == 0
    for name, plan in plans.items():
        assert plan.summary().padding == pytest.approx(found[name], abs=1e-12)


def test_the_mixture_is_as_wide_as_described() -> None:
    image, text = wide_mixture(20_000)
    assert 900 < image.min() < 0.25e6 / 256 * 1.1
    assert 4 * 7000 < image.max() <= 4 * 2e6 / 256 * 1.1
    assert 20 <= text.min() < 25
    assert 400 + 2 * 180 < text.max() < 400 + 3 * 220


@pytest.mark.parametrize("fixed", ["image", "text"])
def test_both_lengths_are_brought_together(fixed: str) -> None:
    """If all samples are equal in one length, sorting by the other is optimal."""
    lengths = np.random.default_rng(0).permutation(4000) + 1000
    rows = [np.full(4000, 500), lengths] if fixed == "image" else [lengths, np.full(4000, 500)]
    plan = BatchPlan(np.stack(rows), TrainConfig(batch_size=8, bucketing_window=1600))
    in_order, padded = [int(lengths[plan.sample(position)]) for position in range(4000)], 0
    for window in range(0, 4000, 1600):
        sorted_ = sorted(in_order[window : window + 1600])
        padded += sum(8 * (longest + 500) for longest in sorted_[7::8])
    assert waste(plan, epochs(plan, 1)[0]) == pytest.approx(1 - (lengths.sum() + 4000 * 500) / padded, abs=1e-12)


def test_samples_are_ordered_by_both_lengths() -> None:
    """The worked example of `_by_similar_length`."""
    tokens = np.array([[10, 40, 10, 40, 10, 40, 10, 40], [8, 8, 2, 2, 6, 6, 4, 4]])
    order = _by_similar_length(tokens, np.full(8, 1 / 2))
    assert "".join("abcdefgh"[i] for i in order) == "cgeabfhd"


@each_case
def test_the_summary_counts_what_there_is(case: Case) -> None:
    plan = case.plan()
    (batches,) = epochs(plan, 1)
    costs = [cost(case.tokens, samples_of(plan, [batch]), case.settings["layout"]) for batch in batches]
    found = plan.summary()
    assert (found.batches, found.most_samples) == (len(batches), max(map(len, batches)))
    assert found.tokens == pytest.approx(np.mean(costs))
    assert found.padding == pytest.approx(waste(plan, batches, case.settings["layout"]), abs=1e-12)


def test_an_epoch_of_many_is_summarised_by_its_beginning_and_says_so() -> None:
    tokens = np.tile(wide_mixture(5000), 40)
    few, many = (BatchPlan(t, TrainConfig(batch_size=8)).summary() for t in (tokens[:, :60_000], tokens))
    assert "samples" not in str(few).partition("padding")[2]
    assert str(many).startswith("25,000 per epoch of at most 8 samples, ")
    assert str(many).endswith(f"padding {100 * many.padding:.1f} %, based on the first 65,536 samples")
    assert many.padding == pytest.approx(few.padding, rel=0.1)


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_sample_larger_than_the_budget_is_named() -> None:
    tokens = np.array([[100, 900, 1500, 300], [10, 20, 60, 10]])
    names = ["cat", "dog", "owl", "fox"]
    with pytest.raises(TrainError) as error:
        BatchPlan(tokens, TrainConfig(max_tokens=919), names.__getitem__)
    message = str(error.value)
    assert "sample owl alone exceeds train.max_tokens, and so do 1 more" in message
    assert "(expected at most 919 tokens, found 1,560: 1,500 of its images, 60 of its text)" in message
    assert "set train.max_tokens=1560 or more" in message
    plan = BatchPlan(tokens, TrainConfig(max_tokens=1560))
    assert sorted(samples_of(plan, epochs(plan, 1)[0])) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "parts"),
    [
        ({"drop_last": True, "max_tokens": 10**6}, ["train.drop_last is for a fixed train.batch_size"]),
        (
            {"drop_last": True, "batch_size": 5},
            ["leaves nothing to train", "expected 5 samples or more", "found 4", "lower train.batch_size"],
        ),
    ],
)
def test_drop_last_where_it_cannot_be_meant_is_refused(settings: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        BatchPlan(wide_mixture(4), TrainConfig(**settings))
    assert all(part in str(error.value) for part in parts)


def test_a_state_that_no_run_had_is_refused() -> None:
    with pytest.raises(QwenCacheError, match=r"no batch begins here \(found 3 samples trained\)"):
        BatchPlan(wide_mixture(8), TrainConfig(batch_size=4)).batch(3)


@each_case
def test_settings_that_change_the_sequence_are_told_apart(case: Case) -> None:
    """Settings that count as equal make the same batches; so a run may continue with the other."""
    n = case.tokens.shape[1]
    config = TrainConfig(**case.settings)
    for changes in (
        {"batch_size": 2},
        {"max_tokens": int(case.tokens.sum(0).max() * 2)},
        {"bucketing_window": 3},
        {"layout": "packed"},
        {"balance_window": 1},
        {"drop_last": True},
    ):
        other = TrainConfig(**{**case.settings, **changes})
        if other.drop_last and (other.max_tokens or (other.batch_size or 1) > n):
            continue
        if sequence_settings(other) == sequence_settings(config):
            assert epochs(case.plan(**changes), 2) == epochs(case.plan(), 2)
        elif "batch_size" in changes or "max_tokens" in changes:
            assert sequence_settings(other)[f"train.{next(iter(changes))}"] == next(iter(changes.values()))
