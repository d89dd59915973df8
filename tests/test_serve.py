"""`qwen-cache serve` as a client sees it: rows in, samples out, and an error for everything else."""

from __future__ import annotations

import io
import json
import socket
import struct
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest
import safetensors.torch

from qwen_cache import open_cache
from qwen_cache.cli.serve import prepare
from qwen_cache.encode.builder import BuildJob, plan_build
from qwen_cache.errors import ConfigError
from qwen_cache.format.update import Existing
from qwen_cache.service.app import read_token, token_for
from qwen_cache.service.engine import Engine
from qwen_cache.service.http import is_loopback, open_socket
from qwen_cache.settings.sections import ServeConfig

from .support.commands import refused, run
from .support.serving import png, running, service_job

LIMITS = ("serve.max_body=400000", "serve.max_pixels=20000", "serve.body_seconds=3", "serve.commit_seconds=0.05")
ROW = {"target": png(1), "control": png(2)}


@pytest.fixture(scope="module")
def job(tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> BuildJob:
    return service_job(tiny_model("edit-plus"), tmp_path_factory.mktemp("service") / "pool", *LIMITS)


@pytest.fixture(scope="module")
def url(job: BuildJob) -> Iterator[str]:
    """A server that all of these tests use: it answers after each of them."""
    with running(job) as address:
        yield address


@pytest.fixture
def http(url: str) -> Iterator[httpx2.Client]:
    with httpx2.Client(verify=False, base_url=url, timeout=600) as client:
        yield client
    assert httpx2.get(f"{url}/healthz", timeout=600, verify=False).status_code == 200  # on a connection of its own


def send(http: httpx2.Client, prompt: str = "make it red", **files: bytes) -> httpx2.Response:
    named = [(name, (name, data)) for name, data in (files or ROW).items()]
    return http.post("/v1/samples", data={"prompt": prompt}, files=named)


def test_a_row_becomes_a_sample(http: httpx2.Client, job: BuildJob) -> None:
    answer = send(http)
    assert answer.status_code == 202
    (sample,) = answer.json()["samples"]
    key = sample["key"]
    assert sample == {"key": key, "state": sample["state"]}
    waited = http.post("/v1/states", json={"keys": [key, "0" * 32], "wait": "stored", "seconds": 60}).json()
    assert [each["state"] for each in waited["states"]] == ["stored", "unknown"]
    file = http.get(f"/v1/samples/{key}", params={"seconds": 60})
    cached = open_cache(job.folder)[0]
    assert cached.key == key
    assert (safetensors.torch.load(file.content)["image_latents"] == cached["image_latents"]).all()
    assert send(http).json()["samples"][0]["state"] == "stored"


def test_the_cache_is_read_by_ranges(http: httpx2.Client, job: BuildJob) -> None:
    key = send(http, "a cache").json()["samples"][0]["key"]
    http.post("/v1/states", json={"keys": [key], "wait": "stored", "seconds": 60})
    for path in job.folder.iterdir():
        if path.suffix in (".json", ".parquet", ".tar"):
            assert http.get(f"/v1/cache/{path.name}").content == path.read_bytes()
    shard = next(iter(job.folder.glob("*.tar")))
    part = http.get(f"/v1/cache/{shard.name}", headers={"Range": "bytes=512-1023"})
    assert (part.status_code, part.content) == (206, shard.read_bytes()[512:1024])
    assert len(open_cache(f"{http.base_url}/v1/cache")) == len(open_cache(job.folder))


def test_it_describes_itself(http: httpx2.Client, job: BuildJob) -> None:
    description = http.get("/v1").json()
    assert description["recipe"] == job.recipe
    assert description["pipeline"] == "QwenImageEditPlusPipeline"
    paths = http.get("/openapi.json").json()["paths"]
    assert {"/v1", "/v1/samples", "/v1/states", "/v1/samples/{key}", "/v1/lengths", "/v1/cache/{name}"} <= set(paths)
    page = http.get("/").text
    assert all(path in page for path in paths)
    assert "http-equiv" in page
    assert http.get("/readyz").json() == {"ready": True, "why": None}
    metrics = http.get("/metrics").text
    assert 'qwen_cache_requests_total{method="GET",route="/v1",status="200"} 1.0' in metrics
    assert "qwen_cache_queue_samples 0.0" in metrics


def test_lengths_are_those_of_the_embeddings(http: httpx2.Client, built: Callable[..., Path]) -> None:
    sample = open_cache(built("edit-plus"))[0]
    sizes = [(96, 64)] * (len(sample.img_shapes) - 1)
    answer = http.post("/v1/lengths", json={"prompts": [{"prompt": "a b c", "controls": sizes}] * 2})
    lengths = answer.json()["lengths"]
    assert lengths[0] == lengths[1] > 3


def bomb() -> bytes:
    """A PNG of some bytes that claims 60000×60000 pixels."""
    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(bytes(1000))), (b"IEND", b"")]
    body = [struct.pack(">I", len(d)) + n + d + struct.pack(">I", zlib.crc32(n + d)) for n, d in chunks]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


JSON = {"Content-Type": "application/json"}


def generate(http: httpx2.Client, **fields: str) -> httpx2.Response:
    return http.post("/v1/samples", data={"generate": "1", "prompt": "x", **fields}, files={"control": png(2)})


def in_charset(http: httpx2.Client, charset: str, prompt: bytes) -> httpx2.Response:
    """A form whose charset the client names."""
    parts = {"name": b"x", "prompt": prompt}
    body = b"".join(
        b'--x\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n' % (name.encode(), value)
        for name, value in parts.items()
    )
    kind = f"multipart/form-data; boundary=x; charset={charset}"
    return http.post("/v1/samples", content=body + b"--x--\r\n", headers={"Content-Type": kind})


REFUSED: dict[str, tuple[int, Callable[[httpx2.Client], httpx2.Response]]] = {
    "no form": (415, lambda http: http.post("/v1/samples", content=b"{}")),
    "no boundary": (
        400,
        lambda http: http.post("/v1/samples", content=b"x", headers={"Content-Type": "multipart/form-data"}),
    ),
    "no prompt": (422, lambda http: http.post("/v1/samples", files=ROW)),
    "no target": (422, lambda http: send(http, control=png(1))),
    "text for an image": (
        422,
        lambda http: http.post("/v1/samples", files=[("prompt", (None, b"x")), ("target", (None, b"http://h/a"))]),
    ),
    "no image": (422, lambda http: send(http, target=b"hello", control=png(1))),
    "a torn image": (422, lambda http: send(http, target=png(3)[:-400], control=png(1))),
    "a bomb": (422, lambda http: send(http, target=bomb())),
    "many pixels": (413, lambda http: send(http, target=png(1, (200, 200)))),
    "a large body": (413, lambda http: send(http, target=bytes(500_000))),
    "many images": (400, lambda http: http.post("/v1/samples", files=[("control", b"x")] * 104)),
    "a long prompt": (400, lambda http: send(http, "x" * ((1 << 17) + 1))),
    "a long name": (422, lambda http: generate(http, name="x" * 8193)),
    "a side of no token": (422, lambda http: generate(http, width="10", height="1024")),
    "a side beyond all positions": (422, lambda http: generate(http, width="1024", height="1000000")),
    "a side beyond 64 bits": (422, lambda http: generate(http, width="9" * 18, height="1024")),
    "a seed beyond 64 bits": (422, lambda http: generate(http, seed=str(1 << 63))),
    "a phrase without end": (422, lambda http: generate(http, phrase="[[0, 1e999]]")),
    "a phrase that is no list": (422, lambda http: generate(http, phrase="5")),
    "a deep phrase": (422, lambda http: generate(http, phrase="[" * 100_000)),
    "text that is not UTF-8": (422, lambda http: in_charset(http, "utf-8", b"caf\xe9")),
    **{
        f"a form in {charset}": (415, lambda http, charset=charset: in_charset(http, charset, b"\\ud800 " * 10_000))
        for charset in ("punycode", "unicode_escape", "idna", "utf-7", "undefined", "hex", "latin-1")
    },
    "an unknown field": (422, lambda http: http.post("/v1/samples", data={"prompt": "x", "colour": "1"}, files=ROW)),
    "a phrase outside": (
        422,
        lambda http: http.post("/v1/samples", data={"prompt": "x", "phrase": "[[0, 9]]"}, files=ROW),
    ),
    "half a size": (422, lambda http: http.post("/v1/samples", data={"prompt": "x", "width": "3"}, files=ROW)),
    "a pixel token": (422, lambda http: send(http, "an <|image_pad|>")),
    "no key": (422, lambda http: http.get("/v1/samples/abc")),
    "an unknown key": (404, lambda http: http.get(f"/v1/samples/{'0' * 32}")),
    "many prompts": (422, lambda http: http.post("/v1/lengths", json={"prompts": [{"prompt": "x"}] * 1001})),
    "half an emoji": (
        422,
        lambda http: http.post("/v1/lengths", content=b'{"prompts": [{"prompt": "\\ud800"}]}', headers=JSON),
    ),
    "a large body of JSON": (413, lambda http: http.post("/v1/lengths", content=b" " * 2_100_000, headers=JSON)),
    "deep JSON": (400, lambda http: http.post("/v1/states", content=b"[" * 1_000_000, headers=JSON)),
    "a key twice": (
        422,
        lambda http: http.post("/v1/states", content=b'{"keys": ["0"], "keys": []}', headers=JSON),
    ),
    "many keys": (422, lambda http: http.post("/v1/states", json={"keys": ["0" * 32] * 10_001})),
    "a row beyond all": (422, lambda http: http.get("/v1/rows", params={"begin": 1 << 63})),
    "a long wait": (422, lambda http: http.post("/v1/states", json={"keys": [], "seconds": 1e9})),
    "broken JSON": (
        422,
        lambda http: http.post("/v1/states", content=b"{", headers={"Content-Type": "application/json"}),
    ),
    "a path outside": (404, lambda http: http.get("/v1/cache/..%2f..%2fetc%2fpasswd")),
    "a lock": (404, lambda http: http.get("/v1/cache/.lock")),
    "another method": (405, lambda http: http.delete("/v1")),
    "no route": (404, lambda http: http.get("/v2")),
    "another host": (403, lambda http: http.get("/v1", headers={"Host": "evil.example:80"})),
    "another page": (403, lambda http: http.get("/v1", headers={"Origin": "http://evil.example"})),
    "a damaged origin": (403, lambda http: http.get("/v1", headers={"Origin": "http://["})),
}


@pytest.mark.parametrize("what", REFUSED)
def test_an_error_says_what_and_what_to_do(http: httpx2.Client, what: str) -> None:
    status, request = REFUSED[what]
    answer = request(http)
    assert answer.status_code == status, answer.text
    error = answer.json()
    assert error["error"]
    assert error["do"]
    assert "Traceback" not in answer.text


def test_what_is_refused_disturbs_no_other_row(http: httpx2.Client) -> None:
    """Every request above, and then a row is stored."""
    for _, request in REFUSED.values():
        request(http)
    key = send(http, "an innocent row").json()["samples"][0]["key"]
    assert http.post("/v1/states", json={"keys": [key], "wait": "stored"}).json()["states"][0]["state"] == "stored"
    assert http.get("/readyz").json() == {"ready": True, "why": None}


def raw(url: str, *parts: bytes) -> bytes:
    """The answer to these bytes; empty if the server closes the connection."""
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=600) as connection:
        try:
            for part in parts:
                connection.sendall(part)
            return b"".join(iter(lambda: connection.recv(1 << 16), b""))
        except ConnectionError:
            return b""


HEAD = b"POST /v1/samples HTTP/1.1\r\nHost: localhost\r\nContent-Type: multipart/form-data; boundary=x\r\n"


RAW = {
    "many headers": ([b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"X: y\r\n" * 100_000, b"\r\n"], b"400"),
    "half a head": ([b"GET / HTTP/1.1\r\nHost: local"], b"408"),
    "slow body": ([HEAD + b"Content-Length: 100\r\n\r\n--x\r\n"], b"408"),
    "huge body": ([HEAD + b"Content-Length: 99999999999\r\n\r\n"], b"413"),
    "negative": ([HEAD + b"Content-Length: -1\r\n\r\n"], b"400"),
    "two lengths": ([HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\nzz"], b"408"),
    "TLS": ([b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"], b"400"),
}
"""The parts that are sent, and the status of the answer."""


def test_raw_bytes(url: str, http: httpx2.Client) -> None:
    """All at once, since some are waited for."""
    with ThreadPoolExecutor(len(RAW)) as pool:
        answers = dict(zip(RAW, pool.map(lambda each: raw(url, *each[0]), RAW.values()), strict=True))
    for name, (parts, answer) in RAW.items():
        found = answers[name]
        if found or len(parts[0]) < 1000:  # a connection may be closed before the answer is read, if more was sent
            assert found.split(b" ")[1] == answer, name
            assert set(json.loads(found.partition(b"\r\n\r\n")[2])) == {"error", "do"}


def test_a_client_that_leaves_and_an_error_of_ours(
    url: str, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    host, port = url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(HEAD + b"Content-Length: 100\r\n\r\n--x\r\n")
    monkeypatch.setattr(Engine, "status", lambda self, keys: 1 / 0)
    answer = http.post("/v1/states", json={"keys": []})
    assert answer.status_code == 500
    number = answer.json()["error"].rpartition(" ")[2]
    events = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    (event,) = [each for each in events if each["event"] == "error"]
    assert event["id"] == number
    assert "ZeroDivisionError" in event["traceback"]


def test_a_token(job: BuildJob, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    own = service_job(tiny_model("edit-plus"), tmp_path / "pool", *LIMITS)
    with running(own, token=b"secret") as address, httpx2.Client(verify=False, base_url=address) as http:
        assert http.get("/healthz").status_code == 200
        for given in (None, "Bearer wrong", "Bearer", "Basic secret", "Bearer secret2", "Bearer sécret"):
            headers: Any = {} if given is None else {"Authorization": given.encode()}
            answer = http.get("/v1", headers=headers)
            assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), given
        assert http.get("/v1", headers={"Authorization": "Bearer secret", "Host": "team.example"}).status_code == 200


def test_other_machines_need_a_token(tmp_path: Path) -> None:
    token = tmp_path / "token"
    for content in ("", " \n", "two words"):
        token.write_text(content)
        with pytest.raises(ConfigError, match="token"):
            read_token(str(token))
    token.write_text("secret\n")
    assert token_for(ServeConfig(listen="0.0.0.0:1", token_file=str(token))) == b"secret"
    with pytest.raises(ConfigError, match="without a token"):
        token_for(ServeConfig(listen="0.0.0.0:1"))
    assert token_for(ServeConfig()) is None
    assert [is_loopback(host) for host in ("localhost", "127.1.2.3", "[::1]", "0.0.0.0", "evil.example", "")] == [
        *[True] * 3,
        *[False] * 3,
    ]


def test_addresses_that_cannot_be_used() -> None:
    for address in ("8077", "localhost:", "localhost:x", "localhost:99999", "192.0.2.1:8077"):
        with pytest.raises(ConfigError):
            open_socket(address)
    with open_socket("127.0.0.1:0") as taken, pytest.raises(ConfigError, match="cannot listen"):
        open_socket(f"127.0.0.1:{taken.getsockname()[1]}")
    refused(run("qwen-cache", "serve", "--listen", "0.0.0.0:1"), "without a token", "--token-file")
    refused(run("qwen-cache", "serve", "--controls", "before"), "--controls goes with --source")


def test_a_prompt_is_not_logged(job: BuildJob, tmp_path: Path, tiny_model: Callable[[str], Path], capsys: Any) -> None:
    own = service_job(tiny_model("edit-plus"), tmp_path / "pool", *LIMITS)
    with running(own) as address, httpx2.Client(verify=False, base_url=address) as http:
        send(http, "a secret prompt")
    log = capsys.readouterr().err
    assert '"event": "request"' in log
    assert '"event": "commit"' in log
    assert "secret" not in log
    assert io.StringIO(log).readline().startswith("{")


def test_rows_of_a_source_of_the_server(pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]) -> None:
    """They have the keys of a build; a row that the source does not have is named."""
    job = service_job(tiny_model("edit-plus"), tmp_path / "pool", f"serve.source={pairs}")
    job = prepare(job.config, lambda _: None)
    expected = {sample.row.name: sample.key for sample in plan_build(job, Existing.empty(2)).samples}
    with running(job) as address, httpx2.Client(verify=False, base_url=address) as http:
        names = http.get("/v1/rows").json()
        assert (sorted(names["names"]), names["total"]) == (sorted(expected), 4)
        assert http.get("/v1/rows", params={"begin": 3}).json()["names"] == names["names"][3:]
        answer = http.post("/v1/rows", json={"names": ["cat", "cup"]})
        assert (answer.status_code, [each["key"] for each in answer.json()["samples"]]) == (
            202,
            [expected["cat"], expected["cup"]],
        )
        refusal = http.post("/v1/rows", json={"names": ["cat", "../cup"]})
        assert refusal.status_code == 404
        assert "no row '../cup'" in refusal.json()["error"]
        assert http.post("/v1/rows", json={"names": ["cat"] * 101}).status_code == 422
    assert {sample.name for sample in open_cache(tmp_path / "pool")} == {"cat", "cup"}
