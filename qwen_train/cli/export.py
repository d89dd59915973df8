"""Terminal front end of `qwen-train export`."""

from __future__ import annotations

from pathlib import Path

from qwen_cache.console import print_done
from qwen_train.lora.export import export


def run_export(source: Path, to: str, out: Path, model: str | None) -> int:
    """Convert a LoRA for other programs; the exit code."""
    print_done(export(source, to, out, model))
    return 0
