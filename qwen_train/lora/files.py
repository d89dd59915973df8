"""Find the file of a LoRA without torch, so that a path without one is refused before anything is loaded."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from qwen_cache.errors import ConfigError, TrainError

WEIGHTS_NAME = "pytorch_lora_weights.safetensors"
"""The LoRA in the output folder of a run, by the name that diffusers' pipelines look for."""


@dataclass(frozen=True)
class WeightedLora:
    """A LoRA file and its weight."""

    file: Path
    weight: float = 1.0


def parse_lora(text: str) -> WeightedLora:
    """Parse `PATH` or `PATH:weight`, the path of a file or of a run's folder."""
    path, _, number = text.rpartition(":")
    try:
        weight = float(number)
    except ValueError:
        weight = math.nan
    if not path or not math.isfinite(weight):
        path, weight = text, 1.0
    return WeightedLora(find_lora(Path(path)), weight)


def find_lora(source: Path) -> Path:
    """The LoRA file: `source`, or the one in a run's folder; TrainError if there is none."""
    file = source / WEIGHTS_NAME if source.is_dir() else source
    if (source / "transformer").is_dir() and not file.is_file():
        do = f"they are in {source / 'transformer'}, as from_pretrained and other programs take them"
        raise TrainError("this run trained all weights", where=source, do=do)
    if not file.is_file() or file.suffix != ".safetensors":
        expected = f"{WEIGHTS_NAME} or a .safetensors file"
        do = "name the output folder of a finished run, or the file of a LoRA"
        raise TrainError("no LoRA here", where=source, expected=expected, do=do)
    return file


def find_start(path: Path) -> Path:
    """The file of `train.lora.weights`; ConfigError if there is none."""
    file = path / WEIGHTS_NAME if path.is_dir() else path
    if file.is_file():
        return file
    expected, do = f"{WEIGHTS_NAME}, or another file", "name the output folder of a finished run, or the file of a LoRA"
    raise ConfigError("train.lora.weights: no LoRA here", where=path, expected=expected, do=do)


def check_export(form: str, out: Path) -> None:
    """ConfigError if a LoRA in this form cannot be written to `out`."""
    folder = {"merged": "merged weights go", "peft": "peft's files go"}
    if form not in folder and (out.suffix != ".safetensors" or out.is_dir()):
        expected, do = "a name that ends in .safetensors", "name a file, such as --out lora.safetensors"
        raise ConfigError("a LoRA is one file", where="--out", expected=expected, found=out, do=do)
    if form in folder and out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(f"{folder[form]} into a new folder", where="--out", found=f"{out}, which is not empty")
