"""The settings of a run, and the command that continues it: a resumed run takes the settings of its own folder."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, RENAMED, Config, assignment, load_config, parse_yaml, read_yaml
from qwen_cache.settings.sections import DataConfig
from qwen_cache.storage.remote import Url, location
from qwen_train.launch import Launch


@dataclass(frozen=True)
class ToEncode:
    """The source of a run without a cache."""

    source: str
    at: str | None = None
    """The server that encodes; None for one that the run starts."""

    @property
    def arguments(self) -> list[str]:
        """Those of `qwen-train run`."""
        return ["--encode-on-the-fly" if self.at is None else f"--encode-at={self.at}", self.source]


def run_settings(
    path: Path | None, assignments: Sequence[str] | None, given: Iterable[Given | None], *, resume: bool
) -> tuple[Config, Config]:
    """The settings of a run, and those that the command would have without `resume`.

    A resumed run takes the qwen.yaml of its own folder, overridden by what `path`, `assignments` and `given` set. The
    qwen.yaml of the working directory is ignored. Raises ConfigError.
    """
    named = [each for each in given if each is not None]
    fresh = load_config(path, assignments, named)
    own = Path(fresh.train.output_dir) / CONFIG_NAME
    if not resume or not own.is_file():
        return fresh, fresh
    try:
        load_config(own)
    except ConfigError as error:
        do = "correct it; or remove it, and give the run's settings again"
        raise ConfigError(error.what, where=own, expected=error.expected, found=error.found, do=do) from None
    names = {"train.output_dir"} | {each.key for each in named}
    names |= _names(read_yaml(path)) if path else set()
    for name, _, text in (each.partition("=") for each in assignments or ()):
        names |= {name.strip(), *_names(parse_yaml(text), f"{name.strip()}.")}
    values = fresh.flat()
    return load_config(own, [assignment(name, values[name]) for name in _among(values, names)]), fresh


def named_in(path: Path, settings: Iterable[str]) -> list[str]:
    """Those of the dotted names of settings that a settings file has. ConfigError if it is not YAML."""
    return _among(settings, _names(read_yaml(path)))


def _among(settings: Iterable[str], names: Iterable[str]) -> list[str]:
    """The settings that are named; a name inside one, as in optimizer.arguments, names the whole."""
    new = {RENAMED.get(name, name) for name in names}
    return [name for name in settings if any(f"{each}.".startswith(f"{name}.") for each in new)]


def _names(value: object, prefix: str = "") -> set[str]:
    """The dotted names in nested mappings."""
    if not isinstance(value, dict):
        return set()
    return {f"{prefix}{name}" for name in value}.union(*(_names(v, f"{prefix}{n}.") for n, v in value.items()))


def recorded(config: Config, name: str) -> Any:
    """A setting of `data` that a run has, or that all its caches were built with, except the teacher's.

    None if neither has it, and for caches that differ.
    """
    if (own := _set(config.data, name)) is not None:
        return own
    caches = [entry.path for entry in config.train.caches if not entry.teacher] or [config.cache.path]
    values = {_of_cache(cache, name) for cache in caches}
    return values.pop() if len(values) == 1 else None


def _of_cache(cache: str, name: str) -> Any:
    """A setting of `data` that a cache on this machine was built with."""
    with suppress(QwenCacheError, OSError):
        if not isinstance(location(cache), Url) and (settings := Path(cache) / CONFIG_NAME).is_file():
            return _set(load_config(settings).data, name)
    return None


def _set(data: DataConfig, name: str) -> Any:
    """A setting; None for a text of white space too, which is none."""
    value = getattr(data, name)
    return (value.strip() or None) if isinstance(value, str) else value


def as_trained(data: DataConfig, folders: Iterable[Path]) -> DataConfig:
    """`data` with what the runs in these folders recorded on prompts, where it is not set and they agree."""
    runs = []
    for settings in {folder / CONFIG_NAME for folder in folders}:
        with suppress(QwenCacheError, OSError):
            runs += [load_config(settings)] if settings.is_file() else []
    found: dict[str, Any] = {}
    for name in ("trigger_word", "marked_phrases"):
        values = {recorded(run, name) for run in runs} if _set(data, name) is None else set()
        found |= {name: values.pop()} if len(values) == 1 else {}
    return data.model_copy(update=found)


def resume_command(
    out: Path, launch: Launch, changes: Mapping[str, Any] | None = None, to_encode: ToEncode | None = None
) -> str:
    """The command line that continues the run in `out` with its own settings and these `changes`."""
    arguments = ["run", *(to_encode.arguments if to_encode else ()), "--resume", "--out", str(out)]
    for name, value in (changes or {}).items():
        arguments += ["--set", assignment(name, value)]
    return launch.command(arguments)
