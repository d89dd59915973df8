"""Files in object storage, written: what S3, Google Cloud Storage and the Hugging Face hub have in common.

A file is there whole or not at all. `swap` is the conditional write that commits rest on: of several writers, one
succeeds. Requests are retried as for reading (`storage/url.py`), a large file by parts, so that a broken connection
costs one of them. A server that ignores conditions is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Event
from typing import Protocol
from uuid import uuid4

from qwen_cache.errors import QwenCacheError
from qwen_cache.storage.url import Url

NEVER = Event()
"""For uploads that nothing stops."""


@dataclass(frozen=True)
class StoredFile:
    """A file in a listing; `modified` is in seconds since 1970, by the clock of the store. Files with one `tag` are
    equal; equal files may have different ones."""

    size: int
    modified: float
    tag: str = ""


@dataclass(frozen=True)
class Listing:
    """The files below a folder, by path, and the time of the store."""

    files: Mapping[str, StoredFile]
    now: float


class Store(Protocol):
    """What this program asks of object storage. Every error is a QwenCacheError, except FileNotFoundError."""

    def put(self, url: Url, data: bytes) -> None:
        """Write a file whole, replacing an earlier one."""

    def put_file(self, url: Url, path: Path, first: Mapping[Url, bytes], stop: Event) -> None:
        """Write the small files `first`, then the local file `path`; CancelledError soon after `stop` is set."""

    def swap(
        self, url: Url, old: bytes | None, new: bytes, first: Mapping[Url, bytes], then: Mapping[Url, bytes]
    ) -> bool:
        """Write `first`; then `new`, if the file still is `old` (None: does not exist); then `then`.

        False, with nothing written but `first`, if the file is neither `old` nor `new`.
        """

    def copy(self, source: Url, target: Url) -> bool:
        """Copy a file without downloading it; False if this store cannot, or `source` is not in it."""

    def listing(self, folder: Url) -> Listing:
        """All files below a folder; QwenCacheError if its bucket or repository does not exist."""

    def delete(self, urls: Sequence[Url]) -> None:
        """Remove files; those that do not exist are no error."""

    def check(self, folder: Url) -> None:
        """QwenCacheError if nothing can be written to a folder, or conditions are ignored there."""


def check_conditions(store: Store, folder: Url, create: Callable[[Url, bytes], bool]) -> None:
    """QwenCacheError if `create` writes a file that exists, or nothing can be written; leaves nothing behind."""
    file = folder / f".check-{uuid4().hex}"
    store.put(file, b"whether this can be written\n")
    try:
        if create(file, b"whether conditions are ignored\n"):
            raise QwenCacheError(
                "this server ignores the condition of a write, so two builders could commit over each other",
                where=folder,
                do="update the server, or build into a local folder and copy that, cache.json last",
            )
    finally:
        store.delete([file])


def put_around(
    put: Callable[[Url, bytes], None],
    first: Mapping[Url, bytes],
    swapped: Callable[[], bool],
    then: Mapping[Url, bytes],
) -> bool:
    """`Store.swap` of a store that writes one file at a time."""
    for url, data in first.items():
        put(url, data)
    if not swapped():
        return False
    for url, data in then.items():
        put(url, data)
    return True


def swap_version(
    url: Url,
    old: bytes | None,
    new: bytes,
    read: Callable[[Url], tuple[bytes, str] | None],
    write: Callable[[Url, bytes, str | None], bool],
) -> bool:
    """Replace `old` by `new`, where `write` writes over the version that `read` has given, or over none (None).

    An answer may be lost after the file was written, so what is there decides. False if that is neither of the two.
    """
    now = read(url)
    while now is not None or old is None:
        data, version = now or (None, None)
        if data == new:
            return True
        if data != old:
            return False
        if write(url, new, version):
            return True
        now = read(url)
    return False
