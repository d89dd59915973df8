"""A command of `qwen-cache` or `qwen-train`: the line that a user types, and how it is started here.

It is started by this Python, without a shell and without its folder in the search path of modules, as the installed
programs are: a file of the user's never takes the place of a module.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from qwen_cache.errors import ConfigError
from qwen_cache.text import shell_line

Program = Literal["qwen-cache", "qwen-train"]
Starts = Mapping[str, Sequence[str]]

STARTS: Starts = {
    "qwen-cache": (sys.executable, "-m", "qwen_cache"),
    "qwen-train": (sys.executable, "-m", "qwen_train"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
"""What starts each program."""
VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""What a job that is read from a folder may set: others, such as LD_PRELOAD, run any program."""
COLUMNS = "110"  # of tables: wider than an unknown terminal, and still without a scroll bar on a laptop
COLOURS = ("CLICOLOR_FORCE", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


def _can_be_given(text: str) -> bool:
    try:
        return b"\0" not in os.fsencode(text)
    except UnicodeEncodeError:  # half of a letter, as from a program that cuts text
        return False


@dataclass(frozen=True)
class Command:
    """A program and its arguments; `environment` is shown and written to the disk, so it holds no secrets."""

    program: Program
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """Of `qwen-train`: more than one are started by torchrun."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(map(str, self.arguments)))

    @property
    def line(self) -> str:
        """The command line for a shell in the opened folder."""
        variables = [f"{name}={shell_line([value])} " for name, value in self.environment.items()]
        return "".join(variables) + shell_line(self._words)

    def argv(self, starts: Starts = STARTS) -> list[str]:
        """What the system starts; ConfigError for a text that no command can be given."""
        program, *arguments = self._words
        for text in arguments:
            if not _can_be_given(text):
                do = "write it again without hidden characters"
                raise ConfigError("a command cannot take this text", found=ascii(text)[:80], do=do)
        return [*starts[program], *arguments]

    @property
    def _words(self) -> list[str]:
        if self.processes == 1:
            return [self.program, *self.arguments]
        launcher = ["torchrun", "--standalone", "--nproc-per-node", str(self.processes)]
        return [*launcher, "-m", self.program.replace("-", "_"), *self.arguments]

    def environ(self, **more: str) -> dict[str, str]:
        """The environment of the process: without colours, and with tables of one width."""
        inherited = {name: value for name, value in os.environ.items() if name not in COLOURS}
        ours = {"NO_COLOR": "1", "COLUMNS": COLUMNS, "PYTHONSAFEPATH": "1"}
        return inherited | ours | more | dict(self.environment)

    def to_json(self) -> dict[str, Any]:
        return {
            "program": self.program,
            "arguments": list(self.arguments),
            "environment": dict(self.environment),
            "processes": self.processes,
        }
