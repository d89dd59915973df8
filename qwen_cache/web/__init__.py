"""What the HTTP servers of this package share: the socket, its address, and errors as JSON answers."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from ipaddress import ip_address
from typing import Any

from starlette.responses import Response

from qwen_cache.errors import ConfigError


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
    """Whether an address or name is this machine's own."""
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


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json_bytes(value), status, headers, "application/json")


def json_bytes(value: Any) -> bytes:
    """JSON in UTF-8; what is no letter there, such as a byte of a file's name, is escaped."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "backslashreplace")


def answer(error: RefusedError) -> Response:
    """The answer to a refused request."""
    value = {"error": error.what, "do": error.do, **({"code": error.code} if error.code else {})}
    return as_json(value, error.status, error.headers)
