"""Which requests reach the application: with the token, from no foreign page, and within the limits.

Without a token the server listens on this machine alone. A browser on it could still be made to send requests by any
page, so the Host of a request must then be this machine, and its Origin, if it has one, the server itself.
"""

from __future__ import annotations

import asyncio
import hmac
import time
from pathlib import Path
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.errors import ConfigError
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.storage.files import read_file
from qwen_cache.web import RefusedError, answer, is_loopback

OPEN_TO_ALL = ("/healthz", "/readyz")
FORM_PATH = "/v1/samples"
MAX_JSON = 1 << 21  # bytes of every other body: it is parsed where all requests wait
MAX_TOKEN = 4096


def read_token(path: str) -> bytes:
    """The token in a file, without spaces around it; ConfigError if it is empty or cannot be read."""
    try:
        token = read_file(Path(path), MAX_TOKEN).strip()
    except OSError as error:
        what, do = "the file of the token cannot be read", "name another with --token-file"
        raise ConfigError(what, where=path, found=error.strerror, do=do) from None
    if not token or not token.isascii() or b" " in token:
        do = "write one line of letters and digits, such as the output of `openssl rand -hex 32`"
        raise ConfigError("the file has no token", where=path, do=do)
    return token


class Access:
    """ASGI middleware that refuses requests, and bodies that are too large or too slow."""

    def __init__(self, app: ASGIApp, settings: ServeConfig, token: bytes | None) -> None:
        self.app, self.settings, self.token = app, settings, token
        self._uploading = 0
        """Bytes of the bodies that are being received."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        size, most = 0, self._most(scope["path"])
        try:
            size = self._admit(scope, most)
            self._uploading += size
            await self.app(scope, Body(receive, most, self.settings.body_seconds).receive, send)
        except RefusedError as error:
            error.headers["Connection"] = "close"  # of the body, nothing more is read
            await answer(error)(scope, receive, send)
        finally:
            self._uploading -= size

    def _most(self, path: str) -> int:
        """The bytes that the body of a request may have."""
        return int(self.settings.max_body) if path == FORM_PATH else MAX_JSON

    def _admit(self, scope: Scope, most: int) -> int:
        """The most bytes that this body may have; RefusedError for a request that is not answered."""
        headers, settings = Headers(scope=scope), self.settings
        if scope["path"] not in OPEN_TO_ALL:
            self._check_sender(headers)
        if scope["method"] != "POST":
            return 0
        length = headers.get("content-length")
        size = most if length is None or not length.isdecimal() else int(length)
        if size > most:
            raise RefusedError(413, f"the body has {size} bytes", f"send at most {most}")
        if self._uploading and self._uploading + size > settings.queue_bytes:
            raise RefusedError(429, "too many uploads at a time", "send it again in a second", Retry_After="1")
        return size

    def _check_sender(self, headers: Headers) -> None:
        if self.token is not None:
            scheme, _, given = headers.get("authorization", "").partition(" ")
            is_right = hmac.compare_digest(given.strip().encode(), self.token)
            if scheme.lower() != "bearer" or not is_right:
                do = "send the header `Authorization: Bearer TOKEN`"
                raise RefusedError(401, "the token is missing or wrong", do, WWW_Authenticate="Bearer")
            return
        host = headers.get("host", "")
        if not is_loopback(_host_of(f"//{host}")):
            raise RefusedError(403, f"this server is for this machine alone, not for {host!r}", "start it with a token")
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            raise RefusedError(403, f"requests from pages of {origin!r} are refused", "use a program")


def _host_of(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


class Body:
    """The body of a request, refused as soon as it is too long or takes too long."""

    def __init__(self, receive: Receive, most: int, seconds: float) -> None:
        self._receive, self._most, self._seconds = receive, most, seconds
        self._left, self._until = most, time.monotonic() + seconds
        self._is_whole = False

    async def receive(self) -> Message:
        """The next part; after the last one, wait for the client to leave."""
        if self._is_whole:
            return await self._receive()
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                message = await self._receive()
        except TimeoutError:
            seconds = f"{self._seconds:g} seconds"
            raise RefusedError(
                408, f"the body did not arrive within {seconds}", "send it again", Connection="close"
            ) from None
        self._is_whole = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            raise RefusedError(413, "the body is too large", f"send at most {self._most} bytes", Connection="close")
        return message
