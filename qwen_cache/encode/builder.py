"""Build: make a cache equal to its source under one recipe, encoding only what is not there.

    prepare (source, model, recipe) → plan (what, why) → lanes (encode) → staging (shards) → one commit

A second build of the same source does nothing. A build that dies leaves the old dataset in place and its finished
samples in staging; the same command goes on from there and gives the same bytes.
"""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache import __version__
from qwen_cache.config import Config
from qwen_cache.encode.plan import Plan, Planned, Rules, make_plan
from qwen_cache.encode.recipe import make_recipe
from qwen_cache.encode.source import Problem, Row, read_source
from qwen_cache.encode.staging import Staging
from qwen_cache.encode.template import PIXEL_TOKENS, TEMPLATES
from qwen_cache.format import directory
from qwen_cache.format.cache import map_file
from qwen_cache.format.errors import ConfigError
from qwen_cache.format.identity import content_hash, dataset_identity, recipe_id
from qwen_cache.format.index import INDEX_NAME, IndexRow, index_row, read_index, write_index
from qwen_cache.format.manifest import MANIFEST_NAME, IndexFile, Manifest, Recipe, Shard
from qwen_cache.model_folder import ModelFolder, open_model

if TYPE_CHECKING:
    from qwen_cache.encode.lanes import InFlight, Lanes

ENCODER_PARTS = ("vae", "text_encoder", "tokenizer", "processor")
IN_FLIGHT = 8  # samples decoded ahead of the writer: enough for uneven lanes, about 100 MB of pixels
DEFAULT_RECIPE = "default"


@dataclass(frozen=True)
class Job:
    """Everything that is known before the cache is looked at."""

    config: Config
    folder: Path
    model: ModelFolder
    recipe: dict[str, Any]
    rows: list[Row]
    problems: list[Problem]

    @property
    def recipe_name(self) -> str:
        return self.config.cache.recipe or DEFAULT_RECIPE

    @property
    def condition_image_size(self) -> int:
        """Pixels of a picture for the text encoder; 0 where it sees none."""
        return int(self.recipe.get("condition_image_size", 0))

    @property
    def format_version(self) -> int:
        return int(self.config.cache.format.removeprefix("v"))


@dataclass(frozen=True)
class Existing:
    """What a cache holds already: all recipes."""

    manifest: Manifest
    rows: list[IndexRow]

    def of_recipe(self, name: str) -> dict[str, IndexRow]:
        """The rows of the recipe called `name`, by key."""
        recipe = self.manifest.recipes.get(name)
        return {row.meta.key: row for row in self.rows if recipe and row.meta.recipe == recipe.id}


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
    model = open_model(config.model.path, ENCODER_PARTS, config.model.revision)
    rows, problems = read_source(
        Path(source or config.data.source),
        needs_control=model.takes_controls,
        allow_empty_prompt=config.data.allow_empty_prompt,
    )
    more = check_prompts(model, rows)
    rows = [row for row in rows if row.where not in {problem.where for problem in more}]
    return Job(config, Path(config.cache.path), model, make_recipe(model, config, on_bytes), rows, [*problems, *more])


def check_prompts(model: ModelFolder, rows: list[Row]) -> list[Problem]:
    """Prompts that the encoder cannot take, or that the pipeline would cut off without a word."""
    problems = [
        Problem(row.where, f"{row.name}: the prompt contains {token}, which stands for a picture's pixels", "remove it")
        for row in rows
        for token in PIXEL_TOKENS
        if token in row.prompt
    ]
    limit = TEMPLATES[model.pipeline].max_length
    long = [row for row in rows if limit and len(row.prompt.encode()) > limit // 2]  # a token is a byte or more
    if limit and long:
        from qwen_cache.encode.text import kept_tokens

        for row, length in zip(long, kept_tokens(model, [row.prompt for row in long]), strict=True):
            if length > limit:
                what = f"{row.name}: the prompt has {length} tokens, the pipeline uses {limit}"
                problems.append(Problem(row.where, what, "shorten it"))
    return problems


def load_existing(job: Job) -> Existing:
    """The cache as it is; ConfigError when it cannot take this recipe."""
    if not (job.folder / MANIFEST_NAME).exists():
        return Existing(Manifest.empty(job.format_version), [])
    manifest, index = directory.load(job.folder)
    if manifest.format_version != job.format_version:
        raise ConfigError(
            "this cache is of another format version",
            where=job.folder,
            expected=f"v{job.format_version}",
            found=f"v{manifest.format_version}",
            do=f"build with --format v{manifest.format_version}, or into another folder",
        )
    same = [name for name, recipe in manifest.recipes.items() if recipe.id == recipe_id(job.recipe)]
    if same and same != [job.recipe_name]:
        raise ConfigError(
            f"recipe {same[0]!r} of this cache is this very recipe", where=job.folder, do=f"set cache.recipe={same[0]}"
        )
    where = str(job.folder / INDEX_NAME)
    records = read_index(index, manifest.format_version, where).to_pylist()
    return Existing(manifest, [index_row(record, manifest.format_version, where) for record in records])


def plan_build(job: Job, existing: Existing, on_row: Callable[[], None] = lambda: None) -> Plan:
    """What to encode, and why."""
    recipe = existing.manifest.recipes.get(job.recipe_name)
    rules = Rules(
        job.model.pipeline,
        recipe_id(job.recipe),
        job.recipe["vae_image_size"],
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


@dataclass(frozen=True)
class Target:
    """What the dataset will be: all samples in order, and those that have to be written, from where."""

    rows: list[tuple[str, str]]
    """Name and key of every sample."""
    kept: dict[str, IndexRow]
    """By key: samples that stay where they are."""
    copied: dict[str, IndexRow]
    """By key: samples that stay, out of shards that do not."""
    encoded: dict[str, Planned]

    @property
    def order(self) -> list[str]:
        """The keys to be written, in order."""
        return [key for _, key in self.rows if key not in self.kept]


def plan_target(job: Job, existing: Existing, plan: Plan) -> Target:
    """A shard stays as it is while every sample in it does; one that holds anything else is written anew."""
    mine = existing.of_recipe(job.recipe_name)
    others = [row for row in existing.rows if row.meta.key not in mine]
    rows = [(row.name, row.meta.key) for row in others] + [(s.row.name, s.key) for s in plan.samples]
    encoded = {sample.key: sample for sample in plan.to_encode}
    alive = {row.meta.key: row for row in [*others, *mine.values()]}
    alive = {key: alive[key] for _, key in rows if key in alive and key not in encoded}
    count: dict[str, int] = {}
    for row in alive.values():
        count[row.shard] = count.get(row.shard, 0) + 1
    whole = {shard.name for shard in existing.manifest.shards if count.get(shard.name) == shard.samples}
    kept = {key: row for key, row in alive.items() if row.shard in whole}
    return Target(rows, kept, {key: row for key, row in alive.items() if key not in kept}, encoded)


def is_up_to_date(job: Job, existing: Existing, target: Target) -> bool:
    """Whether the cache is already what the build would make."""
    rows = [(row.name, row.meta.key) for row in existing.rows]
    return job.recipe_name in existing.manifest.recipes and target.rows == rows


def run(
    job: Job,
    existing: Existing,
    plan: Plan,
    load_lanes: Callable[[Job], Lanes],
    on_sample: Callable[[int], None] = lambda _: None,
) -> Report:
    """Encode and commit; the caller holds `directory.writing(job.folder)`.

    `on_sample` hears how many samples are done: at once those that an earlier run left, then one by one.
    """
    target = plan_target(job, existing, plan)
    staging = open_staging(job, existing, target)
    try:
        on_sample(sum(key in target.encoded for key in target.order[: staging.position]))
        _write(job, target, staging, load_lanes, on_sample)
        shards = staging.finish()
    finally:
        staging.close()
    manifest, index = _describe(job, existing, target, shards)
    directory.commit(job.folder, manifest, index, [staging.folder / shard.name for shard, _ in shards])
    shutil.rmtree(staging.folder)
    return Report(
        encoded=len(target.encoded),
        samples=manifest.recipes[job.recipe_name].samples,
        shards=len(manifest.shards),
        bytes=sum(shard.bytes for shard in manifest.shards),
        replaced=len({shard.name for shard in existing.manifest.shards} - {shard.name for shard in manifest.shards}),
    )


def open_staging(job: Job, existing: Existing, target: Target) -> Staging:
    """The staging folder of this recipe, with the shards that a crash left under their final names."""
    folder = job.folder / directory.STAGING / f"{recipe_id(job.recipe)}-v{job.format_version}"
    for path in directory.unlisted_shards(job.folder, existing.manifest):
        folder.mkdir(parents=True, exist_ok=True)
        path.replace(folder / path.name)
    return Staging(folder, target.order, job.format_version, int(job.config.cache.shard_size))


def _write(
    job: Job, target: Target, staging: Staging, load_lanes: Callable[[Job], Lanes], on_sample: Callable[[int], None]
) -> None:
    """Write what is missing, in order; the encoders are loaded only when there is something to encode."""
    order = target.order[staging.position :]
    if not any(key in target.encoded and staging.left_over(key) is None for key in order):
        for key in order:
            _copy(job, key, target, staging)
            on_sample(key in target.encoded)
        return
    with load_lanes(job) as lanes:
        for key, work in _ahead(order, target, staging, lanes):
            if work is None:
                _copy(job, key, target, staging)
            else:
                staging.add(*lanes.result(work))
            on_sample(key in target.encoded)


def _ahead(order: list[str], target: Target, staging: Staging, lanes: Lanes) -> Iterator[tuple[str, InFlight | None]]:
    """Each key with its work, of which up to IN_FLIGHT pieces are under way; None for what is copied."""
    waiting: deque[tuple[str, InFlight | None]] = deque()
    for key in order:
        encode = key in target.encoded and staging.left_over(key) is None
        waiting.append((key, lanes.submit(target.encoded[key]) if encode else None))
        if len(waiting) >= IN_FLIGHT:
            yield waiting.popleft()
    yield from waiting


def _copy(job: Job, key: str, target: Target, staging: Staging) -> None:
    left = staging.left_over(key)
    if left is None:
        row = target.copied[key]
        left = row.entry, map_file(directory.shard_path(job.folder, row.shard))
    staging.add_copy(*left)


def _describe(
    job: Job, existing: Existing, target: Target, shards: list[tuple[Shard, list[Any]]]
) -> tuple[Manifest, bytes]:
    """The manifest and the index of the new dataset."""
    places = {entry.meta.key: (shard.name, entry) for shard, entries in shards for entry in entries}
    places |= {key: (row.shard, row.entry) for key, row in target.kept.items()}
    rows = [IndexRow(name, *places[key]) for name, key in target.rows]
    index = write_index(rows, job.format_version)
    mine = [row.meta.key for row in rows if row.meta.recipe == recipe_id(job.recipe)]
    recipes = {**existing.manifest.recipes, job.recipe_name: Recipe(job.recipe, len(mine), dataset_identity(mine))}
    kept = {row.shard for row in target.kept.values()}
    libraries = {name: version(name) for name in ("diffusers", "torch", "transformers")}
    return replace(
        existing.manifest,
        recipes=recipes,
        index=IndexFile(len(rows), len(index), content_hash(index)),
        shards=(*(old for old in existing.manifest.shards if old.name in kept), *(shard for shard, _ in shards)),
        written_by={"qwen-cache": __version__, **libraries},
    ), index
