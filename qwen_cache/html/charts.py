"""The data of charts: bars of counts, and curves over steps. `templates/charts.html.jinja` renders them.

Charts are legible at any width: curves stretch with the page, and the numbers around them are text. Each curve contains
its values, and `curve_values.js` shows them at the pointer; without JavaScript, the values of the last step are shown.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
