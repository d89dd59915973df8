"""Encode samples as a trainer requests them: `qwen-train run --encode-on-the-fly`.

A request is a line on stdin, the position of a sample in the source; a reply is a line of JSON on stdout, in the order
of the requests. The first reply describes the source, with the token counts that the index of its cache would have.
Each other reply names the file of one sample, an unsealed shard in a folder that is removed when this process ends. It
ends with stdin. Nothing is kept: a sample that is requested twice is encoded twice.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from tempfile import TemporaryDirectory
from threading import Event, Thread
from typing import Any, TextIO

from qwen_cache.encode.builder import IN_FLIGHT, BuildJob
from qwen_cache.encode.lanes import InFlight, Lanes
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.encode.text import kept_tokens
from qwen_cache.format.identity import dataset_identity
from qwen_cache.format.sample import token_count
from qwen_cache.format.shard import ShardWriter
from qwen_cache.sources.sizes import calculate_dimensions


def serve(
    job: BuildJob,
    samples: Sequence[PlannedSample],
    load_lanes: Callable[[BuildJob], Lanes],
    requests: TextIO,
    replies: TextIO,
) -> None:
    """Answer until `requests` ends."""
    requested: SimpleQueue[int | None] = SimpleQueue()
    ended = Event()

    def read() -> None:
        for line in requests:
            requested.put(int(line))
        ended.set()
        requested.put(None)

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    with TemporaryDirectory(prefix="qwen-cache-") as folder, load_lanes(job) as lanes:
        reply(_description(job, samples))
        Thread(target=read, daemon=True).start()
        for count, work in enumerate(_submitted(samples, lanes, requested)):
            if ended.is_set():
                return
            path = Path(folder) / f"{count}.tar"
            writer = ShardWriter(path, job.format_version)
            writer.add(*lanes.result(work))
            writer.close()
            reply({"file": str(path)})


def _description(job: BuildJob, samples: Sequence[PlannedSample]) -> dict[str, Any]:
    """The first reply."""
    return {
        "samples": len(samples),
        "identity": dataset_identity(sample.key for sample in samples),
        "recipe": job.recipe,
        "format_version": job.format_version,
        "prompt_embeds_width": job.model.text_width,
        "names": [sample.row.name for sample in samples],
        "image_tokens": [token_count(sample.img_shapes) for sample in samples],
        "target_tokens": [token_count(sample.img_shapes[:1]) for sample in samples],
        "text_tokens": text_tokens(job, samples),
    }


def text_tokens(job: BuildJob, samples: Sequence[PlannedSample]) -> list[int]:
    """The exact length of each sample's prompt embeddings, without encoding it."""
    area = job.condition_image_size
    sizes = [[calculate_dimensions(area, control) for control in sample.originals[1:]] for sample in samples]
    return kept_tokens(job.model, [(sample.row.prompt, each) for sample, each in zip(samples, sizes, strict=True)])


def _submitted(
    samples: Sequence[PlannedSample], lanes: Lanes, requested: SimpleQueue[int | None]
) -> Iterator[InFlight]:
    """The requested samples in order, up to IN_FLIGHT of them in flight."""
    waiting: deque[InFlight] = deque()
    while True:
        while len(waiting) < IN_FLIGHT:
            try:
                position = requested.get(block=not waiting)
            except Empty:
                break
            if position is None:
                return
            waiting.append(lanes.submit(samples[position]))
        yield waiting.popleft()
