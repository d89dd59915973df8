"""The devices of a pipeline's components, and advice when a device has too little memory.

Refused: offloading without an accelerator, and offloading of components on several devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from qwen_cache.errors import ConfigError, DeviceError
from qwen_cache.models.devices import choose_device

Offload = Literal["none", "model", "sequential"]
"""Which weights wait in host memory: none, those of idle components, or those of idle layers."""

FIXES = {
    "encoding the prompt": "run the text encoder elsewhere with --text-device, for example on the cpu, or use "
    "--offload sequential",
    "loading the transformer": "set model.quantization=int8, or use --offload sequential",
    "denoising": "lower --height, --width or --num-images-per-prompt, set model.quantization=int8, or use "
    "--offload sequential",
    "loading the VAE": "run it elsewhere with --vae-device, for example on the cpu",
    "encoding an image": "run the VAE elsewhere with --vae-device, for example on the cpu, or use --offload model",
    "decoding the image": "run the VAE elsewhere with --vae-device, for example on the cpu, use --offload model, "
    "or lower --height, --width or --num-images-per-prompt",
}
"""What to do, by the operation that ran out of memory."""


@dataclass(frozen=True)
class Devices:
    """The device of each component."""

    vae: torch.device
    text: torch.device
    transformer: torch.device


def choose(device: str, vae: str | None, text: str | None, transformer: str | None) -> Devices:
    """The devices named on the command line; `device` is the default."""
    named = {"--vae-device": vae, "--text-device": text, "--transformer-device": transformer}
    return Devices(*(choose_device(name or device, option if name else "--device") for option, name in named.items()))


def check_offload(offload: Offload, devices: Devices) -> None:
    """Raise ConfigError unless VAE and transformer take turns on one accelerator."""
    if offload == "none":
        return
    name = f"predict.offload={offload}"
    if devices.transformer.type == "cpu":
        do = "leave it out: on the CPU all weights are in host memory anyway"
        raise ConfigError(f"{name} is for an accelerator", found="the transformer on the cpu", do=do)
    if devices.vae != devices.transformer:
        raise ConfigError(
            f"with {name}, VAE and transformer take turns on one device",
            found=f"{devices.vae} and {devices.transformer}",
            do="name the same device for --vae-device and --transformer-device, or leave --offload out",
        )


@contextmanager
def memory_for(doing: str, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a DeviceError with advice; `doing` is a key of FIXES."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise DeviceError(f"{device} has too little memory for {doing}", found=reason, do=FIXES[doing]) from None
