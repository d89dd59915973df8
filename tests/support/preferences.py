"""A source of preferences: pairs of a bright target and a dark rejected image."""

from __future__ import annotations

import json
from pathlib import Path

from PIL import ImageEnhance

from .judge import image

PHOTOGRAPHS = ("china.jpg", "flower.jpg", "coffee.png", "chelsea.png")


def write_preferences(folder: Path, count: int, *, rejected: bool = True) -> Path:
    """Rows that prefer the bright image: every second rejected image has another shape, every third row no control."""
    folder.mkdir(parents=True)
    rows = []
    for i in range(count):
        photo = image(PHOTOGRAPHS[i % 4], (200, 160)).crop((i, i, i + 150, i + 100))
        images = {
            "target": ImageEnhance.Brightness(photo).enhance(1.5),
            "control": photo,
            "rejected": ImageEnhance.Brightness(photo.resize((220, 80) if i % 2 else (150, 100))).enhance(0.3),
        }
        images = {role: each for role, each in images.items() if role != "control" or i % 3}
        images = images if rejected else {role: each for role, each in images.items() if role != "rejected"}
        for role, each in images.items():
            each.save(folder / f"{i} {role}.png")
        rows.append({"prompt": "brighter" + " and brighter" * (i % 3)} | {role: f"{i} {role}.png" for role in images})
    (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return folder
