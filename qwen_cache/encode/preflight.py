"""Before the first sample: devices, memory, the disk, and loading the encoders."""

from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.encode.builder import BuildJob, disk_bytes, free_bytes
from qwen_cache.encode.components import Component, DeviceMemory, TextWork
from qwen_cache.encode.memory import text_memory, vae_memory
from qwen_cache.encode.plan import RECIPE, BuildPlan, PlannedSample
from qwen_cache.encode.recipe import recipe_changes
from qwen_cache.errors import ConfigError, DeviceError, QwenCacheError, SourceError
from qwen_cache.format.update import Existing, Update
from qwen_cache.models.family import estimate_tokens
from qwen_cache.models.folder import ModelFolder, read_config
from qwen_cache.models.hardware import (
    Placement,
    choose_names,
    device_memory,
    device_names,
    is_accelerator_name,
    is_device_name,
)
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import CacheConfig
from qwen_cache.sources.detect import advice
from qwen_cache.sources.sizes import Size, calculate_dimensions
from qwen_cache.storage.files import cache_home
from qwen_cache.storage.remote import Location, is_remote
from qwen_cache.terminal import console, human_bytes, plural
from qwen_cache.text import plain, shell_line

if TYPE_CHECKING:
    from qwen_cache.encode.lanes import Lanes

# ---- device plan -----------------------------------------------------------------------------------------------------
# The plan of a build for memory: what each of its devices needs, what it has, and which settings need less.
#
# A device that this machine does not have is planned for too, when it is named. Imports torch only for what is not
# remembered.

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
    """The memory that a build needs on a device."""

    device: str
    memory: DeviceMemory
    capacity: int | None
    """Bytes; None if unknown."""
    savings: tuple[tuple[str, int], ...] = ()
    """Settings under which it fits, and what it needs then; empty if it fits anyway."""
    ignores_offload: bool = False
    """True if `cache.text_offload` is set for a device that is the host."""

    @property
    def fits(self) -> bool | None:
        return None if self.capacity is None else self.memory.least <= self.capacity

    @property
    def advice(self) -> str:
        """Advice for a build that does not fit."""
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
    """True if this machine has one."""
    return len(device_names()) > 1


def plan_devices(job: BuildJob, samples: Sequence[PlannedSample]) -> list[DevicePlan] | None:
    """The memory that encoding `samples` needs on each device; None if the packages that know it are not installed."""
    if any(find_spec(name) is None for name in NEEDED):
        return None
    images = [size for sample in samples for _, _, size in sample.images]
    work = _longest(job, samples)
    image = max(images, key=lambda size: size[0] * size[1], default=None)
    return [_with_savings(each, job, image, work) for each in _planned(job, job.config.cache, image, work)]


def _longest(job: BuildJob, samples: Sequence[PlannedSample]) -> TextWork:
    """The prompt with the most tokens, those of its images included."""
    family = job.model.family

    def tokens(prompt: str, sample: PlannedSample) -> int:
        return estimate_tokens(family, prompt, job.encoder_pixels(sample))[0]

    prompts = ((prompt, sample) for sample in samples for prompt in sample.row.prompts)
    prompt, longest = max(prompts, key=lambda each: tokens(*each))
    controls = longest.sizes[1:]
    if not family.one_condition_image:
        count = len(longest.row.controls)
        originals = longest.originals[len(longest.originals) - count :]
        controls = tuple(calculate_dimensions(job.condition_image_size, size) for size in originals)
    return TextWork(controls, estimate_tokens(family, prompt, [])[0])


def _planned(job: BuildJob, cache: CacheConfig, image: Size | None, work: TextWork) -> list[DevicePlan]:
    placement = _placement(job.model, cache)
    configs = {name: read_config(job.model.component(name) / "config.json") for name in ("vae", "text_encoder")}
    if (file := job.model.text_encoder_file) is not None:
        configs["text_encoder"] = file.config(configs["text_encoder"])
    vae, text = (json.dumps(config, sort_keys=True) for config in configs.values())
    encoders: dict[str, dict[str, Component]] = defaultdict(dict)
    for device in _devices(cache.vae_device, "--vae-device", preferred=0):
        encoders[device]["vae"] = vae_memory(vae, image, cache.dtype)
    for device in _devices(cache.text_device, "--text-device", preferred=1):
        partial = placement.is_partial(device)
        encoders[device]["text_encoder"] = text_memory(text, work, cache.dtype, placement, partial=partial)
    return [
        DevicePlan(
            name,
            DeviceMemory(each, is_accelerator_name(name)),
            _capacity(name),
            ignores_offload=placement.offload and "text_encoder" in each and not is_accelerator_name(name),
        )
        for name, each in encoders.items()
    ]


def _with_savings(planned: DevicePlan, job: BuildJob, image: Size | None, work: TextWork) -> DevicePlan:
    """With the settings under which it fits, if it does not."""
    if planned.fits is not False or "text_encoder" not in planned.memory.encoders:
        return planned
    savings, is_quantised = [], _placement(job.model, job.config.cache).loaded_quantised
    for changes in SAVINGS:
        if is_quantised and "text_quantization" in changes:
            continue  # weights that are loaded quantised are not quantised again
        cache = job.config.cache.model_copy(update=changes)
        changed = next(each for each in _planned(job, cache, image, work) if each.device == planned.device)
        if changed.fits and cache != job.config.cache:
            words = " ".join(f"cache.{name}={json.dumps(value)}" for name, value in changes.items())
            savings.append((words.replace('"', ""), changed.memory.least))
    return replace(planned, savings=tuple(savings))


def _placement(model: ModelFolder, cache: CacheConfig) -> Placement:
    """The placement of the text encoder's weights."""
    file = model.text_encoder_file
    is_quantised = file is not None and file.quantization is not None
    return Placement(cache.text_quantization, cache.text_offload, is_quantised)


def _devices(names: str, option: str, preferred: int) -> list[str]:
    """The devices that the build would choose here; those that this machine lacks as they are named."""
    try:
        return choose_names(names, option, preferred)
    except DeviceError:
        named = [name.strip() for name in names.split(",")]
        if all(map(is_device_name, named)):
            return named
        raise DeviceError(f"{option}: no device has this name", found=names) from None


def _capacity(name: str) -> int | None:
    """The memory of a device of this machine, if torch can say it."""
    return device_memory(name)


# ---- obstacles -------------------------------------------------------------------------------------------------------
# What stops a build after its plan and before an encoder is loaded; a dry run reports it.
#
# Unusable rows, no usable row, too little disk space, too little memory of a device, and a recipe that changed by
# accident: a build that would encode more than half of the cached samples again needs `--replace`. Samples that need no
# encoder (a new mask only, or a copy from a replaced shard) do not count.

SURE = 0.9  # of the estimated bytes: a build that may just fit is not refused


def unusable_rows(job: BuildJob, plan: BuildPlan) -> SourceError | None:
    """The error for rows that cannot be used, unless they are to be skipped."""
    if not plan.problems or job.config.data.on_error == "skip":
        return None
    do = advice(len(plan.problems), len(plan.samples), "--on-error skip")
    what = f"nothing will be encoded until {'this is' if len(plan.problems) == 1 else 'these are'} fixed"
    return SourceError(what, found=plural(len(plan.problems), "problem"), do=do)


def empty_source(job: BuildJob, existing: Existing, plan: BuildPlan) -> SourceError | None:
    """The error for a build without a sample, unless it builds an empty slice."""
    names = existing.of_recipe(job.recipe_name).each("name")
    if plan.samples or (job.slice and all(job.keeps(name) for name in names)):
        return None
    return SourceError("no usable sample is left, so there is nothing to build")


class RecipeChangedError(ConfigError):
    """A build would replace most of the cache because of its settings, which may be an accident."""

    def __init__(self, what: str, where: Location, commands: Sequence[str]) -> None:
        do = "keep these samples too, in another folder or as another recipe, or replace them"
        super().__init__(what, where=where, do=do)
        self.commands = tuple(commands)
        """The command lines to choose from."""

    def __str__(self) -> str:
        return super().__str__() + "".join(f"\n    {plain(command)}" for command in getattr(self, "commands", ()))


def changed_recipe(
    job: BuildJob, existing: Existing, plan: BuildPlan, command: Sequence[str]
) -> RecipeChangedError | None:
    """The error for a build that would encode more than half of the cached samples again for another recipe, or drop
    those of other slices for it.

    `command` has the arguments of the command line, from which the commands in the message are made.
    """
    again = {sample.row.name for sample in plan.to_encode if any(r.startswith(RECIPE) for r in sample.reasons)}
    differs = existing.recipes.get(job.recipe_name, job.recipe) != job.recipe
    cached = existing.of_recipe(job.recipe_name).column("name").unique().to_pylist() if again or differs else []
    of_slices = {name for name in cached if differs and job.keeps(name)}
    if not of_slices and 2 * len(again) <= len(cached):
        return None
    again |= of_slices
    changes = "; ".join(recipe_changes(existing.recipes[job.recipe_name], job.recipe))
    samples = f"{len(again)} of {plural(len(cached), 'cached sample')}"
    folder = next(name for i in itertools.count(2) if not Path(name := f"{job.folder}-{i}").exists())
    recipe = next(name for i in itertools.count(2) if (name := f"{job.recipe_name}-{i}") not in existing.recipes)
    left = [word for i, word in enumerate(command) if word != "--out" and command[i - 1 : i] != ["--out"]]
    without_out = [word for word in left if not word.startswith("--out=")]
    return RecipeChangedError(
        f"{samples} would be encoded again, because the recipe changed: {changes}",
        job.folder,
        [
            shell_line(["qwen-cache", *without_out, "--out", folder]),
            shell_line(["qwen-cache", *command, "--set", f"cache.recipe={recipe}"]),
            shell_line(["qwen-cache", *command, "--replace"]),
        ],
    )


def full_disk(job: BuildJob, plan: BuildPlan, update: Update) -> QwenCacheError | None:
    """The error for a build that does not fit on the disk."""
    needed, free = disk_bytes(job, plan, update), free_bytes(job.folder)
    if free is None or SURE * needed <= free:
        return None
    where: Location = job.folder
    do = "make room (`qwen-cache gc` removes replaced shards), or name a folder on another disk with --out"
    if is_remote(where):  # shards wait here for their upload
        where = cache_home()
        do = "make room, choose a smaller cache.shard_size, or set XDG_CACHE_HOME to a folder of another disk"
    return QwenCacheError(
        "the disk has too little space for this build",
        where=where,
        expected=f"about {human_bytes(needed)}",
        found=human_bytes(free),
        do=do,
    )


def little_memory(devices: Sequence[DevicePlan]) -> DeviceError | None:
    """The error for a device that cannot hold the encoders, whatever its driver takes."""
    for planned in devices:
        if planned.capacity is not None and SURE * planned.memory.tensors > planned.capacity:
            return DeviceError(
                f"{planned.device} has too little memory for the encoders",
                expected=f"about {human_bytes(planned.memory.least)}",
                found=human_bytes(planned.capacity),
                do=planned.advice,
            )
    return None


# ---- load ------------------------------------------------------------------------------------------------------------
# Both encoders, loaded on the devices that the settings name.
#
# Importing this imports no torch: a build with nothing to do loads none.

VAE_BATCH_PIXELS, TEXT_BATCH_TOKENS = 2 * 1024 * 1024, 2048  # on a GPU


def check_devices(config: Config) -> None:
    """DeviceError if a named device does not exist, or cannot compute with the quantised weights that the settings ask
    for; ConfigError if a package for them is missing. Before anything is read."""
    devices = {"--vae-device": config.cache.vae_device, "--text-device": config.cache.text_device}
    named = {option: name for option, name in devices.items() if name != "auto"}
    for option, name in named.items():
        choose_names(name, option)
    if (quantization := config.cache.text_quantization) != "none":
        from qwen_cache.models.devices import SETTING, choose_devices
        from qwen_cache.models.quantization import check_quantization

        for device in choose_devices(config.cache.text_device, "--text-device", preferred=1):
            check_quantization(quantization, SETTING, device)


def load_lanes(job: BuildJob) -> Lanes:
    """Both encoders, each on its devices.

    The batches of a GPU are large enough to hide launch overhead: 2048 tokens are 30 TFLOP of a 7B model. A CPU gains
    nothing from batches.
    """

    from qwen_cache.encode.lanes import Lanes
    from qwen_cache.encode.recipe import EditMasks
    from qwen_cache.encode.text import TextEncoder
    from qwen_cache.encode.vae import VaeEncoder
    from qwen_cache.format.identity import recipe_id
    from qwen_cache.models.devices import choose_devices, is_accelerator, torch_dtype

    cache = job.config.cache
    vae_devices = choose_devices(cache.vae_device, "--vae-device", preferred=0)
    text_devices = choose_devices(cache.text_device, "--text-device", preferred=1)
    dtype = torch_dtype(cache.dtype)
    pixels = cache.vae_batch_pixels or (VAE_BATCH_PIXELS if is_accelerator(vae_devices[0]) else 1)
    tokens = cache.text_batch_tokens or (TEXT_BATCH_TOKENS if is_accelerator(text_devices[0]) else 1)
    vae = [VaeEncoder(job.model, device, dtype, pixels) for device in vae_devices]
    masks = EditMasks.of(job.config)
    placement = _placement(job.model, cache)
    if cache.text_offload and not any(map(is_accelerator, text_devices)):
        console().print("warning: cache.text_offload has no effect on the CPU", style="yellow")
    text = [
        TextEncoder(job.model, device, dtype, tokens, attend=masks.attend, placement=placement)
        for device in text_devices
    ]
    recipe, crop = recipe_id(job.recipe), job.resolution.crop
    return Lanes(
        vae,
        text,
        recipe,
        job.condition_image_size,
        job.format_version,
        crop,
        masks,
        job.keeps_thumbnails,
        job.model.family,
    )
