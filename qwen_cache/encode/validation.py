"""The validation cache: images to generate while the model is trained, encoded beside the cache by the same encoders.

Its rows are those of `validation.source`, with trigger word, prefix and suffix, then the prompts of
`validation.prompts` as they are typed, except that the trigger word replaces [trigger]; they need no target. Its recipe
is that of the cache, so equal rows have equal embeddings and control latents. It is a cache of its own, in the folder
`validation/` of the cache unless `validation.cache` names another. With slices, only the first builds it. Refused: a
folder that is the cache's or the source's own, format v1, and sizes that the model cannot generate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from qwen_cache.encode.builder import (
    BuildJob,
    as_encoded,
    check_prompts,
    check_sizes,
    fitting_model,
    prepare_build,
    recipe_of_build,
)
from qwen_cache.encode.plan import SourceSlice
from qwen_cache.encode.recipe import EditMasks
from qwen_cache.errors import ConfigError, Problem
from qwen_cache.format import directory
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import NO_CACHE
from qwen_cache.sources.captions import Captions
from qwen_cache.sources.detect import Content, Row, check_exists, read_content, read_written, reading
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_cache.storage.stores import destination


def is_wanted(config: Config) -> bool:
    """True if the settings have rows for a validation cache, and this is not a later slice of a build."""
    has_rows = bool(config.validation.source or config.validation.prompts)
    return has_rows and (config.data.slice is None or SourceSlice.parse(config.data.slice).number == 1)


def check_wanted(config: Config, *, alone: bool) -> None:
    """ConfigError if the validation cache is wanted `alone` and has no rows."""
    if not alone or is_wanted(config):
        return
    found, do = "no source and no prompts", "give --validation SOURCE, or set validation.source or validation.prompts"
    if config.validation.source or config.validation.prompts:
        found, do = f"slice {config.data.slice}", "leave --slice out: the first slice alone builds the validation cache"
    raise ConfigError("there is nothing to build for validation", found=found, do=do)


def prepare_with_validation(
    config: Config, source: str | None, on_bytes: Callable[[int], None], *, alone: bool = False, here: bool = True
) -> list[BuildJob]:
    """The builds of the cache, unless the validation cache is wanted `alone`, and of that, if it is wanted.

    `here` is that of `prepare_build`. Raises ConfigError if it is wanted alone and has no rows, else the errors of
    `prepare_build`.
    """
    check_wanted(config, alone=alone)
    if not alone:  # what needs no model comes first, since that may be downloaded
        Resolution.of(config.data)
        check_exists(location(source or config.data.source))
    if not is_wanted(config):
        return [prepare_build(config, source, on_bytes, here=here)]
    model = fitting_model(config)
    validation = read_validation(config, model, partial(check_prompts, model))  # before the weights, which take longer
    if alone:
        recipe, encoders = recipe_of_build(config, model, on_bytes, here=here)
        return [replace(validation, recipe=recipe, vae_encoders=encoders)]
    job = prepare_build(config, source, on_bytes, model, here=here)
    return [job, replace(validation, recipe=job.recipe, vae_encoders=job.vae_encoders)]


def read_validation(config: Config, model: ModelFolder, check: Callable[[list[Row]], list[Problem]]) -> BuildJob:
    """The validation cache as a job without a recipe; a row in which `check` finds a problem is not usable.

    ConfigError if the cache cannot be written, SourceError if the source cannot be read.
    """
    folder, content = _folder(config), _read(config, model, check)
    source = config.validation.source or str(folder)  # where what is known of the images is remembered
    rows, problems = content.rows, content.problems
    return BuildJob(config, folder, model, {}, rows, problems, source=source, notices=content.notices)


def _folder(config: Config) -> Location:
    """The folder of the validation cache; ConfigError if it cannot be written there."""
    path = config.validation_cache
    if config.cache.format == "v1":
        raise ConfigError("format v1 cannot hold images to generate", do="build with --format v2")
    if config.validation.cache == NO_CACHE:
        found = "validation.cache=none with a source or prompts"
        raise ConfigError("no validation cache is wanted, but it has rows", found=found, do="leave one of them out")
    folder, cache = destination(path), destination(config.cache.path)
    same = not is_remote(folder) and not is_remote(cache) and folder.absolute() == cache.absolute()
    if same or directory.is_same(folder, cache):
        raise ConfigError("the validation cache would replace the cache", where=path, do="set another validation.cache")
    source = config.validation.source
    if source and directory.is_same(location(source), folder):
        what = "the validation cache would be among the images that it is made from"
        raise ConfigError(what, where=path, do="set another validation.cache")
    return folder


def _read(config: Config, model: ModelFolder, check: Callable[[list[Row]], list[Problem]]) -> Content:
    """The usable rows of source and prompts, and the problems of the others."""
    settings = reading(config.data, model) | {"captions": Captions.of(config.data).in_order}
    settings |= {
        "columns": None,
        "split": None,
        "config_name": None,
    }  # names of parts that another source need not have
    content = read_written([each.model_dump() for each in config.validation.prompts], "validation.prompts", **settings)
    if config.validation.source:
        settings |= {"to_generate": True}
        content = read_content(location(config.validation.source), **settings) + content
    rows = as_encoded(content.rows, masks=False, phrases=EditMasks.of(config).attend, marked=config.data.marked_phrases)
    unfit = [*check(rows), *check_sizes(model, rows)]
    rows = [row for row in rows if row.where not in {problem.where for problem in unfit}]
    return replace(content, rows=rows, problems=[*content.problems, *unfit])
