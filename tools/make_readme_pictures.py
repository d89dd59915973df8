"""Make the pictures of the README out of the folder that `make demo` leaves: docs/inspect.svg and docs/prediction.jpg.

make demo && .venv/bin/python tools/make_readme_pictures.py
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from PIL import Image
from rich.console import Console

from qwen_cache.inspect import print_overview, summarise

ROOT = Path(__file__).parents[1]
DEMO, DOCS = ROOT / "demo", ROOT / "docs"
NAME, PROMPT = "china_black_and_white", "make it black and white"
HEIGHT = 280


def inspect_picture() -> None:
    console = Console(record=True, width=100, highlight=False, file=open("/dev/null", "w"))  # noqa: SIM115
    overview = summarise(DEMO / "shards")
    print_overview({**overview, "cache": "shards"}, console)
    console.save_svg(str(DOCS / "inspect.svg"), title="qwen-cache inspect shards")


def predict(out: str, *options: str) -> Image.Image:
    program = Path(sys.executable).parent / "qwen-train"
    control = f"data/control_images/{NAME}.jpg"
    arguments = ["predict", "--image", control, "--prompt", PROMPT, "--out", out, *options]
    subprocess.run([program, *arguments], cwd=DEMO, check=True)
    return Image.open(DEMO / out)


def strip() -> None:
    """Control, drawn without the LoRA, drawn with it, target."""
    pictures = [
        Image.open(DEMO / "data" / "control_images" / f"{NAME}.jpg"),
        predict("without.png"),
        predict("prediction.png", "--lora", "out"),
        Image.open(DEMO / "data" / "target_images" / f"{NAME}.jpg"),
    ]
    same_height = [p.convert("RGB").resize((round(p.width * HEIGHT / p.height), HEIGHT)) for p in pictures]
    whole = Image.new("RGB", (sum(p.width for p in same_height) + 12 * (len(same_height) - 1), HEIGHT), "white")
    x = 0
    for picture in same_height:
        whole.paste(picture, (x, 0))
        x += picture.width + 12
    whole.save(DOCS / "prediction.jpg", quality=85)


if __name__ == "__main__":
    DOCS.mkdir(exist_ok=True)
    inspect_picture()
    strip()
