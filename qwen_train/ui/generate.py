"""The Generate page: a wish as a command line, choices, uploads, results."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import FileResponse
from PIL import Image
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.responses import Response

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.identity import content_hash
from qwen_cache.models.recorded import recorded_model
from qwen_cache.service.http import RefusedError, as_json, router_of
from qwen_cache.sources.images import open_rgba
from qwen_cache.sources.places import read_bytes
from qwen_cache.storage.files import make_folder, write_durably
from qwen_train.cli import COMMANDS
from qwen_train.inference.images import CHECKPOINT, FINAL, LORA_WEIGHT, check_count, grid_cells, parse_axes
from qwen_train.run import run_of
from qwen_train.ui import runs, search
from qwen_train.ui.job import Command, Job
from qwen_train.ui.jobs import Queue
from qwen_train.ui.refusals import MODEL, is_model_here, pipeline_of, told_at
from qwen_train.ui.workspace import Changes, Workspace, decoded, options_of

KIND = "generate"
FOLDER = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
VALUE = re.compile(r"-([a-z_]+)=([^=]+?)(?=-[a-z_]+=|$)")
"""An axis and its value in the name of an image, as `predict --grid` writes it."""
STEM, GRID = "image", "image-grid.png"
PREVIEW = 512  # pixels


class Axis(BaseModel):
    """Columns or rows of a grid."""

    name: str
    values: str


class Devices(BaseModel):
    """The device of all components, and those of components that have another; `auto` is none."""

    device: str = "auto"
    vae_device: str = "auto"
    text_device: str = "auto"
    transformer_device: str = "auto"


class Wish(BaseModel):
    """The images to generate."""

    model: str = ""
    images: list[str] = []
    prompt: str = ""
    lora: str = ""
    strength: float = 1.0
    grid: list[Axis] = []
    devices: Devices = Devices()
    changes: Changes = {}


def routes_of(workspace: Workspace, queue: Queue) -> APIRouter:
    router = router_of()
    results = Results(workspace, queue)

    @router.get("/api/generate/choices")
    def choices() -> dict[str, Any]:
        """The LoRAs, images and models of the opened folders, and the model of qwen.yaml."""
        found = search.find(workspace)
        return {
            "loras": loras_of(workspace, found),
            "images": sorted(map(workspace.shown, found.images)),
            "models": list(map(workspace.shown, found.models)),
            "model": workspace.settings().model.path,
        }

    @router.post("/api/generate/command")
    def command(wish: Wish) -> dict[str, Any]:
        """The command line, checked; the folder of its images is not known yet."""
        return {"line": command_of(workspace, wish, f"{STEM}.png").line}

    @router.post("/api/generate/start")
    def start(wish: Wish) -> dict[str, Any]:
        """Put the command into the queue."""
        name = time.strftime("%Y%m%d-%H%M%S-", time.localtime()) + secrets.token_hex(4)
        folder = workspace.state / "generated" / name
        made = command_of(workspace, wish, workspace.shown(folder / f"{STEM}.png"))
        about: dict[str, Any] = {"folder": name, "prompt": wish.prompt, "images": wish.images, "lora": wish.lora}
        about |= {"strength": wish.strength, "grid": [axis.model_dump() for axis in wish.grid]}
        make_folder(folder)
        return queue.add(title_of(wish), KIND, made, devices_of(wish.devices), about).to_json()

    @router.get("/api/generate/results")
    def all_results() -> list[dict[str, Any]]:
        """The images that were generated or will be, newest first."""
        return results.all()

    @router.get("/api/generate/results/{folder}/{name}")
    def image(folder: str, name: str) -> FileResponse:
        """An image that was generated."""
        return FileResponse(results.image(folder, name), headers={"Cache-Control": "private, max-age=31536000"})

    @router.get("/api/generate/preview")
    def preview(path: str) -> Response:
        """A small version of an image in the opened folders."""
        return Response(preview_of(workspace.inside(path)), media_type="image/webp")

    @router.post("/api/generate/upload")
    async def upload(request: Request) -> Response:
        """Keep an image, by its content; the answer has its path."""
        return as_json({"path": workspace.shown(keep_upload(workspace, await request.body()))})

    return router


# ---- the command -----------------------------------------------------------------------------------------------------


def command_of(workspace: Workspace, wish: Wish, out: str) -> Command:
    """The command of a wish; ConfigError or RefusedError for one that cannot be carried out."""
    if not wish.prompt.strip():
        raise ConfigError("nothing to generate", where="prompt", do="write a prompt")
    config = workspace.settings(wish.changes)
    arguments = ["predict"]
    for path in wish.images:
        if not (found := workspace.inside(path)).is_file():
            raise ConfigError("no such image", where="images", found=path, do="choose another")
        arguments += ["--image", workspace.shown(found)]
    grid = [f"{axis.name}={axis.values}" for axis in wish.grid]
    lora = _lora(workspace, wish, {axis.name for axis in wish.grid})
    is_varied = any(axis.name == LORA_WEIGHT for axis in wish.grid)
    strength = "" if is_varied or wish.strength == 1 else f":{wish.strength:g}"
    with told_at("lora", wish.lora, TrainError), told_at("grid", kind=ConfigError):
        grid_cells(parse_axes(grid, config.predict), config.predict, [f"{lora}{strength}"] if lora else [])
    model = wish.model.strip() or config.model.path or _recorded(workspace, lora)
    if pipeline := pipeline_of(workspace, model):
        with told_at("images"):
            check_count(pipeline, len(wish.images))
    config_file = ["--config", "qwen.yaml"] if workspace.config_file else []
    arguments += [
        "--prompt",
        wish.prompt,
        *(COMMANDS["predict"].typed(MODEL, wish.model.strip()) if wish.model.strip() else []),
        *(("--lora", workspace.shown(lora) + strength) if lora else ()),
        *(part for axis in grid for part in ("--grid", axis)),
        *(
            part
            for name, device in wish.devices.model_dump().items()
            if device not in ("", "auto")
            for part in (f"--{name.replace('_', '-')}", device)
        ),
    ]
    return Command("qwen-train", (*arguments, "--out", out, "--json", *config_file, *options_of(wish.changes)))


def _lora(workspace: Workspace, wish: Wish, axes: Collection[str]) -> Path | None:
    """The file or folder of the LoRA: of a grid over training steps the folder of the run."""
    if not wish.lora.strip():
        return None
    path = workspace.inside(wish.lora.strip())
    if not path.exists():
        raise ConfigError("no such LoRA", where="lora", found=wish.lora, do="choose another")
    return run_of(path) if CHECKPOINT in axes else path


def _recorded(workspace: Workspace, lora: Path | None) -> str | None:
    """The model of the run of a LoRA, if it is on this machine."""
    model = recorded_model(run_of(lora if lora.is_dir() else lora.parent)).get("path") if lora else None
    return model if is_model_here(workspace, model) else None


def devices_of(devices: Devices) -> list[str]:
    """The devices that the command computes on."""
    parts = (devices.vae_device, devices.text_device, devices.transformer_device)
    return list(dict.fromkeys(devices.device or "auto" if part in ("", "auto") else part for part in parts))


def title_of(wish: Wish) -> str:
    """A line for the queue."""
    prompt = " ".join(wish.prompt.split())
    return f"Generate: {prompt if len(prompt) <= 60 else prompt[:59] + '…'}"


# ---- choices ---------------------------------------------------------------------------------------------------------


def loras_of(workspace: Workspace, found: search.Found) -> list[dict[str, Any]]:
    """The LoRAs as JSON, the newest first; with their run its model, if that is on this machine."""
    steps: dict[Path, list[int | str]] = {}
    for lora in found.loras:
        if lora.run:
            steps.setdefault(lora.run, []).append(FINAL if lora.step is None else lora.step)
    models = {run: str(runs.settings_of(run).get(MODEL) or "") for run in steps}
    here = {name for name in {*models.values()} if is_model_here(workspace, name)}
    return [
        {
            "path": workspace.shown(lora.path),
            "run": lora.run and workspace.shown(lora.run),
            "step": lora.step,
            "model": models[lora.run] if lora.run and models[lora.run] in here else None,
            "checkpoints": sorted(steps[lora.run], key=lambda step: (step == FINAL, step)) if lora.run else [],
        }
        for lora in found.loras
    ]


def preview_of(path: Path) -> bytes:
    """A small WebP of an image file; SourceError if it is none."""
    with decoded(read_bytes(path), path.name, open_rgba) as image:
        image.thumbnail((PREVIEW, PREVIEW))
    return _webp(image)


def _webp(image: Image.Image) -> bytes:
    data = BytesIO()
    image.save(data, "WEBP", quality=85)
    return data.getvalue()


def keep_upload(workspace: Workspace, data: bytes) -> Path:
    """The file of an uploaded image, which has all its pixels; SourceError if it is none."""
    with_pixels = open_rgba(data, "the uploaded file")
    png = BytesIO()
    with_pixels.save(png, "PNG")
    folder = workspace.state / "uploads"
    path = folder / f"{content_hash(data)}.png"
    if not path.exists():
        make_folder(folder)
        write_durably(path, png.getvalue())
    return path


# ---- results ---------------------------------------------------------------------------------------------------------


class Results:
    """The images of the jobs of this page."""

    def __init__(self, workspace: Workspace, queue: Queue) -> None:
        self.workspace, self.folder, self.queue = workspace, workspace.state / "generated", queue

    def all(self) -> list[dict[str, Any]]:
        """Each job with the images that it has written so far."""
        jobs = sorted((job for job in self.queue.list() if job.kind == KIND), key=lambda job: job.created, reverse=True)
        return [job.to_json() | {"images": self.images(job), "problem": self._problem(job)} for job in jobs]

    def _problem(self, job: Job) -> str:
        return job.error() if job.state in ("failed", "lost") else ""

    def images(self, job: Job) -> list[dict[str, Any]]:
        """The images of a job in the order of its grid, each with its values and its URL."""
        name = str(job.about.get("folder", ""))
        if not (FOLDER.fullmatch(name) and self.workspace.is_inside(self.folder / name)):
            return []
        found = sorted((self.folder / name).glob(f"{STEM}*.png"))
        images = [
            {"values": dict(VALUE.findall(path.stem)), "url": url_of(path)} for path in found if path.name != GRID
        ]
        axes = {axis.name: axis.values.split(",") for axis in reversed(_axes(job.about.get("grid")))}
        return sorted(images, key=lambda image: [_place(image["values"].get(axis), axes[axis]) for axis in axes])

    def image(self, folder: str, name: str) -> Path:
        """The file of an image; RefusedError (404) if it is none of those."""
        path = self.folder / folder / name
        if not (FOLDER.fullmatch(folder) and path.name == name and path.suffix == ".png" and path.is_file()):
            raise RefusedError(404, "no such image", "reload the page")
        return self.workspace.inside(path)


def url_of(path: Path) -> str:
    """The URL of a generated image, which changes with the file."""
    return f"/api/generate/results/{path.parent.name}/{path.name}?{path.stat().st_mtime_ns}"


def _axes(written: Any) -> list[Axis]:
    """The grid of a job; none if its file, which may come from elsewhere, has another value there."""
    with suppress(ValidationError):
        return TypeAdapter(list[Axis]).validate_python(written)
    return []


def _place(value: str | None, values: Sequence[str]) -> int:
    """The position of a value among those that were typed, which may be written in another way: 0.50 for 0.5."""
    for i, each in enumerate(values):
        if value == each.strip() or _number(value) == _number(each):
            return i
    return len(values)


def _number(text: str | None) -> float | str | None:
    try:
        return float(text or "")
    except ValueError:
        return json.dumps(text)
