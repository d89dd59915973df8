"""The metrics of a run: `metrics.jsonl` with one line per logged step, the tracker's curves, and the progress line.

A line has the step, its metrics, and its times: `time` in seconds since 1970, as trackers have it too, and
`elapsed_seconds`, the time of training up to here without loading the model and without the pauses before a resume.
A damaged line is refused. The trackers are accelerate's, started in the main process only.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from PIL import Image

from qwen_cache.errors import TrainError
from qwen_cache.settings.load import Config
from qwen_cache.storage.files import read_file, sync, write_durably
from qwen_cache.terminal import console, human_time, naming
from qwen_cache.text import parse_json
from qwen_train.data.batches import Batch
from qwen_train.run import METRICS_NAME, step_of

if TYPE_CHECKING:
    from qwen_train.inference.decode import Latents

TENSORBOARD_FOLDER = "logs"
RUN_NAME_OPTION = {
    "wandb": "name",
    "trackio": "name",
    "swanlab": "experiment_name",
    "mlflow": "run_name",
    "clearml": "task_name",
}
"""Each tracker's option for the name of a run; other trackers have only a project name."""


@dataclass
class StepStats:
    """Sums over the batches of an optimizer step."""

    loss: float = 0.0
    """The losses of the batches, each times its loss scale."""
    loss_scale: float = 0.0
    tokens: int = 0
    """Valid tokens of text, target and controls."""
    waited: float = 0.0
    """Seconds spent waiting for batches."""
    labels: list[str] = field(default_factory=list)
    """The name of the samples in messages."""
    skipped_batches: int = 0
    """Batches without a finite loss, including those of earlier steps that were skipped whole."""

    def add(self, batch: Batch, loss: float) -> None:
        mask, embeds = batch.prompt_embeds_mask, batch.prompt_embeds
        text = embeds.shape[0] * embeds.shape[1] if mask is None else int(mask.sum())
        self.loss += batch.loss_scale * loss
        self.loss_scale += batch.loss_scale
        self.tokens += batch.image_tokens + text
        self.labels += batch.labels

    def reduced(self, accelerator: Any) -> StepStats:
        """The sums over all processes; `waited` is the mean, since processes wait at the same time."""
        if accelerator.num_processes == 1:
            return self
        mine = torch.tensor([self.loss, self.loss_scale, self.tokens, self.waited], dtype=torch.float64)
        loss, loss_scale, tokens, waited = accelerator.reduce(mine.to(accelerator.device)).tolist()
        waited /= accelerator.num_processes
        return StepStats(loss, loss_scale, round(tokens), waited, self.labels, self.skipped_batches)


@dataclass
class Throughput:
    """The speed of the run since its start, without the time for saving and validation."""

    in_epoch: int
    """Samples in an epoch."""
    samples: int = 0
    seconds: float = 0.0

    def add(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = self.samples + samples, self.seconds + seconds

    @property
    def epoch_time(self) -> str:
        """The time for an epoch, as text."""
        return human_time(self.in_epoch * self.seconds / self.samples)


def progress_text(step: int, max_steps: int, values: dict[str, float], throughput: Throughput) -> str:
    """The text beside the progress bar, in three lines, so that it fits with the times into 80 columns."""
    return (
        f"{step}/{max_steps}, loss {values['loss']:.4f}, lr {values['learning_rate']:.2e}\n"
        f"{values['tokens_per_second']:,.0f} tokens/s, {values['samples_per_second']:.2f} samples/s\n"
        f"{throughput.epoch_time} per epoch, data wait {100 * values['data_wait']:.0f} %"
    )


class MetricsLog:
    """Appends to metrics.jsonl; a resumed run first removes the steps that it will repeat, a new one all of them."""

    def __init__(self, folder: Path, accelerator: Any, config: Config, step: int) -> None:
        self.accelerator, self.every_steps = accelerator, config.logging.logging_steps
        self.main = bool(accelerator.is_main_process)
        if not self.main:
            return
        self.path = path = folder / METRICS_NAME
        kept = [line for line in read_metrics(path) if line["step"] <= step] if step else []
        elapsed = kept[-1].get("elapsed_seconds") if kept else 0.0
        self.earlier = elapsed if isinstance(elapsed, float) else 0.0  # an older version did not write it
        self.began = time.monotonic()
        write_durably(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode("utf-8"))
        self.file = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 (closed by close)
        start_tracker(accelerator, config, step)

    def write(self, step: int, values: dict[str, float], *, always: bool = False) -> None:
        """Log every `logging.logging_steps`-th step, or any step if `always`."""
        if not self.main or (step % self.every_steps and not always):
            return
        elapsed = self.earlier + time.monotonic() - self.began
        times = {"time": round(time.time(), 3), "elapsed_seconds": round(elapsed, 3)}
        with naming(self.path):
            self.file.write(json.dumps({"step": step, **values, **times}) + "\n")
            self.file.flush()
        self.accelerator.log(values, step=step)

    def sync(self) -> None:
        """Make the lines durable, before a checkpoint from which a resumed run would not repeat them."""
        if self.main:
            with naming(self.path):
                sync(self.file.fileno())

    def close(self) -> None:
        if self.main:
            self.sync()
            with naming(self.path):
                self.file.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers.clear()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of metrics.jsonl without incomplete ones; TrainError for a damaged line.

    A kill leaves the beginning of a line, a power loss zeros.
    """
    lines = read_file(path).split(b"\n") if path.exists() else []
    metrics = []
    for number, line in enumerate(lines, 1):
        if not (line.startswith(b"{") and line.endswith(b"}")) or b"\0" in line:
            continue
        try:
            values = parse_json(line)
            metrics.append(values | {"step": int(values["step"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            do = "remove that line; only the curves lose its step"
            raise TrainError("this line was not written by a run", where=f"{path}:{number}", do=do) from None
    return metrics


def start_tracker(accelerator: Any, config: Config, step: int | None = None) -> None:
    """Start a run in the tracker, with the settings; TensorBoard has no projects and takes no settings.

    A run that begins after `step` repeats what an earlier one of this folder logged of later steps, and a new one all:
    TensorBoard drops that. In other trackers it is a run of its own.
    """
    logging = config.logging
    if logging.report_to == "tensorboard":
        purged = {} if step is None else {"purge_step": step + 1 if step else 0}
        name = "/".join(filter(None, (TENSORBOARD_FOLDER, logging.run_name)))
        accelerator.init_trackers(name, init_kwargs={"tensorboard": purged})
        return
    name = logging.run_name or Path(config.train.output_dir).resolve().name
    option = RUN_NAME_OPTION.get(logging.report_to)
    options = {logging.report_to: {option: name}} if option else {}
    settings = {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in config.flat().items()
        if value is not None
    }
    accelerator.init_trackers(logging.project, settings, options)


# ---- tracked images --------------------------------------------------------------------------------------------------
# Validation images in the tracker of `logging.report_to`, at the step that they were generated after.
#
# accelerate's trackers log them; those that cannot are named, once. Images of another process than the one in training
# are a run of their own in the tracker: no service takes two writers of one run, and TensorBoard reads one file of a
# folder at a time (its `DirectoryWatcher`), so a second one would end its curves.

FORMS: dict[str, tuple[Callable[[Image.Image], Any], dict[str, Any]]] = {
    "tensorboard": (lambda image: np.asarray(image)[None], {"dataformats": "NHWC"}),
    "wandb": (lambda image: [image], {}),
    "swanlab": (lambda image: [image], {}),
    "aim": (lambda image: image, {}),
    "clearml": (lambda image: image, {}),
}
"""The form of an image for accelerate's `log_images`, and further arguments; the other trackers have no such method."""
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
    """True if the tracker takes images; a message if it does not."""
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
