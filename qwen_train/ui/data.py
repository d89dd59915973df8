"""The routes of the Data page."""

from __future__ import annotations

import json
from collections import OrderedDict
from threading import Lock
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Body, Query
from starlette.requests import Request
from starlette.responses import Response

from qwen_cache.errors import Problem, QwenCacheError, SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.service.http import RefusedError, as_json, router_of
from qwen_cache.sources.detect import Entry, list_source, reading
from qwen_cache.sources.images import upright_size
from qwen_cache.sources.rows import Readable
from qwen_cache.storage.remote import is_remote
from qwen_cache.text import plain
from qwen_train.ui import measured, runs, search, upload
from qwen_train.ui.build import Form, build_of
from qwen_train.ui.captions import add_captions
from qwen_train.ui.check import Check
from qwen_train.ui.edits import OfSource, add_edits, renames
from qwen_train.ui.jobs import Checks, Queue
from qwen_train.ui.opened import FILTERS, OpenSource, View, check_links, version_of_entry
from qwen_train.ui.replacing import add_replacing
from qwen_train.ui.scan import (
    FINDINGS,
    IN_GROUPS,
    Thumbnails,
    deflated,
    image_of,
    joined_versions,
    mask_png,
    mask_values,
    overlay,
    roles_of,
    version_of,
    whole,
)
from qwen_train.ui.workspace import Workspace

MOST_ROWS = 200  # of one answer
MOST_AT_ONCE = 1000  # images of a source that is listed for one answer: 0.1 s
MOST_OPEN = 3  # sources that are kept in memory
MOST_GENERAL = 200  # problems of no row that are shown
MOST_RUNS = 50  # that are offered
IN_GROUP = 24  # rows of a group that are shown
FOREVER = "private, max-age=31536000, immutable"

Text = Annotated[str, Query(max_length=4096)]
Number = Annotated[int, Query(ge=0, le=1 << 40)]
Sort = Literal["source", "name", "longest", "shortest", "largest", "smallest"]


class Checked(OfSource):
    form: Form = Form()
    """The form of the Build page, whose source is replaced."""


class NewPrompt(OfSource):
    row: int
    seen: str
    caption: int = 0
    text: str


class LeftOut(OfSource):
    rows: list[int]
    order: int
    left_out: bool


class Sources:
    """The sources that are open, the most recent last."""

    def __init__(self, workspace: Workspace, checks: Checks) -> None:
        self.workspace, self.checks = workspace, checks
        self._open: OrderedDict[tuple[str, str], OpenSource] = OrderedDict()
        self._lock = Lock()

    def get(self, text: str) -> OpenSource:
        """A source by what the user typed; RefusedError (403) if it is outside the opened folders."""
        place, data = self.workspace.location(text), self.workspace.settings().data
        key = str(place), data.model_dump_json()
        with self._lock:
            if key not in self._open:
                self._open[key] = OpenSource(place, data, self.workspace, self.checks)
                self._open[key].list_again()
            self._open.move_to_end(key)
            while len(self._open) > MOST_OPEN:
                self._open.popitem(last=False)[1].close()
            return self._open[key]

    def start_check(self, source: OpenSource, form: Form) -> Check:
        """Check all images, and plan the build of a form that names a model; ConfigError for one with problems."""
        named = form.at.strip() or form.model.strip() or form.changes.get("model.path")
        if not (named or self.workspace.settings().model.path):
            return source.start_check(None, source.data)
        place = source.place
        shown = str(place) if is_remote(place) else self.workspace.shown(place)
        once = {"source": shown, "mode": "new", "rehash": False}
        build = build_of(self.workspace, form.model_copy(update=once))
        return source.start_check(build.plan, build.settings.data)


def routes_of(workspace: Workspace, queue: Queue, checks: Checks) -> APIRouter:
    """The routes of the Data page."""
    router = router_of(prefix="/api/data")
    sources = Sources(workspace, checks)
    thumbnails = Thumbnails(workspace.state / "thumbnails")
    _add_reading(router, sources)
    _add_images(router, sources, thumbnails)
    _add_edits(router, sources)
    add_edits(router, sources.get)
    add_replacing(router, sources.get)
    add_captions(router, workspace, queue, sources.get)
    _add_checks(router, sources)
    upload.routes_of(workspace, router)
    return router


def _add_reading(router: APIRouter, sources: Sources) -> None:
    @router.get("/sources")
    def in_the_folder() -> dict[str, Any]:
        """The sources, caches and runs in the opened folders, and the source to open at first, if any."""
        workspace = sources.workspace
        found = search.find(workspace)
        return {
            "default": workspace.default_source,
            "sources": [
                {
                    "source": workspace.shown(each.path),
                    "images": each.images,
                    "more": not each.is_whole,
                    "first": list(map(workspace.shown, each.first)),
                }
                for each in found.sources
            ],
            "caches": list(map(workspace.shown, found.caches)),
            "runs": [runs.about(workspace, run) for run in found.runs[:MOST_RUNS]],
        }

    @router.get("/overview")
    def overview(source: Text) -> dict[str, Any]:
        """How many rows a source has, and how many of them have problems, or why it cannot be read.

        Null where that would take long: sources of many images are listed when they are opened.
        """
        place = sources.workspace.inside(source)
        known = next((each for each in search.find(sources.workspace).sources if each.path == place), None)
        if known is None or not known.is_whole or known.images > MOST_AT_ONCE or not known.images:
            return {"rows": None, "problems": None, "error": None}
        try:
            check_links(place, sources.workspace.is_inside)
            listing = list_source(place, **reading(sources.workspace.settings().data))
        except SourceError as error:
            return {"rows": None, "problems": None, "error": plain(error.fault)}
        faulty = sum(bool(entry.problems) for entry in listing.entries) + len(listing.other_problems)
        return {"rows": len(listing.entries), "problems": faulty, "error": None}

    @router.get("")
    def summary(source: Text) -> dict[str, Any]:
        opened = sources.get(source)
        opened.look()
        return summary_of(opened)

    @router.post("/reload")
    def reload(body: OfSource) -> dict[str, Any]:
        opened = sources.get(body.source)
        opened.list_again()
        return summary_of(opened)

    @router.get("/rows")
    def rows(
        source: Text,
        start: Number = 0,
        count: Annotated[int, Query(ge=0, le=MOST_ROWS)] = 50,
        filter: Text = "all",
        search: Text = "",
        sort: Sort = "source",
    ) -> dict[str, Any]:
        opened = sources.get(source)
        chosen = opened.rows(View(filter, search, sort))
        shown = [row_json(opened, int(row)) for row in chosen[start : start + count]]
        return {"total": len(chosen), "start": start, "order": opened.order, "revision": opened.revision, "rows": shown}

    @router.get("/positions")
    def all_rows(source: Text, filter: Text = "all", search: Text = "", sort: Sort = "source") -> Response:
        opened = sources.get(source)
        return as_json({"order": opened.order, "rows": opened.rows(View(filter, search, sort)).tolist()})

    @router.get("/place")
    def place(source: Text, row: Number, filter: Text = "all", search: Text = "", sort: Sort = "source") -> Any:
        """The position of a row in a view; null if it is not there."""
        found = (sources.get(source).rows(View(filter, search, sort)) == row).nonzero()[0]
        return {"index": int(found[0]) if len(found) else None}

    @router.get("/row")
    def row(source: Text, row: Number) -> dict[str, Any]:
        opened = sources.get(source)
        entry = opened.entry(row)
        offered = [{"old": opened.shown(str(old)), "new": new.name} for old, new in renames(opened, entry)]
        return row_json(opened, row) | {"details": details_of(opened, row), "renames": offered}

    @router.get("/groups")
    def groups(source: Text, finding: Text, start: Number = 0, count: Annotated[int, Query(ge=0, le=50)] = 20) -> Any:
        opened = sources.get(source)
        findings = opened.scan.findings if opened.scan else None
        grouped = findings.groups.get(finding) if findings else None
        every = grouped or [[row] for row in opened.flags().get(finding, ())]
        shown = [
            {"size": len(group), "rows": [row_json(opened, row) for row in group[:IN_GROUP]]}
            for group in every[start : start + count]
        ]
        return {"total": len(every), "order": opened.order, "groups": shown}


def _add_images(router: APIRouter, sources: Sources, thumbnails: Thumbnails) -> None:
    @router.get("/image")
    def image(
        request: Request,
        source: Text,
        row: Number,
        role: Text = "target",
        size: Literal["thumbnail", "whole", "overlay"] = "thumbnail",
        v: Text = "",
    ) -> Response:
        opened = sources.get(source)
        entry = opened.readable(row)
        found = image_at(entry, role)
        on_target = size == "overlay" and role != "mask"
        version = overlay_version(entry, role) if on_target else version_of(found)
        tag, is_mask = f'"{version}-{size}"', role == "mask"
        headers = {"ETag": tag, "Cache-Control": FOREVER if v == version else "private, no-cache"}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if size == "thumbnail":
            try:
                return Response(thumbnails.get(found, is_mask=is_mask), headers=headers, media_type="image/jpeg")
            except SourceError as error:
                opened.note(opened.entry(row), found, error)
                raise
        if on_target:
            return Response(control_overlay(opened, entry, role), headers=headers, media_type="image/jpeg")
        data = overlay(found) if size == "overlay" else whole(found, is_mask=is_mask)
        return Response(data, headers=headers, media_type="image/png" if is_mask else "image/jpeg")

    @router.get("/mask")
    def mask(source: Text, row: Number) -> Response:
        """The values of a mask at the target's size, deflated."""
        (width, height), values, seen, is_scaled = mask_values(sources.get(source).readable(row))
        about = {"width": width, "height": height, "seen": seen, "scaled": is_scaled}
        headers = {"X-About": json.dumps(about)}
        return Response(deflated(values), headers=headers, media_type="application/octet-stream")


def _add_edits(router: APIRouter, sources: Sources) -> None:
    def answer(opened: OpenSource, row: int) -> dict[str, Any]:
        return {"order": opened.order, "revision": opened.revision, "row": row_json(opened, row)}

    @router.post("/prompt")
    def prompt(body: NewPrompt) -> dict[str, Any]:
        opened = sources.get(body.source)
        opened.set_prompt(body.row, body.seen, body.caption, body.text)
        return answer(opened, body.row)

    @router.post("/left-out")
    def left_out(body: LeftOut) -> dict[str, Any]:
        opened = sources.get(body.source)
        opened.set_left_out(body.rows, body.order, is_left_out=body.left_out)
        return {"order": opened.order, "revision": opened.revision}

    @router.post("/mask")
    def new_mask(
        source: Text, row: Number, seen: Text, body: Annotated[bytes, Body()], seen_mask: Text = ""
    ) -> dict[str, Any]:
        opened = sources.get(source)
        png = mask_png(opened.readable(row), body)
        new = opened.set_mask(row, seen, png, seen_mask or None)
        return answer(opened, row) | {"seen": "" if new.mask is None else content_hash(new.mask.read())}


def _add_checks(router: APIRouter, sources: Sources) -> None:
    @router.post("/check")
    def check(body: Checked) -> dict[str, Any]:
        return sources.start_check(sources.get(body.source), body.form).as_json()

    @router.post("/check/stop")
    def stop_check(body: OfSource) -> dict[str, Any]:
        opened = sources.get(body.source)
        if opened.check is not None:
            opened.check.stop()
        return {}

    @router.post("/scan")
    def scan(body: OfSource) -> dict[str, Any]:
        return sources.get(body.source).start_scan().as_json()

    @router.post("/scan/stop")
    def stop(body: OfSource) -> dict[str, Any]:
        opened = sources.get(body.source)
        if opened.scan is None:
            raise RefusedError(409, "nothing is being read", "reload the page")
        opened.scan.stop()
        return opened.scan.as_json()


# ---- as JSON ---------------------------------------------------------------------------------------------------------


def summary_of(opened: OpenSource) -> dict[str, Any]:
    """The part of the page above the rows."""
    is_ready = opened.state == "ready"
    editor = opened.editor() if is_ready else None
    refusal = editor if isinstance(editor, SourceError) else None
    general = opened.other_problems() if is_ready else []
    return {
        "state": opened.state,
        "listing": opened.is_listing,
        "listed": len(opened.entries),
        "order": opened.order,
        "revision": opened.revision,
        "error": None if opened.error is None else error_json(opened, opened.error),
        "editable": is_ready and refusal is None,
        "not_editable": None if refusal is None else error_json(opened, refusal),
        "undo": {"id": opened.undoable[-1].id, "what": opened.undoable[-1].what} if opened.undoable else None,
        "counts": opened.counts() if is_ready else {},
        "labels": FILTERS | FINDINGS | measured.FINDINGS,
        "advice": measured.ADVICE,
        "groups": IN_GROUPS,
        "general": [problem_json(opened, problem) for problem in general[:MOST_GENERAL]],
        "general_count": len(general),
        "check": None if opened.check is None else check_json(opened, opened.check),
        "scan": None if opened.scan is None else opened.scan.as_json(),
    }


def row_json(opened: OpenSource, row: int) -> dict[str, Any]:
    """A row as the page shows it; an edit by its number is refused when the source has another order."""
    order = opened.order  # before the row, since a listing may end between the two
    entry = opened.entry(row)
    findings = opened.scan.findings if opened.scan else None
    problems = [problem_json(opened, problem) for problem in opened.problems_of(entry)]
    images = [{"role": role, "v": version_of(image_at(entry, role))} for role in roles_of(entry)]
    has_changed = opened.has_changed(entry, joined_versions([image["v"] for image in images]))
    row_measured = None if has_changed or entry.is_left_out else opened.measured.of(entry)
    notes = list(row_measured.notes()) if row_measured else []
    return {
        "row": row,
        "order": order,
        "name": entry.name,
        "where": opened.shown(entry.where),
        "version": version_of_entry(entry),
        "prompts": entry.prompts,
        "phrase": entry.phrase,
        "left_out": entry.is_left_out,
        "draft": entry in opened.drafts,
        "problems": problems,
        "changed": has_changed,
        "findings": [*(findings.by_row.get(row, ()) if findings else ()), *dict.fromkeys(name for name, _, _ in notes)],
        "measured": [measured_json(entry, *note) for note in notes],
        "images": images,
    }


def measured_json(entry: Entry, finding: str, what: str, control: int | None) -> dict[str, Any]:
    """A finding of a row, with the role and version of the control that has an overlay."""
    role = None if control is None else f"control-{control}"
    overlaid = None if role is None else {"role": role, "v": overlay_version(entry, role)}
    return {"finding": finding, "what": what, "do": measured.ADVICE[finding], "overlay": overlaid}


def check_json(opened: OpenSource, check: Check) -> dict[str, Any]:
    """A check, with how many rows each of its findings has."""
    found = {name: len(rows) for name, rows in opened.flags().items() if name in measured.FINDINGS}
    return check.as_json() | {"unseen": opened.unseen(), "found": found, "measured": opened.measured.to_json()}


def overlay_version(entry: Entry, role: str) -> str:
    """A name of the bytes of a control and its target."""
    return joined_versions([version_of(image_at(entry, each)) for each in ("target", role)])


def control_overlay(opened: OpenSource, entry: Entry, role: str) -> bytes:
    """A JPEG of a misaligned control on its target; RefusedError (422) for any other image."""
    row, position = opened.measured.of(entry), int(role.rpartition("-")[2]) if role.startswith("control-") else -1
    if row is None or position not in row.misaligned or entry.target is None:
        what, do = "only a mask, or a control that is misaligned, has an overlay", "check the source again"
        raise RefusedError(422, what, do)
    return measured.overlay_of(entry.target, image_at(entry, role), row, position)


def details_of(opened: OpenSource, row: int) -> list[dict[str, Any]]:
    """The place of each image, and its size or what is wrong with it."""
    found: list[dict[str, Any]] = []
    entry = opened.readable(row)
    for role in roles_of(entry):
        image = image_at(entry, role)
        about: dict[str, Any] = {"role": role, "where": opened.shown(str(image)), "size": None, "error": None}
        try:
            about["size"] = upright_size(image.read(), str(image))
        except QwenCacheError as error:
            about["error"] = error_json(opened, error)
        found.append(about)
    return found


def image_at(entry: Entry, role: str) -> Readable:
    """An image of a row; RefusedError (404) if the row has none of this role."""
    image = image_of(entry, role)
    if image is None:
        raise RefusedError(404, "the row has no such image", "reload the page: the source has changed")
    return image


def problem_json(opened: OpenSource, problem: Problem) -> dict[str, str]:
    return {"where": opened.shown(problem.where), "what": problem.what, "do": problem.do}


def error_json(opened: OpenSource, error: QwenCacheError) -> dict[str, str]:
    return {"where": opened.shown(str(error.where or "")), "what": plain(error.fault), "do": error.do or ""}
