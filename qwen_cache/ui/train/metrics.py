"""Curves of a run from its metrics.jsonl, read further from where the last look ended.

A line is a JSON object of numbers with its step. Damaged lines are skipped and counted; one without its end is left for
the next look. NaN and infinities are gaps. A file that was replaced, as by a run that is resumed, is read again. Shown
are points of the file alone: of many, the first, last, lowest and highest of each stretch.
"""

from __future__ import annotations

import math
import os
from array import array
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qwen_cache.storage.files import open_file
from qwen_cache.text import parse_json

NAME = "metrics.jsonl"
LOSS = "loss"
TIMES = ("time", "elapsed_seconds")
"""The entries of a line that are not metrics."""
BLOCK = 1 << 20  # bytes in one read
LONGEST = 1 << 16  # bytes of a line; a run writes 300
LARGEST = 1e100  # far above any float32, and small enough that sums and differences do not overflow
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
    """What was read so far of a run's metrics. One thread at a time reads further."""

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
        """Whether the last line has no end yet."""
        return bool(self._rest)

    def snapshot(self) -> tuple[dict[str, tuple[Steps, Values]], dict[str, int]]:
        """Steps and values of each metric, and the last step, the lines and the damaged ones, all of one moment."""
        with self._lock:
            series = {name: (np.array(it.steps), np.array(it.values)) for name, it in self.series.items()}
            return series, {"last": max(self.last, 0), "lines": self.lines, "damaged": self.damaged}

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
            if line.strip():
                self._add(line)
        if self._too_long or len(self._rest) > LONGEST:  # until the end of that line, nothing is kept
            self.damaged, self._too_long, self._rest = self.damaged + (not self._too_long), True, b""

    def _add(self, line: bytes) -> None:
        values = parsed(line)
        if values is None or values["step"] <= self.last:
            self.damaged += 1
            return
        self.last, self.lines = int(values.pop("step")), self.lines + 1
        for name, value in values.items():
            if name in TIMES or (name not in self.series and len(self.series) >= MOST_NAMES):
                continue
            series = self.series.setdefault(name, Series())
            series.steps.append(self.last)
            series.values.append(value)


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
    """Whether this is a number that a run can write: NaN and infinities too, nothing else beyond any float32."""
    if type(value) not in (int, float):
        return False
    return abs(value) <= LARGEST or (type(value) is float and not math.isfinite(value))


# ---- what is shown ---------------------------------------------------------------------------------------------------


def usual_smoothing(count: int) -> float:
    """The weight of `smoothed` for this many values, as in report.html: an average over 5 % of them, or over 20."""
    return 1 - 1 / max(20, 0.05 * count)


def smoothed(values: Values, weight: float) -> Values:
    """The exponential moving average without its bias towards 0 at the beginning, as in TensorBoard.

    A value that is not finite stays as it is, and the average continues after it.
    """
    average, power, made = 0.0, 1.0, array("d")
    for value in values.tolist():
        if not math.isfinite(value):
            made.append(value)
            continue
        average, power = weight * average + (1 - weight) * value, power * weight
        made.append(average / (1 - power))
    return np.array(made, dtype=np.float64)


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


def curves(file: MetricsFile, smoothing: float | None = None, points: int = POINTS) -> dict[str, Any]:
    """The curves as a JSON value: of each metric its steps and values, and the smoothed loss.

    A value that is not finite is None.
    """
    series, facts = file.snapshot()
    made = {name: _curve(steps, values, points) for name, (steps, values) in series.items()}
    if LOSS in series:
        steps, values = series[LOSS]
        smoothing = usual_smoothing(len(values)) if smoothing is None else smoothing
        made[f"{LOSS}_smoothed"] = _curve(steps, smoothed(values, smoothing), points)
    return {**facts, "smoothing": smoothing, "series": made}


def _curve(steps: Steps, values: Values, points: int) -> dict[str, Any]:
    kept = shown(steps, values, points)
    return {
        "steps": steps[kept].tolist(),
        "values": [value if math.isfinite(value) else None for value in values[kept].tolist()],
        "count": len(steps),
        "not_finite": int(np.count_nonzero(~np.isfinite(values))),
    }
