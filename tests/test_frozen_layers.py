"""Quantised linear layers and LayerNorms in training: results as in the layers they replace, and less memory kept."""

from __future__ import annotations

import copy
import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_cache.models.quantization import QuantizedLinear
from qwen_train.model.placement import InputDtypeLayerNorm, replace_layers

from .support.judge import AS_FAR

CONFIGS = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
WIDTH, OUT, TOKENS = 96, 64, 40


@pytest.fixture(params=CONFIGS)
def torchao_linear(request: pytest.FixtureRequest) -> nn.Linear:
    """A frozen linear layer, quantised by torchao."""
    torchao = importlib.import_module("torchao.quantization")
    torch.manual_seed(0)
    layer = nn.Linear(WIDTH, OUT).bfloat16()
    torchao.quantize_(layer, getattr(torchao, CONFIGS[request.param])())
    return layer.requires_grad_(False)


def replaced(layer: nn.Linear) -> nn.Module:
    layers = nn.Sequential(copy.deepcopy(layer))
    replace_layers(layers)
    assert type(layers[0]) is QuantizedLinear
    return layers


def outputs_and_gradients(layer: Any, x: Tensor, upstream: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(upstream.to(output.dtype))
    return torch.cat([output.detach().flatten().double(), x.grad.flatten().double()])  # type: ignore[union-attr]


def distance(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_product_and_gradient_are_those_of_the_unpacked_weight(torchao_linear: nn.Linear, dtype: torch.dtype) -> None:
    """Against float64. torchao's own layer judges bfloat16; float32 rounds four times and sums 96 products."""
    weight, bias = torchao_linear.weight.dequantize(torch.float32).double(), torchao_linear.bias.double()  # type: ignore[operator]
    layer = replaced(torchao_linear)
    if dtype == torch.float32:
        layer[0].bias = nn.Parameter(layer[0].bias.float(), requires_grad=False)  # type: ignore[index]
    x, upstream = torch.randn(2, TOKENS, WIDTH).to(dtype), torch.randn(2, TOKENS, OUT).to(dtype)
    exact = outputs_and_gradients(lambda x: F.linear(x, weight, bias), x.double(), upstream)
    found = distance(outputs_and_gradients(layer, x, upstream), exact)
    if dtype == torch.float32:
        assert found < 2**-24 * (4 + 96**0.5)
    else:
        assert found <= AS_FAR * distance(outputs_and_gradients(torchao_linear, x, upstream), exact)


def test_autograd_keeps_no_unpacked_weight(torchao_linear: nn.Linear) -> None:
    """torchao's layer keeps one as large as an unquantised weight; this one the quantised parameter alone."""

    def kept(layer: Any) -> int:
        """The bytes that autograd keeps besides the layer's parameters and its input."""
        sizes: dict[int, int] = {}
        x = torch.randn(TOKENS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        ours = isinstance(layer, nn.Sequential)
        weight: Any = layer[0].weight if ours else layer.weight
        parts = (weight, layer[0].scale) if ours else (weight.qdata, weight.scale)
        known = {part.untyped_storage()._cdata for part in (x, *parts)}

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            sizes.update({} if storage._cdata in known else {storage._cdata: storage.nbytes()})
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            layer(x)
        return sum(sizes.values())

    assert kept(replaced(torchao_linear)) <= OUT * 8, "at most the scales"
    assert kept(torchao_linear) >= WIDTH * OUT * 2, "otherwise torchao needs no replacement any more"


def test_under_autocast_the_result_has_its_dtype(torchao_linear: nn.Linear) -> None:
    x = torch.randn(TOKENS, WIDTH)
    layer = replaced(torchao_linear)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).dtype == torch.bfloat16


def test_other_layers_stay_as_they_are() -> None:
    """A trained weight, quantised activations, groups within a row, and norms with weights."""
    torchao = importlib.import_module("torchao.quantization")
    dynamic = nn.Linear(WIDTH, OUT).bfloat16()
    torchao.quantize_(dynamic, torchao.Int8DynamicActivationInt8WeightConfig())
    groups = nn.Linear(WIDTH, OUT).bfloat16()
    torchao.quantize_(groups, torchao.Int8WeightOnlyConfig(granularity=torchao.PerGroup(32)))
    layers = nn.Sequential(
        nn.Linear(WIDTH, OUT), dynamic, groups, nn.LayerNorm(OUT), nn.LayerNorm(OUT, elementwise_affine=False)
    )
    replace_layers(layers)
    assert [type(layer) for layer in layers] == [nn.Linear] * 3 + [nn.LayerNorm, InputDtypeLayerNorm]
