"""Several caches as one: every epoch has of each what its weight says, bit for bit as the cache alone gives it."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from qwen_cache import open_cache
from qwen_cache.batching import BatchPlan, Epochs, MixturePart
from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.settings.load import Config, load_config
from qwen_cache.settings.sections import CacheConfig, TrainConfig, WeightedCache
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Mixture, open_mixture
from qwen_train.flow import NoiseSchedule

from .support.commands import Result, run
from .support.marks import slow
from .support.runs import run_training

Built = Callable[..., Path]
SMALLER = ("--set", "data.vae_image_size=9216")


def mixture(*parts: tuple[Path, float]) -> Mixture:
    return open_mixture([WeightedCache(path=str(path), weight=weight) for path, weight in parts], CacheConfig())


def batches(samples: Any, **settings: Any) -> Batches:
    return Batches(samples, TrainConfig(**settings), NoiseSchedule())


# ---- epochs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1.0,), (2.0, 1.0), (0.5, 1.0), (2.3, 0.07, 1.0), (1 / 3,)])
def test_every_epoch_has_of_each_part_what_its_weight_says(weights: Sequence[float]) -> None:
    """And over epochs, each sample of a part as often as any other of it, but for one time."""
    sizes = [70, 41, 5][: len(weights)]
    ends = np.cumsum(sizes)
    parts = [MixturePart(np.arange(end - n, end), w) for n, end, w in zip(sizes, ends, weights, strict=True)]
    epochs, counts = Epochs(parts, seed=3), Counter()
    for epoch in range(40):
        found = Counter(epochs.order(epoch).tolist())
        assert found.total() == len(epochs)
        counts += found
        for part in parts:
            times = [found[sample] for sample in part.samples.tolist()]
            assert sum(times) == round(len(times) * part.weight)
            assert {*times} <= {math.floor(part.weight), math.ceil(part.weight)}
            often = [counts[sample] for sample in part.samples.tolist()]
            assert max(often) - min(often) <= 1
    assert counts.keys() == set(range(ends[-1]))


def test_an_epoch_is_a_function_of_seed_and_number_and_is_mixed() -> None:
    parts = [MixturePart(np.arange(1000), 0.5), MixturePart(np.arange(1000, 2000), 1.5)]
    orders = [Epochs(parts, seed=7).order(epoch).tolist() for epoch in (0, 1, 9)]
    assert [Epochs(parts, seed=7).order(epoch).tolist() for epoch in (0, 1, 9)] == orders
    assert Epochs(parts, seed=8).order(0).tolist() != orders[0]
    assert orders[0] != orders[1]
    of_second = np.array(orders[0]) >= 1000
    assert abs(np.corrcoef(np.arange(2000), of_second)[0, 1]) < 5 / math.sqrt(2000)
    halves = [{sample for sample in order if sample < 1000} for order in orders[:2]]
    assert halves[0] | halves[1] == set(range(1000))
    assert abs(np.corrcoef(np.arange(1000), [i in halves[0] for i in range(1000)])[0, 1]) < 5 / math.sqrt(1000)


@pytest.mark.parametrize("weight", [1.0, 2.0, 0.5, 1.4, 0.07])
def test_alternatives_of_an_image_take_turns_as_often_as_they_are_listed(weight: float) -> None:
    """Whenever an image has come as often as it has entries, each entry has stood for it once."""
    lists = [[7], [1, 1, 1, 2], [3, 4], [5, 5, 6], *([each] for each in range(10, 26))]
    begins = np.cumsum([0, *map(len, lists)])[:-1]
    part = MixturePart(np.concatenate(lists), weight, begins)
    image_of = {sample: number for number, listed in enumerate(lists) for sample in listed}
    epochs, came = Epochs([part], seed=5), [list[int]() for _ in lists]
    for epoch in range(120):
        order = epochs.order(epoch).tolist()
        assert len(order) == len(epochs) == round(len(lists) * weight)
        for sample in order:
            came[image_of[sample]].append(sample)
    for listed, found in zip(lists, came, strict=True):
        if weight <= 1:  # with more, an epoch shuffles the turns within it
            for begin in range(0, len(found) - len(listed) + 1, len(listed)):
                assert sorted(found[begin : begin + len(listed)]) == listed
        share = Counter(found)
        assert all(abs(share[each] - len(found) * listed.count(each) / len(listed)) <= len(listed) for each in listed)
    times = [len(found) for found in came]
    assert max(times) - min(times) <= 1


def test_a_seed_gives_the_epochs_that_it_always_gave() -> None:
    parts = [MixturePart(np.arange(4), 1.5), MixturePart(np.arange(4, 16), 1.5, np.array([0, 4, 9, 11]))]
    assert [Epochs(parts, 5).order(epoch).tolist() for epoch in range(3)] == [
        [0, 15, 2, 4, 11, 1, 8, 3, 15, 13, 2, 1],
        [7, 2, 14, 3, 1, 0, 5, 3, 15, 12, 13, 0],
        [15, 1, 3, 9, 10, 0, 14, 2, 2, 15, 6, 1],
    ]


def test_repeats_are_different_positions_so_they_have_noise_of_their_own() -> None:
    plan = BatchPlan(np.full((2, 3), 9), TrainConfig(batch_size=2), parts=[MixturePart(np.arange(3), 2.0)])
    positions, done = [], 0
    while done < 12:
        positions += plan.batch(done)
        done = len(positions)
    assert sorted(positions) == list(range(12))
    for epoch in (positions[:6], positions[6:]):
        assert Counter(map(plan.sample, epoch)) == {0: 2, 1: 2, 2: 2}
    assert plan.summary().in_epoch == 6


# ---- caches ----------------------------------------------------------------------------------------------------------


def test_it_is_its_caches_one_after_the_other(built: Built, tmp_path: Path) -> None:
    """Two caches of two resolutions, one compressed and one in format v1."""
    first, second = built("edit-plus", ("--format", "v1")), tmp_path / "small"
    assert run("qwen-cache", "merge", built("edit-plus", SMALLER), "--out", second, "--compression", "zstd").code == 0
    both, caches = mixture((first, 1), (second, 1)), [open_cache(first), open_cache(second)]
    assert len(both) == 8
    for i, sample in enumerate([*caches[0], *caches[1]]):
        assert both[i].key == sample.key
        assert both.row(i) == sample.row
        assert all(torch.equal(both[i][name], tensor) for name, tensor in sample.tensors().items())
    for beyond in (-1, 8):
        with pytest.raises(IndexError, match=f"sample {beyond} of 8"):
            both[beyond]
    assert str(first) in both.folder
    assert str(second) in both.folder


def test_batches_of_both_are_those_of_each(built: Built) -> None:
    """A trained sample does not depend on the cache that it comes with; tokens are its own."""
    first, second = built("edit-plus"), built("edit-plus", SMALLER)
    stream = batches(mixture((first, 2), (second, 0.5)), batch_size=3, caption_dropout=0.5)
    stored = {sample.key: sample for path in (first, second) for sample in open_cache(path)}
    seen, done = Counter(), 0
    while done < 40:
        batch = stream.batch(done)
        for i, key in enumerate(batch.keys):
            clean = torch.cat([stored[key]["image_latents"], stored[key]["control_latents"]])
            assert torch.equal(batch.clean[i, : len(clean)], clean)
            assert not batch.clean[i, len(clean) :].any()
        seen.update(batch.keys)
        done = batch.consumed_samples
    assert all(seen[sample.key] == 8 for sample in open_cache(first))
    assert all(seen[sample.key] == 2 for sample in open_cache(second))
    images = [sum(h * w for _, h, w in stored[key].img_shapes) for key in stored]
    assert stream.plan.tokens[0].tolist() == images
    by_tokens = batches(mixture((first, 2), (second, 0.5)), loss_reduction="per_token").plan.loss_tokens
    assert by_tokens is not None
    assert by_tokens.tolist() == [len(stored[key]["image_latents"]) for key in stored]


def test_samples_are_held_out_in_every_cache(built: Built) -> None:
    first, second = built("edit-plus"), built("edit-plus", SMALLER)
    stream = batches(mixture((first, 1), (second, 2)), validation_split=0.5)
    alone = batches(mixture((first, 1)), validation_split=0.5)
    assert stream.validation.tolist() == [*alone.validation, *(4 + alone.validation)]
    found = Counter(stream.plan.sample(position) for position in range(len(stream.plan.epochs)))
    assert found == {**dict.fromkeys(alone.training.tolist(), 1), **dict.fromkeys((4 + alone.training).tolist(), 2)}


def test_its_identity_is_that_of_its_parts_and_their_weights(built: Built) -> None:
    first, second = built("edit-plus"), built("edit-plus", SMALLER)
    ways = [((first, 1), (second, 1)), ((second, 1), (first, 1)), ((first, 1), (second, 2)), ((first, 1),)]
    identities = [mixture(*way).identity for way in ways]
    assert len(set(identities)) == 4
    assert identities[-1] == open_cache(first).identity, "one cache alone is that cache"
    assert mixture(*ways[0]).identity == identities[0]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("weight", [2.0, 3.0])
def test_a_run_on_both_resumes_with_the_same_weights_only(
    built: Built, tiny_model: Callable[[str], Path], tmp_path: Path, weight: float
) -> None:
    """And says what an epoch is: of the one cache every sample twice."""
    first, second = built("edit-plus"), built("edit-plus", SMALLER)

    def train(weight: float, steps: int) -> Result:
        caches = json.dumps([{"path": str(first), "weight": weight}, {"path": str(second)}])
        settings = [f"train.caches={caches}", f"train.max_steps={steps}", f"train.output_dir={tmp_path / 'out'}"]
        settings += ["train.mixed_precision=no", "logging.report_to=none", "train.loss_reduction=per_token"]
        options = [option for setting in settings for option in ("--set", setting)]
        return run_training("--model", tiny_model("edit-plus"), *options, "--resume")

    begun = train(2, 1)
    assert begun.code == 0, begun.stderr
    assert "8 samples" in begun.stderr
    assert "12 per epoch" in begun.stderr
    found = train(weight, 2)
    if weight == 2:
        assert found.code == 0, found.stderr
    else:
        identities = [mixture((first, w), (second, 1)).identity for w in (2, 3)]
        assert found.code == 2
        assert (
            f"another cache, so it cannot be resumed (expected {identities[0]}, found {identities[1]})" in found.stderr
        )


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", ["run", slow("plan")])
def test_a_cache_on_the_command_line_is_in_place_of_all_of_them(
    command: str, built: Built, tiny_model: Callable[[str], Path], tmp_path: Path
) -> None:
    cache = built("edit-plus")
    settings = [f"train.output_dir={tmp_path / 'out'}", "train.max_steps=1", "train.mixed_precision=no"]
    settings += ["train.caches=[{path: nowhere}]", "logging.report_to=none"]
    options = [word for setting in settings for word in ("--set", setting)]
    model = tiny_model("edit-plus")
    assert run("qwen-train", command, cache, "--model", model, *options).code == 0
    named = run("qwen-train", command, "--model", model, *options, "--set", f"train.output_dir={tmp_path / 'other'}")
    assert named.code == 2
    assert "nowhere" in named.stderr


@pytest.mark.parametrize(
    ("variant", "options", "what"),
    [
        ("edit", ("--on-error", "skip"), "pipeline"),
        ("edit-plus", ("--dtype", "bfloat16"), "the dtype of image_latents"),
    ],
)
def test_caches_that_do_not_go_together_are_refused_by_name(
    built: Built, variant: str, options: tuple[str, ...], what: str
) -> None:
    first, second = built("edit-plus"), built(variant, options)
    with pytest.raises(ConfigError) as error:
        mixture((first, 1), (second, 1))
    message = str(error.value)
    assert f"these caches cannot be trained together: they differ in {what} (expected " in message
    assert f"as in {first}, found " in message
    assert f" in {second})" in message


def test_a_part_that_cannot_be_meant_is_refused(built: Built, tmp_path: Path) -> None:
    with pytest.raises(QwenCacheError, match=r"no cache\.json here"):
        mixture((built("edit-plus"), 1), (tmp_path, 1))
    for part, message in (("{path: a, weight: 0}", "greater than 0"), ("{weight: 1}", "Field required")):
        with pytest.raises(ConfigError, match=message):
            load_config(None, [f"train.caches=[{part}]"])
    with pytest.raises(ConfigError, match=r"unknown key train.caches.0.wight\n.*did you mean train.caches.weight\?"):
        load_config(None, ["train.caches=[{path: a, wight: 2}]"])
    parts = load_config(None, ["train.caches=[{path: a, weight: 2}, {path: b, recipe: small}]"]).train.caches
    assert parts == [WeightedCache(path="a", weight=2), WeightedCache(path="b", recipe="small")]
    assert Config().train.caches == []
