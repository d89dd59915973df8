"""Files of this machine: atomic and durable writes, locks, folders, and reading through maps."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import shutil
import socket
import stat
import sys
import time
import weakref
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from io import FileIO
from pathlib import Path
from threading import Lock
from typing import IO, Any

from qwen_cache.terminal import naming

# ---- durable ---------------------------------------------------------------------------------------------------------
# Durable writes and locks on Linux, macOS and Windows.
#
# A file or folder gets its name only when it is complete and on the disk. Locks are the kernel's, so a lock ends with
# its process, however that ends. Without kernel locks, locking is an error: the lock file of a killed process would
# lock everybody out. Windows refuses to rename or remove a file that a process has open or mapped, and cannot sync
# folders.

try:
    import fcntl
except ImportError:  # on Windows
    fcntl = None  # type: ignore[assignment]

WINDOWS = sys.platform == "win32"
WAITS = (0.01, 0.05, 0.2, 0.5, 1.0)  # seconds; a virus scanner or a reader of the old file needs less than one
JUNCTION = 0xA0000003  # IO_REPARSE_TAG_MOUNT_POINT: a link to a folder on Windows, not a symbolic link
APP = "qwen-cache"
REMOVED = ".removed.tmp"  # the end of a folder's name that is being removed
BLOCK = 1 << 20


# ---- all or nothing --------------------------------------------------------------------------------------------------


def write_durably(path: Path, *parts: bytes | memoryview) -> None:
    """Write `parts` to `path` atomically, synced before it gets its name; a failure leaves nothing behind."""
    with whole_file(path) as temporary, open(temporary, "wb") as file:
        file.writelines(parts)
        file.flush()
        sync(file)


@contextmanager
def whole_file(path: Path, *, shared: bool = False) -> Iterator[Path]:
    """A temporary path to write and sync a file, which then replaces `path`; a failure leaves nothing behind.

    With `shared`, each process has its own temporary path, so several may write the file at the same time. An OSError
    names `path`.
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
    """A new folder to fill, which is then synced and replaces `path`; an error leaves nothing behind.

    Its files get the rights of all new files: safetensors writes some that only their owner may read. No system
    replaces a folder in one step, so the old one is moved aside first. If the process dies in between, the next call
    gives it its name back; it also removes what a killed process left.
    """
    make_folder(path.parent)
    temporary, old = path.with_name(f".{path.name}.tmp"), path.with_name(f".{path.name}.old")
    _name_again(old, path)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir()
        yield temporary
        for each in temporary.rglob("*"):
            if each.is_dir():
                sync_folder(each)
            else:
                each.chmod(temporary.stat().st_mode & 0o666)
                sync_file(each)
        sync_folder(temporary)
        if path.exists():
            shutil.rmtree(old, ignore_errors=True)
            replace(path, old)
        replace(temporary, path)
    except Exception:
        shutil.rmtree(temporary, ignore_errors=True)  # other writers may need its disk space
        _name_again(old, path)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _name_again(old: Path, path: Path) -> None:
    if old.exists() and not path.exists():
        replace(old, path)


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each durable in its own parent; nothing to do if it exists."""
    if folder.is_dir():
        return
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder)) from None
    with suppress(PermissionError):  # a folder that may be written to but not read cannot be synced
        sync_folder(folder.parent)


def remove_folder(folder: Path) -> None:
    """Remove a folder under another name, so that what a crash leaves of it is not taken for a whole one.

    Also removes what crashes left.
    """
    remove_left(folder.parent)
    removed = folder.with_name(f".{folder.name}{REMOVED}")
    replace(folder, removed)
    shutil.rmtree(removed)


def remove_left(parent: Path) -> None:
    """Remove what crashes left of folders in `parent` that were being removed."""
    for left in parent.glob(f".*{REMOVED}"):
        shutil.rmtree(left, ignore_errors=True)


def replace(source: Path, target: Path) -> None:
    """Rename `source` to `target`, replacing it; on Windows wait about two seconds for readers of the old file."""
    for wait in WAITS if WINDOWS else ():
        try:
            os.replace(source, target)
        except PermissionError:
            time.sleep(wait)
        else:
            return
    os.replace(source, target)


def move(source: Path, target: Path) -> None:
    """Rename a file that is named by its content; where Windows refuses because it is in use, link or copy it."""
    with unless_in_use():
        os.replace(source, target)
        return
    link_or_copy(source, target)


def link_or_copy(source: Path, target: Path) -> None:
    """Make the immutable file `source` available as `target`, without a copy if the file system allows it."""
    if target.exists():
        return
    try:
        os.link(source, target)  # no temporary name: Windows would not rename a link to a file in use
    except OSError:
        temporary = target.with_name(f".{target.name}.tmp")
        with naming(temporary), open(source, "rb") as original, open(temporary, "wb") as copy:
            shutil.copyfileobj(original, copy, BLOCK)
            copy.flush()
            sync(copy)
        os.replace(temporary, target)


def rename_new(source: Path, target: Path) -> None:
    """Rename a file; FileExistsError if the new name is taken, also by a program that takes it meanwhile."""
    try:
        os.link(source, target)  # a rename would replace the file there
    except FileExistsError:
        raise
    except OSError:  # a file system without links
        if os.path.lexists(target):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from None
        replace(source, target)
    else:
        source.unlink()
    for folder in {source.parent, target.parent}:
        sync_folder(folder)


@contextmanager
def unless_in_use() -> Iterator[None]:
    """Ignore that Windows refuses to rename or remove a file that a process has open or mapped; it stays as it is."""
    try:
        yield
    except PermissionError:
        if not WINDOWS:
            raise


def is_link(path: Path) -> bool:
    """True if the path is a symbolic link or a Windows junction."""
    try:
        return path.is_symlink() or getattr(path.lstat(), "st_reparse_tag", 0) == JUNCTION
    except OSError:
        return False


# ---- on the disk -----------------------------------------------------------------------------------------------------


def sync(file: IO[bytes] | int) -> None:
    """Flush a file to the disk. On macOS that takes F_FULLFSYNC: fsync stops at the disk's own cache."""
    descriptor = file if isinstance(file, int) else file.fileno()
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if full is not None:
        with suppress(OSError):  # a network disk may support only fsync
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_file(path: Path) -> None:
    """Flush a closed file to the disk."""
    with naming(path), open(path, "r+b") as file:  # Windows syncs only files that are open for writing
        sync(file)


def sync_folder(folder: Path) -> None:
    """Make renames in `folder` durable; Windows cannot open a folder, and does this itself."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        if WINDOWS:
            return
        raise
    with naming(folder):
        try:
            sync(descriptor)
        finally:
            os.close(descriptor)


def allocate(path: Path) -> None:
    """Reserve disk space for a sparse file: a write through a mapping to a full disk kills the process (SIGBUS).

    OSError if the disk is full. Systems without such a call get a file filled with zeros.
    """
    with naming(path), open(path, "r+b") as file:
        size = os.fstat(file.fileno()).st_size
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size)
            return
        for begin in range(0, size, BLOCK):
            file.write(bytes(min(BLOCK, size - begin)))


# ---- one writer at a time --------------------------------------------------------------------------------------------


class LockHeldError(Exception):
    """Another process, `holder`, has the lock."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        super().__init__(holder)


class NoLocksError(OSError):
    """The system or the file system cannot lock files."""


@contextmanager
def locked(path: Path, *, remove: bool = False) -> Iterator[int]:
    """Hold a lock on the file `path` until the end of the block or of the process, however it ends.

    The file stays, or is removed at the end of the block with `remove`. Programs started meanwhile do not hold the
    lock, except those that inherit the descriptor that this yields: then the last of them ends it. Raises LockHeldError
    immediately when another process has the lock, NoLocksError if the kernel cannot lock this file, and OSError if the
    path is a symbolic link.
    """
    from filelock import lock_descriptor, unlock_descriptor  # only its wrappers of the kernel's lock on an open file

    with ExitStack() as stack:
        if remove and WINDOWS:
            stack.callback(_try_to_remove, path)  # once it is closed
        file = stack.enter_context(_closed(FileIO(str(path), "a+", opener=_open_no_link)))
        try:
            free = lock_descriptor(file.fileno(), blocking=False)
        except OSError as error:
            raise NoLocksError(error.errno, error.strerror, str(path)) from None
        with naming(path):
            if not (free and _is_at(path, file)):
                file.seek(1)  # Windows lets nobody else read the first byte
                raise LockHeldError(file.read().decode("utf-8", "replace").strip() or "unknown")
        try:
            with suppress(OSError):  # the name of the holder is for messages alone: `gc` works on a full disk
                file.truncate(0)
                file.write(f"\nprocess {os.getpid()} on {socket.gethostname()}".encode())
            yield file.fileno()
        finally:
            if remove and not WINDOWS:
                _try_to_remove(path)  # while it is locked: who opens it later opens another file
            with suppress(OSError):  # closing the file unlocks it, too
                file.truncate(0)
                unlock_descriptor(file.fileno())


@contextmanager
def _closed(file: FileIO) -> Iterator[FileIO]:
    """Close a file of which nothing is kept, so its errors are not of interest."""
    try:
        yield file
    finally:
        with suppress(OSError):
            file.close()


def _try_to_remove(path: Path) -> None:
    with suppress(OSError):  # on Windows a process may have it open; a lock file that stays locks nobody out
        path.unlink()


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """True if the file is still the one at `path`; its last holder may just have removed it."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _open_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


# ---- the user's folder -----------------------------------------------------------------------------------------------


def cache_home() -> Path:
    """The user's folder for files that can be made again: in XDG_CACHE_HOME if set, else the folder of the system.

    The system's is ~/.cache on Linux, ~/Library/Caches on macOS, %LOCALAPPDATA% on Windows.
    """
    if named := os.environ.get("XDG_CACHE_HOME"):
        return Path(named) / APP
    from platformdirs import user_cache_path

    return user_cache_path(APP, appauthor=False)


_SEEKING = Lock()


def write_at(file: int, begin: int, data: bytes | memoryview) -> None:
    """Write `data` at offset `begin`; safe from any number of threads."""
    rest = memoryview(data)
    while rest:
        written = os.pwrite(file, rest, begin) if hasattr(os, "pwrite") else _seek_and_write(file, begin, rest)
        rest, begin = rest[written:], begin + written


def _seek_and_write(file: int, begin: int, data: memoryview) -> int:
    """Like `pwrite`, which Windows lacks. The lock is safe there: without fork, no child inherits it locked."""
    with _SEEKING:
        os.lseek(file, begin, os.SEEK_SET)
        return os.write(file, data)


def allow_descriptors(wanted: int) -> int:
    """Let this process open `wanted` files and sockets, or as many as the system allows; returns how many.

    Windows has no such limit.
    """
    if sys.platform == "win32":
        return wanted
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return wanted
    highest = wanted if hard == resource.RLIM_INFINITY else min(hard, wanted)
    with suppress(ValueError, OSError):  # macOS states a higher limit than it grants
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        return highest
    return soft


# ---- mapped ----------------------------------------------------------------------------------------------------------
# Files opened and mapped without trusting their names.
#
# Opening never waits for a pipe. The opened file is checked, not its name, so nothing can be exchanged in between. A
# mapping holds no file descriptor, so any number of shards can be mapped, and views of them kept; it ends with its last
# view.

POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: reads pages as an access does, but fails where that gets SIGBUS
UNREADABLE = (errno.EFAULT, getattr(errno, "EHWPOISON", 133))


class NotAFileError(OSError):
    """The path is a folder, a pipe, a socket, a device, or a symbolic link where none is followed."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path | str, *, follow_links: bool = True) -> int:
    """A descriptor of the regular file at `path`, for reading; NotAFileError for anything else."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(path, flags if follow_links else flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        other = error.errno == errno.ENXIO or (not follow_links and error.errno == errno.ELOOP)
        if other or (error.errno == errno.EACCES and os.path.isdir(path)):  # a socket, a link, a folder on Windows
            raise NotAFileError(path) from None
        raise
    with naming(path):
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise NotAFileError(path)
        except OSError:
            os.close(file)
            raise
    return file


def read_file(path: Path, size: int = -1) -> bytes:
    """The bytes of a regular file, at most the first `size`; NotAFileError for anything else. An OSError names it."""
    with naming(path), open(open_file(path), "rb") as file:
        return file.read(size)


def map_file(path: Path, *, follow_links: bool = True) -> memoryview:
    """The bytes of a regular file, mapped copy-on-write because torch warns of tensors over read-only memory."""
    file = open_file(path, follow_links=follow_links)
    with naming(path):
        try:
            size = os.fstat(file).st_size
            if not size:  # the system refuses to map an empty file
                return memoryview(b"")
            if WINDOWS:  # handles are not limited there
                return memoryview(mmap.mmap(file, size, access=mmap.ACCESS_COPY))
            return _mapped(file, size)
        finally:
            os.close(file)


def _mapped(file: int, size: int) -> memoryview:
    """`mmap.mmap` would keep a copy of the descriptor; from Python 3.13 on, `trackfd=False` does the same."""
    address = _libc().mmap(None, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE, file, 0)
    if address == ctypes.c_void_p(-1).value:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    pages = (ctypes.c_ubyte * size).from_address(address)
    weakref.finalize(pages, _libc().munmap, address, size).atexit = False  # views may outlive the interpreter's exit
    return memoryview(pages).cast("B")


def is_cut_short(data: memoryview) -> bool:
    """True if the file of mapped, non-empty `data` no longer reaches to its end; reading it would end the process.

    Asks for the last page alone, in 1 µs. False wherever the system cannot tell: before Linux 5.14, on macOS, and for
    memory that is not mapped. A disk that fails on another page still ends the process (SIGBUS).
    """
    if sys.platform != "linux" or data.readonly or not data.nbytes:
        return False
    last = ctypes.addressof(ctypes.c_ubyte.from_buffer(data, data.nbytes - 1))
    failed = _libc().madvise(last - last % mmap.PAGESIZE, 1, POPULATE_READ)
    return bool(failed) and ctypes.get_errno() in UNREADABLE


@cache
def _libc() -> Any:
    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    number = ctypes.c_int
    library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number, number, number, ctypes.c_long]
    library.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    library.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, number]
    return library
