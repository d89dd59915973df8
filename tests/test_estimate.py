"""The estimate of `build --dry-run`, held against what the build then does."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from qwen_cache import open_cache
from qwen_cache.encode import build as build_command
from qwen_cache.encode import preflight
from qwen_cache.encode.builder import BuildJob, RunningEncoders
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.format.sample import token_count

from .support.caches import build
from .support.marks import slow

TinyModel = Callable[[str], Path]
SECONDS_PER_TOKEN, WARM_UP = 0.5, 1000.0


class Clock:
    """A clock that work moves."""

    def __init__(self) -> None:
        self.now = 0.0


class TimedLanes(RunningEncoders):
    """In place of the encoders: each image token takes its time, and the first sample more."""

    def __init__(self, clock: Clock) -> None:
        self.clock, self.warm_up, self.done = clock, WARM_UP, 0

    def close(self) -> None:
        pass

    def submit(self, sample: PlannedSample, known: object = None) -> PlannedSample:
        return sample

    def result(self, sample: PlannedSample) -> None:
        self.clock.now += self.warm_up + SECONDS_PER_TOKEN * token_count(sample.img_shapes)
        self.warm_up, self.done = 0.0, self.done + 1


def dry_run(source: Path, out: Path, model: Path, *options: str) -> dict[str, Any]:
    result = build(source, out, model, "--dry-run", "--json", *options)
    assert result.code == 0, result.stderr
    return dict(json.loads(result.stdout))


@pytest.mark.parametrize("variant", ["edit-plus", slow("edit")])
def test_tokens_and_bytes_are_about_what_the_build_writes(
    variant: str, pairs: Path, tmp_path: Path, tiny_model: TinyModel
) -> None:
    if variant == "edit":
        (pairs / "control_images" / "cat_control_1.png").unlink()
    out = tmp_path / "shards"
    expected = dry_run(pairs, out, tiny_model(variant))
    assert build(pairs, out, tiny_model(variant)).code == 0
    samples = list(open_cache(out))
    written = {name: sum(s.row.meta.tensors[name].shape[0] for s in samples) for name in samples[0].row.meta.tensors}
    text = written["prompt_embeds"] + written["empty_prompt_embeds"]
    assert expected["image_tokens"] == written["image_latents"] + written["control_latents"]
    assert expected["text_tokens"] == pytest.approx(text, rel=0.5), "of English; the tiny tokenizer makes more of it"
    size = sum(path.stat().st_size for path in out.glob("*.tar"))
    assert expected["bytes"] == pytest.approx(size, rel=0.25), "with headers and thumbnails"
    assert expected["seconds"] is None
    assert dry_run(pairs, out, tiny_model(variant))["bytes"] == 0


def test_time_is_measured_on_a_few_samples_of_which_the_first_warms_up(
    pairs: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    lanes = TimedLanes(clock)
    monkeypatch.setattr(preflight, "load_lanes", lambda job: lanes)
    monkeypatch.setattr(build_command, "MEASURED", 2)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    found = dry_run(pairs, tmp_path / "shards", tiny_model("edit-plus"), "--measure")
    assert lanes.done == 3
    assert found["seconds"] == pytest.approx(SECONDS_PER_TOKEN * found["image_tokens"], rel=0.15), "text is not timed"


def test_measuring_uses_the_encoders_and_writes_nothing(pairs: Path, tmp_path: Path, tiny_model: TinyModel) -> None:
    out, model = tmp_path / "shards", tiny_model("edit-plus")
    result = build(pairs, out, model, "--dry-run")
    assert "add --measure to learn how long that takes" in result.stderr
    result = build(pairs, out, model, "--dry-run", "--measure")
    assert result.code == 0, result.stderr
    line = next(line for line in result.stderr.splitlines() if line.startswith("estimate"))
    assert line.endswith(" s"), line
    assert not out.exists()


def test_what_is_cached_is_not_measured(
    pairs: Path, tmp_path: Path, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, model = tmp_path / "shards", tiny_model("edit-plus")
    assert build(pairs, out, model).code == 0

    def refuse(job: BuildJob) -> None:
        raise AssertionError("the encoders were loaded for nothing")

    monkeypatch.setattr(preflight, "load_lanes", refuse)
    assert dry_run(pairs, out, model, "--measure")["seconds"] is None


@pytest.mark.parametrize("options", [("--measure",), ("--dry-run", "--measure", "--ray", "local")])
def test_measuring_goes_with_a_dry_run_on_this_machine(
    options: tuple[str, ...], pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    result = build(pairs, tmp_path / "shards", tiny_model("edit-plus"), *options)
    assert result.code == 2
    assert "--measure goes with --dry-run, and measures this machine" in result.stderr
    assert not (tmp_path / "shards" / "cache.json").exists()
