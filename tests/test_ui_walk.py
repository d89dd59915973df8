"""The whole way of the demo in the web UI, in a real Chromium, by keyboard alone: open the photographs, correct a
prompt, build, train, see an image come in, stop, try the LoRA, resume, generate. Source, model, cache, run and LoRA are
named once; each page has what was chosen before. On a desktop and a phone, in light and in dark.

All pages are then checked by axe-core (https://github.com/dequelabs/axe-core), which must find nothing serious.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from qwen_cache.models.recorded import recorded_model

from .support import processes
from .support.browser import chromium, new_page
from .support.paths import ROOT
from .support.ui import running
from .support.waiting import wait_until

pytestmark = pytest.mark.slow

SOURCE = "edits"
NAME, PROMPT = "china_black_and_white", "make it black and white, with soft contrast"
CONTROL = f"{SOURCE}/control_images/{NAME}.jpg"
SETTINGS = """
data: {vae_image_size: 16384}
cache: {dtype: float32}
train:
  max_steps: 50
  gradient_accumulation_steps: 40
  gradient_checkpointing: false
  mixed_precision: "no"
  checkpointing_steps: 25
optimizer: {learning_rate: 1.0e-3}
validation: {num_inference_steps: 2}
predict: {dtype: float32, num_inference_steps: 2}
"""
SCREENS: dict[str, dict[str, Any]] = {
    "desktop": {"viewport": {"width": 1280, "height": 900}, "color_scheme": "light"},
    "phone": {"viewport": {"width": 390, "height": 844}, "color_scheme": "dark"},
}
SHOWN = {
    "data": "#rows [role=row]",
    "build": "#jobs .job",
    "train": "#charts svg",
    "generate": ".flip img",
    "queue": "#ended .job",
}
"""The content of each page after the whole way."""
TABS = 600
"""More than any page has stops for the Tab key."""
HAS_FOCUS = """([css, text]) => {
  const node = document.activeElement;
  return node.matches(css) && (!text || node.textContent.trim() === text);
}"""


@dataclass(frozen=True)
class Keyboard:
    """A user of a page who has only a keyboard."""

    page: Any

    def to(self, css: str, text: str = "") -> None:
        """Move the focus with the Tab key to what matches."""
        for _ in range(TABS):
            if self.page.evaluate(HAS_FOCUS, [css, text]):
                return
            self.page.keyboard.press("Tab")
        raise AssertionError(f"the Tab key does not reach {css} {text}")

    def press(self, css: str, text: str = "", key: str = "Enter") -> None:
        self.to(css, text)
        self.page.keyboard.press(key)

    def write(self, css: str, text: str) -> None:
        self.to(css)
        self.page.keyboard.press("Control+a")
        self.page.keyboard.type(text)

    def open(self, name: str) -> None:
        self.press(f"nav a[href='/{name}']")
        self.page.wait_for_url(f"**/{name}")
        self.page.wait_for_load_state("networkidle")  # the devices are known

    def start(self, css: str) -> None:
        """Press the button of the form until its job is shown: while the form is checked, the button does nothing."""
        shown = self.page.locator(css)
        while not shown.count():
            self.press("#start:enabled")
            for _ in range(100):
                self.page.wait_for_timeout(200)
                if shown.count():
                    break

    def wait(self, css: str, text: str = "") -> Any:
        """The matching element, as soon as it is there; the page must show no error meanwhile."""
        found = self.page.locator(css, has_text=text).first if text else self.page.locator(css).first

        def is_there() -> bool:
            assert not (problem := self.page.locator("#errors").text_content()), problem
            return bool(found.is_visible())

        wait_until(is_there)
        return found


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with chromium() as started:
        yield started


@pytest.fixture(scope="module", params=SCREENS)
def walked(request: pytest.FixtureRequest, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A page of the UI, and its folder, after the whole way; it wrote nothing to the console."""
    folder, said = tmp_path_factory.mktemp("project"), list[str]()
    model = tmp_path_factory.mktemp("models") / "tiny"
    for tool, *arguments in (["make_tiny_model.py", model, "--variant", "edit-plus"], ["make_demo_data.py", SOURCE]):
        processes.run([sys.executable, ROOT / "tools" / tool, *arguments], cwd=folder, check=True, capture_output=True)
    (folder / "qwen.yaml").write_text(SETTINGS, encoding="utf-8")
    page = new_page(browser, **SCREENS[request.param], reduced_motion="reduce")
    page.on("console", lambda message: said.append(message.text))
    page.on("pageerror", lambda error: said.append(str(error)))
    with running(folder) as (url, _):
        page.goto(url)
        walk(Keyboard(page), folder, model)
        yield page, folder
        page.context.close()
    assert not said


def walk(user: Keyboard, folder: Path, model: Path) -> None:
    user.wait("#found li", "29 images")
    user.press("#found a", SOURCE)
    correct_a_prompt(user, folder)
    build(user, model)
    train(user, model)
    generate(user)


def build(user: Keyboard, model: Path) -> None:
    user.press("#build-this")
    user.wait("#model-problem", "no model is named")
    assert user.page.is_disabled("#start")
    user.write("#model", str(model))
    user.write("#cache", "cache")
    user.wait("#command code", f"qwen-cache build {SOURCE} --model {model} --out cache")
    user.start("#jobs .job")
    user.wait("#jobs .state", "done")
    user.wait("#jobs a", "Train from it")
    user.press("#jobs a", "Train from it")


def correct_a_prompt(user: Keyboard, folder: Path) -> None:
    user.wait("#rows [role=row]")
    user.write("#search", NAME)
    user.wait("#range", "1 of 1")
    user.press("#rows")
    user.wait("#editor[open] textarea")
    user.write("#prompt-0", PROMPT)
    user.page.keyboard.press("Control+Enter")
    wait_until(lambda: (folder / f"{SOURCE}/target_images/{NAME}.txt").read_text(encoding="utf-8").strip() == PROMPT)
    user.page.keyboard.press("Escape")


def train(user: Keyboard, model: Path) -> None:
    user.page.wait_for_url("**/train")
    user.page.wait_for_load_state("networkidle")
    user.wait("#line code", f"qwen-train run cache --model {model}")
    user.start("#jobs .job-title")
    user.wait("#images figcaption", "before training")  # by the form as it is
    user.press("#jobs button", "Sample now")
    user.wait("#images figcaption", "step ")
    user.press("#jobs button", "Stop")
    user.wait("#jobs .job-title", "stopped")
    user.press("#jobs button", "Try this LoRA")
    user.page.wait_for_url("**/generate")
    user.page.wait_for_load_state("networkidle")
    user.wait("#model-about", f"The run out was trained on {model}.")
    chosen = user.page.locator("#lora option:checked")
    assert chosen.text_content().startswith("out, step ")
    assert user.page.input_value("#model") == str(model)
    user.press("nav a[href='/train']")
    user.wait("#view-title", "Run out")
    user.press("#jobs button", "Resume")
    user.wait("#jobs .job-title", "done")


def generate(user: Keyboard) -> None:
    user.press("#jobs button", "Try this LoRA")
    user.page.wait_for_url("**/generate")
    user.page.wait_for_load_state("networkidle")
    user.wait("#model-about", "The run out was trained on")
    assert user.page.locator("#lora option:checked").text_content() == "out, at its end"
    user.write("#from-folder", CONTROL)
    user.page.keyboard.press("Enter")
    user.wait("#chosen img")
    user.write("#prompt", PROMPT)
    user.to("[name=several]")
    user.page.keyboard.press("ArrowDown")
    user.wait("#command code", "--grid lora_weight=0,1")
    user.start(".result")
    user.wait(".result[data-state=done] .flip img")
    before = user.page.locator(".flip img").get_attribute("src")
    user.press(".flip input", key="ArrowLeft")
    assert user.page.locator(".flip output").text_content() == "strength 0"
    wait_until(lambda: user.page.locator(".flip img").get_attribute("src") != before)


def test_what_the_way_leaves_is_what_the_commands_leave(walked: Any) -> None:
    _, folder = walked
    metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [line["step"] for line in metrics][-1] == 50
    assert (folder / "out/pytorch_lora_weights.safetensors").is_file()
    assert (folder / "qwen.yaml").read_text(encoding="utf-8") == SETTINGS
    kept = list((folder / ".qwen-ui/kept").rglob(f"{NAME}.txt"))
    assert [path.read_text(encoding="utf-8").strip() for path in kept] == ["Make the photograph black and white."]
    generated = sorted(path.name for path in (folder / ".qwen-ui/generated").rglob("*.png"))
    assert generated == ["image-grid.png", "image-lora_weight=0.png", "image-lora_weight=1.png"]
    build = [Path(sys.executable).parent / "qwen-cache", "build", SOURCE, "--out", "cache", "--dry-run", "--json"]
    again = subprocess.run(
        [*build, "--model", recorded_model(folder / "cache")["path"]], cwd=folder, capture_output=True, check=True
    )
    assert json.loads(again.stdout)["to_encode"] == 0


@pytest.mark.parametrize("name", SHOWN)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_is_accessible_and_fits(walked: Any, name: str, scheme: str) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    page, _ = walked
    page.emulate_media(color_scheme=scheme)
    page.goto(f"{page.url.rpartition('/')[0]}/{name}")
    Keyboard(page).wait(SHOWN[name])
    found = axe.run(page).response["violations"]
    serious = [each for each in found if each["impact"] in ("serious", "critical")]
    assert not serious, json.dumps(
        [(each["id"], [node["html"] for node in each["nodes"]]) for each in serious], indent=1
    )
    assert not page.evaluate("document.documentElement.scrollWidth > innerWidth")
