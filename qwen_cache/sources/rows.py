"""The output of every kind of source: rows that refer to their images, and problems.

A row holds no pixels: `read` of an image returns its bytes, as often as it is called, and `str` says where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from qwen_cache.errors import Problem
from qwen_cache.format.identity import Phrase
from qwen_cache.settings.sections import ColumnsConfig

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
    """Whether the rows are images to generate: then a table may have only prompts, and `seed`, `width` and `height`."""
    takes_control: bool = True
    """If False, for a text-to-image model, there must be no control."""
    marked_phrases: bool | None = None
    """Whether `[[ ]]` in prompts mark words; None: no, and a notice counts the prompts that have them."""
    allow_urls: tuple[str, ...] = ()
    columns: ColumnsConfig = field(default_factory=ColumnsConfig)
    split: str | None = None
    config_name: str | None = None

    @property
    def some_control(self) -> bool:
        """Whether a source without a single control is refused."""
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


FieldProblems = dict[str, tuple[str, str]]
"""By field of a row, the problem and what to do."""


def limits_exceeded(row: Row) -> FieldProblems:
    """The fields that no cache could hold, whether the row is from a folder, a table, a tar or a request."""
    found: FieldProblems = {}
    for role, text, most in (("name", row.name, MAX_NAME), ("prompt", row.prompt, MAX_TEXT)):
        try:
            size = len(text) if text.isascii() else len(text.encode())
        except UnicodeEncodeError:
            found[role] = (
                f"the {role} {text[:200]!r} is not UTF-8 text",
                "rename it" if role == "name" else "correct it",
            )
            continue
        if "\0" in text:
            found[role] = f"the {role} has NUL characters", "save it as UTF-8 text; it may be UTF-16 without its mark"
        if size > most:
            found[role] = f"the {role} has {size} bytes, expected at most {most}", "shorten it"
    if len(row.controls) > MAX_CONTROLS:
        what = f"the row has {len(row.controls)} controls, expected at most {MAX_CONTROLS}"
        found["control"] = what, "leave out the others"
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


@dataclass(frozen=True)
class Draft:
    """A row before validation: one sample per caption, and the problems so far."""

    samples: tuple[Row, ...]
    field_problems: FieldProblems = field(default_factory=dict)
    phrase: str = ""
    """Words that every prompt contains."""
    is_left_out: bool = False
    """Whether the source leaves the row out: then it is neither a row nor a problem."""
    unusable: Problem | None = None
    """What stands for all problems of the row. Rows that follow each other may share one, which is reported once."""


def unique(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name#2` and so on when an earlier row has it; `taken` counts them."""
    free = name
    while free in taken:
        taken[name] += 1
        free = f"{name}#{taken[name]}"
    taken[free] = 1
    return free
