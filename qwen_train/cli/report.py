"""Terminal front end of `qwen-train report`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.console import print_done
from qwen_train.report import write_report


def run_report(folder: Path) -> int:
    """Write report.html again; the exit code."""
    print_done(write_report(folder))
    return 0
