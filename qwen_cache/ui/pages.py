"""The pages: a template each, in one layout, with the scripts and styles of `static/`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import FileResponse, HTMLResponse

from qwen_cache.html.page import FOLDER, render
from qwen_cache.ui.workspace import Workspace
from qwen_cache.version import __version__
from qwen_cache.web import RefusedError

HERE = Path(__file__).parent
PAGES = {"data": "Data", "build": "Build", "train": "Train", "generate": "Generate", "queue": "Queue"}
"""The pages by their path, in the order of the work."""
STATIC = {"style.css": FOLDER / "style.css"} | {path.name: path for path in (HERE / "static").iterdir()}
KINDS = {".css": "text/css", ".js": "text/javascript"}


def pages_of(workspace: Workspace) -> APIRouter:
    """The routes of the pages and of their files."""
    router = APIRouter()

    def add(path: str, name: str) -> None:
        router.add_api_route(path, page_of(workspace, name), response_class=HTMLResponse)

    add("/", next(iter(PAGES)))
    for name in PAGES:
        add(f"/{name}", name)
    router.add_api_route("/static/{name}", static_file, response_class=FileResponse)
    return router


def page_of(workspace: Workspace, name: str) -> Callable[[], HTMLResponse]:
    """A handler that renders a page."""

    def page() -> HTMLResponse:
        values: dict[str, Any] = {"title": PAGES[name], "name": name, "pages": PAGES, "version": __version__}
        folder = {"folder": workspace.folder.name or "/", "path": str(workspace.folder)}
        return HTMLResponse(render(f"{name}.html.jinja", HERE, **values, **folder))

    return page


def static_file(name: str) -> FileResponse:
    """A script or a style."""
    if name not in STATIC:
        raise RefusedError(404, "no such file", "reload the page")
    path = STATIC[name]
    return FileResponse(path, media_type=KINDS.get(path.suffix, "image/svg+xml"), headers={"Cache-Control": "no-cache"})
