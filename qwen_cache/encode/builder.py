"""A build job: rows, samples to encode and to keep, an estimate of the work, and what has settled."""

from __future__ import annotations

import math
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from threading import Lock
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import numpy as np
import pyarrow.compute as pc

from qwen_cache.encode.plan import (
    BuildPlan,
    PlannedSample,
    RememberedImages,
    Rules,
    SlicedSource,
    SourceSlice,
    make_plan,
)
from qwen_cache.encode.recipe import EditMasks, ReusableSamples, as_cached, make_recipe, recipe_changes, vae_encoders
from qwen_cache.errors import ConfigError, Notice, Problem, ShardError, SourceError
from qwen_cache.format import directory
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.manifest import DEFAULT_RECIPE
from qwen_cache.format.remote import STAGED, Stored, conflict
from qwen_cache.format.rows import ListedSample, ListedSamples, listed
from qwen_cache.format.sample import LATENT_CHANNELS, SampleMeta, token_count
from qwen_cache.format.staging import Destination, finished_samples
from qwen_cache.format.update import Existing, OtherCaches, Update, plan_update, read_existing
from qwen_cache.models.family import estimate_tokens, pixel_token, pixel_token_told
from qwen_cache.models.folder import ENCODER_PARTS, ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import check_compression
from qwen_cache.sources.captions import Captions, has_marks
from qwen_cache.sources.detect import Row, read_content, reading, without_gc
from qwen_cache.sources.images import thumbnail_size
from qwen_cache.sources.sizes import Resolution, Size, calculate_dimensions, img_shapes
from qwen_cache.storage.files import cache_home
from qwen_cache.storage.remote import LocalCopies, Location, is_remote, location
from qwen_cache.storage.stores import destination
from qwen_cache.terminal import human_bytes, plural

if TYPE_CHECKING:
    import torch

# ---- builder ---------------------------------------------------------------------------------------------------------
# Build: plan a cache equal to its source under one recipe, encoding only what is missing.
#
#     prepare (source, model, recipe) → plan (what, why) → lanes (encode) → staging (shards) → commit (`write.py`)
#
# A second build of the same source does nothing. A build that returns to earlier settings reuses the samples in
# replaced shards, while those exist.


@dataclass(frozen=True)
class BuildJob:
    """Everything a build knows before it reads the cache."""

    config: Config
    folder: Location
    model: ModelFolder
    recipe: dict[str, Any]
    rows: list[Row]
    problems: list[Problem]
    masks_left_out: int = 0
    """Masks of the source that the format version cannot store."""
    slice: SourceSlice | None = None
    """The slice of the source that `rows` come from; None for the whole source."""
    sliced: SlicedSource | None = None
    """All rows of that source; None if it is not sliced."""
    source: str = ""
    """The address that `rows` come from."""
    rows_left_out: int = 0
    """Rows that the source leaves out, of all slices."""
    notices: tuple[Notice, ...] = ()
    """Facts about rows that are used all the same."""
    vae_encoders: Mapping[str, str] = field(default_factory=dict)
    """The hash that the manifest gets of the VAE (`Manifest.vae_encoders`)."""

    def keeps(self, name: str) -> bool:
        """True if a cached sample of this name belongs to another slice."""
        return self.sliced is not None and self.sliced.keeps(name)

    @property
    def recipe_name(self) -> str:
        return self.config.cache.recipe or DEFAULT_RECIPE

    @property
    def resolution(self) -> Resolution:
        return Resolution.of(self.config.data)

    @property
    def condition_image_size(self) -> int:
        """Pixels of an image for the text encoder; 0 if it sees no images, or those of the VAE."""
        return int(self.recipe.get("condition_image_size", 0))

    def encoder_pixels(self, sample: PlannedSample) -> list[int]:
        """Pixels of each image of a sample for the text encoder."""
        if self.model.family.one_condition_image:
            return [width * height for width, height in sample.sizes[1:]]
        return [self.condition_image_size] * (len(sample.sizes) - 1)

    @property
    def keeps_thumbnails(self) -> bool:
        return self.config.cache.thumbnails and self.format_version > 1

    @property
    def format_version(self) -> int:
        return int(self.config.cache.format.removeprefix("v"))


def prepare_build(
    config: Config,
    source: str | None,
    on_bytes: Callable[[int], None] = lambda _: None,
    model: ModelFolder | None = None,
    *,
    here: bool = True,
) -> BuildJob:
    """Find the model, read the source, fingerprint the weights. ConfigError, ModelError or SourceError if one fails.

    `model` is that of `fitting_model`, if it was called before. `here`: this machine encodes, not a cluster.
    """
    folder, source = destination(config.cache.path), source or config.data.source
    if directory.is_same(location(source), folder):
        what = "the cache would be among the images that it is made from"
        raise ConfigError(what, where=config.cache.path, do="choose another folder with --out")
    model = model or fitting_model(config)
    masks = EditMasks.of(config)
    keeps_masks = config.cache.format != "v1" and masks.source != "none"
    check = partial(check_prompts, model)
    job = read_job(config, source, folder, model, check, masks=keeps_masks, phrases=masks.attend)
    recipe, encoders = recipe_of_build(config, model, on_bytes, here=here)
    return replace(job, recipe=recipe, vae_encoders=encoders)


def prepare_service(config: Config, on_bytes: Callable[[int], None] = lambda _: None) -> BuildJob:
    """A job without rows, which come later. ConfigError or ModelError as for `prepare_build`."""
    folder, model = destination(config.cache.path), fitting_model(config)
    recipe, encoders = recipe_of_build(config, model, on_bytes)
    return BuildJob(config, folder, model, recipe, [], [], vae_encoders=encoders)


def recipe_of_build(
    config: Config, model: ModelFolder, on_bytes: Callable[[int], None] = lambda _: None, *, here: bool = True
) -> tuple[dict[str, Any], dict[str, str]]:
    """The recipe of a build, and its `vae_encoders`. Where it gives the same as that of the cache, it is that one.

    Without a cache it is that of the first cache of `cache.reuse`, whose samples are then found. FormatError for a
    damaged cache.
    """
    made = make_recipe(model, config, on_bytes, here=here)
    encoders, name = vae_encoders(model, made), config.cache.recipe or DEFAULT_RECIPE
    named = [destination(config.cache.path), *map(location, config.cache.reuse)]
    folders = [folder for folder in named if is_remote(folder) or folder.is_dir()]
    manifest = next((it for it in map(directory.read_manifest, folders) if it and it.recipes), None)
    if manifest is None:
        return made, encoders
    cached = manifest.recipes.get(name) or next(iter(manifest.recipes.values()))
    recipe = as_cached(made, cached.recipe, {**manifest.vae_encoders, **encoders})
    return recipe, ({recipe["vae"]: encoders[made["vae"]]} if encoders else {})


def fitting_model(config: Config) -> ModelFolder:
    """The model; ConfigError or ModelError unless its encoders are there and the settings fit it."""
    Resolution.of(config.data)  # refuses contradictory settings early
    check_compression(config.cache.format, config.cache.compression)
    masks = EditMasks.of(config)
    named = config.model
    model = open_model(named.path, ENCODER_PARTS, named.revision, text_encoder=named.text_encoder)
    check_family(model, config)
    check_text_quantization(model, config)
    masks.check(model, config.cache.format)
    return model


def check_family(model: ModelFolder, config: Config) -> None:
    """ConfigError for settings that the model's family does not have."""
    family = model.family
    if family.one_condition_image and config.data.condition_image_size is not None:
        raise ConfigError(
            f"{family.name} has no data.condition_image_size: its text encoder sees the image that the VAE gets",
            found=f"data.condition_image_size={config.data.condition_image_size}",
            do="leave it out; data.vae_image_size sets the size of both",
        )
    if family.text_rows_only and config.cache.format == "v1":
        raise ConfigError(f"format v1 cannot hold a cache of {family.name}", do="build with --format v2")


def check_text_quantization(model: ModelFolder, config: Config) -> None:
    """ConfigError if the text encoder is to be quantised, and is a file that is already."""
    file, kind = model.text_encoder_file, config.cache.text_quantization
    if file is not None and file.quantization and kind != "none":
        raise ConfigError(
            f"cache.text_quantization={kind} is for weights that are not quantised yet",
            where=file.path,
            found=f"{file.quantization} weights",
            do="set cache.text_quantization=none: the file is loaded as it was saved",
        )


@without_gc()
def read_job(
    config: Config,
    source: str,
    folder: Location,
    model: ModelFolder,
    check: Callable[[list[Row]], list[Problem]],
    *,
    masks: bool,
    phrases: bool,
) -> BuildJob:
    """A job without a recipe: the rows of `source` for the settings `config.data`, of the slice that these name.

    A row in which `check` finds a problem is not usable. `masks` and `phrases` are those of `as_encoded`.
    """
    settings = reading(config.data, model) | {"captions": Captions.of(config.data)}
    content = read_content(location(source), **settings)
    rows, problems = content.rows, content.problems
    unfit = [(row.name, what) for row in rows if (what := not_in_v1(row))] if config.cache.format == "v1" else []
    if unfit:
        found, do = f"{plural(len(unfit), 'row')}, such as {unfit[0][0]}", "build with --format v2"
        raise ConfigError(f"format v1 cannot hold {unfit[0][1]}", where=source, found=found, do=do)
    source_slice, sliced = SourceSlice.parse(config.data.slice) if config.data.slice else None, None
    if source_slice:
        positions = {row.name: i for i, row in enumerate(rows)}
        rows = source_slice.take(rows)
        sliced = SlicedSource(positions, frozenset(row.name for row in rows), is_complete=not problems)
        problems = source_slice.take(problems)
    if unusable := [*check(rows), *check_sizes(model, rows)]:
        places = {problem.where for problem in unusable}
        rows = [row for row in rows if row.where not in places]
    return BuildJob(
        config,
        folder,
        model,
        {},
        as_encoded(rows, masks=masks, phrases=phrases, marked=config.data.marked_phrases),
        [*problems, *unusable],
        masks_left_out=sum(row.mask is not None for row in rows) if config.cache.format == "v1" else 0,
        slice=source_slice,
        sliced=sliced,
        source=source,
        rows_left_out=content.left_out,
        notices=content.notices,
    )


def not_in_v1(row: Row) -> str | None:
    """The first part of a row for which format v1 has no place; None if there is none."""
    parts = {"rejected images": row.rejected, "directions of sliders": row.slider}
    return next((what for what, part in parts.items() if part is not None), None)


def as_encoded(rows: list[Row], *, masks: bool, phrases: bool, marked: bool | None) -> list[Row]:
    """The rows without masks and phrases, unless the stored tensors depend on them.

    SourceError where they depend on phrases, and `marked` is None: it says whether `[[ ]]` mark one.
    """
    names = [row.name for row in rows if has_marks(row.prompt)] if phrases and marked is None else []
    if names:
        what = f"{plural(len(names), 'prompt')} with [[ ]], which may mark the words that say where the edit is"
        do = "set data.marked_phrases=true if they do, or =false if they are part of the prompt"
        raise SourceError(what, where=", ".join(names[:3]), do=do)

    def fitted(row: Row) -> Row:
        if (masks or row.mask is None) and (phrases or not row.phrase):
            return row
        return replace(row, mask=row.mask if masks else None, phrase=row.phrase if phrases else ())

    return [fitted(row) for row in rows]


def check_tokens(rows: list[Row]) -> list[Problem]:
    """Problems of prompts that the encoder cannot take."""
    found = ((row, token) for row in rows for token in filter(None, map(pixel_token, row.prompts)))
    told = ((row, *pixel_token_told(token)) for row, token in found)
    return [Problem(row.where, f"{row.name}: {what}", do) for row, what, do in told]


def check_prompts(model: ModelFolder, rows: list[Row]) -> list[Problem]:
    """Problems of prompts that the encoder cannot take, or that text to image would truncate silently."""
    problems = check_tokens(rows)
    limit = model.facts.template_for(controls=0).max_length
    prompts = ((row, prompt) for row in rows if not row.controls for prompt in row.prompts)
    long = [each for each in prompts if limit and len(each[1].encode()) > limit // 2]  # a token is at least one byte
    if limit and long:
        from qwen_cache.encode.text import kept_tokens

        for (row, _), length in zip(long, kept_tokens(model, [(prompt, ()) for _, prompt in long]), strict=True):
            if length > limit:
                what = f"{row.name}: the prompt has {length} tokens, the pipeline uses {limit}"
                problems.append(Problem(row.where, what, "shorten it"))
    return problems


def check_sizes(model: ModelFolder, rows: Sequence[Row]) -> Iterator[Problem]:
    """The problems of sizes that the model cannot generate."""
    step = model.family.pixels_per_step
    for row in rows:
        if row.size and row.target is None and any(side % step for side in row.size):
            near = "×".join(str(max(step, round(side / step) * step)) for side in row.size)
            what = f"{row.name}: {row.size[0]}×{row.size[1]} cannot be generated: sides are multiples of {step} pixels"
            yield Problem(row.where, what, f"such as {near}")


@without_gc()
def load_existing(job: BuildJob) -> Existing:
    """The existing cache, without the rows of missing shards: their samples are encoded again.

    ConfigError if it cannot take this recipe, ShardError if a missing shard has samples of another one.
    """
    existing = load_every_row(job)
    existing.check_name(job.recipe_name, job.recipe, job.folder)
    here = directory.intact_shards(job.folder, existing.manifest)
    replaced = existing.manifest.recipes.get(job.recipe_name)
    ours = {recipe_id(job.recipe), replaced.id if replaced else None}
    shards = existing.manifest.shards
    is_here = np.array([*(shard.name in here for shard in shards), False])[existing.shard_numbers]
    if is_here.all():
        return existing
    lost = existing.rows.at(np.flatnonzero(~is_here))
    for recipe in set(lost.column("recipe").to_pylist()) - ours:
        row = next(lost.where_in(recipe=[recipe]).in_order())
        raise ShardError(
            "a shard with samples of another recipe is missing",
            where=job.folder / row.shard,
            found=f"samples of recipe {existing.recipe_names.get(recipe)!r}",
            do="restore it from a copy, or run `qwen-cache build --repair` with the settings of that recipe",
        )
    return existing.only(existing.rows.at(np.flatnonzero(is_here)))


def load_every_row(job: BuildJob) -> Existing:
    """The existing cache as its index has it; ConfigError for another format version."""
    existing = read_existing(job.folder, job.format_version)
    manifest = existing.manifest
    if manifest.format_version != job.format_version:
        raise ConfigError(
            "this cache has another format version",
            where=job.folder,
            expected=f"v{job.format_version}",
            found=f"v{manifest.format_version}",
            do=f"run `qwen-cache migrate`, build with --format v{manifest.format_version}, or into another folder",
        )
    return existing


def plan_build(job: BuildJob, existing: Existing, on_row: Callable[[], None] = lambda: None) -> BuildPlan:
    """The missing samples, and why. Reads only images that are new or have changed since the last plan."""
    recipe = existing.manifest.recipes.get(job.recipe_name)
    changed = recipe_changes(recipe.recipe, job.recipe) if recipe else []
    cached = existing.of_recipe(job.recipe_name)
    memory = RememberedImages.of(job.source, job.config.data)
    plan = make_plan(job.rows, job.problems, rules(job), cached, changed, on_row, memory)
    return replace(plan, removed=tuple(name for name in plan.removed if not job.keeps(name)))


def rules(job: BuildJob) -> Rules:
    """The requirements of the model and of this build's recipe on its source."""
    return Rules(
        job.model.pipeline,
        recipe_id(job.recipe),
        job.resolution,
        job.condition_image_size,
        job.model.max_controls,
        _text_rows(job) if job.model.is_here else None,
    )


def _text_rows(job: BuildJob) -> Callable[[str, Sequence[Size]], int]:
    """A function that counts the rows of prompt embeddings about controls of these sizes in the source.

    Threads may share it. It loads a tokenizer with its first call.
    """
    lock, area = Lock(), job.condition_image_size

    @cache
    def counter() -> Callable[[str, Sequence[Size]], int]:
        from qwen_cache.encode.text import token_counter

        return token_counter(job.model)

    def count(prompt: str, sizes: Sequence[Size]) -> int:
        resized = [calculate_dimensions(area, size) if area else size for size in sizes]
        with lock:
            return counter()(prompt, resized)

    return count


def without_encoder(job: BuildJob, existing: Existing, plan: BuildPlan, reusable: ReusableSamples) -> BuildPlan:
    """The plan with the missing samples that need no encoder: left by an interrupted build, in a replaced shard or in a
    cache of `cache.reuse`, or `reusable` with another mask."""
    keys = {sample.key for sample in plan.missing}
    finished = finished_samples(job.folder, existing.manifest, staging_name(job), keys)
    other, reused = other_caches(job).copies(keys - finished.interrupted - finished.replaced)
    found = finished.interrupted | finished.replaced | other
    masks = {sample.key for sample in plan.missing if sample.key not in found and reusable.row_for(sample) is not None}
    return replace(
        plan, kept=finished.interrupted, to_copy=finished.replaced | other, new_masks=frozenset(masks), reused=reused
    )


def other_caches(job: BuildJob) -> OtherCaches:
    """The caches of `cache.reuse`."""
    cache = job.config.cache
    return OtherCaches(cache.reuse, job.folder, job.format_version, LocalCopies.of_settings(cache))


def staging_name(job: BuildJob, *, repair: bool = False) -> str:
    """The name of the staging folder for builds with this recipe; repairs and slices use others."""
    of_slice = f"-{job.slice.number}-of-{job.slice.count}" if job.slice else ""
    return recipe_id(job.recipe) + of_slice + ("-repair" if repair else "")


def make_update(job: BuildJob, existing: Existing, plan: BuildPlan) -> Update:
    """The dataset after the build: the other recipes unchanged, then this one in the order of the source."""
    ours = ListedSamples.of(ListedSample(sample.row.name, sample.key, sample.source_rows) for sample in plan.samples)
    if job.sliced:
        # Cached samples of the other slices stay, unless they have another recipe, which the build replaces.
        rows = existing.of_recipe(job.recipe_name)
        is_same = existing.recipes.get(job.recipe_name) == job.recipe
        stay = rows.at(rows.positions[[is_same and job.keeps(name) for name in rows.each("name")]])
        ours = job.sliced.in_order(ours + listed(stay))
    update = plan_update(job.folder, existing, job.format_version, existing.others(job.recipe_name) + ours)
    return replace(update, order=plan.grouped(update.order), vae_encoders=job.vae_encoders)


def update_of_slice(job: BuildJob, plan: BuildPlan) -> Update:
    """`make_update` for the dataset as it is now; ConflictError if its recipe was replaced meanwhile."""
    existing = load_existing(job)
    if existing.recipes.get(job.recipe_name, job.recipe) != job.recipe:
        raise conflict(job.folder)
    return make_update(job, existing, plan)


# ---- encoders --------------------------------------------------------------------------------------------------------
# The encoders of builds: those of this machine, those of a server, or workers that encode and write shards.

IN_FLIGHT = 16  # samples ahead of the writer: enough for uneven lanes; about 300 MB of pixels at a megapixel

FindLatents = Callable[[str, Size], "Callable[[], torch.Tensor] | None"]
"""For an image file's hash and a size in pixels, a function that reads the latents `[S, 64]`; None to encode them."""

Encoded = tuple[SampleMeta, dict[str, memoryview]]
"""A sample's metadata and the bytes of its tensors."""

Chunk = tuple[PlannedSample, ...]
"""The samples of one shard that a worker writes."""


@dataclass(frozen=True)
class LaneState:
    """How far one copy of an encoder is."""

    name: str
    """Such as `vae-0`."""
    device: str
    done: int
    """Images that the VAE has encoded, or prompts that the text encoder has."""
    busy: float
    """The share of the time since it was loaded in which it encoded."""
    batches: int
    """How many batches these were."""


class RunningEncoders(Protocol):
    """Loaded encoders, which the block ends. `Lanes` has those of this machine, `ServerEncoders` those of a server.

    Callers take results in the order of submission.
    """

    def submit(self, sample: PlannedSample, known: FindLatents | None = None) -> Any:
        """Begin to encode a sample; returns what `result` takes. `known` is used if `Encoders.takes_latents` is."""
        ...

    def result(self, work: Any) -> Encoded:
        """Wait for a sample; raises its error if it failed."""
        ...

    def states(self) -> list[LaneState]:
        """How far each copy of an encoder on this machine is."""
        return []

    def close(self) -> None:
        """Drop the work that has not started, and end."""
        ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class WorkersState:
    """The content of shards that workers have not completed yet, and the samples per second of each worker."""

    samples: int
    bytes: int
    rates: Mapping[str, float]


class Workers(Protocol):
    """Processes with encoders of their own, which write shards."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    def write(
        self, chunks: Sequence[Chunk], destination: Destination, on_state: Callable[[WorkersState], None]
    ) -> Iterator[Stored]:
        """A shard of each chunk, as they are completed."""
        ...


class Encoders:
    """The encoders that builds with one recipe share: loaded when a sample first needs them, ended with the block."""

    def __init__(
        self,
        load: Callable[[BuildJob], RunningEncoders],
        in_flight: int = IN_FLIGHT,
        *,
        takes_latents: bool = False,
        start_workers: Callable[[BuildJob], AbstractContextManager[Workers]] | None = None,
    ) -> None:
        """`in_flight` samples are submitted before the first result is taken; `takes_latents` is true if `submit` uses
        the latents of caches. Workers encode in place of this process."""
        self.in_flight, self.takes_latents, self.has_workers = in_flight, takes_latents, start_workers is not None
        self._load, self._start_workers = load, start_workers
        self._running: RunningEncoders | None = None
        self._workers: Workers | None = None
        self._opened = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._opened.__exit__(kind, error, trace)

    def running(self, job: BuildJob) -> RunningEncoders:
        """The loaded encoders."""
        if self._running is None:
            self._running = self._opened.enter_context(self._load(job))
        return self._running

    def workers(self, job: BuildJob) -> Workers:
        """The started workers; only if `has_workers`."""
        if self._workers is None:
            assert self._start_workers is not None
            self._workers = self._opened.enter_context(self._start_workers(job))
        return self._workers

    def states(self) -> list[LaneState]:
        """The states of the running encoders."""
        return self._running.states() if self._running else []


Item = TypeVar("Item")
Begun = TypeVar("Begun")


def ahead(
    items: Iterable[Item], begin: Callable[[Item], Begun], in_flight: int = IN_FLIGHT
) -> Iterator[tuple[Item, Begun]]:
    """Each item with what `begin` returned for it, which is called for up to `in_flight` items ahead."""
    waiting: deque[tuple[Item, Begun]] = deque()
    for item in items:
        waiting.append((item, begin(item)))
        if len(waiting) >= in_flight:
            yield waiting.popleft()
    while waiting:
        yield waiting.popleft()


# ---- estimate --------------------------------------------------------------------------------------------------------
# What a build will write: tokens and bytes of its samples, estimated before anything is encoded, and the free space.
#
# Latents are exact; text is estimated from the number of characters, thumbnails from their pixels. Attention is not
# counted.

TEMPLATE = 1000  # tokens around the prompt and 32 images: more than any template has
OTHER = 32_000_000  # bytes of header, thumbnails and attention: more than an image of 10 megapixels needs
COMPRESSED = 0.7  # of the bytes, with zstd: settings/sections.py
HEADER = 4000  # bytes of a sample beside its tensors: the header of its file, tar's own blocks, its row in the index
THUMBNAIL = 0.25  # bytes of a pixel, of photographs as JPEG


@dataclass(frozen=True)
class Estimate:
    """The size of encoded samples: tokens of latents and of prompt embeddings, and their bytes."""

    image_tokens: int
    text_tokens: int
    bytes: int

    @property
    def tokens(self) -> int:
        return self.image_tokens + self.text_tokens

    def __str__(self) -> str:
        tokens = f"{self.image_tokens:,} image tokens, {self.text_tokens:,} text tokens"
        return f"{tokens}, {human_bytes(self.bytes)}"


def estimate(samples: Sequence[PlannedSample], job: BuildJob) -> Estimate:
    """An estimate of the size of `samples` once they are encoded."""
    image = sum(token_count(img_shapes([size for _, _, size in sample.images])) for sample in samples)
    family = job.model.family
    text = sum(estimate_tokens(family, s.row.prompt, job.encoder_pixels(s))[1] for s in samples)
    text += sum(estimate_tokens(family, prompt, [])[1] for s in samples for prompt in s.row.slider or ())
    elements = image * LATENT_CHANNELS + text * job.model.text_width
    size = elements * (2 if job.recipe["dtype"] == "bfloat16" else 4)
    size = round(size * (COMPRESSED if job.config.cache.compression == "zstd" else 1)) + len(samples) * HEADER
    if job.keeps_thumbnails:
        shown = (thumbnail_size(shape) for sample in samples for shape in sample.shown_shapes)
        size += round(THUMBNAIL * sum(map(math.prod, shown)))
    return Estimate(image, text, size)


def most_bytes(sample: PlannedSample, job: BuildJob) -> int:
    """More bytes than the encoded sample can have: each byte of a prompt is a token, and the text is stored twice."""
    image, width = token_count(sample.shown_shapes), job.model.text_width
    seen = sum(math.ceil(pixels / job.model.family.pixels_per_text_token) for pixels in job.encoder_pixels(sample))
    text = TEMPLATE + len(sample.row.prompt.encode()) + 2 * seen  # sides are rounded, maybe up
    further = sum(TEMPLATE + len(prompt.encode()) for prompt in sample.row.slider or ())
    numbers = image * (LATENT_CHANNELS + 2) + (2 * text + further) * width  # an edit mask has up to 2 for each token
    return OTHER + numbers * (2 if job.recipe["dtype"] == "bfloat16" else 4)


def bytes_to_write(job: BuildJob, plan: BuildPlan, update: Update) -> int:
    """About how many bytes the build adds to the disk. Replaced shards stay there until `gc`.

    Samples that an interrupted build has finished are on the disk already; samples of replaced shards are linked.
    """
    made = {sample.key for sample in plan.to_encode} | plan.new_masks
    written = estimate([sample for sample in plan.samples if sample.key in made], job).bytes
    written += sum(copies.bytes for copies in plan.reused.values())
    return written + (pc.sum(update.moved.column("length")).as_py() or 0)


def disk_bytes(job: BuildJob, plan: BuildPlan, update: Update) -> int:
    """About how many bytes the build needs on a disk of this machine: for object storage, a few shards at a time."""
    needed = bytes_to_write(job, plan, update)
    if not is_remote(job.folder):
        return needed
    largest = max((estimate([sample], job).bytes for sample in plan.to_encode), default=0)
    return min(needed, STAGED * max(int(job.config.cache.shard_size), largest))


def free_bytes(folder: Location) -> int | None:
    """The free space for files in `folder`, which need not exist; None if the system does not report it.

    For object storage, that of the user's cache folder, where shards wait for their upload.
    """
    folder = cache_home() if is_remote(folder) else folder
    there = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    with suppress(OSError):
        usage = shutil.disk_usage(there)
        return usage.free if usage.total > 0 else None  # some network file systems report zeros
    return None


# ---- chunks ----------------------------------------------------------------------------------------------------------
# Cut the samples that workers encode into chunks, each of which becomes one shard.
#
# Chunks have about the bytes of a shard. Where that would leave workers idle, they are smaller. Samples with the same
# controls stay together, so that these are encoded once.

PER_WORKER = 4  # chunks at least: the last worker is done at most a quarter of its time after the others
LEAST = 8  # samples, on average, in chunks that are smaller than a shard: as many as one batch of the encoders takes


def cut_into_chunks(job: BuildJob, samples: Sequence[PlannedSample], workers: int) -> list[Chunk]:
    """Cut `samples`, in their order, for this many workers, where possible between those of different controls."""
    sizes = [estimate([sample], job).bytes for sample in samples]
    wanted = max(sum(sizes) / (PER_WORKER * workers), LEAST * sum(sizes) / max(len(samples), 1))
    wanted, most = min(wanted, int(job.config.cache.shard_size)), job.config.cache.commit_every
    chunks, chunk, size = list[Chunk](), list[PlannedSample](), 0
    for sample, bytes_ in zip(samples, sizes, strict=True):
        same = bool(chunk and sample.inputs.controls and sample.inputs.controls == chunk[-1].inputs.controls)
        if chunk and (size >= (2 if same else 1) * wanted or len(chunk) == most):
            chunks.append(tuple(chunk))
            chunk, size = [], 0
        chunk.append(sample)
        size += bytes_
    return [*chunks, tuple(chunk)] if chunk else chunks


# ---- settled ---------------------------------------------------------------------------------------------------------
# Which rows of a source that changes are at rest, for `build --watch`.
#
# A row that is being written cannot be read yet, or differs from one look to the next. So a build takes the rows of
# which two looks saw the same content, leaves the samples of all other rows as they are, and removes what two looks did
# not see. While rows cannot be told apart, because their prompt or control is missing, it removes nothing.


@dataclass(frozen=True)
class Look:
    """One look at a source: the keys of each row's samples, none if another row has the same content."""

    keys: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, job: BuildJob, plan: BuildPlan) -> Look:
        """The look of this plan; a row with a problem has been written in part."""
        unusable = {problem.where for problem in plan.problems}
        keys: dict[str, tuple[str, ...]] = {row.name: () for row in job.rows if row.where not in unusable}
        for sample in plan.samples:
            keys[sample.row.name] += (sample.key,)
        return cls(keys)


def settled(job: BuildJob, now: Look, before: Look) -> BuildJob:
    """The job with the rows at rest alone, which keeps the samples of the others."""
    at_rest = frozenset(name for name, keys in now.keys.items() if before.keys.get(name) == keys)
    names = dict.fromkeys([*(row.name for row in job.rows), *before.keys])
    positions = {name: position for position, name in enumerate(names)}
    rows = [row for row in job.rows if row.name in at_rest]
    source = SlicedSource(positions, at_rest, is_complete=not job.problems)
    return replace(job, rows=rows, problems=[], sliced=source)
