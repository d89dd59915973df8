"""`inspect --source`: whether a cache is what its source makes today, by content and prompts, told without a model.

The source is read as `build --dry-run` reads it, and counted alike; nothing is written. The recipe is taken as the
cache has it, weights and all: what another model or other settings would change is left to `build --dry-run`, and so is
whether a text-to-image prompt is longer than the pipeline keeps, which takes a tokenizer to tell. Refused are recipes
that were imported, which have no source, and settings that make other sizes than the recipe. A cache that no build has
finished is not compared.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qwen_cache.console import counting
from qwen_cache.encode.builder import as_encoded, check_tokens, read_rows
from qwen_cache.encode.plan import NEW, Plan, Rules, make_plan
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.cache import Cache, open_configured
from qwen_cache.format.directory import shards_here
from qwen_cache.format.manifest import DEFAULT_RECIPE, Manifest
from qwen_cache.inspect.summary import legible
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import CONFIG_NAME, Config, load_config
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.url import Url, location

SIZES = ("vae_image_size", "resolution", "resolutions_per_sample", "resize_mode", "upscale")
"""What a recipe says of `Resolution`."""


def compare(folder: Path | Url, manifest: Manifest | None, source: str, settings: Config) -> dict[str, Any]:
    """`state` and `source` of what `inspect` says; `stale` is what `build --dry-run --check` would fail.

    `settings` are those that the cache was built with (`settings_of_build`).
    """
    place = location(source)
    if manifest is None:
        if isinstance(place, Path) and not place.exists():
            raise SourceError("there is no such source", where=place)
        return {"source": {"path": legible(source)}}
    default = DEFAULT_RECIPE if DEFAULT_RECIPE in manifest.recipes else None
    named = settings.cache.model_copy(update={"recipe": settings.cache.recipe or default})
    cache = open_configured(named, folder)
    _check(cache, settings)
    plan = _plan(cache, settings, source)
    new = sum(sample.reasons == (NEW,) for sample in plan.to_encode)
    found = {
        "new": new,
        "changed": len(plan.to_encode) - new,
        "removed": len(plan.removed),
        "problems": len(plan.problems),
    }
    state = "stale" if any(found.values()) else "complete"
    return {"state": state, "source": {"path": legible(source), "recipe": cache.recipe_name, **found}}


def settings_of_build(cache: str, config: Path | None, assignments: Sequence[str]) -> Config:
    """Those of `config`, else those that the build left in the cache, else qwen.yaml here; with `assignments` over."""
    folder = location(cache)
    own = folder / CONFIG_NAME if isinstance(folder, Path) else None
    return load_config(config or (own if own and own.is_file() else None), assignments)


def _check(cache: Cache, settings: Config) -> None:
    recipe = cache.recipe.recipe
    if tool := recipe.get("imported_from"):
        raise ConfigError(
            f"recipe {cache.recipe_name!r} was imported from {tool}, so there is no source to compare it with",
            where=cache.folder,
            do="leave --source out; `qwen-cache import --dry-run` reads what it was imported from",
        )
    made, asked = {name: recipe[name] for name in SIZES if name in recipe}, Resolution.of(settings.data).recipe()
    if made != asked:
        raise ConfigError(
            f"these settings make other sizes than recipe {cache.recipe_name!r}",
            where=cache.folder,
            expected=json.dumps(made),
            found=json.dumps(asked),
            do="give those that it was built with, by --config or as --set data.…; "
            "what others would change is what `qwen-cache build --dry-run` says",
        )


def _plan(cache: Cache, settings: Config, source: str) -> Plan:
    """What a build would do, were the recipe the same."""
    recipe = cache.recipe.recipe
    model = ModelFolder(recipe["pipeline"], Path(), recipe["pipeline"])  # what it takes; no such folder is opened
    read = read_rows(settings, source, model, check_tokens)
    rules = Rules(
        model.pipeline,
        cache.recipe.id,
        Resolution.of(settings.data),
        int(recipe.get("condition_image_size", 0)),
        model.max_controls,
    )
    here = shards_here(cache.folder, cache.manifest)  # what was in a missing shard is encoded again
    cached = {row.meta.key: row for row in cache.rows() if row.shard in here}
    masks = cache.format_version > 1 and settings.data.edit_mask != "none"
    rows = as_encoded(read.rows, masks=masks, phrases="attention" in recipe or "mask_head" in recipe)
    with counting("reading the source", total=len(read.rows)) as advance:
        return make_plan(rows, read.problems, rules, cached, on_row=lambda: advance(1))
