"""The parts that `qwen-cache serve` and `ui` share: socket, connections and their time, errors as answers."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable, Mapping
from http import HTTPStatus
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

import h11
from fastapi import APIRouter, FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticSerializationError, to_json
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from qwen_cache.errors import ConfigError
from qwen_cache.storage.bounds import SLOWEST
from qwen_cache.storage.files import allow_descriptors

# ---- web -------------------------------------------------------------------------------------------------------------
# What the HTTP servers of this package share: the socket, its address, and errors as JSON answers.


def open_socket(listen: str, option: str = "--listen") -> socket.socket:
    """A socket that listens at HOST:PORT, which `option` gave; ConfigError if that is no address, or is not free."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65_535:
        raise ConfigError("no address to listen at", found=listen, do="write HOST:PORT, such as 127.0.0.1:8077")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, int(port)), family=family, backlog=1024)
    except OSError as error:
        what, do = "the server cannot listen there", f"choose another address with {option}"
        raise ConfigError(what, found=f"{listen}: {error.strerror}", do=do) from None
    # connections inherit it; without, an answer of two writes waits 40 ms for the client's delayed acknowledgement
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return listener


def address_of(listener: socket.socket) -> str:
    """The URL of a server with this socket."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def is_loopback(host: str) -> bool:
    """True if an address or name is this machine's own."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class RefusedError(Exception):
    """A request that is answered with an HTTP error; `code` is a word for programs."""

    def __init__(self, status: int, what: str, do: str, code: str | None = None, **headers: str) -> None:
        super().__init__(what)
        self.status, self.what, self.do, self.code = status, what, do, code
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def bearer(headers: Headers) -> bytes:
    """The token in the header `Authorization`; empty if there is none."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    return given.strip().encode() if scheme.lower() == "bearer" else b""


def check_host(headers: Headers, what: str, do: str) -> None:
    """RefusedError for a request to another name than this machine's own: `what` is for this machine alone."""
    host = headers.get("host", "")
    try:
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:
        name = ""
    if not is_loopback(name):
        raise RefusedError(403, f"this {what} is for this machine alone, not for {host!r}", do)


def add_refusals(app: FastAPI, unknown: str, invalid: str) -> None:
    """Answer refused requests in JSON; `unknown` and `invalid` say what to do about an address and about a value."""

    @app.exception_handler(RefusedError)
    async def refusal(_: Request, error: Any) -> Response:
        return answer(error)

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: Any) -> Response:
        if isinstance(error.__cause__, RefusedError):  # FastAPI puts its own error around what refused a JSON body
            return answer(error.__cause__)
        return answer(RefusedError(error.status_code, str(error.detail), unknown))

    @app.exception_handler(RequestValidationError)
    async def value(_: Request, error: Any) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(RefusedError(422, f"{where}: {first['msg']}", invalid))


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json_bytes(value), status, headers, "application/json")


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8; what is no letter there, such as a byte of a file's name, is escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


class Json(JSONResponse):
    """JSON of any text, also a file's name that is no UTF-8; NaN and infinities are null."""

    def render(self, content: Any) -> bytes:
        try:
            return to_json(content, inf_nan_mode="null")
        except PydanticSerializationError:
            return json_bytes(content)


def router_of(prefix: str = "") -> APIRouter:
    """A router, still without routes, whose handlers answer with `Json`."""
    return APIRouter(prefix=prefix, default_response_class=Json)


def answer(error: RefusedError) -> Response:
    """The answer to a refused request."""
    value = {"error": error.what, "do": error.do, **({"code": error.code} if error.code else {})}
    return as_json(value, error.status, error.headers)


# ---- connection ------------------------------------------------------------------------------------------------------
# The connections of a server: how many there are, and how long each may keep it waiting.
#
# uvicorn ends only connections that are silent between two requests, and answers a damaged head with text; here it is
# JSON as in every other answer. A head, and whatever else a client sends while nothing is being answered, has
# `HEAD_SECONDS`. An answer is read at `SLOWEST` or faster. How long the body of a request may take is up to the
# application. Where there are as many connections as there may be, the one that has waited longest for its next request
# gives way to a new one; if every one has a request, the new one is refused with 503.

HEAD_SECONDS = 10.0  # of the slowest honest client; curl and browsers send a head in one packet
MOST_DESCRIPTORS = 1 << 16  # of a process; more connections than this are not waited for
BACKLOG = 1024  # connections that the system accepts before the server does


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


def limits(connections: int) -> tuple[int, int]:
    """The most connections, and the backlog of the socket, that leave this process half of its file descriptors.

    Raises the limit of the process (`ulimit -n`) as far as the system lets it.
    """
    descriptors = allow_descriptors(MOST_DESCRIPTORS)
    return min(connections, descriptors // 2), min(BACKLOG, descriptors // 8)


def protocol(connections: int, seconds: float) -> type[H11Protocol]:
    """uvicorn's protocol for at most this many connections; `seconds`: how long an answer may go unread at a time."""
    head_seconds = min(HEAD_SECONDS, seconds)
    every = set[H11Protocol]()
    waiting: dict[H11Protocol, None] = {}
    """The connections on which nothing is being answered, beginning with the one that has waited longest."""

    class Protocol(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            self._request, self._reader = Timer(), Timer()
            super().connection_made(transport)
            if len(every) >= connections and not self._make_room():
                self._refuse(503, "too many connections at a time", "send it again in a second", Retry_After="1")
                return
            every.add(self)
            waiting[self] = None
            self._request.start(head_seconds, self._close_unless_answering)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            self._watch_request()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self in every:
                waiting.pop(self, None)
                waiting[self] = None
            if self.conn.trailing_data[0]:  # of a next request, which came before this answer
                self._watch_request()

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
            self._forget()
            super().connection_lost(exc)

        def _make_room(self) -> bool:
            """End the connection that has waited longest for its next request; False if there is none."""
            oldest = next(iter(waiting), None)
            if oldest is None:
                return False
            oldest._forget()  # type: ignore[attr-defined]
            oldest.transport.abort()
            return True

        def _forget(self) -> None:
            every.discard(self)
            waiting.pop(self, None)

        def _watch_request(self) -> None:
            if self._is_answering():
                self._request.stop()
                waiting.pop(self, None)
            elif not self._request.is_running and not self.transport.is_closing():
                self._request.start(head_seconds, self._close_unless_answering)

        def _is_answering(self) -> bool:
            return self.cycle is not None and not self.cycle.response_complete

        def _close_unless_answering(self) -> None:
            self._request.stop()
            if self._is_answering() or self.transport.is_closing():
                return
            if self.conn.trailing_data[0] and self.conn.our_state is h11.IDLE:
                self._refuse(408, f"the head of the request took more than {head_seconds:g} seconds", "send it faster")
            else:
                self.transport.close()

        def _refuse(self, status: int, what: str, do: str, **headers: str) -> None:
            """Answer in place of the application, and end the connection."""
            refusal = answer(RefusedError(status, what, do, **headers, Connection="close"))
            begin = h11.Response(status_code=status, headers=refusal.raw_headers, reason=HTTPStatus(status).phrase)
            for event in (begin, h11.Data(data=bytes(refusal.body)), h11.EndOfMessage()):
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
