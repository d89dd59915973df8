"""A build on a Ray cluster, and what each of its workers does."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, redirect_stdout, suppress
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from qwen_cache.encode.builder import BuildJob, Chunk, Encoders, RunningEncoders, Workers, WorkersState, ahead
from qwen_cache.encode.recipe import as_cached, for_any_device, make_recipe, recipe_changes, vae_encoders
from qwen_cache.errors import ConfigError, DeviceError, ModelError, QwenCacheError, SourceError
from qwen_cache.extras import install_command
from qwen_cache.format.remote import Stored
from qwen_cache.format.shard import ShardWriter, compress
from qwen_cache.format.staging import Destination
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.settings.sections import CacheConfig
from qwen_cache.storage.remote import is_remote

if TYPE_CHECKING:
    import ray

# ---- cluster worker --------------------------------------------------------------------------------------------------
# A worker of a Ray cluster: it encodes chunks of samples, and writes a shard of each.
#
# Shards go to the staging folder of the build, which every node must see, or to its bucket. While one shard is made
# durable or uploaded, the samples of the next are encoded. Refuses weights or code that would give another recipe, and
# a folder that is not shared.


@dataclass(frozen=True)
class Written:
    """The bytes that a worker has written since it started, and how many of them are in incomplete shards."""

    samples: int = 0
    unfinished_samples: int = 0
    unfinished_bytes: int = 0


class Worker:
    """The lanes of one machine, in a process of its own on some node. `write` and `written` are called from threads."""

    def __init__(self, job: BuildJob, load_lanes: Callable[[BuildJob], RunningEncoders], folder: str) -> None:
        with suppress(OSError):  # relative paths mean the same here, where this folder is shared
            os.chdir(folder)
        self.job, self.load_lanes = job, load_lanes
        self.encoding = Lock()
        self.folders: dict[Destination, Path] = {}
        self.opened = ExitStack()
        """For as long as this process lives."""
        self.samples = 0
        self.open: dict[ShardWriter, int] = {}
        """The incomplete shards, each with the number of its samples."""

    def load(self) -> None:
        """Load the encoders; ModelError if they are not those of the recipe."""
        job, config = self.job, self.job.config
        if not job.model.path.is_dir():
            named = config.model
            model = open_model(named.path, ENCODER_PARTS, named.revision, text_encoder=named.text_encoder)
            job = replace(job, model=model)
        made = for_any_device(make_recipe(job.model, config))
        encoders = {**job.vae_encoders, **vae_encoders(job.model, made)}
        if different := recipe_changes(job.recipe, as_cached(made, job.recipe, encoders)):
            raise ModelError(
                "the model or the environment of this node gives another recipe",
                where=job.model.path,
                found=", ".join(different),
                do="give all nodes the same model and the same environment",
            )
        self.lanes = self.load_lanes(job)

    def write(self, chunk: Chunk, destination: Destination) -> Stored:
        """Encode a chunk, and store its shard. What a failure leaves in a folder, the next build uses."""
        with self.encoding:
            if destination not in self.folders:
                self.folders[destination] = self.opened.enter_context(destination.opened())
            path = self.folders[destination] / f"open-{uuid.uuid4().hex}.tar"
            writer = ShardWriter(path, self.job.format_version)
            self.open[writer] = 0
            try:
                for _, work in ahead(chunk, self.lanes.submit):
                    writer.add(*compress(*self.lanes.result(work), self.job.config.cache.compression))
                    self.samples += 1
                    self.open[writer] += 1
            except BaseException:
                del self.open[writer]
                writer.close()
                raise
        try:
            return destination.store(writer)
        finally:
            del self.open[writer]

    def written(self) -> Written:
        """How far this worker is."""
        unfinished = list(self.open.items())
        return Written(self.samples, sum(count for _, count in unfinished), sum(w.size for w, _ in unfinished))


# ---- cluster ---------------------------------------------------------------------------------------------------------
# The workers of a Ray cluster, which encode and write shards; this process hands out chunks and commits.
#
# Samples never pass through this process, so on nodes of one kind their tensors are those of one machine, and only the
# cut into shards differs. A lost worker is replaced, on its node or on one that is still there, and its unfinished
# chunks are done again. Refuses a chunk that fails three times, and names its samples.
#
# Every node needs the same environment, the source and the folder of the cache under the same paths unless that is in
# object storage, and the model there or on the hub.

LOCAL = "local"
DECODE_CPUS = 4  # of a worker on a GPU: the threads that decode
FAILURES = 3  # of one chunk, or of a node in a row, before it is given up
CHUNKS = 2  # of a worker at a time: it encodes one while the shard of the other is made durable
INTERVAL = 1.0  # seconds between two looks at what the workers have written
LOOK_FOR_NODES = 10.0  # seconds between two looks for nodes that have joined
SHOWN = 10  # names of samples in an error


@dataclass(frozen=True)
class WorkerResources:
    """The GPUs that one worker takes, and its own names for its devices: Ray shows a worker no other GPUs."""

    gpus: int
    vae_device: str
    text_device: str


@dataclass(frozen=True)
class Node:
    """The node of one worker, and the CPUs it takes there."""

    id: str
    address: str
    cpus: int


def choose_resources(cache: CacheConfig, *, has_gpus: bool) -> WorkerResources:
    """A worker's resources: as many GPUs as the options name. `auto` is one GPU for both encoders, so neither idles."""
    vae, text = ([name.strip() for name in names.split(",")] for names in (cache.vae_device, cache.text_device))
    auto = next((name for name in (*vae, *text) if name not in ("auto", "cpu")), "cuda:0" if has_gpus else "cpu")
    in_worker: dict[str, str] = {}  # the name of each GPU here, and its name in the worker
    devices = []
    for name in (*vae, *text):
        device = auto if name == "auto" else name
        device = "cuda:0" if device == "cuda" else device
        devices.append(device if device == "cpu" else in_worker.setdefault(device, f"cuda:{len(in_worker)}"))
    return WorkerResources(len(in_worker), ",".join(devices[: len(vae)]), ",".join(devices[len(vae) :]))


def choose_nodes(nodes: Iterable[Mapping[str, Any]], resources: WorkerResources) -> list[Node]:
    """One entry per worker: as many on each node as its GPUs allow; without GPUs, one on each node with a free CPU."""
    chosen = []
    for node in nodes:
        cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        count = gpus // resources.gpus if resources.gpus else min(cpus, 1)
        each = min(cpus // max(count, 1), DECODE_CPUS if resources.gpus else cpus)
        chosen += [Node(node["NodeID"], node["NodeManagerAddress"], each)] * (count if node["Alive"] else 0)
    return chosen


@dataclass(eq=False)
class WorkerHandle:
    """A worker, seen from this process, with the chunks that it was given."""

    actor: Any
    node: Node
    is_loaded: bool = False
    chunks: set[int] = field(default_factory=set)
    since: float = 0.0
    """When its first chunk was handed out."""
    written: Written = field(default_factory=Written)
    is_asked: bool = False
    """True if a request for `written` is on its way."""


@dataclass
class ChunkQueue:
    """Chunks to write, by number, and how often and where they failed."""

    chunks: Sequence[Chunk]
    destination: Destination
    waiting: list[int]
    failures: Counter[int] = field(default_factory=Counter)
    failed_on: dict[int, set[str]] = field(default_factory=lambda: defaultdict(set))

    def next_for(self, worker: WorkerHandle, nodes: set[str]) -> int | None:
        """The first chunk for a worker; one that failed goes to a node of `nodes` on which it has not, if there is one,
        and to a worker that has no other chunk, so that a second failure is surely its own."""
        for number in self.waiting:
            failed_on = self.failed_on.get(number, set[str]())
            is_elsewhere = worker.node.id not in failed_on or nodes <= failed_on
            if is_elsewhere and not (self.failures[number] and worker.chunks):
                return number
        return None


class Cluster(Workers):
    """Workers on all nodes. The encoders of one recipe are loaded once, for as many calls of `write` as follow."""

    def __init__(self, job: BuildJob, address: str, load_lanes: Callable[[BuildJob], RunningEncoders]) -> None:
        self.job, self.address, self.load_lanes = job, address, load_lanes
        self.workers: list[WorkerHandle] = []
        self.running: dict[ray.ObjectRef[Any], tuple[WorkerHandle, str | int]] = {}
        """The awaited thing: `load`, `written`, or the number of a chunk."""
        self.lost = Counter[str]()
        """The workers that each node has lost since it last wrote a chunk."""
        self.last_error = ""
        self.asked = self.filled = 0.0
        """When the workers were last asked how far they are, and when it was last looked for nodes without workers."""

    def __enter__(self) -> Self:
        import ray

        with ExitStack() as opened:
            opened.enter_context(redirect_stdout(sys.stderr))  # Ray prints there that a node has died, with --json too
            _connect(self.address)
            opened.callback(ray.shutdown)
            nodes = ray.nodes()
            has_gpus = any(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in nodes)
            self.resources = choose_resources(self.job.config.cache, has_gpus=has_gpus)
            if not choose_nodes(nodes, self.resources):
                found = f"{len(nodes)} nodes without" if nodes else "no nodes"
                raise DeviceError("no node of the Ray cluster has these devices", expected=self.resources, found=found)
            self._fill()
            self._opened = opened.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for worker in self.workers:
            ray.kill(worker.actor)
        self._opened.close()

    @property
    def count(self) -> int:
        return len(self.workers)

    def write(
        self, chunks: Sequence[Chunk], destination: Destination, on_state: Callable[[WorkersState], None]
    ) -> Iterator[Stored]:
        """A shard of each chunk, as they are completed."""
        work = ChunkQueue(chunks, destination, list(range(len(chunks))))
        left = len(chunks)
        while left:
            self._fill()
            self._hand_out(work)
            shard = self._wait(work)
            on_state(self._state())
            if shard is not None:
                left -= 1
                yield shard

    def _fill(self) -> None:
        """Start a worker wherever there is none: at first, after a loss, and on nodes that have joined."""
        import ray

        if time.monotonic() < self.filled + LOOK_FOR_NODES:
            return
        self.filled = time.monotonic()
        have = Counter(worker.node.id for worker in self.workers)
        for node in choose_nodes(ray.nodes(), self.resources):
            have[node.id] -= 1
            if have[node.id] < 0 and self.lost[node.id] < FAILURES:
                self._start(node)
        if not self.workers:
            raise QwenCacheError(
                "every worker of the Ray cluster is lost",
                found=self.last_error,
                do="see `ray status`; run the same command to continue",
            )

    def _start(self, node: Node) -> None:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cache = self.job.config.cache.model_copy(
            update={"vae_device": self.resources.vae_device, "text_device": self.resources.text_device}
        )
        config = self.job.config.model_copy(update={"cache": cache})
        job = replace(self.job, config=config, rows=[], problems=[], sliced=None)
        actor_class = ray.remote(Worker).options(
            num_cpus=node.cpus,
            num_gpus=self.resources.gpus,
            max_concurrency=CHUNKS + 1,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        worker = WorkerHandle(actor_class.remote(job, self.load_lanes, os.getcwd()), node)
        self.workers.append(worker)
        self.running[worker.actor.load.remote()] = worker, "load"

    def _hand_out(self, work: ChunkQueue) -> None:
        """Give every loaded worker a chunk, and a second one while there are enough for all."""
        nodes = {worker.node.id for worker in self.workers}
        for count in range(CHUNKS):
            for worker in self.workers:
                is_free = worker.is_loaded and len(worker.chunks) == count
                if not is_free or any(work.failures[number] for number in worker.chunks):
                    continue
                number = work.next_for(worker, nodes)
                if number is None or (count and len(work.waiting) < len(self.workers)):
                    continue
                work.waiting.remove(number)
                worker.chunks.add(number)
                worker.since = worker.since or time.monotonic()
                self.running[worker.actor.write.remote(work.chunks[number], work.destination)] = worker, number

    def _wait(self, work: ChunkQueue) -> Stored | None:
        """Wait until something is ready, at most an interval; the shard, if it is one."""
        import ray
        from ray.exceptions import RayError, RayTaskError

        self._ask()
        ready, _ = ray.wait([*self.running], timeout=INTERVAL)
        if not ready:
            return None
        worker, what = self.running.pop(ready[0])
        try:
            value = ray.get(ready[0])
        except RayTaskError as error:
            self._lose(worker, _unless_ours(error, worker.node.address, work), work)
        except RayError as error:
            self._lose(worker, error, work)
        else:
            if what == "load":
                worker.is_loaded = True
            elif what == "written":
                worker.written, worker.is_asked = value, False
            else:
                worker.chunks.remove(int(what))
                self.lost[worker.node.id] = 0
                shard: Stored = value
                return shard
        return None

    def _ask(self) -> None:
        """Ask the workers how far they are, unless they were asked just now."""
        if time.monotonic() < self.asked + INTERVAL:
            return
        self.asked = time.monotonic()
        for worker in self.workers:
            if worker.chunks and not worker.is_asked:
                worker.is_asked = True
                self.running[worker.actor.written.remote()] = worker, "written"

    def _lose(self, worker: WorkerHandle, error: Exception, work: ChunkQueue) -> None:
        """Return the chunks of a lost worker to the queue; QwenCacheError if one has failed too often."""
        import ray

        self.last_error = f"{worker.node.address}: {str(error).strip().splitlines()[-1]}"
        self.lost[worker.node.id] += 1
        self.workers.remove(worker)
        self.filled = 0.0
        self.running = {ref: each for ref, each in self.running.items() if each[0] is not worker}
        ray.kill(worker.actor)  # it may only be out of reach
        for number in worker.chunks:
            work.failures[number] += 1
            work.failed_on[number].add(worker.node.id)
            if work.failures[number] >= FAILURES:
                names = [sample.row.name for sample in work.chunks[number]]
                more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
                raise QwenCacheError(
                    f"encoding these samples failed {FAILURES} times: {', '.join(names[:SHOWN])}{more}",
                    where=work.chunks[number][0].row.where,
                    found=self.last_error,
                    do="build without --ray to see which of them fails; what is complete is kept",
                ) from error
        work.waiting = sorted([*work.waiting, *worker.chunks])

    def _state(self) -> WorkersState:
        now, rates = time.monotonic(), dict[str, float]()
        at_work = [worker for worker in self.workers if worker.since]
        alone = {address for address, count in Counter(w.node.address for w in at_work).items() if count == 1}
        for number, worker in enumerate(at_work, 1):
            address = worker.node.address
            name = address if address in alone else f"{address} #{number}"
            rates[name] = worker.written.samples / max(now - worker.since, 1e-6)
        samples = sum(worker.written.unfinished_samples for worker in self.workers)
        return WorkersState(samples, sum(worker.written.unfinished_bytes for worker in self.workers), rates)


def _connect(address: str) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # no usage reports from a cluster that we start
    dashboard = False if address == LOCAL else None
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "//" not in host:  # Ray itself would retry for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray: no cluster answers: {str(error).splitlines()[0]}",
            where=address,
            do="give the address of one (`ray start --head` prints it), or --ray local for this machine alone",
        ) from None


def _unless_ours(error: ray.exceptions.RayTaskError, address: str, work: ChunkQueue) -> Exception:
    """The error of a worker, to be tried again; one that a user can cause is raised at once, and names the node."""
    cause: object = error.cause
    if isinstance(cause, OSError) and cause.filename:
        folder = work.destination.folder
        if not is_remote(folder) and Path(str(cause.filename)).is_relative_to(folder):
            raise cause
        do = "put source and model where every node has them under the same path"
        raise SourceError(f"node {address} cannot read this: {cause.strerror}", where=cause.filename, do=do) from None
    if isinstance(cause, QwenCacheError):
        cause.what += f", on node {address}"
        raise cause from None
    failed: Exception = error
    return failed


def on_cluster(address: str, load_lanes: Callable[[BuildJob], RunningEncoders]) -> Encoders:
    """Encoders with the lanes of `load_lanes` on every node. ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("--ray: the package ray is not installed", do=install_command("ray"))
    return Encoders(load_lanes, start_workers=lambda job: Cluster(job, address, load_lanes))
