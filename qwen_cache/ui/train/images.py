"""The validation images of a run, by the fixed layout of its folder, and small copies of them.

    validation/
      step-500/KEY.safetensors, KEY.png   generated after step 500; of several guidance scales also KEY-2.png, …
      target/, controls/                  what belongs to them; controls also as KEY-2.png, …

Only files with these names are listed and answered, never through a link. Of the latents only the header is read, for
name and prompt. A PNG that is damaged or too large is refused.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image

from qwen_cache.service.http import RefusedError
from qwen_cache.storage.files import is_link, open_file
from qwen_cache.text import parse_json

VALIDATION = "validation"
STEP = re.compile(r"step-(\d{1,15})")
PNG = re.compile(r"([0-9a-f]{32})(?:-([1-9]\d{0,3}))?\.png")
PATH = re.compile(rf"({STEP.pattern}|target|controls)/{PNG.pattern}")
SIGNATURE = b"\x89PNG\r\n\x1a\n"
SCALES = "true_cfg_scale"
SIZES = (160, 320, 640, 1280)
"""Longest sides of small copies, in pixels."""
LONGEST_HEADER = 1 << 20  # bytes; names and prompts have hundreds
LARGEST_FILE = 1 << 28  # bytes of a PNG
UNREADABLE = (OSError, ValueError, SyntaxError, AssertionError, MemoryError, Image.DecompressionBombError)
"""Raised by Pillow for a PNG that is damaged or too large."""


def listed(run: Path) -> dict[str, Any]:
    """The samples of a run with their images, and how many latents wait for `qwen-train decode`, as JSON.

    An image is {"path": …, "version": …, "size": …}: its place in the folder, a text that changes with the file, and
    its width and height.
    """
    steps = sorted((int(match[1]), name) for name in _names(run / VALIDATION) if (match := STEP.fullmatch(name)))
    samples: dict[str, dict[str, Any]] = {}
    waiting = 0
    for step, name in steps:
        found, latents = _images(run, name), _latents(run, name)
        waiting += len(latents - found.keys())
        for key in sorted(latents | found.keys()):
            if key not in samples:
                samples[key] = _sample(run, name, key)
            if key in found:
                samples[key]["steps"].append({"step": step, "images": found[key]})
    for place in ("target", "controls"):
        for key, images in _images(run, place).items():
            if key in samples:
                samples[key][place] = images
    shown = sorted(samples.values(), key=lambda sample: (_natural(sample["name"]), sample["key"]))
    return {"samples": [each for each in shown if each["steps"]], "waiting": waiting, "steps": [it for it, _ in steps]}


def _sample(run: Path, folder: str, key: str) -> dict[str, Any]:
    words = metadata(run / VALIDATION / folder / f"{key}.safetensors")
    scales: Any = None
    with suppress(ValueError, RecursionError):
        scales = json.loads(words.get(SCALES, "null"))
    is_list = isinstance(scales, list) and all(type(each) in (int, float) for each in scales)
    return {
        "key": key,
        "name": words.get("name", key),
        "prompt": words.get("prompt", ""),
        "scales": scales if is_list else [],
        "controls": [],
        "target": [],
        "steps": [],
    }


def _images(run: Path, folder: str) -> dict[str, list[dict[str, Any]]]:
    """The PNGs in a folder of the validation, by the key of their sample, in the order of their numbers."""
    found: dict[str, list[tuple[int, dict[str, Any]]]] = {}
    for name in _names(run / VALIDATION / folder):
        match = PNG.fullmatch(name)
        path = run / VALIDATION / folder / name
        if match:
            with suppress(OSError):
                stat, size = path.stat(), _size(path)
                image = {"path": f"{folder}/{name}", "version": f"{stat.st_mtime_ns}-{stat.st_size}", "size": size}
                found.setdefault(match[1], []).append((int(match[2] or 1), image))
    return {key: [image for _, image in sorted(images, key=lambda it: it[0])] for key, images in found.items()}


def _size(path: Path) -> tuple[int, int]:
    """Width and height in the header of a PNG; zeros if it has none. OSError for a link."""
    with open(open_file(path, follow_links=False), "rb") as file:
        head = file.read(24)
    if len(head) < 24 or not head.startswith(SIGNATURE):
        return 0, 0
    return int.from_bytes(head[16:20]), int.from_bytes(head[20:])


def _latents(run: Path, folder: str) -> set[str]:
    stems = (name.removesuffix(".safetensors") for name in _names(run / VALIDATION / folder) if name.endswith("s"))
    return {stem for stem in stems if re.fullmatch(r"[0-9a-f]{32}", stem)}


def _names(folder: Path) -> list[str]:
    """The names in a folder that is not a link; none if there is no such folder."""
    if is_link(folder) or is_link(folder.parent):
        return []
    with suppress(OSError):
        return os.listdir(folder)
    return []


def metadata(latents: Path) -> dict[str, str]:
    """The texts in the header of a safetensors file; {} if it is missing, a link, or damaged."""
    with suppress(OSError, ValueError):
        with open(open_file(latents, follow_links=False), "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length).decode("utf-8")) if length <= LONGEST_HEADER else {}
        words = header.get("__metadata__") if isinstance(header, dict) else None
        if isinstance(words, dict):
            return {str(name): str(value) for name, value in words.items()}
    return {}


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts prompts/10 after prompts/9."""
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)]


# ---- one image -------------------------------------------------------------------------------------------------------


def read(run: Path, path: str) -> bytes:
    """The bytes of an image of the run; RefusedError for any other path, and for links."""
    if not PATH.fullmatch(path):
        raise RefusedError(404, f"{path!r} is no image of a run", "choose an image on the page")
    folder, _, name = path.partition("/")
    if any(map(is_link, (run / VALIDATION, run / VALIDATION / folder))):
        raise RefusedError(403, f"{path}: links are not followed", "copy the files to their place")
    try:
        with open(open_file(run / VALIDATION / folder / name, follow_links=False), "rb") as file:
            data = file.read(LARGEST_FILE + 1)
    except OSError as error:
        raise RefusedError(404, f"{path}: {error.strerror}", "reload the page") from None
    if len(data) > LARGEST_FILE or not data.startswith(SIGNATURE):
        raise RefusedError(422, f"{path} is no PNG, or too large", "decode it again with `qwen-train decode`")
    return data


def small(data: bytes, size: int) -> bytes:
    """A PNG as a JPEG with this longest side, on white; RefusedError if it is damaged."""
    try:
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.verify()  # the checksums of its chunks, which decoding ignores
        with warnings.catch_warnings(action="ignore"), Image.open(BytesIO(data), formats=["PNG"]) as image:
            image.load()
            white = Image.new("RGBA", image.size, "white")
            copy = (Image.alpha_composite(white, image) if image.mode == "RGBA" else image).convert("RGB")
    except UNREADABLE:
        raise RefusedError(422, "this PNG cannot be read", "decode it again with `qwen-train decode`") from None
    copy.thumbnail((size, size), Image.Resampling.LANCZOS)
    made = BytesIO()
    copy.save(made, "JPEG", quality=90)
    return made.getvalue()


def versions(run: Path) -> Iterator[str]:
    """A text for each folder of images, which changes when an image comes."""
    for name in sorted(_names(run / VALIDATION)):
        with suppress(OSError):
            yield f"{name} {(run / VALIDATION / name).stat().st_mtime_ns}"
