"""Pages that commands have written, such as `inspect --html`: served in a sandbox, which has no origin.

Such a page has a policy of its own, which knows its script by its hash. The sandbox keeps it from the routes of this
program and from the token. The key in its address (`access.py`) opens the page and the files beside it: a page that
came with a run can give its address away.
"""

from __future__ import annotations

from pathlib import Path

from fastapi.responses import FileResponse

from qwen_cache.service.http import RefusedError

KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
SANDBOX = {
    "Content-Security-Policy": (
        "sandbox allow-scripts allow-forms; default-src 'none'; script-src 'unsafe-inline' 'self'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Cross-Origin-Opener-Policy": "unsafe-none",
}
"""To a page without an origin, the files beside it are those of another; and a browser shows no page that has both a
sandbox and an opener policy. Forms are for the filters of a list: they are sent nowhere."""

POLICY = "Content-Security-Policy"
ALONE = SANDBOX | {POLICY: SANDBOX[POLICY].replace(" 'self'", "")}


def written_page(folder: Path, name: str, *, is_alone: bool = False) -> FileResponse:
    """A page below a folder, or a script beside it; RefusedError (404) for everything else.

    A page that `is_alone` needs no scripts beside it, and can load none: those of other pages have what these show.
    """
    root = folder.resolve()
    try:
        file = (root / name).resolve()
        is_page = ".." not in Path(name).parts and file.is_relative_to(root) and file.suffix in KINDS and file.is_file()
    except (OSError, ValueError):  # a null byte, too long a name
        is_page = False
    if not is_page:
        raise RefusedError(404, "there is no such page", "write it again")
    return FileResponse(file, media_type=KINDS[file.suffix], headers=ALONE if is_alone else SANDBOX)
