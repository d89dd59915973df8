"""Every error that a user can cause, as one tree.

A message says what is wrong, where, what was expected, what was found and what to do about it. Both
commands print it on one or a few lines, without a traceback, and exit with code 2.

    QwenCacheError
    ├── SourceError      the pictures, prompts and tables that a cache is made from
    ├── ModelError       the model folder: missing parts, another architecture
    ├── ConfigError      qwen.yaml, --set, and options that contradict each other
    ├── DeviceError      a device that this machine does not have
    ├── FormatError      a cache that breaks a rule of schemas/FORMAT.md (`rule` names it)
    └── TrainError       a run that cannot start, go on or resume
"""

from __future__ import annotations


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
    """The pictures, prompts or tables cannot be used as they are."""


class ModelError(QwenCacheError):
    """The model folder misses a part, or is of another architecture."""


class ConfigError(QwenCacheError):
    """A setting is unknown, of the wrong type, or contradicts another."""


class DeviceError(QwenCacheError):
    """A device was named that this machine does not have."""


class TrainError(QwenCacheError):
    """A run cannot start, go on or resume."""


class FormatError(QwenCacheError):
    """A cache breaks a rule of schemas/FORMAT.md; `rule` is its number there, such as `F7`."""

    def __init__(
        self,
        rule: str,
        what: str,
        *,
        where: object | None = None,
        expected: object | None = None,
        found: object | None = None,
        do: str | None = None,
    ) -> None:
        self.rule = rule
        super().__init__(f"{what} [{rule}]", where=where, expected=expected, found=found, do=do)
