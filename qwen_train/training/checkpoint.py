"""Checkpoints: the whole state of a run, so that a resumed run equals an uninterrupted one, bit for bit on one CPU.

    checkpoint-500/
      pytorch_lora_weights.safetensors   the adapter, as the stock pipeline loads it; or all weights, in transformer/
      pytorch_lora_weights_ema.safetensors   their EMA, if there is one; or transformer_ema/
      state.safetensors, state.json      optimizer, learning rate, random state; step and samples; cache, seed
      checksums.json                     size and xxh3-128 of all of these; read and compared before anything is used

A checkpoint is complete under its name or absent: if writing fails, the earlier ones stay. It is never replaced. It
contains no pickle. It does not depend on the number of processes: sharded tensors are gathered when saved and sharded
again on resume. A damaged checkpoint is refused, and so is one of a run with other settings or another transformer.
"""

from __future__ import annotations

import errno
import json
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

from qwen_cache.errors import QwenCacheError, TrainError, first_line
from qwen_cache.models.devices import accelerator, device_module
from qwen_cache.storage.files import remove_folder, sync_file, whole_file, whole_folder, write_durably
from qwen_cache.storage.remembered import NAME as CHECKSUMS
from qwen_cache.storage.remembered import UNLISTED, Fault, file_digest, find_fault, write_checksums
from qwen_cache.terminal import counting
from qwen_cache.text import parse_json
from qwen_train.model.placement import Ema, assign, distribute_like, full_tensor
from qwen_train.run import CHECKPOINT, STATE, checkpoints
from qwen_train.training.best import best_checkpoint
from qwen_train.training.optimizers import evaluation_weights, has_two_modes, trained_parameters
from qwen_train.training.processes import all_gather_object, together
from qwen_train.training.start import NEW_RUN, check_fixed
from qwen_train.weights import gather_weights, read_weights, weights_path, write_weights

EMA_SUFFIX = "_ema"
TRAINING_WEIGHTS = "training_weights"
"""The entry with the weights that an optimizer with two modes computes gradients at; the weights' file has the others,
which are those to generate images with."""
DTYPES = {str(dtype): dtype for dtype in (torch.float32, torch.bfloat16)}
FULL = (errno.ENOSPC, errno.EDQUOT, None)
"""Errors of a full disk; those of the safetensors library have no number, and mean the same."""


@dataclass
class Run:
    """The state of a run: its components, its progress, and the settings that must not change."""

    transformer: Any
    optimizer: Any
    lr_scheduler: Any
    fixed: dict[str, Any]
    """Everything that a resumed run must share with the checkpoint: the transformer's weights, the cache's identity,
    the seed, the training method, the optimizer, and the batch settings, which decide which samples were trained."""
    origin: dict[str, Any] = field(default_factory=dict)
    """Written into the LoRA file and the checkpoint: the model and the cache that it was trained on."""
    step: int = 0
    consumed_samples: int = 0
    """Samples that all processes have trained; this number determines the next batch (`batch_plan`)."""
    ema: Ema | None = None
    commits: list[dict[str, Any]] | None = None
    """With `train.follow` the commits that were taken in, as JSON (`data/commits.py`)."""


def save_checkpoint(folder: Path, run: Run, keep: int) -> Path:
    """Write `checkpoint-<step>`, then remove all but the newest `keep` (0 keeps all) and the best so far; every process
    takes part.

    Raises TrainError in every process if writing fails, or if there is a checkpoint of this step.
    """
    main, final = PartialState().is_main_process, folder / f"checkpoint-{run.step}"
    weights = _all_weights(run, main)
    tensors: dict[str, Tensor] | None = {} if main else None
    state = {
        "step": run.step,
        "samples": run.consumed_samples,
        "fixed": run.fixed,
        "origin": run.origin,
        "ema": run.ema and run.ema.updates,
        "optimizer": _flatten(run.optimizer.state_dict(), "optimizer", tensors),
        "lr_scheduler": _flatten(run.lr_scheduler.state_dict(), "lr_scheduler", tensors),
        "random": _flatten(all_gather_object(_random_state()), "random", tensors),
    }
    if run.commits is not None:
        state["commits"] = run.commits
    if has_two_modes(run.optimizer):
        state[TRAINING_WEIGHTS] = _flatten(trained_parameters(run.optimizer), TRAINING_WEIGHTS, tensors)
    with together(), _writing(f"checkpoint-{run.step}", folder):
        if tensors is not None:
            if final.exists():  # only another run can have written it; where files cannot be locked there may be one
                raise FileExistsError(errno.EEXIST, "another run has written it", str(final))
            with whole_folder(final) as temporary:
                for suffix, values in weights.items():
                    write_weights(run.transformer, values, weights_path(run.transformer, temporary, suffix), run.origin)
                seen: set[int] = set()
                for name, tensor in tensors.items():  # optimizers may share tensors; safetensors refuses that
                    tensors[name] = tensor.clone() if tensor.data_ptr() in seen else tensor
                    seen.add(tensor.data_ptr())
                # Without a copy in memory, as `write_durably` has: an optimizer's state can be larger than the model.
                with whole_file(temporary / "state.safetensors") as file:
                    save_file(tensors, file)
                    sync_file(file)
                write_durably(temporary / STATE, json.dumps(state).encode("utf-8"))
                write_checksums(temporary)
            older = checkpoints(folder)[:-keep] if keep else []
            best = best_checkpoint(folder) if older else None
            for _, old in older:
                if old != best:
                    remove_folder(old)
    return final


def save_result(folder: Path, run: Run, dtype: torch.dtype) -> Path:
    """Write the trained weights and their EMA, floating-point tensors in `dtype`; the path of the trained weights."""
    weights = _all_weights(run, PartialState().is_main_process)
    with together(), _writing("the result", folder):
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
                write_checksums(temporary)
    return weights_path(run.transformer, folder)


def _all_weights(run: Run, keep: bool) -> dict[str, dict[str, Tensor]]:
    """The trained weights and, if there is one, their EMA, by the suffix of their names."""
    with evaluation_weights(run.optimizer):
        weights = {"": gather_weights(run.transformer, keep=keep)}
    if run.ema:
        with run.ema.swapped():
            weights[EMA_SUFFIX] = gather_weights(run.transformer, keep=keep)
    return weights


@contextmanager
def _writing(what: str, folder: Path) -> Iterator[None]:
    """Turn a failed write of the main process into a TrainError."""
    try:
        yield
        return
    except FileExistsError as error:
        reason, do = str(error.strerror), "stop the other run, or name another folder with --out"
    except (OSError, SafetensorError) as error:
        is_full = getattr(error, "errno", None) in FULL
        do = "free disk space" if is_full else "check the disk, and that you may write to this folder"
        reason = getattr(error, "strerror", None) or str(error)
    if newest := checkpoints(folder):
        do = f"{do}; {newest[-1][1].name} is kept, continue with --resume"
    raise TrainError(f"{what} cannot be written: {reason}", where=folder, do=do)


def load_checkpoint(path: Path, run: Run) -> None:
    """Restore the run from the checkpoint; TrainError if it is damaged, or belongs to other settings.

    Every file is compared with its checksum first, by one process of each machine.
    """
    with together():
        if PartialState().is_local_main_process and (fault := _find_fault(path)):
            raise fault.error(TrainError, _advice(path, fault))
    with together(), restoring(path):
        state = parse_json((path / STATE).read_text(encoding="utf-8"))
        models = str(state["origin"]["model"]), str(run.origin.get("model"))
        check_fixed(path, state["fixed"], run.fixed, f"restore what has changed, or {NEW_RUN}", models)
        step, samples = _count(state["step"]), _count(state["samples"])
        tensors = load_file(path / "state.safetensors")
        _load_optimizer(run.optimizer, _unflatten(state["optimizer"], tensors))
        run.lr_scheduler.load_state_dict(_unflatten(state["lr_scheduler"], tensors))
        random = _unflatten(state["random"], tensors)
        if run.ema:
            run.ema.updates = _count(state["ema"])
        read_weights(run.transformer, weights_path(run.transformer, path))  # the slow part
        if run.ema:
            with run.ema.swapped():
                read_weights(run.transformer, weights_path(run.transformer, path, EMA_SUFFIX))
        if has_two_modes(run.optimizer):
            saved = _unflatten(state[TRAINING_WEIGHTS], tensors)
            for parameter, value in zip(trained_parameters(run.optimizer), saved, strict=True):
                assign(parameter, value)
        run.step, run.consumed_samples = step, samples
        _set_random_state(random, run)


def _find_fault(path: Path) -> Fault | None:
    """`find_fault` with a progress line: the files of full training can be 240 GB."""
    total = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    with counting(f"reading {path.name}", total, in_bytes=True, transient=True) as advance:
        return find_fault(path, lambda file: file_digest(file, advance))


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn a failure to restore a whole checkpoint into a TrainError: this version did not write it, or not so."""
    try:
        yield
    except (QwenCacheError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # noqa: BLE001 (optimizers raise what they like)
        what = f"this version cannot restore this checkpoint: {type(error).__name__}: {first_line(error)}"
        raise TrainError(what, where=path / STATE, do=_advice(path)) from None


def _advice(path: Path, fault: Fault | None = None) -> str:
    """Advice about a checkpoint that cannot be used; earlier ones are read to find one that is whole."""
    name, step = path.name, int(CHECKPOINT.fullmatch(path.name)[1])  # type: ignore[index]
    older = [earlier for number, earlier in reversed(checkpoints(path.parent)) if number < step]
    whole = next((earlier.name for earlier in older if _find_fault(earlier) is None), None)
    if whole:
        skipped = ", ".join([name, *(each.name for each in older[: [it.name for it in older].index(whole)])])
        do = f"remove {skipped}; {whole} is whole, and --resume continues from it"
    else:
        do = "no earlier checkpoint is whole: start again with another train.output_dir"
    if fault and fault.what == UNLISTED:
        return f"remove this file, if it came there by mistake; else {do}"
    if fault and fault.where == path / CHECKSUMS and not fault.where.exists():
        return f"if an earlier version wrote it, which had no {CHECKSUMS}, finish the run with that version; else {do}"
    return do


def _count(value: Any) -> int:
    """The value, if it is a number of steps or samples."""
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is not a number of steps or samples")
    return value


def _load_optimizer(optimizer: Any, state: dict[str, Any]) -> None:
    """Restore the optimizer's state as it was saved: torch casts it to the parameters' dtype, JSON has no tuples.

    How an update is computed is no part of it: that depends on the device.
    """
    for group, fresh in zip(state["param_groups"], optimizer.param_groups, strict=True):
        group |= {name: fresh[name] for name in ("fused", "foreach") if name in fresh}
        group |= {n: tuple(v) for n, v in group.items() if isinstance(v, list) and isinstance(fresh.get(n), tuple)}
    parameters = trained_parameters(optimizer)
    for index, values in state["state"].items():  # each tensor is sharded like its parameter
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                values[name] = distribute_like(value, parameters[index])
    optimizer.load_state_dict(state)
    for index, values in state["state"].items():
        restored = optimizer.state[parameters[index]]
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dtype != restored[name].dtype:
                restored[name] = value.to(restored[name].device)


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
    if type(value).__name__ == "OptimState8bit":  # torchao's, which is imported only where it is used
        parts = {name: _flatten(getattr(value, name), f"{path}.{name}", tensors) for name in value.tensor_attrs}
        return {"8bit": parts, "signed": value.signed, "dtype": str(value.dtype)}
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
    if "8bit" in value:
        from torchao.optim.subclass_8bit import OptimState8bit

        parts = {name: tensors[part["tensor"]] for name, part in value["8bit"].items()}
        return OptimState8bit(**parts, signed=bool(value["signed"]), dtype=DTYPES[value["dtype"]])
    if "list" in value:
        return [_unflatten(item, tensors) for item in value["list"]]
    return {key: _unflatten(item, tensors) for key, item in value["dict"]}
