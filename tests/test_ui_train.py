"""The Train page: a run's command is checked as `qwen-train` checks it, and what its folder has is shown as it is.

Runs are folders written by hand; the judges are plain re-computations. One slow test trains through the routes.
"""

from __future__ import annotations

import io
import json
import math
import os
import shlex
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from starlette.testclient import TestClient

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import Config
from qwen_cache.ui.jobs import Checked, Checks, Command
from qwen_cache.ui.train import folders, images, metrics
from qwen_cache.ui.workspace import Workspace
from qwen_cache.web import RefusedError

from .support.browser import chromium, new_page
from .support.commands import command as command_line
from .support.commands import run
from .support.runs import EVERYTHING_RANDOM, column, differences, outcome
from .support.ui import enter, opened, served
from .support.waiting import wait_until

KEY, OTHER = "0123456789abcdef" * 2, "f" * 32
NAN = math.nan


def write_lines(run: Path, *lines: Any, end: str = "\n") -> Path:
    """metrics.jsonl with these lines: text as it is, all else as JSON."""
    text = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    run.mkdir(parents=True, exist_ok=True)
    (run / metrics.NAME).write_text("\n".join(text) + end, encoding="utf-8")
    return run / metrics.NAME


def write_run(run: Path, settings: str = "train:\n  max_steps: 9\n", steps: int = 3) -> Path:
    """The folder of a run with as many steps."""
    write_lines(run, *({"step": step, "loss": 1 / step, "time": 1e9 + step} for step in range(1, steps + 1)))
    (run / "qwen.yaml").write_text(settings, encoding="utf-8")
    return run


def write_image(run: Path, place: str, key: str = KEY, number: int = 1, **words: str) -> Path:
    """An image of the validation, and for the first its latents with these words in the header."""
    folder = run / "validation" / place
    folder.mkdir(parents=True, exist_ok=True)
    if number == 1:
        header = json.dumps({"__metadata__": words}).encode()
        (folder / f"{key}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    path = folder / (f"{key}.png" if number == 1 else f"{key}-{number}.png")
    Image.new("RGBA", (64, 32), (255, 0, 0, 0)).save(path)
    return path


def read(path: Path) -> metrics.MetricsFile:
    file = metrics.MetricsFile(path)
    file.look()
    return file


def series(file: metrics.MetricsFile, name: str) -> list[tuple[int, float]]:
    steps, values = file.snapshot()[0][name]
    return list(zip(steps.tolist(), values.tolist(), strict=True))


# ---- metrics ---------------------------------------------------------------------------------------------------------


def test_metrics_are_read_further_from_where_the_last_look_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path, {"step": 1, "loss": 3}, '{"step": 2, "lo', end="")
    file = read(path)
    assert series(file, "loss") == [(1, 3.0)]
    assert file.is_incomplete
    assert file.damaged == 0
    before, taken = file.version, list[bytes]()
    monkeypatch.setattr(file, "_take", lambda data, take=file._take: (taken.append(data), take(data)))
    with path.open("a", encoding="utf-8") as opened:
        opened.write('ss": 2}\n{"step": 4, "loss": 1, "grad_norm": 7}\n')
    file.look()
    assert b"".join(taken) == b'ss": 2}\n{"step": 4, "loss": 1, "grad_norm": 7}\n'
    assert series(file, "loss") == [(1, 3.0), (2, 2.0), (4, 1.0)]
    assert series(file, "grad_norm") == [(4, 7.0)]
    assert not file.is_incomplete
    assert file.version != before


def test_a_file_that_was_replaced_or_shortened_is_read_again(tmp_path: Path) -> None:
    """A resumed run writes a new file, without the steps that it repeats."""
    path = write_lines(tmp_path / "run", *({"step": step, "loss": step} for step in range(1, 9)))
    file = read(path)
    new = write_lines(tmp_path / "new", {"step": 1, "loss": 5}, {"step": 2, "loss": 6}, *[{"step": 3, "loss": 1}] * 30)
    os.replace(new, path)
    file.look()
    assert series(file, "loss") == [(1, 5.0), (2, 6.0), (3, 1.0)]
    path.write_text('{"step": 1, "loss": 7}\n', encoding="utf-8")
    file.look()
    assert series(file, "loss") == [(1, 7.0)]


DAMAGED = (
    "\0\0\0\0",
    '{"step": 3',
    "[1, 2]",
    '{"loss": 1}',
    '{"step": true, "loss": 1}',
    '{"step": -1, "loss": 1}',
    '{"step": 4, "loss": "1"}',
    '{"step": 4, "loss": 1e200}',
    '{"step": 1, "loss": 1}',
    "[" * 5000,
    '{"step": 5, "name": "' + "x" * 70_000 + '"}',
    '{"step": 5, "loss": ' + "9" * 70_000 + "}",
)


def test_damaged_lines_are_skipped_and_counted(tmp_path: Path) -> None:
    """Beginnings, zeros, other types, steps that do not ascend, endless lines."""
    path = write_lines(tmp_path, {"step": 2, "loss": 3}, *DAMAGED, "", {"step": 9, "loss": 4})
    file = read(path)
    assert series(file, "loss") == [(2, 3.0), (9, 4.0)]
    assert file.damaged == len(DAMAGED)
    assert metrics.curves(file)["damaged"] == len(DAMAGED)


def test_a_line_without_end_stays_small(tmp_path: Path) -> None:
    path = tmp_path / metrics.NAME
    path.write_bytes(b'{"step": 1, "loss": 1}\n' + b"x" * (3 << 20))
    file = read(path)
    assert not file.is_incomplete, "what is no line is not kept"
    with path.open("ab") as opened_again:
        opened_again.write(b'xxx\n{"step": 2, "loss": 2}\n')
    file.look()
    assert series(file, "loss") == [(1, 1.0), (2, 2.0)]
    assert file.damaged == 1


def test_values_that_are_not_finite_are_gaps_in_strict_json(tmp_path: Path) -> None:
    lines = ({"step": i, "loss": value} for i, value in enumerate([1.0, NAN, 3.0, math.inf, -math.inf, 2.0], 1))
    made = metrics.curves(read(write_lines(tmp_path, *lines)), 0.5)
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["series"]["loss"]["values"] == [1.0, None, 3.0, None, None, 2.0]
    assert made["series"]["loss"]["not_finite"] == 3
    averages = made["series"]["loss_smoothed"]["values"]
    assert averages == [1.0, None, pytest.approx((0.5 * 1 + 3) / 1.5), None, None, pytest.approx(3.75 / 1.75)]


def test_the_smoothed_loss_is_the_weighted_mean_of_all_values_so_far() -> None:
    values, weight = np.random.default_rng(0).normal(size=50), 0.9
    found = metrics.smoothed(values, weight)
    for t in range(50):
        weights = weight ** np.arange(t, -1, -1)
        assert found[t] == pytest.approx((weights * values[: t + 1]).sum() / weights.sum())
    assert metrics.smoothed(values, 0.0).tolist() == values.tolist()


def outline(steps: list[int], values: list[float], points: int) -> list[int]:
    """Which points a chart of points / 4 columns needs, plainly: of each column first, last, lowest, highest, a gap."""
    columns: dict[int, list[int]] = {}
    for i, step in enumerate(steps):
        columns.setdefault(int((step - steps[0]) / ((steps[-1] - steps[0] + 1) / (points // 4))), []).append(i)
    kept = set()
    for of_one in columns.values():
        finite = [i for i in of_one if math.isfinite(values[i])]
        kept |= {of_one[0], of_one[-1], *[i for i in of_one if not math.isfinite(values[i])][:1]}
        kept |= {min(finite, key=lambda i: values[i]), max(finite, key=lambda i: values[i])} if finite else set()
    return sorted(kept)


@pytest.mark.parametrize("seed", range(4))
def test_of_many_points_the_outline_is_shown(seed: int) -> None:
    """Steps with holes, equal values, runs of NaN: the same points as a plain reference, all of them in the file."""
    random = np.random.default_rng(seed)
    steps = np.cumsum(random.choice([1, 1, 1, 50], 3000))
    values = random.normal(size=3000).round(1 + seed)
    values[random.random(3000) < 0.02] = NAN
    values[1000:1100] = math.inf
    found = metrics.shown(steps, values, 200)
    assert found.tolist() == outline(steps.tolist(), values.tolist(), 200)
    assert len(found) <= 5 * 50
    assert metrics.shown(steps[:200], values[:200], 200).tolist() == list(range(200))


def test_the_usual_smoothing_is_that_of_the_report() -> None:
    from qwen_train import report

    for count in (1, 400, 401, 5000):
        assert metrics.usual_smoothing(count) == report.smoothing([(0, 0.0)] * count)


# ---- the folders of runs ---------------------------------------------------------------------------------------------


def test_runs_caches_and_models_are_found_but_nothing_inside_them_or_behind_links(tmp_path: Path) -> None:
    project, outside = tmp_path / "project", write_run(tmp_path / "outside")
    for name in ("out", "runs/2026/cats", "a/b/c/d", "a/b/c/d/e", ".hidden/run", "out/inside"):
        write_run(project / name)
    for name, file in (("shards", "cache.json"), ("shards/validation", "cache.json"), ("models/m", "model_index.json")):
        (project / name).mkdir(parents=True)
        (project / name / file).write_text("{}", encoding="utf-8")
    (project / "linked").symlink_to(outside)
    half = project / "half"
    half.mkdir()
    (half / "qwen.yaml").write_text("{}", encoding="utf-8")
    (half / metrics.NAME).symlink_to(outside / metrics.NAME)
    workspace = Workspace.open(project)
    found = folders.find(workspace)
    assert [workspace.shown(each) for each in found.runs] == ["out", "runs/2026/cats", "a/b/c/d"]
    assert [workspace.shown(each) for each in found.caches] == ["shards"]
    assert [workspace.shown(each) for each in found.models] == ["models/m"]
    for name in ("linked", "half", "../outside", "shards", str(outside)):
        with pytest.raises(RefusedError):
            folders.run_at(workspace, name)


def test_a_new_run_gets_a_free_name(tmp_path: Path) -> None:
    workspace = Workspace.open(tmp_path)
    assert folders.new_name(workspace, "out") == "out"
    for name in ("out", "out-2", "runs/cats"):
        (tmp_path / name).mkdir(parents=True)
    assert [folders.new_name(workspace, name) for name in ("out", "out-2", "runs/cats")] == [
        "out-3",
        "out-3",
        "runs/cats-2",
    ]


def test_a_run_is_running_while_the_process_in_its_lock_exists(tmp_path: Path) -> None:
    run, lock = write_run(tmp_path / "out"), tmp_path / "out" / ".lock"
    assert not folders.is_running(run)
    lock.write_text(f"\nprocess {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
    assert folders.is_running(run)
    lock.write_text(f"\nprocess {1 << 30} on {socket.gethostname()}", encoding="utf-8")
    assert not folders.is_running(run), "a run that was killed"
    lock.write_text("\nprocess 1 on another-machine", encoding="utf-8")
    assert folders.is_running(run)
    lock.write_text("", encoding="utf-8")
    assert not folders.is_running(run)


def test_only_settings_that_differ_are_listed() -> None:
    known = frozenset({"train.lora.rank_pattern", "train.lora.rank", "train.caches"})
    one = {"train": {"lora": {"rank": 16, "rank_pattern": {"to_q": 1}}, "output_dir": "a", "fsdp": True, "ema": 1}}
    two = {"train": {"lora": {"rank": 32, "rank_pattern": {"to_q": 2}}, "output_dir": "b", "fsdp": 1, "ema": 1.0}}
    two["train"]["new"] = None
    rows = folders.differing({"a": folders.flat(one, known), "b": folders.flat(two, known)})
    assert rows == [
        {"key": "train.lora.rank", "values": ["16", "32"]},
        {"key": "train.lora.rank_pattern", "values": ['{"to_q": 1}', '{"to_q": 2}']},
        {"key": "train.fsdp", "values": ["true", "1"]},
        {"key": "train.new", "values": [None, "null"]},
    ]


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_listed_by_sample_and_step(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    words = {"name": "cats/2", "prompt": "make it <b>red</b>", "true_cfg_scale": "[1, 4]"}
    for place in ("step-10", "step-9"):
        write_image(run, place, **words)
        write_image(run, place, number=2)
    write_image(run, "step-9", OTHER, name="cats/10", prompt="blue")
    write_image(run, "target")
    for number in (1, 2):
        write_image(run, "controls", number=number)
    (run / "validation" / "step-10" / f"{OTHER}.safetensors").write_bytes(b"")
    for strange in ("step-9/notes.png", f"step-9/{KEY}.jpg", f"step-x/{KEY}.png", f"other/{KEY}.png"):
        path = run / "validation" / strange
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"")
    made = images.listed(run)
    first, second = made["samples"]
    paths = [[image["path"] for image in step["images"]] for step in first["steps"]]
    assert (first["name"], first["prompt"], first["scales"]) == ("cats/2", "make it <b>red</b>", [1, 4])
    assert [step["step"] for step in first["steps"]] == [9, 10]
    assert paths == [[f"step-{n}/{KEY}.png", f"step-{n}/{KEY}-2.png"] for n in (9, 10)]
    assert [image["path"] for image in first["target"]] == [f"target/{KEY}.png"]
    assert [image["path"] for image in first["controls"]] == [f"controls/{KEY}.png", f"controls/{KEY}-2.png"]
    assert first["controls"][0]["size"] == (64, 32)
    assert (second["name"], second["steps"][0]["step"], len(second["steps"])) == ("cats/10", 9, 1)
    assert (made["waiting"], made["steps"]) == (1, [9, 10])


@pytest.mark.parametrize("header", [b"", b"\xff" * 8, (1 << 40).to_bytes(8, "little"), b"\2\0\0\0\0\0\0\0[]", b"\1"])
def test_damaged_latents_only_cost_their_words(tmp_path: Path, header: bytes) -> None:
    write_image(write_run(tmp_path), "step-0")
    (tmp_path / "validation" / "step-0" / f"{KEY}.safetensors").write_bytes(header)
    (sample,) = images.listed(tmp_path)["samples"]
    assert (sample["name"], sample["prompt"]) == (KEY, "")


def test_nothing_but_the_images_of_a_run_is_read(tmp_path: Path) -> None:
    run, secret = write_run(tmp_path / "out"), tmp_path / "secret.png"
    write_image(run, "step-0")
    Image.new("RGB", (8, 8)).save(secret)
    folder = run / "validation" / "step-0"
    (folder / f"{OTHER}.png").symlink_to(secret)
    (run / "validation" / "step-1").symlink_to(folder)
    (folder / f"{'a' * 32}.png").write_bytes(b"GIF89a")
    assert images.read(run, f"step-0/{KEY}.png").startswith(b"\x89PNG")
    for path in (
        "step-0/../../../secret.png",
        "step-0/secret.png",
        f"../out/validation/step-0/{KEY}.png",
        f"step-0/{KEY}.safetensors",
        f"step-0/{KEY}.png\0",
        f"step-0/{KEY}.png\n",
        f"step-0/{OTHER}.png",
        f"step-1/{KEY}.png",
        f"step-2/{KEY}.png",
        f"step-0/{'a' * 32}.png",
        str(secret),
        "",
    ):
        with pytest.raises(RefusedError):
            images.read(run, path)
    listed = [it["path"] for sample in images.listed(run)["samples"] for s in sample["steps"] for it in s["images"]]
    assert OTHER not in "".join(listed)
    assert "step-1" not in "".join(listed)


def test_a_small_copy_is_on_white_and_a_damaged_png_is_refused(tmp_path: Path) -> None:
    data = write_image(write_run(tmp_path), "step-0").read_bytes()
    with Image.open(io.BytesIO(images.small(data, 16))) as copy:
        assert (copy.format, copy.size) == ("JPEG", (16, 8))
        assert min(np.asarray(copy).ravel()) > 250
    for damaged in (data[:-30], data[:-16] + bytes(4) + data[-12:]):  # cut off; another checksum
        with pytest.raises(RefusedError):
            images.small(damaged, 16)


# ---- routes ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """An opened folder with a cache, a run and an image, beside one that is not opened."""
    (tmp_path / "project" / "shards").mkdir(parents=True)
    (tmp_path / "project" / "shards" / "cache.json").write_text("{}", encoding="utf-8")
    run = write_run(tmp_path / "project" / "out", "train: {max_steps: 9}\nvalidation: {vae_device: cuda:1}\n")
    write_image(run, "step-0", prompt="red")
    write_run(tmp_path / "outside")
    return tmp_path / "project"


@pytest.fixture
def page(project: Path) -> Iterator[TestClient]:
    """A client of the page whose queue starts nothing."""
    with opened(project) as client:
        client.post("/api/queue/pause")
        yield client


def command(page: TestClient, devices: list[str] | None = None, **changes: Any) -> Any:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    body = {"changes": changes, "devices": devices or ["cpu"], "has_gpus": devices is not None}
    return page.post("/api/train/command", json=body).json()


def test_the_command_line_has_options_where_the_program_has_them(page: TestClient) -> None:
    made = command(
        page,
        cache__path="shards",
        model__path="-tiny",
        train__output_dir="runs/new",
        train__max_steps=20,
        train__lora__rank=8,
        optimizer__learning_rate=5e-05,
        train__gradient_checkpointing=False,
        validation__prompts=[{"prompt": "it's", "control": ["a.png"]}],
    )
    assert made["line"] == (
        "qwen-train run shards --model=-tiny --max-steps 20 --learning-rate 5e-05 --rank 8 --out runs/new "
        "--set train.gradient_checkpointing=false "
        """--set 'validation.prompts=[{"prompt": "it'"'"'s", "control": ["a.png"]}]'"""
    )
    assert made["devices"] == ["cpu"]


def test_the_line_is_what_the_program_reads(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """The changes that a form sends are the settings of the run."""
    from qwen_train.cli import run as cli

    changes = {
        "train.max_steps": 20,
        "train.batch_size": None,
        "train.caches": [{"path": "shards", "weight": 2}],
        "train.output_dir": "new run",
        "train.lora.target_modules": "to_q",
        "optimizer.name": "1e5",
        "optimizer.betas": [0.5, 0.6],
        "logging.run_name": "null",
    }
    line = page.post("/api/train/command", json={"changes": changes}).json()["line"]
    given: list[Config] = []

    def starting(config: Config, *_: Any, **__: Any) -> None:
        given.append(config)
        raise ConfigError("that is all")

    monkeypatch.setattr(cli, "starting", starting)
    run("qwen-train", *shlex.split(line)[1:])
    (config,) = given
    assert {key: config.flat()[key] for key in changes} == {
        **changes,
        "train.caches": [{"path": "shards", "weight": 2.0, "recipe": None, "teacher": False, "loss_weight": 1.0}],
    }


@pytest.mark.parametrize(
    ("devices", "decoder", "begin", "decodes_on", "occupied"),
    [
        (["cpu"], None, "CUDA_VISIBLE_DEVICES='' qwen-train run", None, ["cpu"]),
        (["cuda:1"], None, "CUDA_VISIBLE_DEVICES=1 qwen-train run", None, ["cuda:1"]),
        (["cuda:2"], "cuda:2", "CUDA_VISIBLE_DEVICES=2 qwen-train run", "cuda:0", ["cuda:2"]),
        (["cuda:2"], "cuda:0", "CUDA_VISIBLE_DEVICES=2,0 qwen-train run", "cuda:1", ["cuda:2", "cuda:0"]),
        (["cuda:2"], "cpu", "CUDA_VISIBLE_DEVICES=2 qwen-train run", "cpu", ["cuda:2"]),
        (["cuda:0", "cuda:3"], None, "CUDA_VISIBLE_DEVICES=0,3 torchrun", None, ["cuda:0", "cuda:3"]),
    ],
)
def test_devices_are_those_that_the_run_sees(
    page: TestClient, devices: list[str], decoder: str | None, begin: str, decodes_on: str | None, occupied: list[str]
) -> None:
    """A GPU that decodes is visible too, under the number that it has among the visible ones."""
    changes = {"train__output_dir": "new", **({"validation__vae_device": decoder} if decoder else {})}
    made = command(page, devices, **changes)
    assert made["line"].startswith(begin)
    assert made["devices"] == occupied
    given = [part for part in shlex.split(made["line"]) if part.startswith("validation.")]
    assert given == ([f'validation.vae_device="{decodes_on}"'] if decodes_on else [])


@pytest.mark.parametrize(
    ("changes", "status", "where", "words"),
    [
        ({"train.max_steps": 0}, 422, "train.max_steps", "greater than 0"),
        ({"train.lora.rank": "many"}, 422, "train.lora.rank", "valid integer"),
        ({"train.nothing": 1}, 422, "train.nothing", "unknown key"),
        ({"validation.prompts": [{"control": []}]}, 422, "validation.prompts", "required"),
        ({"train.output_dir": "../outside"}, 403, None, "outside the opened folders"),
        ({"train.output_dir": "/tmp/elsewhere"}, 403, None, "outside the opened folders"),
        ({"train.output_dir": "."}, 422, "train.output_dir", "a folder of its own"),
        ({"train.output_dir": ".qwen-ui/jobs"}, 422, "train.output_dir", "a folder of its own"),
        ({"cache.path": "../outside"}, 403, None, "outside the opened folders"),
        ({"train.caches": [{"path": "/etc"}]}, 403, None, "outside the opened folders"),
        ({"validation.cache": "../x"}, 403, None, "outside the opened folders"),
        ({"validation.prompts": [{"prompt": "a", "control": "/etc/x.png"}]}, 403, None, "outside"),
        ({"logging.run_name": "../../../x"}, 422, "logging.run_name", "outside of its own"),
        ({"cache.local_copies": "/tmp/copies"}, 403, None, "outside the opened folders"),
    ],
)
def test_what_a_run_would_refuse_is_refused_before(
    page: TestClient, changes: dict[str, Any], status: int, where: str | None, words: str
) -> None:
    for path in ("command", "start", "plan"):
        answer = page.post(f"/api/train/{path}", json={"changes": changes, "devices": ["cpu"]})
        assert answer.status_code == status, answer.text
        assert words in answer.text
        assert answer.json().get("where") == where
    assert page.get("/api/jobs").json()["jobs"] == []


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["xpu:1"], ["xpu:0", "xpu:1"]])
def test_devices_on_which_the_run_would_not_train_are_refused(page: TestClient, devices: list[str]) -> None:
    assert command(page, devices)["where"] == "devices"
    assert command(page, ["xpu:0"])["devices"] == ["xpu:0"]


def test_urls_are_no_paths(page: TestClient) -> None:
    assert "s3://bucket/cache" in command(page, cache__path="s3://bucket/cache")["line"]


def test_a_second_run_in_a_folder_is_refused_while_the_first_waits(page: TestClient, project: Path) -> None:
    body = {"changes": {"train.output_dir": "new"}, "devices": ["cpu"]}
    job = page.post("/api/train/start", json=body).json()
    assert (job["kind"], job["state"], job["devices"], job["about"]) == (
        "train",
        "queued",
        ["cpu"],
        {"output_dir": "new"},
    )
    (project / "link").symlink_to("new")
    for name in ("new", "./new/", "link"):
        again = page.post("/api/train/start", json={"changes": {"train.output_dir": name}, "devices": ["cpu"]})
        assert again.status_code == 409, name
        assert "waits in the queue" in again.json()["error"]
    page.post(f"/api/jobs/{job['id']}/remove")
    assert page.post("/api/train/start", json=body).status_code == 200


def test_a_run_resumes_on_the_devices_that_it_had(page: TestClient) -> None:
    """The number of the GPU that decodes is one of the visible ones, so it stays; elsewhere it is translated."""
    first = {"changes": {"train.output_dir": "out", "validation.vae_device": "cuda:3"}, "devices": ["cuda:2"]}
    job = page.post("/api/train/start", json=first).json()
    asked = {"folder": "out", "changes": {"train.max_steps": 30, "train.output_dir": "elsewhere"}}
    same = page.post("/api/train/resume/command", json=asked).json()
    assert same["line"] == "CUDA_VISIBLE_DEVICES=2,3 qwen-train run --resume --out out --max-steps 30"
    assert same["devices"] == ["cuda:2", "cuda:3"]
    other = page.post("/api/train/resume/command", json={"folder": "out", "devices": ["cuda:0"]}).json()
    assert other["line"].startswith("CUDA_VISIBLE_DEVICES=0,3 qwen-train run --resume --out out --set")
    assert "cuda:1" in other["line"]
    page.post(f"/api/jobs/{job['id']}/remove")
    unknown = page.post("/api/train/resume/command", json={"folder": "out", "devices": ["cuda:1"]}).json()
    assert unknown["devices"] == ["cuda:1"]


def test_the_plan_names_settings_that_fit_as_changes(page: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Command] = []
    fits = ["train.max_tokens=4096", "train.gradient_checkpointing=true model.quantization=nf4 (12.3 GB)", "buy more"]

    def check(_: Checks, command: Command, key: str = "") -> Checked:
        asked.append(command)
        return Checked(1, {"fits": False, "do": fits}, "")

    monkeypatch.setattr(Checks, "check", check)
    form = {"changes": {"train.max_steps": 5, "cache.path": "shards", "model.path": "m"}, "gpu_memory": 24_000_000_000}
    answer = page.post("/api/train/plan", json=form).json()
    assert [each["changes"] for each in answer["fitting"]] == [
        {"train.max_tokens": 4096},
        {"train.gradient_checkpointing": True, "model.quantization": "nf4"},
    ]
    line = "qwen-train plan shards --model m --set train.max_steps=5 --gpu-memory 24000000000B --json"
    assert (asked[0].line, answer["line"]) == (line, line)


def test_prompts_are_encoded_by_a_job(page: TestClient) -> None:
    form = {
        "changes": {"validation.prompts": ["a cat"], "train.max_steps": 3, "cache.path": "shards"},
        "devices": ["cpu"],
    }
    job = page.post("/api/train/encode", json=form).json()
    assert job["line"] == (
        "qwen-cache build --only-validation --out shards --set 'validation.prompts=[\"a cat\"]' "
        "--vae-device cpu --text-device cpu"
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"cache.path": "../elsewhere", "train.caches": [{"path": "shards"}]},
        {"cache.path": "..", "validation.cache": "shards"},
        {"cache.path": "shards", "validation.cache": "/elsewhere"},
        {"cache.path": "linked"},
        {"cache.path": "shards", "cache.reuse": ["/elsewhere"]},
    ],
)
def test_prompts_are_encoded_into_opened_folders_alone(
    page: TestClient, project: Path, changes: dict[str, object]
) -> None:
    (project / "linked").symlink_to(project.parent)
    answer = page.post("/api/train/encode", json={"changes": changes})
    assert answer.status_code == 403
    assert "is outside the opened folders" in answer.json()["error"]
    assert page.get("/api/jobs").json()["jobs"] == []


@pytest.mark.parametrize(
    "changes",
    [
        {"validation.cache": "/elsewhere", "validation": {"cache": "shards"}},
        {"cache.local_copies": "/elsewhere", "cache": {"local_copies": "copies"}},
        {"train": {"caches": [{"path": "shards"}]}, "cache.path": "/elsewhere"},
    ],
    ids=str,
)
def test_no_section_hides_a_setting(page: TestClient, changes: dict[str, object]) -> None:
    """The command line has them in another order than a request, so another of the two would count."""
    for path in ("command", "plan", "encode"):
        answer = page.post(f"/api/train/{path}", json={"changes": changes})
        assert (answer.status_code, answer.json()["error"]) == (422, "this is a section, not a setting")


def test_a_run_is_shown_by_its_folder(page: TestClient, project: Path) -> None:
    (found,) = page.get("/api/train/runs").json()["runs"]
    assert {key: found[key] for key in ("folder", "running", "step", "max_steps", "loss", "checkpoint", "report")} == {
        "folder": "out", "running": False, "step": 3, "max_steps": 9, "loss": 1 / 3, "checkpoint": None, "report": "",
    }  # fmt: skip
    curves = page.get("/api/train/curves", params={"folder": "out", "smoothing": 0}).json()
    assert curves["series"]["loss"]["values"] == curves["series"]["loss_smoothed"]["values"] == [1, 1 / 2, 1 / 3]
    same = page.get("/api/train/curves", params={"folder": "out", "smoothing": 0, "version": curves["version"]}).json()
    assert "series" not in same
    with (project / "out" / metrics.NAME).open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 9}\n')
    more = page.get("/api/train/curves", params={"folder": "out", "smoothing": 0, "version": curves["version"]}).json()
    assert more["series"]["loss"]["values"][-1] == 9
    listed = page.get("/api/train/images", params={"folder": "out"}).json()
    assert "samples" not in page.get("/api/train/images", params={"folder": "out", "version": listed["version"]}).json()
    image = {"folder": "out", "path": listed["samples"][0]["steps"][0]["images"][0]["path"]}
    whole, small = (page.get("/api/train/image", params={**image, "size": size}) for size in (0, 100))
    assert (whole.headers["content-type"], small.headers["content-type"]) == ("image/png", "image/jpeg")
    assert whole.content == (project / "out" / "validation" / "step-0" / f"{KEY}.png").read_bytes()
    assert page.get("/api/train/places").json() == {
        "caches": ["shards"],
        "models": [],
        "out": "out-2",
        "complete": True,
    }


def test_the_report_of_a_run_is_served_in_a_sandbox(page: TestClient, project: Path) -> None:
    (project / "out" / "report.html").write_text("<p>a run", encoding="utf-8")
    (found,) = page.get("/api/train/runs").json()["runs"]
    answer = page.get(found["report"])
    assert answer.text == "<p>a run"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "'self'" not in policy  # nor reads it what other pages show
    (project / "out" / "report.html").unlink()
    (project / "out" / "report.html").symlink_to(project / "out" / "qwen.yaml")
    assert page.get(found["report"]).status_code == 404


@pytest.mark.parametrize("name", ["../outside", "shards", "nothing", "", "a\0b", "/etc"])
def test_no_other_folder_is_read(page: TestClient, name: str) -> None:
    for path in ("curves", "images", "differences", "image"):
        answer = page.get(f"/api/train/{path}", params={"folder": name, "path": f"step-0/{KEY}.png"})
        assert answer.status_code in (403, 404), answer.text
    for path in ("resume", "resume/command", "decode"):
        assert page.post(f"/api/train/{path}", json={"folder": name}).status_code in (403, 404)


def test_a_run_that_continues_writes_nowhere_else(page: TestClient) -> None:
    for changes in {"logging.run_name": "../../x"}, {"cache.local_copies": "/tmp/copies"}:
        answer = page.post("/api/train/resume", json={"folder": "out", "changes": changes, "devices": ["cpu"]})
        assert answer.status_code in (403, 422)
        assert "outside" in answer.text


# ---- a run through the page ------------------------------------------------------------------------------------------


def wait_for(page: TestClient, job: dict[str, Any], reached: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The job once it has got there."""
    wait_until(lambda: reached(page.get(f"/api/jobs/{job['id']}").json()))
    return page.get(f"/api/jobs/{job['id']}").json()  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_run_that_is_saved_stopped_and_resumed_equals_one_that_was_not(
    tmp_path: Path, built: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    cache, model = built("edit-plus"), tiny_model("edit-plus")
    changes = {
        **EVERYTHING_RANDOM,
        "train.max_steps": 150,
        "cache.path": str(cache),
        "model.path": str(model),
        "train.checkpointing_steps": 1000,
        "validation.num_images": 1,
        "validation.images_every_steps": 1000,
        "validation.num_inference_steps": 2,
        "validation.vae_device": "cpu",
        "predict.dtype": "float32",
        "train.validation_split": 0.6,
    }
    with opened(tmp_path, cache.parent, model.parent) as page:
        body = {"changes": {**changes, "train.output_dir": "stopped"}, "devices": ["cpu"]}
        job = page.post("/api/train/start", json=body).json()
        wait_for(page, job, lambda it: "save" in it["can"] or it["state"] == "failed")
        assert page.post(f"/api/jobs/{job['id']}/save").status_code == 200
        wait_until(lambda: any((tmp_path / "stopped").glob("checkpoint-*")))
        again = page.post("/api/train/start", json=body)
        assert (again.status_code, "is running" in again.json()["error"]) == (409, True)
        assert page.post(f"/api/jobs/{job['id']}/stop").status_code == 200
        assert wait_for(page, job, lambda it: it["ended"] is not None)["state"] == "stopped"
        (found,) = page.get("/api/train/runs").json()["runs"]
        assert 0 < found["step"] < 150
        assert found["checkpoint"] == found["step"]
        (sample,) = page.get("/api/train/images", params={"folder": "stopped"}).json()["samples"]
        assert [step["step"] for step in sample["steps"]] == [0]
        job = page.post("/api/train/resume", json={"folder": "stopped"}).json()
        assert wait_for(page, job, lambda it: it["ended"] is not None)["state"] == "done", job
        curves = page.get("/api/train/curves", params={"folder": "stopped"}).json()
    assignments = [f"--set={key}={json.dumps(value)}" for key, value in changes.items()]
    done = command_line("qwen-train", "run", *assignments, "--out", "whole", cwd=tmp_path)
    assert done.code == 0, done.stderr
    assert differences(outcome(tmp_path / "stopped"), outcome(tmp_path / "whole")) == []
    assert curves["series"]["loss"]["steps"] == list(range(1, 151))
    assert curves["series"]["loss"]["values"] == column(tmp_path / "whole", "loss")


# ---- the page in a browser -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_show_the_points_of_the_files_and_runs_are_laid_over_one_another(project: Path) -> None:
    """By keyboard: values at a step, a curve hidden, a second run beside the first, an image enlarged, all kept."""
    lines = [{"step": step, "loss": NAN if step == 4 else 1 / step, "grad_norm": 0} for step in range(1, 9)]
    write_lines(project / "out", *lines)
    write_run(project / "two", "train: {max_steps: 9, seed: 7}\nvalidation: {vae_device: cuda:1}\n", steps=5)
    write_image(project / "two", "step-5", prompt="red")
    with served(project) as address, chromium() as browser:
        page = new_page(browser)
        enter(page, address)
        page.goto(f"{address}/train#run=out")
        plot = page.get_by_role("slider", name="Loss", exact=True)
        plot.locator(".curve").first.wait_for(state="attached")
        spoken = []
        plot.focus()
        for key in ("End", "ArrowLeft", "Home", "ArrowRight"):
            plot.press(key)
            spoken.append(plot.get_attribute("aria-valuetext").split(", ")[0])
        assert spoken == [f"step {n}: as logged {value}" for n, value in ((8, 0.125), (7, 0.1429), (1, 1), (2, 0.5))]
        commands = plot.locator(".curve.faint > path").first.get_attribute("d")
        assert [commands.count(letter) for letter in "ML"] == [2, 5], "a break at the value that is not finite"
        assert page.locator(".chart.large .chart-note").inner_text() == "× 1 value is not finite."
        page.get_by_role("checkbox", name="Show two").press("Space")
        page.locator("#differences tbody tr").wait_for()
        assert page.locator("#differences tbody").inner_text().split() == ["train.seed", "(not", "set)", "7"]
        assert page.locator(".by-step tbody tr").count() == 2
        page.get_by_role("button", name="two, as logged", exact=True).press("Enter")
        page.locator(".chart.large [aria-pressed=false]").wait_for()
        page.locator(".by-step button").last.press("Enter")
        page.locator("#enlarged[open]").wait_for()
        assert page.locator("#enlarged-title").inner_text() == "red: two, step 5"
        page.reload()
        page.locator("#differences tbody tr").wait_for()
        assert page.locator("#view-title").inner_text() == "2 runs compared"
