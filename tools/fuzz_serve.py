"""Attack a server of the service with random requests while clients encode rows; exit code 1 if it breaks a promise.

    python tools/fuzz_serve.py MODEL [--requests 2000] [--seed 0] [--first 0] [--samples 200] [--save FOLDER] [--json]
    python tools/fuzz_serve.py --url http://127.0.0.1:8077 […]

MODEL is a folder of `tools/make_tiny_model.py`, for a server of the tool's own; `--url` attacks another one that has no
token. The promise: every answer is 2xx, 4xx, or 503 with Retry-After; only what is no whole request of HTTP
may be left without one; each answer comes within `PATIENCE` seconds; the server lives, prints no traceback, and can
commit; every row that it accepted is stored or failed in the end; and the rows of the clients are stored with the bytes
that `build` gives, in a cache that `verify` finds undamaged. An odd seed starts the server with a token.

Request NUMBER of a seed is always the same: `--first NUMBER --requests 1` sends it again. Those that break the promise
are saved as they were sent, for `nc HOST PORT < FILE`.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import h11
import httpx2
from bench_serve import SETTINGS, Server, write_source
from hostile_requests import hostile_request

from qwen_cache import open_cache
from qwen_cache.errors import QwenCacheError
from qwen_cache.service.client import Client
from qwen_cache.service.routes import States

CLIENTS, ATTACKERS = 4, 8
PATIENCE = 120.0  # seconds for an answer: many times what any takes on a busy machine
BODY_SECONDS = 20.0
LIMITS = (
    *("serve.max_body=2000000", "serve.max_pixels=1000000", "serve.commit_seconds=0.5", "serve.queue_samples=64"),
    f"serve.body_seconds={BODY_SECONDS}",
)
TOKEN = "a-token-of-the-test"
KEY = re.compile(r'"key":"([0-9a-f]{32})"')


@dataclass
class Report:
    """The outcome. `violations` has a line for each broken promise."""

    save: Path
    answers: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    accepted: dict[str, int] = field(default_factory=dict)
    """The number of the request that brought each key."""
    slowest_health: float = 0.0
    """The longest answer of /healthz, in seconds."""
    sent: deque[int] = field(default_factory=lambda: deque(maxlen=3 * ATTACKERS))
    """The numbers of the last requests."""

    def violated(self, what: str, number: int | None = None, raw: bytes | None = None) -> None:
        if raw is not None:
            path = self.save / f"{number}.request"
            path.write_bytes(raw)
            what += f"\n    {raw[:300]!r}\n    saved as {path}"
        self.violations.append(what if number is None else f"request {number}: {what}")


@dataclass(frozen=True)
class Target:
    """The server to attack. `process` and `log` are those of a server of this tool."""

    url: str
    token: str | None = None
    process: subprocess.Popen[str] | None = None
    log: Path | None = None
    refuses: threading.Event = field(default_factory=threading.Event)
    """Set once it accepts no connection."""

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host.strip("[]"), int(port)

    def lives(self) -> bool:
        return not self.refuses.is_set() and (self.process is None or self.process.poll() is None)

    def get(self, path: str) -> httpx2.Response:
        headers = {"Authorization": f"Bearer {self.token}"} if self.token else {}
        return httpx2.get(self.url + path, headers=headers, timeout=PATIENCE)


# ---- one hostile request --------------------------------------------------------------------------------------------


def whole_requests(raw: bytes) -> list[str]:
    """The methods of the whole requests in these bytes, as h11 reads them."""
    connection, methods, method = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 16), [], ""
    connection.receive_data(raw)
    with suppress(h11.ProtocolError):
        while (event := connection.next_event()) not in (h11.NEED_DATA, h11.PAUSED):
            if isinstance(event, h11.Request):
                method = event.method.decode()
            elif isinstance(event, h11.EndOfMessage):
                methods.append(method)
                connection.send(h11.Response(status_code=200, headers=[(b"Content-Length", b"0")]))
                connection.send(h11.EndOfMessage())
                connection.start_next_cycle()
    return methods


class Answers(io.BufferedReader):
    """The bytes of a connection, in place of a socket, for several answers one after another: each would close it."""

    def makefile(self, mode: str) -> Answers:
        return self

    def close(self) -> None:
        pass


def send(target: Target, report: Report, number: int, raw: bytes) -> None:
    """Send the bytes, and judge each answer."""
    methods = whole_requests(raw)
    # nobody waits for most of what is cut, or it would take the time limit of a body each time
    patience = PATIENCE if methods or Random(number).random() < 0.05 else 0.2
    closes, begin = False, time.monotonic()
    with socket.create_connection(target.address, timeout=PATIENCE) as connection:
        with suppress(ConnectionError, TimeoutError):  # an answer may come before the whole request is read
            connection.sendall(raw)
        is_late = time.monotonic() - begin > BODY_SECONDS / 2  # on a busy machine: the server may have given up
        connection.settimeout(patience)
        answers: Any = Answers(socket.SocketIO(connection, "r"))
        for method in methods or [raw.split(b" ")[0].decode("latin-1")]:
            answer = http.client.HTTPResponse(answers, method=method)
            try:
                answer.begin()
                body = answer.read()
            except TimeoutError:
                if methods:
                    report.violated(f"no answer within {PATIENCE:g} seconds", number, raw)
                report.answers["left"] += 1
                return
            except http.client.IncompleteRead as error:
                report.violated(f"the answer {answer.status} ends too early: {error}", number, raw)
                return
            except (http.client.HTTPException, ConnectionError) as error:
                if methods and not closes and not is_late:
                    report.violated(f"closed without an answer: {error!r}", number, raw)
                report.answers["closed"] += 1
                return
            judge(target, report, number, raw, answer, body)
            closes = closes or answer.getheader("Connection") == "close"


def judge(
    target: Target, report: Report, number: int, raw: bytes, answer: http.client.HTTPResponse, body: bytes
) -> None:
    """Note the answer, and its violation if it is one."""
    status = answer.status
    report.answers[f"{status // 100}xx" if status != 503 else "503"] += 1
    if status == 202:
        report.accepted.update(dict.fromkeys(KEY.findall(body.decode("utf-8", "replace")), number))
    allowed = 200 <= status < 300 or 400 <= status < 500 or (status == 503 and answer.getheader("Retry-After"))
    if not allowed:
        report.violated(f"status {status}: {body[:200]!r}{_logged(target, body)}", number, raw)


def _logged(target: Target, body: bytes) -> str:
    """The log's line about an answer 500."""
    number = re.search(rb"an error of the server, ([0-9a-f]{12})", body)
    if number is None or target.log is None:
        return ""
    for line in target.log.read_text("utf-8", "replace").splitlines():
        if number[1].decode() in line and '"event": "error"' in line:
            facts = json.loads(line)
            return f"\n    {facts['problem']}\n    {facts['traceback'].strip().splitlines()[-3].strip()}"
    return ""


def attack(target: Target, report: Report, numbers: Sequence[int], seed: int, progress: Progress) -> None:
    """Send these requests, several at a time, until the server ends."""

    def each(number: int) -> None:
        if target.lives():
            report.sent.append(number)
            raw = hostile_request(seed, number, target.token.encode() if target.token else None)
            try:
                send(target, report, number, raw)
            except OSError:
                target.refuses.set()
        progress.advance()

    with ThreadPoolExecutor(ATTACKERS) as threads:
        list(threads.map(each, numbers))
    if not target.lives():
        code = target.process.poll() if target.process else None
        last = ", ".join(map(str, sorted(report.sent)))
        report.violated(f"the server accepts no connection (exit code {code}); the last requests were {last}")


def ask_for_health(target: Target, report: Report, ended: threading.Event) -> None:
    """Ask now and then, and keep the longest time: how long the event loop stood still."""
    while not ended.wait(0.2) and target.lives():
        begin = time.monotonic()
        with suppress(httpx2.TransportError):
            target.get("/healthz")
        report.slowest_health = max(report.slowest_health, time.monotonic() - begin)


# ---- the clients ----------------------------------------------------------------------------------------------------


class Progress:
    """How many hostile requests are done; clients wait for it, so that they send rows until the end."""

    def __init__(self, total: int) -> None:
        self.total, self.done, self._changed = total, 0, threading.Condition()

    def advance(self) -> None:
        with self._changed:
            self.done += 1
            self._changed.notify_all()

    def wait(self, share: float) -> None:
        """Until this share is done."""
        with self._changed:
            self._changed.wait_for(lambda: self.done >= min(share, 0.98) * self.total)


def encode_rows(target: Target, report: Report, source: Path, samples: int, progress: Progress) -> dict[str, Any]:
    """Encode all rows by several clients; the metadata of each tensor, by the samples' keys."""
    found: dict[str, Any] = {}

    def each(begin: int) -> None:
        with Client(target.url, token=target.token or "", patience=PATIENCE) as client:
            for row in range(begin, samples, CLIENTS):
                progress.wait(row / samples)
                images = [source / kind / f"{row:05}.png" for kind in ("target_images", "control_images")]
                prompt = (source / "target_images" / f"{row:05}.txt").read_text()
                try:
                    sample = client.encode(prompt, images[0], [images[1]], name=images[0].stem)
                    found[sample.key] = sample.row.meta.tensors
                except Exception as error:  # noqa: BLE001 (whatever it is, a client's row is lost)
                    report.violated(f"row {row} of a client: {error!r}".replace("\n", " "))
                    if not target.lives():
                        return

    with ThreadPoolExecutor(CLIENTS) as threads:
        list(threads.map(each, range(CLIENTS)))
    return found


# ---- what must hold in the end --------------------------------------------------------------------------------------


def check_stored(target: Target, report: Report, keys: Sequence[str]) -> None:
    """Every row of a client is stored, and every other accepted one stored or failed."""
    states: dict[str, str] = {}
    everything, until = sorted({*keys, *report.accepted}), time.monotonic() + PATIENCE
    with Client(target.url, token=target.token or "", patience=PATIENCE) as client:
        for begin in range(0, len(everything), 1000):
            asked = {"keys": everything[begin : begin + 1000], "wait": "stored"}
            while True:
                answer = client.ask(States, "POST", "/v1/states", value={**asked, "seconds": 10}).states
                if all(each.state in ("stored", "failed") for each in answer) or time.monotonic() > until:
                    break
                if target.get("/readyz").status_code != 200:
                    until = min(until, time.monotonic() + 10)  # its commits fail: one more may succeed
            states |= {each.key: str(each.state) for each in answer}
    if lost := [key for key in keys if states[key] != "stored"]:
        report.violated(f"{len(lost)} of {len(keys)} rows of clients are not stored: {lost[0]} is {states[lost[0]]}")
    for key, number in report.accepted.items():
        if states[key] not in ("stored", "failed"):
            report.violated(f"its row {key} is {states[key]}, neither stored nor failed", number)
    ready = target.get("/readyz")
    if ready.status_code != 200:
        report.violated(f"the server is not ready: {ready.text}")


def check_bytes(report: Report, cache: str, found: Mapping[str, Any], expected: Mapping[str, Any] | None) -> None:
    """The stored rows have the tensors that the clients got, and that `build` gives; `verify` passes."""
    try:
        stored = {sample.key: sample.row.meta.tensors for sample in open_cache(cache)}
    except QwenCacheError as error:
        report.violated(f"the cache cannot be read: {error}")
        return
    if wrong := [key for key in found.keys() & stored.keys() if stored[key] != found[key]]:
        report.violated(f"{len(wrong)} stored samples are not those that the clients got, such as {wrong[0]}")
    if expected is not None and found != expected:
        wrong = [key for key in {*found, *expected} if found.get(key) != expected.get(key)]
        report.violated(f"{len(wrong)} samples are not those of `build`, such as {wrong[0]}")
    verified = qwen_cache("verify", cache)
    if verified.returncode:
        report.violated(f"verify: {verified.stdout}{verified.stderr}")


def check_log(report: Report, log: Path) -> None:
    """No traceback that the server printed, and no error in its log that no answer told of."""
    told = "\n".join(report.violations)
    for line in log.read_text("utf-8", "replace").splitlines():
        if line.startswith("Traceback"):
            report.violated(f"the server printed a traceback: see {log}")
            return
        if '"event": "error"' in line and (problem := json.loads(line)["problem"]) not in told:
            told += problem
            report.violated(f"the server's log has an error: {problem}")


def qwen_cache(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "qwen_cache", *map(str, arguments)], capture_output=True, text=True, check=False
    )


# ---- a server of the tool's own -------------------------------------------------------------------------------------


@contextmanager
def own_server(model: Path, folder: Path, log: Path, with_token: bool) -> Iterator[tuple[Target, Server]]:
    """A server with the tiny model; `end` it, or it is killed when the block ends."""
    write_source(folder / "own", 5)
    settings, token = [*LIMITS, f"serve.source={folder / 'own'}"], folder / "token"
    if with_token:
        token.write_text(TOKEN)
        settings.append(f"serve.token_file={token}")
    with open(log, "wb") as file:
        server = Server(model, folder / "pool", settings, log=file)
        server.start()
    assert server.process is not None
    try:
        server.wait_until_ready()
        yield Target(server.url, TOKEN if with_token else None, server.process, log), server
    finally:
        if server.process.poll() is None:
            server.end(signal.SIGKILL)
        if server.process.stdout is not None:
            server.process.stdout.close()


def built_rows(model: Path, source: Path, out: Path) -> dict[str, Any]:
    """The metadata of the tensors that `build` gives, by the samples' keys."""
    sets = [item for each in SETTINGS for item in ("--set", each)]
    built = qwen_cache("build", source, "--model", model, "--out", out, *sets)
    assert built.returncode == 0, built.stderr
    return {sample.key: sample.row.meta.tensors for sample in open_cache(out)}


def run(target: Target, report: Report, source: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Attack while clients encode, and check what is stored; the samples of the clients."""
    progress, ended = Progress(options.requests), threading.Event()
    numbers = range(options.first, options.first + options.requests)
    with ThreadPoolExecutor(2) as background:
        encoding = background.submit(encode_rows, target, report, source, options.samples, progress)
        background.submit(ask_for_health, target, report, ended)
        try:
            attack(target, report, numbers, options.seed, progress)
            found = encoding.result()
        finally:
            ended.set()
    if target.lives():
        check_stored(target, report, list(found))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", metavar="MODEL", type=Path, nargs="?")
    parser.add_argument("--url")
    for name, default in {"requests": 2000, "seed": 0, "first": 0, "samples": 200}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument(
        "--save", type=Path, default=Path("fuzz-serve"), help="folder for requests that break a promise"
    )
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if (options.model is None) == (options.url is None):
        parser.error("give MODEL or --url")
    options.save.mkdir(parents=True, exist_ok=True)
    report = Report(options.save)
    with tempfile.TemporaryDirectory() as name:
        folder, source = Path(name), Path(name) / "source"
        write_source(source, options.samples)
        if options.url:
            target = Target(options.url.rstrip("/"))
            found = run(target, report, source, options)
            check_bytes(report, f"{target.url}/v1/cache", found, None)
        else:
            expected = built_rows(options.model, source, folder / "built")
            log = options.save / "server.log"
            with own_server(options.model, folder, log, options.seed % 2 == 1) as (target, server):
                found = run(target, report, source, options)
                if target.lives() and (code := server.end(signal.SIGTERM)):  # it commits what it has
                    report.violated(f"the server ended with code {code} after SIGTERM")
            check_bytes(report, str(folder / "pool"), found, expected)
            check_log(report, log)
    counts = {"requests": options.requests, "seed": options.seed, "answers": dict(sorted(report.answers.items()))}
    counts |= {"rows": len(found), "slowest_health_seconds": round(report.slowest_health, 2)}
    print(json.dumps(counts | ({"violations": report.violations} if options.json else {})))
    if not options.json:
        print(f"{len(report.violations)} violations", *report.violations, sep="\n")
    return 1 if report.violations else 0


if __name__ == "__main__":
    sys.exit(main())
