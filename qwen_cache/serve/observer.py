"""What a service counts, for its metrics and its log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from threading import Lock

from qwen_cache.serve.states import Fault


class Observer:
    """Counters since the start; `listen` is called with the name and the facts of each event."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.commit_seconds = 0.0
        self.listen: Callable[[str, dict[str, object]], None] = lambda name, facts: None
        self._lock = Lock()

    def accepted(self, new: int, known: int) -> None:
        """Samples that clients sent: to be encoded, and known already."""
        self._count(misses=new, hits=known)

    def encoded(self) -> None:
        self._count(encoded=1)

    def copied(self) -> None:
        self._count(copied=1)

    def reused(self) -> None:
        """The latents of an image were taken from a cache."""
        self._count(reused=1)

    def copy_failed(self, problem: str) -> None:
        self.listen("copy failed", {"problem": problem})

    def failed(self) -> None:
        self._count(failed=1)

    def committed(self, samples: int, seconds: float) -> None:
        self._count(commits=1, stored=samples)
        self.commit_seconds += seconds
        self.listen("commit", {"samples": samples, "seconds": round(seconds, 3)})

    def store_failed(self, fault: Fault) -> None:
        """Nothing can be stored for now."""
        self.listen("fault", {"code": fault.code, "problem": fault.problem})

    def commit_failed(self, problem: str) -> None:
        self._count(failed_commits=1)
        self.listen("commit failed", {"problem": problem})

    def _count(self, **more: int) -> None:
        with self._lock:
            self.counts.update(more)
