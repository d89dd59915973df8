"""Compute on paper what a training step takes: seconds by device and by way of running a block.

    python tools/roofline.py [--json]

One sample, frozen weights in bfloat16, a LoRA whose own products are left out. A step is the sum of three parts, each
at the rate that a device reaches (`qwen_train/memory/cost.py`): products of matrices (forward, again where a block is
recomputed, and for the gradient of the activations), attention, and the traffic of element-wise kernels. Left out: the
host, which launches the kernels, the optimizer, the loss and the loading of data. So a step takes longer. Nothing is
measured here.
"""

from __future__ import annotations

import argparse
import json
from typing import NamedTuple

from qwen_train.memory.cost import BACKWARD, CARDS, FORWARD, UNITS


class Device(NamedTuple):
    """The rates that a device reaches, as in `qwen_train/memory/cost.py`."""

    products: float  # FLOP/s, bfloat16
    attention: tuple[float, float]  # FLOP/s, flash attention: forward and backward
    memory: float  # bytes/s


DEVICES = {
    name: Device(CARDS[name].products, CARDS[name].attention, CARDS[name].bandwidth)
    for name in ("H100", "RTX 4090", "RTX 3090")
}
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
