"""Captions of a source from the Data page: `qwen-cache caption` as a job, and the drafts that it writes.

A form is refused for what would make the command fail, by the command's own checks. Before prompts are written over,
which somebody has to ask for, they are kept as old versions.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel

from qwen_cache.cli import COMMANDS
from qwen_cache.errors import ConfigError, ModelError, QwenCacheError, SourceError
from qwen_cache.models.family import Pipeline
from qwen_cache.models.folder import check_name
from qwen_cache.settings.load import Config
from qwen_cache.sources.captions import CaptionFiles, TextFiles, caption_files
from qwen_cache.sources.detect import read_source, reading
from qwen_cache.sources.old_files import OldFiles
from qwen_cache.sources.rows import Row
from qwen_cache.terminal import plural
from qwen_cache.text import plain
from qwen_train.ui import search
from qwen_train.ui.build import DEVICE, Problem
from qwen_train.ui.drafts import Drafts
from qwen_train.ui.edits import Get
from qwen_train.ui.job import Command, Job
from qwen_train.ui.jobs import Queue
from qwen_train.ui.opened import OpenSource, kept_folder
from qwen_train.ui.refusals import pipeline_of, told_at
from qwen_train.ui.workspace import Workspace, options_of

QUICK = 0.5  # seconds: a source that is read faster is read again for each look at the form
FIELDS = {
    "model": "model.path",
    "captioner": "caption.model",
    "text_device": "cache.text_device",
    "on_error": "data.on_error",
}
"""The settings with an option of the command, by the names of the form."""
SET = {
    "instruction": "caption.instruction",
    "edit_instruction": "caption.edit_instruction",
    "max_new_tokens": "caption.max_new_tokens",
    "image_size": "caption.image_size",
}
"""The settings that `--set` changes."""


class Form(BaseModel):
    """The fields of the page; empty text, and None, is the value of qwen.yaml."""

    source: str
    model: str = ""
    captioner: str = ""
    text_device: str = ""
    on_error: str = ""
    replace: bool = False
    """Also rows that have a prompt."""
    instruction: str = ""
    edit_instruction: str = ""
    max_new_tokens: int | None = None
    image_size: int | None = None

    def changes(self, names: dict[str, str]) -> dict[str, Any]:
        """The settings of some fields, without those that are empty."""
        given = {key: getattr(self, name) for name, key in names.items()}
        texts = {key: value.strip() if isinstance(value, str) else value for key, value in given.items()}
        return {key: value for key, value in texts.items() if value not in ("", None)}


@dataclass(frozen=True)
class Captioning:
    """A form that was checked: its command, what it asks about, and where the captions go."""

    command: Command
    settings: Config
    rows: Sequence[Row]
    missing: Sequence[Row]
    files: CaptionFiles

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name.strip() for name in self.settings.cache.text_device.split(",")))


class Captions:
    """The handlers of an opened folder."""

    def __init__(self, workspace: Workspace, queue: Queue, get: Get) -> None:
        self._workspace, self._queue, self._get = workspace, queue, get
        self._read: tuple[object, list[Row], int] = None, [], 0
        """The rows of the source that was asked about last, and how many problems it has."""

    def start_values(self) -> dict[str, Any]:
        """The values of qwen.yaml, and the models in the opened folders."""
        values = self._workspace.settings().flat()
        models = [self._workspace.shown(each) for each in search.find(self._workspace).models]
        return {"values": {name: values[key] for name, key in (FIELDS | SET).items()}, "models": models}

    def command(self, form: Form) -> dict[str, Any]:
        """The command line with what it would do, or what is wrong with the form."""
        try:
            asked = self._checked(form)
        except QwenCacheError as error:
            texts = (error.what, error.expected, error.found, error.do)
            what, expected, found, do = ("" if text is None else str(text) for text in texts)
            return {"line": "", "problems": [asdict(Problem(str(error.where or ""), plain(what), expected, found, do))]}
        about = {"rows": len(asked.rows), "missing": len(asked.missing), "to": self._shown(asked.files.source)}
        return {"line": asked.command.line, "problems": [], "about": about}

    def start(self, form: Form) -> dict[str, Any]:
        """A job that writes the captions; the drafts are expected from now on."""
        asked, source = self._checked(form), self._get(form.source)
        if not asked.missing:
            raise ConfigError("every row has a prompt", where="data.source", do="choose all rows, or build the source")
        names = {row.name for row in asked.missing}
        entries = [entry for entry in source.entries if not names.isdisjoint(entry.names)]
        target = asked.files.source
        if form.replace:  # then somebody's prompts, or an earlier copy with corrections, are written over
            paths = {asked.files.path(row) for row in asked.missing} if isinstance(asked.files, TextFiles) else {target}
            root = target if target.is_dir() else target.parent
            OldFiles(root, kept_folder(self._workspace, target)).keep(sorted(filter(Path.is_file, paths)))
        drafts = source.drafts if target == source.place else Drafts(self._workspace.state / "drafts", target)
        drafts.expect({entry.name: entry.prompts for entry in entries})
        shown = self._shown(source.place)
        about = {"source": shown, "to": self._shown(target), "rows": len(asked.missing)}
        title = plain(f"Write {plural(len(asked.missing), 'caption')} for {shown}")
        job: Job = self._queue.add(title, "caption", asked.command, asked.devices, about)
        return job.to_json()

    def _shown(self, path: Any) -> str:
        return self._workspace.shown(path) if isinstance(path, Path) else str(path)

    def _checked(self, form: Form) -> Captioning:
        """The command of a form; the first of its problems as an error."""
        source = self._get(form.source)
        given, changes = form.changes(FIELDS), form.changes(SET)
        settings = self._workspace.settings(given | changes)
        _check_devices(settings.cache.text_device)
        facts = _check_model(self._workspace, settings)
        rows, problems = self._rows(source, settings, facts)
        if problems and settings.data.on_error == "stop":
            do = "correct them, or leave these rows out of it"
            raise ConfigError(f"{plural(problems, 'problem')} in the source", where="data.on_error", do=do)
        with _told_of_source():
            files = caption_files(source.place, settings.data, None, "", replace=form.replace)
            missing = files.missing(rows)
        before = self._workspace.settings().flat()
        arguments = ["caption", self._shown(source.place)]
        for key, value in given.items():
            if value != before[key]:
                arguments += COMMANDS["caption"].typed(key, value)
        if form.replace:
            arguments.append("--replace")
        arguments += options_of({key: value for key, value in changes.items() if value != before[key]})
        return Captioning(Command("qwen-cache", tuple(arguments)), settings, rows, missing, files)

    def _rows(self, source: OpenSource, settings: Config, facts: Pipeline | None) -> tuple[list[Row], int]:
        """The rows as the command reads them, and the number of problems; read once while the list stays as it is."""
        if source.state != "ready":
            raise ConfigError("the source is not listed yet", where="data.source", do="wait for its list")
        key = (str(source.place), source.revision, facts and facts.name, settings.data.model_dump_json())
        if self._read[0] != key:
            asked = reading(settings.data)
            if facts is not None:
                needs = facts.min_controls > 0 and not settings.data.allow_no_control
                asked |= {"needs_control": needs, "takes_control": facts.max_controls != 0}
            asked |= {"needs_prompt": False, "allow_empty_prompt": True}
            began = time.monotonic()
            with _told_of_source():
                rows, problems = read_source(source.place, **asked)
            is_kept = time.monotonic() - began > QUICK
            self._read = key if is_kept else None, rows, len(problems)
        return self._read[1], self._read[2]


def _check_devices(names: str) -> None:
    for name in names.split(","):
        if not DEVICE.fullmatch(name.strip()):
            raise ConfigError(
                "no name of a device", where="cache.text_device", expected="such as cuda:0", found=name, do="choose one"
            )


def _check_model(workspace: Workspace, settings: Config) -> Pipeline | None:
    """The pipeline of the model, as far as it is known; ConfigError if the command would refuse it."""
    captioner, named = settings.caption.model, settings.model
    if captioner and not (workspace.folder / captioner).is_dir():
        with told_at("caption.model", captioner, ModelError):
            check_name(captioner)
    if named.text_encoder is not None and captioner is None:
        raise ConfigError(
            "the single file of a text encoder writes no captions: it is read without its lm_head",
            where="caption.model",
            found=named.text_encoder,
            do="name another model, or leave model.text_encoder out",
        )
    return pipeline_of(workspace, named.path)


@contextmanager
def _told_of_source() -> Iterator[None]:
    """Errors about the source, at its field."""
    try:
        yield
    except SourceError as error:
        found = error.found or error.where
        raise ConfigError(error.what, where="data.source", expected=error.expected, found=found, do=error.do) from None


def add_captions(router: APIRouter, workspace: Workspace, queue: Queue, get: Callable[[str], OpenSource]) -> None:
    """The routes of captions."""
    captions = Captions(workspace, queue, get)
    router.add_api_route("/caption", captions.start_values, methods=["GET"])
    router.add_api_route("/caption/command", captions.command, methods=["POST"])
    router.add_api_route("/caption/start", captions.start, methods=["POST"])
