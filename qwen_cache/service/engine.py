"""The engine of the server: plans, encodes and remembers samples, and says what it is doing."""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import StrEnum
from threading import Condition, Lock, Thread
from typing import Any, Literal, Self, overload

from qwen_cache.encode.builder import (
    IN_FLIGHT,
    BuildJob,
    LaneState,
    RunningEncoders,
    as_encoded,
    check_prompts,
    check_sizes,
    not_in_v1,
    other_caches,
    rules,
)
from qwen_cache.encode.known_latents import ImageRows, of_recipe
from qwen_cache.encode.plan import PlannedSample, plan_row
from qwen_cache.encode.recipe import EditMasks
from qwen_cache.errors import BusyError, QwenCacheError, ServerFaultError, SourceError, StoppingError, first_line
from qwen_cache.format.cache import uncompressed
from qwen_cache.format.sample import SampleMeta, decode
from qwen_cache.format.shard import tensor_bytes
from qwen_cache.service.pool import Memory, Pool, Store
from qwen_cache.settings.sections import ServeConfig
from qwen_cache.sources.rows import Row
from qwen_cache.sources.sizes import Size
from qwen_cache.terminal import FULL

# ---- states ----------------------------------------------------------------------------------------------------------
# How far a sample is.


class State(StrEnum):
    """How far a sample is."""

    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    """The sample waits for the encoders, or is being encoded; lost if the server is killed."""
    ENCODED = "encoded"
    """The sample can be fetched; lost if the server is killed."""
    STORED = "stored"
    """The sample is in the cache, and survives whatever happens to the server."""
    FAILED = "failed"
    """The sample cannot be encoded."""


@dataclass(frozen=True)
class Fault:
    """A fault of the server, not of the row: the client sends the same request again later."""

    code: str
    """A word for programs: `storage_full`, `storage_failed`, `out_of_memory` or `lost`."""
    problem: str


@dataclass(frozen=True)
class Status:
    """The state of the sample with this key, and its problem if it failed."""

    key: str
    state: State
    problem: str | None = None
    code: str | None = None
    """That of a `Fault`; None if the row cannot be encoded."""


# ---- observer --------------------------------------------------------------------------------------------------------
# What a service counts, for its metrics and its log.


class Observer:
    """Counters since the start; `listen` is called with the name and the facts of each event."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.commit_seconds = 0.0
        self.listen: Callable[[str, dict[str, object]], None] = lambda name, facts: None
        self._lock = Lock()

    def accepted(self, new: int, known: int) -> None:
        """Samples that clients sent: to be encoded, and known already."""
        self._count(misses=new, hits=known)

    def encoded(self) -> None:
        self._count(encoded=1)

    def copied(self) -> None:
        self._count(copied=1)

    def reused(self) -> None:
        """The latents of an image were taken from a cache."""
        self._count(reused=1)

    def copy_failed(self, problem: str) -> None:
        self.listen("copy failed", {"problem": problem})

    def failed(self) -> None:
        self._count(failed=1)

    def committed(self, samples: int, seconds: float) -> None:
        self._count(commits=1, stored=samples)
        self.commit_seconds += seconds
        self.listen("commit", {"samples": samples, "seconds": round(seconds, 3)})

    def store_failed(self, fault: Fault) -> None:
        """Nothing can be stored for now."""
        self.listen("fault", {"code": fault.code, "problem": fault.problem})

    def commit_failed(self, problem: str) -> None:
        self._count(failed_commits=1)
        self.listen("commit failed", {"problem": problem})

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)


# ---- engine ----------------------------------------------------------------------------------------------------------
# The encoders, the queue in front of them, and the store behind them.
#
# Samples of many clients meet in one queue, in the order in which they came, and go through the same lanes as those of
# a build, which batch them by shape and size. A sample that is stored, encoded or in the queue is not encoded again,
# and one that a cache of `cache.reuse` had when the service started is copied. Of a sample of which only the prompt or
# one image is new, the latents of the other images are taken from there, or from the store. One thread takes results,
# adds them to the store, and commits. A sample that cannot be encoded or stored fails alone. A fault of the server,
# such as a full disk, is no sample's: what is encoded waits until it is over, and new samples are refused meanwhile.

FAILURES_KEPT = 10_000
RETRY_AFTER = 2  # seconds until a client whose samples found the queue full tries again
FAULT_SECONDS = 10.0  # after which a sample that failed by a fault of the server may be sent again
STORAGE_FULL = "storage_full"
NO_CPU_MEMORY = "DefaultCPUAllocator"
"""A name in torch's RuntimeError of too little memory of the CPU: it has no class of its own."""
LATER = "send the request again later; the server's log says more"


@dataclass(eq=False)
class Work:
    """A sample that is not in the dataset yet, and what waits for it."""

    key: str
    name: str
    size: int
    sample: PlannedSample | None
    """None once it is encoded, so that its images are freed."""
    encoded: Future[Status] = field(default_factory=Future)
    stored: Future[Status] = field(default_factory=Future)


class Engine:
    """A service without its protocol; safe to use from many threads.

    Entering the context opens the store and starts to load the encoders; leaving it is `stop`. Raises QwenCacheError if
    the store cannot be opened.
    """

    def __init__(
        self,
        job: BuildJob,
        load: Callable[[BuildJob], RunningEncoders],
        settings: ServeConfig,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.job, self.settings, self.observer = job, settings, Observer()
        self.store: Store = Pool(job) if settings.store else Memory(int(settings.memory))
        self.rows = {row.name: row for row in job.rows}
        """The rows of `serve.source` by name."""
        self.ready = False
        """True if the encoders are loaded and the service takes samples."""
        self.fault: Fault | None = None
        """Why nothing can be stored for now; None once it can."""
        self.ended: Future[None] = Future()
        """Done when nothing is encoded any more, with the error that ended it."""
        self._load, self._clock = load, clock
        self._rules, self._attend = rules(job), EditMasks.of(job.config).attend
        self._keeps_masks = job.format_version > 1 and EditMasks.of(job.config).source != "none"
        self._changed = Condition()
        self._queue: deque[Work] = deque()
        self._works: dict[str, Work] = {}
        """Everything accepted that is not stored (without a store: not encoded), by key."""
        self._failed: OrderedDict[str, tuple[Status, float]] = OrderedDict()
        """The samples that failed last, and when."""
        self._waiting_bytes = 0
        self._stopping, self._give_up_at = False, float("inf")
        self._oldest: float | None = None
        """When the oldest sample was encoded that is not stored."""
        self._uncommitted: list[Work] = []
        self._lanes: RunningEncoders | None = None
        self._others = other_caches(job)
        self._others_images = [ImageRows(*each) for each in of_recipe(job, self._others.local)]
        self._thread = Thread(target=self._run, name="encode")

    def __enter__(self) -> Self:
        self.store.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    # ---- what clients ask for ----------------------------------------------------------------------------------------

    def plan(self, row: Row) -> list[PlannedSample]:
        """The samples of a row, with their keys; SourceError with all of its problems. Decodes images that are new."""
        (row,) = as_encoded([row], masks=self._keeps_masks, phrases=self._attend, marked=False)
        if problems := [*check_prompts(self.job.model, [row]), *check_sizes(self.job.model, [row])]:
            raise SourceError(problems[0].what, where=row.where, do=problems[0].do)
        if self.job.format_version == 1 and (unfit := not_in_v1(row)):
            do = "leave it out, or start the server with --format v2"
            raise SourceError(f"format v1 cannot hold {unfit}", where=row.where, do=do)
        return plan_row(row, self._rules, _Known(self))

    def submit(self, samples: Sequence[PlannedSample], size: int) -> list[Status]:
        """Accept all of these samples or none; `size`: the bytes that their images take until they are encoded.

        Raises BusyError if the queue is full, ServerFaultError if nothing more can be stored for now, StoppingError if
        the service is about to end.
        """
        with self._changed:
            if self._stopping or self.ended.done():
                raise StoppingError("this server is about to end", do="send the request again in a minute")
            new = {sample.key: sample for sample in samples if self._state(sample.key).state in _TO_ENCODE}
            settings, waiting = self.settings, len(self._queue)
            # While nothing can be stored: refused at once on a full disk, else when too many wait.
            is_full = self.fault is not None and self.fault.code == STORAGE_FULL
            if new and self.fault and (is_full or len(self._works) + len(new) > settings.queue_samples):
                raise ServerFaultError(self.fault.code, self.fault.problem, do=LATER)
            full = waiting + len(new) > settings.queue_samples or self._waiting_bytes + size > settings.queue_bytes
            if new and waiting and full:
                do = f"send the request again in {RETRY_AFTER} seconds"
                raise BusyError("the queue of this server is full", found=f"{waiting} samples", do=do)
            for each, (key, sample) in enumerate(new.items()):
                self._failed.pop(key, None)
                self._works[key] = work = Work(key, sample.row.name, 0 if each else size, sample)
                self._queue.append(work)
            self._waiting_bytes += size if new else 0
            self.observer.accepted(len(new), len(samples) - len(new))
            self._changed.notify_all()
            return [self._state(sample.key) for sample in samples]

    def status(self, keys: Sequence[str]) -> list[Status]:
        """The state of each of these samples."""
        with self._changed:
            return [self._state(key) for key in keys]

    def failed_lately(self, key: str) -> bool:
        """True if a sample has failed, and not so long ago that another attempt is worth while."""
        with self._changed:
            return key in self._failed and self._clock() < self._failed[key][1] + FAULT_SECONDS

    def reached(self, key: str, state: State) -> Future[Status]:
        """The status of a sample once it is ENCODED or STORED, or has failed; at once if it is unknown.

        A service that does not store answers when the sample is encoded.
        """
        result: Future[Status] = Future()

        def answer(done: Future[Status]) -> None:
            if result.set_running_or_notify_cancel():
                result.set_result(done.result())

        with self._changed:
            work = self._works.get(key)
            waited = work and (work.stored if state is State.STORED and self.store.stores else work.encoded)
            if not waited:
                waited = Future()
                waited.set_result(self._state(key))
        waited.add_done_callback(answer)
        return result

    def sample(self, key: str) -> tuple[SampleMeta, Mapping[str, memoryview]] | None:
        """A sample and the stored bytes of its tensors, checked: FormatError if damaged; None if it is not here."""
        return self.store.sample(key)

    def lengths(self, prompts: Sequence[tuple[str, Sequence[Size]]]) -> list[int]:
        """The rows of `prompt_embeds` for each prompt, about controls whose originals have these sizes in pixels."""
        assert self._rules.text_rows
        return [self._rules.text_rows(prompt, sizes) for prompt, sizes in prompts]

    def states(self) -> list[LaneState]:
        """How far each lane is; none before the encoders are loaded."""
        return self._lanes.states() if self._lanes else []

    @property
    def waiting(self) -> tuple[int, int]:
        """Samples that wait or are being encoded, and the bytes of their images."""
        return sum(work.sample is not None for work in list(self._works.values())), self._waiting_bytes

    def begin_stop(self) -> None:
        """Take no more samples from now on; safe in a signal handler."""
        Thread(target=self._refuse, args=(self.settings.stop_seconds,)).start()

    def give_up(self) -> None:
        """Stop, and encode no more: commit what is encoded; safe in a signal handler."""
        Thread(target=self._refuse, args=(0.0,)).start()

    def stop(self) -> None:
        """Take no more samples; encode and commit what was accepted, for at most `stop_seconds`."""
        self._refuse(self.settings.stop_seconds)
        self._thread.join()
        self.store.__exit__(None, None, None)

    def _refuse(self, seconds: float) -> None:
        with self._changed:
            self._give_up_at = min(self._give_up_at, self._clock() + seconds)
            self._stopping, self.ready = True, False
            self._changed.notify_all()

    # ---- the state of one sample -------------------------------------------------------------------------------------

    def _state(self, key: str) -> Status:
        if work := self._works.get(key):
            return Status(key, State.ENCODED if work.encoded.done() else State.ACCEPTED)
        if self.store.is_stored(key):
            return Status(key, State.STORED)
        if key in self._failed:
            return self._failed[key][0]
        return Status(key, State.ENCODED if self.store.has(key) else State.UNKNOWN)

    def _fail(self, work: Work, problem: str, code: str | None = None) -> None:
        """Give a sample up: its row cannot be encoded, or with a `code` the server could not do it this time."""
        failed = Status(work.key, State.FAILED, problem, code)
        with self._changed:
            self._failed[work.key] = failed, self._clock()
            while len(self._failed) > FAILURES_KEPT:
                self._failed.popitem(last=False)
        self.observer.failed()
        self._drop(work, failed)

    def _drop(self, work: Work, status: Status) -> None:
        """Tell those who wait that the sample will not come."""
        with self._changed:
            self._forget(work)
            self._works.pop(work.key, None)
        for waiting in (work.encoded, work.stored):
            if not waiting.done():
                waiting.set_result(status)

    def _forget(self, work: Work) -> None:
        """Free the images of a sample."""
        if work.sample is not None:
            self._waiting_bytes -= work.size
            work.sample = None

    # ---- the thread that encodes -------------------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            with self._load(self.job) as lanes:
                with self._changed:
                    self.ready, self._lanes = not self._stopping, lanes
                self._encode(lanes)
            self._commit()
        except BaseException as found:  # noqa: BLE001 (whoever waits for `ended` gets it)
            error = found
        self.ready = False
        with self._changed:
            self._stopping = True
            left = list(self._works.values())
        for work in left:
            self._drop(work, Status(work.key, State.UNKNOWN))
        self.ended.set_exception(error) if error else self.ended.set_result(None)

    def _encode(self, lanes: RunningEncoders) -> None:
        """Encode what comes until the service stops and nothing is left, or it takes too long."""
        running: deque[tuple[Work, Any]] = deque()
        while self._clock() < self._give_up_at:
            for work in self._taken(IN_FLIGHT - len(running), wait=not running):
                if work.key in self._others and self._copy(work):
                    continue
                try:
                    assert work.sample is not None
                    running.append((work, lanes.submit(work.sample, self._latents)))
                except Exception as error:  # noqa: BLE001
                    self._fail_by(work, error)
            if running:
                self._finish(lanes, *running.popleft())
            elif self._stopping and not self._queue:
                return
            if self._is_commit_due():
                self._commit()

    def _latents(self, digest: str, size: Size) -> Callable[[], Any] | None:
        """A function that gives the latents of an image; None if they are not known, or are damaged."""
        found = (images.find(digest, size) for images in [*self.store.images(), *self._others_images])
        if (read := next(filter(None, found), None)) is None:
            return None
        try:
            latents = read()
        except (QwenCacheError, OSError) as error:
            self.observer.copy_failed(_problem(error))
            return None
        self.observer.reused()
        return lambda: latents

    def _taken(self, most: int, *, wait: bool) -> list[Work]:
        """Up to `most` samples of the queue; with `wait`, not before there is one, or something else to do."""
        with self._changed:
            if wait and not self._queue and not self._stopping:
                left = None if self._oldest is None else self._oldest + self.settings.commit_seconds - self._clock()
                if left is None or left > 0:
                    self._changed.wait(left)
            return [self._queue.popleft() for _ in range(min(most, len(self._queue)))]

    def _copy(self, work: Work) -> bool:
        """Take a sample of another cache into the store; False if that fails, so that it is encoded."""
        try:
            entry, shard, where = self._others.sample(work.key)
            stored, specs = dict(tensor_bytes(entry, shard)), entry.meta.tensors
            tensors = {name: decode(stored[name], spec, where) for name, spec in specs.items()}
        except (QwenCacheError, OSError) as error:
            self.observer.copy_failed(_problem(error))
            return False
        if self._add(work, uncompressed(entry.meta), tensors):
            self.observer.copied()
        return True

    def _finish(self, lanes: RunningEncoders, work: Work, running: Any) -> None:
        """Take the result of a sample into the store."""
        try:
            meta, tensors = lanes.result(running)
        except Exception as error:  # noqa: BLE001 (of this sample: a damaged image, no memory)
            self._fail_by(work, error)
            return
        if self._add(work, meta, tensors):
            self.observer.encoded()

    def _add(self, work: Work, meta: SampleMeta, tensors: Mapping[str, memoryview]) -> bool:
        """Add a sample to the store, as soon as the store can take it; False if it has failed."""
        while True:
            try:
                self.store.add(work.name, meta, tensors)
            except OSError as error:
                self._suffer(fault := fault_of(error, storing=True))
                with self._changed:
                    if self._clock() < self._give_up_at:
                        self._changed.wait(min(self.settings.commit_seconds, self._give_up_at - self._clock()))
                        continue
                self._fail(work, fault.problem, fault.code)
                return False
            except Exception as error:  # noqa: BLE001 (of this sample: it could not be read back)
                self._fail_by(work, error)
                if not self._uncommitted:  # else the next commit tells
                    self.fault = None
                return False
            self._done(work)
            return True

    def _fail_by(self, work: Work, error: Exception) -> None:
        fault = fault_of(error)
        self._fail(work, fault.problem if fault else _problem(error), fault.code if fault else None)

    def _suffer(self, fault: Fault) -> None:
        """Work on with this fault, which is reported once."""
        if fault != self.fault:
            self.observer.store_failed(fault)
        self.fault = fault

    def _done(self, work: Work) -> None:
        """Tell those who wait that the sample is there."""
        with self._changed:
            self._forget(work)
            if self.store.stores:
                self._uncommitted.append(work)
                self._oldest = self._clock() if self._oldest is None else self._oldest
            else:
                del self._works[work.key]
        work.encoded.set_result(Status(work.key, State.ENCODED))

    def _is_commit_due(self) -> bool:
        if self._oldest is None:
            return False
        full = len(self._uncommitted) >= self.settings.commit_samples
        return (full and not self.fault) or self._clock() >= self._oldest + self.settings.commit_seconds

    def _commit(self) -> None:
        """Store what is encoded; after an error it is tried again after `commit_seconds`."""
        if not self._uncommitted:
            return
        begin = self._clock()
        try:
            lost = self.store.commit()
        except Exception as error:  # (whatever it is, the next commit tries again)
            self._oldest = self._clock()
            self.observer.commit_failed(_problem(error))
            self._suffer(fault_of(error, storing=True))
            if self._stopping:
                raise
            return
        stored = [work for work in self._uncommitted if self.store.is_stored(work.key)]
        for work in self._uncommitted:
            if work not in stored:
                self._fail(work, lost.get(work.key, "it is not in the dataset"), "lost")
        with self._changed:
            self._uncommitted, self._oldest, self.fault = [], None, None
            for work in stored:
                del self._works[work.key]
        self.observer.committed(len(stored), self._clock() - begin)
        for work in stored:
            work.stored.set_result(Status(work.key, State.STORED))


class _Known:
    """The keys that need not be encoded: their images are not decoded again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __contains__(self, key: object) -> bool:
        return self._engine.status([str(key)])[0].state not in _TO_ENCODE


_TO_ENCODE = (State.UNKNOWN, State.FAILED)


@overload
def fault_of(error: BaseException, *, storing: Literal[True]) -> Fault: ...


@overload
def fault_of(error: BaseException, *, storing: bool = False) -> Fault | None: ...


def fault_of(error: BaseException, *, storing: bool = False) -> Fault | None:
    """The fault of the server that an error shows; None if there is none. Every error of `storing` is one."""
    import torch

    if isinstance(error, OSError) and error.errno in FULL:
        return Fault(STORAGE_FULL, f"the server's disk is full: {_problem(error)}")
    if isinstance(error, MemoryError | torch.OutOfMemoryError) or NO_CPU_MEMORY in str(error):
        return Fault("out_of_memory", f"the server has too little memory: {_problem(error)}")
    return Fault("storage_failed", f"the server cannot store samples: {_problem(error)}") if storing else None


def _problem(error: BaseException) -> str:
    return str(error) if isinstance(error, QwenCacheError) else f"{type(error).__name__}: {first_line(error)}"
