"""Images at addresses that clients name: read only below `serve.allow_urls`, and within the limits of a body.

They are read with the rights and from the network of the server. A server that is allowed may redirect to another one.
"""

from __future__ import annotations

import asyncio

from starlette.concurrency import run_in_threadpool

from qwen_cache.errors import QwenCacheError
from qwen_cache.serve.form import Uploaded
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.sources.places import allowed_file, read_bytes
from qwen_cache.web import RefusedError

AT_A_TIME = 8  # a slow server holds up other addresses, and not the threads that all requests share


class Fetch:
    """Reads the image of a field at an address; RefusedError for one that is not allowed or cannot be read."""

    def __init__(self, settings: ServeConfig) -> None:
        self._allowed, self._free = tuple(settings.allow_urls), asyncio.Semaphore(AT_A_TIME)

    async def __call__(self, name: str, url: str, most: int) -> Uploaded:
        """`most`: its bytes at most."""
        place = allowed_file(url, self._allowed)
        if place is None:
            what = f"{name} is text, and no address that this server reads"
            raise RefusedError(422, what, "send the image as a file, or have its address allowed by serve.allow_urls")
        async with self._free:
            try:
                return Uploaded(await run_in_threadpool(read_bytes, place, most), name)
            except QwenCacheError as error:
                raise RefusedError(422, f"{name}: {error.fault}", error.do or "send the image as a file") from None
