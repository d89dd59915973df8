"""The metrics of a run: the same numbers in metrics.jsonl, in the tracker and on the progress line."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import accelerate.tracking
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen_cache import open_cache
from qwen_cache.errors import TrainError
from qwen_cache.settings.sections import LoggingConfig
from qwen_cache.terminal import clock, progress
from qwen_train import train as training
from qwen_train.run import METRICS_NAME, TIMES
from qwen_train.training import start as preflight
from qwen_train.training.metrics import MetricsLog, StepStats, read_metrics

from .support.commands import refused
from .support.runs import Trainer, column, metrics


class FakeTracker(GeneralTracker):  # type: ignore[misc]
    """Remembers what it is told, in place of a service."""

    name = "wandb"
    requires_logging_directory = False
    told: list[tuple[str, Any]]

    def __init__(self, project: str, **options: Any) -> None:
        super().__init__()
        type(self).told = [("project", project), ("options", options)]

    tracker = None

    def start(self) -> None:
        self.told.append(("start", None))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.told.append(("settings", values))

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.told.append(("log", {"step": step, **values}))

    def finish(self) -> None:
        self.told.append(("finish", None))


@pytest.fixture
def fake_tracker(monkeypatch: pytest.MonkeyPatch) -> type[FakeTracker]:
    """wandb as if it were installed."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", FakeTracker)
    monkeypatch.setattr(accelerate.tracking, "_available_trackers", [LoggerType.WANDB])
    monkeypatch.setattr(preflight, "installed", lambda package: package == "wandb")
    return FakeTracker


def test_a_tracker_is_told_what_the_file_says(train: Trainer, fake_tracker: type[FakeTracker]) -> None:
    out = train(logging__report_to="wandb", logging__project="cats", train__lora__rank=4, train__max_steps=4)
    told = fake_tracker.told
    assert told[:3] == [("project", "cats"), ("options", {"name": "out"}), ("start", None)]
    assert [what for what, _ in told[3:]] == ["settings", *["log"] * 4, "finish"]
    settings = told[3][1]
    assert settings["train.lora.rank"] == 4
    assert settings["train.max_steps"] == 4
    assert all(isinstance(value, bool | int | float | str) for value in settings.values())
    lines = [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(out)]
    assert [value for what, value in told if what == "log"] == lines


def test_a_run_in_a_tracker_can_be_named(train: Trainer, fake_tracker: type[FakeTracker]) -> None:
    train(logging__report_to="wandb", logging__run_name="mine", train__max_steps=1)
    assert ("options", {"name": "mine"}) in fake_tracker.told
    out = train(logging__report_to="wandb", train__max_steps=1, out="again")
    assert ("project", "qwen-train") in fake_tracker.told
    assert ("options", {"name": out.name}) in fake_tracker.told


def test_a_tracker_whose_package_is_missing_is_refused_first(train: Trainer) -> None:
    train.model = train.folder / "nowhere"  # which would be refused next
    result = train.try_(logging__report_to="comet_ml")
    refused(result, "logging.report_to=comet_ml needs a package that is not installed", "pip install comet-ml")
    assert not (train.folder / "out").exists()


def test_all_trackers_of_accelerate_can_be_named(train: Trainer) -> None:
    known = get_args(LoggingConfig.model_fields["report_to"].annotation)
    assert set(known) == {str(name) for name in LoggerType.list()} - {"all"} | {"none"}
    result = train.try_("--set", "logging.report_to=tensorbord")
    refused(
        result,
        "logging.report_to: not a valid value (expected tensorboard, wandb",
        "found tensorbord)\n  → did you mean tensorboard?",
    )


@pytest.mark.slow
def test_speeds_count_the_tokens_and_samples_of_the_step(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock that shows a second at each look; of a batch of three and one of a single sample."""
    images = [sum(h * w for _, h, w in sample.img_shapes) for sample in open_cache(train.cache)]
    tokens = sum(images) + sum(len(sample["prompt_embeds"]) for sample in open_cache(train.cache))
    ticks = itertools.count()
    monkeypatch.setattr(training, "time", SimpleNamespace(monotonic=lambda: float(next(ticks))))
    out = train(train__batch_size=3, train__gradient_accumulation_steps=2, train__caption_dropout=0.0)
    looks = 2 * 2 + 1  # around each batch, and at the end of the step
    assert column(out, "tokens_per_second") == pytest.approx([tokens / looks] * 3)
    assert column(out, "samples_per_second") == pytest.approx([4 / looks] * 3)
    assert column(out, "data_wait") == pytest.approx([2 / looks] * 3)


def test_the_sums_of_a_step_are_those_of_all_processes() -> None:
    """The time that they waited is a mean; samples that messages name, and skipped batches, stay those of each."""
    other = torch.tensor([2.0, 0.5, 30, 3.0], dtype=torch.float64)
    accelerator = SimpleNamespace(num_processes=2, device="cpu", reduce=lambda mine: mine + other)
    found = StepStats(1.0, 1.5, 10, 1.0, ["a"], 1).reduced(accelerator)
    assert found == StepStats(3.0, 2.0, 40, 2.0, ["a"], 1)


def test_the_progress_line_says_the_same_in_80_columns(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    result = train.try_(optimizer__learning_rate=0.02, train__max_steps=2)
    last = metrics(train.folder / "out")[-1]
    assert re.search(rf"2/2, loss {last['loss']:.4f}, lr 2.00e-02 .*0:\d\d elapsed\n", result.stderr)
    assert f"{last['tokens_per_second']:,.0f} tokens/s, {last['samples_per_second']:.2f} samples/s" in result.stderr
    assert re.search(rf"\d s per epoch, data wait {100 * last['data_wait']:.0f} %", result.stderr)


def test_a_resumed_run_has_each_step_once_in_tensorboard(tmp_path: Path, train: Trainer) -> None:
    """Metrics of a run that was killed after step 4, and resumed after step 2."""
    for begin, end, factor in ((0, 4, 1), (2, 6, 10)):
        accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=str(tmp_path))
        log = MetricsLog(tmp_path, accelerator, train.config(logging__report_to="tensorboard"), begin)
        for step in range(begin + 1, end + 1):
            log.write(step, {"loss": float(factor * step)})
        log.close()
    curve = EventAccumulator(str(tmp_path / "logs")).Reload().Scalars("loss")
    assert [(event.step, event.value) for event in curve] == [(1, 1), (2, 2), (3, 30), (4, 40), (5, 50), (6, 60)]
    assert [(line["step"], line["loss"]) for line in metrics(tmp_path)] == [(it.step, it.value) for it in curve]


def test_half_a_line_that_a_killed_run_left_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / METRICS_NAME
    zeros = "\0" * 9  # as a power loss leaves them
    path.write_text(f'{{"step": 1, "loss": 0.5}}\n{{"step": 2,{zeros}9}}\n{zeros}\n{{"step": 2, "lo', encoding="utf-8")
    assert read_metrics(path) == [{"step": 1, "loss": 0.5}]
    assert read_metrics(tmp_path / "absent") == []
    for damaged in (
        b'{"step": 1, "lo{"step": 2}',
        b'{"loss": 1}',
        b'{"step": "x"}',
        b'{"\xff": 1}',
        b'{"step": 1e400}',
    ):
        path.write_bytes(b'{"step": 1}\n' + damaged + b"\n")
        with pytest.raises(TrainError, match=r"metrics.jsonl:2: this line was not written by a run"):
            read_metrics(path)


def test_both_times_of_a_progress_line_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with progress() as bar:
        bar.update(bar.add_task("training", total=4, count="1/4, loss 2.5"), completed=1)
    assert re.search(r"training ━.* 1/4, loss 2.5 0:\d\d elapsed, \S+ left$", capsys.readouterr().err.strip())
    assert [clock(seconds) for seconds in (None, 59.9, 61, 3845)] == ["-:--", "0:59", "1:01", "1:04:05"]
