"""A source that is open in the Data page: rows as shown, problems, edits, checks."""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.errors import OutdatedError, Problem, QwenCacheError, SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.service.http import RefusedError
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources import left_out
from qwen_cache.sources.detect import (
    METADATA_TABLES,
    Entry,
    Listing,
    as_entry,
    drafts_of,
    needs_of,
    read_drafts,
    reading,
    without_gc,
)
from qwen_cache.sources.editing import ChangedError, Editor, open_editor
from qwen_cache.sources.places import IMAGE_EXTENSIONS
from qwen_cache.sources.rows import Draft, Readable
from qwen_cache.storage.remote import Location, is_remote
from qwen_train.ui.job import Command
from qwen_train.ui.jobs import Checked, Checks
from qwen_train.ui.scan import Scan, StoppedError, areas
from qwen_train.ui.workspace import Workspace

# ---- inside ----------------------------------------------------------------------------------------------------------
# What is read of a source: files in the opened folders. A table may name any file of the machine, a link lead to it.
#
# An image elsewhere is shown as one that cannot be read. A source with a link to other files elsewhere, such as
# prompts, is not listed. `build` reads them all: it runs as the user does. Images on servers are left to
# `data.allow_urls`.

IsInside = Callable[[Path], bool]
"""True if a file is in the opened folders, after links are followed."""
ALLOW = "open its folder too: qwen-cache ui --allow FOLDER"


@dataclass(frozen=True)
class Outside:
    """An image that is not read."""

    where: str

    def __str__(self) -> str:
        return self.where

    def read(self) -> bytes:
        raise SourceError("this image is outside the opened folders", where=self.where, do=ALLOW)


def readable(entry: Entry, is_inside: IsInside) -> Entry:
    """The row, with `Outside` in place of images that are not read."""

    def checked(image: Readable) -> Readable:
        files = getattr(image, "files", ())
        is_here = all(is_inside(file) for file in files if not is_remote(file))
        return image if is_here else Outside(str(image))

    target, mask = (None if image is None else checked(image) for image in (entry.target, entry.mask))
    return replace(entry, target=target, controls=tuple(map(checked, entry.controls)), mask=mask)


def check_links(source: Path, is_inside: IsInside) -> None:
    """SourceError for a link in a source that leads out of the opened folders, unless it has the name of an image.

    Of a folder with a table only the table is looked at: all else that is read of it are images.
    """
    if not source.is_dir():
        return
    tables = [source / name for name in METADATA_TABLES if (source / name).is_file()]
    for table in tables:
        _check(table, is_inside)
    waiting = [] if tables else [os.path.realpath(source)]
    seen = set(waiting)
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                is_link = entry.is_symlink()
                if entry.name[0] == "." or not (is_link or entry.is_dir()):
                    continue
                is_folder = False
                with suppress(OSError):  # a link to itself
                    is_folder = entry.is_dir()
                if is_link and (is_folder or not entry.name.lower().endswith(IMAGE_EXTENSIONS)):
                    _check(Path(entry.path), is_inside)
                if is_folder and (folder := os.path.realpath(entry.path)) not in seen:
                    seen.add(folder)
                    waiting.append(folder)


def _check(path: Path, is_inside: IsInside) -> None:
    if not is_inside(path):
        raise SourceError("this link leads out of the opened folders", where=path, do=ALLOW)


# ---- view ------------------------------------------------------------------------------------------------------------
# Which rows of a source are shown, and in which order: a filter, the words of a search, and a sort.

Positions = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

FILTERS = {
    "problems": "rows with problems",
    "left_out": "rows left out",
    "kept": "rows that are kept",
    "no_mask": "rows without a mask",
    "no_control": "rows without a control",
    "no_prompt": "rows without a prompt",
}
"""What every listing shows; the findings of a scan have filters of their own."""


@dataclass(frozen=True)
class View:
    """The view that a page asks for."""

    filter: str = "all"
    search: str = ""
    sort: str = "source"


@dataclass(frozen=True)
class Shown:
    """The facts that a view depends on, besides the listing."""

    with_problems: Collection[int]
    flags: Mapping[str, Sequence[int]]
    """The rows of each finding, in their order: groups one after another."""
    pixels: npt.NDArray[np.float64] | None
    """Pixels of each target; NaN where unknown."""


def text_of(entry: Entry) -> str:
    """The texts that a search looks into."""
    return "\n".join((entry.name, *entry.prompts)).casefold()


def has(entry: Entry, row: int, name: str, with_problems: Collection[int]) -> bool:
    """True if a row belongs to one of `FILTERS`."""
    match name:
        case "problems":
            return row in with_problems
        case "left_out":
            return entry.is_left_out
        case "kept":
            return not entry.is_left_out
        case "no_mask":
            return entry.mask is None
        case "no_control":
            return not entry.controls
        case _:
            return not all(entry.prompts)


def counts(entries: Sequence[Entry], with_problems: Collection[int]) -> dict[str, int]:
    """The number of rows of each of `FILTERS`."""
    left_out = sum(entry.is_left_out for entry in entries)
    return {
        "problems": len(with_problems),
        "left_out": left_out,
        "kept": len(entries) - left_out,
        "no_mask": sum(entry.mask is None for entry in entries),
        "no_control": sum(not entry.controls for entry in entries),
        "no_prompt": sum(not all(entry.prompts) for entry in entries),
    }


def positions(view: View, entries: Sequence[Entry], text: Callable[[int], str], shown: Shown) -> Positions:
    """The rows of a view, in its order."""
    rows: Sequence[int] = range(len(entries))
    if view.filter in shown.flags:
        rows = [row for row in shown.flags[view.filter] if row < len(entries)]
    elif view.filter in FILTERS:
        rows = [row for row in rows if has(entries[row], row, view.filter, shown.with_problems)]
    if words := view.search.casefold().split():
        rows = [row for row in rows if all(word in text(row) for word in words)]
    chosen = np.fromiter(rows, np.int64, len(rows))
    if view.sort in ("shortest", "longest"):
        keys = np.array([max(map(len, entries[row].prompts), default=0) for row in chosen.tolist()], np.float64)
    elif view.sort in ("smallest", "largest"):
        keys = np.full(len(chosen), np.nan) if shown.pixels is None else shown.pixels[chosen]
    elif view.sort == "name":
        return np.array(sorted(chosen.tolist(), key=lambda row: entries[row].name), np.int64)
    else:
        return chosen
    return chosen[np.argsort(-keys if view.sort in ("longest", "largest") else keys, kind="stable")]


# ---- check -----------------------------------------------------------------------------------------------------------
# The check of a source: `qwen-cache build --dry-run --json` in a process of its own, and the problems it lists.

KEY = "data-check"


def located(where: str, folder: Path) -> str:
    """The place of a problem as a list of the source has it, which begins with an absolute path."""
    return where if "://" in where else os.path.join(folder, where)


class Check:
    """A check that runs in a thread; `found` gets the problems."""

    def __init__(
        self, checks: Checks, command: Command, folder: Path, found: Callable[[Sequence[Problem]], object]
    ) -> None:
        """`folder` is where the command runs: the places of its problems begin there."""
        self.command, self.folder, self.state, self.message, self.summary = command, folder, "running", "", ""
        self._checks, self._found, self._began = checks, found, time.monotonic()
        self.seconds = 0.0

    def start(self) -> None:
        threading.Thread(target=self._run, name="check", daemon=True).start()

    def _run(self) -> None:
        try:
            self._take(self._checks.check(self.command, KEY))
        except OutdatedError:
            self.state = "stopped"
        except (QwenCacheError, OSError) as error:
            self.state, self.message = "failed", str(error)
        self.seconds = time.monotonic() - self._began

    def _take(self, checked: Checked) -> None:
        document = checked.document
        if not isinstance(document, dict) or "problems" not in document:
            self.state, self.message = "failed", checked.message or f"the command ended with {checked.code}"
            return
        problems = [
            Problem(located(each["where"], self.folder), each["what"], each["do"]) for each in document["problems"]
        ]
        self._found(problems)
        encode, cached = document.get("to_encode", 0), document.get("cached", 0)
        self.summary = f"{encode:,} to encode, {cached:,} in the cache"
        refused = [each["what"] for each in document.get("refused", ()) if not (problems and "problem" in each["what"])]
        self.state, self.message = "done", os.linesep.join(refused)

    def as_json(self) -> dict[str, Any]:
        seconds = time.monotonic() - self._began if self.state == "running" else self.seconds
        return {
            "state": self.state,
            "message": self.message,
            "summary": self.summary,
            "line": self.command.line,
            "seconds": round(seconds, 1),
        }


# ---- opened ----------------------------------------------------------------------------------------------------------
# A source as the Data page sees it: listed in a thread, listed again when its files change, edited row by row.
#
# A row is named by its position and the version that the page saw. An edit of another version is refused, and so is one
# of a file that changed meanwhile; edits of one source follow each other. What is written, and where, is decided by
# `sources/editing.py`.

WATCHED = 4096  # folders and files whose times say whether a source has changed
VIEWS = 8
CHANGED = RefusedError(409, "this row has changed meanwhile", "look at it as it is now, and repeat your change")


def version_of_entry(entry: Entry) -> str:
    """A name of what the page shows of a row."""
    shown = (entry.names, entry.prompts, entry.phrase, entry.is_left_out, str(entry.mask))
    return content_hash(repr(shown).encode("utf-8", "backslashreplace"))[:12]


class OpenSource:
    """The rows of a source, and what is known of them."""

    def __init__(self, place: Location, data: DataConfig, workspace: Workspace) -> None:
        self.place, self.data, self.workspace = place, data, workspace
        self.top, self.folder = workspace.folder, workspace.state
        self.entries: list[Entry] = []
        self.state = "listing"
        self.error: QwenCacheError | None = None
        self.general: list[Problem] = []
        self.order = self.revision = 0
        self.scan: Scan | None = None
        self.checked: Mapping[str, Sequence[Problem]] = {}
        """The problems of the last check by `Problem.where`."""
        self.changed_since_check: set[str] = set()
        self.lock = threading.RLock()
        self._is_listing = self._is_closed = False
        self._edits = 0
        self._editor: Editor | SourceError | None = None
        self._stamp: object = None
        self._watched: Sequence[Path] = ()
        self._texts: dict[int, str] = {}
        self._views: OrderedDict[View, Positions] = OrderedDict()
        self._counted: tuple[int, dict[str, int]] = -1, {}
        self._at_revision = -1
        self._with_problems: frozenset[int] = frozenset()

    def shown(self, where: str) -> str:
        """A place in messages, as it is typed in the opened folder."""
        return where.removeprefix(f"{self.top}{os.sep}")

    # ---- listing -----------------------------------------------------------------------------------------------------

    def list_again(self) -> None:
        """Start to list the source, unless that is under way."""
        with self.lock:
            if self._is_listing or self._is_closed:
                return
            self._is_listing = True
        threading.Thread(target=self._list, name="listing", daemon=True).start()

    def close(self) -> None:
        """End what runs for this source."""
        self._is_closed = True
        if self.scan is not None:
            self.scan.stop()

    @property
    def is_listing(self) -> bool:
        return self._is_listing

    def look(self) -> None:
        """List again if files have changed."""
        if not self._is_listing and self.state != "listing" and not self.is_current():
            self.list_again()

    def is_current(self) -> bool:
        """True if no file has changed since the list was made, as far as times tell."""
        return self._stamp == self._stamp_now()

    def count_edit(self, *, is_current: bool) -> None:
        """Take note of an edit by this program; nothing else has changed if the list `is_current`."""
        self._edits += 1
        self.revision += 1
        if is_current:
            self._stamp = self._stamp_now()

    def _list(self) -> None:
        is_first = self.state == "listing"
        found = self.entries if is_first else []

        def take(draft: Draft, problems: Sequence[Problem]) -> None:
            if self._is_closed:
                raise StoppedError
            found.append(as_entry(draft, problems))

        try:
            settings = reading(self.data)
            while True:
                edits, stamp, needs = self._edits, self._stamp_now(), needs_of(**settings)
                if not is_remote(self.place):
                    check_links(self.place, self.workspace.is_inside)
                drafts, empty = drafts_of(self.place, needs), settings["allow_empty_prompt"]
                with without_gc():
                    content = read_drafts(drafts, str(self.place), needs, allow_empty_prompt=empty, on_draft=take)
                with self.lock:
                    if edits == self._edits:
                        listing = Listing(str(self.place), tuple(found), tuple(content.problems))
                        self._settle(listing, found, stamp, is_first=is_first)
                        return
                found, is_first = [], False
        except StoppedError:
            pass
        except (QwenCacheError, OSError) as error:
            self._fail(error if isinstance(error, QwenCacheError) else SourceError(str(error), where=self.place))
        finally:
            if self._is_listing and not self._is_closed:
                self._fail(SourceError("an error of this program", where=self.place, do="see its terminal"))
            self._is_listing = False

    def _fail(self, error: QwenCacheError) -> None:
        with self.lock:
            self.state, self.error, self._stamp, self._is_listing = "failed", error, self._stamp_now(), False
            self.revision += 1

    def _settle(self, listing: Listing, found: list[Entry], stamp: object, *, is_first: bool) -> None:
        """Show a finished listing."""
        if not is_first and [entry.name for entry in found] != [entry.name for entry in self.entries]:
            self.order += 1
            if self.scan is not None:
                self.scan.stop()
                self.scan = None
        self.entries, self.general = found, listing.other_problems
        self.state, self.error, self._editor = "ready", None, None
        self._texts = {}
        watched = self._watched
        self._watched = self._files()
        self._stamp = stamp if watched == self._watched else self._stamp_now()
        self._is_listing = False
        self.revision += 1

    def _files(self) -> Sequence[Path]:
        """The folders and files that change when the source does."""
        if is_remote(self.place):
            return ()
        if not self.place.is_dir():
            return (self.place,)
        names = (*METADATA_TABLES, left_out.LIST)
        found = dict.fromkeys([self.place, *(self.place / name for name in names)])
        for entry in self.entries:
            for image in (entry.target, *entry.controls[:1]):
                if image is None or len(found) > WATCHED:
                    continue
                # The folder of an image in a file of its own, or the file that holds it.
                files = [file for file in getattr(image, "files", ()) if not is_remote(file)]
                found.update(dict.fromkeys(file if str(file) != str(image) else file.parent for file in files))
        return tuple(found)

    def _stamp_now(self) -> object:
        def state(path: Path) -> object:
            with suppress(OSError):
                result = os.stat(path)
                return result.st_mtime_ns, result.st_size, result.st_ino
            return None

        return [state(path) for path in self._watched or self._files()]

    # ---- rows --------------------------------------------------------------------------------------------------------

    def entry(self, row: int) -> Entry:
        """A row by its position; RefusedError (404) if there is none."""
        entries = self.entries
        if not 0 <= row < len(entries):
            raise RefusedError(404, "there is no such row", "reload the page: the source has changed")
        return entries[row]

    def readable(self, row: int) -> Entry:
        """A row as `entry`, without reading images outside the opened folders."""
        return readable(self.entry(row), self.workspace.is_inside)

    def problems_of(self, entry: Entry) -> list[Problem]:
        """The problems of a row, by the listing and the last check."""
        if entry.is_left_out:
            return []
        known = {problem.what: problem for problem in entry.problems}
        if entry.where not in self.changed_since_check:
            known |= {problem.what: problem for problem in self.checked.get(entry.where, ())}
        return list(known.values())

    def other_problems(self) -> list[Problem]:
        """Problems that belong to no row."""
        places = {entry.where for entry in self.entries}
        checked = [problem for where, each in self.checked.items() if where not in places for problem in each]
        return list(dict.fromkeys([*self.general, *checked]))

    def with_problems(self) -> frozenset[int]:
        """The rows that have some."""
        self._forget_old()
        return self._with_problems

    def counts(self) -> dict[str, int]:
        """How many rows each filter shows."""
        revision = self.revision
        if self._counted[0] != revision:
            entries = self.entries if self.state != "listing" else ()
            self._counted = revision, counts(entries, self.with_problems())
        return self._counted[1]

    def rows(self, view: View) -> Positions:
        """The rows of a view, in its order."""
        with self.lock:
            self._forget_old()
            count = len(self.entries)
            known = self._views.get(view)
            if known is None or self.state == "listing":
                findings = self.scan.findings if self.scan else None
                flags, pixels = (findings.flags, findings.pixels) if findings else ({}, None)
                shown = Shown(self._with_problems, flags, pixels)
                known = self._views[view] = positions(view, self.entries[:count], self._text, shown)
            self._views.move_to_end(view)
            while len(self._views) > VIEWS:
                self._views.popitem(last=False)
            return known

    def _forget_old(self) -> None:
        with self.lock:
            if self._at_revision == self.revision and self.state != "listing":
                return
            self._at_revision = self.revision
            self._views.clear()
            rows = enumerate(self.entries)
            self._with_problems = frozenset(
                row
                for row, entry in rows
                if not entry.is_left_out
                and (entry.problems or (entry.where in self.checked and entry.where not in self.changed_since_check))
            )

    def _text(self, row: int) -> str:
        if row not in self._texts:
            self._texts[row] = text_of(self.entries[row])
        return self._texts[row]

    # ---- check and scan ----------------------------------------------------------------------------------------------

    def take_check(self, problems: Sequence[Problem]) -> None:
        """The problems that a check found."""
        by_where: dict[str, list[Problem]] = {}
        for problem in problems:
            by_where.setdefault(problem.where, []).append(problem)
        with self.lock:
            self.checked, self.changed_since_check = by_where, set()
            self.revision += 1

    def start_scan(self) -> Scan:
        """A new scan of all rows, unless one is running."""
        if self.state != "ready":
            raise RefusedError(409, "the source is not listed yet", "wait for its list")
        with self.lock:
            if self.scan is None or self.scan.state != "running":
                store = self.folder / "scan" / content_hash(str(self.place).encode("utf-8", "surrogateescape"))
                area, is_inside = min(areas(self.data.vae_image_size)), self.workspace.is_inside
                entries = tuple(self.entries)
                self.scan = Scan(entries, lambda entry: readable(entry, is_inside), store, area, self._touch)
                self.scan.start()
            return self.scan

    def _touch(self) -> None:
        self.revision += 1

    # ---- edits -------------------------------------------------------------------------------------------------------

    def editor(self) -> Editor | SourceError:
        """The editor of the source, or why it cannot be edited."""
        with self.lock:
            if self._editor is None and is_remote(self.place):
                what, do = (
                    "a source behind an address can be looked at, not edited",
                    "copy it to a disk, and open the copy",
                )
                self._editor = SourceError(what, where=self.place, do=do)
            elif self._editor is None:
                name = f"{self.place.name[:50]}-{content_hash(str(self.place).encode('utf-8', 'surrogateescape'))[:8]}"
                try:
                    self._editor = open_editor(self.place, self.folder / "kept" / name, **reading(self.data))
                except SourceError as error:
                    self._editor = error
            return self._editor

    def set_prompt(self, row: int, seen: str, caption: int, text: str) -> Entry:
        """Write a caption of a row."""
        return self._edit(row, seen, lambda editor, entry: editor.set_prompt(entry, text, caption))

    def set_mask(self, row: int, seen: str, png: bytes, seen_mask: str | None) -> Entry:
        """Write the mask of a row."""
        return self._edit(row, seen, lambda editor, entry: editor.set_mask(entry, png, seen_mask))

    def _edit(self, row: int, seen: str, change: Callable[[Editor, Entry], Entry]) -> Entry:
        with self.lock:
            editor, entry = self._writing(), self.entry(row)
            if version_of_entry(entry) != seen:
                raise CHANGED
            with _Changing(self, editor):
                new = change(editor, entry)
                self._replace([row], [new])
            return new

    def set_left_out(self, rows: Sequence[int], order: int, *, is_left_out: bool) -> None:
        """Leave rows out, or put them back."""
        with self.lock:
            editor = self._writing()
            if order != self.order:
                raise CHANGED
            chosen = [row for row in dict.fromkeys(rows) if self.entry(row).is_left_out != is_left_out]
            if chosen:
                with _Changing(self, editor):
                    self._replace(chosen, editor.set_left_out([self.entry(row) for row in chosen], is_left_out))

    def _writing(self) -> Editor:
        if self.state != "ready":
            raise RefusedError(409, "the source is not listed yet", "wait for its list")
        editor = self.editor()
        if isinstance(editor, SourceError):
            raise editor
        return editor

    def _replace(self, rows: Sequence[int], new: Sequence[Entry]) -> None:
        for row, entry in zip(rows, new, strict=True):
            if version_of_entry(entry) != version_of_entry(self.entries[row]):
                self.changed_since_check.add(entry.where)
            self.entries[row] = entry
            self._texts.pop(row, None)


class _Changing:
    """Count an edit; list again if it changed other rows, or was refused because a file has changed."""

    def __init__(self, source: OpenSource, editor: Editor) -> None:
        self.source, self.editor = source, editor

    def __enter__(self) -> None:
        self.is_current = self.source.is_current()

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        self.source.count_edit(is_current=error is None and self.is_current)
        if isinstance(error, ChangedError) or (error is None and self.editor.others_changed):
            self.source.list_again()
        if isinstance(error, ChangedError):
            raise CHANGED from error
