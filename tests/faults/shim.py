"""The shim (`shim.c`) around the calls of libc that read and write files: compiled once, loaded by LD_PRELOAD.

Rust and C++ go through libc too. Four things are not seen: what the kernel does with a mapping, `fopen` beyond opening,
system calls that a library makes itself (Rust's `tempfile` renames so, within safetensors' `save_file`), and
`io_uring`; sendfile and copy_file_range are refused for watched files, as by file systems without them.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from filelock import FileLock

SOURCE = Path(__file__).with_name("shim.c")
FOLDER = Path(__file__).parents[2] / ".simulated-device"  # what tests compile
COMMAND = ("-std=gnu2x", "-O1", "-fPIC", "-shared", "-D_GNU_SOURCE", "-U_FORTIFY_SOURCE", "-ldl", "-lpthread")
SHORT = -1
"""In place of an errno: half of the bytes are read or written."""


def obstacle() -> str | None:
    """Why system calls cannot be made to fail here; None if they can."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return "the shim is written for Linux with glibc"
    return None if compiler() else "there is no C compiler in PATH"


def compiler() -> str | None:
    return shutil.which("cc") or shutil.which("gcc") or shutil.which("g++")


def build() -> Path:
    """The compiled shim; RuntimeError with the compiler's messages if it refuses the source."""
    key = "\n".join((SOURCE.read_text(encoding="utf-8"), str(compiler()), *COMMAND))
    library = FOLDER / hashlib.sha256(key.encode()).hexdigest()[:16] / "shim.so"
    library.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(library.with_suffix(".lock")):
        if not library.exists():
            unfinished = library.with_suffix(f".{os.getpid()}")
            call = [str(compiler()), "-x", "c", str(SOURCE), *COMMAND, "-o", str(unfinished)]
            process = subprocess.run(call, capture_output=True, text=True)
            if process.returncode:
                raise RuntimeError(f"{call[0]} refuses {SOURCE}:\n{process.stderr}")
            unfinished.replace(library)
    return library


def preloaded(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run this Python with the shim, in the project's root."""
    environment = {**os.environ, "LD_PRELOAD": str(build()), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=FOLDER.parent, env=environment, capture_output=True, text=True
    )


class Shim:
    """The shim in this process; RuntimeError without it."""

    def __init__(self) -> None:
        if "shim.so" not in os.environ.get("LD_PRELOAD", ""):
            raise RuntimeError("the shim is not loaded")
        self.library = ctypes.CDLL(None)
        self.library.shim_fail.argtypes = (ctypes.c_long, ctypes.c_int, ctypes.c_int)
        self.library.shim_failed.restype = ctypes.c_char_p

    def watch(self, folders: Iterable[Path]) -> None:
        """See the calls on files in these folders, and no others."""
        self.library.shim_watch(":".join(map(str, folders)).encode())

    def fail(self, number: int, error: int, *, onwards: bool = False) -> None:
        """Make the call of this number, counted from 1 and from now on, fail with `error`; `onwards`: and all later
        ones of its kind. With ENOSPC and EDQUOT those are calls that need space."""
        self.library.shim_fail(number, error, int(onwards))

    def failed(self) -> str:
        """The call that failed, and its path; "" if there was none."""
        return str((self.library.shim_failed() or b"").decode("utf-8", "replace"))

    def list_calls(self, descriptor: int) -> None:
        """Write a line for each call to a file that is not watched; -1: no more."""
        self.library.shim_list(descriptor)

    def record(self, descriptor: int) -> None:
        """Append each call that changes something to a file that is not watched (`record.py` reads it)."""
        self.library.shim_record(descriptor)

    def mark(self, text: str) -> None:
        """Put a remark into the record."""
        self.library.shim_mark(text.encode())


def error_name(error: int) -> str:
    return "half of the bytes" if error == SHORT else errno.errorcode[error]
