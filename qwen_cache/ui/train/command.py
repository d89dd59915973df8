"""The command line of a run from what the form has: checked by the settings' own code, and only inside opened folders.

The chosen GPUs become CUDA_VISIBLE_DEVICES, several of them one process each. A device that decodes images is one more
of the visible ones, so its number changes with them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.settings.sections import NO_CACHE
from qwen_cache.ui.jobs.command import Command
from qwen_cache.ui.jobs.job import Job
from qwen_cache.ui.settings import Changes, options_of
from qwen_cache.ui.train.folders import run_at
from qwen_cache.ui.workspace import STATE, Workspace, given

OPTIONS = {
    "model.path": "--model",
    "model.transformer": "--transformer",
    "train.max_steps": "--max-steps",
    "optimizer.learning_rate": "--learning-rate",
    "train.lora.rank": "--rank",
    "train.batch_size": "--batch-size",
    "train.output_dir": "--out",
}
"""The options of `qwen-train run` that override a setting; all others are changed with --set."""
OF_PLAN = ("model.path", "model.transformer")
"""Those that `qwen-train plan` has too."""
OF_ENCODING = ("cache.", "model.", "validation.prompts", "validation.source", "validation.cache")
CPU = "cpu"
AUTO = "auto"
GPU = re.compile(r"cuda:(\d{1,3})")
NOT_FIRST = re.compile(r"[a-z]+:0*[1-9]\d*")
"""A device that is not the first of its kind: a run takes the first one, and only GPUs of CUDA are hidden here."""
VISIBLE = "CUDA_VISIBLE_DEVICES"
VAE_DEVICE = "validation.vae_device"
LOGS = "logs"  # of TensorBoard, in the folder of a run


class Form(BaseModel):
    """What the form of a new run has."""

    changes: Changes = {}
    """By dotted name, among them cache.path, model.path and train.output_dir."""
    devices: list[str] = []
    """cpu, or GPUs such as cuda:0; none: as the command chooses."""
    gpu_memory: int | None = None
    """Bytes, for the plan."""
    has_gpus: bool = False
    """Whether this machine has GPUs, which are then hidden from a run on the CPU."""


class Continued(BaseModel):
    """What is asked for a run that continues."""

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


def new_run(workspace: Workspace, form: Form) -> Prepared:
    """The command of a new run; ConfigError names the setting at fault, RefusedError a path outside."""
    config = workspace.settings(form.changes)
    check_paths(workspace, config)
    decoder = config.validation.vae_device
    environment, changes, devices, processes = on_devices(form.devices, form.changes, decoder, form.has_gpus)
    arguments = ["run", *_cache(changes), *_options(changes, tuple(OPTIONS))]
    command = Command("qwen-train", tuple(arguments), environment, processes)
    return Prepared(command, devices, config.train.output_dir)


def resumed(workspace: Workspace, asked: Continued, earlier: Job | None) -> Prepared:
    """The command that continues a run with its own settings and these changes, where `earlier` ran unless told."""
    run = run_at(workspace, asked.folder)
    changes = {key: value for key, value in asked.changes.items() if key != "train.output_dir"}
    config = load_config(run / CONFIG_NAME, (), given(changes))
    arguments = ["run", "--resume", *_given("--out", workspace.shown(run))]
    check_written(workspace, config, run)
    check_read(workspace, config)
    if earlier and not asked.devices:
        environment, devices, processes = earlier.command.environment, earlier.devices, earlier.command.processes
    else:
        if VAE_DEVICE not in changes and (decoder := _of_machine(config.validation.vae_device, earlier)):
            changes[VAE_DEVICE] = decoder
        environment, changes, devices, processes = on_devices(
            asked.devices, changes, changes.get(VAE_DEVICE), asked.has_gpus
        )
    arguments += [*_cache(changes), *_options(changes, tuple(OPTIONS))]
    return Prepared(Command("qwen-train", tuple(arguments), environment, processes), devices, workspace.shown(run))


def _of_machine(device: str | None, earlier: Job | None) -> str | None:
    """A GPU by its number in this machine, from its number among those that the earlier job saw; None if it is none."""
    match = GPU.fullmatch(device or "")
    visible = (earlier.command.environment.get(VISIBLE, "") if earlier else "").split(",")
    if match and int(match[1]) < len(visible) and visible[int(match[1])].isdecimal():
        return f"cuda:{visible[int(match[1])]}"
    return device if match else None


def planned(workspace: Workspace, form: Form) -> Command:
    """The command that predicts the memory of such a run."""
    check_paths(workspace, workspace.settings(form.changes))
    changes = {key: value for key, value in form.changes.items() if key != "train.output_dir"}
    size = ["--gpu-memory", f"{form.gpu_memory}B"] if form.gpu_memory else []
    return Command("qwen-train", ("plan", *_cache(changes), *_options(changes, OF_PLAN), *size, "--json"))


def encoding(workspace: Workspace, form: Form) -> Prepared:
    """The command that encodes the prompts of images to generate, on the first of the devices."""
    config = workspace.settings(form.changes)
    check_paths(workspace, config)
    changes = {key: value for key, value in form.changes.items() if key.startswith(OF_ENCODING)}
    before = workspace.settings().cache.reuse
    for name in (config.cache.path, config.validation_cache, *(set(config.cache.reuse) - set(before))):
        workspace.location(name)
    path = changes.pop("cache.path", None)
    device = form.devices[0] if form.devices else AUTO
    on = [part for option in ("--vae-device", "--text-device") for part in (option, device)]
    out = _given("--out", str(path)) if path else []
    arguments = ("build", "--only-validation", *out, *_options(changes, ("model.path",)), *on)
    return Prepared(Command("qwen-cache", arguments), (device,), config.validation_cache)


# ---- options ---------------------------------------------------------------------------------------------------------


def _cache(changes: Changes) -> list[str]:
    """The cache as an argument, if the form names one."""
    path = changes.get("cache.path")
    if not isinstance(path, str) or changes.get("train.caches"):
        return []
    return [f"./{path}" if path.startswith("-") else path]


def _options(changes: Changes, known: Sequence[str]) -> list[str]:
    """The changes as options, those that have one first."""
    is_cached = not changes.get("train.caches")
    named = {key for key in known if changes.get(key) is not None}
    others = {key: value for key, value in changes.items() if key not in named}
    if is_cached and isinstance(others.get("cache.path"), str):
        del others["cache.path"]
    made = [part for key in known if key in named for part in _given(OPTIONS[key], str(changes[key]))]
    return made + options_of(others)


def _given(option: str, value: str) -> list[str]:
    return [f"{option}={value}"] if value.startswith("-") else [option, value]


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
