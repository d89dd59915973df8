"""The states that a power loss may leave after each call of a command, by the model of `record.py`, all judged.

After each call: the names that are not durable yet, in every combination while there are at most `EVERY_CHANGES` of
them, else none, all, each alone, all but each, and some at random; with the bytes that are not durable lost, whole,
zeros, torn, or some blocks of them. Equal folders are judged once. Each is the old or the new state, whole; after the
last call, when the command has reported success, the new one. A share of the states is completed by the same command.
"""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from .each_call import Judge
from .record import Change, Disk, File, Folder, Node
from .runs import restore, run
from .scenarios import LOGS, WORK, Scenario
from .shim import Shim

EVERY_CHANGES = 5  # so at most 32 combinations
AT_RANDOM = 6  # combinations, where there are more changes
SECTOR, BLOCK = 512, 4096  # what a disk writes whole, and what a file system does
ENOUGH = 50  # bad states, after which a command is not judged further
DATA = ("lost", "whole", "zeros", "torn", "blocks")
Tree = dict[str, bytes | None]
"""Bytes of files, and None for folders, by path."""


@dataclass
class Report:
    """The states of a command."""

    name: str
    events: int
    states: int = 0
    completed: int = 0
    """States after which the same command ran again."""
    bad: list[str] = field(default_factory=list)


def record_run(scenario: Scenario, base: Path, shim: Shim) -> Path:
    """The record of an undisturbed run."""
    restore(scenario.before, base / WORK)
    record = base / LOGS / "record"
    with open(record, "wb") as file:
        ended = run(scenario.program, base / LOGS, lambda: shim.record(file.fileno()))
    assert ended.code == 0, ended.stderr
    return record


def replay_power_losses(
    scenario: Scenario, base: Path, shim: Shim, complete_every: int = 10, without: str = ""
) -> Report:
    """Judge the states of a command; `complete_every`-th of them are completed (0: none)."""
    judge = Judge(scenario, base)
    disk = Disk(base / WORK, scenario.before, record_run(scenario, base, shim), without)
    report, seen = Report(scenario.name, disk.events), set[tuple[str, bool]]()
    for at, how, tree in states(disk, random.Random(0)):
        done = at == disk.events
        key = digest(tree), done
        if key in seen or len(report.bad) >= ENOUGH:
            continue
        seen.add(key)
        report.states += 1
        again = bool(complete_every) and report.states % complete_every == 0
        report.completed += again
        write(tree, judge.work)
        fault = lost(judge, disk, at) or judge.fault(again=again)
        if fault:
            report.bad.append(f"after event {at} of {disk.events}, {how}: {fault}")
    return report


def lost(judge: Judge, disk: Disk, at: int) -> str | None:
    """Everything that was reported to the user before the power loss and is missing after it."""
    if at == disk.events and (
        missing := [name for name in judge.new if name not in judge.scenario.outcome(judge.work)]
    ):
        return f"reported as done, but without {missing[0]}"
    reported = [number for number, when in enumerate(disk.marks.values()) if when <= at]
    later = list(disk.marks)[reported[-1] :] if reported else []
    return None if not later or any((judge.work / name).exists() for name in later) else f"{later[0]} is not there"


def states(disk: Disk, choice: random.Random) -> Iterator[tuple[int, str, Tree]]:
    """The states after each event: its number, what was chosen, and the tree."""
    files = disk.files()
    for at in range(disk.events + 1):
        happened = [change for change in disk.changes if change.at <= at]
        pending = [change for change in happened if change.durable is None or change.durable > at]
        durable = set(happened) - set(pending)
        for chosen in combinations(pending, choice):
            present = durable | chosen
            names = [change for change in happened if change in present]
            for data in DATA if any(unsynced(file, at) for file in files) else DATA[:1]:
                contents = Contents(at, data, choice)
                how = f"{len(chosen)} of {len(pending)} names, bytes {data}"
                yield at, how, tree_of(disk.root, names, contents)


def combinations(pending: Sequence[Change], choice: random.Random) -> Iterator[set[Change]]:
    """Sets of changes, each with those that it needs."""
    subsets: Iterator[Sequence[Change]]
    if len(pending) <= EVERY_CHANGES:
        subsets = itertools.chain(*(itertools.combinations(pending, n) for n in range(len(pending) + 1)))
    else:
        some = [[c for c in pending if choice.random() < 0.5] for _ in range(AT_RANDOM)]
        alone, without = [[c] for c in pending], [[c for c in pending if c is not each] for each in pending]
        subsets = iter([[], list(pending), *alone, *without, *some])
    found = set()
    for subset in subsets:
        wanted = set(subset)
        closed = frozenset(c for c in subset if all(need in wanted or need not in pending for need in c.needs))
        if closed not in found:
            found.add(closed)
            yield set(closed)


def unsynced(file: File, at: int) -> bool:
    synced = max((sync for sync in file.syncs if sync <= at), default=0)
    return any(synced < write.at <= at for write in file.writes)


@dataclass
class Contents:
    """The bytes of files after a power loss at `at`."""

    at: int
    data: str
    choice: random.Random
    known: dict[File, bytes] = field(default_factory=dict)

    def of(self, file: File) -> bytes:
        if file not in self.known:
            self.known[file] = self._of(file)
        return self.known[file]

    def _of(self, file: File) -> bytes:
        synced = max((sync for sync in file.syncs if sync <= self.at), default=0)
        content = bytearray(file.first)
        pending = []
        for write in file.writes:
            if write.at <= synced:
                overwrite(content, write.offset, write.data)
            elif write.at <= self.at:
                pending.append(write)
        if self.data == "lost":
            pending = []
        elif self.data == "torn":
            pending = pending[: self.choice.randint(1, len(pending))] if pending else []
        for i, write in enumerate(pending):
            self._overwrite(content, write.offset, write.data, last=i == len(pending) - 1)
        return bytes(content)

    def _overwrite(self, content: bytearray, offset: int, data: bytes | None, *, last: bool) -> None:
        if data is None or self.data == "whole" or (self.data == "torn" and not last):
            overwrite(content, offset, data)
        elif self.data == "torn":
            sectors = self.choice.randint(0, len(data) // SECTOR)
            overwrite(content, offset, data[: sectors * SECTOR])
        else:  # the size is set, and some or no blocks are written
            content.extend(bytes(max(0, offset + len(data) - len(content))))
            for begin in range(0, len(data), BLOCK) if self.data == "blocks" else ():
                if self.choice.random() < 0.5:
                    overwrite(content, offset + begin, data[begin : begin + BLOCK])


def overwrite(content: bytearray, offset: int, data: bytes | None) -> None:
    """Write at an offset; without data, set the size."""
    if data is None:
        del content[offset:]
    content.extend(bytes(max(0, offset - len(content))))
    if data is not None:
        content[offset : offset + len(data)] = data


# ---- trees -----------------------------------------------------------------------------------------------------------


def tree_of(root: Node, changes: Sequence[Change], contents: Contents) -> Tree:
    """The files that can be reached after these changes."""
    slots: dict[Folder, dict[str, Node | None]] = {}
    for change in changes:
        for folder, name, node in change.slots:
            slots.setdefault(folder, {})[name] = node
    tree: Tree = {}

    def add(folder: Folder, prefix: str) -> None:
        for name, node in (folder.first | slots.get(folder, {})).items():
            if isinstance(node, Folder):
                tree[prefix + name] = None
                add(node, f"{prefix}{name}/")
            elif node is not None:
                tree[prefix + name] = contents.of(node)

    assert isinstance(root, Folder)
    add(root, "")
    return tree


def digest(tree: Tree) -> str:
    found = xxhash.xxh3_128()
    for path, data in sorted(tree.items()):
        if not path.endswith(".lock"):
            found.update(f"{path}\0{-1 if data is None else len(data)}\0".encode() + (data or b""))
    return found.hexdigest()


def write(tree: Tree, work: Path) -> None:
    """Make `work` this tree."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    for path, data in sorted(tree.items()):
        if data is None:
            (work / path).mkdir()
        else:
            (work / path).write_bytes(data)
