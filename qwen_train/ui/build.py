"""The Build page: its command line, and its routes."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

from fastapi import APIRouter
from fastapi.responses import Response
from pydantic import BaseModel

from qwen_cache.cli import COMMANDS
from qwen_cache.errors import ConfigError
from qwen_cache.format.identity import content_hash
from qwen_cache.service.http import RefusedError, router_of
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import Config
from qwen_cache.text import plain
from qwen_train.ui import search
from qwen_train.ui.job import Command, Job
from qwen_train.ui.jobs import Checks, Queue
from qwen_train.ui.refusals import check_cache, check_source, pipeline_of
from qwen_train.ui.workspace import STATE, Changes, Workspace, options_of, written_page

# ---- build command ---------------------------------------------------------------------------------------------------
# The form of the Build page as a command line, with what is wrong with it by setting.
#
# The settings are checked by the code that the command runs. What the form names to read or write must be in an opened
# folder, or be a URL. Values equal to those of qwen.yaml are left out; what qwen.yaml itself names is not asked about.

SECTIONS = ("data", "cache", "model")
FIELDS = (
    "data.source",
    "model.path",
    "cache.path",
    "cache.vae_device",
    "cache.text_device",
    "cache.format",
)
"""The settings with a field of their own."""
READ_OR_WRITTEN = (
    "data.source",
    "cache.path",
    "data.mask_head",
    "cache.local_copies",
)
"""The settings that name files which are in the opened folders; models may lie anywhere."""
DEVICE_SETTINGS = ("cache.vae_device", "cache.text_device")
ELSEWHERE = "server:0"
"""In place of a device: builds with the encoders of a server run one at a time, beside jobs on other devices."""
DEVICE = re.compile(r"[a-z]+(:\d+)?")
SERVER = re.compile(r"https?://[^\s/]+\S*")

Mode = Literal["new", "watch", "replace", "repair"]


class Form(BaseModel):
    """The fields of the page; empty text, and None, is the value of qwen.yaml."""

    source: str = ""
    model: str = ""
    cache: str = ""
    vae_device: str = ""
    text_device: str = ""
    at: str = ""
    """The address of a server that encodes in place of this machine, which then needs neither model nor devices."""
    format: str = ""
    reuse: list[str] | None = None
    mode: Mode = "new"
    watch: float = 10.0
    """Seconds between two looks at the source."""
    rehash: bool = False
    changes: Changes = {}
    """Other settings."""

    def fields(self) -> dict[str, str]:
        """The settings with a field of their own, without empty ones and those that a server does not need."""
        values = (self.source, self.model, self.cache, self.vae_device, self.text_device, self.format)
        given = {key: value.strip() for key, value in zip(FIELDS, values, strict=True) if value.strip()}
        unused = ("model.path", *DEVICE_SETTINGS) if self.at.strip() else ()
        return {key: value for key, value in given.items() if key not in unused}


@dataclass(frozen=True)
class Problem:
    """A problem of the form, at the setting `key`."""

    key: str
    what: str
    expected: str = ""
    found: str = ""
    do: str = ""


@dataclass(frozen=True)
class Build:
    """A form that was checked: the arguments of `qwen-cache`, and the settings with which they run."""

    arguments: tuple[str, ...]
    settings: Config
    mode: Mode
    at: str = ""

    @property
    def command(self) -> Command:
        """The build itself."""
        return Command("qwen-cache", self.arguments)

    @property
    def plan(self) -> Command:
        """The command that plans it, with JSON; the rows of a source that is watched are planned as they are now."""
        arguments = self.arguments
        if self.mode == "watch":
            at = arguments.index("--watch")
            arguments = (*arguments[:at], *arguments[at + 2 :])
        return Command("qwen-cache", (*arguments, "--dry-run", "--json"))

    @property
    def measure(self) -> Command:
        """The plan with an estimate of the time, which encodes a few samples."""
        return Command("qwen-cache", (*self.plan.arguments, "--measure"))

    @property
    def devices(self) -> tuple[str, ...]:
        """The devices of both encoders; of those on a server, a name that stands for any."""
        if self.at:
            return (ELSEWHERE,)
        cache = self.settings.cache
        names = [name.strip() for text in (cache.vae_device, cache.text_device) for name in text.split(",")]
        return tuple(dict.fromkeys(names))


def checked(workspace: Workspace, form: Form) -> tuple[Build | None, list[Problem]]:
    """The command of a form; None where there are problems."""
    problems = list(_problems(workspace, form))
    given: dict[str, Any] = form.fields()
    if form.reuse is not None:
        given |= {"cache.reuse": [name.strip() for name in form.reuse if name.strip()]}
    try:
        settings = workspace.settings(form.changes | given)
    except ConfigError as error:
        known = {each.key for each in problems}
        problems += [each for each in map(_problem, (error, *error.others)) if each.key not in known]
    if problems:
        return None, problems
    at = form.at.strip()
    problems = list(_known_failures(workspace, settings, form))
    if problems:
        return None, problems
    before = workspace.settings().flat()
    fields = {key: value for key, value in given.items() if value != before[key]}
    changes = {key: value for key, value in form.changes.items() if key not in given}

    arguments = ["build"]
    for key in FIELDS:
        if key in fields:
            arguments += COMMANDS["build"].typed(key, fields[key])
    if at:
        arguments += ["--at", at]
    reuse = fields.get("cache.reuse")
    for name in reuse or ():
        arguments += ["--reuse", name]
    if form.mode == "watch":
        arguments += ["--watch", f"{form.watch:g}"]
    elif form.mode != "new":
        arguments.append(f"--{form.mode}")
    if form.rehash and form.mode != "watch":  # which reads what has changed
        arguments.append("--rehash")
    arguments += options_of(changes | ({"cache.reuse": []} if reuse == [] else {}))
    return Build(tuple(arguments), settings, form.mode, at), []


def build_of(workspace: Workspace, form: Form) -> Build:
    """The build of a form; ConfigError for the first of its problems."""
    build, problems = checked(workspace, form)
    if build is None:
        first = problems[0]
        given = {name: getattr(first, name) or None for name in ("expected", "found", "do")}
        raise ConfigError(first.what, where=first.key, **given)
    return build


def _problems(workspace: Workspace, form: Form) -> Iterator[Problem]:
    """The problems that the command would let pass: paths outside of the opened folders, and look-alikes of options."""
    known = {each.key for each in all_settings() if each.key.partition(".")[0] in SECTIONS}
    for key in form.changes:
        if key not in known:
            yield Problem(key, "this is no setting of a build", do="change it on another page, or in qwen.yaml")
    values = form.changes | form.fields()
    before = workspace.settings().flat()
    named = [(key, values[key]) for key in READ_OR_WRITTEN if values.get(key) not in (None, "", before[key])]
    reuse = form.changes.get("cache.reuse") or ()
    reused = [*(form.reuse or ()), *([reuse] if isinstance(reuse, str) else map(str, reuse))]
    others = [("cache.reuse", name) for name in reused if name.strip() and name not in before["cache.reuse"]]
    for key, value in ((key, str(value).strip()) for key, value in (*named, *others)):
        if value.startswith("-"):
            yield Problem(key, "a path cannot begin with a dash", found=value, do=f"write ./{value}")
            continue
        try:
            workspace.location(value)
        except RefusedError as error:
            yield Problem(key, error.what, do=error.do)
        except ConfigError as error:
            yield _problem(error, key)
    for key in DEVICE_SETTINGS:
        for name in str(values.get(key, "auto")).split(","):
            if not DEVICE.fullmatch(name.strip()):
                yield Problem(key, "no name of a device", "such as cuda:0", name, "choose a device")
    at = form.at.strip()
    if at and not SERVER.fullmatch(at):
        yield Problem("at", "not the address of a server", "such as http://127.0.0.1:8077", at, "give its address")
    if at and form.mode == "repair":
        do = "repair where the server's encoders are, or leave the server out"
        yield Problem("at", "a server cannot repair damaged samples", do=do)
    if form.mode == "watch" and not form.watch >= 0.1:
        yield Problem("watch", "too short", "at least 0.1 seconds", str(form.watch), "give a longer time")


def _known_failures(workspace: Workspace, settings: Config, form: Form) -> Iterator[Problem]:
    """The problems that the command would find once it runs."""
    is_given = form.source.strip() or "data.source" in form.changes
    named = settings.data.source if is_given else workspace.default_source
    checks: list[Callable[[], object]] = [lambda: check_source(workspace, named)]
    if not form.at.strip():
        checks.append(lambda: pipeline_of(workspace, settings.model.path))
    if form.mode == "repair":
        checks.append(lambda: check_cache(workspace, settings.cache.path, "cache.path"))
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield _problem(error)


def _problem(error: ConfigError, key: str = "") -> Problem:
    texts = (error.what, error.expected, error.found, error.do)
    what, expected, found, do = ("" if text is None else str(text) for text in texts)
    return Problem(key or str(error.where or ""), what, expected, found, do)


# ---- build -----------------------------------------------------------------------------------------------------------
# The routes of the Build page: a form as a command line, its plan, and jobs that build, measure, verify and inspect.
#
# Long lists of a plan are cut, with their lengths told. What the page names is checked here; whether it can be built,
# the command itself says.

MAX_LISTED = 100
"""Entries of each list of a plan that are sent."""
INSPECTED = "inspect"
"""The folder of the pages about caches, in the state folder."""


class Named(BaseModel):
    """A cache; empty is that of qwen.yaml."""

    cache: str = ""


def routes_of(workspace: Workspace, queue: Queue, checks: Checks) -> APIRouter:
    router = router_of()
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
        values = self._workspace.settings().flat() | {"data.source": self._workspace.default_source}
        found = search.find(self._workspace)
        return {
            "values": {key: values[key] for key in (*FIELDS, "cache.reuse")},
            "sources": [self._workspace.shown(each.path) for each in found.sources],
            "models": [self._workspace.shown(each) for each in found.models],
            "caches": [self._workspace.shown(each) for each in found.caches],
        }

    def command(self, form: Form) -> dict[str, Any]:
        """The command line, and what is wrong with the form."""
        build, problems = checked(self._workspace, form)
        return {"line": build.command.line if build else "", "problems": [asdict(each) for each in problems]}

    def plan(self, form: Form) -> dict[str, Any]:
        """The plan of the build. `plan` is None if it cannot be planned; `message` is what the command says."""
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
        check_cache(self._workspace, name, "cache.path")
        return name

    def _add(
        self, title: str, kind: str, command: Command, about: dict[str, Any], devices: tuple[str, ...] = ()
    ) -> dict[str, Any]:
        job: Job = self._queue.add(plain(title), kind, command, devices, about)
        return job.to_json()


def _about(build: Build) -> dict[str, Any]:
    settings = build.settings
    return {"cache": settings.cache.path, "source": settings.data.source, "model": settings.model.path}


def shortened(plan: Any) -> dict[str, Any] | None:
    """A plan whose lists of samples and problems are cut; `lengths` has their lengths."""
    if not isinstance(plan, dict):
        return None
    lists = {key: plan[key] for key in ("samples", "problems", "removed", "target_sizes") if key in plan}
    cut = {key: each[:MAX_LISTED] for key, each in lists.items()}
    below = {"validation": shortened(plan["validation"])} if "validation" in plan else {}
    return plan | cut | below | {"lengths": {key: len(each) for key, each in lists.items()}}
