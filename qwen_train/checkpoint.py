"""Checkpoints: everything that a run is, so that resumed equals uninterrupted, bit for bit on one CPU.

    checkpoint-500/
      pytorch_lora_weights.safetensors   the adapter, as the stock pipeline loads it; or all weights, in transformer/
      pytorch_lora_weights_ema.safetensors   their average, where there is one; or transformer_ema/
      state.safetensors, state.json      optimizer, learning rate, random numbers; steps and samples done; cache, seed

A checkpoint is complete under its name or not there: when it cannot be written, those before it stay. Nothing in it is
a pickle. It is of no number of processes: what they hold in parts is gathered, and dealt out to those that resume.
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
from qwen_cache.storage.durable import sync_file, whole_file, whole_folder, write_durably
from qwen_train.model.ema import Ema
from qwen_train.model.sharding import alike, of_all, whole
from qwen_train.weights import gather_weights, read_weights, weights_path, write_weights

NAME = re.compile(r"checkpoint-(\d+)")
EMA_SUFFIX = "_ema"


@dataclass
class Run:
    """A run as it goes: its parts, the steps that are done, the samples that were trained, and what must not change."""

    transformer: Any
    optimizer: Any
    lr_scheduler: Any
    fixed: dict[str, Any]
    """What a resumed run must share with the checkpoint: the identity of the cache, the seed, what is trained and by
    which optimizer, and the settings of the batches, which decide what was trained so far."""
    origin: dict[str, Any] = field(default_factory=dict)
    """What is written into a LoRA's file: the model and the cache that it is of."""
    step: int = 0
    samples: int = 0
    """Those that all processes have trained; which batch follows is a function of it (`batch_plan`)."""
    ema: Ema | None = None


def save_checkpoint(folder: Path, run: Run, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep` (0 keeps all); every process has to take part.

    TrainError in each of them when it cannot be written.
    """
    main, final = PartialState().is_main_process, folder / f"checkpoint-{run.step}"
    weights = _all_weights(run, main)
    tensors: dict[str, Tensor] | None = {} if main else None
    state = {
        "step": run.step,
        "samples": run.samples,
        "fixed": run.fixed,
        "ema": run.ema and run.ema.updates,
        "optimizer": _flatten(run.optimizer.state_dict(), "optimizer", tensors),
        "lr_scheduler": _flatten(run.lr_scheduler.state_dict(), "lr_scheduler", tensors),
        "random": _flatten(of_all(_random_state()), "random", tensors),
    }
    with _told_to_all(f"checkpoint-{run.step}", folder):
        if tensors is not None:
            _write(final, run, weights, tensors, state)
            for _, old in checkpoints(folder)[:-keep] if keep else []:
                shutil.rmtree(old)
    return final


def save_result(folder: Path, run: Run, dtype: torch.dtype) -> Path:
    """Write what was trained, and its average; floating-point weights in `dtype`. The path of the first."""
    weights = _all_weights(run, PartialState().is_main_process)
    with _told_to_all("the result", folder):
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
    """What was trained and, where there is one, its average, by the suffix of their names."""
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
    """As `write_durably`, from memory that is there: the state of an optimizer can be larger than the model."""
    seen: set[int] = set()
    for name, tensor in tensors.items():  # which optimizers may share, and safetensors may not
        tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
        seen.add(tensor.data_ptr())
    with whole_file(path) as temporary:
        save_file(tensors, temporary)
        sync_file(temporary)


@contextmanager
def _told_to_all(what: str, folder: Path) -> Iterator[None]:
    """What the main process cannot write becomes a TrainError in each: none waits for one that has ended."""
    problem = None
    try:
        yield
    except (OSError, SafetensorError) as error:
        problem = getattr(error, "strerror", None) or str(error)
    problem = of_all(problem)[0]
    if problem is not None:
        newest = checkpoints(folder)
        raise TrainError(
            f"{what} cannot be written: {problem}",
            where=folder,
            do=f"make room; {newest[-1][1].name} is kept, go on from it with --resume" if newest else "make room",
        )


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
    with _reading(weights_path(run.transformer, path)) as weights:
        read_weights(run.transformer, weights)
    if run.ema:
        run.ema.updates = int(state["ema"])
        with _reading(weights_path(run.transformer, path, EMA_SUFFIX)) as weights, run.ema.swapped():
            read_weights(run.transformer, weights)
    run.optimizer.load_state_dict(_dealt_out(_unflatten(state["optimizer"], tensors), run.optimizer))
    run.lr_scheduler.load_state_dict(_unflatten(state["lr_scheduler"], tensors))
    run.step, run.samples = int(state["step"]), int(state["samples"])
    _set_random_state(_unflatten(state["random"], tensors), run)


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
            was, now = _differing(saved.get(name), current.get(name))
            raise TrainError(
                f"this checkpoint was trained with another {name}, so it cannot be resumed",
                where=path,
                expected=was,
                found=now,
                do=f"use the same {name}, or start anew with another train.output_dir",
            )


def _differing(was: Any, now: Any) -> tuple[str, str]:
    """Both in words; of settings by name, those that differ."""
    if not (isinstance(was, dict) and isinstance(now, dict)):
        return str(was), str(now)
    names = [name for name in was | now if was.get(name) != now.get(name)]
    before, after = (", ".join(f"{name} {side.get(name)}" for name in names) for side in (was, now))
    return before, after


def _dealt_out(state: dict[str, Any], optimizer: Any) -> dict[str, Any]:
    """An optimizer's state with each tensor held as its parameter is: in parts, where that is."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for index, values in state["state"].items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                values[name] = alike(value, parameters[index])
    return state


def _random_state() -> dict[str, Any]:
    """torch's generators, which dropout draws from; all else is drawn from the position (`batches`)."""
    state: dict[str, Any] = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(states: list[dict[str, Any]], run: Run) -> None:
    """This process's own; where their number has changed, one of its own for this step."""
    process = PartialState()
    if len(states) != process.num_processes:
        torch.manual_seed(run.fixed["seed"] + run.samples + process.process_index)
        return
    state = states[process.process_index]
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _flatten(value: Any, path: str, tensors: dict[str, Tensor] | None) -> Any:
    """`value` as JSON, with its tensors moved to `tensors`, if any; dicts become lists of pairs, since their keys may
    be numbers."""
    if isinstance(value, Tensor):
        gathered = whole(value)
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
