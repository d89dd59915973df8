"""Lanes on a Ray cluster: each worker has both encoders; this process hands out the samples and is the only writer.

Results are taken in the order of the plan, so on nodes of one kind the cache is, byte for byte, that of one machine,
whichever worker encoded what (where encoders take one sample at a time: `batching`), and an interrupted build resumes
with Ray or without. A worker that is lost, with its node or alone, leaves nothing behind: its samples go to the others.
Everything written passes through this process; where its network or disk is the limit, `--part` is the other way.

Every node needs the same environment, the source under the same paths, and the model there or on the hub. Refused is a
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

from qwen_cache.encode.builder import ENCODER_PARTS, IN_FLIGHT, Encoders, Encoding, Job, changed_settings
from qwen_cache.encode.plan import Planned
from qwen_cache.encode.recipe import make_recipe
from qwen_cache.errors import ConfigError, DeviceError, ModelError, QwenCacheError, SourceError
from qwen_cache.format.sample import SampleMeta
from qwen_cache.models.folder import open_model
from qwen_cache.settings.cache import CacheConfig

if TYPE_CHECKING:
    import ray

LOCAL = "local"
WINDOW = 4096  # samples that the builder lets us choose from; only their names wait
AHEAD = 2  # times what its lanes hold may be done of a worker before the writer comes to it, so that none waits for it
DECODE_CPUS = 4  # of a worker on a GPU: the threads that decode

Encoded = tuple[SampleMeta, dict[str, memoryview]]


@dataclass(frozen=True)
class Share:
    """What one worker takes of a node, and what its devices are called there: Ray shows it only its own."""

    gpus: int
    vae_device: str
    text_device: str


@dataclass(frozen=True)
class Place:
    """Where a worker is to be."""

    node: str
    address: str
    cpus: int


def choose_share(cache: CacheConfig, *, has_gpus: bool) -> Share:
    """As many GPUs as the options name. `auto` is one for both encoders, so that neither waits idle for the other."""
    vae, text = ([part.strip() for part in names.split(",")] for names in (cache.vae_device, cache.text_device))
    asked = ["cuda:0" if name == "cuda" else name for name in (*vae, *text)]
    named = [name for name in asked if name not in ("auto", "cpu")]
    auto = named[0] if named else "cuda:0" if has_gpus else "cpu"
    asked = [auto if name == "auto" else name for name in asked]
    number = {name: f"cuda:{i}" for i, name in enumerate(dict.fromkeys(name for name in asked if name != "cpu"))}
    there = [number.get(name, name) for name in asked]
    return Share(len(number), ",".join(there[: len(vae)]), ",".join(there[len(vae) :]))


def choose_places(nodes: Iterable[Mapping[str, Any]], share: Share) -> list[Place]:
    """A worker for every `share.gpus` GPUs of a node, or else one for each node with a CPU to give."""
    places = []
    for node in nodes:
        cpus, gpus = (int(node["Resources"].get(name, 0)) for name in ("CPU", "GPU"))
        count = gpus // share.gpus if share.gpus else min(cpus, 1)
        each = min(cpus // max(count, 1), DECODE_CPUS if share.gpus else cpus)
        places += [Place(node["NodeID"], node["NodeManagerAddress"], each)] * (count if node["Alive"] else 0)
    return places


class Worker:
    """In a process of its own, somewhere in the cluster: the lanes of one machine, one call at a time."""

    def __init__(self, job: Job, load_lanes: Callable[[Job], Encoding], folder: str) -> None:
        with suppress(OSError):  # relative paths mean the same here, where this folder is shared
            os.chdir(folder)
        self.job, self.load_lanes, self.begun = job, load_lanes, deque[Any]()

    def load(self) -> None:
        """Load the encoders, once it is sure that they are those of the recipe."""
        job, config = self.job, self.job.config
        if not job.model.path.is_dir():
            job = replace(job, model=open_model(config.model.path, ENCODER_PARTS, config.model.revision))
        if different := changed_settings(job.recipe, make_recipe(job.model, config)):
            raise ModelError(
                "this node would encode something else than the recipe says",
                where=job.model.path,
                found=", ".join(different),
                do="give all nodes the same model and the same environment",
            )
        self.lanes = self.load_lanes(job)

    def begin(self, sample: Planned) -> None:
        self.begun.append(self.lanes.submit(sample))

    def finish(self, _begun: None) -> tuple[SampleMeta, dict[str, np.ndarray[Any, Any]]]:
        """The oldest that was begun. As arrays, the bytes of its tensors are shared and not copied."""
        meta, tensors = self.lanes.result(self.begun.popleft())
        return meta, {name: np.frombuffer(data, np.uint8) for name, data in tensors.items()}


@dataclass(frozen=True)
class Begun:
    """A sample, its place in the order of submission, and what `Worker.begin` returned."""

    number: int
    sample: Planned
    ref: ray.ObjectRef[Any]


@dataclass(eq=False)
class Hand:
    """A worker as seen from here. `begun` is what it has, oldest first; the first is what is being waited for."""

    actor: Any
    address: str
    begun: deque[Begun] = field(default_factory=deque)
    is_loaded: bool = False

    def is_about(self, sample: Planned) -> bool:
        """Whether what it was given last is about the controls of `sample`, which it then need not encode again."""
        controls = sample.inputs.controls
        return bool(controls and self.begun and self.begun[-1].sample.inputs.controls == controls)


class ClusterLanes:
    """The lanes of all workers, as if they were one machine's."""

    def __init__(self, job: Job, address: str, load_lanes: Callable[[Job], Encoding]) -> None:
        self.job, self.address, self.load_lanes = job, address, load_lanes
        self.hands: list[Hand] = []
        self.waiting: list[tuple[int, Planned]] = []
        """A heap: what was submitted first, or came back from a lost worker, goes out first."""
        self.submitted = self.taken = 0
        self.running: dict[ray.ObjectRef[Any], Hand] = {}
        self.done: dict[str, Encoded] = {}

    def __enter__(self) -> Self:
        import ray

        _connect(self.address)
        nodes = ray.nodes()
        has_gpus = any(node["Alive"] and node["Resources"].get("GPU", 0) >= 1 for node in nodes)
        share = choose_share(self.job.config.cache, has_gpus=has_gpus)
        places = choose_places(nodes, share)
        if not places:
            ray.shutdown()
            found = f"{len(nodes)} nodes without" if nodes else "no nodes"
            raise DeviceError("no node of the Ray cluster has these devices", expected=share, found=found)
        self.hands = [self._start(place, share) for place in places]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import ray

        for hand in self.hands:
            ray.kill(hand.actor)
        ray.shutdown()

    def submit(self, sample: Planned) -> str:
        heappush(self.waiting, (self.submitted, sample))
        self.submitted += 1
        self._hand_out()
        return sample.key

    def result(self, key: str) -> Encoded:
        """Wait until that sample is done; the others are kept busy meanwhile."""
        while key not in self.done:
            self._wait()
        self.taken += 1
        return self.done.pop(key)

    def _start(self, place: Place, share: Share) -> Hand:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        cache = self.job.config.cache.model_copy(
            update={"vae_device": share.vae_device, "text_device": share.text_device}
        )
        config = self.job.config.model_copy(update={"cache": cache})
        job = replace(self.job, config=config, rows=[], problems=[])
        actor_class = ray.remote(Worker).options(
            num_cpus=place.cpus,
            num_gpus=share.gpus,
            scheduling_strategy=NodeAffinitySchedulingStrategy(place.node, soft=False),
        )
        hand = Hand(actor_class.remote(job, self.load_lanes, os.getcwd()), place.address)
        self.running[hand.actor.load.remote()] = hand
        return hand

    def _hand_out(self) -> None:
        """Give every worker that is ready as much as its lanes hold, in order; samples about the same controls to the
        same worker, as long as it has room."""
        while self.waiting and self.waiting[0][0] < self.taken + AHEAD * IN_FLIGHT * len(self.hands):
            free = [hand for hand in self.hands if hand.is_loaded and len(hand.begun) < IN_FLIGHT]
            if not free:
                return
            number, sample = heappop(self.waiting)
            hand = min(free, key=lambda hand: (not hand.is_about(sample), len(hand.begun)))
            hand.begun.append(Begun(number, sample, hand.actor.begin.remote(sample)))
            if len(hand.begun) == 1:
                self._ask(hand)

    def _ask(self, hand: Hand) -> None:
        """Ask for the oldest that was begun."""
        self.running[hand.actor.finish.remote(hand.begun[0].ref)] = hand

    def _wait(self) -> None:
        import ray
        from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

        [ready], _ = ray.wait([*self.running])
        hand = self.running.pop(ready)
        try:
            value = ray.get(ready)
        except (RayActorError, ObjectLostError) as error:
            self._lose(hand, error)
        except RayTaskError as error:
            raise _as_ours(error, hand.address) from None
        else:
            if hand.is_loaded:
                meta, tensors = value
                self.done[hand.begun.popleft().sample.key] = meta, {name: data.data for name, data in tensors.items()}
            hand.is_loaded = True
            if hand.begun:
                self._ask(hand)
        self._hand_out()

    def _lose(self, hand: Hand, error: Exception) -> None:
        """Give what a worker had to the others."""
        import ray

        self.hands.remove(hand)
        ray.kill(hand.actor)  # it may only be out of reach
        for begun in hand.begun:
            heappush(self.waiting, (begun.number, begun.sample))
        if not self.hands:
            raise QwenCacheError(
                "every worker of the Ray cluster is lost",
                found=f"{hand.address}: {str(error).strip().splitlines()[-1]}",
                do="see `ray status`; the same command goes on",
            )


def _connect(address: str) -> None:
    import ray

    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # what we start does not report on its user
    dashboard = False if address == LOCAL else None
    host, _, port = address.rpartition(":")
    try:
        if host and port.isdecimal() and "//" not in host:  # Ray itself would try for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, include_dashboard=dashboard, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, OverflowError, RuntimeError, ValueError) as error:
        raise ConfigError(
            f"--ray: no cluster answers: {str(error).splitlines()[0]}",
            where=address,
            do="give the address of one (`ray start --head` prints it), or --ray local for this machine alone",
        ) from None


def _as_ours(error: ray.exceptions.RayTaskError, address: str) -> Exception:
    """What went wrong in a worker: a user's error as itself, with the node; a fault of ours with its traceback."""
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


def on_cluster(address: str, load_lanes: Callable[[Job], Encoding]) -> Encoders:
    """In place of `load_lanes`: the same lanes on every node. ConfigError when Ray is not installed."""
    if find_spec("ray") is None:
        raise ConfigError("--ray: the package ray is not installed", do="pip install 'qwen-cache[ray]'")
    return Encoders(lambda job: ClusterLanes(job, address, load_lanes), WINDOW)
