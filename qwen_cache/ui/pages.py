"""The pages: a template each, in one layout, with the scripts and styles of `static/`.

They are the same for everybody, and open to all. The scripts ask for the folder and its contents with the token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse

from qwen_cache.html.page import FOLDER, render
from qwen_cache.service.http import RefusedError
from qwen_cache.ui.workspace import Workspace

HERE = Path(__file__).parent
PAGES = {"data": "Data", "build": "Build", "train": "Train", "generate": "Generate", "queue": "Queue"}
"""The pages by their path, in the order of the work."""
PATHS = ("/", *(f"/{name}" for name in PAGES))
STATIC = {"style.css": FOLDER / "style.css"} | {path.name: path for path in (HERE / "static").iterdir()}
KINDS = {".css": "text/css", ".js": "text/javascript"}


def pages_of(workspace: Workspace) -> APIRouter:
    """The routes of the pages and of their files, and of the folder's name."""
    router = APIRouter()
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
    if name not in STATIC:
        raise RefusedError(404, "no such file", "reload the page")
    path = STATIC[name]
    return FileResponse(path, media_type=KINDS.get(path.suffix, "image/svg+xml"), headers={"Cache-Control": "no-cache"})
