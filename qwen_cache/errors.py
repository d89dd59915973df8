"""Every error that a user can cause, as one tree.

A message says what is wrong, where, what was expected, what was found and what to do about it. Both
commands print it on one or a few lines, without a traceback, and exit with code 2.

    QwenCacheError
    ├── SourceError      the images, prompts and tables that a cache is made from
    ├── ModelError       the model folder: missing parts, another architecture
    ├── ConfigError      qwen.yaml, --set, and options that contradict each other
    ├── DeviceError      a device that this machine does not have, or that has too little memory
    ├── FormatError      a cache that breaks a rule of schemas/FORMAT.md (`rule` names it)
    └── TrainError       a run that cannot start, go on or resume
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

RESTORE = "restore the file from a copy, or run `qwen-cache build` into an empty folder"
RESTORE_SHARD = "restore the shard from a copy, or delete it and run `qwen-cache build` again"
UPGRADE = "install a newer version: `git pull && pip install .` in its repository"


@dataclass(frozen=True)
class Problem:
    """Why one row of a source cannot be used: reported with all others, not raised."""

    where: str
    what: str
    do: str


class QwenCacheError(Exception):
    """What is wrong (`what`), and where, expected, found and the cure (`do`) when they apply."""

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        expected: object | None = None,
        found: object | None = None,
        do: str | None = None,
    ) -> None:
        self.what, self.where, self.expected, self.found, self.do = what, where, expected, found, do
        super().__init__(str(self))

    @property
    def fault(self) -> str:
        """What is wrong, with what was expected and found, but without the place and the cure."""
        pairs = (("expected", self.expected), ("found", self.found))
        sides = ", ".join(f"{name} {value}" for name, value in pairs if value is not None)
        return f"{self.what} ({sides})" if sides else self.what

    def __str__(self) -> str:
        text = f"{self.where}: {self.fault}" if self.where is not None else self.fault
        return f"{text}\n  → {self.do}" if self.do else text


class SourceError(QwenCacheError):
    """The images, prompts or tables cannot be used as they are."""


class ModelError(QwenCacheError):
    """The model folder misses a part, or is of another architecture."""


class ConfigError(QwenCacheError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DeviceError(QwenCacheError):
    """A device was named that this machine does not have, or one has too little memory."""


class TrainError(QwenCacheError):
    """A run cannot start, go on or resume."""


class FormatError(QwenCacheError):
    """A cache breaks a rule of schemas/FORMAT.md. Each rule has a class: its number, and the usual cure."""

    rule: ClassVar[str]
    cure: ClassVar[str] = RESTORE

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        expected: object | None = None,
        found: object | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, where=where, expected=expected, found=found, do=do or self.cure)

    @property
    def fault(self) -> str:
        return f"{super().fault} [{self.rule}]"

    def to_json(self) -> dict[str, str]:
        """As a finding of `verify`."""
        return {"rule": self.rule, "where": str(self.where), "what": super().fault, "do": str(self.do)}


class ManifestError(FormatError):
    """cache.json is missing, or is not what its schema says."""

    rule = "F1"


class VersionError(FormatError):
    """The format version is not known."""

    rule = "F2"
    cure = UPGRADE


class UnknownKeyError(FormatError):
    """A key is not known, and does not say that it may be ignored."""

    rule = "F3"
    cure = UPGRADE


class CountError(FormatError):
    """The numbers of samples disagree, or a shard is listed twice."""

    rule = "F4"


class RecipeError(FormatError):
    """A recipe, its id, or the samples that belong to it are not what the manifest says."""

    rule = "F5"


class ShardError(FormatError):
    """A shard is missing, or its name or size is not that of its bytes."""

    rule = "F6"
    cure = RESTORE_SHARD


class IndexFileError(FormatError):
    """index.parquet is not the one of the manifest, or contradicts itself."""

    rule = "F7"


class ArchiveError(FormatError):
    """A shard is not a tar of pairs of members."""

    rule = "F8"
    cure = RESTORE_SHARD


class MemberError(FormatError):
    """A member is not what its schema or the safetensors format says."""

    rule = "F9"
    cure = RESTORE_SHARD


class SampleKeyError(FormatError):
    """A key is not the hash of content and recipe, or stands twice."""

    rule = "F10"


class TensorSetError(FormatError):
    """A tensor is missing, or not expected."""

    rule = "F11"


class ShapeError(FormatError):
    """A shape does not follow from img_shapes and the text."""

    rule = "F12"


class DtypeError(FormatError):
    """A dtype is not allowed, or differs within a sample."""

    rule = "F13"


class ChecksumError(FormatError):
    """The bytes of a tensor are not those that were written."""

    rule = "F14"
    cure = RESTORE_SHARD


class NotFiniteError(FormatError):
    """A tensor has NaN or Inf."""

    rule = "F15"
    cure = "delete the shard and run `qwen-cache build` again; if it comes back, look at the source or the encoder"


class DisagreementError(FormatError):
    """Index and shard disagree."""

    rule = "F16"
    cure = RESTORE_SHARD


class StrayFileError(FormatError):
    """A shard lies there that the manifest does not name."""

    rule = "F17"
    cure = "run `qwen-cache gc`"


class PhraseError(FormatError):
    """A phrase does not lie in the prompt."""

    rule = "F19"


class ThumbnailError(FormatError):
    """Thumbnails are not a JPEG, or not one of that size."""

    rule = "F20"
    cure = RESTORE_SHARD


class CodecError(FormatError):
    """A compressed tensor cannot be decoded."""

    rule = "F18"
    cure = RESTORE_SHARD


RULES: dict[str, type[FormatError]] = {error.rule: error for error in FormatError.__subclasses__()}
