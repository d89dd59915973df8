"""The tensors of a single file: compared with a model's parameters, mapped as they are stored, and unpacked to numbers.

The file is mapped, not read into memory; processes of one machine share its bytes.
"""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from qwen_cache.errors import ModelError
from qwen_cache.models.quantization import rotated
from qwen_cache.models.single_file import SingleFile, StoredTensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I8": torch.int8,
}


def check_shapes(file: SingleFile, model: nn.Module) -> None:
    """ModelError unless the file has the parameters of the model, in their shapes."""
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: tensor.shape for name, tensor in file.tensors.items()}
    wrong = sorted(name for name in expected.keys() | found.keys() if expected.get(name) != found.get(name))
    if wrong:
        others = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise ModelError(
            f"the file does not have the parameters of the model in model.path: {wrong[0]}{others}",
            where=file.path,
            expected=expected.get(wrong[0], "no such parameter"),
            found=found.get(wrong[0], "no such tensor"),
            do="name a file of this model, or its own model with --model",
        )


def map_file(file: SingleFile) -> Tensor:
    """The bytes of the file, mapped copy-on-write: `[N]` in uint8."""
    return torch.from_numpy(np.memmap(file.path, np.uint8, "c"))


def stored(whole: Tensor, tensor: StoredTensor) -> Tensor:
    """The tensor as it is stored; of a packed one, the bytes of each row."""
    raw = whole[tensor.begin : tensor.end]
    if tensor.is_packed:
        return raw.view(*tensor.shape[:-1], -1)
    dtype = DTYPES[tensor.dtype]
    aligned = raw if tensor.begin % dtype.itemsize == 0 else raw.clone()
    return aligned.view(dtype).view(tensor.shape)


def unpacked(whole: Tensor, tensor: StoredTensor) -> Tensor:
    """The tensor as numbers: an 8-bit weight times its scale, rotated back, in float32; a packed one in the dtype of
    its scales."""
    values = stored(whole, tensor)
    if tensor.is_packed:
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        numbers: Tensor = dequantize_gguf_tensor(packed(values, tensor))
        return numbers
    return values if tensor.scale is None else rotated(values.float() * row_scales(whole, tensor), tensor.group)


def row_scales(whole: Tensor, tensor: StoredTensor) -> Tensor:
    """`[N, 1]` in float32: the scale of each row, 1 without one."""
    rows = tensor.shape[0]
    scale = torch.ones(1) if tensor.scale is None else stored(whole, tensor.scale).float()
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def packed(values: Tensor, tensor: StoredTensor) -> Any:
    """diffusers' parameter for GGML's blocks."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    return GGUFParameter(values, quant_type=importlib.import_module("gguf").GGMLQuantizationType[tensor.dtype])
