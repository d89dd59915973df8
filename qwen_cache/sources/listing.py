"""Every row of a source as it stands there, for people to look at and edit: also rows with problems and rows left out.

Prompts are raw: with marks, without trigger word, prefix and suffix. The problems are exactly those that `read_source`
reports, by the same code. Nothing is opened but tables, tars and text files: an image that cannot be decoded is no
problem here. Raises `SourceError` for a source that cannot be read at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Unpack

from qwen_cache.errors import Problem
from qwen_cache.sources.detect import drafts_of, read_drafts, unix
from qwen_cache.sources.garbage import without_gc
from qwen_cache.sources.places import Location
from qwen_cache.sources.reading import SourceSettings, needs_of
from qwen_cache.sources.rows import Draft, Readable


@dataclass(frozen=True, slots=True)
class Entry:
    """A row of a source: a target with its controls, or without, and one or more captions."""

    names: tuple[str, ...]
    """The name of each caption's sample: that of the row, then with `#2`, `#3`, …"""
    where: str
    """Where the row is, as in its problems: `data/metadata.csv:12`, or the target's path."""
    target: Readable | None
    controls: tuple[Readable, ...]
    mask: Readable | None
    prompts: tuple[str, ...]
    """The captions; one that is empty or missing is an empty text."""
    phrase: str
    """The words that a table gives for where the edit is."""
    is_left_out: bool
    problems: tuple[Problem, ...]
    """Why the row cannot be used; none if it is left out."""

    @property
    def name(self) -> str:
        return self.names[0]


@dataclass(frozen=True)
class Listing:
    """A source as a list."""

    source: str
    entries: tuple[Entry, ...]
    """In the order of the source."""
    problems: tuple[Problem, ...]
    """All problems, as `read_source` reports them: what every row lacks is one of them."""

    @property
    def left_out(self) -> int:
        """How many rows are left out."""
        return sum(entry.is_left_out for entry in self.entries)

    @property
    def other_problems(self) -> list[Problem]:
        """Those of no entry: of a file without a target, of a row that cannot be cut into cells, of all rows."""
        known = {problem for entry in self.entries for problem in entry.problems}
        return [problem for problem in self.problems if problem not in known]


@without_gc()
def list_source(source: Location, **settings: Unpack[SourceSettings]) -> Listing:
    """The rows of `source` for these settings of `read_source`; `captions` change nothing here."""
    needs, entries = needs_of(**settings), list[Entry]()
    content = read_drafts(
        drafts_of(source, needs),
        str(source),
        needs,
        allow_empty_prompt=settings.get("allow_empty_prompt", False),
        on_draft=lambda draft, problems: entries.append(as_entry(draft, problems)),
    )
    return Listing(str(source), tuple(entries), tuple(content.problems))


def as_entry(draft: Draft, problems: Sequence[Problem]) -> Entry:
    first = draft.samples[0]
    return Entry(
        tuple(row.name for row in draft.samples),
        first.where,
        first.target,
        first.controls,
        first.mask,
        tuple(unix(row.prompt) for row in draft.samples),
        unix(draft.phrase),
        draft.is_left_out,
        tuple(problems),
    )
