"""`best`: the step of a run to keep; and `--step`, which other commands take."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from qwen_cache.extras import require
from qwen_cache.options import CONFIG, DEVICES, INPUT, JSON, SET, command, option, setting_argument
from qwen_cache.settings.given import Given
from qwen_cache.terminal import console, plural, print_json, results, verbatim

if TYPE_CHECKING:
    from qwen_train.training.best import Best

STEP = option(INPUT, "The checkpoint of this step, or best: the one that `qwen-train best` proposes.", "STEP")


@command(
    page="howto/improve-a-lora.md",
    examples=[
        "qwen-train best",
        "qwen-train best runs/cats --likeness dinov2-base/",
    ],
)
def best(
    folder: Given | None = setting_argument("train.output_dir", "FOLDER", "The output folder of a run."),
    likeness: Path | None = option(
        INPUT, "A folder with a vision model, such as a CLIP: how much the images resemble the targets.", "FOLDER"
    ),
    device: str = option(DEVICES, "The device of that model.", "DEVICE", default="cpu"),
    json: bool = JSON,
    config: Path | None = CONFIG,
    set_: list[str] | None = SET,
) -> int:
    """Say which step of a run to keep: the earliest that is as good as the best, by held-out samples."""
    from qwen_cache.errors import TrainError
    from qwen_cache.settings.load import load_config
    from qwen_train.run import METRICS_NAME, in_one_process

    path = Path(load_config(config, set_, [folder]).train.output_dir)
    in_one_process("best")
    if not (path / METRICS_NAME).is_file():
        raise TrainError("no run here", where=path, expected=METRICS_NAME, do="name the train.output_dir of a run")
    from qwen_train.training.best import best_of

    if likeness is not None:
        _measure(path, likeness, device)
    found = best_of(path)
    print_json(found.document()) if json else print_best(found)
    return 0


def _measure(folder: Path, model: Path, device: str) -> None:
    """Measure the likeness of the run's images, for the scores of this and later commands, and renew its page."""
    require("torch")
    from qwen_cache.models.devices import choose_device
    from qwen_train.inference.likeness import VisionModel, write_likeness
    from qwen_train.training.report import renew_report

    count = write_likeness(folder, VisionModel.load(model, choose_device(device, "--device")))
    console().print(f"measured the likeness of {plural(count, 'image')}", highlight=False)
    renew_report(folder)


def print_best(found: Best) -> None:
    """Print the proposal, why, and the main scores of all steps, on stdout."""
    from rich.table import Table

    from qwen_cache.html.page import number
    from qwen_train.training.scores import DRIFT, JUDGES, LIKENESS_TO_ALL, SEEDS

    out = results(soft_wrap=True)
    where = "" if found.checkpoint is None else f": {verbatim(found.checkpoint)}"
    out.print(f"[bold]{found.headline}[/]{where}")
    for reason in found.reasons:
        out.print(reason, markup=False)
    if found.scores.likeness:
        out.print(found.scores.likeness, markup=False)
    if scores := [score for score in found.scores.scores if score.name in (*JUDGES, LIKENESS_TO_ALL, DRIFT, SEEDS)]:
        table = Table(box=None)
        table.add_column("step", justify="right")
        for score in scores:
            table.add_column(score.name, justify="right")
        table.add_column()
        for step in found.steps:
            means = [score.means.get(step) for score in scores]
            table.add_row(f"{step:,}", *("" if mean is None else number(mean) for mean in means), found.note(step))
        out.print(table)
    for file in found.scores.unread:
        console().print(f"warning: {verbatim(file)} cannot be read", style="yellow")


def chosen(folder: Path, step: str | None) -> Path:
    """The folder of the checkpoint that `--step` names; without it `folder` itself."""
    if step is None:
        return folder
    from qwen_train.training.best import checkpoint_of

    path = checkpoint_of(folder, step)
    console().print(f"the weights of {verbatim(path)}")
    return path
