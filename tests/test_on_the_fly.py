"""Training without a cache promises what training from one does: the same losses, the same LoRA, bit for bit."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx2
import pytest
import yaml

from qwen_cache import open_cache
from qwen_cache.batching import index_token_counts
from qwen_cache.encode.builder import prepare_service
from qwen_cache.encode.preflight import load_lanes
from qwen_cache.settings.load import load_config
from qwen_cache.settings.sections import ServeConfig
from qwen_train.data.served import ServedSamples
from qwen_train.run import ToEncode

from .support.caches import SMALL, build
from .support.commands import Result, run
from .support.fake_lanes import FakeLanes, fake_lanes
from .support.photographs import photograph
from .support.processes import popen
from .support.runs import LORA, Trainer, run_training, two
from .support.serving import running, service_job
from .support.waiting import HANG, wait_until

SETTINGS = {
    "train.max_steps": 4,
    "train.batch_size": 2,
    "train.caption_dropout": 0.3,
    "train.checkpointing_steps": 2,
    "train.mixed_precision": "no",
    "logging.report_to": "none",
    "cache.dtype": "float32",
}


def train(out: Path, model: Path, *arguments: str | Path, **settings: object) -> Result:
    values = {**SETTINGS, "train.output_dir": out, **{k.replace("__", "."): v for k, v in settings.items()}}
    sets = [item for key, value in values.items() for item in ("--set", f"{key}={value}")]
    return run_training(*arguments, "--model", model, *sets, *SMALL[:-2])


def losses(out: Path) -> list[object]:
    return [yaml.safe_load(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture
def model(tiny_model: Callable[[str], Path]) -> Path:
    return tiny_model("edit-plus")


def processes() -> list[str]:
    """Processes that encode for a trainer of this test; other tests may run beside it."""
    found, mine = [], os.environ["PYTEST_CURRENT_TEST"].rpartition(" ")[0].encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            line, environment = ((entry / name).read_bytes() for name in ("cmdline", "environ"))
            found += [entry.name] if b"encode-worker" in line and mine in environment else []
    return found


@pytest.mark.slow
@pytest.mark.parametrize("limit", ["batch_size", "max_tokens"])
def test_losses_and_lora_are_those_of_a_cache(limit: str, pairs: Path, tmp_path: Path, model: Path) -> None:
    """More than an epoch, from a server with little memory: a sample is encoded again when it comes again.

    Under a budget of tokens the batches follow from how long every prompt will be.
    """
    assert build(pairs, tmp_path / "shards", model).code == 0
    budget = 2 * int(index_token_counts(open_cache(tmp_path / "shards").table, "there").sum(0).max())
    settings = {"train__batch_size": "null", "train__max_tokens": budget} if limit == "max_tokens" else {}
    cached = train(tmp_path / "cached", model, tmp_path / "shards", **settings)
    assert cached.code == 0, cached.stderr
    if limit == "max_tokens":
        with running(service_job(model, "unused", "serve.store=false", "serve.memory=1"), load_lanes) as url:
            wait_until(
                lambda: httpx2.get(f"{url}/readyz", verify=False).is_success
            )  # loading takes random numbers, here the run's
            result = train(tmp_path / "served", model, pairs, "--encode-at", url, **settings)
    else:
        result = train(tmp_path / "served", model, pairs, "--encode-on-the-fly", **settings)
        assert processes() == []
    assert result.code == 0, result.stderr
    assert losses(tmp_path / "served") == losses(tmp_path / "cached")
    served, from_cache = (tmp_path / name / LORA for name in ("served", "cached"))
    assert served.read_bytes() == from_cache.read_bytes()


@pytest.mark.slow
def test_two_processes_train_from_one_server(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each sample is encoded once, and the losses are those of one process on a cache that accumulates."""
    fake_lanes(monkeypatch)
    assert build(pairs, tmp_path / "shards", model).code == 0
    job = service_job(model, "unused", "serve.store=false")
    lanes, on_cache = FakeLanes(job), Trainer(tmp_path / "shards", model, tmp_path)
    on_cache(train__gradient_accumulation_steps=2, out="cached")
    with running(job, lambda _: lanes) as url:
        done = two(Trainer(pairs, model, tmp_path), "--encode-at", url, *SMALL[:-2], out="served")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "served") == pytest.approx(losses(tmp_path / "cached"), rel=1e-5)
    assert sorted(lanes.encoded) == sorted(set(lanes.encoded))


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(("--set", "data.condition_image_size=30000"), id="larger"),
        pytest.param((), id="small"),
    ],
)
@pytest.mark.parametrize("variant", ["edit-plus", "edit", "t2i"])
def test_tokens_are_those_of_the_cache_though_nothing_is_encoded(
    variant: str, settings: tuple[str, ...], pairs: Path, tmp_path: Path, tiny_model: Callable[[str], Path]
) -> None:
    """With controls of shapes of their own, which are seen at other sizes than the latents have."""
    if variant == "t2i":
        pairs.joinpath("control_images").rename(tmp_path / "unused")
    else:
        for side in ("china", "cup"):
            photograph("chelsea.png").resize((90, 170)).save(pairs / "control_images" / f"{side}.png")
    if variant == "edit":
        pairs.joinpath("control_images", "cat_control_1.png").unlink()
    built = build(pairs, tmp_path / "shards", tiny_model(variant), *settings)
    assert built.code == 0, built.stderr
    cache = open_cache(tmp_path / "shards")
    config = load_config(tmp_path / "shards" / "qwen.yaml")
    job = prepare_service(config.model_copy(update={"serve": ServeConfig(store=False)}))
    with running(job) as url:
        feed = ServedSamples(config, ToEncode(str(pairs), url))
        feed.stop_prefetch()
    expected = index_token_counts(cache.table, "there")
    assert feed.token_counts().tolist() == expected.tolist()
    assert [feed.name(i) for i in range(len(feed))] == [sample.name for sample in cache]
    assert len(set(expected[1])) > 2


@pytest.mark.slow
@pytest.mark.usefixtures("forked_encoder")
def test_a_run_resumes_from_a_cache_and_back(pairs: Path, tmp_path: Path, model: Path) -> None:
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert build(pairs, tmp_path / "shards", model).code == 0
    assert train(whole, model, tmp_path / "shards").code == 0
    first = train(parted, model, pairs, "--encode-on-the-fly", train__max_steps=2)
    assert first.code == 0, first.stderr
    assert train(parted, model, tmp_path / "shards", "--resume").code == 0
    assert losses(parted) == losses(whole)


@pytest.mark.slow
@pytest.mark.usefixtures("forked_encoder")
def test_what_is_wrong_with_the_source_is_said(
    pairs: Path, tmp_path: Path, model: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """In the source by the trainer, in what only the encoders need by the process that loads them."""
    images = pairs / "control_images"
    (images / "cup.png").rename(images / "saved")
    with running(service_job(model, "unused", "serve.store=false")) as url:
        result = train(tmp_path / "out", model, pairs, "--encode-at", url)
    assert result.code == 2
    assert "the control" in result.stderr
    assert "nothing can be trained" in result.stderr
    (images / "saved").rename(images / "cup.png")
    shutil.copytree(model, tmp_path / "model")
    (tmp_path / "model" / "vae" / "config.json").unlink()
    result = train(tmp_path / "out", tmp_path / "model", pairs, "--encode-on-the-fly")
    assert result.code == 2
    assert "the encoding process has ended; its message is above" in result.stderr
    assert "found exit code 2" in result.stderr
    assert "vae" in capfd.readouterr().err
    assert not list((tmp_path / "out").glob("checkpoint-*"))


def test_several_training_processes_are_refused(
    pairs: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "2" if name == "WORLD_SIZE" else "0")
    result = train(tmp_path / "out", model, pairs, "--encode-on-the-fly")
    assert result.code == 2
    assert "--encode-on-the-fly is for one training process (found 2)" in result.stderr
    assert "--encode-at" in result.stderr


def test_samples_of_the_source_are_not_shown(pairs: Path, tmp_path: Path, model: Path) -> None:
    """Before anything is loaded."""
    result = train(tmp_path / "out", model, pairs, "--encode-on-the-fly", validation__num_images=2)
    assert result.code == 2
    assert result.stderr.startswith("error: validation.num_images: a run that encodes shows no samples of its source")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_encoders_end_with_the_trainer(number: int, pairs: Path, tmp_path: Path, model: Path) -> None:
    """A Ctrl-C saves first; after a kill nothing is left running, nor on the disk."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    sets = {**SETTINGS, "train.output_dir": tmp_path / "out", "train.max_steps": 100_000}
    options = [item for key, value in sets.items() for item in ("--set", f"{key}={value}")]
    arguments = ["run", pairs, "--encode-on-the-fly", "--model", model, *options, *SMALL[:-2]]
    process = popen(
        [Path(sys.executable).parent / "qwen-train", *arguments],
        stderr=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    wait_until(lambda: process.poll() is not None or (tmp_path / "out" / "checkpoint-2").exists())
    process.send_signal(number)
    process.communicate(timeout=HANG)
    if number == signal.SIGINT:
        assert process.returncode == 130
    wait_until(lambda: not processes())  # the encoder ends a moment after the trainer
    assert not list(temporary.iterdir())


def test_settings_that_are_none_are_an_error_of_ours() -> None:
    for text, message in (("{", "this is not JSON"), ('{"train": {"max_step": 3}}', "max_steps")):
        result = run("qwen-cache", "encode-worker", text)
        assert result.code == 2
        assert message in result.stderr
