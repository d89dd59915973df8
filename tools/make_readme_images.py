"""Make the images of the README from the folder of `make demo`: docs/inspect.svg, docs/page.jpg (with a Chromium from
PATH), docs/prediction.jpg, and the pages of the web UI: docs/ui-data.jpg, docs/ui-build.jpg and docs/ui-train.jpg.

    make demo && .venv/bin/python tools/make_readme_images.py
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DEMO, DOCS = ROOT / "demo", ROOT / "docs"
NAME, PROMPT = "china_black_and_white", "make it black and white"
HEIGHT = 280


def inspect_image() -> None:
    """The text as a terminal of 100 columns shows it."""
    program, environment = (
        Path(sys.executable).parent / "qwen-cache",
        {**os.environ, "FORCE_COLOR": "1", "COLUMNS": "100"},
    )
    printed = subprocess.run(
        [program, "inspect", "shards"], cwd=DEMO, env=environment, check=True, capture_output=True, text=True
    )
    console = Console(record=True, width=100, highlight=False, file=io.StringIO())
    console.print(Text.from_ansi(printed.stdout))
    console.save_svg(str(DOCS / "inspect.svg"), title="qwen-cache inspect shards")


@contextmanager
def browser() -> Iterator[Any]:
    """A page of the width of a desktop in a Chromium."""
    from playwright.sync_api import sync_playwright

    program = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        yield chromium.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        chromium.close()


def page_image(page: Any) -> None:
    """A screenshot of `inspect --html`: the list of samples, searched for a word."""
    page.goto((DEMO / "shards.html").as_uri())
    page.locator("#search").fill("photograph")
    page.evaluate("document.getElementById('list').scrollIntoView()")
    page.wait_for_load_state("networkidle")
    page.screenshot(path=DOCS / "page.jpg", type="jpeg", quality=80)


def ui_images(page: Any) -> None:
    """Screenshots of the web UI: the photographs, a plan, and two runs side by side."""
    program = Path(sys.executable).parent
    other = ["--out", "slower", "--set", "optimizer.learning_rate=1e-3"]
    if not (DEMO / "slower" / "report.html").is_file():
        subprocess.run([program / "qwen-train", "run", "shards", *other], cwd=DEMO, check=True)
    with subprocess.Popen(
        [program / "qwen-cache", "ui", DEMO, "--port", "0", "--no-browser", "--json"], stdout=subprocess.PIPE, text=True
    ) as ui:
        try:
            assert ui.stdout is not None
            url = json.loads("".join(ui.stdout.readline() for _ in range(3)))["url"]
            take_ui_images(page, url)
        finally:
            ui.terminate()


def take_ui_images(page: Any, url: str) -> None:
    """The screenshots of a UI at this address."""
    page.goto(url)
    page.wait_for_selector("#rows img")
    page.wait_for_load_state("networkidle")
    page.screenshot(path=DOCS / "ui-data.jpg", type="jpeg", quality=80)
    address = url.partition("/#")[0]
    page.goto(f"{address}/build")
    page.wait_for_selector("#command code")
    page.locator("#cache").fill("other")
    page.wait_for_selector("#command code >> text=other")
    page.locator("#plan:enabled").click()
    page.wait_for_selector("#plan-result .facts-grid", timeout=300_000)
    page.locator("#plan-title").scroll_into_view_if_needed()
    page.locator("#plan-place").screenshot(path=DOCS / "ui-build.jpg", type="jpeg", quality=80)
    page.goto(f"{address}/train")
    for name in ("out", "slower"):
        page.locator("#runs tr", has_text=name).get_by_role("checkbox").check()
    page.locator(".by-step tbody tr").nth(1).locator("img").last.wait_for()
    for image in page.locator("#images img").all():  # which are loaded when they come into view
        image.scroll_into_view_if_needed()
        while not image.evaluate("img => img.complete && img.naturalWidth"):
            page.wait_for_timeout(100)
    page.locator("#view").screenshot(path=DOCS / "ui-train.jpg", type="jpeg", quality=80)


def predict(out: str, *options: str) -> Image.Image:
    program = Path(sys.executable).parent / "qwen-train"
    control = f"data/control_images/{NAME}.jpg"
    arguments = ["predict", "--image", control, "--prompt", PROMPT, "--out", out, *options]
    subprocess.run([program, *arguments], cwd=DEMO, check=True)
    return Image.open(DEMO / out)


def strip() -> None:
    """The control, the image without the LoRA, the image with it, and the target, side by side."""
    images = [
        Image.open(DEMO / "data" / "control_images" / f"{NAME}.jpg"),
        predict("without.png"),
        predict("prediction.png", "--lora", "out"),
        Image.open(DEMO / "data" / "target_images" / f"{NAME}.jpg"),
    ]
    same_height = [p.convert("RGB").resize((round(p.width * HEIGHT / p.height), HEIGHT)) for p in images]
    whole = Image.new("RGB", (sum(p.width for p in same_height) + 12 * (len(same_height) - 1), HEIGHT), "white")
    x = 0
    for image in same_height:
        whole.paste(image, (x, 0))
        x += image.width + 12
    whole.save(DOCS / "prediction.jpg", quality=85)


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    inspect_image()
    strip()
    with browser() as page:
        page_image(page)
        ui_images(page)
