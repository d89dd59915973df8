"""The Build page: its form is the command line that it shows, its plan and jobs are those of that command."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen_cache.format.cache import open_cache
from qwen_cache.inspect import page as document
from qwen_cache.inspect.flags import stored_images
from qwen_cache.inspect.summary import survey
from qwen_cache.settings.load import load_config
from qwen_cache.settings.titles import SECTIONS
from qwen_train.ui import search
from qwen_train.ui.build import MAX_LISTED, Form, checked, shortened
from qwen_train.ui.jobs import Checked, Device, Found, found
from qwen_train.ui.workspace import Workspace

from .support.browser import chromium, new_page
from .support.commands import command
from .support.paths import load_tool
from .support.serving import running, service_job
from .support.ui import PROGRAM, enter, opened, served, signed
from .support.waiting import wait_until

SETTINGS = """
model: {path: tiny}
data: {source: photos}
cache: {path: kept, text_device: "cuda:1", reuse: [older]}
"""


CHANGED = """async ([settings, examples]) => {
  const { inputOf, read } = await import("/static/setting_input.js");
  const given = (setting, value) => read(inputOf(setting, value, "any"), setting);
  const differ = (setting, value) => JSON.stringify(given(setting, value)) !== JSON.stringify(value);
  return settings.flatMap((setting) => [setting.default, setting.value, examples[setting.kind] ?? setting.default]
    .filter((value) => differ(setting, value)).map((value) => [setting.key, value]));
}"""
"""The values of settings that a form would not give back as it got them."""
EXAMPLES = {
    "area": 786432,
    "sizes": [[1024, 768]],
    "list": ["a", "1"],
    "numbers": [0.5, 1],
    "bytes": 15,
    "number": 1e-8,
}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("project")
    (folder / "qwen.yaml").write_text(SETTINGS, encoding="utf-8")
    for name, file in (("tiny", "model_index.json"), ("kept", "cache.json"), ("a/b/shards", "cache.json")):
        (folder / name).mkdir(parents=True)
        (folder / name / file).write_text('{"_class_name": "QwenImageEditPipeline"}', encoding="utf-8")
    for name in "photos", "other photos":
        (folder / name).mkdir()
    return folder


@pytest.fixture(scope="module")
def client(project: Path) -> Iterator[TestClient]:
    with opened(project) as client:
        client.post("/api/queue/pause", json={})
        yield client


@pytest.fixture
def own(client: TestClient, project: Path, monkeypatch: pytest.MonkeyPatch) -> TestClient:
    """A client of the page whose queue starts nothing; the tests remove the jobs that they start."""
    monkeypatch.chdir(project)
    return client


def built(project: Path, **given: Any) -> list[str]:
    """The arguments of a form without problems."""
    build, problems = checked(Workspace.open(project), Form(**given))
    assert build is not None, problems
    return list(build.arguments)


# ---- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "options"),
    [
        ({}, ""),
        ({"source": "photos", "model": "tiny", "cache": "kept", "text_device": "cuda:1"}, ""),  # as in qwen.yaml
        ({"source": "other photos", "cache": "s3://bucket/shards"}, "'other photos' --out s3://bucket/shards"),
        ({"model": "Qwen/Qwen-Image-Edit-2509", "format": "v1"}, "--model Qwen/Qwen-Image-Edit-2509 --format v1"),
        ({"vae_device": "cuda:0,cuda:1", "text_device": "cpu"}, "--vae-device cuda:0,cuda:1 --text-device cpu"),
        ({"reuse": ["a b", "c"], "mode": "replace", "rehash": True}, "--reuse 'a b' --reuse c --replace --rehash"),
        ({"reuse": ["older"]}, ""),
        ({"reuse": []}, "--set cache.reuse=[]"),
        ({"mode": "watch", "watch": 2.5, "rehash": True}, "--watch 2.5"),
        ({"mode": "repair"}, "--repair"),
        ({"at": " http://127.0.0.1:8077", "vae_device": "cuda:0", "model": "new"}, "--at http://127.0.0.1:8077"),
        (
            {"changes": {"data.vae_image_size": 65536, "data.trigger_word": "sks 'x'"}},
            "--set data.trigger_word='\"sks '\"'\"'x'\"'\"'\"' --set data.vae_image_size=65536",
        ),
    ],
    ids=str,
)
def test_a_form_is_a_command_line(own: TestClient, project: Path, given: dict[str, Any], options: str) -> None:
    answer = own.post("/api/build/command", json=given).json()
    assert answer["problems"] == []
    assert shlex.split(answer["line"]) == shlex.split(f"qwen-cache build {options}")
    assert built(project, **given) == shlex.split(answer["line"])[1:]


def test_the_command_line_gives_the_settings_of_the_form(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    changes = {"cache.dtype": "float32", "data.resolution": [[64, 32]], "data.prompt_prefix": "1e-5"}
    build, _ = checked(Workspace.open(project), Form(cache="new", changes=changes))
    assert build is not None
    arguments = [*build.arguments]
    sets = [arguments[at + 1] for at, each in enumerate(arguments) if each == "--set"]
    assert load_config(None, sets, cache__path="new") == build.settings
    assert build.settings.data.source == "photos"


def test_a_plan_of_what_is_watched_is_that_of_one_build(project: Path) -> None:
    build, _ = checked(Workspace.open(project), Form(mode="watch", changes={"cache.dtype": "float32"}))
    assert build is not None
    assert build.plan.arguments == ("build", "--set", 'cache.dtype="float32"', "--dry-run", "--json")
    assert build.measure.arguments == (*build.plan.arguments, "--measure")


@pytest.mark.parametrize(
    ("given", "key", "what"),
    [
        ({"source": "../elsewhere"}, "data.source", "../elsewhere is outside the opened folders"),
        ({"cache": "/etc"}, "cache.path", "/etc is outside the opened folders"),
        ({"source": "nowhere"}, "data.source", "there is no such source"),
        ({"model": "--set"}, "model.path", "no such folder"),
        ({"model": "nowhere/at/all"}, "model.path", "no such folder"),
        ({"model": "photos"}, "model.path", "not a diffusers model folder"),
        ({"mode": "repair", "cache": "photos"}, "cache.path", "no cache.json here"),
        ({"reuse": ["shards", "/root"]}, "cache.reuse", "/root is outside the opened folders"),
        ({"changes": {"cache.reuse": ["../x"]}}, "cache.reuse", "../x is outside the opened folders"),
        ({"changes": {"cache.local_copies": "/tmp"}}, "cache.local_copies", "/tmp is outside the opened folders"),
        ({"changes": {"data.mask_head": "/x.pt"}}, "data.mask_head", "/x.pt is outside the opened folders"),
        ({"changes": {"cache.path": "/etc"}}, "cache.path", "/etc is outside the opened folders"),
        ({"changes": {"cache": {"path": "/etc"}}}, "cache", "this is no setting of a build"),
        ({"changes": {"validation.cache": "/etc"}}, "validation.cache", "this is no setting of a build"),
        ({"vae_device": "cuda:0; rm"}, "cache.vae_device", "no name of a device"),
        ({"at": "127.0.0.1:8077"}, "at", "not the address of a server"),
        ({"at": "http://127.0.0.1:8077", "mode": "repair"}, "at", "a server cannot repair"),
        ({"mode": "watch", "watch": 0}, "watch", "too short"),
        ({"format": "v7"}, "cache.format", "not a valid value"),
        ({"changes": {"data.on_error": "halt"}}, "data.on_error", "not a valid value"),
        ({"changes": {"data.vae_image_size": -5}}, "data.vae_image_size", "not a valid value"),
        ({"changes": {"cache.shard_size": "many"}}, "cache.shard_size", "could not parse value and unit"),
    ],
    ids=str,
)
def test_a_problem_names_its_setting(own: TestClient, given: dict[str, Any], key: str, what: str) -> None:
    answer = own.post("/api/build/command", json=given).json()
    assert answer["line"] == ""
    (problem,) = answer["problems"]
    assert problem["key"] == key
    assert what in problem["what"]
    for name in ("plan", "measure", "start"):
        refused = own.post(f"/api/build/{name}", json=given)
        assert (refused.status_code, refused.json()["where"]) == (422, key)
    assert own.get("/api/jobs").json()["jobs"] == []


def test_models_are_read_from_anywhere(own: TestClient, project: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/model_index.json").write_bytes((project / "tiny/model_index.json").read_bytes())
    form = {"model": str(tmp_path / "elsewhere"), "changes": {"model.vae": "/vae", "model.text_encoder": "/x"}}
    answer = own.post("/api/build/command", json=form).json()
    assert answer["problems"] == []
    assert shlex.split(answer["line"])[2:4] == ["--model", form["model"]]


def test_a_source_and_a_model_are_needed(tmp_path: Path) -> None:
    (tmp_path / "photos").mkdir()
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny/model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}', encoding="utf-8")
    build, (problem,) = checked(Workspace.open(tmp_path), Form(model="tiny"))
    assert (build, problem.key, problem.what) == (None, "data.source", "no source is named")
    build, (problem,) = checked(Workspace.open(tmp_path), Form(source="photos"))
    assert (build, problem.key, problem.what) == (None, "model.path", "no model is named")


def test_models_and_caches_of_the_folder_are_offered(own: TestClient, project: Path) -> None:
    answer = own.get("/api/build").json()
    assert (answer["models"], answer["caches"]) == (["tiny"], ["kept", "a/b/shards"])
    assert answer["values"] == {
        "data.source": "photos",
        "model.path": "tiny",
        "cache.path": "kept",
        "cache.vae_device": "auto",
        "cache.text_device": "cuda:1",
        "cache.format": "v2",
        "cache.reuse": ["older"],
    }
    (project / "tiny" / "inside").mkdir(exist_ok=True)
    (project / "tiny" / "inside" / "cache.json").write_text("{}", encoding="utf-8")
    assert project / "tiny/inside" not in search.find(Workspace.open(project)).caches


# ---- jobs ------------------------------------------------------------------------------------------------------------


def test_a_start_is_a_job_with_the_line_that_is_shown(own: TestClient) -> None:
    form = {"vae_device": "cuda:0,cuda:1", "mode": "replace"}
    line = own.post("/api/build/command", json=form).json()["line"]
    job = own.post("/api/build/start", json=form).json()
    assert (job["kind"], job["state"], job["line"]) == ("build", "queued", line)
    assert job["devices"] == ["cuda:0", "cuda:1"]
    about = {"cache": "kept", "source": "photos", "model": "tiny"}
    assert job["about"] == about
    measure = own.post("/api/build/measure", json=form).json()
    assert (measure["kind"], measure["line"]) == ("measure", f"{line} --dry-run --json --measure")
    assert measure["about"] == about | {"build": line}
    elsewhere = own.post("/api/build/start", json={"at": "http://127.0.0.1:8077"}).json()
    assert elsewhere["devices"] == ["server:0"]
    refused = own.post("/api/build/measure", json={"at": "http://127.0.0.1:8077"})
    assert (refused.status_code, refused.json()["where"]) == (422, "at")
    for each in (job, measure, elsewhere):
        own.post(f"/api/jobs/{each['id']}/remove", json={})


def test_a_plan_is_cut_and_says_how_long_it_is() -> None:
    samples = [{"name": str(at)} for at in range(MAX_LISTED + 7)]
    plan = {"to_encode": 3, "samples": samples, "problems": [], "validation": {"samples": samples[:2]}}
    short = shortened(plan)
    assert short is not None
    assert (short["samples"], short["to_encode"]) == (samples[:MAX_LISTED], 3)
    assert short["lengths"] == {"samples": MAX_LISTED + 7, "problems": 0}
    assert short["validation"]["lengths"] == {"samples": 2}
    assert shortened("no document") is None


def test_what_the_command_says_is_the_answer(own: TestClient) -> None:
    """A source that does not exist: a plan that fails, by the command itself."""
    answer = own.post("/api/build/plan", json={}).json()
    assert (answer["plan"], answer["line"], answer["source"]) == (None, "qwen-cache build", "photos")
    assert answer["message"].startswith("error:")


@pytest.mark.parametrize("name", ["look", "verify"])
def test_caches_that_are_outside_or_none_are_not_looked_at(own: TestClient, name: str) -> None:
    none = own.post(f"/api/build/{name}", json={"cache": "photos"})
    assert (none.status_code, none.json()["where"], none.json()["found"]) == (422, "cache.path", "photos")
    assert own.post(f"/api/build/{name}", json={"cache": "/etc"}).status_code == 403
    assert own.post(f"/api/build/{name}", json={"cache": "--help"}).status_code == 422


# ---- the page about a cache ------------------------------------------------------------------------------------------


def test_a_written_page_is_served_in_a_sandbox(own: TestClient, project: Path) -> None:
    """The page has no token: its address has a key, which opens the page and the files beside it, and nothing else."""
    folder = project / ".qwen-ui" / "inspect"
    (folder / "x_files").mkdir(parents=True, exist_ok=True)
    (folder / "y_files").mkdir(exist_ok=True)
    for name in ("x.html", "x_files/rows-0.js", "x.txt", "y.html", "y_files/rows-0.js"):
        (folder / name).write_text("text", encoding="utf-8")
    (project / "secret.html").write_text("secret", encoding="utf-8")
    (folder / "link.html").unlink(missing_ok=True)
    (folder / "link.html").symlink_to(project / "secret.html")
    sandboxed = TestClient(own.app, base_url=str(own.base_url), headers={"Sec-Fetch-Site": "cross-site"})
    page = sandboxed.get(signed("/written/inspect/x.html"))
    assert page.headers["content-security-policy"].startswith("sandbox allow-scripts allow-forms; default-src 'none'")
    assert "allow-same-origin" not in page.headers["content-security-policy"]
    assert page.headers["x-content-type-options"] == "nosniff"
    key = signed("/written/inspect/x.html").removesuffix("x.html")
    assert sandboxed.get(f"{key}x_files/rows-0.js").text == "text"
    outside = "..%2f..%2fsecret.html", "%2e%2e/%2e%2e/secret.html"
    for name in ("x.txt", "none.html", "link.html", "a%00.html", *outside):
        assert sandboxed.get(signed(f"/written/inspect/{name}")).status_code == 404, name
    for name in ("x_files/..%2fy.html", "x_files/%2e%2e/y.html", "x_files/%2e%2e/y_files/rows-0.js"):
        assert sandboxed.get(key + name).status_code == 404, name
    for name in ("y.html", "y_files/rows-0.js", "x_files", "x%5ffiles/rows-0.js", "../runs/out"):
        assert sandboxed.get(key + name).status_code == 401, name
    for path in ("/written/inspect/x.html", f"/signed/{64 * '0'}/written/inspect/x.html", "/signed/x", "/api/jobs"):
        assert sandboxed.get(path).status_code == 401, path
    assert sandboxed.post(f"{key}x.html", json={}).status_code == 401
    assert sandboxed.post("/api/queue/pause", json={}, headers={"Origin": "null"}).status_code == 401


# ---- devices ---------------------------------------------------------------------------------------------------------

GPU = {"place": "cuda:0", "name": "NVIDIA H200", "total": 141, "free": 140, "bf16": True}
MEMORY = {"name": "memory", "status": "ok", "found": "", "do": None, "facts": {"total": 64, "free": 32}}
CPU = Device("cpu", "CPU", 64, 32)


@pytest.mark.parametrize(
    ("checks", "expected"),
    [
        (
            [{"name": "cuda:0", "status": "ok", "facts": GPU}],
            Found((Device("cuda:0", "NVIDIA H200", 141, 140, True), CPU)),
        ),
        (
            [{"name": "accelerator", "status": "warning", "found": "none", "do": "buy one", "facts": {}}],
            Found((CPU,), "accelerator: none", "buy one"),
        ),
        (
            [{"name": "torch's build", "status": "missing", "found": "fails: x", "do": None, "facts": {}}],
            Found((CPU,), "torch's build: fails: x"),
        ),
    ],
)
def test_devices_are_those_of_doctor(checks: list[dict[str, Any]], expected: Found) -> None:
    assert found(Checked(1, {"ok": False, "checks": [*checks, MEMORY]}, "")) == expected


def test_a_doctor_that_fails_leaves_the_cpu() -> None:
    failed = found(Checked(2, None, "error: no python"))
    assert failed.devices == (Device("cpu", "CPU"),)
    assert failed.problem == "qwen-cache doctor failed: error: no python"


# ---- with encoders, and in a browser ---------------------------------------------------------------------------------


def stored(folder: Path) -> dict[str, dict[str, bytes]]:
    """Every tensor of every sample, by the key of the sample."""
    cache = open_cache(folder)
    names = [cache.row(at).meta.tensors for at in range(len(cache))]
    return {each.key: {name: bytes(each.buffer(name)) for name in names[at]} for at, each in enumerate(cache)}


@pytest.mark.slow
def test_a_build_that_is_stopped_and_resumed_is_that_of_the_command(
    tmp_path: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    load_tool("make_demo_data").make_demo_data(tmp_path / "data")  # type: ignore[attr-defined]
    (tmp_path / "tiny").symlink_to(tiny_model("edit-plus"))
    form = {"vae_device": "cpu", "text_device": "cpu"}
    changes = {"data.vae_image_size": 250_000, "cache.dtype": "float32"}  # sizes that leave time to stop it
    form |= {"model": "tiny", "cache": "shards", "changes": changes}  # type: ignore[dict-item]
    with opened(tmp_path, tiny_model("edit-plus")) as client:

        def job(id: str) -> dict[str, Any]:
            return dict(client.get(f"/api/jobs/{id}").json())

        def has_ended(id: str) -> bool:
            return bool(job(id)["ended"])

        planned = client.post("/api/build/plan", json=form).json()
        assert (planned["plan"]["to_encode"], planned["plan"]["refused"]) == (13, [])
        measure = client.post("/api/build/measure", json=form).json()
        wait_until(lambda: has_ended(measure["id"]))
        measured = client.get(f"/api/build/measured/{measure['id']}").json()
        assert measured["line"] == planned["line"]
        assert measured["plan"]["seconds"] > 0
        assert not (tmp_path / "shards").exists()

        first = client.post("/api/build/start", json=form).json()
        assert first["line"] == planned["line"]
        seen: list[dict[str, Any]] = []

        def is_between() -> bool:
            now = job(first["id"])["progress"] or {"total": None, "what": "", "done": 0}
            seen.append(now)
            assert not job(first["id"])["ended"], "it ended before it could be stopped"
            return now["what"] == "encoding" and 0 < now["done"] < 13

        wait_until(is_between)
        lanes = {lane["name"]: lane["device"] for lane in seen[-1]["lanes"]}
        assert lanes == {"vae-0": "cpu", "text-0": "cpu"}
        assert all(lane["done"] > 0 and 0 <= lane["busy"] <= 1 for lane in seen[-1]["lanes"])
        client.post(f"/api/jobs/{first['id']}/stop", json={})
        wait_until(lambda: has_ended(first["id"]))
        assert job(first["id"])["state"] == "stopped"

        rest = client.post("/api/build/plan", json=form).json()["plan"]
        assert rest["kept"] > 0
        assert rest["to_encode"] > 0
        assert rest["kept"] + rest["to_encode"] == 13
        again = client.post(f"/api/jobs/{first['id']}/again", json={}).json()
        wait_until(lambda: has_ended(again["id"]))
        assert job(again["id"])["state"] == "done"
        assert "done in" in client.get(f"/api/jobs/{again['id']}/output").json()["text"]

        verify = client.post("/api/build/verify", json={"cache": "shards"}).json()
        look = client.post("/api/build/look", json={"cache": "shards"}).json()
        for each in (verify, look):
            wait_until(lambda id=each["id"]: has_ended(id))  # type: ignore[misc]
        assert client.get(f"/api/jobs/{verify['id']}/result").json()["document"]["ok"] is True
        assert "<title>shards" in client.get(f"/written/inspect/{look['about']['page']}").text
    by_hand = command("qwen-cache", *shlex.split(planned["line"])[1:], "--out", "by-hand", cwd=tmp_path, fresh=False)
    assert by_hand.code == 0, by_hand.stderr
    assert open_cache(tmp_path / "by-hand").identity == open_cache(tmp_path / "shards").identity
    assert stored(tmp_path / "by-hand") == stored(tmp_path / "shards")


@pytest.mark.slow
def test_a_build_with_the_encoders_of_a_server(
    tmp_path: Path, pairs: Path, tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder names no model; the server has one."""
    (tmp_path / "ui").mkdir()
    monkeypatch.chdir(tmp_path / "ui")
    with running(service_job(tiny_model("edit-plus"), tmp_path / "pool")) as url, opened(tmp_path / "ui", pairs) as own:
        form = {"source": str(pairs), "at": url}
        plan = own.post("/api/build/plan", json=form).json()
        job = own.post("/api/build/start", json=form).json()
        wait_until(lambda: own.get(f"/api/jobs/{job['id']}").json()["ended"])
        assert own.get(f"/api/jobs/{job['id']}").json()["state"] == "done"
    keys = {sample.key for sample in open_cache(tmp_path / "ui" / "shards")}
    assert len(keys) == plan["plan"]["to_encode"] > 0
    assert {sample.key for sample in open_cache(tmp_path / "pool")} == keys


@pytest.mark.slow
def test_the_page_in_a_browser(project: Path, built: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """Problems at their fields, the newest build after a reload, and the page about a cache in its sandbox."""
    page_file = project / ".qwen-ui" / "inspect" / "large.html"
    monkeypatch.setattr(document, "ONE_FILE", 2)
    surveyed = survey(str(built("edit-plus")), scan=False)
    monkeypatch.chdir(project)
    document.write_page(page_file, surveyed, stored_images, 4)
    assert page_file.with_name("large_files").is_dir()
    with served(project) as address, chromium() as browser:
        page = new_page(browser)
        enter(page, address)
        page.request.post(f"{address}/api/queue/pause", data={}, headers=PROGRAM)
        page.goto(f"{address}/build")
        line = page.locator("#command code")
        line.wait_for()
        assert line.inner_text() == "qwen-cache build"
        page.fill("#source", "../elsewhere")
        page.locator("#source-problem:visible").wait_for()
        assert page.get_attribute("#source", "aria-invalid") == "true"
        assert page.is_disabled("#start")
        page.fill("#source", "other photos")
        page.locator("#start:enabled").wait_for()
        assert line.inner_text() == "qwen-cache build 'other photos'"
        size = page.locator("[id='setting-data.vae_image_size']")
        size.fill("big")
        size.press("Tab")
        page.locator("[id='setting-data.vae_image_size-problem']", has_text="an integer").wait_for()
        assert page.is_disabled("#start")
        size.fill("512², 1024×768")
        size.press("Tab")
        page.locator("#command code", has_text="--set 'data.vae_image_size=[262144, 786432]'").wait_for()
        page.get_by_label("Undo the change of Image area (pixels)").click()
        page.locator("#start:enabled").wait_for()
        sections = ",".join(SECTIONS)
        settings = page.request.get(f"{address}/api/settings?sections={sections}", headers=PROGRAM).json()
        assert page.evaluate(CHANGED, [settings, EXAMPLES]) == []
        page.fill("#server", "http://127.0.0.1:8077")
        page.locator("#command code", has_text="--at http://127.0.0.1:8077").wait_for()
        assert page.is_disabled("#measure")
        assert not page.is_visible("#own-devices")
        page.fill("#server", "")
        page.locator("#measure:enabled").wait_for()
        page.click("#start")
        page.locator(".job .state").wait_for()
        page.reload()
        page.locator(".job .state").wait_for()
        assert page.locator(".job .state").inner_text() == "queued: the queue is paused, see the Queue page, on cuda:1"
        assert page.input_value("#source") == "other photos"

        about = new_page(browser)  # without the token
        about.goto(address + signed("/written/inspect/large.html"))
        about.locator("article:not(.waiting) img").first.wait_for()
        assert about.locator("article").count() == 4
        assert about.evaluate("window.origin") == "null"
        assert about.evaluate("fetch('/api/jobs').then(() => 'read', () => 'refused')") == "refused"
