"""The progress line of a build: samples, samples per second, bytes written, and the time left; with Ray by worker."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from qwen_cache.encode.build import progress_line
from qwen_cache.encode.write import Progress

from .support.caches import build
from .support.fake_lanes import FakeLanes


def shown(capsys: pytest.CaptureFixture[str], *states: Progress, seconds: float = 10.0) -> str:
    """The line after these states of a build of 40 samples, after this time."""
    with pytest.MonkeyPatch.context() as patch, progress_line("encoding", 40) as show:
        begin = time.monotonic()
        patch.setattr(time, "monotonic", lambda: begin + seconds)
        for state in states:
            show(state)
    return " ".join(capsys.readouterr().err.split())


def test_samples_of_an_earlier_run_do_not_count_as_speed(capsys: pytest.CaptureFixture[str]) -> None:
    line = shown(capsys, Progress(10), Progress(25, running=5, bytes=3_500_000))
    assert re.search(r"encoding .* 30/40, (1\.99|2\.00) samples/s, 3\.5 MB ", line), line
    assert "left" in line


def test_few_workers_are_named_and_of_many_the_slowest_and_the_fastest(capsys: pytest.CaptureFixture[str]) -> None:
    few = shown(capsys, Progress(0), Progress(40, bytes=12, rates={"10.0.0.1": 1.5, "10.0.0.2": 2.25}))
    assert few.endswith("elapsed 10.0.0.1: 1.50 samples/s, 10.0.0.2: 2.25 samples/s")
    many = shown(capsys, Progress(0), Progress(8, rates={f"10.0.0.{i}": i / 4 for i in range(1, 17)}))
    assert many.endswith("left 16 workers: 0.25 to 4.00 samples/s each")


def test_a_build_ends_with_its_line_on_stderr(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], fast: list[FakeLanes]
) -> None:
    """`--json` leaves stdout to its one document."""
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--json")
    assert re.search(r"encoding .* 4/4, \d+\.\d\d samples/s, [\d.]+ [kM]B +\d:\d\d elapsed", result.stderr)
    assert result.stdout.startswith("{")
    assert "samples/s" not in result.stdout
