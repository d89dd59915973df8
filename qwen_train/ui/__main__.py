"""The process of `qwen-cache ui`: python -m qwen_train.ui FOLDER, with the options of that command."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from threading import Thread

from qwen_cache.cli.ui import ALLOW, FOLDER, NO_BROWSER, PORT
from qwen_cache.options import JSON, command, run_app
from qwen_cache.service.http import open_socket
from qwen_cache.terminal import console, plural, print_json, print_text, verbatim
from qwen_train.ui.app import address, new_token, only_ui, serve
from qwen_train.ui.workspace import Workspace


@command("qwen-cache", page="howto/use-the-web-ui.md", examples=())
def run(
    folder: Path = FOLDER,
    allow: list[Path] | None = ALLOW,
    port: int = PORT,
    no_browser: bool = NO_BROWSER,
    json: bool = JSON,
) -> int:
    """Open the folder, print the address, and answer until Ctrl-C; return the exit code."""
    workspace, token, token_once = Workspace.open(folder, allow or ()), new_token(), new_token()
    with only_ui(workspace), open_socket(f"127.0.0.1:{port}", "--port") as listener:
        url = address(listener, token)
        print_json({"url": url}) if json else print_text(f"open {url}")
        console().print(f"{verbatim(workspace.folder)}; Ctrl-C ends the UI, and jobs continue", highlight=False)
        if not no_browser:
            Thread(target=webbrowser.open, args=(address(listener, token_once),), daemon=True).start()
        running = serve(workspace, listener, token, token_once)
    if running:
        text = f"{plural(running, 'job')} still running: `qwen-cache ui` shows them again, and continues the queue"
        console().print(text, markup=False)
    return 0


if __name__ == "__main__":
    run_app(run)
