"""The pages in a browser: clicks that were not meant."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from .support.browser import chromium, new_page
from .support.ui import enter, served
from .support.waiting import wait_until
from .support.written_runs import write_image, write_run

pytestmark = pytest.mark.slow

LORA = "pytorch_lora_weights.safetensors"


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The UI of a folder with a cache, a model, a source and two runs, one of them with a LoRA and an image."""
    folder = tmp_path_factory.mktemp("project")
    for name, file in (("tiny", "model_index.json"), ("shards", "cache.json")):
        (folder / name).mkdir()
        (folder / name / file).write_text('{"_class_name": "QwenImageEditPipeline"}', encoding="utf-8")
    (folder / "qwen.yaml").write_text(
        "model: {path: tiny}\ndata: {source: photos}\ncache: {path: shards}\n", encoding="utf-8"
    )
    for name, steps in (("out", 9), ("other", 7)):
        write_run(folder / name, f"train: {{max_steps: {steps}}}\nmodel: {{path: tiny}}\n", steps)
    (folder / "out/checkpoint-2").mkdir()
    (folder / "out/checkpoint-2" / LORA).write_bytes(b"")
    image = write_image(folder / "out", "step-1", prompt="red")
    for name in ("photos", "more"):
        (folder / name).mkdir()
        (folder / name / "a.png").write_bytes(image.read_bytes())
    with served(folder) as address:
        yield address


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture
def page(browser: Any, address: str) -> Iterator[Any]:
    """A page of the UI in a browser that has kept nothing; an error of its scripts fails the test."""
    page, errors = new_page(browser), list[str]()
    page.on("pageerror", lambda error: errors.append(str(error)))
    enter(page, address, "/queue")
    yield page
    page.context.close()
    assert errors == []


class Program:
    """Jobs as a program would answer, which does at once what it is told, and every request that tells it something."""

    def __init__(self, page: Any, *jobs: dict[str, Any]) -> None:
        self.page, self.jobs, self.told, self.paused = page, list(jobs), list[str](), False
        page.route("**/api/jobs", self.list)
        for pattern in ("**/api/jobs/*/*", "**/api/queue/*", "**/api/*/start", "**/api/build/verify"):
            page.route(pattern, self.tell)

    def list(self, route: Any) -> None:
        more = {"held": [], "paused": self.paused, "gpus": [], "problem": ""}
        route.fulfill(json={"jobs": self.jobs, **more})

    def tell(self, route: Any) -> None:
        if route.request.method == "GET":
            route.fulfill(json={"text": "", "next": 0, "skipped": 0})
            return
        what, name = route.request.url.split("/")[-2:]
        self.told.append(f"{name} {what}")
        self.paused = name == "pause"
        if name == "stop":
            self.jobs[0]["state"] = "stopping"
        elif name == "remove":
            self.jobs = [job for job in self.jobs if job["id"] != what]
        elif name == "move":
            self.jobs.insert(1, self.jobs.pop(2))
        elif name == "again":
            self.jobs.append(job("copy", state="queued"))
        route.fulfill(json={"paused": self.paused, **job("new")})

    def wait(self, *told: str) -> None:
        """Wait for the last of these; the others came before it, and nothing else."""
        wait_until(lambda: self.page.wait_for_timeout(20) or told[-1] in self.told)
        assert self.told == list(told)


def job(id: str, state: str = "running", *can: str, **more: Any) -> dict[str, Any]:
    about = {"output_dir": "out", "cache": "shards", "prompt": "red", "images": [], "grid": []}
    times = {"created": 1, "started": 1, "ended": 2 if state == "done" else None}
    told = {"id": id, "title": f"job {id}", "kind": "train", "state": state, "can": can, "line": "qwen-train run"}
    return told | {"about": about, "devices": ["cpu"], "code": None, "error": None, "progress": None} | times | more


def press(page: Any, css: str, count: int = 1) -> None:
    """A click; of a double click the first or the second one, where the first one has been."""
    if count == 1:
        page.locator(css).scroll_into_view_if_needed()
        box = page.locator(css).bounding_box()
        page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.down(click_count=count)
    page.mouse.up(click_count=count)


def show_form(page: Any, address: str) -> None:
    """The Train page with the form of a new run."""
    page.goto(f"{address}/train#run=out")
    page.locator("#runs tr").first.wait_for()
    page.locator("#new-run > summary").click()
    page.locator("#line code").wait_for()


def test_a_double_click_is_one_and_a_key_that_is_held_is_pressed_once(page: Any, address: str) -> None:
    """The second click would do what the first one has brought; buttons that one presses quickly count each click."""
    program = Program(
        page,
        job("a", "running", "stop"),
        *(job(id, "queued", "move", "remove") for id in "bcd"),
        job("e", "done", "again"),
    )

    def twice(css: str, then: str) -> None:
        page.locator(css).wait_for()
        press(page, css)
        page.locator(then).wait_for(state="attached")
        press(page, css, 2)

    twice("[aria-label='Stop: job a']", "[aria-label='Stop without saving: job a']")
    twice("[aria-label='Up: job c']", "#queued li:first-child[data-job=c]")
    twice("[aria-label='Remove: job c']", "#queued:not(:has([data-job=c]))")
    twice("#pause", "#is-paused:not([hidden])")
    page.focus("[aria-label='Run again: job e']")
    page.keyboard.down("Enter")
    page.locator("[data-job=copy]").wait_for()
    page.keyboard.down("Enter")
    page.keyboard.up("Enter")
    page.locator("[aria-label='Remove: job b']").click()
    program.wait("stop a", "move c", "remove c", "pause queue", "again e", "remove b")

    show_form(page, address)
    twice("#images button", "#enlarged[open]")
    assert page.locator("#enlarged[open]").count() == 1
    page.keyboard.press("Escape")
    page.get_by_role("button", name="Zoom in").dblclick()
    assert [each.input_value() for each in page.locator("#range-tools input").all()] == ["4", "6"]
