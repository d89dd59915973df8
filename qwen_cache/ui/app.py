"""The application: pages, the routes behind them, and errors as JSON."""

from __future__ import annotations

import logging
import traceback
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticSerializationError, to_json
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response

from qwen_cache.errors import OutdatedError, QwenCacheError
from qwen_cache.service.http import RefusedError, answer, as_json, json_bytes
from qwen_cache.ui.access import Access
from qwen_cache.ui.build import routes_of as build_routes
from qwen_cache.ui.data.routes import routes_of as data_routes
from qwen_cache.ui.devices import routes_of as device_routes
from qwen_cache.ui.generate import routes_of as generate_routes
from qwen_cache.ui.jobs.checks import Checks
from qwen_cache.ui.jobs.queue import Queue
from qwen_cache.ui.jobs.routes import routes_of as job_routes
from qwen_cache.ui.pages import PATHS, pages_of
from qwen_cache.ui.settings import routes_of as settings_routes
from qwen_cache.ui.train.routes import routes_of as train_routes
from qwen_cache.ui.workspace import Workspace

LOG = logging.getLogger("qwen_cache.ui")


class Json(JSONResponse):
    """JSON of any text, also a file's name that is no UTF-8; NaN and infinities are null."""

    def render(self, content: Any) -> bytes:
        try:
            return to_json(content, inf_nan_mode="null")
        except PydanticSerializationError:
            return json_bytes(content)


def make_app(workspace: Workspace, queue: Queue, checks: Checks, token: str, token_once: str = "") -> FastAPI:
    """The application for an opened folder, whose queue is entered elsewhere."""
    app = FastAPI(title="qwen-cache ui", docs_url=None, redoc_url=None, openapi_url=None, default_response_class=Json)
    app.include_router(pages_of(workspace))
    app.include_router(settings_routes(workspace))
    app.include_router(job_routes(queue))
    app.include_router(device_routes(checks))
    app.include_router(data_routes(workspace, checks))
    app.include_router(build_routes(workspace, queue, checks))
    app.include_router(train_routes(workspace, queue, checks))
    app.include_router(generate_routes(workspace, queue))
    _add_errors(app)
    app.add_middleware(Access, token=token, token_once=token_once, pages=PATHS)
    return app


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(RefusedError)
    async def refusal(_: Any, error: Any) -> Response:
        return answer(error)

    @app.exception_handler(QwenCacheError)
    async def problem(_: Any, error: Any) -> Response:
        parts = {"error": error.what, "where": error.where, "expected": error.expected, "found": error.found}
        shown = {name: None if value is None else str(value) for name, value in parts.items()}
        return as_json(shown | {"do": error.do or ""}, 409 if isinstance(error, OutdatedError) else 422)

    @app.exception_handler(HTTPException)
    async def http(_: Any, error: Any) -> Response:
        return answer(RefusedError(error.status_code, str(error.detail), "reload the page"))

    @app.exception_handler(RequestValidationError)
    async def invalid(_: Any, error: Any) -> Response:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        return answer(RefusedError(422, f"{where}: {first['msg']}", "reload the page"))

    @app.exception_handler(OSError)
    async def system(_: Any, error: Any) -> Response:
        where = error.filename or ""
        return answer(RefusedError(500, f"{where}: {error.strerror or error}", "see that file and the disk"))

    @app.exception_handler(Exception)
    async def bug(_: Any, error: Any) -> Response:
        LOG.error("".join(traceback.format_exception(error)))
        return answer(RefusedError(500, f"an error of this program: {type(error).__name__}", "see its terminal"))
