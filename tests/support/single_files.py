"""A transformer or text encoder written to a single file, as ComfyUI and llama.cpp's tools write it."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

PREFIX = "model.diffusion_model."
LAYOUTS = ("bf16", "prefixed", "fp8", "scale_weight", "comfy_quant", "metadata", "rows", "int8", "convrot", "params")
"""bf16 without and with ComfyUI's prefix; fp8 without scales; fp8 with scales in the first layout, in the present one
with its entries as tensors or as metadata, and with a scale for each row, also outside the blocks; int8 without
rotation, rotated by 16 columns, and rotated with one scale for all rows and ComfyUI's prefix, entries nested."""
FORMAT = {"format": "float8_e4m3fn"}
INT8 = {
    "int8": {"format": "int8_tensorwise"},
    "convrot": {"format": "int8_tensorwise", "convrot": True, "convrot_groupsize": 16},
    "params": {"format": "int8_tensorwise", "params": {"convrot": True, "convrot_groupsize": 4}},
}


def convrot(weight: Tensor, size: int) -> Tensor:
    """Groups of `size` columns times ConvRot's matrix, written out by its definition."""
    four = 1 - 2 * torch.eye(4, dtype=torch.float64).flip(0)
    matrix = four
    while len(matrix) < size:
        matrix = torch.kron(matrix, four)
    rotated = (weight.double().unflatten(1, (-1, size)) @ (matrix / size**0.5)).flatten(1)
    return rotated.float()


def weights_of(model: Path) -> dict[str, Tensor]:
    """The transformer's weights, in float32."""
    files = sorted((model / "transformer").glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def is_matrix(name: str, tensor: Tensor) -> bool:
    """True if these programs quantise it."""
    return name.startswith("transformer_blocks.") and tensor.ndim == 2


def text_weights_of(stock: Any) -> dict[str, Tensor]:
    """A stock text encoder's weights, in float32, under the names of ComfyUI's files.

    Those of Qwen2.5-VL have the names of its first repository, those of Qwen3-VL the names of transformers.
    """
    weights = {name: weight.detach() for name, weight in stock.named_parameters()}
    if stock.config.model_type == "qwen3_vl":
        return weights
    shorter = {"model.language_model.": "model.", "model.visual.": "visual."}
    return {_replaced(name, shorter): weight for name, weight in weights.items()}


def _replaced(name: str, beginnings: Mapping[str, str]) -> str:
    begin = next((it for it in beginnings if name.startswith(it)), "")
    return beginnings.get(begin, "") + name.removeprefix(begin)


def is_text_matrix(name: str, tensor: Tensor) -> bool:
    """True for what ComfyUI may quantise of a text encoder: all matrices but the vision tower's table of positions."""
    return tensor.ndim == 2 and "pos_embed" not in name


def write_safetensors(
    path: Path,
    weights: Mapping[str, Tensor],
    layout: str,
    is_matrix: Callable[[str, Tensor], bool] = is_matrix,
    prefix: str = PREFIX,
) -> dict[str, Tensor]:
    """Write the file, and return the weights that it means, in float32. `prefix` is that of the layouts with one."""
    stored: dict[str, Tensor] = {}
    meant: dict[str, Tensor] = {}
    scaled = layout not in ("bf16", "prefixed", "fp8")
    for name, tensor in weights.items():
        stored[name] = tensor.to(torch.float8_e4m3fn if layout == "fp8" else torch.bfloat16)
        meant[name] = stored[name].float()
        outside = layout == "rows" and name == "proj_out.weight"
        if not scaled or not (outside or is_matrix(name, tensor)):
            continue
        if layout in INT8:
            entry = INT8[layout]
            group = {**entry, **entry.get("params", {})}.get("convrot_groupsize", 0)
            turned = convrot(tensor, group) if group else tensor
            scale = (turned.abs().max() if layout == "params" else turned.abs().amax(1, keepdim=True)) / 127
            stored[name] = (turned / scale).round().to(torch.int8)
            numbers = stored[name].float() * scale
            meant[name] = convrot(numbers, group) if group else numbers
            layer = name.removesuffix(".weight")
            stored[f"{layer}.weight_scale"] = scale
            stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(entry).encode()), dtype=torch.uint8)
            continue
        scale = (tensor.abs().amax(1) if layout == "rows" else tensor.abs().max()) / 448
        column = scale[:, None] if layout == "rows" else scale
        stored[name] = (tensor / column).to(torch.float8_e4m3fn)
        meant[name] = stored[name].float() * column
        layer = name.removesuffix(".weight")
        stored[f"{layer}.{'scale_weight' if layout == 'scale_weight' else 'weight_scale'}"] = scale
        if layout == "scale_weight":
            stored[f"{layer}.scale_input"] = torch.tensor(0.5)
        elif layout != "metadata":
            stored[f"{layer}.comfy_quant"] = torch.tensor(list(json.dumps(FORMAT).encode()), dtype=torch.uint8)
    if layout == "scale_weight":
        stored["scaled_fp8"] = torch.zeros(2, dtype=torch.float8_e4m3fn)
    layers = {name.removesuffix(".weight"): FORMAT for name in weights if is_matrix(name, weights[name])}
    metadata = {"_quantization_metadata": json.dumps({"layers": layers})} if layout == "metadata" else None
    prefix = prefix if layout in ("prefixed", "scale_weight", "params") else ""
    if prefix and layout == "prefixed":
        stored["vae.decoder.conv_in.weight"] = torch.zeros(1)  # of a whole checkpoint
    own = {name if name.startswith("vae.") else prefix + name: tensor for name, tensor in stored.items()}
    save_file(own, path, metadata)
    return meant


def write_gguf(path: Path, weights: Mapping[str, Tensor], kind: str) -> dict[str, Tensor]:
    """Write the file by the `gguf` package, with matrices outside the blocks in BF16; the weights that it means."""
    import gguf

    writer, meant = gguf.GGUFWriter(path, "qwen_image"), {}
    for name, tensor in weights.items():
        of = kind if is_matrix(name, tensor) else "BF16" if tensor.ndim == 2 else "F32"
        quant_type = gguf.GGMLQuantizationType[of]
        packed = gguf.quants.quantize(tensor.numpy(), quant_type)
        writer.add_tensor(name, packed, raw_dtype=quant_type)
        meant[name] = torch.from_numpy(gguf.quants.dequantize(packed, quant_type).copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return meant


def gguf_header(tensors: int, values: bytes, count: int, infos: bytes = b"") -> bytes:
    """The beginning of a GGUF file with these counts, whatever follows."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, count) + values + infos


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()
