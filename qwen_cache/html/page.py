"""Render HTML pages from templates: each is one file that needs neither the network nor other files.

Templates escape every value they print, as text or, with `tojson`, as JSON, so no text of a source becomes markup. Our
own style and scripts are included unescaped. A missing value is an error. jinja2 is imported with the first page.
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
    """The page from a template of `templates/` and its values."""
    return environment().get_template(template).render(values)


@cache
def environment() -> Environment:
    """The jinja2 environment: it escapes every value, and writes JSON without escaping non-ASCII letters."""
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
    """The style or a script of this folder, not escaped."""
    from markupsafe import Markup

    return Markup((FOLDER / name).read_text(encoding="utf-8"))
