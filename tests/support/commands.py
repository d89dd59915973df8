"""The two programs as a user runs them, and their results."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from . import processes
from .waiting import HANG

HEAVY = ("torch", "diffusers", "transformers", "accelerate", "peft")
"""Packages that neither a command line nor a reader imports."""


@dataclass(frozen=True)
class Result:
    """The exit code and output of a command."""

    code: int
    stdout: str
    stderr: str


def command(
    program: str, *arguments: str | Path, cwd: Path | None = None, timeout: float = HANG, fresh: bool = True
) -> Result:
    """Run `qwen-cache` or `qwen-train` as a user does, in a process of its own.

    One that computes with a model had better not be `fresh`; any other starts sooner than its imports are shared.
    """
    process = processes.run(
        [Path(sys.executable).parent / program, *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "COLUMNS": "200"},
        fresh=fresh,
    )
    return Result(process.returncode, process.stdout, process.stderr)


def run(program: str, *arguments: str | Path) -> Result:
    """`command` in this process, so that the suite pays for heavy imports once."""
    from contextlib import redirect_stderr, redirect_stdout
    from io import StringIO

    from qwen_cache import cli as cache_cli
    from qwen_train import cli as train_cli

    main = {"qwen-cache": cache_cli.main, "qwen-train": train_cli.main}[program]
    out, err, argv = StringIO(), StringIO(), sys.argv
    sys.argv = [program, *map(str, arguments)]
    try:
        with redirect_stdout(out), redirect_stderr(err), pytest.raises(SystemExit) as exit_:
            main()
    finally:
        sys.argv = argv
    code = exit_.value.code
    return Result(code if isinstance(code, int) else 0 if code is None else 1, out.getvalue(), err.getvalue())


def imported_by(statement: str) -> set[str]:
    """Every word that `statement` prints in a fresh process, and every module that it loads."""
    code = f"import sys; {statement}; print(' '.join(sys.modules))"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(process.stdout.split())


def refused(result: Result, *parts: str) -> None:
    """Exit code 2, a message with all of `parts`, no traceback."""
    assert result.code == 2, result.stderr
    assert "error:" in result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in result.stderr
