"""Linear layers whose frozen weight has 8 or 4 bits: made of others here, or read from a file.

A quantised weight is plain parameters: its numbers by rows (int8, or the bytes of fp8 and nf4) and their float32 scales
as int32 bits, so that offloading moves them, and no mixed precision casts them. `quantize` makes them, in pieces;
`check_quantization` refuses what cannot work on a device.

- `int8`, `fp8`, `nf4` quantise weights alone: a weight is unpacked for its product, so a row of the result depends on
  no other row of its batch, except for the rounding of the kernels.
- `int8_convrot`, `fp8_w8a8` multiply in 8 bits. The scales of activations are per row, too.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qwen_cache.errors import ConfigError, DeviceError
from qwen_cache.extras import install_command
from qwen_cache.models.hardware import Kind
from qwen_cache.models.single_file import CONVROT_GROUPS

# ---- kinds -----------------------------------------------------------------------------------------------------------


EIGHT_BITS = {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int8_convrot": torch.int8,
    "fp8_w8a8": torch.float8_e4m3fn,
}
"""The dtype of the numbers of each kind with 8 bits."""
PRODUCTS = ("int8_convrot", "fp8_w8a8")
"""The kinds that multiply in 8 bits."""
NF4_BLOCK = 64
"""Weights that share a scale."""
PIECE = 1 << 24
"""Weights that are unpacked at once: 34 MB in bfloat16, and products large enough for a GPU."""
ROWS = 32
"""8-bit products take a multiple of these rows: cuBLAS refuses few, and some odd ones."""
SMALLEST_SCALE = 1e-30


def check_quantization(kind: Kind, setting: str, device: torch.device) -> None:
    """ConfigError if the package for `kind` is missing, DeviceError if `device` cannot compute with such weights.

    fp8 weights need no GPU with fp8 units: they are converted, not multiplied. fp8_w8a8 needs them.
    """
    if kind == "none":
        return
    if kind == "nf4":
        try:
            importlib.import_module("bitsandbytes.functional")
        except ImportError as error:
            raise ConfigError(f"{setting}={kind}: {error}", do=install_command("quantization")) from None
    try:
        layers = nn.Sequential(nn.Linear(NF4_BLOCK, NF4_BLOCK, device=device)).requires_grad_(False)
        quantize(layers, kind, device)
        with torch.inference_mode():
            layers(torch.ones(1, NF4_BLOCK, device=device, dtype=torch.bfloat16))
    except (RuntimeError, TypeError, NotImplementedError, ValueError) as error:
        what, do = f"{setting}={kind}: {device} cannot compute with such weights", f"choose another {setting}"
        raise DeviceError(what, found=str(error).splitlines()[0], do=do) from None


def quantize(
    layers: nn.Module,
    kind: Kind,
    device: torch.device,
    *,
    few_rows: Collection[str] = (),
    skip: Collection[str] = (),
    backward_in_8_bits: bool = True,
    to: torch.device | None = None,
    later: bool = False,
) -> None:
    """Quantise every `nn.Linear` in `layers` in place, on `device`, and leave it there, or move it `to` another one.

    Layers with a part of `few_rows` in their name never multiply in 8 bits: they have a row for each sample. Those in
    `skip`, by their names without the number of a block, stay as they are. With `later` all become `PendingLinear`.
    """
    for name, linear in list(layers.named_modules()):
        if type(linear) is not nn.Linear or name.partition(".")[2] in skip:
            continue
        products = kind in PRODUCTS and not set(name.split(".")) & set(few_rows)
        if later:
            PendingLinear.make(linear, kind, products, backward_in_8_bits)
        else:
            _pack(linear, kind, device, products, backward_in_8_bits)
            linear.to(device if to is None else to)


def _pack(linear: nn.Linear, kind: Kind, device: torch.device, products: bool, backward_in_8_bits: bool) -> None:
    """Quantise one layer; what it has beside its weight stays where it is."""
    weight = linear.weight.detach()
    at_once = [slice(None)] if device.type == "meta" else row_pieces(*weight.shape)  # no data needs no pieces
    pieces = (weight[rows].to(device) for rows in at_once)
    if kind == "nf4":
        Nf4Linear.make(linear, *map(torch.cat, zip(*map(_nf4, pieces), strict=True)))
    else:
        group = group_size(weight.shape[1]) if kind == "int8_convrot" else 0
        values, scale = map(torch.cat, zip(*(quantized_rows(each, kind, group) for each in pieces), strict=True))
        QuantizedLinear.make(linear, values, scale, group=group, products=products, backward=backward_in_8_bits)


def row_pieces(rows: int, columns: int) -> Iterator[slice]:
    """The rows of a weight in pieces of about PIECE numbers. They have a multiple of 64 rows, except the last one: so
    no block of nf4 is cut."""
    step = max(PIECE // columns // NF4_BLOCK, 1) * NF4_BLOCK
    for begin in range(0, rows, step):
        yield slice(begin, min(begin + step, rows))


def is_quantized(model: nn.Module) -> bool:
    """True if frozen weights of the model are packed, by this project or by a library."""
    ours = any(isinstance(module, PackedLinear) for module in model.modules())
    return ours or getattr(model, "hf_quantizer", None) is not None


class PackedLinear(nn.Linear):
    """A linear layer that peft unpacks for a DoRA, which needs the weight itself: by `dequantize`, since it has `W_q`
    (peft/utils/integrations.py, dequantize_module_weight)."""

    @property
    def W_q(self) -> Tensor:  # noqa: N802
        return self.weight

    def dequantize(self) -> Tensor:
        """The weight `[N, K]` in float32."""
        raise NotImplementedError


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def quantized_rows(weight: Tensor, kind: str, group: int = 0) -> tuple[Tensor, Tensor]:
    """The numbers `[N, K]` and float32 scales `[N]` of a weight; with a `group`, of the rotated weight.

    int8 and fp8 are torchao's Int8WeightOnlyConfig and Float8WeightOnlyConfig, bit for bit; int8_convrot is ComfyUI's
    format (comfy_kitchen/backends/eager/quantization.py): float32, 127 steps, rounded to even.
    """
    if kind == "int8":  # in the weight's dtype, as in torchao
        scale = (weight.abs().amax(1) / 127.5).clamp(min=torch.finfo(torch.float32).eps).float()
        return (weight * (1 / scale)[:, None]).round().clamp(-128, 127).to(torch.int8), scale
    if kind == "fp8":
        scale = (weight.abs().amax(1) / torch.finfo(torch.float8_e4m3fn).max).float().clamp(min=SMALLEST_SCALE)
        return (weight.float() / scale[:, None]).to(torch.float8_e4m3fn), scale
    values, scale = _by_row(rotated(weight.float(), group), EIGHT_BITS[kind])
    return values, scale[:, 0]


def _by_row(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`[M, K]` in 8 bits, and a float32 scale for each row, `[M, 1]`."""
    x = x.float()
    top = 127.0 if dtype == torch.int8 else torch.finfo(dtype).max
    smallest = 1e-30  # SMALLEST_SCALE: of a global number dynamo makes an input, which a second layer cannot reach
    scale = (x.abs().amax(1, keepdim=True) / top).clamp(min=smallest)
    x = x / scale
    return (x.round_() if dtype == torch.int8 else x).to(dtype), scale


def group_size(columns: int) -> int:
    """The largest of ConvRot's groups that divides a weight's columns; 0 for no rotation."""
    return max((size for size in CONVROT_GROUPS if columns % size == 0), default=0)


@functools.cache
def hadamard(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """ConvRot's matrix `[size, size]` (arXiv 2512.03673): a Kronecker power, orthogonal and its own inverse.

    Its entries are plus or minus a power of two, so exact in every dtype.
    """
    with torch.inference_mode(False):  # it is kept, and training needs it too
        four = torch.tensor([[1.0, 1, 1, -1], [1, 1, -1, 1], [1, -1, 1, 1], [-1, 1, 1, 1]])
        matrix = four
        while len(matrix) < size:
            matrix = torch.kron(matrix, four)
        if len(matrix) != size:
            raise ValueError(f"{size} is no power of 4")
        result: Tensor = (matrix / size**0.5).to(device, dtype)
        return result


@torch.library.custom_op("qwen_cache::hadamard", mutates_args=())
def _in_graph(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """The matrix for a graph of several layers, in which it is one operation; torch takes what that returns as new."""
    return hadamard(size, device, dtype).clone()


@_in_graph.register_fake
def _(size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, size, device=device, dtype=dtype)


def rotated(x: Tensor, group: int) -> Tensor:
    """Each group of columns times ConvRot's matrix; its own inverse. Nothing without a group."""
    if not group:
        return x
    matrix_of = _in_graph if torch.compiler.is_compiling() else hadamard
    return (x.reshape(-1, group) @ matrix_of(group, x.device, x.dtype)).view(x.shape)


class QuantizedLinear(PackedLinear):
    """A linear layer whose frozen weight has 8 bits, with a scale per row; under autocast in autocast's dtype.

    The backward pass unpacks or reads the weight again, so autograd keeps no copy of it.
    """

    scale: Tensor
    """`[N]`: the bits of float32 scales as int32."""
    values: torch.dtype
    """int8 or one of fp8; `weight` is int8 or has the bytes of fp8."""
    group: int
    """The columns that were rotated together; 0 for a weight that was not."""
    products: bool
    """True if the input is quantised too, and multiplied in 8 bits."""
    backward_in_8_bits: bool
    """The same for the gradient of the output."""

    @classmethod
    def make(
        cls,
        linear: Any,
        values: Tensor,
        scale: Tensor,
        *,
        group: int = 0,
        products: bool = False,
        backward: bool = True,
    ) -> None:
        """Make an `nn.Linear` quantised, in place."""
        stored = values if values.dtype == torch.int8 else values.view(torch.uint8)
        linear.weight = nn.Parameter(stored, requires_grad=False)
        linear.scale = nn.Parameter(scale.flatten().contiguous().view(torch.int32), requires_grad=False)
        linear.values, linear.group = values.dtype, group
        linear.products, linear.backward_in_8_bits = products, backward
        linear.__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        x = rotated(x.to(_dtype_of(x)), self.group)
        weight, scale = self.weight.view(self.values), self.scale.view(torch.float32)
        if self.products:
            return apply(_EightBitProduct, x, weight, scale, self.bias, self.backward_in_8_bits)
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return in_pieces(x, len(weight), lambda rows: (weight[rows].to(x.dtype), scale[rows]), self.bias)
        return apply(_RowScaledProduct, x, weight, scale, self.bias)

    def dequantize(self) -> Tensor:
        """The weight `[N, K]` in float32, as it was before it was rotated."""
        numbers = self.weight.view(self.values).float() * self.scale.view(torch.float32)[:, None]
        return rotated(numbers, self.group)


class PendingLinear(PackedLinear):
    """A linear layer that `quantize_pending` quantises, after an adapter was added.

    Until then its weight is a mapped file. So a process that keeps a part of each block never has all of them in
    memory of its own.
    """

    pending: tuple[Kind, bool, bool]
    """The arguments of `_pack`, without the device."""

    @classmethod
    def make(cls, linear: Any, kind: Kind, products: bool, backward_in_8_bits: bool) -> None:
        """Mark an `nn.Linear`, in place."""
        linear.pending, linear.__class__ = (kind, products, backward_in_8_bits), cls

    def dequantize(self) -> Tensor:
        return self.weight.float()


def quantize_pending(layers: nn.Module, device: torch.device) -> None:
    """Quantise every `PendingLinear` in `layers` in place, on `device`, and leave it there."""
    for layer in list(layers.modules()):
        if isinstance(layer, PendingLinear):
            kind, products, backward_in_8_bits = layer.pending
            del layer.pending
            _pack(layer, kind, device, products, backward_in_8_bits)
            layer.to(device)


def apply(function: Any, *arguments: Any) -> Tensor:
    """Call an autograd function, whose own `apply` has no types."""
    result: Tensor = function.apply(*arguments)
    return result


def _dtype_of(x: Tensor) -> torch.dtype:
    """The dtype of products: autocast's, else that of the input."""
    kind = x.device.type
    enabled = kind != "meta" and torch.is_autocast_enabled(kind)  # "meta" has no autocast
    return torch.get_autocast_dtype(kind) if enabled else x.dtype


class _RowScaledProduct(torch.autograd.Function):
    """`x @ weight.T * scale + bias`, with gradients for `x` alone.

    A weight is cast to the dtype of `x` without rounding: int8 and fp8 are exact in bfloat16. Products with the scales
    are in float32.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight, scale)
        output = (x @ weight.to(x.dtype).t()).mul_(scale)
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        return _scaled(gradient, scale) @ weight.to(gradient.dtype), None, None, None


def _scaled(gradient: Tensor, scale: Tensor) -> Tensor:
    return torch.mul(gradient, scale, out=torch.empty_like(gradient))


class _EightBitProduct(torch.autograd.Function):
    """`x @ weight.T * scale + bias` with `x` in 8 bits, with gradients for `x` alone.

    The same weight serves both directions, since its scales belong to the rows that the backward pass sums over: they
    are multiplied into the gradient before that is quantised.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, backward_in_8_bits: bool
    ) -> Tensor:
        ctx.save_for_backward(weight, scale)
        ctx.in_8_bits = backward_in_8_bits
        output = _product(x.reshape(-1, x.shape[-1]), weight.t(), scale).view(*x.shape[:-1], len(weight))
        return output if bias is None else output.add_(bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        (gradient,), (weight, scale) = gradients, ctx.saved_tensors
        if ctx.in_8_bits:
            by_column = weight.t().contiguous().t()  # the layout that tensor cores take, for a moment
            of_x = _product((gradient * scale).reshape(-1, len(scale)), by_column, None, gradient.dtype)
            of_x = of_x.view(*gradient.shape[:-1], weight.shape[1])
        else:
            of_x = _scaled(gradient, scale) @ weight.to(gradient.dtype)
        return of_x, None, None, None, None


def _product(x: Tensor, weight: Tensor, scale: Tensor | None, dtype: torch.dtype | None = None) -> Tensor:
    """`x @ (weight * scale)` of `[M, K]`, quantised by row, and 8-bit numbers `[K, N]`, columns first, in x's dtype.

    Where there are no 8-bit products (the CPU, MPS) their numbers are multiplied in float32.
    """
    dtype, rows, columns = dtype or x.dtype, len(x), weight.shape[1]
    if not has_products(x.device):
        x, of_row = _by_row(x, weight.dtype)
        with torch.autocast(x.device.type, enabled=False):
            return _rescaled(x.float() @ weight.float(), of_row, scale).to(dtype)
    if torch.compiler.is_compiling() or rows % ROWS:
        x = F.pad(x, (0, 0, 0, -rows % ROWS))
    x, of_row = _by_row(x, weight.dtype)  # under the same name, so that no copy in float32 is kept
    if weight.dtype == torch.int8:
        return _rescaled(torch._int_mm(x, weight), of_row, scale)[:rows].to(dtype)
    of_column = of_row.new_ones(1, columns) if scale is None else scale[None]
    product = torch._scaled_mm(x, weight, scale_a=of_row, scale_b=of_column, out_dtype=torch.bfloat16)
    return product[:rows].to(dtype)


def has_products(device: torch.device) -> bool:
    """True if torch has 8-bit products for the device; "meta" imitates one that has."""
    return device.type in ("cuda", "meta")


def _rescaled(sums: Tensor, of_row: Tensor, scale: Tensor | None) -> Tensor:
    sums = sums * of_row
    return sums if scale is None else sums.mul_(scale)


# ---- nf4 -------------------------------------------------------------------------------------------------------------


class Nf4Linear(PackedLinear):
    """A linear layer whose frozen weight has 4 bits, by the kernels of bitsandbytes, on any device.

    bitsandbytes' own layer cannot be offloaded, and its kernels for CPUs take only rows of whole blocks.
    """

    scale: Tensor
    """The bits of the float32 scale of each block as int32, by rows like `weight` if these have whole blocks."""

    @classmethod
    def make(cls, linear: Any, packed: Tensor, scale: Tensor) -> None:
        """Make an `nn.Linear` quantised, in place."""
        shape = (linear.out_features, -1) if linear.in_features % NF4_BLOCK == 0 else (-1,)
        linear.weight = nn.Parameter(packed.view(shape), requires_grad=False)
        linear.scale = nn.Parameter(scale.view(torch.int32).view(shape), requires_grad=False)
        linear.__class__ = cls

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(_dtype_of(x))
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled():
            return in_pieces(x, self.out_features, lambda rows: (self._unpacked(rows, x.dtype), None), self.bias)
        return apply(_UnpackedProduct, x, self.weight, self.scale.view(torch.float32), self.bias)

    def dequantize(self) -> Tensor:
        return self._unpacked(slice(0, self.out_features), torch.float32)

    def _unpacked(self, rows: slice, dtype: torch.dtype) -> Tensor:
        """These rows of the weight; unless they are the last ones, their number is one of whole blocks."""
        begin, end = (row * self.in_features for row in (rows.start, rows.stop))
        packed, scale = self.weight.flatten(), self.scale.view(torch.float32).flatten()
        packed, scale = packed[begin // 2 : -(-end // 2)], scale[begin // NF4_BLOCK : -(-end // NF4_BLOCK)]
        return _unpacked(packed, scale, (rows.stop - rows.start, self.in_features), dtype)


class _UnpackedProduct(torch.autograd.Function):
    """`x @ weight.T + bias` of a weight in nf4, with gradients for `x` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, packed: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
        columns = x.shape[-1]
        ctx.save_for_backward(packed, scale)
        ctx.shape = 2 * packed.numel() // columns, columns
        return F.linear(x, _unpacked(packed, scale, ctx.shape, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (packed, scale) = gradients, ctx.saved_tensors
        return gradient @ _unpacked(packed, scale, ctx.shape, gradient.dtype), None, None, None


def _unpacked(packed: Tensor, scale: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight of whole blocks, but for the last one."""
    if packed.is_meta:
        return torch.empty(shape, dtype=dtype, device="meta")
    # As one row: the kernel for CPUs begins a block with each row.
    flat, count = packed.reshape(-1, 1), shape[0] * shape[1]
    kernel = torch.ops.bitsandbytes.dequantize_4bit.default  # imported by whoever has quantised
    unpacked: Tensor = kernel(flat, scale.flatten(), NF4_BLOCK, "nf4", (1, count), dtype)
    return unpacked.view(shape)


def _nf4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The bytes of some rows, two weights in one, and the float32 scale of each block."""
    if weight.is_meta:
        blocks = -(-weight.numel() // NF4_BLOCK)
        packed = torch.empty(-(-weight.numel() // 2), dtype=torch.uint8, device="meta")
        return packed, torch.empty(blocks, device="meta")
    importlib.import_module("bitsandbytes.functional")  # which makes the operators
    kernel = torch.ops.bitsandbytes.quantize_4bit.default
    packed, scale = kernel(weight.contiguous(), NF4_BLOCK, "nf4", torch.uint8)
    return packed.flatten(), scale


def in_pieces(
    x: Tensor, rows: int, unpack: Callable[[slice], tuple[Tensor, Tensor | None]], bias: Tensor | None
) -> Tensor:
    """`x @ weight.T * scale + bias`; `unpack` gives some rows of the weight, and their scales if they have any."""
    output = x.new_empty(*x.shape[:-1], rows)
    for piece in row_pieces(rows, x.shape[-1]):
        weight, scale = unpack(piece)
        product = x @ weight.t()
        output[..., piece] = product if scale is None else product.mul_(scale)
    return output if bias is None else output.add_(bias.to(output.dtype))
