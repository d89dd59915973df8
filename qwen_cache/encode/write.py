"""Write the missing samples of a build, on this machine or with workers that write shards, and commit them.

A build that is killed leaves the old dataset in place, and its finished samples in staging. The same command continues
from there, with workers or without; on one machine it gives the same bytes if the encoders take one sample at a time
(`micro_batches`). With `cache.commit_every` there are commits before the last one. They only add: samples that replace
others wait for the last one, and so does everything if the build replaces the recipe or repairs the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any

import numpy as np
import pyarrow.compute as pc

from qwen_cache.encode.builder import (
    BuildJob,
    Chunk,
    Encoded,
    Encoders,
    FindLatents,
    WorkersState,
    ahead,
    cut_into_chunks,
    other_caches,
    staging_name,
)
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.encode.recipe import ReusableSamples
from qwen_cache.errors import ConflictError
from qwen_cache.extras import __version__, installed
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.remote import conflict
from qwen_cache.format.shard import compress
from qwen_cache.format.staging import Destination, replaced_shards
from qwen_cache.format.update import Update, commit_early, commit_update, copy_if_there, open_staging
from qwen_cache.storage.remote import LocalCopies


@dataclass(frozen=True)
class Report:
    """The result of a build."""

    made: frozenset[str]
    """The keys of the samples that were encoded, or got a new mask; all others were copied or already present."""
    samples: int
    shards: int
    bytes: int
    replaced: int
    """Shards that the dataset no longer names, kept until `gc`."""


@dataclass(frozen=True)
class Progress:
    """How far a build is."""

    finished: int
    """Missing samples that are on the disk: they stay if the build is stopped now."""
    running: int = 0
    """Samples in the incomplete shards of workers."""
    bytes: int = 0
    """Written so far."""
    rates: Mapping[str, float] = field(default_factory=dict)
    """Samples per second of each worker."""


def run(
    job: BuildJob,
    update: Update,
    missing: Sequence[PlannedSample],
    encoders: Encoders,
    on_progress: Callable[[Progress], None] = lambda _: None,
    again: Callable[[], Update] | None = None,
    *,
    known: FindLatents | None = None,
    reusable: ReusableSamples | None = None,
) -> Report:
    """Copy or encode the missing samples and commit; the caller holds `directory.writing(job.folder)`.

    Of an image with `known` latents these are taken. A sample that `reusable` has needs a new mask and no encoder, so
    this process makes it even if there are workers. If other builds may commit to a bucket meanwhile, `again` gives the
    update of the dataset as it then is.
    """
    made, now, written = set[str](), update, 0
    while True:
        writing = Writing(job, now, missing, encoders, on_progress, again, known, reusable, written)
        try:
            made |= writing.write()
            manifest = writing.commit()
            break
        except ConflictError:
            if again is None:
                raise
            now, written = again(), writing.bytes  # what is written is adopted
        finally:
            writing.staging.close()
    before, after = ({s.name for s in m.shards} for m in (update.existing.manifest, manifest))
    return Report(
        made=frozenset(made),
        samples=manifest.recipes[job.recipe_name].samples,
        shards=len(after),
        bytes=sum(shard.bytes for shard in manifest.shards),
        replaced=len(before - after),
    )


class Writing:
    """The samples of one update on their way into the dataset."""

    def __init__(
        self,
        job: BuildJob,
        update: Update,
        missing: Sequence[PlannedSample],
        encoders: Encoders,
        on_progress: Callable[[Progress], None],
        again: Callable[[], Update] | None,
        known: FindLatents | None,
        reusable: ReusableSamples | None,
        written: int,
    ) -> None:
        """`written` are the bytes of earlier attempts, before a conflict."""
        self.job, self.encoders, self.on_progress, self.again = job, encoders, on_progress, again
        self.known, self.reusable, self.written = known, reusable, written
        self.samples = {sample.key: sample for sample in missing}
        # A commit before the last one must just add to the dataset.
        existing = update.existing
        is_replaced = existing.recipes.get(job.recipe_name, job.recipe) != job.recipe
        lacks_shards = len(existing) != len(existing.table)
        self.every = None if update.damaged or is_replaced or lacks_shards else job.config.cache.commit_every
        self.late = frozenset[str]()
        """The keys of samples that move to another shard, or that replace one of their name."""
        if self.every:
            has_name = pc.is_in(update.rows.table["name"], pc.unique(existing.table["name"])).to_numpy()
            replacing = update.rows.keys(np.flatnonzero(has_name & (update.kept < 0)))
            self.late = frozenset(update.moved) | frozenset(replacing)
        if self.late:
            update = replace(update, order=sorted(update.order, key=lambda key: key in self.late))
        self.update = update
        replaced = replaced_shards(job.folder, self.samples.keys(), job.format_version)
        self.name = staging_name(job, repair=bool(update.damaged))
        copies = LocalCopies.of_settings(job.config.cache)
        self.staging = open_staging(update, self.name, int(job.config.cache.shard_size), replaced, copies)
        self.others = other_caches(job)
        self.finished = self.uncommitted = 0
        self.left = len(update.order)
        """The keys that are not written yet."""
        self.committed = set[str]()
        """The keys of this update that were committed early."""

    @property
    def bytes(self) -> int:
        """Written so far, without the incomplete shards of workers."""
        return self.written + self.staging.size

    def write(self) -> set[str]:
        """Write all samples of the update; returns the keys of those that were not copied."""
        waiting = self.staging.to_write
        is_left, others = self.staging.left_over, self.others  # samples that need no encoder
        to_make = {key for key in waiting if key in self.samples and is_left(key) is None and key not in others}
        cached = {key: self.reusable.row_for(self.samples[key]) for key in to_make} if self.reusable else {}
        new_masks = {key: row for key, row in cached.items() if row is not None}
        to_encode = to_make - new_masks.keys()
        self._count(set(self.update.order).difference(waiting))
        if self.encoders.has_workers and to_encode:
            self.staging.leave(to_encode)
            workers = self.encoders.workers(self.job)
            self._write_here(set(), new_masks)
            order = [key for key in waiting if key in to_encode]
            chunks: list[Chunk] = []
            for late in (False, True):
                samples = [self.samples[key] for key in order if (key in self.late) == late]
                chunks += cut_into_chunks(self.job, samples, workers.count)
            destination = Destination.of(self.job.folder, self.name, self.job.format_version)
            for shard in workers.write(chunks, destination, self._report):
                self.staging.add_shard(shard)
                self._count([entry.meta.key for entry in shard[1]])
        else:
            self._write_here(to_encode, new_masks)
        return to_make

    def commit(self) -> Manifest:
        """Commit everything; all samples must be written. ConflictError if meanwhile others are to be written."""
        if set(self.staging.order) - self.committed != set(self.update.order) - self.committed:
            raise conflict(self.job.folder)
        return commit_update(self.update, self.staging, self._recipes(), written_by())

    def _write_here(self, to_encode: Set[str], new_masks: Mapping[str, IndexRow]) -> None:
        """Encode samples, make new masks for rows of the cache, and copy all others."""
        with ExitStack() as opened:
            running = self.encoders.running(self.job) if to_encode else None
            masks = None
            if new_masks and self.reusable:
                from qwen_cache.encode.masks import MaskUpdates

                masks = opened.enter_context(closing(MaskUpdates(self.job, self.reusable)))

            def begin(key: str) -> Callable[[], Encoded] | None:
                """A function that waits for the sample; None to copy it."""
                if running and key in to_encode:
                    return partial(running.result, running.submit(self.samples[key], self.known))
                return masks.submit(self.samples[key], new_masks[key]).result if masks and key in new_masks else None

            for key, result in ahead(self.staging.to_write, begin, self.encoders.in_flight):
                if result is not None:
                    self.staging.add(*compress(*result(), self.job.config.cache.compression))
                else:
                    self._copy(key)
                self._count([key])

    def _copy(self, key: str) -> None:
        if not copy_if_there(self.update, self.staging, key):
            self.staging.add_copy(*self.others.sample(key))

    def _count(self, keys: Iterable[str]) -> None:
        """Count samples that are written, and commit if enough of them are new."""
        for key in keys:
            self.left -= 1
            self.finished += key in self.samples
            self.uncommitted += key not in self.late
        self._report(WorkersState(0, 0, {}))
        if self.every and self.uncommitted >= self.every and self.left:
            self._commit_early()
            self.uncommitted = 0

    def _commit_early(self) -> None:
        """Commit the complete shards, unless they hold samples that replace others, or that are there already."""
        while True:
            shards = self.staging.take(set(self.update.order) - self.late)
            if not shards:
                return
            try:
                self.update = commit_early(self.update, self.staging, shards, self._recipes(), written_by())
            except ConflictError:
                if self.again is None:
                    raise
                self.staging.sealed += shards
                self.update = self.again()
            else:
                self.committed.update(entry.meta.key for _, entries in shards for entry in entries)
                return

    def _report(self, workers: WorkersState) -> None:
        self.on_progress(Progress(self.finished, workers.samples, self.bytes + workers.bytes, workers.rates))

    def _recipes(self) -> dict[str, dict[str, Any]]:
        return {**self.update.existing.recipes, self.job.recipe_name: self.job.recipe}


@cache
def written_by() -> dict[str, str]:
    """The versions of what wrote a dataset here; packages of the encoders that are not installed are left out."""
    versions = {name: installed(name) for name in ("diffusers", "torch", "transformers")}
    return {"qwen-cache": __version__, **{name: found for name, found in versions.items() if found}}
