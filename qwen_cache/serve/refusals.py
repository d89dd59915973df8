"""Errors of the service as HTTP answers."""

from __future__ import annotations

from qwen_cache.errors import BusyError, FormatError, QwenCacheError, SourceError, StoppingError
from qwen_cache.serve.engine import RETRY_AFTER
from qwen_cache.web import RefusedError


def refused(error: QwenCacheError) -> RefusedError:
    """An error of the service as the answer to the request that met it."""
    what, do = error.fault, error.do or ""
    if isinstance(error, BusyError):
        return RefusedError(429, what, do, Retry_After=str(RETRY_AFTER))
    if isinstance(error, StoppingError):
        return RefusedError(503, what, do, Retry_After="10")
    if isinstance(error, SourceError):
        return RefusedError(422, what, do)
    if isinstance(error, FormatError):
        return RefusedError(
            500, f"this sample is damaged: {what}", "run `qwen-cache verify` where the server stores it"
        )
    return RefusedError(500, what, do)
