"""Turn what people have (a folder, or a CSV, JSONL or JSON table) into rows, before anything is encoded.

A folder for editing. Names are compared whole, never by prefix; subfolders are part of a name:

    target_images/NAME.png           the target (the folder may be called training_images, targets or target as well)
    target_images/NAME.txt           its prompt
    control_images/NAME.png          the first control (or condition_images, controls, control)
    control_images/NAME_control_1.*  further controls, counted from 1
    control_images/NAME_mask.*       the mask, white where the target was edited

Every picture in the target folder is a target. A file in the control folder goes to the target that has exactly its
name, if there is one; only else are `_control_1` and `_mask` read as endings. So a target may be called `x_mask`, but
then `control_images/x_mask.png` is the control of that one. For text-to-image there are no controls, and a folder of
pictures with their prompts beside them will do. A folder with a metadata.csv or metadata.jsonl stands for that table.

A table has one row per sample. These are its columns or keys, in upper or lower case; others are ignored, unless the
name reads like that of a control or a mask:

    target   path_target, target, target_image, image, image_path, file_name, edited_image
    control  path_control, control, control_image, control_images, control_path, edit_image, input_image, source_image
             (several: one of these with _0, _1, _2, … behind it; in JSON a list will do)
    mask     path_mask, mask, mask_image, mask_path, control_mask, edit_mask
    prompt   prompt, text, caption, instruction, edit_prompt

Paths are relative to the table's folder. Text is UTF-8; white space around prompts is dropped. Refused at once, with a
`SourceError`: what cannot be read, is empty, or can be read in two ways. All else that is wrong is a `Problem` of its
row, so that one go shows all of them. No row is dropped in silence, and no files are paired by their position.
"""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from qwen_cache.format.errors import SourceError

TARGET_FOLDERS = ("target_images", "training_images", "targets", "target")
CONTROL_FOLDERS = ("control_images", "condition_images", "controls", "control")
METADATA_TABLES = ("metadata.csv", "metadata.jsonl")
IMAGE_EXTENSIONS = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".tif", ".tiff", ".avif")

COLUMNS = {
    "target": ("path_target", "target", "target_image", "image", "image_path", "file_name", "edited_image"),
    "control": (
        *("path_control", "control", "control_image", "control_images", "control_path"),
        *("edit_image", "input_image", "source_image"),
    ),
    "mask": ("path_mask", "mask", "mask_image", "mask_path", "control_mask", "edit_mask"),
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt"),
}
"""What a column holds, and the names that qwen-image-finetune, DiffSynth, musubi-tuner and imagefolder give it."""


@dataclass(frozen=True)
class Row:
    """One sample as it lies on disk; every file was there when the source was read."""

    name: str
    """Unique in its source, and the same whatever other targets there are: the target's path without extension,
    relative to the target folder or the table. A further row with the same one gets `#2`, `#3`, …"""
    where: str
    """For messages: `data/metadata.csv:12`, `data/metadata.json[11]`, or the target's path."""
    target: Path
    controls: tuple[Path, ...]
    mask: Path | None
    prompt: str


@dataclass(frozen=True)
class Problem:
    """Why one row cannot be used."""

    where: str
    what: str
    do: str


Draft = tuple[Row, dict[str, tuple[str, str]]]
"""A row in the making, and by the part concerned what is wrong with it and what to do about that."""


def read_source(
    path: Path, *, needs_control: bool, allow_empty_prompt: bool = False
) -> tuple[list[Row], list[Problem]]:
    """The usable rows of `path`, and everything that is wrong with the others.

    A folder's rows are sorted by name, a table's keep their order. `needs_control` says whether the model edits (every
    target needs a control) or makes pictures from text (there must be none).
    """
    table = _table_in(path) if path.is_dir() else path
    drafts = _read_folder(path, needs_control) if table is None else _read_table(table, needs_control)
    rows: list[Row] = []
    problems: list[Problem] = []
    for draft in drafts:
        if isinstance(draft, Problem):
            problems.append(draft)
            continue
        row, faults = draft
        if needs_control and not row.controls:
            faults.setdefault("control", (f"the target {row.target} has no control", "add one, or remove the target"))
        if not row.prompt and not allow_empty_prompt:
            do = "write one, or allow empty prompts with data.allow_empty_prompt: true"
            faults.setdefault("prompt", (f"the prompt of {row.target} is empty", do))
        for role, file in [("target", row.target), *(("control", it) for it in row.controls), ("mask", row.mask)]:
            if file is not None and not os.path.isfile(file):
                do = "put the file there, or correct the path (in a table it starts at the table's folder)"
                faults[f"{role} {file}"] = f"the {role} {file} does not exist", do
        problems += [Problem(row.where, what, do) for what, do in faults.values()]
        if not faults:
            rows.append(row)
    return rows, problems


# Folders


def _table_in(folder: Path) -> Path | None:
    """The table that stands for a folder, if it has one."""
    tables = [folder / name for name in METADATA_TABLES if (folder / name).is_file()]
    rivals = tables + _subfolders(folder, TARGET_FOLDERS) + _subfolders(folder, CONTROL_FOLDERS)
    if tables and len(rivals) > 1:
        raise SourceError(
            "the folder can be read in more than one way",
            where=folder,
            expected="one table, or folders of pictures",
            found=", ".join(rival.name for rival in rivals),
            do=f"name the table itself, {tables[0]}, or move it elsewhere to use the folders",
        )
    return tables[0] if tables else None


def _subfolders(folder: Path, names: Iterable[str]) -> list[Path]:
    return [folder / name for name in names if (folder / name).is_dir()]


def _layout(folder: Path, needs_control: bool) -> tuple[Path, Path | None]:
    """Where the targets and the controls lie."""
    found = {"target": _subfolders(folder, TARGET_FOLDERS), "control": _subfolders(folder, CONTROL_FOLDERS)}
    for role, names in (("target", TARGET_FOLDERS), ("control", CONTROL_FOLDERS)):
        if len(found[role]) > 1:
            raise SourceError(
                f"the folder has more than one {role} folder",
                where=folder,
                expected="one",
                found=", ".join(path.name for path in found[role]),
                do="rename or move the one that is not meant",
            )
        if needs_control and not found[role]:
            raise SourceError(
                f"the folder has no {role} folder, which an editing model needs",
                where=folder,
                expected=" or ".join(names),
                found=", ".join(sorted(os.listdir(folder))[:10]) or "nothing",
                do=f"put the {role} pictures into {folder / names[0]}, or name a table ({', '.join(_READERS)})",
            )
    if found["control"] and not needs_control:
        raise SourceError(
            "there is a control folder, but a text-to-image model takes no controls",
            where=folder,
            expected="targets and prompts only",
            found=found["control"][0].name,
            do="choose an editing model, or name the folder of the targets itself",
        )
    return next(iter(found["target"]), folder), next(iter(found["control"]), None)


def _scan(folder: Path, extensions: Iterable[str]) -> dict[str, list[Path]]:
    """Files below `folder` by name: the path relative to it, without extension. Hidden ones are left out."""

    def refuse(error: OSError) -> None:
        raise SourceError("the folder cannot be read", where=error.filename, found=error.strerror) from error

    found: dict[str, list[Path]] = {}
    for root, folders, files in os.walk(folder, followlinks=True, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for file in sorted(files):
            path = Path(root, file)
            if not file.startswith(".") and path.suffix.lower() in extensions:
                found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), []).append(path)
    return dict(sorted(found.items()))


def _read_folder(folder: Path, needs_control: bool) -> Iterator[Problem | Draft]:
    target_folder, control_folder = _layout(folder, needs_control)
    targets, prompts = _scan(target_folder, IMAGE_EXTENSIONS), _scan(target_folder, [".txt"])
    if not targets:
        accepted = ", ".join(IMAGE_EXTENSIONS)
        raise SourceError("there is no picture", where=target_folder, expected=accepted, do="name another source")
    owned: dict[str, dict[int, list[Path]]] = {name: {} for name in targets}
    strays = [path for name, paths in prompts.items() if name not in targets for path in paths]
    for name, paths in _scan(control_folder, IMAGE_EXTENSIONS).items() if control_folder else ():
        target, slot = _owner(name, targets)
        if target is None:
            strays += paths
        else:
            owned[target][slot] = paths
    for name, paths in targets.items():
        yield _folder_row(name, paths, prompts.get(name, []), owned[name], control_folder)
    for path in strays:
        what = f"{path} belongs to no target: {target_folder} has no picture of that name"
        do = "add the target or remove the file; further controls are called NAME_control_1, masks NAME_mask"
        yield Problem(str(path), what, do)


_MASK = -1
"""The slot of the mask among what the control folder holds for a target; 0 is its first control, then 1, 2, …"""


def _owner(name: str, targets: Collection[str]) -> tuple[str | None, int]:
    """The target that a file of the control folder belongs to, and its slot there."""
    if name in targets:
        return name, 0
    ending = re.fullmatch(r"(.+)_(?:control_([1-9][0-9]*)|mask)", name, re.DOTALL)
    if ending is None or ending[1] not in targets:
        return None, 0
    return ending[1], int(ending[2]) if ending[2] else _MASK


def _folder_row(
    name: str, targets: list[Path], prompts: list[Path], slots: dict[int, list[Path]], control_folder: Path | None
) -> Draft:
    faults: dict[str, tuple[str, str]] = {}
    for files in (targets, prompts, *slots.values()):
        if len(files) > 1:
            what = f"several files have the same name: {', '.join(map(str, files))}"
            faults[what] = what, "keep the one that is meant"
    numbers = sorted(slot for slot in slots if slot != _MASK)
    missing = min(set(range(len(numbers) + 1)).difference(numbers))
    if control_folder and missing < max(len(numbers), 1):
        expected = control_folder / (f"{name}_control_{missing}.png" if missing else f"{name}.png")
        found = ", ".join(slots[slot][0].name for slot in numbers) or "none"
        what = f"the control {expected} (or .jpg, …) is missing, found {found}"
        faults["control"] = what, "add it, or remove the target"
    try:
        prompt = prompts[0].read_bytes().decode("utf-8-sig").strip() if prompts else ""
    except (OSError, UnicodeDecodeError) as error:
        prompt, faults["prompt"] = "", (f"the prompt {prompts[0]} cannot be read: {error}", "save it as UTF-8 text")
    if not prompts:
        do = "write it; a picture that is no target, such as a mask, belongs elsewhere"
        faults["prompt"] = f"the prompt {targets[0].with_suffix('.txt')} is missing", do
    controls = tuple(slots[slot][0] for slot in numbers)
    mask = slots[_MASK][0] if _MASK in slots else None
    return Row(name, str(targets[0]), targets[0], controls, mask, prompt), faults


# Tables

Record = tuple[str, dict[str, Any]]
"""A row of a table: where it is, and its values by column."""


def _read_table(path: Path, needs_control: bool) -> Iterator[Problem | Draft]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None or not path.is_file():
        raise SourceError(
            "this is no source that can be read" if path.exists() else "there is no such source",
            where=path,
            expected=f"a folder, or a table ({', '.join(_READERS)})",
            do="correct the path",
        )
    names, records = reader(path, _read_text(path))
    if not records:
        raise SourceError("the table has no rows", where=path, expected="one row per sample", do="name another source")
    columns = _columns(names, path, needs_control)
    taken: dict[str, int] = {}
    for record in records:
        yield record if isinstance(record, Problem) else _table_row(record, columns, path.parent, taken)


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise SourceError(
            "the table cannot be read", where=path, found=error.strerror, do="check its rights"
        ) from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise SourceError(
            "the table is not UTF-8 text",
            where=f"{path}:{line}",
            expected="UTF-8",
            found=f"the bytes {data[error.start : error.end]!r}",
            do="save it as UTF-8 (spreadsheets call it “CSV UTF-8”)",
        ) from error


def _csv_records(path: Path, text: str) -> tuple[list[str], list[Record | Problem]]:
    # strict: without it, a quote that is never closed swallows the rest of the table in silence
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, skipinitialspace=True)
    records: list[Record | Problem] = []
    line = 1
    try:
        names = next(reader, [])
        line = reader.line_num + 1
        for cells in reader:
            where, line = f"{path}:{line}", reader.line_num + 1
            if len(cells) == len(names):
                records.append((where, dict(zip(names, cells, strict=True))))
            elif cells:
                what = f"the row has {len(cells)} cells, expected {len(names)} as in the first line"
                records.append(Problem(where, what, "put a prompt that contains commas in double quotes"))
    except csv.Error as error:
        raise SourceError(
            "the table cannot be read from here on",
            where=f"{path}:{line}",
            found=error,
            do="write a double quote inside a quoted prompt twice, and close every quoted prompt",
        ) from error
    return names, [it for it in records if isinstance(it, Problem) or any(cell.strip() for cell in it[1].values())]


def _json_records(path: Path, text: str) -> tuple[list[str], list[Record | Problem]]:
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise _not_json(f"{path}:{error.lineno}", error) from error
    if not isinstance(items, list):
        raise SourceError("this is no table", where=path, expected="a list of objects", found=type(items).__name__)
    return _objects((f"{path}[{index}]", item) for index, item in enumerate(items))


def _jsonl_records(path: Path, text: str) -> tuple[list[str], list[Record | Problem]]:
    items = []
    for number, line in enumerate(text.split("\n"), 1):  # splitlines would also break at U+2028, which JSON may hold
        try:
            items += [(f"{path}:{number}", json.loads(line))] if line.strip() else []
        except json.JSONDecodeError as error:
            raise _not_json(f"{path}:{number}", error) from error
    return _objects(items)


def _not_json(where: str, error: json.JSONDecodeError) -> SourceError:
    return SourceError(
        "this is not JSON", where=where, found=f"{error.msg} at column {error.colno}", do="correct the line"
    )


def _objects(items: Iterable[tuple[str, Any]]) -> tuple[list[str], list[Record | Problem]]:
    records: list[Record | Problem] = []
    names: dict[str, None] = {}
    for where, item in items:
        if not isinstance(item, dict):
            raise SourceError(
                "this is no sample", where=where, expected='an object, {"image": …}', found=repr(item)[:60]
            )
        names |= dict.fromkeys(item)
        records.append((where, item))
    return list(names), records


_READERS: dict[str, Callable[[Path, str], tuple[list[str], list[Record | Problem]]]] = {
    ".csv": _csv_records,
    ".jsonl": _jsonl_records,
    ".json": _json_records,
}


def _columns(names: list[str], where: Path, needs_control: bool) -> dict[str, list[str]]:
    """The columns by what they hold; the controls in the order of their numbers."""
    found: dict[str, dict[int, str]] = {role: {} for role in COLUMNS}
    unknown: dict[str, str] = {}
    for name in names:
        stem, number = _split_number(name.strip().lower())
        role = next((role for role, aliases in COLUMNS.items() if stem in aliases), None)
        if role is None or (number is not None and role != "control"):
            unknown[name] = stem
        elif (twin := found[role].get(number or 0)) is not None:
            what = f"two columns hold the same {role}: {twin!r} and {name!r}"
            raise SourceError(what, where=where, expected="one", do="rename or remove the one that is not meant")
        else:
            found[role][number or 0] = name
    for role in ("target", "prompt", "control") if needs_control else ("target", "prompt"):
        if not found[role]:
            raise _no_column(role, names, unknown, where)
    _check_unknown(unknown, where)
    _check_controls(found["control"], where, needs_control)
    return {role: [by_number[number] for number in sorted(by_number)] for role, by_number in found.items()}


def _split_number(name: str) -> tuple[str, int | None]:
    """`control_2` is (`control`, 2), `control` is (`control`, None)."""
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if stem and number.isdecimal() else (name, None)


def _no_column(role: str, names: list[str], unknown: dict[str, str], where: Path) -> SourceError:
    near = [(name, like) for name, stem in unknown.items() for like in get_close_matches(stem, COLUMNS[role], 1)]
    return SourceError(
        f"no column holds the {role}",
        where=where,
        expected=" or ".join(COLUMNS[role]),
        found=", ".join(map(repr, names)) or "an empty first line",
        do=f"rename {near[0][0]!r} to {near[0][1]!r}" if near else "add it, or rename the one that is meant",
    )


def _check_unknown(unknown: dict[str, str], where: Path) -> None:
    """Other columns may be ignored, but no control or mask may get lost over the name of its column."""
    known = (*COLUMNS["control"], *COLUMNS["mask"])
    for name, stem in unknown.items():
        near = get_close_matches(stem, known, 1, 0.8)  # `path_contol` (0.96) is a typo, `task` (0.75) is no `mask`
        near += [like for like in known if sorted(like) == sorted(stem)]  # but `maks` (0.75) is one
        near += [word for word in ("control", "mask") if word in stem.split("_")]
        if near:
            like = near[0] + (name.strip()[len(stem) :] if near[0] in COLUMNS["control"] else "")  # with its number
            raise SourceError(
                f"the column {name!r} is unknown, and much like {like!r}",
                where=where,
                expected=", ".join(known),
                do=f"rename it to {like!r}, or to something else if it holds neither a control nor a mask",
            )


def _check_controls(controls: dict[int, str], where: Path, needs_control: bool) -> None:
    listed = ", ".join(repr(controls[number]) for number in sorted(controls))
    if controls and not needs_control:
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


def _table_row(record: Record, columns: dict[str, list[str]], folder: Path, taken: dict[str, int]) -> Problem | Draft:
    where, values = record
    faults: dict[str, tuple[str, str]] = {}
    cells: dict[str, list[str]] = {role: [] for role in columns}
    for role, column in [(role, column) for role, listed in columns.items() for column in listed]:
        value = values.get(column)
        for item in (value or [None]) if isinstance(value, list) and role == "control" else [value]:
            text = item if isinstance(item, str) else ""
            # half an emoji, as programs leave it that cut captions at a length, is no text that a file could hold
            if (item is not None and text != item) or re.search(r"[\ud800-\udfff]", text):
                what = f"the {role} {column!r} is {item!r}, expected text"
                faults[role] = what, "correct it; text stands in double quotes"
            cells[role].append(text.strip())
    [target], [prompt], mask = cells["target"], cells["prompt"], "".join(cells["mask"])
    controls = cells["control"]
    while controls and not controls[-1]:
        controls.pop()
    if "" in controls:
        what = f"control {controls.index('') + 1} is empty, but a later one is {controls[-1]}"
        faults.setdefault("control", (what, "move the later ones up: their order is what the model sees"))
    if not target:
        what, do = f"the target {columns['target'][0]!r} is empty", "name a picture, or remove the row"
        return Problem(where, *faults.get("target", (what, do)))
    name = _unique(os.path.relpath(os.path.splitext(folder / target)[0], folder), taken)
    files = tuple(folder / control for control in controls if control)
    return Row(name, where, folder / target, files, folder / mask if mask else None, prompt), faults


def _unique(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name#2` and so on when an earlier row has it; `taken` counts them."""
    unique = name
    while unique in taken:
        taken[name] += 1
        unique = f"{name}#{taken[name]}"
    taken[unique] = 1
    return unique
