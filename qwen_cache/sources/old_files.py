"""The old versions of a source's files: kept before an edit, listed, put back, and an edit undone as a whole.

A file is replaced whole, after the old one was copied into a folder of its own, by the time of the edit. Nothing is
written through a link, outside the source's folder, or over a file that was not looked at.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from qwen_cache.errors import SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.storage.files import (
    LockHeldError,
    link_or_copy,
    locked,
    make_folder,
    rename_new,
    replace,
    sync,
    sync_folder,
)
from qwen_cache.terminal import naming

PATIENCE = 10.0
"""Seconds to wait for another program's edit, which takes a fraction of one."""
LARGE_COPY, MOST_COPIES = 1_000_000, 1_000_000_000
"""Bytes of a copy that makes older ones go, and of those that stay. Every edit copies a table, whatever its size."""
WRITERS = 16  # files that are synced at once: the disk then writes many together
STAMP = "%Y-%m-%dT%H-%M-%S"
VERSION = re.compile(r"(\d{4}-\d\d-\d\dT\d\d-\d\d-\d\d)-\d+")
"""The name of a version: when the file was replaced, in UTC, and a number."""


class ChangedError(SourceError):
    """A row or file is no longer as it was looked at."""

    def __init__(self, what: str, where: object) -> None:
        super().__init__(f"{what} was changed meanwhile", where=where, do="reload the source, and repeat the edit")


@dataclass(frozen=True)
class OldVersion:
    """A file as it was until `time`, in seconds since 1970."""

    name: str
    time: float
    copy: Path


@dataclass(frozen=True)
class Written:
    """The files that an edit has replaced, so that it can be undone."""

    files: Mapping[Path, tuple[Path | None, str | None]] = field(default_factory=dict)
    """By file the copy of the old one, None if there was none; and the hash of the new one, None if it was removed."""
    moved: tuple[Path, Path] | None = None
    """The old and the new name of a file."""


@dataclass
class OldFiles:
    """The folder of a source, and the one for copies of what is replaced there."""

    root: Path
    kept: Path
    written: Written | None = field(default=None, init=False)
    """The last edit."""

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Alone with the source, among programs that edit it by this module."""
        lock, end = self.root / f".{name}edit.lock", time.monotonic() + PATIENCE
        while True:
            try:
                with locked(lock, remove=True):
                    yield
                    return
            except LockHeldError as error:
                if time.monotonic() > end:
                    do = "try again when it has ended"
                    raise SourceError(f"{error.holder} is editing this source", where=self.root, do=do) from None
                time.sleep(0.02)
            except PermissionError as error:
                do = "change its rights, or edit a copy"
                raise SourceError("this folder cannot be written to", where=self.root, do=do) from error

    def place(self, path: Path) -> Path:
        """The path below the source's folder; SourceError if it leads out of it, or cannot be written."""
        root, parent = self.root.resolve(), path.parent.resolve()
        if not parent.is_relative_to(root):
            do = "edit the file where it is, or copy it into the source"
            raise SourceError("this is outside the source's folder", where=path, expected=root, found=parent, do=do)
        if path.is_symlink():
            do = "edit the file that it leads to, or replace the link by a copy"
            raise SourceError("this is a link, which is not written through", where=path, do=do)
        if path.exists() and not path.is_file():
            raise SourceError("this is not a file", where=path, do="remove it")
        if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
            raise SourceError("this file is read-only", where=path, do="change its rights, or edit a copy")
        return parent.relative_to(root) / path.name

    # ---- writing -----------------------------------------------------------------------------------------------------

    def write(self, files: Mapping[Path, bytes | None]) -> None:
        """Replace files, in this order, once all old ones are kept; None removes one."""
        old = {path: bytes_of(path) for path in files}
        changed = {path: data for path, data in files.items() if data is None or old[path] != data}
        for path in changed:
            self.place(path)
        copies = self.keep([path for path in changed if old[path] is not None])
        _replace({path: data for path, data in changed.items() if data is not None})
        for path, data in changed.items():
            if data is None:
                path.unlink()
        hashes = {path: None if data is None else content_hash(data) for path, data in changed.items()}
        self.written = Written({path: (copies.get(path), hashes[path]) for path in changed}) if changed else None

    def keep(self, paths: Sequence[Path]) -> dict[Path, Path]:
        """Copy files that are replaced next; by file its copy."""
        if not paths:
            return {}
        folder, size = self._new_folder(), 0
        copies = {path: folder / self.place(path) for path in paths}
        for path, copy in copies.items():
            make_folder(copy.parent)
            link_or_copy(path, copy)  # a file is replaced, never written into
            size += copy.stat().st_size
        for each in {copy.parent for copy in copies.values()}:
            sync_folder(each)
        if size > LARGE_COPY:
            self._remove_old_copies(folder)
        return copies

    def _remove_old_copies(self, newest: Path) -> None:
        """Down to `MOST_COPIES` bytes, the oldest first; the first copy of each file, its original, and the newest
        stay."""
        copies = [path for path in self.kept.rglob("*") if path.is_file()]
        size, seen = sum(path.stat().st_size for path in copies), set[Path]()
        for path in sorted(copies, key=lambda path: (path.stat().st_mtime_ns, path)):
            place = Path(*path.relative_to(self.kept).parts[1:])
            if size > MOST_COPIES and place in seen and not path.is_relative_to(newest):
                size -= path.stat().st_size
                path.unlink()
                with suppress(OSError):  # other files were copied with it
                    path.parent.rmdir()
            seen.add(place)

    def _new_folder(self) -> Path:
        make_folder(self.kept)
        stamp, number = time.strftime(STAMP, time.gmtime()), 1
        while True:
            try:
                (folder := self.kept / f"{stamp}-{number}").mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder

    def move(self, old: Path, new: Path) -> None:
        """Give a file another name; SourceError if that one is taken."""
        for path in (old, new):
            self.place(path)
        if not old.is_file():
            raise ChangedError("this file", old)
        is_same = old.name.lower() == new.name.lower() and new.exists() and old.samefile(new)  # other capitals
        if os.path.lexists(new) and not is_same:
            do = "keep the right one of both"
            raise SourceError("a file of this name is there already", where=new, found=old.name, do=do)
        make_folder(new.parent)
        if is_same:
            replace(old, new)
        else:
            rename_new(old, new)
        self.written = Written(moved=(old, new))

    # ---- going back --------------------------------------------------------------------------------------------------

    def versions(self, paths: Iterable[Path]) -> dict[Path, list[OldVersion]]:
        """The old versions of files, the newest first."""
        wanted = {path: self._place_of(path) for path in paths}
        found: dict[Path, list[OldVersion]] = {path: [] for path in wanted}
        with suppress(FileNotFoundError), os.scandir(self.kept) as entries:
            names = sorted((entry.name for entry in entries if VERSION.fullmatch(entry.name)), reverse=True)
            for name in names:
                for path, place in wanted.items():
                    if place is not None and (copy := self.kept / name / place).is_file():
                        found[path].append(OldVersion(name, _time_of(name), copy))
        return found

    def _place_of(self, path: Path) -> Path | None:
        root, parent = self.root.resolve(), path.parent.resolve()
        return parent.relative_to(root) / path.name if parent.is_relative_to(root) else None

    def restore(self, path: Path, version: str, seen: str | None) -> None:
        """Write an old version of a file over the one that has the hash `seen`, None if there is none."""
        if hash_of(path) != seen:
            raise ChangedError("this file", path)
        copy = next((each.copy for each in self.versions([path])[path] if each.name == version), None)
        if copy is None:
            raise SourceError("this version is not kept", where=path, found=version, do="choose one that is listed")
        self.write({path: copy.read_bytes()})

    def undo(self, written: Written) -> None:
        """Put back what an edit replaced; ChangedError if a file is no longer as the edit left it."""
        if written.moved:
            old, new = written.moved
            self.move(new, old)
            return
        files: dict[Path, bytes | None] = {}
        for path, (copy, left) in written.files.items():
            if hash_of(path) != left:
                raise ChangedError("this file", path)
            if copy is not None and not copy.is_file():
                what, do = "the old version is not kept any more", "choose one of the older versions of this file"
                raise SourceError(what, where=path, do=do)
            files[path] = None if copy is None else copy.read_bytes()
        self.write(files)


def bytes_of(path: Path) -> bytes | None:
    """The bytes of a file; None if there is none."""
    return path.read_bytes() if path.is_file() else None


def hash_of(path: Path) -> str | None:
    """The content hash of a file; None if there is none."""
    data = bytes_of(path)
    return None if data is None else content_hash(data)


def _time_of(name: str) -> float:
    return datetime.strptime(name.rpartition("-")[0], STAMP).replace(tzinfo=UTC).timestamp()


def _replace(files: Mapping[Path, bytes]) -> None:
    """Give files new bytes, and the rights of the old ones: each is whole at any time, and on the disk at the end."""
    temporary = {path: path.with_name(f".{path.name}.tmp") for path in files}
    try:
        with ThreadPoolExecutor(WRITERS, "writing") as pool:
            list(pool.map(_prepare, files, temporary.values(), files.values()))
        for path, written in temporary.items():
            with naming(path):
                replace(written, path)
    except BaseException:
        for path in temporary.values():
            with suppress(OSError):
                path.unlink()
        raise
    for folder in {path.parent for path in files}:
        sync_folder(folder)


def _prepare(path: Path, temporary: Path, data: bytes) -> None:
    make_folder(path.parent)
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with naming(path), open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        sync(file)
    if mode is not None:
        temporary.chmod(mode)
