"""Files opened and mapped without trusting their names.

Opening never waits for a pipe. The opened file is checked, not its name, so nothing can be exchanged in between.
A mapping holds no file descriptor, so any number of shards can be mapped, and views of them kept; it ends with its last
view.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import stat
import sys
import weakref
from functools import cache
from pathlib import Path
from typing import Any

from qwen_cache.storage.durable import WINDOWS
from qwen_cache.system_errors import naming

POPULATE_READ = 22  # MADV_POPULATE_READ, Linux 5.14: reads pages as an access does, but fails where that gets SIGBUS
UNREADABLE = (errno.EFAULT, getattr(errno, "EHWPOISON", 133))


class NotAFileError(OSError):
    """The path is a folder, a pipe, a socket, a device, or a symbolic link where none is followed."""

    def __init__(self, path: Path) -> None:
        super().__init__(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path, *, follow_links: bool = True) -> int:
    """A descriptor of the regular file at `path`, for reading; NotAFileError for anything else."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
    try:
        file = os.open(path, flags if follow_links else flags | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        other = error.errno == errno.ENXIO or (not follow_links and error.errno == errno.ELOOP)
        if other or (error.errno == errno.EACCES and path.is_dir()):  # a socket, a link, a folder on Windows
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
    """Whether the file of mapped, non-empty `data` no longer reaches to its end; reading it would end the process.

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
