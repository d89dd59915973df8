"""An unfinished build in object storage: what earlier runs left there and on this machine, and the way up.

The shard that is being written, and those that wait for their upload, are in a folder of this machine, in the user's
cache folder. Each running build has such a folder to itself, and the next one takes over what a killed one left.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator, Set
from contextlib import ExitStack, contextmanager, suppress
from itertools import count, takewhile
from pathlib import Path

from qwen_cache.errors import QwenCacheError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import Manifest
from qwen_cache.format.remote import Stored, Uploads, build_name, read_parts, read_replaced
from qwen_cache.format.shard import Entry
from qwen_cache.format.shards import RemoteShards
from qwen_cache.storage.files import LockHeldError, NoLocksError, cache_home, locked, make_folder
from qwen_cache.storage.remote import LocalCopies, Url
from qwen_cache.storage.stores import store_of

LOCK = ".lock"


class RemoteBuild:
    """The unfinished build `name` of the cache at `folder`, whose dataset is `manifest`; `keys` are those to write.

    Raises QwenCacheError if the store cannot be written to.
    """

    def __init__(
        self, folder: Url, name: str, format_version: int, manifest: Manifest, keys: Set[str], copies: LocalCopies
    ) -> None:
        self.folder, build = folder, build_name(name, format_version)
        store = store_of(folder)
        store.check(folder)
        here = store.listing(folder)
        parts = read_parts(folder, build, here, format_version)
        self._have_part = {shard.name for shard, _ in parts}
        replaced = read_replaced(folder, manifest, here, keys, format_version)
        self.stored = [*parts, *(stored for stored in replaced if stored[0].name not in self._have_part)]
        """The shards that are there and not in the dataset."""
        self.uploads = Uploads(folder, build, format_version, here)
        shards = {shard.name: shard for shard in (*manifest.shards, *(shard for shard, _ in self.stored))}
        self.shards = RemoteShards(folder, dataclasses.replace(manifest, shards=tuple(shards.values())), copies)
        self._left: dict[str, IndexRow] = {}
        self._stack = ExitStack()
        self.scratch = self._stack.enter_context(own_folder(folder)) / build

    def adopt(self, stored: Stored) -> None:
        """Take a shard that is there into this build."""
        if stored[0].name in self._have_part:
            self.uploads.parts.append(stored)
        else:
            self.uploads.add(None, stored)

    def keep(self, stored: Stored) -> None:
        """Remember the samples of a shard that cannot be adopted whole."""
        if stored[0].name in self._have_part:
            self.uploads.parts.append(stored)
        self._left |= {entry.meta.key: IndexRow("", stored[0].name, entry) for entry in stored[1]}

    def left_over(self, key: str) -> tuple[Entry, memoryview] | None:
        """A sample of such a shard, and the bytes of the shard's local copy."""
        row = self._left.get(key)
        return (row.entry, self.shards.bytes_of(row)) if row else None

    def remove_left(self) -> None:
        """Remove what processes that were killed have left of this build on this machine, once it is committed."""
        for path in takewhile(Path.is_dir, _folders(self.folder)):
            if path != self.scratch.parent:
                with suppress(LockHeldError, NoLocksError), locked(path / LOCK):
                    shutil.rmtree(path / self.scratch.name, ignore_errors=True)

    def close(self) -> None:
        """End the uploads, and leave the local folder to the next build."""
        self.uploads.stop()
        self._stack.close()


def _folders(folder: Url) -> Iterator[Path]:
    """The local folders of builds of one cache, as many as one asks for."""
    begin = cache_home() / "staging" / content_hash(str(folder).encode())
    return (begin.with_name(f"{begin.name}-{number}") for number in count())


@contextmanager
def own_folder(folder: Url) -> Iterator[Path]:
    """The first local folder that no other process has; several builds of one cache may run on one machine."""
    with ExitStack() as stack:
        for path in _folders(folder):
            make_folder(path)
            try:
                stack.enter_context(locked(path / LOCK))
            except LockHeldError:
                continue
            except NoLocksError as error:
                what = "files cannot be locked here, so two builds could not be kept apart"
                do = "set XDG_CACHE_HOME to a folder on a local disk"
                raise QwenCacheError(what, where=path, found=error.strerror, do=do) from None
            yield path
            return


def scratch_folders(folder: Url, name: str, format_version: int) -> list[Path]:
    """The local folders with shards of the unfinished build `name`, of any process."""
    build = build_name(name, format_version)
    return [path / build for path in takewhile(Path.is_dir, _folders(folder)) if (path / build).is_dir()]
