"""Where each part of a pipeline runs, and what to do about a device that has too little memory for it.

Refused: offloading where there is nothing to offload from, or of parts that run on several devices.
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
"""Which weights wait in the host's memory: none, those of the parts that do not compute, or all layers that do not."""

CURES = {
    "encoding the prompt": "run the text encoder elsewhere with --text-device, on the cpu for example, or with "
    "--offload sequential",
    "loading the transformer": "set model.quantization=int8, or draw with --offload sequential",
    "denoising": "draw less with --height, --width and --num-images, set model.quantization=int8, or draw with "
    "--offload sequential",
    "loading the VAE": "run it elsewhere with --vae-device, on the cpu for example",
    "encoding an image": "run the VAE elsewhere with --vae-device, on the cpu for example, or with --offload model",
    "decoding the image": "run the VAE elsewhere with --vae-device, on the cpu for example, or with --offload model, "
    "or draw less with --height, --width and --num-images",
}
"""What would help, by what there was too little memory for."""


@dataclass(frozen=True)
class Devices:
    """Where each part runs."""

    vae: torch.device
    text: torch.device
    transformer: torch.device


def choose(device: str, vae: str | None, text: str | None, transformer: str | None) -> Devices:
    """The devices called so on the command line; `device` is for all that is not named."""
    named = {"--vae-device": vae, "--text-device": text, "--transformer-device": transformer}
    return Devices(*(choose_device(name or device, option if name else "--device") for option, name in named.items()))


def check_offload(offload: Offload, devices: Devices) -> None:
    """ConfigError where there is nothing to offload from; VAE and transformer have to take turns on one device."""
    if offload == "none":
        return
    name = f"predict.offload={offload}"
    if devices.transformer.type == "cpu":
        do = "leave it out: on the CPU all weights are in the host's memory anyway"
        raise ConfigError(f"{name} is for an accelerator", found="the transformer on the cpu", do=do)
    if devices.vae != devices.transformer:
        raise ConfigError(
            f"with {name} VAE and transformer take turns on one device",
            found=f"{devices.vae} and {devices.transformer}",
            do="name the same for --vae-device and --transformer-device, or leave --offload out",
        )


@contextmanager
def memory_for(doing: str, device: torch.device) -> Iterator[None]:
    """DeviceError says what there was too little memory for, one of CURES, and what would help."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise DeviceError(f"{device} has too little memory for {doing}", found=reason, do=CURES[doing]) from None
