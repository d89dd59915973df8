"""A worker of a Ray cluster: it encodes chunks of samples, and writes a shard of each.

Shards go to the staging folder of the build, which every node must see, or to its bucket. While one shard is made
durable or uploaded, the samples of the next are encoded. Refuses weights or code that would give another recipe, and a
folder that is not shared.
"""

from __future__ import annotations

import os
import uuid
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Lock
from typing import Any

from qwen_cache.encode.builder import IN_FLIGHT, BuildJob, Chunk, Encoding
from qwen_cache.encode.recipe import make_recipe, recipe_changes
from qwen_cache.errors import ModelError
from qwen_cache.format.remote import Stored
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import ShardWriter, compress
from qwen_cache.format.staging import Destination
from qwen_cache.models.folder import ENCODER_PARTS, open_model


@dataclass(frozen=True)
class Written:
    """What a worker has written since it started, and how much of it is in incomplete shards."""

    samples: int = 0
    unfinished_samples: int = 0
    unfinished_bytes: int = 0


class Worker:
    """The lanes of one machine, in a process of its own on some node. `write` and `written` are called from threads."""

    def __init__(self, job: BuildJob, load_lanes: Callable[[BuildJob], Encoding], folder: str) -> None:
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
            job = replace(job, model=open_model(config.model.path, ENCODER_PARTS, config.model.revision))
        if different := recipe_changes(job.recipe, make_recipe(job.model, config)):
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
                for sample in self._encoded(chunk):
                    writer.add(*compress(*sample, self.job.config.cache.compression))
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

    def _encoded(self, chunk: Chunk) -> Iterator[tuple[SampleMeta, dict[str, memoryview]]]:
        started: deque[Any] = deque()
        for sample in chunk:
            started.append(self.lanes.submit(sample))
            if len(started) >= IN_FLIGHT:
                yield self.lanes.result(started.popleft())
        while started:
            yield self.lanes.result(started.popleft())
