"""The server: access, metrics, log, refusals, the application, and its process."""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import signal
import socket
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from threading import Thread
from types import FrameType
from typing import Any, TextIO

import uvicorn
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.errors import (
    BusyError,
    ConfigError,
    FormatError,
    QwenCacheError,
    ServerFaultError,
    SourceError,
    StoppingError,
    first_line,
)
from qwen_cache.extras import __version__
from qwen_cache.html.page import render
from qwen_cache.models.devices import device_module, reports_memory
from qwen_cache.service.engine import LATER, RETRY_AFTER, Engine, fault_of
from qwen_cache.service.http import (
    RefusedError,
    add_refusals,
    answer,
    as_json,
    bearer,
    check_host,
    is_loopback,
    limits,
    protocol,
)
from qwen_cache.service.routes import describe, routes_of
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.storage.files import read_file
from qwen_cache.text import plain

# ---- access ----------------------------------------------------------------------------------------------------------
# Which requests reach the application: with the token, from no foreign page, and within the limits.
#
# Without a token the server listens on this machine alone. A browser on it could still be made to send requests by any
# page, so the Host of a request must then be this machine, and its Origin, if it has one, the server itself.

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
        is_open = scope["path"] in OPEN_TO_ALL
        if not is_open and self.token is not None:
            if not hmac.compare_digest(bearer(headers), self.token):
                do = "send the header `Authorization: Bearer TOKEN`"
                raise RefusedError(401, "the token is missing or wrong", do, WWW_Authenticate="Bearer")
        elif not is_open:
            check_host(headers, "server", "start it with a token")
            origin = headers.get("origin")
            if origin is not None and origin.partition("://")[2] != headers.get("host", ""):
                raise RefusedError(403, f"requests from pages of {origin!r} are refused", "use a program")
        if scope["method"] != "POST":
            return 0
        length = headers.get("content-length")
        size = most if length is None or not length.isdecimal() else int(length)
        if size > most:
            raise RefusedError(413, f"the body has {size} bytes", f"send at most {most}")
        if self._uploading and self._uploading + size > settings.queue_bytes:
            raise RefusedError(429, "too many uploads at a time", "send it again in a second", Retry_After="1")
        return size


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


# ---- metrics ---------------------------------------------------------------------------------------------------------
# The metrics of a service, in the text format of Prometheus.

COUNTS = {
    "hits": "samples that clients sent and that were known already",
    "misses": "samples that clients sent and that were not known",
    "encoded": "samples encoded",
    "copied": "samples copied from caches of cache.reuse",
    "reused": "images whose latents were known",
    "failed": "samples that could not be encoded",
    "stored": "samples committed",
    "commits": "commits",
    "failed_commits": "commits that failed",
}


class Metrics:
    """Requests by route and status, and what the engine counts."""

    def __init__(self, engine: Engine) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_OfEngine(engine))
        labels = ("method", "route", "status")
        self.requests = Counter("qwen_cache_requests", "requests answered", labels, registry=self.registry)
        self.seconds = Histogram("qwen_cache_request_seconds", "time of a request", ("route",), registry=self.registry)

    def text(self) -> bytes:
        """The page that Prometheus reads."""
        return generate_latest(self.registry)


class _OfEngine(Collector):
    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def collect(self) -> Iterator[Metric]:
        observer, (samples, size) = self.engine.observer, self.engine.waiting
        for name, text in COUNTS.items():
            yield CounterMetricFamily(f"qwen_cache_{name}", text, value=observer.counts[name])
        yield CounterMetricFamily("qwen_cache_commit_seconds", "time of commits", value=observer.commit_seconds)
        yield GaugeMetricFamily("qwen_cache_queue_samples", "samples that wait or are encoded", value=samples)
        yield GaugeMetricFamily("qwen_cache_queue_bytes", "bytes of images that wait", value=size)
        yield GaugeMetricFamily("qwen_cache_samples", "samples in the store", value=len(self.engine.store))
        yield GaugeMetricFamily("qwen_cache_ready", "whether the encoders are loaded", value=self.engine.ready)
        batches = CounterMetricFamily("qwen_cache_batches", "batches encoded", labels=("lane",))
        items = CounterMetricFamily("qwen_cache_batch_items", "images or prompts in batches", labels=("lane",))
        for lane in self.engine.states():
            batches.add_metric([lane.name], lane.batches)
            items.add_metric([lane.name], lane.done)
        yield from (batches, items, _memory(self.engine))


def _memory(engine: Engine) -> GaugeMetricFamily:
    """Bytes that this process has on each accelerator that reports it."""
    import torch

    family = GaugeMetricFamily("qwen_cache_device_memory_bytes", "memory of an accelerator", labels=("device",))
    for device in {torch.device(lane.device) for lane in engine.states()}:
        if reports_memory(device):
            family.add_metric([str(device)], device_module(device).memory_reserved(device))
    return family


# ---- log -------------------------------------------------------------------------------------------------------------
# One JSON object a line on stderr: requests, commits, failures. Never a prompt, a token or an image.

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


# ---- refusals --------------------------------------------------------------------------------------------------------
# Errors of the service as HTTP answers.

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


# ---- app -------------------------------------------------------------------------------------------------------------
# The application: routes, health, metrics, a page that describes them, and errors as JSON.

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"


def make_app(engine: Engine, token: bytes | None, log: Log) -> FastAPI:
    """The application for an engine that is entered elsewhere; `token`: what each request must have."""
    app = FastAPI(title="qwen-cache serve", version=__version__, docs_url=None, redoc_url=None, redirect_slashes=False)
    metrics = Metrics(engine)
    engine.observer.listen = log
    app.include_router(routes_of(engine))
    _add_health(app, engine, metrics)
    _add_errors(app, log)
    app.add_middleware(Access, settings=engine.settings, token=token)
    app.add_middleware(Logged, log=log, metrics=metrics)
    return app


def _add_health(app: FastAPI, engine: Engine, metrics: Metrics) -> None:
    @app.get("/healthz", summary="Whether the process lives")
    async def health() -> dict[str, bool]:
        return {"alive": True}

    @app.get("/readyz", summary="Whether the encoders are loaded, and commits succeed")
    async def ready() -> Response:
        fault, loading = engine.fault, "the encoders are being loaded, or the server is stopping"
        why = fault.problem if fault else None if engine.ready else loading
        code = {"code": fault.code} if fault else {}
        return as_json({"ready": why is None, "why": why, **code}, 200 if why is None else 503)

    @app.get("/metrics", response_class=Response, summary="Metrics for Prometheus")
    def text() -> Response:
        return Response(metrics.text(), media_type=PROMETHEUS)

    @app.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page(request: Request) -> HTMLResponse:
        routes = [
            {"method": method.upper(), "path": path, "summary": operation.get("summary", "")}
            for path, operations in app.openapi()["paths"].items()
            for method, operation in operations.items()
        ]
        values = {"title": "qwen-cache serve", "server": describe(engine), "address": str(request.base_url)}
        return HTMLResponse(render("serve.html.jinja", routes=routes, **values))


def _add_errors(app: FastAPI, log: Log) -> None:
    add_refusals(app, "see / for what this server answers", "see /openapi.json")

    @app.exception_handler(QwenCacheError)
    async def problem(_: Request, error: Any) -> Response:
        return answer(refused(error))

    @app.exception_handler(OSError)
    @app.exception_handler(MemoryError)
    async def system(_: Request, error: Any) -> Response:
        log("error", {"problem": f"{type(error).__name__}: {first_line(error)}"})
        return answer(out_of_resources(error))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: Any) -> Response:
        return answer(RefusedError(400, "the body ended too early", "send it again"))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Any) -> Response:
        number, trace = uuid.uuid4().hex[:12], traceback.format_exception(error)
        log("error", {"id": number, "problem": first_line(error), "traceback": "".join(trace)})
        return answer(RefusedError(500, f"an error of the server, {number}", "see the server's log"))


# ---- run -------------------------------------------------------------------------------------------------------------
# The server process: its socket, its signals and its end.

KEEP_ALIVE = 75  # seconds of an idle connection: longer than balancers keep theirs, which is 60 by default
GRACE = 10  # seconds for the last answers, after the engine has ended


def token_for(settings: ServeConfig) -> bytes | None:
    """The token of the settings; ConfigError if others than this machine could connect without one."""
    if settings.token_file is not None:
        return read_token(settings.token_file)
    if not is_loopback(settings.listen.rpartition(":")[0]):
        do = "name a file with a token by --token-file, and put a proxy with TLS in front of the server"
        raise ConfigError("other machines could use this server without a token", found=settings.listen, do=do)
    return None


def serve(
    engine: Engine,
    listener: socket.socket,
    token: bytes | None,
    log: Log = no_log,
    ends_with: TextIO | None = None,
) -> None:
    """Answer until SIGTERM or Ctrl-C, then finish what was accepted; a second Ctrl-C does not wait for that.

    When `ends_with` ends, so does the server, without finishing. Raises what ended
    the engine, such as a model that cannot be loaded.
    """
    settings = engine.settings
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)  # the log has these errors, as JSON
    connections, backlog = limits(settings.connections)
    config = uvicorn.Config(
        make_app(engine, token, log),
        http=protocol(connections, settings.body_seconds),
        backlog=backlog,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        h11_max_incomplete_event_size=1 << 16,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(settings.stop_seconds) + GRACE,
    )
    with engine:
        server = Server(config, engine)
        if ends_with is not None:
            Thread(target=server.end_with, args=(ends_with,), daemon=True).start()
        server.run(sockets=[listener])
    engine.ended.result()


class Server(uvicorn.Server):
    """uvicorn's server, which ends with the engine, and tells it of a signal."""

    def __init__(self, config: uvicorn.Config, engine: Engine) -> None:
        super().__init__(config)
        self.engine = engine
        engine.ended.add_done_callback(lambda _: setattr(self, "should_exit", True))

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit and sig == signal.SIGINT:
            self.force_exit = True
            self.engine.give_up()
        self.should_exit = True
        self.engine.begin_stop()

    def end_with(self, stream: TextIO) -> None:
        """End at once when `stream` ends."""
        stream.read()
        self.should_exit = self.force_exit = True
        self.engine.give_up()
