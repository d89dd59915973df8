"""`init`: a small qwen.yaml for the data and this machine, with a comment per value.

It reads the rows of the source as `build` does, the headers of some images, and the devices of this machine; nothing is
downloaded. With --from, data and settings are those of another trainer's file, and what it does not take is listed.
Refuses a source with unusable rows, a model that does not exist, and to overwrite a file without --force.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add
from pathlib import Path
from statistics import median_low
from typing import TYPE_CHECKING, Any

from qwen_cache.cli.doctor import Device, Torch, probe_torch
from qwen_cache.errors import ConfigError, SourceError, counted
from qwen_cache.models.assistants import published_for, verified_for
from qwen_cache.models.family import FAMILIES, QWEN_IMAGE, VAE_IMAGE_SIZE, Family
from qwen_cache.options import (
    CONTROLS,
    FROM,
    JSON,
    MODEL,
    OUTPUT,
    SET,
    TARGETS,
    command,
    flag,
    given_controls,
    option,
    setting,
    setting_argument,
)
from qwen_cache.settings.given import Given
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.terminal import console, human_bytes, plural, print_json, print_next, print_problems
from qwen_cache.text import plain, shell_line

if TYPE_CHECKING:
    from qwen_cache.errors import Notice
    from qwen_cache.format.sample import ImgShapes
    from qwen_cache.models.folder import ModelFolder
    from qwen_cache.settings.load import Config
    from qwen_cache.settings.sections import DataConfig
    from qwen_cache.sources.captions import Captions
    from qwen_cache.sources.detect import Readable, Row
    from qwen_cache.trainers.settings.names import Dataset, Reading, Taken

HEADERS = 32
"""Images whose size is read, evenly spaced: enough for a median, and about a second from a server."""
SMALL = 0.75
"""Share of the default area below which a smaller area is suggested: upscaled images cost time and add no detail."""
SMALL_EDITS = 0.25
"""The same for edits, whose sides are then enlarged more than twice: the stock Edit pipelines always condition on about
the default area, so a LoRA is trained at it while the images have detail enough."""
STEP = 32
"""Suggested sides are multiples of this, as in the pipelines."""
FITTING: tuple[tuple[float, dict[str, Any]], ...] = (
    (48.8e9, {}),
    (34.6e9, {"train.tabulated_modulation": True}),
    (22.0e9, {"train.offload_blocks": 40}),
    (7.8e9, {"train.offload_blocks": 60}),
)
"""Bytes of GPU memory for a LoRA on the 20B model (1024², one control), and the settings that achieve them, from
docs/howto/fit-your-gpu.md. Only settings that leave the numbers unchanged, fastest first."""
IN_8_BITS = 21.5e9
"""The same for weights and products in int8, which are faster than offloading."""
MEASURED = 16
"""Samples of which the images are measured: a fault of one program is in all of its images."""
PROMPTS = 2
"""Prompts for validation, made from the first rows."""
KINDS = {
    "csv": "a CSV table",
    "tsv": "a TSV table",
    "jsonl": "a JSON Lines table",
    "json": "a JSON table",
    "parquet": "Parquet",
    "arrow": "a dataset that `datasets` saved",
    "tar": "tars of images",
}
"""Kinds of sources by the extension in the location of a row."""
IMAGES = "a folder of images"


@dataclass(frozen=True)
class Survey:
    """The content of the source."""

    kind: str
    samples: int
    controls: tuple[int, int]
    """The fewest and the most controls of a sample."""
    without_prompt: int
    with_mask: int
    sizes: Sequence[tuple[int, int]]
    """Width and height of some targets, by area."""
    repeats: dict[str, int]
    """How often the images of each folder come in an epoch, if its folders are those of kohya's trainers."""
    prompts: Sequence[dict[str, Any]]
    """The first rows as prompts to generate images from; none where their controls are no files of their own."""
    notices: tuple[Notice, ...]

    def __add__(self, other: Survey) -> Survey:
        """Both sources as one."""
        return Survey(
            self.kind,
            self.samples + other.samples,
            (min(self.controls[0], other.controls[0]), max(self.controls[1], other.controls[1])),
            self.without_prompt + other.without_prompt,
            self.with_mask + other.with_mask,
            sorted([*self.sizes, *other.sizes], key=math.prod),
            {},
            [*self.prompts, *other.prompts][:PROMPTS],
            counted([*self.notices, *other.notices]),
        )

    @property
    def median(self) -> tuple[int, int]:
        return self.sizes[median_low(range(len(self.sizes)))]

    @property
    def smaller(self) -> tuple[int, str] | None:
        """The side of a square of the area to train at, and why; None for the default."""
        width, height = self.median
        has_edits = bool(self.controls[1])
        if width * height >= (SMALL_EDITS if has_edits else SMALL) * VAE_IMAGE_SIZE:
            return None
        side = max(STEP, math.isqrt(width * height) // STEP * STEP)
        why = f"{side}²: the median target has {width}×{height} pixels. By default all are resized to about 1024²."
        if has_edits:
            why += " The stock Edit pipelines condition on about a megapixel: train on larger images if you have them."
        return side, why


@dataclass(frozen=True)
class Part:
    """A part of the data with a cache of its own."""

    words: list[str]
    """The arguments of `build`."""
    cache: dict[str, Any]
    """Its entry in `train.caches`."""


@command(
    page="tutorial.md",
    examples=[
        "qwen-cache init data.parquet --model Qwen/Qwen-Image-2.1 --out run.yaml",
        "qwen-cache init --from dataset.toml",
    ],
)
def init(
    source: Given | None = setting_argument("data.source", "SOURCE", "A folder, table or tars of images, or a URL."),
    model: Given | None = setting(
        "model.path",
        MODEL,
        "A diffusers folder, or a repository on the hub.",
        "MODEL",
        name="--model",
        default="one that takes as many control images as the samples have",
    ),
    from_: Path | None = FROM,
    targets: Given | None = TARGETS,
    controls: list[str] | None = CONTROLS,
    out: Path = option(OUTPUT, "The settings file to write.", "FILE", default=Path("qwen.yaml")),
    force: bool = flag("--force", OUTPUT, "Replace the file if it exists."),
    json: bool = JSON,
    set_: list[str] | None = SET,
) -> int:
    """Write a small commented qwen.yaml for the data in SOURCE and the devices of this machine."""
    from qwen_cache.models.folder import check_name, open_model
    from qwen_cache.settings.describe import settings_file
    from qwen_cache.settings.load import Config, overridden, parse_yaml

    given = [each for each in (source, model, targets, given_controls(controls)) if each is not None]
    theirs = _read_theirs(from_, has_source=source is not None) if from_ else None
    configs = _configs(theirs, set_, given)
    config = configs[0]
    if out.exists() and not force:
        raise ConfigError("this settings file already exists", where=out, do="give --force to replace it, or --out")
    known = None
    if config.model.path is not None:
        name = check_name(config.model.path)
        known = open_model(name, ()) if Path(name).is_dir() else None
    surveys = [survey_source(each, known) for each in configs]
    survey = surveys[0] if len(surveys) == 1 else reduce(add, surveys)
    models, torch = fitting_models(survey.controls), probe_torch()
    if config.model.path is not None:
        _check_model(config.model.path, known, survey.controls, models)
    parts = _parts(theirs, configs, survey)
    entries = {key: (value, comment) for key, value, comment in chosen(config, survey, models, torch, parts)}
    if theirs is not None:
        entries = _with_theirs(entries, theirs)
    if parts and "validation.prompts" in entries:
        validation = f"{parts[0].cache['path']}/validation"
        entries["validation.cache"] = validation, "The first build encodes the prompts, and the run finds them here."
    typed = {key: (value, "Given on the command line.") for key, value in _given(config, set_, given)}
    entries |= typed
    if theirs is not None:
        later = {key: each for key, each in theirs.later.items() if key not in typed}
        entries |= dict(_steps(later, entries, theirs.datasets, surveys))
    defaults = Config().flat()
    text = settings_file((key, *entries[key]) for key in sorted(entries, key=list(defaults).index))
    about = _about([each.data.source for each in configs], survey)
    text = f"{_head(about, has_prompts='validation.prompts' in entries)}\n\n{text}\n"
    overridden(parse_yaml(text), str(out))
    make_folder(out.parent)
    write_durably(out, text.encode("utf-8"))
    follow = _next_commands(out, parts)
    if json:
        print_json(_to_json(out, config, survey, models, torch, follow) | _theirs_to_json(theirs))
        return 0
    console().print(f"wrote {plain(out)}: {about}", markup=False)
    for notice in survey.notices:
        console().print(str(notice), markup=False)
    if theirs is not None:
        _print_theirs(theirs)
    if survey.repeats:
        console().print("train.caches has a cache for each folder, with its number as the weight", markup=False)
    elif len(configs) > 1:
        console().print("train.caches has a cache for each data set, with its repeats as the weight", markup=False)
    is_smaller = survey.smaller is not None and survey.smaller[1] in [comment for _, comment in entries.values()]
    if survey.smaller and survey.controls[1] and is_smaller:
        console().print(f"warning: data.vae_image_size is {survey.smaller[1]}", markup=False)
    print_next(*follow)
    return 0


def _check_model(
    name: str, folder: ModelFolder | None, controls: tuple[int, int], models: Sequence[tuple[str, Family]]
) -> None:
    """ConfigError for a model that takes fewer control images than the samples have."""
    published = {each: it for family in FAMILIES for it in family.pipelines for each in it.models}
    pipeline, (_, most) = folder.facts if folder else published.get(name), controls
    if pipeline is not None and pipeline.max_controls is not None and most > pipeline.max_controls:
        raise ConfigError(
            f"{pipeline.name} takes {plural(pipeline.max_controls, 'control image')}",
            where="--model",
            found=f"{_controls(controls)} per sample",
            do=f"name another model, such as {models[0][0]}, or leave them out with --set 'data.columns.control=[]'",
        )


# ---- another trainer's file ------------------------------------------------------------------------------------------


def _read_theirs(file: Path, *, has_source: bool) -> Reading:
    """The settings of a file; with a source on the command line, without the folders of its data."""
    from qwen_cache.trainers.settings.read import read

    theirs = read(file)
    if has_source:
        theirs.drop_data()
    else:
        theirs.check_folders()
    return theirs


def _configs(theirs: Reading | None, assignments: Sequence[str] | None, given: Sequence[Given]) -> list[Config]:
    """The settings for each data set of the file; those of the command line alone, if there is none."""
    from qwen_cache.settings.load import overridden
    from qwen_cache.trainers.settings.names import Taken, nested

    if theirs is None:
        return [overridden({}, assignments=assignments, given=given)]
    of_sets = [
        {key: Taken(value, each.name) for key, value in each.source().items()} | each.settings
        for each in theirs.datasets
    ]
    where = f"--from {theirs.file}"
    return [
        overridden(nested(theirs.settings | each), where, assignments=assignments, given=given)
        for each in of_sets or [{}]
    ]


def _with_theirs(entries: dict[str, tuple[Any, str]], theirs: Reading) -> dict[str, tuple[Any, str]]:
    """The entries with those of the file in place of what `init` suggests, each with its name there."""
    first = next(iter(theirs.datasets), None)
    taken = theirs.settings | (first.settings if first else {})
    found = {key: (each.value, f"{each.origin}.") for key, each in taken.items()}
    if first:
        found |= {key: (value, f"{theirs.file.name}: {first.name}.") for key, value in first.source().items()}
    if "data.resolution" in found:
        entries.pop("data.vae_image_size", None)
    if "img_mod.1" in found.get("train.lora.target_modules", ((), ""))[0]:
        entries.pop("train.tabulated_modulation", None)  # which is for a modulation that is not trained
    return entries | found


def _steps(
    later: dict[str, Taken],
    entries: dict[str, tuple[Any, str]],
    datasets: Sequence[Dataset],
    surveys: Sequence[Survey],
) -> Iterator[tuple[str, tuple[int, str]]]:
    """The numbers of steps that the file gives in epochs, or as a part of all steps."""
    from qwen_cache.trainers.settings.names import Epochs

    weights = [each.weight for each in datasets] or [1.0]
    samples = sum(each.samples * weight for each, weight in zip(surveys, weights, strict=True))
    of_a_step = [entries.get(f"train.{key}", (1, ""))[0] for key in ("batch_size", "gradient_accumulation_steps")]
    epoch = math.ceil(samples / math.prod(of_a_step))
    most = entries["train.max_steps"][0]
    for key, each in sorted(later.items(), key=lambda item: item[0] != "train.max_steps"):
        if isinstance(each.value, Epochs):
            steps, why = max(1, round(each.value.count * epoch)), f"an epoch has {plural(epoch, 'step')}"
        else:
            steps, why = round(each.value.part * most), f"of {plural(most, 'step')}"
        most = steps if key == "train.max_steps" else most
        yield key, (steps, f"{each.origin}; {why}.")


def _given(config: Config, assignments: Sequence[str] | None, given: Sequence[Given]) -> Iterator[tuple[str, Any]]:
    """The settings that the command line gives, a section's own as far as they are not the defaults."""
    from qwen_cache.settings.load import Config

    names = [*(each.partition("=")[0].strip() for each in assignments or ()), *(each.key for each in given)]
    defaults = Config().flat()
    for key, value in config.flat().items():
        if key in names or (value != defaults[key] and any(key.startswith(f"{name}.") for name in names)):
            yield key, value


def _print_theirs(theirs: Reading) -> None:
    name = plain(theirs.file.name)
    count = len(theirs.settings) + len(theirs.later) + sum(len(each.settings) for each in theirs.datasets)
    lines = [f"{name} is of {theirs.trainer}: {plural(count, 'setting')} taken, each with its name there as a comment"]
    if theirs.same:
        lines.append(f"the same here without a setting: {plain(', '.join(dict.fromkeys(theirs.same)))}")
    if theirs.left:
        lines += ["not taken:", *dict.fromkeys(f"  {each}" for each in theirs.left)]
    console().print("\n".join(lines), markup=False)


def _theirs_to_json(theirs: Reading | None) -> dict[str, Any]:
    if theirs is None:
        return {}
    taken = theirs.settings | theirs.later
    return {
        "from": {
            "trainer": theirs.trainer,
            "file": str(theirs.file),
            "taken": {key: each.origin for key, each in taken.items()},
            "datasets": [
                {"name": each.name, **each.source(), "taken": {key: one.origin for key, one in each.settings.items()}}
                for each in theirs.datasets
            ],
            "same": list(dict.fromkeys(theirs.same)),
            "not_taken": [{"name": each.name, "value": each.text, "why": each.why} for each in theirs.left],
        }
    }


# ---- the data --------------------------------------------------------------------------------------------------------


def survey_source(config: Config, model: ModelFolder | None = None) -> Survey:
    """Read the rows of the source, and the size of some targets; SourceError where `build` would stop."""
    from qwen_cache.settings.sections import ColumnsConfig
    from qwen_cache.sources.captions import Captions
    from qwen_cache.sources.detect import advice, read_content, reading
    from qwen_cache.sources.layouts import repeats_of
    from qwen_cache.sources.places import open_folder
    from qwen_cache.storage.remote import is_remote, location

    source, place = config.data.source, location(config.data.source)
    content = read_content(place, **reading(config.data, model) | {"allow_empty_prompt": True})
    rows, problems = content.rows, content.problems
    print_problems(problems, rest="`qwen-cache build --dry-run --json` lists all")
    if not rows or (problems and config.data.on_error == "stop"):
        for notice in content.notices:  # which folder was taken for the targets may be the reason
            console().print(str(notice), markup=False)
        do = advice(len(problems), len(rows), "--set data.on_error=skip")
        what = "some rows of this source cannot be used" if rows else "no row of this source can be used"
        raise SourceError(what, where=source, do=do)
    targets = [row.target for row in rows if row.target is not None]
    if not targets:
        command = shell_line(["qwen-cache", "build", source, "--model", "MODEL"])
        what, found = "init looks at the sizes of targets", "none: all rows are images to generate"
        raise SourceError(what, where=source, found=found, do=f"build it without init: {command}")
    sizes = sorted(_sizes(targets), key=math.prod)
    if not sizes:
        raise SourceError("no image of this source can be read", where=source, found=str(targets[0]))
    counts, kind = [len(row.controls) for row in rows], _kind(rows[0], source)
    is_numbered = kind == IMAGES and not max(counts) and config.data.columns == ColumnsConfig()
    repeats = repeats_of(open_folder(place)) if is_numbered and not is_remote(place) else {}
    survey = Survey(
        kind=kind,
        samples=len(rows),
        controls=(min(counts), max(counts)),
        without_prompt=sum(not row.prompt for row in rows),
        with_mask=sum(row.mask is not None for row in rows),
        sizes=sizes,
        repeats=repeats if len(repeats) > 1 else {},
        prompts=list(islice(_prompts(rows, Captions.of(config.data).in_order), PROMPTS)),
        notices=content.notices,
    )
    return replace(survey, notices=(*content.notices, *_found_in_images(rows, config.data, survey)))


def _found_in_images(rows: Sequence[Row], data: DataConfig, survey: Survey) -> list[Notice]:
    """Notices of `MEASURED` samples at the size that is trained; images that cannot be decoded are left out."""
    from qwen_cache.format.measured import Measured, findings, table_of_measured
    from qwen_cache.sources.alignment import measure_files
    from qwen_cache.sources.images import upright_size
    from qwen_cache.sources.sizes import Resolution, SourceImage, img_shapes, sizes_of

    if survey.smaller and data.vae_image_size is None and data.resolution is None:
        data = data.model_copy(update={"vae_image_size": [survey.smaller[0] ** 2]})
    resolution = Resolution.of(data)

    def measured(row: Row) -> tuple[str, Measured, ImgShapes] | None:
        files = [file for file in (row.target, *row.controls) if file is not None]
        with suppress(SourceError):
            sizes, *_ = sizes_of(
                [SourceImage(str(each), upright_size(each.read(), str(each))) for each in files], resolution
            )
            return row.name, measure_files(files, sizes, crop=resolution.crop), img_shapes(sizes)
        return None

    with_target = [row for row in rows if row.target is not None]
    some = (
        [with_target[i * len(with_target) // MEASURED] for i in range(MEASURED)]
        if len(with_target) > MEASURED
        else with_target
    )
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = [each for each in pool.map(measured, some) if each]
    notices = findings(table_of_measured((each, shapes) for _, each, shapes in found)).notices(
        lambda positions: [found[i][0] for i in positions.tolist()]
    )
    return [replace(each, what=f"of {plural(len(found), 'sample')} looked at: {each.what}") for each in notices]


def _kind(row: Row, source: str) -> str:
    inside = row.where.removeprefix(source)
    ending = re.findall(rf"\.({'|'.join(KINDS)})\b", inside) or re.findall(r"\.(\w+)$", source)
    return KINDS.get(ending[0], IMAGES) if ending else IMAGES


def _prompts(rows: Sequence[Row], captions: Captions) -> Iterator[dict[str, Any]]:
    """Rows as entries of `validation.prompts`, which are encoded as they are, so with trigger word and prefix."""
    for row in rows:
        controls = [str(each) for each in row.controls]
        if row.prompt and all(map(os.path.isfile, controls)):
            [encoded] = captions.applied([row])
            yield {"prompt": encoded.prompt, **({"control": controls} if controls else {})}


def _sizes(targets: Sequence[Readable]) -> Iterator[tuple[int, int]]:
    from qwen_cache.sources.images import upright_size

    for number in range(min(HEADERS, len(targets))):
        target = targets[number * len(targets) // min(HEADERS, len(targets))]
        data = target.read()
        with suppress(SourceError):  # not an image: `build` reports it
            yield upright_size(data, str(target))


def fitting_models(controls: tuple[int, int]) -> list[tuple[str, Family]]:
    """The published models that take that many controls, the suggested one first: that of the README's commands.

    An editing model takes samples without controls too, but is suggested only for a source that has some.
    """
    _, most = controls
    return [
        (name, family)
        for family in FAMILIES
        for pipeline in reversed(family.pipelines)
        if pipeline.min_controls <= most and (pipeline.max_controls is None or most <= pipeline.max_controls)
        for name in pipeline.models
    ]


# ---- the file --------------------------------------------------------------------------------------------------------


def chosen(
    config: Config, survey: Survey, models: Sequence[tuple[str, Family]], torch: Torch, parts: Sequence[Part]
) -> Iterator[tuple[str, Any, str]]:
    """Each setting of the file, with its value and a comment that explains it."""
    from qwen_cache.settings.load import Config

    name, family = next((each for each in models if each[0] == config.model.path), models[0])
    others = "; ".join(f"{other} ({_terms(other, kind)})" for other, kind in models if other != name)
    takes = "No control images" if not survey.controls[1] else f"{_controls(survey.controls)} per sample"
    yield "model.path", name, f"{takes}, licence {family.licence}." + (f" Also possible: {others}." if others else "")
    yield "data.source", config.data.source, ""
    if survey.without_prompt:
        what = f"{survey.without_prompt} of {plural(survey.samples, 'sample')} without a prompt: `build` refuses this"
        do = "`qwen-cache caption` writes what is missing, for you to correct."
        yield "data.allow_empty_prompt", False, f"{what} unless the setting is true. {do}"
    if survey.smaller:
        side, why = survey.smaller
        yield "data.vae_image_size", side * side, why
    if not parts:
        yield "cache.path", config.cache.path, "The folder of the cache."
    defaults = Config()
    yield "train.output_dir", defaults.train.output_dir, "The folder of the LoRA, its checkpoints and the report."
    if parts:
        caches = [each.cache for each in parts]
        yield "train.caches", caches, "A cache for each part; the weight is how often a sample comes in an epoch."
    yield from _assistant(config.model.path or name)
    yield from _memory(family, torch)
    steps = defaults.train.max_steps
    epochs = "" if parts else f"{steps / survey.samples:.1f} epochs at a batch size of 1."
    yield "train.max_steps", steps, epochs
    if survey.with_mask:
        masks = f"{plural(survey.with_mask, 'sample')} with a mask: above 1, the loss inside the mask counts more."
        yield "train.edit_mask_weight", defaults.train.edit_mask_weight, masks
    yield "train.lora.rank", defaults.train.lora.rank, "A higher rank can learn more, and takes more memory."
    yield "optimizer.learning_rate", defaults.optimizer.learning_rate, ""
    if survey.prompts:
        what = "Images to generate while it trains, from the first rows: `build` encodes them, `qwen-train decode` "
        yield "validation.prompts", survey.prompts, what + "shows them. Images that are not in the data tell more."


def _terms(model: str, family: Family) -> str:
    """The licence of a published model, and whether it is one to generate with alone."""
    is_distilled = any(model in pipeline.distilled for pipeline in family.pipelines)
    return f"{family.licence}{', distilled: to generate with' if is_distilled else ''}"


def _assistant(base: str) -> Iterator[tuple[str, Any, str]]:
    """The training adapter of a base that needs one: `auto` if it was verified, or else in a comment."""
    from qwen_cache.settings.describe import CommentedOut

    why = "A frozen adapter beside the LoRA, which alone is reported to lose texture on this model"
    if verified := verified_for(base):
        yield "train.assistant_lora", "auto", f"{why}: {verified.assistant.repository}."
    elif published := published_for(base):
        text = f"{why}; {published[0].licence_told}, its benefit not checked here. Uncomment to try it."
        yield "train.assistant_lora", CommentedOut(published[0].name), text


def _memory(family: Family, torch: Torch) -> Iterator[tuple[str, Any, str]]:
    """The settings of training that depend on the GPU."""
    device = next(iter(torch.devices), None)
    plan = "`qwen-train plan` predicts the memory for this cache; with --fit it names the fastest settings that fit."
    if device is None or device.total is None:
        found = "torch is not installed" if torch.absent else "No GPU was found"
        yield "train.batch_size", 1, f"{found} on this machine, so no setting here depends on GPU memory. {plan}"
        return
    has = f"{device.name} has {human_bytes(device.total)}"
    if family is not QWEN_IMAGE:
        yield "train.batch_size", 1, f"{has}. {plan}"
        return
    needed, settings = next((each for each in FITTING if each[0] <= device.total), FITTING[-1])
    about = f"{has}; a sample of 1024² with one control needs about {human_bytes(needed)}"
    yield "train.batch_size", 1, f"{about}{' with the setting below' if settings else ''}. {plan}"
    faster = (
        "Faster on GPUs, with the frozen weights rounded to 8 bits: train.tabulated_modulation: true and "
        "model.quantization: int8_convrot in place of this."
        if "train.offload_blocks" in settings and device.total >= IN_8_BITS
        else ""
    )
    yield from ((key, value, faster) for key, value in settings.items())


def _head(about: str, *, has_prompts: bool) -> str:
    from qwen_cache.settings.describe import comment

    where = "`qwen-train config` lists all settings, `qwen-train config --search lr` searches them."
    if not has_prompts:
        where += " `validation.prompts` has prompts to generate images from while the model trains; there are none yet."
    return "\n".join([*comment(f"Written by `qwen-cache init`. {about}."), *comment(where)])


def _about(sources: Sequence[str], survey: Survey) -> str:
    """A sentence about the sources, without its full stop."""
    if len(sources) == 1:
        return f"{plain(sources[0])} is {summary(survey)}"
    return f"{plain(' and '.join(sources))} have {summary(survey).partition(': ')[2]}"


def summary(survey: Survey) -> str:
    """The kind of a source, its samples and their sizes, on one line."""
    (w0, h0), (w, h), (w1, h1) = survey.sizes[0], survey.median, survey.sizes[-1]
    sizes = f"{w}×{h}" if (w0, h0) == (w1, h1) else f"{w0}×{h0} to {w1}×{h1}, median {w}×{h}"
    controls = f"with {_controls(survey.controls)} each" if survey.controls[1] else "without control images"
    return f"{survey.kind}: {plural(survey.samples, 'sample')} {controls}, targets {sizes}"


def _controls(controls: tuple[int, int]) -> str:
    fewest, most = controls
    return plural(most, "control image") if fewest == most else f"{fewest} to {most} control images"


def _parts(theirs: Reading | None, configs: Sequence[Config], survey: Survey) -> list[Part]:
    """The parts of data that has several: folders with repeats, or data sets of another trainer's file."""
    config, base = configs[0], configs[0].data.source.rstrip("/")
    if survey.repeats:
        return [
            Part([f"{base}/{name}", "--out", path], {"path": path, "weight": number})
            for name, number in survey.repeats.items()
            for path in [_cache_of(config, name)]
        ]
    datasets = theirs.datasets if theirs else []
    names = [Path(each.targets).name for each in datasets]
    if len({*names} - {""}) < len(names):
        names = [each.name for each in datasets]
    parts = list[Part]()
    for dataset, name, each in zip(datasets, names, configs, strict=bool(datasets)):
        path = _cache_of(config, name)
        once = ["--set", "validation.prompts=[]"] if parts and config.validation.prompts else []
        parts.append(Part([*_build_words(each, config), *once, "--out", path], dataset.entry(path)))
    only_one = len(parts) == 1 and parts[0].cache.keys() <= {"path", "weight"}
    return [] if only_one else parts


def _build_words(config: Config, written: Config) -> list[str]:
    """The arguments of `build` for settings of the data that differ from those written."""
    from qwen_cache.settings.load import assignment

    words, columns = [config.data.source], config.data.columns
    has_names = columns != written.data.columns and columns.target is not None and bool(columns.control)
    if has_names:
        words += ["--targets", str(columns.target)]
        words += [word for name in columns.control or () for word in ("--controls", name)]
    said = ["data.source", *(["data.columns.target", "data.columns.control"] if has_names else [])]
    others = written.data.flat("data.")
    for key, value in config.data.flat("data.").items():
        if value != others[key] and key not in said:
            words += ["--set", assignment(key, value)]
    return words


def _cache_of(config: Config, folder: str) -> str:
    """The cache of one part of the data."""
    return f"{config.cache.path}-{re.sub(r'[^0-9A-Za-z.-]+', '_', folder)}"


def _next_commands(file: Path, parts: Sequence[Part]) -> list[list[str]]:
    from qwen_cache.settings.load import CONFIG_NAME

    settings = [] if file == Path(CONFIG_NAME) else ["--config", str(file)]
    builds = [each.words for each in parts] or [["--dry-run"], []]
    return [["qwen-cache", "build", *words, *settings] for words in builds]


def _to_json(
    file: Path,
    config: Config,
    survey: Survey,
    models: Sequence[tuple[str, Family]],
    torch: Torch,
    follow: Sequence[Sequence[str]],
) -> dict[str, Any]:
    return {
        "file": str(file),
        "source": config.data.source,
        "kind": survey.kind,
        "samples": survey.samples,
        "controls": list(survey.controls),
        "without_prompt": survey.without_prompt,
        "with_mask": survey.with_mask,
        "targets": {"smallest": survey.sizes[0], "median": survey.median, "largest": survey.sizes[-1]},
        "models": [name for name, _ in models],
        "notices": [str(each) for each in survey.notices],
        "devices": [_device(each) for each in torch.devices],
        "next": list(map(shell_line, follow)),
    }


def _device(device: Device) -> dict[str, Any]:
    return {"device": device.device, "name": device.name, "memory": device.total}
