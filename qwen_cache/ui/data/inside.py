"""What is read of a source: files in the opened folders. A table may name any file of the machine, a link lead to it.

An image elsewhere is shown as one that cannot be read. A source with a link to other files elsewhere, such as prompts,
is not listed. `build` reads them all: it runs as the user does. Images on servers are left to `data.allow_urls`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_cache.errors import SourceError
from qwen_cache.sources.detect import METADATA_TABLES, Entry
from qwen_cache.sources.pairs import IMAGE_EXTENSIONS
from qwen_cache.sources.rows import Readable

IsInside = Callable[[Path], bool]
"""Whether a file is in the opened folders, after links are followed."""
ALLOW = "open its folder too: qwen-cache ui --allow FOLDER"


@dataclass(frozen=True)
class Outside:
    """An image that is not read."""

    where: str

    def __str__(self) -> str:
        return self.where

    def read(self) -> bytes:
        raise SourceError("this image is outside the opened folders", where=self.where, do=ALLOW)


def readable(entry: Entry, is_inside: IsInside) -> Entry:
    """The row, with `Outside` in place of images that are not read."""

    def checked(image: Readable) -> Readable:
        files = getattr(image, "files", ())
        is_here = all(is_inside(file) for file in files if isinstance(file, Path))
        return image if is_here else Outside(str(image))

    target, mask = (None if image is None else checked(image) for image in (entry.target, entry.mask))
    return replace(entry, target=target, controls=tuple(map(checked, entry.controls)), mask=mask)


def check_links(source: Path, is_inside: IsInside) -> None:
    """SourceError for a link in a source that leads out of the opened folders, unless it has the name of an image.

    Of a folder with a table only the table is looked at: all else that is read of it are images.
    """
    if not source.is_dir():
        return
    tables = [source / name for name in METADATA_TABLES if (source / name).is_file()]
    for table in tables:
        _check(table, is_inside)
    waiting = [] if tables else [os.path.realpath(source)]
    seen = set(waiting)
    while waiting:
        with os.scandir(waiting.pop()) as entries:
            for entry in entries:
                is_link = entry.is_symlink()
                if entry.name[0] == "." or not (is_link or entry.is_dir()):
                    continue
                is_folder = _is_folder(entry)
                if is_link and (is_folder or not entry.name.lower().endswith(IMAGE_EXTENSIONS)):
                    _check(Path(entry.path), is_inside)
                if is_folder and (folder := os.path.realpath(entry.path)) not in seen:
                    seen.add(folder)
                    waiting.append(folder)


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False


def _check(path: Path, is_inside: IsInside) -> None:
    if not is_inside(path):
        raise SourceError("this link leads out of the opened folders", where=path, do=ALLOW)
