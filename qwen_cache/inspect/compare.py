"""`inspect --source`: whether a cache is up to date with the images and prompts of its source, without a model.

The source is read and counted as `build --dry-run` does; nothing is written. The recipe, including the weights, is that
of the cache. `build --dry-run` reports what another model or other settings would change, and text-to-image prompts
that are longer than the pipeline keeps, which takes a tokenizer. Imported recipes, which have no source, and settings
that give other sizes than the recipe are errors. A cache that no build has finished is not compared.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from qwen_cache.encode.builder import check_tokens, read_job
from qwen_cache.encode.check import is_for_validation
from qwen_cache.encode.plan import NEW, BuildPlan, RememberedImages, Rules, make_plan
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.cache import Cache, open_configured
from qwen_cache.format.directory import shards_here
from qwen_cache.format.manifest import DEFAULT_RECIPE, Manifest
from qwen_cache.format.rows import KeyedRows
from qwen_cache.inspect.summary import printable
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_cache.terminal import counting

SIZES = ("vae_image_size", "resolution", "resolutions_per_sample", "resize_mode", "upscale")
"""The keys of a recipe that `Resolution` gives."""


def compare(folder: Location, manifest: Manifest | None, source: str, settings: Config) -> dict[str, Any]:
    """`state` and `source` of the report; the state is `stale` where `build --dry-run --check` would fail.

    `settings` are those of the build.
    """
    path = location(source)
    if manifest is None:
        if not is_remote(path) and not path.exists():
            raise SourceError("there is no such source", where=path)
        return {"source": {"path": printable(source)}}
    default = DEFAULT_RECIPE if DEFAULT_RECIPE in manifest.recipes else None
    named = settings.cache.model_copy(update={"recipe": settings.cache.recipe or default})
    cache = open_configured(named, folder)
    _check(cache, settings)
    plan, cached = _plan(cache, settings, source)
    new = sum(sample.reasons == (NEW,) for sample in plan.missing)
    # Cached samples would have another name, number of rows or place in the list.
    ours = {each.key: (each.key, each.row.name, each.source_rows) for each in plan.samples if each.key in cached}
    listed = zip(cached, cached.each("name"), cached.each("source_rows"), strict=True)
    theirs = [each for each in listed if each[0] in ours]
    counts = {
        "new": new,
        "changed": len(plan.missing) - new,
        "renamed_or_moved": sum(now != before for now, before in zip(ours.values(), theirs, strict=True)),
        "removed": len(plan.removed),
        "problems": len(plan.problems) + sum(notice.count for notice in plan.notices if notice.is_fault),
    }
    state = "stale" if any(counts.values()) else "complete"
    return {"state": state, "source": {"path": printable(source), "recipe": cache.recipe_name, **counts}}


def _check(cache: Cache, settings: Config) -> None:
    recipe = cache.recipe.recipe
    if tool := recipe.get("imported_from"):
        raise ConfigError(
            f"recipe {cache.recipe_name!r} was imported from {tool}, so there is no source to compare it with",
            where=cache.folder,
            do="leave --source out; `qwen-cache import --dry-run` reads the cache that it was imported from",
        )
    if is_for_validation(cache):
        raise ConfigError(
            "inspect does not compare images to generate with their source",
            where=cache.folder,
            do="leave --source out; `qwen-cache build --only-validation --dry-run` does it",
        )
    expected, given = {name: recipe[name] for name in SIZES if name in recipe}, Resolution.of(settings.data).recipe()
    if expected != given:
        raise ConfigError(
            f"these settings give other sizes than recipe {cache.recipe_name!r}",
            where=cache.folder,
            expected=json.dumps(expected),
            found=json.dumps(given),
            do="give the settings of the build, by --config or --set data.…; "
            "`qwen-cache build --dry-run` reports what other settings would change",
        )


def _plan(cache: Cache, settings: Config, source: str) -> tuple[BuildPlan, KeyedRows]:
    """The plan of a build with the recipe of the cache, and the rows that it would find."""
    recipe = cache.recipe.recipe
    model = ModelFolder(recipe["pipeline"], Path(), recipe["pipeline"])  # for its limits; the folder is never opened
    masks = cache.format_version > 1 and settings.data.edit_mask != "none"
    phrases = "attention" in recipe or "mask_head" in recipe
    job = read_job(settings, source, cache.folder, model, check_tokens, masks=masks, phrases=phrases)
    rules = Rules(
        model.pipeline,
        cache.recipe.id,
        Resolution.of(settings.data),
        int(recipe.get("condition_image_size", 0)),
        model.max_controls,
    )
    here = shards_here(cache.folder, cache.manifest)  # samples of a missing shard count as not cached
    cached = cache.keyed_rows.where_in(shard=here)
    with counting("reading the source", total=len(job.rows)) as advance:
        memory = RememberedImages.of(source, settings.data)
        plan = make_plan(job.rows, job.problems, rules, cached, on_row=lambda: advance(1), memory=memory)
    return replace(plan, notices=(*job.notices, *plan.notices)), cached
