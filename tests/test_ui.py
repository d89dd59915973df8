"""`qwen-cache ui`: who is answered, which files are reached, and the frame of the pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import httpx2
import pytest
import uvicorn
from fastapi.routing import iter_route_contexts
from PIL import Image
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from qwen_cache.errors import ConfigError
from qwen_cache.options import run_app
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import load_config
from qwen_train.ui import __main__ as ui
from qwen_train.ui.app import FILES, HERE, PAGES, PATHS, STATIC_FOLDER, Access
from qwen_train.ui.workspace import Workspace, options_of

from .support.browser import chromium, new_page
from .support.commands import Result, refused, run
from .support.processes import popen
from .support.ui import ONCE, ORIGIN, OWN, PORT, PROGRAM, TOKEN, enter, opened, running, served, signed
from .support.waiting import HANG, wait_until

QUEUE, JOBS = "/api/queue/pause", "/api/jobs"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "qwen.yaml").write_text("train: {max_steps: 7}\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def own(project: Path) -> Iterator[TestClient]:
    """A client with the rights of a page."""
    with opened(project) as client:
        yield client


@pytest.fixture(scope="module")
def stranger(own: TestClient) -> TestClient:
    """A client without any."""
    return TestClient(own.app, base_url=ORIGIN, raise_server_exceptions=False)


def attempt(client: TestClient, headers: dict[str, str]) -> set[int]:
    """The statuses of requests to read and to change."""
    requests = ("GET", JOBS), ("POST", QUEUE), ("PUT", JOBS), ("GET", "/nothing"), ("OPTIONS", JOBS)
    answers = [client.request(*request, headers=headers, content=b"") for request in requests]
    assert all(set(answer.json()) == {"error", "do"} for answer in answers)
    return {answer.status_code for answer in answers}


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cookie": f"qwen_cache_ui_{PORT}={TOKEN}; token={TOKEN}"},  # other ports get it too
        {"Authorization": "Bearer wrong"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Bearer {ONCE}"},
        {"Authorization": f"Basic {TOKEN}"},
    ],
    ids=str,
)
def test_a_stranger_gets_nothing(stranger: TestClient, headers: dict[str, str]) -> None:
    for own in ({}, {"Origin": ORIGIN, "Referer": f"{ORIGIN}/", "Sec-Fetch-Site": "same-origin"}):
        assert attempt(stranger, headers | own) == {401}
    assert stranger.get(f"{JOBS}?token={TOKEN}", headers=headers).status_code == 401


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": f"127.0.0.1.evil.example:{PORT}"},
        {"Host": "192.168.0.1"},
        {"Host": "[::2"},
        {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        {"Origin": "http://127.0.0.1:3000"},
        {"Origin": "null"},
        {"Sec-Fetch-Site": "same-site"},  # another port of this machine
        {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
    ids=str,
)
def test_pages_of_others_get_nothing(stranger: TestClient, headers: dict[str, str]) -> None:
    """Even if they knew the token, or a key; a link may lead to the start, but to no page that shows what it names."""
    assert attempt(stranger, PROGRAM | headers) == {403}
    image = signed("/api/data/image?source=data&row=0&role=target")
    for path in ("/data?source=s3%3A%2F%2Fevil", "/?source=x", "/train", "/static/api.js", image):
        assert stranger.get(path, headers=headers).status_code == 403, path
    assert stranger.get("/", headers=headers).status_code == (403 if "Host" in headers else 200)


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://["},
        {"Origin": "\xff"},
        {"Host": "127.0.0.1:x"},
        {"Host": "http://["},
        {"Host": ""},
        {"Authorization": "Bearer \xff"},
        {"Authorization": "\xff"},
        {"Sec-Fetch-Site": "\xff"},
        {"Content-Length": "\xb2"},
        {"Content-Length": "9" * 5000},
        {"Content-Length": "-1"},
    ],
    ids=lambda headers: str(headers)[:40],
)
def test_malformed_headers_are_refused(stranger: TestClient, headers: dict[str, str]) -> None:
    given = {name: value.encode("latin-1") for name, value in (OWN | headers).items()}
    for method, path in ("POST", QUEUE), ("POST", "/api/token"), ("PUT", "/data/"):
        assert 400 <= stranger.request(method, path, headers=given, content=b"{}").status_code < 500, path
    assert not stranger.get(JOBS, headers=OWN).json()["paused"]


def routes(app: Any) -> Iterator[tuple[str, str]]:
    """Every method and path of the application, with a value for each part that varies."""
    for route in iter_route_contexts(app.routes):
        for method in route.methods or ():
            yield method, re.sub(r"\{.+?\}", "x", str(route.path))


def is_open(method: str, path: str) -> bool:
    return method == "GET" and (path in PATHS or path.startswith("/static/"))


def test_every_route_needs_the_token(stranger: TestClient) -> None:
    own = {name: value for name, value in OWN.items() if name != "Authorization"}
    found = list(routes(stranger.app))
    assert len(found) > 60
    for method, path in found:
        if not is_open(method, path):
            assert stranger.request(method, path, headers=own, content=b"").status_code == 401, path


def test_pages_are_the_same_for_everybody(stranger: TestClient, project: Path) -> None:
    for path in (*PATHS, *(f"/static/{name}" for name in STATIC_FOLDER)):
        answer = stranger.get(path, headers={"Cookie": "a=b"})
        assert answer.status_code == 200, path
        assert project.name not in answer.text
        assert "set-cookie" not in answer.headers
    folder = {"name": project.name, "path": str(project.resolve())}
    assert stranger.get("/api/folder", headers=OWN).json() == folder


def test_a_key_opens_one_file(stranger: TestClient) -> None:
    """Requests that a browser makes by itself, without the token."""
    images = [f"/api/data/image?source=none&row={row}" for row in (0, 1)]
    images += ["/api/train/image?folder=none&path=x", "/api/train/lora?folder=none&step=1"]
    images += ["/api/generate/preview?path=none", "/api/generate/results/x/y"]
    keys = [signed(path)[: len("/signed/") + 64] for path in images]
    for key in keys:
        for path in images:
            is_its = key == keys[images.index(path)]
            assert (stranger.get(key + path).status_code != 401) == is_its, path
            for other in (f"{path}&x", path.replace("api", "ap%69"), path + "/"):
                assert stranger.get(key + other).status_code == 401
            assert stranger.post(key + path, content=b"").status_code == 401
        assert stranger.get(key.replace("signed", "signe%64") + images[0]).status_code == 401
    for method, path in routes(stranger.app):
        if method == "GET" and not path.startswith(("/written/", "/api/generate/results/", *FILES)):
            assert stranger.get(signed(path)).status_code == 401, path


def test_a_person_without_the_key_gets_a_page(stranger: TestClient) -> None:
    """Such as in a window with a report, after the UI was started again."""
    page = stranger.get("/written/runs/out", headers={"Accept": "text/html,*/*"})
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "open the address that `qwen-cache ui` printed" in page.text


def test_a_program_needs_the_token_alone(stranger: TestClient) -> None:
    assert stranger.post(QUEUE, headers=PROGRAM, content=b"{}").json() == {"paused": True}
    assert stranger.post("/api/queue/resume", headers=PROGRAM, content=b"{}").json() == {"paused": False}


def test_bodies_have_a_length_and_a_limit(own: TestClient) -> None:
    endless = own.post(QUEUE, content=iter([b"{}"]))
    assert (endless.status_code, endless.json()["error"]) == (411, "the body has no length")
    both = own.post(QUEUE, content=b"{}", headers={"Transfer-Encoding": "chunked", "Content-Length": "2"})
    assert both.status_code == 411
    huge = own.post(QUEUE, content=b"", headers={"Content-Length": "300000000"})
    assert (huge.status_code, huge.json()["do"]) == (413, "send at most 256000000")


def test_the_token_that_a_browser_is_given_is_exchanged_once() -> None:
    """Other users see it in the list of processes."""
    client = TestClient(Access(PlainTextResponse("a page"), TOKEN, ONCE), base_url=ORIGIN)

    def exchange(token: str) -> Any:
        answer = client.post("/api/token", headers={"Authorization": f"Bearer {token}"})
        return answer.json().get("token", answer.status_code)

    assert exchange("wrong") == 401
    assert [exchange(ONCE), exchange(ONCE)] == [TOKEN, 401]
    assert [exchange(TOKEN), exchange(TOKEN), exchange("")] == [TOKEN, TOKEN, 401]
    assert client.get("/api/jobs", headers=PROGRAM).text == "a page"


@pytest.mark.parametrize("name", PAGES)
def test_pages_run_their_own_scripts_alone(own: TestClient, name: str) -> None:
    answer = own.get(f"/{name}")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'; script-src 'self'; style-src 'self'" in policy
    assert "unsafe" not in policy
    assert answer.headers["cache-control"] == "no-store"
    text = answer.text
    assert f'aria-current="page">{PAGES[name]}' in text
    assert not re.findall(r"<script(?![^>]*\ssrc=)|\sstyle=|\son\w+=|https?://", text)
    for url in re.findall(r'(?:src|href)="(/static/[^"]+)"', text):
        assert own.get(url).status_code == 200, url


def test_scripts_never_write_markup_and_load_nothing_from_elsewhere() -> None:
    scripts = {path.name: path.read_text(encoding="utf-8") for path in (HERE / "static").glob("*.js")}
    assert {f"{name}.js" for name in PAGES} <= scripts.keys()
    for name, text in scripts.items():
        assert not re.findall(
            r"(?:inner|outer)HTML\s*=|insertAdjacentHTML|document\.write|\beval\(|https?://(?!www\.w3\.org)", text
        ), name


@pytest.mark.parametrize("name", ["nothing.js", "../app.py", "..%2fapp.py", "%2e%2e/app.py", "style.css%00"])
def test_static_files_are_listed_ones(own: TestClient, name: str) -> None:
    assert own.get(f"/static/{name}").status_code == 404


@pytest.mark.parametrize(
    "path",
    ["..", "../other", "/etc/passwd", "data/../../other", "link/secret.txt", "link", "loop", "a\0b"],
)
def test_paths_outside_the_folder_are_refused(tmp_path: Path, path: str) -> None:
    folder, other = tmp_path / "project", tmp_path / "other"
    for each in (folder / "data", other):
        each.mkdir(parents=True)
    (other / "secret.txt").write_text("secret", encoding="utf-8")
    (folder / "link").symlink_to(other)
    (folder / "loop").symlink_to("loop")
    workspace = Workspace.open(folder)
    if path == "loop" and sys.version_info >= (3, 13):
        return  # resolves to itself, inside
    with pytest.raises(RefusedError) as refused:
        workspace.inside(path)
    assert refused.value.status == 403


@pytest.mark.parametrize("link", [".qwen-ui", ".qwen-ui/uploads", ".qwen-ui/thumbnails/ab"])
def test_a_state_that_leads_elsewhere_is_not_used(tmp_path: Path, link: str) -> None:
    """A link may have come with the folder: uploads would be written there, and old thumbnails removed."""
    folder, other = tmp_path / "project", tmp_path / "other"
    other.mkdir()
    (folder / link).parent.mkdir(parents=True)
    (folder / link).symlink_to(other)
    with pytest.raises(ConfigError, match="leads out of the opened folders"):
        Workspace.open(folder)
    Workspace.open(folder, [other])


def test_a_path_never_looks_like_an_option(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    for typed in ("./--out=x", "a/../-x"):
        shown = workspace.shown(workspace.inside(typed))
        assert shown.startswith("./-")
        assert workspace.inside(shown) == workspace.inside(typed)


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have names in Unicode alone")
def test_names_that_are_no_text_do_not_break_pages(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"\xff\xfe.png")).write_bytes(b"")
    (tmp_path / "<img src=x onerror=alert(1)>\n\x1b[2J'\".png").write_bytes(b"")
    with opened(tmp_path) as client:
        for path in ("/api/generate/choices", "/api/train/controls"):
            answer = client.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-type"] == "application/json"
            assert sorted(answer.json()["images"]) == sorted(each.name for each in tmp_path.glob("*.png"))
        body, kind = b'{"changes": {"\\ud800": NaN}}', {"Content-Type": "application/json"}
        answer = client.post("/api/settings/check", content=body, headers=kind)
        assert answer.status_code == 422


def test_allowed_folders_are_reached(tmp_path: Path) -> None:
    folder, photographs = tmp_path / "project", tmp_path / "photographs"
    folder.mkdir()
    photographs.mkdir()
    (folder / "data").symlink_to(photographs)
    workspace = Workspace.open(folder, [photographs])
    assert workspace.inside("data/a.png") == photographs / "a.png"
    assert workspace.shown(photographs / "a.png") == str(photographs / "a.png")
    assert workspace.shown(folder / "out/b.png") == "out/b.png"
    assert str(workspace.location("s3://bucket/shards")) == "s3://bucket/shards"
    with pytest.raises(ConfigError, match="no such folder"):
        Workspace.open(tmp_path / "missing")


def test_settings_are_those_of_the_help(own: TestClient) -> None:
    found = {each["key"]: each for each in own.get("/api/settings?sections=train,optimizer").json()}
    assert found.keys() == {each.key for each in all_settings() if each.key.startswith(("train.", "optimizer."))}
    steps = found["train.max_steps"]
    assert (steps["value"], steps["kind"]) == (7, "integer")  # of qwen.yaml
    assert all(each["description"] and each["title"] for each in found.values())
    kinds = {"choice", "flag", "integer", "number", "numbers", "text", "yaml"}
    assert {each["kind"] for each in found.values()} == kinds
    assert found["train.validation_split"]["bounds"] == {"ge": 0, "lt": 1}


CHANGES: list[dict[str, Any]] = [
    {"train.max_steps": 50, "optimizer.learning_rate": 1e-5},
    {"train.output_dir": "a: b # c", "train.gradient_checkpointing": False},
    {"train.output_dir": "1e-5"},  # text that YAML would read as a number
    {"data.trigger_word": "a\x7f\x85\xa0\u2028b 😀"},
    {"train.lora.rank_pattern": {"to_q": 4}, "model.transformer": None},
    {"validation.prompts": [{"prompt": 'quotes " and \\ and\nlines', "control": ["ä b.png"], "seed": 3}]},
]


@pytest.mark.parametrize("changes", CHANGES, ids=str)
def test_changes_reach_a_command_as_they_are(own: TestClient, changes: dict[str, Any]) -> None:
    options = own.post("/api/settings/check", json={"changes": changes}).json()["options"]
    assert options == options_of(changes)
    assert options[::2] == ["--set"] * len(changes)
    values = load_config(None, options[1::2]).model_dump(mode="json")
    for key, value in changes.items():
        section: Any = values
        for part in key.split("."):
            section = section[part]
        for given, read in zip(*(each if isinstance(each, list) else [each] for each in (value, section)), strict=True):
            assert read == given if not isinstance(given, dict) else given.items() <= read.items()


def test_a_wrong_setting_is_named(own: TestClient) -> None:
    answer = own.post("/api/settings/check", json={"changes": {"optimizer.lerning_rate": 1}})
    assert answer.status_code == 422
    assert answer.json()["do"] == "did you mean optimizer.learning_rate?"
    answer = own.post("/api/settings/check", json={"changes": {"train.max_steps": "many"}})
    assert (answer.json()["where"], answer.json()["found"]) == ("train.max_steps", "many")


@pytest.fixture
def ui_here(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], Result]:
    """`qwen-cache ui` for a folder, in this process, with a server that ends at once."""

    def execute(program: str, words: list[str]) -> None:
        assert [program, *words[1:4]] == [sys.executable, "-P", "-m", ui.__package__]
        sys.argv = words[3:]
        run_app(ui.run)

    monkeypatch.setattr(os, "execv", execute)
    monkeypatch.setattr(uvicorn.Server, "run", lambda *_, **__: None)
    return lambda folder: run("qwen-cache", "ui", folder, "--port", "0", "--no-browser")


def test_one_ui_for_a_folder_and_an_end_by_ctrl_c(tmp_path: Path, ui_here: Callable[[Path], Result]) -> None:
    """The process is the one that was started, and has its options, those of every command included."""
    program = Path(sys.executable).parent / "qwen-cache"
    arguments = [program, "ui", tmp_path, "--port", "0", "--no-browser", "--json", "--quiet"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with popen(arguments, env=environment, **pipes) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(3)]
        url = json.loads("".join(lines))["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{43}", url)
        address, _, token = url.partition("/#token=")
        answer = httpx2.get(
            f"{address}/api/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=HANG, verify=False
        )
        assert (answer.json()["paused"], answer.json()["jobs"]) == (False, [])
        assert httpx2.get(f"{address}/api/jobs", timeout=HANG, verify=False).status_code == 401
        second = ui_here(tmp_path)
        process.send_signal(signal.SIGINT)
        assert process.wait(HANG) == 0
        assert process.stderr is not None
        assert "Ctrl-C ends the UI" not in process.stderr.read()
    refused(second, "this folder is already open in another `qwen-cache ui`")


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read in Linux's /proc")
def test_many_large_images_take_the_memory_of_one(tmp_path: Path) -> None:
    (tmp_path / "data/target_images").mkdir(parents=True)
    for i in range(8):
        Image.new("RGB", (8000, 8000), (20 * i, 80, 120)).save(tmp_path / f"data/target_images/{i}.png")
        (tmp_path / f"data/target_images/{i}.txt").write_text("a prompt")
    with running(tmp_path) as (url, pid):
        address, _, token = url.partition("/#token=")

        def peak(*rows: int) -> int:
            """In kB, after these images were asked for at once."""

            def ask(row: int) -> None:
                assert get("/api/data/image", row=row, size="whole").status_code == 200

            with ThreadPoolExecutor(len(rows)) as pool:
                list(pool.map(ask, rows))
            return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])

        def get(path: str, **query: Any) -> Any:
            headers, query = {"Authorization": f"Bearer {token}"}, {"source": "data"} | query
            return httpx2.get(address + path, params=query, headers=headers, timeout=HANG, verify=False)

        wait_until(lambda: not get("/api/data").json()["listing"])
        one = peak(0)
        assert one > 8000 * 8000 * 3 / 1024
        assert peak(*range(1, 8)) < 1.5 * one


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path, ui_here: Callable[[Path], Result]) -> None:
    refused(ui_here(tmp_path / "missing"), "no such folder")


# ---- in a browser ----------------------------------------------------------------------------------------------------

ATTACKS = """async (ui) => {
  const load = (name, attributes) => new Promise((done) => {
    const made = Object.assign(document.createElement(name), attributes);
    made.onload = () => done("loaded");
    made.onerror = () => done("refused");
    document.body.append(made);
  });
  const send = (path, options) =>
    fetch(ui + path, { credentials: "include", ...options }).then(() => "sent", () => "refused");
  navigator.sendBeacon(ui + "/api/queue/pause", "{}");
  return [
    await send("/api/jobs", {}),
    await send("/api/jobs", { headers: { Authorization: "Bearer a-token" } }),
    await send("/api/queue/pause", { method: "POST", mode: "no-cors", body: "{}" }),
    await load("script", { type: "module", src: ui + "/static/api.js" }),
    await load("img", { src: ui + "/static/icon.svg" }),
  ];
}"""
STEAL = """async () => {
  const tabs = new BroadcastChannel("qwen-cache token"), heard = [];
  tabs.onmessage = ({ data }) => heard.push(JSON.stringify(data));
  tabs.postMessage({ asks: true });
  await new Promise((done) => setTimeout(done, 500));
  const kept = JSON.stringify({ ...localStorage, ...sessionStorage });
  return [document.cookie, kept, window.name, document.referrer, heard.join()];
}"""
REPORT = """<p id="tried"></p><script>
const tried = [];
const note = (name) => (how) => document.getElementById("tried").textContent = tried.push(name + how) && tried.sort();
const other = document.createElement("script");
other.src = location.pathname.replace(/runs.*/, "inspect/data.js");
other.onload = () => note("script ")("loaded");
other.onerror = () => note("script ")("refused");
document.head.append(other);
fetch("/api/jobs", { credentials: "include" }).then(() => "sent", () => "refused").then(note("fetch "));
try { note("token ")(sessionStorage.length + document.cookie); } catch { note("token ")("refused"); }
</script>"""


class Recorder(BaseHTTPRequestHandler):
    """A program of another port: it keeps all that a browser sends, and lets every page read its answers."""

    got: ClassVar[list[tuple[str, dict[str, str], bytes]]] = []

    def do_GET(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.got.append((self.path, dict(self.headers.items()), body))
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        for name, value in ("Origin", self.headers.get("Origin", "*")), ("Credentials", "true"), ("Headers", "*"):
            self.send_header(f"Access-Control-Allow-{name}", value)
        self.end_headers()
        self.wfile.write(b"<link rel=icon href=data:,>another program")

    do_POST = do_OPTIONS = do_GET  # noqa: N815

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def recorder() -> Iterator[int]:
    """The port of a `Recorder`."""
    Recorder.got.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Recorder) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_port
        server.shutdown()


def write_run(project: Path) -> None:
    """A pair of images to show, and a run whose report attacks."""
    for name, text in ("metrics.jsonl", '{"step": 1}\n'), ("qwen.yaml", "{}"), ("report.html", REPORT):
        (project / "run").mkdir(exist_ok=True)
        (project / "run" / name).write_text(text, encoding="utf-8")
    for name, text in ("inspect/data.js", "const prompts = 1"), ("../data/target_images/a.txt", "a prompt"):
        path = project / ".qwen-ui" / name
        path.resolve().parent.mkdir(parents=True, exist_ok=True)
        path.resolve().write_text(text, encoding="utf-8")
    for name in "target_images", "control_images":
        (project / "data" / name).mkdir(exist_ok=True)
        Image.new("RGB", (32, 32), "teal").save(project / "data" / name / "a.png")


@pytest.mark.slow  # a browser
def test_other_pages_in_the_browser_reach_nothing(project: Path, own: TestClient) -> None:
    """Requests of another port and another name of this machine, and one that came with a run and was opened.

    What the browser sent to the other port is then sent to every route of the UI, as if by its own page.
    """
    write_run(project)
    with recorder() as port, served(project) as ui, chromium() as browser:
        page = new_page(browser)
        enter(page, ui, token=ONCE)
        assert page.url in (f"{ui}/", f"{ui}/?source=data")  # the page opens its source when that is found
        page.wait_for_selector("#rows img[data-state=there]")
        image = page.locator("#rows img").first.get_attribute("src")
        for host in "127.0.0.1", "localhost":
            there = f"http://{host}:{port}/"
            other = page.context.new_page()
            other.goto(there)
            assert other.evaluate(ATTACKS, ui) == ["refused"] * 5
            assert other.evaluate(STEAL) == ["", "{}", "", "", ""]
            other.set_content(f'<form method="post" action="{ui}/api/queue/pause"><button>Win</button></form>')
            other.click("button")
            other.wait_for_url(f"{ui}/api/queue/pause")
            assert '"error"' in other.content()
            page.evaluate(  # what a page of the UI could send there
                """async (there) => {
                  document.body.append(Object.assign(new Image(), { src: there }));
                  document.body.append(Object.assign(document.createElement("a"), { href: there, id: "away" }));
                  for (const credentials of ["include", "omit"]) await fetch(there, { credentials }).catch(() => {});
                }""",
                there,
            )
            page.evaluate("document.getElementById('away').click()")
            page.wait_for_url(there)
            assert page.evaluate(STEAL) == ["", "{}", "", "", ""]
            page.evaluate("fetch('/', { credentials: 'include' }).then((answer) => answer.text())")
            page.go_back()
            page.wait_for_selector("body[data-folder] #rows img[data-state=there]")

        page.click("nav a[href='/train']")
        with page.context.expect_page() as shown:
            page.click("text=Report of this run")
        tried = shown.value.locator("#tried", has_text=re.compile("fetch.*script.*token"))
        assert tried.text_content() == "fetch refused,script refused,token refused"
        assert page.context.cookies() == []

        assert len(Recorder.got) >= 6
        sent = repr(Recorder.got)
        assert not any(secret in sent for secret in (TOKEN, ONCE, image.split("/")[2]))
        heads = [{name: value for name, value in head.items() if name != "Host"} for _, head, _ in Recorder.got]
        as_page = {"Origin": ui, "Referer": f"{ui}/", "Sec-Fetch-Site": "same-origin"}
        distinct = {json.dumps(head | as_page | {"Connection": "close"}) for head in heads}
        addresses = [each for each in routes(own.app) if not is_open(*each)]
        addresses += [("GET", "/" + image.split("/", 3)[3]), ("GET", image.replace("row=0", "row=1"))]
        with httpx2.Client(verify=False, base_url=ui, timeout=HANG) as program:
            for head in map(json.loads, sorted(distinct)):
                for method, path in addresses:
                    assert program.request(method, path, headers=head).status_code == 401, path
            assert program.get(image).headers["content-type"] == "image/jpeg"
            answer = program.get(JOBS, headers=PROGRAM).json()
            assert (answer["paused"], answer["jobs"], answer["held"]) == (False, [], [])


DAMAGED = """() => {
  const { getItem, setItem } = Storage.prototype;
  Storage.prototype.getItem = function (key) { return this === localStorage ? VALUE : getItem.call(this, key); };
  Storage.prototype.setItem = function (key, value) {
    if (this === localStorage) throw new DOMException("full", "QuotaExceededError");
    setItem.call(this, key, value);
  };
}"""


OTHER_KINDS = json.dumps(
    {
        **dict.fromkeys(("source", "model", "cache", "run", "lora"), 5),
        "form build": {"reuse": 7, "mode": "x", "watch": [], "vae_device": None, "format": {}},
        "form build settings": {"changes": [1]},
        "form train": {"prompts": [None, 5, {"prompt": "a"}, {"prompt": 5, "control": []}], "devices": 1},
        "form train settings": {"changes": {"train.max_steps": {"a": []}, "unknown": 1}},
        "form curves": {"log": None, "raw": "x", "smoothing": "x"},
        "form generate": {"axes": [5, ["x"], ["y", 1], []], "images": [5], "devices": {"device": 5}, "strength": None},
    }
)
"""Entries of other kinds than those that the pages keep."""


@pytest.mark.slow  # a browser
@pytest.mark.parametrize("value", ["{cut", "[1]", "null", OTHER_KINDS], ids=["cut", "list", "null", "other kinds"])
def test_a_page_opens_whatever_the_browser_kept(project: Path, value: str) -> None:
    write_run(project)
    with served(project) as ui, chromium() as browser:
        page = new_page(browser)
        errors = list[str]()
        page.context.on("weberror", lambda error: errors.append(str(error.error)))
        page.add_init_script(f"({DAMAGED.replace('VALUE', json.dumps(value))})()")
        enter(page, ui)
        for path in ("/build", "/train", "/generate"):
            page.goto(f"{ui}{path}")
            page.wait_for_selector("#settings input", state="attached")
        assert errors == []


COUNTED = """() => {
  const send = window.fetch;
  window.asked = 0;
  window.fetch = (path, ...more) => { if (path === "/api/jobs") window.asked += 1; return send(path, ...more); };
}"""


@pytest.mark.slow  # a browser
def test_a_page_has_one_poll_of_the_jobs(project: Path) -> None:
    """Whenever the longest pause has passed, at most one request is sent, and the next one after its answer."""
    write_run(project)
    with served(project) as ui, chromium() as browser:
        page = new_page(browser)
        page.clock.install()
        page.add_init_script(f"({COUNTED})()")
        enter(page, ui)
        for name in PAGES:
            page.goto(f"{ui}/{name}")
            page.wait_for_selector("body[data-folder]")
            page.wait_for_load_state("networkidle")
            page.clock.pause_at(page.evaluate("Date.now()") / 1000 + 1)
            first = before = page.evaluate("asked")
            while before < first + 4:
                page.clock.fast_forward(3000)
                now = page.evaluate("asked")
                assert now - before <= 1, name
                before = now
                page.wait_for_timeout(200)
            page.clock.resume()


@pytest.mark.slow  # a browser
def test_windows_get_the_token_from_the_address_or_from_one_another(project: Path) -> None:
    write_run(project)
    with chromium() as browser:
        page = new_page(browser)
        errors = list[str]()
        page.context.on("weberror", lambda error: errors.append(str(error.error)))
        opened_page, asks = "body[data-folder] nav", "#token[open]"
        with served(project) as ui:
            enter(page, ui, token=ONCE)
            page.reload()
            page.wait_for_selector("#rows img[data-state=there]")
            page.click("nav a[href='/build']")
            page.wait_for_selector("[data-page=build][data-folder]")
            assert page.title() == f"Build · {project.name} · qwen-cache"

            second = page.context.new_page()
            second.goto(f"{ui}/train#run=run")  # a bookmark, beside another window
            second.wait_for_selector("#view:not([hidden])")
            page.close()
            second.close()

            alone = page.context.new_page()
            alone.goto(f"{ui}/data?source=data")
            alone.wait_for_selector(asks)
            assert "Open the address that qwen-cache ui printed" in alone.inner_text(asks)
            assert alone.locator(".folder").inner_text().strip() == ""
            for wrong in (ONCE, f"{ui}/#token={ONCE}", "\u00fc\n"):
                alone.fill("#address", wrong)
                alone.press("#address", "Enter")
                alone.locator("#token-problem", has_text="used up, or of an earlier start").wait_for()
            alone.keyboard.press("Escape")
            alone.keyboard.press("Escape")
            alone.wait_for_selector(asks)
            alone.fill("#address", f" {ui}/#token={TOKEN} ")
            alone.press("#address", "Enter")
            alone.wait_for_selector("#rows img[data-state=there]")
            assert not alone.locator(asks).count()

        with served(project, ui.removeprefix("http://"), token="another-token"):
            alone.wait_for_selector(asks)  # its token is of the program before
            alone.evaluate(f"void (window.sent = import('/static/api.js').then((api) => api.post('{QUEUE}')))")
            another = alone.context.new_page()
            another.goto(f"{ui}/queue")
            another.wait_for_selector(asks)
            another.evaluate("location.hash = 'token=another-token'")  # the address, opened in a window of the UI
            another.wait_for_selector(opened_page)
            alone.wait_for_selector(asks, state="hidden")
            assert alone.evaluate("window.sent") == {"paused": True}, "what a user does meanwhile is not lost"
            alone.click("nav a[href='/train']")
            alone.wait_for_selector(opened_page)
        assert errors == []
