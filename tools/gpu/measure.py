"""The measurements of all parts of the GPU report: the card, medians of synchronised repeats, peaks of its memory.

`UnavailableError` says why something cannot be measured here; the report shows its reason in place of numbers. All
times are those of the host's clock, from one moment when the device has nothing to do to the next.
"""

from __future__ import annotations

import gc
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qwen_cache.models.devices import choose_device, device_module, is_accelerator, reports_memory
from qwen_cache.models.hardware import host_memory

ROOT = Path(__file__).parents[2]
SIMULATED = "simu"
"""The type of the device of tests/simulated_device, on which the tests run the whole report."""
Row = dict[str, Any]
"""The numbers of one case, by name."""
Case = tuple[str, Callable[[], Row]]
Cases = Iterator[Case]


class UnavailableError(Exception):
    """This card, or this machine, cannot run the case; the message says why."""


@dataclass(frozen=True)
class Card:
    """The accelerator that is measured."""

    device: torch.device
    small: bool
    """Tiny models in place of those of real size: for the tests, the numbers mean nothing."""
    memory: int
    """Bytes that this process may allocate on it."""

    @property
    def name(self) -> str:
        return str(device_module(self.device).get_device_name(self.device))

    def synchronize(self) -> None:
        torch.accelerator.synchronize(self.device)


def open_card(name: str, *, small: bool = False, gigabytes: float | None = None) -> Card:
    """The accelerator `name` as the current device, with at most `gigabytes` of its memory.

    Raises DeviceError for a device that this machine lacks, and UnavailableError for the CPU.
    """
    if name.startswith(SIMULATED):
        install_simulated_device()
    device = choose_device(name, "--device")
    if not is_accelerator(device) or not reports_memory(device):
        raise UnavailableError(f"no accelerator to measure on this machine: {device} is not one")
    torch.accelerator.set_device_index(device.index or 0)
    memory = free_memory(device)
    if gigabytes is not None:
        limit_memory(device, int(gigabytes * 1e9))
        memory = min(memory, int(gigabytes * 1e9))
    return Card(device, small, memory)


def install_simulated_device() -> None:
    """Make torch's accelerator the simulated one, with the kernel that packed rows use on CUDA."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    from qwen_train.model import segments
    from tests.simulated_device import backend

    backend.install(ROOT)
    segments.runs_flash = lambda device: device.type == SIMULATED  # type: ignore[assignment]


# ---- time ------------------------------------------------------------------------------------------------------------


def timed(
    work: Callable[[], object], card: Card, *, least: int = 3, most: int = 10, budget: float = 30.0, warm_up: int = 2
) -> Row:
    """Median seconds of `work`, their spread (range over median), and the number of repeats.

    At least `least` repeats, then more for `budget` seconds.
    """
    least, most, warm_up = (2, 2, 1) if card.small else (least, most, warm_up)
    for _ in range(warm_up):
        work()
    card.synchronize()
    seconds: list[float] = []
    while len(seconds) < least or (len(seconds) < most and sum(seconds) < budget):
        begin = time.perf_counter()
        work()
        card.synchronize()
        seconds.append(time.perf_counter() - begin)
    return summary(seconds)


def summary(seconds: list[float]) -> Row:
    median = statistics.median(seconds)
    return {"seconds": median, "spread": (max(seconds) - min(seconds)) / median, "repeats": len(seconds)}


# ---- memory ----------------------------------------------------------------------------------------------------------


def free_memory(device: torch.device) -> int:
    """Free bytes of the device; the caching allocator of this process holds none yet."""
    return int(device_module(device).mem_get_info(device)[0])


def limit_memory(device: torch.device, size: int) -> None:
    """Let this process allocate no more than `size` bytes, as on a smaller card."""
    if device.type == SIMULATED:
        from tests.simulated_device import backend

        backend.set_capacity(device.index or 0, size)
        return
    module = device_module(device)
    if not hasattr(module, "set_per_process_memory_fraction"):
        raise UnavailableError(f"the memory of {device} cannot be limited: leave --memory out")
    module.set_per_process_memory_fraction(min(1.0, size / module.mem_get_info(device)[1]), device)


def free_host_memory() -> float:
    """Bytes, within the limit of the container; as good as unlimited where the system does not say."""
    return host_memory()[1] or math.inf


def need_host_memory(size: float, what: str) -> None:
    """UnavailableError unless the host has `size` bytes and a tenth more for everything else."""
    if (free := free_host_memory()) < 1.1 * size:
        raise UnavailableError(f"{what} takes {size / 1e9:.0f} GB of host memory, and {free / 1e9:.0f} GB are free")


def forget(card: Card) -> int:
    """Free what an earlier case left behind, and begin to count peaks; the bytes of tensors that stay, such as cached
    RoPE tables."""
    gc.collect()
    card.synchronize()
    module = device_module(card.device)
    module.empty_cache()
    module.reset_peak_memory_stats(card.device)
    return int(module.memory_allocated(card.device))


def peaks(card: Card, left: int = 0) -> Row:
    """The peaks since `forget`: bytes of tensors without those that were left, and bytes that torch took for all."""
    module = device_module(card.device)
    return {
        "allocated": int(module.max_memory_allocated(card.device)) - left,
        "reserved": int(module.max_memory_reserved(card.device)),
    }
