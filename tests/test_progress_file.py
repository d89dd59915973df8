"""Progress for other programs: the JSON document in the file that QWEN_CACHE_PROGRESS names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qwen_cache import terminal
from qwen_cache.encode.build import progress_line
from qwen_cache.encode.builder import LaneState
from qwen_cache.encode.lanes import Batch, Encoder, Lane, WorkItem
from qwen_cache.encode.write import Progress
from qwen_cache.terminal import counting, progress, set_verbosity
from qwen_train.run import Launch, silence_others

from .support.waiting import wait_until


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(terminal.VARIABLE, str(tmp_path / "progress.json"))
    monkeypatch.setattr(terminal, "_warned", type(terminal._warned)())
    return tmp_path / "progress.json"


def document(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="ascii")))


def test_the_file_follows_the_line_and_keeps_its_last_state(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with counting("reading", total=3) as advance:
        advance(1)
        wait_until(lambda: file.exists() and document(file)["done"] == 1)
        begun = document(file)
        advance(2)
    assert begun.keys() == {"what", "done", "total", "text", "elapsed", "left", "lanes"}
    assert (begun["what"], begun["total"], begun["lanes"]) == ("reading", 3, [])
    assert begun["text"].startswith("1/3, ")
    assert isinstance(begun["elapsed"], int)
    ended = document(file)
    assert (ended["done"], ended["left"]) == (3, 0)
    assert ended["text"].startswith("3/3, ")
    assert list(file.parent.iterdir()) == [file]  # no temporary file is left
    assert "reading" in capsys.readouterr().err


def test_it_is_written_although_the_line_is_not_shown(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`transient` lines are shown on terminals alone, and none under `--quiet`."""
    with counting("hashing", in_bytes=True, transient=True) as advance:
        advance(4_000_000)
    assert document(file)["text"].startswith("4.0 MB")
    set_verbosity(quiet=True)
    try:
        with counting("quietly", total=1) as advance:
            advance(1)
    finally:
        set_verbosity()
    assert document(file)["what"] == "quietly"
    assert capsys.readouterr().err == ""


def test_of_lines_inside_each_other_the_outer_one_is_written(file: Path) -> None:
    with counting("images", total=2) as outer:
        with counting("steps", total=9, transient=True) as inner:
            inner(9)
        assert not file.exists() or document(file)["what"] == "images"
        outer(1)
    assert (document(file)["what"], document(file)["total"]) == ("images", 1)
    with counting("next", total=1) as advance:
        advance(1)
    assert document(file)["what"] == "next"


def test_a_file_that_cannot_be_written_is_one_warning(
    file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(terminal.VARIABLE, str(file / "no such folder" / "file"))
    for _ in range(2):
        with counting("reading", total=1) as advance:
            advance(1)
    errors = capsys.readouterr().err
    assert errors.count("warning: QWEN_CACHE_PROGRESS: ") == 1
    assert "No such file or directory; progress is not written" in " ".join(errors.split())
    assert errors.count("reading") == 2


def test_a_line_without_work_leaves_no_document(file: Path) -> None:
    with progress():
        pass
    assert not file.exists()


def test_only_the_main_process_of_a_run_writes(file: Path) -> None:
    silence_others(Launch())
    with counting("main", total=1) as advance:
        advance(1)
    try:
        silence_others(Launch(rank=1, world_size=2))
        with counting("other", total=1) as advance:
            advance(1)
    finally:
        set_verbosity()
    assert document(file)["what"] == "main"


def test_lanes_and_workers_of_a_build(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lanes = [LaneState("vae-0", "cuda:0", 24, 0.834, 3), LaneState("text-0", "cuda:1", 1, 0.4, 1)]
    with progress_line("encoding", 40, lambda: lanes) as show:
        show(Progress(12))
    assert document(file)["lanes"] == [
        {"name": "vae-0", "device": "cuda:0", "done": 24, "busy": 0.83},
        {"name": "text-0", "device": "cuda:1", "done": 1, "busy": 0.4},
    ]
    line = " ".join(capsys.readouterr().err.split())
    assert line.endswith("left vae-0 on cuda:0: 24 images, 83 % busy, text-0 on cuda:1: 1 prompt, 40 % busy")
    with progress_line("encoding", 40) as show:
        show(Progress(12, rates={"10.0.0.1": 1.5}))
    assert document(file)["lanes"] == [{"name": "10.0.0.1", "samples_per_second": 1.5}]


def test_a_lane_knows_its_work_and_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr("qwen_cache.encode.lanes.time.monotonic", lambda: clock[0])

    class Sleeping(Encoder[int, int]):
        device = torch.device("cpu")

        def encode(self, items: list[int]) -> list[int]:
            clock[0] += 3.0
            return items

    lane: Lane[int, int] = Lane(Sleeping(), "vae-0")
    items = [WorkItem[int, int](inputs, lambda n: n, 1) for inputs in (_done(1), _done(2))]
    lane.send(Batch(0, items, 2))
    lane.thread.shutdown(wait=True)
    clock[0] += 9.0
    assert lane.state == LaneState("vae-0", "cpu", 2, 0.25, 1)


def _done(value: int) -> Any:
    from concurrent.futures import Future

    future: Future[int] = Future()
    future.set_result(value)
    return future
