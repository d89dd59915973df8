"""Programs in processes of their own that need not import torch, diffusers and transformers again.

A fork server, which runs this file, has imported all that our programs import, and forks a child for each. It computes
nothing and has one thread: after a backward pass, or with threads, a fork of torch hangs, because the child lacks the
threads that the parent's pools and locks know. Its children are not those of the tests, so it waits for them, and tells
how they ended and how much CPU time they took. The first worker of pytest that needs it starts it for all of them; it
ends with the last.

`popen` and `run` are those of `subprocess`. What a fork cannot do starts truly: other programs, options of Python, and
an environment that differs in what is read when Python or a library starts. A test has to say `fresh=True` (or use
`subprocess`) if it is about what a program imports, or how much memory it takes. A forked program shares its seed of
`hash` with the others, and /proc shows the command line and environment of the fork server.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from os.path import abspath
from pathlib import Path
from types import ModuleType
from typing import Any

from filelock import FileLock

from .paths import ROOT
from .waiting import HANG

IMPORTED = (
    *("qwen_cache.cli.build", "qwen_cache.encode.build", "qwen_cache.encode.check", "qwen_cache.service.engine"),
    *("qwen_cache.format.verify", "qwen_cache.encode.vae", "qwen_cache.encode.lanes", "qwen_cache.service.app"),
    *("qwen_train.cli", "qwen_train.inference.predict", "qwen_train.training.start", "qwen_train.train"),
    *("qwen_train.inference.generator", "qwen_train.inference.images", "qwen_train.inference.pipeline"),
    "diffusers.models.autoencoders.autoencoder_kl_qwenimage",
    "diffusers.models.transformers.transformer_qwenimage",
    "diffusers.models.transformers.transformer_qwenimage21",
    "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl",
    "transformers.models.qwen2_5_vl.processing_qwen2_5_vl",
    *("accelerate", "pandas", "peft", "peft.tuners.lora.bnb"),
)
"""The modules that a build, a run, a prediction and a server import."""
WITHOUT_THREADS = {"JE_ARROW_MALLOC_CONF": "background_thread:false", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Importing pyarrow starts no thread, and importing bitsandbytes no CUDA, of which a fork has no use."""
READ_AT_START = (
    *("ACCELERATE_", "ARROW_", "ATEN_", "BNB_", "CUBLAS_", "CUDA_", "DIFFUSERS_", "DNNL_", "FORCE_COLOR", "FSSPEC_"),
    *("GITHUB_", "GLIBC_", "GOMP_", "HF_", "HOME", "HUGGINGFACE_", "JE_", "KMP_", "LANG", "LC_", "LD_", "MALLOC_"),
    *("MKL_", "NVIDIA_", "OMP_", "ONEDNN_", "OPENBLAS_", "PEFT_", "PYTHON", "PYTORCH_", "PY_COLORS", "SAFETENSORS_"),
    *("TERMINAL_WIDTH", "TOKENIZERS_", "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_", "TRANSFORMERS_", "USE_", "XDG_"),
)
"""The first letters of variables that are read when Python starts, or a library is imported."""
SET_BY_PROGRAMS = {
    ("DIFFUSERS_VERBOSITY", "error"),
    ("KMP_DUPLICATE_LIB_OK", "True"),
    ("KMP_INIT_AT_FORK", "FALSE"),
    ("PYTHON_COLORS", "0"),
    ("TOKENIZERS_PARALLELISM", "false"),
    ("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1"),
    ("TRANSFORMERS_VERBOSITY", "error"),
}
"""Which programs and libraries set themselves, also in the process of the tests."""
READ_WHEN_USED = {"PYTHONUNBUFFERED", "TORCHINDUCTOR_CACHE_DIR", "XDG_CACHE_HOME"}
"""huggingface_hub derives its folder from the last at import, but uses it only online, where tests set HF_HOME too."""
OPTIONS = {"cwd", "creationflags", "encoding", "start_new_session", "stderr", "stdin", "stdout", "text"}
"""Arguments of `subprocess.Popen` that a fork has too."""
GREETING = struct.Struct("qd")
"""The fork server's number, and the CPU time of its imports for the process that started it."""
ALONE = 1.0
"""Seconds after which a fork server ends that no process is connected to: workers do not all start at once."""
PROGRAMS = [str(Path(sys.executable).with_name(name)) for name in ("qwen-cache", "qwen-train")]


# ---- the side of the tests -------------------------------------------------------------------------------------------


class ForkServer:
    """The fork server whose address is in `folder`, as this process sees it; it starts with the first program."""

    def __init__(self, imported: Sequence[str], folder: Path) -> None:
        self.imported, self.folder, self.environment = imported, folder, dict(os.environ)
        self.pid = 0
        self.control: socket.socket | None = None

    def can_fork(self, argv: Sequence[str], environment: Mapping[str, str], options: Mapping[str, object]) -> bool:
        """True if the program cannot tell a fork from a start."""
        program, first, *_ = *argv, "-"
        is_python = program == sys.executable and (first in ("-c", "-m") or not first.startswith("-"))
        if not (is_python or program in PROGRAMS) or not options.keys() <= OPTIONS:
            return False
        different = (environment.items() ^ self.environment.items()) - SET_BY_PROGRAMS
        return not any(name.startswith(READ_AT_START) and name not in READ_WHEN_USED for name, _ in different)

    def fork(self, program: tuple[object, ...], descriptors: list[int]) -> Connection:
        """Over which the child's number comes, and at its end its exit code; with either, the CPU time."""
        if self.control is None:
            with FileLock(self.folder / "fork_server.lock"):
                self.control = self._found() or self._started()
        ours, to_child = Pipe()
        with to_child:
            socket.send_fds(self.control, [b"\0"], [*descriptors, to_child.fileno()])
        ours.send(program)
        return ours

    def _found(self) -> socket.socket | None:
        """Connected to the one that runs; None if there is none, or the last of its processes has just left."""
        control = socket.socket(socket.AF_UNIX)
        with suppress(OSError, struct.error):
            control.connect((self.folder / "fork_server").read_text(encoding="utf-8"))
            self.pid, seconds = GREETING.unpack(control.recv(GREETING.size))
            _count(seconds)
            return control
        control.close()
        return None

    def _started(self) -> socket.socket:
        """Connected to a new one, which is no child of this process and may outlive it."""
        with socket.socket(socket.AF_UNIX) as listener:
            address = str(Path(tempfile.mkdtemp()) / "s")  # a short one: it has at most 107 bytes
            listener.bind(address)
            listener.listen()
            environment = self.environment | WITHOUT_THREADS
            command = [sys.executable, "-m", __name__, *self.imported]
            subprocess.run(
                command, cwd=ROOT, env=environment, stdin=listener, stdout=subprocess.DEVNULL, check=True, timeout=HANG
            )
        (self.folder / "fork_server").write_text(address, encoding="utf-8")
        control = self._found()
        assert control, "the fork server ended"
        return control

    def received(self, connection: Connection) -> int:
        number, seconds = connection.recv()
        _count(seconds)
        return int(number)

    def close(self) -> None:
        if self.control:
            self.control.close()
            self.control = None


_server: ForkServer | None = None
_forked = 0.0
"""User and system time of finished children, and of the imports of fork servers that this process started."""


def _count(seconds: float) -> None:
    global _forked
    _forked += seconds


@contextmanager
def forking(folder: Path, imported: Sequence[str] = IMPORTED) -> Iterator[ForkServer]:
    """Fork inside the block the programs that have the environment of now; processes with one folder share a server."""
    global _server
    before, _server = _server, ForkServer(imported, folder)
    server = _server
    try:
        yield server
    finally:
        _server = before
        server.close()


def cpu_seconds() -> float:
    """User and system time of this process, its finished children, and those that the fork server forked for it."""
    return sum(os.times()[:4]) + _forked


class Forked(subprocess.Popen[Any]):
    """`subprocess.Popen` of a child of the fork server; pipes, their reading and time limits stay those of the base."""

    def _execute_child(self, *given: Any) -> None:
        assert _server
        self._server, (cwd, environment), pipes = _server, given[5:7], given[10:16]
        descriptors = [
            number if pipe == -1 else pipe for number, pipe in enumerate((pipes[0], pipes[3], pipes[5]))
        ]  # without a pipe, those of this process
        program = (self.args, os.fspath(cwd or os.getcwd()), dict(environment or os.environ), given[-2])
        self._connection = _server.fork(program, descriptors)
        self.pid = _server.received(self._connection)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _wait(self, timeout: float | None) -> int:
        if self.returncode is None:
            if not self._connection.poll(timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = self._server.received(self._connection)
            self._connection.close()
        return self.returncode

    def _internal_poll(self, *_: object, **__: object) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode


def popen(
    argv: Sequence[str | bytes | Path], *, fresh: bool = False, env: Mapping[str, str] | None = None, **options: Any
) -> subprocess.Popen[Any]:
    """`subprocess.Popen`, forked where the program cannot tell, and not at all with `fresh`."""
    words = list(map(os.fsdecode, argv))
    forked = not fresh and _server and _server.can_fork(words, os.environ if env is None else env, options)
    return (Forked if forked else subprocess.Popen)(words, env=env, **options)


def run(
    argv: Sequence[str | bytes | Path],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float = HANG,
    **options: Any,
) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` by `popen`."""
    if capture_output:
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with popen(argv, **options) as process:
        try:
            outputs = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, *outputs)
    if check:
        done.check_returncode()
    return done


# ---- the side of the fork server -------------------------------------------------------------------------------------


def serve(imported: Sequence[str]) -> list[str]:
    """Fork a child for each message until all workers have ended; returns in the children, with their program."""
    if os.fork():
        os._exit(0)
    from qwen_cache.options import quiet_libraries

    quiet_libraries()  # before they are imported, as in our programs
    for name in imported:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # so that no collection copies what is shared
    listener, clients, children = socket.socket(fileno=0), list[socket.socket](), dict[int, Connection]()
    imports = sum(os.times()[:2])
    child_ended, by_signal = socket.socketpair()
    by_signal.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(by_signal.fileno())
    while True:
        ready, _, _ = select.select([listener, child_ended, *clients], [], [], None if clients else ALONE)
        if child_ended in ready:
            child_ended.recv(1000)
            _send_ends(children)
        elif listener in ready:
            clients.append(listener.accept()[0])
            clients[-1].send(GREETING.pack(os.getpid(), imports))
            imports = 0.0
        elif not ready:
            address = Path(listener.getsockname())
            address.unlink()
            address.parent.rmdir()
            os._exit(0)
        elif descriptors := socket.recv_fds(ready[0], 1, 4)[1]:
            *streams, number = descriptors
            connection = Connection(number)
            if pid := os.fork():
                children[pid] = connection
                _send(connection, pid, 0.0)
                for stream in streams:
                    os.close(stream)
            else:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                listener.detach()  # the child's standard input takes its number
                for each in (child_ended, by_signal, *clients, *children.values()):
                    each.close()
                return _become(connection, streams)
        else:
            clients.remove(ready[0])
            ready[0].close()


def _send_ends(children: dict[int, Connection]) -> None:
    while children and (found := os.wait4(-1, os.WNOHANG))[0]:
        pid, status, usage = found
        connection = children.pop(pid)
        _send(connection, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        connection.close()


def _send(connection: Connection, number: int, seconds: float) -> None:
    with suppress(OSError):  # nobody waits for this child
        connection.send((number, seconds))


def _become(connection: Connection, streams: list[int]) -> list[str]:
    """Take over what a process gets from the one that starts it, and forget what this one remembers."""
    import numpy as np

    argv, cwd, environment, is_new_session = connection.recv()
    connection.close()
    if is_new_session:
        os.setsid()
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    is_unbuffered = bool(environment.get("PYTHONUNBUFFERED"))
    for number, (stream, name) in enumerate(zip(streams, ("stdin", "stdout", "stderr"), strict=True)):
        os.dup2(stream, number)
        os.close(stream)
        old, is_output = getattr(sys, name), number > 0
        binary = os.fdopen(number, "wb" if is_output else "rb", 0 if is_unbuffered and is_output else -1, closefd=False)
        by_line = os.isatty(number) or (name == "stderr" and not is_unbuffered)
        new = TextIOWrapper(binary, old.encoding, old.errors, None, by_line, is_unbuffered and is_output)
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
    time.tzset()
    tempfile.tempdir = None
    importlib.invalidate_caches()
    np.random.seed()
    return list(argv)


def execute(argv: list[str]) -> None:
    """Run `-c code`, `-m module` or a file as Python does.

    The end without an exception skips what takes Python longest, and no program needs: taking all modules down.
    """
    _, *words = argv if argv[0] == sys.executable else ("", *argv)
    sys.orig_argv[:] = [sys.executable, *words]
    try:
        sys.modules["__main__"] = main = ModuleType("__main__")
        match words:
            case "-c", text, *arguments:
                sys.argv, sys.path[0] = ["-c", *arguments], ""
                exec(compile(text, "<string>", "exec"), main.__dict__)
            case "-m", module, *arguments:
                sys.argv, sys.path[0] = ["-m", *arguments], os.getcwd()
                runpy.run_module(module, run_name="__main__", alter_sys=True)
            case path, *_:
                sys.argv, sys.path[0], main.__file__ = words, os.path.dirname(os.path.realpath(path)), abspath(path)
                exec(compile(Path(path).read_bytes(), main.__file__, "exec"), main.__dict__)
        code = 0
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        code = end.code or 0
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__):
        if stream and not stream.closed:
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    execute(serve(sys.argv[1:]))
