"""Quantised linear layers: their numbers, their products in 8 bits, forward and backward, and how they are stored."""

from __future__ import annotations

import copy
import importlib
import itertools
import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from qwen_cache.models import quantization
from qwen_cache.models.hardware import Kind
from qwen_cache.models.quantization import (
    PRODUCTS,
    QuantizedLinear,
    _product,
    group_size,
    hadamard,
    quantize,
    quantized_rows,
    rotated,
)

from .support.judge import AS_FAR

CPU = torch.device("cpu")
KINDS: tuple[Kind, ...] = ("int8", "fp8", "nf4", "int8_convrot", "fp8_w8a8")
TORCHAO = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
WIDTH, OUT, TOKENS = 256, 160, 40


@pytest.fixture(params=["device", "cpu"])
def products_of(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products by the operators that a GPU has, which torch also has on the CPU; or by those that a CPU takes."""
    monkeypatch.setattr(quantization, "has_products", lambda _: request.param == "device")


def layers(kind: Kind, dtype: torch.dtype = torch.float32, **options: bool) -> tuple[nn.Sequential, nn.Sequential]:
    """A quantised layer, and the unquantised one in float64."""
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(WIDTH, OUT)).to(dtype).requires_grad_(False)
    exact = copy.deepcopy(found).double()
    quantize(found, kind, CPU, **options)
    return found, exact


def results(layer: nn.Module, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    """The output, and the gradient of the input."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(upstream.to(output.dtype))
    assert x.grad is not None
    return output.detach().double(), x.grad.double()


def error(found: Tensor, exact: Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


# ---- numbers ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", TORCHAO)
def test_weights_of_8_bits_are_torchaos(kind: str, dtype: torch.dtype) -> None:
    torchao = importlib.import_module("torchao.quantization")
    weight = (torch.randn(OUT, WIDTH) * torch.rand(OUT, 1)).to(dtype)
    layer = nn.Linear(WIDTH, OUT, bias=False)
    layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    torchao.quantize_(layer, getattr(torchao, TORCHAO[kind])())
    values, scale = quantized_rows(weight, kind)
    theirs = layer.weight
    assert torch.equal(values.view(torch.uint8), theirs.qdata.view(torch.uint8))  # type: ignore[operator]
    assert torch.equal(scale, theirs.scale.flatten())  # type: ignore[operator]


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_of_zeros_stays_zero(kind: Kind) -> None:
    found = nn.Sequential(nn.Linear(WIDTH, OUT)).requires_grad_(False)
    found[0].weight[3] = 0
    quantize(found, kind, CPU)
    assert found(torch.randn(TOKENS, WIDTH))[:, 3].sub(found[0].bias[3]).abs().max() == 0


@pytest.mark.parametrize("size", [4, 16, 64, 256])
def test_convrots_matrix_is_its_own_inverse(size: int) -> None:
    matrix = hadamard(size, CPU, torch.float64)
    assert torch.equal(matrix, matrix.T)
    assert torch.equal(matrix @ matrix, torch.eye(size, dtype=torch.float64))
    assert torch.equal(matrix.abs(), torch.full((size, size), size**-0.5, dtype=torch.float64))
    with torch.inference_mode():
        hadamard.cache_clear()
        assert not hadamard(size, CPU, torch.float64).is_inference(), "kept for training, too"
    assert matrix.sum(1).unique().tolist() == [1.0], "every row has the same sum: constant inputs stay constant"


def test_a_group_divides_the_columns() -> None:
    assert [group_size(columns) for columns in (3072, 12288, 192, 48, 12, 90)] == [256, 256, 64, 16, 4, 0]


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_plain_numbers_that_no_mixed_precision_casts(kind: Kind) -> None:
    found, _ = layers(kind)
    before = {name: parameter.clone() for name, parameter in found.named_parameters() if "bias" not in name}
    found.to(torch.bfloat16)
    for name, parameter in found.named_parameters():
        if name in before:
            assert type(parameter.data) is Tensor
            assert not parameter.is_floating_point()
            assert torch.equal(parameter, before[name])
    weight = found[0].weight
    assert (len(weight), weight.element_size()) == (OUT, 1), "by rows, in bytes"


@pytest.mark.parametrize("kind", KINDS)
def test_the_unpacked_weight_is_not_rotated(kind: Kind) -> None:
    found, exact = layers(kind)
    assert error(found[0].dequantize(), exact[0].weight) < {"nf4": 0.1, "fp8": 0.04, "fp8_w8a8": 0.04}.get(kind, 0.012)


@pytest.mark.parametrize("kind", KINDS)
def test_a_dora_sees_the_unpacked_weight(kind: Kind) -> None:
    """In generation; training refuses it."""
    results = []
    for quantised in (True, False):
        torch.manual_seed(0)
        model = nn.ModuleDict({"to_q": nn.Linear(WIDTH, OUT)}).requires_grad_(False)
        if quantised:
            quantize(model, kind, CPU)
        layer: Any = get_peft_model(model, LoraConfig(target_modules=["to_q"], use_dora=True)).base_model.model["to_q"]
        with torch.no_grad():
            torch.manual_seed(1)
            for factor in (layer.lora_A.default.weight, layer.lora_B.default.weight):
                factor.copy_(torch.randn(factor.shape) / 8)
            layer.lora_magnitude_vector.default.weight.copy_(torch.rand(OUT) + 0.5)
            results.append(layer(torch.randn(TOKENS, WIDTH)))
    assert error(*results) < (0.15 if kind == "nf4" else 0.05)


# ---- products --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_results_err_as_8_and_4_bits_do(kind: Kind, dtype: torch.dtype) -> None:
    """Against float64. A number of b bits errs by half a step at most, and by a third of that on average; two factors
    err independently."""
    found, exact = layers(kind, dtype)
    x, upstream = torch.randn(2, TOKENS, WIDTH).to(dtype), torch.randn(2, TOKENS, OUT).to(dtype)
    bound = {"int8": 0.008, "fp8": 0.03, "nf4": 0.1, "int8_convrot": 0.016, "fp8_w8a8": 0.042}[kind]
    expected = results(exact, x.double(), upstream)
    for ours, theirs in zip(results(found, x, upstream), expected, strict=True):
        assert bound / 10 < error(ours, theirs) < bound
    trained = results(found, x, upstream)[0]
    with torch.inference_mode():
        assert error(found(x), trained) < 2**-7


@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("rows", [1, 7, 32, 40])
def test_int8_products_are_exact(rows: int) -> None:
    """Sums of up to 1,040 products of int8 are exact in float32, too.

    Weights within ±64: a CPU without VNNI sums two products of a number of 8 bits without a sign in 16 bits.
    """
    weight = torch.randint(-64, 65, (OUT, WIDTH), dtype=torch.int8)
    numbers = torch.randint(-127, 128, (rows, WIDTH))
    numbers[:, 0] = 127  # so that the scale of each row is the one of its numbers
    of_row = 2.0 ** torch.randint(-6, 6, (rows, 1))
    found = _product(numbers * of_row, weight.t(), None)
    assert torch.equal(found.double(), numbers.double() @ weight.double().t() * of_row.double())


@pytest.mark.parametrize("rows", [1, 32, 40])
def test_the_operator_gets_rows_that_cublas_takes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 16, and a multiple of 32; the CPU's own takes any."""
    taken, multiply = [], torch._int_mm
    monkeypatch.setattr(quantization, "has_products", lambda _: True)
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: taken.append(len(a)) or multiply(a, b))
    results(layers("int8_convrot")[0], torch.randn(rows, WIDTH), torch.randn(rows, OUT))
    assert taken == [-(-rows // 32) * 32] * 2, "forward and backward"


@pytest.mark.usefixtures("products_of")
@pytest.mark.parametrize("rows", [7, 64])
def test_fp8_products_sum_in_float32(rows: int) -> None:
    weight = torch.randn(OUT, WIDTH).to(torch.float8_e4m3fn)
    x, scale = torch.randn(rows, WIDTH), torch.rand(OUT) + 0.5
    of_row = x.abs().amax(1, keepdim=True) / 448
    numbers = (x / of_row).to(torch.float8_e4m3fn)
    exact = (numbers.double() * of_row) @ (weight.double() * scale[:, None]).t()
    assert error(_product(x, weight.t(), scale), exact) < 2**-8


@pytest.mark.parametrize("kind", PRODUCTS)
def test_the_backward_pass_in_bfloat16_rounds_no_gradient(kind: Kind) -> None:
    x, upstream = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, OUT)
    (_, in_8_bits), (_, not_in_8_bits) = (
        results(layers(kind, backward_in_8_bits=each)[0], x, upstream) for each in (True, False)
    )
    unpacked = layers(kind)[0][0].dequantize().double()
    assert error(not_in_8_bits, upstream.double() @ unpacked) < 1e-6 < error(in_8_bits, upstream.double() @ unpacked)


def test_rotation_spreads_outliers() -> None:
    """Eight channels 60 times as large as the others cost int8 its steps; rotated, they cost nothing."""
    x = torch.randn(TOKENS, WIDTH)
    x[:, ::32] *= 60
    found, exact = layers("int8_convrot")
    values, scale = quantized_rows(exact[0].weight.float(), "int8_convrot", 0)  # the same, without rotation
    plain = copy.deepcopy(exact).float()
    QuantizedLinear.make(plain[0], values, scale, products=True)
    expected = exact(x.double())
    assert 1.5 * error(found(x), expected) < error(plain(x), expected)


@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_value_that_is_not_finite_is_not_lost(kind: Kind) -> None:
    x = torch.randn(3, WIDTH)
    x[1, 5], x[2, 5] = float("nan"), float("inf")
    found = layers(kind)[0](x)
    assert found.isfinite().all(1).tolist() == [True, False, False]


def test_layers_of_few_rows_are_unpacked() -> None:
    """A modulation has one row for each sample; 8-bit products begin at 17."""
    model = nn.ModuleDict({"img_mod": nn.Sequential(nn.SiLU(), nn.Linear(WIDTH, OUT)), "to_q": nn.Linear(WIDTH, OUT)})
    model.requires_grad_(False)
    quantize(model, "int8_convrot", CPU, few_rows=("img_mod",))
    assert (model["img_mod"][1].products, model["to_q"].products) == (False, True)  # type: ignore[index]
    x = torch.randn(2, WIDTH)
    weight, bias = model["img_mod"][1].dequantize(), model["img_mod"][1].bias  # type: ignore[index]
    assert error(model["img_mod"](x), nn.functional.silu(x).double() @ weight.double().t() + bias) < 1e-6


# ---- compiled --------------------------------------------------------------------------------------------------------


@pytest.fixture
def one_graph() -> Iterator[None]:
    torch._dynamo.reset()
    counters = importlib.import_module("torch._dynamo.utils").counters
    counters.clear()
    yield
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
@pytest.mark.usefixtures("one_graph")
@pytest.mark.parametrize(
    ("products_of", "kind"), [*itertools.product(("device", "cpu"), PRODUCTS), ("cpu", "nf4")], indirect=["products_of"]
)
def test_one_graph_for_every_number_of_tokens(products_of: None, kind: Kind) -> None:
    found, _ = layers(kind, torch.bfloat16)
    compiled = torch.compile(found, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (40, 64, 77):
        x, upstream = torch.randn(1, tokens, WIDTH).bfloat16(), torch.randn(1, tokens, OUT).bfloat16()
        for ours, eager in zip(results(compiled, x, upstream), results(found, x, upstream), strict=True):
            assert error(ours, eager) < 2**-8 * AS_FAR


@pytest.mark.usefixtures("one_graph")
@pytest.mark.filterwarnings("ignore:.*autograd.function.Function.* should not be instantiated")
def test_layers_of_equal_and_of_other_groups_are_one_graph() -> None:
    widths = (256, 256, 4, 90, 8)
    assert [*map(group_size, widths[:-1])] == [256, 256, 4, 0]
    torch.manual_seed(0)
    linears = [nn.Linear(*each) for each in itertools.pairwise(widths)]
    found = nn.Sequential(*linears).bfloat16().requires_grad_(False)
    quantize(found, "int8_convrot", CPU)
    compiled = torch.compile(found, fullgraph=True, dynamic=True, backend="aot_eager")
    x, upstream = torch.randn(1, 40, widths[0]).bfloat16(), torch.randn(1, 40, widths[-1]).bfloat16()
    for ours, eager in zip(results(compiled, x, upstream), results(found, x, upstream), strict=True):
        assert error(ours, eager) < 2**-8 * AS_FAR


def test_rotated_is_an_orthogonal_map() -> None:
    x = torch.randn(3, 5, 512, dtype=torch.float64)
    torch.testing.assert_close(rotated(rotated(x, 64), 64), x)
    torch.testing.assert_close(rotated(x, 64).norm(), x.norm())


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_quantising_and_scaling_are_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the products, each direction is one kernel that quantises and one that scales back, adding the bias."""
    torch._dynamo.reset()
    monkeypatch.setattr(quantization, "has_products", lambda _: True)
    found, _ = layers("int8_convrot", torch.bfloat16)
    compiled = torch.compile(found, fullgraph=True, dynamic=True)
    x, upstream = torch.randn(1, TOKENS, WIDTH).bfloat16(), torch.randn(1, TOKENS, OUT).bfloat16()
    _, codes = run_and_get_code(results, compiled, x, upstream)
    for code in codes:
        kernels = re.findall(r"^\s+(cpp_fused\w+|extern_kernels\.\w+)\(", code, re.MULTILINE)
        products = [name for name in kernels if name.startswith("extern")]
        assert sorted(products) == ["extern_kernels._int_mm", "extern_kernels.mm"]
        assert len(kernels) == 4
    assert len(codes) == 2


# ---- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch has 8-bit products for CUDA only")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("inputs", "outputs"), [(3072, 3072), (3072, 12288), (12288, 3072)])
@pytest.mark.parametrize("kind", PRODUCTS)
def test_a_gpu_computes_what_the_cpu_does(kind: Kind, inputs: int, outputs: int, compiled: bool) -> None:
    """At the sizes of the 20B model, with a number of tokens that is no multiple of 32."""
    device = torch.device("cuda")
    if kind == "fp8_w8a8" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("this GPU has no fp8 units")
    torch.manual_seed(0)
    found = nn.Sequential(nn.Linear(inputs, outputs)).bfloat16().requires_grad_(False)
    quantize(found, kind, CPU)
    of_cpu, found = found, copy.deepcopy(found).to(device)
    x, upstream = torch.randn(1, 77, inputs).bfloat16(), torch.randn(1, 77, outputs).bfloat16()
    layer = torch.compile(found, fullgraph=True, dynamic=True) if compiled else found
    ours = results(layer, x.to(device), upstream.to(device))
    for gpu, cpu in zip(ours, results(of_cpu, x, upstream), strict=True):
        assert error(gpu.cpu(), cpu) < 2**-7  # the rotation is rounded to bfloat16 before it is quantised
