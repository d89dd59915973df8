"""A training run on the small cache, and its results."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any
from unittest.mock import patch

import jaxtyping
import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers.training_utils import EMAModel
from torch._dynamo.utils import counters
from torch.distributed import TCPStore

from qwen_cache import open_cache
from qwen_cache.settings.load import Config, load_config
from qwen_train import train as training
from qwen_train.data.batches import Batches
from qwen_train.data.samples import Mixture
from qwen_train.flow import NoiseSchedule
from qwen_train.model.compilation import compile_blocks
from qwen_train.run import Launch
from qwen_train.training import checkpoint, prepare
from qwen_train.training.start import starting

from .commands import Result, run
from .processes import popen
from .waiting import HANG, wait_until

LORA = "pytorch_lora_weights.safetensors"
SMALL = {"train.mixed_precision": "no", "train.max_steps": 3, "logging.report_to": "none"}
EVERYTHING_RANDOM = {
    **SMALL,
    "train.batch_size": 2,
    "train.gradient_accumulation_steps": 2,
    "train.caption_dropout": 0.5,
    "train.lora.lora_dropout": 0.3,
    "optimizer.learning_rate": 0.01,
    "lr_scheduler.name": "cosine",
    "lr_scheduler.warmup_steps": 1,
}
"""A run that depends as much as possible on random numbers and state: three steps of two batches."""
IMAGES = {
    **SMALL,
    "train.max_steps": 2,
    "train.validation_split": 0.6,
    "validation.num_images": 2,
    "validation.images_every_steps": 1,
    "validation.num_inference_steps": 2,
    "predict.dtype": "float32",
}


def run_training(*arguments: str | Path, page: bool = False) -> Result:
    """`qwen-train run` without predicting memory, and unless `page` without writing the page of the run.

    They take as long as a short run and have their own tests.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    with patch.object(prepare, "print_memory"), nullcontext() if page else patch.object(training, "renew_report"):
        return run("qwen-train", "run", *arguments)


RUNS: dict[str, Path] = {}
"""The output folders of runs that tests share."""


class Trainer:
    """`qwen-train run` on the small cache, with settings by their dotted names."""

    page = False
    """True if runs write their page."""

    def __init__(self, cache: Path, model: Path, folder: Path) -> None:
        self.cache, self.model, self.folder = cache, model, folder

    def arguments(self, out: str = "out", **changes: Any) -> list[str | Path]:
        settings = {"train.output_dir": str(self.folder / out), **changes.pop("settings", SMALL)}
        settings |= {name.replace("__", "."): value for name, value in changes.items()}
        assignments = [["--set", f"{name}={json.dumps(value)}"] for name, value in settings.items()]
        return ["run", self.cache, "--model", self.model, *itertools.chain(*assignments)]

    def try_(self, *options: str, **changes: Any) -> Result:
        return run_training(*self.arguments(**changes)[1:], *options, page=self.page)

    def __call__(self, *options: str, **changes: Any) -> Path:
        """The output folder of a run that works."""
        result = self.try_(*options, **changes)
        assert result.code == 0, result.stderr
        return self.folder / str(changes.get("out", "out"))

    def once(self, **changes: Any) -> Path:
        """The output folder of a run that works, made for the first test of this process; the tests only read it."""
        key = repr((self.cache, self.model, changes))
        if key not in RUNS:
            RUNS[key] = self(out=f"run-{len(RUNS)}", **changes)
        return RUNS[key]

    def config(self, **changes: Any) -> Config:
        _, cache, _, model, *assignments = self.arguments(**changes)
        return load_config(None, [str(it) for it in assignments[1::2]], cache__path=str(cache), model__path=str(model))

    def prepared(self, **changes: Any) -> training.Prepared:
        """A run that is ready for its first step; without predicting memory, as in `run_training`."""
        with starting(self.config(**changes), Launch()) as start, patch.object(prepare, "print_memory"):
            return training.prepare(start)

    def batches(self, **changes: Any) -> Batches:
        schedule = json.loads((self.model / "scheduler" / "scheduler_config.json").read_text(encoding="utf-8"))
        return Batches(
            Mixture.of(open_cache(self.cache)), self.config(**changes).train, NoiseSchedule.of_config(schedule)
        )


class MixedTrainer(Trainer):
    """`qwen-train run` on a cache, and on a second one with the base as teacher and half the weight in the loss."""

    def __init__(self, cache: Path, taught: Path, model: Path, folder: Path) -> None:
        super().__init__(cache, model, folder)
        self.taught = taught

    def arguments(self, out: str = "out", **changes: Any) -> list[str | Path]:
        caches = [{"path": str(self.cache)}, {"path": str(self.taught), "teacher": True, "loss_weight": 0.5}]
        changes["settings"] = {"train.caches": caches, **changes.get("settings", SMALL)}
        command, _, *options = super().arguments(out, **changes)  # a cache there is in place of all of them
        return [command, *options]

    def config(self, **changes: Any) -> Config:
        _, _, model, *assignments = self.arguments(**changes)
        return load_config(None, [str(it) for it in assignments[1::2]], model__path=str(model))


def two(train: Trainer, *options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """`qwen-train run`, or `program`, in two processes, or in more `processes`."""
    program, processes = changes.pop("program", ["-m", "qwen_train"]), int(changes.pop("processes", 2))
    return connected([*program, *train.arguments(**changes), *options], processes)


def connected(program: Sequence[str | Path], processes: int) -> subprocess.CompletedProcess[str]:
    """A program of Python in processes that find each other as under torchrun, and share their output.

    If one fails, the others are ended.
    """
    argv = list(map(str, [sys.executable, *program]))
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "WORLD_SIZE": f"{processes}",
        "LOCAL_WORLD_SIZE": f"{processes}",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
    with TemporaryFile("w+", encoding="utf-8") as stdout, TemporaryFile("w+", encoding="utf-8") as stderr:
        both = [popen(argv, env=environment, stdout=stdout, stderr=stderr) for environment in environments]
        wait_until(lambda: any(codes := [process.poll() for process in both]) or None not in codes)
        for process in both:
            process.terminate()
        codes = [process.wait(HANG) for process in both]
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess(argv, int(any(codes)), stdout.read(), stderr.read())


def by_two(train: Trainer, *options: str, **changes: Any) -> Path:
    """The output folder of a run in two processes that works."""
    done = two(train, *options, **changes)
    assert done.returncode == 0, done.stderr
    return train.folder / str(changes.get("out", "out"))


def torchrun(train: Trainer, *options: str, **changes: Any) -> subprocess.CompletedProcess[str]:
    """`two` as a user starts it."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    program = changes.pop("program", [Path(sys.executable).parent / "qwen-train"])
    return subprocess.run(
        [*launcher, *program, *map(str, train.arguments(**changes)), *options],
        capture_output=True,
        text=True,
        timeout=HANG,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )


def metrics(out: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def column(out: Path, name: str) -> list[float]:
    """The values of a metric, of the lines that have it: the one before training has no loss."""
    return [line[name] for line in metrics(out) if name in line]


def outcome(out: Path) -> dict[str, object]:
    """The weights, checkpoint and metrics of a finished run, without times."""
    newest = checkpoint.checkpoints(out)[-1][1]
    files = [out / LORA, *sorted(newest.iterdir())]
    curves = _curves(out)
    return {str(path.relative_to(out)): path.read_bytes() for path in files} | curves


def _curves(out: Path) -> dict[str, object]:
    """The curves of training itself, with validation or without."""
    lines = [line for line in metrics(out) if "loss" in line]
    return {name: [line[name] for line in lines] for name in ("step", "loss", "learning_rate", "grad_norm")}


def written(out: Path) -> dict[str, object]:
    """All output of a run without its settings, which name the folder, and times."""
    files = [path for path in out.rglob("*") if path.is_file() and path.name not in ("qwen.yaml", "metrics.jsonl")]
    curves = _curves(out)
    return {str(path.relative_to(out)): path.read_bytes() for path in files if path.suffix != ".html"} | curves


def differences(a: dict[str, object], b: dict[str, object]) -> list[str]:
    """The names under which two outcomes differ."""
    return sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name))


def relative_error(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    error = sum(float((found[name] - expected[name]).square().sum()) for name in expected)
    return math.sqrt(error / sum(float(tensor.square().sum()) for tensor in expected.values()))


def send(monkeypatch: pytest.MonkeyPatch, number: signal.Signals, in_batch: int, times: int = 1) -> None:
    """Send the process a signal during this batch, counted from 0."""
    batches, compute_loss = itertools.count(), training.compute_loss

    def interrupted(*arguments: Any) -> torch.Tensor:
        if next(batches) == in_batch:
            for _ in range(times):
                os.kill(os.getpid(), number)
        return compute_loss(*arguments)

    monkeypatch.setattr(training, "compute_loss", interrupted)


def average_of(steps: list[dict[str, torch.Tensor]], decay: float) -> dict[str, torch.Tensor]:
    """diffusers' moving average of the weights after each step."""
    parameters = {name: torch.nn.Parameter(tensor) for name, tensor in steps[0].items()}
    reference = EMAModel(parameters.values(), decay=decay)
    for weights in steps:
        for name, tensor in weights.items():
            parameters[name].data.copy_(tensor)
        reference.step(parameters.values())
    return dict(zip(parameters, reference.shadow_params, strict=True))


@contextmanager
def compiling(monkeypatch: pytest.MonkeyPatch, backend: Any) -> Iterator[None]:
    """Let runs compile their blocks by this backend; without shape checks, which the compiler cannot see through."""
    torch.compiler.reset()
    counters.clear()
    jaxtyping.config.update("jaxtyping_disable", True)
    monkeypatch.setattr(prepare, "compile_blocks", functools.partial(compile_blocks, backend=backend))
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", False)


def train_compiled(train: Trainer, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]) -> Path:
    """A run with compiled blocks, without the C++ compiler; the test fails if nothing was compiled."""
    with compiling(monkeypatch, "aot_eager"):
        out = train(settings=settings, train__compile=True)
    assert counters["stats"]["unique_graphs"], "nothing was compiled"
    return out
