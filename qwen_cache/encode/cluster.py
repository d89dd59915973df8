"""Lanes on a Ray cluster: each worker has both encoders; this process hands out samples and is the only writer.

Results are taken in the order of the plan. So on nodes of one kind the cache is, byte for byte, that of one machine,
whichever worker encoded what (if the encoders take one sample at a time: `micro_batches`), and an interrupted build
resumes with Ray or without. The samples of a lost worker, or of a lost node, go to the others. All output passes
through this process; where its network or disk is the limit, use `--slice` instead.

Every node needs the same environment, the source under the same paths, and the model there or on the hub. Refuses a
node whose weights or code would give another recipe.
"""

from __future__ import annotations

import logging
import os
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from heapq import heappop, heappush
from importlib.util import find_spec
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from qwen_cache.encode.builder import IN_FLIGHT, BuildJob, Encoders, Encoding
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.encode.recipe import make_recipe, recipe_changes
from qwen_cache.errors import ConfigError, DeviceError, ModelError, QwenCacheError, SourceError
from qwen_cache.extras import install_command
from qwen_cache.format.sample import SampleMeta
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from qwen_cache.settings.cache import CacheConfig

if TYPE_CHECKING:
    import ray

LOCAL = "local"
WINDOW = 4096  # samples that the builder submits before the first result; they wait without pixels
AHEAD = 2  # workers may be this many times the content of all lanes ahead of the writer, so that none idles
DECODE_CPUS = 4  # of a worker on a GPU: the threads that decode

Encoded = tuple[SampleMeta, dict[str, memoryview]]


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


class Worker:
    """The lanes of one machine, in a process of its own on some node; it serves one call at a time."""

    def __init__(self, job: BuildJob, load_lanes: Callable[[BuildJob], Encoding], folder: str) -> None:
        with suppress(OSError):  # relative paths mean the same here, where this folder is shared
            os.chdir(folder)
        self.job, self.load_lanes, self.started = job, load_lanes, deque[Any]()

    def load(self) -> None:
        """Load the encoders; ModelError if they are not those of the recipe."""
        job, config = self.job, self.job.config
        if not job.model.path.is_dir():
            job = replace(job, model=open_model(config.model.path, ENCODER_PARTS, config.model.revision))
        if different := recipe_changes(job.recipe, make_recipe(job.model, config)):
            raise ModelError(
                "the model or the environment of this node gives another recipe",
                where=job.model.path,
                found=", ".join(different),
                do="give all nodes the same model and the same environment",
            )
        self.lanes = self.load_lanes(job)

    def begin(self, sample: PlannedSample) -> None:
        self.started.append(self.lanes.submit(sample))

    def finish(self, _started: None) -> tuple[SampleMeta, dict[str, np.ndarray[Any, Any]]]:
        """The result of the oldest started sample. As arrays, its tensors are shared and not copied."""
        meta, tensors = self.lanes.result(self.started.popleft())
        return meta, {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}


@dataclass(frozen=True)
class StartedSample:
    """A sample, its number in the order of submission, and what `Worker.begin` returned."""

    number: int
    sample: PlannedSample
    ref: ray.ObjectRef[Any]


@dataclass(eq=False)
class WorkerHandle:
    """A worker, seen from this process. `started` are its samples, oldest first; the first is being waited for."""

    actor: Any
    address: str
    started: deque[StartedSample] = field(default_factory=deque)
    is_loaded: bool = False

    def has_controls_of(self, sample: PlannedSample) -> bool:
        """Whether its newest sample has the controls of `sample`, so that it need not encode them again."""
        controls = sample.inputs.controls
        return bool(controls and self.started and self.started[-1].sample.inputs.controls == controls)


class ClusterLanes:
    """The lanes of all workers, as if they were one machine's."""

    def __init__(self, job: BuildJob, address: str, load_lanes: Callable[[BuildJob], Encoding]) -> None:
        self.job, self.address, self.load_lanes = job, address, load_lanes
        self.workers: list[WorkerHandle] = []
        self.waiting: list[tuple[int, PlannedSample]] = []
        """A heap by number of submission; samples of a lost worker return to it."""
        self.submitted = self.taken = 0
        self.running: dict[ray.ObjectRef[Any], WorkerHandle] = {}
        self.done: dict[str, Encoded] = {}

    def __enter__(self) -> Self:
        import ray

        _connect(self.address)
        nodes = ray.nodes()
        has_gpus = any(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in nodes)
        resources = choose_resources(self.job.config.cache, has_gpus=has_gpus)
        chosen = choose_nodes(nodes, resources)
        if not chosen:
            ray.shutdown()
            found = f"{len(nodes)} nodes without" if nodes else "no nodes"
            raise DeviceError("no node of the Ray cluster has these devices", expected=resources, found=found)
        self.workers = [self._start(node, resources) for node in chosen]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for worker in self.workers:
            ray.kill(worker.actor)
        ray.shutdown()

    def submit(self, sample: PlannedSample) -> str:
        heappush(self.waiting, (self.submitted, sample))
        self.submitted += 1
        self._hand_out()
        return sample.key

    def result(self, key: str) -> Encoded:
        """Wait for that sample; the workers keep busy meanwhile."""
        while key not in self.done:
            self._wait()
        self.taken += 1
        return self.done.pop(key)

    def _start(self, node: Node, resources: WorkerResources) -> WorkerHandle:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cache = self.job.config.cache.model_copy(
            update={"vae_device": resources.vae_device, "text_device": resources.text_device}
        )
        config = self.job.config.model_copy(update={"cache": cache})
        job = replace(self.job, config=config, rows=[], problems=[])
        actor_class = ray.remote(Worker).options(
            num_cpus=node.cpus,
            num_gpus=resources.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node.id, soft=False),
        )
        worker = WorkerHandle(actor_class.remote(job, self.load_lanes, os.getcwd()), node.address)
        self.running[worker.actor.load.remote()] = worker
        return worker

    def _hand_out(self) -> None:
        """Give every loaded worker as much as its lanes hold, in order; samples with the same controls go to the same
        worker while it has room."""
        while self.waiting and self.waiting[0][0] < self.taken + AHEAD * IN_FLIGHT * len(self.workers):
            free = [worker for worker in self.workers if worker.is_loaded and len(worker.started) < IN_FLIGHT]
            if not free:
                return
            number, sample = heappop(self.waiting)
            worker = min(free, key=lambda worker: (not worker.has_controls_of(sample), len(worker.started)))
            worker.started.append(StartedSample(number, sample, worker.actor.begin.remote(sample)))
            if len(worker.started) == 1:
                self._request_oldest(worker)

    def _request_oldest(self, worker: WorkerHandle) -> None:
        """Request the result of the oldest started sample."""
        self.running[worker.actor.finish.remote(worker.started[0].ref)] = worker

    def _wait(self) -> None:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        [ready], _ = ray.wait([*self.running])
        worker = self.running.pop(ready)
        try:
            value = ray.get(ready)
        except (RayActorError, ObjectLostError) as error:
            self._drop(worker, error)
        except RayTaskError as error:
            raise _as_ours(error, worker.address) from None
        else:
            if worker.is_loaded:
                meta, tensors = value
                key = worker.started.popleft().sample.key
                self.done[key] = meta, {name: data.data for name, data in tensors.items()}
            worker.is_loaded = True
            if worker.started:
                self._request_oldest(worker)
        self._hand_out()

    def _drop(self, worker: WorkerHandle, error: Exception) -> None:
        """Return the samples of a lost worker to the queue."""
        import ray

        self.workers.remove(worker)
        ray.kill(worker.actor)  # it may only be out of reach
        for each in worker.started:
            heappush(self.waiting, (each.number, each.sample))
        if not self.workers:
            raise QwenCacheError(
                "every worker of the Ray cluster is lost",
                found=f"{worker.address}: {str(error).strip().splitlines()[-1]}",
                do="see `ray status`; run the same command to continue",
            )


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


def _as_ours(error: ray.exceptions.RayTaskError, address: str) -> Exception:
    """The error of a worker: a user's error as itself, with its node; a bug of ours with its traceback."""
    from ray.exceptions import RayTaskError

    cause: object = error
    while isinstance(cause, RayTaskError):  # `finish` fails with what `begin` raised
        cause = cause.cause
    if isinstance(cause, OSError) and cause.filename:
        do = "put source and model where every node has them under the same path"
        return SourceError(f"node {address} cannot read this: {cause.strerror}", where=cause.filename, do=do)
    if isinstance(cause, QwenCacheError):
        cause.what += f", on node {address}"
        return cause
    raised: Exception = error
    return raised


def on_cluster(address: str, load_lanes: Callable[[BuildJob], Encoding]) -> Encoders:
    """Encoders with the lanes of `load_lanes` on every node. ConfigError if Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("--ray: the package ray is not installed", do=install_command("ray"))
    return Encoders(lambda job: ClusterLanes(job, address, load_lanes), WINDOW)
