"""Load a transformer from a single file (`qwen_cache/models/single_file.py`) by diffusers' single-file loader.

The file is mapped, not read into memory; processes of one machine share its bytes. bf16, f16 and f32 weights are
converted to the wanted dtype. The matrices of the blocks stay quantised: fp8 with the file's own scale, one per row, as
torchao's fp8 weights; GGUF as in diffusers, unpacked for each product. What else is fp8 or packed is unpacked. No
weight is rounded except by the conversion to the wanted dtype. Refused: names or shapes that are not the model's.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qwen_cache.errors import ModelError, first_line
from qwen_cache.models.encoders import from_config
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.single_file import BLOCKS, FP8, SingleFile, StoredTensor

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def load_single_file(kind: type[Any], model: ModelFolder, dtype: torch.dtype) -> Any:
    """The transformer of class `kind` from the model's single file, on the CPU; ModelError if it does not fit."""
    file = model.transformer_file
    assert file is not None
    folder = model.component("transformer")
    check_parameters(kind, file, kind.load_config(folder))
    unread = [re.compile(pattern) for pattern in kind._keys_to_ignore_on_load_unexpected or ()]
    names = [name for name in file.tensors if not any(pattern.search(name) for pattern in unread)]
    try:
        quantization = _quantization_config(file, dtype)
        whole = map_file(file)
        state = {name: _parameter(whole, name, file.tensors[name], kind, dtype) for name in names}
        transformer = kind.from_single_file(
            state, config=str(folder), torch_dtype=dtype, quantization_config=quantization, local_files_only=True
        )
    except torch.OutOfMemoryError:
        raise  # the file is not the reason
    except (OSError, ValueError, RuntimeError) as error:
        raise ModelError(f"the transformer cannot be loaded: {first_line(error)}", where=file.path) from None
    return transformer


def check_parameters(kind: type[Any], file: SingleFile, config: Mapping[str, Any]) -> None:
    """ModelError unless the file has the parameters of the class with this config.json, in their shapes."""
    with torch.device("meta"):
        stock = from_config(getattr(kind, "_stock_class", kind), config)
    expected = {name: tuple(parameter.shape) for name, parameter in stock.named_parameters()}
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


def quantize(transformer: Any, config: Any, device: torch.device | None) -> None:
    """Quantise the loaded transformer by torchao, as diffusers does while it loads a folder: module by module.

    `config` is diffusers' config, which names the modules to leave as they are; each module goes to `device` first.
    """
    from diffusers.quantizers import DiffusersAutoQuantizer

    def is_quantised(module: torch.nn.Module, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and not any(
            f"{each}." in f"{name}." for each in config.modules_to_not_convert
        )

    torchao = importlib.import_module("torchao.quantization")
    torchao.quantize_(transformer, config.get_apply_tensor_subclass(), filter_fn=is_quantised, device=device)
    transformer.hf_quantizer = DiffusersAutoQuantizer.from_config(config)


# ---- tensors ---------------------------------------------------------------------------------------------------------


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
    """The tensor as numbers: an fp8 weight times its scale, in float32; a packed one in the dtype of its scales."""
    values = stored(whole, tensor)
    if tensor.is_packed:
        from diffusers.quantizers.gguf.utils import dequantize_gguf_tensor

        numbers: Tensor = dequantize_gguf_tensor(_packed(values, tensor))
        return numbers
    return values if tensor.scale is None else values.float() * _row_scales(whole, tensor)


def _row_scales(whole: Tensor, tensor: StoredTensor) -> Tensor:
    """`[N, 1]` in float32: the scale of each row, 1 without one."""
    rows = tensor.shape[0]
    scale = torch.ones(1) if tensor.scale is None else stored(whole, tensor.scale).float()
    return scale.reshape(-1, 1).expand(rows, 1).contiguous()


def _packed(values: Tensor, tensor: StoredTensor) -> Any:
    """diffusers' parameter for GGML's blocks."""
    from diffusers.quantizers.gguf.utils import GGUFParameter

    return GGUFParameter(values, quant_type=importlib.import_module("gguf").GGMLQuantizationType[tensor.dtype])


def _parameter(whole: Tensor, name: str, tensor: StoredTensor, kind: type[Any], dtype: torch.dtype) -> Any:
    """What the single-file loader is given under this name."""
    if not (tensor.is_packed or tensor.dtype in FP8):
        return stored(whole, tensor)
    if not (name.startswith(BLOCKS) and name.endswith(".weight") and len(tensor.shape) == 2):
        return unpacked(whole, tensor).to(dtype)
    if tensor.is_packed:
        return _packed(stored(whole, tensor), tensor)
    return _float8(stored(whole, tensor), _row_scales(whole, tensor), dtype)


def _float8(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Any:
    """torchao's weight-only fp8 tensor, which takes the place of a weight in `dtype`."""
    quantization = importlib.import_module("torchao.quantization")
    return quantization.Float8Tensor(values, scales, block_size=[1, values.shape[1]], dtype=dtype)


def _quantization_config(file: SingleFile, dtype: torch.dtype) -> Any:
    """diffusers' config for the file's quantised weights."""
    import diffusers

    if file.quantization == "gguf":
        return diffusers.GGUFQuantizationConfig(compute_dtype=dtype)
    if file.quantization == "fp8":
        return diffusers.TorchAoConfig(importlib.import_module("torchao.quantization").Float8WeightOnlyConfig())
    return None
