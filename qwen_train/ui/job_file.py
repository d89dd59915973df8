"""A job as a small file: exported here, imported in another folder or on another machine, and the paths that it names.

Such a file starts nothing: an imported job is held until a user has read its command and runs it. It holds no secrets:
a command with credentials in an address is not exported, and of the environment only what a job may set is taken.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError, field_validator
from pydantic_core import ErrorDetails

from qwen_cache.errors import ConfigError, JobError
from qwen_cache.models.hardware import NAME as DEVICE_NAME
from qwen_cache.models.hardware import is_accelerator_name
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.text import escaped, expected_value
from qwen_train.ui.job import VARIABLES, Command, Job, Program

SECRET = re.compile(
    r"://[^/\s@]*:[^/\s@]+@|[?&](?:[\w-]*(?:token|secret|signature|password|api-?key|credential)|sig|key)=",
    re.IGNORECASE,
)
"""Credentials in an address."""
OF_PAGES = ("output_dir", "decoded", "cache", "source")
"""Facts about a job that pages know besides its command."""
PATH_OPTIONS = ("--", "--out", "--model", "--lora", "--image", "--config", "--transformer", "--text-encoder", "--vae")
"""Options whose values are paths; the first stands for the beginning of the line."""
PATH_ENDINGS = (".path", "_dir", ".source", ".cache", ".local_copies")
"""Ends of the names of settings that are paths."""
Text = Annotated[str, Field(max_length=100_000)]
Short = Annotated[str, Field(max_length=200)]


class JobFile(BaseModel, extra="forbid", strict=True):
    """The content of the file."""

    qwen_cache_job: Literal[1]
    """The version of this format."""
    title: Short
    kind: Annotated[str, Field(pattern=r"^[a-z]{1,20}$")]
    program: Program
    arguments: Annotated[list[Text], Field(max_length=1000)]
    environment: dict[str, Short] = {}
    processes: Annotated[int, Field(ge=1, le=64)] = 1
    devices: Annotated[list[Short], Field(max_length=64)] = []
    about: dict[str, Short] = {}

    @field_validator("environment", "about")
    @classmethod
    def _names(cls, value: dict[str, str], info: Any) -> dict[str, str]:
        known = VARIABLES if info.field_name == "environment" else OF_PAGES
        if others := set(value) - set(known):
            raise ValueError(f"{', '.join(map(escaped, sorted(others)))}: known are {', '.join(known)}")
        return value

    @property
    def command(self) -> Command:
        return Command(self.program, tuple(self.arguments), self.environment, self.processes)


def read_job_file(value: Any) -> JobFile:
    """The content of a file that a user has chosen; ConfigError for the first of its faults, with the others."""
    try:
        return JobFile.model_validate(value)
    except ValidationError as error:
        checks = [_fault(each) for each in error.errors()]
        checks[0].others = tuple(checks[1:])
        raise checks[0] from None


def _fault(fault: ErrorDetails) -> ConfigError:
    first, *inner = fault["loc"] or ("",)
    place = escaped(str(first)) + "".join(f"[{each!r}]" for each in inner)
    expected, found, do = expected_value(fault), fault["input"], "export the job again, or correct the file"
    if fault["type"] == "extra_forbidden":
        return ConfigError("a file of a job has no such entry", where=place, do=do)
    if fault["type"] == "missing":
        return ConfigError(
            "this is no file of a job: an entry is missing", where=place, do="choose one that Export saved"
        )
    what = "not a valid value" if expected else fault["msg"].removeprefix("Value error, ")
    shown = ascii(found)
    return ConfigError(f"in the file of a job: {what}", where=place, expected=expected,
                       found=shown if len(shown) <= 100 else f"{shown[:99]}…", do=do)  # fmt: skip


def devices_named(job: Job) -> list[str]:
    """The accelerators that a job is for: those of its place in the queue, and with a number in its command."""
    visible = job.command.environment.get("CUDA_VISIBLE_DEVICES", "")
    numbers = [f"cuda:{each.strip()}" for each in visible.split(",") if each.strip().isdecimal()]
    texts = [] if numbers else [part for each in job.command.arguments for part in re.split(r'[=,"\s]', each)]
    named = dict.fromkeys([*job.devices, *numbers, *(text for text in texts if ":" in text)])
    return [each for each in named if DEVICE_NAME.fullmatch(each) and is_accelerator_name(each)]


def file_of(job: Job) -> dict[str, Any]:
    """The content of the file of a job; JobError if its command has credentials in it."""
    if any(map(SECRET.search, job.command.arguments)):
        do = "name them in the environment, or in the settings of the storage"
        raise JobError("this command has credentials in an address, so it is not exported", where=job.title, do=do)
    about = {name: value for name in OF_PAGES if isinstance(value := job.about.get(name), str)}
    return {
        "qwen_cache_job": 1,
        "title": job.title,
        "kind": job.kind,
        **job.command.to_json(),
        "devices": list(job.devices),
        "about": about,
    }


def paths_of(job: Job) -> list[dict[str, Any]]:
    """The paths and addresses in the command of a job, each with whether it is on this machine; None for an address."""
    found = dict.fromkeys(text for text in _places(job.command.arguments) if text)
    return [{"path": escaped(text), "is_here": _is_here(job, text)} for text in found]


def _places(arguments: Sequence[str]) -> Iterator[str]:
    """The texts that may be paths: arguments without a dash, values of options with a slash, and texts in settings."""
    before = "--"
    for text in arguments[1:]:
        name, _, value = text.partition("=")
        if before == "--set":
            with suppress(ValueError, RecursionError):
                yield from (each for each in _texts(json.loads(value)) if "/" in each or name.endswith(PATH_ENDINGS))
        elif text.startswith("-"):
            yield from [value] if "/" in value else []
        elif "/" in text or not before.startswith("--") or before in PATH_OPTIONS or "=" in before:
            yield text
        before = text


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _texts(each)


def _is_here(job: Job, text: str) -> bool | None:
    with suppress(OSError, ValueError, ConfigError):
        return None if is_remote(location(text)) else (job.workplace / text).exists()
    return False
