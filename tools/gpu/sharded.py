"""A training step on two GPUs with FSDP2: its time, and the memory of the first against the prediction for each.

The processes are started by torchrun and run this file. A few blocks are enough: each is gathered like any other.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import torch
from accelerate import Accelerator
from bench_memory import make_model, random_batch

from qwen_cache.settings.load import load_config
from qwen_train.memory.prediction import predict_memory
from qwen_train.model.combinations import with_layout
from qwen_train.model.placement import held_bytes, wrap
from qwen_train.run import Launch
from qwen_train.training.loss import compute_loss
from qwen_train.training.optimizers import make_optimizer
from qwen_train.training.processes import connect, leave
from qwen_train.weights import compute_dtype, trainable

from . import models
from .measure import ROOT, SIMULATED, Card, Cases, Row, UnavailableError, forget, peaks, timed

PROCESSES = 2
BLOCKS = 12
KINDS = {"bf16": "none", "int8": "int8", "nf4": "nf4", "int8_convrot": "int8_convrot"}
REPEATS = 5
"""The same number in each process, which wait for each other."""
SECONDS = 120
"""The limit of one case."""


def cases(part: str, card: Card) -> Cases:
    for name, kind in KINDS.items():
        yield f"FSDP2, {BLOCKS} blocks, {name}", lambda kind=kind: measure(kind, card)


def measure(kind: str, card: Card) -> Row:
    """The row of the first process; UnavailableError where there is one GPU."""
    if card.device.type == SIMULATED or torch.accelerator.device_count() < PROCESSES:
        raise UnavailableError(f"it needs {PROCESSES} GPUs, and there is one")
    return launched(kind, small=card.small)


def launched(kind: str, *, small: bool) -> Row:
    """The row of the first of two processes; RuntimeError with the last line of what they say if one fails."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(PROCESSES)]
    paths = os.pathsep.join([str(ROOT / "tools"), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *torchrun, "-m", "gpu.sharded", kind, *(["--small"] if small else [])],
        env=os.environ | {"PYTHONPATH": paths},
        cwd=ROOT,
        timeout=SECONDS,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("".join(line for line in done.stderr.splitlines() if "Error" in line)[-400:])
    row: Row = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def main(kind: str, *options: str) -> None:
    """A process of `launched`; the first one prints the row."""
    connect(Launch.of_environment())
    accelerator = Accelerator(mixed_precision="bf16")
    device = accelerator.device
    card = Card(device, "--small" in options, 0)
    config = models.config_of("20b", card, 4 if card.small else BLOCKS)
    settings = with_layout(load_config(None, ["train.fsdp=true", f"model.quantization={kind}"]), device)
    sample = models.edit("20b", card, (1024, 1024), (1024, 1024))
    on_device: Any = "cpu" if device.type == "cpu" else "accelerator"
    predicted = predict_memory(config, settings, [sample], on_device, processes=PROCESSES)
    dtype = compute_dtype(settings.train)
    batch = random_batch(config, settings, [sample]).to(device, dtype)
    model = wrap(accelerator, make_model(config, settings, str(device), later=True), settings.train)
    held, whole = held_bytes(model)
    parameters = trainable(model)
    optimizer, _ = make_optimizer(settings, parameters)

    def step() -> None:
        compute_loss(model, batch).backward()
        accelerator.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    step()  # allocates the optimizer's state
    row: Row = {}
    if device.type != "cpu":  # which counts no bytes: the test of this file
        forget(card)
        row = {**timed(step, card, least=REPEATS, most=REPEATS), **peaks(card)}
    if accelerator.is_main_process:
        row |= {"blocks": config["num_layers"], "held": held, "whole": whole}
        row |= {"predicted": predicted.total - predicted.reserved, "predicted_reserved": predicted.total}
        print(json.dumps(row), flush=True)
    leave(accelerator)


if __name__ == "__main__":
    main(*sys.argv[1:])
