"""Caches built with small settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .commands import Result, run

SMALL = ["--set", "data.vae_image_size=16384", "--set", "data.condition_image_size=12544", "--dtype", "float32"]
"""A build with these settings takes seconds: images of about 128² pixels for the VAE, 112² for the text encoder."""
SMALL_ONE_IMAGE = [*SMALL[:2], *SMALL[4:]]
"""The same for Qwen-Image-2.1, whose text encoder gets the image of the VAE."""


def build(source: Path, out: Path, model: Path, *options: str) -> Result:
    """`qwen-cache build` with the small settings."""
    index = model / "model_index.json"
    is_21 = index.is_file() and "QwenImage21Pipeline" in index.read_text(encoding="utf-8")
    small = SMALL_ONE_IMAGE if is_21 else SMALL
    return run("qwen-cache", "build", source, "--out", out, "--model", model, *small, *options)


def contents(folder: Path) -> dict[str, bytes]:
    """Every file of a dataset by name, without the lock and the folders that are not part of it."""
    files = (p for p in folder.rglob("*") if p.is_file() and not p.relative_to(folder).parts[0].startswith("."))
    return {str(path.relative_to(folder)): path.read_bytes() for path in files if path.name != "qwen.yaml"}


def plan(source: Path, out: Path, model: Path, *options: str) -> dict[str, Any]:
    """The output of `build --dry-run --json`."""
    result = build(source, out, model, "--dry-run", "--json", *options)
    found = dict(json.loads(result.stdout))
    assert result.code == (2 if found["refused"] else 0), result.stderr
    return found
