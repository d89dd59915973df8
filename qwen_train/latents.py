"""The latents of validation images in the output folder of a run, and their PNGs: where they are, without torch.

A folder without any is refused.

    validation/
      step-500/KEY.safetensors, KEY.png   generated after step 500
      target/, controls/                  the cached images that belong to them; controls also as KEY-2.png, …
"""

from __future__ import annotations

import re
from pathlib import Path

from qwen_cache.errors import TrainError
from qwen_train.run_folder import METRICS_NAME

VALIDATION = "validation"
"""The folder for the latents of validation images."""
STEP = re.compile(r"step-(\d+)")
"""The name of the folder with the images of a step."""
SCALES = "true_cfg_scale"
"""The entry of a file's metadata with the guidance of each of its images, as a JSON list; only of several images."""


GENERATE = "set validation.prompts and build the cache, or set validation.num_images"


def latents_files(folder: Path) -> list[Path]:
    """The latents files: of a run, only its validation; of another folder, all; or the file itself."""
    if folder.is_file():
        return [folder]
    is_run, files = latents_folder(folder) != folder, found_latents(folder)
    if is_run and not files:
        raise TrainError("this run generated no images", where=folder, do=GENERATE)
    if not files:
        raise TrainError(
            "no latents here",
            where=folder,
            expected=f"the output folder of a run that generated images, or a folder in its {VALIDATION}/",
            do=f"name another folder; or {GENERATE}, and train",
        )
    return files


def found_latents(folder: Path) -> list[Path]:
    """The latents files in the folder of a run or another one, in the order of their steps; maybe none."""
    files = latents_folder(folder).rglob("*.safetensors")
    return sorted(files, key=lambda file: (step_of(file) if step_of(file) is not None else -1, file))


def step_of(path: Path) -> int | None:
    """The step that a file was generated after, None for a target or controls."""
    match = STEP.fullmatch(path.parent.name)
    return int(match[1]) if match else None


def png_of(latents: Path, number: int = 0) -> Path:
    """The PNG of an image of a file, counted from 0: the first has the file's name, the others also a number."""
    return latents.with_name(f"{latents.stem}-{number + 1}.png" if number else f"{latents.stem}.png")


def latents_folder(path: Path) -> Path:
    """The folder with the latents and their PNGs: the validation folder of a run, or the folder of a file."""
    if path.is_file():
        return path.parent
    is_run = (path / METRICS_NAME).is_file() or (path / VALIDATION).is_dir()
    return path / VALIDATION if is_run else path
