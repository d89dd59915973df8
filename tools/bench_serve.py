"""Load a server of the service, kill it, and compare its throughput with that of `build`.

    python tools/bench_serve.py MODEL [--samples 500] [--requests 10000] [--clients 8] [--kills 20]
                                      [--repeats 3] [--encoder-seconds 0] [--json]

MODEL is a folder of `tools/make_tiny_model.py`. First `load`: clients ask for random samples, all of which are checked
against a cache that `build` made; then again, while the server is killed with SIGKILL at random moments and started
again, until there were enough requests and all kills. Every sample that was reported as stored must be there after each
kill, and an undisturbed server must not grow in the second half. Then `throughput`: the same samples by the encoders of
this process, and by those of a new server, alternately; encoders are loaded before. With `--encoder-seconds 0.05` both
encoders take so much longer for each image and prompt, without using the CPU, as on a GPU: the tiny ones take less time
than HTTP.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from threading import Event, Lock
from typing import IO, Any

import numpy as np
from PIL import Image

from qwen_cache import open_cache
from qwen_cache.encode import builder, write
from qwen_cache.encode.builder import BuildJob, Encoders
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.encode.text import TextEncoder
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.format import directory
from qwen_cache.format.identity import content_hash
from qwen_cache.service.client import Client
from qwen_cache.service.encoding import IN_FLIGHT, ServerEncoders, prepare_at
from qwen_cache.service.engine import State
from qwen_cache.service.routes import States
from qwen_cache.settings.load import load_config

TOOLS = Path(__file__).parent
SETTINGS = ("data.vae_image_size=65536", "data.condition_image_size=12544", "cache.dtype=float32")
COMMIT = ("serve.commit_samples=64", "serve.commit_seconds=0.5")


def write_source(folder: Path, samples: int) -> None:
    """Pairs of random images with a caption each."""
    generator = np.random.default_rng(0)
    for kind in ("target_images", "control_images"):
        (folder / kind).mkdir(parents=True)
        for i in range(samples):
            coarse = generator.integers(0, 255, (8, 8, 3), np.uint8)
            Image.fromarray(coarse).resize((256, 256), Image.Resampling.BICUBIC).save(folder / kind / f"{i:05}.png")
    for i in range(samples):
        (folder / "target_images" / f"{i:05}.txt").write_text(f"make number {i} red")


def slow_down(seconds: float) -> None:
    """Make both encoders of this process take so much longer for each image and prompt."""

    def waiting(encode: Callable[..., Any]) -> Callable[..., Any]:
        def encode_slowly(*arguments: Any) -> Any:
            time.sleep(seconds * len(arguments[-1]))
            return encode(*arguments)

        return encode_slowly

    if seconds:
        VaeEncoder._encode = waiting(VaeEncoder._encode)  # type: ignore[method-assign]
        TextEncoder.encode = waiting(TextEncoder.encode)  # type: ignore[method-assign]


class Server:
    """A server in a process of its own, which can be killed and started again at the same address."""

    def __init__(
        self,
        model: Path,
        pool: Path,
        settings: Sequence[str] = (),
        encoder_seconds: float = 0,
        log: int | IO[bytes] = subprocess.DEVNULL,
    ) -> None:
        self.model, self.pool, self.address = model, pool, "127.0.0.1:0"
        self.settings, self.encoder_seconds, self.log = (*SETTINGS, *settings), encoder_seconds, log
        self.process: subprocess.Popen[str] | None = None
        self.peak = 0

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    def start(self) -> None:
        sets = [item for each in self.settings for item in ("--set", each)]
        command = ["serve", "--model", self.model, "--out", self.pool, "--listen", self.address, *sets]
        code = f"import bench_serve, qwen_cache.cli as cli; bench_serve.slow_down({self.encoder_seconds}); cli.main()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *map(str, command)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(TOOLS), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=self.log,
            text=True,
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line.startswith("listening on http://"), line
        self.address = line.strip().removeprefix("listening on http://")

    def wait_until_ready(self) -> None:
        import httpx2

        while httpx2.get(f"{self.url}/readyz", timeout=600).status_code != 200:
            time.sleep(0.1)

    def end(self, number: int) -> int:
        """Send a signal and wait; the exit code."""
        assert self.process is not None
        self.peak = max(self.peak, self.memory("VmHWM"))
        self.process.send_signal(number)
        code = self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()
        return code

    def memory(self, field: str) -> int:
        """A field of /proc/PID/status in bytes: VmHWM is the most that it had, RssAnon what it has besides files."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.split(f"{field}:")[1].split()[0])


def load(server: Server, job: BuildJob, built: Path, requests: int, clients: int, kills: int) -> dict[str, Any]:
    """Random requests of several clients while the server is killed; AssertionError for anything lost or wrong."""
    plan = builder.plan_build(job, builder.load_existing(job))
    rows = {sample.key: sample for sample in plan.samples}
    expected = {sample.key: sample for sample in open_cache(built)}
    assert rows.keys() == expected.keys()
    keys, stored, asked, lock = list(rows), set[str](), set[str](), Lock()
    server.start()
    server.wait_until_ready()
    encoding = ServerEncoders(client := Client(server.url), job)

    def request(number: int) -> None:
        key = random.Random(number).choice(keys)
        meta, tensors = encoding.result(encoding.submit(rows[key]))
        want = expected[key].row.meta
        assert meta.tensors == want.tensors, key  # which has the hashes of all of them
        assert all(content_hash(tensors[name]) == spec.xxh3_128 for name, spec in want.tensors.items()), key
        (status,) = client.ask(States, "POST", "/v1/states", value={"keys": [key]}).states
        with lock:
            asked.add(key)
            stored.update([key] if status.state == State.STORED else [])

    numbers, all_killed, memory = count(), Event(), dict[str, int]()

    def send() -> None:
        """Requests until there were enough, and all kills."""
        for number in numbers:
            if number == requests // 2 and not kills:
                memory["half_bytes"] = server.memory("RssAnon")
            if number >= requests and all_killed.is_set():
                return
            request(number)

    def kill() -> int:
        moments = random.Random(1)
        for _ in range(kills):
            time.sleep(moments.uniform(0.2, 2.0))
            with lock:
                promised = set(stored)
            server.end(signal.SIGKILL)
            found = {sample.key for sample in open_cache(server.pool)} if promised else set()
            assert promised <= found, f"{len(promised - found)} stored samples are lost"
            server.start()
            server.wait_until_ready()
        all_killed.set()
        return kills

    begin = time.monotonic()
    with encoding, client, ThreadPoolExecutor(clients) as threads, ThreadPoolExecutor(1) as killer:
        sending, killing = [threads.submit(send) for _ in range(clients)], killer.submit(kill)
        try:
            killed = killing.result()
        finally:
            all_killed.set()
        for future in sending:
            future.result()
        encoded = metric(server.url, "qwen_cache_encoded_total")
    memory |= {} if kills else {"end_bytes": server.memory("RssAnon")}
    code = server.end(signal.SIGTERM)
    names = [sample.key for sample in open_cache(server.pool)]
    assert code == 0, code
    assert set(names) == asked
    assert len(names) == len(asked)
    assert kills or encoded == len(asked), f"{encoded} encoded, {len(asked)} distinct"
    assert kills or memory["end_bytes"] < 1.1 * memory["half_bytes"], f"the server's memory grows: {memory}"
    report = {"requests": next(numbers) - clients, "distinct": len(asked), "kills": killed}
    return {**report, "seconds": time.monotonic() - begin, "peak_bytes": server.peak, **memory}


def metric(url: str, name: str) -> float:
    import httpx2

    lines = httpx2.get(f"{url}/metrics", timeout=600).text.splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def throughput(model: Path, source: Path, folder: Path, repeats: int, encoder_seconds: float) -> dict[str, Any]:
    """Samples per second of a build here and of one at a server."""
    slow_down(encoder_seconds)
    config = load_config(None, [*SETTINGS, f"model.path={model}", f"cache.path={folder / 'none'}"])
    local = builder.prepare_build(config, str(source))
    rates: dict[str, list[float]] = {"build": [], "build --at": []}
    with Encoders(load_lanes) as encoders:
        encoders.running(local)
        for repeat in range(repeats + 1):  # the first round warms up
            here = folder / f"here-{repeat}"
            rates["build"].append(_rate(_job(config, source, here), encoders))
            server = Server(model, folder / f"pool-{repeat}", (), encoder_seconds)
            server.start()
            server.wait_until_ready()
            with (
                Client(server.url) as client,
                Encoders(lambda job: ServerEncoders(client, job), IN_FLIGHT) as remote,
            ):
                at = prepare_at(
                    config.model_copy(update={"cache": _path(config, folder / f"at-{repeat}")}), str(source), client
                )
                rates["build --at"].append(_rate(at, remote))
            server.end(signal.SIGTERM)
    means = {name: statistics.median(values[1:]) for name, values in rates.items()}
    return {"samples_per_second": means, "ratio": means["build --at"] / means["build"]}


def _path(config: Any, out: Path) -> Any:
    return config.cache.model_copy(update={"path": str(out)})


def _job(config: Any, source: Path, out: Path) -> BuildJob:
    return builder.prepare_build(config.model_copy(update={"cache": _path(config, out)}), str(source))


def _rate(job: BuildJob, encoders: Encoders) -> float:
    with directory.writing(job.folder):
        existing = builder.load_existing(job)
        plan = builder.plan_build(job, existing)
        update = builder.make_update(job, existing, plan)
        begin = time.monotonic()
        write.run(job, update, plan.missing, encoders)
        return len(plan.missing) / (time.monotonic() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    for name, default in {"samples": 500, "requests": 10_000, "clients": 8, "kills": 20, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--encoder-seconds", type=float, default=0, help="for each image and prompt")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_source(folder / "source", options.samples)
        config = load_config(None, [*SETTINGS, f"model.path={options.model}", f"cache.path={folder / 'built'}"])
        job = builder.prepare_build(config, str(folder / "source"))
        with Encoders(load_lanes) as encoders:
            _rate(job, encoders)
        empty = _job(config, folder / "source", folder / "nothing")
        counts = (options.requests, options.clients)
        report: dict[str, Any] = {}
        for name, kills in {"load": 0, "kills": options.kills}.items() if options.requests else ():
            server = Server(options.model, folder / name, COMMIT)
            report[name] = load(server, empty, folder / "built", *counts, kills)
        if options.repeats:
            report["throughput"] = throughput(
                options.model, folder / "source", folder, options.repeats, options.encoder_seconds
            )
    print(json.dumps(report) if options.json else json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
