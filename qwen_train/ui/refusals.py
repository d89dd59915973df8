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
from qwen_cache.models.folder import check_name, find_here, open_model, read_config
from qwen_cache.models.recorded import recorded_model
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.load import Config
from qwen_cache.sources.detect import check_exists
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_train.model.combinations import check_offload
from qwen_train.ui.job import Job
from qwen_train.ui.workspace import Changes, Workspace

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


class Together:
    """Checks that do not depend on one another: the first ConfigError is raised at the end, with the `others`."""

    def __init__(self) -> None:
        self.found: list[ConfigError] = []

    @contextmanager
    def one(self) -> Iterator[None]:
        """A check, whose ConfigError ends the block alone; a path that is refused is told if nothing else is wrong."""
        try:
            yield
        except RefusedError:
            if not self.found:
                raise
        except ConfigError as error:
            self.found += [error, *error.others]

    def end(self) -> None:
        """ConfigError if a check has found one."""
        if self.found:
            first, *others = self.found
            first.others = tuple(others)
            raise first


def settings_of(workspace: Workspace, changes: Changes, checks: Together) -> Config:
    """The settings with these changes; with those alone that are right if some are wrong, which `checks` notes.

    ConfigError if they are wrong without the changes.
    """
    with checks.one():
        return workspace.settings(changes)
    wrong = {str(each.where) for each in checks.found}
    return workspace.settings({key: value for key, value in changes.items() if key not in wrong})


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


def check_model_of(workspace: Workspace, name: str | None, folders: Sequence[Path | None]) -> str | None:
    """The model that is named, or recorded in one of these folders; None is one that is not known yet.

    ConfigError if there is none.
    """
    if name is None and None in folders:
        return None
    recorded = (path for folder in folders if folder and (path := recorded_model(folder).get("path")))
    model = name if name is not None else next(recorded, None)
    pipeline_of(workspace, model)
    return model


def check_training(workspace: Workspace, config: Config, jobs: Sequence[Job]) -> None:
    """ConfigError for a run without its caches, without a model, or that offloads what its model does not have."""
    listed, checks = config.train.caches, Together()
    named = [("train.caches", each.path) for each in listed] if listed else [("cache.path", config.cache.path)]
    folders: list[Path | None] = [None]
    if not config.train.follow:  # which waits for them
        with checks.one():
            folders = [check_cache(workspace, name, key, jobs) for key, name in named]
    with checks.one():
        model = check_model_of(workspace, config.model.path, folders)
        check_offloading(workspace, config, model)
    checks.end()


def check_offloading(workspace: Workspace, config: Config, model: str | None) -> None:
    """ConfigError if more blocks are offloaded than the model has, as far as its transformer is on this machine."""
    if not (config.train.offload_blocks and model):
        return
    folder = workspace.folder / model
    found = find_here(str(folder) if folder.is_dir() else model, ())
    file = found / "transformer" / "config.json" if found else None
    if file and file.is_file():
        with told_at(MODEL):
            transformer = read_config(file)
        with told_at("train.offload_blocks"):
            check_offload(config, transformer)


def is_model_here(workspace: Workspace, name: Any) -> bool:
    """True if a model that somebody else may have named is on this machine, so that nothing is downloaded for it."""
    if not isinstance(name, str) or not name:
        return False
    with suppress(ModelError):
        return find_here(str(workspace.folder / name) if (workspace.folder / name).is_dir() else name, ()) is not None
    return False
