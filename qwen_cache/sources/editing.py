"""Editing a source on this machine: prompts, masks, which rows are left out, and images turned, renamed, put back.

For folders of images and text tables; SourceError for every other kind. A file is written whole, and only the value
that changes: encoding, line ends, quotes and every other row keep their bytes. Before that, the old file is copied into
a folder of its own. An edit of a row that is no longer as it was listed is refused (`ChangedError`), also if two
programs edit at the same time. Nothing is written through a link, or outside the source's folder.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Unpack

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
    without_gc,
)
from qwen_cache.sources.images import open_mask, upright_size
from qwen_cache.sources.layouts import Layout, find_layout
from qwen_cache.sources.old_files import ChangedError, OldFiles, Written, bytes_of
from qwen_cache.sources.pairs import beside, mask_name, names_of, prompts_of, read_some
from qwen_cache.sources.places import File, Folder, TableFolder, open_folder, read_bytes, suffix
from qwen_cache.sources.rotation import rotated
from qwen_cache.sources.rows import (
    COLUMNS,
    MAX_TEXT,
    Columns,
    Draft,
    Needs,
    Readable,
    find_columns,
    has_captions,
    read_row,
)
from qwen_cache.sources.tables import CSV, READERS, CsvText, TableText, changed, open_text
from qwen_cache.storage.remote import Location, is_remote

PNG = b"\x89PNG\r\n\x1a\n"


@dataclass
class Editor(ABC):
    """Edits the rows of one source, each as it was listed."""

    needs: Needs
    allow_empty_prompt: bool
    files: OldFiles
    others_changed: bool = field(default=False, init=False)
    """True if the last edit changed where other rows are, or may have changed their problems: list them again."""

    @abstractmethod
    def set_prompt(self, entry: Entry, text: str, caption: int = 0) -> Entry:
        """Write one caption of a row; the row as it is then."""

    @abstractmethod
    def set_prompts(self, changes: Sequence[tuple[Entry, Sequence[str]]]) -> list[Entry]:
        """Write all captions of rows; the rows as they are then, none of a table whose other rows have moved."""

    @abstractmethod
    def set_left_out(self, entries: Sequence[Entry], is_left_out: bool) -> list[Entry]:
        """Leave rows out or take them in again; the rows as they are then.

        Of a folder, the names and prompts of the rows are compared with those that were listed, and no images.
        """

    @abstractmethod
    def set_mask(self, entry: Entry, png: bytes, seen: str | None) -> Entry:
        """Write the mask of a row, as large as its target; the row as it is then.

        `seen` is the content hash of the mask that was edited, None if there was none.
        """

    @abstractmethod
    def prompt_files(self, entries: Sequence[Entry]) -> list[Path]:
        """The files of the rows' prompts; the table of a table."""

    @abstractmethod
    def _locked(self) -> AbstractContextManager[None]:
        """Alone with the source."""

    @abstractmethod
    def _editing(self, entries: Sequence[Entry]) -> AbstractContextManager[Any]:
        """`_locked`, with rows that are as they were listed."""

    def rotate(self, entry: Entry, images: Sequence[Readable], turns: int) -> None:
        """Turn images of a row by quarters clockwise, all of them or none."""
        paths = [Path(image.local) for image in images if isinstance(image, File) and image.local]
        if len(paths) < len(images):
            do = "turn it in the program that made the file"
            raise SourceError("this image is not in a file of its own", where=entry.where, do=do)
        self.others_changed = False
        with self._editing([entry]):
            self.files.write({path: rotated(read_bytes(path), str(path), turns) for path in paths})

    def rename(self, entry: Entry, old: Path, new: Path) -> None:
        """Give a file of a row the name that its problem asks for."""
        with self._editing([entry]):
            self.others_changed = True
            self.files.move(old, new)

    def restore(self, path: Path, version: str, seen: str | None) -> None:
        """Put back an old version of a file, whose content hash is `seen` now, None if it is not there."""
        with self._locked():
            self.others_changed = True
            self.files.restore(path, version, seen)

    def undo(self, written: Written) -> None:
        """Put back what an edit replaced; ChangedError if a file is no longer as the edit left it."""
        with self._locked():
            self.files.undo(written)


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


# ---- what is written -------------------------------------------------------------------------------------------------


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
    return Entry(*shown, is_left_out=True, problems=(), rejected=entry.rejected)  # `replace` takes three times as long


def _is_same(entry: Entry, other: Entry | None) -> bool:
    """True if a row is as it was; its problems, and names that they ask for, may depend on other rows."""
    if other is None or entry == other:
        return other is not None
    return replace(entry, problems=(), renames=()) == replace(other, problems=(), renames=())


# ---- folders of images -----------------------------------------------------------------------------------------------


@dataclass
class FolderEditor(Editor):
    """Prompts are NAME.txt, masks NAME_mask.png beside the controls; left_out.txt lists what is left out."""

    @property
    def source(self) -> Path:
        return self.files.root

    def _locked(self) -> AbstractContextManager[None]:
        return self.files.locked("")

    @contextmanager
    def _opened(self) -> Iterator[tuple[Folder, Layout]]:
        with self._locked():
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
        if caption:
            raise SourceError("a target of a folder has one caption", where=entry.where, found=caption + 1)
        return self.set_prompts([(entry, [text])])[0]

    def set_prompts(self, changes: Sequence[tuple[Entry, Sequence[str]]]) -> list[Entry]:
        entries = [entry for entry, _ in changes]
        texts = [_encoded(text, entry.where).decode() for entry, [text] in changes]
        with self._editing(entries) as (_, layout):
            paths = self._prompts(entries, layout)
            self.files.write({path: _like(bytes_of(path), text) for path, text in zip(paths, texts, strict=True)})
            return self._edited(entries)

    def prompt_files(self, entries: Sequence[Entry]) -> list[Path]:
        return self._prompts(entries, find_layout(open_folder(self.source), self.needs))

    def _prompts(self, entries: Sequence[Entry], layout: Layout) -> list[Path]:
        """The file of each row's prompt; SourceError if there is more than one."""
        folder, names = layout.prompt or layout.target, cache(names_of)
        paths = []
        for entry in entries:
            if folder == "." and f"{entry.name}.txt" == left_out.LIST:
                do = "rename the image"
                raise SourceError(f"{left_out.LIST} is the list of rows left out", where=entry.where, do=do)
            [path, *others] = beside(self.source / folder, entry.name, [".txt"], names) or [
                self.source / folder / f"{entry.name}.txt"
            ]
            if others:
                do = "keep the right one"
                raise SourceError("several files are this prompt", where=path, found=others[0].name, do=do)
            paths.append(path)
        return paths

    def set_left_out(self, entries: Sequence[Entry], is_left_out: bool) -> list[Entry]:
        with self._opened() as (folder, layout):
            path = self.source / left_out.LIST
            data = bytes_of(path) or b""
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
class TableEditor(Editor):
    """Prompts and `left_out` are cells; a mask is a file of the source's folder that a cell names."""

    table: Path
    listed: str = ""
    """The content hash of a table of which all rows are that are edited."""
    _names: tuple[str, list[str]] = field(default=("", []), init=False)
    """The columns of the table that has this content hash: those of JSON are in all of its rows."""

    def _locked(self) -> AbstractContextManager[None]:
        return self.files.locked(f"{self.table.name}.")

    @contextmanager
    def _editing(self, entries: Sequence[Entry]) -> Iterator[Opened]:
        with self._locked():
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
            cell = opened.cell_of_prompts(entry, column, {caption: text})
            return self._write(opened, [entry], {entry.where: {column: cell}})[0]

    @without_gc()
    def set_prompts(self, changes: Sequence[tuple[Entry, Sequence[str]]]) -> list[Entry]:
        for entry, texts in changes:
            for text in texts:
                _encoded(text, entry.where)
        entries = [entry for entry, _ in changes]
        with self._editing(entries) as opened:
            column = opened.column("prompt", ("prompt",))
            cells = {}
            for entry, texts in changes:
                new = {i: text for i, text in enumerate(texts) if text != entry.prompts[i]}
                cells[entry.where] = {column: opened.cell_of_prompts(entry, column, new)}
            edited = self._write(opened, entries, cells)
            return [] if self.others_changed else edited

    def prompt_files(self, entries: Sequence[Entry]) -> list[Path]:
        return [self.table]

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
            roles = ("target", "control", "mask", "rejected")
            cells = [record[1].get(name) for role in roles for name in opened.columns[role]]
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

    @cached_property
    def folder(self) -> TableFolder:
        return TableFolder(self.table.parent, self.editor.needs.allow_urls)

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

    def cell_of_prompts(self, entry: Entry, column: str, texts: Mapping[int, str]) -> Any:
        """The cell of a row's captions, with new texts by the numbers of these."""
        value = self.values(entry.where).get(column)
        if not has_captions(column, value):
            if max(texts, default=0):
                raise SourceError("this row has one caption", where=entry.where, found=max(texts) + 1)
            return texts.get(0, value)
        if not isinstance(value, list) or not all(0 <= number < len(value) for number in texts):
            found, do = repr(value)[:60], "correct the table first"
            what = f"the column {column!r} has no caption {next(iter(texts), 0) + 1}"
            raise SourceError(what, where=entry.where, expected="a list of texts", found=found, do=do)
        return [texts.get(number, old) for number, old in enumerate(value)]

    def entry(self, listed: Entry) -> Entry | None:
        """The row at the place of a listed one, by that one's names; None if none is there."""
        values = self.rows.values(listed.where)
        if values is None:
            return None
        draft = read_row(listed.where, values, self.columns, self.folder, {})
        if len(draft.samples) != len(listed.names):
            return None
        if tuple(row.name for row in draft.samples) != listed.names:  # numbered, as others have them too
            named = zip(draft.samples, listed.names, strict=True)
            draft = replace(draft, samples=tuple(replace(row, name=name) for row, name in named))
        allow_empty = self.editor.allow_empty_prompt
        return as_entry(draft, checked(draft, self.editor.needs, allow_empty_prompt=allow_empty)[1])
