"""`python -m tests.simulated_device.run JOBS.json REPORTS.json`: run both programs on the simulated devices.

JOBS.json is a list of `{"program": "qwen-train", "arguments": [...], "capacity": {"0": bytes}, "broken": name}`, the
last two optional. Compiled blocks run their graphs operator by operator. REPORTS.json has for each job the exit code,
the output, all events, the waits of each training step, the peaks of memory, the losses, and how often the
variable-length kernel and convolutions ran. All jobs run in this process, so that it imports and compiles once; what an
earlier job left in memory, such as diffusers' cached tables, is not counted.
"""

from __future__ import annotations

import gc
import itertools
import json
import sys
import traceback
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any
from unittest.mock import patch

from . import backend, simu

ROOT = Path(__file__).parents[2]
VARLEN = "aten::_flash_attention_forward"
CONVOLUTION = "aten::convolution"


class Steps:
    """The training steps of a job: where each one's events end, and the file with its losses."""

    def __init__(self) -> None:
        self.ends: list[int] = []
        self.issued = [backend.issued()]
        self.files: list[Path] = []

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this is open, every call of `MetricsLog.write` ends a step."""
        from qwen_train.training.metrics import MetricsLog

        write = MetricsLog.write

        def marked(log: MetricsLog, *arguments: Any, **options: Any) -> None:
            write(log, *arguments, **options)
            self.ends.append(len(backend.events))
            self.issued.append(backend.issued())
            if Path(log.file.name) not in self.files:
                self.files.append(Path(log.file.name))

        with patch.object(MetricsLog, "write", marked):
            yield

    def waits(self) -> list[list[dict[str, Any]]]:
        """The reasons for which the host waited in each step; the first step begins at the start of the job."""
        begins = [0, *self.ends]
        slices = [backend.events[begin:end] for begin, end in zip(begins, self.ends, strict=False)]
        return [backend.counted([it for it in step if it.kind in backend.SLOW]) for step in slices]

    def launches(self) -> list[dict[str, int]]:
        """How often the devices ran each operator in each step; the first one's begins at the start of the job."""
        return [dict(after - before) for before, after in itertools.pairwise(self.issued)]

    def losses(self) -> list[float]:
        from qwen_train.training.metrics import read_metrics

        return [line["loss"] for file in self.files for line in read_metrics(file) if "loss" in line]


def forget() -> None:
    """Free what the last job kept: accelerate's state is global, and models are full of cycles."""
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()


def run_job(job: dict[str, Any]) -> dict[str, Any]:
    from qwen_train.model import compilation, segments
    from qwen_train.training import prepare

    from .broken import BROKEN

    forget()
    left = {str(i): simu.memory_allocated(i) for i in range(simu.device_count())}
    for device, size in left.items():
        capacity = (job.get("capacity") or {}).get(device)
        backend.set_capacity(int(device), None if capacity is None else capacity + size)
    backend.reset_peaks()
    backend.events.clear()
    steps, varlen_calls, convolutions = Steps(), backend.calls(VARLEN), backend.calls(CONVOLUTION)
    flash = (patch.object(it, "runs_flash", lambda device: device.type == "simu") for it in (segments, compilation))
    compiler = partial(compilation.compile_blocks, backend="aot_eager")
    with ExitStack() as stack:
        for each in (steps.watched(), *flash, patch.object(prepare, "compile_blocks", compiler)):
            stack.enter_context(each)
        stack.enter_context(BROKEN[job.get("broken")]())
        peaks = stack.enter_context(backend.peaks_kept())
        result = call(job["program"], job["arguments"])
    waits = steps.waits()
    for device in range(simu.device_count()):
        simu.synchronize(device)  # so that what is still on its way is judged
    return {
        **result,
        "events": backend.counted(backend.events),
        "waits": waits,
        "launches": steps.launches(),
        "peaks": {
            name: {counter: value - left[name] for counter, value in peak.items()} if name in left else peak
            for name, peak in peaks().items()
        },
        "losses": steps.losses(),
        "varlen_calls": backend.calls(VARLEN) - varlen_calls,
        "convolutions": backend.calls(CONVOLUTION) - convolutions,
    }


def call(program: str, arguments: list[str]) -> dict[str, Any]:
    """One of the programs, in this process; an exception that it does not handle is exit code 1 and a traceback."""
    from qwen_cache import cli as cache_cli
    from qwen_train import cli as train_cli

    main = {"qwen-cache": cache_cli.main, "qwen-train": train_cli.main}[program]
    out, err = StringIO(), StringIO()
    code: Any = 0
    with patch.object(sys, "argv", [program, *map(str, arguments)]), redirect_stdout(out), redirect_stderr(err):
        try:
            main()
        except SystemExit as exit_:
            code = exit_.code
        except Exception:  # noqa: BLE001 (reported)
            traceback.print_exc()
            code = 1
    code = code if isinstance(code, int) else 0 if code is None else 1
    return {"exit_code": code, "stdout": out.getvalue(), "stderr": err.getvalue()}


def main() -> None:
    jobs, reports = map(Path, sys.argv[1:])
    backend.install(ROOT)
    results = [run_job(job) for job in json.loads(jobs.read_text(encoding="utf-8"))]
    reports.write_text(json.dumps(results, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
