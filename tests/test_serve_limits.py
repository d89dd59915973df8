"""`qwen-cache serve` under clients that are too many, too slow, or strange: each is refused, none stays for ever."""

from __future__ import annotations

import ast
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Event
from typing import Any

import httpx2
import pytest

from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.sources.rows import MAX_CONTROLS, MAX_SPANS, MAX_TEXT

from .support.fake_lanes import FakeLanes
from .support.paths import ROOT
from .support.server import Server
from .support.server import serving as serving_files
from .support.serving import png, running, service_job
from .support.waiting import HANG, wait_until

FILE = f"{'0' * 32}.tar"
SIZE = 50_000_000
JSON = {"Content-Type": "application/json"}
BODY = b"POST /v1/samples HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"


@pytest.fixture(scope="module")
def job(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> BuildJob:
    return service_job(tiny_model("edit-plus"), tmp_path_factory.mktemp("limits") / "pool", "serve.body_seconds=0.5")


@pytest.fixture(scope="module")
def url(job: BuildJob) -> Iterator[str]:
    with running(job) as address:
        wait_until(lambda: httpx2.get(f"{address}/readyz", verify=False).is_success)
        yield address


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=HANG) as connection:
        yield connection


def send(http: httpx2.Client, number: int) -> httpx2.Response:
    return http.post("/v1/samples", data={"prompt": f"number {number}"}, files=[("target", ("target", png(number)))])


@pytest.mark.parametrize("rest", [b"GET / HT", b"POST / HTTP/1.1\r\nX: y\r\n"], ids=["line", "headers"])
def test_the_head_of_a_later_request_has_a_limit_too(url: str, rest: bytes) -> None:
    with connected(url) as connection:
        connection.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = connection.recv(1 << 16)
        connection.sendall(rest)
        assert answer.startswith(b"HTTP/1.1 200")
        wait_until(lambda: connection.recv(1 << 16) == b"")


def test_a_slow_body_of_json_is_a_timeout(url: str) -> None:
    with connected(url) as connection:
        connection.sendall(
            BODY.replace(b"samples", b"states").replace(b"multipart/form-data; boundary=x", b"application/json")
        )
        connection.sendall(b"Content-Length: 9\r\n\r\n{")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 408")
        wait_until(lambda: connection.recv(1 << 16) == b"")


def test_an_answer_that_is_not_read_ends(url: str, job: BuildJob) -> None:
    """The answer is larger than the buffers of the system; a request is counted when it has ended."""
    path = Path(str(job.folder)) / FILE
    try:
        with open(path, "wb") as file:
            file.truncate(SIZE)
        with connected(url) as connection:
            connection.sendall(f"GET /v1/cache/{FILE} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            wait_until(lambda: 'route="/v1/cache/{name}"' in httpx2.get(f"{url}/metrics", verify=False).text)
            assert sum(map(len, iter(lambda: connection.recv(1 << 20), b""))) < SIZE
    finally:
        path.unlink()


def test_what_a_client_makes_up_is_not_counted_by_its_name(url: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Neither a method nor a route, and a line of the log stays short."""
    with httpx2.Client(verify=False, base_url=url) as http:
        assert http.request("MADEUP", "/v1").status_code == 405
        assert http.get(f"/{'a' * 50_000}").status_code == 404
        metrics = http.get("/metrics").text
    assert 'method="other",route="/v1",status="405"' in metrics
    assert "MADEUP" not in metrics
    assert "aaa" not in metrics
    assert max(map(len, capfd.readouterr().err.splitlines())) < 5000


def test_too_much_at_a_time_is_refused_until_later(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """A full queue, too many uploads."""
    go = Event()

    class Waiting(FakeLanes):
        def result(self, sample: PlannedSample) -> Any:
            go.wait(HANG)
            return super().result(sample)

    limits = ("serve.queue_samples=1", "serve.queue_bytes=1000000")
    job = service_job(tiny_model("edit-plus"), tmp_path / "pool", *limits)
    with (
        running(job, Waiting) as url,
        httpx2.Client(verify=False, base_url=url, timeout=HANG) as http,
        ExitStack() as uploads,
    ):
        try:
            answers = [send(http, 0)]
            while answers[-1].status_code == 202:
                answers.append(send(http, len(answers)))
            assert refusal(answers[-1]) == (429, "2", "the queue of this server is full (found 1 samples)")

            def after_another(length: int, ask: Callable[[], httpx2.Response]) -> tuple[int, str | None, str | None]:
                """An answer after one more upload, which is refused while an earlier request still counts."""
                head = BODY + f"Content-Length: {length}\r\n\r\n--x\r\n".encode()
                uploads.enter_context(connected(url)).sendall(head)
                return refusal(ask())

            wait_until(
                lambda: after_another(999_000, lambda: send(http, 0)) == (429, "1", "too many uploads at a time")
            )
            uploads.close()
        finally:
            go.set()
        wait_until(lambda: send(http, len(answers)).status_code == 202)


def test_connections_are_counted(tiny_model: Callable[[str], Path], tmp_path: Path) -> None:
    """The one that has waited longest for a request gives way; a new one is refused if all have a request."""
    job = service_job(tiny_model("edit-plus"), tmp_path / "pool", "serve.connections=4")
    with running(job) as url, ExitStack() as open_ones:
        idle = [open_ones.enter_context(connected(url)) for _ in range(4)]
        idle[0].sendall(b"GET / HTTP/1.1\r\nHost: local")  # half a head holds no place either
        assert [httpx2.get(f"{url}/healthz", timeout=HANG, verify=False).status_code for _ in range(2)] == [200, 200]
        with suppress(ConnectionResetError):
            assert idle[0].recv(100) == b""
        uploads = [open_ones.enter_context(connected(url)) for _ in range(4)]
        for upload in uploads:
            upload.sendall(BODY + b"Expect: 100-continue\r\nContent-Length: 100\r\n\r\n")
            assert upload.recv(100).startswith(b"HTTP/1.1 100")  # its request has been read: it does not give way
            upload.sendall(b"--x\r\n")
        full = (503, "1", "too many connections at a time")
        wait_until(lambda: refusal(httpx2.get(f"{url}/readyz", timeout=HANG, verify=False)) == full)
        uploads[0].close()
        wait_until(lambda: httpx2.get(f"{url}/readyz", timeout=HANG, verify=False).is_success)


def test_no_request_holds_up_the_others(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest allowed of each field takes less than a second of the thread that answers everybody."""
    slowest = [0.0]
    run_handle = asyncio.events.Handle._run  # type: ignore[attr-defined]

    def timed(handle: Any) -> None:
        begin = time.thread_time()
        run_handle(handle)
        slowest[0] = max(slowest[0], time.thread_time() - begin)

    monkeypatch.setattr(asyncio.events.Handle, "_run", timed)
    controls = [("control", (None, "x" * MAX_TEXT))] * MAX_CONTROLS
    spans = [[2 * i, 2 * i + 1] for i in range(MAX_SPANS)]
    images = [(role, ("x" * 4000, png(1))) for role in ("target", "control")]
    job = service_job(tiny_model("edit-plus"), tmp_path / "pool", "serve.body_seconds=600")
    with running(job) as url, httpx2.Client(verify=False, base_url=url, timeout=HANG) as http:
        for fields in ({"prompt": "é" * (MAX_TEXT // 2)}, {"prompt": "x" * MAX_TEXT, "phrase": str(spans)}):
            answer = http.post("/v1/samples", data=fields, files=images)
            assert (answer.status_code, "beside images of these sizes" in answer.text) == (422, True)  # counted first
        assert http.post("/v1/samples", data={"prompt": "x"}, files=controls).status_code == 422
        words = [{"prompt": "word " * 400, "controls": [[96, 64]] * 4}] * 900
        deep: Any = "[" * ((1 << 21) - 20)
        for content in (json.dumps({"prompts": words}), json.dumps({"prompts": [{"prompt": "x" * MAX_TEXT}] * 15})):
            assert len(content) < 1 << 21
            assert http.post("/v1/lengths", content=content, headers=JSON).status_code == 200
        assert http.post("/v1/lengths", content=deep, headers=JSON).status_code == 400
        assert http.post("/v1/states", json={"keys": ["0" * 32] * 10_000}).status_code == 200
    assert 0 < slowest[0] < 1, slowest


def refusal(answer: httpx2.Response) -> tuple[int, str | None, str | None]:
    error = answer.json().get("error") if answer.status_code >= 400 else None
    return answer.status_code, answer.headers.get("Retry-After"), error


def test_only_allowed_addresses_are_read(
    tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By prefix, within the size of a body, and with the key of an upload."""
    for name in ("open", "closed"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(png(1))
    (tmp_path / "open" / "huge.png").write_bytes(bytes(300_000))
    with serving_files(Server(tmp_path)) as files:
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        settings = (f'serve.allow_urls=["{files.url}/open"]', "serve.max_body=200000")
        job = service_job(tiny_model("edit-plus"), tmp_path / "pool", *settings)
        with running(job) as url, httpx2.Client(verify=False, base_url=url, timeout=HANG) as http:

            def named(address: str) -> httpx2.Response:
                form = [("prompt", (None, b"number 1")), ("target", (None, address.encode()))]
                return http.post("/v1/samples", files=form)

            form = [
                ("prompt", (None, b"x")),
                ("name", (None, b"n")),
                ("target", (None, f"{files.url}/open/1.png".encode())),
            ]
            form += [("control", (None, f"{files.url}/open/1.png".encode()))] * 8
            assert http.post("/v1/samples", files=form).status_code == 202
            refused = ["closed/1.png", "open", "open/../closed/1.png", "open/%2e%2e/closed/1.png", "opening/1.png"]
            addresses = [f"{files.url}/{path}" for path in refused]
            addresses += [f"file://{tmp_path}/open/1.png", f"zip://a::{files.url}/open/1.png", "1.png", "x" * 5000]
            for address in addresses:
                answer = named(address)
                assert (answer.status_code, "no address that this server reads" in answer.text) == (422, True), address
            assert "too large" in named(f"{files.url}/open/huge.png").text
            assert "does not exist" in named(f"{files.url}/open/2.png").text
            assert (
                named(f"{files.url}/open/1.png").json()["samples"][0]["key"]
                == send(http, 1).json()["samples"][0]["key"]
            )


SERVER = """
import sys, uvicorn
from qwen_cache.service.http import address_of, open_socket
from qwen_cache.service.http import limits, protocol

async def app(scope, receive, send):
    with open(sys.executable, "rb"):  # as every answer with a file does
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": b"ok"})

listener = open_socket("127.0.0.1:0")
print(address_of(listener), flush=True)
connections, backlog = limits(1024)
config = uvicorn.Config(app, http=protocol(connections, 60), backlog=backlog, lifespan="off", log_config=None)
uvicorn.Server(config).run(sockets=[listener])
"""


def test_more_connections_than_descriptors_disturb_nobody() -> None:
    """The protocol of both servers, under `ulimit -n 128`: 300 half heads, and then requests that open a file."""
    limited = ["sh", "-c", 'ulimit -n 128; exec "$0" -c "$1"', sys.executable, SERVER]
    with subprocess.Popen(limited, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        assert server.stderr is not None
        url = server.stdout.readline().strip()
        try:
            with ExitStack() as strangers:
                for _ in range(300):
                    strangers.enter_context(connected(url)).sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-a: b")
                    time.sleep(0.003)  # the queue of new connections is short here, and a full one costs a second
                assert {httpx2.get(url, timeout=HANG, verify=False).text for _ in range(20)} == {"ok"}
        finally:
            server.terminate()
        assert server.stderr.read() == ""


def test_every_server_has_this_protocol() -> None:
    """`qwen-cache serve` and `qwen-cache ui`."""
    programs = [path for name in ("qwen_cache", "qwen_train") for path in sorted((ROOT / name).rglob("*.py"))]
    texts = [text for path in programs if "uvicorn" in (text := path.read_text(encoding="utf-8"))]
    nodes = [node for text in texts for node in ast.walk(ast.parse(text))]
    servers = [node for node in nodes if isinstance(node, ast.Call) and ast.unparse(node.func) == "uvicorn.Config"]
    found = [{each.arg: ast.unparse(each.value) for each in server.keywords} for server in servers]
    assert [each["http"].partition("(")[0] for each in found] == ["protocol", "protocol"]
