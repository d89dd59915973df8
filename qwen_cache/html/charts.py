"""The numbers of charts: bars of counts, and curves over steps. `templates/charts.html.jinja` shows them.

A chart is legible at any width. Curves are stretched to the width of the page, the numbers around them are text. Each
curve carries its values, which `curve_values.js` shows under the pointer; without it, those of the last step are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BARS = 12  # of a chart; one more is for all others
GRID = 1000  # the width and height of a plot in its own units, whatever its size on the screen
POINTS = 800  # of a curve: more than its pixels can show


def number(value: float) -> str:
    """As people read it: four digits, or all of a whole number."""
    whole = isinstance(value, int) or 1000 <= abs(value) < 1e12
    return f"{value:,.0f}" if whole else f"{value:.4g}".replace("e-0", "e-")


# ---- bars ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bar:
    """A count under its name."""

    label: str
    count: int
    fraction: float
    """Of the longest bar."""


def bars(counts: Mapping[str, int]) -> list[Bar]:
    """The first `BARS` counts, and one bar for all others."""
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
    """Empty where there is no other."""
    points: Sequence[tuple[float, float]]
    """Step and value."""
    colour: str = "accent"
    """A class of the style."""


@dataclass(frozen=True)
class Line:
    """A curve as a page shows it: at most about `POINTS` of its points."""

    label: str
    colour: str
    steps: Sequence[float]
    values: Sequence[float]
    points: str
    """On the grid, as a polyline has them."""


@dataclass(frozen=True)
class CurveChart:
    """Lines on one grid, with the numbers at the ends of its axes; an axis has one number where both ends are equal."""

    title: str
    lines: Sequence[Line]
    top_to_bottom: Sequence[float]
    left_to_right: Sequence[float]
    grid: int = GRID


def curve_chart(title: str, curves: Sequence[Curve]) -> CurveChart | None:
    """A chart of the curves that have points; None where no curve has one."""
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
    """As many points as can be seen, the last among them."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], points[-1]]


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = min(values), max(values)
    return lambda value: begin + (end - begin) * (value - low) / (high - low) if high > low else (begin + end) / 2


def _line(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> Line:
    """A single point is there twice: a polyline shows it as a dot, as its ends are round."""
    shown = thin(curve.points)
    ends = shown if len(shown) > 1 else shown * 2
    points = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in ends)
    return Line(curve.label, curve.colour, [step for step, _ in shown], [value for _, value in shown], points)
