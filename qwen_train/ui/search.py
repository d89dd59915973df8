"""Sources, caches, models, runs, LoRAs and images in the opened folders: one walk, a few folders deep, for all pages.

Nothing inside a cache, a model or a run is found but the LoRAs of a run; nothing hidden, nothing in a linked folder,
and of linked images those that lie in an opened folder. The folders that are looked into, the entries of each, and the
files that are looked at are bounded, whatever is found.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path

from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.models.folder import PIPELINE_INDEX
from qwen_cache.settings.load import CONFIG_NAME
from qwen_cache.sources.detect import ARCHIVES, METADATA_TABLES, SAVED
from qwen_cache.sources.layouts import CONTROL_FOLDERS, TARGET_FOLDERS
from qwen_cache.sources.places import IMAGE_EXTENSIONS, open_regular, suffix
from qwen_cache.sources.tables import READERS
from qwen_train.lora.files import WEIGHTS_NAME
from qwen_train.run import CHECKPOINT, METRICS_NAME
from qwen_train.ui.workspace import Workspace

DEPTH = 4  # levels of folders: runs/2026/cats/out
MOST_FOLDERS = 4000
MOST_ENTRIES = 20_000  # of a folder that are looked at: 10 ms
MOST_LOOKS = 200_000  # entries in all
MOST_FILES = 2000  # that are looked at: images, LoRAs
MOST_SOURCES = 50  # that are offered
SHOWN = 4  # images of a source that stand for it
LORA_FOLDERS = ("loras", "lora")
"""Folders whose .safetensors are offered as LoRAs, beside the opened folders themselves."""
ROLES = (*TARGET_FOLDERS, *CONTROL_FOLDERS)
"""Names of folders that are a part of a source."""


@dataclass(frozen=True)
class Folder:
    """A folder, what it is, and the names in it, in order."""

    path: Path
    depth: int
    """Below the opened folder."""
    kind: str
    """`run`, `cache`, `model`, or empty."""
    files: tuple[str, ...]
    links: tuple[str, ...]
    steps: tuple[int, ...]
    """The steps of the checkpoints in it."""
    is_whole: bool = True
    """False if there are more than the entries that were looked at."""

    @cached_property
    def images(self) -> list[str]:
        """The names of images, among them links."""
        return sorted(name for name in (*self.files, *self.links) if name.lower().endswith(IMAGE_EXTENSIONS))

    @cached_property
    def stems(self) -> set[str]:
        """The names of images without their endings."""
        return {name.rpartition(".")[0] for name in self.images}

    @property
    def is_source(self) -> bool:
        """True if a table or tars in it make it one source."""
        names = {*self.files}
        return bool(names & {*METADATA_TABLES, SAVED}) or any(suffix(Path(name)) in ARCHIVES for name in names)


@dataclass(frozen=True)
class Source:
    """A likely source."""

    path: Path
    images: int = 0
    """How many were seen; 0 for tables and tars."""
    is_whole: bool = True
    """False if there may be more images."""
    first: tuple[Path, ...] = ()
    """A few of the images."""


@dataclass(frozen=True)
class Lora:
    """A LoRA, by the path that `--lora` takes: a file, or the folder of a run or of its checkpoint."""

    path: Path
    changed: float
    run: Path | None = None
    step: int | None = None
    """None for the LoRA of a run's end, and for one of no run."""


@dataclass(frozen=True)
class Found:
    """The folders that were looked into, the nearest first."""

    workspace: Workspace
    folders: tuple[Folder, ...]
    is_complete: bool
    """True if everything was looked at."""

    @cached_property
    def caches(self) -> list[Path]:
        return self._of_kind("cache")

    @cached_property
    def models(self) -> list[Path]:
        return self._of_kind("model")

    @cached_property
    def runs(self) -> list[Path]:
        return self._of_kind("run")

    def _of_kind(self, kind: str) -> list[Path]:
        return [each.path for each in self.folders if each.kind == kind]

    @cached_property
    def images(self) -> list[Path]:
        """The images that `build` and `predict` read, among the first `MOST_FILES`."""
        named = ((each, name) for each in self.folders if not each.kind for name in each.images)
        return [
            folder.path / name
            for folder, name in islice(named, MOST_FILES)
            if name not in folder.links or self.workspace.is_inside(folder.path / name)
        ]

    @cached_property
    def loras(self) -> list[Lora]:
        """The LoRAs of runs, the newest run and step first, then other files; at most `MOST_FILES` are looked at."""
        left, of_runs, others = MOST_FILES, list[list[Lora]](), list[Lora]()
        for folder in self.folders:
            is_run = folder.steps or WEIGHTS_NAME in folder.files
            is_of_loras = not folder.kind and (folder.depth == 0 or folder.path.name in LORA_FOLDERS)
            names = [name for name in folder.files if name.lower().endswith(".safetensors")] if is_of_loras else []
            if is_run:
                of_runs.append(loras_of(folder.path, folder.steps[-left:] if left else ()))
                left = max(0, left - len(folder.steps) - 1)
            for name in names[:left] if not is_run else ():
                left -= 1
                others += [Lora(folder.path / name, changed) for changed in _changed(folder.path / name)]
        of_runs.sort(key=lambda loras: -max((each.changed for each in loras), default=0.0))
        return [*(lora for loras in of_runs for lora in loras), *others]

    @cached_property
    def sources(self) -> list[Source]:
        """Likely sources by name, at most `MOST_SOURCES`.

        Folders beside each other with images of the same names are one source, the folder that they are in.
        """
        unknown = [each for each in self.folders if not each.kind]
        parts, stems = dict[Path, list[Folder]](), dict[Path, Counter[str]]()
        for folder in unknown:
            stems.setdefault(folder.path.parent, Counter()).update(folder.stems)
        for folder in unknown:
            above = [folder.path, *folder.path.parents][: folder.depth]
            roles = [each.parent for each in above if each.name in ROLES]
            beside = stems[folder.path.parent]
            has_twin = folder.depth and any(beside[stem] > 1 for stem in folder.stems)
            source = roles[-1] if roles else folder.path.parent if has_twin else folder.path
            if folder.images:
                parts.setdefault(source, []).append(folder)
        found = {path: self._source(path, folders) for path, folders in parts.items()}
        near = [each for each in unknown if each.depth <= 1 and each.path not in found]
        of_tables = [each for each in near if each.depth and each.is_source]
        found |= {each.path: Source(each.path) for each in of_tables}
        tables = (each.path / name for each in near if each not in of_tables for name in each.files if _may_list(name))
        found |= {path: Source(path) for path in islice(tables, MOST_FILES) if _is_table(path)}
        return [found[path] for path in sorted(found)[:MOST_SOURCES]]

    def _source(self, path: Path, folders: Sequence[Folder]) -> Source:
        """The source of these folders, with the first images of targets, if they have a known name."""
        shown = sorted(folders, key=lambda each: each.path.name in CONTROL_FOLDERS)[0]
        named = (name for name in shown.images[:SHOWN] if name not in shown.links)
        first = tuple(shown.path / name for name in named)
        return Source(path, sum(len(each.images) for each in folders), all(each.is_whole for each in folders), first)


def find(workspace: Workspace) -> Found:
    """All that is in the opened folders."""
    waiting, found, left = [(each, 0) for each in (workspace.folder, *workspace.allowed)], list[Folder](), MOST_LOOKS
    while waiting and left and len(found) < MOST_FOLDERS:
        path, depth = waiting.pop(0)
        folder, inner, looks = _folder(path, depth, min(left, MOST_ENTRIES))
        found.append(folder)
        left -= looks
        if depth < DEPTH and not folder.kind:
            waiting += [(path / name, depth + 1) for name in sorted(inner)]
    return Found(workspace, tuple(found), not waiting and all(each.is_whole for each in found))


def loras_of(run: Path, steps: Sequence[int]) -> list[Lora]:
    """The LoRAs of the run in a folder and of the checkpoints of these steps, which ascend; the newest first.

    That of its end is the newest, unless the run was resumed since.
    """
    of_steps = [
        Lora(folder, changed, run, step)
        for step in reversed(steps)
        for folder in [run / f"checkpoint-{step}"]
        for changed in _changed(folder / WEIGHTS_NAME)
    ]
    of_end = [Lora(run, changed, run) for changed in _changed(run / WEIGHTS_NAME)]
    is_newest = not of_steps or (of_end and of_end[0].changed >= of_steps[0].changed)
    return [*of_end, *of_steps] if is_newest else [*of_steps, *of_end]


def steps_of_checkpoints(folder: Path) -> list[int]:
    """The steps from which the run in a folder can be resumed, in ascending order."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(int(match[1]) for it in entries if (match := CHECKPOINT.fullmatch(it.name)) and it.is_dir())
    return []


def _changed(file: Path) -> list[float]:
    """The time of a file's last change; none if there is no such file."""
    with suppress(OSError):
        return [file.stat().st_mtime] if file.is_file() else []
    return []


def _folder(path: Path, depth: int, most: int) -> tuple[Folder, list[str], int]:
    """A folder by at most `most` of its entries, the folders in it, and how many entries that were."""
    inner, files, links, steps, looks = list[str](), list[str](), set[str](), list[int](), 0
    is_whole = True
    with suppress(OSError), os.scandir(path) as entries:
        for each in entries:
            if looks == most:
                is_whole = False
                break
            looks += 1
            if each.is_dir(follow_symlinks=False):
                if match := CHECKPOINT.fullmatch(each.name):
                    steps.append(int(match[1]))
                elif each.name[0] != ".":
                    inner.append(each.name)
            elif each.is_file(follow_symlinks=False):
                files.append(each.name)
            else:
                links.add(each.name)
    kind = _kind(path, {*files}, links)
    names = tuple(sorted(files)), tuple(sorted(links)), tuple(sorted(steps))
    return Folder(path, depth, kind, *names, is_whole), inner, looks


def _kind(path: Path, files: set[str], links: set[str]) -> str:
    """A run's files are its own; those of a cache or model may be links, as the hub's local cache has them."""
    if {METRICS_NAME, CONFIG_NAME} <= files:
        return "run"
    linked = {name for name in (MANIFEST_NAME, PIPELINE_INDEX) if name in links and (path / name).is_file()}
    if MANIFEST_NAME in files | linked:
        return "cache"
    return "model" if PIPELINE_INDEX in files | linked else ""


def _may_list(name: str) -> bool:
    return suffix(Path(name)) in (*READERS, *ARCHIVES)


def _is_table(path: Path) -> bool:
    """True if it may be one: other files of JSON are no lists."""
    if suffix(path) != ".json":
        return True
    try:
        with open_regular(path) as file:
            return file.read(100).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    except OSError:
        return False
