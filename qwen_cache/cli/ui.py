"""Terminal front end of `qwen-cache ui`."""

from __future__ import annotations

import webbrowser
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

from qwen_cache.extras import require
from qwen_cache.terminal import console, plural, print_json, print_text, verbatim


def run_ui(folder: Path, allowed: Sequence[Path], port: int, *, browser: bool, as_json: bool) -> int:
    """Open the folder, print the address, and answer until Ctrl-C; return the exit code."""
    for module in ("fastapi", "uvicorn"):
        require(module)
    from qwen_cache.service.http import open_socket
    from qwen_cache.ui.run import address, new_token, only_ui, serve
    from qwen_cache.ui.workspace import Workspace

    workspace, token, token_once = Workspace.open(folder, allowed), new_token(), new_token()
    with only_ui(workspace), open_socket(f"127.0.0.1:{port}", "--port") as listener:
        url = address(listener, token)
        print_json({"url": url}) if as_json else print_text(f"open {url}")
        console().print(f"{verbatim(workspace.folder)}; Ctrl-C ends the UI, and jobs continue", highlight=False)
        if browser:
            Thread(target=webbrowser.open, args=(address(listener, token_once),), daemon=True).start()
        running = serve(workspace, listener, token, token_once)
    if running:
        text = f"{plural(running, 'job')} still running: `qwen-cache ui` shows them again, and continues the queue"
        console().print(text, markup=False)
    return 0
