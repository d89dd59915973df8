"""A file of settings of another trainer: TOML, YAML or JSON, read within bounds, and recognised by its keys."""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, first_line
from qwen_cache.settings.load import MAX_BYTES, parse_yaml
from qwen_cache.storage.files import read_file
from qwen_cache.text import parse_json
from qwen_cache.trainers.settings import ai_toolkit, musubi, simpletuner
from qwen_cache.trainers.settings.names import NoCounterpartError, Reading


@dataclass(frozen=True)
class Trainer:
    """A trainer whose files are read."""

    title: str
    files: str
    recognises: Callable[[Any], bool]
    take: Callable[[Reading, Any, Callable[[Path], Any]], None]
    """Fill the reading from the value of a file; the last argument reads a file that it names."""


TRAINERS = (
    Trainer(musubi.TITLE, musubi.FILES, musubi.recognises, musubi.take),
    Trainer(ai_toolkit.TITLE, ai_toolkit.FILES, ai_toolkit.recognises, ai_toolkit.take),
    Trainer(simpletuner.TITLE, simpletuner.FILES, simpletuner.recognises, simpletuner.take),
)


def read(file: Path) -> Reading:
    """Our settings for those of a file; ConfigError for a file of no known trainer, SourceError for missing data."""
    value = _value(file)
    trainer = next((each for each in TRAINERS if each.recognises(value)), None)
    if trainer is None:
        keys = list(value) if isinstance(value, dict) else [type(value).__name__]
        raise ConfigError(
            "this is no configuration of a trainer that is read here",
            where=file,
            expected="; or ".join(f"{each.title}'s {each.files}" for each in TRAINERS),
            found=", ".join(map(str, keys[:8])) or "nothing",
            do="name the data, `qwen-cache init SOURCE`, and set the rest by docs/howto/come-from-another-trainer.md",
        )
    reading = Reading(trainer.title, file)
    try:
        trainer.take(reading, value, _value)
    except (AttributeError, LookupError, TypeError, ValueError, NoCounterpartError) as error:  # a list for a mapping, …
        what = f"this is not what {trainer.title} reads: {first_line(error)}"
        raise ConfigError(what, where=file, expected=trainer.files) from error
    reading.check()
    return reading


def _value(file: Path) -> Any:
    """The value of a file; ConfigError if it cannot be read as what its name says."""
    kind = file.suffix.lower()
    if kind not in (".yaml", ".yml", ".toml", ".json", ".jsonc"):
        expected = "; or ".join(f"{each.title}'s {each.files}" for each in TRAINERS)
        raise ConfigError("this kind of file is not read", where=file, expected=expected, found=kind or "no extension")
    try:
        data = read_file(file, MAX_BYTES + 1)
    except OSError as error:
        raise ConfigError("the file cannot be read", where=file, found=error.strerror) from error
    if len(data) > MAX_BYTES:
        raise ConfigError("the file is too long", where=file, expected=f"at most {MAX_BYTES} bytes")
    try:
        text = data.decode("utf-8-sig")
        if kind in (".yaml", ".yml"):
            return parse_yaml(text, file)
        return tomllib.loads(text) if kind == ".toml" else parse_json(text)
    except (ValueError, RecursionError) as error:  # also of the encoding
        name = {".toml": "TOML", ".json": "JSON", ".jsonc": "JSON"}.get(kind, "YAML")
        raise ConfigError(f"this is not {name}: {error}", where=file) from None
