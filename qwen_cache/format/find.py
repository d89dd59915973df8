"""Find a sample by its name, its key, or a start of its key that no other sample shares."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache, Sample

SHOWN = 5
"""Samples listed in a message."""


def find_sample(caches: Sequence[Cache], text: str) -> tuple[Cache, Sample]:
    """The sample with this name or key, else the only one whose key starts so, and its cache; ConfigError otherwise.

    `caches` has one cache for each recipe of a folder.
    """
    samples = [
        (key, name, cache)
        for cache in caches
        for key, name in zip(*(cache.table[column].to_pylist() for column in ("key", "name")), strict=True)
    ]
    matches = [each for each in samples if text in each[:2]]
    if not matches and text:
        matches = [each for each in samples if each[0].startswith(text.lower())]
    where = caches[0].folder
    if len(matches) > 1:
        found = _some([f"{name} ({key})" for key, name, _ in matches])
        raise ConfigError("several samples match", where=where, found=found, do="give the full key")
    if not matches:
        names = list(dict.fromkeys(name for _, name, _ in samples))
        near = difflib.get_close_matches(text, names, SHOWN)
        do = f"did you mean {_some(near)}?" if near else f"name one, such as {_some(names)}; index.parquet lists all"
        raise ConfigError("no sample has this name, key or start of a key", where=where, found=text, do=do)
    ((key, _, cache),) = matches
    return cache, cache[key]


def _some(listed: Sequence[str]) -> str:
    return ", ".join(listed[:SHOWN]) + (f" and {len(listed) - SHOWN} more" if len(listed) > SHOWN else "")
