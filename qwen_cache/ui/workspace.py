"""The opened folder: its settings, the state of the UI in it, and which files may be read and written.

Paths are those of the folder and of what `--allow` names, after symbolic links are followed. Every other path is
refused. The working directory of the process is the folder, as it is for the commands that are started in it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qwen_cache.errors import ConfigError
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.describe import all_settings
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.storage.remote import Url, location

STATE = ".qwen-ui"


@dataclass(frozen=True)
class Workspace:
    """An opened folder, and further ones that may be read and written. All are absolute and without links."""

    folder: Path
    allowed: tuple[Path, ...] = ()

    @classmethod
    def open(cls, folder: Path, allowed: Sequence[Path] = ()) -> Workspace:
        """The workspace of existing folders; ConfigError if one does not exist, or the state of the UI is elsewhere."""
        for each in (folder, *allowed):
            if not each.is_dir():
                raise ConfigError("no such folder", where=each, do="name the folder of a project, or create it")
        opened = cls(folder.resolve(), tuple(each.resolve() for each in allowed))
        for path in _links(opened.state):
            if not opened.is_inside(path):
                what, do = (
                    "a link in the UI's state leads out of the opened folders",
                    "remove it, or --allow its folder",
                )
                raise ConfigError(what, where=path, found=path.resolve(), do=do)
        return opened

    @property
    def state(self) -> Path:
        """Jobs, old versions of edited files, uploads and generated images."""
        return self.folder / STATE

    def inside(self, path: str | Path) -> Path:
        """A path, relative to the folder, without links; RefusedError (403) if it is in no opened folder."""
        try:
            resolved = (self.folder / path).resolve()
        except (OSError, ValueError, RuntimeError):  # a null byte, a loop of links
            raise RefusedError(403, "this is no path", "name a file in the opened folder") from None
        if self._has(resolved):
            return resolved
        do = "open its folder too: qwen-cache ui --allow FOLDER"
        raise RefusedError(403, f"{path} is outside the opened folders", do)

    def is_inside(self, path: Path) -> bool:
        """Whether a path is in an opened folder, after links are followed."""
        return self._has((self.folder / path).resolve())

    def _has(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(each) for each in (self.folder, *self.allowed))

    def location(self, text: str) -> Path | Url:
        """A path of `inside`, or a URL."""
        place = location(text)
        return place if isinstance(place, Url) else self.inside(place)

    def shown(self, path: Path) -> str:
        """A path as it is typed in the folder: relative if it is inside, and never like an option."""
        text = str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)
        return f"./{text}" if text.startswith("-") else text

    @property
    def config_file(self) -> Path | None:
        """qwen.yaml of the folder, if there is one."""
        file = self.folder / CONFIG_NAME
        return file if file.is_file() else None

    def settings(self, changes: Mapping[str, Any] | None = None) -> Config:
        """The settings of qwen.yaml with these changes, by dotted name; ConfigError names the setting at fault."""
        return load_config(self.config_file, (), given(changes or {}))


def given(changes: Mapping[str, Any]) -> list[Given]:
    """The changes as settings take them; ConfigError for a whole section, which may hide a setting that is checked."""
    for key in changes:
        if any(each.key.startswith(f"{key}.") for each in all_settings()):
            raise ConfigError("this is a section, not a setting", where=key, do="change its settings one by one")
    return [Given(key, key, value) for key, value in changes.items()]


def _links(folder: Path, depth: int = 2) -> Iterator[Path]:
    """The links among a folder and what is in it, down to the folders that the UI keeps files in."""
    if folder.is_symlink():
        yield folder
    elif depth:
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                if entry.is_symlink():
                    yield Path(entry.path)
                elif depth > 1 and entry.is_dir():
                    yield from _links(Path(entry.path), depth - 1)
