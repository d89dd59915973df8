"""report.html: a run on one self-contained page, without other files or the network; its images link to their PNGs.

It is a pure function of the output folder: curves from metrics.jsonl, settings from qwen.yaml, images from `qwen-train
decode`; so `qwen-train report` writes the same page again. The template `run.html.jinja` has the markup; this module
collects its values. Lines, files and images that cannot be read are listed and skipped. A folder without a run is
refused.
"""

from __future__ import annotations

import math
import re
import warnings
from base64 import b64encode
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from io import BytesIO
from itertools import count, takewhile
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

from PIL import Image
from safetensors import SafetensorError, safe_open

from qwen_cache.batching import BEGIN
from qwen_cache.errors import ConfigError, QwenCacheError, TrainError
from qwen_cache.html.page import Curve, CurveChart, curve_chart, number, relative_url, render
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.storage.files import read_file, write_durably
from qwen_cache.storage.remembered import check_safetensors
from qwen_cache.terminal import console, human_bytes, human_time, plural
from qwen_cache.text import parse_json, plain
from qwen_train.data.commits import TakenIn, describe, read_sequence
from qwen_train.lora.files import adapter_title
from qwen_train.run import (
    LOSS,
    LOSSES,
    METRICS_NAME,
    PREFERENCE_ACCURACY,
    PREFERENCE_MARGIN,
    REPORT_NAME,
    RUN_FACTS_NAME,
    STEP,
    TIMES,
    VALIDATION,
    checkpoints,
    image_titles,
    png_of,
)
from qwen_train.training.best import Best, best_of, differences

OVERVIEW_FACTS = ("cache", "identity", "pipeline", "trainable_parameters", "device")
"""The entries of about.json that the overview shows."""
SMOOTHED_SHARE, SMOOTHED_LEAST = 0.05, 20
"""The smoothed loss averages over about this share of the logged steps, or this many: with one sample in a step, the
noise levels would dominate a shorter average."""
SHOWN_STEPS = 8  # of each sample: at 30 kB an image, the page of ten samples with two controls has 3 MB
THUMBNAIL = 320  # pixels
LARGEST = 1e100  # far above any float32, and small enough that sums and differences do not overflow
DIGITS = re.compile(r"(\d+)")
UNREADABLE = (OSError, ValueError, SyntaxError, AssertionError, MemoryError, Image.DecompressionBombError)
"""Raised by Pillow for a PNG that is damaged or too large."""

Metrics = Sequence[Mapping[str, float]]
"""The lines of metrics.jsonl."""
Points = list[tuple[float, float]]
"""Step and value."""
Facts = Iterator[tuple[str, str]]
"""Rows of a table: name and value."""


def write_report(folder: Path) -> Path:
    """Write `folder`/report.html, atomically; TrainError without a run in `folder`, or if it cannot be written."""
    if not (folder / METRICS_NAME).is_file():
        raise TrainError("no run here", where=folder, expected=METRICS_NAME, do="name the train.output_dir of a run")
    path = folder / REPORT_NAME
    data = page(folder).encode("utf-8")
    try:
        write_durably(path, data)
    except OSError as error:
        do = f"make {REPORT_NAME} writable, or copy the folder of the run elsewhere and name the copy"
        raise TrainError(f"this page cannot be written: {error.strerror}", where=path, do=do) from None
    return path


def renew_report(folder: Path) -> None:
    """`write_report` for a run: any failure becomes a warning on stderr, and training continues."""
    try:
        write_report(folder)
    except Exception as error:  # noqa: BLE001 (a run is worth more than its page)
        cause = str(error) if isinstance(error, QwenCacheError) else f"{type(error).__name__}: {error}"
        text = f"warning: {REPORT_NAME} was not renewed: {plain(' '.join(cause.split()))}"
        console().print(text, style="yellow", markup=False)


def page(folder: Path) -> str:
    """The whole document."""
    lines = [line for line in read_file(folder / METRICS_NAME).split(b"\n") if line.strip()]
    metrics = [values for line in lines if (values := _parsed(line)) and _is_measured(values)]
    damaged = len(lines) - len(metrics)
    facts, text, per_step = _object(folder / RUN_FACTS_NAME), _text(folder / CONFIG_NAME), samples_per_step(folder)
    parts = ((RUN_FACTS_NAME, facts), (CONFIG_NAME, text), ("the state.json of the newest checkpoint", per_step))
    unread = [f"{plural(damaged, 'line')} of {METRICS_NAME}"] if damaged else []
    unread += [name for name, content in parts if content is None]
    facts, best = facts or {}, best_of(folder)
    return render(
        "run.html.jinja",
        title=f"Training run {folder.resolve().name}",
        facts=list(overview(folder, metrics, facts, per_step or 0)),
        best=best,
        score_rows=list(score_rows(best)),
        unread=unread,
        logged=bool(metrics),
        charts=list(charts(metrics)),
        samples=validation_samples(folder, best.step),
        data=[(name.replace("_", " "), _text_of(value)) for name, value in facts.items() if name not in OVERVIEW_FACTS],
        settings_name=CONFIG_NAME,
        settings=text,
    )


# ---- overview --------------------------------------------------------------------------------------------------------


def overview(folder: Path, metrics: Metrics, facts: Mapping[str, Any], per_step: float) -> Facts:
    """Progress, losses, output files and model, as far as the run recorded them."""
    last, config = max((int(line["step"]) for line in metrics), default=0), _settings(folder / CONFIG_NAME)
    if last:
        of = f" of {_text_of(config.train.max_steps)}" if config else ""
        yield "steps", number(last) + of + (f", {plural(round(per_step, 1), 'sample')} in each" if per_step else "")
    each, taken = facts.get("samples_in_an_epoch"), commits(folder, last)
    if per_step and _is_number(each) and each > 0:
        begin, which = (taken[-1].begin, " by now") if taken else (BEGIN, "")
        epochs = begin.epoch + (per_step * last - begin.samples) / each
        yield "epochs", f"{epochs:,.1f}, {plural(each, 'sample')} in each{which}"
    if taken:
        yield "commits", "; ".join(describe(entry) for entry in taken)
    yield from times(metrics)
    speeds = [speed for _, speed in series(metrics, "samples_per_second") if speed > 0]
    if per_step and speeds and _is_number(seconds := per_step / (usual := median(speeds))):
        duration = human_time(seconds) if seconds >= 1 else f"{1000 * seconds:.0f} ms"
        yield "speed", f"{duration} for a step: {number(1 / seconds)} steps/s, {number(usual)} samples/s"
    yield from losses(metrics)
    sizes = [f"{path}, {human_bytes(size)}" for path, size in outcome(folder)]
    if sizes:
        yield "output files", "; ".join(sizes)
    if config:
        yield "model", " with ".join(filter(None, (str(config.model.path), config.model.transformer)))
        yield "trained", f"a {adapter_title(config.train.lora)}" if config.train.method == "lora" else "every weight"
    for name in OVERVIEW_FACTS:
        if name in facts:
            yield name.replace("_", " "), _text_of(facts[name])


def commits(folder: Path, last: int) -> Sequence[TakenIn]:
    """The commits of the cache that the run took in up to the step `last`; none where they cannot be read."""
    with suppress(TrainError, OSError):
        return [each for each in read_sequence(folder).taken if each.step <= last]
    return []


def times(metrics: Metrics) -> Facts:
    """Training time up to the last step, without loading and pauses before a resume, and its dates."""
    clock, elapsed = series(metrics, "time"), series(metrics, "elapsed_seconds")
    if not (clock and elapsed):
        return
    begin, end = (_minute(at) for at in (clock[0][1] - elapsed[0][1], clock[-1][1]))
    yield "time", f"{human_time(elapsed[-1][1])} of training, from {begin} to {end} UTC"


def samples_per_step(folder: Path) -> float | None:
    """Mean samples per step by the newest checkpoint; 0 without a checkpoint, None if it cannot be read."""
    step, path = max(checkpoints(folder), default=(0, folder))
    if not step:
        return 0
    samples = (_object(path / "state.json") or {}).get("samples")
    return samples / step if _is_number(samples) and samples >= 0 else None


def losses(metrics: Metrics) -> Facts:
    """The last losses, and how they have changed."""
    loss, measured = series(metrics, "loss"), series(metrics, LOSS)
    if loss:
        (step, raw), last = loss[-1], _smoothed(loss)[-1][1]
        yield "loss", f"{number(last)} smoothed after step {number(step)}, {number(raw)} in that step alone"
    if measured:
        (first_step, first), (step, last) = measured[0], measured[-1]
        low_step, low = min(measured, key=lambda point: point[1])
        moved = f"; {number(first)} after step {number(first_step)}, lowest {number(low)} after step {number(low_step)}"
        yield "validation loss", f"{number(last)} after step {number(step)}{moved if len(measured) > 1 else ''}"
    accuracies, margins = series(metrics, PREFERENCE_ACCURACY), series(metrics, PREFERENCE_MARGIN)
    for (step, accuracy), (_, margin) in list(zip(accuracies, margins, strict=True))[-1:]:
        of_pairs = f"the target in {100 * accuracy:.0f} % of held-out pairs after step {number(step)}"
        yield "prefers", f"{of_pairs}, by a margin of {number(margin)} in squared error"


def outcome(folder: Path) -> Iterator[tuple[Path, int]]:
    """Every weights file and checkpoint, with its size."""
    for path in sorted(path for path in folder.glob("*.safetensors") if path.is_file()):
        yield path.relative_to(folder), path.stat().st_size
    for path in sorted(path for path in folder.iterdir() if path.name.startswith(("checkpoint-", "transformer"))):
        yield path.relative_to(folder), sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


# ---- scores ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ScoreRow:
    """A step in the table of scores."""

    step: int
    note: str
    cells: list[tuple[str, str]]
    """The mean of each score; of those that judge, how it compares with the best."""


def score_rows(best: Best) -> Iterator[ScoreRow]:
    """The scores of each step, in the order of `best.scores`."""
    cells = dict[int, list[tuple[str, str]]]({step: [] for step in best.steps})
    for score in best.scores.scores:
        found = dict(zip(score.steps, zip(score.means.values(), differences(score), strict=True), strict=True))
        for step, row in cells.items():
            mean, (more, error) = found.get(step, (None, (0.0, None)))
            compared = more != 0 and error is not None and score.name in best.judges
            sign = "+" if more > 0 else "−"
            text = f"{sign}{number(abs(more))} ± {number(error or 0.0)}" if compared else ""
            row.append(("" if mean is None else number(mean), text))
    for step, row in cells.items():
        yield ScoreRow(step, best.note(step), row)


# ---- curves ----------------------------------------------------------------------------------------------------------


def charts(metrics: Metrics) -> Iterator[CurveChart]:
    """One chart per metric, losses first."""
    for title, curves in _curves(metrics):
        if chart := curve_chart(title, curves):
            yield chart


def _curves(metrics: Metrics) -> Iterator[tuple[str, list[Curve]]]:
    """Titles and curves; a curve may have no points."""
    loss = series(metrics, "loss")
    smooth = Curve(f"smoothed, {number(smoothing(len(loss)))}", _smoothed(loss))
    yield "loss", [Curve("as logged", loss, "plain"), smooth] if len(loss) > 1 else [Curve("", loss)]
    levels = [Curve(noise_level(i), series(metrics, name), f"quarter-{i + 1}") for i, name in enumerate(LOSSES)]
    yield "validation loss by noise level", [Curve("all levels", series(metrics, LOSS)), *levels]
    for name in dict.fromkeys(name for line in metrics for name in line):
        if name == "data_wait":
            yield "data wait, %", [Curve("", [(step, 100 * share) for step, share in series(metrics, name)])]
        elif name not in ("step", "loss", LOSS, *LOSSES, *TIMES):
            yield name.replace("_", " "), [Curve("", series(metrics, name))]


def noise_level(i: int) -> str:
    """The noise levels of `LOSSES[i]` in words, with the share of noise in the noised sample."""
    low, high = (round(100 * level / len(LOSSES)) for level in (i, i + 1))
    ends = {0: ", almost clean", len(LOSSES) - 1: ", almost pure noise"}
    return f"{low}–{high} % noise{ends.get(i, '')}"


def series(metrics: Metrics, name: str) -> Points:
    """Steps and values, where the value exists and is finite."""
    return [(line["step"], line[name]) for line in metrics if math.isfinite(line.get(name, math.nan))]


def smoothing(count: int) -> float:
    """The weight of `smoothed` for this many values: the slider "Smoothing" of TensorBoard shows the same with it."""
    return 1 - 1 / max(SMOOTHED_LEAST, SMOOTHED_SHARE * count)


def smoothed(values: Iterable[float], weight: float) -> list[float]:
    """The exponential moving average with the bias towards its beginning at 0 removed, as in TensorBoard.

    A value that is not finite stays as it is, and the average continues after it.

    With values v and weight w: `a_t = w·a_{t-1} + (1 - w)·v_t`, `a_0 = 0`, shown as `a_t / (1 - w^t)`: tensorboard's
    webapp/widgets/line_chart_v2/data_transformer.ts at 412c86e5; the correction is that of Adam (arXiv:1412.6980,
    section 3).
    """
    average, power, made = 0.0, 1.0, list[float]()
    for value in values:
        if math.isfinite(value):
            average, power = weight * average + (1 - weight) * value, power * weight
            value = average / (1 - power)
        made.append(value)
    return made


def _smoothed(points: Points) -> Points:
    made = smoothed((value for _, value in points), smoothing(len(points)))
    return [(step, value) for (step, _), value in zip(points, made, strict=True)]


# ---- images ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Thumbnail:
    """An image of the page."""

    caption: str
    source: str
    """A data URL; empty, and the caption says so, if the image cannot be read."""
    whole: str
    """The URL of the PNG in the folder of the run."""


@dataclass(frozen=True)
class Strip:
    """Images side by side."""

    title: str
    """The guidance, where a sample has images of several; else empty."""
    images: list[Thumbnail]


@dataclass(frozen=True)
class ValidationSample:
    """A validation sample with its controls, its target, and what was generated at each step."""

    name: str
    prompt: str
    strips: list[Strip]


def validation_samples(folder: Path, best: int | None = None) -> list[ValidationSample]:
    """The samples of the newest two steps, since the images of the newest may still come, by their names; the images
    of the proposed step say so."""
    decoded = {path.parent for path in (folder / VALIDATION).glob("step-*/*.png")}
    steps = sorted((int(match[1]), path) for path in decoded if (match := STEP.fullmatch(path.name)))
    stems: dict[str, None] = {}
    for _, path in steps[-2:]:
        pngs = sorted(path.glob("*.png"))
        further = {png_of(png, i) for png in pngs for i in range(1, len(_titles(_metadata(png))))}
        stems |= dict.fromkeys(png.stem for png in pngs if png not in further)
    shown = shown_steps(steps, best)
    found = [_validation_sample(folder / VALIDATION, stem, shown, best) for stem in stems]
    return sorted(found, key=lambda sample: natural_order(sample.name))


def natural_order(name: str) -> list[str | int]:
    """A key that sorts prompts/10 after prompts/9."""
    return [int(part) if i % 2 else part for i, part in enumerate(DIGITS.split(name))]


def shown_steps(steps: Sequence[tuple[int, Path]], best: int | None = None) -> list[tuple[int, Path]]:
    """The first and the last steps, and up to `SHOWN_STEPS` in all, evenly spaced between them; and the best one."""
    if len(steps) <= SHOWN_STEPS:
        return list(steps)
    shown = {round(i * (len(steps) - 1) / (SHOWN_STEPS - 1)) for i in range(SHOWN_STEPS)}
    return [each for i, each in enumerate(steps) if i in shown or each[0] == best]


def _validation_sample(
    folder: Path, stem: str, steps: Sequence[tuple[int, Path]], best: int | None
) -> ValidationSample:
    """Strips of the shown steps, one for each image of a file, of which the first begins with controls and target."""
    pngs = {path.name: path for path in (folder / "controls").glob("*.png")}
    names = (png_of(Path(f"{stem}.png"), i).name for i in count())
    controls = [pngs[name] for name in takewhile(pngs.__contains__, names)]
    given = [(path, f"control {i}" if controls[1:] else "control") for i, path in enumerate(controls, 1)]
    given.append((folder / "target" / f"{stem}.png", "target"))
    strips, metadata = dict[str, list[tuple[Path, str]]](), dict[str, str]()
    for step, decoded in steps:
        png = decoded / f"{stem}.png"
        metadata |= _metadata(png)
        caption = f"after step {step}{', proposed' if step == best else ''}" if step else "before training"
        for i, title in enumerate(_titles(_metadata(png))):
            strips.setdefault(title, []).append((png_of(png, i), caption))
    images = {title: [_image(path, caption) for path, caption in row if path.exists()] for title, row in strips.items()}
    shown = [Strip(title, row) for title, row in images.items() if row]
    beside = [_image(path, caption) for path, caption in given if path.exists()]
    if beside and len(shown) == 1:
        shown = [Strip("", beside + shown[0].images)]
    elif beside:
        shown.insert(0, Strip("", beside))
    return ValidationSample(metadata.get("name", stem), metadata.get("prompt", ""), shown)


def _titles(metadata: Mapping[str, str]) -> list[str]:
    """A title for each image of a file; empty for a single one."""
    try:
        return image_titles(metadata)
    except ValueError:
        return [""]


def _metadata(png: Path) -> dict[str, str]:
    """The metadata of the latents of an image; empty if the file is missing or damaged."""
    latents = png.with_suffix(".safetensors")
    try:
        check_safetensors(latents, TrainError)
        with safe_open(latents, framework="np") as file:
            return dict(file.metadata() or {})
    except (OSError, SafetensorError, TrainError):
        return {}


def _image(path: Path, caption: str) -> Thumbnail:
    """The thumbnail of a PNG in a folder of `VALIDATION`; one that cannot be read only changes the caption."""
    whole = relative_url("/".join((VALIDATION, *path.parts[-2:])))
    try:
        content = BytesIO(read_file(path))
        with warnings.catch_warnings(action="ignore"), Image.open(content, formats=["PNG"]) as image:
            image.verify()  # the checksums of its chunks, which decoding ignores
        with warnings.catch_warnings(action="ignore"), Image.open(content, formats=["PNG"]) as image:
            image.load()
            white = Image.new("RGBA", image.size, "white")
            small = (Image.alpha_composite(white, image) if image.mode == "RGBA" else image).convert("RGB")
    except UNREADABLE:
        return Thumbnail(f"{caption} {path.name} cannot be read", "", whole)
    small.thumbnail((THUMBNAIL, THUMBNAIL))
    data = BytesIO()
    small.save(data, "JPEG", quality=85)
    return Thumbnail(caption, f"data:image/jpeg;base64,{b64encode(data.getvalue()).decode('ascii')}", whole)


# ---- files of the run ------------------------------------------------------------------------------------------------


def _is_measured(values: Mapping[str, Any]) -> bool:
    """True if all values are numbers (NaN and infinities included), and one is the step."""
    numbers = all(_is_number(value) or (type(value) is float and not math.isfinite(value)) for value in values.values())
    return numbers and _is_number(values.get("step"))


def _is_number(value: Any) -> TypeGuard[float]:
    return type(value) in (int, float) and abs(value) <= LARGEST


def _object(path: Path) -> dict[str, Any] | None:
    """The object in a JSON file; {} without a file, None if it cannot be read."""
    try:
        return _parsed(path.read_bytes()) if path.is_file() else {}
    except OSError:
        return None


def _parsed(data: bytes) -> dict[str, Any] | None:
    """The JSON object in `data`, or None."""
    try:
        value = parse_json(data.decode("utf-8"))
    except ValueError:  # UnicodeDecodeError is a ValueError
        return None
    return value if isinstance(value, dict) else None


def _settings(path: Path) -> Config | None:
    """The settings in qwen.yaml, None if this version cannot read them; the page shows its text in any case."""
    try:
        return load_saved(path)
    except (ConfigError, OSError, ValueError, RecursionError):  # YAML dates and deep nesting
        return None


def _text_of(value: Any) -> str:
    return number(value) if _is_number(value) else str(value)


def _minute(seconds: float) -> str:
    """The date and time, in UTC so that the page is the same everywhere; of a number that is no date, the number."""
    try:
        return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M}"
    except (ValueError, OverflowError, OSError):
        return number(seconds)


def _text(path: Path) -> str | None:
    """The text of a file; empty without a file, None if it cannot be read."""
    try:
        return path.read_text(encoding="utf-8") if path.is_file() else ""
    except (OSError, ValueError):
        return None
