"""Compare the training time per token, forward and backward, on samples of mixed sizes.

    python tools/bench_transformer.py [--size tiny|medium|real] [--layers N] [--batch-size 4] [--batches 3]
        [--device cuda] [--dtype bfloat16] [--repeats 5] [--json]

All ways have the same weights (random, frozen, with a LoRA) and the same samples: batches that the planner makes from a
wide mixture (0.25 to 2 megapixels, aspect 1:3 to 3:1, 0 to 3 controls, prompts of 20 to 400 tokens; at `tiny` and
`medium` a sixteenth of the pixels and an eighth of the text).

    ideal        out of reach of any mixture: for each sample a batch of its copies, in the stock model, without a mask
    stock        the stock model, one sample at a time
    naive        ours, padded, the same samples in random batches
    padded       ours, padded, in the batches of the planner
    packed       ours, packed, in the batches of `naive`: the composition of a batch does not matter

The ways alternate, in both orders; medians are compared, and every way computes the same loss. `--size real` has the
real width (24 heads of 128) and `--layers` layers: 20 take 27 GB in bfloat16.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import QwenImageTransformer2DModel
from diffusers.utils import logging
from peft import LoraConfig

from qwen_cache.batching import BatchPlan
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.settings.sections import TrainConfig
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel

POOL = 4096  # samples of the mixture that the planner chooses from
LORA = ["to_q", "to_k", "to_v", "to_out.0"]
Way = Callable[[], float]


@dataclass(frozen=True)
class Size:
    """The size of a model, and factors by which samples are smaller than real ones."""

    heads: int
    head_dim: int
    layers: int
    axes: tuple[int, int, int]
    text_width: int
    fewer_pixels: int = 1
    shorter_text: int = 1


SIZES = {
    "tiny": Size(2, 32, 2, (4, 14, 14), 64, 16, 8),
    "medium": Size(8, 64, 4, (8, 28, 28), 512, 16, 8),
    "real": Size(24, 128, 20, (16, 56, 56), 3584),
}


@dataclass(frozen=True)
class Sample:
    """A sample of random numbers: image `[S, 64]`, text `[L, D]`."""

    shapes: list[tuple[int, int, int]]
    image: torch.Tensor
    text: torch.Tensor
    sigma: float

    @property
    def tokens(self) -> int:
        return len(self.image) + len(self.text)


# ---- samples and models ----------------------------------------------------------------------------------------------


def sample_mixture(random: np.random.Generator, size: Size) -> tuple[list[list[tuple[int, int, int]]], list[int]]:
    """Shapes and text lengths of POOL samples."""
    shapes = []
    for _ in range(POOL):
        area = math.exp(random.uniform(math.log(0.25), math.log(2))) * 1024 * 1024 / size.fewer_pixels
        aspect = math.exp(random.uniform(-math.log(3), math.log(3)))
        width, height = calculate_dimensions(round(area), (round(1000 * aspect), 1000))
        image = (1, height // PIXELS_PER_TOKEN, width // PIXELS_PER_TOKEN)
        shapes.append([image] * (1 + int(random.integers(0, 4))))
    texts = random.integers(20, 401, POOL) // size.shorter_text
    return shapes, [max(1, int(text)) for text in texts]


def choose_batches(size: Size, batch_size: int, batches: int) -> list[list[Sample]]:
    """The first batches that the planner makes from the mixture."""
    random = np.random.default_rng(0)
    shapes, texts = sample_mixture(random, size)
    images = [sum(math.prod(shape) for shape in each) for each in shapes]
    plan = BatchPlan(np.array([images, texts]), TrainConfig(batch_size=batch_size, bucketing_window=POOL))

    def sample(i: int) -> Sample:
        generator = torch.Generator().manual_seed(i)
        image = torch.randn(images[i], 64, generator=generator)
        return Sample(shapes[i], image, torch.randn(texts[i], size.text_width, generator=generator), i / POOL)

    return [[sample(plan.sample(p)) for p in plan.batch(k * batch_size)] for k in range(batches)]


def make_models(size: Size, layers: int, device: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """The stock model and ours, with equal weights."""
    config = {
        "num_layers": layers,
        "num_attention_heads": size.heads,
        "attention_head_dim": size.head_dim,
        "joint_attention_dim": size.text_width,
        "axes_dims_rope": size.axes,
    }
    models = []
    for kind in (QwenImageTransformer2DModel, QwenImageMultiResTransformer2DModel):
        torch.manual_seed(0)
        with torch.device(device):
            before = torch.get_default_dtype()
            torch.set_default_dtype(dtype)
            model = kind(**config)
            torch.set_default_dtype(before)
        model.requires_grad_(False)
        model.add_adapter(LoraConfig(r=16, lora_alpha=16, init_lora_weights=True, target_modules=LORA))
        models.append(model.train())
    return models[0], models[1]


# ---- the ways --------------------------------------------------------------------------------------------------------


def step(model: Any, samples: Sequence[Sample]) -> float:
    """Forward and backward of one batch; returns the sum of the samples' mean squares."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype
    image_length, text_length = max(len(s.image) for s in samples), max(len(s.text) for s in samples)
    image = torch.stack([F.pad(s.image, (0, 0, 0, image_length - len(s.image))) for s in samples])
    text = torch.stack([F.pad(s.text, (0, 0, 0, text_length - len(s.text))) for s in samples])
    mask = torch.arange(text_length) < torch.tensor([[len(s.text)] for s in samples])
    velocity = model(
        hidden_states=image.to(device, dtype),
        encoder_hidden_states=text.to(device, dtype),
        encoder_hidden_states_mask=None if mask.all() else mask,
        timestep=torch.tensor([s.sigma for s in samples], device=device, dtype=dtype),
        img_shapes=[s.shapes for s in samples],
        return_dict=False,
    )[0]
    squares = velocity.float().square().sum(dim=(1, 2))
    loss = (squares / torch.tensor([len(s.image) for s in samples], device=device)).sum()
    loss.backward()
    return float(loss.detach())


def make_ways(stock: Any, ours: Any, planned: list[list[Sample]]) -> dict[str, Way]:
    """Every way returns the sum of the losses of all samples."""
    samples = [sample for batch in planned for sample in batch]
    size = len(planned[0])
    order = np.random.default_rng(1).permutation(len(samples))
    at_random = [[samples[i] for i in order[begin : begin + size]] for begin in range(0, len(samples), size)]

    def run(batches: list[list[Sample]], layout: str) -> float:
        ours.layout = layout
        return sum(step(ours, batch) for batch in batches)

    return {
        "ideal": lambda: sum(step(stock, [sample] * size) / size for sample in samples),
        "stock": lambda: sum(step(stock, [sample]) for sample in samples),
        "naive": lambda: run(at_random, "padded"),
        "padded": lambda: run(planned, "padded"),
        "packed": lambda: run(at_random, "packed"),
    }


# ---- measuring -------------------------------------------------------------------------------------------------------


def measure(ways: dict[str, Way], copies: int, device: str, repeats: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds and loss of each way; `ideal` computes everything `copies` times."""

    def synchronize() -> None:
        if device != "cpu":
            torch.cuda.synchronize(device)

    losses = {name: way() for name, way in ways.items()}  # warms up
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways) if repeat % 2 else list(reversed(ways)):
            synchronize()
            begin = time.perf_counter()
            ways[name]()
            synchronize()
            seconds[name].append((time.perf_counter() - begin) / (copies if name == "ideal" else 1))
            print(f"{repeat + 1} of {repeats}: {name}", file=sys.stderr)
    return {name: statistics.median(each) for name, each in seconds.items()}, losses


def compare(options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[options.size]
    dtype = getattr(torch, options.dtype)
    planned = choose_batches(size, options.batch_size, options.batches)
    stock, ours = make_models(size, options.layers or size.layers, options.device, dtype)
    ways = make_ways(stock, ours, planned)
    seconds, losses = measure(ways, options.batch_size, options.device, options.repeats)
    tokens = sum(sample.tokens for batch in planned for sample in batch)
    results = {
        name: {
            "microseconds_per_token": 1e6 * seconds[name] / tokens,
            "times_ideal": seconds[name] / seconds["ideal"],
            "loss": losses[name],
        }
        for name in ways
    }
    shortest, longest = (f(s.tokens for batch in planned for s in batch) for f in (min, max))
    cuda = options.device != "cpu"
    chip = torch.cuda.get_device_name(options.device) if cuda else f"{platform.machine()}, {os.cpu_count()} cores"
    return {
        "machine": f"{chip}, torch {torch.__version__}, {options.dtype}",
        "size": options.size,
        "samples": sum(map(len, planned)),
        "tokens": {"all": tokens, "shortest": shortest, "longest": longest},
        "ways": results,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="medium")
    parser.add_argument("--layers", type=int, help="instead of the layers of the size")
    parser.add_argument("--batch-size", type=int, default=4)
    parser.add_argument("--batches", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way; the median is reported")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    logging.set_verbosity_error()
    report = compare(options)
    losses = [way["loss"] for way in report["ways"].values()]
    report["difference"] = (max(losses) - min(losses)) / abs(losses[0])
    print(json.dumps(report, indent=1)) if options.json else show(report)
    sys.exit(0 if report["difference"] <= (1e-4 if options.dtype == "float32" else 2e-2) else 1)


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    tokens = report["tokens"]
    table = Table(title=f"model of size {report['size']}; {report['machine']}")
    for column in ("", "µs per token", "× ideal"):
        table.add_column(column, justify="right" if column else "left")
    for name, way in report["ways"].items():
        table.add_row(name, f"{way['microseconds_per_token']:.2f}", f"{way['times_ideal']:.3f}")
    Console(width=110).print(
        table,
        f"{report['samples']} samples of {tokens['shortest']} to {tokens['longest']} tokens; losses differ by "
        f"{report['difference']:.1e}",
    )


if __name__ == "__main__":
    main()
