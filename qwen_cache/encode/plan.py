"""The plan of a build: slices, what each row becomes, and what is remembered of its images."""

from __future__ import annotations

import os
import re
import struct
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from typing import TypeVar

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc

from qwen_cache.errors import ConfigError, Notice, Problem, SourceError, counted
from qwen_cache.extras import __version__
from qwen_cache.format.identity import Inputs, content_hash, differences, sample_key
from qwen_cache.format.rows import KeyedRows, ListedSamples, first_of_each, taken
from qwen_cache.format.sample import ImgShape, ImgShapes
from qwen_cache.format.update import Copies
from qwen_cache.models.family import family_of
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.captions import parse
from qwen_cache.sources.detect import without_gc
from qwen_cache.sources.images import PLUGINS, has_other_profile, open_mask, open_rgb, upright_size
from qwen_cache.sources.rows import Readable, Row, limits_exceeded
from qwen_cache.sources.sizes import (
    REJECTED_TARGET,
    Resolution,
    Size,
    SourceImage,
    calculate_dimensions,
    img_shapes,
    mask_fault,
    sizes_of,
    sizes_to_generate,
)
from qwen_cache.storage.remembered import RememberedFiles
from qwen_cache.storage.remote import Location, is_remote, location
from qwen_cache.terminal import plural

# ---- slices ----------------------------------------------------------------------------------------------------------
# Slices: the rows of a source cut into runs, so that independent machines can build it.
#
# The source alone decides the cut: of its n usable rows, in order, slice k of N has those from `(k-1)·n/N` to `k·n/N`.
# Rows left out are not usable: leaving one out moves the cuts, and drops its sample, as deleting it would. Slices may
# share a cache: each build replaces the samples of its own rows, keeps those of the other slices, and drops those of
# which the source has no row. So all slices together make the cache that one build would, in the order of the source.
# They may also have a cache each, for `qwen-cache merge`.

T = TypeVar("T")


@dataclass(frozen=True)
class SourceSlice:
    """Slice `number`, from 1, of `count`."""

    number: int
    count: int

    @classmethod
    def parse(cls, text: str) -> SourceSlice:
        """The slice that `3/16` names."""
        match = re.fullmatch(r"([0-9]+)/([0-9]+)", text)
        parsed = cls(int(match[1]), int(match[2])) if match else cls(0, 0)
        if not 1 <= parsed.number <= parsed.count:
            expected = "NUMBER/COUNT from 1/1 on, such as 3/16"
            raise ConfigError("not a slice of the source", expected=expected, found=text)
        return parsed

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def take(self, items: Sequence[T]) -> list[T]:
        """This slice of `items`. The lengths of any two slices differ by at most one."""
        begin, end = ((self.number - 1 + i) * len(items) // self.count for i in range(2))
        return list(items[begin:end])


@dataclass(frozen=True)
class SlicedSource:
    """The rows of a source, by name, as a build of one slice knows them."""

    positions: Mapping[str, int]
    """The position of every usable row."""
    own: frozenset[str]
    """The rows of the slice."""
    is_complete: bool
    """True if every row is usable. If not, a sample whose row is missing may belong to an unusable one."""

    def keeps(self, name: str) -> bool:
        """True if a sample of this name is left as it is: the row of another slice, or of nobody knows which."""
        return name not in self.own and (name in self.positions or not self.is_complete)

    def in_order(self, samples: ListedSamples) -> ListedSamples:
        """The samples in the order of the source, each key once; those of no row are last."""
        found = pc.index_in(samples.table["name"], pa.array(list(self.positions), pa.string()))
        order = np.argsort(pc.fill_null(found, len(self.positions)).to_numpy(), kind="stable")
        in_order = ListedSamples(taken(samples.table, order))
        return ListedSamples(taken(in_order.table, np.flatnonzero(first_of_each(in_order.words("the source")))))


# ---- remembered images -----------------------------------------------------------------------------------------------
# The images of a plan: content hash, size and whether they decode, from memory if they have not changed.
#
# The memory is that of `storage/remembered.py`. Another version of this program, of Pillow, or of a package that reads
# HEIC or JPEG XL may see another size or decode other files, so it starts with an empty memory. An image that could not
# be decoded is read again each time.

FACTS = struct.Struct("<16sII??")  # content hash, width, height, decoded, has another profile


@dataclass(frozen=True)
class Facts:
    """An image as a plan knows it."""

    hash: str
    size: Size = (0, 0)
    """After EXIF rotation; zeros if not read yet."""
    decoded: bool = False
    """True if every pixel was decoded without an error."""
    other_profile: bool = False
    """True if it has a colour profile other than sRGB, as far as it was decoded."""

    @staticmethod
    def from_bytes(data: bytes) -> Facts:
        digest, width, height, *known = FACTS.unpack(data)
        return Facts(digest.hex(), (width, height), *known)

    def to_bytes(self) -> bytes:
        return FACTS.pack(bytes.fromhex(self.hash), *self.size, self.decoded, self.other_profile)


class RememberedImages:
    """The facts about the images of a source: those that the last plan learned, and this one's."""

    def __init__(self, files: RememberedFiles) -> None:
        self.files = files

    @staticmethod
    def nowhere() -> RememberedImages:
        """A memory without a store."""
        return RememberedImages(RememberedFiles("images"))

    @staticmethod
    def of(source: str, data: DataConfig) -> RememberedImages:
        """The images of a source, or of the slice, split and configuration of it that `data` names."""
        detail = "\0".join(each or "" for each in (data.slice, data.split, data.config_name))
        readers = [f"images 2, qwen-cache {__version__}, Pillow {PIL.__version__}"]
        for _, package in PLUGINS.values():
            with suppress(PackageNotFoundError):
                readers.append(f"{package} {version(package)}")
        return RememberedImages(RememberedFiles.of(", ".join(readers), location(source), detail))

    @contextmanager
    def planning(self, rows: Sequence[Row]) -> Iterator[None]:
        """Remember what is learned inside the block, in which a plan of `rows` is made."""
        images = (image for row in rows for image in (*row.images, *([row.mask] if row.mask else [])))
        self.files.list_folders(file for image in images for file in _files(image) if is_remote(file))
        with self.files.saved():
            yield

    def image(self, file: Readable, *, is_mask: bool = False, may_read: bool = True) -> PlannedImage:
        return PlannedImage(self.files, file, is_mask, may_read)


class NotRememberedError(Exception):
    """An image would have to be read."""


class PlannedImage:
    """An image of a row. Its file is read at most once, and only for what is not remembered.

    Where it may not be read, every method but `keep` raises NotRememberedError instead.
    """

    def __init__(self, memory: RememberedFiles, file: Readable, is_mask: bool, may_read: bool) -> None:
        self.where, self._may_read = str(file), may_read
        self._file, self._memory, self._is_mask = file, memory, is_mask
        self._name, self._is_settled = self._named()
        known = memory.recall(self._name) if self._name else None
        self._facts = Facts.from_bytes(known) if known else None
        self._content: bytes | None = None

    def hash(self) -> str:
        """The content hash; SourceError if the file cannot be read."""
        return self._known().hash

    def size(self) -> Size:
        """The upright size, from the header; SourceError if the file is not an image."""
        facts = self._known()
        if not all(facts.size):
            self._facts = facts = replace(facts, size=upright_size(self._read(), self.where))
        return facts.size

    def decode(self) -> Size:
        """The size, if every pixel can be decoded; else SourceError."""
        facts = self._known()
        if not facts.decoded:
            image = (open_mask if self._is_mask else open_rgb)(self._read(), self.where)
            other_profile = has_other_profile(self._read(), self.where)
            self._facts = facts = replace(facts, size=image.size, decoded=True, other_profile=other_profile)
        return facts.size

    @property
    def has_other_profile(self) -> bool:
        """True if the image has a colour profile other than sRGB, as far as it was decoded, now or before."""
        return self._facts is not None and self._facts.other_profile

    def keep(self) -> None:
        """Remember what is known, unless the file may have changed while it was read; drop its bytes."""
        was_read, self._content = self._content is not None, None
        if self._name and self._facts and (not was_read or (self._is_settled and self._named()[0] == self._name)):
            self._memory.keep(self._name, self._facts.to_bytes())

    def _known(self) -> Facts:
        if self._facts is None:
            self._facts = Facts(content_hash(self._read()))
        return self._facts

    def _read(self) -> bytes:
        if not self._may_read:
            raise NotRememberedError
        if self._content is None:
            self._content = self._file.read()
            if self._facts and content_hash(self._content) != self._facts.hash:
                what = "the content of this file changed, but its times or ETag did not"
                do = "run the same command again; if the error persists, add --rehash"
                raise SourceError(what, where=self.where, do=do)
        return self._content

    def _named(self) -> tuple[bytes | None, bool]:
        return self._memory.name("mask" if self._is_mask else "image", self.where, _files(self._file))


def _files(image: Readable) -> Sequence[Location]:
    """The files that an image is read from; none if its kind of source does not say."""
    return getattr(image, "files", ())


# ---- plan ------------------------------------------------------------------------------------------------------------
# The plan of a build: every image hashed, every problem listed, and which samples are missing and why.
#
# The plan is complete before anything is encoded. Images to encode are also decoded once, so that a corrupt file stops
# the build in its first minutes and not in its last hour. An image that has not changed since the last plan is not read
# (`RememberedImages`). Needs no torch.


NEW = "new"
RECIPE = "recipe: "  # prefix of reasons that come from the settings, not from the source
CHUNK = 64  # rows per task of the thread pool


@dataclass(frozen=True, slots=True)
class PlannedSample:
    """One sample of the source, its key, and the reasons why the cache lacks it (empty if it has it)."""

    row: Row
    inputs: Inputs
    key: str
    sizes: tuple[Size, ...]
    """Pixels for the VAE: of the target, or of the image to generate, then of the controls."""
    originals: tuple[Size, ...]
    """Pixels in the source: of the target, if there is one, and of the controls."""
    reasons: tuple[str, ...] = ()
    """`new`, or what changed: `prompt`, `control 1`, `recipe: dtype bfloat16 → float32`."""
    source_rows: int = 1
    """How many rows of the source have this content."""
    rejected_size: Size | None = None
    """Pixels of the rejected image for the VAE, if there is one."""

    @property
    def img_shapes(self) -> ImgShapes:
        return img_shapes(self.sizes)

    @property
    def rejected_shape(self) -> ImgShape | None:
        return img_shapes([self.rejected_size])[0] if self.rejected_size else None

    @property
    def shown_shapes(self) -> ImgShapes:
        """The shapes of all images: target, or the image to generate, controls, rejected image."""
        return (*self.img_shapes, *([self.rejected_shape] if self.rejected_shape else []))

    @property
    def images(self) -> list[tuple[Readable, str, Size]]:
        """File, hash and pixels for the VAE of each image: target, unless it is to be generated, controls, rejected."""
        inputs = self.inputs
        hashes = [digest for digest in (inputs.target, *inputs.controls, inputs.rejected) if digest is not None]
        sizes = self.sizes if inputs.target else self.sizes[1:]
        sizes += (self.rejected_size,) if self.rejected_size else ()
        return list(zip(self.row.images, hashes, sizes, strict=True))


Result = tuple[PlannedSample | Problem | Notice, ...]
"""The samples of a row, or its problems; and facts about its images."""


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
    """The keys of missing samples that are in replaced shards, or in the caches of `cache.reuse`."""
    reused: Mapping[str, Copies] = field(default_factory=dict)
    """The samples of these that come from each cache of `cache.reuse`."""
    new_masks: frozenset[str] = frozenset()
    """The keys of missing samples of which the cache has everything but the mask."""
    notices: tuple[Notice, ...] = ()
    """Facts about images that are used all the same."""

    @property
    def missing(self) -> list[PlannedSample]:
        """The samples that the cache lacks."""
        return [sample for sample in self.samples if sample.reasons]

    @property
    def to_encode(self) -> list[PlannedSample]:
        """The missing samples that need an encoder."""
        return [sample for sample in self.missing if self.work(sample.key) == "to_encode"]

    def work(self, key: str) -> str:
        """The work on a missing sample: `to_encode`, `to_copy`, `kept` or `new_masks`."""
        found = {"kept": self.kept, "to_copy": self.to_copy, "new_masks": self.new_masks}
        return next((name for name, keys in found.items() if key in keys), "to_encode")

    def grouped(self, keys: Iterable[str]) -> list[str]:
        """The keys in the order of encoding: first those of other samples, then, with samples of the same controls next
        to each other, those of this plan."""
        wanted = dict.fromkeys(keys)
        groups: dict[tuple[str, ...], list[str]] = {}
        for sample in self.samples:
            if sample.key in wanted:
                groups.setdefault(sample.inputs.controls, []).append(sample.key)
                del wanted[sample.key]
        return [*wanted, *(key for group in groups.values() for key in group)]

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


AROUND_PROMPT, AROUND_IMAGE = 64, 64
"""More tokens than a template has around a prompt, and around an image."""


@dataclass(frozen=True)
class Rules:
    """The requirements of the model and the recipe on the source."""

    pipeline: str
    recipe_id: str
    resolution: Resolution
    condition_image_size: int
    max_controls: int | None
    text_rows: Callable[[str, Sequence[Size]], int] | None = None
    """The exact number of rows of a prompt's embeddings about controls of these sizes in the source; None where no
    tokenizer is at hand, so that texts longer than the RoPE table are not found."""


def make_plan(
    rows: Sequence[Row],
    problems: Sequence[Problem],
    rules: Rules,
    cached: KeyedRows,
    changed_recipe: Sequence[str] = (),
    on_row: Callable[[], None] = lambda: None,
    memory: RememberedImages | None = None,
) -> BuildPlan:
    """Hash every image of `rows`, or look it up in `memory`, and decide which samples to encode.

    `cached` are the cache's rows of the recipe with this name, by key. `changed_recipe` lists how that recipe differs;
    if it does, none of them can be used.
    """
    memory = memory or RememberedImages.nowhere()
    usable: Container[str] = () if changed_recipe else cached
    samples: dict[str, PlannedSample] = {}
    repeated, all_problems, notices = Counter[str](), list(problems), dict[Notice, None]()
    with memory.planning(rows), ThreadPoolExecutor(min(32, (os.cpu_count() or 1) + 4)) as pool:
        known = _remembered(rows, lambda row: _plan_row(row, rules, usable, memory, may_read=False), pool)
        unknown = [row for row, result in zip(rows, known, strict=True) if not result]
        work = pool.map(lambda row: _plan_row(row, rules, usable, memory, may_read=True), unknown)
        with closing(result for result in work) as read:  # if this ends early, the pool drops the pending rows
            while known:
                for item in known.popleft() or next(read):
                    if isinstance(item, Problem):
                        all_problems.append(item)
                    elif isinstance(item, Notice):
                        notices[item] = None
                    elif item is not samples.setdefault(item.key, item):
                        repeated[item.key] += 1
                on_row()
    for key, times in repeated.items():
        samples[key] = replace(samples[key], source_rows=1 + times)
    _add_reasons(samples, usable, cached, changed_recipe)
    unmatched = [key for key in cached if key not in samples]
    names = {row.name for row in rows} if unmatched else set()
    removed = tuple(name for name in (cached[key].name for key in unmatched) if name not in names)
    found = _of_all_rows(rows, all_problems[len(problems) :])
    return BuildPlan(tuple(samples.values()), (*problems, *found), removed, notices=counted(notices))


def _of_all_rows(rows: Sequence[Row], problems: Sequence[Problem]) -> Sequence[Problem]:
    """One problem in place of the same one of every row."""
    told = {(each.what.removeprefix(f"{row.name}: "), each.do) for row, each in zip(rows, problems, strict=False)}
    if len(rows) < 2 or len(rows) != len(problems) or len(told) != 1:
        return problems
    what, do = told.pop()
    return [Problem(problems[0].where, f"{what}, as in all {len(rows)} rows", do)]


@without_gc()
def _remembered(rows: Sequence[Row], plan_row: Callable[[Row], Result], pool: ThreadPoolExecutor) -> deque[Result]:
    """The results of the rows whose images need not be read, nothing for the others.

    The threads are for slow disks. A task has many rows, since submitting a task costs as much as planning one row.
    """

    def plan(chunk: Sequence[Row]) -> list[Result]:
        results: list[Result] = []
        for row in chunk:
            try:
                results.append(plan_row(row))
            except NotRememberedError:
                results.append(())
        return results

    chunks = (rows[begin : begin + CHUNK] for begin in range(0, len(rows), CHUNK))
    return deque(result for chunk in pool.map(plan, chunks) for result in chunk)


def _add_reasons(
    samples: dict[str, PlannedSample], usable: Container[str], cached: KeyedRows, changed_recipe: Sequence[str]
) -> None:
    """Add the reasons to the missing samples: how they differ from the cached sample of their name."""
    missing = [key for key in samples if key not in usable]
    before = cached.where_in(name=[samples[key].row.name for key in missing])
    named = dict(zip(before.column("name").to_pylist(), before.positions.tolist(), strict=True))
    for key in missing:
        sample, reasons = samples[key], list[str]()
        if (position := named.get(sample.row.name)) is not None:
            old = cached.row(position).meta
            reasons = differences(old.inputs, old.prompt, sample.inputs, sample.row.prompt)
            if "prompt" in reasons and _without_marks(sample.row.prompt) == old.prompt:
                reasons[reasons.index("prompt")] = "prompt: [[ ]] are kept now"
            reasons += ["phrase"] if old.phrase != sample.row.phrase else []
            reasons += ["slider"] if old.slider != sample.row.slider else []
            reasons += [RECIPE + what for what in changed_recipe]
        samples[key] = replace(sample, reasons=tuple(reasons or [NEW]))


def _without_marks(prompt: str) -> str | None:
    """The prompt as it is encoded where `[[ ]]` are marks; None if they cannot be."""
    with suppress(SourceError):
        text, _ = parse(prompt)
        return text.strip()
    return None


def plan_row(row: Row, rules: Rules, cached: Container[str] = ()) -> list[PlannedSample]:
    """The samples of a row that comes alone; SourceError with all of its problems if it cannot be used."""
    result = _plan_row(row, rules, cached, RememberedImages.nowhere(), may_read=True)
    problems = [each for each in result if isinstance(each, Problem)]
    if problems:
        what, do = ("; ".join(getattr(each, part) for each in problems) for part in ("what", "do"))
        raise SourceError(what, where=row.where, do=do)
    return [each for each in result if isinstance(each, PlannedSample)]


def _plan_row(row: Row, rules: Rules, cached: Container[str], memory: RememberedImages, *, may_read: bool) -> Result:
    """The samples of one row, or its problems: hash its files, and decode them if a sample is to be encoded.

    NotRememberedError if an image has to be read and `may_read` is False.
    """
    if exceeded := limits_exceeded(row):
        return tuple(Problem(row.where, f"{row.name}: {what}", do) for what, do in exceeded.values())
    if rules.max_controls is not None and len(row.controls) > rules.max_controls:
        takes = f"{rules.pipeline} takes {plural(rules.max_controls, 'control image')}"
        what = f"{row.name}: {takes}, found {len(row.controls)}"
        return (Problem(row.where, what, "drop the others, or build for Qwen-Image-Edit-2509 (Edit-Plus)"),)
    files = [file for file in (row.target, *row.controls) if file is not None]
    images = [memory.image(file, may_read=may_read) for file in files]
    mask = memory.image(row.mask, is_mask=True, may_read=may_read) if row.mask else None
    rejected = memory.image(row.rejected, may_read=may_read) if row.rejected else None
    try:
        return _samples_of(row, images, mask, rejected, rules, cached)
    finally:
        for image in [*images, *(each for each in (mask, rejected) if each)]:
            image.keep()


def _samples_of(
    row: Row,
    images: Sequence[PlannedImage],
    mask: PlannedImage | None,
    rejected: PlannedImage | None,
    rules: Rules,
    cached: Container[str],
) -> Result:
    """`_plan_row` of a row that the pipeline takes; `images` are target and controls."""
    try:
        hashes = [_shared(image.hash()) for image in images]
        target, controls = (hashes[0], hashes[1:]) if row.target else (None, hashes)
        worse = rejected.hash() if rejected else None
        inputs = Inputs(target, _shared(tuple(controls)), mask.hash() if mask else None, row.seed, worse)
    except SourceError as error:
        return (as_problem(row, error.where, error),)
    if worse is not None and worse == target:
        what, do = REJECTED_TARGET
        return (Problem(row.where, f"{row.name}: {what}", do),)
    try:
        originals = [SourceImage(image.where, image.size()) for image in images]
        if row.target:
            of_rejected = SourceImage(rejected.where, rejected.size()) if rejected else None
            choices = sizes_of(originals, rules.resolution, of_rejected)
        else:
            choices = [sizes_to_generate(originals, row.size, rules.resolution)]
    except SourceError as error:
        return tuple(_decode(row, images, mask, rejected, rules)) or (as_problem(row, error.where, error),)
    own, samples = _shared(tuple(image.size for image in originals)), list[PlannedSample]()
    count = 1 + len(row.controls)
    for choice in choices:
        sizes, (rejected_size, *_) = _shared(choice[:count]), (*choice[count:], None)
        shapes, (rejected_shape, *_) = img_shapes(sizes), (*img_shapes(choice[count:]), None)
        key = sample_key(rules.recipe_id, inputs, row.prompt, shapes, row.phrase, rejected_shape, row.slider)
        samples.append(PlannedSample(row, inputs, key, sizes, own, rejected_size=rejected_size))
    problems = [] if all(each.key in cached for each in samples) else _decode(row, images, mask, rejected, rules)
    problems += _text_problems(row, originals, [each.sizes for each in samples], rules)
    if problems:
        return tuple(problems)
    what = "images have a colour profile that is not sRGB; it is ignored, as by the pipelines"
    do = "convert them to sRGB if their colours matter"
    every = [*images, *([rejected] if rejected else [])]
    return (*samples, *(Notice(what, (image.where,), do) for image in every if image.has_other_profile))


def _text_problems(
    row: Row, originals: Sequence[SourceImage], choices: Sequence[Sequence[Size]], rules: Rules
) -> list[Problem]:
    """The problems of texts that are longer than the RoPE table beside the images of their sample.

    A token has at least one byte, so only the longest prompts are tokenized.
    """
    if rules.text_rows is None:
        return []
    family, controls = family_of(rules.pipeline), [image.size for image in originals[1 if row.target else 0 :]]
    limit = min(family.longest_text(img_shapes(sizes)) for sizes in choices)
    pixels = 0 if family.text_rows_only else rules.condition_image_size
    seen = len(controls) * (2 * pixels // family.pixels_per_text_token + AROUND_IMAGE)
    long = [prompt for prompt in row.prompts if len(prompt.encode()) + seen + AROUND_PROMPT > limit]
    lengths = [length for prompt in long if (length := rules.text_rows(prompt, controls)) > limit]
    what = f"{row.name}: the text has {{}} tokens, the transformer takes {limit} beside images of these sizes"
    do = "shorten the prompt" + (", or use smaller images" if controls else "")
    return [Problem(row.where, what.format(length), do) for length in lengths]


@lru_cache(1 << 12)
def _shared(value: T) -> T:
    """An equal value that another sample may have: few sizes differ, and samples may share an image."""
    return value


def _decode(
    row: Row,
    images: Sequence[PlannedImage],
    mask: PlannedImage | None,
    rejected: PlannedImage | None,
    rules: Rules,
) -> list[Problem]:
    """Decode the images of a row; the problems with them."""
    problems: list[Problem] = []
    target: Size | None = None
    for image in (*images, *([rejected] if rejected else [])):
        try:
            size = image.decode()
            target = target or size
            is_control = image is not rejected and (row.target is None or image is not images[0])
            if is_control and rules.condition_image_size:
                calculate_dimensions(rules.condition_image_size, size)
        except SourceError as error:
            problems.append(as_problem(row, image.where, error))
    if mask is not None and target is not None:
        try:
            if fault := mask_fault(mask.decode(), target):
                problems.append(Problem(row.where, f"{row.mask}: {fault[0]}", fault[1]))
        except SourceError as error:
            problems.append(as_problem(row, mask.where, error))
    return problems


def as_problem(row: Row, path: object, error: SourceError) -> Problem:
    """The error about one image as a problem of its row."""
    what = error.fault if str(path) == row.where else f"{path}: {error.fault}"
    return Problem(row.where, what, error.do or "replace the file")


def read_again(file: Readable, expected: str) -> bytes:
    """The bytes that the plan hashed, or remembered; SourceError if the file has changed since.

    New files are read twice, because the plan needs every image: the last one may be damaged or a duplicate. To read
    each only once, the build would have to keep the whole source in memory.
    """
    data = file.read()
    if content_hash(data) != expected:
        do = "build again; if the error persists, add --rehash"
        raise SourceError("the file changed while the cache was being built", where=file, do=do)
    return data
