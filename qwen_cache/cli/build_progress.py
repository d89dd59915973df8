"""The progress line of `qwen-cache build`: samples, samples per second, bytes written, and the time that is left."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from qwen_cache.console import human_bytes, progress
from qwen_cache.encode.write import Progress
from qwen_cache.plain_text import plain

MAX_RATES = 3  # workers that the line names


@contextmanager
def progress_line(what: str, total: int) -> Iterator[Callable[[Progress], None]]:
    """A progress line, with a second one for workers; yields the function that updates it."""
    begin, before, workers = time.monotonic(), None, ""
    with progress(below=lambda: workers) as bar:
        task = bar.add_task(what, total=total, count="")

        def show(now: Progress) -> None:
            nonlocal before, workers
            done = now.finished + now.running
            before = done if before is None else before  # finished by an earlier run
            speed = (done - before) / max(time.monotonic() - begin, 1e-6)
            workers = _worker_rates(now.rates) if now.rates else workers
            count = f"{done}/{total}, {speed:.2f} samples/s, {human_bytes(now.bytes)}"
            bar.update(task, completed=done, count=count)

        yield show


def _worker_rates(rates: Mapping[str, float]) -> str:
    """The samples per second of each worker, or the lowest and the highest."""
    if len(rates) <= MAX_RATES:
        return ", ".join(f"{plain(name)}: {rate:.2f} samples/s" for name, rate in rates.items())
    return f"{len(rates)} workers: {min(rates.values()):.2f} to {max(rates.values()):.2f} samples/s each"
