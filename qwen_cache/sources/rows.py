"""What every kind of source gives: rows that name their images, and problems.

An image is not held, it is named: `read` gives its bytes, as often as it is asked, and `str` says where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from qwen_cache.format.identity import Phrase


class Readable(Protocol):
    """Where the bytes of an image lie."""

    def read(self) -> bytes:
        """All of them; SourceError when that cannot be."""
        ...


class Embedded(Readable, Protocol):
    """An image inside a file that holds others as well."""

    @property
    def name(self) -> str:
        """What the sample is called whose target this is."""
        ...


@dataclass(frozen=True)
class Needs:
    """What every row of a source has to have."""

    control: bool
    """An editing model's rows; one that makes images from text takes no controls."""
    target: bool = True
    """Else a row that has none is called like its first control, which stands in the target's place."""
    prompt: bool = True


@dataclass(frozen=True)
class Row:
    """One sample of the source."""

    name: str
    """Unique in its source, and the same whatever other targets there are: the target's path without extension,
    relative to the target folder or the table; a tar's key; for an image in a table that has no path the table's name
    and the number of the row. A further row with the same one, and a further caption, gets `#2`, `#3`, …"""
    where: str
    """For messages: `data/metadata.csv:12`, `data/metadata.json[11]`, `data/0.tar:cat`, or the target's path."""
    target: Readable
    controls: tuple[Readable, ...]
    mask: Readable | None
    prompt: str
    phrase: Phrase = ()
    """Which words of the prompt say where the edit is; none are marked when empty."""


Faults = dict[str, tuple[str, str]]
"""By the part concerned, what is wrong with it and what to do about that."""


@dataclass(frozen=True)
class Draft:
    """A row in the making: a sample for each of its captions, and what is wrong with it."""

    samples: tuple[Row, ...]
    faults: Faults = field(default_factory=dict)
    phrase: str = ""
    """Words that each of the prompts contains."""


def unique(name: str, taken: dict[str, int]) -> str:
    """`name`, or `name#2` and so on when an earlier row has it; `taken` counts them."""
    found = name
    while found in taken:
        taken[name] += 1
        found = f"{name}#{taken[name]}"
    taken[found] = 1
    return found
