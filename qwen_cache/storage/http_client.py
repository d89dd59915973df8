"""The HTTP client of this package: what an answer holds in memory, and how long it takes to come, is bounded.

It is behind fsspec's file system, and behind the client of `qwen-cache serve`. Compressed answers are refused: a small
one may stand for any size, and its bytes are not those of the range. `bounds.py` has the bounds.
"""

from __future__ import annotations

import asyncio
import re
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

import aiohttp

from qwen_cache.errors import QwenCacheError, TooLargeError
from qwen_cache.storage import bounds


async def bounded_client(**options: Any) -> aiohttp.ClientSession:
    """A session for fsspec's `get_client`; `options` are those of the user's settings for fsspec.

    `trace_request_ctx` of a request has the seconds until the head of its answer, if not `bounds.SILENCE`.
    """
    ours: dict[str, Any] = {
        "response_class": BoundedResponse,
        "timeout": aiohttp.ClientTimeout(total=None),
        "trace_configs": [_head_in_time()],
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
    }
    if "headers" in options:
        options["headers"] = {**ours["headers"], **options["headers"]}
    return aiohttp.ClientSession(**{**ours, **options})


def _head_in_time() -> aiohttp.TraceConfig:
    """The limit on a request until the head of the last answer is there: through its connections and redirects.

    A piece of a body that is sent renews it, so that a large one may take long.
    """

    async def begin(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.seconds = context.trace_request_ctx or bounds.SILENCE
        context.limit = asyncio.timeout(context.seconds)
        await context.limit.__aenter__()

    async def renew(
        _: aiohttp.ClientSession, context: SimpleNamespace, sent: aiohttp.TraceRequestChunkSentParams
    ) -> None:
        if sent.chunk:
            with suppress(RuntimeError):  # the head came before all was sent
                context.limit.reschedule(asyncio.get_running_loop().time() + context.seconds)

    async def end(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        await context.limit.__aexit__(None, None, None)

    async def fail(
        _: aiohttp.ClientSession, context: SimpleNamespace, failed: aiohttp.TraceRequestExceptionParams
    ) -> None:
        error = failed.exception
        await context.limit.__aexit__(type(error), error, error.__traceback__)  # raises TimeoutError if it is late

    trace = aiohttp.TraceConfig()
    trace.on_request_start.append(begin)
    trace.on_request_chunk_sent.append(renew)
    trace.on_request_end.append(end)
    trace.on_request_exception.append(fail)
    return trace


class BoundedResponse(aiohttp.ClientResponse):
    """A response of which at most one byte more is read than the range that was asked for, or a listing's bound."""

    async def read(self) -> bytes:
        """The body; TooLargeError for a listing beyond its bound, TimeoutError for a server that is too slow."""
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        most = int(asked[2]) - int(asked[1]) + 1 if asked else bounds.LISTING
        data = await self.read_up_to(most + 1)
        if not asked and len(data) > most:
            do = "name a table (.csv, .jsonl, .json, .parquet): it needs no listing"
            raise TooLargeError(
                "the listing of this folder is too large", where=self.url, expected=f"at most {most} bytes", do=do
            )
        return bytes(data)

    async def read_up_to(self, most: int) -> bytearray:
        """At most this many bytes of the body, in pieces, each of which must come in time: else TimeoutError.

        QwenCacheError for a compressed one, unless it tells of an error.
        """
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding not in ("identity", "") and self.status < 400:
            raise QwenCacheError(
                "the server compresses what must be sent as it is",
                where=self.url,
                found=f"Content-Encoding: {encoding}",
                do="turn compression off there, also in a proxy before it; of a file, use a local copy",
            )
        piece, data = int(bounds.SLOWEST * bounds.SILENCE), bytearray()
        while len(data) < most:
            goal = min(most, len(data) + piece)
            async with asyncio.timeout(bounds.SILENCE):
                while len(data) < goal and (part := await self.content.read(goal - len(data))):
                    data += part
            if len(data) < goal:
                break
        return data

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        """The body as text; of a listing, whose addresses are ASCII."""
        return (await self.read()).decode(encoding or "utf-8", errors)
