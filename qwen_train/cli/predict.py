"""`predict`: what its options mean together, and the work."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qwen_cache.errors import ConfigError, Problem
from qwen_cache.extras import installed, require
from qwen_cache.format.cache import Cache, Sample, find_sample, open_configured
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.storage.files import make_folder
from qwen_cache.terminal import FAILED, FAULTS, INTERRUPTED, console, plural, print_json, print_problems, verbatim
from qwen_train.inference.images import (
    COMPONENTS,
    COMPONENTS_FOR_A_CACHE,
    OF_LORA,
    Axis,
    Cell,
    Comparison,
    GenerateJob,
    check_comparison,
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
from qwen_train.lora.files import parse_lora, split_weight
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
    if options.grid:
        _check_grid(settings, options)
    images = settings.predict.num_images_per_prompt
    if images > 1 and not options.is_one:
        found = f"--num-images-per-prompt {images}"
        raise ConfigError("several images per prompt need a single prompt", found=found)
    if options.save_interrupted and not options.is_one:
        raise ConfigError("--save-interrupted is for one image", do="leave it out: finished images are kept")
    if options.source:
        _check_folder(options.out, options.source)
    elif not options.into_folder:
        _check_files(options, images)


def _check_grid(settings: Config, options: PredictOptions) -> None:
    """Raise ConfigError for what a grid excludes."""
    one = "give one --prompt, with --image or without"
    excluded = {
        "--source": (options.source, one),
        "--from-cache": (options.cache, one),
        "a second --prompt": (options.prompts[1:], one),
        "--compare": (options.compare, "leave it out: --grid lora_weight=0,1 is without and with the LoRA"),
        f"--num-images-per-prompt {settings.predict.num_images_per_prompt}": (
            settings.predict.num_images_per_prompt > 1,
            "leave it out: --grid seed=0,1,2 starts from several noises",
        ),
        "--save-interrupted": (options.save_interrupted, "leave it out: finished images are kept"),
    }
    for name, (given, do) in excluded.items():
        if given:
            raise ConfigError(f"--grid and {name} exclude each other", do=do)


def _check_folder(out: Path, source: str) -> None:
    """Raise ConfigError unless --out is a folder outside the source."""
    if out.suffix:
        raise ConfigError("--source generates into a folder", where="--out", found=out, do="give --out FOLDER")
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        what = "the output folder is inside --source: the next run would read its own results"
        raise ConfigError(what, where="--out", do="name another folder")


def _check_files(options: PredictOptions, images: int) -> None:
    """Raise ConfigError unless --out can be written, and is none of the control images."""
    image_format(options.out)
    make_folder(options.out.parent)
    given = {image.resolve() for image in options.images}
    for path in image_paths(options.out, max(images, len(options.keys))):
        if path.is_dir():
            raise ConfigError("a folder has the name of the image", where=path, do="choose another --out")
        if path.resolve() in given:
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
# Terminal front end of `qwen-train predict`: one image, several prompts, a grid of settings, every row of a source, or
# cached samples.

COMPARE_NAME = "compare.png"


def run_predict(settings: Config, options: PredictOptions) -> int:
    """Generate images; the exit code."""
    require("torch")
    in_one_process("predict")
    check(settings, options)
    paths = [Path(split_weight(text)[0]) for text in options.loras]
    data = as_trained(settings.data, [run_of(path if path.is_dir() else path.parent) for path in paths])
    marked = settings.data.model_copy(update={"marked_phrases": data.marked_phrases})
    settings = settings.model_copy(update={"data": marked})
    options = replace(options, prompts=typed_prompts(options.prompts, data))
    if options.grid:
        return _grid(settings, options)
    components = COMPONENTS if options.cache is None else COMPONENTS_FOR_A_CACHE
    loras = [parse_lora(text) for text in options.loras]
    model = _open(settings, options, components)
    cache = None if options.cache is None else open_configured(settings.cache, options.cache)
    samples = [] if cache is None else [find_sample([cache], key)[1] for key in options.keys]
    from qwen_train.inference.generator import Generator
    from qwen_train.inference.pipeline import choose

    generator = Generator(
        model,
        settings.predict,
        choose(*options.devices),
        loras=loras,
        merge=options.merge,
        quantization=settings.model.quantization,
    )
    if cache is not None:
        return _from_cache(generator, options, cache, samples)
    return _one(generator, options) if options.is_one else _many(settings, generator, options)


def _open(settings: Config, options: PredictOptions, components: Sequence[str]) -> ModelFolder:
    """The model with these folders; ConfigError for LoRAs that it cannot take."""
    named = settings.model
    model = open_model(named.path, components, named.revision, transformer=named.transformer, vae=named.vae)
    if model.needs_nunchaku:
        check_nunchaku(model, options.loras)
    return model


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


# ---- one image, many images, cached samples --------------------------------------------------------------------------


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
    console().print(f"{ended}: {_joined(paths)}, {size}", highlight=False)
    return 0 if steps is None else INTERRUPTED


def _note_text_alone(model: ModelFolder, where: str) -> None:
    """Say where an editing model generates without a control image: it may be a mistake."""
    if model.needs_controls:
        console().print(f"note: {where}, {model.pipeline} generates from text alone", markup=False, highlight=False)


def _many(settings: Config, generator: Generator, options: PredictOptions) -> int:
    """Generate a PNG for each prompt, or for each row of the source; existing ones are skipped."""
    from qwen_train.inference.generator import compared, generate_jobs

    problems: list[Problem] = []
    if options.source is None:
        open_images(options.images, generator.model.family)  # an unreadable one is one error, not one per prompt
        jobs = prompt_jobs(options.out.stem, options.images, options.prompts)
        folder, png = options.out.parent, options.out.with_stem(f"{options.out.stem}-compare")
    else:
        jobs, problems = source_jobs(options.source, settings.data, generator.model, options.prompts)
        folder, png = options.out, options.out / COMPARE_NAME
    print_problems(problems)
    if problems and settings.data.on_error == "stop":
        console(always=True).print("nothing was generated; fix these rows, or skip them with --set data.on_error=skip")
        return FAILED
    if without := sum(not job.controls for job in jobs):
        of_all = f"for {without} of {plural(len(jobs), 'row')}, without control images"
        _note_text_alone(generator.model, of_all if options.source else "without --image")
    comparison = comparison_path(png, len(jobs)) if options.compare else None
    results = generate_jobs(generator, jobs, folder, comparison=comparison)
    existing = f", {len(results.skipped)} already there" if results.skipped else ""
    console().print(
        f"[bold green]done[/]: {plural(len(results.written), 'new image')} in {verbatim(folder)}{existing}",
        highlight=False,
    )
    if comparison:
        with_lora, family = bool(options.loras), generator.model.family
        rows = compared(jobs, folder, family, with_lora=with_lora, failed=results.failed)
        _compare(comparison, rows, len(jobs))
    print_problems(results.failed)
    if options.as_json:
        _print_json(results.written, results.skipped, comparison, [*problems, *results.failed])
    return FAULTS if problems or results.failed else 0


def _from_cache(generator: Generator, options: PredictOptions, cache: Cache, samples: Sequence[Sample]) -> int:
    """Generate these samples of a cache."""
    from qwen_train.inference.generator import generate_samples

    rows, paths = [], []
    outs = _paths_in_folder(samples, options.out) if options.into_folder else image_paths(options.out, len(samples))
    png = options.out / COMPARE_NAME if options.into_folder else options.out.with_stem(f"{options.out.stem}-compare")
    comparison = comparison_path(png, len(samples)) if options.compare else None
    if comparison and os.path.lexists(comparison):
        check_comparison(comparison)
    generated = generate_samples(generator, cache, samples, compare=options.compare)
    for out, row in zip(outs, generated, strict=True):
        image = row.with_lora or row.without_lora
        assert image is not None
        paths += save_images([image], out)
        rows.append(row)
    console().print(f"[bold green]done[/]: {_joined(paths)}", highlight=False)
    if comparison:
        named = zip(samples, rows, paths, strict=True)
        title = "with LoRA" if options.loras else "without LoRA"
        shown = (Comparison(sample.name, sample.prompt, row, {title: path}) for sample, row, path in named)
        _compare(comparison, shown, len(rows))
    if options.as_json:
        _print_json(paths, comparison=comparison)
    return 0


def _compare(path: Path, rows: Iterable[Comparison], count: int) -> None:
    """Write the rows side by side."""
    save_comparison(path, rows, count)
    console().print(f"side by side: {verbatim(path)}", highlight=False)


def _paths_in_folder(samples: Sequence[Sample], folder: Path) -> list[Path]:
    """A PNG by the name of each sample, or by name and key where several have that name; none outside the folder."""
    names = Counter(sample.name for sample in samples)
    return output_paths(
        [
            GenerateJob(
                sample.name if names[sample.name] == 1 else f"{sample.name}-{sample.key[:8]}", (), sample.prompt
            )
            for sample in samples
        ],
        folder,
    )


def _joined(paths: Sequence[Path]) -> str:
    """The paths, escaped for rich."""
    return ", ".join(map(verbatim, paths))


# ---- a grid ----------------------------------------------------------------------------------------------------------


def _grid(settings: Config, options: PredictOptions) -> int:
    """Generate the cells that are missing; the exit code. After Ctrl-C, --json lists the finished ones."""
    axes = parse_axes(options.grid, settings.predict)
    cells = grid_cells(axes, settings.predict, options.loras)
    _check_merge(axes, options)
    model = _open(settings, options, COMPONENTS)
    from qwen_train.inference import cells as work
    from qwen_train.inference.pipeline import choose

    generator = work.grid_generator(
        model, cells, choose(*options.devices), merge=options.merge, quantization=settings.model.quantization
    )
    open_images(options.images, model.family)  # an unreadable one is one error, not one per cell
    jobs = work.cell_jobs(generator, cells, options.out.stem, options.images, options.prompts[0])
    folder, whole = options.out.parent, options.out.with_stem(f"{options.out.stem}-grid")
    work.check_cells(generator, jobs, folder, whole)
    if not options.images:
        _note_text_alone(model, "without --image")
    before = work.finished(jobs, folder)

    def print_document(grid: Path | None, failed: Sequence[Problem] = ()) -> None:
        if options.as_json:
            there = work.finished(jobs, folder)
            images = [there.get(job.name) for job in jobs]
            _print_document(axes, cells, images, grid, set(before.values()), failed)

    try:
        failed = work.generate_cells(generator, cells, jobs, folder).failed
    except KeyboardInterrupt:
        print_document(None)
        raise
    there = work.finished(jobs, folder)
    count = plural(len(there.keys() - before.keys()), "new image")
    existing = f", {len(before)} already there" if before else ""
    console().print(f"[bold green]done[/]: {count} in {verbatim(folder)}{existing}", highlight=False)
    print_problems(failed)
    if not failed:
        paths = [there[job.name] for job in jobs]
        save_images([work.cells_side_by_side(axes, paths, options.prompts[0], model.family)], whole)
        console().print(f"side by side: {verbatim(whole)}", highlight=False)
    print_document(None if failed else whole, failed)
    return FAULTS if failed else 0


def _check_merge(axes: Sequence[Axis], options: PredictOptions) -> None:
    """Raise ConfigError for an axis that changes a merged LoRA."""
    if options.merge and (names := [axis.name for axis in axes if axis.name in OF_LORA]):
        found = f"--merge and --grid {names[0]}"
        raise ConfigError("a merged LoRA cannot be changed again", found=found, do="leave --merge out")


def _print_document(
    axes: Sequence[Axis],
    cells: Sequence[Cell],
    images: Sequence[Path | None],
    grid: Path | None,
    before: Collection[Path],
    failed: Sequence[Problem],
) -> None:
    """Print the JSON document of --json: as that of other images, with axes and cells; null for what is not there."""
    there = [image for image in images if image is not None]
    _print_json(
        [image for image in there if image not in before],
        [image for image in there if image in before],
        problems=failed,
        axes=[{"name": axis.name, "values": axis.values} for axis in axes],
        cells=[
            {"values": cell.values, "image": None if image is None else str(image)}
            for cell, image in zip(cells, images, strict=True)
        ],
        grid=None if grid is None else str(grid),
    )


# ---- the JSON document -----------------------------------------------------------------------------------------------


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
