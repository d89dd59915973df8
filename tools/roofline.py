"""Compute on paper what a training step takes: seconds by device and by way of running a block.

    python tools/roofline.py [--json]

One sample, frozen weights in bfloat16, a LoRA whose own products are left out. A step is the sum of three parts, each
at the rate that a device reaches: products of matrices (forward, again where a block is recomputed, and for the
gradient of the activations), attention, and the traffic of element-wise kernels. Left out: the host, which launches the
kernels, the optimizer, the loss and the loading of data. So a step takes longer. Nothing is measured here; every
assumption is a constant of this file.
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple


class Device(NamedTuple):
    """The rates that a device reaches."""

    products: float  # FLOP/s, bfloat16
    attention: tuple[float, float]  # FLOP/s, flash attention: forward and backward
    memory: float  # bytes/s


SHARE = 0.85  # of a data sheet's memory bandwidth, assumed: the H100 reaches 0.88 of its 3.35e12
DEVICES = {
    # Products and memory: measured, docs/gpu/NVIDIA-H100-80GB-HBM3.md. Attention of 4,608 tokens: pytorch #142132, the
    # default; backward: FlashAttention-2 in figures of the FlashAttention-3 paper (arXiv 2407.08608).
    "H100": Device(760e12, (329e12, 310e12), 2.964e12),
    # Products: 0.9 of the data sheets' 165 and 71 TFLOP/s (float32 sums); attention: about that, backward a little
    # less. All assumed, none measured. Memory: data sheets, 1,008 and 936 GB/s.
    "RTX 4090": Device(150e12, (150e12, 130e12), 1.008e12 * SHARE),
    "RTX 3090": Device(64e12, (60e12, 52e12), 0.936e12 * SHARE),
}
UNITS = {  # `python tools/bench_graph.py`, forward and backward: tokens x width x 2 bytes in a block
    "eager": (123.5, 188.3),
    "compiled": (51.0, 56.7),
    "recomputed": (47.3, 116.7),
}
FORWARD, BACKWARD = 4, 10  # FLOPs of attention for a pair of tokens and a channel: 2 and 5 products
IMAGE = 64 * 64  # tokens of 1024 x 1024 pixels


class Model(NamedTuple):
    """The published configuration of a transformer."""

    width: int
    blocks: int
    weights: int  # which a token meets in a block, in widths squared: attention and MLP


QWEN_IMAGE = Model(3072, 60, 4 + 8)  # each token meets the linear layers of its own stream
QWEN_IMAGE_21 = Model(4096, 32, 4 + 9)  # a gated MLP of three layers, three widths wide


class Case(NamedTuple):
    """A sample: its tokens, and the pairs of tokens that attention computes."""

    model: Model
    tokens: int
    pairs: int


def everything(model: Model, tokens: int) -> Case:
    """Every token attends to every token."""
    return Case(model, tokens, tokens**2)


def with_prefix(model: Model, text: int, reference: int, target: int) -> Case:
    """Text is causal, the reference attends to text and itself, the target to everything."""
    tokens = text + reference + target
    return Case(model, tokens, text**2 // 2 + reference * (text + reference) + target * tokens)


CASES = {  # texts of 250, 450 and 350 tokens, assumed: a caption, and instructions with what an encoder makes of images
    "Qwen-Image, text to image, 1024²": everything(QWEN_IMAGE, 250 + IMAGE),
    "Qwen-Image-Edit-2511, one control, 1024²": everything(QWEN_IMAGE, 450 + 2 * IMAGE),
    "Qwen-Image-2.1, one reference, 1024²": with_prefix(QWEN_IMAGE_21, 350, IMAGE, IMAGE),
}
WAYS = {  # the units; how often products and attention run forward
    "eager": ("eager", 2, 2),
    "one graph per block": ("recomputed", 2, 2),
    "+ attention kept": ("recomputed", 2, 1),
    "no block recomputed": ("compiled", 1, 1),
}


def parts(case: Case, device: Device, way: str) -> tuple[float, float, float]:
    """Seconds of products, of attention and of element-wise kernels."""
    units, products, attention = WAYS[way]
    (width, blocks, weights), (forward, backward) = case.model, UNITS[units]
    product = 2 * weights * width**2 * case.tokens * blocks
    pairs = case.pairs * width * blocks
    again = products - 1 if units == "eager" else 0  # compiled, it is counted in backward
    traffic = (forward * (1 + again) + backward) * case.tokens * width * 2 * blocks
    scores = pairs * (FORWARD * attention / device.attention[0] + BACKWARD / device.attention[1])
    return product * (products + 1) / device.products, scores, traffic / device.memory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    report = {
        case: {way: {name: parts(CASES[case], device, way) for name, device in DEVICES.items()} for way in WAYS}
        for case in CASES
    }
    if parser.parse_args().json:
        print(json.dumps(report, indent=1))
        return
    for case, ways in report.items():
        print(f"\n| {case} | {' | '.join(DEVICES)} |\n| --- |{' --- |' * len(DEVICES)}")
        for way, devices in ways.items():
            cells = (f"{sum(each):.2f} ({' + '.join(f'{part:.2f}' for part in each)})" for each in devices.values())
            print(f"| {way} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
