"""`ui`: this process becomes that of `qwen_train.ui`, which stands above the trainer and imports parts of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from qwen_cache.extras import require
from qwen_cache.options import INPUT, JSON, OUTPUT, argument, command, flag, option
from qwen_cache.terminal import console, is_verbose

FOLDER = argument("FOLDER", "The folder of a project: its images, qwen.yaml, caches and runs.", default=Path())
ALLOW = option(INPUT, "A further folder that may be read and written; repeat it for more.", "FOLDER")
PORT = option(INPUT, "The port on this machine; 0: any that is free.", "PORT", default=8078, min=0)
NO_BROWSER = flag("--no-browser", OUTPUT, "Print the address, and open no browser.")


@command(
    page="howto/use-the-web-ui.md",
    examples=["qwen-cache ui", "qwen-cache ui my-project --allow /mnt/photographs --no-browser"],
)
def ui(
    folder: Path = FOLDER,
    allow: list[Path] | None = ALLOW,
    port: int = PORT,
    no_browser: bool = NO_BROWSER,
    json: bool = JSON,
) -> int:
    """Open a folder in a local web page: correct the data, build, train, watch and generate."""
    for module in ("fastapi", "uvicorn"):
        require(module)
    options = [word for each in allow or () for word in ("--allow", str(each))] + ["--port", str(port)]
    options += ["--no-browser"] * no_browser + ["--json"] * json
    options += ["--quiet"] * console().quiet + ["--verbose"] * is_verbose()
    arguments = [sys.executable, "-P", "-m", "qwen_train.ui", *options, "--", str(folder)]
    if os.name != "nt":
        os.execv(sys.executable, arguments)  # the same process, so that signals reach it
    for name in ("SIGINT", "SIGBREAK"):  # they reach every process of the terminal, and end the other one
        signal.signal(getattr(signal, name), lambda *_: None)
    return subprocess.call(arguments)
