"""The output of runs: curves, images, settings, and which of them are running."""

from __future__ import annotations

import json
import math
import os
import re
import socket
import warnings
from array import array
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, lru_cache
from io import BytesIO
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from qwen_cache.errors import ConfigError
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import CONFIG_NAME, read_yaml
from qwen_cache.storage.files import WINDOWS, is_link, open_file, write_durably
from qwen_cache.text import parse_json, without_controls
from qwen_train.lora.files import WEIGHTS_NAME
from qwen_train.run import (
    LOCK,
    METRICS_NAME,
    RUN_FACTS_NAME,
    STEP,
    TIMES,
    VALIDATION,
    VALIDATION_IMAGES,
    image_titles,
)
from qwen_train.training.report import LARGEST, UNREADABLE, smoothed, smoothing
from qwen_train.ui.search import loras_of, steps_of_checkpoints
from qwen_train.ui.workspace import Workspace

# ---- metrics ---------------------------------------------------------------------------------------------------------
# Curves of a run from its metrics.jsonl, read further from where the last look ended.
#
# A line is a JSON object of numbers with its step. Damaged lines are skipped and counted; one without its end is left
# for the next look. NaN and infinities are gaps. A file that was replaced, as by a run that is resumed, is read again.
# Shown are points of the file alone: of many, the first, last, lowest and highest of each stretch.

LOSS = "loss"
BLOCK = 1 << 20  # bytes in one read
LONGEST = 1 << 16  # bytes of a line; a run writes 300
MOST_NAMES = 64  # metrics of a run; one with every option has 14
MOST_BYTES = 1 << 30  # of a file; at 300 bytes a step, 3 million steps
POINTS = 2000  # of a curve as shown: four in each of 500 stretches, more than a screen has columns

Steps = NDArray[np.int64]
Values = NDArray[np.float64]


@dataclass
class Series:
    """A metric: steps in ascending order, and values, which may be NaN or infinite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))


class MetricsFile:
    """The part of a run's metrics that was read so far. One thread at a time reads further."""

    def __init__(self, path: Path) -> None:
        self.path, self._lock = path, Lock()
        self._begin(None)

    def _begin(self, file: tuple[int, int] | None) -> None:
        self._file, self._offset, self._rest, self._too_long = file, 0, b"", False
        self.series: dict[str, Series] = {}
        self.damaged, self.lines, self.last = 0, 0, -1

    @property
    def version(self) -> str:
        """Another text whenever the curves may be other ones."""
        device, inode = self._file or (0, 0)
        return f"{device}-{inode}-{self._offset}"

    @property
    def is_incomplete(self) -> bool:
        """True if the last line has no end yet."""
        return bool(self._rest)

    def snapshot(self) -> tuple[dict[str, tuple[Steps, Values]], dict[str, int]]:
        """Steps and values of each metric, and first and last step, the lines and the damaged ones, of one moment."""
        with self._lock:
            series = {name: (np.array(it.steps), np.array(it.values)) for name, it in self.series.items()}
            first = min((it.steps[0] for it in self.series.values()), default=0)
            facts = {"first": first, "last": max(self.last, 0), "lines": self.lines, "damaged": self.damaged}
            return series, facts

    def look(self) -> None:
        """Read what was added; OSError if there is no such file."""
        with self._lock, open(open_file(self.path, follow_links=False), "rb") as file:
            stat = os.fstat(file.fileno())
            if self._file != (stat.st_dev, stat.st_ino) or stat.st_size < self._offset:
                self._begin((stat.st_dev, stat.st_ino))
            file.seek(self._offset)
            while self._offset < MOST_BYTES and (data := file.read(BLOCK)):
                self._offset += len(data)
                self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).split(b"\n")
        if lines and self._too_long:
            lines, self._too_long = [b"", *lines[1:]], False
        for line in lines:
            if not line.strip():
                continue
            values = parsed(line)
            if values is None or values["step"] <= self.last:
                self.damaged += 1
                continue
            self.last, self.lines = int(values.pop("step")), self.lines + 1
            for name, value in values.items():
                if name not in TIMES and (name in self.series or len(self.series) < MOST_NAMES):
                    series = self.series.setdefault(name, Series())
                    series.steps.append(self.last)
                    series.values.append(value)
        if self._too_long or len(self._rest) > LONGEST:  # until the end of that line, nothing is kept
            self.damaged, self._too_long, self._rest = self.damaged + (not self._too_long), True, b""


def parsed(line: bytes) -> dict[str, float] | None:
    """The values of a line by their names; None if it is damaged."""
    if len(line) > LONGEST:
        return None
    try:
        values = parse_json(line.decode("utf-8"))
    except ValueError:  # UnicodeDecodeError is a ValueError
        return None
    if not isinstance(values, dict) or not all(map(_is_measured, values.values())):
        return None
    step = values.get("step")
    return values if type(step) is int and 0 <= step < 1 << 53 else None


def _is_measured(value: Any) -> bool:
    """True if this is a number that a run can write: NaN and infinities too, nothing else beyond any float32."""
    if type(value) not in (int, float):
        return False
    return abs(value) <= LARGEST or (type(value) is float and not math.isfinite(value))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def shown(steps: Steps, values: Values, points: int = POINTS) -> NDArray[np.int64]:
    """Which of the points are shown: at most about `points`, all of them if there are fewer.

    The steps are divided into stretches of equal length; of each, its first and last point and the lowest and highest
    are kept, and one that is not finite. So a line through them covers the same pixels as one through all.
    """
    if len(steps) <= points:
        return np.arange(len(steps))
    width = (steps[-1] - steps[0] + 1) / max(1, points // 4)
    stretches = ((steps - steps[0]) / width).astype(np.int64)
    begins = np.concatenate(([0], np.flatnonzero(np.diff(stretches)) + 1, [len(steps)]))
    kept = [i for begin, end in pairwise(begins.tolist()) for i in _outline(values[begin:end], begin)]
    return np.array(kept)


def _outline(values: Values, begin: int) -> list[int]:
    """The points to show of a stretch that begins at the point `begin`."""
    finite = np.flatnonzero(np.isfinite(values))
    kept = {0, len(values) - 1}
    if len(finite):
        kept |= {int(finite[values[finite].argmin()]), int(finite[values[finite].argmax()])}
    if len(finite) < len(values):
        kept.add(int(np.flatnonzero(~np.isfinite(values))[0]))
    return [begin + i for i in sorted(kept)]


WHOLE = (0, 1 << 53)
"""The range of all steps."""


def curves(
    file: MetricsFile, weight: float | None = None, points: int = POINTS, between: tuple[int, int] = WHOLE
) -> dict[str, Any]:
    """The curves as a JSON value: of each metric its steps and values, and the smoothed loss.

    A value that is not finite is None. Of each curve, the part `between` two steps is shown, with a point before and
    after it; smoothed is the whole.
    """
    series, facts = file.snapshot()
    made = {name: _curve(steps, values, points, between) for name, (steps, values) in series.items()}
    if LOSS in series:
        steps, values = series[LOSS]
        weight = smoothing(len(values)) if weight is None else weight
        made[f"{LOSS}_smoothed"] = _curve(steps, np.array(smoothed(values.tolist(), weight)), points, between)
    return {**facts, "smoothing": weight, "series": made}


def _curve(steps: Steps, values: Values, points: int, between: tuple[int, int]) -> dict[str, Any]:
    count, (first, last) = len(steps), between
    inside = slice(max(0, np.searchsorted(steps, first) - 1), np.searchsorted(steps, last, "right") + 1)
    steps, values = steps[inside], values[inside]
    kept = shown(steps, values, points)
    return {
        "steps": steps[kept].tolist(),
        "values": [value if math.isfinite(value) else None for value in values[kept].tolist()],
        "count": count,
        "not_finite": int(np.count_nonzero(~np.isfinite(values))),
    }


# ---- images ----------------------------------------------------------------------------------------------------------
# The validation images of a run, by the fixed layout of its folder, and small copies of them.
#
#     validation/
#       step-500/KEY.safetensors, KEY.png   generated after step 500; of several scales or strengths also KEY-2.png, …
#       target/, controls/                  what belongs to them; controls also as KEY-2.png, …
#
# Only files with these names are listed and answered, never through a link. Of the latents only the header is read, for
# name and prompt. A PNG that is damaged or too large is refused.

PNG = re.compile(r"([0-9a-f]{32})(?:-([1-9]\d{0,3}))?\.png")
PATH = re.compile(rf"(step-\d{{1,15}}|target|controls)/{PNG.pattern}")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
SIZES = (160, 320, 640, 1280)
"""Longest sides of small copies, in pixels."""
LONGEST_HEADER = 1 << 20  # bytes; names and prompts have hundreds
LARGEST_FILE = 1 << 28  # bytes of a PNG


def listed(run: Path) -> dict[str, Any]:
    """The samples of a run with their images, and how many latents wait for `qwen-train decode`, as JSON.

    An image is {"path": …, "version": …, "size": …}: its place in the folder, a text that changes with the file, and
    its width and height.
    """
    steps = sorted((int(match[1]), name) for name in _names(run / VALIDATION) if (match := STEP.fullmatch(name)))
    samples: dict[str, dict[str, Any]] = {}
    waiting = 0
    for step, name in steps:
        found = _images(run, name)
        stems = (file.removesuffix(".safetensors") for file in _names(run / VALIDATION / name) if file.endswith("s"))
        latents = {stem for stem in stems if re.fullmatch(r"[0-9a-f]{32}", stem)}
        waiting += len(latents - found.keys())
        for key in sorted(latents | found.keys()):
            if key not in samples:
                samples[key] = _sample(run, name, key)
            if key in found:
                samples[key]["steps"].append({"step": step, "images": found[key]})
    for place in ("target", "controls"):
        for key, images in _images(run, place).items():
            if key in samples:
                samples[key][place] = images
    shown = sorted(samples.values(), key=lambda sample: (_natural(sample["name"]), sample["key"]))
    return {"samples": [each for each in shown if each["steps"]], "waiting": waiting, "steps": [it for it, _ in steps]}


def _sample(run: Path, folder: str, key: str) -> dict[str, Any]:
    words = metadata(run / VALIDATION / folder / f"{key}.safetensors")
    titles = [""]
    with suppress(ValueError):
        titles = image_titles(words)
    return {
        "key": key,
        "name": words.get("name", key),
        "prompt": words.get("prompt", ""),
        "titles": titles,
        "controls": [],
        "target": [],
        "steps": [],
    }


def _images(run: Path, folder: str) -> dict[str, list[dict[str, Any]]]:
    """The PNGs in a folder of the validation, by the key of their sample, in the order of their numbers."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name in _names(run / VALIDATION / folder):
        match = PNG.fullmatch(name)
        path = run / VALIDATION / folder / name
        if match:
            with suppress(OSError):
                stat, size = path.stat(), _size(path)
                image = {"path": f"{folder}/{name}", "version": f"{stat.st_mtime_ns}-{stat.st_size}", "size": size}
                found.setdefault(match[1], []).append((int(match[2] or 1), image))
    return {key: [image for _, image in sorted(images, key=lambda it: it[0])] for key, images in found.items()}


def _size(path: Path) -> tuple[int, int]:
    """Width and height in the header of a PNG; zeros if it has none. OSError for a link."""
    with open(open_file(path, follow_links=False), "rb") as file:
        head = file.read(24)
    if len(head) < 24 or not head.startswith(SIGNATURE):
        return 0, 0
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:])


def _names(folder: Path) -> list[str]:
    """The names in a folder that is not a link; none if there is no such folder."""
    if is_link(folder) or is_link(folder.parent):
        return []
    with suppress(OSError):
        return os.listdir(folder)
    return []


def metadata(latents: Path) -> dict[str, str]:
    """The texts in the header of a safetensors file; {} if it is missing, a link, or damaged."""
    with suppress(OSError, ValueError):
        with open(open_file(latents, follow_links=False), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length).decode("utf-8")) if length <= LONGEST_HEADER else {}
        words = header.get("__metadata__") if isinstance(header, dict) else None
        if isinstance(words, dict):
            return {str(name): str(value) for name, value in words.items()}
    return {}


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts prompts/10 after prompts/9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


# ---- one image -------------------------------------------------------------------------------------------------------


def read(run: Path, path: str) -> bytes:
    """The bytes of an image of the run; RefusedError for any other path, and for links."""
    if not PATH.fullmatch(path):
        raise RefusedError(404, f"{path!r} is no image of a run", "choose an image on the page")
    folder, _, name = path.partition("/")
    if any(map(is_link, (run / VALIDATION, run / VALIDATION / folder))):
        raise RefusedError(403, f"{path}: links are not followed", "copy the files to their place")
    try:
        with open(open_file(run / VALIDATION / folder / name, follow_links=False), "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise RefusedError(404, f"{path}: {error.strerror}", "reload the page") from None
    if len(data) > LARGEST_FILE or not data.startswith(SIGNATURE):
        raise RefusedError(422, f"{path} is no PNG, or too large", "decode it again with `qwen-train decode`")
    return data


def small(data: bytes, size: int) -> bytes:
    """A PNG as a JPEG with this longest side, on white; RefusedError if it is damaged."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.verify()  # the checksums of its chunks, which decoding ignores
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.load()
            white = Image.new("RGBA", image.size, "white")
            copy = (Image.alpha_composite(white, image) if image.mode == "RGBA" else image).convert("RGB")
    except UNREADABLE:
        raise RefusedError(422, "this PNG cannot be read", "decode it again with `qwen-train decode`") from None
    copy.thumbnail((size, size), Image.Resampling.LANCZOS)
    made = BytesIO()
    copy.save(made, "JPEG", quality=90)
    return made.getvalue()


def images_at_a_time(run: Path) -> int | None:
    """The images that a run generates at a time; None where it has not said so."""
    with suppress(OSError, ValueError), open(open_file(run / RUN_FACTS_NAME, follow_links=False), "rb") as file:
        facts = parse_json(file.read(LONGEST_HEADER).decode("utf-8"))
        count = facts.get(VALIDATION_IMAGES) if isinstance(facts, dict) else None
        return count if type(count) is int else None
    return None


def versions(run: Path) -> Iterator[str]:
    """A text for each folder of images, which changes when an image comes."""
    for name in sorted(_names(run / VALIDATION)):
        with suppress(OSError):
            yield f"{name} {(run / VALIDATION / name).stat().st_mtime_ns}"


# ---- folders ---------------------------------------------------------------------------------------------------------
# The caches, models and runs in the opened folders, found by their files without opening more than these.
#
# Looked for is a few folders deep, not through links, and not inside a cache or a run. A run is a folder with its
# settings and metrics; whether it is running, its lock says.

NOTE_NAME = "note.txt"
NOTE_BYTES = 1 << 14
NEWEST = 2  # checkpoints that are asked for a LoRA: the newest may just be removed
KEPT_SETTINGS = 512  # runs; 10 kB each
TAIL = 1 << 16  # bytes at the end of metrics.jsonl: the newest 200 lines
HOLDER = re.compile(r"process (\d+) on (.*)")


def is_run(folder: Path) -> bool:
    """True if a run has written to the folder: its files, not links to files elsewhere."""
    return all((folder / name).is_file() and not is_link(folder / name) for name in (METRICS_NAME, CONFIG_NAME))


def run_at(workspace: Workspace, name: str) -> Path:
    """The folder of a run in the opened folders; RefusedError if it is none."""
    folder = workspace.inside(name)
    if not is_run(folder):
        raise RefusedError(404, f"{name} is not the folder of a run", "choose another run")
    return folder


def new_name(workspace: Workspace, wanted: str) -> str:
    """A folder for a new run: this one, or with the first number that is free."""
    name = re.sub(r"-\d+$", "", wanted) if (workspace.folder / wanted).exists() else wanted
    for number in range(1, 10_000):
        free = name if number == 1 else f"{name}-{number}"
        if not (workspace.folder / free).exists():
            return free
    return name


# ---- one run ---------------------------------------------------------------------------------------------------------


def about(workspace: Workspace, folder: Path) -> dict[str, Any]:
    """A run in the list of runs, as JSON."""
    values, last = settings_of(folder), newest(folder)
    checkpoints = steps_of_checkpoints(folder)
    loras = loras_of(folder, checkpoints[-NEWEST:])
    maximum = values.get("train.max_steps", 1000)
    return {
        "folder": workspace.shown(folder),
        "running": is_running(folder),
        "step": last.get("step", 0),
        "max_steps": maximum if type(maximum) is int else None,
        "loss": _finite(last.get("loss")),
        "time": _finite(last.get("time")) or (folder / METRICS_NAME).stat().st_mtime,
        "seconds": _finite(last.get("elapsed_seconds")),
        "checkpoint": max(checkpoints, default=None),
        "lora": {"path": workspace.shown(loras[0].path), "step": loras[0].step} if loras else None,
        "model": values.get("model.path"),
        "note": note_of(folder),
    }


def note_of(folder: Path) -> str:
    """The user's note on a run, in a file of its folder; empty without one."""
    with suppress(OSError), open(open_file(folder / NOTE_NAME, follow_links=False), "rb") as file:
        return without_controls(file.read(NOTE_BYTES).decode("utf-8", "replace"))
    return ""


def write_note(folder: Path, text: str, seen: str) -> str:
    """Replace the note that the user has `seen`; RefusedError if it was changed meanwhile, or this one is too long."""
    if note_of(folder) != seen:
        raise RefusedError(409, "another window has changed this note", "copy yours, and reload the page")
    data = without_controls(text).strip().encode("utf-8")
    if len(data) > NOTE_BYTES:
        raise RefusedError(413, f"this note has {len(data)} bytes", f"write at most {NOTE_BYTES}")
    if data:
        write_durably(folder / NOTE_NAME, data)
    else:
        (folder / NOTE_NAME).unlink(missing_ok=True)
    return note_of(folder)


def newest(folder: Path) -> dict[str, float]:
    """The values of the last whole line of the metrics; {} without one."""
    with suppress(OSError), open(open_file(folder / METRICS_NAME, follow_links=False), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        for line in reversed(file.read().split(b"\n")[:-1]):
            if (values := parsed(line)) is not None:
                return values
    return {}


def is_running(folder: Path) -> bool:
    """True if the process that is named in the run's lock exists; the lock itself is left alone, a run may want it."""
    try:
        with open(open_file(folder / LOCK, follow_links=False), "rb") as file:
            file.seek(1)  # Windows lets nobody else read the first byte of a lock
            match = HOLDER.search(file.read(1 << 12).decode("utf-8", "replace"))
    except OSError:
        return False
    if match is None or match[2].strip() != socket.gethostname():
        return match is not None  # of another machine only the file is seen; a run removes it at its end
    if WINDOWS:  # os.kill would send it Ctrl-C
        return True
    try:
        os.kill(int(match[1]), 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


def _finite(value: float | None) -> float | None:
    return None if value is None or not abs(value) <= LARGEST else value


# ---- loras -----------------------------------------------------------------------------------------------------------


def loras(folder: Path) -> list[dict[str, Any]]:
    """The LoRAs of a run as JSON, the newest first: the step, None for that of its end, and bytes."""
    found = loras_of(folder, steps_of_checkpoints(folder))
    return [{"step": each.step, "bytes": size} for each in found for size in _sizes(_weights_of(folder, each.step))]


def lora(folder: Path, step: int | None) -> tuple[int, Iterator[bytes]]:
    """The bytes of a LoRA, and their number; RefusedError if there is none, or it is a link.

    It stays readable when its checkpoint is removed meanwhile.
    """
    path = _weights_of(folder, step)
    try:
        if is_link(path.parent):
            raise IsADirectoryError
        file = open(open_file(path, follow_links=False), "rb")  # noqa: SIM115 (closed by what reads it)
    except OSError:
        raise RefusedError(404, "there is no such LoRA in this run", "reload the page") from None
    size = os.fstat(file.fileno()).st_size

    def parts() -> Iterator[bytes]:
        left = size
        with file:
            while left and (data := file.read(min(BLOCK, left))):
                left -= len(data)
                yield data

    return size, parts()


def _weights_of(folder: Path, step: int | None) -> Path:
    return (folder if step is None else folder / f"checkpoint-{step}") / WEIGHTS_NAME


def _sizes(file: Path) -> list[int]:
    """The size of a file; none if there is no such file, or it is a link."""
    with suppress(OSError):
        return [] if is_link(file) or is_link(file.parent) else [file.stat().st_size]
    return []


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a run saved, by their dotted names; {} if its file cannot be read."""
    with suppress(ConfigError, OSError):
        file = folder / CONFIG_NAME
        stat = file.stat()
        return dict(_settings_in(file, stat.st_mtime_ns, stat.st_size))
    return {}


@lru_cache(KEPT_SETTINGS)
def _settings_in(file: Path, changed: int, size: int) -> dict[str, Any]:
    """`settings_of`, kept until the file changes: the list of runs asks for all of them every few seconds."""
    value = read_yaml(file)
    return flat(value, known_settings()) if isinstance(value, dict) else {}


@cache
def known_settings() -> frozenset[str]:
    """The dotted names of all settings."""
    return frozenset(each.key for each in all_settings())


def flat(value: Mapping[Any, Any], known: frozenset[str], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: a mapping that is the value of a known setting stays whole."""
    made: dict[str, Any] = {}
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, dict) and key not in known:
            made |= flat(inner, known, f"{key}.")
        else:
            made[key] = inner
    return made


OF_EVERY_RUN = ("train.output_dir",)
"""Settings that differ between any two runs."""


def differing(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that differ between the runs: key, and each run's value as text, None where it has none."""
    keys = dict.fromkeys(key for settings in runs.values() for key in settings)
    rows = []
    for key in keys:
        texts = [_text(settings[key]) if key in settings else None for settings in runs.values()]
        if key not in OF_EVERY_RUN and len(set(texts)) > 1:
            rows.append({"key": key, "values": texts})
    return rows


def _text(value: Any) -> str:
    """A value as it is compared and shown: text as it is typed, all else as JSON; 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
