"""The images of a plan: content hash, size and whether they decode, from memory if they have not changed.

The memory is that of `storage/remembered.py`. Another version of this program, of Pillow, or of a package that
reads HEIC or JPEG XL may see another size or decode other files, so it starts with an empty memory. An image that could
not be decoded is read again each time.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import PIL

from qwen_cache.errors import SourceError
from qwen_cache.extras import __version__
from qwen_cache.format.identity import content_hash
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.images import PLUGINS, has_other_profile, open_mask, open_rgb, upright_size
from qwen_cache.sources.rows import Readable, Row
from qwen_cache.sources.sizes import Size
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Url, location

FACTS = struct.Struct("<16sII??")  # content hash, width, height, decoded, has another profile


@dataclass(frozen=True)
class Facts:
    """What is known of an image."""

    hash: str
    size: Size = (0, 0)
    """After EXIF rotation; zeros if not read yet."""
    decoded: bool = False
    """Whether every pixel was decoded without an error."""
    other_profile: bool = False
    """Whether it has a colour profile other than sRGB, as far as it was decoded."""

    @staticmethod
    def from_bytes(data: bytes) -> Facts:
        digest, width, height, *known = FACTS.unpack(data)
        return Facts(digest.hex(), (width, height), *known)

    def to_bytes(self) -> bytes:
        return FACTS.pack(bytes.fromhex(self.hash), *self.size, self.decoded, self.other_profile)


class RememberedImages:
    """What the last plan learned about the images of a source, and what this one learns."""

    def __init__(self, files: RememberedFiles) -> None:
        self.files = files

    @staticmethod
    def nowhere() -> RememberedImages:
        """A memory without a store."""
        return RememberedImages(RememberedFiles("images"))

    @staticmethod
    def of(source: str, data: DataConfig) -> RememberedImages:
        """The images of a source, or of the slice, split and configuration of it that `data` names."""
        detail = "\0".join(each or "" for each in (data.slice, data.split, data.config_name))
        return RememberedImages(RememberedFiles.of(_readers(), location(source), detail))

    @contextmanager
    def planning(self, rows: Sequence[Row]) -> Iterator[None]:
        """Remember what is learned inside the block, in which a plan of `rows` is made."""
        images = (image for row in rows for image in (row.target, *row.controls, row.mask) if image is not None)
        self.files.list_folders(file for image in images for file in _files(image) if isinstance(file, Url))
        with self.files.saved():
            yield

    def image(self, file: Readable, *, is_mask: bool = False, may_read: bool = True) -> PlannedImage:
        return PlannedImage(self.files, file, is_mask, may_read)


class NotRememberedError(Exception):
    """An image would have to be read."""


class PlannedImage:
    """An image of a row. Its file is read at most once, and only for what is not remembered.

    Where it may not be read, every method but `keep` raises NotRememberedError instead.
    """

    def __init__(self, memory: RememberedFiles, file: Readable, is_mask: bool, may_read: bool) -> None:
        self.where, self._may_read = str(file), may_read
        self._file, self._memory, self._is_mask = file, memory, is_mask
        self._name, self._is_settled = self._named()
        known = memory.recall(self._name) if self._name else None
        self._facts = Facts.from_bytes(known) if known else None
        self._content: bytes | None = None

    def hash(self) -> str:
        """The content hash; SourceError if the file cannot be read."""
        return self._known().hash

    def size(self) -> Size:
        """The upright size, from the header; SourceError if the file is not an image."""
        facts = self._known()
        if not all(facts.size):
            self._facts = facts = replace(facts, size=upright_size(self._read(), self.where))
        return facts.size

    def decode(self) -> Size:
        """The size, if every pixel can be decoded; else SourceError."""
        facts = self._known()
        if not facts.decoded:
            image = (open_mask if self._is_mask else open_rgb)(self._read(), self.where)
            other_profile = has_other_profile(self._read(), self.where)
            self._facts = facts = replace(facts, size=image.size, decoded=True, other_profile=other_profile)
        return facts.size

    @property
    def has_other_profile(self) -> bool:
        """Whether the image has a colour profile other than sRGB, as far as it was decoded, now or before."""
        return self._facts is not None and self._facts.other_profile

    def keep(self) -> None:
        """Remember what is known, unless the file may have changed while it was read; drop its bytes."""
        was_read, self._content = self._content is not None, None
        if self._name and self._facts and (not was_read or (self._is_settled and self._named()[0] == self._name)):
            self._memory.keep(self._name, self._facts.to_bytes())

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = Facts(content_hash(self._read()))
        return self._facts

    def _read(self) -> bytes:
        if not self._may_read:
            raise NotRememberedError
        if self._content is None:
            self._content = self._file.read()
            if self._facts and content_hash(self._content) != self._facts.hash:
                what = "the content of this file changed, but its times or ETag did not"
                do = "run the same command again; if the error persists, add --rehash"
                raise SourceError(what, where=self.where, do=do)
        return self._content

    def _named(self) -> tuple[bytes | None, bool]:
        return self._memory.name("mask" if self._is_mask else "image", self.where, _files(self._file))


def _readers() -> str:
    """What reads images here, with its versions."""
    versions = [f"images 2, qwen-cache {__version__}, Pillow {PIL.__version__}"]
    for _, package in PLUGINS.values():
        with suppress(PackageNotFoundError):
            versions.append(f"{package} {version(package)}")
    return ", ".join(versions)


def _files(image: Readable) -> Sequence[Path | Url]:
    """The files that an image is read from; none if its kind of source does not say."""
    return getattr(image, "files", ())
