"""The average of the trained weights: diffusers' own, from the weights that each step's checkpoint holds."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file

from qwen_train.model.placement import Ema

from .support.runs import EVERYTHING_RANDOM, LORA, Trainer, average_of, differences, outcome, relative_error

AVERAGE = "pytorch_lora_weights_ema.safetensors"


@pytest.mark.parametrize("decay", [0.5, 0.9, 0.9999])
def test_equals_diffusers(decay: float) -> None:
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(3, 5)), torch.nn.Parameter(torch.randn(7))]
    ours, theirs = Ema(parameters, decay), EMAModel(parameters, decay=decay)
    for _ in range(30):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(torch.randn_like(parameter))
        ours.update()
        theirs.step(parameters)
    for found, expected in zip(ours.average, theirs.shadow_params, strict=True):
        torch.testing.assert_close(found, expected)


def test_swapped_lends_the_average_and_gives_back_the_weights_whatever_happens() -> None:
    parameter = torch.nn.Parameter(torch.tensor([1.0, 2.0]))
    ema = Ema([parameter], 0.9)
    parameter.data.zero_()
    seen = []
    with suppress(RuntimeError), ema.swapped():
        seen.append(parameter.tolist())
        raise RuntimeError
    assert seen == [[1, 2]]
    assert parameter.tolist() == [0, 0]
    assert ema.average[0].tolist() == [1, 2]


def test_the_file_is_the_average_of_the_steps_and_the_training_is_that_without_it(train: Trainer) -> None:
    plain = train.once(settings=EVERYTHING_RANDOM)
    changes = {"settings": EVERYTHING_RANDOM, "train__ema_decay": 0.4, "train__checkpointing_steps": 1}
    out = train(**changes)
    steps = [load_file(out / f"checkpoint-{step}" / LORA) for step in (1, 2, 3)]
    assert (out / LORA).read_bytes() == (plain / LORA).read_bytes()
    expected = average_of(steps, decay=0.4)
    assert relative_error(load_file(out / AVERAGE), expected) < 1e-6
    assert relative_error(steps[-1], expected) > 1e-3, "the average is the last step"
    assert (out / AVERAGE).read_bytes() == (out / "checkpoint-3" / AVERAGE).read_bytes()


@pytest.mark.slow
def test_the_average_continues_in_a_resumed_run(train: Trainer) -> None:
    changes = {"settings": EVERYTHING_RANDOM, "train__ema_decay": 0.9, "lr_scheduler__name": "constant"}
    expected = train(**changes, out="expected")
    train(**changes, train__max_steps=1)
    out = train("--resume", **changes)
    assert (out / AVERAGE).read_bytes() == (expected / AVERAGE).read_bytes()
    assert differences(outcome(out), outcome(expected)) == []
    result = train.try_("--resume", **changes | {"train__ema_decay": 0.8, "train__max_steps": 4})
    assert result.code == 2
    assert "another train.ema_decay" in result.stderr
    assert "(expected 0.9, found 0.8)" in result.stderr
