"""Terminal front end of `qwen-train run`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.console import print_done, print_json
from qwen_cache.settings.load import Config
from qwen_train.metrics import METRICS_NAME, read_metrics
from qwen_train.train import train


def run_train(settings: Config, *, resume: bool, encode_from: str | None, as_json: bool) -> int:
    """Train, and print the path of the result; the exit code."""
    result = train(settings, resume=resume, encode_from=encode_from)
    if not as_json:
        print_done(result)
        return 0
    folder = Path(settings.train.output_dir)
    metrics = read_metrics(folder / METRICS_NAME)
    print_json({"result": str(result), "output_dir": str(folder), "metrics": metrics[-1] if metrics else {}})
    return 0
