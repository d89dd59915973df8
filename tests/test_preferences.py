"""Learning from preferences (`train.dpo`): pairs of a target and a rejected image of any size.

The judge is the stock transformer with peft's adapter, one image at a time, with `disable_adapters` for the reference,
and the formula of Diffusion-DPO written out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from safetensors.torch import load_file
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.errors import ConfigError
from qwen_train import train as training
from qwen_train.data.batches import NoisedSample
from qwen_train.data.checks import check_objective, unused_parts
from qwen_train.data.samples import Mixture
from qwen_train.memory import plan as plan_module
from qwen_train.memory.plan import Workload
from qwen_train.memory.prediction import Memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.training import loss as loss_module
from qwen_train.training.best import best_of

from .support.caches import build
from .support.commands import run
from .support.marks import slow
from .support.preferences import write_preferences
from .support.runs import (
    EVERYTHING_RANDOM,
    LORA,
    SMALL,
    Trainer,
    by_two,
    column,
    differences,
    metrics,
    outcome,
    relative_error,
)
from .support.teacher import gradients, prepared, stock_of, velocity_20b, with_fault
from .support.training_21 import stock_velocity

TinyModel = Callable[[str], Path]
Preferring = Callable[..., Trainer]
BETA, SMOOTHING, ALPHA = 5.0, 0.1, 0.5
DPO = {"train__dpo__beta": BETA, "train__dpo__label_smoothing": SMOOTHING, "train__dpo__rpo_alpha": ALPHA}
EXACT = 1e-5
"""Tolerance in float32: two orders of the same sums."""


@pytest.fixture(scope="module")
def preferring(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Preferring:
    """`qwen-train run` on a cache of pairs: `preferring("edit-plus", folder)`; a cache is built once."""
    root, caches = tmp_path_factory.mktemp("preferences"), dict[Any, Path]()

    def make(variant: str, folder: Path, count: int = 6, *, rejected: bool = True) -> Trainer:
        key = variant, count, rejected
        if key not in caches:
            source = write_preferences(root / f"source {len(caches)}", count, rejected=rejected)
            caches[key] = root / f"shards {len(caches)}"
            result = build(source, caches[key], tiny_model(variant))
            assert result.code == 0, result.stderr
        return Trainer(caches[key], tiny_model(variant), folder)

    return make


# ---- the loss --------------------------------------------------------------------------------------------------------


def squared_error(stock: Any, item: NoisedSample, noise: Tensor, velocity: Any, *, rejected: bool) -> Tensor:
    """That of one image of a pair, at the target's noise level."""
    sample, sigma = item.sample, item.draws[0].sigma
    clean = sample["rejected_latents" if rejected else "image_latents"]
    controls = {name: sample[name] for name in ("control_latents",) if name in sample}
    shapes = sample.img_shapes if not rejected else (sample.rejected_shape, *sample.img_shapes[1:])
    described = Described(controls, img_shapes=shapes, row=sample.row)
    text = sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"]
    predicted = velocity(stock, described, text, (1 - sigma) * clean + sigma * noise, sigma)
    error: Tensor = ((noise - clean - predicted) ** 2).mean()
    return error


class Described(SimpleNamespace):
    """The tensors of a sample that the judge needs."""

    def __init__(self, tensors: dict[str, Tensor], **values: Any) -> None:
        super().__init__(tensors=tensors, **values)

    def __contains__(self, name: str) -> bool:
        return name in self.tensors

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]


def reference_loss(stock: Any, pairs: list[list[NoisedSample]], velocity: Any) -> Tensor:
    """Equation 14 of arXiv 2311.12908 for the velocity, with label smoothing and a supervised term as in TRL."""
    losses = []
    for target, rejected in pairs:
        noise = target.draws[0].noise
        noise_rejected = noise if len(noise) == len(rejected.draws[0].noise) else rejected.draws[0].noise
        better = partial(squared_error, stock, target, noise, velocity, rejected=False)
        worse = partial(squared_error, stock, target, noise_rejected, velocity, rejected=True)
        stock.disable_adapters()
        with torch.no_grad():
            reference_better, reference_worse = better(), worse()
        stock.enable_adapters()
        error = better()
        z = BETA * ((worse() - reference_worse) - (error - reference_better))
        likely = (1 - SMOOTHING) * torch.sigmoid(z).log() + SMOOTHING * torch.sigmoid(-z).log()
        losses.append(ALPHA * error - likely)
    return torch.stack(losses).mean()


def judged(p: training.Prepared, stock: Any, velocity: Any, positions: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
    expected = reference_loss(stock, [p.batches.rows(position) for position in positions], velocity)
    stock.zero_grad()
    expected.backward()
    return expected, {name: each.clone() for name, each in gradients(stock).items()}


def found(p: training.Prepared) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and the gradients of the first batch, as training has them."""
    p.run.optimizer.zero_grad()
    batch = loss_module.with_reference(p.run.transformer, p.batches.batch(0), p.config.train)
    loss = loss_module.compute_loss(p.transformer, batch, p.config.train)
    loss.backward()
    return loss, gradients(p.run.transformer)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("edit-plus", {"train__layout": "padded"}),
        slow("edit-plus", {"train__layout": "packed"}),
        slow("qwen-image-21", {"train__layout": "padded"}),
        ("qwen-image-21", {"train__layout": "packed"}),
        slow("edit-plus", {"train__offload_blocks": 2}),
    ],
)
def test_loss_and_gradient_are_those_of_the_stock_model_image_by_image(
    preferring: Preferring, tiny_model: TinyModel, tmp_path: Path, variant: str, changes: dict[str, Any]
) -> None:
    p = prepared(preferring(variant, tmp_path), train__batch_size=6, train__caption_dropout=0.5, **DPO, **changes)
    positions = p.batches.plan.batch(0)
    pairs = [p.batches.rows(position) for position in positions]
    assert {better.without_caption for better, _ in pairs} == {False, True}
    assert {len(better.draws[0].noise) == len(worse.draws[0].noise) for better, worse in pairs} == {False, True}
    kind = QwenImageTransformer2DModel if variant == "edit-plus" else QwenImage21Transformer2DModel
    velocity = velocity_20b if variant == "edit-plus" else stock_velocity
    stock = stock_of(p, tiny_model(variant) / "transformer", kind)
    expected, expected_gradients = judged(p, stock, velocity, positions)
    loss, loss_gradients = found(p)
    assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
    assert relative_error(loss_gradients, expected_gradients) < EXACT


FAULTS = {
    "the sign": (loss_module, "pair_losses", "z = -dpo.beta", "z = dpo.beta"),
    "the reference has the LoRA": (loss_module, "with_reference", ", without(transformer, TRAINED)", ""),
    "the mean over tokens": (loss_module, "sample_errors", "/ weight.sum(dim=1)", "/ (weight.sum() / len(weight))"),
    "another noise": (NoisedSample, "rejected", "generator.set_state(state)", "generator.manual_seed(1)"),
}


def test_each_fault_would_be_seen(
    preferring: Preferring, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    p = prepared(preferring("edit-plus", tmp_path), train__batch_size=6, **DPO)
    stock = stock_of(p, tiny_model("edit-plus") / "transformer", QwenImageTransformer2DModel)
    _, expected = judged(p, stock, velocity_20b, p.batches.plan.batch(0))
    assert relative_error(found(p)[1], expected) < EXACT
    for name, (owner, function, old, new) in FAULTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(owner, function, with_fault(getattr(owner, function), old, new))
            assert relative_error(found(p)[1], expected) > 100 * EXACT, name


# ---- batches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variant", "layout", "budget"), [("edit-plus", "padded", 700), ("qwen-image-21", "packed", 1200)]
)
def test_a_pair_is_two_rows_of_one_batch_at_one_noise_level_within_the_budget(
    preferring: Preferring, tmp_path: Path, variant: str, layout: str, budget: int
) -> None:
    train = preferring(variant, tmp_path)
    batches = train.batches(train__dpo__beta=BETA, train__layout=layout, train__max_tokens=budget)
    consumed, samples, shared = 0, list[str](), set[bool]()
    while consumed < batches.plan.in_epoch:
        positions = batches.plan.batch(consumed)
        batch = batches.batch(consumed)
        consumed += len(positions)
        rows, texts = 2 * len(positions), batch.prompt_embeds.shape[1]
        valid = rows * texts if batch.prompt_embeds_mask is None else int(batch.prompt_embeds_mask.sum())
        computed = rows * (batch.clean.shape[1] + texts) if layout == "padded" else batch.image_tokens + valid
        assert computed <= budget
        assert len(batch.keys) == rows
        assert (
            batch.keys[::2] == batch.keys[1::2] == tuple(batches.cache[batches.plan.sample(i)].key for i in positions)
        )
        assert torch.equal(batch.sigma[::2], batch.sigma[1::2])
        assert torch.equal(batch.prompt_embeds[::2], batch.prompt_embeds[1::2])
        for better, worse in (batches.rows(position) for position in positions):
            shared.add(same := len(better.draws[0].noise) == len(worse.draws[0].noise))
            assert torch.equal(better.draws[0].noise, worse.draws[0].noise) == same
        samples += batch.keys[::2]
    assert shared == {True, False}
    assert len(set(samples)) == len(samples) == 6
    plain = train.batches(train__layout=layout).sample_noise(0)
    assert torch.equal(plain.draws[0].noise, batches.sample_noise(0).draws[0].noise)


# ---- runs ------------------------------------------------------------------------------------------------------------

LEARNING = {
    **SMALL,
    "train.dpo.beta": 50.0,
    "train.batch_size": 4,
    "train.max_steps": 20,
    "train.validation_split": 0.4,
    "optimizer.learning_rate": 0.01,
    "validation.validation_steps": 20,
}


@pytest.mark.slow
def test_the_accuracy_of_preference_rises_on_held_out_pairs(preferring: Preferring, tmp_path: Path) -> None:
    train = preferring("edit-plus", tmp_path, 24)
    train.page = True
    result = train.try_(settings=LEARNING)
    assert result.code == 0, result.stderr
    measured = [line for line in metrics(tmp_path / "out") if "preference_accuracy" in line]
    assert [line["step"] for line in measured] == [0, 20]
    assert (measured[0]["preference_accuracy"], measured[0]["preference_margin"]) == (0.5, 0.0)
    assert measured[1]["preference_accuracy"] >= 0.9
    assert measured[1]["preference_margin"] > 0
    assert "step 0: preference accuracy 0.50, margin +0" in result.stderr
    assert "DPO with beta 50, and as reference the model without the LoRA" in result.stderr
    assert column(tmp_path / "out", "loss")[0] == pytest.approx(math.log(2)), "before the LoRA has learnt"
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert "preference accuracy" in page
    assert "of held-out pairs after step 20, by a margin of" in page
    best = best_of(tmp_path / "out")
    assert (best.step, best.within) == (20, (20,))
    (score,) = (each for each in best.scores.scores if each.name == "preference loss")
    assert score.values[0].tolist() == pytest.approx([math.log(2)] * score.units)


@pytest.mark.slow
def test_a_run_is_resumed_exactly_and_with_these_settings_alone(preferring: Preferring, tmp_path: Path) -> None:
    train = preferring("edit-plus", tmp_path)
    settings = {**EVERYTHING_RANDOM, "train.dpo.beta": 50.0, "train.ema_decay": 0.5}
    whole = train(settings=settings, out="whole")
    assert train.try_(settings=settings, train__max_steps=1).code == 0
    other = train.try_("--resume", settings=settings, train__dpo__beta=60.0)
    assert other.code == 2
    assert "this checkpoint was trained with another train.dpo.beta" in other.stderr
    assert differences(outcome(train("--resume", settings=settings)), outcome(whole)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one(preferring: Preferring, tmp_path: Path, fsdp: bool) -> None:
    train = preferring("edit-plus", tmp_path)
    settings = {**SMALL, "train.dpo.beta": 50.0, "train.batch_size": 1, "optimizer.eps": 1e-2}
    settings |= {"train.validation_split": 0.4, "validation.validation_steps": 3}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings, train__fsdp=fsdp)
    for name, rounded in (("loss", 0.0), ("preference_margin", 2**-22)):  # a difference of float32 errors of about 1
        assert column(out, name) == pytest.approx(column(one, name), rel=1e-4, abs=rounded)
    assert relative_error(load_file(out / LORA), load_file(one / LORA)) < 1e-4


# ---- what is counted, said and refused -------------------------------------------------------------------------------


def test_plan_counts_both_images_of_a_pair(
    preferring: Preferring, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And predicts the memory of both; `tests/test_memory.py` judges that of several rows."""
    train, predicted = preferring("edit-plus", tmp_path), list[list[SampleSize]]()

    def predict(_: object, __: object, batch: list[SampleSize], **___: object) -> Memory:
        predicted.append(batch)
        return Memory(0, 0, 0, 0, 0, 0)

    def planned(**changes: Any) -> dict[str, int]:
        config = train.config(**changes)
        return dict(plan_module.plan(config, Workload.of(config), None)["largest_batch"])

    monkeypatch.setattr(plan_module, "predict_memory", predict)
    one, pair = planned(), planned(train__dpo__beta=BETA)
    assert one["samples"] == pair["samples"] == 1
    assert pair["tokens"] >= 2 * one["tokens"]
    assert [*map(len, predicted)] == [1, 1, 2, 2]


def test_rejected_images_that_are_not_trained_are_said_and_what_cannot_work_is_refused(
    preferring: Preferring, tmp_path: Path
) -> None:
    train, plain = preferring("edit-plus", tmp_path), preferring("edit-plus", tmp_path, rejected=False)
    samples = Mixture.of(open_cache(train.cache))
    note = "note: 6 of 6 samples have a rejected image, which is not trained: to learn from it, set train.dpo.beta"
    assert [*unused_parts(samples, train.config().train)] == [note]
    assert not [*unused_parts(samples, train.config(**DPO).train)]
    assert not [*unused_parts(Mixture.of(open_cache(plain.cache)), train.config().train)]
    for command in ("run", "plan"):
        result = run("qwen-train", command, *plain.arguments(train__dpo__beta=BETA)[1:])
        assert result.code == 2
        assert "samples have none (found 6 of 6 samples without rejected image)" in result.stderr
    taught = [{"path": str(train.cache)}, {"path": str(plain.cache), "teacher": True}]
    for change, value, setting in (
        ("train__method", "full", "train.method=full"),
        ("train__caches", taught, "teacher: true in train.caches"),
        ("train__follow", True, "train.follow=true"),
        ("train__noise_draws", 2, "train.noise_draws=2"),
        ("train__loss_type", "huber", "train.loss_type=huber"),
        ("train__loss_reduction", "per_token", "train.loss_reduction=per_token"),
        ("train__edit_mask_weight", 3.0, "train.edit_mask_weight=3"),
    ):
        with pytest.raises(ConfigError, match=f"train.dpo and {setting} exclude each other"):
            check_objective(train.config(train__dpo__beta=BETA, **{change: value}).train)
    result = train.try_(train__dpo__beta=BETA, train__follow=True)
    assert result.code == 2
    assert "train.dpo and train.follow=true exclude each other" in result.stderr
    with pytest.raises(ConfigError, match=r"train.dpo.label_smoothing is for learning from preferences"):
        train.config(train__dpo__label_smoothing=0.1)
