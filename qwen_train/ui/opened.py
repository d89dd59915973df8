"""A source that is open in the Data page: rows as shown, problems, edits, checks."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from qwen_cache.errors import Problem, QwenCacheError, SourceError
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
from qwen_cache.sources.editing import Editor, open_editor, table_hash
from qwen_cache.sources.old_files import ChangedError, Written
from qwen_cache.sources.places import IMAGE_EXTENSIONS, File
from qwen_cache.sources.rows import Draft, Readable
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.remote import Location, is_remote
from qwen_cache.terminal import plural
from qwen_train.ui.check import Check, KeptBuild, PlanCheck, read_kept, write_kept
from qwen_train.ui.drafts import Drafts
from qwen_train.ui.job import Command
from qwen_train.ui.jobs import Checks
from qwen_train.ui.measured import MeasuredRows, Measuring
from qwen_train.ui.scan import Facts, Scan, StoppedError, areas, fault_of, faults_of, version_of_images
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

    target, mask, rejected = (
        None if image is None else checked(image) for image in (entry.target, entry.mask, entry.rejected)
    )
    controls = tuple(map(checked, entry.controls))
    return replace(entry, target=target, controls=controls, mask=mask, rejected=rejected)


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
                if entry.is_file(follow_symlinks=False) or entry.name[0] == ".":
                    continue
                is_link = entry.is_symlink()
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
    "drafts": "drafts of a model to read",
}
"""The filters that every listing shows; the findings of a scan have filters of their own."""


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
    drafts: Drafts
    flags: Mapping[str, Sequence[int]]
    """The rows of each finding, in their order: groups one after another."""
    pixels: npt.NDArray[np.float64] | None
    """Pixels of each target; NaN where unknown."""


def text_of(entry: Entry) -> str:
    """The texts that a search looks into."""
    return "\n".join((entry.name, *entry.prompts)).casefold()


def has(entry: Entry, row: int, name: str, with_problems: Collection[int], drafts: Drafts) -> bool:
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
        case "drafts":
            return entry in drafts
        case _:
            return not all(entry.prompts)


def counts(entries: Sequence[Entry], with_problems: Collection[int], drafts: Drafts) -> dict[str, int]:
    """The number of rows of each of `FILTERS`."""
    left_out = sum(entry.is_left_out for entry in entries)
    return {
        "problems": len(with_problems),
        "left_out": left_out,
        "kept": len(entries) - left_out,
        "no_mask": sum(entry.mask is None for entry in entries),
        "no_control": sum(not entry.controls for entry in entries),
        "no_prompt": sum(not all(entry.prompts) for entry in entries),
        "drafts": sum(entry in drafts for entry in entries),
    }


def positions(view: View, entries: Sequence[Entry], text: Callable[[int], str], shown: Shown) -> Positions:
    """The rows of a view, in its order."""
    rows: Sequence[int] = range(len(entries))
    if view.filter in shown.flags:
        rows = [row for row in shown.flags[view.filter] if row < len(entries)]
    elif view.filter in FILTERS:
        rows = [row for row in rows if has(entries[row], row, view.filter, shown.with_problems, shown.drafts)]
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


# ---- opened ----------------------------------------------------------------------------------------------------------
# A source as the Data page sees it: listed in a thread, listed again when its files change, edited row by row.
#
# A row is named by its position and the version that the page saw. An edit of another version is refused, and so is one
# of a file that changed meanwhile; edits of one source follow each other. What is written, and where, is decided by
# `sources/editing.py`.

WATCHED = 4096  # folders and files whose times say whether a source has changed
VIEWS = 8
UNDOS = 20  # edits that can be undone
CHANGED = RefusedError(409, "this row has changed meanwhile", "look at it as it is now, and repeat your change")


def version_of_entry(entry: Entry) -> str:
    """A name of what the page shows of a row."""
    return content_hash(repr(_shown_of(entry)).encode("utf-8", "backslashreplace"))[:12]


def _shown_of(entry: Entry) -> tuple[object, ...]:
    return entry.names, entry.prompts, entry.phrase, entry.is_left_out, str(entry.mask)


def kept_folder(workspace: Workspace, source: Location) -> Path:
    """The folder for the old files of a source."""
    name = f"{source.name[:50]}-{content_hash(str(source).encode('utf-8', 'surrogateescape'))[:8]}"
    return workspace.state / "kept" / name


class OpenSource:
    """The rows of a source, and what is known of them."""

    def __init__(self, place: Location, data: DataConfig, workspace: Workspace, checks: Checks) -> None:
        self.place, self.data, self.workspace, self.checks = place, data, workspace, checks
        self.top, self.folder = workspace.folder, workspace.state
        self.entries: list[Entry] = []
        self.state = "listing"
        self.error: QwenCacheError | None = None
        self.general: list[Problem] = []
        self.order = self.revision = 0
        self.scan: Scan | None = None
        self.check: Check | None = None
        self.measured = MeasuredRows()
        """The measurements of the last check that has ended."""
        self.checked: Mapping[str, Sequence[Problem]] = {}
        """The problems of the last plan of a build by `Problem.where`."""
        self.changed_since_check: set[str] = set()
        self.looked_at: dict[str, str] = {}
        """The version of the images that were looked at, by the row's place."""
        self.faults: dict[str, tuple[str, tuple[Problem, ...]]] = {}
        """The version of a row's images, and what is wrong with them, by the row's place."""
        self.lock = threading.RLock()
        self._is_listing = self._is_closed = False
        self._edits = 0
        self._editor: Editor | SourceError | None = None
        self._table = ""
        """The content hash of the table that was listed."""
        self.undoable: list[Edit] = []
        """The last edits, the newest last."""
        self.drafts = Drafts(workspace.state / "drafts", place)
        self._stamp: object = None
        self._watched: Sequence[Path] = ()
        self._texts: dict[int, str] = {}
        self._views: OrderedDict[View, Positions] = OrderedDict()
        self._counted: tuple[int, dict[str, int]] = -1, {}
        self._at_revision = -1
        self._with_problems: frozenset[int] = frozenset()
        self._flags: Mapping[str, Sequence[int]] = {}

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
        for each in (self.scan, self.check):
            if each is not None:
                each.stop()

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
                table = table_hash(self.place)
                if not is_remote(self.place):
                    check_links(self.place, self.workspace.is_inside)
                drafts, empty = drafts_of(self.place, needs), settings["allow_empty_prompt"]
                with without_gc():
                    content = read_drafts(drafts, str(self.place), needs, allow_empty_prompt=empty, on_draft=take)
                with self.lock:
                    if edits == self._edits:
                        self._table = table if table_hash(self.place) == table else ""
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
        has_order = is_first or [entry.name for entry in found] == [entry.name for entry in self.entries]
        self.entries, self.general = found, listing.other_problems
        if not has_order:
            self.order += 1  # after the rows: who reads the order first never takes old rows for new ones
            if self.scan is not None:
                self.scan.stop()
                self.scan = None
        self.state, self.error, self._editor = "ready", None, None
        self._texts = {}
        watched = self._watched
        self._watched = self._files()
        self._stamp = stamp if watched == self._watched else self._stamp_now()
        self._is_listing = False
        self.revision += 1
        if is_first:
            threading.Thread(target=self._recall, name="recall", daemon=True).start()

    def _files(self) -> Sequence[Path]:
        """The folders and files that change when the source does."""
        if is_remote(self.place):
            return ()
        if not self.place.is_dir():
            return (self.place,)
        names = (*METADATA_TABLES, left_out.LIST)
        found = dict.fromkeys(map(str, [self.place, *(self.place / name for name in names)]))
        for entry in self.entries:
            if len(found) > WATCHED:
                break
            for image in (entry.target, *entry.controls[:1]):
                # The folder of an image in a file of its own, or the file that holds it.
                if isinstance(image, File):
                    if image.local is not None:
                        found[os.path.dirname(image.local)] = None
                elif image is not None:
                    files: Sequence[Location] = getattr(image, "files", ())
                    found.update(dict.fromkeys(str(file) for file in files if not is_remote(file)))
        return tuple(map(Path, found))

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
        known = {problem.what: problem for problem in (*entry.problems, *self._faults_of(entry))}
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

    def flags(self) -> Mapping[str, Sequence[int]]:
        """The rows of each finding of the scan and of the check."""
        self._forget_old()
        return self._flags

    def counts(self) -> dict[str, int]:
        """How many rows each filter shows."""
        revision = self.revision
        if self._counted[0] != revision:
            entries = self.entries if self.state != "listing" else ()
            self._counted = revision, counts(entries, self.with_problems(), self.drafts)
        return self._counted[1]

    def rows(self, view: View) -> Positions:
        """The rows of a view, in its order."""
        with self.lock:
            self._forget_old()
            count = len(self.entries)
            known = self._views.get(view)
            if known is None or self.state == "listing":
                pixels = self.scan.findings.pixels if self.scan and self.scan.findings else None
                shown = Shown(self._with_problems, self.drafts, self._flags, pixels)
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
            findings = self.scan.findings if self.scan else None
            self._flags = {**(findings.flags if findings else {}), **self.measured.flags(self.entries)}
            rows = enumerate(self.entries)
            self._with_problems = frozenset(
                row
                for row, entry in rows
                if not entry.is_left_out
                and (
                    entry.problems
                    or (entry.where in self.checked and entry.where not in self.changed_since_check)
                    or self._faults_of(entry)
                )
            )

    def _text(self, row: int) -> str:
        if row not in self._texts:
            self._texts[row] = text_of(self.entries[row])
        return self._texts[row]

    # ---- check and scan ----------------------------------------------------------------------------------------------

    def has_changed(self, entry: Entry, version: str) -> bool:
        """True if a row was checked, and is another now; `version` is that of its images."""
        return entry.where in self.changed_since_check or self.looked_at.get(entry.where, version) != version

    def unseen(self) -> int:
        """How many rows there are whose images nobody has looked at."""
        return sum(entry.where not in self.looked_at for entry in self.entries)

    def note(self, entry: Entry, image: Readable, error: SourceError) -> None:
        """Take note of an image of a row that turned out to be broken, such as for its thumbnail."""
        with self.lock:
            if entry.where not in self.faults:
                self._take_faults(entry, version_of_images(entry), [(image, *fault_of(error))])
                self.revision += 1

    def _take_faults(self, entry: Entry, version: str, faults: Sequence[tuple[Readable, str, str]]) -> None:
        problems = []
        for image, what, do in faults:
            named = what if str(image) == entry.where else f"{self.shown(str(image))}: {what}"
            problems.append(Problem(entry.where, named, do))
        if problems:
            self.faults[entry.where] = version, tuple(problems)
        else:
            self.faults.pop(entry.where, None)

    def _faults_of(self, entry: Entry) -> Sequence[Problem]:
        """The known faults of a row's images, unless they have changed."""
        version, problems = self.faults.get(entry.where, ("", ()))
        return problems if problems and version == version_of_images(entry) else ()

    def take_check(self, problems: Sequence[Problem]) -> None:
        """The problems that a check found."""
        by_where: dict[str, list[Problem]] = {}
        for problem in problems:
            by_where.setdefault(problem.where, []).append(problem)
        with self.lock:
            self.checked, self.changed_since_check = by_where, set()
            self.revision += 1

    def start_scan(self) -> Scan:
        """A new scan of all rows for duplicates and outliers, unless one is running."""
        self._need_list()
        with self.lock:
            if self.scan is None or self.scan.state != "running":
                scan = self.scan = self._scan(lambda: self._end_scan(scan), self.data)
                scan.start()
            return self.scan

    def start_check(self, command: Command | None, data: DataConfig) -> Check:
        """A new check: of all images, which are measured at the size that `data` trains, and of the planned build.

        That is of a `command`, if one is given.
        """
        self._need_list()
        plan = PlanCheck(self.checks, command, self.workspace.folder, self.take_check) if command else None
        with self.lock:
            if self.check is not None:
                self.check.stop()
            measured = MeasuredRows()
            check = self.check = Check(self._scan(lambda: None, data, finds=False, measured=measured), plan)
            if plan is None:
                self.checked, self.changed_since_check = {}, set()
            key = self._key(command)
        check.start(lambda: self._end_check(check, key, measured))
        return check

    def _need_list(self) -> None:
        if self.state != "ready":
            raise RefusedError(409, "the source is not listed yet", "wait for its list")

    def _scan(
        self,
        ended: Callable[[], object],
        data: DataConfig,
        *,
        finds: bool = True,
        measured: MeasuredRows | None = None,
        reads: bool = True,
    ) -> Scan:
        """A scan that has not begun; `measured` gets the measurements at the size that `data` trains."""
        area, is_inside = min(areas(self.data.vae_image_size)), self.workspace.is_inside
        resolution = Resolution.of(self.data)

        def seen(entry: Entry, version: str, facts: Facts) -> None:
            faults = list(faults_of(facts, resolution))
            if measured is not None:
                measured.take(entry, facts.measured)
            with self.lock:
                had = entry.where in self.faults
                self.looked_at[entry.where] = version
                self._take_faults(entry, version, faults)
                self.revision += bool(faults) or had

        def look(entry: Entry) -> Entry:
            return readable(entry, is_inside)

        measures = measured is not None
        measuring = Measuring(Resolution.of(data), self._state_of("measured"), reads=reads) if measures else None
        options: dict[str, Any] = {"finds": finds, "measuring": measuring, "reads": reads}
        return Scan(tuple(self.entries), look, self._state_of("scan"), area, seen, ended, **options)

    def _state_of(self, name: str) -> Path:
        """A file about this source in the state folder."""
        return self.folder / name / content_hash(str(self.place).encode("utf-8", "surrogateescape"))

    # ---- over a restart ----------------------------------------------------------------------------------------------

    def _end_scan(self, scan: Scan) -> None:
        self.revision += 1
        if scan.state == "done":
            self._keep(has_scanned=True)

    def _end_check(self, check: Check, key: str, measured: MeasuredRows) -> None:
        if check.images.state == "done" and check is self.check:
            self.measured = measured
        self.revision += 1
        if check.state != "done":
            return
        plan, build = check.plan, None
        if plan and self._key(plan.command) == key:
            problems = [(each.where, each.what, each.do) for each in plan.problems]
            build = KeptBuild(key=key, arguments=[*plan.command.arguments], problems=problems)
        self._keep(has_checked=True, build=build)

    def _keep(self, **changes: Any) -> None:
        file = self._state_of("checks")
        with self.lock:
            write_kept(file, read_kept(file, self._settings).model_copy(update=changes))

    @property
    def _settings(self) -> str:
        return content_hash(self.data.model_dump_json().encode())

    def _key(self, command: Command | None) -> str:
        """A hash of all that the problems of a build depend on: its command, the settings, the model, and every row."""
        if command is None:
            return ""
        config = self.workspace.settings()
        words = [command.line, config.model_dump_json()]
        for word in (*command.arguments, config.model.path or ""):
            with suppress(OSError):
                folder = self.workspace.folder / word
                words += [f"{each.name} {each.stat().st_mtime_ns}" for each in sorted(folder.iterdir())] if word else []
        words += [f"{entry.where} {version_of_entry(entry)} {version_of_images(entry)}" for entry in self.entries]
        return content_hash("\n".join(words).encode("utf-8", "backslashreplace"))

    def _recall(self) -> None:
        """Find again what was found before a restart: from what is remembered of the images, without reading them."""
        kept = read_kept(self._state_of("checks"), self._settings)
        if not (kept.has_checked or kept.has_scanned):
            return
        with self.lock:
            if self.scan is not None or self.check is not None:
                return
            measured = MeasuredRows() if kept.has_checked else None
            images = self._scan(self._touch, self.data, finds=kept.has_scanned, measured=measured, reads=False)
        images.start()
        images.wait()
        with self.lock:
            if images.state != "done" or self.scan is not None or self.check is not None:
                return
            self.scan = images if kept.has_scanned else None
            if measured is not None:
                self.measured = measured
                self.check = Check(images, self._recalled(kept.build), is_kept=True)
            self.revision += 1

    def _recalled(self, build: KeptBuild | None) -> PlanCheck | None:
        """The plan that was kept, with its problems, unless anything that these depend on is another."""
        command = Command("qwen-cache", tuple(build.arguments)) if build else None
        if build is None or command is None or self._key(command) != build.key:
            return None
        problems = [Problem(*each) for each in build.problems]
        self.take_check(problems)
        return PlanCheck.kept(self.checks, command, self.workspace.folder, problems)

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
                try:
                    kept = kept_folder(self.workspace, self.place)
                    self._editor = open_editor(self.place, kept, self._table, **reading(self.data))
                except SourceError as error:
                    self._editor = error
            return self._editor

    def set_prompt(self, row: int, seen: str, caption: int, text: str) -> Entry:
        """Write a caption of a row."""
        new = self._edit("prompt", row, seen, lambda editor, entry: editor.set_prompt(entry, text, caption))
        self.drafts.accept([new.name])
        return new

    def set_mask(self, row: int, seen: str, png: bytes, seen_mask: str | None) -> Entry:
        """Write the mask of a row."""
        return self._edit("mask", row, seen, lambda editor, entry: editor.set_mask(entry, png, seen_mask))

    def _edit(self, what: str, row: int, seen: str, change: Callable[[Editor, Entry], Entry]) -> Entry:
        with self.lock:
            editor, entry = self.writing(), self.seen(row, seen)
            with Changing(self, editor, f"{what} of {entry.name}", [row]):
                new = change(editor, entry)
                self.replace([row], [new])
            return new

    def seen(self, row: int, version: str) -> Entry:
        """A row whose version was seen; RefusedError (409) if it has changed since."""
        entry = self.entry(row)
        if version_of_entry(entry) != version:
            raise CHANGED
        return entry

    def set_left_out(self, rows: Sequence[int], order: int, *, is_left_out: bool) -> None:
        """Leave rows out, or put them back."""
        with self.lock:
            editor = self.writing()
            if order != self.order:
                raise CHANGED
            chosen = [row for row in dict.fromkeys(rows) if self.entry(row).is_left_out != is_left_out]
            if chosen:
                what = "leaving out" if is_left_out else "putting back"
                with Changing(self, editor, f"{what} {plural(len(chosen), 'row')}", chosen):
                    self.replace(chosen, editor.set_left_out([self.entry(row) for row in chosen], is_left_out))

    def writing(self) -> Editor:
        """The editor; RefusedError (409) before the source is listed, SourceError if it cannot be edited."""
        self._need_list()
        editor = self.editor()
        if isinstance(editor, SourceError):
            raise editor
        return editor

    def replace(self, rows: Sequence[int], new: Sequence[Entry]) -> None:
        """Show rows as they are after an edit."""
        for row, entry in zip(rows, new, strict=True):
            if self.check and self.check.plan and _shown_of(entry) != _shown_of(self.entries[row]):
                self.changed_since_check.add(entry.where)
            self.entries[row] = entry
            self._texts.pop(row, None)


@dataclass(frozen=True)
class Edit:
    """An edit that can be undone."""

    what: str
    written: Written
    rows: Sequence[int]
    before: Sequence[Entry]
    after: Sequence[Entry]
    is_alone: bool
    """True if no other row has changed with it."""

    @property
    def id(self) -> str:
        return f"{id(self.written):x}"


class Changing:
    """Count an edit, and keep how to undo it if it has a name.

    List again if it changed other rows, or was refused because a file has changed.
    """

    def __init__(self, source: OpenSource, editor: Editor, what: str, rows: Sequence[int]) -> None:
        self.source, self.editor, self.what, self.rows = source, editor, what, rows

    def __enter__(self) -> None:
        self.is_current = self.source.is_current()
        self.written = self.editor.files.written
        self.before = [self.source.entries[row] for row in self.rows]

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        source, written = self.source, self.editor.files.written
        source.count_edit(is_current=error is None and self.is_current)
        others_changed = error is None and self.editor.others_changed
        if error is None and self.what and written is not None and written is not self.written:
            after = [source.entries[row] for row in self.rows]
            edit = Edit(self.what, written, self.rows, self.before, after, is_alone=not others_changed)
            source.undoable = [*source.undoable, edit][-UNDOS:]
        if isinstance(error, ChangedError) or others_changed:
            source.list_again()
        if isinstance(error, ChangedError):
            raise CHANGED from error
