"""Sources of preferences, pairs of a bright target and a dark rejected image, and of directions of a slider."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import ImageEnhance

from .judge import image

PHOTOGRAPHS = ("china.jpg", "flower.jpg", "coffee.png", "chelsea.png")


def write_preferences(folder: Path, count: int, *, rejected: bool = True) -> Path:
    """Rows that prefer the bright image: every second rejected image is larger, every third row no control."""
    folder.mkdir(parents=True)
    rows = []
    for i in range(count):
        photo = image(PHOTOGRAPHS[i % 4], (200, 160)).crop((i, i, i + 150, i + 100))
        images = {
            "target": ImageEnhance.Brightness(photo).enhance(1.5),
            "control": photo,
            "rejected": ImageEnhance.Brightness(photo.resize((200, 100) if i % 2 else (150, 100))).enhance(0.3),
        }
        images = {role: each for role, each in images.items() if role != "control" or i % 3}
        images = images if rejected else {role: each for role, each in images.items() if role != "rejected"}
        for role, each in images.items():
            each.save(folder / f"{i} {role}.png")
        rows.append({"prompt": "brighter" + " and brighter" * (i % 3)} | {role: f"{i} {role}.png" for role in images})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


def write_directions(folder: Path, count: int, *, target: bool) -> Path:
    """Rows with the two prompts of a direction, of two shapes; every third has no control."""
    folder.mkdir(parents=True)
    rows = []
    for i in range(count):
        photo = image(("china.jpg", "coffee.png")[i % 2], (200, 160)).crop((i, i, i + 96 + 32 * (i % 2), i + 96))
        photo.save(folder / f"{i}.png")
        prompts = {"prompt": "a photo" + " of it" * i, "positive_prompt": "a bright photo", "negative_prompt": "night"}
        images = {"target": f"{i}.png"} if target else {"width": photo.width, "height": photo.height, "seed": i}
        rows.append({**prompts, **images, **({"control": f"{i}.png"} if i % 3 else {})})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder


BRIGHTNESS = {"photo": 1.0, "bright": 1.5, "dark": 0.4}
"""A prompt, and the brightness of its photographs."""


def write_brightness(folder: Path, kind: str) -> Path:
    """Photographs of 64×64: of each brightness with its prompt ("base"), or what a slider of brightness learns from:
    "targets" or images to be "generated", with the two prompts of its direction, or "pairs"."""
    folder.mkdir(parents=True)
    direction = {"prompt": "photo", "positive_prompt": "bright", "negative_prompt": "dark"}
    rows = list[dict[str, object]]()
    for i, name in enumerate(PHOTOGRAPHS):
        files = {prompt: f"{i} {prompt}.png" for prompt in BRIGHTNESS}
        for prompt, factor in BRIGHTNESS.items():
            ImageEnhance.Brightness(image(name, (64, 64))).enhance(factor).save(folder / files[prompt])
        rows += {
            "base": [{"prompt": prompt, "target": file} for prompt, file in files.items()],
            "targets": [{**direction, "target": files["photo"]}],
            "generated": [{**direction, "width": 64, "height": 64, "seed": i}],
            "pairs": [{"prompt": "photo", "target": files["bright"], "rejected": files["dark"]}],
        }[kind]
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder
