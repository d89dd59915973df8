"""A page that needs no network: document, style, tables, bars and curves."""

from __future__ import annotations

import json
import os
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from qwen_cache.text import json_without_controls, without_controls

if TYPE_CHECKING:
    from jinja2 import Environment
    from markupsafe import Markup

# ---- charts ----------------------------------------------------------------------------------------------------------
# The data of charts: bars of counts, and curves over steps. `templates/charts.html.jinja` renders them.
#
# Charts are legible at any width: curves stretch with the page, and the numbers around them are text. Each curve
# contains its values, and `curve_values.js` shows them at the pointer; without JavaScript, the values of the last step
# are shown.

BARS = 12  # bars of a chart; one more counts all others
GRID = 1000  # width and height of a plot in its own units, independent of its size on the screen
POINTS = 800  # points of a curve; more than its pixels can show


def number(value: float) -> str:
    """A number for people: four significant digits, or all digits of an integer."""
    whole = isinstance(value, int) or 1000 <= abs(value) < 1e12
    return f"{value:,.0f}" if whole else f"{value:.4g}".replace("e-0", "e-")


# ---- bars ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A count and its label."""

    label: str
    count: int
    fraction: float
    """Length relative to the longest bar."""


def bars(counts: Mapping[str, int]) -> list[Bar]:
    """The first `BARS` counts as bars, and one bar for all others."""
    shown = list(counts.items())[:BARS]
    if len(counts) > BARS:
        shown.append((f"{len(counts) - BARS} others", sum(list(counts.values())[BARS:])))
    longest = max((count for _, count in shown), default=0)
    return [Bar(label, count, count / longest) for label, count in shown]


# ---- curves ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Curve:
    """A line of a chart."""

    label: str
    """Empty for the only curve of a chart."""
    points: Sequence[tuple[float, float]]
    """(step, value)."""
    colour: str = "accent"
    """A CSS class of style.css."""


@dataclass(frozen=True)
class Line:
    """A curve as rendered, with at most about `POINTS` of its points."""

    label: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]
    points: str
    """The `points` attribute of a polyline, in units of the grid."""


@dataclass(frozen=True)
class CurveChart:
    """Lines on one grid, with the numbers at the ends of both axes; one number if both ends are equal."""

    title: str
    lines: Sequence[Line]
    top_to_bottom: Sequence[float]
    left_to_right: Sequence[float]
    grid: int = GRID


def curve_chart(title: str, curves: Sequence[Curve]) -> CurveChart | None:
    """A chart of the curves that have points; None if none has."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return None
    steps, values = ([point[axis] for curve in curves for point in curve.points] for axis in (0, 1))
    x, y = _scale(steps, 0, GRID), _scale(values, GRID, 0)
    return CurveChart(
        title,
        [_line(curve, x, y) for curve in curves],
        list(dict.fromkeys((max(values), min(values)))),
        list(dict.fromkeys((min(steps), max(steps)))),
    )


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most about `POINTS` evenly spaced points, the last included."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], points[-1]]


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = min(values), max(values)
    return lambda value: begin + (end - begin) * (value - low) / (high - low) if high > low else (begin + end) / 2


def _line(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> Line:
    """A curve as a line; a single point is repeated, which a polyline with round ends renders as a dot."""
    shown = thin(curve.points)
    ends = shown if len(shown) > 1 else shown * 2
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in ends)
    return Line(curve.label, curve.colour, [step for step, _ in shown], [value for _, value in shown], points)


# ---- page ------------------------------------------------------------------------------------------------------------
# Render HTML pages from templates: each needs no network, and no files but those of a folder beside it.
#
# Templates escape every value they print, as text or, with `tojson`, as JSON, so no text of a source becomes markup.
# Our own style and scripts are included unescaped. A missing value is an error. jinja2 is imported with the first page.

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
