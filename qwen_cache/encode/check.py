"""Encoding again: spot checks within the bounds of rounding, and repairs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from qwen_cache.encode.builder import (
    BuildJob,
    RunningEncoders,
    ahead,
    check_prompts,
    fitting_model,
    load_every_row,
    read_job,
    rules,
    staging_name,
)
from qwen_cache.encode.plan import BuildPlan, PlannedSample, RememberedImages, make_plan
from qwen_cache.encode.recipe import (
    EditMasks,
    as_cached,
    for_any_device,
    make_recipe,
    recipe_changes,
    vae_encoders,
)
from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format import directory
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import differences, recipe_id
from qwen_cache.format.index import SLIDER, IndexRow
from qwen_cache.format.manifest import DEFAULT_RECIPE, MANIFEST_NAME
from qwen_cache.format.sample import WITHOUT_PREFIX, SampleMeta
from qwen_cache.format.staging import finished_samples
from qwen_cache.format.update import Existing, Update, by_position, plan_update
from qwen_cache.format.verify import damaged_shards
from qwen_cache.settings.load import CONFIG_NAME, Config, load_saved
from qwen_cache.settings.sections import CacheConfig, DataConfig
from qwen_cache.sources.detect import Row
from qwen_cache.storage.remote import is_remote, location
from qwen_cache.text import shell_line

# ---- rounding --------------------------------------------------------------------------------------------------------
# How far two encodings of one sample may be apart, and how far they are.
#
# They are one function on other kernels: sums in another order, fused operations, batches of other shapes. So they
# differ by rounding alone, and a bound follows from it. `u` is the unit roundoff: 2^-8 in bfloat16, 2^-24 in float32. A
# result that was rounded n times in sequence, independently, is off by about u·√n of its length, and two such results
# by less than 2·u·√n. n is 64: two residual additions in each of some 30 layers; the VAEs are less deep.
#
# bfloat16: sums are accumulated in float32, so an operation rounds once. 2·2^-8·√64 = 2^-4. float32: a sum of k terms
# rounds k times; k is at most 2^15. 2·2^-24·√(2^15·64) = 2^-12.5. Convolutions by transforms (Winograd, FFT) round
# several times as coarsely, hence 2^-10.
#
# That is the bound of the RMS over the rows (tokens) of a tensor. Rows amplify unequally, so one row may be off by four
# times as much. The error of a row is relative to its length, or to the median length if the row is shorter: latents of
# flat areas are short, and some embeddings before a final norm are a hundred times as long as the others.
#
# What this finds and what not: other images and prompts are off by about 1 in the rows concerned, a missing VAE mean by
# 0.3. Noise is found from the bound on: 0.1 % in float32; in bfloat16 some 6 %, below which another GPU's rounding
# looks the same (1.6 % for the VAE).

RMS_BOUND = {"bfloat16": 2.0**-4, "float32": 2.0**-10}
ONE_ROW = 4
"""The bound of a single row, in bounds of the RMS."""
SOFTMAX = 4
"""Attention: a softmax turns the absolute error of a logit into a relative one, and logits reach 4 and more."""
LEVEL = 1 / 254
"""Masks of the source are resized in integers, whose levels are 1/255: one level in the mean, two anywhere."""
AT_THRESHOLD = 1 / 8
"""Masks that are made: pixels next to a threshold may fall on either side of it."""
NOT_COMPARED = "thumbnails"
"""For people to look at, and no output of an encoder."""
DTYPES = {"BF16": ml_dtypes.bfloat16, "F16": np.float16, "F32": np.float32, "U8": np.uint8}

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Difference:
    """A tensor of a sample in the cache, and as it was encoded again."""

    rms: float
    """Over its rows, relative; of a mask absolute."""
    largest: float
    """The largest of one row; of a mask of one token."""
    rms_bound: float
    largest_bound: float
    is_equal: bool
    """Bit by bit."""

    @property
    def is_within(self) -> bool:
        """True if rounding explains it."""
        return self.rms <= self.rms_bound and self.largest <= self.largest_bound


def arrays(meta: SampleMeta, data: Mapping[str, memoryview]) -> dict[str, Array]:
    """The tensors of an encoded sample as readers give them: embeddings with their shared prefix."""
    found = {
        name: np.frombuffer(data[name], DTYPES[spec.dtype]).reshape(spec.shape)
        for name, spec in meta.tensors.items()
        if name != NOT_COMPARED
    }
    for name in WITHOUT_PREFIX & found.keys():
        found[name] = np.concatenate([found["prompt_embeds"][: meta.prefix_length], found[name]])
    return found


def difference(name: str, cached: Array, encoded: Array, dtype: str, mask_from: str | None = None) -> Difference:
    """Compare a tensor of equal shape; `dtype` is that of the recipe, `mask_from` the origin of an edit mask."""
    a, b = cached.astype(np.float64), encoded.astype(np.float64)
    if name == "edit_mask":
        errors, bound = np.abs(a - b), (LEVEL, 2 * LEVEL) if mask_from == "file" else (AT_THRESHOLD, 1.0)
    else:
        times = SOFTMAX if name == "attention" else 1
        errors, bound = row_errors(a, b), (times * RMS_BOUND[dtype], ONE_ROW * times * RMS_BOUND[dtype])
    rms, largest = (float(each) for each in (np.sqrt(np.mean(errors**2)), errors.max()))
    is_equal = cached.dtype == encoded.dtype and cached.tobytes() == encoded.tobytes()
    return Difference(_or_infinite(rms), _or_infinite(largest), *bound, is_equal)


def row_errors(a: Array, b: Array) -> Array:
    """The error of each row of `a` [rows, …] against `b`, relative to the row's length or the median length."""
    rows, reference = a.reshape(len(a), -1), b.reshape(len(b), -1)
    lengths = np.linalg.norm(reference, axis=1)
    least = np.median(lengths) or np.finfo(np.float64).tiny
    errors: Array = np.linalg.norm(rows - reference, axis=1) / np.maximum(lengths, least)
    return errors


def _or_infinite(number: float) -> float:
    """NaN is further away than any bound."""
    return math.inf if math.isnan(number) else number


# ---- spot check ------------------------------------------------------------------------------------------------------
# `verify --re-encode`: encode a random part of a cache again from its images, and compare.
#
# The hashes in a cache say that its bytes are those that were written, not that images and prompts give them. This says
# so, for as many samples as one likes, within what rounding explains. The settings are those of the
# cache's recipe; the model at hand must give exactly this recipe. A sample is compared only if the source has its
# content: the images, by their hashes, and the prompt. Samples are chosen among those whose name the source has; if it
# has none of the names, by content, which reads the whole source.
#
# Refuses imported caches, which no encoder here has made, and validation caches. Nothing to compare is an error.

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
    if not is_remote(path) and not path.exists():
        raise SourceError("there is no such source", where=path, do="give --source SOURCE")
    config = settings_of_recipe(cache, settings)
    if cache.recipe.recipe.get("mask_head") and config.data.mask_head is None:
        do = "give it with --set data.mask_head=FILE"
        raise ConfigError("this cache was made with a mask head, which is not named", where=cache.folder, do=do)
    model = fitting_model(config)
    made = for_any_device(make_recipe(model, config, on_bytes))
    encoders = {**cache.manifest.vae_encoders, **vae_encoders(model, made)}
    recipe = as_cached(made, cache.recipe.recipe, encoders)
    if recipe != cache.recipe.recipe:
        written_by = cache.manifest.written_by.get("qwen-cache", "an unknown version")
        raise ConfigError(
            "this model and this version do not give the recipe of the cache",
            where=cache.folder,
            found="; ".join(recipe_changes(cache.recipe.recipe, recipe)),
            do=f"name the model of the cache with --model; it was written by qwen-cache {written_by}",
        )
    masks = cache.table["mask"].null_count < len(cache)
    phrases = EditMasks.of(config).attend
    job = read_job(config, source, Path(), model, partial(check_prompts, model), masks=masks, phrases=phrases)
    return replace(job, recipe=recipe)


def check_origin(cache: Cache) -> None:
    """ConfigError for a cache that cannot be encoded again."""
    if tool := cache.recipe.recipe.get("imported_from"):
        raise ConfigError(
            f"recipe {cache.recipe_name!r} was imported from {tool}: its encoder is not known, only claimed",
            where=cache.folder,
            do="build a cache from the images instead; `qwen-cache verify` without --re-encode checks the bytes",
        )
    if is_for_validation(cache):
        raise ConfigError(
            "this is a cache of images to generate; --re-encode checks caches to train on",
            where=cache.folder,
            do="leave --re-encode out; `qwen-cache build --only-validation` encodes such a cache again",
        )


def is_for_validation(cache: Cache) -> bool:
    """True if the cache has images to generate that give no slider its direction: nothing can be trained on them."""
    without_target = cache.table["target"].is_null()
    if SLIDER[0] in cache.table.column_names:
        without_target = pc.and_(without_target, cache.table[SLIDER[0]].is_null())
    return bool(pc.any(without_target).as_py())


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
        planned = _plan_again(job, job.rows, RememberedImages.of(job.source, job.config.data))
        positions = positions_in(cache, "key", list(planned))
        keys = [cache.row(int(position)).meta.key for position in random.permutation(positions)[:count]]
        chosen = Chosen(tuple(planned[key] for key in keys), len(positions), {})
    if chosen.samples:
        return chosen
    if not chosen.in_source:
        what, found = "the source has no sample of this cache", f"{len(job.rows)} rows, none with its name or content"
    else:
        counts = Counter(chosen.changed.values()).most_common()
        what = "the source has none of the chosen samples as they are in the cache"
        found = f"{len(chosen.changed)} with other content: " + ", ".join(f"{n}× {change}" for change, n in counts)
    do = "give the images that the cache was made from, and the settings of its captions: --config, --set data.…"
    raise SourceError(what, where=job.source, expected=f"some of {len(cache)} samples", found=found, do=do)


def positions_in(cache: Cache, column: str, values: Sequence[str]) -> Positions:
    """The positions of the rows with one of these values in a column."""
    found = pc.is_in(cache.table[column], value_set=pa.array(values, pa.string()))
    positions: Positions = np.flatnonzero(np.asarray(found))
    return positions


def _by_name(cache: Cache, job: BuildJob, positions: Positions) -> Chosen:
    rows = {row.name: row for row in job.rows}
    cached = [cache.row(int(position)) for position in positions]
    planned = _plan_again(job, [rows[name] for name in dict.fromkeys(row.name for row in cached)])
    samples = tuple(planned[row.meta.key] for row in cached if row.meta.key in planned)
    of_name = {sample.row.name: sample for sample in planned.values()}
    changed = {}
    for row in cached:
        if row.meta.key in planned:
            continue
        same_name = positions_in(cache, "name", [row.name])  # another may be in the source, as in a merged cache
        if not any(cache.row(int(position)).meta.key in planned for position in same_name):
            changed[row.name] = _what_changed(row, of_name.get(row.name))
    return Chosen(samples, len(positions_in(cache, "name", list(rows))), changed)


def _what_changed(row: IndexRow, sample: PlannedSample | None) -> str:
    if sample is None:
        return "cannot be used"
    changes = differences(row.meta.inputs, row.meta.prompt, sample.inputs, sample.row.prompt)
    changes += ["phrase"] if row.meta.phrase != sample.row.phrase else []
    changes += ["slider"] if row.meta.slider != sample.row.slider else []
    return ", ".join(changes) or "size"


def _plan_again(job: BuildJob, rows: Sequence[Row], memory: RememberedImages | None = None) -> dict[str, PlannedSample]:
    """The samples of these rows by key; their images are read and hashed."""
    nothing = Existing.empty(job.format_version).rows
    return {sample.key: sample for sample in make_plan(rows, [], rules(job), nothing, memory=memory).samples}


# ---- comparing -------------------------------------------------------------------------------------------------------


def compare_samples(
    cache: Cache, job: BuildJob, samples: Sequence[PlannedSample], lanes: RunningEncoders
) -> Iterator[Compared]:
    """Encode the samples and compare each with that of the cache."""
    positions = positions_in(cache, "key", [sample.key for sample in samples])
    cached = {row.meta.key: Sample(row, cache.shards) for row in map(cache.row, map(int, positions))}
    cache.prefetch(map(int, positions))
    for sample, work in ahead(samples, lanes.submit):
        yield compare_sample(cached[sample.key], *lanes.result(work), job.config.cache.dtype)


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
    """The faults that show before any number is compared."""
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


# ---- repair ----------------------------------------------------------------------------------------------------------
# Repair: encode the damaged samples of a cache again, and nothing else.
#
# A damaged shard is replaced by one with the same samples in the same order. Samples whose tensors still match their
# hashes are copied, the others are encoded from the source, which must be unchanged. A damaged sample whose source has
# changed or is missing, or that belongs to another recipe, is a problem: `data.on_error` stops, or drops it from the
# cache. Shards that hold only other recipes are reported and left as they are.

DAMAGED = "damaged"
_DROP = "or drop the sample with --on-error skip"


@dataclass(frozen=True)
class Repair:
    """The plan of a repair."""

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
    if is_remote(job.folder):
        raise ConfigError(
            "--repair works on a local folder",
            where=job.folder,
            do="remove the shards that `qwen-cache verify` names and run the same command without --repair: "
            "it encodes their samples again",
        )
    if not (job.folder / MANIFEST_NAME).exists():
        raise directory.no_manifest(job.folder)
    existing = load_every_row(job)
    recipe = existing.recipes.get(job.recipe_name)
    if recipe is None:
        existing.check_name(job.recipe_name, job.recipe, job.folder)
        names = ", ".join(sorted(existing.recipes))
        do = "name one of its recipes with --set cache.recipe=NAME"
        raise ConfigError(f"this cache has no recipe {job.recipe_name!r}", where=job.folder, found=names, do=do)
    if changes := recipe_changes(recipe, job.recipe):
        what = "--repair needs the model and the settings that the cache was built with"
        raise ConfigError(what, where=job.folder, found="; ".join(changes), do=_right_settings(job))
    damaged = damaged_shards(job.folder, existing, on_bytes)
    mine = recipe_id(job.recipe)
    ours = set(existing.rows.where_in(recipe=[mine], shard=damaged).column("shard").to_pylist())
    affected = existing.rows.where_in(shard=ours)
    keys_lost = {key for shard in ours for key in damaged[shard]}
    lost = {key: affected[key] for key in affected if key in keys_lost}
    plan = _plan_repair(job, existing, lost)
    dropped = lost.keys() - {sample.key for sample in plan.samples}
    rewritten = affected.without(dropped)
    order = by_position(existing.manifest, rewritten)
    shard_of = dict(zip(rewritten, rewritten.column("shard").to_pylist(), strict=True))
    last = dict.fromkeys(ours, "") | {shard_of[key]: key for key in order}
    whole, listed = existing.only(existing.rows.without(lost)), existing.only(existing.rows.without(dropped)).listed
    update = plan_update(job.folder, whole, job.format_version, listed, order, last)
    update = replace(update, vae_encoders=job.vae_encoders)
    keys = {sample.key for sample in plan.samples}
    finished = finished_samples(job.folder, existing.manifest, staging_name(job, repair=True), keys)
    plan = replace(plan, kept=finished.interrupted, to_copy=finished.replaced)

    others = damaged.keys() - ours
    rows = existing.rows.where_in(shard=others)
    pairs = zip(rows.column("shard").to_pylist(), rows.column("recipe").to_pylist(), strict=True)
    held = {(shard, existing.recipe_names.get(of, "")) for shard, of in pairs}
    elsewhere = {shard: sorted(name for other, name in held if other == shard) for shard in sorted(others)}
    return Repair(plan, update, elsewhere)


def _right_settings(job: BuildJob) -> str:
    """The place of the recipe's settings: the cache has a file of those of its last build."""
    path = job.folder / CONFIG_NAME
    with suppress(ConfigError, OSError):
        if not is_remote(path) and (load_saved(path).cache.recipe or DEFAULT_RECIPE) == job.recipe_name:
            return f"add `{shell_line(['--config', str(path)])}`, which has those of the last build"
    return f"give those of recipe {job.recipe_name!r}; {path} does not have them"


def _plan_repair(job: BuildJob, existing: Existing, lost: Mapping[str, IndexRow]) -> BuildPlan:
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
    """The problem of a damaged sample that cannot be encoded again."""
    if now is None:
        return f"{row.name} is damaged, and the source no longer has it", f"put it back, {_DROP}"
    changes = differences(row.meta.inputs, row.meta.prompt, now.inputs, now.row.prompt) or ["size"]
    what = f"{row.name} is damaged, and its source has changed since ({', '.join(changes)})"
    return what, f"restore the old source, {_DROP}: the next build encodes the new one"
