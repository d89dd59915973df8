"""The settings of qwen.yaml as forms show them: value, default, choices, description, from the classes of the settings.

What a form changes is never written to qwen.yaml. It becomes `--set key=value` on the command line, checked before by
the same code as there.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel
from pydantic_core import PydanticUndefined

from qwen_cache.settings.describe import Setting, all_settings, other_names
from qwen_cache.ui.workspace import Workspace

NOT_IN_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
"""Characters of JSON that YAML refuses, or takes for white space."""
Changes = dict[str, Any]
"""New values by the dotted names of the settings."""


class Changed(BaseModel):
    """The body of a request to check changes."""

    changes: Changes = {}


def routes_of(workspace: Workspace) -> APIRouter:
    router = APIRouter()

    @router.get("/api/settings")
    def settings(sections: str) -> list[dict[str, Any]]:
        """The settings of these sections, separated by commas, with the values of qwen.yaml."""
        return described(workspace, sections.split(","))

    @router.post("/api/settings/check")
    def check(body: Changed) -> dict[str, Any]:
        """The changes as options of a command line; an error names the setting at fault."""
        workspace.settings(body.changes)
        return {"options": options_of(body.changes)}

    return router


def described(workspace: Workspace, sections: Sequence[str]) -> list[dict[str, Any]]:
    """Every setting of the sections, or of parts of them such as `train.lora`."""
    values = workspace.settings().flat()
    return [
        {
            "key": each.key,
            "value": values[each.key],
            "default": None if each.default is PydanticUndefined else each.default,
            "choices": list(each.choices),
            "kind": kind_of(each),
            "description": each.description,
            "other_names": other_names(each),
        }
        for each in all_settings()
        if any(each.key.startswith(f"{section}.") or each.key == section for section in sections)
    ]


def kind_of(setting: Setting) -> str:
    """How a form asks for a value: `choice`, `flag`, `integer`, `number`, `text`, or `yaml` for lists and mappings."""
    kinds = set(setting.kinds)
    if setting.choices:
        return "choice" if len(kinds) == 1 else "text"
    if kinds == {bool}:
        return "flag"
    if kinds == {int}:
        return "integer"
    if kinds <= {int, float} and kinds:
        return "number"
    return "text" if str in kinds else "yaml"


def options_of(changes: Mapping[str, Any]) -> list[str]:
    """The changes as `--set` takes them: values as JSON, which YAML reads."""
    return [part for key, value in sorted(changes.items()) for part in ("--set", f"{key}={_typed(value)}")]


def _typed(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
