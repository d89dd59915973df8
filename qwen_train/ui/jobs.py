"""The queue of jobs over the devices of this machine, short checks, and their routes."""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from threading import Event, Lock, Semaphore, Thread
from types import TracebackType
from typing import Annotated, Any, Self

from fastapi import APIRouter, Body
from pydantic import BaseModel

from qwen_cache.errors import JobError, OutdatedError
from qwen_cache.service.http import RefusedError, router_of
from qwen_cache.storage.files import LockHeldError, locked, make_folder, remove_folder, whole_folder
from qwen_cache.text import escaped, without_controls
from qwen_train.ui.gpus import Gpus
from qwen_train.ui.job import (
    ENDED,
    ID,
    JOB,
    LOCK,
    OUTPUT,
    STARTS,
    STOP,
    Command,
    Job,
    NoJobError,
    Output,
    Starts,
    State,
    began,
    children,
    kill,
    read_job,
    read_json,
    send,
    signed,
    write_json,
)
from qwen_train.ui.job_file import devices_named, file_of, paths_of, read_job_file

# ---- jobs ------------------------------------------------------------------------------------------------------------
# Commands as jobs: processes that outlive the UI, a queue over the devices of this machine, and short checks.

__all__ = ["Checked", "Checks", "Command", "Job", "NoJobError", "Output", "Queue"]

# ---- checks ----------------------------------------------------------------------------------------------------------
# Commands that answer in seconds, such as `build --dry-run --json`, while a user waits.
#
# At most two run at once. A newer check with the same key ends the older one, whose answer nobody wants any more.

AT_ONCE = 2
MESSAGE_CHARACTERS = 20_000


@dataclass(frozen=True)
class Checked:
    """The answer of a command: its exit code, the JSON document on stdout or None, and its message on stderr."""

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
        finally:
            with self._lock:
                del self._under_way[check]

        document = None
        with suppress(ValueError, RecursionError):
            document = json.loads(out)
        text = without_controls(err.decode("utf-8", "replace").replace("\r", "\n"))[-MESSAGE_CHARACTERS:].strip()
        message = text[text.index("error: ") :] if "error: " in text else text
        return Checked(process.returncode, document, message)

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


def _end(check: _Check) -> None:
    check.is_outdated = True
    if check.process and check.process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(check.process.pid, signal.SIGKILL)


def _outdated() -> OutdatedError:
    return OutdatedError("a newer check has taken the place of this one", do="wait for that one")


# ---- scheduler -------------------------------------------------------------------------------------------------------
# Which queued jobs start now.
#
# Two jobs with a common device never run together. A job that waits reserves its devices from those behind it, so none
# waits for ever. A device whose number is not known, such as `auto`, may be any. Jobs without devices are short checks:
# a few of them run at any time. One that fails holds up no other.

MAX_CHECKS = 2
_KNOWN = re.compile(r"cpu|mps|[a-z]+:[0-9]+", re.ASCII)


def to_start(jobs: Sequence[Job]) -> list[Job]:
    """The queued jobs, in this order, that may run beside the active ones, which come first."""
    checks = sum(job.is_active and not job.devices for job in jobs)
    chosen = []
    for i, job in enumerate(jobs):
        if job.state != "queued":
            continue
        if job.devices:
            is_free = not waits_for(job, jobs[:i])
        else:
            is_free = checks < MAX_CHECKS
            checks += is_free
        if is_free:
            chosen.append(job)
    return chosen


def waits_for(job: Job, before: Sequence[Job]) -> list[Job]:
    """The jobs among those before a queued one that may use a device of it: they run, or are to run before it."""
    return [it for it in before if not it.is_ended and it.devices and have_common(job.devices, it.devices)]


def _waiting(job: Job, before: Sequence[Job]) -> list[dict[str, Any]]:
    """The jobs that a queued one waits for, as JSON, each with their common devices; none where any may be one."""
    others = waits_for(job, before) if job.state == "queued" and job.devices else []
    known = [{*it.devices} & {*job.devices} if all(map(_KNOWN.fullmatch, it.devices)) else set() for it in others]
    return [
        {"title": escaped(it.title), "is_active": it.is_active, "devices": sorted(common)}
        for it, common in zip(others, known, strict=True)
    ]


def have_common(some: Sequence[str], others: Sequence[str]) -> bool:
    """True if two jobs on these devices may use the same one."""
    return any(not _KNOWN.fullmatch(each) for each in (*some, *others)) or not set(some).isdisjoint(others)


# ---- queue -----------------------------------------------------------------------------------------------------------
# The queue of an opened folder: jobs in order, and the thread that starts them.
#
# All of it is on the disk, so a UI that is killed loses nothing: running jobs continue, and the next UI starts the
# queued ones. A job starts at most once, even if two UIs try: its supervising process holds its lock. Ids are checked
# before they become a path.

PAUSE = 0.5  # seconds between two looks at what has ended
QUEUE = "queue.json"


Jobs = list[Job]


class Queue:
    """The jobs of a folder. While it is entered, queued ones are started; running ones outlive it."""

    def __init__(self, folder: Path, starts: Starts = STARTS) -> None:
        """`starts` is what starts each program."""
        self._jobs = folder.resolve() / ".qwen-ui" / "jobs"
        self._starts = starts
        self._changing = Lock()
        self._ended: dict[str, Job] = {}
        """Jobs that do not change any more."""
        self._wake, self._ends = Event(), Event()
        self._thread = Thread(target=self._schedule, name="queue", daemon=True)

    def __enter__(self) -> Self:
        make_folder(self._jobs)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ends.set()
        self._wake.set()
        self._thread.join()

    # ---- what there is -----------------------------------------------------------------------------------------------

    @property
    def paused(self) -> bool:
        """True if queued jobs wait until `resume`."""
        return bool(self._written().get("paused"))

    def list(self) -> list[Job]:
        """Active jobs, then queued ones in their order, then those that have ended, the newest first."""
        return self.list_all()[0]

    def list_all(self) -> tuple[Jobs, Jobs]:
        """The jobs of `list`, and those that are held until a user runs them, the oldest first."""
        jobs = []
        for folder in self._jobs.iterdir() if self._jobs.is_dir() else ():
            if ID.fullmatch(folder.name):
                with suppress(NoJobError):  # removed meanwhile, or damaged
                    jobs.append(self.get(folder.name))
        written = self._written().get("order")
        order = {str(id): i for i, id in enumerate(written if isinstance(written, list) else ())}
        ended = sorted((job for job in jobs if job.is_ended), key=lambda job: (job.ended or 0, job.id), reverse=True)
        active = sorted((job for job in jobs if job.is_active), key=lambda job: (job.started or 0, job.id))
        queued = [job for job in jobs if job.state == "queued"]
        queued.sort(key=lambda job: (order.get(job.id, len(order)), job.created, job.id))
        held = sorted((job for job in jobs if job.state == "held"), key=lambda job: job.id)
        return [*active, *queued, *ended], held

    def get(self, id: str) -> Job:
        """One job; NoJobError if there is none."""
        if not ID.fullmatch(id):
            raise NoJobError("this is no id of a job", found=id, do="reload the page")
        if id in self._ended and (self._jobs / id).is_dir():
            return self._ended[id]
        job = read_job(self._jobs / id)
        if job.is_ended:
            self._ended[id] = job
        return job

    def output(self, id: str, since: int = 0) -> Output:
        """The output of the job on stderr, from byte `since` on."""
        return self.get(id).output(since)

    def result(self, id: str) -> Any:
        """The output of the job on stdout: a JSON document, or text."""
        return self.get(id).result()

    # ---- what a user does --------------------------------------------------------------------------------------------

    def add(
        self,
        title: str,
        kind: str,
        command: Command,
        devices: Sequence[str] = (),
        about: Mapping[str, Any] | None = None,
    ) -> Job:
        """A new job at the end of the queue."""
        return self._add(title, kind, command, devices, about, signed)

    def hold(self, title: str, kind: str, command: Command, devices: Sequence[str], about: Mapping[str, Any]) -> Job:
        """A job from elsewhere, which does not start before `run`."""
        return self._add(title, kind, command, devices, about, dict)

    def run(self, id: str) -> Job:
        """A held job, at the end of the queue as the user's own: what starts its program is found on this machine."""
        job = self.get(id)
        if job.state != "held":
            raise JobError("this job is not held", where=job.title, found=job.state, do="reload the page")
        own = self.add(job.title, job.kind, job.command, job.devices, job.about)
        self.remove(id)
        return own

    def _add(
        self,
        title: str,
        kind: str,
        command: Command,
        devices: Sequence[str],
        about: Mapping[str, Any] | None,
        sign: Callable[[dict[str, Any]], dict[str, Any]],
    ) -> Job:
        now = time.time()
        id = f"{time.strftime('%Y%m%d-%H%M%S', time.gmtime(now))}-{secrets.token_hex(4)}"
        job = {
            "id": id,
            "title": title,
            "kind": kind,
            "command": command.to_json(),
            "argv": command.argv(self._starts),
            "devices": list(devices),
            "about": dict(about or {}),
            "created": now,
        }
        make_folder(self._jobs)
        with whole_folder(self._jobs / id) as folder:
            write_json(folder / JOB, sign(job))
        self._wake.set()
        return self.get(id)

    def again(self, id: str, arguments: Sequence[str] | None = None) -> Job:
        """A new job with the command of another, or with these arguments in place of its own."""
        job = self.get(id)
        command = job.command if arguments is None else replace(job.command, arguments=arguments)
        return self.add(job.title, job.kind, command, job.devices, job.about)

    def stop(self, id: str) -> Job:
        """Let the command save and end; the second time, end it without that."""
        job, pid = self._running(id)
        stops = int(read_json(job.folder / STOP).get("stops", 0)) + 1
        write_json(job.folder / STOP, {"time": time.time(), "stops": stops})
        if stops == 1:
            _ask(job, pid, signal.SIGINT)
        else:
            send(pid, job.since, signal.SIGTERM)
        return self.get(id)

    def kill(self, id: str) -> Job:
        """End the command and all that it has started, at once."""
        job, pid = self._running(id)
        stops = int(read_json(job.folder / STOP).get("stops", 0))
        write_json(job.folder / STOP, {"time": time.time(), "stops": stops, "killed": True})
        kill(pid, job.since)
        return self.get(id)

    def save_now(self, id: str) -> Job:
        """Let a run save a checkpoint after its current step."""
        job, pid = self._running(id)
        if not job.saves():
            raise JobError("this job saves nothing now", where=job.title, do="wait until it trains")
        _ask(job, pid, signal.SIGUSR1)
        return job

    def sample_now(self, id: str) -> Job:
        """Let a run generate its validation images after its current step."""
        job, pid = self._running(id)
        if not job.saves():
            raise JobError("this job generates nothing now", where=job.title, do="wait until it trains")
        if not job.generates():
            do = "start the next run with images: Show images, in the form of a new run"
            raise JobError("this run has no images to generate", where=job.title, do=do)
        _ask(job, pid, signal.SIGUSR2)
        return job

    def remove(self, id: str) -> None:
        """Remove a job that is queued or has ended, with its output."""
        job = self.get(id)
        do = "stop it, and wait until it has ended"
        try:
            with locked(job.folder / LOCK):
                if read_job(job.folder).is_active:
                    raise JobError("this job is running", where=job.title, do=do)
                remove_folder(job.folder)
        except LockHeldError:
            raise JobError("this job is running", where=job.title, do=do) from None
        self._ended.pop(id, None)

    def move(self, id: str, by: int) -> None:
        """Move a queued job among the queued ones: by -1 one place to the front."""
        with self._change() as written:
            queued = [job.id for job in self.list() if job.state == "queued"]
            if id not in queued:
                raise JobError("only a queued job can be moved", found=self.get(id).state, do="reload the page")
            place = queued.index(id)
            queued.insert(min(max(place + by, 0), len(queued) - 1), queued.pop(place))
            written["order"] = queued

    def pause(self) -> None:
        """Start no queued job until `resume`; running ones continue."""
        with self._change() as written:
            written["paused"] = True

    def resume(self) -> None:
        with self._change() as written:
            written["paused"] = False

    # ---- the thread --------------------------------------------------------------------------------------------------

    def _schedule(self) -> None:
        """Start jobs until the end; only one process does, and another takes its place when it ends."""
        while not self._ends.is_set():
            with suppress(LockHeldError, OSError), locked(self._jobs / "scheduler.lock"):
                while not self._ends.is_set():
                    for job in [] if self.paused else to_start(self.list()):
                        if self._ends.is_set():
                            break
                        if not _start(job):
                            self._note_failed_start(job)
                    self._rest()
            self._rest()

    def _rest(self) -> None:
        self._wake.wait(PAUSE)
        self._wake.clear()

    def _note_failed_start(self, job: Job) -> None:
        """Let a job that could not be started fail, or it would be tried for ever."""
        with suppress(LockHeldError, FileNotFoundError), locked(job.folder / LOCK):
            if read_job(job.folder).state == "queued":
                write_json(job.folder / ENDED, {"time": time.time(), "code": 1})

    # ---- the disk ----------------------------------------------------------------------------------------------------

    def _running(self, id: str) -> tuple[Job, int]:
        job = self.get(id)
        if not job.is_active:
            raise JobError("this job is not running", where=job.title, found=job.state, do="reload the page")
        if job.pid is None:
            raise JobError("this job is being started", where=job.title, do="try again in a second")
        return job, job.pid

    def _written(self) -> dict[str, Any]:
        return read_json(self._jobs / QUEUE)

    @contextmanager
    def _change(self) -> Iterator[dict[str, Any]]:
        """The order and the pause, to be changed and written."""
        with self._changing:
            make_folder(self._jobs)
            written = self._written()
            yield written
            write_json(self._jobs / QUEUE, written)
        self._wake.set()


def _ask(job: Job, pid: int, number: signal.Signals) -> None:
    """Send a signal to the command; to its processes where torchrun starts them.

    torchrun passes no SIGUSR1 or SIGUSR2 on, and after SIGINT gives them 30 seconds to save.
    """
    workers = [(child, began(child)) for child in children(pid)] if job.command.processes > 1 else []
    if not workers or began(pid) != job.since:
        send(pid, job.since, number)
        return
    for worker, since in workers:
        if since is not None:
            send(worker, since, number)


def _start(job: Job) -> bool:
    """Start a queued job in processes of its own; whether it has begun."""
    command = [sys.executable, "-m", "qwen_train.ui.supervise", str(job.folder)]
    with open(job.folder / OUTPUT, "ab") as errors:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
            cwd=job.workplace,
            env={**os.environ, "PYTHONSAFEPATH": "1"},
            check=False,
        )
    return done.returncode == 0


# ---- routes ----------------------------------------------------------------------------------------------------------
# The routes of the Queue page, and of every page that shows a job.


class Move(BaseModel, extra="forbid"):
    """How many places a queued job moves to the back; to the front if it is negative."""

    by: int


class Stop(BaseModel, extra="forbid"):
    """The state on the page: who saw a job run wants it to save, though another window has stopped it meanwhile."""

    seen: State = "stopping"


def job_routes(queue: Queue, known: KnownDevices) -> APIRouter:
    """The routes for a queue that is entered elsewhere, on a machine with the devices that are `known`."""
    router, gpus = router_of(prefix="/api"), Gpus()

    @router.get("/jobs")
    def jobs() -> dict[str, Any]:
        """The jobs, those that are held, and the GPUs that they run on."""
        listed, held = queue.list_all()
        return {
            "paused": queue.paused,
            "jobs": [job.to_json() | {"waits_for": _waiting(job, listed[:i])} for i, job in enumerate(listed)],
            "held": [job.to_json() | {"paths": paths_of(job)} for job in held],
            **gpus.now(),
        }

    @router.post("/jobs/import")
    def imported(content: Annotated[Any, Body()]) -> dict[str, Any]:
        """A job from the file of another one, which is held."""
        file = read_job_file(content)
        return queue.hold(file.title, file.kind, file.command, file.devices, file.about).to_json()

    @router.get("/jobs/{id}/export")
    def exported(id: str) -> dict[str, Any]:
        """The content of the file of a job."""
        with refusals():
            return file_of(queue.get(id))

    @router.post("/jobs/{id}/run")
    def run(id: str) -> dict[str, Any]:
        """A held job, queued; JobError if this machine lacks a device of it."""
        with refusals():
            job = queue.get(id)
            if named := devices_named(job):
                check_devices(job, named, known.get())
            return queue.run(id).to_json()

    @router.get("/jobs/{id}")
    def job(id: str) -> dict[str, Any]:
        with refusals():
            return queue.get(id).to_json()

    @router.get("/jobs/{id}/output")
    def output(id: str, since: int = 0) -> dict[str, Any]:
        with refusals():
            return asdict(queue.output(id, since))

    @router.get("/jobs/{id}/result")
    def result(id: str) -> dict[str, Any]:
        with refusals():
            value = queue.result(id)
        is_text = isinstance(value, str)
        return {"document": None if is_text else value, "text": value if is_text else None}

    @router.post("/jobs/{id}/kill")
    def kill(id: str) -> dict[str, Any]:
        with refusals():
            return queue.kill(id).to_json()

    @router.post("/jobs/{id}/save")
    def save(id: str) -> dict[str, Any]:
        with refusals():
            return queue.save_now(id).to_json()

    @router.post("/jobs/{id}/sample")
    def sample(id: str) -> dict[str, Any]:
        with refusals():
            return queue.sample_now(id).to_json()

    @router.post("/jobs/{id}/again")
    def again(id: str) -> dict[str, Any]:
        with refusals():
            return queue.again(id).to_json()

    stopping = Lock()

    @router.post("/jobs/{id}/stop")
    def stop(id: str, stop: Stop | None = None) -> dict[str, Any]:
        with refusals(), stopping:
            job = queue.get(id)
            is_repeated = stop is not None and stop.seen == "running" and job.state == "stopping"
            return (job if is_repeated else queue.stop(id)).to_json()

    @router.post("/jobs/{id}/remove")
    def remove(id: str) -> dict[str, Any]:
        with refusals():
            queue.remove(id)
        return {}

    @router.post("/jobs/{id}/move")
    def move(id: str, move: Move) -> dict[str, Any]:
        with refusals():
            queue.move(id, move.by)
        return {}

    @router.post("/queue/pause")
    def pause() -> dict[str, bool]:
        queue.pause()
        return {"paused": True}

    @router.post("/queue/resume")
    def resume() -> dict[str, bool]:
        queue.resume()
        return {"paused": False}

    return router


@contextmanager
def refusals() -> Iterator[None]:
    """The errors of jobs as answers: 404, or 409 for what a job does not allow now."""
    try:
        yield
    except JobError as error:
        status = 404 if isinstance(error, NoJobError) else 409
        raise RefusedError(status, error.fault, error.do or "reload the page") from None


# ---- devices ---------------------------------------------------------------------------------------------------------
# The devices of this machine, as `qwen-cache doctor --json` finds them: torch is never imported here.
#
# The first answer is kept, since a look takes seconds; `again` repeats it. The CPU is always one of them, the last.

CPU = "cpu"
WHY_NONE = ("accelerator", "torch's build")
"""The checks of `doctor` that say why there is no accelerator."""
LOOK = Command("qwen-cache", ("doctor", "--json"))


@dataclass(frozen=True)
class Device:
    """A device by the name that commands take; None for what its backend does not report."""

    name: str
    title: str
    memory: int | None = None
    free: int | None = None
    bf16: bool | None = None
    uuid: str | None = None


@dataclass(frozen=True)
class Found:
    """The devices, and why there may be fewer than expected."""

    devices: tuple[Device, ...]
    problem: str = ""
    do: str = ""


def devices(checks: Checks) -> list[Device]:
    """The devices of this machine, from one look that takes seconds."""
    return list(look(checks).devices)


def look(checks: Checks) -> Found:
    """The result of `qwen-cache doctor --json`."""
    return found(checks.check(LOOK))


def found(checked: Checked) -> Found:
    """The devices in an answer of `doctor`; its reason where it found no accelerator or failed."""
    if not isinstance(checked.document, dict):
        return Found((Device(CPU, "CPU"),), f"qwen-cache doctor failed: {checked.message}", "run it in a terminal")
    examined: Sequence[dict[str, Any]] = checked.document["checks"]
    facts = [each["facts"] for each in examined if "place" in each["facts"]]
    names = ("place", "name", "total", "free", "bf16", "uuid")
    accelerators = [Device(*map(it.get, names)) for it in facts]
    host = next((each["facts"] for each in examined if each["name"] == "memory"), {"total": None, "free": None})
    here = (*accelerators, Device(CPU, "CPU", host["total"], host["free"]))
    lacking = [each for each in examined if each["name"] in WHY_NONE and each["status"] != "ok"]
    if accelerators or not lacking:
        return Found(here)
    return Found(here, f"{lacking[0]['name']}: {lacking[0]['found']}", lacking[0]["do"] or "")


class KnownDevices:
    """The devices of this machine, from the last look; thread-safe."""

    def __init__(self, checks: Checks) -> None:
        self._checks, self._lock = checks, Lock()
        self._found: Found | None = None

    def get(self, *, again: bool = False) -> Found:
        """The devices of the last look, or of a new one."""
        with self._lock:
            if again or self._found is None:
                self._found = look(self._checks)
            return self._found


def check_devices(job: Job, named: Sequence[str], found: Found) -> None:
    """JobError if this machine has not all of the devices that a job is for, by name."""
    here = {each.name for each in found.devices}
    here |= {name.partition(":")[0] for name in here}
    if lacking := [each for each in named if each not in here]:
        names = ", ".join(each.name for each in found.devices)
        why = f"; {found.problem}" if found.problem else ""
        do = "start it again from its page, with a device that is here, and remove this one"
        what = f"this machine has no {' and no '.join(lacking)}"
        raise JobError(what, where=job.title, found=f"{names}{why}", do=do)


def device_routes(known: KnownDevices) -> APIRouter:
    router = router_of()

    @router.get("/api/devices")
    def found_once() -> dict[str, Any]:
        """The devices, found once."""
        return asdict(known.get())

    @router.post("/api/devices/again")
    def again() -> dict[str, Any]:
        """The devices and their free memory as they are now."""
        return asdict(known.get(again=True))

    return router
