"""What stops a build after its plan and before an encoder is loaded; a dry run reports it.

Unusable rows, no usable row, too little disk space, too little memory of a device, and a recipe that changed by
accident: a build that would encode more than half of the cached samples again needs `--replace`. Samples that need no
encoder (a new mask only, or a copy from a replaced shard) do not count.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from qwen_cache.encode.builder import BuildJob
from qwen_cache.encode.device_plan import DevicePlan
from qwen_cache.encode.estimate import disk_bytes, free_bytes
from qwen_cache.encode.plan import RECIPE, BuildPlan
from qwen_cache.encode.recipe import recipe_changes
from qwen_cache.errors import ConfigError, DeviceError, QwenCacheError, SourceError
from qwen_cache.format.update import Existing, Update
from qwen_cache.storage.files import cache_home
from qwen_cache.storage.remote import Url
from qwen_cache.terminal import human_bytes, plural
from qwen_cache.text import plain, shell_line

SURE = 0.9  # of the estimated bytes: a build that may just fit is not refused


def unusable_rows(job: BuildJob, plan: BuildPlan) -> SourceError | None:
    """The error for rows that cannot be used, unless they are to be skipped."""
    if not plan.problems or job.config.data.on_error == "skip":
        return None
    this, it, rows = ("this is", "it", "its row") if len(plan.problems) == 1 else ("these are", "them", "their rows")
    do = f"fix {it}, or skip {rows} with --on-error skip"
    what = f"nothing will be encoded until {this} fixed"
    return SourceError(what, found=plural(len(plan.problems), "problem"), do=do)


def empty_source(job: BuildJob, existing: Existing, plan: BuildPlan) -> SourceError | None:
    """The error for a build without a sample, unless it builds an empty slice."""
    names = existing.of_recipe(job.recipe_name).each("name")
    if plan.samples or (job.slice and all(job.keeps(name) for name in names)):
        return None
    return SourceError("no usable sample is left, so there is nothing to build")


class RecipeChangedError(ConfigError):
    """A build would replace most of the cache because of its settings, which may be an accident."""

    def __init__(self, what: str, where: Path | Url, commands: Sequence[str]) -> None:
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
    return RecipeChangedError(
        f"{samples} would be encoded again, because the recipe changed: {changes}",
        job.folder,
        [
            shell_line(["qwen-cache", *_without_out(command), "--out", folder]),
            shell_line(["qwen-cache", *command, "--set", f"cache.recipe={recipe}"]),
            shell_line(["qwen-cache", *command, "--replace"]),
        ],
    )


def full_disk(job: BuildJob, plan: BuildPlan, update: Update) -> QwenCacheError | None:
    """The error for a build that does not fit on the disk."""
    needed, free = disk_bytes(job, plan, update), free_bytes(job.folder)
    if free is None or SURE * needed <= free:
        return None
    where: Path | Url = job.folder
    do = "make room (`qwen-cache gc` removes replaced shards), or name a folder on another disk with --out"
    if isinstance(where, Url):  # shards wait here for their upload
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


def _without_out(command: Sequence[str]) -> list[str]:
    left = [word for i, word in enumerate(command) if word != "--out" and command[i - 1 : i] != ["--out"]]
    return [word for word in left if not word.startswith("--out=")]
