"""Models in one file: the headers of safetensors and GGUF, and which family they are."""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Callable, Collection, Mapping
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
OTHER_TEXT_ENCODER = "use a bf16, fp8 or int8_convrot file of the text encoder alone"


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
# A transformer in a single file, of ComfyUI or GGUF, or a text encoder in one of ComfyUI: its parameters by their names
# in diffusers or transformers.
#
# Read without torch: safetensors in bf16, fp8, scaled fp8 and int8 (with ConvRot's rotation or not), and a transformer
# in GGUF, with or without ComfyUI's prefix. Refused, with the reason: URLs, pickles, truncated files, other
# quantisations, LoRAs, and models of another kind, family or size than the model's config.json says.

PREFIXES = ("model.diffusion_model.", "diffusion_model.")
"""Prefixes that ComfyUI's files may have before the name of a parameter."""
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
TEXT_BLOCKS = "language_model.layers."
TEXT_NAMES = {
    "model.visual.": "visual.",
    "visual.": "visual.",
    "model.language_model.": "language_model.",
    "model.": "language_model.",
}
"""How the names of a text encoder begin in files (ComfyUI's of Qwen2.5-VL are older than those of Qwen3-VL), and in
transformers without its `lm_head`; the first that fits counts."""
LM_HEAD = "lm_head."
"""The language model's last layer, which no embedding depends on."""
AS_TEXT_ENCODER = ("a text encoder", "name it as model.text_encoder, or with --text-encoder")
NOT_A_TRANSFORMER = {
    ".lora_": ("a LoRA", "name the base here; a LoRA goes to `predict --lora` or train.lora.weights"),
    "lora_unet_": ("a LoRA", "name the base here; a LoRA goes to `predict --lora` or train.lora.weights"),
    ".qweight": ("quantised by nunchaku or another program", "use a bf16, fp8 or GGUF file, or its folder"),
    "model.embed_tokens.": AS_TEXT_ENCODER,
    "model.layers.": AS_TEXT_ENCODER,
    "model.language_model.": AS_TEXT_ENCODER,
    "token_embd.": ("a text encoder", "text encoder and VAE are those of model.path"),
    "decoder.": ("a VAE", "text encoder and VAE are those of model.path"),
}
"""Parts of names that say what a file is instead."""
NOT_A_TEXT_ENCODER = {
    ".lora_": ("a LoRA", "leave model.text_encoder out"),
    ".qweight": ("quantised by nunchaku or another program", OTHER_TEXT_ENCODER),
    BLOCKS: ("a transformer", "name it as model.transformer, or with --transformer"),
    "decoder.": ("a VAE", "leave model.text_encoder out: the VAE is that of model.path"),
    "text_encoders.": ("a whole checkpoint", OTHER_TEXT_ENCODER),
    ".linear_attn.": ("a Qwen3.5, such as the prompt enhancer of Qwen-Image-2.1", OTHER_TEXT_ENCODER),
}
"""The same of a text encoder's file."""


@dataclass(frozen=True)
class SingleFile:
    """A model in a single file. Make one with `open_single_file` or `open_text_encoder`."""

    path: Path
    kind: Literal["safetensors", "gguf"]
    tensors: Mapping[str, StoredTensor]
    """The parameters, by their names in diffusers, or in transformers without the `lm_head`."""
    blocks: str = BLOCKS
    """How the names of the parameters in its blocks begin."""

    @property
    def quantization(self) -> str | None:
        """How the weights are quantised: gguf, int8_convrot (with or without rotation) or fp8; None if they are not."""
        dtypes = {tensor.dtype for tensor in self.tensors.values()}
        if any(tensor.is_packed for tensor in self.tensors.values()):
            return "gguf"
        return "int8_convrot" if INT8 in dtypes else "fp8" if dtypes & set(FP8) else None

    @property
    def matrices(self) -> dict[str, StoredTensor]:
        """The matrices of the blocks."""
        return {name: it for name, it in self.tensors.items() if name.startswith(self.blocks) and len(it.shape) == 2}

    @property
    def quantised(self) -> set[str]:
        """The weights of the blocks that stay quantised when they are loaded; all others are unpacked."""
        matrices = self.matrices.items()
        return {name for name, it in matrices if name.endswith(".weight") and (it.is_packed or it.dtype in QUANTISED)}

    @property
    def bytes_per_weight(self) -> float:
        """In the matrices of the blocks, as loaded: 8 bits with a float32 scale per row, what is not quantised in
        bf16."""
        matrices = self.matrices.values()
        return sum(map(_bytes_loaded, matrices)) / (sum(math.prod(it.shape) for it in matrices) or 1)

    def config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """The model's config.json with the quantisation of this file in place of the folder's own."""
        own = {name: value for name, value in config.items() if name != "quantization_config"}
        matrices: dict[str, list[bool]] = {}
        for name, tensor in self.matrices.items():
            layer = name.removeprefix(self.blocks).partition(".")[2].removesuffix(".weight")
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
    path = _file(name, "model.transformer", "a .safetensors or .gguf file")
    header = read_header(path)
    tensors = _parameters(path, header, _transformer_names(path, header), OTHER_FILE)
    for joined_name in [it for it, tensor in tensors.items() if it.endswith(GATE_UP) and len(tensor.shape) == 2]:
        joined = tensors.pop(joined_name)
        for second, part in enumerate(GATE_AND_UP):
            tensors[joined_name.replace(GATE_UP, part)] = joined.half(bool(second))
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


def open_text_encoder(name: str, config: Mapping[str, Any]) -> SingleFile:
    """The text encoder in the file `name`, without its `lm_head`, for one with this config.json; ModelError if it is
    not that."""
    path = _file(name, "model.text_encoder", "a .safetensors file")
    header = read_header(path)
    if header.kind != "safetensors":
        what = "text encoders in GGUF are not read"
        raise ModelError(what, where=path, expected="a .safetensors file", found=header.kind, do=OTHER_TEXT_ENCODER)
    _check_kind(path, header.tensors, "text encoder", NOT_A_TEXT_ENCODER)
    tensors = _parameters(path, header, _text_name, OTHER_TEXT_ENCODER)
    _check_text_encoder(path, tensors, config)
    return SingleFile(path, header.kind, tensors, TEXT_BLOCKS)


def _file(name: str, setting: str, expected: str) -> Path:
    path = Path(name)
    if not path.is_file():
        found = "a URL" if "://" in name else "a folder" if path.is_dir() else "no such file"
        do = {"a URL": "download it first", "a folder": "name a folder with --model"}.get(found)
        raise ModelError(f"{setting} is a file", where=name, expected=expected, found=found, do=do)
    return path


def check_packages(file: SingleFile | None) -> None:
    """ConfigError if a package is missing that loads this quantisation."""
    if file is not None and file.quantization == "gguf" and installed("gguf") is None:
        what = "gguf weights need a package that is not installed"
        raise ConfigError(what, where=file.path, expected="gguf", do=install_command("gguf"))


# ---- names -----------------------------------------------------------------------------------------------------------


def _transformer_names(path: Path, header: Header) -> Callable[[str], str | None]:
    """A function that returns the name of a parameter in diffusers; None for a tensor that is not the transformer's."""
    prefix = next((it for it in PREFIXES if any(name.startswith(it) for name in header.tensors)), "")
    own = [name.removeprefix(prefix) for name in header.tensors if name.startswith(prefix)]
    _check_kind(path, own, "transformer", NOT_A_TRANSFORMER)
    if others := [name for name in header.tensors if not name.startswith((prefix, *OTHER_PARTS))]:
        what = "some tensors have ComfyUI's prefix, others have not"
        raise ModelError(what, where=path, found=min(others), do=DOWNLOAD)
    return lambda name: name.removeprefix(prefix) if name.startswith(prefix) else None


def _text_name(name: str) -> str | None:
    """The name in transformers of a text encoder's parameter; None for the `lm_head`."""
    begin = next((it for it in TEXT_NAMES if name.startswith(it)), None)
    return None if name.startswith(LM_HEAD) else TEXT_NAMES[begin] + name.removeprefix(begin) if begin else name


def _parameters(path: Path, header: Header, rename: Callable[[str], str | None], do: str) -> dict[str, StoredTensor]:
    """The parameters with their scales and rotations, under the names that `rename` gives them."""
    tensors: dict[str, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    for stored_name, tensor in header.tensors.items():
        if (name := rename(stored_name)) is None or name.endswith(IGNORED):
            continue
        ending = next((it for it in SCALES if name.endswith(it)), None)
        found, name = (scales, f"{name.removesuffix(ending)}.weight") if ending else (tensors, name)
        if name in found:
            raise ModelError("two tensors are the same parameter", where=f"{path}: {name}", found=stored_name, do=do)
        found[name] = tensor
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
                do=do,
            )
        tensors[name] = replace(weight, scale=scale)
    formats = {rename(f"{layer}.weight"): entry for layer, entry in _comfy_formats(path, header, do).items()}
    for weight_name, entry in formats.items():
        weight, where = tensors.get(weight_name or ""), f"{path}: {weight_name}"
        if weight and weight.dtype in QUANTISED and weight.dtype not in COMFY_FORMATS[entry["format"]]:
            what = "the weight's dtype is not that of ComfyUI's entry about it"
            raise ModelError(what, where=where, expected=entry["format"], found=weight.dtype, do=DOWNLOAD)
        if weight_name and weight and weight.dtype == INT8:
            tensors[weight_name] = replace(weight, group=_group(where, weight, entry, do))
    for name, tensor in tensors.items():
        if tensor.dtype == INT8 and (tensor.scale is None or name not in formats):
            lacking = "its scale" if tensor.scale is None else "ComfyUI's entry about its format"
            raise ModelError(f"an int8 weight without {lacking}", where=f"{path}: {name}", do=do)
        if header.kind == "safetensors" and tensor.dtype not in PARAMETERS:
            raise ModelError(
                "weights of this dtype are not read",
                where=f"{path}: {name}",
                expected=", ".join(PARAMETERS),
                found=tensor.dtype,
                do=do,
            )
    return tensors


# ---- checks ----------------------------------------------------------------------------------------------------------


def _check_kind(path: Path, names: Collection[str], kind: str, others: Mapping[str, tuple[str, str]]) -> None:
    """ModelError if a part of a name says that the file is one of `others`."""
    for part, (other, do) in others.items():
        if any(part in name for name in names):
            raise ModelError(f"this is not a {kind}'s file but {other}", where=path, do=do)


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
    found["blocks"] = _count(tensors, BLOCKS)
    _check_equal(path, "transformer", expected, found, f"name a file of {family.name}, or its own model with --model")


def _check_text_encoder(path: Path, tensors: Mapping[str, StoredTensor], config: Mapping[str, Any]) -> None:
    """ModelError unless vocabulary, widths and layers are those of config.json; torch compares the rest."""
    text, vision = config.get("text_config") or config, config.get("vision_config") or {}
    table, patches = tensors.get("language_model.embed_tokens.weight"), tensors.get("visual.patch_embed.proj.weight")
    rows, width = table.shape if table and len(table.shape) == 2 else (None, None)
    vision_width = patches.shape[0] if patches and patches.shape else None
    sizes: dict[str, tuple[Any, Any]] = {
        "vocabulary": (text.get("vocab_size"), rows),
        "width": (text.get("hidden_size"), width),
        "layers": (text.get("num_hidden_layers"), _count(tensors, TEXT_BLOCKS)),
        "width of the vision tower": (vision.get("hidden_size"), vision_width),
        "layers of the vision tower": (vision.get("depth"), _count(tensors, "visual.blocks.")),
    }
    known = {name: size for name, size in sizes.items() if size[0] is not None}  # others have transformers' defaults
    expected, found = ({name: size[i] for name, size in known.items()} for i in (0, 1))
    do = f"name a file of this model's text encoder, {config.get('model_type')}, or its own model with --model"
    _check_equal(path, "text encoder", expected, found, do)


def _count(tensors: Mapping[str, StoredTensor], blocks: str) -> int:
    return len({name.removeprefix(blocks).partition(".")[0] for name in tensors if name.startswith(blocks)})


def _check_equal(path: Path, kind: str, expected: Mapping[str, Any], found: Mapping[str, Any], do: str) -> None:
    for name, value in expected.items():
        if found[name] != value:
            raise ModelError(
                f"this is not the {kind} of the model in model.path: {name}",
                where=path,
                expected=value,
                found="no such tensor" if found[name] is None else found[name],
                do=do,
            )


def _comfy_formats(path: Path, header: Header, do: str) -> dict[str, dict[str, Any]]:
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
                do=do,
            )
    return entries


def _group(where: str, weight: StoredTensor, entry: Mapping[str, Any], do: str) -> int:
    """The columns that were rotated together, by an entry of ComfyUI, whose values may stand in `params`."""
    params = entry.get("params")
    values = {**(params if isinstance(params, dict) else {}), **entry}
    if (rotates := values.get("convrot", False)) is False:
        return 0
    group = values.get("convrot_groupsize", 256)
    if rotates is not True or type(group) is not int or group not in CONVROT_GROUPS:
        expected = f"a rotation of {', '.join(map(str, CONVROT_GROUPS))} columns"
        found = f"convrot {rotates!r}, convrot_groupsize {group!r}"
        raise ModelError("this rotation is not ConvRot's", where=where, expected=expected, found=found, do=do)
    if len(weight.shape) != 2 or weight.shape[1] % group:
        found = f"{weight.shape}, rotated by {group}"
        raise ModelError("the columns are no multiple of the rotated group", where=where, found=found, do=DOWNLOAD)
    return group
