"""Every error that a user can cause, in one tree.

A message says what is wrong, where, what was expected, what was found and what to do. Both programs print it on a few
lines, without a traceback, and exit with code 2.

    QwenCacheError
    ├── SourceError      the images, prompts and tables of a source
    ├── ModelError       the model folder: missing parts, another architecture
    ├── ConfigError      qwen.yaml, --set, and options that contradict each other
    ├── TooLargeError    a file or a listing on a server that does not fit into memory
    ├── ConflictError    another build has changed the cache in object storage meanwhile
    ├── DeviceError      a device that does not exist or has too little memory
    ├── FormatError      a cache that breaks a rule of schemas/FORMAT.md (`rule` names it)
    └── TrainError       a run that cannot start, continue or resume
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import ClassVar

from qwen_cache.text import one_line, plain

RESTORE = "restore the file from a copy, or run `qwen-cache build` into an empty folder"
RESTORE_SHARD = (
    "restore the shard from a copy, or run the same `qwen-cache build` with --repair: "
    "it encodes the damaged samples again"
)
REBUILD_MANIFEST = (
    "restore cache.json and index.parquet from a copy, or delete cache.json and run the same `qwen-cache build` again: "
    "it keeps the whole shards of its recipe"
)
UPGRADE = "install a newer version: `git pull && pip install .` in its repository"


@dataclass(frozen=True)
class Problem:
    """Why one row of a source cannot be used: reported together with all others, not raised.

    `str(problem)` is the message for people; the fields are as long as they are.
    """

    where: str
    what: str
    do: str

    def __str__(self) -> str:
        return f"{plain(self.where)}: {plain(one_line(self.what))}\n  → {plain(one_line(self.do))}"


NAMES_IN_NOTICE = 3


@dataclass(frozen=True)
class Notice:
    """A fact that a user should know of some samples, which are used all the same: one line, with their number."""

    what: str
    """A clause about these samples, with the verb in the plural: `prompts have …`."""
    names: tuple[str, ...]
    """The first of them."""
    do: str
    count: int = 1
    is_fault: bool = False
    """True if a check fails because of it."""

    def __str__(self) -> str:
        more = ", …" if self.count > len(self.names) else ""
        return f"{self.count} {self.what}: {plain(', '.join(self.names))}{more}\n  → {self.do}"


def counted(notices: Iterable[Notice]) -> tuple[Notice, ...]:
    """The notices, those of one kind as one."""
    found: dict[str, Notice] = {}
    for each in notices:
        known = found.get(each.what, replace(each, names=(), count=0))
        names = (*known.names, *each.names)[:NAMES_IN_NOTICE]
        found[each.what] = replace(known, names=names, count=known.count + each.count)
    return tuple(found.values())


class QwenCacheError(Exception):
    """The base class of every error that a user can cause; `str(error)` is the message, fit for a terminal.

    `what` says what is wrong. `where` (the location), `expected`, `found` and `do` (the fix) are None where they do not
    apply. The attributes and `fault` are as they were given; in the message, control characters are escaped and long
    parts shortened.
    """

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
        """The fault, expected and found, without the location and the fix."""
        return self._fault(str)

    def _fault(self, shown: Callable[[object], str]) -> str:
        pairs = (("expected", self.expected), ("found", self.found))
        sides = ", ".join(f"{name} {shown(value) or 'nothing'}" for name, value in pairs if value is not None)
        what = shown(one_line(self.what))
        return f"{what} ({sides})" if sides else what

    def __str__(self) -> str:
        fault = self._fault(plain)
        text = f"{plain(self.where)}: {fault}" if self.where is not None else fault
        return f"{text}\n  → {plain(one_line(self.do))}" if self.do else text


class SourceError(QwenCacheError):
    """The images, prompts or tables cannot be used as they are."""


class ModelError(QwenCacheError):
    """The model folder lacks a component, or the model has another architecture."""


class ConfigError(QwenCacheError):
    """A setting is unknown, of the wrong type, or contradicts another."""

    others: tuple[ConfigError, ...] = ()
    """The other faults of the same settings: a command says the first one, a form marks each."""


class DeviceError(QwenCacheError):
    """A device does not exist on this machine, or has too little memory."""


class ConflictError(QwenCacheError):
    """Another build has committed to a cache in object storage since this one read it."""


class BusyError(QwenCacheError):
    """The queue of a server is full."""


class StoppingError(QwenCacheError):
    """A server is about to end."""


class ServerFaultError(QwenCacheError):
    """A server cannot work for now, and `code` says why: its disk is full, for example."""

    def __init__(self, code: str, what: str, *, do: str) -> None:
        super().__init__(what, do=do)
        self.code = code


class ServerSilentError(QwenCacheError):
    """A server did not answer, or was too busy, for as long as the client waits."""


class TooLargeError(QwenCacheError):
    """A file or a listing on a server is larger than what is read into memory."""


class JobError(QwenCacheError):
    """A job of `qwen-cache ui` does not allow this now, or there is no such job."""


class OutdatedError(QwenCacheError):
    """A newer check of `qwen-cache ui` has taken the place of this one."""


class TrainError(QwenCacheError):
    """A run cannot start, continue or resume."""


class FormatError(QwenCacheError):
    """A cache breaks a rule of schemas/FORMAT.md.

    Each rule has a subclass, with its number (`rule`, such as "F14") and the usual fix (`fix`), which `do` defaults to.
    """

    rule: ClassVar[str]
    fix: ClassVar[str] = RESTORE

    def __init__(
        self,
        what: str,
        *,
        where: object | None = None,
        expected: object | None = None,
        found: object | None = None,
        do: str | None = None,
    ) -> None:
        super().__init__(what, where=where, expected=expected, found=found, do=do or self.fix)

    def _fault(self, shown: Callable[[object], str]) -> str:
        return f"{super()._fault(shown)} [{self.rule}]"

    def to_json(self) -> dict[str, str]:
        """The entry in the output of `verify --json`."""
        return {"rule": self.rule, "where": str(self.where), "what": super()._fault(str), "do": str(self.do)}


class ManifestError(FormatError):
    """cache.json is missing or does not follow its schema."""

    rule = "F1"


class NoCacheError(ManifestError):
    """There is no cache here, so the message names no rule."""

    def _fault(self, shown: Callable[[object], str]) -> str:
        return QwenCacheError._fault(self, shown)


class VersionError(FormatError):
    """The format version is unknown."""

    rule = "F2"
    fix = UPGRADE


class UnknownKeyError(FormatError):
    """A key is unknown and not marked as ignorable."""

    rule = "F3"
    fix = UPGRADE


class CountError(FormatError):
    """The numbers of samples disagree, or a shard is listed twice."""

    rule = "F4"


class RecipeError(FormatError):
    """A recipe, its id or its samples do not match the manifest."""

    rule = "F5"


class ShardError(FormatError):
    """A shard is missing, or its name or size does not match its bytes."""

    rule = "F6"
    fix = RESTORE_SHARD


class IndexFileError(FormatError):
    """index.parquet does not match the manifest, or contradicts itself."""

    rule = "F7"
    fix = REBUILD_MANIFEST


class ArchiveError(FormatError):
    """A shard is not a tar of member pairs."""

    rule = "F8"
    fix = RESTORE_SHARD


class MemberError(FormatError):
    """A member does not follow its schema or the safetensors format."""

    rule = "F9"
    fix = RESTORE_SHARD


class SampleKeyError(FormatError):
    """A key is not the hash of content and recipe, or occurs twice."""

    rule = "F10"


class TensorSetError(FormatError):
    """A tensor is missing or unexpected."""

    rule = "F11"


class ShapeError(FormatError):
    """A shape does not follow from img_shapes and the text."""

    rule = "F12"


class DtypeError(FormatError):
    """A dtype is not allowed, or differs within a sample."""

    rule = "F13"


class ChecksumError(FormatError):
    """The bytes of a tensor do not match their hash."""

    rule = "F14"
    fix = RESTORE_SHARD


class NotFiniteError(FormatError):
    """A tensor contains NaN, Inf or a number out of range."""

    rule = "F15"
    fix = "run the same `qwen-cache build` with --repair; if it happens again, check the source and the encoder"


class DisagreementError(FormatError):
    """Index and shard disagree."""

    rule = "F16"
    fix = RESTORE_SHARD


class StrayFileError(FormatError):
    """A shard in the folder is not in the manifest."""

    rule = "F17"
    fix = "run `qwen-cache gc`"


class PhraseError(FormatError):
    """A phrase is not within the prompt."""

    rule = "F19"


class ThumbnailError(FormatError):
    """Thumbnails are neither a JPEG nor a WebP, or have another size."""

    rule = "F20"
    fix = RESTORE_SHARD


class ManifestChecksumError(FormatError):
    """The bytes of cache.json do not match its checksum."""

    rule = "F21"
    fix = REBUILD_MANIFEST


class CodecError(FormatError):
    """A compressed tensor cannot be decoded."""

    rule = "F18"
    fix = RESTORE_SHARD


RULES: dict[str, type[FormatError]] = {error.rule: error for error in FormatError.__subclasses__()}


def first_line(error: object) -> str:
    """The first line of another library's message, at most 200 characters; the name of its type if it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
