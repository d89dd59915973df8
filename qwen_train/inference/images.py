"""Images to generate: jobs, the loop over them, files, the axes of a grid, images side by side. Imports no torch."""

from __future__ import annotations

import difflib
import itertools
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.cache import Sample
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.html.grid import HEIGHT, make_grid, thumbnail
from qwen_cache.html.page import relative_url, render
from qwen_cache.models.family import Family, Pipeline
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.given import Given
from qwen_cache.settings.load import overridden
from qwen_cache.settings.sections import DataConfig, PredictConfig
from qwen_cache.sources.captions import PLACEHOLDER, Captions, parse
from qwen_cache.sources.detect import Readable, read_source, reading
from qwen_cache.sources.images import open_rgb, open_rgb_file, open_rgba, open_rgba_file, over_white
from qwen_cache.sources.places import File
from qwen_cache.sources.rows import MAX_TEXT, text_exceeded
from qwen_cache.storage.files import WINDOWS, make_folder, write_durably
from qwen_cache.storage.remote import location
from qwen_cache.terminal import console, counting, plural
from qwen_cache.text import plain
from qwen_train.lora.files import WEIGHTS_NAME, WeightedLora, find_lora, parse_lora, split_weight
from qwen_train.run import checkpoints

# ---- jobs ------------------------------------------------------------------------------------------------------------
# A job is an image to generate: its inputs, settings and LoRAs. Prompts, rows of a source and samples of a cache are
# jobs; each cell of a grid, and each image without the LoRAs to compare with, is a job again. All are listed first and
# then carried out by one loop (`Work`).
#
# A PNG records the hash of its inputs: prompt, bytes of the control images, settings. An existing PNG with the same
# hash is skipped, so a killed run continues where it stopped; one with another hash is generated again. Jobs with equal
# inputs are generated once. Each image is written atomically. Refused before anything is generated: a file in the way
# that was not generated here, and names that are equal or lead out of the folder. A job whose image cannot be read is
# reported; the others continue.

COMPONENTS_FOR_A_CACHE = ("vae", "transformer", "scheduler")
COMPONENTS = (*COMPONENTS_FOR_A_CACHE, "text_encoder", "tokenizer", "processor")
"""The folders of a model that generating needs: from a cached sample, and from prompts."""
CHUNK = "qwen-train job"
"""The key of the PNG text chunk with the hash."""
NO_NAME_ON_WINDOWS = frozenset('<>:"|?*')
PAGE_HASH = "by itself"
"""Instead of a hash, in an image that is generated each time: a single one, one from a cache, or a comparison."""
WITHOUT = "-without-lora"
"""The end of the name of an image that is generated without the LoRAs, to compare with."""
LONGEST_COMPONENT = 240
"""Bytes of a path component: file systems take 255, minus room for the extension and the temporary name."""


Value = int | float | str


@dataclass(frozen=True)
class Cell:
    """The settings and LoRAs of one image; without a grid, all images are of one cell without values."""

    values: Mapping[str, Value] = field(default_factory=dict)
    """By axis, in the order of the axes."""
    config: PredictConfig = field(default_factory=PredictConfig)
    loras: tuple[WeightedLora, ...] = ()

    @property
    def files(self) -> tuple[Path, ...]:
        """The files of the LoRAs."""
        return tuple(lora.file for lora in self.loras)

    def name(self, stem: str) -> str:
        """The name of its file without `.png`, such as `out-lora_weight=0.5`."""
        return "-".join([stem, *(f"{axis}={value}" for axis, value in self.values.items())])


@dataclass(frozen=True)
class GenerateJob:
    """An image to generate."""

    name: str
    """The file name without `.png`; slashes create folders."""
    controls: tuple[Readable, ...]
    prompt: str
    target: Readable | None = None
    """The target if known, only for comparison; it does not affect the image."""
    sample: Sample | None = None
    """The sample of a cache with the embeddings of the prompt and the latents of the controls."""
    cell: Cell = Cell()


def source_jobs(
    source: str, config: DataConfig, model: ModelFolder, prompts: Sequence[str] = ()
) -> tuple[list[GenerateJob], list[Problem]]:
    """A job for each row of a source as `qwen-cache build` reads it, tags in their own order, and the problems of the
    other rows.

    Rows with a control need no target. Rows without are text to image, for an editing model where `qwen-cache build`
    takes them too; a folder of images alone has controls for it. `prompts` replace the rows' own: a job for each row
    and prompt. Then every row needs a control: with one prompt for all, only the images distinguish the rows.
    """
    edits = model.takes_controls and bool(prompts)
    settings = reading(config, model) | {
        "needs_control": model.needs_controls or edits,  # a folder of images alone has controls then
        "needs_target": not model.takes_controls,
        "needs_prompt": not prompts,
        "allow_empty_prompt": config.allow_empty_prompt or bool(prompts),
        "captions": Captions.of(config).in_order,
    }
    if edits:
        settings["no_control"] = "refused"
    rows, problems = read_source(location(source), **settings)
    jobs = [GenerateJob(row.name, row.controls, row.prompt, row.target) for row in rows]
    if not prompts:
        return jobs, problems
    unique: dict[str, GenerateJob] = {}  # one job per row, even if it has several captions
    for row, job in zip(rows, jobs, strict=True):
        unique.setdefault(row.where, job)
    named = [(f"-{i}" if prompts[1:] else "", prompt) for i, prompt in enumerate(prompts, 1)]
    return [
        replace(job, name=job.name + end, prompt=prompt) for job in unique.values() for end, prompt in named
    ], problems


def typed_prompts(prompts: Sequence[str], data: DataConfig) -> list[str]:
    """Prompts as `validation.prompts` are read: without marks where `data` has them, and with the trigger word for its
    placeholder; SourceError for one that no cache could hold."""
    for prompt in prompts:
        if told := text_exceeded("prompt", prompt, MAX_TEXT):
            what, do = told
            raise SourceError(what, where="--prompt", do=do)
    captions = Captions.of(data)
    if any(PLACEHOLDER in prompt for prompt in prompts):
        word = captions.trigger_word
        about = f"stands for {plain(word)}" if word else "stays in the prompt: data.trigger_word is not set"
        console().print(f"note: {PLACEHOLDER} {about}", markup=False, highlight=False)
    return [captions.replaced(parse(prompt)[0] if data.marked_phrases else prompt) for prompt in prompts]


def prompt_jobs(name: str, images: Sequence[Path], prompts: Sequence[str]) -> list[GenerateJob]:
    """A job for each prompt with the same images, named `name`, or `name-1`, `name-2`, … if several."""
    controls = tuple(File(path) for path in images)
    names = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(1, len(prompts) + 1)]
    return [GenerateJob(each, controls, prompt) for each, prompt in zip(names, prompts, strict=True)]


def check_count(pipeline: Pipeline, images: int) -> None:
    """Raise ConfigError if the pipeline takes fewer control images."""
    most = pipeline.max_controls
    if most is not None and images > most:
        raise ConfigError(f"{pipeline.name} takes {plural(most, 'image')}", found=images, do="give fewer")


def control_images(job: GenerateJob, family: Family) -> list[Image.Image]:
    """The job's control images, opened as in a build."""
    open_image = {"RGB": open_rgb, "RGBA": open_rgba}[family.image_mode]
    return [open_image(image.read(), str(image)) for image in job.controls]


class Work:
    """Jobs that are listed, and their results once they are carried out.

    `inputs` are the inputs of a job's image besides prompt and controls, as JSON: model, LoRAs, settings, seed. Without
    it each image is generated, whatever exists, written in the format of its path, and kept in memory; one without a
    path is only kept.
    """

    def __init__(
        self,
        jobs: Sequence[GenerateJob],
        paths: Sequence[Path | None],
        inputs: Callable[[GenerateJob], Mapping[str, Any]] | None = None,
    ) -> None:
        self.jobs, self.paths = jobs, paths
        self.written: list[Path] = []
        self.skipped: list[Path] = []
        """Images that already existed."""
        self.failed: list[Problem] = []
        self.images: list[Image.Image] = []
        """The images that are kept, in the order of the jobs."""
        self.pending: list[tuple[GenerateJob, Path | None, str | SourceError | None]] = []
        """Each with the hash of its inputs, or with the error of reading them."""
        self._of_inputs: dict[str, Path] = {}
        existing = {path: recorded_hash(path) for path in paths if inputs and path and os.path.lexists(path)}
        for job, path in zip(jobs, paths, strict=True):
            digest: str | SourceError | None = None
            if inputs and path:
                try:
                    digest = inputs_hash(job, inputs(job))
                except SourceError as error:
                    digest = error
                if isinstance(digest, str) and existing.get(path) == digest:
                    self.skipped.append(path)
                    self._of_inputs[digest] = path
                    continue
            self.pending.append((job, path, digest))

    def run(self, generate: Callable[[GenerateJob], Image.Image]) -> None:
        """Generate and write the images that do not exist; those of equal inputs are generated once."""
        with counting("images", len(self.jobs)) as advance:
            advance(len(self.skipped))
            for job, path, digest in self.pending:
                try:
                    if isinstance(digest, SourceError):
                        raise digest
                    if path and (same := self._of_inputs.get(digest or "")):
                        make_folder(path.parent)
                        write_durably(path, same.read_bytes())
                    else:
                        image = generate(job)
                        self.images += [] if digest else [image]
                        if path:
                            save_images([image], path, digest or PAGE_HASH)
                except SourceError as error:
                    where = job.name if error.where is None else f"{job.name}: {error.where}"
                    self.failed.append(Problem(where, error.fault, error.do or "restore it"))
                else:
                    if path:
                        self.written.append(path)
                        self._of_inputs |= {digest: path} if digest else {}
                advance(1)


def inputs_hash(job: GenerateJob, inputs: Mapping[str, Any]) -> str:
    """The hash of all inputs of the image; its name is not among them."""
    controls = [content_hash(image.read()) for image in job.controls]
    return content_hash(canonical_json({"prompt": job.prompt, "controls": controls, "about": inputs}))


# ---- the folder ------------------------------------------------------------------------------------------------------


def output_paths(jobs: Sequence[GenerateJob], folder: Path) -> list[Path]:
    """The path of each image; SourceError unless all are different and inside the folder."""
    paths = [folder / f"{checked_name(job.name)}.png" for job in jobs]
    taken: dict[str, str] = {}
    for job, path in zip(jobs, paths, strict=True):
        folded = str(path).casefold()  # some file systems ignore case
        if folded in taken:
            raise SourceError(
                "two images would have the same path",
                where=path,
                found=f"{taken[folded]} and {job.name}",
                do="rename one of them in the source",
            )
        taken[folded] = job.name
    for parent in dict.fromkeys(parent for path in paths for parent in path.parents):
        if str(parent).casefold() in taken or (os.path.lexists(parent) and not parent.is_dir()):
            raise SourceError("a file is in the way of a folder", where=parent, do="rename it, or name another --out")
    return paths


def checked_name(name: str) -> str:
    """The name, if it is a valid relative path inside the folder; else SourceError."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise SourceError(
            "this name leads out of the output folder",
            where=repr(name),
            expected="a relative path without ..",
            do="rename it in the source, or move the table to a folder above its images",
        )
    if WINDOWS and (invalid := sorted(set(name) & NO_NAME_ON_WINDOWS)):
        raise SourceError(
            "Windows does not allow this file name", where=name, found=" ".join(invalid), do="rename it in the source"
        )
    if any(len(os.fsencode(part)) > LONGEST_COMPONENT for part in parts):
        raise SourceError("this name is too long for a file", where=name, expected=f"{LONGEST_COMPONENT} bytes at most")
    return name


def recorded_hash(path: Path) -> str | None:
    """The hash recorded in an image; None if it is damaged. ConfigError for a file not generated here."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            digest = image.info.get(CHUNK)
            if isinstance(digest, str):
                with suppress(OSError, SyntaxError, ValueError):
                    image.verify()
                    return digest
                return None
    except (OSError, ValueError, Image.DecompressionBombError):
        pass
    raise not_ours(path)


def not_ours(path: Path) -> ConfigError:
    """The error for a file in the way."""
    return ConfigError(
        "this file was not generated by `qwen-train`, and would be overwritten",
        where=path,
        do="move it, or name another --out",
    )


# ---- images ----------------------------------------------------------------------------------------------------------
# Image files: opened, and written atomically; formats and paths by name.
#
# Transparency is kept where the format has it. Other formats get the image over white, with a message, since they are
# chosen for programs that want no transparency.

FORMATS = {"PNG": True, "WEBP": True, "TIFF": True, "JPEG": False, "BMP": False}
"""True if a format keeps transparency; other programs ignore that of a BMP."""


def open_images(paths: Sequence[Path], family: Family) -> list[Image.Image]:
    """Open image files in the mode of the family, as a build does; SourceError for one that cannot be read."""
    open_file = {"RGB": open_rgb_file, "RGBA": open_rgba_file}[family.image_mode]
    return [open_file(path) for path in paths]


def image_format(out: Path) -> str:
    """Pillow's name for the format of a file name's extension; ConfigError for another extension."""
    extensions = Image.registered_extensions()
    image_format = extensions.get(out.suffix.lower())
    if image_format not in FORMATS:
        raise ConfigError("not an image format", where="--out", expected=".png, .jpg or .webp", found=out)
    return image_format


def image_paths(out: Path, count: int) -> list[Path]:
    """The paths of `count` images: `out`, or numbered (out-1.png, out-2.png) if several."""
    return [out] if count == 1 else [out.with_stem(f"{out.stem}-{number}") for number in range(1, count + 1)]


def save_images(images: Sequence[Image.Image], out: Path, digest: str = PAGE_HASH) -> list[Path]:
    """Write the images to their paths, each atomically.

    A PNG records `digest`, and so that it was generated here and may be replaced.
    """
    make_folder(out.parent)
    kind, paths = image_format(out), image_paths(out, len(images))
    recorded = PngImagePlugin.PngInfo()
    recorded.add_text(CHUNK, digest)
    for path, image in zip(paths, images, strict=True):
        data = BytesIO()
        shown = image if FORMATS[kind] else over_white(image)
        shown.save(data, kind, **({"pnginfo": recorded} if kind == "PNG" else {}))
        write_durably(path, data.getvalue())
        if shown is not image and image.getchannel("A").getextrema() != (255, 255):
            console().print(
                f"{plain(path)}: {kind} has no transparency, so it is over white; a .png keeps it", markup=False
            )
    return paths


# ---- axes ------------------------------------------------------------------------------------------------------------
# `--grid` of `predict`: one axis or two, and the cells between them, found and checked without torch.
#
# An axis replaces the setting of its name. `lora_weight` and `checkpoint` vary the single `--lora`: its weight, of
# which 0 is without it, and the training step in the folder of a run. Refused: an unknown axis, with the nearest; an
# axis or a value given twice; a value that its setting refuses; and an axis of something that is not there: of no LoRA
# or of several, of a step without a checkpoint, of guidance without a negative prompt, of steps beside `--sigmas`.

LORA_WEIGHT, CHECKPOINT = "lora_weight", "checkpoint"
OF_LORA = (LORA_WEIGHT, CHECKPOINT)
SETTINGS = ("num_inference_steps", "true_cfg_scale", "seed")
"""Axes that are settings of `predict`."""
AXES = (*OF_LORA, *SETTINGS)
FINAL = "final"
"""The checkpoint that is the finished LoRA."""
MOST_VALUES = 20
"""The most values of an axis: many programs cannot show a larger image of all cells."""
MOST_PIXELS = 50_000_000
"""Pixels of the cells in the image of all of them; titles add a third at most, and Pillow warns about 89 million."""


@dataclass(frozen=True)
class Axis:
    """A name of AXES and its values: numbers, or `final`."""

    name: str
    values: tuple[Value, ...]

    def titles(self) -> list[str]:
        """Each value with the name, such as `lora_weight=0.5`."""
        return [f"{self.name}={value}" for value in self.values]


def parse_axes(texts: Sequence[str], config: PredictConfig) -> list[Axis]:
    """The axes of the texts `AXIS=V1,V2,…`, columns before rows; `grid_cells` checks that checkpoints exist."""
    if len(texts) > 2:
        raise ConfigError("a grid has columns and rows", where="--grid", expected="one or two axes", found=len(texts))
    axes: list[Axis] = []
    for text in texts:
        name, equals, values = (part.strip() for part in text.partition("="))
        if not equals:
            raise ConfigError("--grid takes AXIS=V1,V2,…", expected="such as seed=0,1,2", found=text)
        if name not in AXES:
            near = [axis for axis in AXES if name and name in axis] or difflib.get_close_matches(name, AXES, n=1)
            do = f"did you mean {near[0]}?" if near else None
            raise ConfigError("unknown axis", where="--grid", expected=" or ".join(AXES), found=name, do=do)
        if name in (axis.name for axis in axes):
            raise ConfigError("this axis is given twice", where="--grid", found=name, do="list all its values in one")
        axis = Axis(name, tuple(_value(name, value.strip(), config) for value in values.split(",")))
        where, count = f"--grid {name}", len(axis.values)
        if twice := [value for value in axis.values if axis.values.count(value) > 1]:
            raise ConfigError("a value is given twice", where=where, found=twice[0])
        if count > MOST_VALUES:
            raise ConfigError("too many values", where=where, expected=f"at most {MOST_VALUES}", found=count)
        axes.append(axis)
    return axes


def _value(name: str, text: str, config: PredictConfig) -> Value:
    """A value of the axis, written in one way: 0.5 for 0.50, 1 for 1.0."""
    where = f"--grid {name}"
    if name == CHECKPOINT:
        if text == FINAL or (text.isascii() and text.isdigit()):
            return text if text == FINAL else int(text)
        raise ConfigError("not a checkpoint", where=where, expected=f"a training step, or {FINAL}", found=text or "''")
    if name == LORA_WEIGHT:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not math.isfinite(number):
            raise ConfigError("not a valid value", where=where, expected="a number", found=text or "''")
    else:
        number = getattr(_with(config, name, text), name)
    return int(number) if number == int(number) else number


def _with(config: PredictConfig, name: str, value: Value) -> PredictConfig:
    """The settings with another one; ConfigError if it is not valid."""
    given = Given(f"--grid {name}", f"predict.{name}", value)
    return overridden({"predict": config.model_dump(exclude_none=True)}, given=[given]).predict


# ---- cells -----------------------------------------------------------------------------------------------------------


def grid_cells(axes: Sequence[Axis], config: PredictConfig, loras: Sequence[str]) -> list[Cell]:
    """The cells, row by row, one without axes; `loras` are the values of `--lora`.

    Raises ConfigError for an axis of something that is not there, TrainError for a path without a LoRA.
    """
    names = {axis.name for axis in axes}
    if "true_cfg_scale" in names and config.negative_prompt is None:
        what = "without a negative prompt there is nothing to guide away from"
        raise ConfigError(what, where="--grid true_cfg_scale", do='give one: --negative-prompt " "')
    if "num_inference_steps" in names and config.sigmas is not None:
        what = "predict.sigmas are the noise levels, so the number of steps would be ignored"
        raise ConfigError(what, where="--grid num_inference_steps", do="leave one of them out")
    files = _varied_files(axes, loras) if names & set(OF_LORA) else {}
    fixed = [] if files else [parse_lora(text) for text in loras]
    weight = split_weight(loras[0])[1] if files else 1.0
    cells = []
    for combination in itertools.product(*(axis.values for axis in reversed(axes))):
        values = dict(zip((axis.name for axis in axes), reversed(combination), strict=True))
        own = config
        for name in SETTINGS:
            own = _with(own, name, values[name]) if name in values else own
        varied = (
            [WeightedLora(files[values.get(CHECKPOINT, FINAL)], float(values.get(LORA_WEIGHT, weight)))]
            if files
            else []
        )
        cells.append(Cell(values, own, () if values.get(LORA_WEIGHT) == 0 else (*fixed, *varied)))
    return cells


def _varied_files(axes: Sequence[Axis], loras: Sequence[str]) -> dict[Value, Path]:
    """The files of the LoRA whose weight or step is varied: by checkpoint, or the one that --lora names as `final`.

    ConfigError for a checkpoint that does not exist lists those that do.
    """
    names = [axis.name for axis in axes if axis.name in OF_LORA]
    if len(loras) != 1:
        found = "no --lora" if not loras else f"{len(loras)} of them"
        raise ConfigError(
            "this axis is about one LoRA", where=f"--grid {names[0]}", expected="--lora PATH", found=found
        )
    path, weight = split_weight(loras[0])
    if LORA_WEIGHT in names and path != loras[0]:
        found = f"--lora …:{weight:g} and --grid {LORA_WEIGHT}"
        raise ConfigError("the weight is given twice", where=path, found=found, do="leave one of them out")
    steps = next((axis.values for axis in axes if axis.name == CHECKPOINT), None)
    folder, where = Path(path), f"--grid {CHECKPOINT}"
    if steps is None:
        return {FINAL: find_lora(folder)}
    if not folder.is_dir():
        raise ConfigError("checkpoints are in the folder of a run", where=where, found=folder, do="name it with --lora")
    there: dict[Value, Path] = dict(checkpoints(folder))
    if (folder / WEIGHTS_NAME).is_file():
        there[FINAL] = folder
    if missing := [step for step in steps if step not in there]:
        known = ", ".join(map(str, there)) or "none in this folder"
        what = f"{folder} has no such checkpoint"
        raise ConfigError(what, where=where, expected=known, found=", ".join(map(str, missing)))
    return {step: find_lora(there[step]) for step in steps}


def cells_side_by_side(axes: Sequence[Axis], paths: Sequence[Path], prompt: str, family: Family) -> Image.Image:
    """The first axis from left to right, the second downwards, and the prompt below."""
    columns, rows = len(axes[0].values), len(axes[1].values) if axes[1:] else 1
    (first,) = open_images(paths[:1], family)
    height = thumbnail_height(columns, rows, first.width / first.height)
    small = []
    for path in paths:  # all of them are in memory at once
        (image,) = open_images([path], family)
        small.append(thumbnail(image, height) if image.height > height else image)
    captions = axes[1].titles() if axes[1:] else [""]
    captions[-1] = f"{captions[-1]}\n{prompt}"
    table = [small[row * columns : (row + 1) * columns] for row in range(rows)]
    return make_grid(axes[0].titles(), table, captions, height)


def thumbnail_height(columns: int, rows: int, ratio: float) -> int:
    """The height of a cell of this ratio of width to height, so that all of them have MOST_PIXELS at most."""
    return min(HEIGHT, math.isqrt(int(MOST_PIXELS / (columns * rows * ratio))))


# ---- grid ------------------------------------------------------------------------------------------------------------
# A grid that compares images with and without a LoRA: controls, without, with, target; one row per prompt.


@dataclass(frozen=True)
class Row:
    """The images of one row; a missing image leaves its cell empty."""

    controls: tuple[Image.Image, ...] = ()
    without_lora: Image.Image | None = None
    with_lora: Image.Image | None = None
    target: Image.Image | None = None


def titled(row: Row) -> list[tuple[str, Image.Image]]:
    """The images of a row that exist, each with its title, in the order of the columns."""
    titles = ["control"] if len(row.controls) == 1 else [f"control {i}" for i in range(1, len(row.controls) + 1)]
    named = [*zip(titles, row.controls, strict=True), ("without LoRA", row.without_lora), ("with LoRA", row.with_lora)]
    return [(title, image) for title, image in [*named, ("target", row.target)] if image is not None]


def compare_grid(rows: Sequence[Row], captions: Sequence[str], height: int = HEIGHT) -> Image.Image:
    """A line of titles, then each row with its caption below; see `make_grid`."""
    controls = max((len(row.controls) for row in rows), default=0)
    titles = ["control"] if controls == 1 else [f"control {i}" for i in range(1, controls + 1)]
    table = [
        [*row.controls, *[None] * (controls - len(row.controls)), row.without_lora, row.with_lora, row.target]
        for row in rows
    ]
    return make_grid([*titles, "without LoRA", "with LoRA", "target"], table, captions, height)


# ---- comparison ------------------------------------------------------------------------------------------------------
# Images with and without a LoRA beside each other: up to `ROWS` rows as one PNG, more as a page.
#
# The page (`compare.html.jinja`) has names and prompts, in parts of `ROWS` rows. Its images are in a folder beside it,
# so that a browser loads them as they are scrolled into view. Writing one form removes the other, which would be out of
# date. A file of that name that was not generated here is refused before anything is generated.

ROWS = 20
"""Rows of a PNG, and of a part of the page: many programs cannot show a higher PNG."""
THUMBNAIL = 640  # pixels of the longer side: two of them fill a laptop's screen
GENERATOR = "qwen-train predict --compare"
"""The meta entry that identifies our pages; the template has it too."""
IMAGE_NAME = re.compile(r"[0-9]{5}-(control|control-[0-9]+|without-lora|with-lora|target)\.(jpg|webp)")


@dataclass(frozen=True)
class Comparison:
    """A row with its name and prompt."""

    name: str
    prompt: str
    row: Row
    files: Mapping[str, Path] = field(default_factory=dict)
    """The generated files by the titles of their columns."""


def comparison_path(png: Path, rows: int) -> Path:
    """The file in which `rows` rows are compared: `png`, or a page of that name."""
    return png if rows <= ROWS else png.with_suffix(".html")


def check_comparison(path: Path) -> None:
    """Raise ConfigError if a PNG or page at `path` was not generated here."""
    if path.suffix != ".html":
        recorded_hash(path)
    elif not _is_our_page(path):
        raise not_ours(path)


def save_comparison(path: Path, rows: Iterable[Comparison], count: int) -> None:
    """Write the PNG or the page of at most `count` rows, and remove the other form of an earlier run."""
    if path.suffix == ".html":
        folder, listed, kept = _image_folder(path), [], set[str]()
        make_folder(folder)
        with counting("comparing", count) as advance:
            for number, each in enumerate(rows, 1):
                images = list(_saved_images(folder, number, each))
                kept |= {image["file"] for image in images}
                listed.append({"number": number, "name": each.name, "prompt": each.prompt, "images": images})
                advance(1)
        text = render("compare.html.jinja", title="With and without the LoRA", rows=listed, part_rows=ROWS)
        write_durably(path, text.encode("utf-8"))
        _remove_images(folder, kept)
        png = path.with_suffix(".png")
        if os.path.lexists(png) and recorded_hash(png) == PAGE_HASH:
            png.unlink()
        return
    shown = list(rows)
    grid = compare_grid([each.row for each in shown], [f"{each.name}: {each.prompt}" for each in shown])
    save_images([grid], path)
    page = path.with_suffix(".html")
    if _is_our_page(page):
        page.unlink()
        _remove_images(_image_folder(page), keep=set())


def _saved_images(folder: Path, number: int, each: Comparison) -> Iterator[dict[str, Any]]:
    """Write a row's images, and yield what the page needs of them."""
    for title, image in titled(each.row):
        transparent = image.mode == "RGBA"
        small = image.copy() if transparent else image.convert("RGB")
        small.thumbnail((THUMBNAIL, THUMBNAIL), Image.Resampling.LANCZOS)
        name = f"{number:05}-{title.replace(' ', '-').lower()}.{'webp' if transparent else 'jpg'}"
        data = BytesIO()
        small.save(data, "WEBP" if transparent else "JPEG", quality=90)
        write_durably(folder / name, data.getvalue())
        source = f"{folder.name}/{name}"
        whole = each.files[title].relative_to(folder.parent).as_posix() if title in each.files else source
        size = {"width": small.width, "height": small.height}
        yield {"file": name, "title": title, "source": relative_url(source), "whole": relative_url(whole), **size}


def _image_folder(page: Path) -> Path:
    return page.with_name(f"{page.stem}_files")


def _remove_images(folder: Path, keep: set[str]) -> None:
    """Remove the images of an earlier page, and the folder if nothing is left in it."""
    for path in folder.glob("*"):
        if IMAGE_NAME.fullmatch(path.name) and path.name not in keep:
            path.unlink()
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _is_our_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return f'name="generator" content="{GENERATOR}"'.encode() in file.read(1000)
