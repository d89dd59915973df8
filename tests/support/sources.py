"""Edit pairs for builds, also with text to image among them, and a change for each reason to encode again."""

from __future__ import annotations

import json
import shutil
from functools import cache
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageOps

from .photographs import photograph


def write_pairs(folder: Path) -> Path:
    """Four edit pairs of mixed sizes: two share a prompt, one has two controls, one a mask."""
    for name, content in _pairs().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


@cache
def _pairs() -> dict[str, bytes]:
    """Their files, by path in the folder."""
    files = dict[str, bytes]()
    china = photograph("china.jpg").resize((160, 107))
    flower = photograph("flower.jpg").resize((107, 160))
    cat = photograph("chelsea.png").resize((120, 120))
    cup = photograph("coffee.png").resize((150, 100))
    for name, control, target, prompt in (
        ("china", china, ImageOps.grayscale(china), "make it black and white"),
        ("flower", flower, ImageOps.grayscale(flower), "make it black and white"),
        ("cat", cat, ImageOps.mirror(cat), "mirror the cat, 然后 keep the second image's light"),
        ("cup", cup, ImageOps.invert(cup), "invert the colours"),
    ):
        files[f"control_images/{name}.png"] = _png(control)
        files[f"target_images/{name}.png"] = _png(target)
        files[f"target_images/{name}.txt"] = prompt.encode()
    files["control_images/cat_control_1.png"] = _png(china)
    mask = Image.new("L", cup.size)
    mask.paste(255, (0, 0, cup.width // 2, cup.height))
    files["control_images/cup_mask.png"] = _png(mask)
    return files


def _png(image: Image.Image) -> bytes:
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PORTRAIT = "a portrait of an astronaut in orange, in front of a flag and a model of the shuttle, 肖像"
"""The longest of the prompts."""


def write_mixed(folder: Path) -> Path:
    """The pairs as a table that has two rows of text to image as well: what one model of both is trained on."""
    write_pairs(folder)
    rows = []
    for target in sorted((folder / "target_images").glob("*.png")):
        name = target.stem
        controls = sorted((folder / "control_images").glob(f"{name}*.png"), key=lambda path: len(path.stem))
        masks = [path for path in controls if path.stem.endswith("_mask")]
        row = {"target": target, "control": [path for path in controls if path not in masks]}
        row |= {"mask": masks[0]} if masks else {}
        rows.append({**row, "prompt": target.with_suffix(".txt").read_text(encoding="utf-8")})
    for name, size, prompt in (
        ("rocket.jpg", (96, 160), "a rocket"),
        ("astronaut.png", (128, 128), PORTRAIT),
    ):
        target = folder / "target_images" / Path(name).with_suffix(".png").name
        photograph(name).resize(size).save(target)
        rows.append({"target": target, "prompt": prompt})
    table = folder / "metadata.jsonl"
    table.write_text("\n".join(json.dumps(row, default=str) for row in rows), encoding="utf-8")
    return table


def change_target(pairs: Path) -> None:
    path = pairs / "target_images" / "china.png"
    ImageOps.flip(Image.open(path)).save(path)


def change_control(pairs: Path) -> None:
    path = pairs / "control_images" / "cat_control_1.png"
    ImageOps.flip(Image.open(path)).save(path)


def change_mask(pairs: Path) -> None:
    path = pairs / "control_images" / "cup_mask.png"
    ImageOps.mirror(Image.open(path)).save(path)


def remove_mask(pairs: Path) -> None:
    (pairs / "control_images" / "cup_mask.png").unlink()


def add_control(pairs: Path) -> None:
    shutil.copy(pairs / "control_images" / "china.png", pairs / "control_images" / "flower_control_1.png")


def change_prompt(pairs: Path) -> None:
    (pairs / "target_images" / "flower.txt").write_text("make it grey")
