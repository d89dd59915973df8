"""Checkpoints: the whole state of a run, so that a resumed run equals an uninterrupted one, bit for bit on one CPU.

    checkpoint-500/
      pytorch_lora_weights.safetensors   the adapter, as the stock pipeline loads it; or all weights, in transformer/
      pytorch_lora_weights_ema.safetensors   their EMA, if there is one; or transformer_ema/
      state.safetensors, state.json      optimizer, learning rate, random state; step and samples; cache, seed

A checkpoint is complete under its name or absent: if writing fails, the earlier ones stay. It contains no pickle. It
does not depend on the number of processes: sharded tensors are gathered when saved and sharded again on resume.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from qwen_cache.errors import TrainError
from qwen_cache.models.devices import accelerator, device_module
from qwen_cache.storage.durable import sync_file, whole_file, whole_folder, write_durably
from qwen_train.model.ema import Ema
from qwen_train.model.sharding import all_gather_object, distribute_like, full_tensor
from qwen_train.weights import gather_weights, read_weights, weights_path, write_weights

NAME = re.compile(r"checkpoint-(\d+)")
EMA_SUFFIX = "_ema"


@dataclass
class Run:
    """The state of a run: its components, its progress, and the settings that must not change."""

    transformer: Any
    optimizer: Any
    lr_scheduler: Any
    fixed: dict[str, Any]
    """What a resumed run must share with the checkpoint: the cache's identity, the seed, the training method, the
    optimizer, and the batch settings, which decide which samples were trained so far."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Written into the LoRA file: the model and the cache that it was trained on."""
    step: int = 0
    consumed_samples: int = 0
    """Samples that all processes have trained; this number determines the next batch (`batch_plan`)."""
    ema: Ema | None = None


def save_checkpoint(folder: Path, run: Run, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep` (0 keeps all); every process takes part.

    Raises TrainError in every process if writing fails.
    """
    main, final = PartialState().is_main_process, folder / f"checkpoint-{run.step}"
    weights = _all_weights(run, main)
    tensors: dict[str, Tensor] | None = {} if main else None
    state = {
        "step": run.step,
        "samples": run.consumed_samples,
        "fixed": run.fixed,
        "ema": run.ema and run.ema.updates,
        "optimizer": _flatten(run.optimizer.state_dict(), "optimizer", tensors),
        "lr_scheduler": _flatten(run.lr_scheduler.state_dict(), "lr_scheduler", tensors),
        "random": _flatten(all_gather_object(_random_state()), "random", tensors),
    }
    with _raised_everywhere(f"checkpoint-{run.step}", folder):
        if tensors is not None:
            _write(final, run, weights, tensors, state)
            for _, old in checkpoints(folder)[:-keep] if keep else []:
                shutil.rmtree(old)
    return final


def save_result(folder: Path, run: Run, dtype: torch.dtype) -> Path:
    """Write the trained weights and their EMA, floating-point tensors in `dtype`; the path of the trained weights."""
    weights = _all_weights(run, PartialState().is_main_process)
    with _raised_everywhere("the result", folder):
        for suffix, values in weights.items():
            path = weights_path(run.transformer, folder, suffix)
            if not values:
                continue
            cast = {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
            if path.suffix:
                write_weights(run.transformer, cast, path, run.origin)
                continue
            with whole_folder(path) as temporary:
                write_weights(run.transformer, cast, temporary, run.origin)
    return weights_path(run.transformer, folder)


def _all_weights(run: Run, keep: bool) -> dict[str, dict[str, Tensor]]:
    """The trained weights and, if there is one, their EMA, by the suffix of their names."""
    weights = {"": gather_weights(run.transformer, keep=keep)}
    if run.ema:
        with run.ema.swapped():
            weights[EMA_SUFFIX] = gather_weights(run.transformer, keep=keep)
    return weights


def _write(
    final: Path, run: Run, weights: dict[str, dict[str, Tensor]], tensors: dict[str, Tensor], state: dict[str, Any]
) -> None:
    with whole_folder(final) as temporary:
        for suffix, values in weights.items():
            write_weights(run.transformer, values, weights_path(run.transformer, temporary, suffix), run.origin)
        _write_tensors(temporary / "state.safetensors", tensors)
        write_durably(temporary / "state.json", json.dumps(state).encode("utf-8"))


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    """As `write_durably`, without a copy in memory: an optimizer's state can be larger than the model."""
    seen: set[int] = set()
    for name, tensor in tensors.items():  # optimizers may share tensors; safetensors refuses that
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    with whole_file(path) as temporary:
        save_file(tensors, temporary)
        sync_file(temporary)


@contextmanager
def _raised_everywhere(what: str, folder: Path) -> Iterator[None]:
    """Turn a failed write of the main process into a TrainError in every process, so that none waits for another."""
    problem = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    problem = all_gather_object(problem)[0]
    if problem is not None:
        newest = checkpoints(folder)
        raise TrainError(
            f"{what} cannot be written: {problem}",
            where=folder,
            do=f"free disk space; {newest[-1][1].name} is kept, continue with --resume"
            if newest
            else "free disk space",
        )


def checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Step and path of every complete checkpoint, oldest first."""
    matches = [(NAME.fullmatch(path.name), path) for path in folder.glob("checkpoint-*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def load_checkpoint(path: Path, run: Run) -> None:
    """Restore the run from the checkpoint; TrainError if it is damaged, or belongs to other settings."""
    with _reading(path / "state.json") as file:
        state = json.loads(file.read_text(encoding="utf-8"))
        _check_fixed(path, state["fixed"], run.fixed)
    with _reading(path / "state.safetensors") as file:
        tensors = load_file(file)
    with _reading(weights_path(run.transformer, path)) as weights:
        read_weights(run.transformer, weights)
    if run.ema:
        run.ema.updates = int(state["ema"])
        with _reading(weights_path(run.transformer, path, EMA_SUFFIX)) as weights, run.ema.swapped():
            read_weights(run.transformer, weights)
    run.optimizer.load_state_dict(_distributed(_unflatten(state["optimizer"], tensors), run.optimizer))
    run.lr_scheduler.load_state_dict(_unflatten(state["lr_scheduler"], tensors))
    run.step, run.consumed_samples = int(state["step"]), int(state["samples"])
    _set_random_state(_unflatten(state["random"], tensors), run)


@contextmanager
def _reading(path: Path) -> Iterator[Path]:
    """Turn any fault of the file into a TrainError that names it."""
    try:
        yield path
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        do = "remove this checkpoint, and resume from the previous one"
        raise TrainError(f"this checkpoint is damaged: {error}", where=path, do=do) from None


def _check_fixed(path: Path, saved: dict[str, Any], current: dict[str, Any]) -> None:
    for name in saved | current:
        if saved.get(name) != current.get(name):
            was, now = _differing(saved.get(name), current.get(name))
            raise TrainError(
                f"this checkpoint was trained with another {name}, so it cannot be resumed",
                where=path,
                expected=was,
                found=now,
                do=f"use the same {name}, or start again with another train.output_dir",
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Both values as text; of dicts, only the entries that differ."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return _shown(was), _shown(now)
    names = [name for name in was | now if was.get(name) != now.get(name)]
    before, after = (", ".join(f"{name} {_shown(side.get(name))}" for name in names) for side in (was, now))
    return before, after


def _shown(value: Any) -> str:
    return "none, or without effect" if value is None else str(value)


def _distributed(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state, each tensor sharded like its parameter."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                values[name] = distribute_like(value, parameters[index])
    return state


def _random_state() -> dict[str, Any]:
    """The state of torch's generators, used by dropout; everything else is seeded by the position (`batches`)."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if device := accelerator():
        state[device.type] = device_module(device).get_rng_state()
    return state


def _set_random_state(states: list[dict[str, Any]], run: Run) -> None:
    """Restore this process's state; if the number of processes has changed, seed from the step's position."""
    process = PartialState()
    if len(states) != process.num_processes:
        torch.manual_seed(run.fixed["seed"] + run.consumed_samples + process.process_index)
        return
    state = states[process.process_index]
    torch.set_rng_state(state["cpu"])
    device = accelerator()
    if device and device.type in state:
        device_module(device).set_rng_state(state[device.type])


def _flatten(value: Any, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """`value` as JSON, its tensors moved to `tensors` unless that is None; dicts become lists of pairs, since keys may
    be numbers."""
    if isinstance(value, Tensor):
        gathered = full_tensor(value)
        if tensors is not None:
            tensors[path] = gathered.cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _flatten(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return {"list": [_flatten(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"{path} is a {type(value).__name__}, which a checkpoint cannot hold")


def _unflatten(value: Any, tensors: dict[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "list" in value:
        return [_unflatten(item, tensors) for item in value["list"]]
    return {key: _unflatten(item, tensors) for key, item in value["dict"]}
