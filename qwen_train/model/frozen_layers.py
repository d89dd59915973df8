"""Layers of a frozen transformer that keep less memory for the backward pass and keep the dtype of their input.

Results are those of the layers they replace, within the rounding of the dtype.

- `QuantizedLinear` (`qwen_cache/models/devices.py`) in place of torchao's layer, which keeps its unpacked
  weight.
- `UnpackedLinear`: the same for diffusers' linear layer of a GGUF file. Its weight becomes a plain tensor of bytes,
  which can be offloaded.
- `InputDtypeLayerNorm`: under CUDA's autocast a LayerNorm returns float32, and so would every later tensor of a
  quantised or fully trained model.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from qwen_cache.models.devices import QuantizedLinear, has_weight_only_rows


def replace_layers(transformer: nn.Module) -> None:
    """Replace the classes of LayerNorms and of frozen quantised linear layers in place; parameters stay the same."""
    for module in transformer.modules():
        if type(module) is nn.LayerNorm and not module.elementwise_affine:
            module.__class__ = InputDtypeLayerNorm
        elif type(module) is nn.Linear and has_weight_only_rows(module.weight):
            module.__class__ = QuantizedLinear
        elif type(module).__name__ == "GGUFLinear":
            as_unpacked_linear(module)


class InputDtypeLayerNorm(nn.LayerNorm):
    """A LayerNorm without weights that runs with autocast disabled; the kernels still sum in float32."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return super().forward(x)


def as_unpacked_linear(layer: Any) -> None:
    """Make diffusers' GGUFLinear an `UnpackedLinear` in place."""
    layer.quant_type = layer.weight.quant_type
    layer.weight = nn.Parameter(layer.weight.as_tensor(), requires_grad=False)
    layer.__class__ = UnpackedLinear


class UnpackedLinear(nn.Linear):
    """A linear layer whose frozen weight is in GGML's blocks: `weight` has the bytes of each row.

    Like QuantizedLinear it computes in autocast's dtype, to which the unpacked weight is rounded, as in GGUFLinear.
    """

    quant_type: Any
    """gguf.GGMLQuantizationType of the blocks."""

    def forward(self, x: Tensor) -> Tensor:
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
        product: Any = _UnpackedProduct.apply
        output: Tensor = product(x.to(dtype), self.weight, self.quant_type, self.bias)
        return output


def _unpack(weight: Tensor, quant_type: Any, dtype: torch.dtype) -> Tensor:
    """`[N, K]` in `dtype` by diffusers' functions, which return float16 or float32."""
    from diffusers.quantizers.gguf.utils import GGUFParameter, dequantize_gguf_tensor

    numbers: Tensor = dequantize_gguf_tensor(GGUFParameter(weight, quant_type=quant_type))
    return numbers.to(dtype)


class _UnpackedProduct(torch.autograd.Function):
    """`x @ weight.T + bias` of a packed weight, with gradients for `x` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, quant_type: Any, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.quant_type = quant_type
        return nn.functional.linear(x, _unpack(weight, quant_type, x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        (gradient,), (weight,) = gradients, ctx.saved_tensors
        return gradient @ _unpack(weight, ctx.quant_type, gradient.dtype), None, None, None
