"""The check of a source: its images, and with a model the plan of its build; and what is kept of both over a restart.

Kept is what was looked at, not what was found in the images: that is remembered by their files (`scan.py`), so it is
never stale. The problems of a build are kept with all that they depend on, and are not shown once any of it is another.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from qwen_cache.errors import OutdatedError, Problem, QwenCacheError
from qwen_cache.storage.files import make_folder, write_durably
from qwen_train.ui.job import Command
from qwen_train.ui.jobs import Checked, Checks
from qwen_train.ui.scan import Scan

KEY = "data-check"
NO_MODEL = "no model is named, so its own limits were not checked, such as the length of prompts"


class KeptBuild(BaseModel):
    """The problems of a build, and the hash of what they depend on."""

    key: str
    arguments: list[str]
    problems: list[tuple[str, str, str]]
    """Where, what, do."""


class Kept(BaseModel):
    """The checks and scans of a source with these settings that have ended."""

    settings: str
    has_checked: bool = False
    has_scanned: bool = False
    build: KeptBuild | None = None


def read_kept(file: Path, settings: str) -> Kept:
    """The part that is kept of a source for these settings; nothing if the file is missing, damaged, or of others."""
    with suppress(OSError, ValidationError):
        kept = Kept.model_validate_json(file.read_bytes())
        if kept.settings == settings:
            return kept
    return Kept(settings=settings)


def write_kept(file: Path, kept: Kept) -> None:
    """Keep it; a folder that cannot be written to only costs another check."""
    with suppress(OSError):
        make_folder(file.parent)
        write_durably(file, kept.model_dump_json().encode())


def located(where: str, folder: Path) -> str:
    """The place of a problem as a list of the source has it, which begins with an absolute path."""
    return where if "://" in where else os.path.join(folder, where)


class PlanCheck:
    """`qwen-cache build --dry-run --json` in a process of its own; `found` gets the problems that it lists."""

    def __init__(
        self, checks: Checks, command: Command, folder: Path, found: Callable[[Sequence[Problem]], object]
    ) -> None:
        """`folder` is where the command runs: the places of its problems begin there."""
        self.command, self.folder, self.state, self.message, self.summary = command, folder, "running", "", ""
        self.checks, self._found = checks, found
        self.problems: list[Problem] = []

    @classmethod
    def kept(cls, checks: Checks, command: Command, folder: Path, problems: Sequence[Problem]) -> PlanCheck:
        """One that ended before, with these problems."""
        plan = cls(checks, command, folder, lambda _: None)
        plan.state, plan.problems = "done", [*problems]
        return plan

    def run(self) -> None:
        try:
            self._take(self.checks.check(self.command, KEY))
        except OutdatedError:
            self.state = "stopped"
        except (QwenCacheError, OSError) as error:
            self.state, self.message = "failed", str(error)

    def _take(self, checked: Checked) -> None:
        document = checked.document
        if not isinstance(document, dict) or "problems" not in document:
            self.state, self.message = "failed", checked.message or f"the command ended with {checked.code}"
            return
        self.problems = [
            Problem(located(each["where"], self.folder), each["what"], each["do"]) for each in document["problems"]
        ]
        self._found(self.problems)
        encode, cached = document.get("to_encode", 0), document.get("cached", 0)
        self.summary = f"{encode:,} to encode, {cached:,} in the cache"
        problems = self.problems
        refused = [each["what"] for each in document.get("refused", ()) if not (problems and "problem" in each["what"])]
        self.state, self.message = "done", os.linesep.join(refused)


class Check:
    """A look at the images, and beside it the plan of a build if a model is named."""

    def __init__(self, images: Scan, plan: PlanCheck | None = None, *, is_kept: bool = False) -> None:
        self.images, self.plan, self.is_kept = images, plan, is_kept
        self._began, self._seconds = time.monotonic(), 0.0

    def start(self, ended: Callable[[], object]) -> None:
        """Begin; `ended` is called when both have ended."""
        threading.Thread(target=self._run, args=(ended,), name="check", daemon=True).start()

    def _run(self, ended: Callable[[], object]) -> None:
        self.images.start()
        if self.plan is not None:
            self.plan.run()
        self.images.wait()
        self._seconds = time.monotonic() - self._began
        ended()

    def stop(self) -> None:
        self.images.stop()
        if self.plan is not None:
            self.plan.checks.end(KEY)

    @property
    def state(self) -> str:
        """`running`, `failed`, `stopped` or `done`, whichever comes first for one of the two."""
        states = {self.images.state, self.plan.state if self.plan else "done"}
        return next(each for each in ("running", "failed", "stopped", "done") if each in states)

    def as_json(self) -> dict[str, Any]:
        plan, images = self.plan, self.images
        summary = [plan.summary if plan else "" if self.is_kept else NO_MODEL]
        return {
            "state": self.state,
            "message": os.linesep.join(filter(None, (images.error, plan.message if plan else ""))),
            "summary": "; ".join(filter(None, summary)),
            "line": plan.command.line if plan else "",
            "seconds": round(time.monotonic() - self._began if self.state == "running" else self._seconds, 1),
            "done": images.done,
            "total": images.total,
            "kept": self.is_kept,
            "with_model": plan is not None,
            "reads": images.state == "running",
        }
