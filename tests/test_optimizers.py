"""Optimizers by name: each is the library's own with the settings of qwen.yaml, or is refused in a sentence."""

from __future__ import annotations

import re
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import bitsandbytes
import pytest
import torch
from safetensors.torch import load_file

from qwen_cache.errors import ConfigError
from qwen_cache.extras import install_command
from qwen_cache.settings.load import Config
from qwen_train.model.combinations import CLASSES, ROUNDING, SHARDABLE, check_combination
from qwen_train.training.optimizers import make_optimizer, optimizer_class
from qwen_train.training.start import check_optimizer

from .support.parts import Layers, few_steps
from .support.paths import ROOT
from .support.runs import connected

PAGE = ROOT / "docs/howto/choose-what-is-trained.md"


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


def of_package(path: str) -> Any:
    """The class at an import path, imported when it is called; its test is skipped without the package."""
    module, name = path.split(".")
    return lambda *arguments, **settings: getattr(pytest.importorskip(module), name)(*arguments, **settings)


ADAM = {"betas": (0.8, 0.95), "weight_decay": 0.3, "eps": 1e-5}
CASES: dict[str, tuple[Any, dict[str, Any], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, ADAM, {"amsgrad": True}),
    "adamw8bit": (bitsandbytes.optim.AdamW8bit, ADAM, {"min_8bit_size": 16}),
    "adafactor": (torch.optim.Adafactor, {"weight_decay": 0.3}, {"beta2_decay": -0.5}),
    "prodigy": (of_package("prodigyopt.Prodigy"), ADAM, {"d_coef": 2.0}),
    "pytorch_optimizer.Lion": (of_package("pytorch_optimizer.Lion"), {}, {"weight_decay": 0.3}),
    "pytorch_optimizer.CAME": (of_package("pytorch_optimizer.CAME"), {}, {"betas": [0.8, 0.95, 0.99]}),
    "pytorch_optimizer.AdEMAMix": (of_package("pytorch_optimizer.AdEMAMix"), {}, {"alpha": 2.0}),
    "bitsandbytes.optim.Lion": (bitsandbytes.optim.Lion, {}, {"weight_decay": 0.3}),
    "bitsandbytes.optim.AdEMAMix": (bitsandbytes.optim.AdEMAMix, {}, {"alpha": 2.0}),
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


def test_muon_is_torchs_own_for_the_matrices_of_a_lora_and_refuses_vectors() -> None:
    ours, theirs = parameters()[:1], parameters()[:1]
    expected = after_steps(torch.optim.Muon(theirs, lr=0.02, weight_decay=0.3), theirs)
    settings = config("torch.optim.Muon", learning_rate=0.02, arguments={"weight_decay": 0.3})
    assert torch.equal(after_steps(make_optimizer(settings, ours)[0], ours)[0], expected[0])
    with pytest.raises(ConfigError) as refusal:
        make_optimizer(settings, parameters())
    assert "torch.optim.Muon does not take these settings: Muon only supports 2D parameters" in str(refusal.value)


def test_eight_bits_are_eight_bits() -> None:
    optimizer, _ = make_optimizer(config("adamw8bit", arguments={"min_8bit_size": 16}), weights := parameters())
    after_steps(optimizer, weights)
    assert optimizer.state[weights[0]]["state1"].dtype == torch.uint8


@pytest.mark.parametrize(
    ("name", "settings", "fused"),
    [
        ("adamw", {}, True),
        ("adamw", {"arguments": {"foreach": True}}, None),
        ("adamw", {"arguments": {"fused": False}}, False),
        ("torch.optim.Adam", {}, None),
    ],
)
def test_adamw_is_one_kernel_on_an_accelerator(name: str, settings: dict[str, Any], fused: bool | None) -> None:
    weights = [torch.nn.Parameter(torch.empty(2, 2, device="meta"))]
    with patch("qwen_train.model.combinations.is_accelerator_name", lambda name: name == "meta"):
        optimizer, _ = make_optimizer(config(name, **settings), weights)
    assert optimizer.param_groups[0]["fused"] is fused


@pytest.mark.parametrize(
    ("name", "extra"),
    [("prodigy", "prodigy"), ("adamw8bit", "quantization"), ("schedulefree.AdamWScheduleFree", "optimizers")],
)
def test_a_library_that_is_missing_is_said_with_what_brings_it(
    monkeypatch: pytest.MonkeyPatch, name: str, extra: str
) -> None:
    for module in ("prodigyopt", "bitsandbytes", "bitsandbytes.optim", "schedulefree"):
        monkeypatch.setitem(sys.modules, module, None)
    for refuse in (optimizer_class, check_optimizer):
        with pytest.raises(ConfigError) as refusal:
            refuse(config(name))
        assert f"the optimizer {name} cannot be imported" in str(refusal.value)
        assert str(refusal.value).endswith(f"→ {install_command(extra)}")


SECTION = PAGE.read_text(encoding="utf-8").partition("## The optimizer\n")[2].partition("\n## ")[0]
ROWS = re.findall(r"^\| `(?!optimizer\.name`).*", SECTION, re.MULTILINE)
OFFERED = [*CLASSES, *re.findall(r"`(\w+(?:\.\w+)+)`", " ".join(row.split("|")[1] for row in ROWS))]
"""The optimizers with a short name, and those of the page."""


@pytest.fixture(scope="module")
def in_parts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of `support/parts.py`, by two processes over gloo."""
    folder = tmp_path_factory.mktemp("parts")
    names = [name for name in SHARDABLE if name != ROUNDING["adamw"] and find_spec(name.partition(".")[0])]
    done = connected(["-m", "tests.support.parts", folder, *names], 2)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SHARDABLE if name != ROUNDING["adamw"]])
def test_one_that_is_offered_for_weights_in_parts_trains_them_as_whole_ones(name: str, in_parts: Path) -> None:
    """Its state, too, from which another number of processes continues."""
    pytest.importorskip(name.partition(".")[0])
    found, expected = load_file(in_parts / f"{name}.safetensors"), few_steps(name)
    start = Layers().state_dict()
    assert all(not torch.equal(found[f"weight.{key}"], value) for key, value in start.items())
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", OFFERED)
def test_every_other_one_is_refused_for_weights_in_parts_by_name(name: str) -> None:
    settings = Config.model_validate({"optimizer": {"name": name}, "train": {"fsdp": True}})
    if CLASSES.get(name, name) in SHARDABLE:
        check_combination(settings, {"num_layers": 1}, 2)
        return
    check_combination(settings, {"num_layers": 1}, 1)
    with pytest.raises(ConfigError) as refusal:
        check_combination(settings, {"num_layers": 1}, 2)
    assert f"{name} cannot be used with train.fsdp: it is not known to train weights in parts" in str(refusal.value)
    assert "(expected adamw, torch.optim.Adam, " in str(refusal.value)
    assert "set optimizer.name to one of these, or train.fsdp=false" in str(refusal.value)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("adam", {}, "no such optimizer (expected adamw, adamw8bit, adafactor, prodigy or an import path, found adam)"),
        ("torch.optim.Adamm", {}, "expected a subclass of torch.optim.Optimizer, found no Adamm in torch.optim"),
        ("collections.OrderedDict", {}, "(expected a subclass of torch.optim.Optimizer, found type)"),
        ("no_such_library.Lion", {}, "the optimizer no_such_library.Lion cannot be imported: No module named"),
        ("adamw", {"arguments": {"momentum": 1}}, "unexpected keyword argument 'momentum'"),
        ("torch.optim.SGD", {"arguments": {"momentum": -1}}, "Invalid momentum value: -1"),
        ("adamw", {"arguments": {"foreach": True, "fused": True}}, "`fused` and `foreach` cannot be `True` together"),
        ("adafactor", {"betas": [0.5, 0.9]}, "optimizer.betas is not a setting of adafactor (found (0.5, 0.9))"),
        ("torch.optim.SGD", {"weight_decay": 0.5}, "optimizer.weight_decay is not a setting of torch.optim.SGD"),
    ],
)
def test_what_cannot_be_meant_is_refused(name: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        make_optimizer(config(name, **settings), parameters())
    assert message in str(refusal.value)
