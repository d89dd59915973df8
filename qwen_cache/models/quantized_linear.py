"""Linear layers whose frozen weight has 8 or 4 bits, and is unpacked for each product.

Only weights are quantised, never activations: so a row of the result does not depend on the other rows of its batch,
except for the rounding of the kernels. Where nothing is trained, a large weight is unpacked in pieces. `quantize` makes
such layers of `nn.Linear`, with torchao (int8, fp8) or the kernels of bitsandbytes (nf4), in pieces too. A quantised
weight has no state besides its tensors, so it can be offloaded. `check_quantization` refuses what cannot work here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import transform_subclass

from qwen_cache.errors import ConfigError, DeviceError
from qwen_cache.extras import install_command

Kind = Literal["none", "int8", "fp8", "nf4"]
TORCHAO = {"int8": "Int8WeightOnlyConfig", "fp8": "Float8WeightOnlyConfig"}
NF4_BLOCK = 64
"""Weights that share a scale."""
PIECE = 1 << 24
"""Weights that are unpacked at once: 34 MB in bfloat16, and products large enough for a GPU."""


class Quantization(NamedTuple):
    """The bytes of a quantised matrix."""

    per_weight: float
    per_row: float = 0
    unpacked: int = 1
    """How many tensors of the size of an unquantised matrix there are while it is unpacked."""


QUANTIZATIONS = {
    "int8": Quantization(1, 5),  # each output channel's float32 scale, and torchao's int8 zero point
    "fp8": Quantization(1, 4),
    "nf4": Quantization(0.5 + 4 / NF4_BLOCK),  # a float32 scale per 64 weights
}


def torchao_config(kind: str, setting: str) -> Any:
    """torchao's configuration for int8 or fp8 weights; ConfigError, with the setting, without torchao."""
    try:
        return getattr(importlib.import_module("torchao.quantization"), TORCHAO[kind])()
    except ImportError as error:
        raise _not_installed(setting, kind, error) from None


def check_quantization(kind: Kind, setting: str, device: torch.device) -> None:
    """ConfigError if the package for `kind` is missing, DeviceError if `device` cannot compute with such weights.

    fp8 weights need no GPU with fp8 units: they are converted, not multiplied.
    """
    if kind == "none":
        return
    if kind == "nf4":
        try:
            importlib.import_module("bitsandbytes.functional")
        except ImportError as error:
            raise _not_installed(setting, kind, error) from None
    try:
        layers = nn.Sequential(nn.Linear(NF4_BLOCK, NF4_BLOCK, device=device)).requires_grad_(False)
        quantize(layers, kind, setting, device)
        with torch.inference_mode():
            layers(torch.ones(1, NF4_BLOCK, device=device))
    except (RuntimeError, TypeError, NotImplementedError) as error:
        what, do = f"{setting}={kind}: {device} cannot compute with such weights", f"choose another {setting}"
        raise DeviceError(what, found=str(error).splitlines()[0], do=do) from None


def _not_installed(setting: str, kind: str, error: ImportError) -> ConfigError:
    return ConfigError(f"{setting}={kind}: {error}", do=install_command("quantization"))


def quantize(layers: nn.Module, kind: Kind, setting: str, device: torch.device) -> None:
    """Quantise every `nn.Linear` in `layers` in place, on `device`, where it stays."""
    for parent, name, linear in list(_linears(layers)):
        weight = linear.weight.detach()
        if kind == "nf4":
            setattr(parent, name, Nf4Linear(linear, device))
        else:
            config = torchao_config(kind, setting)
            pieces = [_by_torchao(weight[rows].to(device), config) for rows in _pieces(*weight.shape)]
            linear.weight = nn.Parameter(_joined(pieces), requires_grad=False)
            linear.__class__ = QuantizedLinear
        getattr(parent, name).to(device)


def _linears(layers: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in layers.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child


def _pieces(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a weight in pieces of about PIECE numbers. They have a multiple of 64 rows, except the last one: so
    no block of nf4 is cut."""
    step = max(PIECE // columns // NF4_BLOCK, 1) * NF4_BLOCK
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


# ---- int8 and fp8 ----------------------------------------------------------------------------------------------------


def _by_torchao(weight: Tensor, config: Any) -> Any:
    """The quantised weight; torchao converts layers."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    importlib.import_module("torchao.quantization").quantize_(layer, config)
    layer.weight.requires_grad_(False)
    assert has_weight_only_rows(layer.weight)
    return layer.weight.detach()


def _joined(pieces: Sequence[Any]) -> Any:
    """Quantised rows as one weight."""
    rows, columns = sum(map(len, pieces)), pieces[0].shape[1]

    def join(name: str, _: Tensor) -> Tensor:
        return torch.cat([getattr(piece, name) for piece in pieces])

    return cast(Any, transform_subclass)(pieces[0], join, outer_size=(rows, columns), outer_stride=(columns, 1))


def has_weight_only_rows(weight: Any) -> bool:
    """Whether it is torchao's int8 or fp8 weight with a scale per row, used without quantising the activations."""
    if not {"qdata", "scale", "block_size"} <= getattr(weight, "__dict__", {}).keys() or weight.requires_grad:
        return False
    of_activations = (getattr(weight, name, None) for name in ("act_quant_kwargs", "act_pre_scale"))
    return list(weight.block_size) == [1, weight.shape[1]] and all(setting is None for setting in of_activations)


class QuantizedLinear(nn.Linear):
    """A linear layer whose frozen weight is int8 or fp8 with a scale per row, under autocast in autocast's dtype.

    torchao's weight-only linear unpacks its weight to compute a product, and autograd then keeps the unpacked weight,
    as large as an unquantised one. Here the backward pass unpacks the weight again.
    """

    def forward(self, x: Tensor) -> Tensor:
        kind, weight = x.device.type, cast(Any, self.weight)
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        x, values, scale = x.to(dtype), weight.qdata, weight.scale.flatten()
        if torch.is_inference_mode_enabled():
            return in_pieces(x, len(values), lambda rows: (values[rows].to(dtype), scale[rows]), self.bias)
        product: Any = _RowScaledProduct.apply
        output: Tensor = product(x, values, scale, self.bias)
        return output


class _RowScaledProduct(torch.autograd.Function):
    """`x @ weight.T * scale + bias`, with gradients for `x` alone.

    A weight is cast to the dtype of `x` without rounding: int8 and fp8 (e4m3) are exact in bfloat16. Products with the
    scales are in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        output = (x @ weight.to(x.dtype).t()).mul_(scale)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        scaled = torch.mul(gradient, scale, out=torch.empty_like(gradient))
        return scaled @ weight.to(gradient.dtype), None, None, None


# ---- nf4 -------------------------------------------------------------------------------------------------------------


class Nf4Linear(nn.Module):
    """A linear layer whose weight has 4 bits, by the kernels of bitsandbytes, on any device and without gradients.

    bitsandbytes' own layer cannot be offloaded, and its kernels for CPUs take only rows of whole blocks.
    """

    def __init__(self, linear: nn.Linear, device: torch.device) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias
        weight, kernel = linear.weight.detach(), _bitsandbytes_kernel("quantize_4bit")
        pieces = [
            kernel(weight[rows].to(device).contiguous(), NF4_BLOCK, "nf4", torch.uint8)
            for rows in _pieces(self.out_features, self.in_features)
        ]
        packed, scales = zip(*pieces, strict=True)
        self.weight = nn.Parameter(torch.cat(packed).flatten(), requires_grad=False)
        self.scale = nn.Parameter(torch.cat(scales), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return in_pieces(x, self.out_features, lambda rows: (self._unpacked(rows, x.dtype), None), self.bias)

    def _unpacked(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """These rows of the weight; unless they are the last ones, their number is one of whole blocks."""
        begin, end = (row * self.in_features for row in (rows.start, rows.stop))
        packed, scale = self.weight[begin // 2 : -(-end // 2)], self.scale[begin // NF4_BLOCK : -(-end // NF4_BLOCK)]
        kernel = _bitsandbytes_kernel("dequantize_4bit")
        # As one row: the kernel for CPUs begins a block with each row.
        unpacked: Tensor = kernel(packed[:, None], scale, NF4_BLOCK, "nf4", (1, end - begin), dtype)
        return unpacked.view(-1, self.in_features)


def _bitsandbytes_kernel(name: str) -> Any:
    """One of bitsandbytes' operators, which exist once it is imported."""
    importlib.import_module("bitsandbytes.functional")
    return getattr(torch.ops.bitsandbytes, name).default


def in_pieces(
    x: Tensor, rows: int, unpack: Callable[[slice], tuple[Tensor, Tensor | None]], bias: Tensor | None
) -> Tensor:
    """`x @ weight.T * scale + bias`; `unpack` gives some rows of the weight, and their scales if they have any."""
    output = x.new_empty(*x.shape[:-1], rows)
    for piece in _pieces(rows, x.shape[-1]):
        weight, scale = unpack(piece)
        product = x @ weight.t()
        output[..., piece] = product if scale is None else product.mul_(scale)
    return output if bias is None else output.add_(bias.to(output.dtype))
