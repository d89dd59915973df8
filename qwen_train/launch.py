"""The processes of a run, as their launcher describes them in the environment; known before torch is loaded.

torchrun and `accelerate launch` give each process its rank. Refused: a WORLD_SIZE without a launcher, since every
process would train alone and write the same files; and a launcher for a command that runs in one process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.terminal import VARIABLE, is_verbose, set_verbosity
from qwen_cache.text import shell_line

OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
COPIES = {"SLURM_STEP_NUM_TASKS": "srun", "OMPI_COMM_WORLD_SIZE": "mpirun", "PMI_SIZE": "mpirun"}
"""Variables in which these programs give the number of independent copies of a command that they started."""


@dataclass(frozen=True)
class Launch:
    """This process among those of its run."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """Processes on this machine."""

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Launch:
        """The launch that the environment describes; ConfigError if WORLD_SIZE is set without the rest."""
        world_size = _number(environment, "WORLD_SIZE", 1)
        if world_size <= 1:
            return cls()
        if missing := [name for name in OF_A_LAUNCHER if name not in environment]:
            raise ConfigError(
                f"WORLD_SIZE={world_size} says that this is one of {world_size} processes, but nothing connects them",
                expected=f"{', '.join(OF_A_LAUNCHER)}, as torchrun sets them",
                found=f"no {' and no '.join(missing)}",
                do="start the run with torchrun, or unset WORLD_SIZE",
            )
        rank, local_rank = _number(environment, "RANK"), _number(environment, "LOCAL_RANK")
        return cls(rank, world_size, local_rank, _number(environment, "LOCAL_WORLD_SIZE", world_size))

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files, and prints."""
        return self.rank == 0

    @property
    def decides_alone(self) -> bool:
        """Whether this process can simply fail: the launcher then ends all others."""
        return self.is_main and self.local_world_size == self.world_size

    def command(self, arguments: Sequence[str]) -> str:
        """The command line that starts `qwen-train` with these arguments in as many processes, quoted for the shell."""
        start = "qwen-train "
        if self.world_size > 1:  # on several machines each has its own options
            options = f"--nproc-per-node {self.world_size}" if self.local_world_size == self.world_size else "…"
            start = f"torchrun {options} -m qwen_train "
        return start + shell_line(arguments)


def silence_others(launch: Launch) -> None:
    """Unless this is the main process, print nothing but errors, and leave the file of the progress to that one."""
    if not launch.is_main:
        set_verbosity(quiet=True, verbose=is_verbose())
        os.environ.pop(VARIABLE, None)


def in_one_process(command: str) -> None:
    """ConfigError if a launcher started this command several times; only the first process of a machine prints it."""
    launch = Launch.of_environment() if "LOCAL_RANK" in os.environ else Launch()
    if launch.world_size == 1:
        return
    if launch.local_rank:
        raise SystemExit(0)  # after a failure the launcher would end the one that prints
    found, do = f"{launch.world_size} processes", "start it without a launcher such as torchrun"
    raise ConfigError(f"`qwen-train {command}` runs in one process", found=found, do=do)


def copies_advice() -> str | None:
    """What to do if a program has started independent copies of this command; else None."""
    for name, program in COPIES.items():
        if "RANK" not in os.environ and (count := _number(os.environ, name, 1)) > 1:
            return f"{program} has started this command {count} times: let it start torchrun once on each machine"
    return None


def _number(environment: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = environment.get(name, "")
    if not text and default is not None:
        return default
    if not (text.isascii() and text.isdecimal()):
        raise TrainError(f"the environment variable {name} is not a number", found=text or "nothing")
    return int(text)
