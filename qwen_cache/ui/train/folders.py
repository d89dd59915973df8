"""The caches, models and runs in the opened folders, found by their files without opening more than these.

Looked for is a few folders deep, not through links, and not inside a cache or a run. A run is a folder with its
settings and metrics; whether it is running, its lock says.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import CONFIG_NAME, read_yaml
from qwen_cache.storage.files import WINDOWS, is_link, open_file
from qwen_cache.ui.train import metrics
from qwen_cache.ui.workspace import Workspace

DEPTH = 4  # levels of folders: runs/2026/cats/out
MOST_FOLDERS = 4000
KEPT_SETTINGS = 512  # runs; 10 kB each
LOCK = ".lock"
REPORT = "report.html"
MODEL_INDEX = "model_index.json"
TAIL = 1 << 16  # bytes at the end of metrics.jsonl: the newest 200 lines
HOLDER = re.compile(r"process (\d+) on (.*)")
CHECKPOINT = re.compile(r"checkpoint-(\d+)")


@dataclass(frozen=True)
class Places:
    """What was found."""

    caches: tuple[Path, ...]
    models: tuple[Path, ...]
    runs: tuple[Path, ...]
    is_complete: bool
    """Whether all folders were looked at."""


def find(workspace: Workspace) -> Places:
    """The caches, models and runs in the opened folders, by their names."""
    found: dict[str, dict[Path, None]] = {"cache": {}, "model": {}, "run": {}, "": {}}
    looked = 0
    for folder, kind in _folders(workspace):
        looked += 1
        found[kind][folder] = None
    return Places(tuple(found["cache"]), tuple(found["model"]), tuple(found["run"]), looked < MOST_FOLDERS)


def images(workspace: Workspace, suffixes: tuple[str, ...], most: int) -> list[Path]:
    """Files with these suffixes in the opened folders, not in a run, model or cache; at most `most`."""
    found: list[Path] = []
    for folder, kind in _folders(workspace):
        if len(found) >= most:
            break
        if not kind:
            with suppress(OSError), os.scandir(folder) as entries:
                names = sorted(it.name for it in entries if it.is_file(follow_symlinks=False))
            found += [folder / name for name in names if name.lower().endswith(suffixes)]
    return found[:most]


def _folders(workspace: Workspace) -> Iterator[tuple[Path, str]]:
    """Folders and what they are: nothing inside a cache, model or run, nothing hidden, no links."""
    waiting, seen = [(each, DEPTH) for each in (workspace.folder, *workspace.allowed)], 0
    while waiting and seen < MOST_FOLDERS:
        (folder, depth), seen = waiting.pop(0), seen + 1
        kind = kind_of(folder)
        yield folder, kind
        if not depth or kind:
            continue
        with suppress(OSError), os.scandir(folder) as entries:
            inner = sorted(it.name for it in entries if it.is_dir(follow_symlinks=False) and it.name[0] != ".")
            waiting += [(folder / name, depth - 1) for name in inner]


def kind_of(folder: Path) -> str:
    """What a folder holds: a `run`, `cache` or `model`, or none of these."""
    if is_run(folder):
        return "run"
    if (folder / MANIFEST_NAME).is_file():
        return "cache"
    return "model" if (folder / MODEL_INDEX).is_file() else ""


def is_run(folder: Path) -> bool:
    """Whether a run has written to the folder: its files, not links to files elsewhere."""
    return all((folder / name).is_file() and not is_link(folder / name) for name in (metrics.NAME, CONFIG_NAME))


def run_at(workspace: Workspace, name: str) -> Path:
    """The folder of a run in the opened folders; RefusedError if it is none."""
    folder = workspace.inside(name)
    if not is_run(folder):
        raise RefusedError(404, f"{name} is not the folder of a run", "choose another run")
    return folder


def new_name(workspace: Workspace, wanted: str) -> str:
    """A folder for a new run: this one, or with the first number that is free."""
    name = re.sub(r"-\d+$", "", wanted) if (workspace.folder / wanted).exists() else wanted
    for number in range(1, 10_000):
        free = name if number == 1 else f"{name}-{number}"
        if not (workspace.folder / free).exists():
            return free
    return name


# ---- one run ---------------------------------------------------------------------------------------------------------


def about(workspace: Workspace, folder: Path) -> dict[str, Any]:
    """What the list of runs shows, as JSON."""
    values, last = settings_of(folder), newest(folder)
    checkpoints = steps_of_checkpoints(folder)
    maximum = values.get("train.max_steps", 1000)
    return {
        "folder": workspace.shown(folder),
        "running": is_running(folder),
        "step": last.get("step", 0),
        "max_steps": maximum if type(maximum) is int else None,
        "loss": _finite(last.get("loss")),
        "time": _finite(last.get("time")) or (folder / metrics.NAME).stat().st_mtime,
        "seconds": _finite(last.get("elapsed_seconds")),
        "checkpoint": max(checkpoints, default=None),
        "model": values.get("model.path"),
    }


def newest(folder: Path) -> dict[str, float]:
    """The values of the last whole line of the metrics; {} without one."""
    with suppress(OSError), open(open_file(folder / metrics.NAME, follow_links=False), "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
        for line in reversed(file.read().split(b"\n")[:-1]):
            if (values := metrics.parsed(line)) is not None:
                return values
    return {}


def steps_of_checkpoints(folder: Path) -> list[int]:
    """The steps from which the run can be resumed."""
    with suppress(OSError), os.scandir(folder) as entries:
        return sorted(int(match[1]) for it in entries if (match := CHECKPOINT.fullmatch(it.name)) and it.is_dir())
    return []


def is_running(folder: Path) -> bool:
    """Whether the process that is named in the run's lock exists; the lock itself is left alone, a run may want it."""
    try:
        with open(open_file(folder / LOCK, follow_links=False), "rb") as file:
            file.seek(1)  # Windows lets nobody else read the first byte of a lock
            match = HOLDER.search(file.read(1 << 12).decode("utf-8", "replace"))
    except OSError:
        return False
    if match is None or match[2].strip() != socket.gethostname():
        return match is not None  # of another machine only the file is seen; a run removes it at its end
    return _exists(int(match[1]))


def _exists(process: int) -> bool:
    if WINDOWS:  # os.kill would send it Ctrl-C
        return True
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:  # of another user
        return True
    return True


def _finite(value: float | None) -> float | None:
    return None if value is None or not abs(value) <= metrics.LARGEST else value


# ---- settings --------------------------------------------------------------------------------------------------------


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings that a run saved, by their dotted names; {} if its file cannot be read."""
    with suppress(ConfigError, OSError):
        file = folder / CONFIG_NAME
        stat = file.stat()
        return dict(_settings_in(file, stat.st_mtime_ns, stat.st_size))
    return {}


@lru_cache(KEPT_SETTINGS)
def _settings_in(file: Path, changed: int, size: int) -> dict[str, Any]:
    """`settings_of`, kept until the file changes: the list of runs asks for all of them every few seconds."""
    value = read_yaml(file)
    return flat(value, known_settings()) if isinstance(value, dict) else {}


@cache
def known_settings() -> frozenset[str]:
    """The dotted names of all settings."""
    return frozenset(each.key for each in all_settings())


def flat(value: Mapping[Any, Any], known: frozenset[str], prefix: str = "") -> dict[str, Any]:
    """Nested settings by their dotted names: a mapping that is the value of a known setting stays whole."""
    made: dict[str, Any] = {}
    for name, inner in value.items():
        key = f"{prefix}{name}"
        if isinstance(inner, dict) and key not in known:
            made |= flat(inner, known, f"{key}.")
        else:
            made[key] = inner
    return made


OF_EVERY_RUN = ("train.output_dir",)
"""Settings that differ between any two runs."""


def differing(runs: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The settings that differ between the runs: key, and each run's value as text, None where it has none."""
    keys = dict.fromkeys(key for settings in runs.values() for key in settings)
    rows = []
    for key in keys:
        texts = [_text(settings[key]) if key in settings else None for settings in runs.values()]
        if key not in OF_EVERY_RUN and len(set(texts)) > 1:
            rows.append({"key": key, "values": texts})
    return rows


def _text(value: Any) -> str:
    """A value as it is compared and shown: text as it is typed, all else as JSON; 1 and 1.0 are equal."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        value = int(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
