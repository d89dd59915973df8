"""The progress line of `qwen-cache build`: samples, samples per second, bytes written, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from qwen_cache.console import human_bytes, progress
from qwen_cache.encode.write import Progress

MAX_RATES = 3  # workers that the line names


@contextmanager
def progress_line(what: str, total: int) -> Iterator[Callable[[Progress], None]]:
    """A progress line; yields the function that updates it."""
    begin, before = time.monotonic(), None
    with progress() as bar:
        task = bar.add_task(what, total=total, count="")

        def show(now: Progress) -> None:
            nonlocal before
            done = now.finished + now.running
            before = done if before is None else before  # finished by an earlier run
            speed = (done - before) / max(time.monotonic() - begin, 1e-6)
            parts = [f"{done}/{total}", f"{speed:.2f} samples/s", human_bytes(now.bytes), *_worker_rates(now.rates)]
            bar.update(task, completed=done, count=", ".join(parts))

        yield show


def _worker_rates(rates: Mapping[str, float]) -> list[str]:
    """The speed of each worker, or the lowest and the highest."""
    if len(rates) <= MAX_RATES:
        return [f"{name}: {rate:.2f}/s" for name, rate in rates.items()]
    return [f"{len(rates)} workers: {min(rates.values()):.2f} to {max(rates.values()):.2f}/s each"]
