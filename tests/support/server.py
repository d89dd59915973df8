"""Servers for caches: HTTP that records requests and fails on demand, and the bucket of an S3 server."""

from __future__ import annotations

import gzip
import itertools
import re
import select
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import fsspec

BUCKET = "bucket"
MEGABYTE = 1_000_000


class Server(ThreadingHTTPServer):
    """Serves a folder over HTTP with ranges; records every request for a shard, and fails on demand."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.folder = folder
        self.requests: list[tuple[str, int, int]] = []
        self.failures: Iterator[str | int] = iter(())
        self.before_answer: Callable[[], object] = lambda: None
        self.ranges = True
        self.hidden: set[str] = set()
        self.trick: str | None = None
        self.sent = 0
        self.closing = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    def fail(self, *failures: str | int) -> None:
        """How the next requests for a shard fail: `cut` in the middle, `short` without a length, or with a status."""
        self.failures = iter(failures)

    def shutdown(self) -> None:
        self.closing.set()
        super().shutdown()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, *, body: bool) -> None:
        path = self.server.folder / self.path.lstrip("/")
        if self.server.trick:
            return self.play(self.server.trick)
        if not path.is_file():
            return self.send_error(404)
        if path.name in self.server.hidden:
            return self.send_error(403)
        data = path.read_bytes()
        match = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", "")) if self.server.ranges else None
        begin, end = (int(match[1]), int(match[2]) + 1) if match else (0, len(data))
        data = data[begin:end]
        failure = None
        if body and path.suffix == ".tar":
            self.server.requests.append((path.name, begin, end))
            self.server.before_answer()
            failure = next(self.server.failures, None)
        if isinstance(failure, int):
            return self.send_error(failure)
        self.send_response(206 if match else 200)
        if failure != "short":
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.close_connection = failure is not None
        self.wfile.write(data[: len(data) // 2] if failure else data if body else b"")
        return None

    def play(self, trick: str) -> None:
        """Answer as a server that means harm: `silent`, `drip`, `slow header`, `slow redirects`, `continue`, `endless`,
        `huge`, `gzip`, `folders`.

        What it sends without end is counted in `server.sent`, with what the system has not delivered yet.
        """
        self.close_connection = True
        pieces: Iterable[bytes] = itertools.repeat(bytes(65_536))
        header = b"HTTP/1.1 206 Partial Content\r\nContent-Type: text/html\r\n"
        if trick == "silent":
            header, pieces = b"", ()
        elif trick == "drip":
            pieces = self.now_and_then(b"x")
        elif trick == "slow header":
            header, pieces = header + b"X-More: ", self.now_and_then(b"x")
        elif trick == "continue":
            header, pieces = b"", self.now_and_then(b"HTTP/1.1 100 Continue\r\n\r\n")
        elif trick == "slow redirects":
            self.server.closing.wait(0.2)
            header, pieces = b"HTTP/1.1 302 Found\r\nLocation: /again\r\nContent-Length: 0\r\n", ()
        elif trick == "huge":
            header += b"Content-Length: 1000000000000\r\n"
        elif trick == "gzip":
            header, pieces = header + b"Content-Encoding: gzip\r\n", [gzip.compress(bytes(10_000_000))]
        elif trick == "folders":
            pieces = [b'<a href="a/">a</a> <a href="b/">b</a>']
        with suppress(OSError):  # the client has closed the connection
            self.wfile.write(header + (b"" if trick in ("silent", "slow header", "continue") else b"\r\n"))
            for piece in pieces:
                self.wfile.write(piece)
                self.server.sent += len(piece)
        if trick == "silent":
            self.server.closing.wait()

    def now_and_then(self, piece: bytes) -> Iterator[bytes]:
        for _ in range(1000):  # then it gives up, so that a client without bounds ends too
            if self.server.closing.wait(0.02):
                return
            yield piece

    def log_message(self, *_: Any) -> None:
        pass


Answer = tuple[int, dict[str, str], Iterable[bytes]]
"""The status, the headers and the pieces of the body; without Content-Length the end of the connection ends it."""


class Scripted(ThreadingHTTPServer):
    """Answers a request with what `answer` returns for its method and path; records the `METHOD path` of each."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, answer: Callable[[str, str], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), ScriptedHandler)
        self.answer, self.asked, self.sent = answer, list[str](), 0
        self.before_read: Callable[[], object] = lambda: None
        """Called before each megabyte of a request's body is read."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], OSError):  # the client has closed the connection
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class ScriptedHandler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Scripted

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        for _ in range(0, left := int(self.headers.get("Content-Length", 0)), MEGABYTE):
            self.server.before_read()
            left -= len(self.rfile.read(min(MEGABYTE, left)))
        self.server.asked.append(f"{self.command} {path}")
        status, headers, pieces = self.server.answer(self.command, path)
        self.close_connection = "Content-Length" not in headers
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):  # the client has closed the connection
            for piece in pieces:
                self.wfile.write(piece)
                self.server.sent += len(piece)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, *_: Any) -> None:
        pass


class Proxy:
    """A TCP proxy that cuts connections: each of the first `cuts` after `after` bytes of answers, or of requests."""

    def __init__(self, target: tuple[str, int], cuts: float, after: int = 60_000, of: str = "answers") -> None:
        self.target, self.cuts, self.after, self.of = target, cuts, after, of
        self.cut, self.lock = 0, threading.Lock()
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listening.getsockname()[1]}"

    def serve_forever(self, poll_interval: float) -> None:
        while True:
            try:
                client, _ = self.listening.accept()
            except OSError:
                return
            threading.Thread(target=self.forward, args=(client,), daemon=True).start()

    def forward(self, client: socket.socket) -> None:
        left = self.after
        with client, socket.create_connection(self.target) as server:
            while True:
                for source in select.select([client, server], [], [])[0]:
                    try:
                        data = source.recv(65_536)
                    except OSError:
                        return
                    if not data:
                        return
                    counted = source is (server if self.of == "answers" else client)
                    is_cut = counted and len(data) >= left and self.may_cut()
                    (client if source is server else server).sendall(data[:left] if is_cut else data)
                    if is_cut:
                        return
                    left -= len(data) if counted else 0

    def may_cut(self) -> bool:
        """True if one more connection is cut, which is counted: several end at the same time."""
        with self.lock:
            self.cut += (cuts := self.cut < self.cuts)
            return cuts

    def shutdown(self) -> None:
        self.listening.shutdown(socket.SHUT_RDWR)

    def server_close(self) -> None:
        self.listening.close()


class serving:  # noqa: N801 (used as a function is)
    """Run a server inside the block."""

    def __init__(self, server: Any) -> None:
        self.server = server

    def __enter__(self) -> Any:
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        return self.server

    def __exit__(self, *_: object) -> None:
        self.server.shutdown()
        self.server.server_close()


def fresh_clients() -> None:
    """Drop clients that were created under other settings."""
    fsspec.get_filesystem_class("s3").clear_instance_cache()
