"""`qwen-train decode --watch` shows the images of a run as they come, whatever state their files are in."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen_cache import open_cache
from qwen_train import tracked_images, watch
from qwen_train.cli import decode

from .support.commands import refused, run
from .support.runs import SMALL, Trainer
from .support.waiting import wait_until

SETTINGS = {
    **SMALL,
    "logging.report_to": "tensorboard",
    "train.max_steps": 1,
    "validation.num_inference_steps": 2,
    "predict.dtype": "float32",
}


@pytest.fixture(autouse=True)
def polling_fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(decode, "AWAIT_SECONDS", 0.02)


@pytest.fixture
def trained(train: Trainer) -> Path:
    """A finished run with the latents of four samples, of two steps each."""
    return train(settings=SETTINGS, validation__cache=str(train.cache))


def copied(source: Path, target: Path) -> None:
    """Copy a file under its final name in two parts, as programs do that write no temporary file."""
    data = source.read_bytes()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(data[: len(data) // 2])
    threading.Event().wait(0.05)
    target.write_bytes(data)


@pytest.mark.slow
def test_images_come_while_the_run_goes_on(train: Trainer, trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It waits for the run, takes files that are half written once they are whole, and ends with the last step."""
    here, latents = train.folder / "here", sorted((trained / "validation").rglob("*.safetensors"))
    seen: list[bool] = []
    waiting, sleep = threading.Event(), time.sleep
    monkeypatch.setattr(decode.time, "sleep", lambda seconds: (waiting.set(), sleep(seconds)))

    def train_slowly() -> None:
        waiting.wait()
        here.mkdir()
        (here / ".lock").touch()
        shutil.copy(trained / "metrics.jsonl", here)
        shutil.copy(trained / "qwen.yaml", here)
        for file in latents:
            copied(file, here / file.relative_to(trained))
        wait_until(lambda: len(list(here.rglob("*.png"))) == len(latents) + 1)  # one sample has a second control
        wait_until(lambda: "before training" in (here / "report.html").read_text(encoding="utf-8"))
        shutil.copytree(trained / "checkpoint-1", here / "checkpoint-1")
        sleep(0.2)  # many polls: a run that holds its lock has not ended
        seen.append(watching.is_set())
        (here / ".lock").unlink()

    thread, watching = threading.Thread(target=train_slowly), threading.Event()
    thread.start()
    watching.set()
    result = run("qwen-train", "decode", here, "--watch", "--json")
    watching.clear()
    thread.join()
    assert result.code == 0, result.stderr
    assert seen == [True]
    assert f"waiting for a run in {here}" in result.stderr
    pngs = {str(path) for path in here.rglob("*.png")}
    assert set(json.loads(result.stdout)["images"]) == pngs
    assert run("qwen-train", "decode", trained).code == 0
    for path in map(Path, pngs):
        assert path.read_bytes() == (trained / path.relative_to(here)).read_bytes()


def test_the_tracker_has_each_image_at_its_step_beside_the_curves(train: Trainer, trained: Path) -> None:
    """In a folder of their own: TensorBoard reads one file of a folder at a time."""
    files = set((trained / "logs").iterdir())
    assert run("qwen-train", "decode", trained, "--watch").code == 0
    assert set((trained / "logs").iterdir()) == {*files, trained / "logs" / "images"}
    events = EventAccumulator(str(trained / "logs" / "images"), size_guidance={"images": 0}).Reload()
    found = {(tag, image.step): image for tag in events.Tags()["images"] for image in events.Images(tag)}
    samples = {f"images/{sample.name}": sample.key for sample in open_cache(train.cache)}
    assert found.keys() == {(tag, step) for tag in samples for step in (0, 1)}
    for (tag, step), image in found.items():
        with Image.open(trained / f"validation/step-{step}/{samples[tag]}.png") as png:
            assert (image.width, image.height) == png.size
    report = (trained / "report.html").read_text(encoding="utf-8")
    assert report.count("<figcaption>before training") == report.count("<figcaption>after step 1") == len(samples)


@pytest.mark.slow
def test_what_stays_damaged_is_named_and_the_others_are_shown(trained: Path) -> None:
    damaged = sorted((trained / "validation" / "step-1").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    result = run("qwen-train", "decode", trained, "--watch")
    refused(result, f"{damaged}: ")
    assert len(list((trained / "validation").glob("step-*/*.png"))) == 7


@pytest.mark.slow
def test_a_file_that_stays_damaged_is_named_once_while_the_run_goes_on(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    damaged = sorted((trained / "validation" / "step-1").iterdir())[0]
    damaged.write_bytes(damaged.read_bytes()[:-1])
    (trained / ".lock").touch()
    polls: Iterator[int] = iter(range(5))

    def interrupted(seconds: float) -> None:
        if next(polls) == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(watch.time, "sleep", interrupted)
    result = run("qwen-train", "decode", trained, "--watch")
    assert result.code == 0, result.stderr
    assert result.stderr.count(f"warning: {damaged}: ") == 1
    assert "stopped; the same command continues" in result.stderr


def test_a_folder_without_a_run_is_refused(train: Trainer, trained: Path) -> None:
    """A cache has a qwen.yaml too, and would be watched for ever."""
    for options in ([], ["--watch"]):
        result = run("qwen-train", "decode", train.cache, *options)
        refused(result, f"{train.cache}: this folder is a cache", "name the output folder of a run")
    for folder in (trained / "validation" / "step-0", trained / "metrics.jsonl"):
        result = run("qwen-train", "decode", folder, "--watch")
        refused(result, f"{folder}: --watch follows a run, and there is none here (expected qwen.yaml)")


@pytest.mark.parametrize("tracker", ["mlflow", "trackio", "comet_ml", "dvclive"])
def test_a_tracker_that_takes_no_images_is_named(tracker: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert not tracked_images.takes_images(tracker)
    assert (
        f"{tracker} takes no images through accelerate (tensorboard, wandb, swanlab, aim, clearml do)"
        in capsys.readouterr().err
    )
    assert not hasattr(LOGGER_TYPE_TO_CLASS[tracker], "log_images")


def test_the_other_trackers_take_images() -> None:
    takers = {name for name, tracker in LOGGER_TYPE_TO_CLASS.items() if hasattr(tracker, "log_images")}
    assert takers == {*tracked_images.FORMS}
