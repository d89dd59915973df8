"""Folders of runs, written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from PIL import Image

from qwen_train.run import METRICS_NAME

KEY = "0123456789abcdef" * 2
"""The key of the sample whose images are written."""


def write_lines(run: Path, *lines: Any, end: str = "\n") -> Path:
    """metrics.jsonl with these lines: text as it is, all else as JSON."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    run.mkdir(parents=True, exist_ok=True)
    (run / METRICS_NAME).write_text("\n".join(text) + end, encoding="utf-8")
    return run / METRICS_NAME


def write_run(run: Path, settings: str = "train:\n  max_steps: 9\n", steps: int = 3) -> Path:
    """The folder of a run with as many steps."""
    write_lines(run, *({"step": step, "loss": 1 / step, "time": 1e9 + step} for step in range(1, steps + 1)))
    (run / "qwen.yaml").write_text(settings, encoding="utf-8")
    return run


def write_image(run: Path, place: str, key: str = KEY, number: int = 1, **words: str) -> Path:
    """An image of the validation, and for the first its latents with these words in the header."""
    folder = run / "validation" / place
    folder.mkdir(parents=True, exist_ok=True)
    if number == 1:
        header = json.dumps({"__metadata__": words}).encode()
        (folder / f"{key}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    path = folder / (f"{key}.png" if number == 1 else f"{key}-{number}.png")
    Image.new("RGBA", (64, 32), (255, 0, 0, 0)).save(path)
    return path
