"""Models in one file: the headers of safetensors and GGUF, and which family they are."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.extras import install_command, installed
from qwen_cache.models.family import FAMILIES
from qwen_cache.storage.files import open_file
from qwen_cache.storage.remembered import LONGEST_HEADER
from qwen_cache.text import parse_json

# ---- tensor headers --------------------------------------------------------------------------------------------------
# The headers of safetensors and GGUF files, read without torch: names, dtypes, shapes and places of all tensors.
#
# Nothing in a header is trusted: counts, lengths and offsets are checked against the size of the file before they are
# used, so a hostile file costs neither memory nor time (the reader of the `gguf` package counts up to 2^64). Refused:
# pickles, truncated files, and types of GGML that diffusers does not unpack.

GGUF_MAGIC = b"GGUF"
PICKLES = (".ckpt", ".pt", ".pth", ".bin", ".pkl")
DTYPES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1}
DTYPES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
"""The dtypes of safetensors, and their bytes."""
GGML_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
    30: ("BF16", 1, 2),
}
"""Name, weights per block and bytes per block of the types that diffusers unpacks (quantizers/gguf/utils.py)."""
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
"""The types of GGUF's metadata values, as in `struct`."""
STRING, ARRAY = 8, 9
MOST_TENSORS, MOST_VALUES, MOST_DIMENSIONS = 100_000, 1_000_000, 4  # the 20B transformer has 1,933 tensors
DOWNLOAD = "download the file again"
OTHER_FILE = "use a bf16, fp8, int8_convrot or GGUF file of the model"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    """The name in a safetensors header, such as BF16, or the name of a GGML type, such as Q4_K."""
    shape: tuple[int, ...]
    begin: int
    """The position of its first byte in the file."""
    end: int
    scale: StoredTensor | None = None
    """The scale of an fp8 or int8 weight: one number, or one for each row."""
    group: int = 0
    """The columns of an int8 weight that were rotated together (ConvRot); 0 without rotation."""

    @property
    def is_packed(self) -> bool:
        """True if the weights are in GGML's blocks."""
        return self.dtype not in DTYPES

    def half(self, second: bool) -> StoredTensor:
        """The first or the second half of the rows, and so of the bytes."""
        middle = (self.begin + self.end) // 2
        begin, end = (middle, self.end) if second else (self.begin, middle)
        scale = self.scale.half(second) if self.scale and math.prod(self.scale.shape) > 1 else self.scale
        return replace(self, shape=(self.shape[0] // 2, *self.shape[1:]), begin=begin, end=end, scale=scale)


@dataclass(frozen=True)
class Header:
    """The header of a file."""

    kind: Literal["safetensors", "gguf"]
    tensors: dict[str, StoredTensor]
    metadata: dict[str, Any]


def read_header(path: Path) -> Header:
    """The header of a safetensors or GGUF file, whatever its name; ModelError for another file, or a damaged one."""
    if path.suffix.lower() in PICKLES:
        what = "this is a pickle, which can run any program when it is opened"
        raise ModelError(what, where=path, do="use a .safetensors or .gguf file of the same weights")
    try:
        size = path.stat().st_size
        with open(open_file(path), "rb") as file:
            begin = file.read(8)
            if begin[:4] == GGUF_MAGIC:
                with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                    return _Gguf(path, mapped, size).header()
            length = int.from_bytes(begin, "little")
            if length <= min(size - 8, LONGEST_HEADER):
                return _safetensors(path, parse_json(file.read(length)), 8 + length, size)
    except OSError as error:
        raise ModelError(f"this file cannot be read: {error.strerror}", where=path) from None
    except (ValueError, LookupError, TypeError, AttributeError):
        pass
    what = "neither a safetensors nor a GGUF file, or damaged"
    raise ModelError(what, where=path, found=f"{begin[:8]!r} at its beginning", do=DOWNLOAD)


def _truncated(path: Path, needed: int, size: int) -> NoReturn:
    raise ModelError("the file is truncated", where=path, expected=f"{needed} bytes", found=f"{size}", do=DOWNLOAD)


def _safetensors(path: Path, header: Any, data: int, size: int) -> Header:
    metadata, tensors = header.pop("__metadata__", {}), {}
    for name, entry in header.items():
        dtype, shape, (begin, end) = str(entry["dtype"]), entry["shape"], entry["data_offsets"]
        if not all(type(it) is int and it >= 0 for it in (*shape, begin, end)):
            raise ValueError(name)
        if dtype in DTYPES and end - begin != math.prod(shape) * DTYPES[dtype]:
            raise ValueError(name)
        if data + end > size:
            _truncated(path, data + max(each["data_offsets"][1] for each in header.values()), size)
        tensors[name] = StoredTensor(dtype, tuple(shape), data + begin, data + end)
    return Header("safetensors", tensors, dict(metadata))


class _Gguf:
    """A cursor in a mapped GGUF file, little-endian (ggml/docs/gguf.md)."""

    def __init__(self, path: Path, mapped: mmap.mmap, size: int) -> None:
        self.path, self.mapped, self.size, self.position = path, mapped, size, 4

    def header(self) -> Header:
        version, count, values = self.read("I"), self.read("Q"), self.read("Q")
        if version not in (2, 3) or count > MOST_TENSORS or values > MOST_VALUES:
            raise ValueError(version)
        metadata = {self.string(): self.value(self.read("I")) for _ in range(values)}
        infos = dict(self.info() for _ in range(count))
        alignment = metadata.get("general.alignment", 32)
        if len(infos) != count or not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ValueError(alignment)
        data = -(-self.position // alignment) * alignment
        tensors = {name: replace(it, begin=data + it.begin, end=data + it.end) for name, it in infos.items()}
        if (needed := max((it.end for it in tensors.values()), default=data)) > self.size:
            _truncated(self.path, needed, self.size)
        return Header("gguf", tensors, metadata)

    def read(self, kind: str) -> Any:
        """The next value of this type in `struct`."""
        return self.take(struct.calcsize(f"<{kind}"), kind)[0]

    def take(self, count: int, kind: str | None = None) -> Any:
        begin, self.position = self.position, self.position + count
        if self.position > min(self.size, LONGEST_HEADER):
            _truncated(self.path, self.position, self.size)
        data = self.mapped[begin : self.position]
        return struct.unpack(f"<{kind}", data) if kind else data

    def string(self) -> str:
        return str(self.take(self.read("Q")), "utf-8")

    def value(self, kind: int) -> Any:
        """A metadata value; an array is skipped."""
        if kind == STRING:
            return self.string()
        if kind != ARRAY:
            return self.read(SCALARS[kind])
        of, count = self.read("I"), self.read("Q")
        if of == STRING and count <= MOST_VALUES:
            for _ in range(count):
                self.take(self.read("Q"))
        else:
            self.take(count * struct.calcsize(f"<{SCALARS[of]}"))
        return None

    def info(self) -> tuple[str, StoredTensor]:
        """A tensor's name, and where it is, from the beginning of the data."""
        name, dimensions = self.string(), self.read("I")
        if dimensions > MOST_DIMENSIONS:
            raise ValueError(dimensions)
        shape = tuple(self.read("Q") for _ in range(dimensions))[::-1] or (1,)
        kind, begin = self.read("I"), self.read("Q")
        if kind not in GGML_TYPES:
            raise ModelError(
                "diffusers does not read this quantisation",
                where=f"{self.path}: {name}",
                expected=", ".join(each[0] for each in GGML_TYPES.values()),
                found=f"GGML type {kind}",
                do="use a file in one of these, such as Q4_K_M or Q8_0",
            )
        dtype, weights, size = GGML_TYPES[kind]
        if shape[-1] % weights:
            raise ValueError(shape)
        return name, StoredTensor(dtype, shape, begin, begin + math.prod(shape) // weights * size)


# ---- single file -----------------------------------------------------------------------------------------------------
# A transformer in a single file, of ComfyUI or GGUF: its parameters by their names in diffusers.
#
# Read without torch: safetensors in bf16, fp8, scaled fp8 and int8 (with ConvRot's rotation or not), and GGUF, with or
# without ComfyUI's prefix. Refused, with the reason: URLs, pickles, truncated files, other quantisations, LoRAs, text
# encoders, and transformers of another family or size than the model's config.json says.

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""What ComfyUI's files may have before the name of a parameter."""
OTHER_PARTS = ("text_encoders.", "cond_stage_model.", "vae.", "first_stage_model.")
"""The rest of a whole checkpoint, which is not read: text encoder and VAE are those of the model folder."""
SCALES = (".scale_weight", ".weight_scale")
"""The scale of a weight in ComfyUI's first layout and in its present one (comfy/utils.py, convert_old_quants)."""
ZERO_COND_T = "__index_timestep_zero__"
"""ComfyUI's marker of Qwen-Image-Edit-2511, whose parameters have the names and shapes of 2509 (model_detection.py)."""
MARKER = ".comfy_quant"
IGNORED = (".scale_input", ".input_scale", MARKER, "scaled_fp8", ZERO_COND_T)
"""Scales of activations, which are not quantised here, and markers."""
FP8 = ("F8_E4M3", "F8_E5M2")
INT8 = "I8"
QUANTISED = (*FP8, INT8)
NUMBERS = ("F32", "F16", "BF16")
PARAMETERS = (*NUMBERS, *QUANTISED)
COMFY_FORMATS = {"float8_e4m3fn": FP8, "float8_e5m2": FP8, "int8_tensorwise": (INT8,)}
"""The formats of comfy/quant_ops.py with a scale per tensor or row, and the dtypes of such weights."""
CONVROT_GROUPS = (4, 16, 64, 256)
"""Powers of 4, for which ConvRot has a matrix; 256 where a file names none."""
UNPACKED_TENSORS = {"BF16": 1, "F16": 1, "F32": 1, **dict.fromkeys(FP8, 1), "IQ4_NL": 7, "IQ4_XS": 7}
UNPACKED_TENSORS |= {"Q5_0": 6, "Q5_1": 6}
UNPACKED_OTHERS = 4
"""The memory that unpacking a matrix takes for a moment, in bfloat16 matrices of its size: of diffusers' functions for
GGML's types, 2.0 to 3.6, 5.0 for Q5_0 and Q5_1, 6.1 for IQ4 (tests/test_single_file.py measures them)."""
LONGEST_MARKER = 4096  # bytes of JSON; real ones have about 30
GATE_UP = "img_mlp.gate_up.weight"
GATE_AND_UP = ("img_mlp.gate_layer.weight", "img_mlp.proj.weight")
"""ComfyUI joins these two matrices of Qwen-Image-2.1, the gate's rows first (as in diffusers' single-file loader)."""
BLOCKS = "transformer_blocks."
NOT_A_TRANSFORMER = {
    ".lora_": ("a LoRA", "name the base here; a LoRA goes to `predict --lora` or train.lora.weights"),
    "lora_unet_": ("a LoRA", "name the base here; a LoRA goes to `predict --lora` or train.lora.weights"),
    ".qweight": ("quantised by nunchaku or another program", "use a bf16, fp8 or GGUF file, or its folder"),
    "model.embed_tokens.": ("a text encoder", "text encoder and VAE are those of model.path"),
    "model.layers.": ("a text encoder", "text encoder and VAE are those of model.path"),
    "token_embd.": ("a text encoder", "text encoder and VAE are those of model.path"),
    "decoder.": ("a VAE", "text encoder and VAE are those of model.path"),
}
"""Parts of names that say what a file is instead."""


@dataclass(frozen=True)
class SingleFile:
    """A transformer in a single file. Make one with `open_single_file`."""

    path: Path
    kind: Literal["safetensors", "gguf"]
    tensors: Mapping[str, StoredTensor]
    """The parameters, by their names in diffusers."""

    @property
    def quantization(self) -> str | None:
        """How the weights are quantised: gguf, int8_convrot (with or without rotation) or fp8; None if they are not."""
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        if any(tensor.is_packed for tensor in self.tensors.values()):
            return "gguf"
        return "int8_convrot" if INT8 in dtypes else "fp8" if dtypes & set(FP8) else None

    @property
    def bytes_per_weight(self) -> float:
        """In the matrices of the blocks, as loaded: 8 bits with a float32 scale per row, what is not quantised in
        bf16."""
        matrices = [it for name, it in self.tensors.items() if name.startswith(BLOCKS) and len(it.shape) == 2]
        return sum(map(_bytes_loaded, matrices)) / sum(math.prod(it.shape) for it in matrices)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model's config.json with the quantisation of this file in place of the folder's own."""
        own = {name: value for name, value in config.items() if name != "quantization_config"}
        matrices: dict[str, list[bool]] = {}
        for name, tensor in self.tensors.items():
            if name.startswith(BLOCKS) and len(tensor.shape) == 2:
                layer = name.removeprefix(BLOCKS).partition(".")[2].removesuffix(".weight")
                matrices.setdefault(layer, []).append(tensor.dtype in QUANTISED)
        quantised = {
            "quant_method": self.quantization,
            "modules_to_not_convert": sorted(name for name, stays in matrices.items() if 2 * sum(stays) < len(stays)),
            "bytes_per_weight": self.bytes_per_weight,
            "unpacked_tensors": max(UNPACKED_TENSORS.get(it.dtype, UNPACKED_OTHERS) for it in self.tensors.values()),
        }
        return own | ({"quantization_config": quantised} if self.quantization else {})


def _bytes_loaded(matrix: StoredTensor) -> int:
    weights = math.prod(matrix.shape)
    if matrix.is_packed:
        return matrix.end - matrix.begin
    return weights + 4 * matrix.shape[0] if matrix.dtype in QUANTISED else 2 * weights


def open_single_file(name: str, config: Mapping[str, Any]) -> SingleFile:
    """The transformer in the file `name`, for a model with this config.json; ModelError if it is not that."""
    path = Path(name)
    if not path.is_file():
        what = "model.transformer is a file"
        found = "a URL" if "://" in name else "a folder" if path.is_dir() else "no such file"
        do = {"a URL": "download it first", "a folder": "name a folder with --model"}.get(found)
        raise ModelError(what, where=name, expected="a .safetensors or .gguf file", found=found, do=do)
    header = read_header(path)
    tensors = _parameters(path, header, _comfy_formats(path, header))
    _check_architecture(path, tensors, config)
    if any(name.endswith(ZERO_COND_T) for name in header.tensors) and not config.get("zero_cond_t"):
        raise ModelError(
            "this is not the transformer of the model in model.path: it is of Qwen-Image-Edit-2511",
            where=path,
            expected="zero_cond_t true in config.json",
            found="false",
            do="set model.path, or --model, to Qwen/Qwen-Image-Edit-2511",
        )
    return SingleFile(path, header.kind, tensors)


def check_packages(file: SingleFile | None) -> None:
    """ConfigError if a package is missing that loads this quantisation."""
    if file is not None and file.quantization == "gguf" and installed("gguf") is None:
        what = "gguf weights need a package that is not installed"
        raise ConfigError(what, where=file.path, expected="gguf", do=install_command("gguf"))


# ---- names -----------------------------------------------------------------------------------------------------------


def _parameters(path: Path, header: Header, formats: Mapping[str, Mapping[str, Any]]) -> dict[str, StoredTensor]:
    """The parameters with their scales and rotations, under diffusers' names."""
    prefix = next((it for it in PREFIXES if any(name.startswith(it) for name in header.tensors)), "")
    own = {name.removeprefix(prefix): it for name, it in header.tensors.items() if name.startswith(prefix)}
    for part, (kind, do) in NOT_A_TRANSFORMER.items():
        if any(part in name for name in own):
            raise ModelError(f"this is not a transformer's file but {kind}", where=path, do=do)
    if others := [name for name in header.tensors if not name.startswith((prefix, *OTHER_PARTS))]:
        what = "some tensors have ComfyUI's prefix, others have not"
        raise ModelError(what, where=path, found=min(others), do=DOWNLOAD)
    tensors, scales = {}, {}
    for name, tensor in own.items():
        if ending := next((it for it in SCALES if name.endswith(it)), None):
            scales[f"{name.removesuffix(ending)}.weight"] = tensor
        elif not name.endswith(IGNORED):
            tensors[name] = tensor
    for name, scale in scales.items():
        weight = tensors.get(name)
        rows = weight.shape[0] if weight and weight.shape else 0
        is_matrix = weight is not None and weight.dtype in QUANTISED and len(weight.shape) == 2
        is_scale = scale.dtype in NUMBERS and scale.shape in ((), (1,), (1, 1), (rows,), (rows, 1))
        if weight is None or not is_matrix or not is_scale:
            of = "no such weight" if weight is None else f"{weight.dtype} {weight.shape}"
            of += "" if weight is None else f", a scale of {scale.dtype} {scale.shape}"
            raise ModelError(
                "this scale is not of an fp8 or int8 matrix, with one number for all or one for each row",
                where=f"{path}: {name}",
                found=of,
                do=OTHER_FILE,
            )
        tensors[name] = replace(weight, scale=scale)
    for layer, entry in formats.items():
        name = f"{layer.removeprefix(prefix)}.weight"
        weight = tensors.get(name)
        if weight and weight.dtype in QUANTISED and weight.dtype not in COMFY_FORMATS[entry["format"]]:
            what = "the weight's dtype is not that of ComfyUI's entry about it"
            raise ModelError(what, where=f"{path}: {name}", expected=entry["format"], found=weight.dtype, do=DOWNLOAD)
        if weight and weight.dtype == INT8:
            tensors[name] = replace(weight, group=_group(f"{path}: {name}", weight, entry))
    named = {layer.removeprefix(prefix) for layer in formats}
    for name, tensor in tensors.items():
        if tensor.dtype == INT8 and (tensor.scale is None or name.removesuffix(".weight") not in named):
            lacking = "its scale" if tensor.scale is None else "ComfyUI's entry about its format"
            raise ModelError(f"an int8 weight without {lacking}", where=f"{path}: {name}", do=OTHER_FILE)
    for name in [it for it, tensor in tensors.items() if it.endswith(GATE_UP) and len(tensor.shape) == 2]:
        joined = tensors.pop(name)
        for second, part in enumerate(GATE_AND_UP):
            tensors[name.replace(GATE_UP, part)] = joined.half(bool(second))
    for name, tensor in tensors.items():
        if not tensor.is_packed and tensor.dtype not in PARAMETERS:
            raise ModelError(
                "weights of this dtype are not read",
                where=f"{path}: {name}",
                expected=", ".join(PARAMETERS),
                found=tensor.dtype,
                do=OTHER_FILE,
            )
    return tensors


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_architecture(path: Path, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    """ModelError unless family, width, layers and text width are those of config.json; torch compares the rest."""
    family = next((each for each in FAMILIES if each.transformer == config.get("_class_name")), None)
    if family is None:
        return  # refused with the folder
    width = config["num_attention_heads"] * config["attention_head_dim"]
    expected: dict[str, Any] = {
        "img_in.weight": (width, config["in_channels"]),
        family.text_norm: (config[family.text_width_key],),
    }
    found: dict[str, Any] = {name: tensors[name].shape if name in tensors else None for name in expected}
    expected["blocks"] = config["num_layers"]
    found["blocks"] = len({name.split(".")[1] for name in tensors if name.startswith(BLOCKS)})
    for name, value in expected.items():
        if found[name] != value:
            raise ModelError(
                f"this is not the transformer of the model in model.path: {name}",
                where=path,
                expected=value,
                found="no such tensor" if found[name] is None else found[name],
                do=f"name a file of {family.name}, or its own model with --model",
            )


def _comfy_formats(path: Path, header: Header) -> dict[str, dict[str, Any]]:
    """ComfyUI's entries about quantised layers: those of the header count, else each layer's own tensor.

    ModelError for a format other than fp8 or int8 with a scale per tensor or row.
    """
    layers: dict[str, Any] = {}
    try:
        with open(open_file(path), "rb") as file:
            for name, marker in header.tensors.items():
                if name.endswith(MARKER):
                    file.seek(marker.begin)
                    text = file.read(min(marker.end - marker.begin, LONGEST_MARKER))
                    layers[name.removesuffix(MARKER)] = parse_json(text)
        if of_all := header.metadata.get("_quantization_metadata"):
            layers |= parse_json(of_all)["layers"]
        entries = {name: dict(it if isinstance(it, dict) else {"format": it}) for name, it in layers.items()}
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelError("ComfyUI's quantisation entries cannot be read", where=path, do=DOWNLOAD) from None
    for name, entry in entries.items():
        if not isinstance(kind := entry.get("format"), str) or kind not in COMFY_FORMATS:
            raise ModelError(
                "this quantisation of ComfyUI is not read",
                where=f"{path}: {name}",
                expected=" or ".join(COMFY_FORMATS),
                found=kind if kind else "no format, as in files of older extensions",
                do=OTHER_FILE,
            )
    return entries


def _group(where: str, weight: StoredTensor, entry: Mapping[str, Any]) -> int:
    """The columns that were rotated together, by an entry of ComfyUI, whose values may stand in `params`."""
    params = entry.get("params")
    values = {**(params if isinstance(params, dict) else {}), **entry}
    if (rotates := values.get("convrot", False)) is False:
        return 0
    group = values.get("convrot_groupsize", 256)
    if rotates is not True or type(group) is not int or group not in CONVROT_GROUPS:
        expected = f"a rotation of {', '.join(map(str, CONVROT_GROUPS))} columns"
        found = f"convrot {rotates!r}, convrot_groupsize {group!r}"
        raise ModelError("this rotation is not ConvRot's", where=where, expected=expected, found=found, do=OTHER_FILE)
    if len(weight.shape) != 2 or weight.shape[1] % group:
        found = f"{weight.shape}, rotated by {group}"
        raise ModelError("the columns are no multiple of the rotated group", where=where, found=found, do=DOWNLOAD)
    return group
