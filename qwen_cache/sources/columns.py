"""The columns of a table by role, and its rows as drafts of samples.

Unknown columns are ignored, unless the name resembles that of a control or a mask: no typo may drop one. A value of an
image column is a path, or the image itself; several controls may be a list. `prompts` is a list of captions, and each
becomes a sample: a sample stays one range of bytes with one key, as batches, `merge --select` and changed captions
need. It costs little: samples about the same images are encoded consecutively, so that images and prefix run once, and
compression works within a sample only.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from difflib import get_close_matches
from typing import Any

from qwen_cache.errors import Problem, SourceError
from qwen_cache.sources.places import File, Location, TableFolder
from qwen_cache.sources.rows import Draft, Embedded, FieldProblems, Needs, Readable, Row, unique

LIST_COLUMNS = ("prompts", "captions")
"""The names of columns that hold a list of captions."""

COLUMNS = {
    "target": (
        *("path_target", "target", "target_image", "target_img", "image", "image_path", "file_name"),
        *("edited_image", "edited_img", "output_image"),
    ),
    "control": (
        *("path_control", "control", "control_image", "control_images", "control_path", "edit_image"),
        *("input_image", "input_images", "source_image", "source_img", "src_img", "original_image"),
    ),
    "mask": ("path_mask", "mask", "mask_image", "mask_img", "mask_path", "control_mask", "edit_mask"),
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", *LIST_COLUMNS),
    "phrase": ("phrase", "edit_phrase"),
}
"""Roles, and their column names in qwen-image-finetune, DiffSynth, musubi-tuner, imagefolder and published datasets of
edits."""

Columns = dict[str, list[str]]
"""The columns of a table by role."""

Record = tuple[str, dict[str, Any]]
"""A row of a table: its location for messages, and its values by column, which are text or embedded images."""


def role_of(name: str) -> tuple[str | None, int | None]:
    """The role of a column by its name, and its number: `control_2` is (`control`, 2)."""
    stem, number = _split_number(name.strip().lower())
    role = next((role for role, aliases in COLUMNS.items() if stem in aliases), None)
    return (role, number) if number is None or role == "control" else (None, None)


def find_columns(names: Iterable[str], where: Location, needs: Needs) -> Columns:
    """The columns by role, the controls in the order of their numbers; SourceError if they are ambiguous."""
    columns: dict[str, dict[int, str]] = {role: {} for role in COLUMNS}
    unknown: dict[str, str] = {}
    for name in names:
        role, number = role_of(name)
        if role is None:
            unknown[name] = _split_number(name.strip().lower())[0]
        elif (twin := columns[role].get(number or 0)) is not None:
            what = f"two columns hold the same {role}: {twin!r} and {name!r}"
            raise SourceError(what, where=where, expected="one", do="rename or remove the wrong one")
        else:
            columns[role][number or 0] = name
    for role in ("target", "prompt", "control"):
        if getattr(needs, role) and not columns[role]:
            raise _no_column(role, names, unknown, where)
    if not (columns["target"] or columns["control"]):
        raise _no_column("target", names, unknown, where)
    _check_unknown(unknown, where)
    _check_controls(columns["control"], where, needs.takes_control)
    return {role: [by_number[number] for number in sorted(by_number)] for role, by_number in columns.items()}


def _split_number(name: str) -> tuple[str, int | None]:
    """`control_2` is (`control`, 2), `control` is (`control`, None)."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if stem and number.isdecimal() else (name, None)


def _no_column(role: str, names: Iterable[str], unknown: dict[str, str], where: Location) -> SourceError:
    near = [(name, like) for name, stem in unknown.items() for like in get_close_matches(stem, COLUMNS[role], 1)]
    return SourceError(
        f"no column holds the {role}",
        where=where,
        expected=" or ".join(COLUMNS[role]),
        found=", ".join(map(repr, names)) or "an empty first line",
        do=f"rename {near[0][0]!r} to {near[0][1]!r}" if near else "add it, or rename the right column",
    )


def _check_unknown(unknown: dict[str, str], where: Location) -> None:
    """SourceError if an unknown column resembles a control or a mask: a typo must not drop it."""
    known = (*COLUMNS["control"], *COLUMNS["mask"])
    for name, stem in unknown.items():
        near = get_close_matches(
            stem, known, 1, 0.85
        )  # `contol` (0.92) is a typo, `source_id` (0.84) is no `source_img`
        near += [like for like in known if sorted(like) == sorted(stem)]  # but `maks` (0.75) is one
        near += [word for word in ("control", "mask") if word in stem.split("_")]
        if near:
            like = near[0] + (name.strip()[len(stem) :] if near[0] in COLUMNS["control"] else "")  # with its number
            raise SourceError(
                f"the column {name!r} is unknown, and resembles {like!r}",
                where=where,
                expected=", ".join(known),
                do=f"rename it to {like!r}, or to something else if it holds neither a control nor a mask",
            )


def _check_controls(controls: dict[int, str], where: Location, takes_control: bool) -> None:
    listed = ", ".join(repr(controls[number]) for number in sorted(controls))
    if controls and not takes_control:
        raise SourceError(
            "there is a control column, but a text-to-image model takes no controls",
            where=where,
            expected="targets, prompts and masks only",
            found=listed,
            do="choose an editing model, or remove the column",
        )
    first = min(controls, default=0)
    if first > 1 or sorted(controls) != list(range(first, first + len(controls))):
        raise SourceError(
            "the control columns have a gap",
            where=where,
            expected="numbers in a row, from 0 or 1; the one without a number counts as 0",
            found=listed,
            do="add the one that is missing, or rename them",
        )


def read_rows(
    records: Iterable[Record | Problem], columns: Columns, folder: TableFolder, taken: dict[str, int]
) -> Iterator[Problem | Draft]:
    """The rows of a table in `folder` as drafts; `taken` has the names so far."""
    for record in records:
        yield record if isinstance(record, Problem) else _read_row(*record, columns, folder, taken)


def _read_row(
    where: str, values: dict[str, Any], columns: Columns, folder: TableFolder, taken: dict[str, int]
) -> Problem | Draft:
    field_problems: FieldProblems = {}
    cells: dict[str, list[Any]] = {role: [] for role in columns}
    for role, column in [(role, column) for role, listed in columns.items() for column in listed]:
        cells[role] += _items(role, column, values.get(column), field_problems)
    mask, controls, prompts = cells["mask"], cells["control"], cells["prompt"] or [""]
    while controls and not controls[-1]:
        controls.pop()
    target = cells["target"][0] if columns["target"] else controls[0] if controls else ""
    if "" in controls:
        what = f"control {controls.index('') + 1} is empty, but a later one is {controls[-1]}"
        field_problems.setdefault("control", (what, "move the later ones up: their order is what the model sees"))
    if not target:
        role = "target" if columns["target"] else "control"
        what, do = f"the {role} {columns[role][0]!r} is empty", "name an image, or remove the row"
        return Problem(where, *field_problems.get(role, (what, do)))
    try:
        images = [_image(value, folder) for value in [target, *filter(None, controls)]]
        painted = _image(mask[0], folder) if mask and mask[0] else None
    except SourceError as error:
        return Problem(where, error.fault, error.do or "correct the path")
    name = folder.name(target) if isinstance(target, str) else target.name
    row = (where, images[0], tuple(images[1:]), painted)
    phrase = cells["phrase"][0] if cells["phrase"] else ""
    return Draft(tuple(Row(unique(name, taken), *row, prompt) for prompt in prompts), field_problems, phrase)


def _image(value: str | Embedded, folder: TableFolder) -> Readable:
    return File(folder.file(value)) if isinstance(value, str) else value


def _items(role: str, column: str, value: Any, field_problems: FieldProblems) -> list[Any]:
    """The values of one cell: stripped text, or images; "" for an empty or unusable one."""
    several = role == "prompt" and column.strip().lower() in LIST_COLUMNS
    if several and not (isinstance(value, list) and value):
        field_problems[role] = (
            f"the {role} {column!r} is {value!r}, expected a list of texts",
            "write one or more captions",
        )
        return [""]
    items = (value or [None]) if isinstance(value, list) and (several or role == "control") else [value]
    return [_item(role, column, item, field_problems) for item in items]


def _item(role: str, column: str, item: Any, field_problems: FieldProblems) -> Any:
    if role != "prompt" and hasattr(item, "read"):
        return item
    text = item if isinstance(item, str) else ""
    # half an emoji, left by programs that truncate captions, cannot be stored as UTF-8
    if (item is not None and text != item) or re.search(r"[\ud800-\udfff]", text):
        what = f"the {role} {column!r} is {_short(item)}, expected text"
        field_problems[role] = what, "correct it; text stands in double quotes"
    return text.strip()


def _short(value: Any) -> str:
    shown = repr(value[:60] if isinstance(value, bytes) else value)
    return shown if len(shown) <= 200 else shown[:200] + "…"
