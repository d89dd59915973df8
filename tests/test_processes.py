"""A program that is forked does what it does when started; the fork server only forks, and ends with the tests."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from .support.caches import build
from .support.paths import ROOT
from .support.processes import Forked, ForkServer, cpu_seconds, forking, popen, run
from .support.waiting import HANG, wait_until

PROGRAM = str(Path(sys.executable).with_name("qwen-cache"))


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkServer]:
    with forking(tmp_path_factory.mktemp("server"), ("numpy.random", "pyarrow", "torch")) as server:
        yield server


pytestmark = pytest.mark.usefixtures("server")


# ---- as if it were started -------------------------------------------------------------------------------------------

STATE = """
import atexit, os, signal, sys, tempfile, threading, time
print(sorted(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")))
print([(n, signal.getsignal(n)) for n in signal.valid_signals() if n != 2])
print(signal.pthread_sigmask(0, []), signal.set_wakeup_fd(-1))
print(sys.argv, sys.orig_argv, sys.path[0], sys.flags)
print(__name__, sys.modules["__main__"].__dict__ is globals(), "__file__" in globals())
print(sys.stdin.readline(), sys.stdin.seekable(), sys.stdin.isatty(), input())
print([(f.encoding, f.errors, f.line_buffering, f.write_through) for f in (sys.stdin, sys.stdout, sys.stderr)])
print(sorted(os.environ.items()), os.getcwd(), time.tzname)
print(tempfile.gettempdir(), os.getsid(0) == os.getpid())
atexit.register(print, "last")
threading.Timer(0.1, print, ["late"]).start()
print("first")
"""
PROGRAMS = {
    "state": STATE,
    "session": "import os, sys; print(os.getsid(0) == os.getpid()); print('seen', file=sys.stderr); sys.exit(300)",
    "exit with a message": "exit('no')",
    "exception": "1 / 0",
    "SIGINT": "import os, time; os.kill(os.getpid(), 2); time.sleep(1000)",
    "unbuffered": "import os, sys; sys.stdout.write('seen'); sys.stdout.buffer.write(b'too'); os._exit(0)",
    "unfinished line": "import sys; sys.stdout.write('no end'); sys.stdout = None",
}


def both(argv: Sequence[str | Path], **options: Any) -> list[tuple[int, str, str]]:
    """Exit code, output and last line of stderr of the program, forked and started."""
    found = []
    for fresh in (False, True):
        with popen(
            argv, fresh=fresh, text=True, **dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE), **options
        ) as process:
            assert isinstance(process, Forked) is not fresh
            stdout, stderr = process.communicate("one\ntwo\n", timeout=HANG)
        found.append((process.returncode, stdout, stderr.rpartition("\n  File")[2].partition("\n")[2] or stderr))
    return found


@pytest.mark.parametrize("name", PROGRAMS)
def test_code_does_what_it_does_when_started(name: str, tmp_path: Path) -> None:
    environment = os.environ | {"TMPDIR": str(tmp_path), "TZ": "Asia/Tokyo", "COLUMNS": "77"}
    environment["PYTHONUNBUFFERED"] = "1" if name == "unbuffered" else ""
    argv = [sys.executable, "-c", PROGRAMS[name], "an argument", "\udcff"]
    forked, started = both(argv, cwd=tmp_path, env=environment, start_new_session=name == "session")
    assert forked == started
    assert started[0] in (0, 1, 44, -2)
    assert name != "state" or started[1].endswith("first\nlate\nlast\n"), started


SHOWN = "import sys; print(sys.argv, sys.path[0], __name__, __file__, __spec__ and __spec__.name, __package__)"


@pytest.mark.parametrize("argv", [["-m", "package.module", "an argument"], ["package/module.py", "an argument"]])
def test_a_module_and_a_file_too(argv: list[str], tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "module.py").write_text(SHOWN)
    forked, started = both([sys.executable, *argv], cwd=tmp_path)
    assert forked == started
    assert "an argument" in started[1]


def test_our_programs_too() -> None:
    forked, started = both([PROGRAM, "verify", "missing"])
    assert forked == started
    assert started[0] == 2


def test_a_process_is_waited_for_and_ended() -> None:
    echo = "while True: print(input(), flush=True)"
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with popen([sys.executable, "-c", echo], **pipes) as one, popen([sys.executable, "-c", echo], **pipes) as two:
        assert isinstance(one, Forked)
        assert one.pid != two.pid
        for process in (two, one):
            assert process.stdin
            assert process.stdout
            print(process.pid, file=process.stdin, flush=True)
            assert process.stdout.readline() == f"{process.pid}\n"
            assert process.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            one.wait(0.01)
        one.kill()
        assert one.wait(HANG) == -signal.SIGKILL
        assert two.poll() is None
        two.terminate()
        wait_until(lambda: two.poll() is not None)
        assert two.returncode == -signal.SIGTERM
    with pytest.raises(subprocess.TimeoutExpired):
        run([sys.executable, "-c", "import time; time.sleep(1000)"], timeout=0.01)
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", "exit(1)"], check=True)


def test_files_and_the_streams_of_this_process(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with (tmp_path / "out").open("w") as out:
        code = "import sys; print('there'); print('here', file=sys.stderr)"
        assert run([sys.executable, "-c", code], stdout=out, stdin=subprocess.DEVNULL).returncode == 0
    assert (tmp_path / "out").read_text() == "there\n"
    assert capfd.readouterr() == ("", "here\n")
    assert run([sys.executable, "-c", code], capture_output=True).stderr == b"here\n"


COMPUTING = """
import threading, torch
def step():
    weight = torch.ones(200, 200, requires_grad=True)
    (weight @ weight).sum().backward()
    print(int(weight.grad[0, 0]), flush=True)
torch.set_num_threads(2)
step()
thread = threading.Thread(target=step)
thread.start()
thread.join()
"""


def test_several_compute_at_once_with_threads() -> None:
    argv = [sys.executable, "-c", COMPUTING]
    several = [popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate(timeout=HANG) for process in several] == [("400\n400\n", "")] * 3


def test_random_numbers_of_two_processes_differ() -> None:
    argv = [sys.executable, "-c", "import random, numpy; print(random.random(), numpy.random.random())"]
    one, two = (run(argv, capture_output=True, text=True).stdout.split() for _ in range(2))
    assert not set(one) & set(two)


# ---- what is not forked ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "environment", "options", "expected"),
    [
        ((sys.executable, "-c", ""), {"COLUMNS": "9", "RANK": "1", "XDG_CACHE_HOME": "/other"}, {"cwd": "/"}, True),
        ((sys.executable, "file.py"), {}, {}, True),
        ((PROGRAM, "verify"), {}, {}, True),
        ((sys.executable, "-W", "error", "-c", ""), {}, {}, False),
        ((sys.executable, "-S", "file.py"), {}, {}, False),
        ((sys.executable,), {}, {}, False),
        (("sh", "-c", ""), {}, {}, False),
        ((sys.executable, "-c", ""), {"OMP_NUM_THREADS": "3"}, {}, False),
        ((sys.executable, "-c", ""), {"OMP_NUM_THREADS": None}, {}, False),
        ((sys.executable, "-c", ""), {"DIFFUSERS_VERBOSITY": "info"}, {}, False),
        ((sys.executable, "-c", ""), {"LD_PRELOAD": "some.so"}, {}, False),
        ((sys.executable, "-c", ""), {}, {"preexec_fn": print}, False),
    ],
)
def test_what_a_fork_cannot_do_is_started(
    argv: Sequence[str],
    environment: Mapping[str, str | None],
    options: Mapping[str, Any],
    expected: bool,
    server: ForkServer,
) -> None:
    changed = {name: value for name, value in {**os.environ, **environment}.items() if value is not None}
    assert server.can_fork(argv, changed, options) is expected


def test_a_library_sees_a_changed_variable() -> None:
    argv = [
        sys.executable,
        "-c",
        "import os; print(os.environ['OMP_NUM_THREADS'], 'torch' in __import__('sys').modules)",
    ]
    done = [
        run(argv, env=os.environ | {"OMP_NUM_THREADS": number}, fresh=fresh, capture_output=True, text=True).stdout
        for number, fresh in (("1", False), ("1", True), ("3", False))
    ]
    assert done == ["1 True\n", "1 False\n", "3 False\n"]


# ---- the fork server -------------------------------------------------------------------------------------------------


def test_the_time_of_children_is_counted() -> None:
    run([sys.executable, "-c", ""])
    before = cpu_seconds()
    run([sys.executable, "-c", "import time\nwhile time.process_time() < 0.3: pass"])
    assert cpu_seconds() - before > 0.25


def state(pid: int) -> tuple[str, int, str]:
    """The threads, open descriptors and children of a process."""
    folder = Path(f"/proc/{pid}")
    threads = re.findall(r"Threads:\s+(\d+)", (folder / "status").read_text())[0]
    return threads, len(list((folder / "fd").iterdir())), (folder / f"task/{pid}/children").read_text()


def check_forking(server: ForkServer) -> None:
    """Six children, of which two compute, leave nothing in the fork server."""
    modules = [sys.executable, "-c", "import sys; print(*sys.modules)"]
    first = run(modules, capture_output=True).stdout
    before, pid = state(server.pid), server.pid
    assert before[0] == "1"
    for i in range(6):
        run([sys.executable, "-c", "import pathlib" if i % 3 else COMPUTING], capture_output=True, check=True)
    threads, descriptors, children = state(pid)
    assert (threads, children) == ("1", "")
    assert descriptors <= before[1] + 1, "that of the last child may not be closed yet"
    assert run(modules, capture_output=True).stdout == first


def test_it_forks_and_nothing_else(server: ForkServer) -> None:
    check_forking(server)


@pytest.mark.slow
def test_what_a_build_in_this_process_sets_is_no_difference(
    pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path], server: ForkServer
) -> None:
    assert build(pairs, tmp_path / "shards", tiny_model("edit-plus")).code == 0
    assert server.can_fork([PROGRAM], os.environ, {})


@pytest.mark.slow
def test_imports_of_all_that_programs_need_start_no_thread(tmp_path: Path) -> None:
    before = cpu_seconds()
    with forking(tmp_path) as server:
        run([sys.executable, "-c", ""])
        assert cpu_seconds() - before > 1, "the imports are counted"
        check_forking(server)


TESTS = """
import os, pathlib, signal, subprocess, sys
from tests.support.processes import forking, popen

with forking(pathlib.Path(sys.argv[1]), ()) as server:
    child = popen([sys.executable, "-c", "import time; time.sleep(1000)"], stdout=-3, stderr=-3)
    print(server.pid, child.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_it_ends_with_killed_tests(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TESTS, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=HANG
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    pid, child = map(int, done.stdout.split())
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text())
