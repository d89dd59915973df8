"""Encode samples as a trainer asks for them: `qwen-train run --encode-on-the-fly`.

Requests come as lines on stdin, each the position of a sample in the source; replies go as lines of JSON to stdout, in
the order of the requests: first what the source is, with the token counts that the index of its cache would have;
then for each request the file of that sample, an unsealed shard in a folder that is gone with this process. The end of
stdin is the end. Nothing is kept: who sees a sample twice has it encoded twice.
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

from qwen_cache.encode.builder import IN_FLIGHT, Job
from qwen_cache.encode.lanes import InFlight, Lanes
from qwen_cache.encode.plan import Planned
from qwen_cache.encode.text import kept_tokens
from qwen_cache.format.identity import dataset_identity
from qwen_cache.format.sample import token_count
from qwen_cache.format.shard import ShardWriter
from qwen_cache.sources.sizes import calculate_dimensions


def serve(
    job: Job, samples: Sequence[Planned], load_lanes: Callable[[Job], Lanes], requests: TextIO, replies: TextIO
) -> None:
    """Answer until `requests` ends."""
    asked: SimpleQueue[int | None] = SimpleQueue()
    ended = Event()

    def read() -> None:
        for line in requests:
            asked.put(int(line))
        ended.set()
        asked.put(None)

    def reply(value: dict[str, Any]) -> None:
        print(json.dumps(value), file=replies, flush=True)

    with TemporaryDirectory(prefix="qwen-cache-") as folder, load_lanes(job) as lanes:
        reply(_about(job, samples))
        Thread(target=read, daemon=True).start()
        for count, work in enumerate(_submitted(samples, lanes, asked)):
            if ended.is_set():
                return
            path = Path(folder) / f"{count}.tar"
            writer = ShardWriter(path, job.format_version)
            writer.add(*lanes.result(work))
            writer.close()
            reply({"file": str(path)})


def _about(job: Job, samples: Sequence[Planned]) -> dict[str, Any]:
    return {
        "samples": len(samples),
        "identity": dataset_identity(sample.key for sample in samples),
        "recipe": job.recipe,
        "format_version": job.format_version,
        "prompt_embeds_width": job.model.text_width,
        "names": [sample.row.name for sample in samples],
        "image_tokens": [token_count(sample.img_shapes) for sample in samples],
        "text_tokens": text_tokens(job, samples),
    }


def text_tokens(job: Job, samples: Sequence[Planned]) -> list[int]:
    """Of each sample's prompt about its controls, exactly, though nothing is encoded yet."""
    area = job.condition_image_size
    sizes = [[calculate_dimensions(area, control) for control in sample.originals[1:]] for sample in samples]
    return kept_tokens(job.model, [(sample.row.prompt, each) for sample, each in zip(samples, sizes, strict=True)])


def _submitted(samples: Sequence[Planned], lanes: Lanes, asked: SimpleQueue[int | None]) -> Iterator[InFlight]:
    """What is asked for, in order, of which up to IN_FLIGHT samples are under way."""
    waiting: deque[InFlight] = deque()
    while True:
        while len(waiting) < IN_FLIGHT:
            try:
                position = asked.get(block=not waiting)
            except Empty:
                break
            if position is None:
                return
            waiting.append(lanes.submit(samples[position]))
        yield waiting.popleft()
