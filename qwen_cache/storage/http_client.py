"""The HTTP client behind fsspec's file system: what a response holds in memory, and how long it waits, is bounded.

Compressed answers are refused: a small one may stand for any size, and its bytes are not those of the range.
"""

from __future__ import annotations

import asyncio
import re
from typing import Any

import aiohttp

from qwen_cache.errors import QwenCacheError, TooLargeError
from qwen_cache.storage import bounds


async def bounded_client(**options: Any) -> aiohttp.ClientSession:
    """A session for fsspec's `get_client`; `options` are those of the user's settings for fsspec."""
    silence = aiohttp.ClientTimeout(total=None, sock_connect=bounds.SILENCE, sock_read=bounds.SILENCE)
    ours: dict[str, Any] = {
        "response_class": BoundedResponse,
        "timeout": silence,
        "auto_decompress": False,
        "headers": {"Accept-Encoding": "identity"},
    }
    if "headers" in options:
        options["headers"] = {**ours["headers"], **options["headers"]}
    return aiohttp.ClientSession(**{**ours, **options})


class BoundedResponse(aiohttp.ClientResponse):
    """A response of which at most one byte more is read than the range that was asked for, or a listing's bound."""

    async def read(self) -> bytes:
        """The body; TooLargeError for a listing beyond its bound, TimeoutError for a server that is too slow."""
        encoding = self.headers.get("Content-Encoding", "identity")
        if encoding not in ("identity", "") and self.status < 400:
            raise QwenCacheError(
                "the server compresses a file that must be sent as it is",
                where=self.url,
                found=f"Content-Encoding: {encoding}",
                do="turn that off for this file, or copy it to a local disk",
            )
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.request_info.headers.get("Range", ""))
        most = int(asked[2]) - int(asked[1]) + 1 if asked else bounds.LISTING
        data = await self._read_up_to(most + 1)
        if not asked and len(data) > most:
            do = "name a table (.csv, .jsonl, .json, .parquet): it needs no listing"
            raise TooLargeError(
                "the listing of this folder is too large", where=self.url, expected=f"at most {most} bytes", do=do
            )
        return data

    async def _read_up_to(self, most: int) -> bytes:
        """In pieces, each of which must come in time."""
        piece, data = int(bounds.SLOWEST * bounds.SILENCE), bytearray()
        while len(data) < most:
            goal = min(most, len(data) + piece)
            async with asyncio.timeout(bounds.SILENCE):
                while len(data) < goal and (part := await self.content.read(goal - len(data))):
                    data += part
            if len(data) < goal:
                break
        return bytes(data)

    async def text(self, encoding: str | None = None, errors: str = "strict") -> str:
        """The body as text; of a listing, whose addresses are ASCII."""
        return (await self.read()).decode(encoding or "utf-8", errors)
