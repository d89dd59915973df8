"""How the bytes of a tensor are stored: as they are, or compressed without loss.

`planes-zstd` splits elements of k bytes into k planes (all first bytes, all second bytes, …) and compresses each
separately with zstandard; a plane that does not get smaller is stored as it is. In bfloat16, the plane of exponents is
worth compressing; the plane of mantissas is noise (`tools/bench_compression.py`).

    stored = k lengths (u64, little-endian), then k planes; a plane of the full length is not compressed

Decoding allocates at most twice the size of the tensor, whatever the compressed bytes claim.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.errors import CodecError
from qwen_cache.format.tensor import TensorSpec

LEVEL = 1  # higher levels are slower and no better on these planes


def encode(data: memoryview, width: int) -> bytes:
    """Compress elements of `width` bytes."""
    import zstandard

    compressor = zstandard.ZstdCompressor(level=LEVEL)
    planes = np.frombuffer(data, np.uint8).reshape(-1, width)
    pieces = []
    for i in range(width):
        plane = np.ascontiguousarray(planes[:, i]).tobytes()
        smaller = compressor.compress(plane)
        pieces.append(smaller if len(smaller) < len(plane) else plane)
    return b"".join([*(len(piece).to_bytes(8, "little") for piece in pieces), *pieces])


def decode(stored: memoryview, spec: TensorSpec, where: str) -> memoryview:
    """The bytes of the tensor; without a codec, `stored` itself. CodecError if they do not decode to its size."""
    if spec.codec is None:
        return stored
    *lower, words = _planes(stored, spec, where)
    words = words.astype(f"<u{spec.element_size}")
    for plane in reversed(lower):  # three times as fast as writing every second byte
        words <<= 8
        words |= plane
    return words.view(np.uint8).data


def _planes(stored: memoryview, spec: TensorSpec, where: str) -> list[npt.NDArray[Any]]:
    import zstandard

    width = spec.element_size
    size = spec.nbytes // width
    lengths = [int.from_bytes(stored[8 * i : 8 * i + 8], "little") for i in range(width)]
    if stored.nbytes != 8 * width + sum(lengths) or any(length > size for length in lengths):
        raise CodecError(
            "the planes do not fit", where=where, expected=f"{width} planes of at most {size} bytes", found=lengths
        )
    planes = []
    position = 8 * width
    for length in lengths:
        piece = stored[position : position + length]
        position += length
        try:
            plane = piece if length == size else zstandard.ZstdDecompressor().decompress(_checked(piece, size), size)
        except zstandard.ZstdError as error:
            raise CodecError(f"a plane cannot be decompressed: {error}", where=where) from None
        if len(plane) != size:
            raise CodecError("a plane has another length", where=where, expected=size, found=len(plane))
        planes.append(np.frombuffer(plane, np.uint8))
    return planes


def _checked(frame: memoryview, size: int) -> memoryview:
    """The frame; ZstdError if it claims another size, which zstandard would allocate."""
    import zstandard

    if (claimed := zstandard.frame_content_size(frame)) != size:
        raise zstandard.ZstdError(f"the frame claims {claimed} bytes, expected {size}")
    return frame
