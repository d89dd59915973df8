"""The plan of a build: every image read and hashed, every problem listed, and which samples are missing and why.

The plan is complete before anything is encoded. Images to encode are also decoded once, so that a corrupt file stops
the build in its first minutes and not in its last hour. Needs no torch.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from qwen_cache.console import plural
from qwen_cache.errors import Problem, SourceError
from qwen_cache.format.identity import Inputs, content_hash, differences, sample_key
from qwen_cache.format.index import IndexRow
from qwen_cache.format.sample import ImgShapes
from qwen_cache.sources.detect import Readable, Row
from qwen_cache.sources.images import open_mask, open_rgb, upright_size
from qwen_cache.sources.sizes import Resolution, Size, SourceImage, calculate_dimensions, img_shapes, sizes_of

NEW = "new"
RECIPE = "recipe: "  # begins the reasons that have nothing to do with the source
ASPECT_TOLERANCE = 0.01  # a mask may have another size than its target, but not another shape


@dataclass(frozen=True)
class PlannedSample:
    """One sample of the source, its key, and the reasons why the cache lacks it (none if it does not)."""

    row: Row
    inputs: Inputs
    key: str
    sizes: tuple[Size, ...]
    """Pixels of target and controls for the VAE."""
    originals: tuple[Size, ...]
    """Pixels of target and controls in the source."""
    reasons: tuple[str, ...] = ()
    """`new`, or what changed: `prompt`, `control 1`, `recipe: dtype bfloat16 → float32`."""
    source_rows: int = 1
    """How many rows of the source have this content."""

    @property
    def img_shapes(self) -> ImgShapes:
        return img_shapes(self.sizes)


@dataclass(frozen=True)
class BuildPlan:
    """The samples of a build, each content once, in the order of the source; and the names that the build drops."""

    samples: tuple[PlannedSample, ...]
    problems: tuple[Problem, ...]
    removed: tuple[str, ...]
    """Names in the cache that the source no longer has."""
    kept: frozenset[str] = frozenset()
    """The keys of missing samples that an interrupted build has finished."""
    to_copy: frozenset[str] = frozenset()
    """The keys of missing samples that are in replaced shards."""
    new_masks: frozenset[str] = frozenset()
    """The keys of missing samples of which the cache has everything but the mask."""

    @property
    def missing(self) -> list[PlannedSample]:
        """The samples that the cache lacks."""
        return [sample for sample in self.samples if sample.reasons]

    @property
    def to_encode(self) -> list[PlannedSample]:
        """The missing samples that need an encoder."""
        return [sample for sample in self.missing if self.work(sample.key) == "to_encode"]

    def work(self, key: str) -> str:
        """What a missing sample needs: `to_encode`, `to_copy`, `kept` or `new_masks`."""
        found = {"kept": self.kept, "to_copy": self.to_copy, "new_masks": self.new_masks}
        return next((name for name, keys in found.items() if key in keys), "to_encode")

    @property
    def order(self) -> list[str]:
        """The keys in the order of encoding, samples with the same controls next to each other."""
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample in self.samples:
            groups.setdefault(sample.inputs.controls, []).append(sample.key)
        return [key for group in groups.values() for key in group]

    @property
    def cached(self) -> int:
        return len(self.samples) - len(self.missing)

    @property
    def repeated(self) -> int:
        """How many rows repeat the content of an earlier row."""
        return sum(sample.source_rows - 1 for sample in self.samples)

    def target_sizes(self) -> dict[Size, int]:
        """The number of samples for each size of the target, the most frequent first."""
        counts = Counter(sample.sizes[0] for sample in self.samples)
        return dict(sorted(counts.items(), key=lambda item: (-item[1], item[0])))

    def reason_counts(self) -> dict[str, int]:
        """The number of missing samples for each reason, `new` first."""
        counts = Counter(reason for sample in self.missing for reason in sample.reasons)
        return dict(sorted(counts.items(), key=lambda item: (item[0] != NEW, -item[1], item[0])))

    def summary(self) -> str:
        """`312 samples, 288 cached, 21 to encode, 3 kept: 20 new, 4 changed (prompt: 3, control 1: 1)`."""
        counts = self.reason_counts()
        new = counts.pop(NEW, 0)
        parts = [f"{new} new"] if new else []
        if changed := len(self.missing) - new:
            parts.append(f"{changed} changed ({', '.join(f'{what}: {count}' for what, count in counts.items())})")
        work = [f"{len(self.to_encode)} to encode"]
        work += [f"{len(self.to_copy)} to copy"] if self.to_copy else []
        work += [f"{len(self.kept)} kept"] if self.kept else []
        work += [plural(len(self.new_masks), "new mask")] if self.new_masks else []
        reasons = ": " + ", ".join(parts) if parts else ""
        return f"{plural(len(self.samples), 'sample')}, {self.cached} cached, {', '.join(work)}{reasons}"


@dataclass(frozen=True)
class Rules:
    """What the model and the recipe require of the source."""

    pipeline: str
    recipe_id: str
    resolution: Resolution
    condition_image_size: int
    max_controls: int | None


def make_plan(
    rows: Sequence[Row],
    problems: Sequence[Problem],
    rules: Rules,
    cached: Mapping[str, IndexRow],
    changed_recipe: Sequence[str] = (),
    on_row: Callable[[], None] = lambda: None,
) -> BuildPlan:
    """Read every image of `rows` and decide which samples to encode.

    `cached` are the cache's rows of the recipe with this name, by key. `changed_recipe` lists how that recipe differs;
    if it does, none of them can be used.
    """
    by_name = {row.name: row for row in cached.values()}
    usable = {} if changed_recipe else cached
    results: list[PlannedSample | Problem] = []
    with ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4)) as pool:
        for result in pool.map(lambda row: _plan_row(row, rules, usable), rows):
            results += result
            on_row()
    good = [item for item in results if isinstance(item, PlannedSample)]
    times = Counter(item.key for item in good)
    samples: dict[str, PlannedSample] = {}
    for item in good:
        if item.key not in samples:
            once = replace(item, source_rows=times[item.key])
            samples[item.key] = _with_reasons(once, usable, by_name.get(item.row.name), changed_recipe)
    all_problems = [*problems, *(item for item in results if isinstance(item, Problem))]
    names = {row.name for row in rows}
    removed = tuple(row.name for key, row in cached.items() if key not in samples and row.name not in names)
    return BuildPlan(tuple(samples.values()), tuple(all_problems), removed)


def _with_reasons(
    sample: PlannedSample, usable: Mapping[str, IndexRow], old: IndexRow | None, changed_recipe: Sequence[str]
) -> PlannedSample:
    if sample.key in usable:
        return sample
    reasons = [NEW]
    if old is not None:
        changes = differences(old.meta.inputs, old.meta.prompt, sample.inputs, sample.row.prompt)
        changes += ["phrase"] if old.meta.phrase != sample.row.phrase else []
        reasons = changes + [RECIPE + what for what in changed_recipe] or [NEW]
    return replace(sample, reasons=tuple(reasons))


def _plan_row(row: Row, rules: Rules, cached: Mapping[str, IndexRow]) -> list[PlannedSample] | list[Problem]:
    """The samples of one row, or its problems: hash its files, and decode them if a sample is to be encoded."""
    if rules.max_controls is not None and len(row.controls) > rules.max_controls:
        takes = f"{rules.pipeline} takes {plural(rules.max_controls, 'control image')}"
        what = f"{row.name}: {takes}, found {len(row.controls)}"
        return [Problem(row.where, what, "drop the others, or build for Qwen-Image-Edit-2509 (Edit-Plus)")]
    files = [row.target, *row.controls, *([row.mask] if row.mask else [])]
    try:
        contents = [file.read() for file in files]
    except SourceError as error:
        return [as_problem(row, error.where, error)]
    hashes = [content_hash(content) for content in contents]
    images = 1 + len(row.controls)
    inputs = Inputs(hashes[0], tuple(hashes[1:images]), hashes[images] if row.mask else None)
    named = list(zip(map(str, files), contents, strict=True))[:images]
    try:
        originals = [SourceImage(name, upright_size(content, name)) for name, content in named]
        choices = sizes_of(originals, rules.resolution)
    except SourceError as error:
        return _decode(row, contents, rules) or [as_problem(row, error.where, error)]
    keys = [sample_key(rules.recipe_id, inputs, row.prompt, img_shapes(sizes), row.phrase) for sizes in choices]
    problems = [] if all(key in cached for key in keys) else _decode(row, contents, rules)
    own = tuple(image.size for image in originals)
    return problems or [PlannedSample(row, inputs, key, sizes, own) for key, sizes in zip(keys, choices, strict=True)]


def _decode(row: Row, contents: Sequence[bytes], rules: Rules) -> list[Problem]:
    """Decode the images of a row; the problems with them."""
    problems: list[Problem] = []
    target: Size | None = None
    for path, content in zip([row.target, *row.controls], contents, strict=False):
        try:
            size = open_rgb(content, str(path)).size
            target = target or size
            if path != row.target and rules.condition_image_size:
                calculate_dimensions(rules.condition_image_size, size)
        except SourceError as error:
            problems.append(as_problem(row, path, error))
    if row.mask is not None and target is not None:
        try:
            problems += _mask_problems(row, open_mask(contents[-1], str(row.mask)).size, target)
        except SourceError as error:
            problems.append(as_problem(row, row.mask, error))
    return problems


def _mask_problems(row: Row, mask: Size, target: Size) -> list[Problem]:
    if abs(mask[0] * target[1] / (mask[1] * target[0]) - 1) <= ASPECT_TOLERANCE:
        return []
    what = f"{row.mask}: the mask is {mask[0]}×{mask[1]}, its target {target[0]}×{target[1]}"
    return [Problem(row.where, what, "make the mask at the size of the target")]


def as_problem(row: Row, path: object, error: SourceError) -> Problem:
    """The error about one image as a problem of its row."""
    what = error.fault if str(path) == row.where else f"{path}: {error.fault}"
    return Problem(row.where, what, error.do or "replace the file")


def read_again(file: Readable, expected: str) -> bytes:
    """The bytes that the plan hashed; SourceError if the file has changed since.

    Files are read twice, because the plan needs every image: the last one may be damaged or a duplicate. To read
    each only once, the build would have to keep the whole source in memory.
    """
    data = file.read()
    if content_hash(data) != expected:
        raise SourceError("the file changed while the cache was being built", where=file, do="build again")
    return data
