"""Signals, and losses that are not finite.

The judges: the run that got no signal, and the run that never saw the skipped batch, bit for bit.
"""

from __future__ import annotations

import itertools
import math
import os
import signal
from collections.abc import Callable, Generator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qwen_cache import open_cache
from qwen_cache.errors import TrainError
from qwen_train import train as training
from qwen_train.data.batches import Batch, Batches
from qwen_train.run import SAMPLE, SAVE, Requests
from qwen_train.training import checkpoint, processes
from qwen_train.training.loss import MAX_CONSECUTIVE, NonFiniteGuard

from .support.commands import refused
from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, by_two, column, differences, outcome, send

FAST = {"optimizer__learning_rate": 0.01, "train__caption_dropout": 0.0}


def break_loss(
    monkeypatch: pytest.MonkeyPatch, broken: Callable[[int], bool], how: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Let `how` ruin the loss of the batches, counted from 0, that are `broken`."""
    batches, compute_loss = itertools.count(), training.compute_loss

    def compute(*arguments: Any) -> torch.Tensor:
        loss = compute_loss(*arguments)
        return how(loss) if arguments[1].noise.any() and broken(next(batches)) else loss

    monkeypatch.setattr(training, "compute_loss", compute)


def nan(loss: torch.Tensor) -> torch.Tensor:
    return loss * math.nan


def nan_gradient(loss: torch.Tensor) -> torch.Tensor:
    loss.register_hook(lambda gradient: gradient * math.inf * 0)
    return loss


def without_batch(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Let batch `number`, counted from 0, never come."""
    starting_at = Batches.starting_at

    def stream(self: Batches, done: int) -> Generator[Batch]:
        yield from (batch for i, batch in enumerate(starting_at(self, done)) if i != number)

    monkeypatch.setattr(Batches, "starting_at", stream)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_sigusr1_saves_after_the_step_and_training_continues(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = outcome(train.once(settings=EVERYTHING_RANDOM))
    handler = signal.getsignal(signal.SIGUSR1)
    send(monkeypatch, signal.SIGUSR1, in_batch=2, times=2)
    send(monkeypatch, signal.SIGUSR2, in_batch=2)
    result = train.try_(settings=EVERYTHING_RANDOM)
    assert result.code == 0, result.stderr
    assert "saved checkpoint-2" in result.stderr
    assert "no images to generate: set validation.prompts" in result.stderr
    out = train.folder / "out"
    assert [step for step, _ in checkpoint.checkpoints(out)] == [2, 3]
    assert differences(outcome(out), expected) == []
    assert signal.getsignal(signal.SIGUSR1) == handler


def test_sigusr2_generates_after_the_step_and_training_is_the_same(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Images of samples that are trained, since none are held out."""
    expected = outcome(train.once(settings=EVERYTHING_RANDOM))
    send(monkeypatch, signal.SIGUSR2, in_batch=2, times=2)
    out = train(settings=EVERYTHING_RANDOM, validation__num_images=2, validation__num_inference_steps=2)
    keys = sorted(sample.key for sample in open_cache(train.cache))[:2]
    folders = {each.name: sorted(file.stem for file in each.iterdir()) for each in (out / "validation").iterdir()}
    assert folders == dict.fromkeys(("step-0", "step-2", "step-3", "target", "controls"), keys)
    assert differences(outcome(out), expected) == []


@pytest.mark.parametrize("name", [SAVE, SAMPLE])
def test_asking_counts_once(name: str) -> None:
    with Requests() as requests:
        assert not requests.take(name)
        os.kill(os.getpid(), getattr(signal, name))
        assert not requests.take(SAVE if name == SAMPLE else SAMPLE)
        assert requests.take(name)
        assert not requests.take(name)


def test_what_is_asked_while_the_model_loads_is_done_after_the_first_step(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, these signals ended the process."""
    prepare = training.prepare

    def asked(start: Any) -> Any:
        os.kill(os.getpid(), signal.SIGUSR1)
        return prepare(start)

    monkeypatch.setattr(training, "prepare", asked)
    out = train(**FAST, train__checkpointing_steps=100)
    assert (out / "checkpoint-1").is_dir()


# ---- losses that are not numbers -------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("how", [nan, nan_gradient])
def test_a_step_without_a_usable_batch_is_made_of_the_next_ones(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, how: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Gradients, moments and the learning rate are those of a run that never saw it."""
    changes = {**FAST, "lr_scheduler__name": "linear", "train__max_grad_norm": 0.0}
    with monkeypatch.context() as patch:
        without_batch(patch, 1)
        expected = train(**changes, out="never-saw-it")
    break_loss(monkeypatch, lambda number: number == 1, how)
    result = train.try_(**changes, train__on_nan="skip")
    assert result.code == 0, result.stderr
    (key,) = train.batches(**changes).batch(1).labels
    what = "loss" if how is nan else "gradient"
    assert f"skipped: the {what} of step 2 is nan for the samples {key}" in result.stderr
    out = train.folder / "out"
    assert (out / LORA).read_bytes() == (expected / LORA).read_bytes()
    for name in ("step", "loss", "learning_rate", "grad_norm"):
        assert column(out, name) == column(expected, name)
    assert column(out, "skipped_batches") == ([0, 1, 0] if how is nan else [0, 0, 0])


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("skipped", [0, 1])
def test_the_step_is_the_mean_over_the_samples_that_are_left(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, skipped: int
) -> None:
    with monkeypatch.context() as patch:
        without_batch(patch, skipped)
        alone = train(**FAST, train__max_steps=1, out="alone")
    break_loss(monkeypatch, lambda number: number == skipped, nan)
    out = train(**FAST, train__max_steps=1, train__gradient_accumulation_steps=2, train__on_nan="skip")
    for name in ("loss", "grad_norm"):
        assert column(out, name) == pytest.approx(column(alone, name), rel=1e-6)
    weights, expected = load_file(out / LORA), load_file(alone / LORA)
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-5, atol=1e-7)


def test_a_gradient_that_is_no_number_stops_the_run(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    break_loss(monkeypatch, lambda number: number == 1, nan_gradient)
    (key,) = train.batches(**FAST).batch(1).labels
    refused(train.try_(**FAST), "the gradient of step 2 is not a number", f"nan for the samples {key}", "train.on_nan")
    assert column(train.folder / "out", "step") == [1]


@pytest.mark.slow
def test_many_in_a_row_stop_the_run(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finite loss between them starts the count again."""
    changes = {**FAST, "train__max_steps": 5, "train__on_nan": "skip", "train__checkpointing_steps": 1}
    break_loss(monkeypatch, lambda number: number not in (0, MAX_CONSECUTIVE), nan)
    result = train.try_(**changes)
    refused(result, f"the loss of step 3 is not a number, for the {MAX_CONSECUTIVE}th time in a row", "--resume")
    (last,) = train.batches(**changes).batch(2 * MAX_CONSECUTIVE).labels
    assert f"last for the samples {last}" in result.stderr
    assert column(train.folder / "out", "skipped_batches") == [0, MAX_CONSECUTIVE - 1]
    assert [step for step, _ in checkpoint.checkpoints(train.folder / "out")] == [1, 2]


def test_many_gradients_in_a_row_stop_the_run_though_their_losses_are_numbers(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    break_loss(monkeypatch, lambda number: 0 < number < 2 * MAX_CONSECUTIVE, nan_gradient)
    result = train.try_(**FAST, train__on_nan="skip")
    refused(result, f"the gradient of step 2 is not a number, for the {MAX_CONSECUTIVE}th time in a row", "--resume")


def test_skips_in_a_row_are_counted_from_the_last_step_that_was_taken() -> None:
    guard, alone = NonFiniteGuard(skip=True), SimpleNamespace(num_processes=1)
    for value in (math.nan, math.inf, -math.inf):
        assert all(guard.skips(alone, "the loss", value, ["a"]) for _ in range(MAX_CONSECUTIVE - 1))
        assert not guard.skips(alone, "the loss", 1.0, ["a"])
    assert all(guard.skips(alone, "the loss", math.nan, ["a"]) for _ in range(MAX_CONSECUTIVE - 1))
    with pytest.raises(TrainError, match=f"the loss is not a number, for the {MAX_CONSECUTIVE}th time in a row"):
        guard.skips(alone, "the loss", math.nan, ["a"])


# ---- several processes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_the_other", [False, True])
def test_what_one_process_cannot_use_both_skip(in_the_other: bool, capsys: pytest.CaptureFixture[str]) -> None:
    """The one that knows the samples names them."""
    guard = NonFiniteGuard(skip=True)
    accelerator = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda mine: mine + float(in_the_other))
    assert guard.skips(accelerator, "the loss", 1.0, ["a"]) is in_the_other
    assert not capsys.readouterr().err
    assert guard.skips(accelerator, "the loss", math.nan, ["a"])
    assert "skipped: the loss is nan for the samples a" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("errors", "told"),
    [
        ([None, None], [None, None]),
        ([None, "mine"], ["another process has ended", "mine"]),
        (["ours", "ours"], ["ours", "another process has ended"]),
        (["one", "two"], ["one", "two"]),
    ],
)
def test_an_error_of_one_process_ends_all_and_is_told_once(
    errors: list[str | None], told: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(processes, "all_gather_object", lambda _: [each and f"ValueError: {each}" for each in errors])
    for rank, error in enumerate(errors):
        monkeypatch.setattr(processes.dist, "get_rank", lambda rank=rank: rank)
        found = None
        try:
            with processes.together():
                if error:
                    raise ValueError(error)
        except (ValueError, processes.EndedElsewhereError) as raised:
            found = str(raised)
        assert found == told[rank]


ONE_IS_DISTURBED = """
import itertools, math, os, signal
from qwen_train import train as training
compute, batches, second = training.compute_loss, itertools.count(), os.environ["RANK"] == "1"

def disturbed(*arguments):
    loss = compute(*arguments)
    number = next(batches) if arguments[1].noise.any() else None
    if second and number == 0:
        os.kill(os.getpid(), signal.SIGUSR1)
        os.kill(os.getpid(), signal.SIGUSR2)
    return loss * math.nan if second and number == 1 else loss

training.compute_loss = disturbed
from qwen_train.cli import main
main()
"""


@pytest.mark.slow
def test_what_one_process_meets_all_of_them_heed(train: Trainer) -> None:
    """The second process is asked to save and for images in the first step, whose second batch it cannot use."""
    one = train(**FAST, train__gradient_accumulation_steps=2, train__max_steps=1, out="one")
    program = train.folder / "disturbed.py"
    program.write_text(ONE_IS_DISTURBED, encoding="utf-8")
    settings = {"train__gradient_accumulation_steps": 2, "train__max_steps": 3, "train__on_nan": "skip"}
    images = {"validation__num_images": 2, "validation__num_inference_steps": 2}
    two = by_two(train, program=[program], **FAST, **settings, **images, out="two")
    assert [step for step, _ in checkpoint.checkpoints(two)] == [1, 3]
    generated = {each.name: len(list(each.iterdir())) for each in (two / "validation").glob("step-*")}
    assert generated == {"step-0": 2, "step-1": 2, "step-3": 2}
    assert column(two, "skipped_batches") == [1, 0, 0]
    for name in ("loss", "grad_norm"):
        assert column(two, name)[0] == pytest.approx(column(one, name)[0], rel=1e-5)
