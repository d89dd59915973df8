"""Render HTML pages from templates: each needs no network, and no files but those of a folder beside it.

Templates escape every value they print, as text or, with `tojson`, as JSON, so no text of a source becomes markup. Our
own style and scripts are included unescaped. A missing value is an error. jinja2 is imported with the first page.
"""

from __future__ import annotations

import json
import os
from base64 import b64encode
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from qwen_cache.html.charts import number
from qwen_cache.plain_text import json_without_controls, without_controls

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

FOLDER = Path(__file__).parent


def render(template: str, package: Path = FOLDER, /, **values: Any) -> str:
    """The page from a template and its values; the template is in `templates/` of `package`, or of this folder."""
    return environment(package).get_template(template).render(values)


@cache
def environment(package: Path = FOLDER) -> Environment:
    """The jinja2 environment: it escapes markup and control characters; JSON keeps its non-ASCII letters."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader([package / "templates", FOLDER / "templates"]),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.policies["json.dumps_function"] = lambda value, **_: compact_json(value)
    templates.filters["number"] = number
    templates.filters["script_hash"] = script_hash
    templates.globals["own_file"] = own_file
    return templates


def _shown(value: object) -> object:
    """Text of a source without control characters, which a terminal would obey; markup and numbers as they are."""
    return without_controls(value) if type(value) is str else value


def compact_json(value: object) -> str:
    """A value as JSON on one line; it keeps its non-ASCII letters, and is a script's literal too."""
    return json_without_controls(json.dumps(value, ensure_ascii=False, separators=(",", ":")))


def script_hash(script: str) -> Markup:
    """A script as the source of a content security policy: a browser runs no other."""
    from markupsafe import Markup

    return Markup(f"'sha256-{b64encode(sha256(script.encode('utf-8')).digest()).decode('ascii')}'")


def relative_url(path: str) -> str:
    """The URL of a file beside the page; `quote` leaves slashes, and `./` keeps a colon from looking like a scheme."""
    return f"./{quote(os.fsencode(path))}"


def own_file(name: str) -> Markup:
    """The style or a script of this folder, not escaped."""
    from markupsafe import Markup

    return Markup((FOLDER / name).read_text(encoding="utf-8"))
