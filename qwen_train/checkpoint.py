"""Checkpoints: everything that a run is, so that resumed equals uninterrupted, bit for bit.

    checkpoint-500/
      pytorch_lora_weights.safetensors   the adapter, as the stock pipeline loads it
      state.safetensors, state.json      optimizer, learning rate, random numbers; steps and samples done; cache, seed

A checkpoint is complete under its name or not there. Nothing in it is a pickle.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from qwen_cache.format.directory import write_durably
from qwen_cache.format.errors import TrainError
from qwen_train.lora import WEIGHTS_NAME, load_lora, save_lora

NAME = re.compile(r"checkpoint-(\d+)")


@dataclass
class Run:
    """A run as it goes: its parts, the steps that are done, the samples that were trained, and what must not change."""

    transformer: Any
    optimizer: Any
    lr_scheduler: Any
    fixed: dict[str, Any]
    """What a resumed run must share with the checkpoint: the identity of the cache, the seed, the LoRA's settings, and
    those of the batches, which decide what was trained so far."""
    step: int = 0
    samples: int = 0
    """Those that all processes have trained; which batch follows is a function of it (`batch_plan`)."""


def save_checkpoint(folder: Path, run: Run, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep` (0 keeps all)."""
    final, temporary = folder / f"checkpoint-{run.step}", folder / f".checkpoint-{run.step}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    save_lora(run.transformer, temporary / WEIGHTS_NAME)
    tensors: dict[str, torch.Tensor] = {}
    state = {
        "step": run.step,
        "samples": run.samples,
        "fixed": run.fixed,
        "optimizer": _flatten(run.optimizer.state_dict(), "optimizer", tensors),
        "lr_scheduler": _flatten(run.lr_scheduler.state_dict(), "lr_scheduler", tensors),
        "random": _flatten(_random_state(), "random", tensors),
    }
    write_durably(temporary / "state.safetensors", save({name: t.cpu().contiguous() for name, t in tensors.items()}))
    write_durably(temporary / "state.json", json.dumps(state).encode("utf-8"))
    shutil.rmtree(final, ignore_errors=True)
    os.replace(temporary, final)
    for _, old in checkpoints(folder)[:-keep] if keep else []:
        shutil.rmtree(old)
    return final


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every whole checkpoint, oldest first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def load_checkpoint(path: Path, run: Run) -> None:
    """Put the run into the state of the checkpoint."""
    with _reading(path / "state.json") as file:
        state = json.loads(file.read_text(encoding="utf-8"))
        _check_fixed(path, state["fixed"], run.fixed)
    with _reading(path / "state.safetensors") as file:
        tensors = load_file(file)
    with _reading(path / WEIGHTS_NAME) as file:
        load_lora(run.transformer, file)
    run.optimizer.load_state_dict(_unflatten(state["optimizer"], tensors))
    run.lr_scheduler.load_state_dict(_unflatten(state["lr_scheduler"], tensors))
    _set_random_state(_unflatten(state["random"], tensors))
    run.step, run.samples = int(state["step"]), int(state["samples"])


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Whatever is wrong with a file becomes an error that names it."""
    try:
        yield path
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        do = "remove this checkpoint, and resume from the one before"
        raise TrainError(f"this checkpoint is damaged: {error}", where=path, do=do) from None


def _check_fixed(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name in saved | current:
        if saved.get(name) != current.get(name):
            raise TrainError(
                f"this checkpoint was trained with another {name}, so it cannot be resumed",
                where=path,
                expected=str(saved.get(name)),
                found=str(current.get(name)),
                do=f"use the same {name}, or start anew with another train.output_dir",
            )


def _random_state() -> dict[str, Any]:
    """torch's generators, which dropout draws from; all else is drawn from the position (`batches`)."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _flatten(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """`value` as JSON, with its tensors moved to `tensors`; dicts become lists of pairs, since their keys may be
    numbers."""
    if isinstance(value, torch.Tensor):
        tensors[path] = value
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _flatten(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_flatten(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def _unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value:
        return [_unflatten(item, tensors) for item in value["list"]]
    return {key: _unflatten(item, tensors) for key, item in value["dict"]}
