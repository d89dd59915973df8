"""Every call of a command that reads or writes a file fails in one run, and then the same command runs again.

A command whose call fails ends with exit code 2 and a sentence that names a file, or with the right result. Then the
old data are whole, or the new ones, and the same command, undisturbed, gives the undisturbed result, byte for byte.
Folders that are left equal are judged once.
"""

from __future__ import annotations

import errno
import itertools
import os
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from .runs import Ended, fingerprint, restore, run
from .scenarios import HOME, LOGS, WORK, Scenario
from .shim import SHORT, Shim, error_name

ERRORS: dict[str, tuple[int, ...]] = {
    "open": (errno.EIO, errno.EMFILE, errno.ESTALE, errno.EACCES),
    "create": (errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EDQUOT, errno.EROFS),
    "read": (errno.EIO, SHORT, errno.ESTALE, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, SHORT, errno.EDQUOT, errno.EINTR),
    "fsync": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "close": (errno.EIO,),
    "rename": (errno.EIO, errno.ENOSPC, errno.EACCES),
    "link": (errno.EIO, errno.EPERM, errno.EMLINK, errno.ENOSPC),
    "mkdir": (errno.ENOSPC, errno.EIO, errno.EDQUOT),
    "ftruncate": (errno.EIO, errno.ENOSPC),
    "flock": (errno.EIO, errno.ENOLCK),
    "mmap": (errno.EIO,),
    "opendir": (errno.EIO, errno.EMFILE),
    "stat": (errno.EIO, errno.ESTALE, errno.EACCES),
}
"""The errors with which each call may fail; others fail with EIO."""
ONWARDS = (errno.EIO, errno.ENOSPC)
"""A disk that has died, or is full: this call and all later ones of its kind fail."""
FREE = re.compile(r'"bytes_free": \d+')  # of the disk, which other programs use too
ENOUGH = 8  # bad cases that are shown of each command


@dataclass(frozen=True)
class Case:
    number: int
    error: int
    onwards: bool

    def __str__(self) -> str:
        return f"{error_name(self.error)}{', from then on' if self.onwards else ''}"


@dataclass
class Report:
    """The outcome of a command's cases."""

    name: str
    calls: int
    seen: dict[str, int]
    """The calls of the undisturbed run, by name."""
    counts: dict[str, int] = field(default_factory=dict)
    bad: list[str] = field(default_factory=list)
    states: int = 0
    """Different folders that were left, each judged."""


def cases(calls: list[str], every: int, offset: int, *, all_errors: bool = False) -> Iterator[Case]:
    """Each call once, or every `every`-th, with one error after another; with `all_errors` each call with each error.

    Among them a disk that is dead or full from that call on.
    """
    turns = dict.fromkeys(calls, offset)
    made: list[Case] = []
    for number, call in enumerate(calls, 1):
        errors = ERRORS.get(call, (errno.EIO,))
        ways = [
            *(Case(number, error, onwards=False) for error in errors),
            *(Case(number, error, onwards=True) for error in ONWARDS if error in errors),
        ]
        made += ways if all_errors else [ways[turns[call] % len(ways)]]
        turns[call] += 1
    return itertools.islice(made, offset % every, None, every)


class Judge:
    """A judge of states: is what a disturbed command left whole, and does the same command complete it?"""

    def __init__(self, scenario: Scenario, base: Path) -> None:
        self.scenario, self.base, self.work = scenario, base, base / WORK
        restore(scenario.before, self.work)
        self.old = scenario.outcome(self.work)
        ended = run(scenario.program, base / LOGS)
        assert ended.code == 0, ended.stderr
        self.new, self.stdout = scenario.outcome(self.work), ended.stdout
        self.known: dict[str, str | None] = {}

    def fault(self, *, again: bool = True) -> str | None:
        """The fault of `work`; None if it is whole and, with `again`, can be completed."""
        state = fingerprint(self.work)
        if state not in self.known:
            self.known[state] = self._fault(again)
        return self.known[state]

    def _fault(self, again: bool) -> str | None:
        if faults := self.scenario.faults(self.work, self.old, self.new):
            return f"left behind: {faults[0]}"
        if not again:
            return None
        ended = run(self.scenario.program, self.base / LOGS)
        if ended.code:
            return f"the same command again fails: {ended.stderr.strip()[-600:]}"
        return self.differs(ended, "after the same command again")

    def differs(self, ended: Ended, when: str) -> str | None:
        """How the result differs from the undisturbed one."""
        found = self.scenario.outcome(self.work)
        if names := sorted(name for name in found.keys() | self.new.keys() if found.get(name) != self.new.get(name)):
            return f"another result {when}: {', '.join(names[:3])}"
        said = {FREE.sub("", stdout) for stdout in (ended.stdout, self.stdout)}
        return f"another output {when}" if self.scenario.prints and len(said) > 1 else None


def fail_each_call(
    scenario: Scenario, base: Path, shim: Shim, every: int = 1, offset: int = 0, *, all_errors: bool = False
) -> Report:
    """Run the cases of a command."""
    judge = Judge(scenario, base)
    calls = list_calls(scenario, base, shim)
    report = Report(scenario.name, len(calls), dict(Counter(calls)))
    for case in cases(calls, every, offset, all_errors=all_errors):
        ended, call = run_case(scenario, base, shim, case)
        what, fault = verdict(scenario, ended, judge)
        what = what if call or fault else "not reached"
        report.counts[what] = report.counts.get(what, 0) + 1
        if fault:
            report.bad.append(f"call {case.number} ({call}): {case}: {fault}")
    report.states = len(judge.known)
    return report


def run_case(scenario: Scenario, base: Path, shim: Shim, case: Case) -> tuple[Ended, str]:
    """How the command ended, and the call that failed; "" where it had fewer calls this time."""
    restore(scenario.before, base / WORK)
    failed = base / LOGS / "failed"
    failed.write_text("", encoding="utf-8")

    def program() -> None:
        try:
            scenario.program()
        finally:
            shim.watch([])
            failed.write_text(shim.failed(), encoding="utf-8")

    ended = run(program, base / LOGS, lambda: shim.fail(case.number, case.error, onwards=case.onwards))
    return ended, failed.read_text(encoding="utf-8")


def list_calls(scenario: Scenario, base: Path, shim: Shim) -> list[str]:
    """The names of the calls of an undisturbed run, in order."""
    restore(scenario.before, base / WORK)
    listed = base / LOGS / "calls"
    with open(listed, "wb") as file:
        ended = run(scenario.program, base / LOGS, lambda: shim.list_calls(file.fileno()))
    assert ended.code == 0, ended.stderr
    return [line.partition(" ")[0] for line in listed.read_text(encoding="utf-8").splitlines()]


def verdict(scenario: Scenario, ended: Ended, judge: Judge) -> tuple[str, str | None]:
    """`survived`, `refused` or `bad`, and why it is bad."""
    fault = None
    if ended.code == 0:
        what, fault = "survived", judge.differs(ended, "although it ended well")
    elif ended.code in (2, scenario.found_faults) and "Traceback" not in ended.stderr:
        what = "refused"
        fault = (
            None
            if names_file(ended.stderr + ended.stdout, judge.base)
            else f"names no file: {ended.stderr.strip()[-300:]}"
        )
    else:
        what, fault = "bad", f"exit code {ended.code}: {last_of(ended.stderr)}"
    fault = fault or judge.fault()
    return ("bad" if fault else what), fault


def last_of(stderr: str) -> str:
    """The last place of ours in a traceback, and the error; the end of any other output."""
    ours = re.findall(r'File ".*?/(qwen_\w+/.*?)", line (\d+)', stderr)
    place = ":".join(ours[-1]) + ": " if ours else ""
    return place + (stderr.strip().splitlines() or ["no output"])[-1][-300:]


def names_file(message: str, base: Path) -> bool:
    """True if a message names a file or folder of the work, or one beside it."""
    found = re.search(r"\d+ problems? in |error:", message)  # the problems of a source come before the error
    text = re.sub(r"\s+", "", message[found.start() :] if found else message)
    return str(base) in text or any(name in text for name in os.listdir(base / WORK) if name != HOME)
