"""Values that were measured once, remembered in the user's cache folder by everything that they depend on.

An entry is a file of its own, with its whole key and a checksum: another key, or a damaged entry, is measured again.
Any number of processes may measure at once, since an entry is replaced as a whole. Where nothing can be remembered,
each command measures.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash

from qwen_cache.storage.files import cache_home, read_file
from qwen_cache.storage.remembered import is_trusted, with_checksum, write_entry
from qwen_cache.terminal import counting
from qwen_cache.text import parse_json

FOLDER = "measured"
MOST = 2_000
"""Entries that are kept, of a few kilobytes each; beyond them the least recently used are removed."""
MEASURING = "measuring once"
"""The progress line."""


def measured(key: dict[str, Any], measure: Callable[[], Any], *, quietly: bool = False) -> Any:
    """The JSON value that `measure` returns, or returned last time for an equal `key`, which is JSON too.

    Unless `quietly`, a progress line on stderr says that something is measured. Raises what `measure` raises, which is
    not remembered; and with `rehashing`, nothing that was remembered counts.
    """
    text = json.dumps(key, sort_keys=True)
    if (entry := remembered_value(text)) is not None and is_trusted():
        return entry["value"]
    if quietly:
        value = measure()
    else:
        with counting(MEASURING, transient=True):
            value = measure()
    _remember(text, value)
    return value


def remembered_value(key: str) -> dict[str, Any] | None:
    """The whole entry of a key in JSON; None without one, or if it is damaged."""
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, RecursionError):
        path = _path(key)
        entry = parse_json(read_file(path))
        if entry["key"] == key and entry == with_checksum({"key": key, "value": entry["value"]}):
            with suppress(OSError):
                os.utime(path)  # used just now
            return dict(entry)
    return None


def _remember(key: str, value: Any) -> None:
    with suppress(OSError, RuntimeError):  # no folder, or none that can be written to, costs time alone
        path = _path(key)
        write_entry(path, with_checksum({"key": key, "value": value}))
        _remove_oldest(path.parent)


def _path(key: str) -> Path:
    """RuntimeError for a user without a home."""
    return cache_home() / FOLDER / f"{xxhash.xxh3_128_hexdigest(key.encode())}.json"


def _remove_oldest(folder: Path) -> None:
    paths = [path for path in folder.iterdir() if path.suffix == ".json"]
    for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns)[: max(0, len(paths) - MOST)]:
        path.unlink(missing_ok=True)


# ---- the parts of a key ----------------------------------------------------------------------------------------------


def versions(packages: Sequence[str]) -> dict[str, str | None]:
    """The installed versions, without the name of the build (`+cpu`); None for a package that is not installed."""
    found: dict[str, str | None] = dict.fromkeys(packages)
    for name in packages:
        with suppress(PackageNotFoundError):
            found[name] = version(name).partition("+")[0]
    return found


def digest_of_code(files: Sequence[Path]) -> str:
    """The hash of the source of our own modules, so that what was measured by another version of them is not used."""
    digest = xxhash.xxh3_128()
    for path in files:
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()
