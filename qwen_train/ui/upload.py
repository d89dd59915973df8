"""A new source from files of the browser: photographs, prompts and tables, written as a folder that `build` reads.

What will come is told first, by name, role and size, and checked whole: names, kinds, how many, how much. The files are
then taken one by one into a folder of the state, and get their name in the project when the last one is there. Refuses
a name that is taken: nothing is written over, and no half of an upload is seen.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path, PurePosixPath
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from pydantic import BaseModel

from qwen_cache.errors import SourceError
from qwen_cache.service.http import RefusedError
from qwen_cache.sources.images import upright_size
from qwen_cache.sources.layouts import CONTROL_FOLDERS, MASK_FOLDERS, TARGET_FOLDERS
from qwen_cache.sources.places import IMAGE_EXTENSIONS, suffix
from qwen_cache.sources.rows import MAX_TEXT
from qwen_cache.sources.tables import READERS
from qwen_cache.storage.files import make_folder, replace, sync_folder, write_durably
from qwen_train.ui.workspace import Workspace

MOST_FILES = 20_000
LARGEST = 200_000_000  # bytes of a file
FREE = 1_000_000_000  # bytes of the disk that stay free
LONGEST = 200  # bytes of a name
ABANDONED = 3600 * 24  # seconds after which an upload that nobody has finished is removed
TEXT = ".txt"
NOT_IN_NAMES = re.compile(r'[\x00-\x1f\x7f\\:*?"<>|\ud800-\udfff]')
"""Characters that some system does not take in a name."""

Role = Literal["target", "control", "mask", "sorted"]
FOLDERS = {"target": TARGET_FOLDERS[0], "control": CONTROL_FOLDERS[0], "mask": MASK_FOLDERS[0]}


class Coming(BaseModel):
    """A file that will be sent."""

    path: str
    """Its name, or its path in the folder that was dropped."""
    role: Role
    """`sorted`: it keeps its path."""
    size: int


class NewSource(BaseModel):
    """A folder of the project, and what it will have."""

    name: str
    files: list[Coming]


class Uploads:
    """The uploads of an opened folder that are under way."""

    def __init__(self, workspace: Workspace) -> None:
        self.workspace, self.folder = workspace, workspace.state / "incoming"
        self._waiting: dict[str, tuple[Path, list[PurePosixPath], set[int]]] = {}
        """By id: the folder that it becomes, the places of its files in it, and which of them are still missing."""
        self._lock = Lock()

    def begin(self, new: NewSource) -> dict[str, Any]:
        """Take note of what will come; RefusedError if any of it cannot be."""
        target, places = self._target(new.name), places_of(new.files)
        free = shutil.disk_usage(self.workspace.folder).free - FREE
        if (size := sum(each.size for each in new.files)) > free:
            raise RefusedError(
                422, f"the files have {size:,} bytes, and the disk has room for {free:,}", "make room, or add fewer"
            )
        self._remove_abandoned()
        id = secrets.token_hex(8)
        make_folder(self.folder / id)
        with self._lock:
            self._waiting[id] = target, places, set(range(len(places)))
        return {"id": id}

    def take(self, id: str, number: int, data: bytes) -> dict[str, Any]:
        """Keep the file of this number; RefusedError if it is not what its name says."""
        _, places, missing = self._get(id)
        if number not in missing:
            raise RefusedError(404, "no such file is expected", "add the files again")
        place = places[number]
        check_content(place, data)
        path = self.folder / id / place
        make_folder(path.parent)
        write_durably(path, data)
        with self._lock:
            missing.discard(number)
        return {"missing": len(missing)}

    def finish(self, id: str) -> dict[str, Any]:
        """Give the folder its name; the answer has the source to open: the folder, or a table in it."""
        target, places, missing = self._get(id)
        if missing:
            first = places[min(missing)]
            raise RefusedError(409, f"{len(missing)} files are missing, such as {first}", "add the files again")
        with self._lock:
            self._target(target.name)
            replace(self.folder / id, target)
            sync_folder(target.parent)
            del self._waiting[id]
        table = next((place for place in places if place.suffix.lower() in READERS), None)
        return {"source": self.workspace.shown(target / table if table else target), "files": len(places)}

    def end(self, id: str) -> dict[str, Any]:
        """Forget an upload, and remove what came of it."""
        with self._lock:
            if self._waiting.pop(id, None):
                shutil.rmtree(self.folder / id, ignore_errors=True)
        return {}

    def _get(self, id: str) -> tuple[Path, list[PurePosixPath], set[int]]:
        if id not in self._waiting:
            raise RefusedError(404, "this upload is not known any more", "add the files again")
        return self._waiting[id]

    def _target(self, name: str) -> Path:
        """The folder of this name in the project; RefusedError if it cannot be a new one."""
        name = name.strip()
        if not name or "/" in name or not is_name(name):
            do = "give one name such as photographs: no slash, no dot at its beginning, at most 200 letters"
            raise RefusedError(422, f"{name!r} cannot be the name of a folder", do)
        target = self.workspace.folder / name
        if os.path.lexists(target):
            raise RefusedError(409, f"{name} is there already, and nothing is written over", "give another name")
        return target

    def _remove_abandoned(self) -> None:
        with suppress(OSError), self._lock:
            for each in self.folder.iterdir():
                if each.stat().st_mtime < time.time() - ABANDONED:
                    self._waiting.pop(each.name, None)
                    shutil.rmtree(each, ignore_errors=True)


def routes_of(workspace: Workspace, router: APIRouter) -> None:
    """Add the routes of uploads to those of the Data page."""
    uploads = Uploads(workspace)

    @router.post("/new")
    def begin(body: NewSource) -> dict[str, Any]:
        return uploads.begin(body)

    @router.post("/new/file")
    def take(id: str, number: int, body: Annotated[bytes, Body()] = b"") -> dict[str, Any]:
        return uploads.take(id, number, body)

    @router.post("/new/finish")
    def finish(id: Annotated[str, Query()]) -> dict[str, Any]:
        return uploads.finish(id)

    @router.post("/new/end")
    def end(id: Annotated[str, Query()]) -> dict[str, Any]:
        return uploads.end(id)


# ---- what is taken ---------------------------------------------------------------------------------------------------


def is_name(name: str) -> bool:
    """True if every system takes this name, and nothing hides it."""
    is_plain = name == name.strip() and not name.startswith(".") and not name.endswith(".")
    return bool(name) and is_plain and len(name.encode("utf-8", "replace")) <= LONGEST and not NOT_IN_NAMES.search(name)


def places_of(files: list[Coming]) -> list[PurePosixPath]:
    """The places of the files in the new folder; RefusedError for a name, kind, size or number that is not taken.

    Images by their role, prompts beside the targets; with a table all keep their paths, since it names them.
    """
    if not 0 < len(files) <= MOST_FILES:
        raise RefusedError(422, f"{len(files):,} files", f"add 1 to {MOST_FILES:,}; copy larger folders there yourself")
    tables = [each.path for each in files if suffix(Path(each.path)) in READERS]
    if len(tables) > 1:
        raise RefusedError(422, f"there are {len(tables)} tables, such as {tables[1]}", "add one table of all images")
    places: dict[str, PurePosixPath] = {}
    for each in files:
        place = _place(each, keeps_path=bool(tables))
        if str(place).casefold() in places:
            raise RefusedError(422, f"there are two files {place}", "rename one of them, or give it another role")
        places[str(place).casefold()] = place
    if not tables and not any(suffix(Path(each.path)) in IMAGE_EXTENSIONS for each in files):
        raise RefusedError(422, "there is no image among the files", "add the photographs too")
    return list(places.values())


def _place(file: Coming, *, keeps_path: bool) -> PurePosixPath:
    parts, kind = file.path.split("/"), suffix(Path(file.path))
    if not all(map(is_name, parts)):
        raise RefusedError(422, f"{file.path!r} is a name that some systems do not take", "rename the file")
    if kind not in (*IMAGE_EXTENSIONS, TEXT, *READERS):
        raise RefusedError(422, f"{file.path} is no image, prompt (.txt) or table", "leave it out")
    most = MAX_TEXT if kind == TEXT else LARGEST
    if not 0 <= file.size <= most:
        raise RefusedError(422, f"{file.path} has {file.size:,} bytes", f"add files of at most {most:,}")
    if keeps_path or file.role == "sorted":
        return PurePosixPath(*(parts[1:] or parts))  # without the folder that was dropped
    return PurePosixPath(FOLDERS["target" if kind == TEXT else file.role], parts[-1])


def check_content(place: PurePosixPath, data: bytes) -> None:
    """RefusedError unless the bytes are what the name says: an image that has a size, or text in UTF-8."""
    if len(data) > LARGEST:
        raise RefusedError(413, f"{place} has {len(data):,} bytes", f"add files of at most {LARGEST:,}")
    if place.suffix.lower() in IMAGE_EXTENSIONS:
        try:
            upright_size(data, str(place))
        except SourceError as error:
            raise RefusedError(422, f"{place}: {error.fault}", error.do or "leave it out") from None
        return
    try:
        data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise RefusedError(422, f"{place} is not text in UTF-8", "save it as UTF-8") from None
