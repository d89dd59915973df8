"""The form of the Build page as a command line, with what is wrong with it by setting.

The settings are checked by the code that the command runs. What the form names to read or write must be in an opened
folder, or be a URL. Values equal to those of qwen.yaml are left out; what qwen.yaml itself names is not asked about.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel

from qwen_cache.errors import ConfigError
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.load import Config
from qwen_cache.ui.jobs.command import Command
from qwen_cache.ui.settings import Changes, options_of
from qwen_cache.ui.workspace import Workspace

SECTIONS = ("data", "cache", "model")
OPTIONS = {
    "data.source": "",
    "model.path": "--model",
    "cache.path": "--out",
    "cache.vae_device": "--vae-device",
    "cache.text_device": "--text-device",
    "cache.format": "--format",
}
"""The settings with a field of their own, and their options; the source is the argument."""
READ_OR_WRITTEN = (
    "data.source",
    "model.path",
    "cache.path",
    "data.mask_head",
    "model.transformer",
    "cache.local_copies",
)
"""The settings that name files."""
DEVICE_SETTINGS = ("cache.vae_device", "cache.text_device")
ELSEWHERE = "server:0"
"""In place of a device: builds with the encoders of a server run one at a time, beside jobs on other devices."""
DEVICE = re.compile(r"[a-z]+(:\d+)?")
SERVER = re.compile(r"https?://[^\s/]+\S*")

Mode = Literal["new", "watch", "replace", "repair"]


class Form(BaseModel):
    """What the page asks for; empty text, and None, is the value of qwen.yaml."""

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
        given = {key: value.strip() for key, value in zip(OPTIONS, values, strict=True) if value.strip()}
        unused = ("model.path", *DEVICE_SETTINGS) if self.at.strip() else ()
        return {key: value for key, value in given.items() if key not in unused}


@dataclass(frozen=True)
class Problem:
    """What is wrong with the form, at the setting `key`."""

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
        """What it would do, as JSON; the rows of a source that is watched are planned as they are now."""
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
    if problems:
        return None, problems
    given = form.fields() | _reuse(form)
    try:
        settings = workspace.settings(form.changes | given)
    except ConfigError as error:
        return None, [_problem(error)]
    at = form.at.strip()
    if not settings.model.path and not at:
        do = "name a diffusers folder or a repository on the hub: Model on the Build page, or model.path in qwen.yaml"
        return None, [Problem("model.path", "no model is named", do=do)]
    before = workspace.settings().flat()
    fields = {key: value for key, value in given.items() if value != before[key]}
    changes = {key: value for key, value in form.changes.items() if key not in given}
    return Build(tuple(_arguments(form, fields, changes)), settings, form.mode, at), []


def build_of(workspace: Workspace, form: Form) -> Build:
    """The build of a form; ConfigError for the first of its problems."""
    build, problems = checked(workspace, form)
    if build is None:
        first = problems[0]
        given = {name: getattr(first, name) or None for name in ("expected", "found", "do")}
        raise ConfigError(first.what, where=first.key, **given)
    return build


def _reuse(form: Form) -> dict[str, Any]:
    return {} if form.reuse is None else {"cache.reuse": [name.strip() for name in form.reuse if name.strip()]}


def _arguments(form: Form, fields: dict[str, Any], changes: Changes) -> Iterator[str]:
    yield "build"
    for key, option in OPTIONS.items():
        if key in fields:
            yield from (option, fields[key]) if option else (fields[key],)
    if at := form.at.strip():
        yield from ("--at", at)
    reuse = fields.get("cache.reuse")
    for name in reuse or ():
        yield from ("--reuse", name)
    if form.mode == "watch":
        yield from ("--watch", f"{form.watch:g}")
    elif form.mode != "new":
        yield f"--{form.mode}"
    if form.rehash and form.mode != "watch":  # which reads what has changed
        yield "--rehash"
    yield from options_of(changes | ({"cache.reuse": []} if reuse == [] else {}))


def _problems(workspace: Workspace, form: Form) -> Iterator[Problem]:
    """What the command would not refuse: paths outside of the opened folders, and what looks like an option."""
    known = {each.key for each in all_settings() if each.key.partition(".")[0] in SECTIONS}
    for key in form.changes:
        if key not in known:
            yield Problem(key, "this is no setting of a build", do="change it on another page, or in qwen.yaml")
    values = form.changes | form.fields()
    before = workspace.settings().flat()
    named = [(key, values[key]) for key in READ_OR_WRITTEN if values.get(key) not in (None, "", before[key])]
    reused = [*(form.reuse or ()), *_as_list(form.changes.get("cache.reuse"))]
    others = [("cache.reuse", name) for name in reused if name.strip() and name not in before["cache.reuse"]]
    for key, value in (*named, *others):
        if problem := _path_problem(workspace, key, str(value).strip()):
            yield problem
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


def _as_list(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else [str(each) for each in value or ()]


def _path_problem(workspace: Workspace, key: str, value: str) -> Problem | None:
    if value.startswith("-"):
        return Problem(key, "a path cannot begin with a dash", found=value, do=f"write ./{value}")
    try:
        workspace.location(value)
    except RefusedError as error:
        return Problem(key, error.what, do=error.do)
    except ConfigError as error:
        return _problem(error, key)
    return None


def _problem(error: ConfigError, key: str = "") -> Problem:
    texts = (error.what, error.expected, error.found, error.do)
    what, expected, found, do = ("" if text is None else str(text) for text in texts)
    return Problem(key or str(error.where or ""), what, expected, found, do)
