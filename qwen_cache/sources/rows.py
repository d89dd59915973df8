"""Rows of a source: their parts, the columns that hold these, and the values of their cells."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, Protocol

from qwen_cache.errors import Problem, SourceError
from qwen_cache.format.identity import Phrase, Slider
from qwen_cache.settings.load import assignment
from qwen_cache.settings.sections import ColumnsConfig
from qwen_cache.sources import left_out
from qwen_cache.sources.places import TableFolder
from qwen_cache.storage.remote import Location
from qwen_cache.text import shell_line

# ---- rows ------------------------------------------------------------------------------------------------------------
# The output of every kind of source: rows that refer to their images, and problems.
#
# A row holds no pixels: `read` of an image returns its bytes, as often as it is called, and `str` says where they are.

MAX_TEXT = 1 << 17
"""Bytes of a prompt. A transformer has positions for some 4,000 tokens; and the metadata of a sample stay below their
bound (F9) even if every character is escaped."""
MAX_NAME = 8192  # bytes: a path of Linux's longest, and a number behind it
MAX_CONTROLS, MAX_SPANS = 100, 5000
MAX_SEED = (1 << 63) - 1
MIN_SIDE, MAX_SIDE = 16, 1 << 15  # pixels: one token, and more than positions exist for


class Readable(Protocol):
    """A reference to the bytes of an image.

    If it has `files`, the `Location` of each file that the bytes depend on, plans may remember it until one changes.
    """

    def read(self) -> bytes:
        """All bytes; SourceError if they cannot be read."""
        ...


class Embedded(Readable, Protocol):
    """An image inside a file with others."""

    @property
    def name(self) -> str:
        """The name of the sample whose target this is."""
        ...


NoControl = Literal["refused", "stated", "allowed"]
"""Which rows may have no control: none; those whose cells in a table are empty, since a missing file may be a mistake;
or any."""


@dataclass(frozen=True)
class Needs:
    """The parts that a source must have, and the settings of `data` that say how it is read."""

    control: bool
    """A column, part or folder of controls, unless any row may lack them: for an editing model."""
    no_control: NoControl = "refused"
    target: bool = True
    """If False, a row may lack the target: an image to generate."""
    prompt: bool = True
    to_generate: bool = False
    """True if the rows are images to generate: then a table may have only prompts, and `seed`, `width` and `height`."""
    has_direction: bool = False
    """True if the settings give every row the direction of a slider: then a table without targets is of images to
    generate."""
    takes_control: bool = True
    """If False, for a text-to-image model, there must be no control."""
    marked_phrases: bool | None = None
    """True if `[[ ]]` in prompts mark words; None: no, and a notice counts the prompts that have them."""
    allow_urls: tuple[str, ...] = ()
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    split: str | None = None
    config_name: str | None = None

    @property
    def some_control(self) -> bool:
        """True if a source without a single control is refused."""
        return self.control and self.no_control != "allowed"


@dataclass(frozen=True, slots=True)
class Row:
    """One sample of the source."""

    name: str
    """Unique in its source, and independent of other targets: the target's path without extension, relative to the
    target folder or the table; the key in a tar; or the table's name and the row number for an embedded image without a
    path. Without target it is that of the first control. Further rows of the same name, and further captions, get `#2`,
    `#3`, …"""
    where: str
    """For messages: `data/metadata.csv:12`, `data/metadata.json[11]`, `data/0.tar:cat`, or the target's path."""
    target: Readable | None
    """None for an image to generate."""
    controls: tuple[Readable, ...]
    mask: Readable | None
    prompt: str
    phrase: Phrase = ()
    """The words of the prompt that say where the edit is; empty if none are marked."""
    seed: int | None = None
    """The seed of the noise to generate the image from."""
    size: tuple[int, int] | None = None
    """Width and height of an image to generate, in pixels; None: those that its controls or the settings give."""
    rejected: Readable | None = None
    """An image for the same prompt and controls that is worse than the target."""
    slider: Slider | None = None
    """The direction of a slider: two further prompts for the same images."""

    @property
    def prompts(self) -> tuple[str, ...]:
        """The prompt, then those of the direction of a slider."""
        return (self.prompt, *(self.slider or ()))

    @property
    def images(self) -> tuple[Readable, ...]:
        """Target, controls and rejected image, as far as there are any."""
        return tuple(image for image in (self.target, *self.controls, self.rejected) if image is not None)


FieldProblems = dict[str, tuple[str, str]]
"""By field of a row, the problem and what to do."""


def text_exceeded(role: str, text: str, most: int) -> tuple[str, str] | None:
    """The problem of a text that no cache could hold, and what to do; None if there is none."""
    try:
        size = len(text) if text.isascii() else len(text.encode())
    except UnicodeEncodeError:
        do = "rename it" if role == "name" else "correct it"
        return f"the {role} {text[:200]!r} is not UTF-8 text", do
    if size > most:
        return f"the {role} has {size} bytes, expected at most {most}", "shorten it"
    if "\0" in text:
        return f"the {role} has NUL characters", "save it as UTF-8 text; it may be UTF-16 without its mark"
    return None


def limits_exceeded(row: Row) -> FieldProblems:
    """The fields that no cache could hold, whether the row is from a folder, a table, a tar or a request."""
    found: FieldProblems = {}
    if told := text_exceeded("name", row.name, MAX_NAME):
        found["name"] = told
    if told := text_exceeded("prompt", row.prompt, MAX_TEXT):
        found["prompt"] = told
    if row.slider:
        found |= _of_direction(row.prompt, row.slider)
    if len(row.controls) > MAX_CONTROLS:
        what = f"the row has {len(row.controls)} controls, expected at most {MAX_CONTROLS}"
        found["control"] = what, "leave out the others"
    if row.rejected is not None and row.target is None:
        found["rejected"] = "there is a rejected image, and no target", "add the target, which is better than it"
    ends = [0, *(end for _, end in row.phrase)]
    spans = zip(ends, row.phrase, strict=False)
    if not all(last <= begin < end <= len(row.prompt) for last, (begin, end) in spans):
        found["phrase"] = "the phrase is not within the prompt", "correct it"
    elif len(row.phrase) > MAX_SPANS:
        what = f"the phrase has {len(row.phrase)} parts, expected at most {MAX_SPANS}"
        found["phrase"] = what, "mark fewer words"
    numbers = {"seed": (row.seed, 0, MAX_SEED)}
    numbers |= dict(zip(("width", "height"), ((side, MIN_SIDE, MAX_SIDE) for side in row.size or ()), strict=False))
    for role, (number, least, most) in numbers.items():
        if number is not None and not least <= number <= most:
            found[role] = f"the {role} is {number}, expected a whole number from {least} to {most}", "correct it"
    return found


def _of_direction(prompt: str, slider: Slider) -> FieldProblems:
    """The problems of a slider's direction."""
    problems: FieldProblems = {}
    for role, text in zip(SLIDER, slider, strict=True):
        if told := text_exceeded(role.replace("_", " "), text, MAX_TEXT):
            problems[role] = told
    size = sum(len(text.encode(errors="replace")) for text in (prompt, *slider))
    if size > MAX_TEXT and not problems:
        what = f"the prompt and those of the slider's direction have {size} bytes, expected at most {MAX_TEXT}"
        problems["slider"] = what, "shorten them"
    if slider.positive == slider.negative:
        what = f"the positive and the negative prompt are the same: {_short(slider.positive)}"
        problems["slider"] = what, "correct one of them, or leave both out"
    return problems


def one_alone(positive: str, negative: str) -> tuple[str, str] | None:
    """The problem of one prompt of a slider's direction without the other, and what to do; None if there is none."""
    if bool(positive) == bool(negative):
        return None
    has, lacks = ("positive", "negative") if positive else ("negative", "positive")
    return f"there is a {has} prompt, and no {lacks} prompt", f"add the {lacks} prompt, or leave out both"


@dataclass(frozen=True)
class Draft:
    """A row before validation: one sample per caption, and the problems so far."""

    samples: tuple[Row, ...]
    field_problems: FieldProblems = field(default_factory=dict)
    phrase: str = ""
    """Words that every prompt contains."""
    is_left_out: bool = False
    """True if the source leaves the row out: then it is neither a row nor a problem."""
    unusable: Problem | None = None
    """The problem that stands for all of the row. Rows that follow each other may share one, which is reported once."""
    renames: tuple[tuple[Path, Path], ...] = ()
    """Files whose names differ from those that the row needs, with these."""


def unique(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name#2` and so on when an earlier row has it; `taken` counts them."""
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name}#{taken[name]}"
    taken[free] = 1
    return free


# ---- columns ---------------------------------------------------------------------------------------------------------
# The columns of a table by role, and its rows as drafts of samples.
#
# `data.columns` names the columns; those that it leaves out are recognised by their names. Unknown columns are ignored,
# unless the name resembles that of a control or a mask: no typo may drop one. A value of an image column is a path, or
# the image itself; several controls may be a list. `prompts` is a list of captions, and each becomes a sample: a sample
# stays one range of bytes with one key, as batches, `merge --select` and changed captions need. It costs little:
# samples about the same images are encoded consecutively, so that images and prefix run once, and compression works
# within a sample only.

LIST_COLUMNS = ("prompts", "captions", "edited_prompt_list")
"""The names of columns that hold a list of captions."""

COLUMNS = {
    "target": (
        *("path_target", "target", "target_image", "target_img", "image", "image_path", "file_name"),
        *("edited", "edited_image", "edited_img", "output_image", "output_img", "after", "after_image"),
    ),
    "control": (
        *("path_control", "control", "control_image", "control_images", "control_path", "edit_image"),
        *("input_image", "input_images", "input_img", "source_image", "source_img", "src_img"),
        *("original_image", "original_img", "before", "before_image"),
    ),
    "mask": ("path_mask", "mask", "mask_image", "mask_img", "mask_path", "control_mask", "edit_mask"),
    "rejected": (
        *("path_rejected", "rejected", "rejected_image", "rejected_img", "rejected_path", "image_rejected"),
        *("image_l", "lose", "lose_image", "loser", "loser_image", "dispreferred", "dispreferred_image"),
    ),
    "prompt": ("prompt", "text", "caption", "instruction", "edit_prompt", "edit_instruction", *LIST_COLUMNS),
    "phrase": ("phrase", "edit_phrase"),
    "positive_prompt": ("positive_prompt",),
    "negative_prompt": ("negative_prompt",),
}
"""Roles, and their column names in qwen-image-finetune, DiffSynth, musubi-tuner, imagefolder and published datasets of
edits: InstructPix2Pix, MagicBrush, HQ-Edit, UltraEdit, OmniEdit."""
SLIDER = ("positive_prompt", "negative_prompt")
"""The columns of the two prompts of a slider's direction."""
TO_GENERATE = {"seed": ("seed",), "width": ("width",), "height": ("height",)}
"""Columns of numbers, in tables of images to generate alone: others may have numbers of these names too."""
LEFT_OUT = {left_out.COLUMN: (left_out.COLUMN,)}
"""The column that leaves rows out; a column that `data.columns` names is another."""
GENERIC = {"target": ("output",), "control": ("input", "source", "original"), "prompt": ("edit",)}
"""Ambiguous names, which may also say, for example, where an image is from: recognised only if no column has one of the
names above."""
CHOSEN = (
    *("path_chosen", "chosen", "chosen_image", "chosen_img", "chosen_path", "image_chosen"),
    *("image_w", "win", "win_image", "winner", "winner_image", "preferred", "preferred_image"),
)
"""Names of targets beside a column of rejected images."""
COMPARED, LABEL = (("jpg_0", "jpg_1"), ("image_0", "image_1")), "label_0"
"""Two columns of images, and that of a label: 1 if the first one is better, 0 if the second one is, 0.5 if neither is.
Pick-a-Pic has them."""
NOT_OF_EDITS = ("image", "image_path", "file_name")
"""Names of targets that say nothing about an edit: `source` beside them need not be a control."""
FILE_NAMES = ("_file_name", "_file_names")
"""Suffixes of columns of paths in imagefolder."""

HALVES = re.compile(r"[\ud800-\udfff]")
"""Half an emoji, left by programs that truncate captions: it cannot be stored as UTF-8."""

NO_CONTROL = "set data.allow_no_control=true if it is meant to have none"
NO_CONTROL_AT_ALL = "or set data.allow_no_control=true if no image is meant to have one"
"""Advice for targets without controls, which become text to image."""

Columns = dict[str, list[str]]
"""The columns of a table by role."""

Record = tuple[str, dict[str, Any]]
"""A row of a table: its location for messages, and its values by column, which are text or embedded images."""


def role_of(name: str) -> tuple[str | None, int | None]:
    """The role of a column by its name, and its number: `control_2` is (`control`, 2)."""
    return _role_among(COLUMNS, name)


def _role_among(known: dict[str, tuple[str, ...]], name: str) -> tuple[str | None, int | None]:
    stem, number = _split_number(name)
    role = next((role for role, aliases in known.items() if stem in aliases), None)
    return (role, number) if number is None or role == "control" else (None, None)


def find_columns(
    names: Sequence[str],
    where: Location,
    needs: Needs,
    noun: str = "column",
    found: Sequence[str] = (),
    images: Sequence[str] = (),
) -> Columns:
    """The columns by role, the controls in the order of their numbers; SourceError if they are ambiguous.

    In messages, a column is called `noun`, and those that exist are `found` (by default `names`). Columns of `images`,
    which hold paths of images that exist, must be used, unless `data.columns.control` says which are.
    """
    named = given(needs.columns)
    check_named(named, names, where, noun)
    is_of_prompts = noun == "column" and _is_of_prompts(names, named, needs)
    needs = replace(needs, target=False, to_generate=True) if is_of_prompts else needs
    known = COLUMNS | LEFT_OUT | (TO_GENERATE if needs.to_generate else {})
    columns = {role: dict(enumerate(named.get(role, ()))) for role in known}
    taken = {name for listed in named.values() for name in listed}
    unknown, missing = list[str](), list[str]()
    if "rejected" in named or any(_role_among(known, name)[0] == "rejected" for name in names):
        known |= {"target": (*known["target"], *CHOSEN)}
    for name in names:
        role, number = _role_among(known, name)
        if role is None and name not in taken:
            unknown.append(name)
        elif role is not None and name not in taken and role not in named:
            _add(columns, role, number, name, where, noun)
    _check_direction(columns, where, noun)
    if label := _compared(columns, named, unknown):
        columns |= {"label": {0: label}}
    for role, needed in (("target", needs.target), ("prompt", needs.prompt), ("control", needs.some_control)):
        if not columns[role] and role not in named and _wants_generic(role, columns["target"], needs):
            for name in list(unknown):
                is_generic, number = _role_among({role: GENERIC[role]}, name)
                if is_generic and not (missing and columns[role]):  # which one it is can be asked next
                    _add(columns, role, number, name, where, noun)
                    unknown.remove(name)
        if needed and not columns[role]:
            missing.append(role)
    unused = [name for name in unknown if name in images]
    if not (columns["target"] or columns["control"] or needs.to_generate or missing):
        missing.append("target")
    if is_of_prompts and unused and not needs.takes_control:  # they may be targets
        missing.append("target")
    if missing:
        raise _no_column(missing, found or names, unknown, where, noun, needs, unused)
    _check_unknown(unknown, named, where, noun)
    if unused and needs.takes_control and "control" not in named:
        used = [columns["control"][number] for number in sorted(columns["control"])]
        raise SourceError(
            f"{noun}s hold images and are not used",
            where=where,
            expected=f"every {noun} with images as target, control or mask",
            found=", ".join(map(repr, unused)),
            do=f"use them as controls, in the order that the model sees: {setting('control', *used, *unused)}; or name "
            f"the controls without them: {setting('control', *used)}",
        )
    _check_controls(columns["control"], where, needs.takes_control)
    return {role: [by_number[number] for number in sorted(by_number)] for role, by_number in columns.items()}


def _is_of_prompts(names: Sequence[str], named: Columns, needs: Needs) -> bool:
    """True for a table of directions of a slider without a column of targets, whose rows are images to generate."""
    roles = {role for role, _ in map(role_of, names) if role not in named} | {role for role in named if named[role]}
    targets = {*GENERIC["target"], *CHOSEN, *(name for pair in COMPARED for name in pair)}
    has_target = "target" in roles or "target" in named or any(name.strip().lower() in targets for name in names)
    return not (needs.to_generate or has_target) and (needs.has_direction or roles >= {*SLIDER})


def _compared(columns: dict[str, dict[int, str]], named: Columns, unknown: list[str]) -> str | None:
    """The column that says which of two images is the target, if there is one; they get their roles."""
    lower = {name.strip().lower(): name for name in unknown}
    pair = next((pair for pair in COMPARED if lower.keys() >= {*pair, LABEL}), None)
    if pair is None or columns["target"] or columns["rejected"] or {"target", "rejected"} & named.keys():
        return None
    for role, name in zip(("target", "rejected"), pair, strict=True):
        columns[role][0] = lower[name]
        unknown.remove(lower[name])
    return lower[LABEL]


def given(columns: ColumnsConfig) -> Columns:
    """The names of `data.columns` by role, without the roles that it leaves out."""
    named = {role: [name] if isinstance(name, str) else name for role, name in columns}
    return {role: listed for role, listed in named.items() if listed is not None}


def check_named(named: Columns, names: Sequence[str], where: Location, noun: str) -> None:
    """SourceError if the source lacks a name of `data.columns`, has it twice, or it has two roles."""
    roles: dict[str, str] = {}
    for role, name in [(role, name) for role, listed in named.items() for name in listed]:
        if names.count(name) != 1:
            what = f"data.columns.{role} names the {noun} {name!r}, " + (
                f"and {names.count(name)} have this name" if name in names else "which does not exist"
            )
            near = nearest(name, names)
            do = f"did you mean {near!r}? {setting(role, near)}" if near else f"name one of these {noun}s"
            do = "rename one of them" if name in names else do
            if role == "control" and set(parts := name.split(",")) <= set(names):
                do = f"several {noun}s are a list: {setting(role, *parts)}"
            raise SourceError(what, where=where, found=", ".join(map(repr, names)) or "none", do=do)
        if name in roles:
            what = f"data.columns names the {noun} {name!r} twice, for the {roles[name]} and for the {role}"
            raise SourceError(what, where=where, expected="one role", do="correct one of them")
        roles[name] = role


def nearest(name: str, names: Iterable[str]) -> str | None:
    """The most similar other name, if any is; capitals count little."""
    by_lower = {each.lower(): each for each in names if each != name}
    return next((by_lower[each] for each in get_close_matches(name.lower(), by_lower, 1)), None)


def setting(role: str, *names: str) -> str:
    """The option that names the columns of a role; without names none."""
    value = names[0] if len(names) == 1 else list(names)
    return shell_line(["--set", assignment(f"data.columns.{role}", value)])


def _add(
    columns: dict[str, dict[int, str]], role: str, number: int | None, name: str, where: Location, noun: str
) -> None:
    twin = columns[role].get(number or 0)
    columns[role][number or 0] = name
    if twin is not None:
        what = f"two {noun}s hold the same {role}: {twin!r} and {name!r}"
        do = f"name the right one: {setting(role, twin)} or {setting(role, name)}"
        if role == "control":
            do += f"; or both in their order: {setting(role, twin, name)}"
        if role in LEFT_OUT or twin == name:
            do = "rename or remove one of them"
        raise SourceError(what, where=where, expected="one", do=do)


def _wants_generic(role: str, targets: dict[int, str], needs: Needs) -> bool:
    """True if a role without a column may have one of a `GENERIC` name."""
    if role != "control":
        return bool(getattr(needs, role))
    return needs.control or (needs.takes_control and _stem(targets.get(0, "")) not in NOT_OF_EDITS)


def _stem(name: str) -> str:
    return _split_number(name)[0]


@lru_cache(1 << 10)
def _split_number(name: str) -> tuple[str, int | None]:
    """The name in lower case, without imagefolder's suffix, and its number: `Control_2` is (`control`, 2)."""
    name = name.strip().lower()
    for ending in FILE_NAMES:
        name = name.removesuffix(ending)
    stem, _, number = name.rpartition("_")
    return (stem, int(number)) if stem and number.isdecimal() else (name, None)


def _no_column(
    missing: Sequence[str],
    names: Sequence[str],
    unknown: list[str],
    where: Location,
    noun: str,
    needs: Needs,
    images: Sequence[str],
) -> SourceError:
    """The error for roles without a column; `images` are unknown columns that hold images."""
    dos, expected = list[str](), list[str]()
    for role in missing:
        known = (*COLUMNS[role], *GENERIC.get(role, ()))
        near = [(name, like) for name in unknown for like in get_close_matches(_stem(name), known, 1)]
        do = f"rename {near[0][0]!r} to {near[0][1]!r}, or name it: " if near else f"add it, or name the right {noun}: "
        dos.append(do + setting(role, near[0][0] if near else "NAME"))
        if role == "control" and needs.no_control == "stated":
            dos[-1] += f"; {NO_CONTROL_AT_ALL}"
        expected.append(" or ".join(known))
    holding = f" ({noun}s with images: {', '.join(map(repr, images))})" if images else ""
    return SourceError(
        f"no {noun} holds the {' or the '.join(missing)}",
        where=where,
        expected="; ".join(expected),
        found=(", ".join(map(repr, names)) or "an empty first line") + holding,
        do="; ".join(dos),
    )


def _check_unknown(unknown: Iterable[str], named: Columns, where: Location, noun: str) -> None:
    """SourceError if an unknown column resembles a control, a mask or a rejected image: a typo must not drop it."""
    open_roles = [role for role in ("control", "mask") if role not in named]
    known = [name for role in open_roles for name in COLUMNS[role]]
    known += [name for name in COLUMNS["rejected"] if "rejected" in name and "rejected" not in named]
    for name in unknown:
        stem = _stem(name)
        near = get_close_matches(
            stem, known, 1, 0.85
        )  # `contol` (0.92) is a typo, `source_id` (0.84) is no `source_img`
        near += [like for like in known if sorted(like) == sorted(stem)]  # but `maks` (0.75) is one
        near += [word for word in open_roles if word in stem.split("_")]
        if near:
            role = next(role for role in ("mask", "rejected", "control") if near[0] in COLUMNS[role])
            like = near[0] + (name.strip()[len(stem) :] if role == "control" else "")  # with its number
            held = "rejected image" if role == "rejected" else role
            raise SourceError(
                f"the {noun} {name!r} is unknown, and resembles {like!r}",
                where=where,
                expected=", ".join(known),
                do=f"rename it to {like!r}; if it holds no {held}, rename it to something else, or name the {held}: "
                + setting(role, "NAME"),
            )


def _check_direction(columns: dict[str, dict[int, str]], where: Location, noun: str) -> None:
    """SourceError for one prompt of a slider's direction without the other one."""
    there = [role for role in SLIDER if columns[role]]
    if len(there) == 1:
        lacks = next(role for role in SLIDER if role not in there)
        raise SourceError(
            f"one {noun} of a slider's direction is there, and the other one is missing",
            where=where,
            expected=" and ".join(SLIDER),
            found=repr(columns[there[0]][0]),
            do=f"add {lacks!r}, or name it: {setting(lacks, 'NAME')}; or ignore the {noun}: {setting(there[0])}",
        )


def _check_controls(controls: dict[int, str], where: Location, takes_control: bool) -> None:
    listed = ", ".join(repr(controls[number]) for number in sorted(controls))
    if controls and not takes_control:
        raise SourceError(
            "there is a control column, but a text-to-image model takes no controls",
            where=where,
            expected="targets, prompts and masks only",
            found=listed,
            do=f"choose an editing model, or ignore the column: {setting('control')}",
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
    """The rows of a table in `folder` as drafts; `taken` has the names so far.

    A row without target is an image to generate; if it may have a seed, it need not have a control either.
    """
    for record in records:
        yield record if isinstance(record, Problem) else read_row(*record, columns, folder, taken)


def read_row(where: str, values: dict[str, Any], columns: Columns, folder: TableFolder, taken: dict[str, int]) -> Draft:
    """One row, whose names are added to `taken`."""
    field_problems: FieldProblems = {}
    cells: dict[str, list[Any]] = {role: [] for role in columns}
    for role, column in [(role, column) for role, listed in columns.items() for column in listed]:
        read = _flag if role in LEFT_OUT else _number if role in TO_GENERATE else _items
        read = _label if role == "label" else read
        cells[role] += read(role, column, values.get(column), field_problems)
    is_left_out = any(cells.get(left_out.COLUMN, ()))
    phrase = cells["phrase"][0] if cells["phrase"] else ""
    mask, controls, prompts = cells["mask"], cells["control"], cells["prompt"] or [""]
    while controls and not controls[-1]:
        controls.pop()
    target = cells["target"][0] if columns["target"] else ""
    rejected = next(iter(cells.get("rejected", [])), "")
    better = next(iter(cells.get("label", [])), "first")
    is_left_out |= better == "neither"
    target, rejected = (rejected, target) if better == "second" else (target, rejected)

    def unusable(what: str, do: str) -> Draft:
        samples = tuple(Row(_numbered(where), where, None, (), None, prompt) for prompt in prompts)
        return Draft(samples, {}, phrase, is_left_out, Problem(where, what, do))

    if "" in controls:
        what = f"control {controls.index('') + 1} is empty, but a later one is {controls[-1]}"
        field_problems.setdefault("control", (what, "move the later ones up: their order is what the model sees"))
    needed = target if columns["target"] else controls
    if not needed and not columns.keys() & TO_GENERATE.keys():
        role = "target" if columns["target"] else "control"
        what, do = f"the {role} {columns[role][0]!r} is empty", "name an image, or remove the row"
        return unusable(*field_problems.get(role, (what, do)))
    try:
        images = [_image(value, folder) for value in filter(None, controls)]
        shown, painted, worse = (
            _image(it, folder) if it else None for it in (target, mask[0] if mask and target else "", rejected)
        )
    except SourceError as error:
        return unusable(error.fault, error.do or "correct the path")
    named = next(filter(None, (target, *controls)), None)
    name = _numbered(where) if named is None else folder.name(named) if isinstance(named, str) else named.name
    width, height = (next(iter(cells.get(each, [])), None) for each in ("width", "height"))
    if (width is None) != (height is None) and not field_problems.keys() & {"width", "height"}:
        what = f"the {'height' if height is None else 'width'} is missing"
        field_problems.setdefault("size", (what, "give both, or neither"))
    size = None if width is None or height is None else (width, height)
    seed = next(iter(cells.get("seed", [])), None)
    slider = [next(iter(cells.get(role, [])), "") for role in SLIDER]
    if (told := one_alone(*slider)) and not field_problems.keys() & {*SLIDER}:
        what, do = told
        field_problems["slider"] = what, f"{do}; to ignore all of them: {' '.join(map(setting, SLIDER))}"
    given, direction = (where, shown, tuple(images), painted), Slider(*slider) if all(slider) else None
    samples = tuple(Row(unique(name, taken), *given, prompt, (), seed, size, worse, direction) for prompt in prompts)
    return Draft(samples, field_problems, phrase, is_left_out)


def _numbered(where: str) -> str:
    """The name of a row without images: `prompts/12` for line 12 of data/prompts.csv, `0/cat` for data/0.tar:cat."""
    table, number = re.split(r"[:\[](?=[^:\[]+$)", where)
    name = re.split(r"[/\\]", table)[-1]
    return f"{posixpath.splitext(name)[0]}/{number.rstrip(']')}"


def _image(value: str | Embedded, folder: TableFolder) -> Readable:
    return folder.image(value) if isinstance(value, str) else value


def _items(role: str, column: str, value: Any, field_problems: FieldProblems) -> list[Any]:
    """The values of one cell: stripped text, or images; "" for an empty or unusable one."""
    several = role == "prompt" and has_captions(column, value)
    if isinstance(value, str) and not several:
        return [_item(role, column, value, field_problems)]
    if several and not (isinstance(value, list) and value):
        field_problems[role] = (
            f"the {role} {column!r} is {value!r}, expected a list of texts",
            "write one or more captions",
        )
        return [""]
    items = (value or [None]) if isinstance(value, list) and (several or role == "control") else [value]
    return [_item(role, column, item, field_problems) for item in items]


def has_captions(column: str, value: Any) -> bool:
    """True if a cell of prompts must be a list of captions: by the name of the column, unless `data.columns` has it."""
    return _stem(column) in LIST_COLUMNS or (isinstance(value, list) and role_of(column)[0] != "prompt")


def _item(role: str, column: str, item: Any, field_problems: FieldProblems) -> Any:
    if role not in ("prompt", *SLIDER) and hasattr(item, "read"):
        return item
    text = item if isinstance(item, str) else ""
    if (item is not None and text != item) or (not text.isascii() and HALVES.search(text)):
        what = f"the {role} {column!r} is {_short(item)}, expected text"
        field_problems[role] = what, "correct it; text stands in double quotes"
    return text.strip()


def _flag(role: str, column: str, value: Any, field_problems: FieldProblems) -> list[bool]:
    """One value, which is true if the cell says yes."""
    yes = left_out.is_yes(value)
    if yes is None:
        expected = f"expected {', '.join(left_out.YES)}, or {', '.join(filter(None, left_out.NO))} or nothing"
        field_problems[role] = f"{column!r} is {_short(value)}, {expected}", "correct it, or leave it empty"
    return [bool(yes)]


def _label(role: str, column: str, value: Any, field_problems: FieldProblems) -> list[str]:
    """`first`, `second` or `neither`, whichever of two images is better."""
    found = {1.0: "first", 0.0: "second", 0.5: "neither"}
    with suppress(ValueError, TypeError):
        if not isinstance(value, bool) and (which := found.get(float(value))):
            return [which]
    what = f"the {role} {column!r} is {_short(value)}, expected 1, 0 or 0.5: the share of the first image"
    field_problems[role] = what, "correct it"
    return ["first"]


def _number(role: str, column: str, value: Any, field_problems: FieldProblems) -> list[int | None]:
    """The number of one cell, None for an empty one."""
    text = str(int(value) if isinstance(value, float) and value.is_integer() else value).strip()
    if value is None or not text:
        return [None]
    least, most = (0, MAX_SEED) if role == "seed" else (MIN_SIDE, MAX_SIDE)
    if isinstance(value, bool) or not re.fullmatch(r"\d{1,19}", text) or not least <= int(text) <= most:
        what = f"the {role} {column!r} is {_short(value)}, expected a whole number from {least} to {most}"
        field_problems[role] = what, "correct it, or leave it empty"
        return [None]
    return [int(text)]


def _short(value: Any) -> str:
    shown = repr(value[:60] if isinstance(value, bytes) else value)
    return shown if len(shown) <= 200 else shown[:200] + "…"
