"""The Train page: a run's command is checked as `qwen-train` checks it; one slow test trains through the routes."""

from __future__ import annotations

import json
import math
import re
import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from starlette.testclient import TestClient

from qwen_cache.errors import ConfigError
from qwen_cache.models.family import QWEN_IMAGE, QWEN_IMAGE_21, Family
from qwen_cache.settings.load import Config, load_config
from qwen_train.memory.prediction import host_bytes, predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model.combinations import with_layout
from qwen_train.run import METRICS_NAME
from qwen_train.ui.job import Command
from qwen_train.ui.jobs import Checked, Checks
from qwen_train.ui.presets import PRESETS

from .support.browser import Late, chromium, new_page
from .support.commands import command as command_line
from .support.commands import run
from .support.runs import EVERYTHING_RANDOM, LORA, column, differences, outcome
from .support.ui import enter, opened, served, signed
from .support.waiting import wait_until
from .support.written_runs import KEY, write_image, write_lines, write_run

NAN = math.nan


# ---- routes ----------------------------------------------------------------------------------------------------------


def write_project(folder: Path) -> Path:
    """A folder to open with a cache, a model, a run and an image, beside one that is not opened."""
    (folder / "project" / "shards").mkdir(parents=True)
    (folder / "project" / "shards" / "cache.json").write_text("{}", encoding="utf-8")
    (folder / "project" / "shards" / "qwen.yaml").write_text("model: {path: tiny}", encoding="utf-8")
    write_model(folder / "project" / "tiny")
    run = write_run(folder / "project" / "out", "train: {max_steps: 9}\nvalidation: {vae_device: cuda:1}\n")
    write_image(run, "step-0", prompt="red")
    write_run(folder / "outside")
    return folder / "project"


def write_model(folder: Path) -> None:
    folder.mkdir()
    (folder / "model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}', encoding="utf-8")


@contextmanager
def paused(project: Path) -> Iterator[TestClient]:
    """A client of the page whose queue starts nothing."""
    with opened(project) as client:
        client.post("/api/queue/pause")
        yield client


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """For the tests that change no file; they remove the jobs that they start."""
    with paused(write_project(tmp_path_factory.mktemp("shared"))) as client:
        yield client


@pytest.fixture
def project(tmp_path: Path) -> Path:
    return write_project(tmp_path)


@pytest.fixture
def own(project: Path) -> Iterator[TestClient]:
    with paused(project) as client:
        yield client


def command(page: TestClient, devices: list[str] | None = None, **changes: Any) -> Any:
    changes = {name.replace("__", "."): value for name, value in changes.items()}
    body = {"changes": changes, "devices": devices or ["cpu"], "has_gpus": devices is not None}
    return page.post("/api/train/command", json=body).json()


def test_the_command_line_has_options_where_the_program_has_them(own: TestClient, project: Path) -> None:
    write_model(project / "-tiny")
    made = command(
        own,
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
    from qwen_train.training import start

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

    monkeypatch.setattr(start, "starting", starting)
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
        ({"train.lora.rank": "many"}, 422, "train.lora.rank", "an integer"),
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


@pytest.mark.parametrize(
    ("changes", "where", "what", "found"),
    [
        ({"cache.path": "nothere"}, "cache.path", "no such folder", "nothere"),
        ({"cache.path": "tiny"}, "cache.path", "no cache.json here: not a cache", "tiny"),
        ({"train.caches": [{"path": "nothere"}]}, "train.caches", "no such folder", "nothere"),
        ({"cache.path": "bare"}, "model.path", "no model is named", None),
        ({"model.path": "nothere"}, "model.path", "no such folder", "nothere"),
        ({"model.path": "shards"}, "model.path", "not a diffusers model folder: it has no model_index.json", "shards"),
    ],
    ids=str,
)
def test_a_run_without_cache_or_model_is_not_queued(
    own: TestClient, project: Path, changes: dict[str, Any], where: str, what: str, found: str | None
) -> None:
    (project / "bare").mkdir()
    (project / "bare/cache.json").write_text("{}", encoding="utf-8")
    for path in ("command", "start", "plan"):
        answer = own.post(f"/api/train/{path}", json={"changes": changes, "devices": ["cpu"]})
        told = {key: answer.json().get(key) for key in ("where", "error", "found")}
        assert (answer.status_code, told) == (422, {"where": where, "error": what, "found": found})
    assert own.get("/api/jobs").json()["jobs"] == []


def test_all_that_is_wrong_is_told_at_once(own: TestClient, project: Path) -> None:
    """Each at its setting: settings, the folder of the run, the cache, and more blocks than the model has."""
    (project / "tiny/transformer").mkdir()
    config: dict[str, Any] = {"_class_name": "QwenImageTransformer2DModel", "num_layers": 2, "in_channels": 64}
    config |= {"num_attention_heads": 2, "attention_head_dim": 32, "axes_dims_rope": [4, 14, 14], "out_channels": 16}
    config |= {"patch_size": 2, "joint_attention_dim": 64}
    (project / "tiny/transformer/config.json").write_text(json.dumps(config), encoding="utf-8")
    changes = {"train.max_steps": 0, "train.lora.rank": "many", "optimizer.learning_rate": -1, "train.output_dir": "."}
    changes |= {"cache.path": "nothere", "model.path": "tiny", "train.offload_blocks": 40}
    for path in ("command", "start", "plan"):
        answer = own.post(f"/api/train/{path}", json={"changes": changes, "devices": ["cpu"]})
        told = answer.json()
        found = {each["where"]: each["expected"] for each in (told, *told["others"])}
        assert answer.status_code == 422
        assert found.keys() == changes.keys() - {"model.path"}
        assert found["train.offload_blocks"] == "at most 2"
    fits = {"model.path": "tiny", "train.offload_blocks": 2}
    assert "offload_blocks=2" in command(own, **{key.replace(".", "__"): value for key, value in fits.items()})["line"]
    form = {"format": "v7", "cache": "/etc", "vae_device": "no one", "changes": {"data.on_error": "halt"}}
    problems = own.post("/api/build/command", json=form).json()["problems"]
    assert [each["key"] for each in problems] == ["cache.path", "cache.vae_device", "data.on_error", "cache.format"]


def test_a_run_may_wait_for_the_build_of_its_cache(own: TestClient, project: Path) -> None:
    (project / "data").mkdir()
    build = own.post("/api/build/start", json={"model": "tiny", "cache": "new"}).json()
    line = command(own, cache__path="./new", train__output_dir="later")["line"]
    assert line == "qwen-train run ./new --out later"
    own.post(f"/api/jobs/{build['id']}/remove")
    assert command(own, cache__path="./new", train__output_dir="later")["where"] == "cache.path"
    assert "train.follow=true" in command(own, cache__path="./new", train__follow=True)["line"]


def test_a_model_elsewhere_is_taken(page: TestClient, tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert f"--model {tmp_path / 'model'}" in command(page, model__path=str(tmp_path / "model"))["line"]


@pytest.mark.parametrize("devices", [["cpu", "cuda:0"], ["xpu:1"], ["xpu:0", "xpu:1"]])
def test_devices_on_which_the_run_would_not_train_are_refused(page: TestClient, devices: list[str]) -> None:
    assert command(page, devices)["where"] == "devices"
    assert command(page, ["xpu:0"])["devices"] == ["xpu:0"]


def test_urls_are_no_paths(page: TestClient) -> None:
    assert "s3://bucket/cache" in command(page, cache__path="s3://bucket/cache")["line"]


def test_a_second_run_in_a_folder_is_refused_while_the_first_waits(own: TestClient, project: Path) -> None:
    body = {"changes": {"train.output_dir": "new"}, "devices": ["cpu"]}
    job = own.post("/api/train/start", json=body).json()
    assert (job["kind"], job["state"], job["devices"], job["about"]) == (
        "train",
        "queued",
        ["cpu"],
        {"output_dir": "new"},
    )
    (project / "link").symlink_to("new")
    for name in ("new", "./new/", "link"):
        again = own.post("/api/train/start", json={"changes": {"train.output_dir": name}, "devices": ["cpu"]})
        assert again.status_code == 409, name
        assert "waits in the queue" in again.json()["error"]
    own.post(f"/api/jobs/{job['id']}/remove")
    assert own.post("/api/train/start", json=body).status_code == 200


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
    form = {
        "changes": {"train.max_steps": 5, "cache.path": "shards", "model.path": "tiny"},
        "gpu_memory": 24_000_000_000,
    }
    answer = page.post("/api/train/plan", json=form).json()
    assert [each["changes"] for each in answer["fitting"]] == [
        {"train.max_tokens": 4096},
        {"train.gradient_checkpointing": True, "model.quantization": "nf4"},
    ]
    line = "qwen-train plan shards --model tiny --set train.max_steps=5 --gpu-memory 24000000000B --json"
    assert (asked[0].line, answer["line"]) == (line, line)


@pytest.mark.parametrize("family", [QWEN_IMAGE, QWEN_IMAGE_21], ids=lambda family: family.name)
def test_presets_are_settings_that_a_run_takes(page: TestClient, family: Family) -> None:
    """The presets for a GPU's memory fit it, for one sample of 1024² with one control."""
    shown = page.get("/api/train/presets", params={"model": family.pipelines[0].models[0]}).json()
    expected = [each for each in PRESETS if each.family in (None, family)]
    assert [each["name"] for each in shown] == [each.name for each in expected]
    for preset, each in zip(expected, shown, strict=True):
        assert {setting["key"]: setting["value"] for setting in each["settings"]} == preset.settings
        assert command(page, **preset.settings, cache__path="shards")["line"], preset
        if preset.memory:
            transformer = {"_class_name": family.transformer, "num_layers": 60 if family is QWEN_IMAGE else 32}
            settings = with_layout(load_config(None, [f"{k}={v}" for k, v in preset.settings.items()]), "cuda")
            sample = SampleSize(((1, 64, 64), (1, 64, 64)), 272, (20,))
            assert predict_memory(transformer, settings, [sample]).total < preset.memory * 1e9, preset
            host = re.search(r"([\d.]+) GB of it", preset.about)
            assert host
            assert float(host[1]) == pytest.approx(host_bytes(transformer, settings) / 1e9, abs=0.05)


def test_prompts_are_encoded_by_a_job(page: TestClient) -> None:
    form = {
        "changes": {
            "validation.prompts": ["a cat"],
            "train.max_steps": 3,
            "cache.path": "shards",
            "model.path": "tiny",
        },
        "devices": ["cpu"],
    }
    job = page.post("/api/train/encode", json=form).json()
    assert job["line"] == (
        "qwen-cache build --only-validation --out shards --model tiny --set 'validation.prompts=[\"a cat\"]' "
        "--vae-device cpu --text-device cpu"
    )
    page.post(f"/api/jobs/{job['id']}/remove")


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
    own: TestClient, project: Path, changes: dict[str, object]
) -> None:
    (project / "linked").symlink_to(project.parent)
    answer = own.post("/api/train/encode", json={"changes": changes})
    assert answer.status_code == 403
    assert "is outside the opened folders" in answer.json()["error"]
    assert own.get("/api/jobs").json()["jobs"] == []


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


def test_a_run_is_shown_by_its_folder(own: TestClient, project: Path) -> None:
    (found,) = own.get("/api/train/runs").json()["runs"]
    assert {key: found[key] for key in ("folder", "running", "step", "max_steps", "loss", "checkpoint", "report")} == {
        "folder": "out", "running": False, "step": 3, "max_steps": 9, "loss": 1 / 3, "checkpoint": None, "report": "",
    }  # fmt: skip
    curves = own.get("/api/train/curves", params={"folder": "out", "smoothing": 0}).json()
    assert curves["series"]["loss"]["values"] == curves["series"]["loss_smoothed"]["values"] == [1, 1 / 2, 1 / 3]
    same = own.get("/api/train/curves", params={"folder": "out", "smoothing": 0, "version": curves["version"]}).json()
    assert "series" not in same
    with (project / "out" / METRICS_NAME).open("a", encoding="utf-8") as file:
        file.write('{"step": 4, "loss": 9}\n')
    more = own.get("/api/train/curves", params={"folder": "out", "smoothing": 0, "version": curves["version"]}).json()
    assert more["series"]["loss"]["values"][-1] == 9
    listed = own.get("/api/train/images", params={"folder": "out"}).json()
    assert "samples" not in own.get("/api/train/images", params={"folder": "out", "version": listed["version"]}).json()
    image = {"folder": "out", "path": listed["samples"][0]["steps"][0]["images"][0]["path"]}
    whole, small = (own.get("/api/train/image", params={**image, "size": size}) for size in (0, 100))
    assert (whole.headers["content-type"], small.headers["content-type"]) == ("image/png", "image/jpeg")
    assert whole.content == (project / "out" / "validation" / "step-0" / f"{KEY}.png").read_bytes()
    assert own.get("/api/train/places").json() == {
        "caches": ["shards"],
        "models": ["tiny"],
        "out": "out-2",
        "complete": True,
    }


def test_a_part_of_a_curve_has_the_points_of_the_file(own: TestClient, project: Path) -> None:
    write_lines(project / "out", *({"step": step, "loss": step} for step in range(1, 10_001)))
    asked = {"folder": "out", "smoothing": 0}
    whole = own.get("/api/train/curves", params=asked).json()
    part = own.get("/api/train/curves", params=asked | {"first": 500, "last": 520, "version": whole["version"]}).json()
    assert len(whole["series"]["loss"]["steps"]) < 10_000
    assert (whole["first"], part["last"]) == (1, 10_000)
    assert part["series"]["loss"]["steps"] == part["series"]["loss_smoothed"]["values"] == list(range(499, 522))


def test_a_note_is_kept_with_the_run(own: TestClient, project: Path) -> None:
    def write(text: str, seen: str) -> int:
        return own.post("/api/train/note", json={"folder": "out", "text": text, "seen": seen}).status_code

    assert write(" too much\nred \u202e", "") == 200
    (run,) = own.get("/api/train/runs").json()["runs"]
    assert run["note"] == (project / "out" / "note.txt").read_text(encoding="utf-8") == "too much\nred \\u202e"
    assert (write("of another window", ""), write("x" * 20_000, run["note"])) == (409, 413)
    assert write("", run["note"]) == 200
    assert not (project / "out" / "note.txt").exists()


def test_loras_are_downloaded_by_a_key_under_the_name_of_run_and_step(own: TestClient, project: Path) -> None:
    for name, content in (("checkpoint-20", b"twenty"), ("checkpoint-40", b"forty"), (".", b"end")):
        (project / "out" / name).mkdir(exist_ok=True)
        (project / "out" / name / LORA).write_bytes(content)
    (project / "out" / "checkpoint-60").mkdir()
    (project / "out" / "checkpoint-60" / LORA).symlink_to(project.parent / "outside" / "qwen.yaml")
    listed = own.get("/api/train/loras", params={"folder": "out"}).json()["loras"]
    assert {(it["step"], it["bytes"]) for it in listed} == {(None, 3), (40, 5), (20, 6)}
    found = own.get(signed("/api/train/lora?folder=out&step=20"), headers={"Authorization": ""})
    assert (found.content, found.headers["content-length"]) == (b"twenty", "6")
    assert found.headers["content-disposition"].endswith("out-step-20.safetensors")
    for step in (30, 60):
        assert own.get("/api/train/lora", params={"folder": "out", "step": step}).status_code == 404


def test_a_new_run_has_the_settings_of_another_but_nothing_that_imports_or_sends(
    own: TestClient, project: Path
) -> None:
    settings = """
model: {path: tiny, transformer: some/where}
cache: {path: shards}
train: {max_steps: 9, lora: {rank: 4}, output_dir: out}
optimizer: {name: planted.Code, learning_rate: 0.5}
logging: {report_to: wandb}
"""
    (project / "out" / "qwen.yaml").write_text(settings, encoding="utf-8")
    found = own.get("/api/train/settings", params={"folder": "out"}).json()
    wanted = {"train.max_steps": 9, "train.lora.rank": 4, "optimizer.learning_rate": 0.5, "model.path": "tiny"}
    assert found["changes"] == wanted | {"train.output_dir": "out-2"}
    assert {it["key"] for it in found["left_out"]} == {"model.transformer", "optimizer.name", "logging.report_to"}
    assert own.post("/api/train/command", json={"changes": found["changes"], "devices": ["cpu"]}).status_code == 200


def test_the_report_of_a_run_is_served_in_a_sandbox(own: TestClient, project: Path) -> None:
    (project / "out" / "report.html").write_text("<p>a run", encoding="utf-8")
    (found,) = own.get("/api/train/runs").json()["runs"]
    answer = own.get(found["report"])
    assert answer.text == "<p>a run"
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("sandbox ")
    assert "'self'" not in policy  # nor reads it what other pages show
    (project / "out" / "report.html").unlink()
    (project / "out" / "report.html").symlink_to(project / "out" / "qwen.yaml")
    assert own.get(found["report"]).status_code == 404


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


@pytest.mark.slow
def test_a_run_that_trains_is_sampled_its_checkpoint_offered_and_its_images_decoded(
    tmp_path: Path, built: Callable[..., Path], tiny_model: Callable[[str], Path]
) -> None:
    cache, model = built("edit-plus"), tiny_model("edit-plus")
    changes = {
        "train.mixed_precision": "no",
        "train.max_steps": 1_000_000,
        "train.checkpointing_steps": 1_000_000,
        "cache.path": str(cache),
        "model.path": str(model),
        "train.output_dir": "out",
        "validation.num_images": 1,
        "validation.images_every_steps": 1_000_000,
        "validation.num_inference_steps": 2,
        "predict.dtype": "float32",
    }
    with opened(tmp_path, cache.parent, model.parent) as page:

        def images() -> Any:
            return page.get("/api/train/images", params={"folder": "out"}).json()

        job = page.post("/api/train/start", json={"changes": changes, "devices": ["cpu"]}).json()
        wait_for(page, job, lambda it: "sample" in it["can"] or it["state"] == "failed")
        wait_until(lambda: (tmp_path / "out" / METRICS_NAME).read_text(encoding="utf-8"))  # after the first images
        assert page.post(f"/api/jobs/{job['id']}/sample").status_code == 200
        wait_until(lambda: images()["waiting"] >= 2)
        assert (images()["decoder"], images()["at_a_time"], images()["samples"]) == ("", 1, [])
        assert page.post(f"/api/jobs/{job['id']}/save").status_code == 200
        saved = wait_for(page, job, lambda it: it["checkpoint"] is not None)["checkpoint"]
        newest = page.get("/api/generate/choices").json()["loras"][0]
        assert (newest["path"], newest["model"]) == (f"out/checkpoint-{saved}", str(model))
        decoding = page.post("/api/train/decode", json={"folder": "out"}).json()
        assert "--vae-device=cpu" in decoding["line"]
        assert wait_for(page, decoding, lambda it: it["ended"] is not None)["state"] == "done"
        assert page.get(f"/api/jobs/{job['id']}").json()["state"] == "running"
        (sample,) = images()["samples"]
        first, sampled, *_ = (each["step"] for each in sample["steps"])
        assert first == 0 < sampled < 1_000_000
        page.post(f"/api/jobs/{job['id']}/kill")
        wait_for(page, job, lambda it: it["ended"] is not None)


# ---- the page in a browser -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_curves_show_the_points_of_the_files_and_runs_are_laid_over_one_another(project: Path) -> None:
    """By keyboard: values at a step, a curve hidden, a second run beside the first, an image enlarged, all kept."""
    lines = [{"step": step, "loss": NAN if step == 4 else 1 / step, "grad_norm": 0} for step in range(1, 9)]
    write_lines(project / "out", *lines)
    write_run(project / "two", "train: {max_steps: 9, seed: 7}\nvalidation: {vae_device: cuda:1}\n", steps=5)
    write_image(project / "two", "step-5", prompt="red")
    write_image(project / "out", "target")
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
        for key, shown in (
            ("Home", ["1", "8"]),
            ("+", ["1", "5"]),
            ("Shift+ArrowRight", ["2", "6"]),
            ("0", ["1", "8"]),
        ):
            plot.press(key)
            wait_until(lambda: [each.input_value() for each in page.locator("#range-tools input").all()] == shown)  # noqa: B023
            assert {each.get_attribute("aria-valuemax") for each in page.locator(".chart-plot").all()} == {shown[1]}
        page.get_by_role("checkbox", name="Show two").press("Space")
        page.locator("#differences tbody tr").wait_for()
        assert page.locator("#differences tbody").inner_text().split() == ["train.seed", "(not", "set)", "7"]
        assert page.locator(".by-step tbody tr").count() == 2
        columns = ["Run", "Target", "before training", "step 5"]
        assert page.locator(".by-step th[scope=col]").all_inner_texts() == columns
        assert page.locator(".by-step tbody tr").nth(1).locator("td").all_inner_texts()[0] == "–", "it has no target"
        page.get_by_role("button", name="out, target").press("Enter")
        assert page.locator("#enlarged-title").inner_text() == "red: out, target"
        page.keyboard.press("Escape")
        page.get_by_role("button", name="two, as logged", exact=True).press("Enter")
        page.locator(".chart.large [aria-pressed=false]").wait_for()
        page.locator("#compare-part summary").press("Enter")
        slider = page.get_by_role("slider", name="Part of the left image")
        slider.press("End")
        assert slider.get_attribute("aria-valuetext").startswith(
            "100 % out, before training, without the LoRA, 0 % two, "
        )
        assert page.locator(".compare-view img").nth(1).evaluate("img => img.style.clipPath") == "inset(0px 0% 0px 0px)"
        page.locator(".by-step button").last.press("Enter")
        page.locator("#enlarged[open]").wait_for()
        assert page.locator("#enlarged-title").inner_text() == "red: two, step 5"
        page.keyboard.press("Escape")
        page.locator("#new-run > summary").press("Enter")
        page.get_by_label("Presets").select_option("Edit")
        page.get_by_role("button", name="Change these 5 settings").press("Enter")
        page.locator("#line", has_text="rank").wait_for()
        page.locator("[id='setting-train.max_steps']").fill("1234")
        page.get_by_role("button", name="Undo the presets").press("Enter")
        page.locator("#line:not(:has-text('rank'))").wait_for()
        assert "--max-steps 1234" in page.locator("#line").inner_text(), "what was typed after the preset stays"
        page.reload()
        page.locator("#differences tbody tr").wait_for()
        assert page.locator("#view-title").inner_text() == "2 runs compared"


@pytest.mark.slow
def test_late_answers_leave_what_the_user_typed(project: Path) -> None:
    """A note that was saved, the output folder, and a prediction of other settings or of another window."""
    with served(project) as address, chromium() as browser:
        page = new_page(browser)
        enter(page, address)
        page.goto(f"{address}/train#run=out")
        note = page.get_by_label("Note on out")
        note.wait_for()
        late = Late(page, "**/api/train/runs")
        late.wait()
        note.fill("mine")
        page.get_by_role("button", name="Save the note").click()
        page.locator("#announcements", has_text="the note is saved").wait_for(state="attached")
        route, old = late.answers.pop()
        route.fulfill(response=old)
        late.wait()  # the next list
        assert note.input_value() == "mine"
        late.deliver()

        late = Late(page, "**/api/train/places")
        page.locator("#new-run > summary").click()
        page.locator("#plan-always").uncheck()
        late.wait()
        page.locator("[id='own-train.output_dir']").fill("typed")
        late.deliver()
        page.locator("#line", has_text="typed").wait_for()

        asked: list[Any] = []
        page.route("**/api/train/plan", lambda route: asked.append(route))
        page.locator("#plan").click()
        wait_until(lambda: page.wait_for_timeout(20) or asked)
        page.locator("[id='own-train.output_dir']").fill("another")
        asked.pop().fulfill(json={"plan": None, "message": "not that", "line": "", "fitting": []})
        page.locator("#memory", has_text="The settings have changed since this prediction.").wait_for()
        page.locator("#plan").click()
        wait_until(lambda: page.wait_for_timeout(20) or asked)
        asked.pop().fulfill(status=409, json={"error": "a newer check has taken the place of this one"})
        page.locator("#memory", has_text="Another window predicts now").wait_for()
