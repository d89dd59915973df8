"""Brightness by the strength of a slider, on real photographs with a tiny model: a table in Markdown.

    python tools/bench_sliders.py [--steps 200] [--out FOLDER]

First a tiny model learns to copy a photograph, and to make it bright or dark when the prompt says so. Then a slider of
each kind is trained on it: from prompts and photographs, from prompts alone, and from pairs of a bright and a dark
image. The table has the mean brightness, in 0 to 1, of photographs that the neutral prompt generates with the slider.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from make_tiny_model import make_tiny_model
from PIL import Image, ImageEnhance
from skimage import data

ROOT = Path(__file__).parents[1]
SIDE = 96
PHOTOGRAPHS = ("chelsea", "coffee", "astronaut", "rocket", "hubble_deep_field", "immunohistochemistry")
BRIGHTNESS = {"a photo": 1.0, "a bright photo": 1.6, "a dark photo": 0.4}
SHOWN = 2
"""Photographs that are generated."""
STRENGTHS = (-2, -1, 0, 1, 2)
KINDS = {
    "prompts, photographs": {"train.slider.direction": "prompts", "train.slider.guidance_strength": 1.0},
    "prompts alone": {
        "train.slider.direction": "prompts",
        "train.slider.guidance_strength": 1.0,
        "train.slider.num_inference_steps": 4,
    },
    "pairs of images": {"train.slider.direction": "images"},
}


def write_rows(folder: Path, kind: str) -> Path:
    """A table of photographs: one row for each of `BRIGHTNESS` for the base, else one row for each photograph."""
    folder.mkdir()
    rows = list[dict[str, Any]]()
    for name in PHOTOGRAPHS:
        photo = Image.fromarray(getattr(data, name)()).convert("RGB").resize((SIDE, SIDE))
        files = {}
        for prompt, factor in BRIGHTNESS.items():
            files[prompt] = f"{name} {prompt}.png"
            ImageEnhance.Brightness(photo).enhance(factor).save(folder / files[prompt])
        plain, bright, dark = BRIGHTNESS
        row = {"prompt": plain, "control": files[plain]}
        direction = {"positive_prompt": bright, "negative_prompt": dark}
        rows += {
            "base": [{**row, "prompt": prompt, "target": files[prompt]} for prompt in BRIGHTNESS],
            "prompts, photographs": [{**row, **direction, "target": files[plain]}],
            "prompts alone": [{**row, **direction, "width": SIDE, "height": SIDE}],
            "pairs of images": [{**row, "target": files[bright], "rejected": files[dark]}],
        }[kind]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def command(program: str, *arguments: object, **settings: Any) -> None:
    """Run a command with the settings of the demo and these."""
    chosen = (word for name, value in settings.items() for word in ("--set", f"{name}={json.dumps(value)}"))
    config = ("--config", str(ROOT / "tools" / "demo.yaml"))
    done = subprocess.run(
        [sys.executable, "-m", program, *map(str, arguments), *config, *chosen],
        capture_output=True,
        text=True,
        encoding="utf-8",
        check=False,
    )
    if done.returncode:
        sys.exit(f"{program} {arguments[0]}:\n{done.stderr}")


def trained(kind: str, folder: Path, model: Path, transformer: Path | None, **settings: Any) -> Path:
    """The output folder of a run on the rows of this kind."""
    cache, out, of_model = folder / f"{kind} cache", folder / f"{kind} run", ("--model", model)
    common = {"data.vae_image_size": SIDE**2, "validation": {"prompts": []}}
    command("qwen_cache", "build", write_rows(folder / kind, kind), "--out", cache, *of_model, **common)
    own = common | {"logging.report_to": "none"} | settings
    on = ("--transformer", transformer) if transformer else ()
    command("qwen_train", "run", cache, "--out", out, *of_model, *on, **own)
    return out


def brightness(folder: Path, model: Path, transformer: Path, lora: Path) -> list[float]:
    """The mean brightness at each strength."""
    grid, images = f"lora_weight={','.join(map(str, STRENGTHS))}", []
    for name in PHOTOGRAPHS[:SHOWN]:
        control = folder / "base" / f"{name} a photo.png"
        options = ("--image", control, "--prompt", "a photo", "--lora", lora, "--grid", grid)
        of_model = ("--model", model, "--transformer", transformer, "--height", SIDE, "--width", SIDE)
        command("qwen_train", "predict", *options, *of_model, "--out", folder / f"{lora.name} {name}.png")
        files = (folder / f"{lora.name} {name}-lora_weight={strength}.png" for strength in STRENGTHS)
        images.append([np.asarray(Image.open(file).convert("L")).mean() / 255 for file in files])
    means: list[float] = np.mean(images, axis=0).tolist()
    return means


def main() -> int:
    parser = argparse.ArgumentParser(description="Brightness by the strength of sliders.")
    parser.add_argument("--steps", type=int, default=200, help="of a slider")
    parser.add_argument("--base-steps", type=int, default=600)
    parser.add_argument("--out", type=Path, help="keep caches, runs and images in this folder")
    options = parser.parse_args()
    folder = options.out or Path(tempfile.mkdtemp())
    folder.mkdir(exist_ok=True)
    make_tiny_model(folder / "tiny", "edit-plus")
    model = folder / "tiny"
    full = {"train.method": "full", "train.max_steps": options.base_steps, "optimizer.learning_rate": 2e-3}
    transformer = trained("base", folder, model, None, **full, **{"train.batch_size": 6}) / "transformer"
    (weights,) = transformer.glob("*.safetensors")
    print(f"| slider | {' | '.join(map(str, STRENGTHS))} |\n|---|{'---|' * len(STRENGTHS)}")
    for kind, settings in KINDS.items():
        own = {"train.max_steps": options.steps, "optimizer.learning_rate": 5e-4, "train.batch_size": 6}
        out = trained(kind, folder, model, weights, **settings, **own)
        cells = (f"{mean:.2f}" for mean in brightness(folder, model, weights, out))
        print(f"| {kind} | {' | '.join(cells)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
