"""How far a sample is."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class State(StrEnum):
    """How far a sample is."""

    UNKNOWN = "unknown"
    ACCEPTED = "accepted"
    """It waits for the encoders, or is being encoded; lost if the server is killed."""
    ENCODED = "encoded"
    """It can be fetched; lost if the server is killed."""
    STORED = "stored"
    """It is in the cache, and survives whatever happens to the server."""
    FAILED = "failed"
    """It cannot be encoded."""


@dataclass(frozen=True)
class Fault:
    """A fault of the server, not of the row: the client sends the same request again later."""

    code: str
    """A word for programs: `storage_full`, `storage_failed`, `out_of_memory` or `lost`."""
    problem: str


@dataclass(frozen=True)
class Status:
    """The state of the sample with this key, and its problem if it failed."""

    key: str
    state: State
    problem: str | None = None
    code: str | None = None
    """That of a `Fault`; None if the row cannot be encoded."""
