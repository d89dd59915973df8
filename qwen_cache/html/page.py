"""HTML pages: a template and its values become one file, which needs no network and no other file.

Every value is escaped where a template prints it, as text or, with `tojson`, as JSON: no text of a source becomes
markup. The style and the scripts are put into the page as they are. A template that lacks a value is an error.
The first page imports jinja2, nothing earlier.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.html.charts import number

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

FOLDER = Path(__file__).parent


def render(template: str, **values: Any) -> str:
    """The page that a template of `templates/` makes of these values."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """Templates that escape every value; in JSON, letters of any alphabet stay as they are."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "separators": (",", ":")}
    templates.filters["number"] = number
    templates.globals["own_file"] = own_file
    return templates


def own_file(name: str) -> Markup:
    """The style or a script of this folder, which the page contains unescaped."""
    from markupsafe import Markup

    return Markup((FOLDER / name).read_text(encoding="utf-8"))
