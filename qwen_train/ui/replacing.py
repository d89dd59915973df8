"""Find and replace over the prompts of the rows that a page shows: what would change, and the change.

What is written is what was shown: the digest of a preview stands for each row with its old and new prompts. Regular
expressions run in a process of their own for a few seconds at most.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel

from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.identity import content_hash
from qwen_cache.service.http import RefusedError
from qwen_cache.sources.captions import PUNCTUATION
from qwen_cache.sources.detect import Entry
from qwen_cache.sources.rows import MAX_TEXT
from qwen_cache.terminal import plural
from qwen_train.ui import pattern
from qwen_train.ui.opened import Changing, OpenSource, View

SECONDS = 5.0  # for a regular expression; 100,000 prompts take less than one
MOST_TYPED = 10_000  # characters of what is found, and of what replaces it
MOST_WRITTEN = 100_000_000  # characters that replace others, in all rows
SHOWN = 20  # rows of a preview
ONE_AT_A_TIME = Lock()


class Replacement(BaseModel):
    """A change of the prompts of some rows."""

    source: str
    how: Literal["replace", "before", "after"] = "replace"
    find: str = ""
    """The text that `replace` looks for."""
    text: str = ""
    """The text that stands there then, or is added."""
    is_pattern: bool = False
    """True if `find` is a regular expression of Python, and `text` may name its groups."""
    match_case: bool = True
    whole_words: bool = False
    skip: bool = True
    """For `before` and `after`: leave out prompts that have the text already."""
    filter: str = "all"
    search: str = ""
    rows: list[int] | None = None
    """These rows, in place of those of the view."""
    order: int
    """The order of the source that the rows belong to."""
    seen: str = ""
    """The digest of the preview that is written."""


@dataclass(frozen=True)
class Planned:
    """The rows that change, as they are and as they become."""

    looked_at: int
    rows: Sequence[int]
    before: Sequence[Entry]
    after: Sequence[Sequence[str]]

    @property
    def digest(self) -> str:
        texts = [[row, entry.prompts, new] for row, entry, new in zip(self.rows, self.before, self.after, strict=True)]
        return content_hash(json.dumps(texts).encode())


# ---- texts -----------------------------------------------------------------------------------------------------------


def new_texts(form: Replacement, texts: list[str]) -> dict[int, str]:
    """By its number, each text that changes; ConfigError for a form that says nothing, or a wrong pattern."""
    if max(len(form.find), len(form.text)) > MOST_TYPED:
        raise ConfigError("this text is too long", where="find", expected=f"at most {MOST_TYPED:,} characters")
    if form.how != "replace":
        return _added(form, texts)
    if not form.find:
        raise ConfigError("there is nothing to find", where="find", do="write what to replace")
    if form.is_pattern:
        return _by_pattern(form, texts)
    wanted = _plain(form.find, match_case=form.match_case, whole_words=form.whole_words)
    found, size = dict[int, str](), 0
    for number, text in enumerate(texts):
        size += len(wanted.findall(text)) * len(form.text)
        if size > MOST_WRITTEN:
            raise ConfigError("the new prompts are too long together", where="text", do="replace fewer rows at a time")
        new = wanted.sub(lambda _: form.text, text)
        if new != text:
            found[number] = new
    return found


def _plain(text: str, *, match_case: bool, whole_words: bool) -> re.Pattern[str]:
    """A text as a pattern, which takes time that grows with the length alone."""
    edge = (r"(?<!\w)", r"(?!\w)") if whole_words else ("", "")
    return re.compile(f"{edge[0]}{re.escape(text)}{edge[1]}", 0 if match_case else re.IGNORECASE)


def _added(form: Replacement, texts: list[str]) -> dict[int, str]:
    added = form.text.strip()
    if not added:
        raise ConfigError("there is nothing to add", where="text", do="write it, such as a trigger word")
    bare = added.strip(PUNCTUATION + " ") or added
    has = _plain(bare, match_case=True, whole_words=True) if form.skip else None
    found = {}
    for number, text in enumerate(texts):
        if has and has.search(text):
            continue
        gap = "" if form.how == "after" and added.startswith(tuple(PUNCTUATION)) else " "
        found[number] = (f"{added}{gap}{text}" if form.how == "before" else f"{text}{gap}{added}").strip()
    return found


def _by_pattern(form: Replacement, texts: list[str]) -> dict[int, str]:
    given = {"pattern": form.find, "text": form.text, "texts": texts, "ignore_case": not form.match_case}
    arguments = [sys.executable, "-I", pattern.__file__]
    with ONE_AT_A_TIME:
        try:
            done = subprocess.run(arguments, input=json.dumps(given), capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            do = "make it simpler: nested repeats such as (a+)+ take for ever"
            raise ConfigError(f"the pattern took more than {SECONDS:g} seconds", where="find", do=do) from None
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        answer = {"error": "it takes too much memory or time"}
    if "error" in answer:
        do = "correct it: a regular expression of Python, with \\1 or \\g<name> for its groups"
        raise ConfigError("this pattern cannot be used", where="find", found=answer["error"], do=do)
    return {int(number): text for number, text in answer["changed"].items()}


# ---- rows ------------------------------------------------------------------------------------------------------------


def planned(source: OpenSource, form: Replacement) -> Planned:
    """The rows that a form changes; SourceError if a prompt would be too long."""
    with source.lock:
        source.writing()
        if form.order != source.order:
            raise RefusedError(409, "the source has other rows now", "look at them, and preview again")
        found = form.rows if form.rows is not None else source.rows(View(form.filter, form.search)).tolist()
        rows = list(dict.fromkeys(found))
        entries = [source.entry(row) for row in rows]
    places = [(i, caption) for i, entry in enumerate(entries) for caption in range(len(entry.prompts))]
    new = new_texts(form, [entries[i].prompts[caption] for i, caption in places])
    changed: dict[int, list[str]] = {}
    for number, text in new.items():
        i, caption = places[number]
        if len(text) > MAX_TEXT:
            expected, found_size = f"at most {MAX_TEXT:,} characters", f"{len(text):,}"
            raise SourceError("a prompt would be too long", where=entries[i].where, expected=expected, found=found_size)
        changed.setdefault(i, list(entries[i].prompts))[caption] = text.strip()
    changed = {i: texts for i, texts in changed.items() if tuple(texts) != entries[i].prompts}
    kept = sorted(changed)
    return Planned(len(rows), [rows[i] for i in kept], [entries[i] for i in kept], [changed[i] for i in kept])


def preview(source: OpenSource, form: Replacement) -> dict[str, Any]:
    """How many rows change, and the first of them before and after."""
    plan = planned(source, form)
    shown = [
        {"row": row, "name": entry.name, "before": before, "after": after}
        for row, entry, texts in list(zip(plan.rows, plan.before, plan.after, strict=True))[:SHOWN]
        for before, after in zip(entry.prompts, texts, strict=True)
        if before != after
    ]
    empty = sum(not all(texts) for texts in plan.after)
    return {"looked_at": plan.looked_at, "rows": len(plan.rows), "empty": empty, "first": shown, "seen": plan.digest}


def write(source: OpenSource, form: Replacement) -> int:
    """Write what was shown; how many rows. RefusedError (409) if anything of it has changed since."""
    plan = planned(source, form)
    with source.lock:
        editor = source.writing()
        is_same = form.order == source.order and all(
            source.entry(row) == entry for row, entry in zip(plan.rows, plan.before, strict=True)
        )
        if not is_same or plan.digest != form.seen:
            raise RefusedError(409, "rows have changed since the preview", "look at the new preview, and replace again")
        if plan.rows:
            with Changing(source, editor, f"the replacement in {plural(len(plan.rows), 'row')}", plan.rows):
                new = editor.set_prompts(list(zip(plan.before, plan.after, strict=True)))
                if new:  # else their places have changed too, and the source is listed again
                    source.replace(plan.rows, new)
    return len(plan.rows)


def add_replacing(router: APIRouter, get: Callable[[str], OpenSource]) -> None:
    """The routes of find and replace."""

    @router.post("/replace/preview")
    def show(form: Replacement) -> dict[str, Any]:
        return preview(get(form.source), form)

    @router.post("/replace")
    def replace(form: Replacement) -> dict[str, Any]:
        return {"rows": write(get(form.source), form)}
