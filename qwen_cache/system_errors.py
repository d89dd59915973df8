"""Errors of the operating system as messages: which file, what the system says, and what to do.

An error that is not in the table is taken for a bug of ours, and keeps its traceback.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from qwen_cache.plain_text import one_line, plain

_AGAIN = "then run the same command again: what is complete is kept"
_DISK = f"check the disk (`dmesg` on Linux); copy the file to another disk, {_AGAIN}"
_NETWORK = f"check the network and the mount, {_AGAIN}"
_RIGHTS = "check owner and permissions of the file and its folder, or name a folder that you can write to"
_LOCKS = "this file system lacks something that is needed: use a folder on a local disk"
_DEVICE = f"check that the disk is there and mounted, {_AGAIN}"
_IN_USE = f"close the program that uses it, {_AGAIN}"
_FULL = f"make room, or name a folder on another disk, {_AGAIN}"
_PATH = "check the path: another program may have moved or removed it"

ADVICE = {
    "EACCES": _RIGHTS,
    "EAGAIN": "raise the limit of processes and threads (`ulimit -u`), or end other programs",
    "EBUSY": _IN_USE,
    "ECONNABORTED": _NETWORK,
    "ECONNREFUSED": _NETWORK,
    "ECONNRESET": _NETWORK,
    "EDQUOT": f"your quota is used up: remove files of yours, or ask for more, {_AGAIN}",
    "EEXIST": "move it away, or choose another name",
    "EFBIG": "this file system, or `ulimit -f`, limits the size of files: use another, or raise the limit",
    "EHOSTDOWN": _NETWORK,
    "EHOSTUNREACH": _NETWORK,
    "EILSEQ": "this file system refuses the name: rename the file",
    "EIO": _DISK,
    "EISDIR": "a folder has this name: move it away, or choose another name",
    "ELOOP": "symbolic links lead to each other here: remove one of them",
    "EMFILE": "raise the limit of open files (`ulimit -n 4096`)",
    "EMLINK": "too many hard links: copy the folder to another file system",
    "ENAMETOOLONG": "choose a shorter name or a folder with a shorter path",
    "ENETUNREACH": _NETWORK,
    "ENFILE": "the whole system has too many open files: end other programs, or raise fs.file-max",
    "ENODEV": _DEVICE,
    "ENOENT": _PATH,
    "ENOLCK": _LOCKS,
    "ENOMEM": "close other programs, or use a machine with more memory",
    "ENOSPC": _FULL,
    "ENOSYS": _LOCKS,
    "ENOTCONN": _NETWORK,
    "ENOTDIR": "a file is where a folder should be: move it away, or choose another path",
    "ENOTEMPTY": "move what is in this folder away, or choose another",
    "ENOTSUP": _LOCKS,
    "EOPNOTSUPP": _LOCKS,
    "ENXIO": _DEVICE,
    "EPERM": _RIGHTS,
    "EREMOTEIO": _NETWORK,
    "EROFS": "this file system is read-only: name a folder on another",
    "ESTALE": f"the server has removed or replaced this file: mount the folder again, {_AGAIN}",
    "ETIMEDOUT": _NETWORK,
    "ETXTBSY": _IN_USE,
    "EXDEV": "use folders on one file system",
}
"""What to do about an error, by its name in `errno`; a system may lack some."""

_WINDOWS = {
    19: "EROFS",  # ERROR_WRITE_PROTECT
    21: "ENODEV",  # ERROR_NOT_READY
    23: "EIO",  # ERROR_CRC
    29: "EIO",  # ERROR_WRITE_FAULT
    30: "EIO",  # ERROR_READ_FAULT
    31: "EIO",  # ERROR_GEN_FAILURE
    32: "EBUSY",  # ERROR_SHARING_VIOLATION
    33: "EBUSY",  # ERROR_LOCK_VIOLATION
    39: "ENOSPC",  # ERROR_HANDLE_DISK_FULL
    53: "ENETUNREACH",  # ERROR_BAD_NETPATH
    55: "ENODEV",  # ERROR_DEV_NOT_EXIST
    59: "ENETUNREACH",  # ERROR_UNEXP_NET_ERR
    64: "ECONNRESET",  # ERROR_NETNAME_DELETED
    121: "ETIMEDOUT",  # ERROR_SEM_TIMEOUT
    123: "EILSEQ",  # ERROR_INVALID_NAME
    206: "ENAMETOOLONG",  # ERROR_FILENAME_EXCED_RANGE
    1117: "EIO",  # ERROR_IO_DEVICE
    1224: "EBUSY",  # ERROR_USER_MAPPED_FILE
    1295: "EDQUOT",  # ERROR_DISK_QUOTA_EXCEEDED
    1450: "ENOMEM",  # ERROR_NO_SYSTEM_RESOURCES
    1455: "ENOMEM",  # ERROR_COMMITMENT_LIMIT: the paging file is too small
    1921: "ELOOP",  # ERROR_CANT_RESOLVE_FILENAME
}
"""Errors of Windows (winerror.h) that Python gives another name in `errno`, or EINVAL."""


FULL = (errno.ENOSPC, errno.EDQUOT)
"""Errors of a full disk, and of a quota that is used up."""


def message_of(error: OSError | MemoryError) -> str | None:
    """The message for an error of the system; None for an error that no user can cause."""
    if isinstance(error, MemoryError):
        found = f" ({plain(one_line(str(error)))})" if str(error) else ""
        return f"not enough memory{found}\n  → {ADVICE['ENOMEM']}"
    name = _WINDOWS.get(getattr(error, "winerror", None) or 0) or errno.errorcode.get(error.errno or 0, "")
    if name not in ADVICE:
        return None
    return f"{_place(error)}: {plain(one_line(error.strerror or name))}\n  → {ADVICE[name]}"


def _place(error: OSError) -> str:
    """The file that the error names; not every call of the system knows it."""
    name = error.filename
    return "reading or writing" if name is None or isinstance(name, int) else plain(os.fsdecode(name))


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError inside names `path`, as those of reading and writing an open file do not."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise
