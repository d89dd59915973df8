"""Caches, models, runs, LoRAs and images in the opened folders: one walk, a few folders deep, for all pages.

Nothing inside a cache, a model or a run is found but the LoRA of a run; nothing hidden, nothing in a linked folder, and
of linked images those that lie in an opened folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.folder import PIPELINE_INDEX
from qwen_cache.settings.load import CONFIG_NAME
from qwen_cache.sources.places import IMAGE_EXTENSIONS
from qwen_train.inference.images import FINAL
from qwen_train.lora.files import WEIGHTS_NAME
from qwen_train.run import CHECKPOINT, METRICS_NAME
from qwen_train.ui.workspace import Workspace

DEPTH = 4  # levels of folders: runs/2026/cats/out
MOST_FOLDERS = 4000
MOST_FILES = 2000  # images that are offered, and LoRAs
LORA_FOLDERS = ("loras", "lora")
"""Folders whose .safetensors are offered as LoRAs, beside the opened folders themselves."""


@dataclass(frozen=True)
class Folder:
    """A folder, what it is, and the names in it, in order."""

    path: Path
    kind: str
    """`run`, `cache`, `model`, or empty."""
    files: tuple[str, ...]
    links: tuple[str, ...]


@dataclass(frozen=True)
class Found:
    """Folders that were found, the nearest first."""

    caches: tuple[Path, ...]
    models: tuple[Path, ...]
    runs: tuple[Path, ...]
    is_complete: bool
    """True if all folders were looked at."""


def find(workspace: Workspace) -> Found:
    """The caches, models and runs in the opened folders."""
    looked = list(_folders(workspace))
    of_kind = {kind: tuple(each.path for each in looked if each.kind == kind) for kind in ("cache", "model", "run")}
    return Found(of_kind["cache"], of_kind["model"], of_kind["run"], len(looked) < MOST_FOLDERS)


def images(workspace: Workspace) -> list[Path]:
    """The images in the opened folders that `build` and `predict` read; at most `MOST_FILES`."""
    found = (
        folder.path / name
        for folder in _folders(workspace)
        if not folder.kind
        for name in sorted((*folder.files, *folder.links))
        if name.lower().endswith(IMAGE_EXTENSIONS)
        and (name not in folder.links or workspace.is_inside(folder.path / name))
    )
    return list(islice(found, MOST_FILES))


def loras(workspace: Workspace) -> list[dict[str, Any]]:
    """LoRAs as JSON: path, and of a run's folder its checkpoints, `final` last; at most `MOST_FILES`."""
    return list(islice(_loras(workspace), MOST_FILES))


def _loras(workspace: Workspace) -> Iterator[dict[str, Any]]:
    opened = (workspace.folder, *workspace.allowed)
    for folder in _folders(workspace):
        if WEIGHTS_NAME in folder.files:
            yield {"path": workspace.shown(folder.path), "checkpoints": [*steps_of_checkpoints(folder.path), FINAL]}
        elif not folder.kind and (folder.path in opened or folder.path.name in LORA_FOLDERS):
            single = (name for name in folder.files if name.lower().endswith(".safetensors"))
            yield from ({"path": workspace.shown(folder.path / name), "checkpoints": []} for name in single)


def steps_of_checkpoints(folder: Path) -> list[int]:
    """The steps from which the run in a folder can be resumed, in ascending order."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(int(match[1]) for it in entries if (match := CHECKPOINT.fullmatch(it.name)) and it.is_dir())
    return []


def _folders(workspace: Workspace) -> Iterator[Folder]:
    waiting, seen = [(each, DEPTH) for each in (workspace.folder, *workspace.allowed)], 0
    while waiting and seen < MOST_FOLDERS:
        (path, depth), seen = waiting.pop(0), seen + 1
        inner, files, links = list[str](), list[str](), set[str]()
        with suppress(OSError), os.scandir(path) as entries:
            for each in entries:
                if each.is_dir(follow_symlinks=False):
                    inner += [each.name] if each.name[0] != "." and not CHECKPOINT.fullmatch(each.name) else []
                elif each.is_file(follow_symlinks=False):
                    files.append(each.name)
                else:
                    links.add(each.name)
        folder = Folder(path, _kind(path, {*files}, links), tuple(sorted(files)), tuple(sorted(links)))
        yield folder
        if depth and not folder.kind:
            waiting += [(path / name, depth - 1) for name in sorted(inner)]


def _kind(path: Path, files: set[str], links: set[str]) -> str:
    """A run's files are its own; those of a cache or model may be links, as the hub's local cache has them."""
    if {METRICS_NAME, CONFIG_NAME} <= files:
        return "run"
    linked = {name for name in (MANIFEST_NAME, PIPELINE_INDEX) if name in links and (path / name).is_file()}
    if MANIFEST_NAME in files | linked:
        return "cache"
    return "model" if PIPELINE_INDEX in files | linked else ""
