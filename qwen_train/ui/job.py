"""A job: its command, folder, state, and processes."""

from __future__ import annotations

import codecs
import hmac
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from qwen_cache.errors import ConfigError, JobError
from qwen_cache.storage.files import LockHeldError, cache_home, is_link, locked, make_folder, read_file, write_durably
from qwen_cache.text import escaped, parse_json, shell_line, without_controls

# ---- command ---------------------------------------------------------------------------------------------------------
# A command of `qwen-cache` or `qwen-train`: the line that a user types, and how it is started here.
#
# It is started by this Python, without a shell and without its folder in the search path of modules, as the installed
# programs are: a file of the user's never takes the place of a module.

Program = Literal["qwen-cache", "qwen-train"]
Starts = Mapping[str, Sequence[str]]

STARTS: Starts = {
    "qwen-cache": (sys.executable, "-m", "qwen_cache"),
    "qwen-train": (sys.executable, "-m", "qwen_train"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
"""The beginning of the command of each program."""
VARIABLES = ("CUDA_VISIBLE_DEVICES",)
"""The variables that a job read from a folder may set: others, such as LD_PRELOAD, run any program."""
COLUMNS = "110"  # of tables: wider than an unknown terminal, and still without a scroll bar on a laptop
COLOURS = ("CLICOLOR_FORCE", "FORCE_COLOR", "PY_COLORS", "TTY_COMPATIBLE", "TTY_INTERACTIVE")


@dataclass(frozen=True)
class Command:
    """A program and its arguments; `environment` is shown and written to the disk, so it holds no secrets."""

    program: Program
    arguments: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    processes: int = 1
    """The processes of `qwen-train`: more than one are started by torchrun."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(map(str, self.arguments)))

    @property
    def line(self) -> str:
        """The command line for a shell in the opened folder."""
        variables = [f"{name}={shell_line([value])} " for name, value in self.environment.items()]
        return "".join(variables) + shell_line(self._words)

    def argv(self, starts: Starts = STARTS) -> list[str]:
        """The command that the system starts; ConfigError for a text that no command can be given."""
        program, *arguments = self._words
        for text in arguments:
            is_possible = False
            with suppress(UnicodeEncodeError):  # half of a letter, as from a program that cuts text
                is_possible = b"\0" not in os.fsencode(text)
            if not is_possible:
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


# ---- signature -------------------------------------------------------------------------------------------------------
# Which jobs are the user's own: each is signed with a key that is not in the opened folder.
#
# A folder from elsewhere may have queued jobs in it, and opening it would run their commands. So only jobs with a valid
# signature start by themselves; others are held until a user has read their commands. The key stays in the user's cache
# folder; where that cannot be written it is that of the process, and jobs of an earlier one count as those of others.

SIGNATURE = "signature"
KEY_NAME, KEY_BYTES = "ui-key", 32


def signed(job: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON of a job with its signature."""
    return {**job, SIGNATURE: _signature(job)}


def is_signed(job: Mapping[str, Any]) -> bool:
    """True if the JSON of a job has been signed by this user on this machine."""
    given = job.get(SIGNATURE)
    return isinstance(given, str) and given.isascii() and hmac.compare_digest(given, _signature(job))


def _signature(job: Mapping[str, Any]) -> str:
    content = {name: value for name, value in job.items() if name != SIGNATURE}
    return hmac.new(_key(), json.dumps(content, sort_keys=True).encode("ascii"), "sha256").hexdigest()


@cache
def _key() -> bytes:
    """The key of the user, made at the first call."""
    path, new = cache_home() / KEY_NAME, secrets.token_bytes(KEY_BYTES)
    with suppress(OSError):
        make_folder(path.parent)
        with (
            suppress(FileExistsError),
            open(path, "xb", opener=lambda at, flags: os.open(at, flags, 0o600)) as file,
        ):
            file.write(new)
        key = read_file(path, KEY_BYTES)
        return key if len(key) == KEY_BYTES else new
    return new


# ---- process ---------------------------------------------------------------------------------------------------------
# Processes by number, safely: a number is used only with the time at which its process began, since it may return.

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


# ---- job -------------------------------------------------------------------------------------------------------------
# A job: its folder, and its state as the folder tells it.
#
#     job.json       what it is; written once
#     lock           held by the supervising process and by the command, as long as one of them lives
#     started.json   when, and the command's process
#     stop.json      that a user stops it
#     ended.json     when, and the exit code
#     output.log     stderr of the command
#     result.json    its stdout
#     progress.json  its progress line
#
# Every file but the last three is written as a whole. A started job without a lock and without ended.json is lost: a
# kill or a power loss has ended it. Whoever finds this first writes it down. A folder may come from elsewhere: one with
# anything but files in it, such as a link to other files, is no job.

JOB, LOCK, STARTED, STOP, ENDED = "job.json", "lock", "started.json", "stop.json", "ended.json"
OUTPUT, RESULT, PROGRESS = "output.log", "result.json", "progress.json"
ID = re.compile(r"[0-9]{8}-[0-9]{6}-[0-9a-f]{8}", re.ASCII)
TRAIN = "train"
"""The kind of the jobs that save and generate images when they are asked to."""
OUTPUT_BYTES = 1 << 16  # of one answer
ERROR_BYTES = 1 << 13
RESULT_BYTES = 1 << 26
_ERROR = re.compile(r"^(?:error: |Traceback )", re.MULTILINE)
_ANSI = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")

EARLIEST = 1_735_689_600
"""2025, before there was this program: a time from elsewhere is none if it is earlier, or in the future."""
DAY = 86_400  # seconds that the clock of another machine may be ahead

State = Literal["held", "queued", "running", "stopping", "done", "failed", "stopped", "lost"]


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
    """True if this user has added it on this machine."""

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
        """The output of the command on stdout: the JSON document that it is, or text."""
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
        """The actions that a user may take on the job now."""
        if self.state == "held":
            return ["run", "remove"]
        if self.state == "queued":
            return ["move", "remove"]
        if self.is_ended:
            return ["again", "remove"]
        asked = ["save", *(["sample"] if self.generates() else [])] if self.saves() else []
        return ["stop", "kill", *asked]

    def saves(self) -> bool:
        """True if the command saves when it is asked to: a run that trains."""
        return self.kind == TRAIN and self.state == "running" and (self.progress() or {}).get("what") == "training"

    def generates(self) -> bool:
        """True if the command is a run with validation images to generate, as its folder says."""
        from qwen_train.run import RUN_FACTS_NAME, VALIDATION_IMAGES

        count = read_json(self.run / RUN_FACTS_NAME).get(VALIDATION_IMAGES) if self.run else None
        return type(count) is int and count > 0

    @property
    def run(self) -> Path | None:
        """The folder of the run that the command trains; None for another command."""
        name = self.about.get("output_dir")
        return self.workplace / name if self.kind == TRAIN and isinstance(name, str) and "\0" not in name else None

    def checkpoint(self) -> int | None:
        """The step of the newest checkpoint of the run; None without one."""
        from qwen_train.run import checkpoints

        return max((step for step, _ in checkpoints(self.run)), default=None) if self.run else None

    def to_json(self) -> dict[str, Any]:
        names = ("id", "kind", "about", "state", "created", "started", "ended", "code", "is_own")
        more: dict[str, Any] = {"error": self.error()} if self.state in ("failed", "lost") else {}
        more |= {"checkpoint": self.checkpoint()} if self.kind == TRAIN and not self.is_ended else {}
        return {
            **{name: getattr(self, name) for name in names},
            "title": escaped(self.title),
            "devices": [escaped(device) for device in self.devices],
            "line": self.command.line,
            "can": self.can(),
            "progress": None if self.state in ("held", "queued") else self.progress(),
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
        # One that can be listed and run again: its folder may come from elsewhere.
        kinds = {"title": str, "kind": str, "about": dict, "created": float}
        is_known = command.program in STARTS and set(command.environment) <= set(VARIABLES)
        texts = (*job["argv"], *job["devices"], *command.environment.values())
        is_text = all(isinstance(text, str) for text in texts) and type(command.processes) is int
        is_here = job["id"] == folder.name
        if not (is_known and is_text and is_here and all(isinstance(job[name], kind) for name, kind in kinds.items())):
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
        code, is_stopped = ended.get("code"), (folder / STOP).exists()
        state: State = "done" if code == 0 else "stopped" if is_stopped else "lost" if code is None else "failed"
        return Job(**job, state=state, ended=_time(ended), code=_whole(ended, "code"))
    is_stopped = (folder / STOP).exists()
    if not started:
        return Job(**job, state="queued" if job["is_own"] else "held")
    return Job(**job, state="stopping" if is_stopped else "running")


def _has_files_alone(folder: Path) -> bool:
    try:
        with os.scandir(folder) as entries:
            return not is_link(folder) and all(each.is_file(follow_symlinks=False) for each in entries)
    except OSError:
        return False


def _time(written: Mapping[str, Any]) -> float | None:
    value: Any = written.get("time")
    if type(value) not in (int, float):
        return None
    return value if EARLIEST <= value <= time.time() + DAY else None


def _whole(written: Mapping[str, Any], name: str) -> int | None:
    value = written.get(name)
    return value if type(value) is int else None


def _lives(folder: Path) -> bool:
    """True if the processes of a started job live; if not, how it ended is written down by now."""
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
