"""Repair: encode the damaged samples of a cache again, and nothing else.

A damaged shard is replaced by one with the same samples in the same order. Samples whose tensors still match their
hashes are copied, the others are encoded from the source, which must be unchanged. A damaged sample whose source has
changed or is missing, or that belongs to another recipe, is a problem: `data.on_error` stops, or drops it from the
cache. Shards that hold only other recipes are reported and left as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from qwen_cache.encode.builder import BuildJob, load_every_row, rules, staging_name
from qwen_cache.encode.plan import BuildPlan, PlannedSample, make_plan
from qwen_cache.encode.recipe import recipe_changes
from qwen_cache.errors import ConfigError, Problem
from qwen_cache.format import directory
from qwen_cache.format.identity import differences, recipe_id
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import DEFAULT_RECIPE, MANIFEST_NAME
from qwen_cache.format.staging import finished_samples
from qwen_cache.format.update import Existing, Update, by_position, plan_update
from qwen_cache.format.verify import damaged_shards
from qwen_cache.settings.load import CONFIG_NAME, load_config
from qwen_cache.storage.remote import Url
from qwen_cache.text import shell_line

DAMAGED = "damaged"
_DROP = "or drop the sample with --on-error skip"


@dataclass(frozen=True)
class Repair:
    """What a repair will do."""

    plan: BuildPlan
    """The damaged samples that can be encoded; `removed` are the names of those that cannot."""
    update: Update
    elsewhere: dict[str, list[str]]
    """The damaged shards that hold only other recipes, each with the names of these recipes."""


def plan_repair(job: BuildJob, on_bytes: Callable[[int], None] = lambda _: None) -> Repair:
    """Read every byte of the cache, then the rows of the damaged samples.

    Raises ManifestError if there is no cache, ConfigError if it has another recipe, and FormatError if its manifest or
    index is damaged, which no build can repair.
    """
    if isinstance(job.folder, Url):
        raise ConfigError(
            "--repair works on a local folder",
            where=job.folder,
            do="remove the shards that `qwen-cache verify` names and run the same command without --repair: "
            "it encodes their samples again",
        )
    if not (job.folder / MANIFEST_NAME).exists():
        raise directory.no_manifest(job.folder)
    existing = load_every_row(job)
    _check_recipe(job, existing)
    damaged = damaged_shards(job.folder, existing, on_bytes)
    mine = recipe_id(job.recipe)
    ours = set(existing.rows.where_in(recipe=[mine], shard=damaged).column("shard").to_pylist())
    affected = existing.rows.where_in(shard=ours)
    keys_lost = {key for shard in ours for key in damaged[shard]}
    lost = {key: affected[key] for key in affected if key in keys_lost}
    plan = _plan(job, existing, lost)
    dropped = lost.keys() - {sample.key for sample in plan.samples}
    rewritten = affected.without(dropped)
    order = by_position(existing.manifest, rewritten)
    shard_of = dict(zip(rewritten, rewritten.column("shard").to_pylist(), strict=True))
    last = dict.fromkeys(ours, "") | {shard_of[key]: key for key in order}
    whole, listed = existing.only(existing.rows.without(lost)), existing.only(existing.rows.without(dropped)).listed
    update = plan_update(job.folder, whole, job.format_version, listed, order, last)
    return Repair(_with_finished(job, existing, plan), update, _elsewhere(existing, damaged.keys() - ours))


def _check_recipe(job: BuildJob, existing: Existing) -> None:
    recipe = existing.recipes.get(job.recipe_name)
    if recipe is None:
        existing.check_name(job.recipe_name, job.recipe, job.folder)
        names = ", ".join(sorted(existing.recipes))
        do = "name one of its recipes with --set cache.recipe=NAME"
        raise ConfigError(f"this cache has no recipe {job.recipe_name!r}", where=job.folder, found=names, do=do)
    if changes := recipe_changes(recipe, job.recipe):
        raise ConfigError(
            "--repair needs the model and the settings that the cache was built with",
            where=job.folder,
            found="; ".join(changes),
            do=_right_settings(job),
        )


def _right_settings(job: BuildJob) -> str:
    """Where the settings of the recipe are: the cache has a file of those of its last build."""
    path = job.folder / CONFIG_NAME
    with suppress(ConfigError, OSError):
        if isinstance(path, Path) and (load_config(path).cache.recipe or DEFAULT_RECIPE) == job.recipe_name:
            return f"add `{shell_line(['--config', str(path)])}`, which has those of the last build"
    return f"give those of recipe {job.recipe_name!r}; {path} does not have them"


def _plan(job: BuildJob, existing: Existing, lost: Mapping[str, IndexRow]) -> BuildPlan:
    """The samples of `lost` that the source still has, and the problems of all others."""
    names, mine = {row.name for row in lost.values()}, recipe_id(job.recipe)
    rows = [row for row in job.rows if row.name in names]
    nothing = existing.rows.where_in(key=())
    read = make_plan(rows, (), rules(job), nothing)  # reads them all: where bytes were lost, trust no memory
    found = tuple(replace(sample, reasons=(DAMAGED,)) for sample in read.samples if sample.key in lost)
    now = {sample.row.name: sample for sample in read.samples}
    unreadable = {row.name for row in rows} - now.keys()  # their problems are among those of `read`
    problems, keys = list(read.problems), {sample.key for sample in found}
    for key, row in lost.items():
        where = str(job.folder / row.shard)
        if row.meta.recipe != mine:
            recipe = existing.recipe_names.get(row.meta.recipe, "")
            what = f"{row.name} is damaged, and belongs to another recipe in this shard, {recipe}"
            problems.append(Problem(where, what, f"restore the shard from a copy, {_DROP} and build that recipe again"))
        elif key not in keys and row.name not in unreadable:
            problems.append(Problem(where, *_lost(row, now.get(row.name))))
    return BuildPlan(found, tuple(problems), tuple(row.name for key, row in lost.items() if key not in keys))


def _lost(row: IndexRow, now: PlannedSample | None) -> tuple[str, str]:
    """What is wrong with a damaged sample that cannot be encoded again, and what to do."""
    if now is None:
        return f"{row.name} is damaged, and the source no longer has it", f"put it back, {_DROP}"
    changes = differences(row.meta.inputs, row.meta.prompt, now.inputs, now.row.prompt) or ["size"]
    what = f"{row.name} is damaged, and its source has changed since ({', '.join(changes)})"
    return what, f"restore the old source, {_DROP}: the next build encodes the new one"


def _with_finished(job: BuildJob, existing: Existing, plan: BuildPlan) -> BuildPlan:
    keys = {sample.key for sample in plan.samples}
    finished = finished_samples(job.folder, existing.manifest, staging_name(job, repair=True), keys)
    return replace(plan, kept=finished.interrupted, to_copy=finished.replaced)


def _elsewhere(existing: Existing, shards: Set[str]) -> dict[str, list[str]]:
    rows = existing.rows.where_in(shard=shards)
    pairs = zip(rows.column("shard").to_pylist(), rows.column("recipe").to_pylist(), strict=True)
    held = {(shard, existing.recipe_names.get(recipe, "")) for shard, recipe in pairs}
    return {shard: sorted(name for other, name in held if other == shard) for shard in sorted(shards)}
