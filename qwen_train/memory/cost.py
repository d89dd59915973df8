"""The seconds of a training step on a card, computed: which of several settings is faster, and by about how much.

A step is a forward pass, and a backward pass with what is recomputed in it. Each takes as long as the slowest of three
that run at the same time: the kernels, the host that launches them, and the bus, over which offloaded blocks and inputs
and the shards of other processes come. Kernels are products of matrices, attention, and the traffic of everything else,
each at a rate that the card reaches. Left out: a LoRA's own products, the optimizer, the loss and the loading of data.
Imports no torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from qwen_cache.format.sample import token_count
from qwen_cache.models.family import family_of_transformer
from qwen_cache.models.hardware import Kind
from qwen_cache.settings.load import Config
from qwen_train.memory.sizes import SampleSize, tokens_of

# ---- cards -----------------------------------------------------------------------------------------------------------


class Card(NamedTuple):
    """The rates that a card reaches."""

    memory: int
    """GB."""
    products: float
    """FLOP/s in bfloat16, with sums in float32."""
    attention: tuple[float, float]
    """FLOP/s of flash attention: forward and backward."""
    bandwidth: float
    """Bytes/s of its memory."""
    bus: float
    """Bytes/s from pinned host memory. Between two cards half of it, since both ways go through the host."""
    in_8_bits: Mapping[Kind, float]
    """How often as fast the products of a quantisation are, with the rounding of their inputs; without those that gain
    nothing there."""


SHARE = 0.85
"""The share of a data sheet's memory bandwidth, assumed: the H100 reaches 0.88 of its 3.35e12."""
PCIE_4, PCIE_5 = 25e9, 54e9
"""Bytes/s of 16 lanes: measured for PCIe 5 (docs/gpu/), the half of it rounded down for PCIe 4."""
HOPPER: dict[Kind, float] = {"fp8_w8a8": 1.6}
ADA: dict[Kind, float] = {"int8_convrot": 1.9, "fp8_w8a8": 1.6}
AMPERE: dict[Kind, float] = {"int8_convrot": 2.0}
"""Assumed, below the ratios of the data sheets; int8 products were slower than bfloat16 on Hopper (sglang #38040)."""


def _of_data_sheet(
    memory: int, teraflops: float, gigabytes: float, in_8_bits: Mapping[Kind, float], bus: float = PCIE_4
) -> Card:
    """A card that reaches of its data sheet what is assumed of an RTX 4090: 0.9 in products and in attention forward,
    0.78 backward."""
    return Card(
        memory,
        0.9e12 * teraflops,
        (0.9e12 * teraflops, 0.78e12 * teraflops),
        SHARE * 1e9 * gigabytes,
        bus,
        in_8_bits,
    )


CARDS: dict[str, Card] = {
    # Products, memory and bus: measured, docs/gpu/NVIDIA-H100-80GB-HBM3.md. Attention of 4,608 tokens: pytorch #142132,
    # the default; backward: FlashAttention-2 in figures of the FlashAttention-3 paper (arXiv 2407.08608).
    "H100": Card(80, 760e12, (329e12, 310e12), 2.964e12, 54.4e9, HOPPER),
    # Products: 0.8 of the data sheet's 312 TFLOP/s. Attention: FlashAttention-2 (arXiv 2307.08691), figures 4 to 6.
    "A100": Card(80, 250e12, (200e12, 170e12), 2.039e12 * SHARE, PCIE_4, {"int8_convrot": 1.2}),
    # The data sheet says 362 TFLOP/s; at its 350 W it is assumed to reach 0.6 of them.
    "L40S": Card(48, 217e12, (200e12, 170e12), 0.864e12 * SHARE, PCIE_4, ADA),
    # The others are assumed by their data sheets: dense TFLOP/s with float32 sums, and GB/s.
    "RTX A6000": _of_data_sheet(48, 155, 768, AMPERE),
    "RTX 5090": _of_data_sheet(32, 210, 1792, ADA, PCIE_5),
    "RTX 4090": _of_data_sheet(24, 165, 1008, ADA),
    "RTX 3090": _of_data_sheet(24, 71, 936, AMPERE),
    "RTX 4080": _of_data_sheet(16, 97.5, 717, ADA),
    "RTX 4070": _of_data_sheet(12, 58.3, 504, ADA),
    "RTX 3060": _of_data_sheet(12, 25.5, 360, AMPERE),
    "RTX 4060": _of_data_sheet(8, 30.2, 272, ADA, PCIE_4 / 2),  # eight lanes
}
NAMES = {
    "H100": r"H[12]00|H800|GH200",
    "A100": r"A[18]00",
    "L40S": r"L40|RTX 6000 Ada",
    "RTX A6000": r"A6000|A40\b",
}
"""Patterns of the driver's names, where the name of the row is not part of them."""
TYPICAL = ("RTX 4060", "RTX 4070", "RTX 4080", "RTX 4090", "RTX 5090", "L40S", "H100")
"""The cards to compute with for a size of memory alone."""


def card_of(name: str | None, memory: float) -> str:
    """The row of `CARDS` for a card by its driver's name; for another one that of a typical card of as many bytes."""
    for row in CARDS:
        if name and re.search(NAMES.get(row, re.escape(row)), name):
            return row
    return max((row for row in TYPICAL if 0.95e9 * CARDS[row].memory <= memory), key=TYPICAL.index, default=TYPICAL[0])


# ---- a block ---------------------------------------------------------------------------------------------------------

UNITS = {  # `python tools/bench_graph.py`, forward and backward: tokens x width x 2 bytes in a block
    "eager": (123.5, 188.3),
    "compiled": (51.0, 56.7),
    "recomputed": (47.3, 116.7),
}
"""The traffic of element-wise kernels; that of a recomputed compiled block counts the repetition as backward."""
FORWARD, BACKWARD = 4, 10
"""FLOPs of attention for a pair of tokens and a channel: 2 and 5 products."""
LAUNCHES = {"eager": 6.4e-3, "compiled": 1.9e-3}
"""Seconds of the host for a pass through a block: a third of a sixtieth of a step at 512², measured (docs/gpu/)."""
UNPACKED = 4
"""Bytes for a weight that is unpacked to bfloat16 for each product: written and read."""
BYTES: dict[Kind, float] = {"none": 2, "int8": 1, "fp8": 1, "int8_convrot": 1, "fp8_w8a8": 1, "nf4": 0.5}
"""The bytes of a weight, without its scales."""


class Work(NamedTuple):
    """The work of a forward pass through one block: FLOPs of products, channels of pairs of tokens, bytes of a unit."""

    products: float
    pairs: float
    unit: float
    passes: float
    """The forward passes before the one that is trained, without gradients."""

    @classmethod
    def of(cls, transformer: Mapping[str, Any], settings: Config, batch: Sequence[SampleSize]) -> Work:
        """The work on a batch. In the 20B family each token sees all of its sample; in a joint sequence text is causal,
        controls see text and themselves, and each draw of the target sees all but the other draws."""
        family, draws = family_of_transformer(dict(transformer)), settings.train.noise_draws
        width = int(transformer["num_attention_heads"]) * int(transformer["attention_head_dim"])
        pairs = 0.0
        for sample in batch:
            target, text = token_count(sample.img_shapes[:1]), sample.text_tokens
            controls = token_count(sample.img_shapes[1:])
            if family.joint_sequence:
                prefix = text + controls
                pairs += text**2 / 2 + controls * prefix + draws * target * (prefix + target)
            else:
                pairs += tokens_of([sample], settings.train, family) ** 2
        tokens = tokens_of(batch, settings.train, family)
        weights = 4 + 9 if family.joint_sequence else 4 + 8  # that a token meets, in widths squared: attention and MLP
        passes = float(settings.train.passes_without_gradients)
        if any(sample.to_generate for sample in batch):
            passes += (settings.train.slider.num_inference_steps - 1) / 2  # on average
        return cls(2 * weights * width**2 * tokens, pairs * width, tokens * width * 2, passes)


# ---- a step ----------------------------------------------------------------------------------------------------------


class Way(NamedTuple):
    """The way in which the blocks are run."""

    recomputed: int
    """The number of blocks that are recomputed."""
    keeps_attention: bool = False
    """True if a recomputed block keeps the output of its attention."""
    offloaded: int = 0
    inputs: float = 0
    """Bytes of the inputs of recomputed blocks that go to host memory and back."""
    processes: int = 1
    """The processes over which weights are sharded."""


def step_seconds(
    transformer: Mapping[str, Any], settings: Config, work: Work, way: Way, card: Card, kind: Kind, block: float
) -> float:
    """The seconds of a step with frozen weights of this `kind`, of which a block has `block` bytes.

    `settings` say what else decides: `train.compile`, `train.method`, `train.quantized_backward`.
    """
    train, layers = settings.train, int(transformer["num_layers"])
    compiled, rate = train.compile is True, card.in_8_bits.get(kind, 1.0)
    backward_rate = rate if train.quantized_backward else 1.0
    is_product = kind in ("int8_convrot", "fp8_w8a8")
    unpack = (block / BYTES[kind]) * (BYTES[kind] + UNPACKED) if kind != "none" else 0.0

    def kernels(products: float, pairs: float, units: float, rate: float, unpacked: float) -> float:
        traffic = (units * work.unit + unpacked) / card.bandwidth
        return work.products * products / (card.products * rate) + pairs + traffic

    attention = (FORWARD * work.pairs / card.attention[0], BACKWARD * work.pairs / card.attention[1])
    unpack_forward = 0.0 if is_product else unpack
    unpack_backward = 0.0 if is_product and train.quantized_backward else unpack
    products_backward = 2 if train.method == "full" else 1
    plain, again = UNITS["compiled" if compiled else "eager"], UNITS["recomputed" if compiled else "eager"]
    kept, repeated = layers - way.recomputed, way.recomputed
    forward = kept * kernels(1, attention[0], plain[0], rate, unpack_forward)
    forward += repeated * kernels(1, attention[0], again[0], rate, unpack_forward)
    backward = kept * kernels(products_backward, attention[1], plain[1], backward_rate, unpack_backward)
    backward += repeated * kernels(products_backward, attention[1], again[1], backward_rate, unpack_backward)
    of_attention = 0.0 if way.keeps_attention else attention[0]
    backward += repeated * kernels(1, of_attention, 0 if compiled else again[0], rate, unpack_forward)

    launches = LAUNCHES["compiled" if compiled else "eager"]
    arriving = way.offloaded * block / card.bus
    copied = (way.offloaded * block + way.inputs) / card.bandwidth  # which kernels have less of
    forward, backward = forward + copied, backward + copied
    if way.processes > 1:  # gathered for each pass
        arriving += layers * block * (way.processes - 1) / way.processes / (card.bus / 2)
    forward = max(forward, layers * launches, arriving, way.inputs / card.bus)  # the bus has two directions
    return (1 + work.passes) * forward + max(backward, (layers + repeated) * launches, arriving + way.inputs / card.bus)
