"""A setting that was given on the command line, with the option under which a user typed it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Given:
    """A value for the setting `key`; `option` is what errors name, such as `--dtype` or `CACHE`."""

    option: str
    key: str
    value: Any
