"""What every page is: one file that asks nobody for anything, in light and in dark, on a phone as on a desk.

Text that comes from elsewhere is escaped by whoever puts it into a body; titles and the cells of `table` are here.
"""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

from qwen_cache.page.look import STYLE

POLICY = "default-src 'none'; img-src data: file: 'self'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
"""What a browser may load: nothing from the network, unless the page itself is there, with its pictures beside it."""


def whole_page(title: str, body: str, script: str) -> str:
    """The document of this title, which is also its first heading; `body` is HTML."""
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><h1>{escape(title)}</h1>{body}<script>{script}</script></body></html>\n"
    )


def table(facts: Iterable[tuple[str, str]]) -> str:
    """Pairs of a name and a value; nothing when there are none."""
    lines = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in facts)
    return f'<table class="facts">{lines}</table>' if lines else ""
