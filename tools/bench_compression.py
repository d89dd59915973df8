"""Measure the ratio and the encoding and decoding speed of compression, on bfloat16 tensors similar to a cache's.

    python tools/bench_compression.py [--repeats 9] [--json]

Latents come from the photographs of scikit-image and scikit-learn by a fixed transform with the statistics of a VAE's:
16 normalised, spatially correlated channels (the first frequencies of 8×8 blocks) and a little noise, packed 2×2.
Embeddings are heavy-tailed, with a scale for each channel and a few outlier channels, like the hidden states of a
language model. Speeds are bytes of the tensor per second of CPU time on one core, medians; every result is decoded and
compared.

Serial reading with zstd is faster than without if the disk is slower than `decoding speed × (1 - 1 / ratio)`.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard
from PIL import Image
from scipy.fft import dctn

from qwen_cache.format.sample import PLANES_ZSTD, TensorSpec, decode, encode

PHOTOGRAPHS = (("skimage", "data/astronaut.png"), ("skimage", "data/coffee.png"), ("skimage", "data/chelsea.png"))
PHOTOGRAPHS += (("sklearn.datasets", "images/china.jpg"), ("sklearn.datasets", "images/flower.jpg"))
PATCH = 8  # pixels per side of a latent position
WIDTH = 3584
SAMPLE = {"image latents": 1.0, "prompt embeddings": 5.0}  # MB in a sample: latents of a target and a control
Words = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]


# ---- tensors to compress ---------------------------------------------------------------------------------------------


def bfloat16(values: Floats) -> Words:
    """Round to nearest, ties to even."""
    bits = np.ascontiguousarray(values, np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def photograph(package: str, name: str, side: int) -> Floats:
    with files(package).joinpath(name).open("rb") as file:
        image = Image.open(file).convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
    return np.asarray(image, np.float32) / 127.5 - 1


def latents(image: Floats, noise: np.random.Generator) -> Words:
    """`[S, 64]`: eight frequencies of brightness and four of each colour difference."""
    n = image.shape[0] // PATCH
    colours = image @ np.array([[0.30, -0.17, 0.50], [0.59, -0.33, -0.42], [0.11, 0.50, -0.08]], np.float32)
    blocks = colours.reshape(n, PATCH, n, PATCH, 3).transpose(0, 2, 4, 1, 3)
    frequencies = dctn(blocks, axes=(-2, -1), norm="ortho")
    low = sorted(((u, v) for u in range(PATCH) for v in range(PATCH)), key=sum)
    channels = [frequencies[:, :, c, u, v] for c, count in ((0, 8), (1, 4), (2, 4)) for u, v in low[:count]]
    z = np.stack(channels).astype(np.float32)
    z = (z - z.mean((1, 2), keepdims=True)) / z.std((1, 2), keepdims=True)
    z += 0.05 * noise.standard_normal(z.shape, np.float32)
    packed = z.reshape(16, n // 2, 2, n // 2, 2).transpose(1, 3, 0, 2, 4).reshape(-1, 64)
    return bfloat16(packed)


def half_flat_latents(side: int) -> Words:
    """Latents of an image whose right half has one colour, and so the same numbers everywhere."""
    words = latents(photograph(*PHOTOGRAPHS[0], side), np.random.default_rng(1))
    grid = words.reshape(side // 16, side // 16, 64)
    grid[:, side // 32 :] = grid[0, -1]
    return words


def embeddings(rows: int, random: np.random.Generator) -> Words:
    scale = np.exp(0.7 * random.standard_normal(WIDTH, np.float32))
    scale[random.choice(WIDTH, 5, replace=False)] *= 100
    return bfloat16(random.standard_t(4, (rows, WIDTH)).astype(np.float32) * scale)


def make_cases(side: int, rows: int) -> dict[str, Words]:
    """The tensors by name; `side` of the images in pixels, `rows` of embeddings."""
    random = np.random.default_rng(0)
    return {
        "image latents": np.concatenate([latents(photograph(*each, side), random) for each in PHOTOGRAPHS]),
        "half-flat image": half_flat_latents(side),
        "prompt embeddings": embeddings(rows, random),
        "normal numbers": bfloat16(random.standard_normal((rows, WIDTH), np.float32)),
    }


# ---- codecs ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Codec:
    encode: Callable[[memoryview], bytes]
    decode: Callable[[bytes, int], Any]


def plain(level: int) -> Codec:
    return Codec(
        lambda data: zstandard.ZstdCompressor(level=level).compress(data),
        lambda stored, _: zstandard.ZstdDecompressor().decompress(stored),
    )


def both_planes(data: memoryview) -> bytes:
    """All low bytes, then all high bytes, in one frame."""
    return zstandard.ZstdCompressor(level=1).compress(np.frombuffer(data, np.uint8).reshape(-1, 2).T.tobytes())


def join_planes(stored: bytes, _: int) -> memoryview:
    low, high = np.frombuffer(zstandard.ZstdDecompressor().decompress(stored), np.uint8).reshape(2, -1)
    words = high.astype("<u2")
    words <<= 8
    words |= low
    return words.data


def decode_ours(stored: bytes, size: int) -> memoryview:
    return decode(memoryview(stored), TensorSpec("BF16", (size // 2,), "", PLANES_ZSTD, len(stored)), "benchmark")


CODECS = {
    "zstd-1": plain(1),
    "zstd-3": plain(3),
    "zstd-1 of both planes": Codec(both_planes, join_planes),
    PLANES_ZSTD: Codec(lambda data: encode(data, 2), decode_ours),
}


def speed(function: Callable[[], object], size: int, repeats: int) -> float:
    """Median GB/s of CPU time."""
    function()
    seconds = []
    for _ in range(repeats):
        begin = time.process_time()
        function()
        seconds.append(time.process_time() - begin)
    return size / max(statistics.median(seconds), 1e-9) / 1e9


def measure(words: Words, codec: Codec, repeats: int) -> dict[str, Any]:
    data = memoryview(words.reshape(-1).view(np.uint8))
    stored = codec.encode(data)
    return {
        "ratio": data.nbytes / len(stored),
        "encode_gb_per_second": speed(lambda: codec.encode(data), data.nbytes, repeats),
        "decode_gb_per_second": speed(lambda: codec.decode(stored, data.nbytes), data.nbytes, repeats),
        "lossless": bytes(codec.decode(stored, data.nbytes)) == bytes(data),
    }


def break_even(results: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ratio and speed of `planes-zstd` for a whole sample, and the disk speed at which it breaks even."""
    size = sum(SAMPLE.values())
    stored = sum(mb / results[name][PLANES_ZSTD]["ratio"] for name, mb in SAMPLE.items())
    milliseconds = sum(mb / results[name][PLANES_ZSTD]["decode_gb_per_second"] for name, mb in SAMPLE.items())
    return {
        "ratio": size / stored,
        "decode_gb_per_second": size / milliseconds,
        "mb_per_second": (size - stored) / milliseconds * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=9, help="runs; the median is reported")
    parser.add_argument("--side", type=int, default=1024, help="side of the images, in pixels")
    parser.add_argument("--rows", type=int, default=700, help="rows of embeddings")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    results = {
        name: {codec: measure(words, CODECS[codec], options.repeats) for codec in CODECS}
        for name, words in make_cases(options.side, options.rows).items()
    }
    lossless = all(result["lossless"] for each in results.values() for result in each.values())
    report = {"machine": platform.machine(), "results": results, "lossless": lossless, "sample": break_even(results)}
    if options.json:
        print(json.dumps(report, indent=1))
    else:
        show(report)
    sys.exit(0 if lossless else 1)


def show(report: dict[str, Any]) -> None:
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    table = Table("", box=SIMPLE, title="ratio · encode GB/s · decode GB/s, one core")
    for codec in CODECS:
        table.add_column(codec, justify="right", no_wrap=True)
    for name, each in report["results"].items():
        rows = (each[codec] for codec in CODECS)
        cells = (f"{r['ratio']:.2f} · {r['encode_gb_per_second']:.2f} · {r['decode_gb_per_second']:.2f}" for r in rows)
        table.add_row(name, *cells)
    console, sample = Console(width=110), report["sample"]
    console.print(table)
    console.print(
        f"A sample gets {sample['ratio']:.2f} times smaller and decodes at {sample['decode_gb_per_second']:.2f} GB/s: "
        f"it loads faster from a disk or network below {sample['mb_per_second']:.0f} MB/s."
    )
    if not report["lossless"]:
        console.print("[bold]A decoded tensor differs from the original.[/bold]")


if __name__ == "__main__":
    main()
