"""The machine and its limits: names and versions, the peak of matrix products, and how fast bytes are copied.

The peak that all utilisations refer to is measured here, by products of large matrices in bfloat16, not taken from a
table: the best median over a few sizes.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import version
from typing import Any

import torch

from qwen_cache.models.devices import device_module, has_streams
from qwen_cache.models.hardware import host_memory

from .measure import Card, Cases, Row, timed

SIDES = (4096, 8192, 16384)
COPIED = 1 << 30  # bytes; a block of the 20B transformer has 0.7 GB
PACKAGES = ("torch", "diffusers", "transformers", "accelerate", "peft", "torchao", "bitsandbytes")


def cases(part: str, card: Card) -> Cases:
    yield "machine", lambda: {"facts": facts(card)}
    yield "products in bfloat16", lambda: best_product(card)
    for pinned in (True, False):
        for up in (True, False):
            where = "to the device" if up else "to the host"
            yield f"{'pinned' if pinned else 'pageable'} memory {where}", lambda p=pinned, u=up: copy_speed(card, p, u)
    yield "within the device", lambda: device_copy_speed(card)


def facts(card: Card) -> dict[str, str]:
    """Names, sizes and versions."""
    module = device_module(card.device)
    total = int(module.mem_get_info(card.device)[1])
    host = f"{(host_memory()[0] or 0) / 1e9:.0f} GB, {os.cpu_count()} cores, {platform.platform()}"
    return {
        "card": card.name,
        "memory of the card": f"{total / 1e9:.1f} GB, {card.memory / 1e9:.1f} GB of it free for this report",
        "capability": ".".join(map(str, module.get_device_capability(card.device))),
        "driver": of_driver("driver_version"),
        "power limit": of_driver("power.limit"),
        "highest clock": of_driver("clocks.max.sm"),
        "CUDA": str(torch.version.cuda or torch.version.hip or "none"),
        "host": host,
        "Python": platform.python_version(),
        **{name: installed(name) for name in PACKAGES},
    }


def installed(package: str) -> str:
    try:
        return version(package)
    except ModuleNotFoundError:
        return "not installed"


def of_driver(question: str) -> str:
    """The answer of the driver's own tool for the first card."""
    command = ["nvidia-smi", f"--query-gpu={question}", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return "unknown: there is no nvidia-smi"
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stdout.partition("\n")[0].strip() or "unknown"


def best_product(card: Card) -> Row:
    """TFLOP/s of the size that is multiplied fastest."""
    return max((product(card, side) for side in ((64,) if card.small else SIDES)), key=lambda row: row["tflops"])


def product(card: Card, side: int) -> Row:
    a, b = (torch.randn(side, side, device=card.device).bfloat16() for _ in range(2))
    times = 1 if card.small else max(1, 4 * (16384 // side) ** 3 // 8)  # 0.02 to 0.1 s on a fast card

    def multiply() -> None:
        for _ in range(times):
            torch.mm(a, b)

    row = timed(multiply, card, least=5, most=20, budget=10)
    return {**row, "side": side, "tflops": times * 2 * side**3 / row["seconds"] / 1e12}


def copy_speed(card: Card, pinned: bool, up: bool) -> Row:
    """GB/s between host and device."""
    size = 1 << 12 if card.small else COPIED
    host: Any = torch.ones(size, dtype=torch.uint8)
    host = host.pin_memory() if pinned and has_streams(card.device) else host
    device = torch.ones(size, dtype=torch.uint8, device=card.device)
    to, source = (device, host) if up else (host, device)
    row = timed(lambda: to.copy_(source, non_blocking=pinned), card, least=5)
    return {**row, "gigabytes_per_second": size / row["seconds"] / 1e9}


def device_copy_speed(card: Card) -> Row:
    """GB/s of a copy on the device; every byte is read and written."""
    size = 1 << 12 if card.small else COPIED
    source = torch.ones(size, dtype=torch.uint8, device=card.device)
    to = torch.empty_like(source)
    row = timed(lambda: to.copy_(source), card, least=5)
    return {**row, "gigabytes_per_second": 2 * size / row["seconds"] / 1e9}
