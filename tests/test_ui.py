"""`qwen-cache ui`: who is answered, which files are reached, and the frame of the pages."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2
import pytest
from PIL import Image
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from qwen_cache.errors import ConfigError
from qwen_cache.settings.listing import all_settings
from qwen_cache.settings.load import load_config
from qwen_cache.ui.access import Access
from qwen_cache.ui.pages import HERE, PAGES
from qwen_cache.ui.settings import options_of
from qwen_cache.ui.workspace import Workspace
from qwen_cache.web import RefusedError

from .support.browser import chromium, new_page
from .support.commands import command
from .support.ui import ORIGIN, OWN, PORT, TOKEN, enter, opened, running, served
from .support.waiting import HANG, wait_until

QUEUE, JOBS = "/api/queue/pause", "/api/jobs"
COOKIE = {"Cookie": OWN["Cookie"]}


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


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Cookie": f"qwen_cache_ui_{PORT}=wrong"},
        {"Cookie": f"qwen_cache_ui_{PORT + 1}={TOKEN}"},
        {"Authorization": "Bearer wrong"},
        {"Authorization": f"Basic {TOKEN}"},
        COOKIE | {"Host": "evil.example"},
        COOKIE | {"Host": f"127.0.0.1.evil.example:{PORT}"},
        COOKIE | {"Host": "192.168.0.1"},
        COOKIE | {"Host": "[::2"},
        COOKIE | {"Origin": "http://evil.example", "Sec-Fetch-Site": "cross-site"},
        COOKIE | {"Origin": "http://127.0.0.1:3000"},
        COOKIE | {"Origin": "null"},
        COOKIE | {"Sec-Fetch-Site": "same-site"},  # another port of this machine, which has the same cookies
        COOKIE | {"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
    ],
    ids=str,
)
def test_a_stranger_gets_nothing(stranger: TestClient, headers: dict[str, str]) -> None:
    for method, path in [("GET", "/"), ("GET", JOBS), ("GET", "/static/api.js"), ("POST", QUEUE), ("PUT", JOBS)]:
        answer = stranger.request(method, path, headers=headers, content=b"{}" if method == "POST" else None)
        assert answer.status_code == (403 if headers.get("Cookie") == OWN["Cookie"] else 401)
        assert set(answer.json()) == {"error", "do"}
    assert not stranger.get(JOBS, headers=OWN).json()["paused"]


def test_a_person_without_the_token_gets_a_page(stranger: TestClient) -> None:
    """Such as in a window that was open before the UI was started again."""
    page = stranger.get("/data", headers={"Accept": "text/html,*/*"})
    assert (page.status_code, page.headers["content-type"]) == (401, "text/html; charset=utf-8")
    assert "open the address that `qwen-cache ui` printed" in page.text


@pytest.mark.parametrize("other", ['a={"b": 1}', "a=b c", '="', "a=\u00e9", "expires", ""])
def test_cookies_of_other_programs_of_this_machine_are_passed_over(stranger: TestClient, other: str) -> None:
    """Browsers send them to every port; many hold JSON, which is no well-formed cookie."""
    cookies = f"{other}; {OWN['Cookie']}; {other}".encode("latin-1")
    assert stranger.get(JOBS, headers=[(b"cookie", cookies)]).status_code == 200
    wrong = cookies.replace(TOKEN.encode(), b"wrong")
    assert stranger.get(JOBS, headers=[(b"cookie", wrong)]).status_code == 401


def test_a_change_needs_a_page_of_the_program(stranger: TestClient) -> None:
    assert stranger.get(JOBS, headers=COOKIE).status_code == 200  # typed into the address line
    assert stranger.post(QUEUE, headers=COOKIE, content=b"{}").status_code == 403  # no browser omits Origin here
    assert stranger.post(QUEUE, headers=OWN, content=b"{}").json() == {"paused": True}
    by_program = {"Authorization": f"Bearer {TOKEN}"}
    assert stranger.post("/api/queue/resume", headers=by_program, content=b"{}").json() == {"paused": False}


def test_bodies_have_a_length_and_a_limit(own: TestClient) -> None:
    endless = own.post(QUEUE, content=iter([b"{}"]))
    assert (endless.status_code, endless.json()["error"]) == (411, "the body has no length")
    both = own.post(QUEUE, content=b"{}", headers={"Transfer-Encoding": "chunked", "Content-Length": "2"})
    assert both.status_code == 411
    huge = own.post(QUEUE, content=b"", headers={"Content-Length": "300000000"})
    assert (huge.status_code, huge.json()["do"]) == (413, "send at most 256000000")


def test_the_address_with_the_token_opens_the_pages(stranger: TestClient) -> None:
    """Also from a page of another origin, such as a terminal in a browser: the next request must be our own page's."""
    welcome = stranger.get(f"/?token={TOKEN}", headers={"Sec-Fetch-Site": "cross-site"}, follow_redirects=False)
    assert welcome.status_code == 200
    assert welcome.headers["set-cookie"] == f"qwen_cache_ui_{PORT}={TOKEN}; HttpOnly; SameSite=Strict; Path=/"
    assert TOKEN not in welcome.text
    assert 'content="0; url=/"' in welcome.text
    for wrong in ("wrong", "", TOKEN + "x"):
        answer = stranger.get(f"/?token={wrong}", headers=COOKIE)
        assert "set-cookie" not in answer.headers
        assert answer.status_code == (200 if wrong == "" else 401)  # an empty one is none


def test_the_address_that_a_browser_is_given_opens_the_pages_once() -> None:
    """Other users see it in the list of processes."""
    client = TestClient(Access(PlainTextResponse("a page"), TOKEN, PORT, "once"), base_url=ORIGIN)
    welcome = client.get("/?token=once")
    assert welcome.headers["set-cookie"].startswith(f"qwen_cache_ui_{PORT}={TOKEN};")
    assert client.get("/").text == "a page"
    client.cookies.clear()
    assert client.get("/?token=once").status_code == 401
    assert client.get(f"/?token={TOKEN}").status_code == 200


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
    """It may have come with the folder: uploads would be written there, and old thumbnails removed."""
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
    assert all(each["description"] for each in found.values())
    kinds = {"choice", "flag", "integer", "number", "text", "yaml"}
    assert {each["kind"] for each in found.values()} == kinds


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


def test_one_ui_for_a_folder_and_an_end_by_ctrl_c(tmp_path: Path) -> None:
    program = Path(sys.executable).parent / "qwen-cache"
    arguments = [program, "ui", tmp_path, "--port", "0", "--no-browser", "--json"]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment) as ui:
        assert ui.stdout is not None
        lines = [ui.stdout.readline() for _ in range(3)]
        url = json.loads("".join(lines))["url"]
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/\?token=[\w-]{43}", url)
        address, _, token = url.partition("/?token=")
        answer = httpx2.get(f"{address}/api/jobs", headers={"Authorization": f"Bearer {token}"}, timeout=HANG)
        assert answer.json() == {"paused": False, "jobs": []}
        assert httpx2.get(f"{address}/api/jobs", timeout=HANG).status_code == 401
        second = command("qwen-cache", "ui", tmp_path, "--port", "0", "--no-browser")
        assert second.code == 2
        assert "this folder is already open in another `qwen-cache ui`" in second.stderr
        ui.send_signal(signal.SIGINT)
        assert ui.wait(HANG) == 0


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read in Linux's /proc")
def test_many_large_images_take_the_memory_of_one(tmp_path: Path) -> None:
    (tmp_path / "data/target_images").mkdir(parents=True)
    for i in range(8):
        Image.new("RGB", (8000, 8000), (20 * i, 80, 120)).save(tmp_path / f"data/target_images/{i}.png")
        (tmp_path / f"data/target_images/{i}.txt").write_text("a prompt")
    with running(tmp_path) as (url, pid):
        address, _, token = url.partition("/?token=")

        def peak(*rows: int) -> int:
            """In kB, after these images were asked for at once."""

            def ask(row: int) -> None:
                assert get("/api/data/image", row=row, size="whole").status_code == 200

            with ThreadPoolExecutor(len(rows)) as pool:
                list(pool.map(ask, rows))
            return int(re.findall(r"VmHWM:\s+(\d+)", Path(f"/proc/{pid}/status").read_text())[0])

        def get(path: str, **query: Any) -> Any:
            headers, query = {"Authorization": f"Bearer {token}"}, {"source": "data"} | query
            return httpx2.get(address + path, params=query, headers=headers, timeout=HANG)

        wait_until(lambda: not get("/api/data").json()["listing"])
        one = peak(0)
        assert one > 8000 * 8000 * 3 / 1024
        assert peak(*range(1, 8)) < 1.5 * one


def test_a_folder_that_is_not_there_is_refused(tmp_path: Path) -> None:
    result = command("qwen-cache", "ui", tmp_path / "missing", "--no-browser")
    assert result.code == 2
    assert "no such folder" in result.stderr


# ---- a browser with the cookie of the UI -----------------------------------------------------------------------------

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
    await send("/api/queue/pause", { method: "POST", mode: "no-cors", body: "{}" }),
    await load("script", { type: "module", src: ui + "/static/api.js" }),
    await load("img", { src: ui + "/static/icon.svg" }),
  ];
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
try { note("cookie ")(document.cookie); } catch { note("cookie ")("refused"); }
</script>"""


@pytest.mark.slow  # a browser
def test_other_pages_in_the_browser_reach_nothing(project: Path, tmp_path: Path) -> None:
    """Those of another port and another name of this machine, and one that came with a run and was opened."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=str(tmp_path)))
    Thread(target=server.serve_forever, daemon=True).start()
    for name, text in ("metrics.jsonl", '{"step": 1}\n'), ("qwen.yaml", "{}"), ("report.html", REPORT):
        (project / "run").mkdir(exist_ok=True)
        (project / "run" / name).write_text(text, encoding="utf-8")
    (project / ".qwen-ui/inspect").mkdir(parents=True, exist_ok=True)
    (project / ".qwen-ui/inspect/data.js").write_text("const prompts = 1")
    with closing(server.socket), served(project) as ui, chromium() as browser:
        page = new_page(browser)
        enter(page, ui)
        for host in "127.0.0.1", "localhost":
            other = page.context.new_page()
            other.goto(f"http://{host}:{server.server_port}/")
            assert other.evaluate(ATTACKS, ui) == ["refused"] * 4
            other.set_content(f'<form method="post" action="{ui}/api/queue/pause"><button>Win</button></form>')
            other.click("button")
            other.wait_for_url(f"{ui}/api/queue/pause")
            assert '"error"' in other.content()
        jobs = "async () => (await fetch('/api/jobs')).json()"
        assert page.evaluate(jobs) == {"paused": False, "jobs": []}
        report = page.evaluate("async () => (await (await fetch('/api/train/runs')).json()).runs[0].report")
        with page.context.expect_page() as shown:
            page.evaluate("(url) => { window.open(url); }", report)
        tried = shown.value.locator("#tried", has_text=re.compile("cookie.*fetch.*script"))
        assert tried.text_content() == "cookie refused,fetch refused,script refused"
        server.shutdown()
