"""The check of a source: `qwen-cache build --dry-run --json` in a process of its own, and the problems it lists."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qwen_cache.errors import OutdatedError, Problem, QwenCacheError
from qwen_cache.ui.jobs.checks import Checked, Checks
from qwen_cache.ui.jobs.command import Command

KEY = "data-check"


def located(where: str, folder: Path) -> str:
    """The place of a problem as a list of the source has it, which begins with an absolute path."""
    return where if "://" in where else os.path.join(folder, where)


class Check:
    """A check that runs in a thread; `found` gets the problems."""

    def __init__(
        self, checks: Checks, command: Command, folder: Path, found: Callable[[Sequence[Problem]], object]
    ) -> None:
        """`folder` is where the command runs: the places of its problems begin there."""
        self.command, self.folder, self.state, self.message, self.summary = command, folder, "running", "", ""
        self._checks, self._found, self._began = checks, found, time.monotonic()
        self.seconds = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="check", daemon=True).start()

    def _run(self) -> None:
        try:
            self._take(self._checks.check(self.command, KEY))
        except OutdatedError:
            self.state = "stopped"
        except (QwenCacheError, OSError) as error:
            self.state, self.message = "failed", str(error)
        self.seconds = time.monotonic() - self._began

    def _take(self, checked: Checked) -> None:
        document = checked.document
        if not isinstance(document, dict) or "problems" not in document:
            self.state, self.message = "failed", checked.message or f"the command ended with {checked.code}"
            return
        problems = [
            Problem(located(each["where"], self.folder), each["what"], each["do"]) for each in document["problems"]
        ]
        self._found(problems)
        encode, cached = document.get("to_encode", 0), document.get("cached", 0)
        self.summary = f"{encode:,} to encode, {cached:,} in the cache"
        refused = [each["what"] for each in document.get("refused", ()) if not (problems and "problem" in each["what"])]
        self.state, self.message = "done", os.linesep.join(refused)

    def as_json(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began if self.state == "running" else self.seconds
        return {
            "state": self.state,
            "message": self.message,
            "summary": self.summary,
            "line": self.command.line,
            "seconds": round(seconds, 1),
        }
