"""The plan of a build for memory: what each of its devices needs, what it has, and which settings need less.

A device that this machine does not have is planned for too, when it is named. Imports torch when it is asked, never
before.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.plan import PlannedSample
from qwen_cache.errors import DeviceError
from qwen_cache.models.family import estimate_tokens
from qwen_cache.models.folder import read_config
from qwen_cache.settings.sections import CacheConfig
from qwen_cache.sources.sizes import Size, calculate_dimensions
from qwen_cache.terminal import human_bytes

if TYPE_CHECKING:
    from qwen_cache.encode.memory import DeviceMemory, TextWork

ENCODERS = {"vae": "VAE", "text_encoder": "text encoder"}
NEEDED = ("torch", "diffusers", "transformers")
OFFLOAD = "cache.text_offload"
SAVINGS: tuple[dict[str, Any], ...] = (
    {"text_offload": True},
    {"text_quantization": "int8"},
    {"text_quantization": "fp8"},
    {"text_quantization": "nf4"},
)
"""Settings that save memory: the one that keeps the embeddings first, then those that change them the least."""


@dataclass(frozen=True)
class DevicePlan:
    """What a build needs on a device."""

    device: str
    memory: DeviceMemory
    capacity: int | None
    """Bytes; None if unknown."""
    savings: tuple[tuple[str, int], ...] = ()
    """Settings under which it fits, and what it needs then; empty if it fits anyway."""
    ignores_offload: bool = False
    """Whether `cache.text_offload` is set for a device that is the host."""

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.memory.least <= self.capacity

    @property
    def advice(self) -> str:
        """What to do if it does not fit."""
        options = [f"{setting} ({human_bytes(size)})" for setting, size in self.savings]
        return f"set {' or '.join(options)}" if options else "name another device with --vae-device or --text-device"

    @property
    def in_words(self) -> list[str]:
        """For the terminal."""
        memory, names = self.memory, " and ".join(ENCODERS[name] for name in self.memory.encoders)
        size = "" if self.capacity is None else f" of {human_bytes(self.capacity)}"
        line = f"{self.device}: {human_bytes(memory.least)}{size} for {names}, weights {human_bytes(memory.weights)}"
        if memory.at_once > memory.least:
            line += f"; {human_bytes(memory.at_once)} without tiles and turns"
        waiting = sum(each.host for each in memory.encoders.values())
        return [
            line,
            *([f"{human_bytes(waiting)} of weights wait in host memory"] if waiting else []),
            *([f"this may not fit: {self.advice}"] if self.fits is False else []),
            *([f"{OFFLOAD} has no effect on the CPU"] if self.ignores_offload else []),
        ]

    def as_json(self) -> dict[str, Any]:
        return {
            "device": self.device,
            "capacity": self.capacity,
            "needed": self.memory.least,
            "at_once": self.memory.at_once,
            "fits": self.fits,
            "encoders": {
                name: {"weights": each.weights, "activations": each.activations, "least_activations": each.least}
                for name, each in self.memory.encoders.items()
            },
            "host": sum(each.host for each in self.memory.encoders.values()),
            "savings": [{"set": setting, "needed": size} for setting, size in self.savings],
        }


def memory_lines(devices: Sequence[DevicePlan]) -> list[str]:
    """The plan for the terminal."""
    return [line for planned in devices for line in planned.in_words]


def has_accelerator() -> bool:
    """Whether this machine has one."""
    from qwen_cache.models.devices import accelerator

    return accelerator() is not None


def plan_devices(job: BuildJob, samples: Sequence[PlannedSample]) -> list[DevicePlan] | None:
    """What encoding `samples` needs of each device; None if the packages that know it are not installed."""
    if any(find_spec(name) is None for name in NEEDED):
        return None
    images = [size for sample in samples for _, _, size in sample.images]
    work = _longest(job, samples)
    image = max(images, key=lambda size: size[0] * size[1], default=None)
    return [_with_savings(each, job, image, work) for each in _planned(job, job.config.cache, image, work)]


def _longest(job: BuildJob, samples: Sequence[PlannedSample]) -> TextWork:
    """The prompt with the most tokens, those of its images included."""
    from qwen_cache.encode.memory import TextWork

    family = job.model.family
    longest = max(samples, key=lambda s: estimate_tokens(family, s.row.prompt, job.encoder_pixels(s))[0])
    controls = longest.sizes[1:]
    if not family.one_condition_image:
        count = len(longest.row.controls)
        originals = longest.originals[len(longest.originals) - count :]
        controls = tuple(calculate_dimensions(job.condition_image_size, size) for size in originals)
    return TextWork(controls, estimate_tokens(family, longest.row.prompt, [])[0])


def _planned(job: BuildJob, cache: CacheConfig, image: Size | None, work: TextWork) -> list[DevicePlan]:
    from qwen_cache.encode.memory import Component, DeviceMemory, text_lane, vae_lane
    from qwen_cache.models.devices import Placement, is_accelerator, torch_dtype

    placement, dtype = Placement(cache.text_quantization, cache.text_offload), torch_dtype(cache.dtype)
    vae, text = (
        json.dumps(read_config(job.model.component(name) / "config.json"), sort_keys=True)
        for name in ("vae", "text_encoder")
    )
    encoders: dict[str, dict[str, Component]] = defaultdict(dict)
    for device in _devices(cache.vae_device, "--vae-device", preferred=0):
        encoders[str(device)]["vae"] = vae_lane(vae, image, dtype)
    for device in _devices(cache.text_device, "--text-device", preferred=1):
        partial = placement.is_partial(device)
        encoders[str(device)]["text_encoder"] = text_lane(text, work, dtype, placement, partial=partial)
    return [
        DevicePlan(
            name,
            DeviceMemory(each, is_accelerator(_device(name))),
            _capacity(name),
            ignores_offload=placement.offload and "text_encoder" in each and not is_accelerator(_device(name)),
        )
        for name, each in encoders.items()
    ]


def _with_savings(planned: DevicePlan, job: BuildJob, image: Size | None, work: TextWork) -> DevicePlan:
    """With the settings under which it fits, if it does not."""
    if planned.fits is not False or "text_encoder" not in planned.memory.encoders:
        return planned
    savings = []
    for changes in SAVINGS:
        cache = job.config.cache.model_copy(update=changes)
        changed = next(each for each in _planned(job, cache, image, work) if each.device == planned.device)
        if changed.fits and cache != job.config.cache:
            words = " ".join(f"cache.{name}={json.dumps(value)}" for name, value in changes.items())
            savings.append((words.replace('"', ""), changed.memory.least))
    return replace(planned, savings=tuple(savings))


def _device(name: str) -> Any:
    import torch

    return torch.device(name)


def _devices(names: str, option: str, preferred: int) -> list[Any]:
    """The devices that the build would choose here; those that this machine lacks as they are named."""
    from qwen_cache.models.devices import choose_devices

    try:
        return choose_devices(names, option, preferred)
    except DeviceError:
        try:
            return [_device(name.strip()) for name in names.split(",")]
        except RuntimeError:
            raise DeviceError(f"{option}: no device has this name", found=names) from None


def _capacity(name: str) -> int | None:
    """The memory of a device of this machine, if torch can say it."""
    from qwen_cache.models.devices import available_devices, device_module, reports_memory

    device = _device(name)
    if name not in available_devices() or not reports_memory(device):
        return None
    return int(device_module(device).mem_get_info(device)[1])
