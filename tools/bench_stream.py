"""Measure how fast the trainer's thread prepares batches: alone, and while another core multiplies matrices.

    python tools/bench_stream.py [--total 1000] [--folder DIR] [--repeats 5]

Samples are those of bench_read.py: edits of a megapixel in bfloat16, with the rows of prompt embeddings of Edit-Plus
(700) or Edit (1400). Every byte is hashed, noise is sampled, and files are in the page cache. Batches in reused
memory and in fresh memory alternate in one process; medians of the repeats.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import islice
from pathlib import Path

import torch
from bench_read import Samples, write_cache

from qwen_cache.batching import RankBatch
from qwen_cache.format.cache import Cache, open_cache
from qwen_cache.settings.sections import TrainConfig
from qwen_train.data.batches import Batch, Batches, Buffers
from qwen_train.flow import NoiseSchedule

SIDE = 64  # tokens along a side of a megapixel
SHAPES = ((700, 1), (700, 4), (1400, 8))  # rows of prompt embeddings, samples in a batch
WARM_UP = 6  # batches that are prefetched, or fill the reused buffers


class TimedBatches(Batches):
    """Counts the CPU time of the thread, which depends less on other processes than elapsed time."""

    spent = 0.0

    def _make(self, rank_batch: RankBatch, buffers: Buffers | None = None) -> Batch:
        begin = time.thread_time()
        batch = super()._make(rank_batch, buffers)
        self.spent += time.thread_time() - begin
        return batch


class FreshBatches(TimedBatches):
    """Allocates new memory for every batch."""

    def _make(self, rank_batch: RankBatch, buffers: Buffers | None = None) -> Batch:
        return super()._make(rank_batch)


@contextmanager
def training_step(runs: bool) -> Iterator[None]:
    """Multiply matrices on one core inside the block, if `runs`."""
    done = threading.Event()

    def work() -> None:
        a = torch.randn(1024, 1024)
        while not done.is_set():
            torch.mm(a, a)

    thread = threading.Thread(target=work)
    if runs:
        thread.start()
    yield
    done.set()
    if runs:
        thread.join()


def size(batch: Batch) -> int:
    return sum(value.nbytes for value in vars(batch).values() if isinstance(value, torch.Tensor))


def speed(kind: type[TimedBatches], cache: Cache, batch_size: int, total: float) -> tuple[float, float]:
    """GB/s over `total` GB of batches, and the thread's CPU seconds per GB."""
    batches = kind(cache, TrainConfig(batch_size=batch_size, caption_dropout=0.0), NoiseSchedule())
    with closing(batches.starting_at(0)) as stream:
        for _ in islice(stream, WARM_UP):
            pass
        begin, read, batches.spent = time.perf_counter(), 0, 0.0
        while read < total * 1e9:
            read += size(next(stream))
        return read / 1e9 / (time.perf_counter() - begin), batches.spent / (read / 1e9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--total", type=int, default=1000, help="MB per cache, and per measurement")
    parser.add_argument("--folder", type=Path, help="where to write the caches (default: a temporary folder)")
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    print("| rows of text | batch | | fresh | reused |\n|---:|---:|---|---:|---:|")
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        for text, batch_size in SHAPES:
            path = Path(folder) / str(text)
            if not path.exists():
                sample = 2 * (2 * SIDE**2 * 64 + text * 3584)
                write_cache(Samples(max(batch_size, round(arguments.total * 1e6 / sample)), SIDE, text), path)
            cache = open_cache(path)
            for runs in (False, True):
                results: dict[type[TimedBatches], list[tuple[float, float]]] = {FreshBatches: [], TimedBatches: []}
                for _ in range(arguments.repeats):
                    for kind, speeds in results.items():
                        with training_step(runs):
                            speeds.append(speed(kind, cache, batch_size, arguments.total / 1000))
                when = "while a core trains" if runs else "alone"
                print(f"| {text} | {batch_size} | {when} | {' | '.join(map(cell, results.values()))} |")


def cell(measured: list[tuple[float, float]]) -> str:
    speeds, spent = zip(*measured, strict=True)
    return f"{statistics.median(speeds):.1f} GB/s, {statistics.median(spent):.2f} CPU-s/GB"


if __name__ == "__main__":
    main()
