"""The memory and load of NVIDIA GPUs, from the driver's own library (NVML), where there is one.

torch is never imported for it, and GPUs of other makers are not asked. The library is asked by a thread of its own: a
driver that hangs holds up no page, and is named once it has not answered for a while.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from threading import Lock, Thread
from typing import Any

FRESH = 1.0  # seconds in which an answer is not asked for again
PATIENCE = 10.0  # seconds after which a driver counts as one that hangs


class Gpus:
    """The newest answer of the driver. `now` is called from any thread, and returns at once."""

    def __init__(self) -> None:
        self._lock, self._thread = Lock(), Thread()
        self._nvml: Any = None
        self._is_absent = False
        self._asked = self._answered = 0.0
        self._gpus: list[dict[str, Any]] = []
        self._problem = ""

    def now(self) -> dict[str, Any]:
        """The GPUs as JSON, and what is wrong with the driver; the driver is asked again for the next call.

        A GPU is {"uuid": …, "title": …, "total": …, "used": …, "busy": …}: bytes of its memory, and the part of the
        last moment in which it computed, in percent; None for what the driver does not know.
        """
        with self._lock:
            now = time.monotonic()
            is_asking = self._thread.is_alive()
            if not is_asking and not self._is_absent and now - self._answered >= FRESH:
                self._thread, self._asked = Thread(target=self._ask, name="gpus", daemon=True), now
                self._thread.start()
            if is_asking and (silent := now - self._asked) > PATIENCE:
                return {"gpus": [], "problem": f"the driver of the GPUs has not answered for {silent:.0f} s"}
            return {"gpus": self._gpus, "problem": self._problem}

    def _ask(self) -> None:
        gpus, problem = list[dict[str, Any]](), ""
        try:
            if self._nvml is None:
                self._nvml = _library()
            if self._nvml is not None:
                handles = map(self._nvml.nvmlDeviceGetHandleByIndex, range(self._nvml.nvmlDeviceGetCount()))
                gpus = [_about(self._nvml, handle) for handle in handles]
        except self._nvml.NVMLError as error:
            problem = f"the driver of the GPUs fails: {error}"
        with self._lock:
            self._gpus, self._problem, self._is_absent = gpus, problem, self._nvml is None
            self._answered = time.monotonic()


def _library() -> Any:
    """NVML, ready to be asked; None without its Python package or without a driver."""
    try:
        import pynvml
    except ImportError:
        return None
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        return pynvml
    return None


def _about(nvml: Any, handle: Any) -> dict[str, Any]:
    def known(ask: Callable[[Any], Any]) -> Any:
        """The answer; None for what this GPU does not report, such as the load of a part of one (MIG)."""
        with suppress(nvml.NVMLError_NotSupported):
            return ask(handle)
        return None

    memory, load = known(nvml.nvmlDeviceGetMemoryInfo), known(nvml.nvmlDeviceGetUtilizationRates)
    return {
        "uuid": nvml.nvmlDeviceGetUUID(handle),
        "title": nvml.nvmlDeviceGetName(handle),
        "total": memory and memory.total,
        "used": memory and memory.used,
        "busy": load and load.gpu,
    }
