"""Several processes that train together: how they connect, and end together.

They are connected by accelerate, over gloo on machines without accelerators. Refused: processes that would train alone,
each with the whole run, and more processes than accelerators.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import parse_flag_from_env

from qwen_cache.errors import ConfigError, TrainError, first_line
from qwen_train.run import Launch

T = TypeVar("T")
GLOO_SECONDS = 0.5  # long enough for a waiting thread to get the interpreter, on a busy machine too


class EndedElsewhereError(TrainError):
    """Another process has an error and prints it; this one ends silently."""


def connect(launch: Launch) -> PartialState:
    """Connect this process with the others of its launch; ConfigError where that is impossible."""
    devices = torch.accelerator.device_count()
    on_cpu = parse_flag_from_env("ACCELERATE_USE_CPU") or (launch.world_size > 1 and not devices)
    if launch.world_size > 1 and not on_cpu and launch.local_world_size > devices:
        if launch.local_rank:
            raise SystemExit(0)  # not connected yet: the first process of each machine prints the error
        raise ConfigError(
            "there are more processes than accelerators on this machine",
            expected=f"at most {devices}",
            found=launch.local_world_size,
            do=f"start it with `torchrun --nproc-per-node {devices}`",
        )
    state = PartialState(cpu=on_cpu)
    if state.num_processes != launch.world_size:
        raise ConfigError(
            "the processes would train alone: accelerate has not connected them",
            expected=f"WORLD_SIZE={launch.world_size}",
            found=f"{state.num_processes} on {state.device}",
            do="start a single process; or set ACCELERATE_USE_CPU=true to train on the CPU",
        )
    return state


def all_gather_object(value: T) -> list[T]:
    """The values of all processes, by rank; every process takes part."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values  # type: ignore[return-value]  # every process has filled its place


@contextmanager
def together() -> Iterator[None]:
    """If one process leaves the block with an error, all do; inside it they do not communicate.

    Of several processes with the same error the first raises it. All others raise EndedElsewhereError.
    """
    problem: Exception | None = None
    try:
        yield
    except Exception as error:
        if not dist.is_initialized():
            raise
        problem = error
    told = all_gather_object(problem and f"{type(problem).__name__}: {problem}")
    if problem is not None and told.index(f"{type(problem).__name__}: {problem}") == dist.get_rank():
        raise problem
    if any(told):
        raise EndedElsewhereError("another process has ended")


def leave(accelerator: Accelerator) -> None:
    """Close the connection between the processes once it is idle.

    To release the tensors that it gathered last, gloo's thread needs the interpreter. DDP's destructor holds the
    interpreter while it waits for that thread (torch 2.13), forever unless the thread gets a moment first.
    """
    accelerator.wait_for_everyone()
    if accelerator.num_processes > 1:
        time.sleep(GLOO_SECONDS)
    accelerator.end_training()


@contextmanager
def naming_lost_connections(launch: Launch) -> Iterator[None]:
    """Turn torch's error about a broken connection into a TrainError; the process that ended prints the reason."""
    try:
        yield
    except RuntimeError as error:
        if launch.world_size == 1 or not (isinstance(error, dist.DistError) or "gloo" in str(error)):
            raise
        raise TrainError(
            "this process has lost its connection to the others",
            where=f"process {launch.rank} of {launch.world_size}",
            found=first_line(error),
            do="see the message of the process that ended first",
        ) from None


def any_process(accelerator: Any, flag: bool) -> bool:
    """True if `flag` is set in any process, so that all processes act on it at the same point."""
    return each_in_any_process(accelerator, (flag,))[0]


def each_in_any_process(accelerator: Any, flags: Sequence[bool]) -> list[bool]:
    """`any_process` of several flags, in one exchange."""
    if accelerator.num_processes == 1:
        return list(flags)
    counts = accelerator.reduce(torch.tensor(flags, dtype=torch.float32, device=accelerator.device))
    return [bool(count > 0) for count in counts.tolist()]
