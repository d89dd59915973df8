"""The opened folders: what forms may set, pages written in them, and memory for decoding."""

from __future__ import annotations

import ctypes
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Lock
from typing import Any, get_args, get_origin

from fastapi import APIRouter
from fastapi.responses import FileResponse
from PIL import Image
from pydantic import BaseModel, ByteSize
from pydantic_core import PydanticUndefined

from qwen_cache.errors import ConfigError
from qwen_cache.service.http import RefusedError, router_of
from qwen_cache.settings.describe import Setting, all_settings, other_names
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.settings.titles import SECTIONS
from qwen_cache.sources.images import upright_size
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_train.run import named_in

# ---- workspace -------------------------------------------------------------------------------------------------------
# The opened folder: its settings, the state of the UI in it, and which files may be read and written.
#
# Paths are those of the folder and of what `--allow` names, after symbolic links are followed. Every other path is
# refused. The working directory of the process is the folder, as it is for the commands that are started in it.

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
        """True if a path is in an opened folder, after links are followed."""
        return self._has((self.folder / path).resolve())

    def _has(self, resolved: Path) -> bool:
        return any(resolved.is_relative_to(each) for each in (self.folder, *self.allowed))

    def location(self, text: str) -> Location:
        """A path of `inside`, or a URL."""
        place = location(text)
        return place if is_remote(place) else self.inside(place)

    def shown(self, path: Path) -> str:
        """A path as it is typed in the folder: relative if it is inside, and never like an option."""
        text = str(path.relative_to(self.folder)) if path.is_relative_to(self.folder) else str(path)
        return f"./{text}" if text.startswith("-") else text

    @property
    def config_file(self) -> Path | None:
        """qwen.yaml of the folder, if there is one."""
        file = self.folder / CONFIG_NAME
        return file if file.is_file() else None

    @property
    def default_source(self) -> str:
        """The source of qwen.yaml, or the usual one if it is there; empty if nobody has named one."""
        with suppress(ConfigError):
            name, file = self.settings().data.source, self.config_file
            if (file and named_in(file, ["data.source"])) or (self.folder / name).exists():
                return name
        return ""

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


# ---- settings --------------------------------------------------------------------------------------------------------
# The settings of qwen.yaml as forms show them: value, default, choices, description, from the classes of the settings.
#
# What a form changes is never written to qwen.yaml. It becomes `--set key=value` on the command line, checked before by
# the same code as there.

NOT_IN_YAML = re.compile("[\x7f-\xa0\u2028\u2029\ufeff]")
"""Characters of JSON that YAML refuses, or takes for white space."""
Changes = dict[str, Any]
"""New values by the dotted names of the settings."""


class Changed(BaseModel):
    """The body of a request to check changes."""

    changes: Changes = {}


def routes_of(workspace: Workspace) -> APIRouter:
    router = router_of()

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
            "title": each.title,
            "section": SECTIONS[each.key.rpartition(".")[0]],
            "value": values[each.key],
            "default": None if each.default is PydanticUndefined else each.default,
            "choices": choices_of(each),
            "bounds": each.bounds,
            "kind": kind_of(each),
            "description": each.description,
            "other_names": other_names(each),
        }
        for each in all_settings()
        if any(each.key.startswith(f"{section}.") or each.key == section for section in sections)
    ]


def choices_of(setting: Setting) -> tuple[str, ...]:
    """The only values of a setting; those of a flag that may be left open, too."""
    return setting.choices or (("true", "false") if setting.kinds == (bool,) and setting.default is None else ())


AREAS = ("data.vae_image_size", "data.condition_image_size", "caption.image_size", "cache.vae_batch_pixels")
"""Settings whose numbers are pixels of an area: 1024² or 1024×768 is easier to read and type than their product."""


def kind_of(setting: Setting) -> str:
    """How a form asks for a value.

    `choice`, `flag`, `integer`, `number`, `bytes`, `text`; `area` for one or several, `sizes` for pairs of width and
    height, `numbers` and `list` for values with commas between them; `yaml` for all else.
    """
    first, kinds = setting.kinds[0], set(setting.kinds)
    if choices_of(setting):
        return "choice" if len(kinds) == 1 else "yaml"
    if setting.key in AREAS:
        return "area"
    if get_origin(first) in (list, tuple) and len(kinds) == 1:
        inner = {getattr(each, "__origin__", each) for each in get_args(first)}
        known = (({tuple}, "sizes"), ({int, float}, "numbers"), ({str}, "list"))
        return next((name for kinds, name in known if inner <= kinds), "yaml")
    numbers = {bool: "flag", int: "integer", ByteSize: "bytes", float: "number"}
    return numbers.get(first, "text" if str in kinds else "yaml")


def options_of(changes: Mapping[str, Any]) -> list[str]:
    """The changes as `--set` takes them: values as JSON, which YAML reads."""
    return [part for key, value in sorted(changes.items()) for part in ("--set", f"{key}={_typed(value)}")]


def _typed(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return NOT_IN_YAML.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


# ---- written pages ---------------------------------------------------------------------------------------------------
# Pages that commands have written, such as `inspect --html`: served in a sandbox, which has no origin.
#
# Such a page has a policy of its own, which knows its script by its hash. The sandbox keeps it from the routes of this
# program and from the token. The key in its address (`app.py`) opens the page and the files beside it: a page that
# came with a run can give its address away.

KINDS = {".html": "text/html; charset=utf-8", ".js": "text/javascript; charset=utf-8"}
SANDBOX = {
    "Content-Security-Policy": (
        "sandbox allow-scripts allow-forms; default-src 'none'; script-src 'unsafe-inline' 'self'; "
        "style-src 'unsafe-inline'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "Cross-Origin-Resource-Policy": "cross-origin",
    "Cross-Origin-Opener-Policy": "unsafe-none",
}
"""To a page without an origin, the files beside it are those of another; and a browser shows no page that has both a
sandbox and an opener policy. Forms are for the filters of a list: they are sent nowhere."""

POLICY = "Content-Security-Policy"
ALONE = SANDBOX | {POLICY: SANDBOX[POLICY].replace(" 'self'", "")}


def written_page(folder: Path, name: str, *, is_alone: bool = False) -> FileResponse:
    """A page below a folder, or a script beside it; RefusedError (404) for everything else.

    A page that `is_alone` needs no scripts beside it, and can load none: those of other pages have what these show.
    """
    root = folder.resolve()
    try:
        file = (root / name).resolve()
        is_page = ".." not in Path(name).parts and file.is_relative_to(root) and file.suffix in KINDS and file.is_file()
    except (OSError, ValueError):  # a null byte, too long a name
        is_page = False
    if not is_page:
        raise RefusedError(404, "there is no such page", "write it again")
    return FileResponse(file, media_type=KINDS[file.suffix], headers=ALONE if is_alone else SANDBOX)


# ---- decoding --------------------------------------------------------------------------------------------------------
# Images of the opened folders, decoded by many threads at once in limited memory.

M_MMAP_THRESHOLD = -3
"""A parameter of mallopt(3)."""
PIXELS = 100_000_000
"""Pixels of images that are decoded at once. Each takes about 8 bytes until it is scaled down, so that is 0.8 GB."""


def return_large_blocks() -> None:
    """Let this process return freed blocks of a megabyte and more to the system, where malloc is glibc's.

    Otherwise each of the threads that answer requests, up to 40, keeps what its largest image took.
    """
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 1 << 20)


class Room:
    """A number of pixels that users share, first come, first served; what is larger than all of it gets all of it."""

    def __init__(self, pixels: int) -> None:
        self.pixels, self.used = pixels, 0
        self._turn, self._changed = Lock(), Condition()

    @contextmanager
    def taken(self, pixels: int) -> Iterator[None]:
        """Wait for that many, and use them within the block."""
        pixels = min(pixels, self.pixels)
        with self._turn, self._changed:
            self._changed.wait_for(lambda: self.used + pixels <= self.pixels)
            self.used += pixels
        try:
            yield
        finally:
            with self._changed:
                self.used -= pixels
                self._changed.notify()


ROOM = Room(PIXELS)


@contextmanager
def decoded(data: bytes, where: str, decode: Callable[[bytes, str], Image.Image]) -> Iterator[Image.Image]:
    """An image, by a function of `sources/images.py`, in the block; SourceError if it cannot be decoded."""
    width, height = upright_size(data, where)
    with ROOM.taken(width * height):
        yield decode(data, where)
