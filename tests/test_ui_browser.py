"""The Build, Generate, Train and Queue pages in a browser: clicks that were not meant, and late or failed answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any
from urllib.parse import urlsplit

import pytest

from .support.browser import Late, chromium, new_page
from .support.ui import enter, served
from .support.waiting import wait_until
from .support.written_runs import write_image, write_run

pytestmark = pytest.mark.slow

LORA = "pytorch_lora_weights.safetensors"
PLAN = {"to_encode": 3, "cached": 0, "to_copy": 0, "kept": 0, "new_masks": 0, "samples": [], "problems": []}
PLAN |= {"lengths": {"samples": 0, "problems": 0, "removed": 0}}


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


def test_a_form_starts_once_and_as_it_was_checked(page: Any, address: str) -> None:
    """However late the check is, or how quickly Start is pressed again."""
    program = Program(page)
    page.goto(f"{address}/build")
    page.fill("#source", "more")
    page.locator("#command code", has_text="more").wait_for()
    held: list[Any] = []
    page.route("**/api/build/start", lambda route: held.append(route))
    late = Late(page, "**/api/build/command")
    page.click("#start")
    late.wait()
    page.fill("#source", "photos")
    late.wait(2)
    late.deliver()
    wait_until(lambda: page.wait_for_timeout(20) or held)
    assert json.loads(held[0].request.post_data)["source"] == "more"
    page.locator("#command code:not(:has-text('more'))").wait_for()
    assert page.is_disabled("#start"), "the first one has not been answered"
    program.tell(held.pop())
    page.unroute("**/api/build/start")
    for count in (1, 2):
        page.locator("#start:enabled").wait_for()
        press(page, "#start", count)
        wait_until(lambda: page.wait_for_timeout(20) or len(program.told) == 2)
    page.click("#verify")
    program.wait("start build", "start build", "verify build")

    page.goto(f"{address}/generate")
    bodies: list[str] = []
    page.on("request", lambda each: "/start" in each.url and bodies.append(json.loads(each.post_data)["prompt"]))
    for prompt in ("red", "blue"):
        page.fill("#prompt", prompt)
        page.locator("#command code", has_text=prompt).wait_for()
        page.focus("#model")
        page.keyboard.down("Enter")
        wait_until(lambda: page.wait_for_timeout(20) or prompt in bodies)  # noqa: B023
        page.locator("#start:enabled").wait_for()
        page.keyboard.down("Enter")
        page.keyboard.up("Enter")
    assert bodies == ["red", "blue"]


def test_what_fails_is_asked_again_until_it_is_answered(page: Any, address: str) -> None:
    """Every first request of a page fails: it says so, then becomes as if nothing had been, and the message goes."""
    failed = set[str]()
    ended = {"state": "done", "code": 0}
    jobs = [job("m", kind="measure", **ended), job("v", kind="verify", **ended), job("t", checkpoint=1)]
    answers: dict[str, Any] = {
        "/api/jobs": {"jobs": jobs, "held": [], "paused": False, "gpus": [], "problem": ""},
        "/api/jobs/v/result": {"document": {"ok": True}},
        "/api/build/measured/m": {"line": "", "source": "photos", "message": "", "plan": PLAN},
    }

    def once(route: Any) -> None:
        path = urlsplit(route.request.url).path
        if path in failed:
            route.fulfill(json=answers[path]) if path in answers else route.continue_()
        else:
            failed.add(path)
            route.fulfill(status=500, json={"error": "not yet"})

    page.route("**/api/**", once)
    there = {
        "/build": ("#command code", ".devices li", "#plan-place:not([hidden])", "text=All checksums match."),
        "/generate": ("#lora option[value*='checkpoint-2']", "#settings input", "#devices select"),
        "/train#run=out": ("#preset optgroup", "#show select", "#line code", "#devices input", "#charts svg"),
    }
    for path, shown in there.items():
        failed.clear()
        page.goto(address + path)
        page.locator("#errors", has_text="not yet").wait_for()
        for css in shown:
            page.locator(css).first.wait_for(state="attached")
        page.locator("#errors > *").wait_for(state="detached")
    page.locator(".loras").locator("xpath=../summary").click()
    page.locator(".loras li").wait_for(state="attached")
    page.locator("#errors > *").wait_for(state="detached")

    failed.clear()
    page.goto(f"{address}/generate")
    page.locator("#lora option[value*='checkpoint-2']").wait_for(state="attached")
    page.fill("#prompt", "red")
    page.locator("#command code", has_text="red").wait_for()
    failed.remove("/api/generate/command")
    page.fill("#prompt", "blue")
    page.locator("#command code", has_text="blue").wait_for()
    failed.remove("/api/generate/choices")
    jobs[2]["checkpoint"] = 2  # a new one to offer
    wait_until(lambda: page.wait_for_timeout(20) or "/api/generate/choices" in failed)
    page.wait_for_event("response", lambda each: each.ok and "/api/generate/choices" in each.url)

    page.locator("#errors > *").wait_for(state="detached")
    page.evaluate("import('/static/api.js').then(({ showError }) => showError({ message: 'of another' }))")
    failed.remove("/api/jobs")
    page.locator("#errors", has_text="not yet").wait_for()
    page.evaluate("import('/static/api.js').then(({ showError }) => showError({ message: 'of another' }))")
    page.wait_for_event("response", lambda each: each.ok and "/api/jobs" in each.url)
    page.wait_for_event("request", lambda each: "/api/jobs" in each.url)
    assert "of another" in page.inner_text("#errors"), "the error of another is not cleared"


Answer = Callable[[Any, Any], None]


def in_turn(page: Any, *asked: tuple[str, Callable[[], object]]) -> Answer:
    """Ask for two things with these addresses; the returned function answers the second one, then the first."""
    held: list[Any] = []

    def hold(count: int) -> Callable[[Any], object]:
        return lambda route: held.append(route) if len(held) < count else route.fallback()

    for count, (pattern, ask) in enumerate(asked, 1):
        page.route(pattern, hold(count))
        ask()
        wait_until(lambda: page.wait_for_timeout(20) or len(held) == count)  # noqa: B023

    def answer(first: Any, second: Any) -> None:
        for route, value in zip(reversed(held), (second, first), strict=True):
            with page.expect_response(route.request.url):
                route.fulfill(json=value)
            page.wait_for_timeout(50)

    return answer


def test_the_newest_choice_is_shown_however_the_answers_come(page: Any, address: str) -> None:
    """The presets of a model, curves of one smoothing, the LoRA files of a run, and its settings."""
    show_form(page, address)
    page.locator("#preset optgroup").first.wait_for(state="attached")
    page.locator("#charts svg").first.wait_for()

    def choose(name: str) -> tuple[str, Callable[[], object]]:
        model = page.locator("[id='own-model.path']")
        return f"**/api/train/presets?model={name}", lambda: (model.fill(name), model.press("Tab"))

    answer = in_turn(page, choose("one"), choose("two"))
    answer(*([{"name": name, "group": "all", "about": "", "settings": []}] for name in ("first", "second")))
    assert page.locator("#preset option").all_inner_texts() == ["none", "second"]

    def smooth(value: str, weight: str) -> tuple[str, Callable[[], object]]:
        slider = page.get_by_role("slider", name="Smoothing")
        return f"**/api/train/curves?*smoothing={weight}", lambda: slider.fill(value)

    def curves(value: float) -> dict[str, Any]:
        loss = {"steps": [1, 2, 3], "values": [value] * 3, "not_finite": 0, "count": 3}
        about = {"version": str(value), "lines": 3, "first": 1, "last": 3, "damaged": 0, "run": {}}
        return about | {"series": {"loss": loss, "loss_smoothed": loss}}

    page.route("**/api/train/curves?*", lambda route: route.fulfill(json={"version": ""}))  # no others
    in_turn(page, smooth("1", "0.5"), smooth("2", "0.7"))(curves(0.125), curves(0.25))
    plot = page.get_by_role("slider", name="Loss", exact=True)
    plot.press("End")
    assert plot.get_attribute("aria-valuetext").endswith("as logged 0.25, smoothed 0.25")

    runs = page.evaluate("import('/static/api.js').then(({ get }) => get('/api/train/runs'))")
    page.route("**/api/train/runs", lambda route: route.fulfill(json=runs))
    loras = "**/api/train/loras?*"
    answer = in_turn(
        page,
        (loras, lambda: page.locator("summary", has_text="LoRA files to download").click()),
        (loras, lambda: [run.update(checkpoint=4) for run in runs["runs"]]),
    )
    answer(*({"loras": [{"step": step, "bytes": 1}]} for step in (2, 4)))
    assert page.locator(".loras li").all_inner_texts() == ["step 4 1 B"]

    def fill(folder: str) -> tuple[str, Callable[[], object]]:
        css = f"[aria-label='New run with these settings: {folder}']"
        return f"**/api/train/settings?folder={folder}", lambda: page.click(css)

    page.locator("tr[data-folder=other] input").check()
    answer = in_turn(page, fill("out"), fill("other"))
    answer(*({"changes": {"train.max_steps": steps}, "devices": [], "left_out": []} for steps in (5, 6)))
    assert "the settings of other" in page.inner_text("#filled")
    assert page.input_value("[id='setting-train.max_steps']") == "6"


def test_what_is_typed_before_an_answer_stays(page: Any, address: str) -> None:
    """In the form of Build, the image to add in Generate, and the name of a run and its settings in Train."""
    late = Late(page, "**/api/build")
    page.goto(f"{address}/build")
    late.wait()
    page.fill("#source", "more")
    page.check("#mode-repair")
    late.deliver()
    page.locator("#command code", has_text="more --repair").wait_for()

    late = Late(page, "**/api/folder")
    page.goto(f"{address}/generate")
    late.wait()
    page.fill("#prompt", "red")
    late.deliver()
    page.locator("#command code", has_text="red").wait_for()
    late = Late(page, "**/api/generate/preview?*")
    page.fill("#from-folder", "photos/a.png")
    page.click("#add")
    late.wait()
    page.fill("#from-folder", "another")
    late.deliver()
    page.locator("#chosen li").wait_for()
    page.locator("#add:enabled").wait_for()
    assert page.input_value("#from-folder") == "another"

    late, places = Late(page, "**/api/train/runs"), Late(page, "**/api/train/places")
    page.goto(f"{address}/train#run=out")
    late.wait()
    page.locator("#new-run > summary").click()
    late.deliver()
    page.locator("#runs tr").first.wait_for()
    assert page.locator("#new-run[open]").count() == 1
    page.click("[aria-label='New run with these settings: out']")  # waits for the form
    places.wait()
    places.deliver()
    page.locator("#filled", has_text="the settings of out").wait_for()
    page.get_by_label("Presets").select_option("Edit")
    size, out = page.locator("[id='setting-train.batch_size']"), page.locator("[id='own-train.output_dir']")
    held: list[Any] = []
    page.route("**/api/settings?*", lambda route: held.append(route))
    page.get_by_role("button", name="Change these 5 settings").click()
    size.fill("3")
    page.wait_for_timeout(50)
    for route in held:  # none that would show the settings again
        with page.expect_response(route.request.url):
            route.continue_()
    page.wait_for_timeout(50)
    assert size.input_value() == "3"
    out.fill("begun")
    page.locator("#line code", has_text="begun").wait_for()
    page.route("**/api/train/start", lambda route: held.append(route))
    held.clear()
    page.click("#start")
    wait_until(lambda: page.wait_for_timeout(20) or held)
    out.fill("typed")
    held[-1].fulfill(json=job("begun", "queued"))
    page.locator("#new-run:not([open])").wait_for(state="attached")
    with page.expect_response("**/api/train/places"):
        page.locator("#new-run > summary").click()
    page.wait_for_timeout(50)
    assert (size.input_value(), out.input_value()) == ("3", "typed")
