"""A job: its folder, and its state as the folder tells it.

    job.json       what it is; written once
    lock           held by the supervising process and by the command, as long as one of them lives
    started.json   when, and the command's process
    stop.json      that a user stops it
    ended.json     when, and the exit code
    output.log     stderr of the command
    result.json    its stdout
    progress.json  its progress line

Every file but the last three is written as a whole. A started job without a lock and without ended.json is lost: a kill
or a power loss has ended it. Whoever finds this first writes it down. A folder may come from elsewhere: one with
anything but files in it, such as a link to other files, is no job.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from qwen_cache.errors import JobError
from qwen_cache.storage.files import LockHeldError, is_link, locked, write_durably
from qwen_cache.text import parse_json, without_controls
from qwen_cache.ui.jobs.command import STARTS, VARIABLES, Command
from qwen_cache.ui.jobs.signature import is_signed

JOB, LOCK, STARTED, STOP, ENDED = "job.json", "lock", "started.json", "stop.json", "ended.json"
OUTPUT, RESULT, PROGRESS = "output.log", "result.json", "progress.json"
ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}", re.ASCII)
TRAIN = "train"
"""The kind of the jobs that save when they are asked to."""
OUTPUT_BYTES = 1 << 16  # of one answer
ERROR_BYTES = 1 << 13
RESULT_BYTES = 1 << 26
_ERROR = re.compile(r"^(?:error: |Traceback )", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

State = Literal["queued", "running", "stopping", "done", "failed", "stopped", "lost"]


class NoJobError(JobError):
    """There is no job of this id."""


@dataclass(frozen=True)
class Output:
    """A part of a job's output, where the next part begins, and the bytes that were left out before this one."""

    text: str
    next: int
    skipped: int


@dataclass(frozen=True)
class Job:
    """A job as its folder has it now."""

    id: str
    title: str
    kind: str
    command: Command
    argv: tuple[str, ...]
    devices: tuple[str, ...]
    about: dict[str, Any]
    created: float
    folder: Path
    state: State = "queued"
    started: float | None = None
    ended: float | None = None
    code: int | None = None
    pid: int | None = None
    since: str = ""
    """When the command's process began."""
    is_own: bool = True
    """Whether this user has added it on this machine."""

    @property
    def is_ended(self) -> bool:
        return self.state in ("done", "failed", "stopped", "lost")

    @property
    def is_active(self) -> bool:
        return self.state in ("running", "stopping")

    @property
    def workplace(self) -> Path:
        """The opened folder, in which the command runs: FOLDER/.qwen-ui/jobs/ID is the job's."""
        return self.folder.parents[2]

    def progress(self) -> dict[str, Any] | None:
        """The newest progress of the command, with its age in seconds; None if there is none."""
        file = self.folder / PROGRESS
        document = read_json(file)
        if not document:
            return None
        try:
            return document | {"age": max(0.0, round(time.time() - file.stat().st_mtime, 1))}
        except FileNotFoundError:
            return None

    def error(self) -> str:
        """The end of the output, from the last error or traceback on; "" without one."""
        text = _text(self._tail(ERROR_BYTES))
        begins = [found.start() for found in _ERROR.finditer(text)]
        return text[begins[-1] :].strip() if begins else ""

    def output(self, since: int) -> Output:
        """The output from byte `since` on; only the end of it where that is too long, or `since` is negative."""
        size = self._size()
        begin = since if 0 <= since <= size and size - since <= OUTPUT_BYTES else max(0, size - OUTPUT_BYTES)
        data = self._tail(OUTPUT_BYTES, begin)
        whole = data if begin == since else data.lstrip(bytes(range(0x80, 0xC0)))  # it may begin within a letter
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        text = decoder.decode(whole)
        rest = len(decoder.getstate()[0])  # the beginning of a letter whose end is not written yet
        return Output(_plain(text), begin + len(data) - rest, max(0, begin - max(since, 0)))

    def result(self) -> Any:
        """What the command printed on stdout: the JSON document that it is, or text."""
        try:
            with open(self.folder / RESULT, "rb") as file:
                data = file.read(RESULT_BYTES + 1)
        except FileNotFoundError:
            return ""
        if len(data) > RESULT_BYTES:
            raise JobError("the result is too large to be shown", where=self.folder / RESULT, do="open the file")
        try:
            return json.loads(data)
        except ValueError:
            return _text(data)

    def can(self) -> list[str]:
        """What a user may do with the job now."""
        if self.state == "queued":
            return ["move", "remove"]
        if self.is_ended:
            return ["again", "remove"]
        return ["stop", "kill", *(["save"] if self.saves() else [])]

    def saves(self) -> bool:
        """Whether the command saves when it is asked to: a run that trains."""
        return self.kind == TRAIN and self.state == "running" and (self.progress() or {}).get("what") == "training"

    def to_json(self) -> dict[str, Any]:
        names = ("id", "title", "kind", "about", "state", "created", "started", "ended", "code", "is_own")
        more = {"error": self.error()} if self.state in ("failed", "lost") else {}
        return {
            **{name: getattr(self, name) for name in names},
            "devices": list(self.devices),
            "line": self.command.line,
            "can": self.can(),
            "progress": None if self.state == "queued" else self.progress(),
            **more,
        }

    def _size(self) -> int:
        try:
            return (self.folder / OUTPUT).stat().st_size
        except FileNotFoundError:
            return 0

    def _tail(self, count: int, begin: int | None = None) -> bytes:
        """Up to `count` bytes of the output, from `begin` on or its last ones."""
        try:
            with open(self.folder / OUTPUT, "rb") as file:
                file.seek(max(0, self._size() - count) if begin is None else begin)
                return file.read(count)
        except FileNotFoundError:
            return b""


def read_job(folder: Path) -> Job:
    """The job of a folder; NoJobError if it is none."""
    written = read_json(folder / JOB) if _has_files_alone(folder) else {}
    try:
        command = Command(**written["command"])
        job = {name: written[name] for name in ("id", "title", "kind", "about", "created")}
        job |= {name: tuple(written[name]) for name in ("argv", "devices")} | {"command": command, "folder": folder}
        job["is_own"] = is_signed(written)
        if not _is_valid(job):
            raise KeyError
    except (KeyError, TypeError, ValueError):
        raise NoJobError("there is no such job", found=folder.name, do="reload the page") from None
    started = read_json(folder / STARTED)
    if started:
        job |= {"started": _time(started), "pid": _whole(started, "pid"), "since": str(started.get("began") or "")}
    ended = read_json(folder / ENDED)
    if not ended and started and not _lives(folder):
        ended = read_json(folder / ENDED)
    if ended:
        return Job(**job, state=_end_state(folder, ended), ended=_time(ended), code=_whole(ended, "code"))
    is_stopped = (folder / STOP).exists()
    return Job(**job, state="queued" if not started else "stopping" if is_stopped else "running")


def _is_valid(job: Mapping[str, Any]) -> bool:
    """Whether a job that was read is one that can be listed and run again; its folder may come from elsewhere."""
    kinds = {"title": str, "kind": str, "about": dict, "created": float}
    command = job["command"]
    is_known = command.program in STARTS and set(command.environment) <= set(VARIABLES)
    texts = (*job["argv"], *job["devices"], *command.environment.values())
    is_text = all(isinstance(text, str) for text in texts) and type(command.processes) is int
    is_here = job["id"] == job["folder"].name
    return is_known and is_text and is_here and all(isinstance(job[name], kind) for name, kind in kinds.items())


def _has_files_alone(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return not is_link(folder) and all(each.is_file(follow_symlinks=False) for each in entries)
    except OSError:
        return False


def _time(written: Mapping[str, Any]) -> float | None:
    value = written.get("time")
    return value if type(value) in (int, float) else None


def _whole(written: Mapping[str, Any], name: str) -> int | None:
    value = written.get(name)
    return value if type(value) is int else None


def _end_state(folder: Path, ended: Mapping[str, Any]) -> State:
    code = ended.get("code")
    if code == 0:
        return "done"
    if (folder / STOP).exists():
        return "stopped"
    return "lost" if code is None else "failed"


def _lives(folder: Path) -> bool:
    """Whether the processes of a started job live; if not, how it ended is written down by now."""
    try:
        with locked(folder / LOCK):
            if not read_json(folder / ENDED):
                write_json(folder / ENDED, {"time": time.time(), "code": None})
            return False
    except LockHeldError:
        return True
    except FileNotFoundError:  # it was removed meanwhile
        return False


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file; {} without one."""
    try:
        value = parse_json(file.read_bytes())
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}


def write_json(file: Path, value: Mapping[str, Any]) -> None:
    write_durably(file, json.dumps(value, indent=1).encode("ascii"))


def _text(data: bytes) -> str:
    return _plain(data.decode("utf-8", "replace"))


def _plain(text: str) -> str:
    """Text without colours, and with each line that replaces another below it."""
    return without_controls(_ANSI.sub("", text).replace("\r\n", "\n").replace("\r", "\n"))
