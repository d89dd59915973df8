"""Parts: the rows of a source cut into runs, so that machines that know nothing of one another can build it.

The cut follows from the source alone: the usable rows, in their order, `k·n/N` to `(k+1)·n/N`. Every part goes into a
folder of its own, and `qwen-cache merge` makes one cache of them, in the order of the source. A part is refused in a
folder that holds other parts, since a build makes a cache equal to its rows and would drop them.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import yaml

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import CONFIG_NAME

T = TypeVar("T")


@dataclass(frozen=True)
class Part:
    """Part `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """What is typed: `3/16`."""
        found = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        part = cls(int(found[1]), int(found[2])) if found else cls(0, 0)
        if not 1 <= part.number <= part.count:
            raise ConfigError("not a part of the source", expected="NUMBER/COUNT from 1/1 on, such as 3/16", found=text)
        return part

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def of(self, items: Sequence[T]) -> list[T]:
        """This part of `items`: no two parts differ by more than one in length."""
        begin, end = ((self.number - 1 + i) * len(items) // self.count for i in range(2))
        return list(items[begin:end])


def refuse_other_parts(folder: Path, part: Part, held: Collection[str], elsewhere: Collection[str]) -> None:
    """ConfigError when `folder`, a cache of samples called `held`, has samples of other parts (`elsewhere`).

    Not when it was built as this part: rows that came or went in the source have then moved the cut.
    """
    others = sorted(set(held) & set(elsewhere))
    if others and _built_as(folder) != str(part):
        raise ConfigError(
            f"this folder holds {len(others)} of the samples of other parts, which part {part} would drop",
            where=folder,
            found=", ".join(others[:3]) + (" …" if others[3:] else ""),
            do=f"give each part its own folder, such as --out {folder}-{part.number:0{len(str(part.count))}}, "
            "then run `qwen-cache merge`",
        )


def _built_as(folder: Path) -> str | None:
    """The part that a finished build recorded beside its cache."""
    try:
        settings = yaml.safe_load((folder / CONFIG_NAME).read_text(encoding="utf-8"))
        return str(settings["data"]["part"])
    except (OSError, UnicodeError, yaml.YAMLError, KeyError, TypeError):
        return None
