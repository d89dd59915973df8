"""report.html: a run on one page that needs nothing else, neither files nor network.

A pure function of the output folder: the curves are drawn from metrics.jsonl, the settings are those of qwen.yaml, the
pictures those that `qwen-train decode` has made; so `qwen-train report` makes the same page again. Refused is a folder
without a run.
"""

from __future__ import annotations

import json
import math
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from qwen_cache.config import CONFIG_NAME
from qwen_cache.console import human_bytes
from qwen_cache.format.directory import write_durably
from qwen_cache.format.errors import TrainError
from qwen_train.metrics import METRICS_NAME, read_metrics
from qwen_train.validation import FOLDER, LOSS, LOSSES

NAME = "report.html"
ABOUT_NAME = "about.json"
WIDTH, HEIGHT, LEFT, BOTTOM = 640, 220, 76, 24  # of a chart, and of the room for its numbers
POINTS = 800  # of a curve: more than its pixels can show
SMOOTHED_OVER = 50  # a moving mean is over this part of the curve
THUMBNAIL = 320  # pixels
STYLE = """
:root { color-scheme: light dark; font: 15px/1.5 system-ui, sans-serif; }
body { max-width: 84rem; margin: 2rem auto; padding: 0 1rem; }
h1 { margin-bottom: 0; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #8884; }
table { border-collapse: collapse; } td, th { padding: .15rem 1.2rem .15rem 0; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
.charts { display: flex; flex-wrap: wrap; gap: 1.5rem; } figure { margin: 0; }
svg { width: 40rem; max-width: 100%; } img { max-width: 100%; border-radius: 4px; } figcaption { font-size: 13px; }
.pictures { display: grid; grid-template-columns: repeat(auto-fill, minmax(15rem, 1fr)); gap: 1rem; }
pre { background: #8881; padding: 1rem; overflow-x: auto; }
"""


@dataclass(frozen=True)
class Line:
    """A curve of a chart."""

    label: str
    colour: str
    points: Sequence[tuple[float, float]]
    """Step and value."""


def write_report(folder: Path) -> Path:
    """Make `folder`/report.html anew; it is replaced whole, or not."""
    if not (folder / METRICS_NAME).is_file():
        raise TrainError("no run here", where=folder, expected=METRICS_NAME, do="name the train.output_dir of a run")
    path = folder / NAME
    write_durably(path, page(folder).encode("utf-8"))
    return path


def page(folder: Path) -> str:
    """The whole document."""
    metrics = read_metrics(folder / METRICS_NAME)
    sections = [
        ("Curves", f'<div class="charts">{"".join(charts(metrics))}</div>'),
        ("Last step", table((name, number(value)) for name, value in (metrics[-1] if metrics else {}).items())),
        ("Data", table(facts(folder))),
        ("Pictures", pictures(folder)),
        ("What came out", table((str(path), human_bytes(size)) for path, size in outcome(folder))),
        ("Settings", f"<pre>{escape(_text(folder / CONFIG_NAME))}</pre>"),
    ]
    body = "".join(f"<h2>{title}</h2>{content}" for title, content in sections if content)
    name = escape(folder.resolve().name)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{name}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head>'
        f"<body><h1>{name}</h1>{body}</body></html>\n"
    )


# ---- curves ----------------------------------------------------------------------------------------------------------


def charts(metrics: Sequence[Mapping[str, float]]) -> Iterator[str]:
    """One for each thing that was measured."""
    loss = series(metrics, "loss")
    window = max(1, len(loss) // SMOOTHED_OVER)
    smooth = Line(f"mean of {window} logged steps", "#c2410c", moving_mean(loss, window))
    yield chart("loss", [Line("", "#8889", loss), *([smooth] if window > 1 else [])])
    quarters = zip(LOSSES, ("#0891b2", "#65a30d", "#ca8a04", "#9333ea"), strict=True)
    by_level = [Line(f"quarter {i}", colour, series(metrics, name)) for i, (name, colour) in enumerate(quarters, 1)]
    yield chart("validation loss, and by quarter of the noise", [Line("", "#dc2626", series(metrics, LOSS)), *by_level])
    for name in ("learning_rate", "grad_norm", "samples_per_second", "tokens_per_second"):
        yield chart(name.replace("_", " "), [Line("", "#2563eb", series(metrics, name))])


def series(metrics: Sequence[Mapping[str, float]], name: str) -> list[tuple[float, float]]:
    """Step and value, where there is one."""
    return [(line["step"], line[name]) for line in metrics if math.isfinite(line.get(name, math.nan))]


def moving_mean(points: Sequence[tuple[float, float]], window: int) -> list[tuple[float, float]]:
    """At each step, the mean of the last `window` values."""
    total, means = 0.0, []
    for i, (step, value) in enumerate(points):
        total += value - (points[i - window][1] if i >= window else 0.0)
        means.append((step, total / min(i + 1, window)))
    return means


def chart(title: str, lines: Sequence[Line]) -> str:
    """An SVG with the smallest and the largest numbers at its axes; nothing without a point."""
    lines = [line for line in lines if line.points]
    if not lines:
        return ""
    steps, values = ([point[axis] for line in lines for point in line.points] for axis in (0, 1))
    x, y = _scale(steps, LEFT, WIDTH), _scale(values, HEIGHT - BOTTOM, 8)
    curves = "".join(_curve([(x(step), y(value)) for step, value in thin(line.points)], line.colour) for line in lines)
    labels = [
        _label(LEFT - 6, y(max(values)) + 8, "end", max(values)),
        _label(LEFT - 6, y(min(values)), "end", min(values)),
        _label(LEFT, HEIGHT - 6, "start", min(steps)),
        _label(WIDTH, HEIGHT - 6, "end", max(steps)),
    ]
    frame = f'<path d="M{LEFT} 4V{HEIGHT - BOTTOM + 4}H{WIDTH}" fill="none" stroke="currentColor" opacity=".4"/>'
    legend = ", ".join(f'<span style="color:{line.colour}">{escape(line.label)}</span>' for line in lines if line.label)
    return (
        f"<figure><figcaption><b>{escape(title)}</b> {legend}</figcaption>"
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">{frame}{curves}{"".join(labels)}</svg></figure>'
    )


def thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """As many of them as can be seen, the last among them."""
    every = -(-len(points) // POINTS)
    return [*points[:-1:every], points[-1]]


def _scale(values: Sequence[float], begin: float, end: float) -> Any:
    low, high = min(values), max(values)
    return lambda value: begin + (end - begin) * (value - low) / (high - low) if high > low else (begin + end) / 2


def _curve(points: Sequence[tuple[float, float]], colour: str) -> str:
    if len(points) == 1:
        return f'<circle cx="{points[0][0]:.1f}" cy="{points[0][1]:.1f}" r="2.5" fill="{colour}"/>'
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    return f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.5"/>'


def _label(x: float, y: float, anchor: str, value: float) -> str:
    place = f'x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
    return f'<text {place} font-size="12" fill="currentColor">{number(value)}</text>'


# ---- the rest of the page --------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def table(rows: Any) -> str:
    """Pairs of a name and a value; nothing when there are none."""
    lines = "".join(
        f'<tr><th>{escape(str(name))}</th><td class="number">{escape(str(value))}</td></tr>' for name, value in rows
    )
    return f"<table>{lines}</table>" if lines else ""


def facts(folder: Path) -> Iterator[tuple[str, str]]:
    """What the run was made of, as it wrote them down at its begin."""
    for name, value in json.loads(_text(folder / ABOUT_NAME) or "{}").items():
        yield name.replace("_", " "), number(value) if isinstance(value, int | float) else value


def outcome(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every file of weights and every checkpoint, with its size."""
    for path in sorted(folder.glob("*.safetensors")):
        yield path.relative_to(folder), path.stat().st_size
    for path in sorted(path for path in folder.iterdir() if path.name.startswith(("checkpoint-", "transformer"))):
        yield path.relative_to(folder), sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def pictures(folder: Path) -> str:
    """The newest that are decoded, each beside its target and controls."""
    steps = [path.parent for path in (folder / FOLDER).glob("step-*/*.png")]
    if not steps:
        return ""
    newest = max(steps, key=lambda path: int(path.name.removeprefix("step-")))
    shown = []
    for picture in sorted(newest.glob("*.png")):
        controls = sorted((folder / FOLDER / "controls").glob(f"{picture.stem}*.png"))
        row = [(path, "control") for path in controls]
        row += [(folder / FOLDER / "target" / picture.name, "target"), (picture, newest.name)]
        shown.append("".join(_figure(path, caption) for path, caption in row if path.exists()))
    return "".join(f'<div class="pictures">{row}</div>' for row in shown)


def _figure(path: Path, caption: str) -> str:
    """A thumbnail; a picture that cannot be read is no reason to have no page."""
    try:
        with Image.open(path) as image:
            small = image.convert("RGB")
    except OSError:
        return f"<figure><figcaption>{escape(caption)} {escape(path.name)} cannot be read</figcaption></figure>"
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    data = BytesIO()
    small.save(data, "JPEG", quality=85)
    source = b64encode(data.getvalue()).decode("ascii")
    return (
        f'<figure><img alt="{escape(caption)}" src="data:image/jpeg;base64,{source}"><figcaption>{escape(caption)}'
        f" {escape(path.stem[:8])}</figcaption></figure>"
    )


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
