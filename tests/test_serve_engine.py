"""The service without its protocol: each sample is encoded once, and what was stored survives."""

from __future__ import annotations

import errno
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest

from qwen_cache import open_cache
from qwen_cache.encode.builder import BuildJob, rules
from qwen_cache.encode.plan import PlannedSample, plan_row
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.errors import (
    BusyError,
    ConfigError,
    MemberError,
    QwenCacheError,
    ServerFaultError,
    SourceError,
    StoppingError,
)
from qwen_cache.format.shard import ShardWriter
from qwen_cache.format.staging import Destination
from qwen_cache.service import pool as pool_module
from qwen_cache.service.engine import Engine, State
from qwen_cache.service.pool import Memory, Pool
from qwen_cache.service.routes import Uploaded

from .support.commands import run
from .support.fake_lanes import FakeLanes
from .support.server import BUCKET
from .support.serving import png, row, running, service_job
from .support.waiting import wait_until

NEVER = ("serve.commit_seconds=1000", "serve.commit_samples=1000")
WAIT = 600.0  # seconds, of a result that comes at once

Jobs = Callable[..., BuildJob]


@pytest.fixture
def job_at(tiny_model: Callable[[str], Path], tmp_path: Path) -> Jobs:
    """A job into `out` of the temporary folder."""
    return lambda out="pool", *settings: service_job(tiny_model("edit-plus"), tmp_path / out, *settings)


@contextmanager
def started(job: BuildJob, lanes: FakeLanes | None = None) -> Iterator[Engine]:
    with Engine(job, lambda job: lanes or FakeLanes(job), job.config.serve) as engine:
        yield engine


def send(engine: Engine, number: int) -> str:
    samples = engine.plan(row(number))
    return engine.submit(samples, 1)[0].key


def test_each_sample_is_encoded_once_whoever_sends_it(job_at: Jobs) -> None:
    job = job_at()
    lanes = FakeLanes(job)
    with started(job, lanes) as engine, ThreadPoolExecutor(4) as clients:
        keys = list(clients.map(lambda number: send(engine, number % 10), range(80)))
        done = [engine.reached(key, State.ENCODED).result(WAIT).state for key in keys]
        fetched = {key: engine.sample(key) for key in keys}
    assert set(done) <= {State.ENCODED, State.STORED}
    assert Counter(lanes.encoded) == Counter({f"row {number}": 1 for number in range(10)})
    cache = open_cache(job.folder)
    assert len(cache) == len(fetched)
    for sample in cache:
        found = fetched[sample.key]
        assert found is not None
        assert found[0] == sample.row.meta
        assert bytes(found[1]["image_latents"]) == bytes(sample.buffer("image_latents"))
    assert run("qwen-cache", "verify", job.folder).code == 0
    with started(job, again := FakeLanes(job)) as engine:
        assert engine.submit(engine.plan(row(3)), 1)[0].state is State.STORED
    assert again.encoded == []


def test_samples_of_many_clients_are_encoded_together(job_at: Jobs) -> None:
    """Eight that wait at the same time, of two sizes: images by shape, and prompts up to a token budget."""
    job, go = job_at("pool", "cache.vae_batch_pixels=1000000", "cache.text_batch_tokens=100000"), Event()
    rows = [row(number) for number in range(8)]
    rows[1::2] = [
        replace(each, target=Uploaded(png(number, (64, 96)), "target")) for number, each in enumerate(rows[1::2])
    ]

    def load(job: BuildJob) -> Any:
        assert go.wait(WAIT)
        return load_lanes(job)

    with Engine(job, load, job.config.serve) as engine, ThreadPoolExecutor(8) as clients:
        keys = list(clients.map(lambda each: engine.submit(engine.plan(each), 1)[0].key, rows))
        go.set()
        assert {engine.reached(key, State.ENCODED).result(WAIT).problem for key in keys} == {None}
        batches = [("vae-0", 2, 16), ("text-0", 1, 8)]
        wait_until(lambda: [(lane.name, lane.batches, lane.done) for lane in engine.states()] == batches)


def test_a_sample_of_another_cache_is_copied_or_encoded_if_it_is_damaged(job_at: Jobs) -> None:
    """Also from one that is compressed."""
    with started(other := job_at("other", "cache.compression=zstd", "serve.commit_seconds=0.05")) as engine:
        keys = [send(engine, number) for number in range(3)]
        assert all(engine.reached(key, State.STORED).result(WAIT) for key in keys)
    (shard,) = other.folder.glob("*.tar")
    data, damaged = bytearray(shard.read_bytes()), open_cache(other.folder)[keys[1]].row
    data[damaged.entry.data] ^= 1
    shard.write_bytes(data)
    job = job_at("pool", f'cache.reuse=["{other.folder}"]')
    lanes = FakeLanes(job)
    with started(job, lanes) as engine:
        for number in range(4):
            send(engine, number)
    assert (sorted(lanes.encoded), engine.observer.counts["copied"]) == (["row 1", "row 3"], 2)
    assert len(open_cache(job.folder)) == 4
    assert run("qwen-cache", "verify", job.folder).code == 0


def test_a_sample_that_cannot_be_encoded_fails_alone(job_at: Jobs) -> None:
    class Failing(FakeLanes):
        def result(self, sample: PlannedSample) -> Any:
            if sample.row.name == "row 1" and self.encoded.count("row 1") == 0:
                self.encoded.append("row 1")
                raise SourceError("no luck", where="there")
            return super().result(sample)

    job = job_at()
    with started(job, Failing(job)) as engine:
        keys = [send(engine, number) for number in range(3)]
        found = [engine.reached(key, State.STORED) for key in keys]
        assert found[1].result(WAIT).problem == "there: no luck"
        assert engine.status([keys[1]])[0].state is State.FAILED
        send(engine, 1)  # it is tried again
        assert engine.reached(keys[1], State.ENCODED).result(WAIT).state is State.ENCODED
    assert len(open_cache(job.folder)) == 3


def test_a_full_queue_refuses_and_frees(job_at: Jobs) -> None:
    go = Event()

    class Waiting(FakeLanes):
        def result(self, sample: PlannedSample) -> Any:
            go.wait(WAIT)
            return super().result(sample)

    job = job_at("pool", "serve.queue_samples=2", "serve.queue_bytes=100")
    with started(job, Waiting(job)) as engine:
        keys: list[str] = []
        with pytest.raises(BusyError, match="queue"):
            keys.extend(send(engine, number) for number in range(40))
        go.set()
        for key in keys:
            engine.reached(key, State.ENCODED).result(WAIT)
        assert engine.submit(engine.plan(row(200)), 1)[0].state is State.ACCEPTED
    assert engine.waiting == (0, 0)
    with pytest.raises(StoppingError):
        engine.submit(engine.plan(row(300)), 1)


def test_commits_by_number_and_by_time(job_at: Jobs) -> None:
    with started(job_at("by number", "serve.commit_samples=2", "serve.commit_seconds=1000")) as engine:
        keys = [send(engine, number) for number in range(2)]
        assert [engine.reached(key, State.STORED).result(WAIT).state for key in keys] == [State.STORED] * 2
        last = send(engine, 2)
        engine.reached(last, State.ENCODED).result(WAIT)
        assert engine.status([last])[0].state is State.ENCODED
    with started(job_at("by time", "serve.commit_seconds=0.05")) as engine:
        assert engine.reached(send(engine, 1), State.STORED).result(WAIT).state is State.STORED


def test_what_a_killed_service_encoded_is_found(job_at: Jobs, tmp_path: Path) -> None:
    """The folder is copied while it runs: what a SIGKILL leaves."""
    job = job_at("pool", *NEVER)
    with started(job) as engine:
        keys = [send(engine, number) for number in range(3)]
        for key in keys:
            engine.reached(key, State.ENCODED).result(WAIT)
        shutil.copytree(tmp_path / "pool", tmp_path / "left")
    with started(job_at("left")) as engine:
        assert {each.state for each in engine.status(keys)} == {State.STORED}
    assert run("qwen-cache", "verify", tmp_path / "left").code == 0
    with pytest.raises(QwenCacheError), started(job_at("left")), started(job_at("left")):
        pass  # one service at a time


def test_a_commit_that_fails_is_tried_again(job_at: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_at("pool", "serve.commit_seconds=0.05")
    room, commit = Event(), pool_module.commit_update

    def failing(*arguments: Any) -> Any:
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device")
        return commit(*arguments)

    monkeypatch.setattr(pool_module, "commit_update", failing)
    with started(job) as engine:
        keys = [send(engine, number) for number in range(2)]
        wait_until(lambda: engine.fault)
        with pytest.raises(ServerFaultError, match="disk is full"):
            send(engine, 3)
        room.set()
        assert {engine.reached(key, State.STORED).result(WAIT).state for key in keys} == {State.STORED}
        assert engine.observer.counts["failed_commits"]
        assert engine.fault is None
    assert len(open_cache(job.folder)) == 2
    assert run("qwen-cache", "verify", job.folder).code == 0


def test_what_waits_while_commits_fail_is_bounded(job_at: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the reason is: a full queue's worth is taken, and the next sample refused with it."""
    job = job_at("pool", "serve.commit_seconds=0.05", "serve.queue_samples=3")
    is_well, commit = Event(), pool_module.commit_update

    def failing(*arguments: Any) -> Any:
        if not is_well.is_set():
            raise OSError(errno.EIO, "Input/output error")
        return commit(*arguments)

    monkeypatch.setattr(pool_module, "commit_update", failing)
    with started(job) as engine:
        send(engine, 0)
        wait_until(lambda: engine.fault)
        keys = [send(engine, number) for number in (1, 2)]
        with pytest.raises(ServerFaultError, match=r"cannot store samples: OSError: .*Input/output") as refused:
            send(engine, 3)
        assert refused.value.code == "storage_failed"
        is_well.set()
        assert {engine.reached(key, State.STORED).result(WAIT).state for key in keys} == {State.STORED}


def test_a_full_disk_is_no_sample_s_fault(job_at: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """An accepted row waits for room; meanwhile nothing new is accepted, and a client learns why."""
    job, room = job_at("pool", "serve.commit_seconds=0.05"), Event()
    write = ShardWriter._write

    def full(writer: ShardWriter, *pieces: Any) -> None:
        write(writer, *pieces)
        if not room.is_set():
            raise OSError(errno.ENOSPC, "No space left on device", str(writer.path))

    monkeypatch.setattr(ShardWriter, "_write", full)
    with running(job) as url, httpx2.Client(verify=False, base_url=url, timeout=WAIT) as http:

        def post(number: int) -> httpx2.Response:
            return http.post("/v1/samples", data={"prompt": f"number {number}"}, files={"target": png(number)})

        keys = [post(1).json()["samples"][0]["key"]]
        wait_until(lambda: http.get("/readyz").json().get("code") == "storage_full")
        for answer in (post(2), http.get(f"/v1/samples/{keys[0]}"), http.get("/readyz")):
            assert (answer.status_code, answer.json()["code"]) == (503, "storage_full")
            assert "No space left on device" in answer.text
        assert post(2).headers["Retry-After"] == "10"
        room.set()
        wait_until(lambda: http.get("/readyz").is_success)
        keys.append(post(2).json()["samples"][0]["key"])
        states = http.post("/v1/states", json={"keys": keys, "wait": "stored", "seconds": 60}).json()["states"]
        assert [each["state"] for each in states] == ["stored", "stored"]
    assert run("qwen-cache", "verify", job.folder).code == 0


def test_too_little_memory_is_no_sample_s_fault(job_at: Jobs) -> None:
    """The sample fails for now; it is encoded when it is sent again."""
    now, errors = [0.0], [MemoryError(), RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")]

    class Failing(FakeLanes):
        def result(self, sample: PlannedSample) -> Any:
            if errors:
                raise errors.pop()
            return super().result(sample)

    job = job_at()
    with Engine(job, lambda job: Failing(job), job.config.serve, clock=lambda: now[0]) as engine:
        for _ in range(2):
            failed = engine.reached(key := send(engine, 1), State.ENCODED).result(WAIT)
            assert (failed.state, failed.code) == (State.FAILED, "out_of_memory")
            assert engine.status([key])[0] == failed
            assert engine.failed_lately(key)
            now[0] += 11
            assert not engine.failed_lately(key)
        assert engine.reached(send(engine, 1), State.ENCODED).result(WAIT).state is State.ENCODED
        assert engine.fault is None


@pytest.mark.parametrize("harm", ["flip", "remove", "name"])
def test_a_sample_that_cannot_be_stored_is_dropped_and_the_others_are_kept(
    job_at: Jobs, monkeypatch: pytest.MonkeyPatch, harm: str
) -> None:
    """A shard that changes on the disk before it is committed, or a name that no index can hold."""
    job = job_at("pool", *NEVER)
    with started(job) as engine:
        keys = [send(engine, number) for number in range(3)]
        for key in keys:
            engine.reached(key, State.ENCODED).result(WAIT)
        (shard,) = engine.store._open  # type: ignore[attr-defined]
        if harm == "flip":
            data = shard.bytes()
            with open(shard.writer.path, "r+b") as file:
                file.seek(shard.entries[keys[1]].data)
                file.write(bytes([data[file.tell()] ^ 1]))
        elif harm == "remove":
            deliver = Destination.deliver

            def removed(self: Destination, stored: Any, folder: Path) -> None:
                monkeypatch.setattr(Destination, "deliver", deliver)
                (folder / stored[0].name).unlink()

            monkeypatch.setattr(Destination, "deliver", removed)
        else:
            shard.names[keys[1]] = "half \ud83d"
        waiting = [engine.reached(key, State.STORED) for key in keys]
    found = [each.result(WAIT) for each in waiting]
    expected = [State.STORED] * 3
    if harm != "remove":
        expected[1] = State.FAILED
        assert found[1].code == "lost"
    assert [each.state for each in found] == expected
    assert len(open_cache(job.folder)) == expected.count(State.STORED)
    assert run("qwen-cache", "verify", job.folder).code == 0


def test_a_full_disk_while_others_are_kept_loses_none(job_at: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A commit that finds a damaged sample writes the others again; until it can, they stay as they are."""
    job, add = job_at("pool"), ShardWriter.add
    lanes = FakeLanes(job)
    with Pool(job) as pool:
        samples = [plan_row(row(number), rules(job))[0] for number in range(3)]
        for sample in samples:
            pool.add(sample.row.name, *lanes.result(sample))
        pool._open[0].names[samples[1].key] = "half \ud83d"

        def full(writer: ShardWriter, *arguments: Any) -> None:
            monkeypatch.setattr(ShardWriter, "add", add)
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(ShardWriter, "add", full)
        with pytest.raises(OSError, match="No space"):
            pool.commit()
        assert all(pool.has(sample.key) for sample in samples)
        assert pool.commit().keys() == {samples[1].key}
        assert [pool.is_stored(sample.key) for sample in samples] == [True, False, True]
    assert run("qwen-cache", "verify", job.folder).code == 0


def test_a_fault_that_is_over_refuses_nobody(job_at: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the sample that met it cannot be stored for a reason of its own, and no other waits."""
    job, add = job_at("pool", "serve.commit_seconds=0.05"), Pool.add
    errors = [MemberError("unfit", where="there"), OSError(errno.ENOSPC, "No space left on device")]

    def failing(pool: Pool, *arguments: Any) -> None:
        if errors:
            raise errors.pop()
        add(pool, *arguments)

    monkeypatch.setattr(Pool, "add", failing)
    with started(job) as engine:
        assert engine.reached(send(engine, 1), State.STORED).result(WAIT).state is State.FAILED
        wait_until(lambda: engine.fault is None)
        assert engine.reached(send(engine, 2), State.STORED).result(WAIT).state is State.STORED


def test_encoders_that_cannot_be_loaded_end_it(job_at: Jobs) -> None:
    def broken(job: BuildJob) -> FakeLanes:
        raise QwenCacheError("no weights")

    job = job_at()
    with Engine(job, broken, job.config.serve) as engine:
        with pytest.raises(QwenCacheError, match="no weights"):
            engine.ended.result(WAIT)
        with pytest.raises(StoppingError):
            send(engine, 1)


def test_a_cache_of_another_recipe_is_refused(job_at: Jobs) -> None:
    with started(job_at()) as engine:
        send(engine, 1)
    with pytest.raises(ConfigError, match="upscale"), started(job_at("pool", "data.upscale=false")):
        pass


def test_memory_keeps_the_newest(job_at: Jobs) -> None:
    job = job_at("pool", "serve.store=false")
    with started(job) as engine:
        key = send(engine, 1)
        assert engine.reached(key, State.STORED).result(WAIT).state is State.ENCODED
        found = engine.sample(key)
        assert found is not None
    assert not (job.folder / "cache.json").exists()
    meta, tensors = found
    memory = Memory(2 * sum(spec.stored_bytes for spec in meta.tensors.values()))
    metas = [replace(meta, prompt=f"number {i}") for i in range(3)]
    for each in metas:
        memory.add("", each, tensors)
    assert [memory.has(each.key) for each in metas] == [False, True, True]


@pytest.mark.slow
def test_two_services_share_a_bucket(
    s3: tuple[str, int], tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each commits while the other has read an older dataset; one sample is encoded by both and stored once."""
    job = service_job(tiny_model("edit-plus"), f"s3://{BUCKET}/team", *NEVER)
    with Pool(job) as one, Pool(job) as other:
        lanes = FakeLanes(job)
        for store, numbers in ((one, (1, 2)), (other, (2, 3))):
            for number in numbers:
                (sample,) = plan_row(row(number), rules(job))
                store.add(f"row {number}", *lanes.result(sample))
        one.commit()
        other.commit()
        assert len(other) == 3
    cache = open_cache(job.folder)
    assert sorted(sample.name for sample in cache) == ["row 1", "row 2", "row 3"]
    assert run("qwen-cache", "verify", f"s3://{BUCKET}/team").code == 0
