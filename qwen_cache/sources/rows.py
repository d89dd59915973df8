"""The output of every kind of source: rows that refer to their images, and problems.

A row holds no pixels: `read` of an image returns its bytes, as often as it is called, and `str` says where they are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol

from qwen_cache.errors import Problem
from qwen_cache.format.identity import Phrase
from qwen_cache.settings.data import ColumnsConfig


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
