"""The pool of encoded samples, and the cache that they are committed to."""

from __future__ import annotations

import uuid
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, Protocol, Self

from qwen_cache.encode.builder import BuildJob, load_existing, staging_name
from qwen_cache.encode.known_latents import ImageRows, of_recipe
from qwen_cache.encode.recipe import recipe_changes, save_settings
from qwen_cache.encode.write import written_by
from qwen_cache.errors import ConfigError, ConflictError, FormatError, ShardError
from qwen_cache.format import directory
from qwen_cache.format.cache import LocalShards, shards_of
from qwen_cache.format.identity import content_hash
from qwen_cache.format.remote import Stored
from qwen_cache.format.rows import KeyedRows, ListedSample, ListedSamples
from qwen_cache.format.sample import SampleMeta, parse_sample
from qwen_cache.format.shard import (
    END_OF_ARCHIVE,
    Entry,
    ShardWriter,
    check_tensors,
    compress,
    scan_shard,
    tensor_bytes,
)
from qwen_cache.format.staging import Destination, Staging, staging_folder
from qwen_cache.format.update import Existing, Update, commit_update, copy_if_there, open_staging, plan_update
from qwen_cache.storage.files import map_file
from qwen_cache.storage.remote import LocalCopies, is_remote

NAME_LENGTH = 12  # digits of the key, as the name of a sample without one
ATTEMPTS = 20  # of a commit while other services commit to the same bucket

Tensors = Mapping[str, memoryview]
"""The stored bytes of each tensor of a sample, by name."""


class Store(Protocol):
    """A place for the service's samples; its methods are for any thread, except `add` and `commit`."""

    stores: bool
    """True if samples become STORED."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *_: object) -> None: ...

    def __len__(self) -> int: ...

    def has(self, key: str) -> bool: ...

    def is_stored(self, key: str) -> bool: ...

    def sample(self, key: str) -> tuple[SampleMeta, Tensors] | None: ...

    def images(self) -> Sequence[ImageRows]: ...

    def add(self, name: str, meta: SampleMeta, tensors: Tensors) -> None: ...

    def commit(self) -> Mapping[str, str]:
        """Store what was added; the keys of samples that cannot be, each with the problem. An error stores nothing."""
        ...


class Memory:
    """The newest samples, up to `limit` bytes."""

    stores = False

    def __init__(self, limit: int) -> None:
        self._limit, self._bytes, self._lock = limit, 0, Lock()
        self._samples: OrderedDict[str, tuple[SampleMeta, Tensors]] = OrderedDict()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def __len__(self) -> int:
        return len(self._samples)

    def has(self, key: str) -> bool:
        return key in self._samples

    def is_stored(self, key: str) -> bool:
        return False

    def sample(self, key: str) -> tuple[SampleMeta, Tensors] | None:
        with self._lock:
            if key in self._samples:
                self._samples.move_to_end(key)
            return self._samples.get(key)

    def images(self) -> Sequence[ImageRows]:
        return ()

    def add(self, name: str, meta: SampleMeta, tensors: Tensors) -> None:
        with self._lock:
            self._samples[meta.key] = meta, tensors
            self._bytes += _size(meta)
            while self._bytes > self._limit and len(self._samples) > 1:
                _, (oldest, _) = self._samples.popitem(last=False)
                self._bytes -= _size(oldest)

    def commit(self) -> Mapping[str, str]:
        return {}


def _size(meta: SampleMeta) -> int:
    return sum(spec.stored_bytes for spec in meta.tensors.values())


@dataclass(eq=False)
class OpenShard:
    """A shard that is not in the dataset yet: its samples by key, and their names."""

    writer: ShardWriter
    entries: dict[str, Entry] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)
    mapped: memoryview | None = None
    """Its bytes once it grows no more: the file is renamed, moved or uploaded."""
    stored: Stored | None = None
    """Set once it is sealed."""
    is_delivered: bool = False
    """True if it is where the commit expects it."""

    def bytes(self) -> memoryview:
        return map_file(self.writer.path) if self.mapped is None else self.mapped


class Pool:
    """The cache of a service; leaving the context releases it and leaves what is not committed to the next one.

    Raises ConfigError when it is entered if the cache has another recipe of this name, or another format version.
    """

    stores = True

    def __init__(self, job: BuildJob) -> None:
        self.job, self._name, self._lock = job, staging_name(job), Lock()
        self._stack = ExitStack()
        self._open: list[OpenShard] = []
        """The one that grows, after those that a failed commit left."""
        self._images: Sequence[ImageRows] | None = None
        """Found when they are first asked for after a commit."""

    def __enter__(self) -> Self:
        job = self.job
        self._stack.enter_context(directory.writing(job.folder))
        try:
            self._read()
            recipe = self._existing.recipes.get(job.recipe_name)
            if recipe is not None and recipe != job.recipe:  # a service adds, and never replaces
                raise ConfigError(
                    f"this cache has another recipe under the name {job.recipe_name!r}",
                    where=job.folder,
                    found=", ".join(recipe_changes(recipe, job.recipe)),
                    do="choose another with --out, or name this recipe with --set cache.recipe=NAME",
                )
            save_settings(job.folder, job.config)
            # The complete samples that a killed service or build left are committed if their rows are new; what was
            # uploaded and not committed is encoded again if it is wanted, and removed by `gc`.
            if not is_remote(job.folder):
                folder = staging_folder(job.folder, self._name, job.format_version)
                left = Staging.finished(folder, job.format_version) if folder.is_dir() else set()
                self._add_to_dataset({key: key[:NAME_LENGTH] for key in sorted(left)})
                folder.mkdir(parents=True, exist_ok=True)
            self._destination = Destination.of(job.folder, self._name, job.format_version)
            self._folder = self._stack.enter_context(self._destination.opened())
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for shard in self._open:
            if shard.stored is None:
                shard.writer.close()
        self._stack.close()

    def __len__(self) -> int:
        return len(self._rows)

    def has(self, key: str) -> bool:
        """True if the sample can be fetched."""
        with self._lock:
            return key in self._rows or any(key in shard.entries for shard in self._open)

    def is_stored(self, key: str) -> bool:
        """True if the sample is in the dataset."""
        with self._lock:
            return key in self._rows

    def sample(self, key: str) -> tuple[SampleMeta, Tensors] | None:
        """A sample, checked by its hashes: FormatError if it is damaged; None if it is not here."""
        with self._lock:
            found = next(((shard.entries[key], shard.bytes()) for shard in self._open if key in shard.entries), None)
            row, shards = self._rows.get(key), self._shards
        if found is None and row is None:
            return None
        if found is None and row is not None:
            with self._lock if isinstance(shards, LocalShards) else nullcontext():  # a bucket may take seconds
                found = row.entry, shards.bytes_of(row)
        assert found is not None
        check_tensors(*found, str(self.job.folder))
        return found[0].meta, dict(tensor_bytes(*found))

    def images(self) -> Sequence[ImageRows]:
        """The images of the dataset, as of the last commit; none of a bucket. For the thread that commits."""
        folder = self.job.folder
        if is_remote(folder):
            return ()
        if self._images is None:
            mine = [(self._rows, LocalShards(folder, self._existing.manifest))]
            self._images = [ImageRows(*each) for each in of_recipe(self.job, mine)]
        return self._images

    def add(self, name: str, meta: SampleMeta, tensors: Tensors) -> None:
        """Append a sample to the open shard. FormatError if it could not be read back; no error changes the shard."""
        stored = compress(meta, tensors, self.job.config.cache.compression)
        parse_sample(stored[0].to_bytes(self.job.format_version), meta.key, self.job.format_version)
        shard = self._growing()
        try:
            shard.writer.add(*stored)
        except OSError:
            self._reopen(shard)
            raise
        self._enter(shard, name or meta.key[:NAME_LENGTH])

    def commit(self) -> Mapping[str, str]:
        """Make the samples of the open shards part of the dataset; those that are damaged are left out.

        After an error the next commit tries again.
        """
        try:
            self._commit()
        except (FormatError, ValueError, TypeError):  # of a sample, or else of the dataset
            damaged = {key: why for shard in self._open for key in shard.entries if (why := self._damage(shard, key))}
            if not self._write_again(damaged):
                raise
            self._commit()
            return damaged
        return {}

    def _enter(self, shard: OpenShard, name: str) -> None:
        """Let the sample that was appended last be found."""
        entry = shard.writer.entries[-1]
        with self._lock:
            shard.entries[entry.meta.key], shard.names[entry.meta.key] = entry, name

    def _commit(self) -> None:
        for shard in self._open:
            if shard.stored is None:
                shard.stored = self._seal(shard)
            if not shard.is_delivered:
                self._destination.deliver(shard.stored, self._folder)
                shard.is_delivered = True
        self._add_to_dataset({key: name for shard in self._open for key, name in shard.names.items()})
        with self._lock:
            self._open.clear()

    def _damage(self, shard: OpenShard, key: str) -> str | None:
        """Why a sample of an open shard cannot be part of the dataset; None if it can."""
        entry, data = shard.entries[key], shard.bytes()
        alone = memoryview(bytes(data[entry.offset : entry.offset + entry.length]) + END_OF_ARCHIVE)
        try:
            list(scan_shard(alone, key, self.job.format_version))
            check_tensors(entry, data, key)
            ListedSamples.of([ListedSample(shard.names[key], key)])
        except (FormatError, ValueError, TypeError) as error:
            return str(error)
        return None

    def _write_again(self, without: Container[str]) -> bool:
        """Write the open shards again that hold one of these samples, or are not on the disk as they were written.

        False if there is none. The other samples of these shards are kept.
        """
        bad = [shard for shard in self._open if any(key in without for key in shard.entries) or self._is_gone(shard)]
        if not bad:
            return False
        new = self._new_shard()
        try:
            for shard in bad:
                for key in [key for key in shard.entries if key not in without]:
                    new.writer.add(shard.entries[key].meta, dict(tensor_bytes(shard.entries[key], shard.bytes())))
                    self._enter(new, shard.names[key])
        except BaseException:  # such as a full disk: all stays as it is
            _remove(new)
            raise
        with self._lock:
            self._open = [*(shard for shard in self._open if shard not in bad), new]
        for shard in bad:
            if shard.stored is None:
                _remove(shard)
        return True

    def _is_gone(self, shard: OpenShard) -> bool:
        if shard.stored is None or is_remote(self.job.folder):
            return False
        path = self._folder / shard.stored[0].name
        return not path.is_file() or content_hash(map_file(path)) != path.stem

    def _seal(self, shard: OpenShard) -> Stored:
        """Seal a shard. An error leaves it as it was. Readers never see its file move."""
        with self._lock:  # a reader may be about to map the file under its old name
            shard.mapped = shard.bytes()
        try:
            return shard.writer.seal(self._folder)
        except OSError:
            self._reopen(shard)
            shard.mapped = None
            raise

    def _reopen(self, shard: OpenShard) -> None:
        """Go back to the last complete sample of a shard."""
        shard.writer.close()
        shard.writer = ShardWriter(shard.writer.path, self.job.format_version, shard.writer.entries)

    def _growing(self) -> OpenShard:
        """The shard to append to."""
        if not self._open or self._open[-1].stored is not None:
            new = self._new_shard()
            with self._lock:
                self._open.append(new)
        if (shard := self._open[-1]).writer.file.closed:  # it could not be opened again after an error
            self._reopen(shard)
        return shard

    def _new_shard(self) -> OpenShard:
        self._folder.mkdir(parents=True, exist_ok=True)  # a commit removes it
        path = self._folder / f"open-{uuid.uuid4().hex}.tar"
        return OpenShard(ShardWriter(path, self.job.format_version))

    def _add_to_dataset(self, names: Mapping[str, str]) -> None:
        """Commit the samples with these keys; what another service has committed meanwhile is left out."""
        for attempt in range(1, ATTEMPTS + 1):
            new = [ListedSample(name, key) for key, name in names.items() if not self.is_stored(key)]
            if not new:
                return
            existing = self._existing
            listed = existing.listed + ListedSamples.of(new)
            update = plan_update(self.job.folder, existing, self.job.format_version, listed)
            update = replace(update, vae_encoders=self.job.vae_encoders)
            try:
                self._carry_out(update)
                self._read()
                return
            except ConflictError:
                if attempt == ATTEMPTS:
                    raise
                self._read()

    def _carry_out(self, update: Update) -> None:
        cache = self.job.config.cache
        staging = open_staging(update, self._name, int(cache.shard_size), copies=LocalCopies.of_settings(cache))
        try:
            for key in staging.to_write:
                if not copy_if_there(update, staging, key):
                    what, do = "a shard that an earlier process left is damaged", "remove this folder"
                    raise ShardError(what, where=staging.folder, found=f"no sample {key}", do=do)
            recipes: dict[str, dict[str, Any]] = {**update.existing.recipes, self.job.recipe_name: self.job.recipe}
            commit_update(update, staging, recipes, written_by())
        finally:
            staging.close()

    def _read(self) -> None:
        """Read the dataset as it is now."""
        existing, job = load_existing(self.job), self.job
        rows = existing.of_recipe(job.recipe_name)
        shards = shards_of(job.folder, existing.manifest, LocalCopies.of_settings(job.config.cache))
        with self._lock:
            self._existing: Existing = existing
            self._rows: KeyedRows = rows
            self._images = None
            self._shards = shards


def _remove(shard: OpenShard) -> None:
    shard.writer.close()
    shard.writer.path.unlink(missing_ok=True)
