"""Weights in parts (FSDP2): trained like whole ones, and gathered whole, in one order that every process keeps.

The judge is one model that takes the mean gradient of both batches. tests/test_distributed.py runs real processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from qwen_cache.errors import ConfigError
from qwen_cache.models.folder import open_model
from qwen_cache.models.hardware import Kind
from qwen_cache.models.quantization import quantize
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import TrainConfig
from qwen_train.model.placement import check_plain, held_bytes, wrap
from qwen_train.training import checkpoint
from qwen_train.weights import TORCH, gather_weights, load_transformer

from .support.ranks import in_two_threads


class Model(nn.Module):
    """Blocks, and a layer outside of them; widths that two processes cannot share evenly."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.transformer_blocks = nn.ModuleList(nn.Linear(7, 7, dtype=dtype) for _ in range(2))
        self.out = nn.Linear(7, 3, dtype=dtype)
        generator = torch.Generator().manual_seed(0)
        for parameter in self.parameters():
            parameter.data.normal_(std=0.3, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = x + block(x)
        output: Tensor = self.out(x)
        return output.float()


def batch(rank: int, width: int = 7) -> Tensor:
    return torch.randn(5, width, generator=torch.Generator().manual_seed(rank))


def trained(rank: int, mixed_precision: str) -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
    """Rank 0's state: the weights after two steps, the optimizer's tensors; and the last gradients, whole."""
    accelerator: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"), mixed_precision=mixed_precision)
    accelerator.prepare_model = lambda model, **_: model
    dtype = torch.bfloat16 if mixed_precision == "bf16" else torch.float32  # as autocast would have it
    model = wrap(accelerator, Model(torch.bfloat16), TrainConfig(fsdp=True, method="full"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        model(batch(rank).to(dtype)).square().mean().backward()
        optimizer.step()
    tensors: dict[str, Tensor] | None = None if rank else {}
    checkpoint._flatten(optimizer.state_dict(), "optimizer", tensors)
    gradients = [parameter.grad.full_tensor() for parameter in model.parameters()]
    return gather_weights(model, keep=not rank), tensors or {}, gradients


def test_weights_in_parts_are_trained_and_gathered_as_whole_ones() -> None:
    whole = Model(torch.bfloat16).float()
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1, eps=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        torch.stack([whole(batch(rank)).square().mean() for rank in range(2)]).mean().backward()
        optimizer.step()
    expected: dict[str, Tensor] = {}
    checkpoint._flatten(deepcopy(optimizer.state_dict()), "optimizer", expected)
    (weights, tensors, _), (others_weights, others_tensors, _) = in_two_threads(lambda rank: trained(rank, "no"))
    assert [*weights] == [*whole.state_dict()]
    torch.testing.assert_close(weights, dict(whole.state_dict()))
    torch.testing.assert_close(tensors, expected)
    assert not others_weights
    assert not others_tensors


def test_gradients_of_products_in_bfloat16_are_summed_in_float32() -> None:
    (weights, _, gradients), (_, _, others) = in_two_threads(lambda rank: trained(rank, "bf16"))
    assert {tensor.dtype for tensor in (*weights.values(), *gradients)} == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    assert any(not torch.equal(gradient, gradient.bfloat16().float()) for gradient in gradients)


class Quantised(nn.Module):
    """Blocks of a frozen layer, and a trained one in float32; all widths are those of whole blocks of nf4."""

    def __init__(self, kind: Kind, *, later: bool) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.transformer_blocks = nn.ModuleList(
            nn.Sequential(OrderedDict(frozen=nn.Linear(64, 128), trained=nn.Linear(128, 64))) for _ in range(2)
        )
        for name, parameter in self.named_parameters():
            parameter.data.normal_(std=0.1, generator=generator)
            parameter.requires_grad_("trained" in name)
        frozen = nn.ModuleList(block[:1] for block in self.transformer_blocks)
        quantize(frozen.to(torch.bfloat16), kind, torch.device("cpu"), later=later)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.transformer_blocks:
            x = x + block(x)
        return x.float()


def of_each(rank: int, kind: Kind) -> tuple[tuple[int, int], dict[str, Tensor], Tensor, list[Tensor]]:
    """The bytes that a process holds, the weights that it gathers, its output, and the gradients, whole."""
    accelerator: Any = SimpleNamespace(num_processes=2, device=torch.device("cpu"), mixed_precision="bf16")
    accelerator.prepare_model = lambda model, **_: model
    model = wrap(accelerator, Quantised(kind, later=True), TrainConfig(fsdp=True))
    output = model(batch(rank, 64).bfloat16())
    output.square().mean().backward()
    gradients = [each.grad.full_tensor() for each in model.parameters() if each.grad is not None]
    return held_bytes(model), gather_weights(model, keep=True), output, gradients


@pytest.mark.skipif(TorchVersion(torch.__version__) < TORCH, reason="an older torch")
@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4", "int8_convrot", "fp8_w8a8"])
def test_quantised_weights_are_divided_and_compute_the_same(kind: Kind) -> None:
    """Each process has half of the bytes, and gathers and computes the same as with whole weights, bit for bit."""
    if kind == "nf4":
        pytest.importorskip("bitsandbytes")
    whole = Quantised(kind, later=False)
    as_computed = deepcopy(whole)  # FSDP2 gathers the trained weights in bfloat16
    for parameter in as_computed.parameters():
        parameter.data = parameter.data.bfloat16() if parameter.is_floating_point() else parameter.data
    for rank, (held, weights, output, gradients) in enumerate(in_two_threads(lambda rank: of_each(rank, kind))):
        assert held[0] <= 0.55 * held[1]
        assert held[1] == sum(parameter.nbytes for parameter in whole.parameters())
        for name, parameter in whole.named_parameters():
            assert weights[name].dtype == parameter.dtype
            assert torch.equal(weights[name], parameter.data), name
        with torch.no_grad():
            assert torch.equal(output, as_computed(batch(rank, 64).bfloat16()))
        assert len(gradients) == 4
        assert all(gradient.abs().sum() > 0 for gradient in gradients)


def test_weights_of_another_library_are_refused_by_name() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    model = nn.Sequential(nn.Linear(64, 64)).requires_grad_(False)
    torchao.quantize_(model, torchao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(ConfigError, match="cannot shard these quantised weights") as caught:
        check_plain(model)
    assert "0.weight" in str(caught.value)
    assert "torchao" in str(caught.value)


def test_an_older_torch_is_refused_for_quantised_weights(
    monkeypatch: pytest.MonkeyPatch, tiny_model: Callable[[str], Path]
) -> None:
    model = open_model(str(tiny_model("edit-plus")), ("transformer",))
    monkeypatch.setattr("qwen_train.weights.TORCH", "99.0")
    with pytest.raises(ConfigError) as caught:
        load_transformer(model, load_config(None, ["train.fsdp=true", "model.quantization=int8"]), in_parts=True)
    assert "train.fsdp shards quantised weights with a newer torch" in str(caught.value)
    assert f"(expected 99.0 or newer, found {torch.__version__})" in str(caught.value)
    assert load_transformer(model, load_config(None, ["train.fsdp=true"]), in_parts=True)
