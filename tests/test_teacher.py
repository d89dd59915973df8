"""The base as teacher: samples of a cache with `teacher: true` are trained towards what the model predicts without its
LoRA.

The judge is the stock transformer with peft's adapter, one sample and one noise draw at a time, with `disable_adapters`
for the teacher.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.settings.sections import CacheConfig, WeightedCache
from qwen_train import train as training
from qwen_train.data.batches import Batch, NoiseDraw, NoisedSample
from qwen_train.data.samples import open_mixture
from qwen_train.lora.adapter import lora_weights
from qwen_train.training import loss as loss_module
from qwen_train.weights import trainable

from .support.commands import run
from .support.marks import slow
from .support.runs import SMALL, MixedTrainer, Trainer, column, differences, outcome, relative_error, train_compiled
from .support.teacher import gradients, prepared, stock_of, velocity_20b
from .support.training_21 import stock_velocity

Built = Callable[..., Path]
TinyModel = Callable[[str], Path]
SMALLER = ("--set", "data.vae_image_size=9216")
LOSS_WEIGHT = 0.5
EXACT = 1e-5
"""Tolerance in float32: two orders of the same sums."""


def with_teacher(p: Any, batch: Batch) -> Batch:
    """The batch as training has it."""
    return loss_module.with_teacher(p.run.transformer, batch, p.config.train, p.accelerator)


def first_batch(p: training.Prepared) -> tuple[Batch, list[NoisedSample]]:
    return p.batches.batch(0), [p.batches.sample_noise(position) for position in p.batches.plan.batch(0)]


def reference(stock: Any, item: NoisedSample, draw: NoiseDraw, mask_weight: float, velocity: Any) -> Tensor:
    """The loss of a sample at one noise draw, written out."""
    sample, sigma = item.sample, draw.sigma
    text, clean = sample["empty_prompt_embeds" if item.without_caption else "prompt_embeds"], sample["image_latents"]
    noisy = (1 - sigma) * clean + sigma * draw.noise
    target = draw.noise - clean
    if item.taught:
        stock.disable_adapters()
        with torch.no_grad():
            target = velocity(stock, sample, text, noisy, sigma)
        stock.enable_adapters()
    error = (velocity(stock, sample, text, noisy, sigma) - target).square().mean(-1)
    mask = sample["edit_mask"] if "edit_mask" in sample else torch.ones(len(clean))
    weight = 1 + (mask_weight - 1) * mask
    return (LOSS_WEIGHT if item.taught else 1.0) * (error * weight).sum() / weight.sum()


def reference_loss(p: training.Prepared, stock: Any, noised: list[NoisedSample], velocity: Any) -> Tensor:
    config = p.config.train
    losses = [
        torch.stack([reference(stock, it, draw, config.edit_mask_weight, velocity) for draw in it.draws]).mean()
        for it in noised
    ]
    tokens = [len(it.draws[0].noise) if config.loss_reduction == "per_token" else 1 for it in noised]
    return torch.stack([n * loss for n, loss in zip(tokens, losses, strict=True)]).sum() / sum(tokens)


@pytest.mark.parametrize(
    ("variant", "changes"),
    [
        ("edit-plus", {"train__layout": "padded", "train__lora__lora_dropout": 0.0}),
        slow("edit-plus", {"train__layout": "packed", "train__loss_reduction": "per_token"}),
        slow("qwen-image-21", {"train__noise_draws": 2, "train__loss_reduction": "per_token"}),
        slow("qwen-image-21", {"train__layout": "packed", "train__noise_draws": 3}),
        slow("edit-plus", {"train__gradient_checkpointing": 2}),
        slow("edit-plus", {"train__offload_blocks": 2}),
    ],
)
def test_loss_and_gradient_of_a_mixed_batch_are_those_of_the_stock_model_one_by_one(
    built: Built, tiny_model: TinyModel, tmp_path: Path, variant: str, changes: dict[str, Any]
) -> None:
    changes = {"train__edit_mask_weight": 3.0, "train__caption_dropout": 0.5, "train__batch_size": 6} | changes
    train = MixedTrainer(built(variant), built(variant, SMALLER), tiny_model(variant), tmp_path)
    p = prepared(train, **changes)
    batch, noised = first_batch(p)
    assert {item.taught for item in noised} == {False, True}
    assert {item.without_caption for item in noised if item.taught} == {False, True}
    kind = QwenImageTransformer2DModel if variant == "edit-plus" else QwenImage21Transformer2DModel
    velocity = velocity_20b if variant == "edit-plus" else stock_velocity
    stock = stock_of(p, tiny_model(variant) / "transformer", kind)
    loss = loss_module.compute_loss(p.transformer, with_teacher(p, batch))
    loss.backward()
    expected = reference_loss(p, stock, noised, velocity)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=EXACT)
    assert relative_error(gradients(p.run.transformer), gradients(stock)) < EXACT
    plain = loss_module.compute_loss(p.transformer, batch)
    assert abs(plain.item() / expected.item() - 1) > 0.01, "a teacher that changes nothing would hide a mistake"


@pytest.mark.slow
def test_the_first_step_has_nothing_to_teach_and_costs_a_pass_of_the_taught_samples_alone(
    train_mixed: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B is zero: the model with its LoRA is the teacher, up to the order of sums in batches of other sizes."""
    p = train_mixed.prepared(train__batch_size=2)
    passes: list[tuple[int, bool]] = []
    forward = type(p.run.transformer).forward

    def counted(model: Any, *arguments: Any, **named: Any) -> Any:
        passes.append((len(named["hidden_states"]), torch.is_grad_enabled()))
        return forward(model, *arguments, **named)

    monkeypatch.setattr(type(p.run.transformer), "forward", counted)
    batches = [p.batches.batch(i) for i in range(0, 16, 2)]
    assert {len(batch.taught) for batch in batches} == {0, 1, 2}
    for batch in batches:
        passes.clear()
        with_target = with_teacher(p, batch)
        assert passes == ([(len(batch.taught), False)] if batch.taught else [])
        alone = torch.zeros(2)
        alone[list(batch.taught)] = 1
        values = []
        for each in (with_target, batch):
            loss = loss_module.compute_loss(p.transformer, replace(each, sample_weight=alone))
            loss.backward()
            values.append((loss.item(), max(float(g.abs().max()) for g in gradients(p.run.transformer).values())))
            p.run.optimizer.zero_grad()
        (loss, gradient), (plain, usual) = values
        assert loss <= 1e-4**2 * plain
        assert gradient <= 1e-4 * usual
        assert bool(plain) == bool(batch.taught)


@pytest.mark.slow
def test_the_teacher_has_the_assistant_and_no_dropout(train_mixed: Trainer) -> None:
    """And leaves the random state as it was, and our LoRA as it is in training."""
    assistant = train_mixed(train__max_steps=2, optimizer__learning_rate=0.1, out="assistant")
    targets = []
    for dropout, lora in ((0.0, None), (0.5, None), (0.5, str(assistant)), (0.0, str(assistant))):
        p = prepared(train_mixed, train__batch_size=8, train__lora__lora_dropout=dropout, train__assistant_lora=lora)
        before = torch.get_rng_state()
        batch = with_teacher(p, p.batches.batch(0))
        assert torch.equal(torch.get_rng_state(), before)
        assert batch.taught
        assert batch.target is not None
        targets.append(batch.target[list(batch.taught)])
        assert len(trainable(p.run.transformer)) == len(lora_weights(p.run.transformer))
    assert torch.equal(targets[0], targets[1])
    assert torch.equal(targets[2], targets[3])
    assert not torch.allclose(targets[0], targets[2], rtol=1e-2)


@pytest.mark.slow
def test_a_run_with_a_teacher_resumes_and_skips_what_is_not_finite(train_mixed: Trainer) -> None:
    settings = {**SMALL, "train.batch_size": 2, "train.max_steps": 3, "train.lora.lora_dropout": 0.3}
    whole = train_mixed(settings=settings, out="whole")
    result = train_mixed.try_(settings=settings, train__max_steps=1)
    assert result.code == 0, result.stderr
    assert "teacher  the model without the LoRA, for 4 samples" in result.stderr
    out = train_mixed("--resume", settings=settings)
    assert differences(outcome(out), outcome(whole)) == []


@pytest.mark.slow
def test_a_teacher_that_is_not_finite_is_a_loss_that_is_not(
    train_mixed: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    predict, spoiled = loss_module.predict_velocity, []

    def spoil(transformer: Any, batch: Batch) -> Tensor:
        velocity = predict(transformer, batch)
        if not torch.is_grad_enabled() and not spoiled:
            spoiled.extend(batch.labels)
            return velocity + torch.nan
        return velocity

    monkeypatch.setattr(loss_module, "predict_velocity", spoil)
    out = train_mixed(train__on_nan="skip", train__max_steps=8)
    assert spoiled
    assert sum(column(out, "skipped_batches")) == 1
    assert all(math.isfinite(loss) for loss in column(out, "loss"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_compiled_blocks_learn_the_same(train_mixed: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compiled block serves the model with both adapters, and with the assistant alone."""
    settings = {**SMALL, "train.batch_size": 2, "optimizer.learning_rate": 0.01}
    settings["train.assistant_lora"] = str(train_mixed(settings=settings, out="assistant"))
    plain = train_mixed(settings=settings, out="plain")
    compiled = train_compiled(train_mixed, monkeypatch, settings)
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


# ---- what is held out, what is refused -------------------------------------------------------------------------------


@pytest.mark.slow
def test_held_out_samples_of_the_teacher_are_not_measured(train_mixed: Trainer) -> None:
    settings = {**SMALL, "train.validation_split": 0.6, "validation.validation_steps": 1}
    p = train_mixed.prepared(settings=settings)
    assert p.validation is not None
    own = {sample.key for sample in open_cache(train_mixed.cache)}
    held_out = [p.batches.cache[int(i)].key for i in p.batches.validation]
    assert {key in own for key in held_out} == {True, False}
    assert {sample.key for sample in p.validation.samples} == {key for key in held_out if key in own}


def test_identity_and_what_is_refused(train_mixed: Trainer, train: Trainer) -> None:
    first, second = str(train_mixed.cache), str(train_mixed.taught)

    def identity(**second_as: Any) -> str:
        return open_mixture(
            [WeightedCache(path=first), WeightedCache(path=second, **second_as)], CacheConfig()
        ).identity

    identities = [
        identity(),
        identity(teacher=True),
        identity(loss_weight=0.5),
        identity(teacher=True, loss_weight=0.5),
    ]
    assert len(set(identities)) == 4
    for command in ("run", "plan"):
        for caches, changes, message in (
            (
                [{"path": first, "teacher": True}],
                [],
                f"{first}: every cache of train.caches has teacher: true, so the LoRA would learn to change nothing",
            ),
            (
                [{"path": first}, {"path": second, "teacher": True}],
                ["--set", "train.method=full"],
                f"{second}: the teacher of train.caches is the model with its LoRA switched off, and full training has",
            ),
        ):
            options = ["--set", f"train.caches={json.dumps(caches)}", *changes]
            result = run("qwen-train", command, "--model", train.model, *options)
            assert result.code == 2
            assert message in result.stderr
