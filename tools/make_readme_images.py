"""Make the images of the README from the folder of `make demo`: docs/inspect.svg, docs/page.jpg (with a Chromium from
PATH) and docs/prediction.jpg.

    make demo && .venv/bin/python tools/make_readme_images.py
"""

from __future__ import annotations

import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
DEMO, DOCS = ROOT / "demo", ROOT / "docs"
NAME, PROMPT = "china_black_and_white", "make it black and white"
HEIGHT = 280


def inspect_image() -> None:
    """What a terminal of 100 columns shows."""
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


def page_image() -> None:
    """A screenshot of `inspect --html` at the width of a desktop: the list of samples, searched for a word."""
    from playwright.sync_api import sync_playwright

    browser = next(path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name)))
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        page = chromium.new_page(viewport={"width": 1200, "height": 900}, color_scheme="light")
        page.goto((DEMO / "shards.html").as_uri())
        page.locator("#search").fill("photograph")
        page.evaluate("document.getElementById('list').scrollIntoView()")
        page.wait_for_load_state("networkidle")
        page.screenshot(path=DOCS / "page.jpg", type="jpeg", quality=80)
        chromium.close()


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
    page_image()
    strip()
