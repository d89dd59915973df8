"""A connection ends if its next request does not begin, or if its answer is not read.

uvicorn itself ends only connections that are silent between two requests, and answers a damaged head with text; here
it is JSON as in every other answer. A head has `seconds`, and so has whatever
else a client sends while nothing is being answered. An answer is read at `SLOWEST` or faster. How long the body of a
request may take is in `access.py`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen_cache.storage.bounds import SLOWEST
from qwen_cache.web import json_bytes


class Timer:
    """A function to call after some seconds, unless it is stopped before."""

    def __init__(self) -> None:
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float, function: Callable[..., None], *arguments: Any) -> None:
        """Begin again."""
        self.stop()
        self._handle = asyncio.get_running_loop().call_later(seconds, function, *arguments)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
        self._handle = None

    @property
    def is_running(self) -> bool:
        return self._handle is not None


def protocol(seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol with these limits."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            self._request, self._reader = Timer(), Timer()
            super().connection_made(transport)
            self._request.start(seconds, self._close_unless_answering)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self._is_answering():
                self._request.stop()
            elif not self._request.is_running:
                self._request.start(seconds, self._close_unless_answering)

        def send_400_response(self, msg: str) -> None:
            self._refuse(400, "this is no request of HTTP/1.1, or its headers have more than 64 KB", "send another one")

        def pause_writing(self) -> None:
            super().pause_writing()
            self._watch_reader()

        def resume_writing(self) -> None:
            super().resume_writing()
            self._reader.stop()

        def connection_lost(self, exc: Exception | None) -> None:
            self._request.stop()
            self._reader.stop()
            super().connection_lost(exc)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _close_unless_answering(self) -> None:
            self._request.stop()
            if self._is_answering() or self.transport.is_closing():
                return
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
                self._refuse(408, f"the head of the request took more than {seconds:g} seconds", "send it faster")
            else:
                self.transport.close()

        def _refuse(self, status: int, what: str, do: str) -> None:
            """Answer in place of the application, and end the connection."""
            body = json_bytes({"error": what, "do": do})
            length = str(len(body)).encode()
            headers = [(b"Content-Type", b"application/json"), (b"Content-Length", length), (b"Connection", b"close")]
            begin = h11.Response(status_code=status, headers=headers, reason=HTTPStatus(status).phrase.encode())
            for event in (begin, h11.Data(data=body), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            self.transport.close()

        def _watch_reader(self) -> None:
            most = self.transport.get_write_buffer_size() - SLOWEST * seconds
            self._reader.start(seconds, self._abort_if_unread, most)

        def _abort_if_unread(self, most: float) -> None:
            """End it if more is unread than would be at the slowest pace."""
            if self.transport.get_write_buffer_size() > most:
                self.transport.abort()
            else:
                self._watch_reader()

    return Protocol
