"""The server process: its socket, its signals and its end."""

from __future__ import annotations

import logging
import signal
import socket
from threading import Thread
from types import FrameType
from typing import TextIO

import uvicorn

from qwen_cache.errors import ConfigError
from qwen_cache.serve.access import read_token
from qwen_cache.serve.app import make_app
from qwen_cache.serve.engine import Engine
from qwen_cache.serve.log import Log, no_log
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.web import is_loopback
from qwen_cache.web.connection import limits, protocol

KEEP_ALIVE = 75  # seconds of an idle connection: longer than balancers keep theirs, which is 60 by default
GRACE = 10  # seconds for the last answers, after the engine has ended


def token_for(settings: ServeConfig) -> bytes | None:
    """The token of the settings; ConfigError if others than this machine could connect without one."""
    if settings.token_file is not None:
        return read_token(settings.token_file)
    if not is_loopback(settings.listen.rpartition(":")[0]):
        do = "name a file with a token by --token-file, and put a proxy with TLS in front of the server"
        raise ConfigError("other machines could use this server without a token", found=settings.listen, do=do)
    return None


def serve(
    engine: Engine,
    listener: socket.socket,
    token: bytes | None,
    log: Log = no_log,
    ends_with: TextIO | None = None,
) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish what was accepted; a second Ctrl-C does not wait for that.

    When `ends_with` ends, so does the server, without finishing. Raises what ended
    the engine, such as a model that cannot be loaded.
    """
    settings = engine.settings
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # the log has these errors, as JSON
    connections, backlog = limits(settings.connections)
    config = uvicorn.Config(
        make_app(engine, token, log),
        http=protocol(connections, settings.body_seconds),
        backlog=backlog,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=1 << 16,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.stop_seconds) + GRACE,
    )
    with engine:
        server = Server(config, engine)
        if ends_with is not None:
            Thread(target=server.end_with, args=(ends_with,), daemon=True).start()
        server.run(sockets=[listener])
    engine.ended.result()


class Server(uvicorn.Server):
    """uvicorn's server, which ends with the engine, and tells it of a signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine
        engine.ended.add_done_callback(lambda _: setattr(self, "should_exit", True))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            self.engine.give_up()
        self.should_exit = True
        self.engine.begin_stop()

    def end_with(self, stream: TextIO) -> None:
        """End at once when `stream` ends."""
        stream.read()
        self.should_exit = self.force_exit = True
        self.engine.give_up()
