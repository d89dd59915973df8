"""Routes of the Train page: the form, the plan, starting and resuming, and what a run's folder has.

Every folder is given by its name and looked up in the opened ones; files in it are those of a run alone. Starting a
run whose folder another job has or waits for is refused; one that was started elsewhere holds the folder's lock.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response

from qwen_cache.service.http import RefusedError
from qwen_cache.settings.load import parse_yaml
from qwen_cache.ui.jobs.checks import Checks
from qwen_cache.ui.jobs.command import Command
from qwen_cache.ui.jobs.job import Job
from qwen_cache.ui.jobs.queue import Queue
from qwen_cache.ui.train import folders, images, metrics
from qwen_cache.ui.train.command import Continued, Form, Prepared, encoding, new_run, planned, resumed
from qwen_cache.ui.workspace import Workspace
from qwen_cache.ui.written_pages import written_page

KIND = "train"
DECODE = "decode"
ENCODE = "build"
REPORTS = "/written/runs/"
KEPT_RUNS = 32  # whose metrics stay in memory, at 16 bytes a value
MOST_COMPARED = 12
HEAVIEST = 0.99999
"""The largest weight of the smoothed loss; 1 would never leave its first value."""
FITTING = re.compile(r"(?P<changes>\S+=\S+(?: \S+=\S+)*)(?: \((?P<size>[^)]+)\))?")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".avif", ".heic", ".jxl")
MOST_IMAGES = 2000


class Decoding(BaseModel):
    """Which latents are decoded, and where."""

    folder: str
    device: str = "auto"


class MetricsFiles:
    """The metrics of the runs that were looked at last."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, metrics.MetricsFile] = OrderedDict()
        self._lock = Lock()

    def of(self, run: Path) -> metrics.MetricsFile:
        """The metrics of this run, read up to now."""
        with self._lock:
            file = self._files.pop(run, None) or metrics.MetricsFile(run / metrics.NAME)
            self._files[run] = file
            while len(self._files) > KEPT_RUNS:
                self._files.popitem(last=False)
        file.look()
        return file


def routes_of(workspace: Workspace, queue: Queue, checks: Checks) -> APIRouter:
    router = APIRouter()
    _add_form(router, workspace, checks)
    _add_jobs(router, workspace, queue)
    _add_runs(router, workspace)
    _add_images(router, workspace)
    return router


# ---- before a run ----------------------------------------------------------------------------------------------------


def _add_form(router: APIRouter, workspace: Workspace, checks: Checks) -> None:
    @router.get("/api/train/places")
    def places() -> dict[str, Any]:
        """The caches that were found, and a free folder for a new run."""
        found, wanted = folders.find(workspace), workspace.settings().train.output_dir
        return {
            "caches": [workspace.shown(each) for each in found.caches],
            "models": [workspace.shown(each) for each in found.models],
            "out": folders.new_name(workspace, wanted),
            "complete": found.is_complete,
        }

    @router.get("/api/train/controls")
    def controls() -> dict[str, Any]:
        """Images in the opened folder that a validation prompt can take as its controls."""
        found = folders.images(workspace, IMAGE_SUFFIXES, MOST_IMAGES)
        return {"images": [workspace.shown(each) for each in found]}

    @router.post("/api/train/command")
    def command(form: Form) -> dict[str, Any]:
        """The command line of a new run; an error names the setting at fault."""
        return _shown(new_run(workspace, form))

    @router.post("/api/train/plan")
    def plan(form: Form) -> dict[str, Any]:
        """What `qwen-train plan` answers, with the settings that would fit as changes; its error as a message."""
        asked = planned(workspace, form)
        checked = checks.check(asked, key="train-plan")
        document = checked.document if isinstance(checked.document, dict) else None
        fitting = [_changes_of(text) for text in (document or {}).get("do", [])]
        return {
            "line": asked.line,
            "plan": document,
            "fitting": [each for each in fitting if each],
            "message": "" if document else checked.message,
        }


def _changes_of(text: str) -> dict[str, Any] | None:
    """Settings that would fit, as `plan` writes them: `a.b=1 c.d=x (12 GB)`; None for anything else."""
    match = FITTING.fullmatch(text)
    if match is None:
        return None
    parts = (part.partition("=") for part in match["changes"].split())
    return {"text": text, "changes": {key: parse_yaml(value) for key, _, value in parts}, "size": match["size"] or ""}


def _shown(prepared: Prepared) -> dict[str, Any]:
    return {"line": prepared.command.line, "devices": prepared.devices, "folder": prepared.folder}


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _add_jobs(router: APIRouter, workspace: Workspace, queue: Queue) -> None:
    adding = Lock()

    def add(prepared: Prepared, title: str) -> dict[str, Any]:
        name = workspace.shown(workspace.inside(prepared.folder))
        with adding:
            _check_free(queue.list(), name)
            job = queue.add(title, KIND, prepared.command, prepared.devices, {"output_dir": name})
        return job.to_json()

    @router.post("/api/train/start")
    def start(form: Form) -> dict[str, Any]:
        """A new run, in the queue."""
        prepared = new_run(workspace, form)
        return add(prepared, f"Train {prepared.folder}")

    @router.post("/api/train/encode")
    def encode(form: Form) -> dict[str, Any]:
        """The prompts of the form, encoded into the validation cache as a job."""
        prepared = encoding(workspace, form)
        return queue.add("Encode validation prompts", ENCODE, prepared.command, prepared.devices).to_json()

    @router.post("/api/train/resume/command")
    def resume_command(asked: Continued) -> dict[str, Any]:
        """The command line that continues a run."""
        return _shown(resumed(workspace, asked, _earlier(queue.list(), workspace, asked.folder)))

    @router.post("/api/train/resume")
    def resume(asked: Continued) -> dict[str, Any]:
        """A run that continues, in the queue."""
        prepared = resumed(workspace, asked, _earlier(queue.list(), workspace, asked.folder))
        return add(prepared, f"Resume {prepared.folder}")

    @router.post("/api/train/decode")
    def decode(asked: Decoding) -> dict[str, Any]:
        """The images of a run that are stored as latents, decoded as a job."""
        name = workspace.shown(folders.run_at(workspace, asked.folder))
        command = Command(
            "qwen-train", ("decode", f"./{name}" if name[0] == "-" else name, f"--vae-device={asked.device}")
        )
        devices = () if asked.device == "cpu" else (asked.device,)
        return queue.add(f"Decode images of {name}", DECODE, command, devices, {"decoded": name}).to_json()


def _check_free(jobs: Sequence[Job], name: str) -> None:
    """RefusedError if a job that has not ended writes to this folder."""
    for job in jobs:
        if job.kind == KIND and not job.is_ended and job.about.get("output_dir") == name:
            state = "waits in the queue" if job.state == "queued" else "is running"
            raise RefusedError(409, f"a run of {name} {state}", "wait for it, stop it, or name another folder")


def _earlier(jobs: Sequence[Job], workspace: Workspace, name: str) -> Job | None:
    """The newest job that has trained in this folder."""
    shown = workspace.shown(workspace.inside(name))
    of_run = [job for job in jobs if job.kind == KIND and job.about.get("output_dir") == shown]
    return max(of_run, key=lambda job: job.created, default=None)


# ---- what runs have written ------------------------------------------------------------------------------------------


def _add_runs(router: APIRouter, workspace: Workspace) -> None:
    files = MetricsFiles()

    def about(run: Path) -> dict[str, Any]:
        shown = folders.about(workspace, run)
        return shown | {"report": f"{REPORTS}{quote(shown['folder'])}" if (run / folders.REPORT).is_file() else ""}

    @router.get(f"{REPORTS}{{name:path}}")
    def report(name: str) -> Response:
        """The page that a run has written."""
        return written_page(folders.run_at(workspace, name), folders.REPORT, is_alone=True)

    @router.get("/api/train/runs")
    def runs() -> dict[str, Any]:
        """All runs that were found, the newest first."""
        found = folders.find(workspace)
        shown = [about(each) for each in found.runs]
        return {"runs": sorted(shown, key=lambda run: -run["time"]), "complete": found.is_complete}

    @router.get("/api/train/curves")
    def curves(
        folder: str, smoothing: float | None = None, points: int = metrics.POINTS, version: str = ""
    ) -> Mapping[str, Any]:
        """The curves of a run, unless they are those of this version; with its state."""
        run = folders.run_at(workspace, folder)
        file = files.of(run)
        state = about(run) | {"incomplete": file.is_incomplete}
        now = f"{file.version}-{smoothing}-{points}"
        if now == version:
            return {"version": now, "run": state}
        weight = None if smoothing is None else min(max(smoothing, 0.0), HEAVIEST)
        made = metrics.curves(file, weight, min(max(points, 8), 20_000))
        return {"version": now, "run": state, **made}

    @router.get("/api/train/differences")
    def differences(folder: Annotated[list[str], Query()]) -> dict[str, Any]:
        """The settings that differ between these runs."""
        settings = {name: folders.settings_of(folders.run_at(workspace, name)) for name in folder[:MOST_COMPARED]}
        return {"runs": list(settings), "rows": folders.differing(settings)}


def _add_images(router: APIRouter, workspace: Workspace) -> None:
    @router.get("/api/train/images")
    def listed(folder: str, version: str = "") -> dict[str, Any]:
        """The images of a run, unless they are those of this version."""
        run = folders.run_at(workspace, folder)
        now = " ".join(images.versions(run))
        return {"version": now} if now and now == version else {"version": now, **images.listed(run)}

    @router.get("/api/train/image", response_class=Response)
    def image(folder: str, path: str, size: int = 0, version: str = "") -> Response:
        """An image of a run, or a small copy with this longest side."""
        data = images.read(folders.run_at(workspace, folder), path)
        kept = {"Cache-Control": "private, max-age=86400, immutable"} if version else {}
        if not size:
            return Response(data, media_type="image/png", headers=kept)
        least = min((each for each in images.SIZES if each >= size), default=images.SIZES[-1])
        return Response(images.small(data, least), media_type="image/jpeg", headers=kept)
