"""An error of the operating system ends a command with a message: the file, what the system says, what to do.

Each is raised where a file is read or written, under the real command line. Bugs of ours keep their traceback.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from qwen_cache.format.shard import ShardWriter
from qwen_cache.storage.files import whole_file
from qwen_cache.terminal import ADVICE, message_of

from .support.commands import refused, run
from .support.paths import ROOT

EXAMPLES = ROOT / "schemas" / "examples" / "valid"
EXAMPLE = EXAMPLES / "cache.v2"


def failing(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def system_error(number: int) -> OSError:
    """The error that reads and writes of an open file raise: without a name."""
    return OSError(number, os.strerror(number))


@pytest.mark.fast_cases(12)
@pytest.mark.parametrize("name", sorted(ADVICE.keys() - {"ENOENT"}))
def test_reading(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    number = getattr(errno, name)
    monkeypatch.setattr("qwen_cache.storage.files.open_file", failing(system_error(number)))
    advice = ADVICE[errno.errorcode[number]]  # some numbers have two names
    result = run("qwen-cache", "verify", EXAMPLE)
    refused(result, f"error: {EXAMPLE}/cache.json: {os.strerror(number)}\n  → {advice}\n")


class FailingFile:
    """An open file of which one call fails."""

    def __init__(self, file: Any, call: str, error: OSError) -> None:
        self.file, self.call, self.error = file, call, error

    def __getattr__(self, name: str) -> Any:
        return failing(self.error) if name == self.call else getattr(self.file, name)


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("call", ["write", "flush", "fsync", "index"])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.ESTALE])
def test_writing(call: str, number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is named, nothing is left under a final name, and the same command then does it."""
    out, error, begin = tmp_path / "out", system_error(number), ShardWriter.__init__

    def opened(self: ShardWriter, *arguments: Any) -> None:
        begin(self, *arguments)
        self.file = FailingFile(self.file, call, error)  # type: ignore[assignment]

    arguments = ["migrate", "v1", "v2", EXAMPLES / "cache.v1", "--out", out]
    with monkeypatch.context() as patch:
        if call in ("write", "flush"):
            patch.setattr(ShardWriter, "__init__", opened)
        elif call == "fsync":
            patch.setattr(os, "fsync", failing_for_files(error))
        else:
            patch.setattr("qwen_cache.format.directory.write_durably", failing_at_the_name(error))
        result = run("qwen-cache", *arguments)
    place, name = (f"{out}/index-", ".parquet") if call == "index" else (f"{out}/.staging/", "/open.tar")
    refused(result, f"error: {place}", f"{name}: {os.strerror(number)}\n  → {ADVICE[errno.errorcode[number]]}\n")
    assert not (out / "cache.json").exists()
    assert run("qwen-cache", *arguments).code == 0
    assert run("qwen-cache", "verify", out).code == 0


def failing_for_files(error: OSError) -> Any:
    """`os.fsync` of a disk that syncs folders alone."""
    fsync = os.fsync

    def sync(file: int) -> None:
        if not stat.S_ISDIR(os.fstat(file).st_mode):
            raise error
        fsync(file)

    return sync


def failing_at_the_name(error: OSError) -> Any:
    """`write_durably` on a disk that takes the bytes and then not the new name."""

    def write(path: Path, data: bytes) -> None:
        with whole_file(path) as temporary:
            temporary.write_bytes(data)
            raise error

    return write


@pytest.mark.parametrize("text", ["", "Unable to allocate 3.00 TiB\nfor an array"])
def test_no_memory_is_no_bug(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qwen_cache.storage.files.open_file", failing(MemoryError(text) if text else MemoryError()))
    found = " (Unable to allocate 3.00 TiB for an array)" if text else ""
    refused(run("qwen-cache", "verify", EXAMPLE), f"error: not enough memory{found}\n  → close other programs, or")


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EBADF, errno.EFAULT, None])
def test_a_bug_keeps_its_traceback(number: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """None: an error of a library that only calls itself an OSError."""
    error = system_error(number) if number else OSError("cannot identify the image")
    monkeypatch.setattr("qwen_cache.storage.files.open_file", failing(error))
    with pytest.raises(OSError, match=r"Invalid argument|Bad file descriptor|Bad address|cannot identify"):
        run("qwen-cache", "verify", EXAMPLE)


class WindowsError(OSError):
    """The error that Windows raises; the numbers are of winerror.h."""

    def __init__(self, winerror: int, number: int, text: str) -> None:
        super().__init__(number, text, "C:\\cache\\x.tar")
        self.winerror = winerror


@pytest.mark.parametrize(
    ("winerror", "number", "name"),
    [
        (23, errno.EACCES, "EIO"),
        (32, errno.EACCES, "EBUSY"),
        (1117, errno.EINVAL, "EIO"),
        (1224, errno.EINVAL, "EBUSY"),
        (1295, errno.EINVAL, "EDQUOT"),
        (1455, errno.EINVAL, "ENOMEM"),
        (112, errno.ENOSPC, "ENOSPC"),
        (5, errno.EACCES, "EACCES"),
    ],
)
def test_windows(winerror: int, number: int, name: str) -> None:
    """Python gives many of its errors the same number, or that of a bug."""
    error = WindowsError(winerror, number, "as Windows says")
    assert message_of(error) == f"C:\\cache\\x.tar: as Windows says\n  → {ADVICE[name]}"
