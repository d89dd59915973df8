"""The Generate page: a wish as a command of `predict`, what is refused, and which images come back."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from starlette.testclient import TestClient

from qwen_train.ui import search
from qwen_train.ui.job import ENDED
from qwen_train.ui.workspace import Workspace

from .support.ui import opened
from .support.written_runs import write_run

WISH: dict[str, Any] = {"prompt": "make it red", "images": ["data/a b.png"], "model": "tiny"}


def png(size: tuple[int, int] = (64, 32)) -> bytes:
    data = BytesIO()
    Image.new("RGB", size, "red").save(data, "PNG")
    return data.getvalue()


def size(data: bytes) -> tuple[int, int]:
    with Image.open(BytesIO(data)) as image:
        return image.size


def write_lora(run: Path, step: int | None, time: float) -> None:
    """The LoRA of a checkpoint, or of the run's end, as old as that."""
    file = (run if step is None else run / f"checkpoint-{step}") / "pytorch_lora_weights.safetensors"
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(b"")
    os.utime(file, (time, time))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("generate") / "project"
    for each in ("data", "loras", ".hidden", "shards", "tiny"):
        (folder / each).mkdir(parents=True)
    for name in ("data/a b.png", "data/-x.png", ".hidden/b.png", "shards/c.png"):
        (folder / name).write_bytes(png())
    (folder / "shards/cache.json").write_text("{}", encoding="utf-8")
    (folder / "tiny/model_index.json").write_text('{"_class_name": "QwenImageEditPipeline"}', encoding="utf-8")
    (folder / "data/photo.eps").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0\n")
    for name in ("loras/cats.safetensors", "data/other.safetensors"):
        (folder / name).write_bytes(b"")
    for i, (name, steps) in enumerate([("stopped", (20, 53)), ("out", (20, 100, None)), ("resumed", (None, 70))]):
        write_run(folder / name, f"model: {{path: {'tiny' if name == 'out' else 'some/where'}}}", steps=3)
        for j, step in enumerate(steps):
            write_lora(folder / name, step, time=1e9 + 10 * i + j)
    (folder / "out/checkpoint-60").mkdir()  # of a run that trains all weights
    secret = folder.parent / "secret.png"
    secret.write_bytes(png())
    (folder / "data/link.png").symlink_to(secret)
    (folder / "data/same.png").symlink_to("a b.png")
    return folder


@pytest.fixture(scope="module")
def page(project: Path) -> Iterator[TestClient]:
    with opened(project) as client:
        client.post("/api/queue/pause", json={})  # no command runs
        yield client


def line(page: TestClient, **wish: Any) -> list[str]:
    answer = page.post("/api/generate/command", json=WISH | wish)
    assert answer.status_code == 200, answer.text
    return shlex.split(answer.json()["line"])


def options(arguments: list[str], name: str) -> list[str]:
    return [arguments[i + 1] for i, each in enumerate(arguments) if each == name]


def test_a_wish_is_one_command(page: TestClient) -> None:
    grid = [{"name": "checkpoint", "values": "20,final"}, {"name": "seed", "values": "0,1"}]
    devices = {"device": "cuda:1", "vae_device": "cpu"}
    found = line(page, lora="out", strength=0.6, grid=grid, devices=devices, changes={"predict.seed": 3})
    assert found[:2] == ["qwen-train", "predict"]
    expected = {
        "--image": ["data/a b.png"],
        "--prompt": ["make it red"],
        "--model": ["tiny"],
        "--lora": ["out:0.6"],
        "--grid": ["checkpoint=20,final", "seed=0,1"],
        "--device": ["cuda:1"],
        "--vae-device": ["cpu"],
        "--text-device": [],
        "--set": ["predict.seed=3"],
    }
    assert {name: options(found, name) for name in expected} == expected
    varied = line(page, lora="out", strength=0.6, grid=[{"name": "lora_weight", "values": "0,1"}])
    assert options(varied, "--lora") == ["out"]  # the grid has its weights
    assert options(line(page, prompt="--lora /etc"), "--prompt") == ["--lora /etc"]


REFUSED: list[tuple[dict[str, Any], int, str]] = [
    ({"prompt": " \n"}, 422, "nothing to generate"),
    ({"images": ["data/missing.png"]}, 422, "no such image"),
    ({"images": ["../secret.png"]}, 403, "../secret.png is outside the opened folders"),
    ({"images": ["data/link.png"]}, 403, "data/link.png is outside the opened folders"),
    ({"images": ["/etc/passwd"]}, 403, "/etc/passwd is outside the opened folders"),
    ({"lora": "../elsewhere"}, 403, "../elsewhere is outside the opened folders"),
    ({"lora": "missing"}, 422, "no such LoRA"),
    ({"changes": {"predict.sed": 1}}, 422, "unknown key predict.sed"),
    ({"lora": "data"}, 422, "no LoRA here"),
    ({"lora": "out/checkpoint-60"}, 422, "no LoRA here"),
    ({"grid": [{"name": "seed", "values": "0,abc"}]}, 422, "not a valid value"),
    ({"grid": [{"name": "lora_weight", "values": ",,"}]}, 422, "not a valid value"),
    ({"grid": [{"name": "seed", "values": "0"}] * 2}, 422, "this axis is given twice"),
    ({"grid": [{"name": "lora_weight", "values": "0,1"}]}, 422, "this axis is about one LoRA"),
    ({"grid": [{"name": "checkpoint", "values": "20"}]}, 422, "this axis is about one LoRA"),
    ({"lora": "out", "grid": [{"name": "checkpoint", "values": "20,21"}]}, 422, "has no such checkpoint"),
    ({"lora": "out", "grid": [{"name": "checkpoint", "values": "60"}]}, 422, "no LoRA here"),
    ({"images": ["data/a b.png", "data/same.png"]}, 422, "QwenImageEditPipeline takes 1 image"),
    ({"model": ""}, 422, "no model is named"),
    ({"model": "", "lora": "stopped/checkpoint-53"}, 422, "no model is named"),  # its run's is not on this machine
    ({"model": "nowhere"}, 422, "no such folder"),
    ({"model": "data"}, 422, "not a diffusers model folder"),
    ({"model": "Qwen/Qwen-Image"}, 422, "QwenImagePipeline takes 0 images"),
]
PLACES = {
    "nothing": "prompt",
    "no such image": "images",
    "no such LoRA": "lora",
    "no LoRA": "lora",
    "no model": "model.path",
    "no such folder": "model.path",
    "not a diffusers": "model.path",
    "Qwen": "images",
    "unknown": "predict.sed",
}
"""The fields at which a refusal stands, by how it begins; others are about the grid."""


@pytest.mark.parametrize(("wish", "status", "what"), REFUSED, ids=str)
def test_what_cannot_be_generated_is_refused_before_it_is_queued(
    page: TestClient, wish: dict[str, Any], status: int, what: str
) -> None:
    for path in ("command", "start"):
        answer = page.post(f"/api/generate/{path}", json=WISH | wish)
        assert (answer.status_code, what in answer.json()["error"]) == (status, True), answer.text
        place = next((place for begin, place in PLACES.items() if what.startswith(begin)), "grid")
        assert answer.json().get("where", place) == place
    assert page.get("/api/generate/results").json() == []


def test_choices_are_those_of_the_folder(page: TestClient) -> None:
    choices = page.get("/api/generate/choices").json()
    assert choices["images"] == ["data/-x.png", "data/a b.png", "data/same.png"]
    assert choices["models"] == ["tiny"]
    assert [each["path"] for each in choices["loras"]] == [
        "resumed/checkpoint-70",
        "resumed",
        "out",
        "out/checkpoint-100",
        "out/checkpoint-20",
        "stopped/checkpoint-53",
        "stopped/checkpoint-20",
        "loras/cats.safetensors",
    ]
    by_path = {each.pop("path"): each for each in choices["loras"]}
    of_out = {"run": "out", "model": "tiny", "checkpoints": [20, 100, "final"]}
    assert (by_path["out/checkpoint-20"], by_path["out"]) == (of_out | {"step": 20}, of_out | {"step": None})
    assert by_path["stopped/checkpoint-53"] == {"run": "stopped", "step": 53, "model": None, "checkpoints": [20, 53]}
    assert by_path["loras/cats.safetensors"] == {"run": None, "step": None, "model": None, "checkpoints": []}
    runs = {run["folder"]: run["lora"] for run in page.get("/api/train/runs").json()["runs"]}
    assert runs == {
        "resumed": {"path": "resumed/checkpoint-70", "step": 70},
        "out": {"path": "out", "step": None},
        "stopped": {"path": "stopped/checkpoint-53", "step": 53},
    }


def test_every_checkpoint_can_be_tried(page: TestClient) -> None:
    for path in ("stopped/checkpoint-20", "./stopped/checkpoint-53/pytorch_lora_weights.safetensors", "resumed"):
        assert options(line(page, lora=path), "--lora") == [path.removeprefix("./")]
    steps = line(page, lora="stopped/checkpoint-53", grid=[{"name": "checkpoint", "values": "20,53"}])
    assert options(steps, "--lora") == ["stopped"]
    assert "--model" not in line(page, lora="out", model="")  # that of its run, which is on this machine


def test_looks_at_a_large_folder_are_bounded(page: TestClient, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks into folders and at files, however many there are and whatever is found."""
    many = project / "many"
    for i in range(30):
        (many / f"{i}").mkdir(parents=True)
        (many / f"{i}/away.png").symlink_to(project.parent / "secret.png")
        write_lora(many / f"{i}", 5, time=0.0)
        write_lora(many / f"{i}", 6, time=0.0)
    looks: dict[str, int] = {"folders": 0, "files": 0}

    def counted(name: str, look: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **named: Any) -> Any:
            looks[name] += 1
            return look(*given, **named)

        return call

    monkeypatch.setattr(search, "MOST_FOLDERS", 12)
    monkeypatch.setattr(search, "MOST_FILES", 10)
    monkeypatch.setattr(os, "scandir", counted("folders", os.scandir))
    monkeypatch.setattr(Workspace, "is_inside", counted("files", Workspace.is_inside))
    monkeypatch.setattr(search, "_changed", counted("files", search._changed))
    for path, rest in (("generate/choices", 0), ("train/places", 0), ("train/controls", 0), ("data/sources", 3)):
        looks.update(folders=0, files=0)
        assert page.get(f"/api/{path}").status_code == 200
        assert 0 < looks["folders"] <= 12 + rest, path  # the rest: the checkpoints of each run
        assert looks["files"] <= 2 * 10 + 3 * rest, path
    monkeypatch.undo()
    shutil.rmtree(many)


def test_previews_and_uploads_are_images(page: TestClient, project: Path) -> None:
    assert page.get("/api/generate/preview", params={"path": "."}).status_code == 422
    with (project / "huge.png").open("wb") as file:
        file.truncate(1 << 40)
    assert "too large" in page.get("/api/generate/preview", params={"path": "huge.png"}).json()["error"]
    (project / "huge.png").unlink()
    shown = page.get("/api/generate/preview", params={"path": "data/a b.png"})
    assert size(shown.content) == (64, 32)
    for path, status in [
        ("data/photo.eps", 422),
        ("data/link.png", 403),
        ("data/missing.png", 422),
        ("qwen.yaml", 422),
    ]:
        assert page.get("/api/generate/preview", params={"path": path}).status_code == status, path
    kept = page.post("/api/generate/upload", content=png((30, 20))).json()["path"]
    assert size((project / kept).read_bytes()) == (30, 20)
    assert options(line(page, images=[kept]), "--image") == [kept]
    assert page.post("/api/generate/upload", content=b"%!PS-Adobe-3.0").status_code == 422


def test_images_come_back_in_the_order_of_the_grid(page: TestClient, project: Path) -> None:
    grid = [{"name": "lora_weight", "values": "1, 0.50,0"}, {"name": "checkpoint", "values": "20,final"}]
    job = page.post("/api/generate/start", json=WISH | {"lora": "out", "grid": grid}).json()
    folder = project / ".qwen-ui/generated" / job["about"]["folder"]
    assert options(shlex.split(job["line"]), "--out") == [f".qwen-ui/generated/{folder.name}/image.png"]
    for weight in ("0.5", "0", "1"):
        for checkpoint in ("final", "20"):
            (folder / f"image-lora_weight={weight}-checkpoint={checkpoint}.png").write_bytes(png())
    (folder / "image-grid.png").write_bytes(png())
    (folder / "secret.png").symlink_to(project.parent / "secret.png")
    (result,) = page.get("/api/generate/results").json()
    values = [(image["values"]["lora_weight"], image["values"]["checkpoint"]) for image in result["images"]]
    assert values == [(weight, checkpoint) for checkpoint in ("20", "final") for weight in ("1", "0.5", "0")]
    assert page.get(result["images"][0]["url"]).content == png()
    for name, status in [("secret.png", 403), ("missing.png", 404), ("..%2fjobs", 404), ("image.txt", 404)]:
        assert page.get(f"/api/generate/results/{folder.name}/{name}").status_code == status, name
    assert page.get("/api/generate/results/..%2f..%2fdata/a b.png").status_code == 404
    assert (
        json.loads((folder.parent.parent / "jobs" / job["id"] / "job.json").read_text(encoding="utf-8"))["kind"]
        == "generate"
    )


@pytest.fixture
def started(tmp_path: Path) -> Iterator[tuple[TestClient, Path, dict[str, Any]]]:
    """A client of a new folder, and a job that waits there."""
    with opened(tmp_path) as client:
        client.post("/api/queue/pause", json={})
        yield (
            client,
            tmp_path / ".qwen-ui",
            client.post("/api/generate/start", json={"prompt": "a", "model": "Qwen/Qwen-Image"}).json(),
        )


@pytest.mark.parametrize("about", [{"grid": "x"}, {"grid": [{"name": "seed"}]}, {"folder": [1]}], ids=str)
def test_a_planted_job_does_not_hide_the_results(started: Any, about: dict[str, Any]) -> None:
    client, state, job = started
    (state / "generated" / job["about"]["folder"] / "image.png").write_bytes(png())
    file = state / "jobs" / job["id"] / "job.json"
    written = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(written | {"about": written["about"] | about}), encoding="utf-8")
    (file.parent / ENDED).write_text(json.dumps({"time": time.time(), "code": 0}), encoding="utf-8")
    (result,) = client.get("/api/generate/results").json()
    assert len(result["images"]) == ("grid" in about)


def test_a_link_in_place_of_results_is_not_followed(started: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    client, state, job = started
    folder, other = state / "generated" / job["about"]["folder"], tmp_path_factory.mktemp("other")
    (other / "image.png").write_bytes(png())
    folder.rmdir()
    folder.symlink_to(other)
    (result,) = client.get("/api/generate/results").json()
    assert result["images"] == []
    assert client.get(f"/api/generate/results/{folder.name}/image.png").status_code == 403
