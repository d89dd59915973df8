"""The UI of a folder in this process, as its own pages reach it."""

from __future__ import annotations

import hmac
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import uvicorn
from starlette.testclient import TestClient

from qwen_cache.service.http import address_of, open_socket
from qwen_train.ui import jobs
from qwen_train.ui.app import make_app
from qwen_train.ui.jobs import Checks, Queue
from qwen_train.ui.workspace import Workspace

from .waiting import HANG, wait_until

PORT, TOKEN, ONCE = 8078, "a-token", "for-one-use"
ORIGIN = f"http://127.0.0.1:{PORT}"
PROGRAM = {"Authorization": f"Bearer {TOKEN}"}
"""The headers of a request by a program."""
OWN = PROGRAM | {"Origin": ORIGIN, "Sec-Fetch-Site": "same-origin"}
"""The headers of a request by a page of the UI."""


@contextmanager
def attentive() -> Iterator[None]:
    """Queues that look more often at what has ended, so that tests wait less."""
    with patch.object(jobs, "PAUSE", 0.15):
        yield


@contextmanager
def opened(folder: Path, *allowed: Path) -> Iterator[TestClient]:
    """A client with the rights of a page; the queue of the folder runs inside the block."""
    workspace = Workspace.open(folder, allowed)
    with attentive(), Queue(workspace.folder) as queue, closing(Checks(workspace.folder)) as checks:
        app = make_app(workspace, queue, checks, TOKEN, ONCE)
        yield TestClient(app, base_url=ORIGIN, headers=OWN, raise_server_exceptions=False)


@contextmanager
def served(folder: Path, listen: str = "127.0.0.1:0", token: str = TOKEN) -> Iterator[str]:
    """The address of a UI that a browser opens with `#token=`; its working directory stays that of the test."""
    workspace, listener = Workspace.open(folder), open_socket(listen)
    with attentive(), Queue(workspace.folder) as queue, closing(Checks(workspace.folder)) as checks:
        app = make_app(workspace, queue, checks, token, ONCE)
        server = uvicorn.Server(uvicorn.Config(app, ws="none", lifespan="off", log_config=None))
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield address_of(listener)
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def running(folder: Path) -> Iterator[tuple[str, int]]:
    """The address, with its token, and the process of `qwen-cache ui`."""
    program = Path(sys.executable).parent / "qwen-cache"
    arguments = [program, "ui", folder, "--port", "0", "--no-browser", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, env=environment) as ui:
        assert ui.stdout is not None
        try:
            yield json.loads("".join(ui.stdout.readline() for _ in range(3)))["url"], ui.pid
        finally:
            ui.send_signal(signal.SIGINT)
        assert ui.wait(HANG) == 0


def enter(page: Any, address: str, path: str = "/", token: str = TOKEN) -> None:
    """Open a page of the UI with the token, until its scripts have begun."""
    page.goto(f"{address}{path}#token={token}")
    page.wait_for_selector("body[data-folder]")


def signed(path: str) -> str:
    """The address with the key that opens a path, as `token.js` makes it."""
    return f"/signed/{hmac.new(TOKEN.encode(), path.encode(), 'sha256').hexdigest()}{path}"


class SourceRequests:
    """The requests of a window of the Data page with a source."""

    def __init__(self, client: TestClient, source: str = "data") -> None:
        self.client, self.source = client, source

    def get(self, path: str = "", status: int = 200, **query: Any) -> Any:
        answer = self.client.get(f"/api/data{path}", params={"source": self.source} | query)
        assert answer.status_code == status, answer.text
        return answer.json() if answer.headers["content-type"] == "application/json" else answer

    def post(self, path: str, status: int = 200, **body: Any) -> Any:
        answer = self.client.post(f"/api/data{path}", json={"source": self.source} | body)
        assert answer.status_code == status, answer.text
        return answer.json()

    def listed(self) -> Any:
        """The summary, when the source is listed."""
        wait_until(lambda: not self.get()["listing"])
        return self.get()
