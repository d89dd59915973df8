"""Editing a source on this machine, row by row: prompts, masks, and which rows are left out.

For folders of images and text tables; SourceError for every other kind. A file is written whole, and only the value
that changes: encoding, line ends, quotes and every other row keep their bytes. Before that, the old file is copied into
a folder of its own. An edit of a row that is no longer as it was listed is refused (`ChangedError`), also if two
programs edit at the same time. Nothing is written through a link, or outside the source's folder.
"""

from __future__ import annotations

import os
import re
import stat
import time
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, Unpack

from qwen_cache.errors import Problem, SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.sources import left_out
from qwen_cache.sources.detect import (
    ARCHIVES,
    METADATA_TABLES,
    SAVED,
    SAVED_SPLITS,
    Entry,
    SourceSettings,
    as_entry,
    checked,
    needs_of,
    unix,
)
from qwen_cache.sources.images import open_mask, upright_size
from qwen_cache.sources.layouts import Layout, find_layout
from qwen_cache.sources.pairs import beside, mask_name, prompts_of, read_some
from qwen_cache.sources.places import File, Folder, TableFolder, open_folder, read_bytes, suffix
from qwen_cache.sources.rows import COLUMNS, MAX_TEXT, Columns, Draft, Needs, find_columns, has_captions, read_row
from qwen_cache.sources.tables import CSV, READERS, CsvText, TableText, changed, open_text
from qwen_cache.storage.files import LockHeldError, locked, make_folder, sync, whole_file, write_durably
from qwen_cache.storage.remote import Location, is_remote

PATIENCE = 10.0
"""Seconds to wait for another program's edit, which takes a fraction of one."""
LARGE_COPY, MOST_COPIES = 1_000_000, 1_000_000_000
"""Bytes of a copy that makes older ones go, and of those that stay. Every edit copies a table, whatever its size."""
PNG = b"\x89PNG\r\n\x1a\n"


class ChangedError(SourceError):
    """A row is no longer as it was listed."""

    def __init__(self, what: str, where: object) -> None:
        super().__init__(f"{what} was changed meanwhile", where=where, do="reload the source, and repeat the edit")


class Editor(Protocol):
    """Edits the rows of one source, each as it was listed."""

    @property
    def others_changed(self) -> bool:
        """True if the last edit changed where other rows are, or may have changed their problems: list them again."""

    def set_prompt(self, entry: Entry, text: str, caption: int = 0) -> Entry:
        """Write one caption of a row; the row as it is then."""

    def set_left_out(self, entries: Sequence[Entry], is_left_out: bool) -> list[Entry]:
        """Leave rows out or take them in again; the rows as they are then.

        Of a folder, the names and prompts of the rows are compared with those that were listed, and no images.
        """

    def set_mask(self, entry: Entry, png: bytes, seen: str | None) -> Entry:
        """Write the mask of a row, as large as its target; the row as it is then.

        `seen` is the content hash of the mask that was edited, None if there was none.
        """


def table_hash(source: Location) -> str:
    """The content hash of the table that a source is; empty for other sources, and if it cannot be read."""
    with suppress(SourceError):
        table = _table(source)
        return "" if table is None else content_hash(read_bytes(table))
    return ""


def open_editor(source: Location, kept: Path, listed: str = "", **settings: Unpack[SourceSettings]) -> Editor:
    """The editor of `source` for the settings that it was listed with; `kept` is for old files.

    `listed` is the `table_hash` of which all rows are that will be edited; while it is that of the table, they need
    not be compared with it one by one. SourceError for a source that cannot be edited.
    """
    needs, allow_empty = needs_of(**settings), settings.get("allow_empty_prompt", False)
    table = _table(source)
    if table is not None:
        return TableEditor(needs, allow_empty, OldFiles(table.parent, kept), table, listed)
    if not is_remote(source) and _is_folder_of_images(source):
        return FolderEditor(needs, allow_empty, OldFiles(source, kept))
    expected = f"a folder of images, or a table ({', '.join(READERS)}), on this machine"
    do = "write a table of its images first"
    raise SourceError("this source cannot be edited", where=source, expected=expected, do=do)


def _table(source: Location) -> Path | None:
    if is_remote(source):
        return None
    if not source.is_dir():
        return source if suffix(source) in READERS else None
    return next((source / name for name in METADATA_TABLES if (source / name).is_file()), None)


def _is_folder_of_images(source: Path) -> bool:
    if not source.is_dir():
        return False
    folder = open_folder(source)
    return not ({SAVED, SAVED_SPLITS} & {*folder.files} or any(folder.having(ending) for ending in ARCHIVES))


# ---- files -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OldFiles:
    """The folder of a source, and the one for copies of what is replaced there."""

    root: Path
    kept: Path

    @contextmanager
    def locked(self, name: str) -> Iterator[None]:
        """Alone with the source, among programs that edit it by this module."""
        lock, end = self.root / f".{name}edit.lock", time.monotonic() + PATIENCE
        while True:
            try:
                with locked(lock, remove=True):
                    yield
                    return
            except LockHeldError as error:
                if time.monotonic() > end:
                    do = "try again when it has ended"
                    raise SourceError(f"{error.holder} is editing this source", where=self.root, do=do) from None
                time.sleep(0.02)
            except PermissionError as error:
                do = "change its rights, or edit a copy"
                raise SourceError("this folder cannot be written to", where=self.root, do=do) from error

    def place(self, path: Path) -> Path:
        """The path below the source's folder; SourceError if it leads out of it, or cannot be written."""
        root, parent = self.root.resolve(), path.parent.resolve()
        if not parent.is_relative_to(root):
            do = "edit the file where it is, or copy it into the source"
            raise SourceError("this is outside the source's folder", where=path, expected=root, found=parent, do=do)
        if path.is_symlink():
            do = "edit the file that it leads to, or replace the link by a copy"
            raise SourceError("this is a link, which is not written through", where=path, do=do)
        if path.exists() and not path.is_file():
            raise SourceError("this is not a file", where=path, do="remove it")
        if path.exists() and not (os.access(path, os.W_OK) and path.stat().st_mode & 0o222):
            raise SourceError("this file is read-only", where=path, do="change its rights, or edit a copy")
        return parent.relative_to(root) / path.name

    def write(self, files: Mapping[Path, bytes | None]) -> None:
        """Replace files, in this order, once all old ones are kept; None removes one."""
        changed = {path: data for path, data in files.items() if data is None or _bytes_of(path) != data}
        places = {path: self.place(path) for path in changed}
        old = {place: path.read_bytes() for path, place in places.items() if path.exists()}
        if old:
            folder = self._new_folder()
            for place, content in old.items():
                make_folder((folder / place).parent)
                write_durably(folder / place, content)
            if sum(map(len, old.values())) > LARGE_COPY:
                self._remove_old_copies(folder)
        for path, data in changed.items():
            if data is None:
                path.unlink()
            else:
                make_folder(path.parent)
                _replace(path, data)

    def _remove_old_copies(self, newest: Path) -> None:
        """Down to `MOST_COPIES` bytes, the oldest first; the first copy of each file, its original, and the newest
        stay."""
        copies = [path for path in self.kept.rglob("*") if path.is_file()]
        size, seen = sum(path.stat().st_size for path in copies), set[Path]()
        for path in sorted(copies, key=lambda path: (path.stat().st_mtime_ns, path)):
            place = Path(*path.relative_to(self.kept).parts[1:])
            if size > MOST_COPIES and place in seen and not path.is_relative_to(newest):
                size -= path.stat().st_size
                path.unlink()
                with suppress(OSError):  # other files were copied with it
                    path.parent.rmdir()
            seen.add(place)

    def _new_folder(self) -> Path:
        make_folder(self.kept)
        stamp, number = time.strftime("%Y-%m-%dT%H-%M-%S", time.gmtime()), 1
        while True:
            try:
                (folder := self.kept / f"{stamp}-{number}").mkdir()
            except FileExistsError:
                number += 1
            else:
                return folder


def _bytes_of(path: Path) -> bytes | None:
    return path.read_bytes() if path.is_file() else None


def _replace(path: Path, data: bytes) -> None:
    """`write_durably` with the rights of the old file."""
    mode = stat.S_IMODE(path.stat().st_mode) if path.exists() else None
    with whole_file(path) as temporary:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            sync(file)
        if mode is not None:
            temporary.chmod(mode)


def _encoded(text: str, where: object) -> bytes:
    """A prompt as UTF-8; SourceError if it is none, or too long."""
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        do = "write it again; programs that cut captions leave half an emoji"
        raise SourceError(
            "the prompt is not text", where=where, found=ascii(error.object[error.start]), do=do
        ) from None
    if len(data) > MAX_TEXT:
        expected = f"at most {MAX_TEXT} bytes"
        raise SourceError("the prompt is too long", where=where, expected=expected, found=len(data), do="shorten it")
    return data


def _check_mask(entry: Entry, png: bytes, seen: str | None) -> None:
    """SourceError for bytes that are no mask of the entry, ChangedError if its mask is not the one that was seen."""
    if entry.target is None:
        raise SourceError("a row without a target has no mask", where=entry.where, do="add the target first")
    if not png.startswith(PNG):
        raise SourceError("the mask is not a PNG", where=entry.where, found=png[:8], do="save it as PNG")
    mask, size = open_mask(png, entry.where).size, upright_size(entry.target.read(), str(entry.target))
    if mask != size:
        expected, found = (f"{width}×{height}" for width, height in (size, mask))
        what, do = "the mask has another size than its target", "make it as large as the target"
        raise SourceError(what, where=entry.where, expected=expected, found=found, do=do)
    try:
        there = content_hash(entry.mask.read()) if entry.mask else None
    except SourceError:  # it is named, but is not there
        there = None
    if there != seen:
        raise ChangedError("the mask", entry.mask or entry.where)


def _as_left_out(entry: Entry) -> Entry:
    """The row, which has no problems any more."""
    shown = entry.names, entry.where, entry.target, entry.controls, entry.mask, entry.prompts, entry.phrase
    return Entry(*shown, is_left_out=True, problems=())  # `replace` takes three times as long


def _is_same(entry: Entry, other: Entry | None) -> bool:
    """True if a row is as it was; its problems may depend on other rows."""
    return other is not None and replace(entry, problems=()) == replace(other, problems=())


# ---- folders of images -----------------------------------------------------------------------------------------------


@dataclass
class FolderEditor:
    """Prompts are NAME.txt, masks NAME_mask.png beside the controls; left_out.txt lists what is left out."""

    needs: Needs
    allow_empty_prompt: bool
    files: OldFiles
    others_changed: bool = field(default=False, init=False)

    @property
    def source(self) -> Path:
        return self.files.root

    @contextmanager
    def _opened(self) -> Iterator[tuple[Folder, Layout]]:
        with self.files.locked(""):
            folder = open_folder(self.source)
            layout = find_layout(folder, self.needs)
            if not layout.target:
                do = "write a table of them"
                raise SourceError("rows without targets cannot be edited", where=self.source, do=do)
            yield folder, layout

    @contextmanager
    def _editing(self, entries: Sequence[Entry]) -> Iterator[tuple[Folder, Layout]]:
        with self._opened() as (folder, layout):
            now = self._rows(folder, layout, [entry.name for entry in entries], near=True)
            for entry in entries:
                if not _is_same(entry, now.get(entry.name)):
                    raise ChangedError("this row", entry.where)
            yield folder, layout

    def _rows(self, folder: Folder, layout: Layout, names: Collection[str], *, near: bool) -> dict[str, Entry]:
        def entry(draft: Draft) -> Entry:
            return as_entry(draft, checked(draft, self.needs, allow_empty_prompt=self.allow_empty_prompt)[1])

        found = read_some(folder, layout, self.needs, frozenset(names), near=near)
        return {name: entry(draft) for name, draft in found.items()}

    def _edited(self, entries: Sequence[Entry]) -> list[Entry]:
        """The rows after an edit; if they had problems, others may have shared these."""
        folder, names = open_folder(self.source), [entry.name for entry in entries]
        layout = find_layout(folder, self.needs)
        now = self._rows(folder, layout, names, near=True)
        if has_problems := any(row.problems for row in now.values()):
            now = self._rows(folder, layout, names, near=False)
        self.others_changed = has_problems or any(entry.problems for entry in entries)
        return [now[name] for name in names]

    def set_prompt(self, entry: Entry, text: str, caption: int = 0) -> Entry:
        data = _encoded(text, entry.where)
        with self._editing([entry]) as (_, layout):
            if caption:
                raise SourceError("a target of a folder has one caption", where=entry.where, found=caption + 1)
            folder = layout.prompt or layout.target
            if folder == "." and f"{entry.name}.txt" == left_out.LIST:
                do = "rename the image"
                raise SourceError(f"{left_out.LIST} is the list of rows left out", where=entry.where, do=do)
            [path, *others] = beside(self.source / folder, entry.name, [".txt"]) or [
                self.source / folder / f"{entry.name}.txt"
            ]
            if others:
                do = "keep the right one"
                raise SourceError("several files are this prompt", where=path, found=others[0].name, do=do)
            self.files.write({path: _like(_bytes_of(path), data.decode())})
            return self._edited([entry])[0]

    def set_left_out(self, entries: Sequence[Entry], is_left_out: bool) -> list[Entry]:
        with self._opened() as (folder, layout):
            path = self.source / left_out.LIST
            data = _bytes_of(path) or b""
            mark = BOM_UTF8 if data.startswith(BOM_UTF8) else b""
            text = data.removeprefix(mark).decode()
            out = {line.name for line in left_out.lines_of(text)}
            prompts = prompts_of(folder, layout, [entry.name for entry in entries])
            for entry in entries:
                prompt = prompts.get(entry.name)
                if prompt is None or (unix(prompt), entry.name in out) != (entry.prompts[0], entry.is_left_out):
                    raise ChangedError("this row", entry.where)
            text = left_out.changed_list(text, [entry.name for entry in entries], is_left_out=is_left_out)
            if text or data:
                self.files.write({path: mark + text.encode()})
            if not is_left_out:
                return self._edited(entries)
            self.others_changed = any(entry.problems for entry in entries)
            return [_as_left_out(entry) for entry in entries]

    def set_mask(self, entry: Entry, png: bytes, seen: str | None) -> Entry:
        with self._editing([entry]) as (_, layout):
            _check_mask(entry, png, seen)
            old = Path(entry.mask.local or "") if isinstance(entry.mask, File) else None
            path = old.with_suffix(".png") if old and suffix(old) != ".png" else old
            path = path or self.source / mask_name(self.source, layout, entry.name)
            self.files.write({path: png} | ({old: None} if old and old != path else {}))
            return self._edited([entry])[0]


def _like(old: bytes | None, text: str) -> bytes:
    """A prompt as the old one is written: with its byte order mark, its line ends, and the white space after it."""
    mark = BOM_UTF8 if (old or b"").startswith(BOM_UTF8) else b""
    try:
        before = "\n" if old is None else old.removeprefix(mark).decode()
    except UnicodeDecodeError:
        before = "\n"
    text = unix(text).replace("\n", "\r\n") if "\r\n" in before else text
    mark = BOM_UTF8 if text.startswith("\ufeff") else mark  # which would be read as a mark alone
    return mark + text.encode() + before[len(before.rstrip()) :].encode()


# ---- tables ----------------------------------------------------------------------------------------------------------


@dataclass
class TableEditor:
    """Prompts and `left_out` are cells; a mask is a file of the source's folder that a cell names."""

    needs: Needs
    allow_empty_prompt: bool
    files: OldFiles
    table: Path
    listed: str = ""
    """The content hash of a table of which all rows are that are edited."""
    others_changed: bool = field(default=False, init=False)
    _names: tuple[str, list[str]] = field(default=("", []), init=False)
    """The columns of the table that has this content hash: those of JSON are in all of its rows."""

    @contextmanager
    def _editing(self, entries: Sequence[Entry]) -> Iterator[Opened]:
        with self.files.locked(f"{self.table.name}."):
            data = read_bytes(self.table)
            opened = self._opened(data)
            if self._names[0] != self.listed:
                self.listed = ""
                for entry in entries:
                    if not _is_same(entry, opened.entry(entry)):
                        raise ChangedError("this row", entry.where)
            yield opened

    def _opened(self, data: bytes) -> Opened:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError:
            raise ChangedError("this table", self.table) from None
        found, rows = content_hash(data), open_text(self.table, text)
        if found != self._names[0]:
            if found == self.listed and isinstance(rows, CsvText):
                self._names = found, rows.names
            else:
                self._names = found, READERS[suffix(self.table)](self.table, text)[0]
        names = self._names[1]
        return Opened(self.table, data, rows, names, find_columns(names, self.table, self.needs), self)

    def _write(
        self,
        opened: Opened,
        entries: Sequence[Entry],
        changes: Mapping[str, Mapping[str, Any]],
        files: Mapping[Path, bytes | None] | None = None,
        *,
        is_left_out: bool = False,
    ) -> list[Entry]:
        """Write new values by row, after some other files; the rows as they are then, which may be left out."""
        if read_bytes(self.table) != opened.data:
            raise ChangedError("this table", self.table)
        rows = changed(opened.rows, changes) if changes else opened.rows
        self.others_changed = isinstance(rows, CsvText) and _lines(rows.text) != _lines(opened.rows.text)
        data = (BOM_UTF8 if opened.data.startswith(BOM_UTF8) else b"") + rows.text.encode()
        self.files.write({**(files or {}), self.table: data})
        names = dict.fromkeys([*opened.names, *(name for values in changes.values() for name in values)])
        self._names = content_hash(data), [*names]
        self.listed = self._names[0] if self.listed and not self.others_changed else ""
        if is_left_out:
            return [_as_left_out(entry) for entry in entries]
        now = replace(
            opened, data=data, rows=rows, names=[*names], columns=find_columns([*names], self.table, self.needs)
        )
        return [row for entry in entries if (row := now.entry(entry)) is not None]

    def set_prompt(self, entry: Entry, text: str, caption: int = 0) -> Entry:
        _encoded(text, entry.where)
        with self._editing([entry]) as opened:
            column = opened.column("prompt", ("prompt",))
            values = opened.values(entry.where)
            value: Any = text
            if has_captions(column, values.get(column)):
                captions = values.get(column)
                if not isinstance(captions, list) or not 0 <= caption < len(captions):
                    found, do = repr(captions)[:60], "correct the table first"
                    what = f"the column {column!r} has no caption {caption + 1}"
                    raise SourceError(what, where=entry.where, expected="a list of texts", found=found, do=do)
                value = [*captions[:caption], text, *captions[caption + 1 :]]
            elif caption:
                raise SourceError("this row has one caption", where=entry.where, found=caption + 1)
            return self._write(opened, [entry], {entry.where: {column: value}})[0]

    def set_left_out(self, entries: Sequence[Entry], is_left_out: bool) -> list[Entry]:
        with self._editing(entries) as opened:
            column = opened.column(left_out.COLUMN, (left_out.COLUMN,))
            yes, no = ("true", "") if suffix(self.table) in CSV else (True, False)
            others = (entry for entry in entries if entry.is_left_out != is_left_out)
            changes = {entry.where: {column: yes if is_left_out else no} for entry in others}
            return self._write(opened, entries, changes, is_left_out=is_left_out)

    def set_mask(self, entry: Entry, png: bytes, seen: str | None) -> Entry:
        with self._editing([entry]) as opened:
            _check_mask(entry, png, seen)
            column = opened.column("mask", COLUMNS["mask"][1:2] + COLUMNS["mask"])
            old = Path(entry.mask.local or "") if isinstance(entry.mask, File) and entry.mask.local else None
            if old and self._is_own(opened, old):
                return self._write(opened, [entry], {}, {old: png})[0]
            path = self._free(entry)
            cell = path.relative_to(self.table.parent).as_posix()
            return self._write(opened, [entry], {entry.where: {column: cell}}, {path: png})[0]

    def _is_own(self, opened: Opened, mask: Path) -> bool:
        """True if a mask may be replaced: a PNG of the source's folder that no other cell names."""
        if suffix(mask) != ".png" or not mask.parent.is_dir():
            return False
        try:
            self.files.place(mask)
        except SourceError:
            return False
        times, place = 0, os.path.realpath(mask)
        for record in READERS[suffix(self.table)](self.table, opened.rows.text)[1]:
            if isinstance(record, Problem):
                continue
            cells = [record[1].get(name) for role in ("target", "control", "mask") for name in opened.columns[role]]
            texts = [str(it).strip() for cell in cells for it in (cell if isinstance(cell, list) else [cell])]
            named = [self.table.parent / text for text in texts if text.endswith(mask.name)]
            times += sum(os.path.realpath(each) == place for each in named)
        return times == 1

    def _free(self, entry: Entry) -> Path:
        """A file for a new mask: beside the target, or beside the table if that is elsewhere."""
        target, folder = entry.target, self.table.parent
        stem = re.sub(r"[^\w.-]", "_", entry.name.rpartition("/")[2])[:100]
        if isinstance(target, File) and target.local:
            path = Path(os.path.normpath(target.local))
            stem = path.stem
            inside = path.is_relative_to(folder) and path.parent.resolve().is_relative_to(folder.resolve())
            folder = path.parent if inside else folder
        number = 1
        while os.path.lexists(path := folder / f"{stem}_mask{'' if number == 1 else f'_{number}'}.png"):
            number += 1
        return path


def _lines(text: str) -> int:
    return len(re.findall(r"\r\n|\r|\n", text))


@dataclass(frozen=True)
class Opened:
    """A table as it is now."""

    table: Path
    data: bytes
    rows: TableText
    names: list[str]
    columns: Columns
    editor: TableEditor

    def values(self, where: str) -> dict[str, Any]:
        return self.rows.values(where) or {}

    def column(self, role: str, new: Sequence[str]) -> str:
        """The column of a role, or the first new name that the table does not have."""
        if self.columns[role]:
            return self.columns[role][0]
        free = next((name for name in new if name not in self.names), None)
        if free is None:
            what, do = f"the table needs a column for {role!r}, but these have other roles", "rename them"
            raise SourceError(what, where=self.table, found=", ".join(new), do=do)
        return free

    def entry(self, listed: Entry) -> Entry | None:
        """The row at the place of a listed one, by that one's names; None if none is there."""
        values = self.rows.values(listed.where)
        if values is None:
            return None
        folder = TableFolder(self.table.parent, self.editor.needs.allow_urls)
        draft = read_row(listed.where, values, self.columns, folder, {})
        if len(draft.samples) != len(listed.names):
            return None
        samples = tuple(replace(row, name=name) for row, name in zip(draft.samples, listed.names, strict=True))
        draft = replace(draft, samples=samples)
        allow_empty = self.editor.allow_empty_prompt
        return as_entry(draft, checked(draft, self.editor.needs, allow_empty_prompt=allow_empty)[1])
