"""Commands that answer in seconds, such as `build --dry-run --json`, while a user waits.

At most two run at once. A newer check with the same key ends the older one, whose answer nobody wants any more.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock, Semaphore
from typing import Any

from qwen_cache.errors import OutdatedError
from qwen_cache.text import without_controls
from qwen_cache.ui.jobs.command import STARTS, Command, Starts

AT_ONCE = 2
MESSAGE_CHARACTERS = 20_000


@dataclass(frozen=True)
class Checked:
    """What a command answered: its exit code, the JSON document on stdout or None, and its message on stderr."""

    code: int
    document: Any
    message: str


@dataclass(eq=False)
class _Check:
    """A check under way."""

    is_outdated: bool = False
    process: subprocess.Popen[bytes] | None = field(default=None)


class Checks:
    """Runs checks in a folder. `check` is called from any thread."""

    def __init__(self, folder: Path, starts: Starts = STARTS) -> None:
        self._folder, self._starts = folder, starts
        self._slots, self._lock = Semaphore(AT_ONCE), Lock()
        self._under_way: dict[_Check, str] = {}
        self._is_closed = False

    def check(self, command: Command, key: str = "") -> Checked:
        """Run a command to its end; OutdatedError if a newer check with the same key has come, or the UI ends."""
        check = _Check()
        with self._lock:
            for older, its_key in self._under_way.items():
                if key and its_key == key:
                    _end(older)
            self._under_way[check] = key
        try:
            with self._slots:
                return self._run(check, command)
        finally:
            with self._lock:
                del self._under_way[check]

    def end(self, key: str) -> None:
        """End the checks with this key; those who wait for them get OutdatedError."""
        with self._lock:
            for check, its_key in self._under_way.items():
                if its_key == key:
                    _end(check)

    def close(self) -> None:
        """End all checks, now and from now on."""
        with self._lock:
            self._is_closed = True
            for check in self._under_way:
                _end(check)

    def _run(self, check: _Check, command: Command) -> Checked:
        with self._lock:
            if check.is_outdated or self._is_closed:
                raise _outdated()
            check.process = process = subprocess.Popen(
                command.argv(self._starts),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=self._folder,
                env=command.environ(),
                start_new_session=True,
            )
        out, err = process.communicate()
        if check.is_outdated:
            raise _outdated()
        return Checked(process.returncode, _document(out), _message(err))


def _end(check: _Check) -> None:
    check.is_outdated = True
    if check.process and check.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(check.process.pid, signal.SIGKILL)


def _outdated() -> OutdatedError:
    return OutdatedError("a newer check has taken the place of this one", do="wait for that one")


def _document(out: bytes) -> Any:
    try:
        return json.loads(out)
    except (ValueError, RecursionError):
        return None


def _message(err: bytes) -> str:
    """The error, or everything if there is none."""
    text = without_controls(err.decode("utf-8", "replace").replace("\r", "\n"))[-MESSAGE_CHARACTERS:].strip()
    return text[text.index("error: ") :] if "error: " in text else text
