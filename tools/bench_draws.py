"""Compare K noise draws behind one prefix with K separate passes, for the transformer of Qwen-Image-2.1.

    python tools/bench_draws.py flops [--json]
    python tools/bench_draws.py time [--layers 4] [--repeats 5] [--json]

`flops` counts the products of matrices of the real model (32 layers of width 4096, without data on torch's device
"meta") for a target and n condition images of 1024 x 1024 pixels and 60 text rows: per draw, relative to one of K
separate passes, which are K times the pass of one draw. Backward counts the gradients of activations and weights.
Attention counts whole matrices of scores, also where the causal mask of text leaves half of them out.

`time` measures forward and backward on the CPU, at width 512 with targets and condition images of 16 x 16 tokens. The
two ways alternate in one run, in both orders; they have equal weights and must compute equal losses. Medians are
compared.
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
from collections.abc import Callable
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel

CONDITIONS = (0, 1, 3, 10)
DRAWS = (1, 2, 4, 8)
TEXT = 60
REAL = {"side": 64, "layers": 32, "text_width": 4096}
MEDIUM = {"num_attention_heads": 8, "attention_head_dim": 64, "context_in_dim": 512, "axes_dims_rope": (8, 28, 28)}
Table = dict[str, dict[int, dict[int, float]]]  # by what is measured, then n, then K


def inputs(conditions: int, draws: int, side: int, text_width: int, device: str) -> dict[str, Any]:
    """One sample; K = 1 is the first draw of any other K."""
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return (
            torch.empty(1, *shape, device=device) if device == "meta" else torch.randn(1, *shape, generator=generator)
        )

    rows = [TEXT * (i + 1) // (conditions + 1) for i in range(conditions)]
    images = numbers(conditions * side**2, 64)
    noisy = [numbers(side**2, 64) for _ in range(draws)]
    return {
        "hidden_states": torch.cat([images, *noisy], dim=1),
        "encoder_hidden_states": torch.empty(1, TEXT, text_width, device=device).fill_(0.5),
        "timestep": (torch.arange(1, draws + 1) / 10)[None].to(device),
        "img_shapes": [[(1, side, side)] * (conditions + 1)],
        "image_positions": [rows],
    }


# ---- products of matrices --------------------------------------------------------------------------------------------


def count(layers: int, conditions: int, draws: int) -> tuple[int, int]:
    """FLOPs of the forward and of the backward pass."""
    with torch.device("meta"):
        model = QwenImage21MultiResTransformer2DModel(num_layers=layers)
    model.layout = "packed"
    totals = []
    with FlopCounterMode(display=False) as counter:
        loss = model(**inputs(conditions, draws, REAL["side"], REAL["text_width"], "meta")).sample.sum()
        totals.append(counter.get_total_flops())
        loss.backward()
        totals.append(counter.get_total_flops() - totals[0])
    return totals[0], totals[1]


def flops() -> Table:
    """FLOPs per draw, relative to one pass; all layers but the last are equal, so three are counted."""
    table: Table = {"forward": {}, "backward": {}}
    passes: dict[str, dict[int, float]] = {name: {} for name in table}
    for conditions in CONDITIONS:
        for draws in DRAWS:
            two, three = (count(layers, conditions, draws) for layers in (2, 3))
            forward, backward = (a + (b - a) * (REAL["layers"] - 2) for a, b in zip(two, three, strict=True))
            for name, total in (("forward", forward), ("backward", backward)):
                passes[name].setdefault(conditions, total)  # K = 1 comes first
                row = table[name].setdefault(conditions, {})
                row[draws] = total / draws / passes[name][conditions]
    return table


# ---- time ------------------------------------------------------------------------------------------------------------


def step(model: Any, batch: dict[str, Any]) -> float:
    """Forward and backward; the sum of the draws' mean squares."""
    side = batch["img_shapes"][0][-1][1]
    loss = model(**batch).sample.square().sum() / side**2
    loss.backward()
    return float(loss.detach())


def split_draws(batch: dict[str, Any]) -> list[dict[str, Any]]:
    """The passes of single draws."""
    shapes = batch["img_shapes"][0]
    before = sum(math.prod(shape) for shape in shapes[:-1])
    images, targets = batch["hidden_states"][:, :before], batch["hidden_states"][:, before:]
    draws = zip(targets.split(math.prod(shapes[-1]), dim=1), batch["timestep"].split(1, dim=1), strict=True)
    return [{**batch, "hidden_states": torch.cat([images, draw], dim=1), "timestep": t[:, 0]} for draw, t in draws]


def measure(ways: dict[str, Callable[[], float]], repeats: int) -> dict[str, float]:
    """Median seconds of each way; exits if their losses differ."""
    losses = [way() for way in ways.values()]  # warms up
    if abs(losses[0] - losses[1]) > 1e-4 * abs(losses[0]):
        sys.exit(f"the ways compute different losses: {losses}")
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for repeat in range(repeats):
        for name in list(ways) if repeat % 2 else list(reversed(ways)):
            begin = time.perf_counter()
            ways[name]()
            seconds[name].append(time.perf_counter() - begin)
    return {name: statistics.median(each) for name, each in seconds.items()}


def times(layers: int, repeats: int) -> Table:
    """Milliseconds per draw, and their ratio to separate passes."""
    torch.manual_seed(0)
    model = QwenImage21MultiResTransformer2DModel(num_layers=layers, **MEDIUM).train()
    model.layout = "packed"
    table: Table = {"ms per draw": {}, "ms per pass": {}, "ratio": {}}
    for conditions in CONDITIONS[:3]:
        for draws in DRAWS[:3]:
            batch = inputs(conditions, draws, 16, MEDIUM["context_in_dim"], "cpu")
            singles = split_draws(batch)
            ways = {
                "draws": lambda batch=batch: step(model, batch),
                "passes": lambda singles=singles: sum(step(model, single) for single in singles),
            }
            seconds = measure(ways, repeats)
            for name, value in (
                ("ms per draw", 1e3 * seconds["draws"] / draws),
                ("ms per pass", 1e3 * seconds["passes"] / draws),
                ("ratio", seconds["draws"] / seconds["passes"]),
            ):
                table[name].setdefault(conditions, {})[draws] = value
            print(f"n = {conditions}, K = {draws}: {table['ratio'][conditions][draws]:.3f}", file=sys.stderr)
    return table


# ---- the command -----------------------------------------------------------------------------------------------------


def show(tables: Table, title: str) -> None:
    from rich.console import Console
    from rich.table import Table as RichTable

    for name, rows in tables.items():
        table = RichTable(title=f"{name}: {title}")
        table.add_column("condition images")
        for draws in next(iter(rows.values())):
            table.add_column(f"K = {draws}", justify="right")
        for conditions, row in rows.items():
            table.add_row(
                str(conditions), *(f"{value:.3f}" if value < 10 else f"{value:.0f}" for value in row.values())
            )
        Console(width=100).print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["flops", "time"])
    parser.add_argument("--layers", type=int, default=4, help="of the model whose time is measured")
    parser.add_argument("--repeats", type=int, default=5, help="runs of each way; the median is reported")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    logging.set_verbosity_error()
    if options.what == "flops":
        tables, title = flops(), "FLOPs per draw, relative to a separate pass"
    else:
        tables = times(options.layers, options.repeats)
        machine = f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}"
        title = f"width 512, {options.layers} layers; {machine}"
    print(json.dumps(tables, indent=1)) if options.json else show(tables, title)


if __name__ == "__main__":
    main()
