"""The server of the UI: the check of its token, the pages, the application, its process."""

from __future__ import annotations

import hmac
import logging
import os
import re
import secrets
import signal
import socket
import traceback
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import FileResponse, HTMLResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from qwen_cache.errors import ConfigError, OutdatedError, QwenCacheError
from qwen_cache.html.page import FOLDER, render
from qwen_cache.service.http import (
    RefusedError,
    add_refusals,
    address_of,
    answer,
    as_json,
    bearer,
    check_host,
    limits,
    protocol,
    router_of,
)
from qwen_cache.storage.files import LockHeldError, NoLocksError, locked, make_folder
from qwen_train.ui.build import routes_of as build_routes
from qwen_train.ui.data import routes_of as data_routes
from qwen_train.ui.generate import routes_of as generate_routes
from qwen_train.ui.jobs import Checks, KnownDevices, Queue, device_routes, job_routes
from qwen_train.ui.train import routes_of as train_routes
from qwen_train.ui.workspace import Workspace, return_large_blocks
from qwen_train.ui.workspace import routes_of as settings_routes

# ---- access ----------------------------------------------------------------------------------------------------------
# Which requests the UI answers: those with its token, in a header.
#
# No cookie opens anything: all ports of this machine share cookies, also those that other users listen at. The address
# that is printed has the token as its fragment, which browsers keep from servers and other pages; our script sends it
# as `Authorization: Bearer`, as programs do. The address that is given to the browser is on its command line, which
# other users of the machine see: its token is another one, and `/api/token` exchanges it once.
#
# What a browser asks for by itself has no header. Pages, scripts and styles are the same for everybody, and open to
# all. Images, LoRAs to download, and pages that commands have written, are below `/signed/` with a key of their own,
# which our script derives from the token: it opens that address alone, and for a written page the files beside it.
#
# The name of the host must be this machine's, against names that resolve to it (DNS rebinding). `Origin` and
# `Sec-Fetch-Site` tell of pages of another origin, which are refused whatever they know. Bodies without a length, and
# too long ones, are refused.

MAX_BODY = 256_000_000  # bytes: images that are uploaded
READING = ("GET", "HEAD")
EXCHANGE, STATIC, SIGNED, WRITTEN = "/api/token", "/static/", "/signed/", "/written/"
FILES = ("/api/data/image", "/api/train/image", "/api/train/lora", "/api/generate/preview")
GENERATED = "/api/generate/results/"
"""With `WRITTEN`, what a key can open."""
KEYED = re.compile(rf"{SIGNED}([0-9a-f]{{64}})(/.*)".encode(), re.DOTALL)
BESIDE = re.compile(rf"({WRITTEN}inspect/[^/]+)_files/.*".encode(), re.DOTALL)
"""A file beside a page that `inspect --html` has written, by the name of that page."""
SAFE_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
"""The headers of every answer that has no others."""
REFUSAL = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    '<link rel="icon" href="data:,"><title>qwen-cache ui</title><h1>{}</h1><p>{}</html>'
)
"""To a person who opens an address with an old key, such as a report after the UI was started again."""
STRANGER = RefusedError(
    401, "the token is missing or wrong", "open the address that `qwen-cache ui` printed", WWW_Authenticate="Bearer"
)


def key_of(token: bytes, address: bytes) -> str:
    """The key that opens an address, path with query, without the token."""
    return hmac.new(token, address, "sha256").hexdigest()


class Access:
    """ASGI middleware that refuses other requests, and adds the headers that protect the pages.

    `pages` are the paths that are open to all; `token_once` is exchanged for the token once.
    """

    def __init__(self, app: ASGIApp, token: str, token_once: str = "", pages: Collection[str] = ()) -> None:
        self.app, self.token, self.token_once, self.pages = app, token.encode(), token_once.encode(), pages

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_safely(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**SAFE_HEADERS, "Cache-Control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        try:
            headers = Headers(scope=scope)
            check_host(headers, "program", "use 127.0.0.1")
            path = self._admitted(scope, headers)
        except RefusedError as error:
            error.headers["Connection"] = "close"  # of the body, nothing is read
            is_page = (
                error is STRANGER and scope["method"] == "GET" and headers.get("accept", "").startswith("text/html")
            )
            page = HTMLResponse(REFUSAL.format(error.what.capitalize(), error.do), error.status, error.headers)
            await (page if is_page else answer(error))(scope, receive, send_safely)
            return
        if path == EXCHANGE:
            await as_json({"token": self.token.decode()})(scope, receive, send_safely)
            return
        await self.app({**scope, "path": path}, receive, send_safely)

    def _admitted(self, scope: Scope, headers: Headers) -> str:
        """The path that is answered; RefusedError for a request without the right to it, or of a foreign page.

        Also for one with a body that is too long, or has no length.
        """
        path, is_reading = str(scope["path"]), scope["method"] in READING
        if is_reading and path.startswith(SIGNED):
            path = path[len(SIGNED) + 64 :]
            found = KEYED.fullmatch(scope["raw_path"])
            if found is None or not (path in FILES or path.startswith((GENERATED, WRITTEN))):
                raise STRANGER
            query = scope["query_string"]
            page = BESIDE.fullmatch(found[2])
            address = page[1] + b".html" if page else found[2] + (b"?" + query if query else b"")
            if not hmac.compare_digest(found[1], key_of(self.token, address).encode()):
                raise STRANGER
        elif is_reading and (path in self.pages or path.startswith(STATIC)):
            if path == "/" and not scope["query_string"]:
                return path  # links lead here, such as that in a terminal in a browser
        elif path == EXCHANGE and self.token_once and hmac.compare_digest(bearer(headers), self.token_once):
            self.token_once = b""
        elif not hmac.compare_digest(bearer(headers), self.token):
            raise STRANGER

        if not path.startswith(WRITTEN):  # a page in a sandbox asks for the files beside it like a foreign one
            origin, site = headers.get("origin"), headers.get("sec-fetch-site")
            is_foreign = origin is not None and origin != f"http://{headers.get('host', '')}"
            if is_foreign or site not in (None, "same-origin", "none"):
                raise RefusedError(
                    403, f"requests from pages of {origin!r} are refused", "use the pages of this program"
                )
        if not is_reading:
            length = headers.get("content-length")
            if length is None or not length.isdecimal() or "transfer-encoding" in headers:
                raise RefusedError(411, "the body has no length", "send Content-Length")
            if len(length) > len(str(MAX_BODY)) or int(length) > MAX_BODY:
                raise RefusedError(413, f"the body has {length} bytes", f"send at most {MAX_BODY}")
        return path


# ---- pages -----------------------------------------------------------------------------------------------------------
# The pages: a template each, in one layout, with the scripts and styles of `static/`.
#
# They are the same for everybody, and open to all. The scripts ask for the folder and its contents with the token.

HERE = Path(__file__).parent
PAGES = {"data": "Data", "build": "Build", "train": "Train", "generate": "Generate", "queue": "Queue"}
"""The pages by their path, in the order of the work."""
PATHS = ("/", *(f"/{name}" for name in PAGES))
STATIC_FOLDER = {"style.css": FOLDER / "style.css"} | {path.name: path for path in (HERE / "static").iterdir()}
KINDS = {".css": "text/css", ".js": "text/javascript"}


def pages_of(workspace: Workspace) -> APIRouter:
    """The routes of the pages and of their files, and of the folder's name."""
    router = router_of()
    for path, name in zip(PATHS, (next(iter(PAGES)), *PAGES), strict=True):
        router.add_api_route(path, page_of(name), response_class=HTMLResponse)
    router.add_api_route("/static/{name}", static_file, response_class=FileResponse)

    @router.get("/api/folder")
    def folder() -> dict[str, str]:
        """The opened folder."""
        return {"name": workspace.folder.name or "/", "path": str(workspace.folder)}

    return router


def page_of(name: str) -> Callable[[], HTMLResponse]:
    """A handler that renders a page."""

    def page() -> HTMLResponse:
        return HTMLResponse(render(f"{name}.html.jinja", HERE, title=PAGES[name], name=name, pages=PAGES))

    return page


def static_file(name: str) -> FileResponse:
    """A script or a style."""
    if name not in STATIC_FOLDER:
        raise RefusedError(404, "no such file", "reload the page")
    path = STATIC_FOLDER[name]
    return FileResponse(path, media_type=KINDS.get(path.suffix, "image/svg+xml"), headers={"Cache-Control": "no-cache"})


# ---- app -------------------------------------------------------------------------------------------------------------
# The application: pages, the routes behind them, and errors as JSON.

LOG = logging.getLogger("qwen_train.ui")


def make_app(workspace: Workspace, queue: Queue, checks: Checks, token: str, token_once: str = "") -> FastAPI:
    """The application for an opened folder, whose queue is entered elsewhere."""
    app = FastAPI(title="qwen-cache ui", docs_url=None, redoc_url=None, openapi_url=None)
    known = KnownDevices(checks)
    for part in (
        pages_of(workspace),
        settings_routes(workspace),
        job_routes(queue, known),
        device_routes(known),
        data_routes(workspace, queue, checks),
        build_routes(workspace, queue, checks),
        train_routes(workspace, queue, checks),
        generate_routes(workspace, queue),
    ):
        app.router.routes += part.routes  # `include_router` makes each route again, half of the time of a start
    app.add_middleware(Access, token=token, token_once=token_once, pages=PATHS)
    add_refusals(app, "reload the page", "reload the page")

    @app.exception_handler(QwenCacheError)
    async def problem(_: Any, error: Any) -> Response:
        return as_json(errors_json(error), 409 if isinstance(error, OutdatedError) else 422)

    @app.exception_handler(OSError)
    async def system(_: Any, error: Any) -> Response:
        where = error.filename or ""
        return answer(RefusedError(500, f"{where}: {error.strerror or error}", "see that file and the disk"))

    @app.exception_handler(Exception)
    async def bug(_: Any, error: Any) -> Response:
        LOG.error("".join(traceback.format_exception(error)))
        return answer(RefusedError(500, f"an error of this program: {type(error).__name__}", "see its terminal"))

    return app


def errors_json(error: QwenCacheError) -> dict[str, Any]:
    """An error as the pages show it, with the others of the same settings."""
    others = error.others if isinstance(error, ConfigError) else ()
    return _error_json(error) | {"others": list(map(_error_json, others))}


def _error_json(error: QwenCacheError) -> dict[str, str | None]:
    parts = {"error": error.what, "where": error.where, "expected": error.expected, "found": error.found}
    shown = {name: None if value is None else str(value) for name, value in parts.items()}
    return shown | {"do": error.do or ""}


# ---- run -------------------------------------------------------------------------------------------------------------
# The process of the UI: one per folder, its address with a token, and its end.
#
# Jobs are processes of their own and continue without it; the queue continues when the UI is started again.

SECONDS_TO_END = 3  # for the last answers
CONNECTIONS = 256  # at a time; a browser opens six
ANSWER_SECONDS = 60.0  # for each part of an answer to be read


def new_token() -> str:
    """A token that nobody guesses: 256 random bits."""
    return secrets.token_urlsafe(32)


@contextmanager
def only_ui(workspace: Workspace) -> Iterator[None]:
    """Keep other UIs out of the folder; ConfigError if one has it, or if the folder cannot be written."""
    try:
        make_folder(workspace.state)
        with locked(workspace.state / "lock"):
            yield
    except LockHeldError as error:
        what, do = "this folder is already open in another `qwen-cache ui`", "use that one, or end it first"
        raise ConfigError(what, where=workspace.folder, found=error.holder, do=do) from None
    except NoLocksError as error:
        what, do = "files cannot be locked here, so two UIs could change one folder", "open a folder on a local disk"
        raise ConfigError(what, where=workspace.folder, found=error.strerror, do=do) from None
    except PermissionError as error:
        what, do = "the state of the UI cannot be written", "open a folder that you may write"
        raise ConfigError(what, where=workspace.state, found=error.strerror, do=do) from None


def serve(workspace: Workspace, listener: socket.socket, token: str, token_once: str) -> int:
    """Answer until Ctrl-C or SIGTERM; return how many jobs are still running. `token_once` opens the pages once."""
    return_large_blocks()
    os.chdir(workspace.folder)  # as for the commands: paths in settings begin there
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL + 1)
    with Queue(workspace.folder) as queue, closing(Checks(workspace.folder)) as checks:
        app = make_app(workspace, queue, checks, token, token_once)
        connections, backlog = limits(CONNECTIONS)
        config = uvicorn.Config(
            app,
            http=protocol(connections, ANSWER_SECONDS),
            backlog=backlog,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=SECONDS_TO_END,
        )
        Server(config).run(sockets=[listener])
    return sum(job.state in ("running", "stopping") for job in queue.list())


class Server(uvicorn.Server):
    """uvicorn's server, which a signal ends without being raised again: it is how a user ends the UI."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True


def address(listener: socket.socket, token: str) -> str:
    """The address to open in a browser; its fragment stays there, in no request and in no `Referer`."""
    return f"{address_of(listener)}/#token={token}"
