"""Errors of the service as HTTP answers."""

from __future__ import annotations

from qwen_cache.errors import BusyError, FormatError, QwenCacheError, ServerFaultError, SourceError, StoppingError
from qwen_cache.serve.engine import LATER, RETRY_AFTER, fault_of
from qwen_cache.web import RefusedError

FAULT_RETRY_AFTER = "10"  # seconds, in which a server may be started again, or files be removed


def out_of_resources(error: OSError | MemoryError) -> RefusedError:
    """An error of the system that met a request."""
    fault = fault_of(error, storing=True)
    return RefusedError(503, fault.problem, LATER, fault.code, Retry_After=FAULT_RETRY_AFTER)


def refused(error: QwenCacheError) -> RefusedError:
    """An error of the service as the answer to the request that met it."""
    what, do = error.fault, error.do or ""
    if isinstance(error, BusyError):
        return RefusedError(429, what, do, Retry_After=str(RETRY_AFTER))
    if isinstance(error, StoppingError):
        return RefusedError(503, what, do, Retry_After=FAULT_RETRY_AFTER)
    if isinstance(error, ServerFaultError):
        return RefusedError(503, what, do, error.code, Retry_After=FAULT_RETRY_AFTER)
    if isinstance(error, SourceError):
        return RefusedError(422, what, do)
    if isinstance(error, FormatError):
        return RefusedError(
            500, f"this sample is damaged: {what}", "run `qwen-cache verify` where the server stores it"
        )
    return RefusedError(500, what, do)
