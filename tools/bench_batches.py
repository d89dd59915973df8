"""Measure padding on a wide mixture of sizes: for random batches, and for those that `qwen-train` plans.

    python tools/bench_batches.py

The mixture: images of 0.25 to 2 megapixels and 1:3 to 3:1, up to three controls, the first with the size of its target,
prompts of 20 to 400 tokens; each control is also in the text, with about 384² pixels, as in Edit-Plus. All numbers
except the planning time are computed, and the same on every machine.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np

from qwen_cache.batching import BatchPlan, IntArray, Summary
from qwen_cache.settings.sections import TrainConfig


def wide_mixture(samples: int, seed: int = 0) -> IntArray:
    """`[2, N]`: image and text tokens."""
    random = np.random.default_rng(seed)
    shape = (4, samples)
    area = np.exp(random.uniform(np.log(0.25e6), np.log(2e6), shape))
    ratio = np.exp(random.uniform(-np.log(3), np.log(3), shape))
    area[1], ratio[1] = area[0], ratio[0]
    controls = random.integers(0, 4, samples)
    which = np.arange(4)[:, None]
    image = sides(area, ratio, 32) * 4 * (which <= controls)  # a token is 16×16 pixels
    in_text = sides(np.full(shape, 384.0**2), ratio, 28) * ((which > 0) & (which <= controls))
    return np.stack([image.sum(0), in_text.sum(0) + random.integers(20, 401, samples)])


def sides(area: Any, ratio: Any, unit: int) -> IntArray:
    """Width times height, in squares of `unit` pixels."""
    product: IntArray = np.rint(np.sqrt(area * ratio) / unit) * np.rint(np.sqrt(area / ratio) / unit)
    return product.astype(np.int64)


def summary(tokens: IntArray, **settings: Any) -> Summary:
    return BatchPlan(tokens, TrainConfig(**settings)).summary()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=65536, help="samples to measure padding with")
    parser.add_argument("--timed", type=int, default=1_000_000, help="samples to measure the planning time with")
    arguments = parser.parse_args()
    tokens = wide_mixture(arguments.samples)
    windows = [1, *(512 << i for i in range(6))]
    print(f"padding of {arguments.samples:,} samples, {tokens.sum(0).mean():,.0f} tokens each on average\n")
    print("| | " + " | ".join("random" if window == 1 else f"window {window}" for window in windows) + " |")
    print("|---|" + "---:|" * len(windows))
    for settings in [{"batch_size": size} for size in (4, 8, 16)] + [{"max_tokens": n} for n in (65_536, 262_144)]:
        summaries = [summary(tokens, **settings, bucketing_window=window) for window in windows]
        ((name, value),) = settings.items()
        print(f"| {name} {value:,} | " + " | ".join(f"{100 * each.padding:.1f} %" for each in summaries) + " |")
        if name == "max_tokens":
            filled = (f"{100 * each.tokens / value:.0f} % full" for each in summaries)
            print("| its batches | " + " | ".join(filled) + " |")
    packed = summary(tokens, max_tokens=262_144, layout="packed")
    print(f"\npacked, max_tokens 262,144: padding {100 * packed.padding:.1f} %, ", end="")
    print(f"batches {100 * packed.tokens / 262_144:.0f} % full")
    many = wide_mixture(arguments.timed)
    for settings in ({"batch_size": 8}, {"max_tokens": 262_144}):
        plan, begin, done = BatchPlan(many, TrainConfig(**settings)), time.perf_counter(), 0
        while done < plan.in_epoch:
            done += len(plan.batch(done))
        seconds = time.perf_counter() - begin
        print(f"planning an epoch of {arguments.timed:,} samples with {settings}: {seconds:.1f} s")


if __name__ == "__main__":
    main()
