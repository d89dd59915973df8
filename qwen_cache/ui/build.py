"""The routes of the Build page: a form as a command line, its plan, and jobs that build, measure, verify and inspect.

Long lists of a plan are cut, with their lengths told. What the page names is checked here; whether it can be built, the
command itself says.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import content_hash
from qwen_cache.format.manifest import MANIFEST_NAME
from qwen_cache.text import plain
from qwen_cache.ui.build_command import OPTIONS, Build, Form, build_of, checked
from qwen_cache.ui.jobs.checks import Checks
from qwen_cache.ui.jobs.command import Command
from qwen_cache.ui.jobs.job import Job
from qwen_cache.ui.jobs.queue import Queue
from qwen_cache.ui.workspace import STATE, Workspace
from qwen_cache.ui.written_pages import written_page

MAX_LISTED = 100
"""Entries of each list of a plan that are sent."""
MAX_DEPTH, MAX_FOLDERS = 3, 2000
"""How far models and caches are looked for: a project is shallow, and a folder of images is not worth a look."""
INSPECTED = "inspect"
"""The folder of the pages about caches, in the state folder."""


class Named(BaseModel):
    """A cache; empty is that of qwen.yaml."""

    cache: str = ""


def routes_of(workspace: Workspace, queue: Queue, checks: Checks) -> APIRouter:
    router = APIRouter()
    page = BuildPage(workspace, queue, checks)
    for path, handler in (("/api/build", page.start_values), ("/api/build/measured/{id}", page.measured)):
        router.add_api_route(path, handler, methods=["GET"])
    for name in ("command", "plan", "measure", "start", "look", "verify"):
        router.add_api_route(f"/api/build/{name}", getattr(page, name), methods=["POST"])
    router.add_api_route("/written/inspect/{name:path}", page.cache_page, methods=["GET"])
    return router


class BuildPage:
    """The handlers of an opened folder."""

    def __init__(self, workspace: Workspace, queue: Queue, checks: Checks) -> None:
        self._workspace, self._queue, self._checks = workspace, queue, checks

    def start_values(self) -> dict[str, Any]:
        """The values of qwen.yaml, and the models and caches in the opened folders."""
        values = self._workspace.settings().flat()
        found = list(found_folders(self._workspace))
        return {
            "values": {key: values[key] for key in (*OPTIONS, "cache.reuse")},
            "models": [name for name, kind in found if kind == "model"],
            "caches": [name for name, kind in found if kind == "cache"],
        }

    def command(self, form: Form) -> dict[str, Any]:
        """The command line, and what is wrong with the form."""
        build, problems = checked(self._workspace, form)
        return {"line": build.command.line if build else "", "problems": [asdict(each) for each in problems]}

    def plan(self, form: Form) -> dict[str, Any]:
        """What the build would do. `plan` is None if it cannot be planned; `message` is what the command says."""
        build, made = build_of(self._workspace, form), time.time()
        answer = self._checks.check(build.plan, key="plan of a build")
        answered = {"line": build.command.line, "source": build.settings.data.source, "made": made}
        return answered | {"plan": shortened(answer.document), "message": answer.message}

    def measure(self, form: Form) -> dict[str, Any]:
        """A job that plans and measures. ConfigError for a build on a server: it has no time of its own."""
        build = build_of(self._workspace, form)
        if build.at:
            do = "start the build, which shows the time that is left"
            raise ConfigError("a server cannot be measured", where="at", found=build.at, do=do)
        about = _about(build) | {"build": build.command.line}
        return self._add(f"Measure {build.settings.cache.path}", "measure", build.measure, about, build.devices)

    def measured(self, id: str) -> dict[str, Any]:
        """The result of such a job, as `plan` returns it."""
        job = self._queue.get(id)
        result = self._queue.result(id)
        document = result if isinstance(result, dict) else None
        told = {"line": job.about.get("build", ""), "source": job.about.get("source")}
        return told | {"plan": shortened(document), "message": job.error()}

    def start(self, form: Form) -> dict[str, Any]:
        """A job that builds."""
        build = build_of(self._workspace, form)
        cache = build.settings.cache.path
        verb = {"new": "Build", "watch": "Watch and build", "replace": "Build again", "repair": "Repair"}[build.mode]
        return self._add(f"{verb} {cache}", "build", build.command, _about(build), build.devices)

    def look(self, named: Named) -> dict[str, Any]:
        """A job that writes the page about a cache; `about.page` is its file."""
        cache = self._cache(named)
        file = f"{content_hash(cache.encode())[:16]}.html"
        command = Command("qwen-cache", ("inspect", cache, "--html", f"{STATE}/{INSPECTED}/{file}"))
        return self._add(f"Look at {cache}", "inspect", command, {"cache": cache, "page": file})

    def verify(self, named: Named) -> dict[str, Any]:
        """A job that checks every byte of a cache."""
        cache = self._cache(named)
        return self._add(
            f"Verify {cache}", "verify", Command("qwen-cache", ("verify", cache, "--json")), {"cache": cache}
        )

    def cache_page(self, name: str) -> Response:
        """A page about a cache, or one of the files beside it."""
        return written_page(self._workspace.inside(self._workspace.state / INSPECTED), name)

    def _cache(self, named: Named) -> str:
        """The cache as a command takes it."""
        of_settings = self._workspace.settings().cache.path
        name = named.cache.strip() or of_settings
        if name.startswith("-"):
            raise ConfigError("a path cannot begin with a dash", found=name, do=f"write ./{name}")
        if name != of_settings:
            self._workspace.location(name)
        return name

    def _add(
        self, title: str, kind: str, command: Command, about: dict[str, Any], devices: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        job: Job = self._queue.add(plain(title), kind, command, devices, about)
        return job.to_json()


def _about(build: Build) -> dict[str, Any]:
    return {"cache": build.settings.cache.path, "source": build.settings.data.source}


def shortened(plan: Any) -> dict[str, Any] | None:
    """A plan whose lists of samples and problems are cut; `lengths` has their lengths."""
    if not isinstance(plan, dict):
        return None
    lists = {key: plan[key] for key in ("samples", "problems", "removed", "target_sizes") if key in plan}
    cut = {key: each[:MAX_LISTED] for key, each in lists.items()}
    below = {"validation": shortened(plan["validation"])} if "validation" in plan else {}
    return plan | cut | below | {"lengths": {key: len(each) for key, each in lists.items()}}


def found_folders(workspace: Workspace) -> Iterator[tuple[str, str]]:
    """Folders of models and caches in the opened folders, as they are typed, each with its kind."""
    left = MAX_FOLDERS
    waiting = [(folder, 0) for folder in (workspace.folder, *workspace.allowed)]
    while waiting and left:
        left -= 1
        folder, depth = waiting.pop(0)
        kind = _kind(folder)
        if kind and folder != workspace.folder:
            yield workspace.shown(folder), kind
        elif depth < MAX_DEPTH:
            waiting += [(each, depth + 1) for each in _folders(folder)]


def _kind(folder: Path) -> str:
    if (folder / "model_index.json").is_file():
        return "model"
    return "cache" if (folder / MANIFEST_NAME).is_file() else ""


def _folders(folder: Path) -> list[Path]:
    """The folders in a folder, without hidden ones and links; none where it cannot be read."""
    try:
        with os.scandir(folder) as entries:
            inside = [each.path for each in entries if each.is_dir(follow_symlinks=False) and each.name[0] != "."]
    except OSError:
        return []
    return sorted(map(Path, inside))
