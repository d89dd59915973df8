"""The server of one run: a process that encodes, and ends with this one."""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from contextlib import suppress

from qwen_cache.errors import TrainError
from qwen_cache.service.client import Client
from qwen_cache.settings.load import Config

COMMAND = "from qwen_cache.cli import main; main()"
TO_END = 60  # seconds: it ends after its current sample


class OwnServer:
    """Starts the process; `client` waits until it listens. TrainError if it has ended."""

    def __init__(self, config: Config, source: str) -> None:
        self._source, self._token = source, secrets.token_hex()
        # In a session of its own: Ctrl-C reaches only the trainer, which stops it later.
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, "encode-worker", json.dumps(config.model_dump(mode="json"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),  # the same on Windows
        )

    def client(self) -> Client:
        """A client of this server."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with suppress(OSError):  # it has ended: `readline` returns nothing
            print(self._token, file=self._process.stdin, flush=True)
        if not (url := self._process.stdout.readline().strip()):
            self.check(wait=True)
        return Client(url, self._token)

    def check(self, *, wait: bool = False) -> None:
        """TrainError if the process has ended."""
        code = self._process.wait() if wait else self._process.poll()
        if code is not None:
            self._close_pipes()
            what = "the encoding process has ended; its message is above"
            raise TrainError(what, where=self._source, found=f"exit code {code}")

    def stop(self) -> None:
        """End it: it stops when its input is closed."""
        self._close_pipes()
        try:
            self._process.wait(TO_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _close_pipes(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):  # unwritten data of a process that has ended
                if pipe:
                    pipe.close()
