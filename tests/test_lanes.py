"""Promises of the lanes about order, with encoders that stop and fail when told to: nothing waits that need not.

A lane that continues while the other lane or the writer is held loses no time to them; then the slower lane decides
how long a build takes. `tools/bench_build.py lanes` measures that.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.encode import builder, lanes, write
from qwen_cache.encode.builder import BuildJob, Encoders
from qwen_cache.encode.lanes import Lanes
from qwen_cache.encode.text import EncodedText
from qwen_cache.errors import SourceError
from qwen_cache.format import directory
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.staging import Staging
from qwen_cache.settings.load import load_config

from .support.waiting import HANG

SAMPLES, IN_FLIGHT = 10, 4
CALLS = {"vae": 3, "text": 1}  # of each encoder for a sample with two controls: three images, one text about two


class FakeEncoder:
    """In place of either encoder: zeros, at once, but while it is held; and a failure at call `fails_at`."""

    device, batch_pixels, batch_tokens = torch.device("cpu"), 1, 1

    def __init__(self, fails_at: int | None = None) -> None:
        self.begun = self.done = 0
        self.fails_at = fails_at
        self.changed, self.free = threading.Condition(), threading.Event()
        self.free.set()

    def pixels(self, image: Image.Image, size: tuple[int, int]) -> torch.Tensor:
        return torch.zeros(size[0] // 16 * (size[1] // 16), 64)

    def inputs(self, images: list[Image.Image]) -> dict[str, torch.Tensor]:
        return {}

    def encode(self, items: Sequence[Any]) -> list[Any]:
        self._work()
        text = EncodedText(torch.zeros(3, 4), torch.zeros(2, 4), torch.zeros(2, 4))
        return [item if isinstance(item, torch.Tensor) else text for item in items]

    def wait_until_done(self, calls: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.done >= calls, HANG), f"stopped after {self.done} calls"

    def _work(self) -> None:
        with self.changed:
            self.begun += 1
            self.changed.notify_all()
        assert self.free.wait(HANG)
        if self.begun == self.fails_at:
            raise RuntimeError("the encoder failed")
        with self.changed:
            self.done += 1
            self.changed.notify_all()


@dataclass
class Build:
    """A build of SAMPLES samples with two controls each, and what it did."""

    job: BuildJob
    encoders: dict[str, FakeEncoder] = field(default_factory=lambda: {"vae": FakeEncoder(), "text": FakeEncoder()})
    lanes: Lanes | None = None

    def run(self) -> int:
        """How many samples were encoded."""
        with directory.writing(self.job.folder):
            existing = builder.load_existing(self.job)
            plan = builder.plan_build(self.job, existing)
            assert not plan.problems
            update = builder.make_update(self.job, existing, plan)
            with Encoders(self.load_lanes, IN_FLIGHT) as encoders:
                return len(write.run(self.job, update, plan.missing, encoders).made)

    def load_lanes(self, job: BuildJob) -> Lanes:
        vae: Any = self.encoders["vae"]
        text: Any = self.encoders["text"]
        self.lanes = Lanes([vae], [text], recipe_id(job.recipe), job.condition_image_size, job.format_version)
        return self.lanes

    @contextmanager
    def running(self) -> Iterator[None]:
        """The build in a thread of its own; afterwards all is let go and it has to end well."""
        with ThreadPoolExecutor(1) as thread:
            future = thread.submit(self.run)
            try:
                yield
            finally:
                for encoder in self.encoders.values():
                    encoder.free.set()
            assert future.result(HANG) == SAMPLES
        assert len(open_cache(self.job.folder)) == SAMPLES


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory, tiny_model: Callable[[str], Path]) -> BuildJob:
    """All images differ, so that nothing is encoded once for two samples."""
    data, numbers = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for folder in ("target_images", "control_images"):
        (data / folder).mkdir()
    for i in range(SAMPLES):
        for name in (f"target_images/{i}", f"control_images/{i}", f"control_images/{i}_control_1"):
            Image.fromarray(numbers.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(data / f"{name}.png")
        (data / f"target_images/{i}.txt").write_text("make it grey")
    settings = ["data.vae_image_size=1024", "data.condition_image_size=1024"]
    return builder.prepare_build(load_config(None, settings, model__path=str(tiny_model("edit-plus"))), str(data))


@pytest.fixture
def build(prepared: BuildJob, tmp_path: Path) -> Build:
    folder = tmp_path / "shards"
    folder.mkdir()
    config = prepared.config.model_copy(
        update={"cache": prepared.config.cache.model_copy(update={"path": str(folder)})}
    )
    return Build(replace(prepared, config=config, folder=folder))


@pytest.mark.parametrize(("held", "other"), [("vae", "text"), ("text", "vae")])
def test_a_lane_does_all_that_is_in_flight_while_the_other_is_held(held: str, other: str, build: Build) -> None:
    build.encoders[held].free.clear()
    with build.running():
        build.encoders[other].wait_until_done(IN_FLIGHT * CALLS[other])
        assert build.encoders[held].done == 0
        assert build.encoders[other].begun == IN_FLIGHT * CALLS[other]
    assert {name: encoder.done for name, encoder in build.encoders.items()} == {n: SAMPLES * CALLS[n] for n in CALLS}


def test_the_writer_holds_up_no_lane(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    add, disk = Staging.add, threading.Event()

    def slow(self: Staging, *arguments: Any) -> None:
        assert disk.wait(HANG)
        add(self, *arguments)

    monkeypatch.setattr(Staging, "add", slow)
    with build.running():
        try:
            for name, encoder in build.encoders.items():
                encoder.wait_until_done(IN_FLIGHT * CALLS[name])
        finally:
            disk.set()


def test_no_more_than_the_bound_is_in_flight(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    submit, add, in_flight, most = Lanes.submit, Staging.add, 0, 0

    def count_in(self: Lanes, *arguments: Any) -> Any:
        nonlocal in_flight, most
        in_flight += 1
        most = max(most, in_flight)
        return submit(self, *arguments)

    def count_out(self: Staging, *arguments: Any) -> None:
        nonlocal in_flight
        add(self, *arguments)
        in_flight -= 1

    monkeypatch.setattr(Lanes, "submit", count_in)
    monkeypatch.setattr(Staging, "add", count_out)
    with build.running():
        pass
    assert (in_flight, most) == (0, IN_FLIGHT)


def test_images_are_let_go_when_both_lanes_have_them(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what is in flight is decoded, and no image outlives its encoding."""
    decoded: list[weakref.ref[Image.Image]] = []
    open_rgb, add = lanes.open_rgb, Staging.add
    alive: list[int] = []

    def count_alive() -> int:
        return sum(image() is not None for image in decoded)

    def remember(data: bytes, where: str) -> Image.Image:
        image = open_rgb(data, where)
        decoded.append(weakref.ref(image))
        return image

    def count(self: Staging, *arguments: Any) -> None:
        alive.append(count_alive())
        add(self, *arguments)

    monkeypatch.setattr(lanes, "open_rgb", remember)
    monkeypatch.setattr(Staging, "add", count)
    with build.running():
        pass
    assert len(decoded) == 3 * SAMPLES
    assert max(alive) <= 3 * IN_FLIGHT
    assert count_alive() == 0


@pytest.mark.parametrize("name", ["vae", "text"])
def test_what_fails_in_a_lane_stops_the_build_and_what_was_written_stays(name: str, build: Build) -> None:
    written = 2
    build.encoders[name] = FakeEncoder(fails_at=written * CALLS[name] + 1)
    with pytest.raises(RuntimeError, match="the encoder failed"):
        build.run()
    assert_continues_after(written, build)


def test_what_has_not_begun_is_dropped(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    """The text lane is in its first call when the VAE fails: it ends that call and begins no other."""
    text, shutdown = build.encoders["text"], ThreadPoolExecutor.shutdown
    text.free.clear()

    def fail(pixels: Sequence[torch.Tensor]) -> None:
        with text.changed:
            assert text.changed.wait_for(lambda: text.begun, HANG)
        raise RuntimeError("the encoder failed")

    def let_go_after(self: ThreadPoolExecutor, wait: bool = True, *, cancel_futures: bool = False) -> None:
        if build.lanes and self is build.lanes.text.lanes[0].thread:
            shutdown(self, wait=False, cancel_futures=cancel_futures)
            text.free.set()
        shutdown(self, wait=wait, cancel_futures=cancel_futures)

    monkeypatch.setattr(build.encoders["vae"], "encode", fail)
    monkeypatch.setattr(ThreadPoolExecutor, "shutdown", let_go_after)
    with pytest.raises(RuntimeError, match="the encoder failed"):
        build.run()
    assert text.begun == text.done == 1


def test_an_interrupt_in_the_writer_keeps_what_was_written(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    add, written = Staging.add, 3
    count = iter(range(SAMPLES))

    def interrupted(self: Staging, *arguments: Any) -> None:
        if next(count) == written:
            raise KeyboardInterrupt
        add(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Staging, "add", interrupted)
        with pytest.raises(KeyboardInterrupt):
            build.run()
    assert_continues_after(written, build)


def test_an_image_that_vanishes_during_the_build_is_named(build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    read_again, vanished = lanes.read_again, str(build.job.rows[2].controls[1])

    def vanish(image: Any, expected: str) -> bytes:
        if str(image) == vanished:
            raise SourceError("cannot be read", where=image)
        return read_again(image, expected)

    monkeypatch.setattr(lanes, "read_again", vanish)
    with pytest.raises(SourceError, match=r"_control_1\.png: cannot be read"):
        build.run()


def assert_continues_after(written: int, build: Build) -> None:
    """The next build encodes what is missing, and no more."""
    again = Build(build.job)
    again.run()
    for name, encoder in again.encoders.items():
        assert encoder.done == (SAMPLES - written) * CALLS[name]
    assert len(open_cache(build.job.folder)) == SAMPLES
