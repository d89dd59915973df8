"""Which rows of a source are shown, and in which order: a filter, the words of a search, and a sort."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qwen_cache.sources.detect import Entry

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
    """What a page asks for."""

    filter: str = "all"
    search: str = ""
    sort: str = "source"


@dataclass(frozen=True)
class Shown:
    """What a view depends on, besides the listing."""

    with_problems: Collection[int]
    flags: Mapping[str, Sequence[int]]
    """The rows of each finding, in their order: groups one after another."""
    pixels: npt.NDArray[np.float64] | None
    """Of each target; NaN where unknown."""


def text_of(entry: Entry) -> str:
    """What a search looks into."""
    return "\n".join((entry.name, *entry.prompts)).casefold()


def has(entry: Entry, row: int, name: str, with_problems: Collection[int]) -> bool:
    """Whether a row belongs to one of `FILTERS`."""
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
    return chosen[_order(view.sort, chosen, entries, shown)]


def _order(sort: str, rows: Positions, entries: Sequence[Entry], shown: Shown) -> Positions:
    def lengths() -> npt.NDArray[np.float64]:
        return np.array([max(map(len, entries[row].prompts), default=0) for row in rows.tolist()], np.float64)

    def pixels() -> npt.NDArray[np.float64]:
        return np.full(len(rows), np.nan) if shown.pixels is None else shown.pixels[rows]

    if sort == "name":
        names = [entries[row].name for row in rows.tolist()]
        return np.array(sorted(range(len(names)), key=names.__getitem__), np.int64)
    keys: dict[str, Callable[[], npt.NDArray[np.float64]]] = {
        "shortest": lengths,
        "longest": lambda: -lengths(),
        "smallest": pixels,
        "largest": lambda: -pixels(),
    }
    return np.argsort(keys[sort](), kind="stable") if sort in keys else np.arange(len(rows))
