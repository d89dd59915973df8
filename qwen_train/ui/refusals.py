"""Commands that are known to fail, refused before they wait in the queue: no source, no cache, no model, no LoRA.

Each refusal is the command's own, with the setting or field at fault as its place. What only the command can know is
left to it: repositories on the hub, caches behind addresses, and those that a job before will have built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, ModelError, QwenCacheError
from qwen_cache.format.directory import no_manifest
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.family import PIPELINES, Pipeline
from qwen_cache.models.folder import check_name, find_here, open_model
from qwen_cache.models.recorded import recorded_model
from qwen_cache.settings.load import Config
from qwen_cache.sources.detect import check_exists
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_train.ui.job import Job
from qwen_train.ui.workspace import Workspace

MODEL = "model.path"
NAME_A_MODEL = (
    "name a diffusers folder or a repository on the hub: Model on the pages Build, Train and Generate, "
    "or model.path in qwen.yaml"
)


@contextmanager
def told_at(key: str, found: object = None, kind: type[QwenCacheError] = QwenCacheError) -> Iterator[None]:
    """Errors of this kind in the block, as ConfigErrors at the field `key`, in which `found` is."""
    try:
        yield
    except kind as error:
        found = error.found or found or error.where
        raise ConfigError(error.what, where=key, expected=error.expected, found=found, do=error.do) from None


def check_source(workspace: Workspace, name: str) -> None:
    """ConfigError if no source is named, or there is none of this name."""
    if not name:
        do = "name a folder of images, a table or tars; Data shows what is in this folder"
        raise ConfigError("no source is named", where="data.source", do=do)
    with told_at("data.source", name):
        check_exists(_place(workspace, name))


def check_cache(workspace: Workspace, name: str, key: str, jobs: Sequence[Job] = ()) -> Path | None:
    """The folder of a cache; None for one behind an address, or one that a build among the `jobs` writes.

    ConfigError at `key` if there is none.
    """
    with told_at(key, name):
        place = _place(workspace, name)
        if is_remote(place):
            return None
        if (place / MANIFEST_NAME).is_file():
            return place
        builds = (job.about.get("cache") for job in jobs if job.kind == "build" and not job.is_ended)
        if any(isinstance(built, str) and (workspace.folder / built).resolve() == place for built in builds):
            return None
        raise no_manifest(place)


def _place(workspace: Workspace, name: str) -> Location:
    """The place of a source or cache, wherever it is: whether a page may name it was asked before."""
    place = location(name)
    return place if is_remote(place) else (workspace.folder / place).resolve()


def pipeline_of(workspace: Workspace, name: str | None) -> Pipeline | None:
    """The pipeline of a model, as far as it is known without opening the hub; ConfigError if there is no such model."""
    folder = workspace.folder / (name or "")
    if not name:
        raise ConfigError("no model is named", where=MODEL, do=NAME_A_MODEL)
    with told_at(MODEL, name):
        if folder.is_dir():
            return open_model(str(folder), ()).facts
        check_name(name)
    return next((each for each in PIPELINES.values() if name in each.models), None)


def check_model_of(workspace: Workspace, name: str | None, folders: Sequence[Path | None]) -> None:
    """ConfigError unless a model is named, or recorded in one of these folders; None is one that is not known yet."""
    if name is not None:
        pipeline_of(workspace, name)
    elif None not in folders:
        recorded = [path for folder in folders if folder and (path := recorded_model(folder).get("path"))]
        pipeline_of(workspace, recorded[0] if recorded else None)


def check_training(workspace: Workspace, config: Config, jobs: Sequence[Job]) -> None:
    """ConfigError for a run without its caches or without a model."""
    listed = config.train.caches
    named = [("train.caches", each.path) for each in listed] if listed else [("cache.path", config.cache.path)]
    folders: list[Path | None] = [None]
    if not config.train.follow:  # which waits for them
        folders = [check_cache(workspace, name, key, jobs) for key, name in named]
    check_model_of(workspace, config.model.path, folders)


def is_model_here(workspace: Workspace, name: Any) -> bool:
    """True if a model that somebody else may have named is on this machine, so that nothing is downloaded for it."""
    if not isinstance(name, str) or not name:
        return False
    with suppress(ModelError):
        return find_here(str(workspace.folder / name) if (workspace.folder / name).is_dir() else name, ()) is not None
    return False
