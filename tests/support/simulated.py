"""Both programs on the simulated accelerator, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.simulated_device.build import build, obstacle

from .paths import ROOT
from .waiting import HANG

Job = dict[str, Any]
Report = dict[str, Any]
FAULTS = ("race", "mixed")


def run_jobs(folder: Path, jobs: Mapping[str, Job]) -> dict[str, Report]:
    """The report of each job (`tests/simulated_device/run.py`), all in one process; skips without a compiler."""
    if reason := obstacle():
        pytest.skip(reason)
    build()
    folder.mkdir(parents=True, exist_ok=True)
    given, reports = folder / "jobs.json", folder / "reports.json"
    given.write_text(json.dumps(list(jobs.values()), default=str), encoding="utf-8")
    process = subprocess.run(
        [sys.executable, "-m", "tests.simulated_device.run", str(given), str(reports)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
    )
    assert process.returncode == 0, process.stderr
    return dict(zip(jobs, json.loads(reports.read_text(encoding="utf-8")), strict=True))


def faults(report: Report) -> list[dict[str, Any]]:
    """Races, and operators that mixed devices."""
    return [event for event in report["events"] if event["kind"] in FAULTS]


def waits(step: list[dict[str, Any]]) -> dict[str, int]:
    """How often each kind of wait occurred in a step; the thread that prepares batches may wait for their memory."""
    counts: dict[str, int] = {}
    for event in step:
        if not event["place"].startswith("qwen_train/data/"):
            counts[event["kind"]] = counts.get(event["kind"], 0) + event["count"]
    return counts


def done(report: Report) -> Report:
    """The report of a job that worked and reported no fault."""
    assert report["exit_code"] == 0, report["stderr"][-2000:]
    assert faults(report) == []
    return report
