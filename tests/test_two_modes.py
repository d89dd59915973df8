"""Optimizers with two modes: what is evaluated and saved are the averaged weights, and training never notices.

The judge is the package's own loop, with `train()` and `eval()` as its documentation says; and a run that is neither
validated nor saved nor stopped.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_cache.settings.load import Config
from qwen_train.training.optimizers import evaluation_weights, make_optimizer

from .support.commands import refused
from .support.marks import slow
from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, column, differences, outcome

ADAMW, PRODIGY = "schedulefree.AdamWScheduleFree", "prodigyplus.ProdigyPlusScheduleFree"
FREE = {**EVERYTHING_RANDOM, "optimizer.name": ADAMW, "lr_scheduler.name": "constant"}
MEASURED = {"train.validation_split": 0.6, "validation.validation_steps": 1}
IMAGES = MEASURED | {
    "validation.num_images": 1,
    "validation.images_every_steps": 1,
    "validation.num_inference_steps": 2,
}


def matrices() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(40, 64, generator=generator)) for _ in range(2)]


def step(optimizer: Any, weights: list[torch.nn.Parameter]) -> None:
    optimizer.zero_grad()
    sum((weight - 3).square().sum() for weight in weights).backward()  # type: ignore[union-attr]
    optimizer.step()


def loop_of(name: str, arguments: dict[str, Any]) -> list[torch.Tensor]:
    """Six steps of the package's own loop, without an evaluation in between; the weights in its evaluation mode."""
    module, _, attribute = name.rpartition(".")
    weights = matrices()
    optimizer = getattr(pytest.importorskip(module), attribute)(weights, lr=0.1, **arguments)
    optimizer.train()
    for _ in range(6):
        step(optimizer, weights)
    optimizer.eval()
    return [weight.detach().clone() for weight in weights]


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        (ADAMW, {"warmup_steps": 3}),
        ("schedulefree.RAdamScheduleFree", {}),
        ("schedulefree.SGDScheduleFree", {}),
        (PRODIGY, {"d0": 1e-2}),
        ("pytorch_optimizer.ScheduleFreeAdamW", {}),
    ],
)
def test_evaluating_after_every_step_changes_nothing(name: str, arguments: dict[str, Any]) -> None:
    expected, ours = loop_of(name, arguments), matrices()
    optimizer, _ = make_optimizer(
        Config.model_validate({"optimizer": {"name": name, "learning_rate": 0.1, "arguments": arguments}}), ours
    )
    optimizer.train()  # type: ignore[attr-defined]
    for _ in range(6):
        step(optimizer, ours)
        before = [weight.detach().clone() for weight in ours]
        with evaluation_weights(optimizer):
            found = [weight.detach().clone() for weight in ours]
        assert all(torch.equal(a, b) for a, b in zip(ours, before, strict=True))
        with evaluation_weights(optimizer):
            assert all(torch.equal(a, b) for a, b in zip(ours, found, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], ours[0]), "one mode would hide a mistake"


@pytest.mark.parametrize("name", [ADAMW, slow("schedulefree.RAdamScheduleFree"), slow(PRODIGY)])
def test_a_stopped_and_resumed_run_is_the_uninterrupted_one(train: Trainer, name: str) -> None:
    """The first is saved and measured where the other is not, and resumed from there."""
    pytest.importorskip(name.split(".")[0])
    settings = FREE | {"optimizer.name": name} | ({"optimizer.learning_rate": 1.0} if name == PRODIGY else {})
    expected = train(settings=settings, train__validation_split=0.6, out="expected")
    train(settings=settings | IMAGES, train__max_steps=2)  # after the first, both modes have the same weights
    out = train("--resume", settings=settings | IMAGES)
    different = differences(outcome(out), outcome(expected))
    assert [each for each in different if not each.startswith("checkpoint-2/")] == []
    assert load_file(out / "checkpoint-2" / LORA).keys() == load_file(out / LORA).keys()


def test_the_file_has_the_averaged_weights_and_they_are_those_measured(train: Trainer) -> None:
    pytest.importorskip("schedulefree")
    out = train(settings=FREE | MEASURED)
    state = load_file(out / "checkpoint-3" / "state.safetensors")
    trained = [state[f"training_weights.{i}"] for i in range(sum(name.startswith("training_w") for name in state))]
    averaged = [y.lerp(state[f"optimizer.state.{i}.z"], 1 - 1 / 0.9) for i, y in enumerate(trained)]
    norms = [
        sorted(float(tensor.norm()) for tensor in each) for each in (load_file(out / LORA).values(), averaged, trained)
    ]
    assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    assert norms[0] != pytest.approx(norms[2], rel=1e-3)
    again = train(
        settings=FREE | MEASURED | {"train.max_steps": 1},
        train__lora__weights=str(out / LORA),
        optimizer__learning_rate=1e-12,
        out="again",
    )
    assert column(again, "validation_loss")[0] == pytest.approx(column(out, "validation_loss")[-1], rel=1e-5)


def test_an_average_of_the_average_is_refused_and_a_schedule_is_warned_of(train: Trainer) -> None:
    pytest.importorskip("schedulefree")
    refused(
        train.try_(settings=FREE, train__ema_decay=0.9),
        f"{ADAMW} averages the weights itself (found train.ema_decay=0.9)",
        "set train.ema_decay=0",
    )
    told = train.try_(settings=FREE, lr_scheduler__name="cosine", train__max_steps=1).stderr
    assert (
        f"warning: {ADAMW} is made for a constant learning rate, because it averages the weights: "
        "set lr_scheduler.name=constant (it is cosine)"
    ) in " ".join(told.split())


def test_a_checkpoint_says_nothing_of_modes_for_other_optimizers(train: Trainer) -> None:
    out: Path = train(settings=EVERYTHING_RANDOM, train__max_steps=1)
    assert not [name for name in load_file(out / "checkpoint-1" / "state.safetensors") if "training_weights" in name]
