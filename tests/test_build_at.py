"""`build --at` and the Python client: the source is here, the encoders are on a server."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from itertools import cycle
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest

from qwen_cache import open_cache
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.errors import ConfigError, QwenCacheError, SourceError
from qwen_cache.service.client import Client
from qwen_cache.storage.remote import Url

from .support.caches import SMALL, build, contents
from .support.commands import HEAVY, Result, imported_by, refused, run
from .support.fake_lanes import FakeLanes
from .support.server import BUCKET
from .support.serving import png, running, service_job
from .support.sources import change_prompt


def build_at(url: str, source: Path, out: Path, *options: str) -> Result:
    return run("qwen-cache", "build", source, "--at", url, "--out", out, *options)


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def test_it_builds_the_bytes_of_a_build(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Also those of the validation cache, with it or alone; of a pair with a mask, and of one with two controls."""
    for path in [*pairs.rglob("china.*"), *pairs.rglob("flower.*")]:
        path.unlink()
    prompts = [{"prompt": "make it red", "control": str(next((pairs / "control_images").iterdir()))}]
    prompts += [{"prompt": "a cat " * 50}]  # whose tokens are counted there
    wanted = ("--set", f"validation.prompts={json.dumps(prompts)}")
    assert build(pairs, tmp_path / "here", model, *wanted).code == 0
    with running(service_job(model, tmp_path / "pool"), load_lanes) as url:
        result = build_at(url, pairs, tmp_path / "at", *wanted)
        assert result.code == 0, result.stderr
        assert result.stderr.endswith(f"  qwen-train run {tmp_path / 'at'} --model FOLDER_OR_REPOSITORY\n")
        assert build_at(url, pairs, tmp_path / "alone", *wanted, "--only-validation").code == 0
        assert "--measure" not in build_at(url, pairs, tmp_path / "new", "--dry-run").stderr
        assert not (tmp_path / "new").exists()
    for folder in ("here", "here/validation"):
        there = tmp_path / folder.replace("here", "at")
        assert contents(there) == contents(tmp_path / folder)
    assert contents(tmp_path / "alone" / "validation") == contents(tmp_path / "here" / "validation")
    assert not (tmp_path / "alone" / "cache.json").exists()
    assert "nothing to do" in build(pairs, tmp_path / "at", model, *wanted).stderr
    keys = {s.key for folder in ("at", "at/validation") for s in open_cache(tmp_path / folder)}
    assert {sample.key for sample in open_cache(tmp_path / "pool")} == keys


def test_what_the_server_knows_is_not_encoded_again(pairs: Path, tmp_path: Path, model: Path) -> None:
    job = service_job(model, tmp_path / "pool")
    lanes = FakeLanes(job)
    with running(job, lambda _: lanes) as url:
        for out in ("mine", "yours"):
            assert build_at(url, pairs, tmp_path / out, *SMALL).code == 0
        first = len(lanes.encoded)
        change_prompt(pairs)
        assert build_at(url, pairs, tmp_path / "mine").code == 0
    assert contents(tmp_path / "yours").keys() == contents(tmp_path / "yours").keys()
    assert len(lanes.encoded) == first + 1 == len(set(lanes.encoded)) + 1


def test_a_server_that_restarts_is_waited_for(tmp_path: Path, model: Path) -> None:
    """The server forgets what it accepted; the client sends it again."""
    job = service_job(model, tmp_path / "pool")
    rows = [({"prompt": f"number {i}"}, [("target", png(i)), ("control", png(i + 1))]) for i in range(4)]
    with running(job) as url, Client(url) as client:
        keys = [client.send(*row)[0] for row in rows[:2]]
        stored = [client.fetch(key) for key in keys]
    port = url.rpartition(":")[2]
    with Client(url, patience=600) as client, ThreadPoolExecutor(4) as threads:
        waiting = [threads.submit(client.encode, row[0]["prompt"], row[1][0][1], [row[1][1][1]]) for row in rows]
        with running(service_job(model, tmp_path / "pool"), address=f"127.0.0.1:{port}"):
            found = [each.result() for each in waiting]
    assert [sample.key for sample in found[:2]] == [sample.key for sample in stored]
    assert len(open_cache(tmp_path / "pool")) == 4


def test_the_python_client(tmp_path: Path, model: Path) -> None:
    (tmp_path / "before.png").write_bytes(png(1))
    with running(service_job(model, tmp_path / "pool"), token=b"secret") as url:
        with Client(url, token="secret") as client:
            sample = client.encode("make it red", target=png(2), controls=[tmp_path / "before.png"], name="one")
            with pytest.raises(SourceError, match="no target"):
                client.encode("make it red")
            with pytest.raises(SourceError, match="cannot be read"):
                client.encode("make it red", target=tmp_path / "missing.png")
            with pytest.raises(QwenCacheError, match="does not have"):
                client.fetch("0" * 32)
        with Client(url, token="wrong") as client, pytest.raises(ConfigError, match="refuses the token"):
            client.encode("make it red", target=png(2))
    cached = open_cache(tmp_path / "pool")[0]
    assert cached.name == "one"
    for name in cached.row.meta.tensors:
        assert (cached[name] == sample[name]).all()


def test_a_row_that_fails_there_is_named(pairs: Path, tmp_path: Path, model: Path) -> None:
    class Failing(FakeLanes):
        def result(self, sample: PlannedSample) -> Any:
            raise SourceError("too strange", where="there")

    with running(service_job(model, tmp_path / "pool"), Failing) as url:
        refused(build_at(url, pairs, tmp_path / "at"), "too strange", str(pairs))
    assert not (tmp_path / "at" / "cache.json").exists()


def test_what_cannot_work_is_refused(pairs: Path, tmp_path: Path, model: Path) -> None:
    out = tmp_path / "at"
    with running(service_job(model, tmp_path / "pool", "data.upscale=false")) as url:
        refused(build_at(url, pairs, out, "--set", "data.vae_image_size=20000"), "vae_image_size", "expected [16384]")
        refused(build_at(url, pairs, out, "--dtype", "float32", "--format", "v1"), "format")
        refused(build_at(url, pairs, out, "--set", "data.upscale=true"), "expected False, found True")
        for option in (("--repair",), ("--model", str(model)), ("--vae-device", "cpu")):
            refused(build_at(url, pairs, out, *option), option[0])
        refused(build_at(url, pairs, out, "--ray", "auto"), "--ray")
        refused(build_at(url, pairs, out, "--dry-run", "--measure"), "--measure")
        refused(build_at(url, pairs, out, "--only-validation"), "nothing to build for validation")
    refused(build_at(url, pairs, out), "does not answer", "qwen-cache serve")
    refused(build_at("ftp://x", pairs, out), "no address")
    assert not out.exists()


@pytest.mark.slow
def test_a_balancer_in_front_of_two_servers_with_one_bucket(
    s3: tuple[str, int], pairs: Path, tmp_path: Path, model: Path
) -> None:
    """Each request goes to the next server, so one has the row and the other is asked for the sample."""
    jobs = [service_job(model, f"s3://{BUCKET}/balanced", "serve.commit_seconds=0.1") for _ in range(2)]
    with running(jobs[0]) as one, running(jobs[1]) as other:
        balancer = ThreadingHTTPServer(("127.0.0.1", 0), _Balancer)
        balancer.daemon_threads, balancer.servers = True, cycle([one, other])  # type: ignore[attr-defined]
        Thread(target=balancer.serve_forever, daemon=True).start()
        result = build_at(f"http://127.0.0.1:{balancer.server_port}", pairs, tmp_path / "at")
        balancer.shutdown()
        balancer.server_close()
    assert result.code == 0, result.stderr
    keys = {sample.key for sample in open_cache(tmp_path / "at")}
    assert len(keys) == 4
    assert {sample.key for sample in open_cache(Url(f"s3://{BUCKET}/balanced"))} == keys
    assert run("qwen-cache", "verify", f"s3://{BUCKET}/balanced").code == 0


class _Balancer(BaseHTTPRequestHandler):
    """Hands each request to the next server."""

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = next(self.server.servers) + self.path  # type: ignore[attr-defined]
        kind = {"Content-Type": self.headers.get("Content-Type", "")}
        answer = httpx2.request(self.command, url, content=body, headers=kind, timeout=60, verify=False)
        self.send_response(answer.status_code)
        for name in ("Content-Type", "Content-Length", "Retry-After"):
            if name in answer.headers:
                self.send_header(name, answer.headers[name])
        self.end_headers()
        self.wfile.write(answer.content)

    def do_POST(self) -> None:
        self.do_GET()

    def log_message(self, format: str, *arguments: Any) -> None:
        """Nothing."""


class _Other(BaseHTTPRequestHandler):
    """A server of something else."""

    body = b"<html>"

    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.body)))
        self.end_headers()
        self.wfile.write(self.body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.parametrize("body", [b"<html>", b"{}", b"[]", b'{"recipe": {}}'])
def test_another_server_is_refused(body: bytes, pairs: Path, tmp_path: Path) -> None:
    handler = type("Other", (_Other,), {"body": body})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            refused(
                build_at(f"http://127.0.0.1:{server.server_port}", pairs, tmp_path / "at"), "no server of qwen-cache"
            )
        finally:
            server.shutdown()
            thread.join()


def test_a_client_needs_no_torch() -> None:
    assert not imported_by("import qwen_cache.service.encoding") & set(HEAVY)
