"""`torch.simu`: what programs call on `torch.cuda`, for the simulated devices.

Names and meanings are those of `torch.cuda`; most functions are torch's own for any accelerator. `backend.install`
registers this module, nothing imports it by its path.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.accelerator import current_device_index as current_device
from torch.accelerator import (
    current_stream,
    device_index,
    empty_cache,
    max_memory_allocated,
    max_memory_reserved,
    memory_allocated,
    memory_reserved,
    memory_stats,
    reset_accumulated_memory_stats,
    reset_peak_memory_stats,
    synchronize,
)
from torch.accelerator import get_memory_info as mem_get_info

from .build import extension

__all__ = [
    "current_device",
    "current_stream",
    "empty_cache",
    "max_memory_allocated",
    "max_memory_reserved",
    "mem_get_info",
    "memory_allocated",
    "memory_reserved",
    "memory_stats",
    "reset_accumulated_memory_stats",
    "reset_peak_memory_stats",
    "synchronize",
]

_initialized = True
AnyDevice = torch.device | str | int | None


def _index(device: AnyDevice) -> int:
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


# ---- devices ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Properties:
    name: str
    total_memory: int
    major: int = 9
    minor: int = 0
    multi_processor_count: int = 1


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def init() -> None: ...


def _lazy_init() -> None: ...


def _is_in_bad_fork() -> bool:
    return False


def device_count() -> int:
    return 2


def set_device(device: AnyDevice) -> None:
    torch.accelerator.set_device_index(_index(device))


class device(device_index):  # noqa: N801 (torch.cuda's name)
    """While this is open, the current device is another."""

    def __init__(self, device: AnyDevice) -> None:
        super().__init__(_index(device))


def get_device_name(device: AnyDevice = None) -> str:
    return "simulated accelerator"


def get_device_capability(device: AnyDevice = None) -> tuple[int, int]:
    return (9, 0)


def get_device_properties(device: AnyDevice = None) -> Properties:
    return Properties(get_device_name(device), mem_get_info(_index(device))[1])


def is_bf16_supported(including_emulation: bool = True) -> bool:
    return True


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


# ---- streams and events ----------------------------------------------------------------------------------------------


class Stream(torch.Stream):
    """A stream of CUDA's constructor: the device is the current one if none is given."""

    def __new__(cls, device: AnyDevice = None, priority: int = 0, **ids: Any) -> Stream:
        if ids:
            return super().__new__(cls, **ids)
        return super().__new__(cls, torch.device("simu", _index(device)), priority=priority)


class Event(torch.Event):
    """An event of CUDA's constructor, which takes no device."""

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        return super().__new__(cls, torch.device("simu"), enable_timing=enable_timing)


@contextmanager
def stream(stream: torch.Stream | None) -> Iterator[None]:
    """While this is open, work is issued on another stream."""
    if stream is None:
        yield
        return
    before_device, before = torch.accelerator.current_device_index(), current_stream(stream.device)
    torch.accelerator.set_stream(stream)
    try:
        yield
    finally:
        torch.accelerator.set_stream(before)
        torch.accelerator.set_device_index(before_device)


def set_stream(stream: torch.Stream) -> None:
    torch.accelerator.set_stream(stream)


def default_stream(device: AnyDevice = None) -> torch.Stream:
    kind = torch._C._autograd.DeviceType.PrivateUse1.value
    return torch.Stream(stream_id=0, device_index=_index(device), device_type=kind)


# ---- random numbers --------------------------------------------------------------------------------------------------


def get_rng_state(device: AnyDevice = None) -> torch.Tensor:
    return extension().default_generator(_index(device)).get_state()  # type: ignore[no-any-return]


def set_rng_state(new_state: torch.Tensor, device: AnyDevice = None) -> None:
    extension().default_generator(_index(device)).set_state(new_state)


def get_rng_state_all() -> list[torch.Tensor]:
    return [get_rng_state(i) for i in range(device_count())]


def set_rng_state_all(new_states: list[torch.Tensor]) -> None:
    for i, state in enumerate(new_states):
        set_rng_state(state, i)


def manual_seed(seed: int) -> None:
    extension().default_generator(_index(None)).manual_seed(seed)


def manual_seed_all(seed: int) -> None:
    for i in range(device_count()):
        extension().default_generator(i).manual_seed(seed)
