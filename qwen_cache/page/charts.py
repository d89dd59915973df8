"""Charts of a page, legible at any width: bars of counts, and curves over steps.

Bars are an SVG that is never drawn much larger or smaller than it is. Curves fill the room that there is: only they are
stretched, the numbers around them are text of the page. Each curve carries its numbers, which the page's script shows
under the pointer; without it, those of the last step are there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

BARS = 12  # of a chart; one more is for all others
ROW, WIDTH, LABEL, COUNT = 20, 340, 110, 48  # of bars: the height of a row, and the widths of all its parts
GRID = 1000  # curves are drawn on so many by so many, whatever their size on the screen
POINTS = 800  # of a curve: more than its pixels can show


def number(value: float) -> str:
    """As people read it: four digits, or all of a whole number."""
    whole = isinstance(value, int) or 1000 <= abs(value) < 1e12
    return f"{value:,.0f}" if whole else f"{value:.4g}".replace("e-0", "e-")


# ---- bars ------------------------------------------------------------------------------------------------------------


def bar_chart(title: str, counts: Mapping[str, int]) -> str:
    """An SVG with a bar for each of them, the last for all that have no room; nothing when there are none."""
    if not counts:
        return ""
    bars = list(counts.items())[:BARS]
    if len(counts) > BARS:
        bars.append((f"{len(counts) - BARS} others", sum(list(counts.values())[BARS:])))
    longest = (WIDTH - LABEL - COUNT) / max(count for _, count in bars)
    lines = "".join(_bar(i * ROW, label, count, count * longest) for i, (label, count) in enumerate(bars))
    return (
        f'<figure class="bars"><figcaption>{escape(title)}</figcaption><svg viewBox="0 0 {WIDTH} {ROW * len(bars)}" '
        f'role="img" aria-label="{escape(title)}">{lines}</svg></figure>'
    )


def _bar(top: int, label: str, count: int, length: float) -> str:
    middle = top + ROW - 6
    return (
        f'<text x="{LABEL - 8}" y="{middle}" text-anchor="end">{escape(label)}</text>'
        f'<rect x="{LABEL}" y="{top + 3}" width="{length:.1f}" height="{ROW - 6}" rx="2"></rect>'
        f'<text x="{LABEL + length + 6:.1f}" y="{middle}">{count:,}</text>'
    )


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


def curve_chart(title: str, curves: Sequence[Curve]) -> str:
    """Curves with the smallest and the largest numbers at their axes; nothing without a point."""
    curves = [curve for curve in curves if curve.points]
    if not curves:
        return ""
    steps, values = ([point[axis] for curve in curves for point in curve.points] for axis in (0, 1))
    x, y = _scale(steps, 0, GRID), _scale(values, GRID, 0)
    keys = "".join(_key(curve) for curve in curves)
    return (
        f'<figure class="curves"><figcaption>{escape(title)}<div class="keys">{keys}'
        f'<span>at step <span class="at">{number(max(steps))}</span></span></div></figcaption>'
        f'<div class="plot">{_axis("values", max(values), min(values))}'
        f'<svg viewBox="0 0 {GRID} {GRID}" preserveAspectRatio="none" role="img" aria-label="{escape(title)}">'
        f'{"".join(_curve(curve, x, y) for curve in curves)}<path class="rule"></path></svg>'
        f"{_axis('steps', min(steps), max(steps))}</div></figure>"
    )


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many of them as can be seen, the last among them."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], points[-1]]


def _scale(values: Sequence[float], begin: float, end: float) -> Callable[[float], float]:
    low, high = min(values), max(values)
    return lambda value: begin + (end - begin) * (value - low) / (high - low) if high > low else (begin + end) / 2


def _curve(curve: Curve, x: Callable[[float], float], y: Callable[[float], float]) -> str:
    """A polyline, which a single point makes a dot, as its ends are round."""
    shown = thin(curve.points)
    places = " ".join(f"{x(step):.1f},{y(value):.1f}" for step, value in (shown if len(shown) > 1 else shown * 2))
    steps, values = " ".join(f"{step}" for step, _ in shown), " ".join(number(value) for _, value in shown)
    dot = "" if len(shown) > 1 else " dot"
    return (
        f'<polyline class="{curve.colour}{dot}" points="{places}" data-steps="{steps}" data-values="{values}">'
        "</polyline>"
    )


def _key(curve: Curve) -> str:
    """What it is, where it is not alone, and its value; the script puts another there."""
    name = f'<i class="{curve.colour}"></i>{escape(curve.label)} ' if curve.label else ""
    return f'<span>{name}<b class="value">{number(curve.points[-1][1])}</b></span>'


def _axis(name: str, *numbers: float) -> str:
    """Its two ends, or the one number that they both are."""
    return f'<div class="{name}">{"".join(f"<span>{number(each)}</span>" for each in dict.fromkeys(numbers))}</div>'
