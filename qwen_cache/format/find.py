"""Find a sample by its name, its key, or a start of its key that no other sample shares."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Cache, Sample

SHOWN = 5
"""Samples listed in a message."""
COMPARED = 100_000
"""Names of a cache in which similar ones are looked for: about a second."""


def find_sample(caches: Sequence[Cache], text: str) -> tuple[Cache, Sample]:
    """The sample with this name or key, else the only one whose key starts so, and its cache; ConfigError otherwise.

    `caches` has one cache for each recipe of a folder.
    """
    matches = [
        (cache, position)
        for cache in caches
        for position in _positions(pc.or_(pc.equal(cache.table["name"], text), pc.equal(cache.table["key"], text)))
    ]
    if not matches and text:
        matches = [
            (cache, position)
            for cache in caches
            for position in _positions(pc.starts_with(cache.table["key"], text.lower()))
        ]
    where = caches[0].folder
    if len(matches) > 1:
        found = _some([_name_and_key(*match) for match in matches[:SHOWN]], len(matches))
        raise ConfigError("several samples match", where=where, found=found, do="give the full key")
    if not matches:
        some = [name for cache in caches for name in pc.unique(cache.table["name"].slice(0, COMPARED)).to_pylist()]
        names, count = (
            list(dict.fromkeys(some)),
            sum(pc.count_distinct(cache.table["name"]).as_py() for cache in caches),
        )
        near = difflib.get_close_matches(text, names, SHOWN)
        do = (
            f"did you mean {_some(near, len(near))}?"
            if near
            else f"name one, such as {_some(names, count)}; index.parquet lists all"
        )
        raise ConfigError("no sample has this name, key or start of a key", where=where, found=text, do=do)
    ((cache, position),) = matches
    return cache, cache[position]


def _name_and_key(cache: Cache, position: int) -> str:
    name, key = (cache.table[column][position].as_py() for column in ("name", "key"))
    return f"{name} ({key})"


def _positions(found: pa.ChunkedArray) -> list[int]:
    """Where an array is true."""
    positions: list[int] = np.flatnonzero(found.to_numpy()).tolist()
    return positions


def _some(listed: Sequence[str], count: int) -> str:
    return ", ".join(listed[:SHOWN]) + (f" and {count - SHOWN} more" if count > SHOWN else "")
