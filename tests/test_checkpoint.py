"""A checkpoint has the whole state: every optimizer continues from it as if nothing had been, and so does the average.

The judge is the same run without a checkpoint, bit for bit. Whole runs are stopped in tests/test_resume.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qwen_cache.settings.load import Config
from qwen_train import weights
from qwen_train.model.placement import Ema
from qwen_train.training.checkpoint import Run, load_checkpoint, save_checkpoint
from qwen_train.training.optimizers import make_optimizer

CASES: dict[str, dict[str, Any]] = {
    "adamw": {},
    "adamw8bit": {"arguments": {"min_8bit_size": 16}},
    "adafactor": {},
    "prodigy": {"learning_rate": 1.0},
    "torch.optim.RAdam": {},
    "schedulefree.AdamWScheduleFree": {},
    "adamw8bit in bfloat16": {},
}


class Model(nn.Module):
    """Two layers of one shape, as blocks have them; each weight is written to a file of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.a, self.b = (nn.Linear(64, 64, dtype=dtype) for _ in range(2))

    def save_config(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}", encoding="utf-8")


def begun(case: str, seed: int) -> Run:
    name, _, in_bfloat16 = case.partition(" ")
    sections = {"optimizer": {"name": name, **CASES[case]}, "lr_scheduler": {"name": "cosine", "warmup_steps": 2}}
    train = {"method": "full", "stochastic_rounding": True} if in_bfloat16 else {}
    torch.manual_seed(seed)
    model = Model(torch.bfloat16 if in_bfloat16 else torch.float32)
    parameters = list(model.parameters())
    optimizer, schedule = make_optimizer(Config.model_validate({**sections, "train": train}), parameters)
    if hasattr(optimizer, "train"):
        optimizer.train()
    return Run(model, optimizer, schedule, {"seed": 0}, {"model": "a model"}, ema=Ema(parameters, 0.5))


def take_steps(run: Run, count: int) -> None:
    """With gradients that depend on the weights and on chance."""
    for _ in range(count):
        for parameter in run.transformer.parameters():
            parameter.grad = parameter.detach() + torch.randn_like(parameter)
        run.optimizer.step()
        assert run.ema
        run.ema.update()
        run.lr_scheduler.step()
        run.step, run.consumed_samples = run.step + 1, run.consumed_samples + 5


def state(run: Run) -> Iterator[tuple[str, Tensor]]:
    assert run.ema
    yield from run.transformer.state_dict().items()
    yield from ((f"average {i}", average) for i, average in enumerate(run.ema.average))


@pytest.mark.parametrize("case", CASES)
def test_a_run_continues_from_its_checkpoint_with_every_optimizer(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "." in case or case == "prodigy":
        pytest.importorskip({"prodigy": "prodigyopt"}.get(case, case.partition(".")[0]))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # torchao's update; it needs a C++ compiler
    monkeypatch.setattr(weights, "MAX_SHARD_SIZE", 100)
    with torch.random.fork_rng(devices=[]):
        whole = begun(case, seed=1)
        take_steps(whole, 3)
        path = save_checkpoint(tmp_path, whole, keep=0)
        assert len([*(path / "transformer").glob("*.safetensors")]) == 4
        take_steps(whole, 3)
        resumed = begun(case, seed=2)
        load_checkpoint(path, resumed)
        assert (resumed.step, resumed.consumed_samples) == (3, 15)
        take_steps(resumed, 3)
    expected = dict(state(whole))
    assert [name for name, tensor in state(resumed) if not torch.equal(tensor, expected[name])] == []
