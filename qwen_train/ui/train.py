"""The Train page: its command line, and its routes."""

from __future__ import annotations

import json
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Annotated, Any
from urllib.parse import quote

from fastapi import APIRouter, Query
from pydantic import BaseModel
from starlette.responses import Response, StreamingResponse

from qwen_cache.cli import COMMANDS as CACHE_COMMANDS
from qwen_cache.errors import ConfigError
from qwen_cache.models.family import family_of
from qwen_cache.options import Command as Declared
from qwen_cache.service.http import RefusedError, router_of
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved, parse_yaml
from qwen_cache.settings.sections import NO_CACHE
from qwen_train.cli import COMMANDS
from qwen_train.run import METRICS_NAME, REPORT_NAME
from qwen_train.ui import runs, search
from qwen_train.ui.job import Command, Job
from qwen_train.ui.jobs import Checks, Queue
from qwen_train.ui.presets import presets
from qwen_train.ui.refusals import Together, check_training, pipeline_of, settings_of
from qwen_train.ui.runs import run_at
from qwen_train.ui.workspace import STATE, Changes, Workspace, given, options_of, written_page

# ---- command ---------------------------------------------------------------------------------------------------------
# The command line of a run from what the form has: checked by the settings' own code, and only inside opened folders.
#
# The chosen GPUs become CUDA_VISIBLE_DEVICES, several of them one process each. A device that decodes images is one
# more of the visible ones, so its number changes with them.

OF_ENCODING = ("cache.", "model.", "validation.prompts", "validation.source", "validation.cache")
CPU = "cpu"
AUTO = "auto"
GPU = re.compile(r"cuda:(\d{1,3})")
NOT_FIRST = re.compile(r"[a-z]+:0*[1-9]\d*")
"""A device that is not the first of its kind: a run takes the first one, and only GPUs of CUDA are hidden here."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
OF_RUNS = ("cache.path", "model.", "train.", "optimizer.", "lr_scheduler.", "validation.", "logging.", "predict.")
"""The settings that a run follows."""
FETCHED = ("model.transformer", "model.text_encoder", "model.vae", "train.assistant_lora", "train.lora.weights")
"""Settings that name a file, or else a repository on the hub."""
VAE_DEVICE = "validation.vae_device"
RESOLVED = ("train.layout", "train.compile")
"""Settings of a run that are the choice for its device where qwen.yaml has `auto`; the results are equal."""
LOGS = "logs"  # of TensorBoard, in the folder of a run


class Form(BaseModel):
    """The form of a new run."""

    changes: Changes = {}
    """By dotted name, among them cache.path, model.path and train.output_dir."""
    devices: list[str] = []
    """cpu, or GPUs such as cuda:0; none: as the command chooses."""
    gpu_memory: int | None = None
    """Bytes, for the plan."""
    has_gpus: bool = False
    """True if this machine has GPUs, which are then hidden from a run on the CPU."""


class Continued(BaseModel):
    """The form of a run that continues."""

    folder: str
    changes: Changes = {}
    devices: list[str] = []
    has_gpus: bool = False


@dataclass(frozen=True)
class Prepared:
    """A command with the devices that it occupies, and the folder of its run."""

    command: Command
    devices: tuple[str, ...]
    folder: str


def new_run(workspace: Workspace, form: Form, jobs: Sequence[Job]) -> Prepared:
    """The command of a new run behind these jobs; ConfigError names the setting at fault, RefusedError a path."""
    config = _checked(workspace, form.changes, jobs)
    decoder = config.validation.vae_device
    environment, changes, devices, processes = on_devices(form.devices, form.changes, decoder, form.has_gpus)
    arguments = ["run", *_cache(changes), *_options(changes, COMMANDS["run"])]
    command = Command("qwen-train", tuple(arguments), environment, processes)
    return Prepared(command, devices, config.train.output_dir)


def _checked(workspace: Workspace, changes: Changes, jobs: Sequence[Job]) -> Config:
    """The settings of a new run; ConfigError for the first of all that is wrong with them, with the others."""
    checks = Together()
    config = settings_of(workspace, changes, checks)
    with checks.one():
        check_paths(workspace, config)
    with checks.one():
        check_training(workspace, config, jobs)
    checks.end()
    return config


def resumed(workspace: Workspace, asked: Continued, jobs: Sequence[Job]) -> Prepared:
    """The command that continues a run with its own settings and these changes, behind these jobs.

    Unless told, on the devices of the newest of them that trained it.
    """
    earlier = _earlier(jobs, workspace, asked.folder)
    run = run_at(workspace, asked.folder)
    changes = {key: value for key, value in asked.changes.items() if key != "train.output_dir"}
    config = load_saved(run / CONFIG_NAME, (), given(changes))
    arguments = ["run", "--resume", *COMMANDS["run"].typed("train.output_dir", workspace.shown(run))]
    check_written(workspace, config, run)
    check_read(workspace, config)
    check_training(workspace, config, jobs)
    if earlier and not asked.devices:
        environment, devices, processes = earlier.command.environment, earlier.devices, earlier.command.processes
    else:
        if VAE_DEVICE not in changes and (decoder := _of_machine(config.validation.vae_device, earlier)):
            changes[VAE_DEVICE] = decoder
        environment, changes, devices, processes = on_devices(
            asked.devices, changes, changes.get(VAE_DEVICE), asked.has_gpus
        )
    arguments += [*_cache(changes), *_options(changes, COMMANDS["run"])]
    return Prepared(Command("qwen-train", tuple(arguments), environment, processes), devices, workspace.shown(run))


def settings_again(workspace: Workspace, run: Path, earlier: Job | None) -> dict[str, Any]:
    """The settings of a run as changes of those of qwen.yaml, for a new run, with the devices of the job that ran it.

    A run's folder may be from somebody else. So what is imported, sent or fetched is left out, unless qwen.yaml has it.
    """
    saved, own = load_saved(run / CONFIG_NAME).flat(), workspace.settings().flat()
    of_run = {key: value for key, value in saved.items() if key.startswith(OF_RUNS)}
    is_chosen = {key: own[key] == AUTO for key in RESOLVED}  # by the run, for its device
    differing = {key: value for key, value in of_run.items() if value != own[key] and not is_chosen.get(key)}
    left_out = [key for key, value in differing.items() if not _is_harmless(workspace, key, value)]
    changes = {key: value for key, value in differing.items() if key not in left_out}
    changes["train.output_dir"] = runs.new_name(workspace, workspace.shown(run))
    devices: list[str] = []
    if earlier:
        devices = [each for each in earlier.devices if each != AUTO][: earlier.command.processes]
        if decoder := _of_machine(saved[VAE_DEVICE], earlier):
            changes[VAE_DEVICE] = decoder
    told = [{"key": key, "value": saved[key]} for key in left_out]
    return {"changes": changes, "devices": devices, "left_out": told}


def _is_harmless(workspace: Workspace, key: str, value: Any) -> bool:
    """True unless a setting lets a run import code, send what it does to a service, or fetch files."""
    if key == "optimizer.name":
        return "." not in str(value)
    if key == "logging.report_to":
        return value in ("tensorboard", "none")
    if key == "model.path":
        return True  # of a model that is not here, the form says so
    if key in FETCHED and value is not None:  # of assistant_lora, a weight may stand behind the path
        names = (str(value), str(value).rpartition(":")[0])
        return any(name and (workspace.folder / name).exists() for name in names)
    return key == "cache.path" or "://" not in json.dumps(value)


def _of_machine(device: str | None, earlier: Job | None) -> str | None:
    """A GPU by its number in this machine, from its number among those that the earlier job saw; None if it is none."""
    match = GPU.fullmatch(device or "")
    visible = (earlier.command.environment.get(VISIBLE, "") if earlier else "").split(",")
    if match and int(match[1]) < len(visible) and visible[int(match[1])].isdecimal():
        return f"cuda:{visible[int(match[1])]}"
    return device if match else None


def planned(workspace: Workspace, form: Form) -> Command:
    """The command that predicts the memory of such a run."""
    _checked(workspace, form.changes, ())
    changes = {key: value for key, value in form.changes.items() if key != "train.output_dir"}
    size = ["--gpu-memory", f"{form.gpu_memory}B"] if form.gpu_memory else []
    return Command("qwen-train", ("plan", *_cache(changes), *_options(changes, COMMANDS["plan"]), *size, "--json"))


def encoding(workspace: Workspace, form: Form) -> Prepared:
    """The command that encodes the prompts of images to generate, on the first of the devices."""
    config = workspace.settings(form.changes)
    check_paths(workspace, config)
    changes = {key: value for key, value in form.changes.items() if key.startswith(OF_ENCODING)}
    before = workspace.settings().cache.reuse
    for name in (config.cache.path, config.validation_cache, *(set(config.cache.reuse) - set(before))):
        workspace.location(name)
    pipeline_of(workspace, config.model.path)
    path = changes.pop("cache.path", None)
    build, device = CACHE_COMMANDS["build"], form.devices[0] if form.devices else AUTO
    on = [part for key in ("cache.vae_device", "cache.text_device") for part in build.typed(key, device)]
    out = build.typed("cache.path", str(path)) if path else []
    arguments = ("build", "--only-validation", *out, *_options(changes, build, ["model.path"]), *on)
    return Prepared(Command("qwen-cache", arguments), (device,), config.validation_cache)


# ---- options ---------------------------------------------------------------------------------------------------------


def _cache(changes: Changes) -> list[str]:
    """The cache as an argument, if the form names one."""
    path = changes.get("cache.path")
    if not isinstance(path, str) or changes.get("train.caches"):
        return []
    return [f"./{path}" if path.startswith("-") else path]


def _options(changes: Changes, command: Declared, keys: Sequence[str] = ()) -> list[str]:
    """The changes as options, those that have one first; `keys`: the settings to look for, by default all but CACHE."""
    keys = keys or [each.key for each in command.settings.values() if each.key != "cache.path"]
    named = [key for key in keys if changes.get(key) is not None]
    others = {key: value for key, value in changes.items() if key not in named}
    if not changes.get("train.caches") and isinstance(others.get("cache.path"), str):
        del others["cache.path"]
    return [part for key in named for part in command.typed(key, str(changes[key]))] + options_of(others)


# ---- devices ---------------------------------------------------------------------------------------------------------


def on_devices(
    devices: Sequence[str], changes: Changes, decoder: str | None, has_gpus: bool
) -> tuple[dict[str, str], Changes, tuple[str, ...], int]:
    """The variables, the changes, the devices that are occupied, and the number of processes.

    `decoder` is the device that decodes images, by its number in this machine, as the user gave it.
    """
    chosen = list(dict.fromkeys(devices))
    gpus = [found[1] for each in chosen if (found := GPU.fullmatch(each))]
    if len(gpus) != len(chosen) and len(chosen) > 1:
        what, do = "a run trains on GPUs, or on one other device", "choose GPUs such as cuda:0, or cpu alone"
        raise ConfigError(what, where="devices", found=", ".join(chosen), do=do)
    if not gpus and any(NOT_FIRST.fullmatch(each) for each in chosen):
        what, do = "a run takes the first device of this kind", "choose that one, or start the run in a terminal"
        raise ConfigError(what, where="devices", found=chosen[0], do=do)
    if not gpus:
        hidden = {VISIBLE: ""} if chosen == [CPU] and has_gpus else {}
        return hidden, changes, tuple(chosen) or (AUTO,), 1
    match = GPU.fullmatch(decoder or "")
    number = match[1] if match else None
    visible = list(dict.fromkeys([*gpus, *([number] if number else [])]))
    if number:
        changes = {**changes, VAE_DEVICE: f"cuda:{visible.index(number)}"}
    return {VISIBLE: ",".join(visible)}, changes, tuple(f"cuda:{each}" for each in visible), len(gpus)


# ---- paths -----------------------------------------------------------------------------------------------------------


def check_paths(workspace: Workspace, config: Config) -> None:
    """RefusedError for a folder that a run would write, or data that it would read, outside the opened folders."""
    out = workspace.inside(config.train.output_dir)
    if out in (workspace.folder, *workspace.allowed) or STATE in out.relative_to(out.anchor).parts:
        raise ConfigError(
            "a run needs a folder of its own",
            where="train.output_dir",
            found=config.train.output_dir,
            do="name a folder inside, such as out",
        )
    check_written(workspace, config, out)
    check_read(workspace, config)


def check_written(workspace: Workspace, config: Config, out: Path) -> None:
    """An error for what a run writes besides its folder `out`; a folder for copies that qwen.yaml names is taken."""
    if not (out / LOGS / (config.logging.run_name or "")).resolve().is_relative_to(out):
        what, do = "the folder of this run's metrics is outside of its own", "give a name without .."
        raise ConfigError(what, where="logging.run_name", found=config.logging.run_name, do=do)
    copies = config.cache.local_copies
    if copies and copies != workspace.settings().cache.local_copies:
        workspace.inside(copies)


def check_read(workspace: Workspace, config: Config) -> None:
    """RefusedError for a cache, image or table of a run outside the opened folders; URLs are taken."""
    for name in _read(config):
        workspace.location(name)


def _read(config: Config) -> Iterator[str]:
    """The caches, images and tables of a run."""
    yield from (each.path for each in config.train.caches) if config.train.caches else (config.cache.path,)
    if config.validation.cache not in (None, NO_CACHE):
        yield config.validation_cache
    if config.validation.source:
        yield config.validation.source
    for prompt in config.validation.prompts:
        yield from prompt.control


# ---- routes ----------------------------------------------------------------------------------------------------------
# Routes of the Train page: the form, the plan, starting and resuming, and what a run's folder has.
#
# Every folder is given by its name and looked up in the opened ones; files in it are those of a run alone. Starting a
# run whose folder another job has or waits for is refused; one that was started elsewhere holds the folder's lock.

KIND = "train"
DECODE = "decode"
ENCODE = "build"
REPORTS = "/written/runs/"
KEPT_RUNS = 32  # whose metrics stay in memory, at 16 bytes a value
MOST_COMPARED = 12
HEAVIEST = 0.99999
"""The largest weight of the smoothed loss; 1 would never leave its first value."""
FITTING = re.compile(r"(?P<changes>\S+=\S+(?: \S+=\S+)*)(?: \((?P<size>[^)]+)\))?")


class Note(BaseModel, extra="forbid"):
    """A note on a run, in place of the one that the user has seen."""

    folder: str
    text: str
    seen: str


class Decoding(BaseModel):
    """Which latents are decoded, and where."""

    folder: str
    device: str = AUTO


class MetricsFiles:
    """The metrics of the runs that were looked at last."""

    def __init__(self) -> None:
        self._files: OrderedDict[Path, runs.MetricsFile] = OrderedDict()
        self._lock = Lock()

    def of(self, run: Path) -> runs.MetricsFile:
        """The metrics of this run, read up to now."""
        with self._lock:
            file = self._files.pop(run, None) or runs.MetricsFile(run / METRICS_NAME)
            self._files[run] = file
            while len(self._files) > KEPT_RUNS:
                self._files.popitem(last=False)
        file.look()
        return file


def routes_of(workspace: Workspace, queue: Queue, checks: Checks) -> APIRouter:
    router = router_of()
    _add_form(router, workspace, queue, checks)
    _add_jobs(router, workspace, queue)
    _add_runs(router, workspace)
    _add_images(router, workspace)
    return router


# ---- before a run ----------------------------------------------------------------------------------------------------


def _add_form(router: APIRouter, workspace: Workspace, queue: Queue, checks: Checks) -> None:
    @router.get("/api/train/places")
    def places() -> dict[str, Any]:
        """The caches that were found, and a free folder for a new run."""
        found, wanted = search.find(workspace), workspace.settings().train.output_dir
        return {
            "caches": [workspace.shown(each) for each in found.caches],
            "models": [workspace.shown(each) for each in found.models],
            "out": runs.new_name(workspace, wanted),
            "complete": found.is_complete,
        }

    @router.get("/api/train/controls")
    def controls() -> dict[str, Any]:
        """Images in the opened folder that a validation prompt can take as its controls."""
        return {"images": [workspace.shown(each) for each in search.find(workspace).images]}

    @router.get("/api/train/presets")
    def presets_of(model: str = "") -> list[dict[str, Any]]:
        """The presets for a model, by default that of qwen.yaml; those for all models if it is not known here."""
        with suppress(ConfigError):
            pipeline = pipeline_of(workspace, model or workspace.settings().model.path)
            return presets(family_of(pipeline.name) if pipeline else None)
        return presets(None)

    @router.post("/api/train/command")
    def command(form: Form) -> dict[str, Any]:
        """The command line of a new run; an error names the setting at fault."""
        return _shown(new_run(workspace, form, queue.list()))

    @router.post("/api/train/plan")
    def plan(form: Form) -> dict[str, Any]:
        """The answer of `qwen-train plan`, with the settings that would fit as changes; its error as a message."""
        asked = planned(workspace, form)
        checked = checks.check(asked, key="train-plan")
        document = checked.document if isinstance(checked.document, dict) else None
        fitting = []
        for text in (document or {}).get("do", []):
            if match := FITTING.fullmatch(text):  # settings, as `a.b=1 c.d=x (12 GB)`
                parts = (part.partition("=") for part in match["changes"].split())
                changes = {key: parse_yaml(value) for key, _, value in parts}
                fitting.append({"text": text, "changes": changes, "size": match["size"] or ""})
        return {
            "line": asked.line,
            "plan": document,
            "fitting": fitting,
            "message": "" if document else checked.message,
        }


def _shown(prepared: Prepared) -> dict[str, Any]:
    return {"line": prepared.command.line, "devices": prepared.devices, "folder": prepared.folder}


# ---- jobs ------------------------------------------------------------------------------------------------------------


def _add_jobs(router: APIRouter, workspace: Workspace, queue: Queue) -> None:
    adding = Lock()

    def add(prepared: Prepared, title: str) -> dict[str, Any]:
        name = workspace.shown(workspace.inside(prepared.folder))
        with adding:
            for job in queue.list():
                if job.kind == KIND and not job.is_ended and job.about.get("output_dir") == name:
                    state = "waits in the queue" if job.state == "queued" else "is running"
                    raise RefusedError(409, f"a run of {name} {state}", "wait for it, stop it, or name another folder")
            job = queue.add(title, KIND, prepared.command, prepared.devices, {"output_dir": name})
        return job.to_json()

    @router.post("/api/train/start")
    def start(form: Form) -> dict[str, Any]:
        """A new run, in the queue."""
        prepared = new_run(workspace, form, queue.list())
        return add(prepared, f"Train {prepared.folder}")

    @router.post("/api/train/encode")
    def encode(form: Form) -> dict[str, Any]:
        """The prompts of the form, encoded into the validation cache as a job."""
        prepared = encoding(workspace, form)
        return queue.add("Encode validation prompts", ENCODE, prepared.command, prepared.devices).to_json()

    @router.post("/api/train/resume/command")
    def resume_command(asked: Continued) -> dict[str, Any]:
        """The command line that continues a run."""
        return _shown(resumed(workspace, asked, queue.list()))

    @router.post("/api/train/resume")
    def resume(asked: Continued) -> dict[str, Any]:
        """A run that continues, in the queue."""
        prepared = resumed(workspace, asked, queue.list())
        return add(prepared, f"Resume {prepared.folder}")

    @router.get("/api/train/settings")
    def settings(folder: str) -> dict[str, Any]:
        """The form of a new run with the settings of this one."""
        run, jobs = runs.run_at(workspace, folder), queue.list()
        return settings_again(workspace, run, _earlier(jobs, workspace, folder))

    @router.post("/api/train/decode")
    def decode(asked: Decoding) -> dict[str, Any]:
        """The images of a run that are stored as latents, decoded as a job that waits for no other: without a device of
        its own it takes the CPU while a run or another job has one."""
        run = runs.run_at(workspace, asked.folder)
        name, device = workspace.shown(run), asked.device
        if device == AUTO and (runs.is_running(run) or any(it.devices and not it.is_ended for it in queue.list())):
            device = CPU
        command = Command("qwen-train", ("decode", name, f"--vae-device={device}"))
        devices, about = () if device == CPU else (device,), {"decoded": name, "device": device}
        return queue.add(f"Decode images of {name}", DECODE, command, devices, about).to_json()


def _earlier(jobs: Sequence[Job], workspace: Workspace, name: str) -> Job | None:
    """The newest job that has trained in this folder."""
    shown = workspace.shown(workspace.inside(name))
    of_run = [job for job in jobs if job.kind == KIND and job.about.get("output_dir") == shown]
    return max(of_run, key=lambda job: job.created, default=None)


# ---- what runs have written ------------------------------------------------------------------------------------------


def _add_runs(router: APIRouter, workspace: Workspace) -> None:
    files = MetricsFiles()

    def about(run: Path) -> dict[str, Any]:
        shown = runs.about(workspace, run)
        return shown | {"report": f"{REPORTS}{quote(shown['folder'])}" if (run / REPORT_NAME).is_file() else ""}

    @router.get(f"{REPORTS}{{name:path}}")
    def report(name: str) -> Response:
        """The page that a run has written."""
        return written_page(runs.run_at(workspace, name), REPORT_NAME, is_alone=True)

    @router.get("/api/train/runs")
    def all_runs() -> dict[str, Any]:
        """All runs that were found, the newest first."""
        found = search.find(workspace)
        shown = [about(each) for each in found.runs]
        return {"runs": sorted(shown, key=lambda run: -run["time"]), "complete": found.is_complete}

    @router.get("/api/train/curves")
    def curves(
        folder: str,
        smoothing: float | None = None,
        points: int = runs.POINTS,
        version: str = "",
        first: int = runs.WHOLE[0],
        last: int = runs.WHOLE[1],
    ) -> Mapping[str, Any]:
        """The curves of a run between two steps, unless they are those of this version; with its state."""
        run = runs.run_at(workspace, folder)
        file = files.of(run)
        state = about(run) | {"incomplete": file.is_incomplete}
        now = f"{file.version}-{smoothing}-{points}-{first}-{last}"
        if now == version:
            return {"version": now, "run": state}
        weight = None if smoothing is None else min(max(smoothing, 0.0), HEAVIEST)
        made = runs.curves(file, weight, min(max(points, 8), 20_000), (max(first, 0), min(last, runs.WHOLE[1])))
        return {"version": now, "run": state, **made}

    @router.get("/api/train/differences")
    def differences(folder: Annotated[list[str], Query()]) -> dict[str, Any]:
        """The settings that differ between these runs."""
        settings = {name: runs.settings_of(runs.run_at(workspace, name)) for name in folder[:MOST_COMPARED]}
        return {"runs": list(settings), "rows": runs.differing(settings)}

    @router.post("/api/train/note")
    def note(note: Note) -> dict[str, str]:
        """The note on a run, as it is now."""
        return {"note": runs.write_note(runs.run_at(workspace, note.folder), note.text, note.seen)}

    @router.get("/api/train/loras")
    def loras(folder: str) -> dict[str, Any]:
        """The LoRAs of a run that can be downloaded."""
        return {"loras": runs.loras(runs.run_at(workspace, folder))}

    @router.get("/api/train/lora", response_class=StreamingResponse)
    def lora(folder: str, step: int | None = None) -> StreamingResponse:
        """The file of a LoRA: that after a step, or that of the run's end."""
        run = runs.run_at(workspace, folder)
        size, parts = runs.lora(run, step)
        of_step = "end" if step is None else f"step-{step}"
        name = quote(f"{workspace.shown(run).strip('./').replace('/', '-')}-{of_step}.safetensors")
        headers = {"Content-Length": str(size), "Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        return StreamingResponse(parts, media_type="application/octet-stream", headers=headers)


def _add_images(router: APIRouter, workspace: Workspace) -> None:
    @router.get("/api/train/images")
    def listed(folder: str, version: str = "") -> dict[str, Any]:
        """The images of a run, unless they are those of this version."""
        run = runs.run_at(workspace, folder)
        settings = runs.settings_of(run)
        decoder, count = settings.get(VAE_DEVICE) or "", runs.images_at_a_time(run)
        now = " ".join((*runs.versions(run), f"{decoder} {count}"))
        if now == version:
            return {"version": now}
        begins_with_lora = settings.get("train.lora.weights") is not None
        more = {"decoder": decoder, "at_a_time": count, "begins_with_lora": begins_with_lora}
        return {"version": now, **runs.listed(run), **more}

    @router.get("/api/train/image", response_class=Response)
    def image(folder: str, path: str, size: int = 0, version: str = "") -> Response:
        """An image of a run, or a small copy with this longest side."""
        data = runs.read(runs.run_at(workspace, folder), path)
        kept = {"Cache-Control": "private, max-age=86400, immutable"} if version else {}
        if not size:
            return Response(data, media_type="image/png", headers=kept)
        least = min((each for each in runs.SIZES if each >= size), default=runs.SIZES[-1])
        return Response(runs.small(data, least), media_type="image/jpeg", headers=kept)
