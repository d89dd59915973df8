"""Describe each setting of qwen.yaml for help, `config` and the documentation, from the classes of the settings."""

from __future__ import annotations

import json
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined, to_jsonable_python

from qwen_cache.settings.load import Config

NUMBERS = {int: "INT", float: "NUMBER"}


@dataclass(frozen=True)
class Setting:
    """A setting by its dotted name."""

    key: str
    description: str
    default: Any
    """As JSON; PydanticUndefined where a value is required."""
    choices: tuple[str, ...]
    """The only values, if they are listed."""
    kinds: tuple[Any, ...]
    """The types of its values, without None."""

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
    return _setting(key, section.model_fields[name])


def _setting(key: str, field: FieldInfo) -> Setting:
    kinds = tuple(each for each in _parts(field.annotation) if each is not type(None))
    choices = tuple(str(value) for kind in kinds if get_origin(kind) is Literal for value in get_args(kind))
    default = field.get_default(call_default_factory=True)
    if default is not PydanticUndefined:
        default = to_jsonable_python(default)
    return Setting(key, field.description or "", default, choices, kinds)


def _parts(annotation: Any) -> Iterator[Any]:
    """The alternatives of a type, without the bounds of each."""
    if get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _parts(each)
    elif hasattr(annotation, "__metadata__"):
        yield from _parts(annotation.__origin__)
    else:
        yield annotation
