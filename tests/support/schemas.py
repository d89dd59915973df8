"""The JSON Schemas of the format."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import jsonschema

from .paths import ROOT

SCHEMAS = ROOT / "schemas"


def schema_of(path: Path) -> jsonschema.Draft202012Validator:
    """The validator for `name.cache.v2.json` or `name.sample.v1.json`."""
    kind, version = path.name.split(".")[-3:-1]
    return _validator(kind, version)


@cache
def _validator(kind: str, version: str) -> jsonschema.Draft202012Validator:
    schema = json.loads((SCHEMAS / f"{kind}.{version}.schema.json").read_text(encoding="utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)
