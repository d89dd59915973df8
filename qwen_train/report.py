"""report.html: a run on one page that needs nothing else, neither files nor network.

A pure function of the output folder: curves from metrics.jsonl, settings from qwen.yaml, images from `qwen-train
decode`; so `qwen-train report` makes the same page again. The template `run.html.jinja` has the markup; this module
collects its values. The page leaves out a line, a file or an image that cannot be read, and says so. Refused: a folder
without a run.
"""

from __future__ import annotations

import json
import math
import re
import warnings
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import count, takewhile
from pathlib import Path
from statistics import fmean, median
from typing import Any, TypeGuard

import numpy as np
from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.console import console, human_bytes, human_time, plural
from qwen_cache.errors import ConfigError, QwenCacheError, TrainError
from qwen_cache.html.charts import Curve, CurveChart, curve_chart, number
from qwen_cache.html.page import render
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.storage.durable import write_durably
from qwen_train.checkpoint import checkpoints
from qwen_train.inference.cached import FOLDER
from qwen_train.metrics import METRICS_NAME
from qwen_train.validation import LOSS, LOSSES

NAME = "report.html"
ABOUT_NAME = "about.json"
SAID_FIRST = ("cache", "identity", "pipeline", "trainable_parameters", "device")
"""What the overview says of about.json."""
SMOOTHED_OVER = 50  # a moving mean is over this part of the curve
THUMBNAIL = 320  # pixels
LARGEST = 1e100  # float32 ends long before, and sums and differences of such do not overflow
STEP = re.compile(r"step-(\d+)")
UNREADABLE = (OSError, ValueError, SyntaxError, AssertionError, MemoryError, Image.DecompressionBombError)
"""What Pillow raises where a PNG is damaged or too large."""

Metrics = Sequence[Mapping[str, float]]
"""The lines of metrics.jsonl."""
Points = list[tuple[float, float]]
"""Step and value."""
Facts = Iterator[tuple[str, str]]
"""Of a table: a name and a value."""


def write_report(folder: Path) -> Path:
    """Make `folder`/report.html anew; it is replaced whole, or not."""
    if not (folder / METRICS_NAME).is_file():
        raise TrainError("no run here", where=folder, expected=METRICS_NAME, do="name the train.output_dir of a run")
    path = folder / NAME
    text = re.sub(r"[\ud800-\udfff]", "\ufffd", page(folder))  # names of files need not be Unicode
    try:
        write_durably(path, text.encode("utf-8"))
    except OSError as error:
        raise TrainError(f"this page cannot be written: {error.strerror}", where=path) from None
    return path


def renew_report(folder: Path) -> None:
    """`write_report` for a run, which goes on whatever is wrong with its page: then a line on stderr says what."""
    try:
        write_report(folder)
    except Exception as error:  # noqa: BLE001 (a run is worth more than its page)
        cause = str(error) if isinstance(error, QwenCacheError) else f"{type(error).__name__}: {error}"
        text = f"warning: {NAME} was not renewed: {' '.join(cause.split())}"
        console().print(text, style="yellow", markup=False)


def page(folder: Path) -> str:
    """The whole document."""
    metrics, damaged = _metrics(folder / METRICS_NAME)
    about, text, per_step = _object(folder / ABOUT_NAME), _text(folder / CONFIG_NAME), samples_per_step(folder)
    parts = ((ABOUT_NAME, about), (CONFIG_NAME, text), ("the state.json of the newest checkpoint", per_step))
    unread = [f"{plural(damaged, 'line')} of {METRICS_NAME}"] if damaged else []
    unread += [name for name, content in parts if content is None]
    about = about or {}
    return render(
        "run.html.jinja",
        title=folder.resolve().name,
        facts=list(overview(folder, metrics, about, per_step or 0)),
        unread=unread,
        logged=bool(metrics),
        charts=list(charts(metrics)),
        samples=validation_samples(folder),
        data=[(name.replace("_", " "), _said(value)) for name, value in about.items() if name not in SAID_FIRST],
        settings_name=CONFIG_NAME,
        settings=text,
    )


# ---- overview --------------------------------------------------------------------------------------------------------


def overview(folder: Path, metrics: Metrics, about: Mapping[str, Any], per_step: float) -> Facts:
    """How far it is, how well it goes, what came out, and of what: as far as the run wrote it down."""
    last, config = max((int(line["step"]) for line in metrics), default=0), _settings(folder / CONFIG_NAME)
    if last:
        of = f" of {_said(config.train.max_steps)}" if config else ""
        yield "steps", number(last) + of + (f", {plural(round(per_step, 1), 'sample')} in each" if per_step else "")
    each = about.get("samples_in_an_epoch")
    if per_step and _is_number(each) and each > 0:
        yield "epochs", f"{number(per_step * last / each)}, {plural(each, 'sample')} in each"
    speeds = [speed for _, speed in series(metrics, "samples_per_second") if speed > 0]
    if per_step and speeds and _is_number(taken := per_step / (usual := median(speeds))):
        yield "time", f"{_duration(taken)} for a step, at {number(usual)} samples a second"
    yield from losses(metrics)
    sizes = [f"{path}, {human_bytes(size)}" for path, size in outcome(folder)]
    if sizes:
        yield "came out", "; ".join(sizes)
    if config:
        lora = f"a LoRA of rank {config.train.lora.rank}"
        yield "model", str(config.model.path)
        yield "trained", lora if config.train.method == "lora" else "every weight"
    for name in SAID_FIRST:
        if name in about:
            yield name.replace("_", " "), _said(about[name])


def samples_per_step(folder: Path) -> float | None:
    """On average, as the newest checkpoint knows; 0 before there is one, None where it does not say."""
    step, path = max(checkpoints(folder), default=(0, folder))
    if not step:
        return 0
    samples = (_object(path / "state.json") or {}).get("samples")
    return samples / step if _is_number(samples) and samples >= 0 else None


def losses(metrics: Metrics) -> Facts:
    """The last ones, and how they moved."""
    loss, measured = series(metrics, "loss"), series(metrics, LOSS)
    if loss:
        window = _window(loss)
        first, last = (fmean(value for _, value in part) for part in (loss[:window], loss[-window:]))
        over = f"; over {window} logged steps {number(first)} at first, {number(last)} at last" if window > 1 else ""
        yield "loss", f"{number(loss[-1][1])}{over}"
    if measured:
        (first_step, first), (step, last) = measured[0], measured[-1]
        low_step, low = min(measured, key=lambda point: point[1])
        moved = f"; {number(first)} after step {number(first_step)}, lowest {number(low)} after step {number(low_step)}"
        yield "validation loss", f"{number(last)} after step {number(step)}{moved if len(measured) > 1 else ''}"


def outcome(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every file of weights and every checkpoint, with its size."""
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        yield path.relative_to(folder), path.stat().st_size
    for path in sorted(path for path in folder.iterdir() if path.name.startswith(("checkpoint-", "transformer"))):
        yield path.relative_to(folder), sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---- curves ----------------------------------------------------------------------------------------------------------


def charts(metrics: Metrics) -> Iterator[CurveChart]:
    """One for each thing that was measured; the losses first."""
    for title, curves in _curves(metrics):
        if chart := curve_chart(title, curves):
            yield chart


def _curves(metrics: Metrics) -> Iterator[tuple[str, list[Curve]]]:
    """Titles, and curves that may have no points."""
    loss = series(metrics, "loss")
    window = _window(loss)
    smooth = Curve(f"mean of {window} logged steps", moving_mean(loss, window))
    yield "loss", [Curve("as logged", loss, "plain"), smooth] if window > 1 else [Curve("", loss)]
    levels = [Curve(f"quarter {i}", series(metrics, name), f"quarter-{i}") for i, name in enumerate(LOSSES, 1)]
    yield "validation loss, and by quarter of the noise", [Curve("all", series(metrics, LOSS)), *levels]
    for name in dict.fromkeys(name for line in metrics for name in line):
        if name not in ("step", "loss", LOSS, *LOSSES):
            yield name.replace("_", " "), [Curve("", series(metrics, name))]


def series(metrics: Metrics, name: str) -> Points:
    """Step and value, where there is one."""
    return [(line["step"], line[name]) for line in metrics if math.isfinite(line.get(name, math.nan))]


def _window(points: Points) -> int:
    return max(1, len(points) // SMOOTHED_OVER)


def moving_mean(points: Points, window: int) -> Points:
    """At each step, the mean of the last `window` values, summed anew: a sum that is carried on keeps its errors.

    The values lie in rows as long as the window, which thus is the head of one row and the tail of the row before.
    """
    rows = np.zeros((-(-len(points) // window), window))
    rows.flat[: len(points)] = [value for _, value in points]
    sums = rows.cumsum(axis=1)
    sums[1:, :-1] += rows[:-1, :0:-1].cumsum(axis=1)[:, ::-1]
    means = sums.ravel()[: len(points)] / np.minimum(np.arange(len(points)) + 1, window)
    return [(step, mean) for (step, _), mean in zip(points, means.tolist(), strict=True)]


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ValidationSample:
    """A sample with the images around it."""

    name: str
    prompt: str
    images: list[tuple[str, str]]
    """Captions and data URLs; an empty URL where an image cannot be read, as its caption then says."""


def validation_samples(folder: Path) -> list[ValidationSample]:
    """The newest that are decoded, each with its target and controls."""
    decoded = {path.parent for path in (folder / FOLDER).glob("step-*/*.png")}
    steps = [(int(match[1]), path) for path in decoded if (match := STEP.fullmatch(path.name))]
    if not steps:
        return []
    _, newest = max(steps)
    return [_validation_sample(folder / FOLDER, path) for path in sorted(newest.glob("*.png"))]


def _validation_sample(folder: Path, decoded: Path) -> ValidationSample:
    """A decoded image with its controls and its target, as far as they are there."""
    there = {path.name: path for path in (folder / "controls").glob("*.png")}
    names = (f"{decoded.stem}-{i}.png" if i > 1 else decoded.name for i in count(1))  # as `decode` numbers them
    controls = [there[name] for name in takewhile(there.__contains__, names)]
    row = [(path, f"control {i}" if controls[1:] else "control") for i, path in enumerate(controls, 1)]
    row += [
        (folder / "target" / decoded.name, "target"),
        (decoded, f"drawn after {decoded.parent.name.replace('-', ' ')}"),
    ]
    name, prompt = _words(decoded.with_suffix(".safetensors"))
    return ValidationSample(name or decoded.stem, prompt, [_image(path, title) for path, title in row if path.exists()])


def _words(latents: Path) -> tuple[str, str]:
    """The name and the prompt of the sample that they are of; nothing where they are gone."""
    try:
        with safe_open(latents, framework="np") as file:
            about = file.metadata() or {}
    except (OSError, SafetensorError):
        return "", ""
    return about.get("name", ""), about.get("prompt", "")


def _image(path: Path, caption: str) -> tuple[str, str]:
    """Its caption and a thumbnail; the page is written even where an image cannot be read."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(path, formats=["PNG"]) as image:
            small = image.convert("RGB")
    except UNREADABLE:
        return f"{caption} {path.name} cannot be read", ""
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    data = BytesIO()
    small.save(data, "JPEG", quality=85)
    return caption, f"data:image/jpeg;base64,{b64encode(data.getvalue()).decode('ascii')}"


# ---- what the run wrote down -----------------------------------------------------------------------------------------


def _metrics(path: Path) -> tuple[Metrics, int]:
    """The lines that a run can have written, and how many others there are."""
    lines = [line for line in path.read_bytes().split(b"\n") if line.strip()]
    whole = [values for line in lines if (values := _parsed(line)) and _is_measured(values)]
    return whole, len(lines) - len(whole)


def _is_measured(values: Mapping[str, Any]) -> bool:
    """Whether these are numbers, of a step; NaN and the infinities are measured too."""
    numbers = all(_is_number(value) or (type(value) is float and not math.isfinite(value)) for value in values.values())
    return numbers and _is_number(values.get("step"))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _object(path: Path) -> dict[str, Any] | None:
    """Of a JSON file; empty where there is none, None where it cannot be read."""
    try:
        return _parsed(path.read_bytes()) if path.is_file() else {}
    except OSError:
        return None


def _parsed(data: bytes) -> dict[str, Any] | None:
    """A JSON object, if it is one."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def _settings(path: Path) -> Config | None:
    """Those of qwen.yaml, where they are of this version; the page has its text in any case."""
    try:
        return load_config(path)
    except (ConfigError, OSError, ValueError, RecursionError):  # of YAML's dates and towers of brackets
        return None


def _said(value: Any) -> str:
    return number(value) if _is_number(value) else str(value)


def _duration(seconds: float) -> str:
    return human_time(seconds) if seconds >= 1 else f"{1000 * seconds:.0f} ms"


def _text(path: Path) -> str | None:
    """Empty where there is no file, None where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        return None
