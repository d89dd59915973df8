"""Terminal front end of `qwen-train run`."""

from __future__ import annotations

from qwen_cache.console import print_done
from qwen_cache.settings.load import Config
from qwen_train.train import train


def run_train(settings: Config, *, resume: bool, encode_from: str | None) -> int:
    """Train, and print the path of the result; the exit code."""
    print_done(train(settings, resume=resume, encode_from=encode_from))
    return 0
