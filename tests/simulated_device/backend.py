"""Installs the simulated accelerator in this process, and keeps what it reports.

`install` makes torch take "simu" as its accelerator: once per process and for good, so tests call it in a process of
their own. What the device reports are `Event`s, each with the project's line that caused it: `race` and `mixed` are
faults; `item`, `upload`, `download`, `shape`, `synchronize` and `allocator-wait` made the host wait for the device;
`upload-pageable` would have been asynchronous from pinned memory.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch

from . import simu
from .build import extension

FAULTS = ("race", "mixed")
SLOW = ("item", "upload", "download", "shape", "synchronize", "allocator-wait", "upload-pageable")


@dataclass(frozen=True, order=True)
class Event:
    kind: str
    what: str
    place: str
    """The innermost line of the project, as `folder/file.py:12`."""


events: list[Event] = []
_folders: tuple[str, ...] = ()
_root = ""


def install(root: Path, folders: Sequence[str] = ("qwen_cache", "qwen_train")) -> None:
    """Register the devices simu:0 and simu:1; `folders` (or files) of `root` are the project that events name."""
    global _folders, _root
    _root = f"{root}/"
    _folders = tuple(f"{root}/{folder}" for folder in folders)
    extension().listen(_record, running_line)
    torch.utils.rename_privateuse1_backend("simu")
    torch._register_device_module("simu", simu)  # type: ignore[no-untyped-call]
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _make_accelerate_choose_it()


def _make_accelerate_choose_it() -> None:
    """accelerate knows its kinds of devices by name, and takes the CPU for any other accelerator."""
    try:
        from accelerate.state import PartialState
    except ImportError:
        return
    PartialState.default_device = property(lambda self: torch.device("simu"))


def _record(kind: str, what: str, place: str) -> None:
    events.append(Event(kind, what, place or running_line()))


def running_line() -> str:
    """The innermost line of the project; the main thread's if autograd's thread runs none of its own."""
    frame = _innermost(sys._getframe())
    if frame is None:
        frame = _innermost(sys._current_frames().get(threading.main_thread().ident or 0))
    if frame is None:
        return "?"
    return f"{frame.f_code.co_filename.removeprefix(_root)}:{frame.f_lineno}"


def _innermost(frame: FrameType | None) -> FrameType | None:
    while frame is not None and not frame.f_code.co_filename.startswith(_folders):
        frame = frame.f_back
    return frame


def counted(some: Sequence[Event]) -> list[dict[str, Any]]:
    """Equal events as one, with their number."""
    return [
        {"kind": event.kind, "what": event.what, "place": event.place, "count": count}
        for event, count in sorted(Counter(some).items())
    ]


def set_capacity(device: int, size: int | None) -> None:
    """The memory of a device, in bytes; None for as good as unlimited."""
    extension().set_capacity(device, 1 << 40 if size is None else size)


def issued() -> Counter[str]:
    """How often the devices ran each operator, such as "aten::_flash_attention_forward"."""
    return Counter(extension().issued())


def calls(operator: str) -> int:
    return issued()[operator]


def peaks() -> dict[str, Any]:
    """The largest numbers of bytes since `reset_peaks`, per device and pinned."""
    devices = {
        str(i): {name: simu.memory_stats(i)[f"{name}_bytes.all.peak"] for name in ("allocated", "active")}
        for i in range(simu.device_count())
    }
    pinned = extension().pinned()
    return {**devices, "pinned": pinned["pinned_peak"], "pinned_rounded": pinned["pinned_rounded_peak"]}


@contextmanager
def peaks_kept() -> Iterator[Callable[[], dict[str, Any]]]:
    """The largest of all `peaks` while open, also where the project resets them to measure a part of its work."""
    highest: dict[str, dict[str, int]] = {}
    reset = simu.reset_peak_memory_stats

    def merged() -> dict[str, Any]:
        now = peaks()
        for name, before in highest.items():
            now[name] = {counter: max(value, before[counter]) for counter, value in now[name].items()}
        return now

    def keep_and_reset(device: Any = None) -> None:
        highest.update({name: peak for name, peak in merged().items() if name.isdigit()})
        reset(device)

    with patch.object(simu, "reset_peak_memory_stats", keep_and_reset):
        yield merged


def reset_peaks() -> None:
    for i in range(simu.device_count()):
        simu.reset_peak_memory_stats(i)
    extension().reset_pinned_peak()
