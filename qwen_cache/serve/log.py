"""One JSON object a line on stderr: requests, commits, failures. Never a prompt, a token or an image."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.serve.metrics import Metrics
from qwen_cache.text import plain

QUIET = ("/healthz", "/readyz", "/metrics")
"""Routes that a monitor asks every few seconds: they are counted and not logged."""
METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS")
"""Any word may be a method, and each would be a counter of its own: others are counted together."""

Log = Callable[[str, dict[str, Any]], None]
"""Takes an event and its facts."""


def log(event: str, facts: dict[str, Any]) -> None:
    """Write an event with the time."""
    value = {"time": datetime.now(UTC).isoformat(timespec="milliseconds"), "event": event, **facts}
    with suppress(OSError):  # the disk with the log is full: the service works on
        print(json.dumps(value), file=sys.stderr, flush=True)


def no_log(event: str, facts: dict[str, Any]) -> None:
    """Write nothing."""


class Logged:
    """ASGI middleware that logs and counts each request."""

    def __init__(self, app: ASGIApp, log: Log, metrics: Metrics) -> None:
        self.app, self.log, self.metrics = app, log, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        begin, status, size = time.monotonic(), 0, 0

        async def sent(message: Message) -> None:
            nonlocal status, size
            status = message.get("status", status)
            size += len(message.get("body", b""))
            await send(message)

        try:
            await self.app(scope, receive, sent)
        finally:
            route = getattr(scope.get("route"), "path", "other")
            method = scope["method"] if scope["method"] in METHODS else "other"
            seconds = time.monotonic() - begin
            self.metrics.requests.labels(method, route, status).inc()
            self.metrics.seconds.labels(route).observe(seconds)
            if scope["path"] not in QUIET:
                facts = {"method": method, "path": plain(scope["path"]), "status": status, "bytes": size}
                client = scope["client"][0] if scope.get("client") else ""
                self.log("request", {**facts, "seconds": round(seconds, 4), "client": client})
