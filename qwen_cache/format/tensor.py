"""One tensor: its dtype, shape and hash, and how its bytes are stored."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from qwen_cache.errors import (
    UPGRADE,
    CodecError,
)

PLANES_ZSTD = "planes-zstd"
"""The codec of compressed tensors, see `codec`."""
MAX_RATIO = 100  # of a tensor to its compressed bytes; bounds the memory that a forged header can request
BYTES_PER_ELEMENT = {"BF16": 2, "F16": 2, "F32": 4, "U8": 1}


@dataclass(frozen=True)
class TensorSpec:
    """The dtype (by safetensors' name), shape and xxh3-128 of a tensor, and how it is stored."""

    dtype: str
    shape: tuple[int, ...]
    xxh3_128: str
    codec: str | None = None
    compressed_bytes: int | None = None

    @property
    def element_size(self) -> int:
        return BYTES_PER_ELEMENT[self.dtype]

    @cached_property
    def nbytes(self) -> int:
        return self.element_size * math.prod(self.shape)

    @property
    def stored_bytes(self) -> int:
        """The number of its bytes in a shard."""
        return self.nbytes if self.compressed_bytes is None else self.compressed_bytes

    def to_json(self) -> dict[str, Any]:
        value = {"dtype": self.dtype, "shape": list(self.shape), "xxh3_128": self.xxh3_128}
        return (
            value if self.codec is None else {**value, "codec": self.codec, "compressed_bytes": self.compressed_bytes}
        )


def check_codec(spec: TensorSpec, where: str) -> None:
    """CodecError for an unknown codec, or a tensor of more than `MAX_RATIO` times its stored bytes."""
    if spec.codec is None:
        return
    if spec.codec != PLANES_ZSTD:
        raise CodecError("unknown codec", where=where, expected=PLANES_ZSTD, found=spec.codec, do=UPGRADE)
    if spec.nbytes > MAX_RATIO * spec.stored_bytes:
        found = f"{spec.stored_bytes} for {spec.nbytes}"
        raise CodecError("too few compressed bytes", where=where, expected=f"at least 1 for {MAX_RATIO}", found=found)
