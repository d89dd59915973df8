"""What a run says of itself: `metrics.jsonl`, one line per logged step, the tracker's curves, and the progress line.

The trackers are accelerate's, started from the main process alone. One whose package is not installed is refused
before anything is loaded.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate.tracking import get_available_trackers

from qwen_cache.console import human_time
from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.settings.load import Config
from qwen_cache.storage.durable import write_durably
from qwen_train.data.batches import Batch

METRICS_NAME = "metrics.jsonl"
TENSORBOARD_FOLDER = "logs"
RUN_NAME_OPTION = {
    "wandb": "name",
    "trackio": "name",
    "swanlab": "experiment_name",
    "mlflow": "run_name",
    "clearml": "task_name",
}
"""What each tracker calls the name of a run; those that are not here have only one name, the project's."""


@dataclass
class Tally:
    """What the batches of an optimizer step add up to."""

    loss: float = 0.0
    """Of each batch by its share."""
    share: float = 0.0
    tokens: int = 0
    """Valid ones, of text, target and controls."""
    waited: float = 0.0
    """Seconds until a batch was ready."""
    keys: list[str] = field(default_factory=list)
    left_out: int = 0
    """Batches without a usable loss, those of steps before it included that had no other."""

    def add(self, batch: Batch, loss: float) -> None:
        mask, embeds = batch.prompt_embeds_mask, batch.prompt_embeds
        text = embeds.shape[0] * embeds.shape[1] if mask is None else int(mask.sum())
        self.loss += batch.share * loss
        self.share += batch.share
        self.tokens += batch.image_tokens + text
        self.keys += batch.keys

    def of_all(self, accelerator: Any) -> Tally:
        """The sum over all processes; `waited` is their mean, as they wait side by side."""
        if accelerator.num_processes == 1:
            return self
        mine = torch.tensor([self.loss, self.share, self.tokens, self.waited], dtype=torch.float64)
        loss, share, tokens, waited = accelerator.reduce(mine.to(accelerator.device)).tolist()
        return Tally(loss, share, round(tokens), waited / accelerator.num_processes, self.keys, self.left_out)


@dataclass
class Pace:
    """How fast the run has been since it was started; saving and validating do not count."""

    in_epoch: int
    samples: int = 0
    seconds: float = 0.0

    def add(self, samples: int, seconds: float) -> None:
        self.samples, self.seconds = self.samples + samples, self.seconds + seconds

    @property
    def epoch(self) -> str:
        """How long an epoch takes, in words."""
        return human_time(self.in_epoch * self.seconds / self.samples)


def progress_text(step: int, max_steps: int, values: dict[str, float], pace: Pace) -> str:
    """What stands beside the bar after a step, in two lines, as terminals are narrow."""
    return (
        f"{step}/{max_steps}, loss {values['loss']:.4f}, lr {values['learning_rate']:.2e}, an epoch in {pace.epoch}\n"
        f"{values['tokens_per_second']:,.0f} tokens/s, {values['samples_per_second']:.2f} samples/s, "
        f"data wait {100 * values['data_wait']:.0f} %"
    )


def check_tracker(name: str) -> None:
    """ConfigError where accelerate does not have the tracker, or its package is not installed."""
    if name == "none" or name in map(str, get_available_trackers()):
        return
    package = name.replace("_", "-")
    raise ConfigError(
        f"logging.report_to={name} needs a package that is not installed",
        expected=package,
        do=f"pip install {package}, or set logging.report_to=tensorboard",
    )


class MetricsLog:
    """Appends to metrics.jsonl, from which a resumed run first drops the steps that it will do again."""

    def __init__(self, folder: Path, accelerator: Any, config: Config, done: int) -> None:
        self.accelerator, self.every_steps = accelerator, config.logging.logging_steps
        self.main = bool(accelerator.is_main_process)
        if not self.main:
            return
        path = folder / METRICS_NAME
        kept = [line for line in read_metrics(path) if line["step"] <= done]
        write_durably(path, "".join(f"{json.dumps(line)}\n" for line in kept).encode("utf-8"))
        self.file = open(path, "a", encoding="utf-8", newline="\n")  # noqa: SIM115 (closed by close)
        start_tracker(accelerator, config)

    def write(self, step: int, values: dict[str, float], *, always: bool = False) -> None:
        """Log a step, if it is one of the nth or `always`."""
        if not self.main or (step % self.every_steps and not always):
            return
        self.file.write(json.dumps({"step": step, **values}) + "\n")
        self.file.flush()
        self.accelerator.log(values, step=step)

    def close(self) -> None:
        if self.main:
            self.file.close()
            for tracker in self.accelerator.trackers:
                tracker.finish()
            self.accelerator.trackers.clear()


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The whole lines of metrics.jsonl; a run that was killed may have left half of one. TrainError for any other."""
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    found = []
    for number, line in enumerate(lines, 1):
        if not (line.startswith(b"{") and line.endswith(b"}")):
            continue
        try:
            values = json.loads(line)
            found.append(values | {"step": int(values["step"])})
        except (ValueError, KeyError, TypeError, OverflowError):
            do = "remove that line; its steps are lost to the curves alone"
            raise TrainError("this line is not one of a run", where=f"{path}:{number}", do=do) from None
    return found


def _given(config: Config) -> dict[str, Any]:
    """The settings as trackers take them, but for those that are not given."""
    return {
        name: value if isinstance(value, bool | int | float | str) else str(value)
        for name, value in config.flat().items()
        if value is not None
    }


def start_tracker(accelerator: Any, config: Config) -> None:
    """Begin a run in the tracker, with the settings; TensorBoard has neither projects nor room for settings."""
    logging = config.logging
    if logging.report_to == "tensorboard":
        accelerator.init_trackers("/".join(filter(None, (TENSORBOARD_FOLDER, logging.run_name))))
        return
    name = logging.run_name or Path(config.train.output_dir).resolve().name
    option = RUN_NAME_OPTION.get(logging.report_to)
    accelerator.init_trackers(logging.project, _given(config), {logging.report_to: {option: name}} if option else {})
