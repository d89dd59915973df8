"""The latents of validation images in the output folder of a run, and their PNGs: where they are, without torch.

A folder without any is refused.

    validation/
      step-500/KEY.safetensors, KEY.png   generated after step 500
      target/, controls/                  the cached images that belong to them; controls also as KEY-2.png, …
"""

from __future__ import annotations

from pathlib import Path

from qwen_cache.errors import TrainError
from qwen_train.run_folder import METRICS_NAME

VALIDATION = "validation"
"""The folder for the latents of validation images."""


def latents_files(folder: Path) -> list[Path]:
    """The latents files: of a run, only its validation; of another folder, all; or the file itself."""
    if folder.is_file():
        return [folder]
    is_run = latents_folder(folder) != folder
    files = sorted(latents_folder(folder).rglob("*.safetensors"))
    if is_run and not files:
        raise TrainError("this run generated no images", where=folder, do="set validation.num_images")
    if not files:
        raise TrainError(
            "no latents here",
            where=folder,
            expected=f"the output folder of a run with validation.num_images, or a folder in its {VALIDATION}/",
            do="name another folder, or set validation.num_images and train",
        )
    return files


def latents_folder(path: Path) -> Path:
    """The folder with the latents and their PNGs: the validation folder of a run, or the folder of a file."""
    if path.is_file():
        return path.parent
    is_run = (path / METRICS_NAME).is_file() or (path / VALIDATION).is_dir()
    return path / VALIDATION if is_run else path
