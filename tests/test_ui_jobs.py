"""Jobs of the UI: processes that outlive it, the order in which they start, and what a user does with them.

Small programs stand in for the commands. Where a process is killed, the judge is what the folder says afterwards.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from threading import Event, Thread
from types import SimpleNamespace
from typing import Any, cast

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from qwen_cache.errors import ConfigError, JobError, OutdatedError
from qwen_cache.service.http import RefusedError, answer, as_json
from qwen_cache.storage.files import locked
from qwen_train.ui.app import errors_json
from qwen_train.ui.gpus import Gpus
from qwen_train.ui.job import (
    ENDED,
    JOB,
    LOCK,
    OUTPUT,
    OUTPUT_BYTES,
    PROGRESS,
    STARTED,
    Command,
    Job,
    NoJobError,
    began,
    read_job,
    write_json,
)
from qwen_train.ui.jobs import Checks, Device, Found, KnownDevices, Queue, job_routes, to_start

from .support.browser import chromium, new_page
from .support.ui import attentive, enter, served
from .support.waiting import wait_until

STAND_IN = """
import os, pathlib, signal, sys, time
here = pathlib.Path()
what, *arguments = sys.argv[1:]

def log(*_):
    with open("log", "a") as file:
        file.write(" ".join([what, *arguments]) + "\\n")

def pause():
    time.sleep(0.02)
    os.stat(__file__)  # what outlives a failed test ends when its folder is removed

if what == "say":
    sys.stdout.write(arguments[0])
    sys.stderr.buffer.write(bytes.fromhex(arguments[1]))
elif what == "fail":
    print("reading", file=sys.stderr)
    print("error: no such thing\\n  -> give another", file=sys.stderr)
    sys.exit(2)
elif what == "wait":  # until a file is there
    signal.signal(signal.SIGUSR1, lambda *_: (here / "saved").touch())
    signal.signal(signal.SIGUSR2, lambda *_: (here / "sampled").touch())
    log()
    while not (here / arguments[0]).exists():
        pause()
elif what == "stop":  # on the first SIGINT, save and end; or only on SIGTERM
    stops = []
    signal.signal(signal.SIGINT, lambda *_: stops.append(1))
    (here / "ready").touch()
    while not stops or arguments == ["late"]:
        pause()
    sys.exit(130)
elif what == "family":  # a child in a session of its own, as torchrun starts them
    import subprocess
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    pathlib.Path("child").write_text(str(child.pid))
    time.sleep(1000)
elif what == "--standalone":  # torchrun, with a worker in a session of its own
    import subprocess
    signal.signal(signal.SIGINT, lambda *_: (here / "passed on").touch())
    sys.exit(subprocess.Popen([sys.executable, *sys.orig_argv[1:3], "worker"], start_new_session=True).wait())
elif what == "worker":
    stops = []
    signal.signal(signal.SIGINT, lambda *_: stops.append(1))
    signal.signal(signal.SIGUSR1, lambda *_: (here / "saved").touch())
    log()
    while not stops:
        pause()
    sys.exit(130)
"""


@pytest.fixture
def starts(tmp_path: Path) -> Iterator[dict[str, Sequence[str]]]:
    program = tmp_path / "stand_in.py"
    program.write_text(STAND_IN, encoding="utf-8")
    with attentive():
        yield dict.fromkeys(("qwen-cache", "qwen-train", "torchrun"), (sys.executable, "-S", str(program)))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "project").mkdir()
    return tmp_path / "project"


@pytest.fixture
def queue(folder: Path, starts: dict[str, Sequence[str]]) -> Iterator[Queue]:
    queue = Queue(folder, starts)
    with queue:
        yield queue
    for job in queue.list():  # what a failed test leaves
        if job.is_active:
            queue.kill(job.id)


def add(queue: Queue, *arguments: str, on: str = "", kind: str = "build") -> str:
    return queue.add(" ".join(arguments), kind, Command("qwen-cache", arguments), on.split()).id


def wait_for(queue: Queue, id: str, *states: str) -> Job:
    wait_until(lambda: queue.get(id).state in states)
    return queue.get(id)


def wait_for_pid(queue: Queue, id: str) -> int:
    wait_until(lambda: queue.get(id).pid)
    return queue.get(id).pid or 0


def supervisor_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# ---- one job ---------------------------------------------------------------------------------------------------------


def test_a_job_runs_in_the_folder_and_keeps_what_it_printed(queue: Queue, folder: Path) -> None:
    id = add(queue, "say", '{"a": [1]}', "\x1b[31mred\x1b[0m \xe9\r20 %\r100 %\n\x07".encode("latin-1").hex())
    job = wait_for(queue, id, "done")
    assert (job.code, job.workplace) == (0, folder)
    assert job.created <= (job.started or 0) <= (job.ended or 0)
    assert queue.result(id) == {"a": [1]}
    output = queue.output(id)
    assert output.text == "red \N{REPLACEMENT CHARACTER}\n20 %\n100 %\n\\x07"
    assert (output.skipped, queue.output(id, output.next).text) == (0, "")


def test_a_command_is_shown_as_a_user_types_it() -> None:
    one = Command("qwen-train", ["run", "--set", "train.output_dir=my run"], {"CUDA_VISIBLE_DEVICES": "0,1"})
    assert one.line == "CUDA_VISIBLE_DEVICES=0,1 qwen-train run --set 'train.output_dir=my run'"
    two = Command("qwen-train", ["run"], processes=2)
    assert two.line == "torchrun --standalone --nproc-per-node 2 -m qwen_train run"
    assert two.argv()[:3] == [sys.executable, "-m", "torch.distributed.run"]


@pytest.mark.parametrize("text", ["a\0b", "\ud800"], ids=ascii)
def test_a_text_that_no_command_takes_is_refused(queue: Queue, folder: Path, text: str) -> None:
    command = Command("qwen-train", ["predict", "--prompt", text])
    for run in (lambda: queue.add("Generate", "generate", command), lambda: Checks(folder).check(command)):
        with pytest.raises(ConfigError, match="cannot take this text"):
            run()
    assert queue.list() == []


def test_a_real_command_runs_without_modules_of_the_folder(folder: Path) -> None:
    """And gives its error and its progress; a checkout's own file of that name would end it."""
    (folder / "typer.py").write_text("raise SystemExit(3)", encoding="utf-8")
    with Queue(folder) as queue:
        job = queue.add("Verify", "verify", Command("qwen-cache", ["verify", "nowhere"]))
        job = wait_for(queue, job.id, "failed")
    assert job.code == 2
    assert "nowhere" in job.to_json()["error"]
    assert job.error().startswith("error: ")
    assert (job.progress() or {}).get("what", "verifying") == "verifying"


def test_a_failed_job_has_its_error_and_holds_up_no_other(queue: Queue) -> None:
    failed, after = add(queue, "fail", on="cpu"), add(queue, "say", "text", "", on="cpu")
    assert wait_for(queue, failed, "failed").code == 2
    assert queue.get(failed).error() == "error: no such thing\n  -> give another"
    assert wait_for(queue, after, "done").error() == ""
    assert queue.result(after) == "text"
    again = queue.again(failed, ["say", "", ""])
    assert (again.title, again.devices, again.id != failed) == ("fail", ("cpu",), True)
    assert wait_for(queue, again.id, "done").command.arguments == ("say", "", "")


def test_a_program_that_cannot_be_started_is_a_failed_job(folder: Path) -> None:
    with Queue(folder, {"qwen-cache": ["/no/such/program"]}) as queue:
        job = wait_for(queue, add(queue, "build"), "failed")
    assert job.code == 127
    assert job.error() == "error: /no/such/program: No such file or directory"


def test_output_of_any_size_is_read_in_parts(queue: Queue, folder: Path) -> None:
    id = add(queue, "say", "", "")
    file = wait_for(queue, id, "done").folder / OUTPUT
    file.write_bytes("é".encode() * OUTPUT_BYTES)  # two bytes each: twice what one answer has
    last = queue.output(id)
    assert (last.text, last.next, last.skipped) == ("é" * (OUTPUT_BYTES // 2), 2 * OUTPUT_BYTES, OUTPUT_BYTES)
    assert queue.output(id, -1).text == last.text
    assert queue.output(id, 2 * OUTPUT_BYTES - 3).text == "\N{REPLACEMENT CHARACTER}é"  # as it was asked for
    file.write_bytes(b"e" + "é".encode() * OUTPUT_BYTES)
    assert queue.output(id).text == "é" * (OUTPUT_BYTES // 2)  # begins within a letter, which is left out
    file.write_bytes("aé".encode()[:-1])
    begun = queue.output(id)
    assert (begun.text, begun.next) == ("a", 1)
    file.write_bytes("aéb".encode())
    assert queue.output(id, begun.next).text == "éb"
    assert queue.output(id, 10**9).text == "aéb"


# ---- order -----------------------------------------------------------------------------------------------------------


def jobs(*described: str) -> list[Job]:
    """`a+ cuda:0 cpu`: an active job; `b`: a queued one."""
    made = []
    for text in described:
        name, *devices = text.split()
        state = "running" if name.endswith("+") else "done" if name.endswith("-") else "queued"
        made.append(
            Job(name, "", "build", Command("qwen-cache"), (), tuple(devices), {}, 0.0, Path(), state=state)  # type: ignore[arg-type]
        )
    return made


@pytest.mark.parametrize(
    ("described", "started"),
    [
        (["a cuda:0", "b cuda:1", "c cuda:0 cuda:1"], "ab"),
        (["a+ cuda:0", "b cuda:0", "c cuda:1"], "c"),
        (["a+ cuda:0", "b cuda:0 cuda:1", "c cuda:1", "d cpu"], "d"),  # b waits, and cuda:1 with it
        (["a+ auto", "b cuda:0", "c"], "c"),
        (["a+ cpu", "b auto", "c cuda:0"], ""),
        (["a cuda", "b cpu"], "a"),
        (["a", "e", "c", "f cpu"], "aef"),
        (["a+", "b", "c"], "b"),
        (["a- cuda:0", "b cuda:0"], "b"),
    ],
)
def test_jobs_start_in_order_as_their_devices_are_free(described: list[str], started: str) -> None:
    assert "".join(job.id for job in to_start(jobs(*described))) == started


def test_two_jobs_on_one_device_run_one_after_the_other(queue: Queue, folder: Path) -> None:
    first, second, beside = (
        add(queue, "wait", "1", on="cuda:0"),
        add(queue, "wait", "2", on="cuda:0"),
        add(queue, "wait", "3", on="cuda:1"),
    )
    wait_for(queue, first, "running")
    wait_for(queue, beside, "running")
    assert queue.get(second).state == "queued"
    assert [job.id for job in queue.list()] == [first, beside, second]
    (folder / "1").touch()
    wait_for(queue, first, "done")
    wait_for(queue, second, "running")
    (folder / "2").touch()
    (folder / "3").touch()
    wait_for(queue, second, "done")
    started, before = queue.get(second).started, queue.get(first).ended
    assert started is not None
    assert before is not None
    assert started >= before


def test_a_paused_queue_can_be_put_in_order(queue: Queue, folder: Path, starts: dict[str, Sequence[str]]) -> None:
    queue.pause()
    ids = [add(queue, "wait", "end", str(i), on="cpu") for i in range(4)]
    queue.move(ids[3], -2)
    queue.move(ids[0], 1)
    queue.move(ids[2], 9)
    queue.remove(ids[0])
    order = [ids[3], ids[1], ids[2]]
    assert [job.id for job in queue.list()] == order
    assert [job.id for job in Queue(folder, starts).list()] == order
    assert Queue(folder, starts).paused
    with pytest.raises(NoJobError, match="no such job"):
        queue.get(ids[0])
    with pytest.raises(JobError, match="not running"):
        queue.stop(ids[1])
    written = queue.get(ids[1]).folder / JOB
    text = written.read_text(encoding="utf-8")
    written.write_text(text.replace('"title"', '"title": "another", "title"', 1), encoding="utf-8")
    with pytest.raises(NoJobError, match="no such job"):  # a key is there twice, and the last one would count
        queue.get(ids[1])
    written.write_text(text, encoding="utf-8")
    (folder / "end").touch()
    queue.resume()
    wait_for(queue, order[-1], "done")
    assert (folder / "log").read_text().split() == ["wait", "end", "3", "wait", "end", "1", "wait", "end", "2"]
    with pytest.raises(JobError, match="only a queued job can be moved"):
        queue.move(ids[1], 1)


# ---- signals ---------------------------------------------------------------------------------------------------------


def test_stop_lets_a_command_end_and_the_second_stop_ends_it(queue: Queue, folder: Path) -> None:
    for arguments, code in ((["stop"], 130), (["stop", "late"], -signal.SIGTERM)):
        (folder / "ready").unlink(missing_ok=True)
        id = add(queue, *arguments, on="cpu")
        wait_until((folder / "ready").exists)
        wait_for_pid(queue, id)
        assert queue.stop(id).state in ("stopping", "stopped")
        if code < 0:
            assert queue.stop(id).state in ("stopping", "stopped")
        assert wait_for(queue, id, "stopped").code == code
        with pytest.raises(JobError, match="not running"):
            queue.kill(id)


def test_kill_ends_all_that_a_command_has_started(queue: Queue, folder: Path) -> None:
    id = add(queue, "family", on="cpu")
    wait_until(lambda: (folder / "child").exists() and (folder / "child").read_text())
    child = int((folder / "child").read_text())
    assert began(child)
    queue.kill(id)
    assert wait_for(queue, id, "stopped").code == -signal.SIGKILL
    wait_until(lambda: began(child) is None)


def test_a_run_saves_only_while_it_trains(queue: Queue, folder: Path) -> None:
    id = add(queue, "wait", "end", kind="train", on="cpu")
    job = wait_for(queue, id, "running")
    wait_until((folder / "log").exists)
    with pytest.raises(JobError, match="saves nothing now"):
        queue.save_now(id)
    write_json(job.folder / PROGRESS, {"what": "training", "done": 3, "total": 9})
    assert queue.get(id).can() == ["stop", "kill", "save"]
    queue.save_now(id)
    wait_until((folder / "saved").exists)
    (folder / "end").touch()
    assert wait_for(queue, id, "done").can() == ["again", "remove"]


def test_a_run_generates_images_if_its_folder_says_that_it_has_some(queue: Queue, folder: Path) -> None:
    (folder / "out").mkdir()
    command = Command("qwen-train", ["wait", "end"])
    job = queue.add("Train", "train", command, ["cpu"], {"output_dir": "out"})
    wait_until((folder / "log").exists)
    wait_for_pid(queue, job.id)
    write_json(job.folder / PROGRESS, {"what": "training"})
    for facts in (None, {"validation_images": 0}, {"validation_images": "2"}):
        if facts is not None:
            write_json(folder / "out" / "about.json", facts)
        assert queue.get(job.id).can() == ["stop", "kill", "save"]
        with pytest.raises(JobError, match="this run has no images to generate"):
            queue.sample_now(job.id)
    write_json(folder / "out" / "about.json", {"validation_images": 2})
    assert queue.get(job.id).can() == ["stop", "kill", "save", "sample"]
    queue.sample_now(job.id)
    wait_until((folder / "sampled").exists)
    (folder / "end").touch()
    wait_for(queue, job.id, "done")


def test_the_processes_of_torchrun_get_the_signals_themselves(queue: Queue, folder: Path) -> None:
    """torchrun passes no SIGUSR1 on, and gives them 30 seconds after SIGINT."""
    job = queue.add("Train", "train", Command("qwen-train", ["run"], processes=2), ["cuda:0", "cuda:1"])
    wait_until((folder / "log").exists)
    wait_for_pid(queue, job.id)
    write_json(job.folder / PROGRESS, {"what": "training"})
    queue.save_now(job.id)
    wait_until((folder / "saved").exists)
    queue.stop(job.id)
    assert wait_for(queue, job.id, "stopped").code == 130
    assert not (folder / "passed on").exists()


def test_a_number_that_another_process_has_now_gets_no_signal(queue: Queue, folder: Path) -> None:
    """A long time later, or after the machine was started again: here this process has the number."""
    id = add(queue, "wait", "end", on="cpu")
    wait_for_pid(queue, id)
    job = queue.get(id)
    started = json.loads((job.folder / STARTED).read_text())
    write_json(job.folder / STARTED, started | {"pid": os.getpid()})
    queue.stop(id)
    queue.stop(id)
    queue.kill(id)
    write_json(job.folder / STARTED, started)
    assert queue.get(id).state == "stopping"  # both live
    (folder / "end").touch()
    wait_for(queue, id, "done")


# ---- processes that are killed ---------------------------------------------------------------------------------------


def test_a_job_without_its_supervising_process_runs_and_is_then_lost(queue: Queue, folder: Path) -> None:
    id, next_ = add(queue, "wait", "end", on="cpu"), add(queue, "say", "", "", on="cpu")
    pid = wait_for_pid(queue, id)
    supervisor = supervisor_of(pid)
    os.kill(supervisor, signal.SIGKILL)
    wait_until(lambda: began(supervisor) is None)
    assert queue.get(id).state == "running"  # it still has the device
    assert queue.get(next_).state == "queued"
    (folder / "end").touch()
    job = wait_for(queue, id, "lost")
    assert (job.code, job.ended is not None) == (None, True)
    wait_for(queue, next_, "done")
    queue.remove(id)
    assert not job.folder.exists()


UI = """
import sys, time
from pathlib import Path
from qwen_train.ui.jobs import Command, Queue
with Queue(Path(sys.argv[1]), {"qwen-cache": sys.argv[2:]}) as queue:
    for name in ("1", "2"):
        queue.add(name, "build", Command("qwen-cache", ["wait", name]), ["cpu"])
    print("ready", flush=True)
    time.sleep(1000)
"""


def test_a_killed_ui_loses_nothing(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    ui = subprocess.Popen(
        [sys.executable, "-c", UI, folder, *starts["qwen-cache"]], stdout=subprocess.PIPE, start_new_session=True
    )
    queue = Queue(folder, starts)
    wait_until(lambda: [job for job in queue.list() if job.state == "running" and job.pid])
    ui.kill()
    ui.communicate()
    first, second = queue.list()
    assert (first.state, second.state) == ("running", "queued")
    (folder / "1").touch()
    wait_for(queue, first.id, "done")
    with queue:
        wait_for(queue, second.id, "running")
        (folder / "2").touch()
        wait_for(queue, second.id, "done")


def test_two_queues_start_a_job_once(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    """Both in one folder, and each as if it were alone: without the lock that lets one of them schedule."""
    queue = Queue(folder, starts)
    id = add(queue, "wait", "end", on="cpu")
    job = queue.get(id)
    line = [sys.executable, "-m", "qwen_train.ui.supervise", str(job.folder)]
    both = [subprocess.Popen(line, start_new_session=True) for _ in range(2)]
    codes = sorted(process.wait() for process in both)
    assert codes == [0, 1]
    (folder / "end").touch()
    wait_for(queue, id, "done")
    assert subprocess.run(line, check=False).returncode == 1  # nor again
    assert (folder / "log").read_text() == "wait end\n"
    with Queue(folder, starts) as one, Queue(folder, starts) as other:
        ids = [add(queue, "say", "", "", on="cpu") for queue in (one, other)]
        for id in ids:
            wait_for(one, id, "done")


def test_a_job_that_is_being_removed_does_not_start(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    queue = Queue(folder, starts)
    id = add(queue, "say", "", "")
    job = queue.get(id)
    line = [sys.executable, "-m", "qwen_train.ui.supervise", str(job.folder)]
    with locked(job.folder / LOCK):
        assert subprocess.run(line, check=False).returncode == 1
        assert queue.get(id).state == "queued"
        with pytest.raises(JobError, match="is running"):
            queue.remove(id)
    queue.remove(id)
    assert subprocess.run(line, check=False, stderr=subprocess.PIPE).stderr == b""
    assert list(job.folder.parent.iterdir()) == []


def test_a_damaged_job_is_left_out(queue: Queue, folder: Path) -> None:
    id = add(queue, "say", "", "")
    job = wait_for(queue, id, "done")
    for content in (b"", b"[1]", b"\xff", b'{"id": 1}'):
        other = job.folder.with_name("20200101-000000-00000000")
        other.mkdir(exist_ok=True)
        (other / "job.json").write_bytes(content)
        assert [each.id for each in queue.list()] == [id]
    (job.folder / PROGRESS).write_bytes(b"\xff")
    assert queue.get(id).progress() is None
    (job.folder / ENDED).write_bytes(b"")  # as a power loss may leave a file that was not synced
    assert read_job(job.folder).state == "lost"


@pytest.mark.parametrize("change", ["unsigned", "other arguments"])
def test_jobs_that_came_with_a_folder_do_not_start(folder: Path, starts: dict[str, Sequence[str]], change: str) -> None:
    """Opening a folder runs nothing that somebody else has put there."""
    id = add(Queue(folder, starts), "say", "", "")
    file = folder / ".qwen-ui/jobs" / id / "job.json"
    written = json.loads(file.read_text())
    written["argv"] = [sys.executable, "-c", "open('foreign', 'w')"]
    if change == "unsigned":
        del written["signature"]
    file.write_text(json.dumps(written))
    with Queue(folder, starts) as queue:
        wait_for(queue, add(queue, "say", "", ""), "done")
        assert queue.get(id).state == "held"
        assert id not in [job.id for job in queue.list()]
        assert not (folder / "foreign").exists()
        wait_for(queue, queue.run(id).id, "done")
        with pytest.raises(NoJobError):
            queue.get(id)
    assert not (folder / "foreign").exists()


PLANTED: dict[str, dict[str, Any]] = {
    "another program": {"command": {"program": "sh"}},
    "a library": {"command": {"program": "qwen-cache", "environment": {"LD_PRELOAD": "./x.so"}}},
    "no environment": {"command": {"program": "qwen-cache", "environment": 1}},
    "no page": {"about": []},
    "no time": {"created": "now"},
    "no signature": {"signature": "\u00e9"},
}


def test_planted_jobs_neither_run_nor_end_the_queue(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    ids = {what: add(Queue(folder, starts), "fail") for what in PLANTED}
    for what, change in PLANTED.items():
        file = folder / ".qwen-ui/jobs" / ids[what] / "job.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with Queue(folder, starts) as queue:
        wait_for(queue, add(queue, "say", "", ""), "done")
        listed = [job.id for job in queue.list_all()[1]]
        assert [what for what, id in ids.items() if id in listed] == ["no signature"]


def test_an_ended_job_that_was_changed_is_nobodys_own(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    """Pages show no link to what such a job claims to have written."""
    with Queue(folder, starts) as queue:
        id = add(queue, "say", "", "")
        wait_for(queue, id, "done")
        assert queue.get(id).to_json()["is_own"]
        file = folder / ".qwen-ui/jobs" / id / "job.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"about": {"page": "planted.html"}}))
    found = Queue(folder, starts).get(id).to_json()
    assert (found["state"], found["about"], found["is_own"]) == ("done", {"page": "planted.html"}, False)


FILES: list[tuple[str, dict[str, Any]]] = [
    (ENDED, {"time": "x", "code": "y"}),
    (STARTED, {"time": [1], "pid": "a", "began": 3}),
    ("job.json", {"devices": [1, {}]}),
    ("job.json", {"argv": [[]]}),
    ("job.json", {"id": "../../x"}),
]


@pytest.mark.parametrize("planted", [FILES, [("../queue.json", {"order": 5})], [("../queue.json", {"order": [[1]]})]])
def test_planted_files_do_not_end_the_queue(
    folder: Path, starts: dict[str, Sequence[str]], planted: list[tuple[str, dict[str, Any]]]
) -> None:
    """Times and codes that are none would make it impossible to order the jobs of others."""
    untouched, *ids = [add(Queue(folder, starts), "fail") for _ in range(1 + len(planted))]
    jobs = folder / ".qwen-ui/jobs"
    for id in (untouched, *ids):
        (jobs / id / ENDED).write_text(json.dumps({"time": 1, "code": 1}))
    for id, (name, content) in zip(ids, planted, strict=True):
        file = jobs / id / name
        before = json.loads(file.read_text()) if name == "job.json" else {}
        file.write_text(json.dumps(before | content))
    with Queue(folder, starts) as queue:
        wait_for(queue, add(queue, "say", "", ""), "done")
        found = [job.id for job in queue.list()]
        assert untouched in found
        assert all((jobs / id).parent == jobs for id in found)
        assert all(type(job.ended) in (int, float, type(None)) for job in queue.list())


@pytest.mark.parametrize("name", [OUTPUT, "result.json", "job.json", ENDED, PROGRESS])
def test_no_link_in_the_folder_of_a_job_is_followed(folder: Path, starts: dict[str, Sequence[str]], name: str) -> None:
    """A link may have come with the opened folder, and shown a file from elsewhere as the job's."""
    queue = Queue(folder, starts)
    id = add(queue, "fail")
    file, other = folder / ".qwen-ui/jobs" / id / name, folder.parent / "other"
    other.write_bytes(file.read_bytes() if file.exists() else b"{}")
    file.unlink(missing_ok=True)
    file.symlink_to(other)
    assert queue.list() == []
    for read in (queue.output, queue.result, queue.get):
        with pytest.raises(NoJobError):
            read(id)


# ---- checks ----------------------------------------------------------------------------------------------------------


def test_a_check_answers_with_its_document_or_its_error(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    checks = Checks(folder, starts)
    said = checks.check(Command("qwen-cache", ["say", '{"samples": 4}', b"reading\n".hex()]))
    assert (said.code, said.document, said.message) == (0, {"samples": 4}, "reading")
    failed = checks.check(Command("qwen-cache", ["fail"]))
    assert (failed.code, failed.document) == (2, None)
    assert failed.message == "error: no such thing\n  -> give another"
    checks.close()
    with pytest.raises(OutdatedError):
        checks.check(Command("qwen-cache", ["fail"]))


def test_a_newer_check_ends_the_older_one_of_its_key(folder: Path, starts: dict[str, Sequence[str]]) -> None:
    checks, ends = Checks(folder, starts), dict[str, Any]()

    def check(name: str, key: str) -> None:
        try:
            ends[name] = checks.check(Command("qwen-cache", ["wait", name]), key).code
        except OutdatedError:
            ends[name] = "outdated"

    threads = {name: Thread(target=check, args=(name, key)) for name, key in (("a", "plan"), ("b", "doctor"))}
    for thread in threads.values():
        thread.start()
    wait_until(lambda: (folder / "log").exists() and len((folder / "log").read_text().split()) == 4)
    threads["c"] = Thread(target=check, args=("c", "plan"))
    threads["c"].start()
    threads["a"].join()
    assert ends == {"a": "outdated"}
    (folder / "b").touch()
    (folder / "c").touch()
    for thread in threads.values():
        thread.join()
    assert ends == {"a": "outdated", "b": 0, "c": 0}


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def client(queue: Queue) -> TestClient:
    app = FastAPI()
    here = SimpleNamespace(get=lambda: Found((Device("cuda:0", "GPU"), Device("cpu", "CPU"))))
    app.include_router(job_routes(queue, cast(KnownDevices, here)))
    app.add_exception_handler(ConfigError, lambda _, error: as_json(errors_json(error), 422))  # type: ignore[arg-type]
    app.add_exception_handler(RefusedError, lambda _, error: answer(error))  # type: ignore[arg-type]
    return TestClient(app)


def test_the_routes_of_a_job(client: TestClient, queue: Queue, folder: Path) -> None:
    nothing = {"paused": False, "jobs": [], "held": [], "gpus": [], "problem": ""}
    assert client.get("/api/jobs").json() == nothing
    id = add(queue, "wait", "end", on="cuda:0")
    waiting = [add(queue, "say", "plain", b"said\n".hex(), on="cuda:0") for _ in range(2)]
    wait_for_pid(queue, id)
    assert client.post(f"/api/jobs/{waiting[1]}/move", json={"by": -1}).json() == {}
    listed = client.get("/api/jobs").json()["jobs"]
    assert [job["id"] for job in listed] == [id, *reversed(waiting)]
    assert listed[0]["can"] == ["stop", "kill"]
    assert listed[0]["line"] == "qwen-cache wait end"
    assert client.post(f"/api/jobs/{id}/save").status_code == 409
    assert client.post(f"/api/jobs/{id}/remove").status_code == 409
    assert client.post(f"/api/jobs/{id}/stop").json()["state"] in ("stopping", "stopped")
    wait_for(queue, id, "stopped")
    wait_for(queue, waiting[0], "done")
    path = f"/api/jobs/{waiting[0]}"
    assert client.get(f"{path}/output").json() == {"text": "said\n", "next": 5, "skipped": 0}
    assert client.get(f"{path}/output?since=5").json() == {"text": "", "next": 5, "skipped": 0}
    assert client.get(f"{path}/result").json() == {"document": None, "text": "plain"}
    assert client.post("/api/queue/pause").json() == {"paused": True}
    again = client.post(f"{path}/again").json()
    assert (again["state"], client.get("/api/jobs").json()["paused"]) == ("queued", True)
    assert client.post("/api/queue/resume").json() == {"paused": False}
    wait_for(queue, again["id"], "done")
    assert client.post(f"{path}/remove").json() == {}
    assert client.get(path).status_code == 404


def test_a_queued_job_says_what_it_waits_for(client: TestClient, queue: Queue, folder: Path) -> None:
    for name, on in (("first", "cuda:0"), ("second", "cuda:1 cuda:0"), ("third", "auto")):
        add(queue, "wait", name, on=on)
    wait_until(lambda: queue.list()[0].is_active)
    said = {job["title"]: job["waits_for"] for job in client.get("/api/jobs").json()["jobs"]}
    first = {"title": "wait first", "is_active": True, "devices": ["cuda:0"]}
    assert (said["wait first"], said["wait second"]) == ([], [first])
    assert [(it["title"], it["devices"]) for it in said["wait third"]] == [("wait first", []), ("wait second", [])]
    for name in ("first", "second", "third"):
        (folder / name).touch()


def test_a_job_is_exported_and_imported_and_waits_for_its_user(client: TestClient, queue: Queue, folder: Path) -> None:
    id = queue.add("Say \u202e", "build", Command("qwen-cache", ["say", "/no/where", ""]), ["cpu"], {"cache": "c"}).id
    wait_for(queue, id, "done")
    file = client.get(f"/api/jobs/{id}/export").json()
    held = client.post("/api/jobs/import", json=file).json()
    wait_for(queue, add(queue, "say", "", ""), "done")
    (listed,) = client.get("/api/jobs").json()["held"]
    assert (listed["id"], listed["state"], listed["title"]) == (held["id"], "held", r"Say \u202e")
    assert listed["paths"] == [{"path": "/no/where", "is_here": False}]
    own = client.post(f"/api/jobs/{held['id']}/run").json()
    assert (wait_for(queue, own["id"], "done").is_own, queue.result(own["id"])) == (True, "/no/where")
    wrong: list[dict[str, Any]] = [
        {"program": "sh"}, {"environment": {"LD_PRELOAD": "x"}}, {"about": {"page": "x"}}, {"more": 1},
        {"arguments": ["x" * 100_001]}, {"qwen_cache_job": 2},
    ]  # fmt: skip
    for change in wrong:
        assert client.post("/api/jobs/import", json=file | change).status_code == 422, change
    told = client.post("/api/jobs/import", json=file | {"devices": 7, "processes": 0, "arguments": ["x", 5]}).json()
    assert {each["where"] for each in (told, *told["others"])} == {"devices", "processes", "arguments[1]"}
    assert told["error"] == "in the file of a job: not a valid value"
    assert client.post("/api/jobs/import", json=["build"]).json()["error"].startswith("in the file of a job")
    secret = add(queue, "say", "s3://key:word@host/x", "")
    assert client.get(f"/api/jobs/{secret}/export").status_code == 409


@pytest.mark.parametrize(
    ("devices", "arguments", "variables", "lacking"),
    [
        (["cuda:1"], [], {}, ["cuda:1"]),
        ([], ["--vae-device=cuda:0", "--set", 'validation.vae_device="cuda:7"'], {}, ["cuda:7"]),
        (["cuda:0"], ["--set", 'validation.vae_device="cuda:1"'], {"CUDA_VISIBLE_DEVICES": "0,3"}, ["cuda:3"]),
        (["cuda:0", "cpu", "auto", "server:0"], ["--text-device", "cuda"], {}, []),
        (["mps"], [], {}, ["mps"]),
    ],
)
def test_an_imported_job_for_a_device_that_is_not_here_is_refused_by_name(
    client: TestClient, devices: list[str], arguments: list[str], variables: dict[str, str], lacking: list[str]
) -> None:
    file = {"qwen_cache_job": 1, "title": "Build", "kind": "build", "program": "qwen-cache", "devices": devices}
    file |= {"arguments": ["say", *arguments], "environment": variables}
    id = client.post("/api/jobs/import", json=file).json()["id"]
    client.post("/api/queue/pause")
    answer = client.post(f"/api/jobs/{id}/run")
    held = [each["id"] for each in client.get("/api/jobs").json()["held"]]
    if not lacking:
        assert (answer.status_code, held) == (200, [])
        return
    assert (answer.status_code, held) == (409, [id])
    assert f"this machine has no {' and no '.join(lacking)} (found cuda:0, cpu)" in answer.json()["error"]


def test_times_that_none_had_are_not_shown(queue: Queue, folder: Path) -> None:
    id = add(queue, "say", "", "")
    job = wait_for(queue, id, "done")
    write_json(job.folder / STARTED, {"time": 1, "pid": 1, "began": ""})
    write_json(job.folder / ENDED, {"time": 9e18, "code": 0})
    shown = read_job(job.folder).to_json()
    assert (shown["started"], shown["ended"], shown["state"]) == (None, None, "done")


def test_gpus_are_those_of_the_driver_and_one_that_hangs_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on, hangs = Event(), Event()

    class NotSupportedError(Exception):
        """NVML's own."""

    def load(gpu: int) -> Any:
        if hangs.is_set():
            goes_on.wait()
        if gpu:
            raise NotSupportedError
        return SimpleNamespace(gpu=97)

    nvml = SimpleNamespace(
        NVMLError=Exception,
        NVMLError_NotSupported=NotSupportedError,
        nvmlInit=lambda: None,
        nvmlDeviceGetCount=lambda: 2,
        nvmlDeviceGetHandleByIndex=lambda i: i,
        nvmlDeviceGetUUID=lambda gpu: f"GPU-{gpu}",
        nvmlDeviceGetName=lambda gpu: "NVIDIA H100",
        nvmlDeviceGetMemoryInfo=lambda gpu: SimpleNamespace(total=80, used=40 + gpu),
        nvmlDeviceGetUtilizationRates=load,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr("qwen_train.ui.gpus.FRESH", 0)
    found = Gpus()
    wait_until(lambda: found.now()["gpus"])
    both = [{"uuid": f"GPU-{i}", "title": "NVIDIA H100", "total": 80, "used": 40 + i} for i in range(2)]
    assert found.now()["gpus"] == [both[0] | {"busy": 97}, both[1] | {"busy": None}]
    hangs.set()
    monkeypatch.setattr("qwen_train.ui.gpus.PATIENCE", 0)
    wait_until(lambda: "has not answered" in found.now()["problem"])
    goes_on.set()
    monkeypatch.setitem(sys.modules, "pynvml", None)
    silent = Gpus()
    wait_until(lambda: silent.now() and silent._is_absent)
    assert silent.now() == {"gpus": [], "problem": ""}


def test_a_stop_from_two_windows_is_one(client: TestClient, queue: Queue, folder: Path) -> None:
    """A second one would end the command before it has saved."""
    id = add(queue, "stop", "late")
    wait_until((folder / "ready").exists)
    wait_for_pid(queue, id)
    asked = {"args": [f"/api/jobs/{id}/stop"], "kwargs": {"json": {"seen": "running"}}}
    threads = [Thread(target=client.post, **asked) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert json.loads((queue.get(id).folder / "stop.json").read_text())["stops"] == 1
    assert queue.get(id).state == "stopping"
    assert client.post(f"/api/jobs/{id}/stop", json={"seen": "stopping"}).status_code == 200
    wait_for(queue, id, "stopped")


def test_jobs_moved_in_two_windows_stay_all(client: TestClient, queue: Queue) -> None:
    queue.pause()
    ids = [add(queue, "say", "", "") for _ in range(6)]

    def move(id: str) -> None:
        for by in (-1, 1, -2):
            assert client.post(f"/api/jobs/{id}/move", json={"by": by}).status_code == 200

    threads = [Thread(target=move, args=[id]) for id in ids]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    listed = [job.id for job in queue.list()]
    assert sorted(listed) == sorted(ids)
    assert json.loads((queue.get(ids[0]).folder.parent / "queue.json").read_text())["order"] == listed


HOSTILE = ["..", "%2e%2e", "..%2f..%2fjob", "20200101-000000-0000000g", "20200101-000000-00000000%0a"]


@pytest.mark.parametrize("id", HOSTILE)
def test_an_id_is_never_a_path(client: TestClient, queue: Queue, folder: Path, id: str) -> None:
    (folder / ".qwen-ui" / "job.json").write_text("{}")
    for path in ("", "/output", "/result"):
        assert client.get(f"/api/jobs/{id}{path}").status_code == 404
    assert client.post(f"/api/jobs/{id}/remove").status_code in (404, 405)
    assert (folder / ".qwen-ui" / "job.json").exists()


# ---- the page --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_in_a_browser(folder: Path, queue: Queue) -> None:
    """Focus stays where it is while jobs move from list to list, and a screen reader hears of changed states alone."""
    with served(folder) as address, chromium() as browser:
        page = new_page(browser)
        errors = list[str]()
        page.on("pageerror", lambda error: errors.append(str(error)))
        enter(page, address)
        page.goto(f"{address}/queue")
        page.get_by_text("No job is running.").wait_for()
        first, second, third = (add(queue, "wait", str(i), on="cpu") for i in range(3))
        page.locator(f"#active [data-job='{first}']").wait_for()
        titles = page.locator("#queued h3")
        page.locator(f"#queued [data-job='{third}']").wait_for()
        assert titles.all_inner_texts() == ["wait 1", "wait 2"]
        page.get_by_role("button", name="Up: wait 2").focus()
        page.keyboard.press("Enter")
        wait_until(lambda: titles.all_inner_texts() == ["wait 2", "wait 1"])
        assert page.evaluate("document.activeElement.getAttribute('aria-label')") == "Up: wait 2"
        page.locator("[aria-label='Up: wait 2'][aria-disabled=true]").wait_for()
        page.keyboard.press("Enter")
        page.locator("[aria-label='Up: wait 1'][aria-disabled=false]").wait_for()
        assert titles.all_inner_texts() == ["wait 2", "wait 1"]
        job = queue.get(first)
        write_json(
            job.folder / PROGRESS,
            {
                "what": "encoding",
                "done": 1,
                "total": 4,
                "text": "1/4",
                "lanes": [{"name": "vae-0", "device": "cpu", "done": 3, "busy": 0.5}],
                "left": 90,
            },
        )
        with open(job.folder / OUTPUT, "ab") as file:
            file.write("<b>é</b>\n".encode())
        page.get_by_text("encoding 1/4, about 2 min left").wait_for()
        lane = page.locator("#active .lanes li").inner_text()
        assert lane.split("\n") == ["vae-0 on cpu", "3 images done, 50 % busy"]
        card = page.locator(f"[data-job='{first}']")
        card.get_by_text("Output").click()
        card.get_by_text("<b>é</b>").wait_for()
        (folder / "0").touch()
        page.locator(f"#ended [data-job='{first}']").wait_for()
        page.locator(f"#active [data-job='{third}']").wait_for()
        assert page.evaluate("document.activeElement.tagName") in ("H3", "SUMMARY")
        assert page.locator("#announcements").inner_text() in ("wait 0: done", "wait 2: running")
        page.get_by_role("button", name="Pause the queue").click()
        page.get_by_text("The queue is paused: no queued job starts.").wait_for()
        page.get_by_role("button", name="Remove: wait 1").click()
        page.get_by_text("No job is waiting.").wait_for()
        with pytest.raises(NoJobError):
            queue.get(second)
        page.once("dialog", lambda dialog: dialog.accept())
        page.get_by_role("button", name="Kill: wait 2").click()
        page.locator(f"#ended [data-job='{third}']").wait_for()
        assert queue.get(third).state == "stopped"
        assert errors == []
