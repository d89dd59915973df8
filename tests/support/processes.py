"""Programs in two processes that find each other as under torchrun, forked from one that has imported everything.

Importing torch, diffusers and transformers takes longer than a short run. The process that forks is started once, with
nothing but imports: after a backward pass torch does not fork.
"""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from multiprocessing import connection, get_context
from multiprocessing.process import BaseProcess
from pathlib import Path

from torch.distributed import TCPStore

from .waiting import HANG

PRELOADED = [
    "tests.support.runs",
    "qwen_train.cli.app",
    "diffusers.models.transformers.transformer_qwenimage",
    "diffusers.models.transformers.transformer_qwenimage21",
    "peft",
]


def in_two_processes(program: Path, arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a Python program in two processes that share their output; if one fails, the other is ended.

    `folder` is for the output's files.
    """
    context = get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        **{name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": "1",
        "COLUMNS": "200",
    }
    environments = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    outputs = folder / "stdout", folder / "stderr"
    processes: list[BaseProcess] = [
        context.Process(target=_run, args=(program, arguments, outputs, environment)) for environment in environments
    ]
    for path in outputs:
        path.write_bytes(b"")
    for process in processes:
        process.start()
    code = int(any(_wait(processes)))
    stdout, stderr = (path.read_text(encoding="utf-8") for path in outputs)
    return subprocess.CompletedProcess([str(program), *arguments], code, stdout, stderr)


def _wait(processes: list[BaseProcess]) -> list[int]:
    """The exit codes; the first failure ends the others, as under torchrun."""
    running = list(processes)
    while running:
        ended = connection.wait([process.sentinel for process in running], HANG)
        assert ended, "the processes hang"
        running = [process for process in running if process.sentinel not in ended]
        for process in processes:
            if process.sentinel in ended:
                process.join()
        if any(process.exitcode for process in processes):
            for process in running:
                process.terminate()
    return [process.exitcode or 0 for process in processes]


def _run(program: Path, arguments: list[str], outputs: tuple[Path, Path], environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)
    for descriptor, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
    sys.argv = [str(program), *arguments]
    runpy.run_path(str(program), run_name="__main__")
