"""What is written durably, and what systems do differently about it: Linux, macOS and Windows.

A file or folder has its name when it is whole and on the disk, or not at all. A lock belongs to the kernel, so it ends
with its process, however that ends; where there are no such locks, locking is an error: a lock file that a killed
process leaves behind would keep everybody out. Windows refuses to rename or remove a file that some process has open or
mapped, and syncs no folder.
"""

from __future__ import annotations

import os
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import IO

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

WINDOWS = sys.platform == "win32"
WAITS = (0.01, 0.05, 0.2, 0.5, 1.0)  # seconds: a virus scanner or a reader of the old file needs a fraction of one
JUNCTION = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT: a link to a folder on Windows, which is no symbolic link
APP = "qwen-cache"
BLOCK = 1 << 20


# ---- whole or not there ----------------------------------------------------------------------------------------------


def write_durably(path: Path, data: bytes) -> None:
    """Replace `path` by `data`: on disk before it gets its name, never partial under it; nothing stays of a failure."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        sync(file)


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A place to write and sync a file, which then replaces `path`; nothing stays of a failure.

    `shared`: other processes may write the same file at the same time, each at a place of its own. An OSError names
    `path`.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp" if shared else f".{path.name}.tmp")
    try:
        yield temporary
        replace(temporary, path)
    except BaseException as error:
        with suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    sync_folder(path.parent)


@contextmanager
def whole_folder(path: Path) -> Iterator[Path]:
    """A new folder to fill, which is then synced and replaces `path`; nothing stays of an error.

    What a kill leaves is removed by the next one.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        yield temporary
        for each in temporary.rglob("*"):
            (sync_folder if each.is_dir() else sync_file)(each)
        sync_folder(temporary)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)  # what it took of the disk may be what others lack
        raise
    shutil.rmtree(path, ignore_errors=True)
    replace(temporary, path)
    sync_folder(path.parent)


def replace(source: Path, target: Path) -> None:
    """Rename, in place of what has the name; on Windows wait for whoever reads that, for about two seconds."""
    for wait in WAITS if WINDOWS else ():
        try:
            os.replace(source, target)
        except PermissionError:
            time.sleep(wait)
        else:
            return
    os.replace(source, target)


def move(source: Path, target: Path) -> None:
    """Rename a file whose name is its content; where Windows refuses that because it is in use, link or copy it."""
    with unless_in_use():
        os.replace(source, target)
        return
    link_or_copy(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Make the immutable file `source` available as `target`: without a copy where the file system allows it."""
    if target.exists():
        return
    try:
        os.link(source, target)  # under its name at once: Windows renames no second name of a file in use either
    except OSError:
        temporary = target.with_name(f".{target.name}.tmp")
        with open(source, "rb") as original, open(temporary, "wb") as copy:
            shutil.copyfileobj(original, copy, BLOCK)
            copy.flush()
            sync(copy)
        os.replace(temporary, target)


@contextmanager
def unless_in_use() -> Iterator[None]:
    """Leave a file as it is where Windows refuses to rename or remove it because a process has it open or mapped."""
    try:
        yield
    except PermissionError:
        if not WINDOWS:
            raise


def is_link(path: Path) -> bool:
    """Whether a symbolic link, or a junction of Windows, has this name."""
    try:
        return path.is_symlink() or getattr(path.lstat(), "st_reparse_tag", 0) == JUNCTION
    except OSError:
        return False


# ---- on the disk -----------------------------------------------------------------------------------------------------


def sync(file: IO[bytes] | int) -> None:
    """Have what was written on the disk. On macOS fsync stops at the disk's own memory, and F_FULLFSYNC does not."""
    descriptor = file if isinstance(file, int) else file.fileno()
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):  # a network disk knows fsync alone
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Have a file on the disk that other code has written."""
    with open(path, "r+b") as file:  # Windows syncs what is open for writing
        sync(file)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; Windows cannot open a folder, and does it by itself."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if WINDOWS:
            return
        raise
    try:
        sync(descriptor)
    finally:
        os.close(descriptor)


def allocate(path: Path) -> None:
    """Have the disk's room for a sparse file: to write through a mapping to a full disk kills the process (SIGBUS).

    OSError where the disk is full. Where the system has no such call, the file is filled with zeros.
    """
    with open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for begin in range(0, size, BLOCK):
            file.write(bytes(min(BLOCK, size - begin)))


# ---- one writer at a time --------------------------------------------------------------------------------------------


class LockHeldError(Exception):
    """Another process has the lock; `holder` says which."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


class NoLocksError(OSError):
    """The system or the file system cannot lock files."""


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Lock the file `path`, which stays: until the end of the block, or of the process, however it ends.

    Raises LockHeldError at once when another process has the lock, NoLocksError where the kernel cannot lock this file,
    and OSError where the path is a symbolic link.
    """
    from filelock import lock_descriptor, unlock_descriptor  # the kernel's lock of an open file, and nothing else of it

    with open(path, "a+b", opener=_open_no_link) as file:
        try:
            free = lock_descriptor(file.fileno(), blocking=False)
        except OSError as error:
            raise NoLocksError(error.errno, error.strerror, str(path)) from None
        if not free:
            raise LockHeldError(_holder(file))
        try:
            file.truncate(0)
            file.write(f"\nprocess {os.getpid()} on {socket.gethostname()}".encode())
            file.flush()
            yield
            file.truncate(0)
        finally:
            unlock_descriptor(file.fileno())


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _holder(file: IO[bytes]) -> str:
    """Who has the lock, as it says in the file: behind the first byte, which Windows lets nobody else read."""
    file.seek(1)
    return file.read().decode("utf-8", "replace").strip() or "unknown"


# ---- the user's folder -----------------------------------------------------------------------------------------------


def cache_home() -> Path:
    """The user's folder for what can be made again: in XDG_CACHE_HOME where that is set, else where the system has it.

    That is ~/.cache on Linux, ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / APP
    from platformdirs import user_cache_path

    return user_cache_path(APP, appauthor=False)


_SEEKING = Lock()


def write_at(file: int, begin: int, data: bytes | memoryview) -> None:
    """Write at `begin`, from any number of threads."""
    left = memoryview(data)
    while left:
        written = os.pwrite(file, left, begin) if hasattr(os, "pwrite") else _seek_and_write(file, begin, left)
        left, begin = left[written:], begin + written


def _seek_and_write(file: int, begin: int, data: memoryview) -> int:
    """As `pwrite`, which Windows lacks; a fork, which could leave the lock to nobody, it lacks as well."""
    with _SEEKING:
        os.lseek(file, begin, os.SEEK_SET)
        return os.write(file, data)
