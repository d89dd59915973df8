"""The headers of safetensors and GGUF files, read without torch: names, dtypes, shapes and places of all tensors.

Nothing in a header is trusted: counts, lengths and offsets are checked against the size of the file before they are
used, so a hostile file costs neither memory nor time (the reader of the `gguf` package counts up to 2^64). Refused:
pickles, truncated files, and types of GGML that diffusers does not unpack.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NoReturn

from qwen_cache.errors import ModelError
from qwen_cache.storage.files import open_file
from qwen_cache.storage.remembered import LONGEST_HEADER
from qwen_cache.text import parse_json

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


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file."""

    dtype: str
    """As in a safetensors header, such as BF16, or the name of a GGML type, such as Q4_K."""
    shape: tuple[int, ...]
    begin: int
    """The position of its first byte in the file."""
    end: int
    scale: StoredTensor | None = None
    """Of an fp8 weight: one number, or one for each row."""

    @property
    def is_packed(self) -> bool:
        """Whether the weights are in GGML's blocks."""
        return self.dtype not in DTYPES

    def half(self, second: bool) -> StoredTensor:
        """The first or the second half of the rows, and so of the bytes."""
        middle = (self.begin + self.end) // 2
        begin, end = (middle, self.end) if second else (self.begin, middle)
        scale = self.scale.half(second) if self.scale and math.prod(self.scale.shape) > 1 else self.scale
        return StoredTensor(self.dtype, (self.shape[0] // 2, *self.shape[1:]), begin, end, scale)


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
