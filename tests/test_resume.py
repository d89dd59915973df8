"""A run that died anywhere, with any method and optimizer, resumes as if it had not.

The judge is the run that was not interrupted, bit for bit, in float32 on the CPU. A process that dies leaves what is on
disk and nothing else, and so does an exception here that nothing catches; tests/test_train.py kills real processes.
"""

from __future__ import annotations

import errno
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_train import checkpoint
from qwen_train import train as training

from .support.commands import refused
from .support.crash import Crash
from .support.marks import slow
from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, column, differences, metrics, written

STEPS = 4
DYING = {**EVERYTHING_RANDOM, "train.max_steps": STEPS, "train.checkpointing_steps": 1, "train.ema_decay": 0.9}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "full": {"train.method": "full"},
    "adamw8bit": {"optimizer.name": "adamw8bit", "optimizer.arguments": {"min_8bit_size": 16}},
    "adafactor": {"optimizer.name": "adafactor"},
    "prodigy": {"optimizer.name": "prodigy", "optimizer.learning_rate": 1},
    "import path": {"optimizer.name": "torch.optim.RAdam"},
    "rslora and dora": {"train.lora.use_rslora": True, "train.lora.use_dora": True},
}


def dying_in(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die while it works on that batch, counted from 0."""
    batches, compute_loss = itertools.count(), training.compute_loss

    def die(*arguments: Any) -> torch.Tensor:
        if next(batches) == batch:
            raise Crash
        return compute_loss(*arguments)

    patch.setattr(training, "compute_loss", die)


@pytest.fixture(scope="module")
def uninterrupted(
    built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, object]]:
    made: dict[str, dict[str, object]] = {}

    def run(way: str) -> dict[str, object]:
        if way not in made:
            folder = tmp_path_factory.mktemp("uninterrupted")
            trainer = Trainer(built("edit-plus"), tiny_model("edit-plus"), folder)
            made[way] = written(trainer(settings=DYING | WAYS[way]))
        return made[way]

    return run


EVERY_STEP = [(way, step) for way in ("adamw", "full") for step in range(STEPS)]
FAST = [("adamw", 2), ("full", 1)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("way", "step"),
    FAST + [slow(*case) for case in [*EVERY_STEP, *((way, 2) for way in WAYS)] if case not in FAST],
)
def test_dead_in_any_step_and_resumed_equals_uninterrupted(
    train: Trainer, uninterrupted: Callable[[str], dict[str, object]], way: str, step: int
) -> None:
    """In the second batch of a step, so that gradients are lost as well."""
    if way == "prodigy":
        pytest.importorskip("prodigyopt")
    settings = DYING | WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        dying_in(2 * step + 1, patch)
        with pytest.raises(Crash):
            train.try_(settings=settings)
    assert [number for number, _ in checkpoint.checkpoints(train.folder / "out")] == list(range(1, step + 1))[-3:]
    assert differences(written(train("--resume", settings=settings)), uninterrupted(way)) == []


@pytest.mark.slow
def test_the_ways_are_different(uninterrupted: Callable[[str], dict[str, object]]) -> None:
    """Or the test above would say nothing of some."""
    losses = [tuple(uninterrupted(way)["loss"]) for way in WAYS if way != "prodigy"]  # type: ignore[arg-type]
    assert len(set(losses)) == len(losses)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer.name": "adafactor"}, "another optimizer.name"),
        ({"train.method": "full"}, "another train.method"),
        ({"train.lora.use_rslora": True}, "another lora"),
    ],
)
def test_resuming_as_something_else_is_refused(train: Trainer, change: dict[str, Any], message: str) -> None:
    train(settings=EVERYTHING_RANDOM, train__max_steps=1)
    refused(train.try_("--resume", settings={**EVERYTHING_RANDOM, **change}), "checkpoint-1", message)


@pytest.mark.parametrize("method", ["lora", slow("full")])
def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """The disk is full when the second checkpoint has its weights and the optimizer's state is to be written."""
    settings = {**DYING, "train.method": method}
    save_file, calls = checkpoint.save_file, itertools.count()

    def full_disk(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if next(calls) == 1:
            path.write_bytes(b"half of it")
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        result = train.try_(settings=settings)
    out = train.folder / "out"
    refused(result, str(out), "checkpoint-2 cannot be written: No space left on device", "checkpoint-1 is kept")
    assert sorted(path.name for path in out.iterdir() if "checkpoint" in path.name) == ["checkpoint-1"]
    resumed = written(train("--resume", settings=settings))
    assert differences(resumed, written(train(settings=settings, out="expected"))) == []


def test_a_result_that_cannot_be_written_is_said_and_written_by_resuming(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_space(*arguments: Any) -> None:
        if arguments[2].parent == train.folder / "out":
            raise OSError(errno.ENOSPC, "No space left on device")
        write(*arguments)

    write = checkpoint.write_weights
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_weights", no_space)
        refused(train.try_(), "the result cannot be written: No space left on device", "checkpoint-3 is kept")
    assert not (train.folder / "out" / LORA).exists()
    out = train("--resume")
    assert (out / LORA).read_bytes() == (out / "checkpoint-3" / LORA).read_bytes()
    assert len(metrics(out)) == 3


def test_a_checkpoint_of_full_training_with_a_weight_missing_is_refused(train: Trainer) -> None:
    settings = {**EVERYTHING_RANDOM, "train.method": "full", "train.max_steps": 1}
    (file,) = (train(settings=settings) / "checkpoint-1" / "transformer").glob("*.safetensors")
    weights = load_file(file)
    checkpoint.save_file({name: weight for name, weight in weights.items() if name != "img_in.bias"}, file)
    refused(train.try_("--resume", settings={**settings, "train.max_steps": 2}), "weights are missing", "img_in.bias")


@pytest.mark.slow
def test_settings_of_the_optimizer_that_changed_count_from_the_checkpoint_on(train: Trainer) -> None:
    """The judge of the schedule is a run that had it from the begin."""
    schedule = {"lr_scheduler.name": "linear", "lr_scheduler.warmup_steps": 1, "optimizer.learning_rate": 5e-3}
    settings = {**DYING, "train.ema_decay": 0, "optimizer.learning_rate": 1e-3}
    plain = train(settings=settings, out="plain")
    always = train(settings=settings | schedule, out="always")
    train(settings=settings, train__max_steps=2)
    result = train.try_("--resume", settings=settings | schedule, optimizer__weight_decay=0.5)
    assert result.code == 0, result.stderr
    rates = column(train.folder / "out", "learning_rate")
    assert rates == column(plain, "learning_rate")[:2] + column(always, "learning_rate")[2:]
    said = " ".join(result.stderr.split())
    assert "from here on: train.max_steps 2 → 4" in said
    assert (
        "optimizer.learning_rate 0.001 → 0.005, optimizer.weight_decay 0.01 → 0.5, lr_scheduler.name cosine → linear"
        in said
    )
    saved = [(train.folder / "out" / f"checkpoint-{step}" / "state.json").read_text() for step in (2, 3)]
    assert ['["weight_decay", 0.5]' in text for text in saved] == [False, True]


def test_a_run_that_is_done_says_so(train: Trainer) -> None:
    train(settings=DYING, train__max_steps=2)
    for steps in (1, 2):
        result = train.try_("--resume", settings=DYING, train__max_steps=steps)
        assert result.code == 0
        assert "after step 2: nothing is left to train; raise train.max_steps" in " ".join(result.stderr.split())


def test_another_lora_is_told_by_what_differs(train: Trainer) -> None:
    train(settings=DYING, train__max_steps=1)
    result = train.try_("--resume", settings=DYING, train__lora__rank=3)
    assert "(expected rank 16, found rank 3)" in result.stderr
