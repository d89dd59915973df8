"""The process of the UI: one per folder, its address with a token, and its end.

Jobs are processes of their own and continue without it; the queue continues when the UI is started again.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from contextlib import closing, contextmanager
from types import FrameType

import uvicorn

from qwen_cache.errors import ConfigError
from qwen_cache.service.http import address_of, limits, protocol
from qwen_cache.storage.files import LockHeldError, NoLocksError, locked, make_folder
from qwen_cache.ui.app import make_app
from qwen_cache.ui.decoding import return_large_blocks
from qwen_cache.ui.jobs.checks import Checks
from qwen_cache.ui.jobs.queue import Queue
from qwen_cache.ui.workspace import Workspace

SECONDS_TO_END = 3  # for the last answers
CONNECTIONS = 256  # at a time; a browser opens six
ANSWER_SECONDS = 60.0  # for each part of an answer to be read


def new_token() -> str:
    """A token that nobody guesses: 256 random bits."""
    return secrets.token_urlsafe(32)


@contextmanager
def only_ui(workspace: Workspace) -> Iterator[None]:
    """Keep other UIs out of the folder; ConfigError if one has it, or if the folder cannot be written."""
    try:
        make_folder(workspace.state)
        with locked(workspace.state / "lock"):
            yield
    except LockHeldError as error:
        what, do = "this folder is already open in another `qwen-cache ui`", "use that one, or end it first"
        raise ConfigError(what, where=workspace.folder, found=error.holder, do=do) from None
    except NoLocksError as error:
        what, do = "files cannot be locked here, so two UIs could change one folder", "open a folder on a local disk"
        raise ConfigError(what, where=workspace.folder, found=error.strerror, do=do) from None
    except PermissionError as error:
        what, do = "the state of the UI cannot be written", "open a folder that you may write"
        raise ConfigError(what, where=workspace.state, found=error.strerror, do=do) from None


def serve(workspace: Workspace, listener: socket.socket, token: str, token_once: str) -> int:
    """Answer until Ctrl-C or SIGTERM; return how many jobs are still running. `token_once` opens the pages once."""
    return_large_blocks()
    os.chdir(workspace.folder)  # as for the commands: paths in settings begin there
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    with Queue(workspace.folder) as queue, closing(Checks(workspace.folder)) as checks:
        app = make_app(workspace, queue, checks, token, token_once)
        connections, backlog = limits(CONNECTIONS)
        config = uvicorn.Config(
            app,
            http=protocol(connections, ANSWER_SECONDS),
            backlog=backlog,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        Server(config).run(sockets=[listener])
    return sum(job.state in ("running", "stopping") for job in queue.list())


class Server(uvicorn.Server):
    """uvicorn's server, which a signal ends without being raised again: it is how a user ends the UI."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def address(listener: socket.socket, token: str) -> str:
    """The address to open in a browser; its fragment stays there, in no request and in no `Referer`."""
    return f"{address_of(listener)}/#token={token}"
