"""The queue of an opened folder: jobs in order, and the thread that starts them.

All of it is on the disk, so a UI that is killed loses nothing: running jobs continue, and the next UI starts the queued
ones. A job starts at most once, even if two UIs try: its supervising process holds its lock. Ids are checked before
they become a path.
"""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Event, Lock, Thread
from types import TracebackType
from typing import Any, Self

from qwen_cache.errors import JobError
from qwen_cache.storage.files import LockHeldError, locked, make_folder, remove_folder, whole_folder, write_durably
from qwen_cache.ui.jobs.command import STARTS, Command, Starts
from qwen_cache.ui.jobs.job import (
    ENDED,
    ID,
    JOB,
    LOCK,
    OUTPUT,
    STOP,
    Job,
    NoJobError,
    Output,
    read_job,
    read_json,
    write_json,
)
from qwen_cache.ui.jobs.process import began, children, kill, send
from qwen_cache.ui.jobs.scheduler import to_start
from qwen_cache.ui.jobs.signature import signed

PAUSE = 0.5  # seconds between two looks at what has ended
QUEUE = "queue.json"
FOREIGN = (
    b"error: this job was not added by you on this machine, so it does not start by itself\n  -> read its command, \
and run it again if you want it\n"
)


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
        """Whether queued jobs wait until `resume`."""
        return bool(self._written().get("paused"))

    def list(self) -> list[Job]:
        """Active jobs, then queued ones in their order, then those that have ended, the newest first."""
        jobs = list(self._every())
        order = {str(id): i for i, id in enumerate(self._order())}
        ended = sorted((job for job in jobs if job.is_ended), key=lambda job: (job.ended or 0, job.id), reverse=True)
        active = sorted((job for job in jobs if job.is_active), key=lambda job: (job.started or 0, job.id))
        queued = [job for job in jobs if job.state == "queued"]
        queued.sort(key=lambda job: (order.get(job.id, len(order)), job.created, job.id))
        return [*active, *queued, *ended]

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
        """What the job has printed on stderr, from byte `since` on."""
        return self.get(id).output(since)

    def result(self, id: str) -> Any:
        """What the job has printed on stdout: a JSON document, or text."""
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
            write_json(folder / JOB, signed(job))
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
                    self._start_next()
                    self._rest()
            self._rest()

    def _rest(self) -> None:
        self._wake.wait(PAUSE)
        self._wake.clear()

    def _start_next(self) -> None:
        for job in [] if self.paused else to_start(self.list()):
            if self._ends.is_set():
                return
            if not job.is_own:
                self._note_failed_start(job, FOREIGN)
            elif not _start(job):
                self._note_failed_start(job)

    def _note_failed_start(self, job: Job, why: bytes = b"") -> None:
        """Let a job that could not be started fail, or it would be tried for ever."""
        with suppress(LockHeldError, FileNotFoundError), locked(job.folder / LOCK):
            if read_job(job.folder).state == "queued":
                if why:
                    write_durably(job.folder / OUTPUT, why)
                write_json(job.folder / ENDED, {"time": time.time(), "code": 1})

    # ---- the disk ----------------------------------------------------------------------------------------------------

    def _every(self) -> Iterator[Job]:
        for folder in self._jobs.iterdir() if self._jobs.is_dir() else ():
            if ID.fullmatch(folder.name):
                with suppress(NoJobError):  # removed meanwhile, or damaged
                    yield self.get(folder.name)

    def _running(self, id: str) -> tuple[Job, int]:
        job = self.get(id)
        if not job.is_active:
            raise JobError("this job is not running", where=job.title, found=job.state, do="reload the page")
        if job.pid is None:
            raise JobError("this job is being started", where=job.title, do="try again in a second")
        return job, job.pid

    def _written(self) -> dict[str, Any]:
        return read_json(self._jobs / QUEUE)

    def _order(self) -> Sequence[Any]:
        order = self._written().get("order")
        return order if isinstance(order, list) else ()

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

    torchrun passes no SIGUSR1 on, and after SIGINT gives them 30 seconds to save.
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
    command = [sys.executable, "-m", "qwen_cache.ui.jobs.supervise", str(job.folder)]
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
