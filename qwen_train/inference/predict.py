"""`predict`: what its options mean together, and the work."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import ConfigError, Problem
from qwen_cache.extras import installed, require
from qwen_cache.format.cache import Cache, find_sample, open_configured
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.models.recorded import with_recorded_model
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.storage.files import make_folder
from qwen_cache.terminal import FAILED, FAULTS, INTERRUPTED, console, plural, print_json, print_problems, verbatim
from qwen_train.inference.images import (
    COMPONENTS,
    COMPONENTS_FOR_A_CACHE,
    OF_LORA,
    WITHOUT,
    Axis,
    Cell,
    GenerateJob,
    Work,
    cells_side_by_side,
    comparison_path,
    grid_cells,
    image_format,
    image_paths,
    open_images,
    output_paths,
    parse_axes,
    prompt_jobs,
    save_comparison,
    save_images,
    source_jobs,
    typed_prompts,
)
from qwen_train.lora.files import split_weight
from qwen_train.run import as_trained, in_one_process, run_of

if TYPE_CHECKING:
    from qwen_train.inference.generator import Generator

# ---- predict options -------------------------------------------------------------------------------------------------
# The options of `qwen-train predict`, and which of them exclude each other, found before anything is read.

WAYS = (("--prompt",), ("--image", "--prompt"), ("--source",), ("--prompt", "--source"), ("--from-cache",))
"""The valid combinations of options that select what to generate."""


@dataclass(frozen=True)
class PredictOptions:
    """The options of the command besides settings and devices."""

    out: Path
    images: Sequence[Path] = ()
    prompts: Sequence[str] = ()
    source: str | None = None
    cache: str | None = None
    keys: Sequence[str] = ()
    loras: Sequence[str] = ()
    """`PATH` or `PATH:weight`."""
    devices: tuple[str, str | None, str | None, str | None] = ("auto", None, None, None)
    """The device of all components; then of VAE, text encoder and transformer, where they differ."""
    merge: bool = False
    compare: bool = False
    grid: Sequence[str] = ()
    """`AXIS=V1,V2,…`, for columns and rows."""
    save_interrupted: bool = False
    as_json: bool = False

    @property
    def into_folder(self) -> bool:
        """True if --out is a folder: with --source always, with --from-cache unless it is the name of an image."""
        return bool(self.source) or (self.cache is not None and not self.out.suffix)

    @property
    def is_one(self) -> bool:
        """True if to make one call of the pipeline, instead of a folder of images."""
        return len(self.prompts) == 1 and not (self.compare or self.source or self.grid)


# ---- checks ----------------------------------------------------------------------------------------------------------


def check(settings: Config, options: PredictOptions) -> None:
    """Raise ConfigError for options that exclude each other, before anything is read."""
    given = {
        "--image": options.images,
        "--prompt": options.prompts,
        "--source": options.source,
        "--from-cache": options.cache,
    }
    ways = tuple(name for name, value in given.items() if value)
    if ways not in WAYS:
        expected = "; or ".join(" and ".join(way) for way in WAYS)
        raise ConfigError("nothing to generate", expected=expected, found=" and ".join(ways) or "nothing")
    if bool(options.cache) != bool(options.keys):
        raise ConfigError(
            "--from-cache CACHE goes with --key KEY", do="name a sample; `qwen-cache inspect --html` lists them"
        )
    if options.compare and options.merge:
        raise ConfigError("a merged LoRA cannot be turned off again", found="--compare and --merge", do="choose one")
    images = settings.predict.num_images_per_prompt
    one = "give one --prompt, with --image or without"
    excluded_by_a_grid = {
        "--source": (options.source, one),
        "--from-cache": (options.cache, one),
        "a second --prompt": (options.prompts[1:], one),
        "--compare": (options.compare, "leave it out: --grid lora_weight=0,1 is without and with the LoRA"),
        f"--num-images-per-prompt {images}": (
            images > 1,
            "leave it out: --grid seed=0,1,2 starts from several noises",
        ),
        "--save-interrupted": (options.save_interrupted, "leave it out: finished images are kept"),
    }
    for name, (excluded, do) in excluded_by_a_grid.items():
        if options.grid and excluded:
            raise ConfigError(f"--grid and {name} exclude each other", do=do)
    if images > 1 and not options.is_one:
        found = f"--num-images-per-prompt {images}"
        raise ConfigError("several images per prompt need a single prompt", found=found)
    if options.save_interrupted and not options.is_one:
        raise ConfigError("--save-interrupted is for one image", do="leave it out: finished images are kept")
    if options.source:
        if options.out.suffix:
            do = "give --out FOLDER"
            raise ConfigError("--source generates into a folder", where="--out", found=options.out, do=do)
        if Path(options.source).is_dir() and options.out.resolve().is_relative_to(Path(options.source).resolve()):
            what = "the output folder is inside --source: the next run would read its own results"
            raise ConfigError(what, where="--out", do="name another folder")
    if options.into_folder:
        return
    image_format(options.out)
    make_folder(options.out.parent)
    controls = {image.resolve() for image in options.images}
    for path in image_paths(options.out, max(images, len(options.keys))):
        if path.is_dir():
            raise ConfigError("a folder has the name of the image", where=path, do="choose another --out")
        if path.resolve() in controls:
            raise ConfigError("the image would replace its own control image", where=path)
    if not options.is_one and not options.cache and options.out.suffix.lower() != ".png":
        raise ConfigError("resumable output must be .png", where="--out", found=options.out)


def check_guidance(config: PredictConfig, true_cfg_scale: float | None) -> None:
    """Raise ConfigError for a guidance scale without a negative prompt, which the stock pipelines ignore."""
    if true_cfg_scale is not None and true_cfg_scale > 1 and config.negative_prompt is None:
        raise ConfigError(
            "without a negative prompt there is nothing to guide away from",
            found=f"--true-cfg-scale {true_cfg_scale:g}",
            do='give one: --negative-prompt " "',
        )


# ---- predict ---------------------------------------------------------------------------------------------------------
# Terminal front end of `qwen-train predict`: one image, or jobs of several prompts, a grid of settings, every row of a
# source, or cached samples.

COMPARE_NAME = "compare.png"


def run_predict(settings: Config, options: PredictOptions) -> int:
    """Generate images; the exit code. After Ctrl-C, --json lists the finished cells of a grid."""
    require("torch")
    in_one_process("predict")
    check(settings, options)
    lora_paths = [Path(split_weight(text)[0]) for text in options.loras]
    runs = [run_of(path if path.is_dir() else path.parent) for path in lora_paths]
    data = as_trained(settings.data, runs)
    marked = settings.data.model_copy(update={"marked_phrases": data.marked_phrases})
    options = replace(options, prompts=typed_prompts(options.prompts, data))
    axes = parse_axes(options.grid, settings.predict)
    cells = grid_cells(axes, settings.predict, options.loras)
    if options.merge and (names := [axis.name for axis in axes if axis.name in OF_LORA]):
        found = f"--merge and --grid {names[0]}"
        raise ConfigError("a merged LoRA cannot be changed again", found=found, do="leave --merge out")

    cache = None if options.cache is None else open_configured(settings.cache, options.cache)
    components = COMPONENTS if cache is None else COMPONENTS_FOR_A_CACHE
    deciding = ("revision", "transformer", "vae", *(("text_encoder",) if cache is None else ()))
    known = () if cache is None else (cache.recipe.recipe, cache.manifest.vae_encoders)
    for folder in (*runs, *((cache.folder,) if cache else ())):  # the base of a LoRA first
        settings = with_recorded_model(settings, folder, components, *known, deciding=deciding)
    named = settings.model
    files = {"transformer": named.transformer, "text_encoder": named.text_encoder, "vae": named.vae}
    model = open_model(named.path, components, named.revision, **files, only_here=named.only_here)
    if model.needs_nunchaku:
        check_nunchaku(model, options.loras)
    samples = [] if cache is None else [find_sample([cache], key)[1] for key in options.keys]
    from qwen_train.inference.generator import generator_of
    from qwen_train.inference.pipeline import choose

    quantization = settings.model.quantization
    generator = generator_of(model, cells, choose(*options.devices), merge=options.merge, quantization=quantization)
    if options.is_one:
        return _one(generator, options)
    if cache is not None:
        counts = Counter(sample.name for sample in samples)
        names = [each.name if counts[each.name] == 1 else f"{each.name}-{each.key[:8]}" for each in samples]
        jobs = [GenerateJob(name, (), each.prompt, sample=each) for name, each in zip(names, samples, strict=True)]
        return _many(generator, options, jobs, axes, cells, cache)
    problems: list[Problem] = []
    if options.source is None:
        open_images(options.images, model.family)  # an unreadable one is one error, not one per prompt
        jobs = prompt_jobs(options.out.stem, options.images, options.prompts)
    else:
        jobs, problems = source_jobs(options.source, marked, model, options.prompts)
    print_problems(problems)
    if problems and marked.on_error == "stop":
        console(always=True).print("nothing was generated; fix these rows, or skip them with --set data.on_error=skip")
        return FAILED
    if without := sum(not job.controls for job in jobs):
        of_all = f"for {without} of {plural(len(jobs), 'row')}, without control images"
        _note_text_alone(model, of_all if options.source else "without --image")
    return _many(generator, options, jobs, axes, cells, problems=problems)


def check_nunchaku(model: ModelFolder, loras: Sequence[str]) -> None:
    """Raise ConfigError for what diffusers' layers of nunchaku's kernels need or cannot do."""
    if installed("kernels") is None:
        raise ConfigError(
            "this transformer needs a package that is not installed",
            where=model.component("transformer"),
            expected="kernels",
            do="pip install kernels, on a machine with an NVIDIA GPU",
        )
    if loras:
        raise ConfigError(
            "a LoRA cannot be added to weights for nunchaku's kernels",
            where=loras[0],
            do="generate with the unquantised model, or with a single file in fp8 or GGUF",
        )


def _note_text_alone(model: ModelFolder, where: str) -> None:
    """Say where an editing model generates without a control image: it may be a mistake."""
    if model.needs_controls:
        console().print(f"note: {where}, {model.pipeline} generates from text alone", markup=False, highlight=False)


def _one(generator: Generator, options: PredictOptions) -> int:
    """Generate the images of one prompt."""
    images = open_images(options.images, generator.model.family)
    if not images:
        _note_text_alone(generator.model, "without --image")
    generated = generator.generate(images, options.prompts[0], save_interrupted=options.save_interrupted)
    paths, steps = save_images(generated.images, options.out), generated.interrupted_after
    if options.as_json:
        _print_json(paths, interrupted_after=steps)
        return 0 if steps is None else INTERRUPTED
    ended = "[bold green]done[/]" if steps is None else f"[yellow]interrupted after {plural(steps, 'step')}[/]"
    size = f"{generated.images[0].width}×{generated.images[0].height}"
    console().print(f"{ended}: {', '.join(map(verbatim, paths))}, {size}", highlight=False)
    return 0 if steps is None else INTERRUPTED


def _many(
    generator: Generator,
    options: PredictOptions,
    inputs: Sequence[GenerateJob],
    axes: Sequence[Axis],
    cells: Sequence[Cell],
    cache: Cache | None = None,
    problems: Sequence[Problem] = (),
) -> int:
    """Generate the inputs with the settings and LoRAs of each cell, and show all side by side if asked to."""
    from qwen_train.inference.generator import check_jobs, check_samples, comparisons, generate_jobs, inputs_of

    jobs = [replace(job, name=cell.name(job.name), cell=cell) for cell in cells for job in inputs]
    if options.compare and options.loras:
        jobs += [replace(job, name=job.name + WITHOUT, cell=replace(job.cell, loras=())) for job in jobs]

    # The files. Of a cache, images have any format and are written each time; those without the LoRA are only compared.
    folder = options.out if options.into_folder else options.out.parent
    paths: list[Path | None] = [None] * len(jobs)
    if cache is None:
        paths[:] = output_paths(jobs, folder)
    else:
        named = output_paths(inputs, folder) if options.into_folder else image_paths(options.out, len(inputs))
        paths[: len(inputs)] = named
    whole: Path | None = None
    if axes:
        whole = options.out.with_stem(f"{options.out.stem}-grid")
    elif options.compare:
        beside = options.out.with_stem(f"{options.out.stem}-compare")
        whole = comparison_path(folder / COMPARE_NAME if options.into_folder else beside, len(inputs))
    check_jobs(generator, jobs, paths, whole)
    if cache is not None:
        check_samples(generator, cache, inputs)
    work = Work(jobs, paths, inputs_of(generator) if cache is None else None)

    def print_document(whole: Path | None) -> None:
        """Print the JSON document of --json; that of a grid has null for what is not there."""
        written, there = set(work.written), {*work.written, *work.skipped}
        cells = [
            {"values": job.cell.values, "image": str(path) if path in there else None}
            for job, path in zip(jobs, paths, strict=True)
        ]
        grid: dict[str, Any] = {
            "axes": [{"name": axis.name, "values": axis.values} for axis in axes],
            "cells": cells,
            "grid": None if whole is None else str(whole),
        }
        images = [path for path in paths if path in written]
        compared = None if axes else whole
        if options.as_json:
            _print_json(images, work.skipped, compared, [*problems, *work.failed], **grid if axes else {})

    try:
        generate_jobs(generator, work)
    except KeyboardInterrupt:
        if axes:
            print_document(None)
        raise
    existing = f", {len(work.skipped)} already there" if work.skipped else ""
    done = f"{plural(len(work.written), 'new image')} in {verbatim(folder)}{existing}"
    if cache is not None:
        done = ", ".join(map(verbatim, work.written))
    console().print(f"[bold green]done[/]: {done}", highlight=False)
    if axes and work.failed:
        whole = None
    elif axes and whole:
        images = [path for path in paths if path]
        side_by_side = cells_side_by_side(axes, images, options.prompts[0], generator.model.family)
        save_images([side_by_side], whole)
    elif whole:
        save_comparison(whole, comparisons(generator, work, len(inputs)), len(inputs))
    if whole:
        console().print(f"side by side: {verbatim(whole)}", highlight=False)
    print_problems(work.failed)
    print_document(whole)
    return FAULTS if problems or work.failed else 0


def _print_json(
    written: Sequence[Path],
    skipped: Sequence[Path] = (),
    comparison: Path | None = None,
    problems: Sequence[Problem] = (),
    interrupted_after: int | None = None,
    **more: Any,
) -> None:
    """Print the JSON document of --json: what was written, and `more` of a grid."""
    files = {"images": written, "already_there": skipped, "compare": [comparison] if comparison else []}
    listed = {name: [str(path) for path in paths] for name, paths in files.items()}
    faults = [asdict(each) for each in problems]
    print_json(listed | {"problems": faults, "interrupted_after": interrupted_after} | more)
