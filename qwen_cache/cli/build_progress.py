"""The progress line of `qwen-cache build`: samples, samples per second, bytes written, and the time that is left.

A second line has the work of each lane of this machine, or the speed of each worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from qwen_cache.encode.write import Progress
from qwen_cache.terminal import human_bytes, plural, progress
from qwen_cache.text import plain

if TYPE_CHECKING:
    from qwen_cache.encode.micro_batches import LaneState

MAX_RATES = 3  # workers that the line names


@contextmanager
def progress_line(
    what: str, total: int, lanes: Callable[[], Sequence[LaneState]] = lambda: ()
) -> Iterator[Callable[[Progress], None]]:
    """A progress line, with a second one for lanes or workers; yields the function that updates it."""
    begin, before, rates = time.monotonic(), None, dict[str, float]()

    def below() -> str:
        return _worker_rates(rates) if rates else ", ".join(map(_lane_work, lanes()))

    def for_programs() -> list[dict[str, Any]]:
        workers = [{"name": name, "samples_per_second": round(rate, 3)} for name, rate in rates.items()]
        return [*workers, *({**asdict(lane), "busy": round(lane.busy, 2)} for lane in lanes())]

    with progress(below=below, lanes=for_programs) as bar:
        task = bar.add_task(what, total=total, count="")

        def show(now: Progress) -> None:
            nonlocal before, rates
            done = now.finished + now.running
            before = done if before is None else before  # finished by an earlier run
            speed = (done - before) / max(time.monotonic() - begin, 1e-6)
            rates = dict(now.rates) or rates
            count = f"{done}/{total}, {speed:.2f} samples/s, {human_bytes(now.bytes)}"
            bar.update(task, completed=done, count=count)

        yield show


def _lane_work(lane: LaneState) -> str:
    """`vae-0 on cuda:0: 24 images, 83 % busy`."""
    work = plural(lane.done, "image" if lane.name.startswith("vae") else "prompt")
    return f"{lane.name} on {lane.device}: {work}, {100 * lane.busy:.0f} % busy"


def _worker_rates(rates: Mapping[str, float]) -> str:
    """The samples per second of each worker, or the lowest and the highest."""
    if len(rates) <= MAX_RATES:
        return ", ".join(f"{plain(name)}: {rate:.2f} samples/s" for name, rate in rates.items())
    return f"{len(rates)} workers: {min(rates.values()):.2f} to {max(rates.values()):.2f} samples/s each"
