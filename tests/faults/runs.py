"""A command in a fork of this process, which has imported everything: some 30 ms instead of seconds."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

HANG = 120  # seconds, on a busy machine
TRACEBACK = 1
Program = Callable[[], object]


@dataclass(frozen=True)
class Ended:
    """How a command ended: its exit code (negative: the signal that ended it), and what it printed."""

    code: int
    stdout: str
    stderr: str


def call(arguments: Sequence[str]) -> Program:
    """A command line as a function of this process."""

    def program() -> None:
        from qwen_cache.cli import main as cache
        from qwen_train.cli import main as train

        sys.argv = list(arguments)
        {"qwen-cache": cache, "qwen-train": train}[arguments[0]]()

    return program


def run(program: Program, logs: Path, before: Callable[[], None] = lambda: None) -> Ended:
    """Run `program` in a fork, after `before`."""
    child = os.fork()
    if not child:
        code = TRACEBACK
        try:
            signal.alarm(HANG)
            for number, name in ((1, "stdout"), (2, "stderr")):
                os.dup2(os.open(logs / name, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            before()
            code = exit_code(program)
        finally:
            if sys.exc_info()[0]:
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return Ended(
        status, *((logs / name).read_text(encoding="utf-8", errors="replace") for name in ("stdout", "stderr"))
    )


def exit_code(program: Program) -> int:
    try:
        program()
    except SystemExit as leaving:
        return leaving.code if isinstance(leaving.code, int) else 0 if leaving.code is None else TRACEBACK
    return 0


def restore(saved: Path, folder: Path) -> None:
    """Make `folder` a copy of `saved`, with its times and hard links' contents."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder, symlinks=True)


def fingerprint(folder: Path) -> str:
    """A hash of every name and byte in a folder but those of locks, which name a process."""
    digest = xxhash.xxh3_128()
    for path in sorted(folder.rglob("*")):
        digest.update(f"{path.relative_to(folder)}\0{path.is_dir()}\0".encode())
        if path.is_file() and path.name != ".lock":
            data = path.read_bytes()
            digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
