"""`verify --re-encode`: encode a random part of a cache again from its images, and compare.

The hashes in a cache say that its bytes are those that were written, not that images and prompts give them. This says
so, for as many samples as one likes, within what rounding explains (`rounding.py`). The settings are those of the
cache's recipe; the model at hand must give exactly this recipe. A sample is compared only if the source has its
content: the images, by their hashes, and the prompt. Samples are chosen among those whose name the source has; if it
has none of the names, by content, which reads the whole source.

Refuses imported caches, which no encoder here has made, and images to generate. Nothing to compare is an error.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from qwen_cache.encode.builder import (
    IN_FLIGHT,
    BuildJob,
    Encoding,
    as_encoded,
    check_prompts,
    fitting_model,
    read_rows,
    rules,
)
from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.encode.plan import PlannedSample, make_plan
from qwen_cache.encode.recipe import make_recipe, recipe_changes
from qwen_cache.encode.remembered_images import RememberedImages
from qwen_cache.encode.rounding import NOT_COMPARED, Array, Difference, arrays, difference
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import differences
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.update import Existing
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import CacheConfig, DataConfig
from qwen_cache.sources.detect import Row
from qwen_cache.storage.remote import location

Positions = npt.NDArray[np.int64]
SIZES = ("vae_image_size", "resolution", "resolutions_per_sample", "resize_mode", "upscale", "condition_image_size")
"""Settings of sizes that a recipe has, if they are not the defaults."""


@dataclass(frozen=True)
class Chosen:
    """The samples to compare, and what was found of the others."""

    samples: tuple[PlannedSample, ...]
    in_source: int
    """Samples of the cache whose name the source has, or, without any such name, whose content."""
    changed: dict[str, str]
    """Names that were chosen and are in the source with other content: what differs."""


@dataclass(frozen=True)
class Finding:
    """A tensor of a sample that rounding does not explain, or that is missing on one side."""

    sample: str
    tensor: str
    what: str

    def __str__(self) -> str:
        return f"{self.sample}: {self.tensor} {self.what}"


@dataclass(frozen=True)
class Compared:
    """A sample: the difference of each tensor, and what is wrong."""

    label: str
    differences: dict[str, Difference]
    findings: tuple[Finding, ...]


# ---- what to encode --------------------------------------------------------------------------------------------------


def prepare(cache: Cache, settings: Config, source: str, on_bytes: Callable[[int], None] = lambda _: None) -> BuildJob:
    """The build that would give this cache; ConfigError, ModelError or SourceError if it cannot be made here."""
    check_origin(cache)
    path = location(source)
    if isinstance(path, Path) and not path.exists():
        raise SourceError("there is no such source", where=path, do="give --source SOURCE")
    config = settings_of_recipe(cache, settings)
    if cache.recipe.recipe.get("mask_head") and config.data.mask_head is None:
        do = "give it with --set data.mask_head=FILE"
        raise ConfigError("this cache was made with a mask head, which is not named", where=cache.folder, do=do)
    model = fitting_model(config)
    recipe = make_recipe(model, config, on_bytes)
    if recipe != cache.recipe.recipe:
        written_by = cache.manifest.written_by.get("qwen-cache", "an unknown version")
        raise ConfigError(
            "this model and this version do not give the recipe of the cache",
            where=cache.folder,
            found="; ".join(recipe_changes(cache.recipe.recipe, recipe)),
            do=f"name the model of the cache with --model; it was written by qwen-cache {written_by}",
        )
    masks = cache.table["mask"].null_count < len(cache)
    read = read_rows(config, source, model, lambda rows: check_prompts(model, rows))
    rows = as_encoded(read.rows, masks=masks, phrases=EditMasks.of(config).attend, marked=config.data.marked_phrases)
    return BuildJob(config, Path(), model, recipe, rows, read.problems, source=source)


def check_origin(cache: Cache) -> None:
    """ConfigError for a cache that cannot be encoded again."""
    if tool := cache.recipe.recipe.get("imported_from"):
        raise ConfigError(
            f"recipe {cache.recipe_name!r} was imported from {tool}: its encoder is not known, only claimed",
            where=cache.folder,
            do="build a cache from the images instead; `qwen-cache verify` without --re-encode checks the bytes",
        )
    if cache.table["target"].null_count:
        raise ConfigError(
            "this is a cache of images to generate; --re-encode checks caches to train on",
            where=cache.folder,
            do="leave --re-encode out; `qwen-cache build --only-validation` encodes such a cache again",
        )


def settings_of_recipe(cache: Cache, settings: Config) -> Config:
    """The settings with everything that the recipe decides as the recipe has it, for the whole source.

    ConfigError for a recipe with other values than settings can have.
    """
    recipe = cache.recipe.recipe
    data = {name: recipe.get(name, DataConfig.model_fields[name].get_default()) for name in SIZES}
    data["resize_mode"] = recipe.get("resize_mode", "stretch" if "resolution" in recipe else None)
    data |= {"edit_mask": recipe.get("edit_mask", "file"), "slice": None}
    of_cache = {"dtype": recipe.get("dtype"), "store_attention": recipe.get("attention", False)}
    of_cache |= {"text_quantization": recipe.get("text_quantization", "none")}
    of_cache |= {"format": f"v{cache.format_version}", "compression": "none", "thumbnails": False}
    try:
        update = {
            "data": DataConfig.model_validate(settings.data.model_dump() | data),
            "cache": CacheConfig.model_validate(settings.cache.model_dump() | of_cache),
        }
    except ValidationError as error:
        fault = error.errors()[0]
        what = f"the recipe of this cache is none that this version writes: {'.'.join(map(str, fault['loc']))}"
        raise ConfigError(what, where=cache.folder, found=repr(fault["input"]), do="do not trust it") from None
    return settings.model_copy(update=update)


# ---- which samples ---------------------------------------------------------------------------------------------------


def choose(cache: Cache, job: BuildJob, count: int, seed: int) -> Chosen:
    """`count` random samples of the cache that the source has; SourceError if it has none."""
    random = np.random.default_rng(seed)
    named = positions_in(cache, "name", [row.name for row in job.rows])
    if len(named):
        chosen = _by_name(cache, job, random.permutation(named)[:count])
    else:
        chosen = _by_content(cache, job, count, random)
    if not chosen.samples:
        raise _nothing(cache, job, chosen)
    return chosen


def positions_in(cache: Cache, column: str, values: Sequence[str]) -> Positions:
    """The positions of the rows with one of these values in a column."""
    found = pc.is_in(cache.table[column], value_set=pa.array(values, pa.string()))
    positions: Positions = np.flatnonzero(np.asarray(found))
    return positions


def _by_name(cache: Cache, job: BuildJob, positions: Positions) -> Chosen:
    rows = {row.name: row for row in job.rows}
    cached = [cache.row(int(position)) for position in positions]
    planned = _plan(job, [rows[name] for name in dict.fromkeys(row.name for row in cached)])
    samples = tuple(planned[row.meta.key] for row in cached if row.meta.key in planned)
    of_name = {sample.row.name: sample for sample in planned.values()}
    changed = {}
    for row in cached:
        if row.meta.key not in planned and not _has_another(cache, row.name, planned):
            changed[row.name] = _what_changed(row, of_name.get(row.name))
    return Chosen(samples, len(positions_in(cache, "name", list(rows))), changed)


def _has_another(cache: Cache, name: str, planned: dict[str, PlannedSample]) -> bool:
    """Whether another sample of this name is in the source, as in a merged cache."""
    positions = positions_in(cache, "name", [name])
    return any(cache.row(int(position)).meta.key in planned for position in positions)


def _what_changed(row: IndexRow, sample: PlannedSample | None) -> str:
    if sample is None:
        return "cannot be used"
    changes = differences(row.meta.inputs, row.meta.prompt, sample.inputs, sample.row.prompt)
    changes += ["phrase"] if row.meta.phrase != sample.row.phrase else []
    return ", ".join(changes) or "size"


def _by_content(cache: Cache, job: BuildJob, count: int, random: np.random.Generator) -> Chosen:
    planned = _plan(job, job.rows, RememberedImages.of(job.source, job.config.data))
    positions = positions_in(cache, "key", list(planned))
    keys = [cache.row(int(position)).meta.key for position in random.permutation(positions)[:count]]
    return Chosen(tuple(planned[key] for key in keys), len(positions), {})


def _plan(job: BuildJob, rows: Sequence[Row], memory: RememberedImages | None = None) -> dict[str, PlannedSample]:
    """The samples of these rows by key; their images are read and hashed."""
    nothing = Existing.empty(job.format_version).rows
    return {sample.key: sample for sample in make_plan(rows, [], rules(job), nothing, memory=memory).samples}


def _nothing(cache: Cache, job: BuildJob, chosen: Chosen) -> SourceError:
    """The error for a source with none of the samples."""
    if not chosen.in_source:
        what, found = "the source has no sample of this cache", f"{len(job.rows)} rows, none with its name or content"
    else:
        counts = Counter(chosen.changed.values()).most_common()
        what = "the source has none of the chosen samples as they are in the cache"
        found = f"{len(chosen.changed)} with other content: " + ", ".join(f"{n}× {change}" for change, n in counts)
    do = "give the images that the cache was made from, and the settings of its captions: --config, --set data.…"
    return SourceError(what, where=job.source, expected=f"some of {len(cache)} samples", found=found, do=do)


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare_samples(
    cache: Cache, job: BuildJob, samples: Sequence[PlannedSample], lanes: Encoding
) -> Iterator[Compared]:
    """Encode the samples and compare each with that of the cache."""
    positions = positions_in(cache, "key", [sample.key for sample in samples])
    cached = {row.meta.key: Sample(row, cache.shards) for row in map(cache.row, map(int, positions))}
    cache.prefetch(map(int, positions))
    waiting: deque[tuple[str, Any]] = deque()
    for sample in samples:
        waiting.append((sample.key, lanes.submit(sample)))
        if len(waiting) >= IN_FLIGHT:
            key, work = waiting.popleft()
            yield compare_sample(cached[key], *lanes.result(work), job.config.cache.dtype)
    for key, work in waiting:
        yield compare_sample(cached[key], *lanes.result(work), job.config.cache.dtype)


def compare_sample(sample: Sample, meta: SampleMeta, data: dict[str, memoryview], dtype: str) -> Compared:
    """The sample of the cache beside the same one, encoded again; `dtype` is that of the recipe."""
    label, encoded, found, findings = sample.row.label, arrays(meta, data), {}, []
    here = {name for name in sample.row.meta.tensors if name != NOT_COMPARED}
    findings += [Finding(label, name, "is missing in the cache") for name in sorted(encoded.keys() - here)]
    findings += [Finding(label, name, "is not made by this recipe") for name in sorted(here - encoded.keys())]
    for name in (name for name in encoded if name in here):
        cached = sample.numpy(name)
        what = _other_kind(name, cached, encoded[name], sample.row.meta, meta)
        if what is None:
            found[name] = difference(name, cached, encoded[name], dtype, meta.edit_mask_from)
            what = None if found[name].is_within else _too_far(found[name])
        findings += [Finding(label, name, what)] if what else []
    return Compared(label, found, tuple(findings))


def _other_kind(name: str, cached: Array, encoded: Array, stored: SampleMeta, meta: SampleMeta) -> str | None:
    """What is wrong before any number is compared."""
    if (cached.shape, cached.dtype) != (encoded.shape, encoded.dtype):
        return f"is {cached.dtype} {list(cached.shape)}, not {encoded.dtype} {list(encoded.shape)}"
    if name == "edit_mask" and stored.edit_mask_from != meta.edit_mask_from:
        return f"comes from {stored.edit_mask_from}, not from {meta.edit_mask_from}"
    if name == "prompt_embeds" and stored.image_positions != meta.image_positions:
        return f"has its images at {list(stored.image_positions)}, not at {list(meta.image_positions)}"
    return None


def _too_far(found: Difference) -> str:
    if found.rms > found.rms_bound:
        return f"differs by {found.rms:.2g} (RMS; rounding explains {found.rms_bound:.2g})"
    return f"differs by {found.largest:.2g} in one row (rounding explains {found.largest_bound:.2g})"
