"""Terminal front end of `qwen-train report`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.terminal import print_done, print_json
from qwen_train.run import in_one_process
from qwen_train.training.report import write_report


def run_report(folder: Path, *, as_json: bool) -> int:
    """Write report.html again; the exit code."""
    in_one_process("report")
    report = write_report(folder)
    if as_json:
        print_json({"report": str(report)})
    else:
        print_done(report)
    return 0
