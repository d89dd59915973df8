"""Batches of the encoders: what goes together, what a device has room for, and what becomes of a piece that fails.

That encoding together changes nothing is judged in `equivalence/test_encode_batches.py`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Barrier, Event
from typing import Any

import pytest
import torch

from qwen_cache.encode import lanes as micro_batches
from qwen_cache.encode.lanes import MEMORY_FRACTION, Batcher, Encoder, Lane, MemoryBudget, Turns
from qwen_cache.errors import DeviceError, SourceError

from .support.waiting import HANG

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@dataclass
class Recorder(Encoder[int, int]):
    """An encoder that negates numbers, and has room for so much at once."""

    room: float = float("inf")
    device: torch.device = CPU
    batches: list[list[int]] = field(default_factory=list)

    def encode(self, items: Sequence[int]) -> list[int]:
        self.batches.append(list(items))
        if sum(items) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB\nmore about it")
        return [-item for item in items]


def there(value: Any = None) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def submit(batcher: Batcher[int, int], number: int, cost: int, kind: str = "", about: Any = None) -> Future[int]:
    return batcher.submit(number, about or there(), lambda _: cost, kind=kind, cost=cost)


@contextmanager
def batching(encoders: Sequence[Recorder], most: int) -> Iterator[Batcher[int, int]]:
    lanes: list[Lane[int, int]] = [Lane(encoder, f"lane-{i}") for i, encoder in enumerate(encoders)]
    yield Batcher(lanes, most)
    for lane in lanes:
        lane.thread.shutdown()


# ---- what goes together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "costs", "expected"),
    [
        (1, [3, 3, 3], [[3], [3], [3]]),
        (6, [3, 3, 3], [[3, 3], [3]]),
        (7, [3, 3, 3, 9, 1], [[3, 3], [3], [9], [1]]),
        (7, [1, 2, 3, 4], [[1, 2, 3], [4]]),
    ],
)
def test_a_batch_is_full_before_it_costs_more_than_the_bound(
    most: int, costs: list[int], expected: list[list[int]]
) -> None:
    encoder = Recorder()
    with batching([encoder], most) as batcher:
        results = [submit(batcher, number, cost) for number, cost in enumerate(costs)]
        batcher.send(len(costs))
    assert encoder.batches == expected
    assert [result.result() for result in results] == [-cost for cost in costs]


def test_only_one_kind_goes_together() -> None:
    encoder = Recorder()
    with batching([encoder], 100) as batcher:
        for number, (kind, cost) in enumerate([("wide", 1), ("tall", 2), ("wide", 3), ("tall", 4)]):
            submit(batcher, number, cost, kind)
        batcher.send(3)
    assert sorted(encoder.batches) == [[1, 3], [2, 4]]


def test_a_batch_goes_when_its_first_piece_may_wait_no_longer() -> None:
    encoder = Recorder()
    with batching([encoder], 100) as batcher:
        results = [submit(batcher, number, number + 1, "odd" if number % 2 else "even") for number in range(6)]
        batcher.send(0)
        wait(results[::2], timeout=HANG)
        assert not any(result.done() for result in results[1::2])
        batcher.send(1)
    assert encoder.batches == [[1, 3, 5], [2, 4, 6]]


def test_what_is_about_the_same_goes_to_the_copy_that_has_it() -> None:
    encoders = [Recorder(), Recorder(), Recorder()]
    first, second = there(), there()
    with batching(encoders, 1) as batcher:
        submit(batcher, 0, 1, about=first)
        submit(batcher, 1, 2, about=first)
        submit(batcher, 2, 3, about=second)
        submit(batcher, 3, 4, about=second)
        submit(batcher, 4, 5, about=first)
    together = [batch for encoder in encoders for batch in encoder.batches]
    assert sorted(together) == [[1], [2], [3], [4], [5]]
    where = {item: i for i, encoder in enumerate(encoders) for (item,) in encoder.batches}
    assert where[1] == where[2]
    assert where[3] == where[4]


def test_copies_share_what_is_about_different_things() -> None:
    """Nothing ends before everything is submitted: a copy that is done would rightly get more."""
    encoders, gates = [Recorder(), Recorder()], [Future[None]() for _ in range(4)]
    with batching(encoders, 1) as batcher:
        for number, gate in enumerate(gates):
            submit(batcher, number, number + 1, about=gate)
        for gate in gates:
            gate.set_result(None)
    assert [len(encoder.batches) for encoder in encoders] == [2, 2]


# ---- what fails ------------------------------------------------------------------------------------------------------


def test_a_piece_without_its_image_fails_for_itself() -> None:
    encoder, missing = Recorder(), Future[Any]()
    missing.set_exception(SourceError("cannot be read"))
    with batching([encoder], 6) as batcher:
        results = [submit(batcher, number, 2, about=missing if number == 1 else None) for number in range(3)]
    assert encoder.batches == [[2, 2]]
    assert [results[0].result(), results[2].result()] == [-2, -2]
    with pytest.raises(SourceError, match="cannot be read"):
        results[1].result()


def test_what_the_encoder_raises_is_the_result_of_all_that_it_had() -> None:
    encoder = Recorder()
    encoder.encode = lambda items: [][1]  # type: ignore[method-assign]
    with batching([encoder], 2) as batcher:
        results = [submit(batcher, number, 1) for number in range(2)]
    assert all(isinstance(result.exception(), IndexError) for result in results)


def test_what_never_began_is_cancelled() -> None:
    encoder, gate = Recorder(), Future[None]()
    lane: Lane[int, int] = Lane(encoder, "lane")
    batcher: Batcher[int, int] = Batcher([lane], 1)
    running, waiting = submit(batcher, 0, 1, about=gate), submit(batcher, 1, 2)
    lane.thread.shutdown(wait=False, cancel_futures=True)
    gate.set_result(None)
    assert running.result() == -1
    assert waiting.cancelled()


# ---- what there is room for ------------------------------------------------------------------------------------------


def test_where_memory_runs_out_half_as_much_is_tried_from_there_on() -> None:
    encoder = Recorder(room=5)
    with batching([encoder], 8) as batcher:
        results = [submit(batcher, number, 1) for number in range(24)]
    assert [result.result() for result in results] == [-1] * 24
    assert list(map(len, encoder.batches)) == [8, 4, 4, 4, 4, 4, 4]


def test_a_piece_that_does_not_fit_alone_is_an_error_and_the_others_are_done() -> None:
    encoder = Recorder(room=5)
    with batching([encoder], 10) as batcher:
        results = [submit(batcher, number, cost) for number, cost in enumerate([1, 2, 7])]
    assert [results[0].result(), results[1].result()] == [-1, -2]
    with pytest.raises(DeviceError) as caught:
        results[2].result()
    message = "a device has too little memory for one sample (found CUDA out of memory. Tried to allocate 2.00 GiB)"
    assert str(caught.value).startswith(message)
    assert "--vae-device" in str(caught.value)


@dataclass
class FakeMemory:
    """The memory of a GPU, as torch tells of it."""

    total: int
    in_use: int
    cached: int = 0
    peak: int = 0

    def work(self, peak: int) -> None:
        self.peak = max(self.peak, self.in_use + peak)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> FakeMemory:
    fake = FakeMemory(total=10_000, in_use=4_000, cached=500)

    def reset(device: torch.device) -> None:
        fake.peak = fake.in_use

    answers: dict[str, Callable[[torch.device], Any]] = {
        "reset_peak_memory_stats": reset,
        "memory_allocated": lambda device: fake.in_use,
        "max_memory_allocated": lambda device: fake.peak,
        "memory_reserved": lambda device: fake.in_use + fake.cached,
        "mem_get_info": lambda device: (fake.total - fake.in_use - fake.cached, fake.total),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, answer)
    return fake


def test_a_device_that_cannot_report_its_free_memory_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as some Intel GPUs: only an out-of-memory error makes their batches smaller."""

    def refuse(device: torch.device) -> Any:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(torch.cuda, "mem_get_info", refuse)
    assert MemoryBudget(GPU).take([10] * 10) == 10


def test_a_gpu_is_given_one_piece_and_then_what_its_free_memory_holds(memory: FakeMemory) -> None:
    room = MemoryBudget(GPU)
    assert room.take([10, 10, 10]) == 1
    with room.measuring(10):
        memory.work(peak=1_000)  # 100 bytes for each unit, of 6,000 that are free
    assert room.take([10] * 10) == 6 * MEMORY_FRACTION // 1 == 4
    with room.measuring(40):
        memory.work(peak=8_000)  # some shapes take more
    assert room.take([10] * 10) == 2
    memory.in_use = 7_000  # and another program came
    with room.measuring(10):
        memory.work(peak=100)
    assert room.take([10] * 10) == 1


def test_memory_that_ran_out_is_remembered_by_what_is_measured_next(memory: FakeMemory) -> None:
    room = MemoryBudget(GPU)
    with room.measuring(10):
        memory.work(peak=100)
    assert room.take([10] * 100) == 48
    with pytest.raises(torch.OutOfMemoryError), room.measuring(480):
        raise torch.OutOfMemoryError
    room.ran_out(480)
    assert room.take([10] * 100) == 24
    with room.measuring(240):
        memory.work(peak=2_400)
    assert room.take([10] * 100) == 24


def test_batches_do_not_depend_on_timing() -> None:
    """The same pieces in the same order make the same batches, whether the lane is fast or waits for its first."""
    found = []
    for held in (False, True):
        encoder, gate = Recorder(), Future[None]()
        with batching([encoder], 7) as batcher:
            if not held:
                gate.set_result(None)
            costs = itertools.islice(itertools.cycle([2, 3, 1, 5]), 40)
            for number, cost in enumerate(costs):
                submit(batcher, number, cost, "ab"[number % 2], about=gate if number == 0 else None)
                batcher.send(number - 4)
            batcher.send(40)
            if held:
                gate.set_result(None)
        found.append(encoder.batches)
    assert found[0] == found[1]


# ---- two lanes on one device -----------------------------------------------------------------------------------------


@dataclass
class Two:
    """An encoder for each of two lanes on one GPU, and what each does with an item: it may look at the other's work."""

    memory: FakeMemory
    do: dict[str, Callable[[int], None]] = field(default_factory=dict)
    working: set[str] = field(default_factory=set)

    def lane(self, name: str, turns: Turns) -> Lane[int, int]:
        def encode(items: Sequence[int]) -> list[int]:
            self.working.add(name)
            try:
                for item in items:
                    self.do[name](item)
            finally:
                self.working.discard(name)
            return [-item for item in items]

        recorder = Recorder(device=GPU)
        recorder.encode = encode  # type: ignore[method-assign]
        return Lane(recorder, name, turns)

    @contextmanager
    def batching(self) -> Iterator[dict[str, Batcher[int, int]]]:
        turns = Turns()
        lanes = {name: self.lane(name, turns) for name in ("vae", "text")}
        yield {name: Batcher([lane], 1) for name, lane in lanes.items()}
        for lane in lanes.values():
            lane.thread.shutdown()


@pytest.fixture
def two(memory: FakeMemory, monkeypatch: pytest.MonkeyPatch) -> Two:
    monkeypatch.setattr(micro_batches, "new_stream", lambda device: None)
    return Two(memory)


def test_work_that_is_measured_has_the_device_alone_and_other_work_shares_it(two: Two) -> None:
    """`meeting` ends only when both lanes are in it at once."""
    begun, meeting, beside = Event(), Barrier(2), []

    def vae(cost: int) -> None:
        if cost == 10:
            begun.set()
            Event().wait(0.2)  # time for the other lane to begin, if nothing keeps it
            beside.append(set(two.working))
        else:
            meeting.wait(HANG)

    def text(cost: int) -> None:
        beside.append(set(two.working)) if cost == 5 else meeting.wait(HANG)

    two.do = {"vae": vae, "text": text}
    with two.batching() as lanes:
        results = [submit(lanes["vae"], 0, 10)]
        assert begun.wait(HANG)
        results += [submit(lanes["text"], 0, 5)]
        results[1].result(HANG)
        results += [submit(lanes["vae"], 1, 9), submit(lanes["text"], 1, 4)]
        assert [result.result(HANG) for result in results] == [-10, -5, -9, -4]
    assert beside == [{"vae"}, {"text"}]


def test_lanes_on_one_device_get_equal_parts_of_its_memory(two: Two) -> None:
    """500 bytes for each of 10 units; 6,000 are free, so 3,000 for each lane."""
    two.do = dict.fromkeys(("vae", "text"), lambda cost: two.memory.work(peak=500))
    with two.batching() as lanes:
        assert submit(lanes["vae"], 0, 10).result(HANG) == -10
        (lane,) = lanes["vae"].lanes
        assert lane.memory.take([10] * 10) == 3_000 * MEMORY_FRACTION // 500 == 4


@pytest.mark.parametrize("fits", [True, False])
def test_an_item_that_does_not_fit_beside_another_lane_is_tried_again_without_it(two: Two, fits: bool) -> None:
    beside, met, ran_out = [], Barrier(2), Event()

    def vae(cost: int) -> None:
        if cost == 9:
            met.wait(HANG)
            assert ran_out.wait(HANG)
            Event().wait(0.2)  # time for a second attempt that does not wait

    def text(cost: int) -> None:
        if cost == 9:
            if not beside:
                met.wait(HANG)
            beside.append("vae" in two.working)
            ran_out.set()
            if beside[-1] or not fits:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    two.do = {"vae": vae, "text": text}
    with two.batching() as lanes:
        for lane in lanes.values():  # measured
            submit(lane, 0, 10).result(HANG)
        other, result = submit(lanes["vae"], 1, 9), submit(lanes["text"], 1, 9)
        assert other.result(HANG) == -9
        assert (result.result(HANG) == -9) if fits else isinstance(result.exception(HANG), DeviceError)
    assert beside == [True, False]


def test_a_batch_that_does_not_fit_beside_another_lane_keeps_its_size(
    memory: FakeMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch is tried alone first: the memory of the other lane's work is free again."""
    monkeypatch.setattr(micro_batches, "new_stream", lambda device: None)
    recorder, turns = Recorder(device=GPU), Turns()
    turns.lanes = 1  # the other one
    lane: Lane[int, int] = Lane(recorder, "vae", turns)
    batcher = Batcher([lane], 7)
    assert submit(batcher, 0, 10).result(HANG) == -10, "measured"
    encode = recorder.encode

    def full_once(items: Sequence[int]) -> list[int]:
        recorder.room = float("inf") if len(recorder.batches) > 1 else 0
        return encode(items)

    recorder.encode = full_once  # type: ignore[method-assign]
    assert [future.result(HANG) for future in (submit(batcher, 1, 3), submit(batcher, 2, 4))] == [-3, -4]
    assert recorder.batches == [[10], [3, 4], [3, 4]]
    lane.thread.shutdown()


def test_each_lane_works_on_a_stream_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, current, seen = itertools.count(), [None], []

    @contextmanager
    def on_stream(stream: int | None) -> Iterator[None]:
        current[0] = stream
        yield
        current[0] = None

    monkeypatch.setattr(micro_batches, "new_stream", lambda device: next(streams))
    monkeypatch.setattr(micro_batches, "on_stream", on_stream)
    for _ in range(2):
        encoder = Recorder()
        encoder.encode = lambda items: [seen.append(current[0]) for _ in items]  # type: ignore[method-assign]
        with batching([encoder], 1) as batcher:
            submit(batcher, 0, 1)
            submit(batcher, 1, 1)
    assert seen == [0, 0, 1, 1]
    assert current == [None]
