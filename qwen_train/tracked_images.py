"""Validation images in the tracker of `logging.report_to`, at the step that they were generated after.

accelerate's trackers log them; those that cannot are named, once. Images of another process than the one in training
are a run of their own in the tracker: no service takes two writers of one run, and TensorBoard reads one file of a
folder at a time (its `DirectoryWatcher`), so a second one would end its curves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from accelerate import Accelerator
from PIL import Image

from qwen_cache.settings.load import Config
from qwen_cache.terminal import console
from qwen_train.latents import step_of
from qwen_train.metrics import start_tracker

if TYPE_CHECKING:
    from qwen_train.inference.decode import Latents

FORMS: dict[str, tuple[Callable[[Image.Image], Any], dict[str, Any]]] = {
    "tensorboard": (lambda image: np.asarray(image)[None], {"dataformats": "NHWC"}),
    "wandb": (lambda image: [image], {}),
    "swanlab": (lambda image: [image], {}),
    "aim": (lambda image: image, {}),
    "clearml": (lambda image: image, {}),
}
"""What accelerate's `log_images` takes for an image, and further arguments; the other trackers have no such method."""
NAME = "images"


def start_image_run(config: Config, folder: Path) -> list[Any]:
    """A run for the images of the run in `folder`, in the tracker of its settings: NAME-images, or logs/images.

    An empty list if the tracker takes no images; a message says so.
    """
    logging = config.logging
    if not takes_images(logging.report_to):
        return []
    in_folder = logging.report_to == "tensorboard"
    parts = (logging.run_name, NAME) if in_folder else (logging.run_name or folder.resolve().name, NAME)
    name = ("/" if in_folder else "-").join(filter(None, parts))
    accelerator = Accelerator(cpu=True, log_with=logging.report_to, project_dir=str(folder))
    start_tracker(accelerator, config.model_copy(update={"logging": logging.model_copy(update={"run_name": name})}))
    trackers: list[Any] = accelerator.trackers
    return trackers


def takes_images(report_to: str) -> bool:
    """Whether the tracker takes images; a message if it does not."""
    if report_to != "none" and report_to not in FORMS:
        text = f"{report_to} takes no images through accelerate ({', '.join(FORMS)} do): see report.html"
        console().print(text, markup=False, highlight=False)
    return report_to in FORMS


def log_decoded(trackers: Iterable[Any], image: Latents, pixels: Image.Image) -> None:
    """Log a generated image under its title, at its step; targets and controls have none."""
    if (step := step_of(image.file)) is None:
        return
    for tracker in trackers:
        form, arguments = FORMS[tracker.name]
        tracker.log_images({f"{NAME}/{image.title}": form(pixels)}, step=step, **arguments)


def finish(trackers: Sequence[Any]) -> None:
    """End the runs of `start_image_run`."""
    for tracker in trackers:
        tracker.finish()
