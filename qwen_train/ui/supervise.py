"""The process that runs one job: it starts the command, waits for it, and writes down how it ended.

`python -m qwen_train.ui.supervise FOLDER` returns when the job has begun: 0, or 1 if another process has it or it
cannot be started. The supervising process itself has no terminal and no parent, so it outlives the UI. It ignores
signals: they are for the command, which gets none from a terminal. The command inherits the lock, so that a job whose
supervising process was killed still counts as running.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from qwen_cache.storage.files import LockHeldError, locked
from qwen_cache.terminal import VARIABLE
from qwen_train.ui.job import ENDED, LOCK, OUTPUT, PROGRESS, RESULT, STARTED, TRAIN, Job, began, read_job, write_json

NOT_STARTED = 127  # as shells report it


def supervise(folder: Path, on_begun: Callable[[], object]) -> None:
    """Run the job of a folder, unless another process has it or it was started before."""
    try:
        with locked(folder / LOCK) as lock:
            job = read_job(folder)
            if job.state != "queued":
                return
            write_json(folder / STARTED, {"time": time.time()})
            code = _run(job, lock, on_begun)
            write_json(folder / ENDED, {"time": time.time(), "code": code})
    except (LockHeldError, FileNotFoundError):  # another process has it, or has removed it
        return


def _run(job: Job, lock: int, on_begun: Callable[[], object]) -> int:
    # Signals are ignored by a handler, which the command does not inherit: there they do what they do by default. A run
    # saves on SIGUSR1 and generates on SIGUSR2 while it trains; before and after, these must not end it.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    if job.kind == TRAIN:
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_IGN)

    with open(job.folder / OUTPUT, "ab") as errors, open(job.folder / RESULT, "wb") as result:
        try:
            process = subprocess.Popen(
                job.argv,
                stdin=subprocess.DEVNULL,
                stdout=result,
                stderr=errors,
                cwd=job.workplace,
                env=job.command.environ(**{VARIABLE: str(job.folder / PROGRESS)}),
                pass_fds=[lock],
                process_group=0,
            )
        except OSError as error:
            errors.write(f"error: {job.argv[0]}: {error.strerror}\n".encode())
            on_begun()
            return NOT_STARTED
    write_json(job.folder / STARTED, {"time": time.time(), "pid": process.pid, "began": began(process.pid)})
    on_begun()
    return process.wait()


def main() -> None:
    begun, begins = os.pipe()
    if os.fork():
        os.close(begins)
        sys.exit(0 if os.read(begun, 1) else 1)
    os.close(begun)
    supervise(Path(sys.argv[1]), lambda: os.write(begins, b"1"))


if __name__ == "__main__":
    main()
