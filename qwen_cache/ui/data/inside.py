"""Images of rows that are in the opened folders: a table may name any file of the machine, and the page shows no other.

`build` reads them all: it runs as the user does. Images on servers are left to `data.allow_urls`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_cache.errors import SourceError
from qwen_cache.sources.listing import Entry
from qwen_cache.sources.rows import Readable

IsInside = Callable[[Path], bool]
"""Whether a file is in the opened folders, after links are followed."""


@dataclass(frozen=True)
class Outside:
    """An image that is not read."""

    where: str

    def __str__(self) -> str:
        return self.where

    def read(self) -> bytes:
        do = "open its folder too: qwen-cache ui --allow FOLDER"
        raise SourceError("this image is outside the opened folders", where=self.where, do=do)


def readable(entry: Entry, is_inside: IsInside) -> Entry:
    """The row, with `Outside` in place of images that are not read."""

    def checked(image: Readable) -> Readable:
        files = getattr(image, "files", ())
        is_here = all(is_inside(file) for file in files if isinstance(file, Path))
        return image if is_here else Outside(str(image))

    target, mask = (None if image is None else checked(image) for image in (entry.target, entry.mask))
    return replace(entry, target=target, controls=tuple(map(checked, entry.controls)), mask=mask)
