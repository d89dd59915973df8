"""Optimizers by name: each is the library's own with the settings of qwen.yaml, or is refused in a sentence."""

from __future__ import annotations

import sys
from typing import Any

import bitsandbytes
import pytest
import torch

from qwen_cache.errors import ConfigError
from qwen_cache.extras import install_command
from qwen_cache.settings.load import Config
from qwen_train.optimizers import make_optimizer, optimizer_class


def config(name: str, **settings: Any) -> Config:
    return Config.model_validate({"optimizer": {"name": name, **settings}})


def parameters() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(*shape, generator=generator)) for shape in ((64, 128), (7,))]


def after_steps(optimizer: torch.optim.Optimizer, weights: list[torch.nn.Parameter]) -> list[torch.Tensor]:
    for _ in range(5):
        optimizer.zero_grad()
        sum((weight - 3).square().sum() for weight in weights).backward()  # type: ignore[union-attr]
        optimizer.step()
    return [weight.detach() for weight in weights]


def prodigy(*arguments: Any, **settings: Any) -> torch.optim.Optimizer:
    return pytest.importorskip("prodigyopt").Prodigy(*arguments, **settings)  # type: ignore[no-any-return]


ADAM = {"betas": (0.8, 0.95), "weight_decay": 0.3, "eps": 1e-5}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, ADAM, {"amsgrad": True}),
    "adamw8bit": (bitsandbytes.optim.AdamW8bit, ADAM, {"min_8bit_size": 16}),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.3}, {"beta2_decay": -0.5}),
    "prodigy": (prodigy, ADAM, {"d_coef": 2.0}),
    "torch.optim.SGD": (torch.optim.SGD, {}, {"momentum": 0.5, "weight_decay": 0.1}),
}


@pytest.mark.parametrize("name", CASES)
def test_is_the_librarys_own_with_the_settings_given(name: str) -> None:
    reference, settings, arguments = CASES[name]
    theirs, ours, untouched = parameters(), parameters(), parameters()
    expected = after_steps(reference(theirs, lr=0.02, **settings, **arguments), theirs)
    optimizer, _ = make_optimizer(config(name, learning_rate=0.02, arguments=arguments, **settings), ours)
    found = after_steps(optimizer, ours)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert not torch.equal(found[0], untouched[0])
    plain, _ = make_optimizer(config(name, learning_rate=0.02), others := parameters())
    assert not torch.equal(after_steps(plain, others)[0], expected[0]), "settings and arguments make no difference"


def test_eight_bits_are_eight_bits() -> None:
    optimizer, _ = make_optimizer(config("adamw8bit", arguments={"min_8bit_size": 16}), weights := parameters())
    after_steps(optimizer, weights)
    assert optimizer.state[weights[0]]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(("name", "extra"), [("prodigy", "prodigy"), ("adamw8bit", "quantization")])
def test_a_library_that_is_missing_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    for module in ("prodigyopt", "bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ConfigError) as refusal:
        optimizer_class(name)
    assert f"the optimizer {name} cannot be imported" in str(refusal.value)
    assert str(refusal.value).endswith(f"→ {install_command(extra)}")


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("adam", {}, "no such optimizer (expected adamw, adamw8bit, adafactor, prodigy or an import path, found adam)"),
        ("torch.optim.Adamm", {}, "expected a subclass of torch.optim.Optimizer, found no Adamm in torch.optim"),
        ("collections.OrderedDict", {}, "(expected a subclass of torch.optim.Optimizer, found type)"),
        ("no_such_library.Lion", {}, "the optimizer no_such_library.Lion cannot be imported: No module named"),
        ("adamw", {"arguments": {"momentum": 1}}, "unexpected keyword argument 'momentum'"),
        ("torch.optim.SGD", {"arguments": {"momentum": -1}}, "Invalid momentum value: -1"),
        ("adafactor", {"betas": [0.5, 0.9]}, "optimizer.betas is not a setting of adafactor (found (0.5, 0.9))"),
        ("torch.optim.SGD", {"weight_decay": 0.5}, "optimizer.weight_decay is not a setting of torch.optim.SGD"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_optimizer(config(name, **settings), parameters())
    assert message in str(refusal.value)
