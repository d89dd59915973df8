"""Each setting's values, default and description, and all settings as a settings file."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
import types
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from qwen_cache.settings.load import OTHER_NAMES, Config
from qwen_cache.settings.sections import Section
from qwen_cache.settings.titles import TITLES

# ---- describe --------------------------------------------------------------------------------------------------------
# Describe each setting of qwen.yaml for help, `config` and the documentation, from the classes of the settings.

NUMBERS = {int: "INT", float: "NUMBER"}
BOUNDS = ("ge", "gt", "le", "lt", "multiple_of")
"""Constraints of a number, as pydantic names them."""


@dataclass(frozen=True)
class Setting:
    """A setting by its dotted name."""

    key: str
    description: str
    default: Any
    """The default as JSON; PydanticUndefined where a value is required."""
    choices: tuple[str, ...]
    """The only values, if they are listed."""
    kinds: tuple[Any, ...]
    """The types of its values, without None."""
    title: str
    """A few words that name it: the label of a form."""
    bounds: dict[str, float]
    """The limits of a number, or of each in a list: those of BOUNDS that there are."""

    @property
    def default_text(self) -> str:
        """The default as it is typed on a command line; empty for None."""
        if self.default is None or self.default is PydanticUndefined:
            return ""
        return self.default if isinstance(self.default, str) else json.dumps(self.default, ensure_ascii=False)

    @property
    def metavar(self) -> str:
        """The values as help shows them: choices, or INT, NUMBER, TEXT."""
        if self.choices:
            return "|".join(self.choices)
        return next((name for kind, name in NUMBERS.items() if kind in self.kinds), "TEXT")


def describe(key: str) -> Setting:
    """The setting of this dotted name; KeyError for an unknown one."""
    *sections, name = key.split(".")
    section: type[BaseModel] = Config
    for each in sections:
        inner = section.model_fields[each].annotation
        assert isinstance(inner, type)
        section = inner
    field = section.model_fields[name]
    kinds = tuple(kind for kind in _parts(field.annotation) if kind is not type(None))
    values = (value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
    choices = tuple("true" if value is True else str(value) for value in values)
    default = field.get_default(call_default_factory=True)
    if default is not PydanticUndefined:
        default = to_jsonable_python(default)
    return Setting(key, field.description or "", default, choices, kinds, TITLES[key], _bounds(field))


def _bounds(field: FieldInfo) -> dict[str, float]:
    """The constraints of a number; those of an alternative that is no list, such as `Positive | None`, are its own."""
    inner = [
        each for kind in (field.annotation, *get_args(field.annotation)) for each in getattr(kind, "__metadata__", ())
    ]
    found = [*field.metadata, *(each for info in inner for each in getattr(info, "metadata", ()))]
    return {name: limit for name in BOUNDS for each in found if (limit := getattr(each, name, None)) is not None}


def _parts(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, without the bounds of each."""
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _parts(each)
    elif hasattr(annotation, "__metadata__"):
        yield from _parts(annotation.__origin__)
    else:
        yield annotation


# ---- listing ---------------------------------------------------------------------------------------------------------
# List the settings of qwen.yaml, all or those that a search finds: each key with its value and description.
#
# The text is a valid settings file. A search looks at keys, descriptions, choices, and other trainers' names.

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
    """The names of a setting in other trainers."""
    return list(OTHER_NAMES.get(setting.key, ()))


def found_by(text: str) -> list[Setting]:
    """The settings in which every word of `text` is the start of a word."""
    words = [re.compile(rf"\b{re.escape(word)}") for word in _plain(text).split()]
    return [each for each in all_settings() if all(word.search(_searched(each)) for word in words)]


def _searched(setting: Setting) -> str:
    return _plain(" ".join([setting.key, setting.title, setting.description, *setting.choices, *other_names(setting)]))


def _plain(text: str) -> str:
    return re.sub(r"[_.]+", " ", text.lower())


def to_json(settings: Iterable[Setting], config: Config) -> list[dict[str, Any]]:
    """Each setting with its value in `config`."""
    values = config.flat()
    return [
        {
            "key": each.key,
            "title": each.title,
            "value": values[each.key],
            "default": each.default,
            "choices": list(each.choices),
            "bounds": each.bounds,
            "description": each.description,
            "other_names": other_names(each),
        }
        for each in settings
    ]


def to_yaml(settings: Iterable[Setting], config: Config) -> str:
    """A settings file with the value of each in `config`, below its description."""
    values = config.flat()
    return settings_file((each.key, values[each.key], _described(each, values[each.key])) for each in settings)


@dataclass(frozen=True)
class CommentedOut:
    """A value that a settings file has in a comment, for a user to uncomment."""

    value: Any


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
    """A key with its value: on one line, but for sentences and lists that do not fit on it."""
    if isinstance(value, CommentedOut):
        return [f"{_indent(depth)}# {name}: {_value(value.value)}"]
    line, indent = f"{_indent(depth)}{name}: {_value(value)}", _indent(depth + 1)
    if len(line) > WIDTH and isinstance(value, list):
        return [f"{_indent(depth)}{name}:", *(f"{indent}- {_value(each)}" for each in value)]
    if len(line) <= WIDTH or not isinstance(value, str) or " ".join(value.split()) != value:
        return [line]
    folded = textwrap.TextWrapper(WIDTH, indent, indent, break_long_words=False, break_on_hyphens=False).wrap(value)
    return [f"{_indent(depth)}{name}: >-", *folded]


def _indent(depth: int) -> str:
    return "  " * depth


def _value(value: Any) -> str:
    """A value on one line of YAML."""
    text = yaml.safe_dump(value, default_flow_style=True, allow_unicode=True, width=10_000, sort_keys=False)
    return text.removesuffix("...\n").strip()
