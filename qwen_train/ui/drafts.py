"""The prompts that a model has written and nobody has read yet, of each source.

A row is a draft from the time that `caption` gives it a prompt until somebody edits or accepts it. What each row had
before is in a file of the state folder, so that drafts are known after a restart, and of a job that was stopped.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from qwen_cache.format.identity import content_hash
from qwen_cache.sources.detect import Entry
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.storage.remote import Location


class Drafts:
    """The drafts of a source; `entry in drafts` tells one."""

    def __init__(self, folder: Path, source: Location) -> None:
        self.file = folder / f"{content_hash(str(source).encode('utf-8', 'surrogateescape'))}.json"
        self._before: dict[str, str] = {}
        """By the name of a row, the hash of the prompts that it had before."""
        with suppress(OSError, ValueError):
            value = json.loads(self.file.read_bytes())
            if isinstance(value, dict):
                self._before = {name: each for name, each in value.items() if isinstance(each, str)}

    def __contains__(self, entry: Entry) -> bool:
        before = self._before.get(entry.name)
        return before is not None and any(entry.prompts) and before != hash_of(entry.prompts)

    def expect(self, prompts: Mapping[str, tuple[str, ...]]) -> None:
        """The prompts of rows that get others by a model."""
        self._before |= {name: hash_of(each) for name, each in prompts.items()}
        self._write()

    def accept(self, names: Iterable[str]) -> None:
        """Somebody has read these rows."""
        if known := [name for name in names if name in self._before]:
            for name in known:
                del self._before[name]
            self._write()

    def _write(self) -> None:
        make_folder(self.file.parent)
        write_durably(self.file, json.dumps(self._before).encode())


def hash_of(prompts: tuple[str, ...]) -> str:
    """A short hash of the prompts of a row."""
    return content_hash(json.dumps(prompts).encode())[:12]
