"""Batches: every sample once per epoch, everything a function of the state, nothing lost or changed by padding.

What is expected is read out of the shards by tarfile and stock safetensors, in format v1, which stores every tensor
whole; losses are compared with those of the stock transformer on one sample at a time.
"""

from __future__ import annotations

import io
import itertools
import math
import re
import shutil
import tarfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import closing
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pytest
import safetensors.torch
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.training_utils import compute_loss_weighting_for_sd3
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from qwen_cache import FormatError, open_cache
from qwen_cache.batching import index_token_counts
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache
from qwen_cache.format.identity import content_hash
from qwen_cache.format.manifest import Recipe
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.batches import AHEAD, Batch, Batches, collate
from qwen_train.data.planned import split
from qwen_train.data.samples import Mixture
from qwen_train.data.served import ServedSamples
from qwen_train.flow import NoiseSchedule, Weighting, weighting
from qwen_train.model.loading import timesteps_from
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.run import Launch
from qwen_train.train import batches_per_step
from qwen_train.training.loss import compute_loss
from qwen_train.training.prepare import make_batches
from qwen_train.training.start import starting

from .support.runs import Trainer

Built = Callable[..., Path]
V1 = ("--format", "v1")


@pytest.fixture
def cache(built: Built) -> Cache:
    """Four samples of different sizes: `cat` has two controls, `cup` a mask."""
    return open_cache(built("edit-plus"))


@pytest.fixture
def expected(built: Built) -> dict[str, dict[str, Tensor]]:
    """The tensors of every sample of `cache` by key, the empty prompt with its prefix."""
    return whole_tensors(built)


def whole_tensors(built: Built, *options: str) -> dict[str, dict[str, Tensor]]:
    """The tensors of the cache built with `options`, by its keys, out of the shards of a v1 build in the same order."""
    v1 = built("edit-plus", (*options, *(() if options[-2:] == V1 else V1)))
    found = {}
    for path in v1.glob("*.tar"):
        with tarfile.open(path) as shard:
            for member in shard.getmembers():
                key, kind = member.name.split(".")
                if kind == "safetensors":
                    file = shard.extractfile(member) or io.BytesIO()
                    found[key] = safetensors.torch.load(file.read())
    samples = zip(open_cache(built("edit-plus", options)), open_cache(v1), strict=True)
    return {sample.key: found[other.key] for sample, other in samples}


def batches(cache: Cache, *, rank: int = 0, world_size: int = 1, **settings: Any) -> Batches:
    return Batches(Mixture.of(cache), TrainConfig(**settings), NoiseSchedule(), rank=rank, world_size=world_size)


def first(stream: Batches, count: int, done: int = 0) -> list[Batch]:
    """The batches of a process that begin after `done` samples."""
    with closing(stream.starting_at(done)) as found:
        return [copied(batch) for batch in itertools.islice(found, count)]


def copied(batch: Batch) -> Batch:
    """The stream uses the memory of a batch again."""
    values = {field.name: getattr(batch, field.name) for field in fields(Batch)}
    return replace(batch, **{name: value.clone() for name, value in values.items() if isinstance(value, Tensor)})


def epoch_of(stream: Batches, epoch: int) -> list[Batch]:
    """The batches of an epoch, from a stream of one process."""
    found, done = [], epoch * len(stream.cache)
    while done < (epoch + 1) * len(stream.cache):
        found.append(stream.batch(done))
        done = found[-1].consumed_samples
    return found


def singles(batch: Batch) -> Iterator[dict[str, Any]]:
    """The samples of a batch without their padding."""
    for i, shapes in enumerate(batch.img_shapes):
        image = sum(math.prod(shape) for shape in shapes)
        mask = batch.prompt_embeds_mask
        text = batch.prompt_embeds.shape[1] if mask is None else int(mask[i].sum())
        yield {
            "key": batch.keys[i],
            "img_shapes": shapes,
            "sigma": batch.sigma[i],
            "prompt_embeds": batch.prompt_embeds[i, :text],
            **{name: getattr(batch, name)[i, :image] for name in ("clean", "noise", "is_target", "weight")},
        }


def same(a: Any, b: Any) -> bool:
    return torch.equal(a, b) if isinstance(a, Tensor) and isinstance(b, Tensor) else bool(a == b)


def same_batch(a: Batch, b: Batch) -> bool:
    return all(same(getattr(a, field.name), getattr(b, field.name)) for field in fields(Batch))


def same_sample(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


# ---- which samples ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [1, 2, 3, 5])
def test_every_epoch_has_every_sample_once(cache: Cache, batch_size: int) -> None:
    """The last batch may be smaller; more in `test_batch_plan`."""
    stream = batches(cache, batch_size=batch_size)
    orders = [[batch.keys for batch in epoch_of(stream, epoch)] for epoch in range(6)]
    for order in orders:
        assert sorted(itertools.chain(*order)) == sorted(sample.key for sample in cache)
        assert sorted(map(len, order))[1:] == [batch_size] * (len(order) - 1)
    if batch_size < len(cache):
        assert len(set(map(tuple, orders))) > 3, "the order is not shuffled again"


def test_a_batch_is_a_pure_function_of_the_state(cache: Cache) -> None:
    """Fresh objects agree, in any order of asking, whatever else draws random numbers; so does iteration."""
    settings = {"batch_size": 3, "caption_dropout": 0.5, "seed": 5}
    expected = [batch for epoch in range(4) for batch in epoch_of(batches(cache, **settings), epoch)]
    states = [0, *(batch.consumed_samples for batch in expected)]
    stream = batches(open_cache(cache.folder), **settings)
    for k in (7, 0, 3, 3, 5):
        torch.manual_seed(k)
        assert same_batch(stream.batch(states[k]), expected[k])
    for begin in (0, 5):
        found = first(stream, 8 - begin, states[begin])
        assert all(same_batch(a, b) for a, b in zip(found, expected[begin:], strict=True))
    assert not same_batch(expected[0], expected[2])


@pytest.mark.parametrize(
    "settings",
    [
        {"batch_size": 2},
        {"batch_size": 3, "world_size": 2},
        {"batch_size": 1, "world_size": 3},
        {"max_tokens": 1000, "world_size": 2, "gradient_accumulation_steps": 2},
        {"max_tokens": 2000, "bucketing_window": 1},
        {"batch_size": 3, "layout": "packed"},
    ],
    ids=str,
)
def test_samples_do_not_depend_on_their_batch_or_process(cache: Cache, settings: dict[str, Any]) -> None:
    """Noise, noise level and dropout of a sample in an epoch are the same however it is trained."""
    common = {"caption_dropout": 0.5, "edit_mask_weight": 3.0}
    alone = batches(cache, batch_size=1, **common)
    world_size = settings.pop("world_size", 1)
    ranks = [first(batches(cache, rank=r, world_size=world_size, **common, **settings), 12) for r in range(world_size)]
    found = [sample for turn in zip(*ranks, strict=True) for batch in turn for sample in singles(batch)]
    assert len(found) >= 12
    trained = range(-(-len(found) // len(cache)))
    expected = [sample for epoch in trained for batch in epoch_of(alone, epoch) for sample in singles(batch)]
    for sample in found:
        expected.pop(next(i for i, other in enumerate(expected) if same_sample(sample, other)))


def test_ranks_are_counted_over_all_machines(train: Trainer) -> None:
    """Two machines with two processes each: the last of all is the second of its machine."""
    accelerator: Any = SimpleNamespace(num_processes=4, process_index=3, local_process_index=1)
    with starting(train.config(), Launch()) as start:
        stream, *_ = make_batches(start, start.config, accelerator)
    assert (stream.rank, stream.world_size) == (3, 4)


def test_every_batch_says_what_it_counts_in_its_step_and_where_the_run_is_then(cache: Cache) -> None:
    """Batches of three and one: in a step of both, three quarters and one quarter."""
    found = first(batches(cache, batch_size=3, gradient_accumulation_steps=2), 4)
    assert {len(batch.keys): batch.loss_scale for batch in found} == {3: 1.5, 1: 0.5}
    assert [batch.consumed_samples for batch in found] in ([3, 4, 7, 8], [3, 4, 5, 8], [1, 4, 7, 8], [1, 4, 5, 8])
    assert {batch.loss_scale for batch in first(batches(cache, batch_size=3), 4)} == {1.0}
    two = [batches(cache, batch_size=3, gradient_accumulation_steps=2, rank=r, world_size=2) for r in range(2)]
    scales = [batch.loss_scale for each in two for batch in first(each, 2)]
    prepared: Any = SimpleNamespace(batches=two[0])
    assert sum(scales) == pytest.approx(batches_per_step(prepared, two[0].config)) == 4


@pytest.mark.parametrize("options", [(), V1], ids=["v2", "v1"])
def test_the_index_knows_the_tokens_of_every_sample(built: Built, options: tuple[str, ...]) -> None:
    """Shapes are those of the tensors, also for a sample without controls."""
    tensors = whole_tensors(built, *options)
    cache = open_cache(built("edit-plus", options))
    images = [len(tensors[s.key]["image_latents"]) + len(tensors[s.key]["control_latents"]) for s in cache]
    texts = [len(tensors[s.key]["prompt_embeds"]) for s in cache]
    assert index_token_counts(cache.table, "there").tolist() == [images, texts]
    assert len(set(images)) > 1
    assert len(set(texts)) > 1

    column = cache.table.schema.get_field_index("control_latents")
    field = cache.table.schema.field(column)
    without = cache.table.set_column(column, field, pa.nulls(len(cache), field.type))
    targets = [len(tensors[sample.key]["image_latents"]) for sample in cache]
    assert index_token_counts(without, "there").tolist() == [targets, texts]


def test_an_index_without_token_counts_is_refused(cache: Cache) -> None:
    column = cache.table.schema.get_field_index("image_latents")
    field = cache.table.schema.field(column)
    for shape in ([], [0, 64], None):
        values = [{**record, "shape": shape} for record in cache.table["image_latents"].to_pylist()]
        broken = cache.table.set_column(column, field, pa.array(values, field.type))
        with pytest.raises(FormatError, match=r"^there/index.parquet: .*token.*\[F7\]"):
            index_token_counts(broken, "there/index.parquet")


# ---- what chance decides ---------------------------------------------------------------------------------------------


def test_another_seed_changes_order_noise_level_and_dropout(cache: Cache) -> None:
    noised = [
        [batches(cache, seed=seed, caption_dropout=0.5).sample_noise(position) for position in range(24)]
        for seed in (1, 2)
    ]
    assert [d.sample.key for d in noised[0]] != [d.sample.key for d in noised[1]]
    assert [d.without_caption for d in noised[0]] != [d.without_caption for d in noised[1]]
    for a, b in zip(*noised, strict=True):
        assert a.draws[0].sigma != b.draws[0].sigma
        assert not torch.equal(a.draws[0].noise[:4], b.draws[0].noise[:4])


def test_a_seed_gives_the_draws_that_it_always_gave(cache: Cache) -> None:
    """Or a run that was begun by an earlier version would be continued with other noise."""
    stream = batches(cache, seed=5, caption_dropout=0.5, timestep_shift=3.0)  # so that no level depends on a size
    found = [(noised.without_caption, noised.draws[0]) for noised in map(stream.sample_noise, range(6))]
    assert [without_caption for without_caption, _ in found] == [False, False, True, True, False, False]
    sigmas = [0.629324, 0.624315, 0.94562, 0.82351, 0.701549, 0.699182]
    assert [draw.sigma for _, draw in found] == pytest.approx(sigmas, abs=1e-6)
    noise = [-1.12684, -0.40452, 0.12448, -2.03648, -0.92821, 0.2688]  # processors give different last digits
    assert [float(draw.noise[0, 0]) for _, draw in found] == pytest.approx(noise, abs=1e-4)


def test_noise_is_normal_and_never_sampled_twice(cache: Cache) -> None:
    noised = [batches(cache).sample_noise(position).draws[0].noise for position in range(40)]
    assert len({tuple(noise[0].tolist()) for noise in noised}) == len(noised)
    values = torch.cat(noised).flatten()
    bound = 4 / math.sqrt(len(values))
    assert abs(float(values.mean())) < bound
    assert abs(float(values.var()) - 1) < 2 * bound
    assert float((values.abs() < 1).float().mean()) == pytest.approx(math.erf(math.sqrt(0.5)), abs=bound)


@pytest.mark.parametrize("shift", [None, 2.0])
def test_noise_level_is_shifted_for_the_target_alone(cache: Cache, shift: float | None) -> None:
    """A logit-normal without width always draws the sigmoid of its mean, so that the level is known."""
    schedule = NoiseSchedule(base_image_seq_len=0, max_image_seq_len=100, shift=shift)
    config = TrainConfig(timestep_sampling="logit_normal", logit_mean=-1.0, logit_std=0.0)
    for position in range(len(cache)):
        noised = Batches(Mixture.of(cache), config, schedule).sample_noise(position)
        _, h, w = noised.sample.img_shapes[0]
        assert noised.draws[0].sigma == pytest.approx(schedule.sigma(1 / (1 + math.e), h * w), rel=1e-9)
        assert noised.draws[0].noise.shape == (h * w, 64)


def test_noise_levels_within_bounds_are_those_of_the_distribution_and_of_the_model(cache: Cache) -> None:
    """The truncated distribution: of the unbounded levels those within, up to chance; all in the modulation's table."""
    whole, stream = batches(cache), batches(cache, min_timestep=300, max_timestep=600)
    unbounded = [whole.sample_noise(position).draws[0].sigma for position in range(1200)]
    within = [stream.sample_noise(position).draws[0].sigma for position in range(400)]
    expected = [sigma for sigma in unbounded if 0.3 <= sigma <= 0.6]
    assert 0.3 <= min(within) < max(within) <= 0.6
    cdfs = [np.searchsorted(np.sort(levels), np.linspace(0.3, 0.6, 500)) / len(levels) for levels in (within, expected)]
    bound = 1.95 * math.sqrt(1 / len(within) + 1 / len(expected))  # Smirnov's: one false alarm in a thousand
    assert np.abs(cdfs[0] - cdfs[1]).max() < bound
    assert {stream.sample_noise(7).draws[0].sigma for _ in range(2)} == {within[7]}
    shifted = batches(cache, timestep_shift=0.2, max_timestep=100)
    levels = torch.tensor([shifted.sample_noise(position).draws[0].sigma for position in range(100)])
    assert set(levels.bfloat16().tolist()) <= set(timesteps_from(0.02).tolist())
    assert shifted.schedule.sigma(0.5, 4096) == shifted.schedule.sigma(0.5, 64) == pytest.approx(1 - 0.98 / 1.2)


def test_bounds_that_the_distribution_does_not_reach_are_refused(cache: Cache) -> None:
    stream = batches(cache, min_timestep=999.9999, logit_std=0.1)
    with pytest.raises(ConfigError) as refusal:
        stream.sample_noise(0)
    assert str(refusal.value) == (
        "10000 timesteps were sampled, and none is between train.min_timestep and train.max_timestep "
        "(found 999.9999 and 1000.0, timestep_sampling logit_normal)\n"
        "  → set them further apart, or train.timestep_sampling=uniform"
    )


def test_noise_draws_at_pure_noise_have_a_weight_of_zero_and_not_of_nothing(cache: Cache) -> None:
    noised = batches(cache).sample_noise(0)
    draws = tuple(replace(noised.draws[0], sigma=1.0, weighting=weighting("min_snr", 1.0)) for _ in range(2))
    batch = collate([replace(noised, draws=draws)])
    assert batch.sample_weight.tolist() == [0]
    assert batch.weight.isfinite().all()
    assert batch.weight.any()


@pytest.mark.parametrize("rate", [0.0, 0.3, 1.0])
def test_captions_are_dropped_at_the_configured_rate(cache: Cache, rate: float) -> None:
    positions = 1500 if 0 < rate < 1 else 100
    stream = batches(cache, caption_dropout=rate)
    dropped = sum(stream.sample_noise(position).without_caption for position in range(positions))
    assert abs(dropped / positions - rate) <= 4 * math.sqrt(rate * (1 - rate) / positions)


@pytest.mark.parametrize("options", [(), V1], ids=["v2", "v1"])
def test_a_dropped_caption_is_the_sample_s_own_empty_prompt(built: Built, options: tuple[str, ...]) -> None:
    """Encoded with its images, from the first token on, though v2 stores only what differs from the prompt."""
    expected = whole_tensors(built, *options)
    stream = batches(open_cache(built("edit-plus", options)), batch_size=16, caption_dropout=0.5)
    used = {"prompt_embeds": set(), "empty_prompt_embeds": set()}
    for epoch in range(6):
        positions = stream.plan.batch(epoch * len(stream.cache))
        for position, sample in zip(positions, singles(stream.batch(epoch * len(stream.cache))), strict=True):
            name = "empty_prompt_embeds" if stream.sample_noise(position).without_caption else "prompt_embeds"
            assert torch.equal(sample["prompt_embeds"], expected[sample["key"]][name])
            used[name].add(sample["key"])
    assert used == {name: set(expected) for name in used}, "not every sample was seen with and without its caption"
    empty = [tensors["empty_prompt_embeds"] for tensors in expected.values()]
    assert not any(same(a, b) for a, b in itertools.combinations(empty, 2)), "the empty prompts do not differ"


def test_caption_dropout_changes_nothing_but_the_text(cache: Cache) -> None:
    for a, b in zip(*(singles(batches(cache, batch_size=8, caption_dropout=p).batch(0)) for p in (0, 1)), strict=True):
        assert not torch.equal(a.pop("prompt_embeds"), b.pop("prompt_embeds"))
        assert same_sample(a, b)


# ---- padding ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [(), V1], ids=["v2", "v1"])
def test_rows_are_the_stored_tensors_and_then_zeros(built: Built, options: tuple[str, ...]) -> None:
    expected = whole_tensors(built, *options)
    batch = batches(open_cache(built("edit-plus", options)), batch_size=4, caption_dropout=0.0).batch(0)
    assert sorted(batch.keys) == sorted(expected)
    assert batch.prompt_embeds_mask is not None
    lengths = set()
    for i, key in enumerate(batch.keys):
        tensors = expected[key]
        clean = torch.cat([tensors["image_latents"], tensors["control_latents"]])
        target, image, text = len(tensors["image_latents"]), len(clean), len(tensors["prompt_embeds"])
        assert torch.equal(batch.clean[i, :image], clean)
        assert torch.equal(batch.prompt_embeds[i, :text], tensors["prompt_embeds"])
        assert batch.noise[i, :target].all()
        for rest in (batch.clean[i, image:], batch.noise[i, target:], batch.prompt_embeds[i, text:]):
            assert not rest.any()
        ones = torch.arange(batch.clean.shape[1]) < target
        assert torch.equal(batch.is_target[i], ones)
        assert torch.equal(batch.weight[i], ones.float())
        assert torch.equal(batch.prompt_embeds_mask[i], torch.arange(batch.prompt_embeds.shape[1]) < text)
        lengths.add((image, text))
    images, texts = zip(*lengths, strict=True)
    assert (batch.clean.shape[1], batch.prompt_embeds.shape[1]) == (max(images), max(texts))
    assert min(images) < max(images), "nothing was padded"
    assert batch.image_tokens == sum(len(t["image_latents"]) + len(t["control_latents"]) for t in expected.values())


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("codec", [(), ("--set", "cache.compression=zstd")], ids=["plain", "compressed"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_batch_is_what_pad_sequence_makes_of_its_samples(built: Built, dtype: str, codec: tuple[str, ...]) -> None:
    """Bit for bit, whatever the memory held before that the batch is written into."""
    tensors = whole_tensors(built, "--dtype", dtype)
    stream = batches(open_cache(built("edit-plus", ("--dtype", dtype, *codec))), caption_dropout=0.5)
    for order in itertools.permutations(range(len(stream.cache)), 3):
        noised = [stream.sample_noise(position) for position in order]
        rows: dict[str, list[Tensor]] = {"clean": [], "noise": [], "is_target": [], "weight": [], "prompt_embeds": []}
        for item in noised:
            stored = tensors[item.sample.key]
            clean = torch.cat([stored["image_latents"], stored["control_latents"]]).float()
            target = len(stored["image_latents"])
            rows["clean"].append(clean)
            rows["noise"].append(item.draws[0].noise)
            rows["is_target"].append(torch.arange(len(clean)) < target)
            mask = item.sample["edit_mask"] if "edit_mask" in item.sample.row.meta.tensors else torch.ones(target)
            rows["weight"].append(1 + (3.3 - 1) * mask)
            rows["prompt_embeds"].append(stored["empty_prompt_embeds" if item.without_caption else "prompt_embeds"])
        [torch.full((n,), math.nan) for n in (10_000, 100_000, 1_000_000)]
        batch = collate(noised, edit_mask_weight=3.3)
        for name, each in rows.items():
            expected, found = pad_sequence(each, batch_first=True), getattr(batch, name)
            beyond = found[:, expected.shape[1] :]
            assert found.dtype == expected.dtype
            assert torch.equal(found[:, : expected.shape[1]], expected), name
            assert not beyond.any(), name


def test_without_padding_there_is_no_text_mask(cache: Cache) -> None:
    assert batches(cache).batch(0).prompt_embeds_mask is None
    stream = batches(cache, caption_dropout=1.0)
    cup = next(p for p in range(len(cache)) if stream.sample_noise(p).sample.name == "cup")
    assert collate([stream.sample_noise(cup), stream.sample_noise(cup)]).prompt_embeds_mask is None


def test_edit_mask_weighs_what_was_edited(cache: Cache) -> None:
    """In the left half of the cup tokens weigh four times what they weigh elsewhere; without a mask, all the same."""
    noised = [batches(cache).sample_noise(position) for position in range(len(cache))]
    for item, row in zip(noised, singles(collate(noised, edit_mask_weight=4.0)), strict=True):
        weight = row["weight"][row["is_target"]] / row["weight"][row["is_target"]].min()
        _, h, w = item.sample.img_shapes[0]
        inside, border, outside = weight.view(h, w).split([w // 2 - 1, 2, w - w // 2 - 1], dim=1)
        assert torch.equal(outside, torch.ones_like(outside))
        assert torch.equal(inside, torch.full_like(inside, 4.0 if item.sample.name == "cup" else 1.0))
        assert border.min() >= 1
        assert border.max() <= 4
        assert not row["weight"][~row["is_target"]].any()


def test_on_its_device_only_the_text_is_in_half_precision(cache: Cache) -> None:
    batch = batches(cache, batch_size=4).batch(0)
    moved = batch.to(torch.device("cpu"), torch.bfloat16)
    assert moved.prompt_embeds.dtype == torch.bfloat16
    assert {moved.clean.dtype, moved.noise.dtype, moved.weight.dtype, moved.sigma.dtype} == {torch.float32}
    assert same_batch(batch.to(torch.device("cpu"), torch.float32), batch)


# ---- the loss of a batch ---------------------------------------------------------------------------------------------


def stock_loss(
    stock: QwenImageTransformer2DModel,
    sample: dict[str, Any],
    mask_weight: float = 1.0,
    huber_c: float | None = None,
) -> float:
    """Flow matching as published, of one sample, unpadded, by the stock model; or scheduled pseudo-Huber's error."""
    target = math.prod(sample["img_shapes"][0])
    clean, noise, sigma = sample["clean"], sample["noise"][:target], sample["sigma"]
    noisy = torch.cat([(1 - sigma) * clean[:target] + sigma * noise, clean[target:]])
    with torch.no_grad():
        velocity = stock(
            hidden_states=noisy[None],
            encoder_hidden_states=sample["prompt_embeds"][None],
            timestep=sigma[None],
            img_shapes=[list(sample["img_shapes"])],
            return_dict=False,
        )[0][0, :target]
    error = (velocity - (noise - clean[:target])).abs()
    if huber_c is None:
        error = error.square()
    else:
        c = huber_c ** float(sigma)
        error = 2 * c * ((error.double() ** 2 + c**2).sqrt() - c)
    error = error.mean(-1)
    weight = torch.ones(target) if sample["mask"] is None else 1 + (mask_weight - 1) * sample["mask"]
    return float((error * weight).sum() / weight.sum())


@pytest.mark.parametrize("mask_weight", [1.0, 5.0])
@pytest.mark.parametrize("variant", ["edit-plus", "edit-2511"])
def test_loss_of_a_padded_batch_is_the_mean_of_stock_losses(
    cache: Cache,
    expected: dict[str, dict[str, Tensor]],
    tiny_model: Callable[[str], Path],
    variant: str,
    mask_weight: float,
) -> None:
    folder = tiny_model(variant) / "transformer"
    ours = QwenImageMultiResTransformer2DModel.from_pretrained(folder)
    stock = QwenImageTransformer2DModel.from_pretrained(folder)
    masks = {sample.key: sample["edit_mask"] for sample in cache if "edit_mask" in sample.row.meta.tensors}
    assert len(masks) == 1
    stream = batches(cache, batch_size=4, caption_dropout=0.5, edit_mask_weight=mask_weight, loss_type="huber")
    for epoch, huber_c in enumerate((None, stream.config.huber_c)):
        (batch,) = epoch_of(stream, epoch)
        with torch.no_grad():
            found = float(compute_loss(ours, batch, stream.config if huber_c else None))
        losses = [
            stock_loss(stock, {**sample, "mask": masks.get(sample["key"])}, mask_weight, huber_c)
            for sample in singles(batch)
        ]
        assert found == pytest.approx(sum(losses) / len(losses), rel=1e-5)
        assert max(losses) > 1.01 * min(losses), "losses so similar would hide a mistake in their mean"


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("loss_reduction", ["per_sample", "per_token"])
@pytest.mark.parametrize("scheme", ["none", "sigma_sqrt", "cosmap"])
def test_loss_of_a_step_is_the_weighted_mean_over_its_samples_or_over_their_tokens(
    cache: Cache,
    expected: dict[str, dict[str, Tensor]],
    tiny_model: Callable[[str], Path],
    scheme: Weighting,
    loss_reduction: Literal["per_sample", "per_token"],
) -> None:
    """With batches of three and of one, by diffusers' weighting of stock losses; tokens of the target alone count."""
    folder = tiny_model("edit-plus") / "transformer"
    ours = QwenImageMultiResTransformer2DModel.from_pretrained(folder)
    stock = QwenImageTransformer2DModel.from_pretrained(folder)
    stream = batches(
        cache, batch_size=3, gradient_accumulation_steps=2, weighting=scheme, loss_reduction=loss_reduction
    )
    step = first(stream, 2)
    with torch.no_grad():
        found = sum(batch.loss_scale * float(compute_loss(ours, batch)) for batch in step) / 2
    samples = [sample for batch in step for sample in singles(batch)]
    losses = [stock_loss(stock, {**sample, "mask": None}) for sample in samples]
    weights = compute_loss_weighting_for_sd3(scheme, torch.stack([sample["sigma"] for sample in samples])).tolist()
    tokens = [
        len(expected[sample["key"]]["image_latents"]) if loss_reduction == "per_token" else 1 for sample in samples
    ]
    together = sum(w * n * loss for w, n, loss in zip(weights, tokens, losses, strict=True)) / sum(tokens)
    assert found == pytest.approx(together, rel=1e-5)
    assert len(set(tokens)) > 1 or loss_reduction == "per_sample", "targets so similar would hide a mistake"


# ---- validation ------------------------------------------------------------------------------------------------------


def test_held_out_samples_are_never_trained(cache: Cache) -> None:
    stream = batches(cache, validation_split=0.5, batch_size=2)
    held_out = {cache[i].key for i in stream.validation}
    assert 0 < len(held_out) < len(cache)
    trained = Counter(key for batch in first(stream, 12) for key in batch.keys)
    assert trained.keys() == {sample.key for sample in cache} - held_out
    assert max(trained.values()) - min(trained.values()) <= 1
    assert batches(cache).validation.tolist() == []


def test_other_samples_do_not_change_which_are_held_out() -> None:
    """Nor does their order; and about as many are as was said."""
    targets = [content_hash(str(i).encode()) for i in range(4000)]
    for share in (0.02, 0.5):
        held_out = {targets[i] for i in split(targets, share)[1]}
        assert abs(len(held_out) / 4000 - share) < 4 * math.sqrt(share * (1 - share) / 4000)
        few = [*reversed(targets[::3]), "0" * 32]
        assert {few[i] for i in split(few, share)[1]} - {"0" * 32} == held_out & set(few)
    training, validation = split(targets, 0.02)
    assert sorted([*training, *validation]) == list(range(4000))
    assert set(validation) < set(split(targets, 0.1)[1]), "a larger part takes those of the smaller one, too"


def test_the_same_targets_are_held_out_as_always() -> None:
    """Or a run that was begun by an earlier version would be continued on what it is measured by."""
    held_out = [split([f"{i:032x}" for i in range(40)], share)[1].tolist() for share in (0.1, 0.3)]
    assert held_out == [[2, 6, 26, 30], [2, 6, 17, 18, 25, 26, 29, 30, 33, 38, 39]]


def test_all_samples_of_a_target_are_on_the_same_side(built: Built) -> None:
    """Whatever the resolution: at both, and in a cache of another one."""
    options = ("--set", "data.vae_image_size=[16384,9216]", "--set", "data.resolutions_per_sample=all")
    both, small = (
        open_cache(built("edit-plus", options)),
        open_cache(built("edit-plus", ("--set", "data.vae_image_size=9216"))),
    )
    assert len(both) == 2 * len(small)
    held_out = [{c[i].name for i in batches(c, validation_split=0.5).validation} for c in (both, small)]
    assert held_out[0] == held_out[1]
    assert len(batches(both, validation_split=0.5).validation) == 2 * len(held_out[0])


@pytest.mark.parametrize(("share", "which", "do"), [(1e-9, "validate", "raise"), (1 - 1e-9, "train", "lower")])
def test_a_split_that_leaves_nothing_is_refused(cache: Cache, share: float, which: str, do: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"leaves nothing to {which} \(found {share} of 4 different targets\)\n.*{do}"
    ):
        batches(cache, validation_split=share)


def test_what_goes_by_an_index_is_refused_where_there_is_none() -> None:
    samples: Any = object.__new__(ServedSamples)
    samples.folder, samples.prompt_embeds_width, samples.pipelines = Path("data"), 64, ()
    samples.recipe, samples._token_counts = Recipe({}, 4, ""), np.ones((2, 4), np.int64)
    with pytest.raises(
        ConfigError, match=r"train\.validation_split.* needs the index of a cache.*\n.*qwen-cache build"
    ):
        Batches(samples, TrainConfig(validation_split=0.5), NoiseSchedule())


# ---- the thread ------------------------------------------------------------------------------------------------------


class AtOnce(Executor):
    """A thread that is always done with all that it was given, so as far ahead as it can be."""

    def __init__(self, *_: object) -> None: ...

    def submit(self, fn: Callable[..., Any], /, *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*arguments))
        return future


def test_a_batch_lasts_until_the_next_is_asked_for(cache: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is left of another in its memory, which was larger or smaller, is not seen."""
    monkeypatch.setattr("qwen_train.data.batches.ThreadPoolExecutor", AtOnce)
    settings = {"batch_size": 3, "caption_dropout": 0.5}
    plain, places, done = batches(cache, **settings), [], 0
    with closing(batches(cache, **settings).starting_at(0)) as stream:
        for batch in itertools.islice(stream, 48):
            assert same_batch(batch, plain.batch(done))
            for tensor in (batch.clean, batch.noise, batch.prompt_embeds):
                tensor.fill_(math.nan)
            places.append(batch.clean.data_ptr())
            done = batch.consumed_samples
    assert len(set(places[24:])) <= AHEAD + 1, "memory is not used again"


def test_damaged_bytes_stop_the_iteration_and_no_thread_is_left(cache: Cache, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(cache.folder, tmp_path / "copy"))
    last = batches(cache).sample_noise(3).sample
    shard = folder / last.row.shard
    data = bytearray(shard.read_bytes())
    data[last.row.entry.data] ^= 1
    shard.write_bytes(data)
    stream = batches(open_cache(folder)).starting_at(0)
    assert [next(stream).keys for _ in range(3)] == [batches(cache).batch(k).keys for k in range(3)]
    damaged = rf"image_latents of sample {re.escape(last.row.label)} does not have the bytes .*\[F14\]"
    with pytest.raises(FormatError, match=damaged):
        next(stream)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
    stream = batches(cache).starting_at(0)
    next(stream)
    stream.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("batches")]
