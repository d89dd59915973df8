"""Errors as HTTP answers: a status, what is wrong, and what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

from qwen_cache.errors import BusyError, FormatError, QwenCacheError, SourceError, StoppingError
from qwen_cache.serve.engine import RETRY_AFTER


class RefusedError(Exception):
    """A request that is answered with an HTTP error."""

    def __init__(self, status: int, what: str, do: str, **headers: str) -> None:
        super().__init__(what)
        self.status, self.what, self.do = status, what, do
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}


def as_json(value: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """A JSON answer."""
    return Response(json.dumps(value, ensure_ascii=False), status, headers, "application/json")


def answer(error: RefusedError) -> Response:
    """The answer to a refused request."""
    return as_json({"error": error.what, "do": error.do}, error.status, error.headers)


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
