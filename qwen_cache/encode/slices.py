"""Slices: the rows of a source cut into runs, so that independent machines can build it.

The source alone decides the cut: of its n usable rows, in order, slice k of N has those from `(k-1)·n/N` to `k·n/N`.
Each slice is built into its own folder, and `qwen-cache merge` joins them into one cache, in the order of the source.
Refuses to build a slice into a folder that holds other slices: a build makes a cache equal to its rows, so it would
drop the others.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from qwen_cache.errors import ConfigError
from qwen_cache.settings.load import CONFIG_NAME
from qwen_cache.settings.yaml_text import read_yaml
from qwen_cache.storage.url import Url

T = TypeVar("T")


@dataclass(frozen=True)
class SourceSlice:
    """Slice `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> SourceSlice:
        """The slice that `3/16` names."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        parsed = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= parsed.number <= parsed.count:
            expected = "NUMBER/COUNT from 1/1 on, such as 3/16"
            raise ConfigError("not a slice of the source", expected=expected, found=text)
        return parsed

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, items: Sequence[T]) -> list[T]:
        """This slice of `items`. The lengths of any two slices differ by at most one."""
        begin, end = ((self.number - 1 + i) * len(items) // self.count for i in range(2))
        return list(items[begin:end])


def refuse_other_slices(
    folder: Path | Url, source_slice: SourceSlice, cached_names: Collection[str], other_names: Collection[str]
) -> None:
    """ConfigError if `folder`, a cache of the samples `cached_names`, has samples of other slices (`other_names`).

    A folder that was built as this slice is accepted: rows added to or removed from the source have moved the cut.
    """
    others = sorted(set(cached_names) & set(other_names))
    if others and _built_as(folder) != str(source_slice):
        digits = len(str(source_slice.count))
        raise ConfigError(
            f"this folder holds {len(others)} samples of other slices, which a build of {source_slice} would drop",
            where=folder,
            found=", ".join(others[:3]) + (" …" if others[3:] else ""),
            do=f"give each slice its own folder, such as --out {folder}-{source_slice.number:0{digits}}, "
            "then run `qwen-cache merge`",
        )


def _built_as(folder: Path | Url) -> str | None:
    """The slice that a finished build recorded beside its cache; `part` is the setting's former name."""
    path = folder / CONFIG_NAME
    if isinstance(path, Url) or not path.is_file():
        return None
    try:
        data = read_yaml(path)["data"]
        return str(data["slice"] if "slice" in data else data["part"])
    except (OSError, ConfigError, KeyError, TypeError):
        return None
