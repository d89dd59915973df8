"""Devices and dtypes by the names that users give, and what a device can do.

Nothing else asks for a type of device, except for what exists on CUDA alone: so CUDA, ROCm, XPU and MPS take the same
path. Importing changes no setting of torch; a model in float32 does (`full_float32`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch

from qwen_cache.errors import DeviceError


def available_devices() -> list[str]:
    """The names of all devices of this machine."""
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator().type  # type: ignore[union-attr]  # there is one
        return [f"{kind}:{i}" for i in range(torch.accelerator.device_count())] + ["cpu"]
    return ["cpu"]


def choose_devices(names: str, option: str, preferred: int = 0) -> list[torch.device]:
    """The devices in `names`, separated by commas; DeviceError names `option`."""
    return [choose_device(name.strip(), option, preferred) for name in names.split(",")]


def choose_device(name: str, option: str, preferred: int = 0) -> torch.device:
    """The device `name`; `auto` is accelerator number `preferred`, else the last accelerator, else the CPU.

    DeviceError, with the name of the option, if this machine does not have it.
    """
    devices = available_devices()
    if name == "auto":
        accelerators = devices[:-1]
        return torch.device(accelerators[min(preferred, len(accelerators) - 1)] if accelerators else "cpu")
    if name in devices:
        return torch.device(name)
    if f"{name}:0" in devices:
        return torch.device(f"{name}:0")
    raise DeviceError(f"{option}: no such device on this machine", expected=" or ".join(devices), found=name)


def accelerator() -> torch.device | None:
    """This process's current accelerator, None without one."""
    return torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None


def is_accelerator(device: torch.device) -> bool:
    """Whether it is a real device other than the CPU."""
    return device.type not in ("cpu", "meta")


def device_module(device: torch.device) -> Any:
    """torch's module for this type of device, such as `torch.cuda`."""
    return torch.get_device_module(device)


def has_streams(device: torch.device) -> bool:
    """Whether it can copy from pinned host memory while it computes; MPS has no streams, and shares the memory."""
    return is_accelerator(device) and hasattr(device_module(device), "Stream")


def reports_memory(device: torch.device) -> bool:
    """Whether torch can say how much of its memory is used and free: not for MPS, nor for some Intel GPUs."""
    if not is_accelerator(device) or not hasattr(device_module(device), "mem_get_info"):
        return False
    with suppress(RuntimeError):
        device_module(device).mem_get_info(device)
        return True
    return False


def new_stream(device: torch.device) -> Any | None:
    """A stream of `device` that begins after all that was issued so far, such as weights; None without streams."""
    if not has_streams(device):
        return None
    module = device_module(device)
    stream = module.Stream(device)
    stream.wait_stream(module.current_stream(device))
    return stream


@contextmanager
def on_stream(stream: Any | None) -> Iterator[None]:
    """Let this thread issue its work to `stream`; its results must be copied to the host inside, or waited for."""
    if stream is None:
        yield
    else:
        with device_module(stream.device).stream(stream):
            yield


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor from host memory. On devices with streams through pinned memory: then the host does not wait.

    torch keeps pinned memory until what was sent from it has arrived. Without streams nothing says when that is. An
    expanded tensor cannot be pinned.
    """
    if not has_streams(device):
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def join_on_device(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """`to_device` of each, one after the other; a single one is not copied again."""
    sent = [to_device(tensor, device) for tensor in tensors]
    return sent[0] if len(sent) == 1 else torch.cat(sent)


def full_float32() -> None:
    """Compute float32 in float32, everywhere in this process and until it ends.

    torch lets cuDNN compute convolutions in TF32, whose 10 bits give errors of 1e-3, and an environment may ask for the
    same in matrix products. These switches belong to the process, and its threads share them. torch has an
    older and a newer API for them, and refuses to read the older one where they disagree.
    """
    backends: Any = torch.backends  # the stubs lack the new switches
    torch.set_float32_matmul_precision("highest")
    backends.cudnn.allow_tf32 = False
    for switch in (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul):
        switch.fp32_precision = "ieee"


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of a setting: `bfloat16` or `float32`."""
    return {"bfloat16": torch.bfloat16, "float32": torch.float32}[name]
