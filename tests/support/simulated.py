"""Both programs on the simulated accelerator, in a process of its own."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch

from tests.simulated_device.build import build, obstacle

from .paths import ROOT
from .sources import write_mixed, write_pairs
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


# ---- jobs ------------------------------------------------------------------------------------------------------------

SETTINGS = {"train.max_steps": 2, "train.batch_size": 2, "logging.report_to": "none", "train.mixed_precision": "bf16"}
TABLE: dict[str, Any] = {"train.tabulated_modulation": True}
ACTIVATIONS: dict[str, Any] = {"train.offload_activations": True}
TWO_DEVICES = ("--vae-device", "simu:0", "--text-device", "simu:1")


def with_transformer(source: Path, folder: Path, **changes: Any) -> Path:
    """A copy of a model with another random transformer."""
    config = json.loads((source / "transformer" / "config.json").read_text(encoding="utf-8"))
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("transformer"))
    torch.manual_seed(0)
    kept = {name: value for name, value in config.items() if not name.startswith("_")}
    getattr(diffusers, config["_class_name"])(**{**kept, **changes}).bfloat16().save_pretrained(folder / "transformer")
    return folder


def training(cache: Path, model: Path, out: Path, settings: dict[str, Any], **job: Any) -> Job:
    named = {**SETTINGS, "train.output_dir": str(out), **settings}
    assignments = itertools.chain(*(["--set", f"{name}={json.dumps(value)}"] for name, value in named.items()))
    return {"program": "qwen-train", "arguments": ["run", str(cache), "--model", str(model), *assignments], **job}


def sources_in(folder: Path) -> Callable[[str], list[str]]:
    """A source for each variant, as arguments of `build`."""
    pairs, mixed = write_pairs(folder / "pairs"), write_mixed(folder / "mixed")
    others = {"edit": [str(pairs), "--on-error", "skip"], "t2i": [str(pairs / "target_images")]}
    others["qwen-image-21"] = [str(mixed)]
    return lambda variant: others.get(variant, [str(pairs)])
