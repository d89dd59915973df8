"""An experiment on several noise draws of a sample in one pass (`train.noise_draws`): held-out loss against compute.

    python tools/experiment_draws.py [--controls 0 1 3] [--draws 1 2 4] [--seeds 4] [--steps 300] [--batch-size 2]
        [--learning-rate 2e-3] [--quick] [--json]

Trains a tiny random Qwen-Image-2.1 on the demo's photographs (13 edits of about 128² pixels) and measures the loss of
held-out samples, with the noise of `validation`. All weights are trained (`train.method: full`), at one learning rate:
a LoRA of rank 16 on random weights learned much less in as many steps. Ways:

    K = 1, 2, 4     the same number of samples in a step, K noise draws of each
    1, larger batch one draw, and as many samples in a step as come nearest to the FLOPs of the largest K

Every sample has `--controls` controls: 0 is text to image, 1 leaves out the second ones, and further ones are
photographs of other samples, which say nothing about the target. FLOPs are those of forward and backward, as torch
counts them for the samples of each batch; attention counts whole rectangles, causal or not.

Every way runs the same number of steps. `equal compute` reads each curve at the FLOPs that the cheapest way has spent
by its last step, `equal steps` at the last step; `lowest` is the lowest point of a curve. Means and standard errors are
over seeds (order, noise, timesteps); model and held-out samples are the same, so the errors say nothing about other
data.

The variance of the gradient is split by a nested sample: between samples, between timesteps of a sample, and between
noises at a timestep. With the costs of a prefix and a draw it gives the K that minimises the variance at equal compute:

    K* = √(prefix / draw · (timestep + noise) / data)

Found with the defaults, in 8 minutes of CPU time; `equal compute` is that of 300 steps with K = 1:

    controls  way                  FLOPs of a step  loss at equal compute  loss after 300 steps
    0         K = 1                1.00             1.246 ± 0.017          1.246 ± 0.017
              K = 2                1.56             1.293 ± 0.016          1.313 ± 0.025
              K = 4                2.68             1.318 ± 0.008          1.322 ± 0.047
              K = 1, batches of 5  2.48             1.360 ± 0.011          1.504 ± 0.069
    1         K = 1                1.00             1.131 ± 0.035          1.131 ± 0.035
              K = 2                1.45             1.190 ± 0.017          1.120 ± 0.021
              K = 4                2.35             1.237 ± 0.011          1.133 ± 0.023
              K = 1, batches of 5  2.49             1.237 ± 0.014          1.183 ± 0.015
    3         K = 1                1.00             1.101 ± 0.013          1.101 ± 0.013
              K = 2                1.33             1.080 ± 0.024          1.059 ± 0.039
              K = 4                2.00             1.145 ± 0.012          1.043 ± 0.027
              K = 1, batches of 4  2.00             1.209 ± 0.010          1.223 ± 0.027

In place of more steps draws did not pay: at equal compute K = 1 was best with 0 and 1 controls, and with 3 K = 2 was
equal within the error. At twice the learning rate (`--controls 1 3 --draws 1 4 --seeds 3 --learning-rate 4e-3`) K = 4
was behind K = 1, too: 1.112 against 1.029 with one control, 0.993 against 0.924 with three. In place of a larger batch
they did, where samples are few, since that repeats its samples more often and overfits: by about two standard errors
with 0 and 1 controls, clearly with 3; at twice the learning rate by two standard errors with 3, and not with 1.
Timestep and noise made 95 % of the gradient's variance before training, 45 to 63 % after it, and K* fell from between 4
and 6 to about 1. At 1024² noise averages over 4,096 tokens in place of 60, and a trained model may differ.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers.utils import logging
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from qwen_cache.format.cache import Sample
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import Config, load_config
from qwen_train.data.batches import Batch, Batches, NoiseDraw, NoisedSample, collate
from qwen_train.data.samples import open_samples
from qwen_train.flow import NoiseSchedule, sample_u
from qwen_train.training.loss import compute_loss
from qwen_train.training.validation import noised_samples
from qwen_train.weights import load_transformer, prepare_for_training, trainable

TOOLS = Path(__file__).parent
AREA = 128 * 128
HELD_OUT = 0.4  # of 13 targets: enough for a mean, with most left to train
TIMESTEPS, NOISES = 8, 2  # of a sample, in the split of the variance
REAL_CONTROLS = (0, 1, 3, 10)
PARTS = ("data", "timestep", "noise")
READINGS = ("equal_compute", "equal_steps", "lowest")


@dataclass(frozen=True)
class Way:
    draws: int
    batch_size: int
    name: str


@dataclass(frozen=True)
class Point:
    """A point of a run's curve."""

    step: int
    flops: float
    loss: float


# ---- data and model --------------------------------------------------------------------------------------------------


def run_tool(name: str, *arguments: str) -> None:
    subprocess.run([sys.executable, str(TOOLS / name), *arguments], check=True, stdout=subprocess.DEVNULL)


def write_data(demo: Path, out: Path, controls: int) -> None:
    """The demo's samples with this many controls each: their own first, then those of other samples."""
    (out / "target_images").mkdir(parents=True)
    for path in (demo / "target_images").iterdir():
        (out / "target_images" / path.name).write_bytes(path.read_bytes())
    files = {path.stem: path for path in sorted((demo / "control_images").iterdir()) if "_mask" not in path.stem}
    names = sorted(path.stem for path in (demo / "target_images").glob("*.txt"))
    if controls:
        (out / "control_images").mkdir()
    for i, name in enumerate(names):
        own = [files[stem] for stem in (name, f"{name}_control_1") if stem in files]
        others = [files[names[(i + k) % len(names)]] for k in range(1, controls + 1)]
        for number, path in enumerate((own + others)[:controls]):
            stem = f"{name}_control_{number}" if number else name
            (out / "control_images" / (stem + path.suffix)).write_bytes(path.read_bytes())


def build(folder: Path, controls: int) -> Path:
    """The cache of the demo's samples with this many controls."""
    source, out = folder / f"data-{controls}", folder / f"shards-{controls}"
    write_data(folder / "data", source, controls)
    settings = ("--set", f"data.vae_image_size={AREA}", "--set", "cache.dtype=float32")
    command = ["build", str(source), "--out", str(out), "--model", str(folder / "tiny"), *settings]
    program = [sys.executable, "-c", "from qwen_cache.cli import main; main()"]
    subprocess.run([*program, *command], check=True, stdout=subprocess.DEVNULL)
    return out


def settings_of(folder: Path, shards: Path, way: Way, seed: int) -> Config:
    assignments = [
        f"train.noise_draws={way.draws}",
        f"train.batch_size={way.batch_size}",
        f"train.seed={seed}",
        f"train.validation_split={HELD_OUT}",
        "train.method=full",
        "train.layout=packed",
        "train.mixed_precision=no",
        "train.gradient_checkpointing=false",
        "train.caption_dropout=0",
        "train.drop_last=true",  # or the larger batch would often be a small one: there are few samples
    ]
    return load_config(None, assignments, model__path=str(folder / "tiny"), cache__path=str(shards))


def prepare(config: Config) -> tuple[Any, Batches]:
    """The transformer in training, and its batches."""
    model = open_model(config.model.path, ("transformer", "scheduler"), None)
    scheduler = json.loads((model.component("scheduler") / "scheduler_config.json").read_text(encoding="utf-8"))
    transformer = prepare_for_training(load_transformer(model, config), config.train)
    return transformer, Batches(open_samples(config, None), config.train, NoiseSchedule.of_config(scheduler))


# ---- compute ---------------------------------------------------------------------------------------------------------


def count_flops(transformer: Any, batch: Batch) -> int:
    """FLOPs of forward and backward; attention by plain matrix products, the only kernel on CPUs that torch counts."""
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        compute_loss(transformer, batch).backward()
    transformer.zero_grad()
    return int(counter.get_total_flops())


def sample_flops(transformer: Any, batches: Batches, draws: int) -> dict[str, int]:
    """The FLOPs of each trained sample with this many draws, by key. Packed, those of a batch are their sum."""
    found = {}
    for i in batches.training:
        sample = batches.cache[int(i)]
        noised = NoisedSample(sample, tuple(noise_draws(batches, sample, draws, 0)), without_caption=False)
        found[sample.key] = count_flops(transformer, collate([noised], family=batches.family))
    return found


def noise_draws(batches: Batches, sample: Sample, count: int, seed: int) -> Iterator[NoiseDraw]:
    """Draws with timesteps as in training."""
    generator = torch.Generator().manual_seed(seed)
    shape = sample.shape("image_latents")
    for _ in range(count):
        sigma = batches.schedule.sigma(sample_u(generator, batches.config.timestep_sampling), shape[0])
        yield NoiseDraw(sigma, torch.randn(shape, generator=generator))


# ---- training --------------------------------------------------------------------------------------------------------


def held_out_loss(transformer: Any, held_out: Sequence[Batch]) -> float:
    transformer.eval()
    with torch.no_grad():
        loss = statistics.fmean(float(compute_loss(transformer, batch)) for batch in held_out)
    transformer.train()
    return loss


def train(config: Config, options: argparse.Namespace) -> tuple[Any, list[Point]]:
    """The transformer and the curve of one run: AdamW, a constant learning rate, clipping as in `qwen-train run`."""
    transformer, batches = prepare(config)
    flops = sample_flops(transformer, batches, config.train.noise_draws)
    samples = [batches.cache[int(i)] for i in batches.validation]
    held_out = [collate([noised], family=batches.family) for sample in samples for noised in noised_samples(sample)]
    parameters, spent, curve = trainable(transformer), 0, []
    optimizer = torch.optim.AdamW(parameters, lr=options.learning_rate)
    with closing(batches.starting_at(0)) as stream:
        for step in range(options.steps + 1):
            if step % options.every == 0:
                curve.append(Point(step, spent, held_out_loss(transformer, held_out)))
            batch = next(stream)
            spent += sum(flops[key] for key in batch.keys)
            compute_loss(transformer, batch).backward()
            torch.nn.utils.clip_grad_norm_(parameters, config.train.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
    return transformer, curve


def loss_at(curve: Sequence[Point], flops: float) -> float:
    """The loss once this compute was spent, linear between the measured points."""
    for before, after in pairwise(curve):
        if flops <= after.flops:
            part = (flops - before.flops) / (after.flops - before.flops)
            return before.loss + part * (after.loss - before.loss)
    return curve[-1].loss


# ---- the variance of the gradient ------------------------------------------------------------------------------------


def gradient(transformer: Any, noised: NoisedSample, batches: Batches) -> Tensor:
    compute_loss(transformer, collate([noised], family=batches.family)).backward()
    flat = torch.cat([p.grad.flatten() for p in trainable(transformer) if p.grad is not None])
    transformer.zero_grad()
    return flat


def split_variance(transformer: Any, batches: Batches) -> dict[str, float]:
    """The variance of one draw's gradient: between samples, timesteps of a sample, and noises at a timestep."""
    between_noises, between_timesteps, means = [], [], []
    for i in batches.training:
        sample, at_timesteps = batches.cache[int(i)], []
        for t, first in enumerate(noise_draws(batches, sample, TIMESTEPS, int(i))):
            others = noise_draws(batches, sample, NOISES, 1000 * (int(i) + 1) + t)
            each = [
                gradient(transformer, NoisedSample(sample, (NoiseDraw(first.sigma, draw.noise),), False), batches)
                for draw in others
            ]
            between_noises.append(variance(each))
            at_timesteps.append(torch.stack(each).mean(0))
        between_timesteps.append(variance(at_timesteps))
        means.append(torch.stack(at_timesteps).mean(0))
    noise = statistics.fmean(between_noises)
    timestep = statistics.fmean(between_timesteps) - noise / NOISES
    data = variance(means) - statistics.fmean(between_timesteps) / TIMESTEPS
    return {"data": data, "timestep": timestep, "noise": noise}


def variance(vectors: Sequence[Tensor]) -> float:
    """The sum over components of the unbiased variance."""
    return float(torch.stack(list(vectors)).var(dim=0).sum())


def best_draws(found: dict[str, float], prefix: float, draw: float) -> float:
    """The K that minimises (data + (timestep + noise) / K) · (prefix + K · draw)."""
    within = max(0.0, found["timestep"]) + found["noise"]
    return math.sqrt(prefix / draw * within / found["data"]) if found["data"] > 0 else math.inf


# ---- comparing -------------------------------------------------------------------------------------------------------


def ways(options: argparse.Namespace, flops: dict[int, float]) -> list[Way]:
    """The ways to compare; `flops` of a sample by number of draws."""
    largest = max(options.draws)
    larger = round(options.batch_size * flops[largest] / flops[1])
    named = [Way(k, options.batch_size, f"K = {k}") for k in options.draws]
    return [*named, Way(1, larger, f"K = 1, batch of {larger}")] if largest > 1 else named


def experiment(folder: Path, controls: int, options: argparse.Namespace) -> dict[str, Any]:
    shards = build(folder, controls)
    transformer, batches = prepare(settings_of(folder, shards, Way(1, 1, ""), 0))
    counts = sorted({1, 2, *options.draws})
    flops = {k: statistics.fmean(sample_flops(transformer, batches, k).values()) for k in counts}
    draw = flops[2] - flops[1]
    splits = {"before": split_variance(transformer, batches)}
    compared = ways(options, flops)
    curves: dict[str, list[list[Point]]] = {way.name: [] for way in compared}
    for seed in range(options.seeds):
        for way in compared:
            began = time.process_time()
            trained, curve = train(settings_of(folder, shards, way, seed), options)
            curves[way.name].append(curve)
            if "after" not in splits:
                splits["after"] = split_variance(trained, batches)
            took = time.process_time() - began
            print(f"{controls} controls, seed {seed}, {way.name}: {took:.0f} s of CPU time", file=sys.stderr)
    budget = min(curve[-1].flops for each in curves.values() for curve in each)
    start = next(iter(curves.values()))[0][0].loss
    return {
        "controls": controls,
        "samples": {"trained": len(batches.training), "held out": len(batches.validation)},
        "gradient_variance": {
            when: {**split, "best_draws": best_draws(split, flops[1] - draw, draw)} for when, split in splits.items()
        },
        "loss_before": start,
        "gigaflops": budget / 1e9,
        "ways": {
            way.name: {
                "flops_per_step": statistics.fmean(curve[-1].flops / curve[-1].step for curve in curves[way.name]),
                "equal_compute": mean_and_error([loss_at(curve, budget) for curve in curves[way.name]]),
                "equal_steps": mean_and_error([curve[-1].loss for curve in curves[way.name]]),
                "lowest": mean_and_error([min(point.loss for point in curve) for curve in curves[way.name]]),
                "curve": [
                    [points[0].step, *mean_and_error([point.loss for point in points])]
                    for points in zip(*curves[way.name], strict=True)
                ],
            }
            for way in compared
        },
    }


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """The mean, and its standard error over seeds."""
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), error


def compare(options: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_tool("make_tiny_model.py", str(folder / "tiny"), "--variant", "qwen-image-21")
        run_tool("make_demo_data.py", str(folder / "data"))
        found = [experiment(folder, controls, options) for controls in options.controls]
    return {
        "steps": options.steps,
        "seeds": options.seeds,
        "batch_size": options.batch_size,
        "experiments": found,
        "cost_of_a_step_at_real_sizes": {
            str(n): {str(k): (n + k) / (n + 1) for k in options.draws} for n in REAL_CONTROLS
        },
    }


def show(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    for each in report["experiments"]:
        samples = each["samples"]
        title = (
            f"{each['controls']} controls: {samples['trained']} samples trained, {samples['held out']} held out, "
            f"{report['seeds']} seeds; loss before training {each['loss_before']:.3f}"
        )
        table = Table(title=title)
        columns = (
            "",
            "FLOPs of a step, times K = 1",
            f"loss at {each['gigaflops']:.0f} GFLOP",
            f"loss at step {report['steps']}",
            "lowest loss",
        )
        for column in columns:
            table.add_column(column, justify="right" if column else "left")
        cheapest = min(way["flops_per_step"] for way in each["ways"].values())
        for name, way in each["ways"].items():
            losses = ("{:.3f} ± {:.3f}".format(*way[which]) for which in READINGS)
            table.add_row(name, f"{way['flops_per_step'] / cheapest:.2f}", *losses)
        console.print(table)
        for when, split in each["gradient_variance"].items():
            whole = sum(split[part] for part in PARTS)
            parts = ", ".join(f"{part} {100 * split[part] / whole:.0f} %" for part in PARTS)
            console.print(f"variance of the gradient {when} training: {parts}; K* = {split['best_draws']:.1f}")
    console.print("FLOPs of a step at real sizes, times K = 1: (n + K) / (n + 1), in place of K", highlight=False)
    for n, row in report["cost_of_a_step_at_real_sizes"].items():
        costs = ", ".join(f"K = {k}: {cost:.2f}" for k, cost in row.items())
        console.print(f"  n = {n} controls of the target's size: {costs}", highlight=False)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--controls", type=int, nargs="+", default=[0, 1, 3], help="controls of a sample")
    parser.add_argument("--draws", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=25, help="steps between two measurements of the held-out loss")
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--learning-rate", type=float, default=2e-3)
    parser.add_argument("--quick", action="store_true", help="a few steps of two seeds with one control: a smoke run")
    parser.add_argument("--json", action="store_true", help="print one JSON document, and nothing else")
    options = parser.parse_args()
    if options.quick:
        options.controls, options.draws, options.seeds, options.steps, options.every = [1], [1, 2], 2, 4, 2
    return options


def main() -> None:
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    options = parse()
    report = compare(options)
    print(json.dumps(report, indent=1)) if options.json else show(report)


if __name__ == "__main__":
    main()
