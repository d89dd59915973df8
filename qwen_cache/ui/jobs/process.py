"""Processes by number, safely: a number is used only with the time at which its process began, since it may return."""

from __future__ import annotations

import os
import signal
import subprocess
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

PROC = Path("/proc")


def began(pid: int) -> str | None:
    """When a process began, as the system says it; None if there is none, or only its exit code is left."""
    if (PROC / "self" / "stat").exists():
        stat = _stat(pid)
        return None if stat is None or stat[0] in "ZX" else stat[19]
    return _ps("-o", "lstart=", "-p", str(pid)) or None


def send(pid: int, since: str, number: signal.Signals) -> bool:
    """Send a signal to the process that began at `since`; whether it was there."""
    if began(pid) != since:
        return False
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    return [child for child, parent in _parents() if parent == pid]


def descendants(pid: int) -> list[int]:
    """The processes that a process has started, and those started by them, as far as their parents live."""
    of = defaultdict[int, list[int]](list)
    for child, parent in _parents():
        of[parent].append(child)
    found, left = list[int](), [pid]
    while left:
        more = of[left.pop()]
        found += more
        left += more
    return found


def kill(pid: int, since: str) -> None:
    """End the process that began at `since`, its group, and all that they have started."""
    now = began(pid)
    every = [pid, *descendants(pid)] if now == since else []
    if now in (since, None):  # a group keeps its number as long as one of its processes lives
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
    for each in every:
        with suppress(ProcessLookupError):
            os.kill(each, signal.SIGKILL)


def _stat(pid: int) -> list[str] | None:
    """The fields of a process from its state on; its name before them may hold anything."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _parents() -> list[tuple[int, int]]:
    """Every process with its parent."""
    if (PROC / "self" / "stat").exists():
        stats = [(int(each.name), _stat(int(each.name))) for each in PROC.iterdir() if each.name.isdecimal()]
        return [(pid, int(stat[1])) for pid, stat in stats if stat]
    return [(int(pid), int(parent)) for pid, parent in map(str.split, _ps("-A", "-o", "pid=,ppid=").splitlines())]


def _ps(*options: str) -> str:
    done = subprocess.run(["ps", *options], capture_output=True, text=True, check=False, env={"LC_ALL": "C"})
    return done.stdout.strip()
