"""The application: routes, health, metrics, a page that describes them, and errors as JSON."""

from __future__ import annotations

import traceback
import uuid
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import HTMLResponse, Response

from qwen_cache.errors import QwenCacheError, first_line
from qwen_cache.extras import __version__
from qwen_cache.html.page import render
from qwen_cache.serve.access import Access
from qwen_cache.serve.description import describe
from qwen_cache.serve.engine import Engine
from qwen_cache.serve.log import Log, Logged
from qwen_cache.serve.metrics import Metrics
from qwen_cache.serve.refusals import out_of_resources, refused
from qwen_cache.serve.routes import routes_of
from qwen_cache.web import RefusedError, answer, as_json

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
    @app.exception_handler(RefusedError)
    async def refusal(_: Request, error: Any) -> Response:
        return answer(error)

    @app.exception_handler(QwenCacheError)
    async def problem(_: Request, error: Any) -> Response:
        return answer(refused(error))

    @app.exception_handler(OSError)
    @app.exception_handler(MemoryError)
    async def system(_: Request, error: Any) -> Response:
        log("error", {"problem": f"{type(error).__name__}: {first_line(error)}"})
        return answer(out_of_resources(error))

    @app.exception_handler(HTTPException)
    async def http(_: Request, error: Any) -> Response:
        if isinstance(error.__cause__, RefusedError):  # FastAPI puts its own error around what refused a JSON body
            return answer(error.__cause__)
        return answer(RefusedError(error.status_code, str(error.detail), "see / for what this server answers"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Request, error: Any) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(RefusedError(422, f"{where}: {first['msg']}", "see /openapi.json"))

    @app.exception_handler(ClientDisconnect)
    async def left(_: Request, error: Any) -> Response:
        return answer(RefusedError(400, "the body ended too early", "send it again"))

    @app.exception_handler(Exception)
    async def bug(_: Request, error: Any) -> Response:
        number, trace = uuid.uuid4().hex[:12], traceback.format_exception(error)
        log("error", {"id": number, "problem": first_line(error), "traceback": "".join(trace)})
        return answer(RefusedError(500, f"an error of the server, {number}", "see the server's log"))
