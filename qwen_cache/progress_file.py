"""Progress for other programs: the progress line as JSON, in the file that QWEN_CACHE_PROGRESS names.

The file is replaced as a whole, at most four times a second and only if the line has changed, whether or not the line
is shown. Of lines inside each other it has the outer one. A file that cannot be written is one warning, never an error.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any

VARIABLE = "QWEN_CACHE_PROGRESS"
INTERVAL = 0.25  # seconds between two writes

_in_use = Lock()
"""Held by the line whose progress is written."""
_warned = Event()


class ProgressFile:
    """Writes what `state` returns, from a thread of its own, between `start` and `stop`; both may be called twice."""

    def __init__(self, path: Path, state: Callable[[], Mapping[str, Any] | None], warn: Callable[[str], None]) -> None:
        self._path, self._state, self._warn = path, state, warn
        self._ends = Event()
        self._thread: Thread | None = None
        self._written = b""

    def start(self) -> None:
        if self._thread is None and _in_use.acquire(blocking=False):
            self._thread = Thread(target=self._write_on, name="progress file", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """Write the last state."""
        if self._thread is not None:
            self._ends.set()
            self._thread.join()
            self._thread = None
            self._write()
            _in_use.release()

    def _write_on(self) -> None:
        while not self._ends.wait(INTERVAL):
            self._write()

    def _write(self) -> None:
        state = self._state()
        document = b"" if state is None else json.dumps(state).encode("ascii")
        if document == self._written:
            return
        temporary = self._path.with_name(f".{self._path.name}.{os.getpid()}.tmp")
        try:
            temporary.write_bytes(document)
            os.replace(temporary, self._path)
        except OSError as error:
            with suppress(OSError):
                temporary.unlink()
            if not _warned.is_set():
                _warned.set()
                self._warn(f"{VARIABLE}: {self._path}: {error.strerror or error}; progress is not written")
        else:
            self._written = document


def progress_file(state: Callable[[], Mapping[str, Any] | None], warn: Callable[[str], None]) -> ProgressFile | None:
    """The file for a progress line; None if the environment names none."""
    name = os.environ.get(VARIABLE)
    return ProgressFile(Path(name), state, warn) if name else None
