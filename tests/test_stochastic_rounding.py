"""Full training in bfloat16: stochastic rounding is unbiased, where rounding to nearest loses the update, and the same
in every process.

torchao compiles its update, which takes a C++ compiler or a GPU; here the same function runs without the compiler.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_train.memory.prediction import predict_memory
from qwen_train.training.optimizers import make_optimizer
from qwen_train.training.rounding import draws, keys_of, rounded
from qwen_train.training.start import check_optimizer

from .support.commands import refused
from .support.full_size import EDIT, bench
from .support.marks import slow
from .support.ranks import second_of_two
from .support.runs import SMALL, Trainer, differences, written

ROUNDED = {
    **SMALL,
    "train.mixed_precision": "bf16",
    "train.method": "full",
    "train.stochastic_rounding": True,
    "train.max_steps": 2,
    "optimizer.learning_rate": 1e-4,
}
FULL = {"method": "full", "stochastic_rounding": True}


@pytest.fixture(autouse=True)
def without_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def config(name: str = "adamw", *, train: dict[str, Any] | None = None, **optimizer: Any) -> Config:
    return Config.model_validate({"train": FULL | (train or {}), "optimizer": {"name": name, **optimizer}})


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_small_updates_count_on_average(name: str) -> None:
    """AdamW's first step is the learning rate: a 64th of the distance of two bfloat16 numbers at 1.

    Each weight moves by that distance with a probability of a 64th, so the mean of n has that of a binomial.
    """
    spacing, count = 2.0**-7, 1 << 16
    weight = torch.nn.Parameter(torch.ones(256, count // 256, dtype=torch.bfloat16))
    settings = config(name, learning_rate=spacing / 64, weight_decay=0.0)
    optimizer, _ = make_optimizer(settings, [weight])
    torch.manual_seed(0)
    weight.grad = torch.full_like(weight, -1.0)
    optimizer.step()
    moved = (weight.detach().double() - 1) / spacing
    assert set(moved.unique().tolist()) == {0.0, 1.0}
    assert abs(float(moved.mean()) - 1 / 64) < 5 * math.sqrt(1 / 64 / count)
    plain = torch.nn.Parameter(torch.ones(8, 8, dtype=torch.bfloat16))
    plain.grad = torch.full_like(plain, -1.0)
    torch.optim.AdamW([plain], lr=spacing / 64, weight_decay=0.0).step()
    assert torch.equal(plain, torch.ones_like(plain)), "rounding to nearest would do as well"


def rounded_steps(mesh: DeviceMesh | None = None) -> list[Tensor]:
    """Two matrices of ones and a vector after two steps, or the rows of this process: of each a 32nd of the elements
    moves."""
    settings = config(learning_rate=2.0**-7 / 64, weight_decay=0.0)
    whole = [torch.ones(shape, dtype=torch.bfloat16) for shape in ((301, 64), (301, 64), (999,))]
    parts = [distribute_tensor(each, mesh, [Shard(0)], src_data_rank=None) for each in whole] if mesh else whole
    weights = [torch.nn.Parameter(each) for each in parts]
    optimizer, _ = make_optimizer(settings, weights)
    for _ in range(2):
        for weight in weights:
            weight.grad = torch.full_like(weight, -1.0)
        optimizer.step()
    return [weight.detach().to_local() if isinstance(weight, DTensor) else weight.detach() for weight in weights]


def test_every_process_rounds_an_element_in_the_same_way_whole_or_in_parts() -> None:
    torch.manual_seed(0)
    whole = rounded_steps()
    torch.manual_seed(1)  # no draw depends on the random state of a process
    assert all(torch.equal(a, b) for a, b in zip(whole, rounded_steps(), strict=True))
    with second_of_two() as mesh:
        parts = rounded_steps(mesh)
    for ours, its in zip(parts, whole, strict=True):
        rows = its[(len(its) + 1) // 2 :]
        assert ours.shape == rows.shape
        assert float((ours != rows).float().mean()) < 1e-3, "kernels may differ in the last bit of an update"
    moved = [weight > 1 for weight in whole]
    both = float((moved[0] & moved[1]).float().mean())
    assert both < 4 / 32**2, "tensors of one shape have the same draws"


def test_draws_are_even_and_those_of_two_steps_independent() -> None:
    weight, count = torch.zeros(512, 256), 1 << 17
    one, two = (draws(weight, torch.tensor([0, *keys_of(0, step, 0)])).double() / 2**16 for step in (1, 2))
    for each in (one, two):
        assert abs(float(each.mean()) - 0.5) < 5 * math.sqrt(1 / 12 / count)
        assert abs(float(each.square().mean()) - 1 / 3) < 5 * math.sqrt(4 / 45 / count)
    pairs = {"steps": (one, two), "neighbours": (one[:, 1:], one[:, :-1]), "rows": (one[1:], one[:-1])}
    for name, (a, b) in pairs.items():
        correlation = float(torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1])
        assert abs(correlation) < 5 / math.sqrt(a.numel()), name


def test_rounding_keeps_what_bfloat16_has_and_what_is_no_number() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -3.5, math.inf, -math.inf, math.nan])
    for draw in (0, 0xFFFF):
        found = rounded(exact, torch.full(exact.shape, draw, dtype=torch.int32))
        torch.testing.assert_close(found, exact.bfloat16(), rtol=0, atol=0, equal_nan=True)
    between = torch.tensor([1 + 2.0**-9, -1 - 2.0**-9])  # a quarter of the way to the next number
    assert [
        int((rounded(between, torch.full((2,), at, dtype=torch.int32)).abs() > 1).sum()) for at in (49151, 49152)
    ] == [0, 2]


@pytest.mark.parametrize("name", ["adamw", slow("adamw8bit")])
def test_a_run_is_in_bfloat16_and_a_resumed_one_equals_it(train: Trainer, name: str) -> None:
    settings = ROUNDED | {"optimizer.name": name, "lr_scheduler.name": "constant_with_warmup"}
    expected = train(settings=settings, out="expected")
    train(settings=settings, train__max_steps=1)
    out = train("--resume", settings=settings)
    different = differences(written(out), written(expected))
    assert [each for each in different if not each.startswith("checkpoint-1/")] == []
    (file,) = (out / "checkpoint-2" / "transformer").glob("*.safetensors")
    (start,) = (train.model / "transformer").glob("*.safetensors")
    weights, before = load_file(file), load_file(start)
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert any(not torch.equal(weights[each], before[each].bfloat16()) for each in weights)
    result = train.try_("--resume", settings=settings, train__stochastic_rounding=False, train__max_steps=3)
    refused(result, "another train.stochastic_rounding", "expected True, found none, or without effect")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (config(train={"method": "lora"}), "train.method=lora: a LoRA is small: its weights stay in float32"),
        (config(train={"mixed_precision": "no"}), "train.mixed_precision=no: the weights are in bfloat16"),
        (config("adafactor"), "optimizer.name=adafactor: only adamw and adamw8bit round so, by torchao"),
        (config(train={"ema_decay": 0.9}), "train.ema_decay=0.9: an average in bfloat16 would round its updates"),
    ],
)
def test_what_it_cannot_be_combined_with(settings: Config, message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        check_optimizer(settings)
    assert f"train.stochastic_rounding cannot be combined with {message}" in str(refusal.value)
    assert "set train.stochastic_rounding=false, or change that" in str(refusal.value)


@pytest.mark.parametrize(("name", "state"), [("adamw8bit", 2 + 8 / 256), slow("adamw", 4)])
def test_half_the_memory_is_planned(name: str, state: float) -> None:
    transformer, batch = bench.transformer_config(layers=1, heads=4, head_dim=32, width=256), EDIT
    memory = predict_memory(transformer, config(name), batch, "cpu")
    plain = predict_memory(transformer, config(name, train={"stochastic_rounding": False}), batch, "cpu")
    assert 2 * memory.trained == plain.trained
    assert 2 * memory.gradients == plain.gradients
    assert memory.optimizer == pytest.approx(state / 2 * memory.trained, rel=0.02)
