"""Functions that macOS and Windows lack or refuse, hidden or refused on Linux, since nothing else can be tried here.

One process without `fcntl` and its like, without the signals and calls that only some systems have, imports the core
and runs its commands; the rest asks `storage.files` for what it promises when a system refuses.
"""

from __future__ import annotations

import errno
import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from qwen_cache import QwenCacheError, open_cache
from qwen_cache.errors import SourceError
from qwen_cache.format import directory
from qwen_cache.format.update import read_existing
from qwen_cache.options import write_utf8
from qwen_cache.storage import files
from qwen_cache.storage.files import LockHeldError, NoLocksError, locked
from qwen_cache.storage.remote import Copy
from qwen_train.inference import images
from qwen_train.run import Requests, Signals

from .support.caches import contents
from .support.commands import run
from .support.paths import ROOT

EXAMPLE = ROOT / "schemas" / "examples" / "valid" / "cache.v1"

WITHOUT = """
import contextlib, fcntl, importlib, io, json, os, pkgutil, signal, sys, warnings

flock, exclusive, only_try = fcntl.flock, fcntl.LOCK_EX, fcntl.LOCK_NB
for name in ("fcntl", "resource", "pwd", "grp", "termios"):
    sys.modules[name] = None
for module, names in (
    (signal, ("SIGUSR1", "SIGUSR2", "SIGHUP", "pause")),
    (os, ("SEEK_HOLE", "SEEK_DATA", "posix_fadvise", "posix_fallocate", "sched_getaffinity", "pwrite", "pread")),
    (os, ("O_CLOEXEC", "O_NOFOLLOW", "statvfs", "sysconf", "sysconf_names", "mkfifo")),
):
    for name in names:
        delattr(module, name)
warnings.filterwarnings("ignore", "only soft file lock")  # of filelock; its soft locks are never used
said = {}

import qwen_cache
imported = [f"qwen_cache.{name}" for name in ("terminal", "extras", "batching")]
for part in ("settings", "html", "storage", "format"):
    package = importlib.import_module(f"qwen_cache.{part}")
    imported += [f"qwen_cache.{part}.{module.name}" for module in pkgutil.iter_modules(package.__path__)]
imported += [f"qwen_cache.cli.{name}" for name in ("doctor", "gc", "inspect", "merge", "verify")]
for name in imported:
    importlib.import_module(name)
said["modules"] = len(imported)
said["torch"] = "torch" in sys.modules

def command(*arguments):
    sys.argv = ["qwen-cache", *arguments]
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            qwen_cache.cli.main()
        except SystemExit as leaving:
            return [leaving.code, out.getvalue(), err.getvalue()]

folder = sys.argv[1]
said["verify"] = command("verify", folder)
said["inspect"] = command("inspect", folder, "--json")
said["gc without locks"] = command("gc", folder)

import filelock, qwen_cache.storage.files
os_open, os_link = os.open, os.link

def lock(descriptor, blocking):  # in place of Windows' own
    with contextlib.suppress(BlockingIOError):
        flock(descriptor, exclusive | only_try)
        return True
    return False

def opened(path, *arguments, **options):
    if os.path.isdir(path):
        raise PermissionError(13, "Permission denied", path)
    return os_open(path, *arguments, **options)

def link(*_, **__):
    raise OSError(1, "Operation not permitted")

filelock.lock_descriptor, filelock.unlock_descriptor = lock, lambda descriptor: None
qwen_cache.storage.files.WINDOWS, os.open, os.link = True, opened, link
for name in ("gc", "migrate", "verify", "inspect"):
    said[f"{name} as on Windows"] = command(name, *(("v1", "v2") if name == "migrate" else ()), folder)
said["left"] = command("gc", folder, "--json")

from fsspec.implementations.memory import MemoryFileSystem
from qwen_cache.format.cache import RemoteShards
MemoryFileSystem().put(folder, "/cache", recursive=True)
fetched, fetch = [], RemoteShards._fetch
RemoteShards._fetch = lambda self, row, copy: (fetched.append(row.meta.key), fetch(self, row, copy))
for _ in range(2):
    cache = qwen_cache.open_cache("memory://cache", local_copies=folder + " of others")
    said["remote"] = [bytes(sample.buffer("image_latents")).hex() for sample in cache]
    cache.shards.copies.evict()
said["fetched"], said["samples"] = len(fetched), len(cache)
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The output of a process that has only functions that all systems have."""
    folder = tmp_path_factory.mktemp("without") / "shards"
    shutil.copytree(EXAMPLE, folder)
    arguments = [sys.executable, "-c", WITHOUT, str(folder)]
    done = subprocess.run(arguments, capture_output=True, text=True, encoding="utf-8", check=False)
    assert done.returncode == 0, done.stderr
    return {"folder": folder, **json.loads(done.stdout)}


# ---- with what all systems have --------------------------------------------------------------------------------------


def test_the_core_starts_and_reads(without: dict[str, Any]) -> None:
    assert without["modules"] > 20
    assert not without["torch"]
    for name in ("verify", "inspect", "gc as on Windows", "migrate as on Windows", "verify as on Windows"):
        code, _, message = without[name]
        assert code == 0, f"{name}: {message}"
    assert json.loads(without["inspect"][1])["recipes"]


def test_without_locks_of_the_kernel_nothing_is_written(without: dict[str, Any]) -> None:
    """There is no lock file instead: a killed process would leave it behind."""
    code, _, message = without["gc without locks"]
    assert code == 2
    assert "files cannot be locked here, so two writers could not be kept apart" in message
    assert "→ write to a local disk" in message


def test_a_change_without_folder_syncs_and_links_is_the_same_change(without: dict[str, Any], tmp_path: Path) -> None:
    shutil.copytree(EXAMPLE, tmp_path / "shards")
    assert run("qwen-cache", "migrate", "v1", "v2", tmp_path / "shards").code == 0
    assert contents(without["folder"]) == contents(tmp_path / "shards")


def test_local_copies_know_what_was_fetched_without_holes(without: dict[str, Any]) -> None:
    assert without["remote"] == [bytes(sample.buffer("image_latents")).hex() for sample in open_cache(EXAMPLE)]
    assert without["fetched"] == without["samples"], "the second cache reads the copies of the first"


def test_a_sample_that_was_not_stored_completely_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entry = read_existing(EXAMPLE, 1).rows.row(1).entry
    copy, pwrite = Copy(tmp_path / "shard.part", entry.offset + entry.length), os.pwrite

    def torn(file: int, data: memoryview, begin: int) -> int:
        if len(data) == 5:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(file, data[:-5], begin)

    assert not copy.has(entry.offset)
    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", torn)
        with pytest.raises(QwenCacheError, match="No space left"):
            copy.write(entry.offset, memoryview(b"x" * entry.length))
    assert copy.data[entry.offset + 1] == ord("x")
    assert not copy.has(entry.offset)
    copy.write(entry.offset, memoryview(b"x" * entry.length))
    assert copy.has(entry.offset)


# ---- locks -----------------------------------------------------------------------------------------------------------

HOLDER = """
import sys
from pathlib import Path
from qwen_cache.storage.files import locked

with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process, which holds the lock of the folder."""
    arguments = [sys.executable, "-c", HOLDER, str(tmp_path / ".lock")]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_lock_ends_with_a_killed_process(tmp_path: Path, holder: subprocess.Popen[str]) -> None:
    path = tmp_path / ".lock"
    inode = path.stat().st_ino
    with pytest.raises(LockHeldError, match=f"^process {holder.pid} on {os.uname().nodename}$"), locked(path):
        pytest.fail("two hold the lock")
    result = run("qwen-cache", "gc", tmp_path)
    assert result.code == 2
    assert f"another process is writing to this cache (found process {holder.pid} on " in result.stderr
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert path.stat().st_size, "the killed process cleaned up, so it was not killed"
    with locked(path), pytest.raises(LockHeldError, match=f"process {os.getpid()}"), locked(path):
        pytest.fail("two hold the lock")
    assert [each.name for each in tmp_path.iterdir()] == [".lock"]
    assert (path.stat().st_ino, path.stat().st_size) == (inode, 0), "who waits for another file waits for nobody"


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_refused(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(NoLocksError), locked(tmp_path / "lock"):
        pytest.fail("there is no lock")
    with pytest.raises(QwenCacheError, match="cannot be locked here") as error, directory.writing(tmp_path / "shards"):
        pytest.fail("there is no lock")
    assert error.value.found == os.strerror(number)


def test_a_lock_is_not_taken_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("years of work", encoding="utf-8")
    (tmp_path / ".lock").symlink_to(tmp_path / "mine")
    with pytest.raises(OSError, match="symbolic links"), locked(tmp_path / ".lock"):
        pytest.fail("the lock was taken")
    assert (tmp_path / "mine").read_text(encoding="utf-8") == "years of work"


# ---- files in use, as Windows sees them ------------------------------------------------------------------------------


@pytest.fixture
def in_use(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Inodes that no call renames, replaces or removes, on a system that syncs no folder."""
    used: set[int] = set()
    replace, unlink, open_ = os.replace, os.unlink, os.open

    def check(path: Path, **options: Any) -> None:
        if os.path.lexists(path) and os.lstat(path).st_ino in used:
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))

    def refusing_replace(source: Path, target: Path) -> None:
        check(source)
        check(target)
        replace(source, target)

    def refusing_unlink(path: Path, *, dir_fd: int | None = None) -> None:
        if os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_ino in used:
            raise PermissionError(errno.EACCES, "The process cannot access the file", str(path))
        unlink(path, dir_fd=dir_fd)

    def refusing_open(path: Any, flags: int, *arguments: Any, **options: Any) -> int:
        if not options and flags == os.O_RDONLY and os.path.isdir(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_(path, flags, *arguments, **options)

    monkeypatch.setattr(files, "WINDOWS", True)
    monkeypatch.setattr(os, "replace", refusing_replace)
    monkeypatch.setattr(os, "unlink", refusing_unlink)
    monkeypatch.setattr(os, "open", refusing_open)
    return used


def tars(folder: Path) -> dict[str, bytes]:
    """The shards of a cache; the bytes of its index depend on the version of pyarrow, and so does the manifest."""
    return {name: data for name, data in contents(folder).items() if name.endswith(".tar")}


def test_shards_that_a_run_reads_stay_until_it_is_done(
    in_use: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Migrate and back while a run maps the first shards: nothing fails, and the shards that it reads stay."""
    monkeypatch.setattr(files, "WAITS", ())
    shards = tmp_path / "shards"
    shutil.copytree(EXAMPLE, shards)
    old = sorted(path.name for path in shards.glob("*.tar"))
    mapped, index = {(shards / name).stat().st_ino for name in old}, (shards / "index.parquet").stat().st_ino
    in_use.update(mapped, [index])
    assert run("qwen-cache", "migrate", "v1", "v2", shards).code == 0
    assert len(open_cache(shards)) == len(open_cache(EXAMPLE))
    assert len(list(shards.glob("index-*.parquet"))) == 1, "the index of the manifest waits for its name"
    in_use.remove(index)
    assert {path.name for path in shards.glob("*.tar")} > set(old)
    assert json.loads(run("qwen-cache", "gc", shards, "--json").stdout)["files"] == {}
    assert run("qwen-cache", "migrate", "v2", "v1", shards).code == 0
    assert tars(shards).items() >= tars(EXAMPLE).items()
    assert {(shards / name).stat().st_ino for name in old} == mapped
    in_use.clear()
    assert run("qwen-cache", "gc", shards).code == 0
    assert tars(shards) == tars(EXAMPLE)
    assert run("qwen-cache", "verify", shards).code == 0


def test_a_file_that_is_read_for_a_moment_is_waited_for(
    in_use: set[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.json"
    path.write_bytes(b"old")
    in_use.add(path.stat().st_ino)
    waited: list[float] = []
    monkeypatch.setattr(files.time, "sleep", waited.append)
    with pytest.raises(PermissionError) as error:
        files.write_durably(path, b"new")
    assert error.value.filename == str(path)
    assert waited == list(files.WAITS)
    assert [each.name for each in tmp_path.iterdir()] == ["cache.json"]
    assert path.read_bytes() == b"old"
    monkeypatch.setattr(files.time, "sleep", lambda _: in_use.clear())
    files.write_durably(path, b"new")
    assert path.read_bytes() == b"new"


def test_on_other_systems_a_refusal_is_an_immediate_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(files, "WINDOWS", False)
    monkeypatch.setattr(files.time, "sleep", lambda _: pytest.fail("waited"))
    for path in (tmp_path / "a", tmp_path / "b"):
        path.write_bytes(b"")
    with pytest.raises(PermissionError), files.unless_in_use():
        refuse()
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        for rename in (files.replace, files.move):
            with pytest.raises(PermissionError):
                rename(tmp_path / "a", tmp_path / "b")
    with monkeypatch.context() as patch:
        patch.setattr(os, "open", refuse)
        with pytest.raises(PermissionError):
            files.sync_folder(tmp_path)


# ---- on the disk -----------------------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_linked_is_copied_and_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    synced: list[int] = []
    fsync = os.fsync
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "fsync", lambda file: (synced.append(os.fstat(file).st_ino), fsync(file)))
    (tmp_path / "a").write_bytes(b"shard")
    files.link_or_copy(tmp_path / "a", tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == b"shard"
    assert synced == [(tmp_path / "b").stat().st_ino] != [(tmp_path / "a").stat().st_ino]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


def test_a_folder_replaces_a_folder_once_all_of_it_is_on_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = tmp_path / "transformer"
    final.mkdir()
    (final / "old").touch()
    synced: set[int] = set()
    fsync, replace = os.fsync, os.replace

    def rename(source: Path, target: Path) -> None:
        if source.name.endswith(".tmp"):
            assert {each.stat().st_ino for each in (source, *source.rglob("*"))} <= synced
        replace(source, target)

    monkeypatch.setattr(os, "fsync", lambda file: (synced.add(os.fstat(file).st_ino), fsync(file)))
    monkeypatch.setattr(os, "replace", rename)
    with pytest.raises(FileNotFoundError), files.whole_folder(final) as folder:
        (folder / "missing" / "new").touch()
    assert [path.name for path in tmp_path.rglob("*")] == ["transformer", "old"]
    with files.whole_folder(final) as folder:
        (folder / "below").mkdir()
        (folder / "below" / "new").write_bytes(b"weights")
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["below", "new", "transformer"]
    assert tmp_path.stat().st_ino in synced


@pytest.mark.parametrize(("fails", "expected"), [(False, ["fcntl 51"]), (True, ["fcntl 51", "fsync"])])
def test_macos_syncs_to_the_disk_itself_where_it_can(
    fails: bool, expected: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def control(file: int, number: int) -> None:
        asked.append(f"fcntl {number}")
        if fails:
            raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr(files, "fcntl", SimpleNamespace(F_FULLFSYNC=51, fcntl=control))
    monkeypatch.setattr(os, "fsync", lambda _: asked.append("fsync"))
    with open(tmp_path / "file", "wb") as file:
        files.sync(file)
    assert asked == expected


def test_a_sparse_file_gets_the_disk_space_it_needs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "posix_fallocate")
    size = 2 * files.BLOCK + 5
    with open(tmp_path / "table", "wb") as file:
        file.truncate(size)
    files.allocate(tmp_path / "table")
    after = (tmp_path / "table").stat()
    assert after.st_size == size
    assert after.st_blocks * 512 >= size


# ---- names, signals, text --------------------------------------------------------------------------------------------


def test_the_users_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On Linux it is the folder of earlier versions."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    assert files.cache_home() == tmp_path / "mine" / "qwen-cache"
    monkeypatch.setenv("HOME", str(tmp_path))
    for unset in ("", None):
        monkeypatch.setenv("XDG_CACHE_HOME", "") if unset == "" else monkeypatch.delenv("XDG_CACHE_HOME")
        assert files.cache_home() == tmp_path / ".cache" / "qwen-cache"


def test_junctions_count_as_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / ".replaced").mkdir()
    assert not files.is_link(tmp_path / ".replaced")
    stat = SimpleNamespace(st_mode=(tmp_path / ".replaced").lstat().st_mode, st_reparse_tag=0xA0000003)
    monkeypatch.setattr(Path, "lstat", lambda _: stat)
    assert files.is_link(tmp_path / ".replaced")


def test_a_run_stops_on_the_signals_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    number = signal.SIGUSR2
    monkeypatch.delattr(signal, "SIGUSR1")
    monkeypatch.delattr(signal, "SIGUSR2")
    monkeypatch.setattr(signal, "SIGBREAK", number, raising=False)
    before = signal.getsignal(number)
    with Signals() as signals:
        assert not signals.stop
        os.kill(os.getpid(), number)
        assert signals.stop
    assert signal.getsignal(number) == before
    with Requests() as requests:
        assert not requests.take("SIGUSR1")


def test_names_that_windows_takes_for_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    assert images.checked_name("cats/a:b") == "cats/a:b"
    monkeypatch.setattr(images, "WINDOWS", True)
    assert images.checked_name("cats/a") == "cats/a"
    with pytest.raises(SourceError, match=r"a:b\?: Windows does not allow this file name.*\n  → rename it"):
        images.checked_name("a:b?")


def test_output_is_utf8_whatever_the_system_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="cp1252", errors="backslashreplace")
    monkeypatch.setattr(sys, "stdout", stream)
    write_utf8()
    print("然后", end="", flush=True)
    assert raw.getvalue() == "然后".encode()
    assert stream.errors == "backslashreplace"
