"""List the settings of qwen.yaml, all or those that a search finds: each key with its value and description.

The text is a valid settings file. A search looks at keys, descriptions, choices, old names, and other trainers' names.
"""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Iterable, Iterator
from typing import Any

import yaml
from pydantic import BaseModel

from qwen_cache.settings.describe import Setting, describe
from qwen_cache.settings.load import OTHER_NAMES, RENAMED, Config
from qwen_cache.settings.section import Section

WIDTH = 80


def all_settings(section: type[BaseModel] = Config, prefix: str = "") -> Iterator[Setting]:
    """Every setting that is not a section, in the order of the sections."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from all_settings(kind, f"{prefix}{name}.")
        else:
            yield describe(prefix + name)


def other_names(setting: Setting) -> list[str]:
    """The old names of a setting, and its names in other trainers."""
    old = [before for before, after in RENAMED.items() if after == setting.key]
    return [*OTHER_NAMES.get(setting.key, ()), *old]


def found_by(text: str) -> list[Setting]:
    """The settings in which every word of `text` is the start of a word."""
    words = [re.compile(rf"\b{re.escape(word)}") for word in _plain(text).split()]
    return [each for each in all_settings() if all(word.search(_searched(each)) for word in words)]


def _searched(setting: Setting) -> str:
    return _plain(" ".join([setting.key, setting.description, *setting.choices, *other_names(setting)]))


def _plain(text: str) -> str:
    return re.sub(r"[_.]+", " ", text.lower())


def to_json(settings: Iterable[Setting], config: Config) -> list[dict[str, Any]]:
    """Each setting with its value in `config`."""
    values = config.flat()
    return [
        {
            "key": each.key,
            "value": values[each.key],
            "default": each.default,
            "choices": list(each.choices),
            "description": each.description,
            "other_names": other_names(each),
        }
        for each in settings
    ]


def to_yaml(settings: Iterable[Setting], config: Config) -> str:
    """A settings file with the value of each in `config`, below its description."""
    values = config.flat()
    return settings_file((each.key, values[each.key], _described(each, values[each.key])) for each in settings)


def settings_file(entries: Iterable[tuple[str, Any, str]]) -> str:
    """A settings file of keys with their values and comments. Keys of one section follow each other."""
    lines: list[str] = []
    section: list[str] = []
    for key, value, text in entries:
        *around, name = key.split(".")
        for depth, part in enumerate(around):
            if section[: depth + 1] != around[: depth + 1]:
                space = [""] if depth == 0 else []
                lines += [*space, *comment(_about(around[: depth + 1]), depth), f"{_indent(depth)}{part}:"]
        section, depth = around, len(around)
        lines += [*comment(text, depth), *_entry(name, value, depth)]
    return "\n".join(lines).strip()


def _described(setting: Setting, value: Any) -> str:
    choices = f" Values: {', '.join(setting.choices)}." if setting.choices else ""
    default = f" Default: {_value(setting.default)}." if value != setting.default else ""
    return (setting.description + choices + default).strip()


def _about(parts: list[str]) -> str:
    """The description of a section; empty if its class has none."""
    section: Any = Config
    for part in parts:
        section = section.model_fields[part].annotation
    return "" if section.__doc__ in (None, Section.__doc__) else inspect.cleandoc(section.__doc__)


def comment(text: str, depth: int = 0) -> list[str]:
    """Lines of a comment."""
    start = f"{_indent(depth)}# "
    return textwrap.wrap(text, WIDTH, initial_indent=start, subsequent_indent=start, break_on_hyphens=False)


def _entry(name: str, value: Any, depth: int) -> list[str]:
    """A key with its value: on one line, but for sentences that do not fit on it."""
    line, indent = f"{_indent(depth)}{name}: {_value(value)}", _indent(depth + 1)
    if len(line) <= WIDTH or not isinstance(value, str) or " ".join(value.split()) != value:
        return [line]
    folded = textwrap.TextWrapper(WIDTH, indent, indent, break_long_words=False, break_on_hyphens=False).wrap(value)
    return [f"{_indent(depth)}{name}: >-", *folded]


def _indent(depth: int) -> str:
    return "  " * depth


def _value(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()
