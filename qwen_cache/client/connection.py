"""Requests to one server, for code without asyncio: an answer is bounded in bytes and time, and never unpacked.

They run in the event loop of fsspec. A redirect is an answer like any other: rows and token go to no other address.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp
from fsspec.asyn import get_loop, sync

from qwen_cache.errors import ConfigError, TooLargeError
from qwen_cache.storage import bounds
from qwen_cache.storage.http_client import BoundedResponse, bounded_client

MAX_JSON = 1 << 20  # bytes: ours have a few kB, and parsing takes up to 30 times as much memory
NO_ANSWER = (aiohttp.ClientError, OSError)  # TimeoutError is an OSError
WAIT = 30  # seconds that the server waits for a sample before it answers that there is none yet


@dataclass(frozen=True)
class Answer:
    """An answer; `retry_after` is the seconds after which the server wants the request again, 0 if it does not say."""

    status: int
    body: bytearray
    retry_after: float


@dataclass(frozen=True)
class Form:
    """The text fields and the images of a row, by their names."""

    fields: Mapping[str, str]
    files: Sequence[tuple[str, bytes]]

    def writer(self) -> aiohttp.MultipartWriter:
        form = aiohttp.MultipartWriter("form-data")
        for name, text in self.fields.items():
            form.append(text).set_content_disposition("form-data", name=name)
        for name, data in self.files:
            form.append(io.BytesIO(data)).set_content_disposition("form-data", name=name, filename=name)
        return form


class Connection:
    """A connection to the server at `url`, for many threads. ConfigError if that is no address of a server."""

    def __init__(self, url: str, token: str | None) -> None:
        self.url = url.rstrip("/")
        self._proxy = _proxy_for(_split(url, token))
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._session: aiohttp.ClientSession | None = None
        self._running = set[asyncio.Task[Answer]]()
        self._is_closed = False

    def ask(
        self,
        method: str,
        path: str,
        most: int,
        *,
        form: Form | None = None,
        value: Any = None,
        params: Mapping[str, int] | None = None,
    ) -> Answer:
        """The answer to a request with a row's form or with JSON.

        One of NO_ANSWER if there is none in time; QwenCacheError for a compressed one; TooLargeError for one beyond
        `most` bytes, or beyond MAX_JSON if its status is not 200.
        """
        answer: Answer = sync(get_loop(), self._until_closed, method, path, most, form, value, params)
        return answer

    async def _until_closed(self, *arguments: Any) -> Answer:
        if self._is_closed:
            raise ConnectionAbortedError("the connection was closed")
        self._running.add(task := asyncio.create_task(self._ask(*arguments)))
        await asyncio.wait([task])
        self._running.remove(task)
        if task.cancelled():
            raise ConnectionAbortedError("the connection was closed")
        return task.result()

    async def _ask(
        self,
        method: str,
        path: str,
        most: int,
        form: Form | None,
        value: Any,
        params: Mapping[str, int] | None,
    ) -> Answer:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0)  # a request does not wait for another thread's
            cookies = aiohttp.DummyCookieJar()
            self._session = await bounded_client(headers=self._headers, connector=connector, cookie_jar=cookies)
        headers = {} if value is None else {"Content-Type": "application/json"}
        data: Any = form.writer() if form else None if value is None else io.BytesIO(json.dumps(value).encode())
        async with self._session.request(
            method,
            self.url + path,
            params=params,
            data=data,
            headers=headers,
            proxy=self._proxy,
            allow_redirects=False,
            trace_request_ctx=WAIT + bounds.SILENCE,
        ) as response:
            body = await _body(response, most if response.status == 200 else MAX_JSON)
            asked = response.headers.get("Retry-After", "")
            return Answer(response.status, body, float(asked) if asked.isascii() and asked.isdecimal() else 0.0)

    def close(self) -> None:
        """End all requests; ConnectionAbortedError for those of other threads."""
        sync(get_loop(), self._close)

    async def _close(self) -> None:
        self._is_closed = True
        for task in self._running:  # aiohttp would leave one that reads a body waiting
            task.cancel()
        if self._session is not None:
            await self._session.close()


def silence(error: BaseException) -> str:
    """Why there is no answer: one of NO_ANSWER in words."""
    if isinstance(error, TimeoutError):
        return bounds.silence(WAIT + bounds.SILENCE)
    return str(error) or type(error).__name__


async def _body(response: aiohttp.ClientResponse, most: int) -> bytearray:
    """The body; TooLargeError for one of more than `most` bytes, before it is read if the server says so."""
    announced = response.content_length or 0
    body = bytearray() if announced > most else await cast(BoundedResponse, response).read_up_to(most + 1)
    if (found := max(announced, len(body))) > most:
        what, do = "the answer of the server is too large", "install the same version of qwen-cache here and there"
        size = found if announced else "more"
        raise TooLargeError(what, where=response.url, expected=f"at most {most} bytes", found=size, do=do)
    return body


def _split(url: str, token: str | None) -> SplitResult:
    """The parts of an address; ConfigError if it is none, or names a user besides a token."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        is_address = False
    if not is_address:
        raise ConfigError("no address of a server", found=url, do="write http://HOST:PORT")
    if token and parts.username is not None:
        what, do = "a token and a user for one server", "leave the user out of the address, or give no token"
        raise ConfigError(what, where=parts.hostname, do=do)
    return parts


def _proxy_for(parts: SplitResult) -> str | None:
    """The proxy that the environment names for an address."""
    return None if proxy_bypass(parts.hostname or "") else getproxies().get(parts.scheme)
