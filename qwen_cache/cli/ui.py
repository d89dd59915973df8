"""`ui`: this process becomes that of `qwen_train.ui`, which stands above the trainer and imports parts of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.terminal import console, is_verbose


def run_ui(folder: Path, allowed: Sequence[Path], port: int, *, browser: bool, as_json: bool) -> int:
    """Become the UI: the same process, so that signals reach it; on Windows, wait for it and return its exit code."""
    for module in ("fastapi", "uvicorn"):
        require(module)
    options = [word for each in allowed for word in ("--allow", str(each))] + ["--port", str(port)]
    options += ["--no-browser"] * (not browser) + ["--json"] * as_json
    options += ["--quiet"] * console().quiet + ["--verbose"] * is_verbose()
    command = [sys.executable, "-P", "-m", "qwen_train.ui", *options, "--", str(folder)]
    if os.name != "nt":
        os.execv(sys.executable, command)
    for name in ("SIGINT", "SIGBREAK"):  # they reach every process of the terminal, and end the other one
        signal.signal(getattr(signal, name), lambda *_: None)
    return subprocess.call(command)
