"""Which process this is, by the environment of its launcher, without torch."""

from __future__ import annotations

import re

import pytest

from qwen_cache.errors import QwenCacheError
from qwen_train.run import Launch

from .support.commands import refused, run

TORCHRUN = {"RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "node-1", "MASTER_PORT": "29500", "WORLD_SIZE": "4"}


def test_the_environment_of_torchrun_names_the_process() -> None:
    assert Launch.of_environment({}) == Launch.of_environment({"WORLD_SIZE": "1", "RANK": "x"}) == Launch()
    one_machine = Launch.of_environment(TORCHRUN)
    assert one_machine == Launch(rank=3, world_size=4, local_rank=1, local_world_size=4)
    two_machines = Launch.of_environment(TORCHRUN | {"LOCAL_WORLD_SIZE": "2", "RANK": "0"})
    assert (one_machine.is_main, two_machines.is_main) == (False, True)
    assert [each.decides_alone for each in (Launch(), one_machine, two_machines)] == [True, False, False]
    command = ["run", "--out", "my cats"]
    assert Launch().command(command) == "qwen-train run --out 'my cats'"
    assert one_machine.command(command) == "torchrun --nproc-per-node 4 -m qwen_train run --out 'my cats'"
    assert two_machines.command(command) == "torchrun … -m qwen_train run --out 'my cats'"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"WORLD_SIZE": "two"}, "the environment variable WORLD_SIZE is not a number (found two)"),
        ({"RANK": ""}, "the environment variable RANK is not a number (found nothing)"),
        (
            {"LOCAL_RANK": None},
            "WORLD_SIZE=4 says that this is one of 4 processes, but nothing connects them (expected",
        ),
    ],
)
def test_an_environment_that_contradicts_itself_is_refused(changes: dict[str, str | None], message: str) -> None:
    environment = {name: value for name, value in (TORCHRUN | changes).items() if value is not None}
    with pytest.raises(QwenCacheError, match=re.escape(message)):
        Launch.of_environment(environment)


def test_a_command_of_one_process_is_refused_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other processes of the machine end in silence and without a failure, for which torchrun would end the first.

    A WORLD_SIZE alone, of a container, does not matter to these commands.
    """
    monkeypatch.setenv("WORLD_SIZE", "4")
    refused(run("qwen-train", "plan", "nowhere"), "nowhere: no such folder")
    for name, value in (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}).items():
        monkeypatch.setenv(name, value)
    for command in (
        ["plan"],
        ["predict", "--prompt", "x"],
        ["decode"],
        ["export", "x", "--to", "comfyui", "--out", "y"],
    ):
        message = (
            f"error: `qwen-train {command[0]}` runs in one process (found 4 processes)\n  → start it without a launcher"
        )
        refused(run("qwen-train", *command), message)
    monkeypatch.setenv("LOCAL_RANK", "1")
    silent = run("qwen-train", "plan")
    assert (silent.code, silent.stdout, silent.stderr) == (0, "", "")
