"""Edits of an open source besides prompts and masks: undo, images turned or renamed, old versions put back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel

from qwen_cache.errors import SourceError
from qwen_cache.service.http import RefusedError
from qwen_cache.sources import left_out
from qwen_cache.sources.detect import Entry
from qwen_cache.sources.editing import TableEditor
from qwen_cache.sources.images import upright_size
from qwen_cache.sources.old_files import OldVersion, hash_of
from qwen_cache.sources.places import File, similar_file
from qwen_cache.sources.rows import Readable
from qwen_train.ui.opened import CHANGED, Changing, OpenSource
from qwen_train.ui.scan import image_of, roles_of, version_of
from qwen_train.ui.workspace import ROOM

MOST_VERSIONS = 100  # of a file that are listed
MOST_SHOWN = 300  # characters of an old prompt

Get = Callable[[str], OpenSource]
Text = Annotated[str, Query(max_length=4096)]


class OfSource(BaseModel):
    source: str


class Undone(OfSource):
    id: str


class OfRow(OfSource):
    row: int
    seen: str
    """The version of the row."""


class Turned(OfRow):
    role: str
    v: str
    """The version of the image."""
    turns: Literal[1, 2, 3]
    """Quarters clockwise."""


class Renamed(OfRow):
    old: str
    """The file as it was offered."""


class Restored(OfSource):
    row: int | None = None
    what: str
    version: str
    seen: str | None
    """The hash of the file as it was listed."""


class Accepted(OfSource):
    rows: list[int]
    order: int


# ---- edits -----------------------------------------------------------------------------------------------------------


def undo(source: OpenSource, id: str) -> str:
    """Undo the last edit, if it has this id; what it was."""
    with source.lock:
        editor = source.writing()
        if not source.undoable or source.undoable[-1].id != id:
            raise RefusedError(409, "this is not the last edit any more", "look at what is offered now")
        edit = source.undoable.pop()  # also if that fails: then a file has changed since
        with Changing(source, editor, "", ()):
            editor.others_changed = not edit.is_alone or any(
                row >= len(source.entries) or source.entries[row] != entry
                for row, entry in zip(edit.rows, edit.after, strict=True)
            )
            editor.undo(edit.written)
            if not editor.others_changed:
                source.replace(edit.rows, edit.before)
        return edit.what


def rotate(source: OpenSource, body: Turned) -> None:
    """Turn an image of a row; a target with its masks, which belong to its pixels."""
    with source.lock:
        editor, entry = source.writing(), source.seen(body.row, body.seen)
        image = image_of(entry, body.role)
        if image is None or version_of(image) != body.v:
            raise CHANGED
        images = [image, *(_masks_of(source, image) if body.role == "target" else ())]
        width, height = upright_size(image.read(), str(image))
        with ROOM.taken(width * height), Changing(source, editor, f"turning the {body.role} of {entry.name}", []):
            editor.rotate(entry, images, body.turns)


def _masks_of(source: OpenSource, target: Readable) -> list[Readable]:
    """The masks of a target, in all rows; SourceError if another target has one of them too."""
    masks = {entry.mask: None for entry in source.entries if entry.target == target and entry.mask is not None}
    for entry in source.entries if masks else ():
        if entry.mask in masks and entry.target != target:
            do = "give each target a mask of its own"
            raise SourceError("its mask belongs to another target too", where=entry.where, found=entry.mask, do=do)
    return list(masks)


def renames(source: OpenSource, entry: Entry) -> list[tuple[Path, Path]]:
    """Files that only need another name to belong to a row, with that name."""
    found = list(entry.renames)
    for image in _images(entry):
        path = Path(image.local) if isinstance(image, File) and image.local else None
        if path is None or path.is_file() or (near := similar_file(str(path))) is None:
            continue
        old = Path(near)
        is_like = old.parent == path.parent and old.suffix.lower() == path.suffix.lower()
        if is_like and not any(File(old) in _images(other) for other in source.entries):
            found.append((old, path))
    return [(old, new) for old, new in dict.fromkeys(found) if old.is_file() and not _is_taken(old, new)]


def _images(entry: Entry) -> tuple[Readable | None, ...]:
    return (entry.target, *entry.controls, entry.mask, entry.rejected)


def _is_taken(old: Path, new: Path) -> bool:
    """True if another file has the new name."""
    return os.path.lexists(new) and not (new.exists() and new.samefile(old))


def rename(source: OpenSource, body: Renamed) -> None:
    """Give a file of a row the name that its problem asks for."""
    with source.lock:
        editor, entry = source.writing(), source.seen(body.row, body.seen)
        offered = {source.shown(str(old)): (old, new) for old, new in renames(source, entry)}
        if body.old not in offered:
            raise CHANGED
        old, new = offered[body.old]
        with Changing(source, editor, f"renaming {old.name} to {new.name}", []):
            editor.rename(entry, old, new)


# ---- old versions ----------------------------------------------------------------------------------------------------


def files_of(source: OpenSource, row: int | None) -> dict[str, Path]:
    """The files of a row that an edit can replace, by what they are; without a row, those that all rows share."""
    editor = source.writing()
    table = editor.table if isinstance(editor, TableEditor) else None
    if row is None:
        return {"table": table} if table else {"rows left out": editor.files.root / left_out.LIST}
    entry = source.entry(row)
    found = {} if table else {"prompt": editor.prompt_files([entry])[0]}
    for role in roles_of(entry):
        image = image_of(entry, role)
        if isinstance(image, File) and image.local:
            found[role] = Path(image.local)
    return found


def versions(source: OpenSource, row: int | None) -> Iterator[dict[str, Any]]:
    """The old versions of these files, the newest first."""
    files = files_of(source, row)
    kept = source.writing().files.versions(files.values())
    for what, path in files.items():
        if listed := kept[path][:MOST_VERSIONS]:
            shown = [_version(each) for each in listed]
            yield {"what": what, "where": source.shown(str(path)), "seen": hash_of(path), "versions": shown}


def _version(version: OldVersion) -> dict[str, Any]:
    about: dict[str, Any] = {"version": version.name, "time": version.time, "bytes": version.copy.stat().st_size}
    if version.copy.suffix.lower() == ".txt":
        with open(version.copy, encoding="utf-8-sig", errors="replace") as file:
            return about | {"text": file.read(MOST_SHOWN)}
    with suppress(SourceError):
        about["size"] = upright_size(version.copy.read_bytes(), str(version.copy))
    return about


def restore(source: OpenSource, body: Restored) -> None:
    """Put back an old version of a file."""
    with source.lock:
        editor, path = source.writing(), files_of(source, body.row).get(body.what)
        if path is None:
            raise CHANGED
        with Changing(source, editor, f"putting back {path.name}", []):
            editor.restore(path, body.version, body.seen)


def accept(source: OpenSource, body: Accepted) -> None:
    """Take the drafts of rows as they are."""
    with source.lock:
        if body.order != source.order:
            raise CHANGED
        source.drafts.accept([source.entry(row).name for row in body.rows])
        source.revision += 1


# ---- routes ----------------------------------------------------------------------------------------------------------


def add_edits(router: APIRouter, get: Get) -> None:
    """The routes of these edits; the page asks for the rows that it shows as they are then."""

    @router.post("/undo")
    def undo_last(body: Undone) -> dict[str, Any]:
        return {"undone": undo(get(body.source), body.id)}

    @router.post("/rotate")
    def rotate_image(body: Turned) -> dict[str, Any]:
        rotate(get(body.source), body)
        return {}

    @router.post("/rename")
    def rename_file(body: Renamed) -> dict[str, Any]:
        rename(get(body.source), body)
        return {}

    @router.get("/versions")
    def old_versions(source: Text, row: int | None = None) -> dict[str, Any]:
        return {"files": list(versions(get(source), row))}

    @router.post("/restore")
    def restore_version(body: Restored) -> dict[str, Any]:
        restore(get(body.source), body)
        return {}

    @router.post("/accept")
    def accept_drafts(body: Accepted) -> dict[str, Any]:
        accept(get(body.source), body)
        return {}
