"""The files of a page with many samples: its rows and images, for its scripts to load as they are needed.

They are scripts that call `data(name, value)`, because a browser lets a page that is opened from a disk load scripts
from its folder, and fetch nothing. `FILE_files/<hash>/` has them, named by their content, so a page never shows those
of another:

    rows-<i>.js     1024 samples, as `rows.COLUMNS`
    images-<i>.js   the images of 32 samples, as data URLs; only those of samples that have some
    kinds-<i>.js    size, recipe, flags of 65,536 samples, for the filters
    keys-<digits>.js  the positions of the samples whose keys begin so
    near-<i>.js     the positions of near-duplicates, group by group

The folder gets its name when all of it is on the disk, before the page; folders of older pages are removed after it.
"""

from __future__ import annotations

import re
import shutil
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from qwen_cache.errors import ConfigError, QwenCacheError
from qwen_cache.html.page import compact_json, relative_url
from qwen_cache.inspect.flags import FLAGS
from qwen_cache.inspect.images import ImageSource, data_url
from qwen_cache.inspect.rows import PageSamples
from qwen_cache.storage.files import (
    REMOVED,
    LockHeldError,
    is_link,
    locked,
    make_folder,
    remove_folder,
    remove_left,
    replace,
    sync_file,
    sync_folder,
)
from qwen_cache.terminal import counting, naming

CHUNK = 1024  # samples per file of rows: some 300 kB
PACK = 32  # samples per file of images: some 1 MB
SECTION = 1 << 16  # samples per file of kinds, so that 16 bits number them
BUCKET = 4096  # samples per file of keys, at most, on average
KEY_DIGITS = 12  # of a key in those files, after the digits in their names; the row then has the whole key
WRITING, LOCK = ".writing.tmp", ".lock"
OURS, SCRIPT = re.compile("[0-9a-f]{32}"), re.compile(r"(rows|images|kinds|keys|near)-[0-9a-f]+\.js")


def folder_of(page: Path) -> Path:
    """The folder for the files of a page."""
    return page.with_name(f"{page.stem}_files")


@contextmanager
def files_beside(page: Path, listing: PageSamples, source: ImageSource) -> Iterator[dict[str, Any]]:
    """Write the files of a page; yields what the page must say about them, and removes older files once it is written.

    QwenCacheError where another process writes this page.
    """
    folder = folder_of(page)
    if is_link(folder) or (folder.exists() and not folder.is_dir()):
        what, do = "the files of a page of this size cannot be written here: not a folder", "give --html another file"
        raise ConfigError(what, where=folder, do=do)
    make_folder(folder)
    try:
        with locked(folder / LOCK, remove=True):
            shutil.rmtree(folder / WRITING, ignore_errors=True)
            try:
                facts, digest = write_files(folder / WRITING, listing, source)
                _give_name(folder / WRITING, folder / digest)
            except BaseException:
                shutil.rmtree(folder / WRITING, ignore_errors=True)
                raise
            yield facts | {"folder": relative_url(f"{folder.name}/{digest}")}
            _remove_older(folder, digest)
    except LockHeldError as held:
        what, do = "another process is writing this page", "wait for it, or give --html another file"
        raise QwenCacheError(what, where=page, found=held.holder, do=do) from None


def remove_files(page: Path) -> None:
    """Remove the files of an older page of this name, if it had some."""
    folder = folder_of(page)
    if folder.is_dir() and not is_link(folder):
        _remove_older(folder, "")


def _give_name(written: Path, final: Path) -> None:
    for path in written.iterdir():
        sync_file(path)
    sync_folder(written)
    if final.is_dir() and _contents(final) == _contents(written):
        _remove_files(written)
        return
    if final.exists():  # somebody changed its files
        remove_folder(final)
    replace(written, final)
    sync_folder(final.parent)


def _contents(folder: Path) -> dict[str, bytes]:
    """The hash of each file."""
    return {path.name: xxhash.xxh3_128_digest(path.read_bytes()) for path in folder.iterdir()}


def _remove_older(folder: Path, digest: str) -> None:
    remove_left(folder)
    for old in list(folder.iterdir()):
        if OURS.fullmatch(old.name) and old.name != digest and _has_only_ours(old):
            removed = old.with_name(f".{old.name}{REMOVED}")
            replace(old, removed)
            _remove_files(removed)
    with suppress(OSError):  # it has other files
        folder.rmdir()


def _remove_files(folder: Path) -> None:
    """Remove a folder without folders. Errors of `shutil.rmtree` would not name the whole path."""
    for path in list(folder.iterdir()):
        path.unlink()
    folder.rmdir()


def _has_only_ours(folder: Path) -> bool:
    return folder.is_dir() and all(SCRIPT.fullmatch(path.name) for path in folder.iterdir())


def write_files(folder: Path, listing: PageSamples, source: ImageSource) -> tuple[dict[str, Any], str]:
    """Write all files into a new folder; returns what the page must say about them, and the hash of their content."""
    folder.mkdir()
    digest = xxhash.xxh3_128()

    def write(name: str, value: Any) -> None:
        script = f"data({compact_json(name)},{compact_json(value)});\n".encode()
        digest.update(script)
        path = folder / f"{name}.js"
        with naming(path):
            path.write_bytes(script)

    with counting("writing the page", listing.count) as advance:
        for i, begin in enumerate(range(0, listing.count, CHUNK)):
            end = min(begin + CHUNK, listing.count)
            rows = listing.rows(begin, end)
            for pack in range(begin, end, PACK):
                titles, images = _images(listing, source, pack, min(pack + PACK, end))
                for row, named in zip(rows[pack - begin : pack - begin + PACK], titles, strict=True):
                    row[-1] = [[title, None] for title in named]
                if any(titles):
                    write(f"images-{pack // PACK}", images)
            write(f"rows-{i}", rows)
            advance(end - begin)
    for i, begin in enumerate(range(0, listing.count, SECTION)):
        kinds, codes = listing.kinds(begin, min(begin + SECTION, listing.count))
        write(f"kinds-{i}", {"kinds": kinds, "codes": b64encode(codes.astype("<u2").tobytes()).decode("ascii")})
    near = np.concatenate([np.zeros(0, np.int64), *listing.groups])
    for i, begin in enumerate(range(0, len(near), SECTION)):
        write(f"near-{i}", near[begin : begin + SECTION].tolist())
    digits = 1
    while listing.count > BUCKET * 16**digits:
        digits += 1
    for name, value in _buckets(listing.keys(), digits):
        write(name, value)
    numbers = {"chunk": CHUNK, "pack": PACK, "section": SECTION, "key_digits": digits, "near": len(near)}
    facts = listing.facts() | numbers | {"flag_names": list(FLAGS), "has_images": bool(len(listing.with_images))}
    return facts, digest.hexdigest()


def _images(listing: PageSamples, source: ImageSource, begin: int, end: int) -> tuple[list[list[str]], list[list[str]]]:
    """The titles and the data URLs of the images of each sample from `begin` to before `end`."""
    found = [list(source(listing.sample(i))) if listing.has_images[i] else [] for i in range(begin, end)]
    titles = [[image.title for image in images] for images in found]
    return titles, [[data_url(image) for image in images] for images in found]


def _buckets(keys: Any, digits: int) -> Iterator[tuple[str, tuple[list[str], list[int]]]]:
    """For each start of a key its file: the next digits of each key, and its position."""
    order = np.argsort(keys)
    bounds = np.searchsorted(keys[order] >> np.uint64(64 - 4 * digits), np.arange(16**digits + 1))
    for bucket in range(16**digits):
        positions = order[bounds[bucket] : bounds[bucket + 1]]
        starts = [f"{key:016x}"[digits : digits + KEY_DIGITS] for key in keys[positions].tolist()]
        yield f"keys-{bucket:0{digits}x}", (starts, positions.tolist())
