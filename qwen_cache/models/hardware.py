"""The devices of this machine by name, and what tensors take beside their bytes. Imports torch only where it must.

A torch without support for accelerators has none, which its version.py says. Of another one the answer is remembered,
on Linux, until anything changes that decides it: the boot, the driver, the device nodes, the process's control group
and environment, or torch. Free memory is never remembered.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from qwen_cache.errors import DeviceError
from qwen_cache.storage.measured import measured

# ---- devices ---------------------------------------------------------------------------------------------------------

SUPPORTED = ("cuda", "hip", "xpu")
"""The entries of torch's version.py that are None in a build without this kind of accelerator."""
FURTHER_BACKENDS = "torch.backends"
"""The entry points by which other packages bring torch a device."""
DEV = Path("/dev")
NODES = re.compile(r"nvidia.*|kfd|dri|accel.*|dxg|davinci.*")
"""The names in /dev of accelerators, and of folders of them."""
VARIABLES = re.compile(r".*(CUDA|NVIDIA|NVML|HIP|HSA_|ROCR|ROCM|GPU|ZE_|ONEAPI|SYCL|XPU|TORCH|LD_).*")
"""The environment that decides what is visible."""
STATE = (
    "/proc/sys/kernel/random/boot_id",
    "/proc/driver/nvidia/version",
    "/sys/module/amdgpu/version",
    "/sys/module/amdgpu/srcversion",
    "/sys/module/i915/srcversion",
    "/sys/module/xe/srcversion",
    "/proc/self/cgroup",
)
MEMINFO = Path("/proc/meminfo")
CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
NAME = re.compile(r"(cpu|meta|cuda|xpu|mps|hpu|npu|xla|mtia|privateuseone)(:(0|[1-9]\d*))?")
"""The names that torch has for devices; it may know more."""


def device_names() -> list[str]:
    """The names of all devices of this machine, the CPU last."""
    if sys.modules.get("torch") is None and sys.platform == "linux":
        if find_spec("torch") is None or not has_support():
            return ["cpu"]
        return list(measured({"what": "devices", **_state_of_machine()}, _ask_for_names, quietly=True))
    return _ask_for_names()


def device_memory(name: str) -> int | None:
    """The bytes of a device's memory; None for another machine's, and where torch cannot say."""
    if not is_accelerator_name(name) or name not in device_names():
        return None
    if sys.modules.get("torch") is None and sys.platform == "linux":
        key = {"what": "memory of a device", "device": name, **_state_of_machine()}
        found: int | None = measured(key, lambda: _ask_for_memory(name), quietly=True)
        return found
    return _ask_for_memory(name)


def device_title(name: str) -> str | None:
    """The name that its driver gives a device; None for another machine's, and where torch cannot say."""
    if not is_accelerator_name(name) or name not in device_names():
        return None
    if sys.modules.get("torch") is None and sys.platform == "linux":
        key = {"what": "title of a device", "device": name, **_state_of_machine()}
        found: str | None = measured(key, lambda: _ask_for_title(name), quietly=True)
        return found
    return _ask_for_title(name)


def host_memory() -> tuple[int | None, int | None]:
    """Bytes of host memory in total and free, within the limit of the container where there is one."""
    fields = {name: rest.split() for name, _, rest in (line.partition(":") for line in _lines(MEMINFO))}
    total, free = (int(fields[name][0]) * 1024 if name in fields else None for name in ("MemTotal", "MemAvailable"))
    if total is None and "SC_PHYS_PAGES" in getattr(os, "sysconf_names", ()):
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    bounds = [int(line) for path in CONTAINER_LIMITS for line in _lines(path) if line.isdigit()]
    return (total and min([total, *bounds])), (free and min([free, *bounds]))


def _lines(path: Path) -> list[str]:
    return (_content(str(path)) or "").splitlines()


def _ask_for_names() -> list[str]:
    import torch

    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # there is one
        return [f"{kind}:{i}" for i in range(torch.accelerator.device_count())] + ["cpu"]
    return ["cpu"]


def _ask_for_memory(name: str) -> int | None:
    import torch

    module = torch.get_device_module(torch.device(name))
    with suppress(AttributeError, RuntimeError):  # not for MPS, nor for some Intel GPUs
        return int(module.mem_get_info(torch.device(name))[1])
    return None


def _ask_for_title(name: str) -> str | None:
    import torch

    module = torch.get_device_module(torch.device(name))
    with suppress(AttributeError, RuntimeError):
        return str(module.get_device_name(torch.device(name)))
    return None


def has_support(version: Path | None = None) -> bool:
    """False if the installed torch was built for CPUs alone, and no package brings it another device. `version` is its
    version.py."""
    if version is None:
        spec = find_spec("torch")
        version = Path(str(spec and spec.origin)).with_name("version.py")
    try:
        body = ast.parse(version.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return True
    given: dict[str, Any] = {}
    for line in body:
        target = line.targets[0] if isinstance(line, ast.Assign) else getattr(line, "target", None)
        if isinstance(target, ast.Name):
            value = getattr(line, "value", None)
            given[target.id] = value.value if isinstance(value, ast.Constant) else ...
    built = any(given.get(name, ...) is not None for name in SUPPORTED)
    return built or bool(entry_points(group=FURTHER_BACKENDS))


def _state_of_machine() -> dict[str, Any]:
    """Everything that decides which devices torch finds."""
    cards = sorted(Path("/proc/driver/nvidia").rglob("information"))
    spec = find_spec("torch")
    torch = Path(str(spec and spec.origin)).with_name("version.py")
    return {
        "torch": [str(torch), *_status(torch)],
        "environment": sorted(item for item in os.environ.items() if VARIABLES.fullmatch(item[0])),
        "nodes": [[str(path), *_status(path)] for path in _nodes(DEV)],
        "state": [_content(path) for path in STATE],
        "cards": [[str(path), _content(str(path))] for path in cards],
        "user": [os.getuid(), sorted(os.getgroups())],
    }


def _nodes(folder: Path) -> list[Path]:
    found = sorted(path for path in folder.glob("*") if NODES.fullmatch(path.name))
    return [each for path in found for each in ([path, *sorted(path.rglob("*"))] if path.is_dir() else [path])]


def _status(path: Path) -> list[int]:
    try:
        status = path.lstat()
    except OSError:
        return []
    return [status.st_ino, status.st_rdev, status.st_mode, status.st_uid, status.st_gid, status.st_ctime_ns]


def _content(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def choose_name(name: str, option: str, preferred: int = 0) -> str:
    """The device `name`; `auto` is accelerator number `preferred`, else the last accelerator, else the CPU.

    DeviceError, with the name of the option, if this machine does not have it.
    """
    devices = device_names()
    if name == "auto":
        accelerators = devices[:-1]
        return accelerators[min(preferred, len(accelerators) - 1)] if accelerators else "cpu"
    for each in (name, f"{name}:0"):
        if each in devices:
            return each
    raise DeviceError(f"{option}: no such device on this machine", expected=" or ".join(devices), found=name)


def choose_names(names: str, option: str, preferred: int = 0) -> list[str]:
    """The devices in `names`, separated by commas; DeviceError names `option`."""
    return [choose_name(name.strip(), option, preferred) for name in names.split(",")]


def is_accelerator_name(name: str) -> bool:
    """True for the name of a real device other than the CPU."""
    return name.partition(":")[0] not in ("cpu", "meta")


def is_device_name(name: str) -> bool:
    """True if torch has devices of this name, here or on another machine."""
    if NAME.fullmatch(name):
        return True
    import torch

    try:
        torch.device(name)
    except RuntimeError:
        return False
    return True


# ---- placement -------------------------------------------------------------------------------------------------------


Kind = Literal["none", "int8", "fp8", "nf4", "int8_convrot", "fp8_w8a8"]
"""How weights are quantised on loading."""


@dataclass(frozen=True)
class Placement:
    """The settings `cache.text_quantization` and `cache.text_offload`, and whether a file is quantised already."""

    quantization: Kind = "none"
    offload: bool = False
    loaded_quantised: bool = False

    def is_partial(self, device: object) -> bool:
        """True if some weights wait in host memory; `device` is one of torch's, or its name."""
        in_less = self.offload or self.loaded_quantised or self.quantization != "none"
        return is_accelerator_name(str(device)) and in_less


WHOLE = Placement()
"""All weights as they were loaded, on one device."""

# ---- bytes -----------------------------------------------------------------------------------------------------------

ON_DEVICE = 2
"""The number of offloaded blocks that the device has memory for."""
RESERVED = 800_000_000  # CUDA context and libraries: 0.4 to 0.8 GB as published for recent GPUs
FRAGMENTATION = 0.03  # of the rest is unusable in the caching allocator; a conservative guess


def with_reserve(size: int) -> int:
    """`size` bytes with the device's own memory."""
    return RESERVED + int((1 + FRAGMENTATION) * size)


def piece_sizes(size: int) -> list[int]:
    """Powers of two, the largest first, that sum to `size` bytes or at most a 64th more.

    torch rounds every pinned allocation up to a power of two, and all blocks in one piece would be up to twice as
    large (ATen/core/CachingHostAllocator.h).
    """
    unit = 1 << max(0, size.bit_length() - 7)
    units = -(-size // unit)
    return [unit << bit for bit in reversed(range(units.bit_length())) if units >> bit & 1]
