"""Cut the samples that workers encode into chunks, each of which becomes one shard.

Chunks have about the bytes of a shard. Where that would leave workers idle, they are smaller. Samples with the same
controls stay together, so that these are encoded once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from qwen_cache.encode.builder import BuildJob, Chunk
from qwen_cache.encode.estimate import estimate
from qwen_cache.encode.plan import PlannedSample

PER_WORKER = 4  # chunks at least: the last worker is done at most a quarter of its time after the others
LEAST = 8  # samples, on average, in chunks that are smaller than a shard: as many as one batch of the encoders takes


def cut_into_chunks(job: BuildJob, samples: Sequence[PlannedSample], workers: int) -> list[Chunk]:
    """Cut `samples`, in their order, for this many workers."""
    sizes = [estimate([sample], job).bytes for sample in samples]
    wanted = max(sum(sizes) / (PER_WORKER * workers), LEAST * sum(sizes) / max(len(samples), 1))
    return list(_cut(samples, sizes, min(wanted, int(job.config.cache.shard_size)), job.config.cache.commit_every))


def _cut(samples: Sequence[PlannedSample], sizes: Sequence[int], wanted: float, most: int | None) -> Iterator[Chunk]:
    """Chunks of `wanted` bytes, or of up to twice as many with the same controls, and of at most `most` samples."""
    chunk: list[PlannedSample] = []
    size = 0
    for sample, bytes_ in zip(samples, sizes, strict=True):
        same = bool(chunk and sample.inputs.controls and sample.inputs.controls == chunk[-1].inputs.controls)
        if chunk and (size >= (2 if same else 1) * wanted or len(chunk) == most):
            yield tuple(chunk)
            chunk, size = [], 0
        chunk.append(sample)
        size += bytes_
    if chunk:
        yield tuple(chunk)
