"""Build: make a cache equal to its source under one recipe, encoding only what is not there.

    prepare (source, model, recipe) → plan (what, why) → lanes (encode) → staging (shards) → one commit

A second build of the same source does nothing, and one that goes back to settings that a cache had takes the samples
out of the shards that were replaced, as long as those are there. A build that dies leaves the old dataset in place and
its finished samples in staging; the same command goes on from there and gives the same bytes, where the encoders take
one sample at a time (`batching`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

from qwen_cache.encode.edit_mask import EditMasks
from qwen_cache.encode.plan import Plan, Planned, Rules, make_plan
from qwen_cache.encode.recipe import make_recipe
from qwen_cache.encode.slices import Part, refuse_other_parts
from qwen_cache.errors import ConfigError, Problem, ShardError
from qwen_cache.format import directory
from qwen_cache.format.identity import recipe_id
from qwen_cache.format.index import IndexRow
from qwen_cache.format.manifest import DEFAULT_RECIPE
from qwen_cache.format.sample import SampleMeta
from qwen_cache.format.shard import compress
from qwen_cache.format.staging import Staging
from qwen_cache.format.update import (
    Existing,
    Listed,
    Update,
    commit_update,
    copy_if_there,
    open_staging,
    plan_update,
    read_existing,
    replaced_shards,
)
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.models.template import PIXEL_TOKENS, TEMPLATES
from qwen_cache.settings.cache import check_compression
from qwen_cache.settings.load import Config
from qwen_cache.sources.detect import Row, read_source
from qwen_cache.sources.sizes import Resolution
from qwen_cache.storage.url import location
from qwen_cache.version import __version__

ENCODER_PARTS = ("vae", "text_encoder", "tokenizer", "processor")
IN_FLIGHT = 16  # samples ahead of the writer: enough for uneven lanes, about 300 MB of pixels at a megapixel


@dataclass(frozen=True)
class Job:
    """Everything that is known before the cache is looked at."""

    config: Config
    folder: Path
    model: ModelFolder
    recipe: dict[str, Any]
    rows: list[Row]
    problems: list[Problem]
    masks_left_out: int = 0
    """Masks of the source that the format version has no place for."""
    part: Part | None = None
    """Which part of the source `rows` are."""
    elsewhere: frozenset[str] = frozenset()
    """The names of the rows of the other parts."""

    @property
    def recipe_name(self) -> str:
        return self.config.cache.recipe or DEFAULT_RECIPE

    @property
    def resolution(self) -> Resolution:
        return Resolution.of(self.config.data)

    @property
    def condition_image_size(self) -> int:
        """Pixels of an image for the text encoder; 0 where it sees none."""
        return int(self.recipe.get("condition_image_size", 0))

    @property
    def keeps_thumbnails(self) -> bool:
        return self.config.cache.thumbnails and self.format_version > 1

    @property
    def format_version(self) -> int:
        return int(self.config.cache.format.removeprefix("v"))


class Encoding(Protocol):
    """The encoders at work, on one machine or on many. Results are asked for in the order of submission."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def submit(self, sample: Planned) -> Any: ...

    def result(self, work: Any) -> tuple[SampleMeta, dict[str, memoryview]]: ...


@dataclass(frozen=True)
class Encoders:
    """How to load them, once there is something to encode, and how many samples to submit before the first result."""

    load: Callable[[Job], Encoding]
    in_flight: int = IN_FLIGHT


@dataclass(frozen=True)
class Report:
    """What a build did."""

    encoded: int
    samples: int
    shards: int
    bytes: int
    replaced: int
    """Shards that the dataset no longer names, kept until `gc`."""


def prepare(config: Config, source: str | None, on_bytes: Callable[[int], None] = lambda _: None) -> Job:
    """Find the model, read the source, fingerprint the weights."""
    Resolution.of(config.data)  # says at once what is wrong with it
    check_compression(config.cache.format, config.cache.compression)
    masks = EditMasks.of(config)
    model = open_model(config.model.path, ENCODER_PARTS, config.model.revision)
    masks.check(model, config.cache.format)
    read = read_rows(config, source or config.data.source, model, lambda rows: check_prompts(model, rows))
    left_out = sum(row.mask is not None for row in read.rows) if config.cache.format == "v1" else 0
    keeps_masks = config.cache.format != "v1" and masks.source != "none"
    rows = as_encoded(read.rows, masks=keeps_masks, phrases=masks.attend)
    recipe = make_recipe(model, config, on_bytes)
    folder = Path(config.cache.path)
    return Job(config, folder, model, recipe, rows, read.problems, left_out, read.part, read.elsewhere)


@dataclass(frozen=True)
class SourceRows:
    """The rows of a source that can be used, or of a slice of it."""

    rows: list[Row]
    problems: list[Problem]
    """Why the others cannot."""
    part: Part | None
    elsewhere: frozenset[str]
    """The names of the rows of the other slices."""


def read_rows(
    config: Config, source: str, model: ModelFolder, check: Callable[[list[Row]], list[Problem]]
) -> SourceRows:
    """Read `source` as `config.data` says; a row for which `check` has a problem is left out."""
    every, problems = read_source(
        location(source), needs_control=model.takes_controls, allow_empty_prompt=config.data.allow_empty_prompt
    )
    part = Part.parse(config.data.slice) if config.data.slice else None
    rows, problems = (part.of(every), part.of(problems)) if part else (every, problems)
    elsewhere = frozenset(row.name for row in every) - {row.name for row in rows}
    unusable = check(rows)
    rows = [row for row in rows if row.where not in {problem.where for problem in unusable}]
    return SourceRows(rows, [*problems, *unusable], part, elsewhere)


def as_encoded(rows: list[Row], *, masks: bool, phrases: bool) -> list[Row]:
    """The rows, but for what nothing that is stored depends on."""
    return [replace(row, mask=row.mask if masks else None, phrase=row.phrase if phrases else ()) for row in rows]


def check_tokens(rows: list[Row]) -> list[Problem]:
    """Prompts that the encoder cannot take."""
    return [
        Problem(row.where, f"{row.name}: the prompt contains {token}, which stands for an image's pixels", "remove it")
        for row in rows
        for token in PIXEL_TOKENS
        if token in row.prompt
    ]


def check_prompts(model: ModelFolder, rows: list[Row]) -> list[Problem]:
    """Prompts that the encoder cannot take, or that the pipeline would cut off without a word."""
    problems = check_tokens(rows)
    limit = TEMPLATES[model.pipeline].max_length
    long = [row for row in rows if limit and len(row.prompt.encode()) > limit // 2]  # a token is a byte or more
    if limit and long:
        from qwen_cache.encode.text import kept_tokens

        for row, length in zip(long, kept_tokens(model, [(row.prompt, ()) for row in long]), strict=True):
            if length > limit:
                what = f"{row.name}: the prompt has {length} tokens, the pipeline uses {limit}"
                problems.append(Problem(row.where, what, "shorten it"))
    return problems


def load_existing(job: Job) -> Existing:
    """The cache as it is; ConfigError when it cannot take this recipe."""
    existing = read_existing(job.folder, job.format_version)
    manifest = existing.manifest
    if manifest.format_version != job.format_version:
        raise ConfigError(
            "this cache is of another format version",
            where=job.folder,
            expected=f"v{job.format_version}",
            found=f"v{manifest.format_version}",
            do=f"run `qwen-cache migrate`, build with --format v{manifest.format_version}, or into another folder",
        )
    existing.check_name(job.recipe_name, job.recipe, job.folder)
    if job.part:
        held = [row.name for row in existing.of_recipe(job.recipe_name).values()]
        refuse_other_parts(job.folder, job.part, held, job.elsewhere)
    return replace(existing, rows=_present(job, existing))


def _present(job: Job, existing: Existing) -> list[IndexRow]:
    """The rows whose shard is there. What was in one that is gone is encoded again, by this recipe of its name."""
    here = directory.shards_here(job.folder, existing.manifest)
    replaced = existing.manifest.recipes.get(job.recipe_name)
    ours = {recipe_id(job.recipe), replaced.id if replaced else None}
    for row in existing.rows:
        if row.shard not in here and row.meta.recipe not in ours:
            raise ShardError("a shard with samples of another recipe is missing", where=job.folder / row.shard)
    return [row for row in existing.rows if row.shard in here]


def plan_build(job: Job, existing: Existing, on_row: Callable[[], None] = lambda: None) -> Plan:
    """What to encode, and why."""
    recipe = existing.manifest.recipes.get(job.recipe_name)
    rules = Rules(
        job.model.pipeline,
        recipe_id(job.recipe),
        job.resolution,
        job.condition_image_size,
        job.model.max_controls,
    )
    changed = changed_settings(recipe.recipe, job.recipe) if recipe else []
    return make_plan(job.rows, job.problems, rules, existing.of_recipe(job.recipe_name), changed, on_row)


def changed_settings(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """What differs between two recipes, in words: `dtype bfloat16 → float32`, or only the name for a fingerprint."""
    found = []
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if a != b:
            long = any(len(str(value)) > 24 for value in (a, b))
            found.append(name if long else f"{name} {a} → {b}")
    return found


def make_update(job: Job, existing: Existing, plan: Plan) -> Update:
    """The dataset that the build shall make: the other recipes as they are, then this one in the order of the
    source."""
    others = existing.others(job.recipe_name)
    ours = [Listed(sample.row.name, sample.key, sample.source_rows) for sample in plan.samples]
    order = [row.key for row in others] + plan.order
    return plan_update(job.folder, existing, job.format_version, [*others, *ours], order)


def run(
    job: Job,
    update: Update,
    to_encode: Sequence[Planned],
    load_lanes: Callable[[Job], Encoding],
    on_sample: Callable[[int], None] = lambda _: None,
    in_flight: int = IN_FLIGHT,
) -> Report:
    """Encode and commit; the caller holds `directory.writing(job.folder)`.

    `on_sample` hears how many samples are done: at once those that an earlier run left, then one by one.
    """
    encoded = {sample.key: sample for sample in to_encode}
    back = replaced_shards(job.folder, encoded.keys(), job.format_version)
    staging = open_staging(update, recipe_id(job.recipe), int(job.config.cache.shard_size), back)
    try:
        on_sample(sum(key in encoded for key in update.order[: staging.position]))
        _write(job, update, encoded, staging, Encoders(load_lanes, in_flight), on_sample)
        libraries = {name: version(name) for name in ("diffusers", "torch", "transformers")}
        written_by = {"qwen-cache": __version__, **libraries}
        manifest = commit_update(update, staging, {**update.existing.recipes, job.recipe_name: job.recipe}, written_by)
    finally:
        staging.close()
    before, after = ({s.name for s in m.shards} for m in (update.existing.manifest, manifest))
    return Report(
        encoded=len(encoded),
        samples=manifest.recipes[job.recipe_name].samples,
        shards=len(after),
        bytes=sum(shard.bytes for shard in manifest.shards),
        replaced=len(before - after),
    )


def _write(
    job: Job,
    update: Update,
    encoded: Mapping[str, Planned],
    staging: Staging,
    encoders: Encoders,
    on_sample: Callable[[int], None],
) -> None:
    """Write what is missing, in order; the encoders are loaded only when there is something to encode."""
    order = update.order[staging.position :]
    missing = {key for key in order if key in encoded and staging.left_over(key) is None}
    with encoders.load(job) if missing else nullcontext() as lanes:
        for key, work in _ahead(order, encoded, missing, lanes, encoders.in_flight):
            if lanes is not None and work is not None:
                staging.add(*compress(*lanes.result(work), job.config.cache.compression))
            else:
                there = copy_if_there(update, staging, key)
                assert there
            on_sample(key in encoded)


def _ahead(
    order: Sequence[str], encoded: Mapping[str, Planned], missing: set[str], lanes: Encoding | None, in_flight: int
) -> Iterator[tuple[str, Any]]:
    """Each key with its work, of which up to `in_flight` pieces are under way; None for what is copied."""
    waiting: deque[tuple[str, Any]] = deque()
    for key in order:
        waiting.append((key, lanes.submit(encoded[key]) if lanes and key in missing else None))
        if len(waiting) >= in_flight:
            yield waiting.popleft()
    yield from waiting
