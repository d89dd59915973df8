"""Terminal front end of `qwen-train predict`: one image, several prompts, every row of a source, or cached samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.markup import escape

from qwen_cache.console import FAILED, FAULTS, INTERRUPTED, console, plural, print_problems
from qwen_cache.errors import ConfigError, Problem
from qwen_cache.format.cache import open_configured
from qwen_cache.grounding.phrase import parse
from qwen_cache.models.folder import open_model
from qwen_cache.settings.load import Config
from qwen_train.inference.cached import find_sample
from qwen_train.inference.devices import Devices
from qwen_train.inference.generator import Generator
from qwen_train.inference.grid import Row, compare_grid
from qwen_train.inference.images import image_format, image_paths, open_images, save_images
from qwen_train.inference.jobs import jobs_of, jobs_of_prompts
from qwen_train.inference.loras import WeightedLora
from qwen_train.inference.many import (
    COMPONENTS,
    COMPONENTS_FOR_A_CACHE,
    compared,
    generate_jobs,
    generate_samples,
)

ROWS_ON_A_PAGE = 25
WAYS = (("--prompt",), ("--image", "--prompt"), ("--source",), ("--prompt", "--source"), ("--from-cache",))
"""The options that say together what to generate."""


@dataclass(frozen=True)
class Prediction:
    """The options of the command besides settings and devices."""

    out: Path
    images: Sequence[Path] = ()
    prompts: Sequence[str] = ()
    source: str | None = None
    cache: str | None = None
    keys: Sequence[str] = ()
    loras: Sequence[WeightedLora] = ()
    merge: bool = False
    compare: bool = False
    save_interrupted: bool = False

    @property
    def is_one(self) -> bool:
        """Whether it is one call of the pipeline, and not a folder of images."""
        return len(self.prompts) == 1 and not (self.compare or self.source)


def run_predict(settings: Config, devices: Devices, asked: Prediction) -> int:
    """Generate images; the exit code."""
    check(settings, asked)
    asked = replace(asked, prompts=[parse(prompt)[0] for prompt in asked.prompts])
    components = COMPONENTS if asked.cache is None else COMPONENTS_FOR_A_CACHE
    generator = Generator(
        open_model(settings.model.path, components, settings.model.revision),
        settings.predict,
        devices,
        loras=asked.loras,
        merge=asked.merge,
        quantization=settings.model.quantization,
    )
    if asked.cache is not None:
        return _from_cache(settings, generator, asked, asked.cache)
    return _one(generator, asked) if asked.is_one else _many(settings, generator, asked)


# ---- what does not go together ---------------------------------------------------------------------------------------


def check(settings: Config, asked: Prediction) -> None:
    """ConfigError for options that do not go together, before anything is read."""
    given = {"--image": asked.images, "--prompt": asked.prompts, "--source": asked.source, "--from-cache": asked.cache}
    ways = tuple(name for name, value in given.items() if value)
    if ways not in WAYS:
        expected = "; or ".join(" and ".join(way) for way in WAYS)
        raise ConfigError("nothing to generate", expected=expected, found=" and ".join(ways) or "nothing")
    if bool(asked.cache) != bool(asked.keys):
        raise ConfigError(
            "--from-cache CACHE goes with --key KEY", do="name a sample; `qwen-cache inspect --html` lists them"
        )
    if asked.compare and asked.merge:
        raise ConfigError("a merged LoRA cannot be turned off again", found="--compare and --merge", do="choose one")
    images = settings.predict.num_images_per_prompt
    if images > 1 and not asked.is_one:
        found = f"--num-images-per-prompt {images}"
        raise ConfigError("several images per prompt are for one prompt", found=found)
    if asked.save_interrupted and not asked.is_one:
        raise ConfigError("--save-interrupted is for one image", do="leave it out: finished images are kept")
    if asked.source:
        _check_folder(asked.out, asked.source)
    else:
        _check_files(asked, images)


def _check_folder(out: Path, source: str) -> None:
    """--out is a folder, and not inside the source."""
    if out.suffix:
        raise ConfigError("--source generates into a folder", where="--out", found=out, do="give --out FOLDER")
    if Path(source).is_dir() and out.resolve().is_relative_to(Path(source).resolve()):
        what = "the output folder is inside --source: the next run would read its own results"
        raise ConfigError(what, where="--out", do="name another folder")


def _check_files(asked: Prediction, images: int) -> None:
    """--out can be written, and is none of the control images."""
    image_format(asked.out)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    given = {image.resolve() for image in asked.images}
    for path in image_paths(asked.out, max(images, len(asked.keys))):
        if path.is_dir():
            raise ConfigError("a folder has the name of the image", where=path, do="name another --out")
        if path.resolve() in given:
            raise ConfigError("the image would replace its own control image", where=path)
    if not asked.is_one and not asked.cache and asked.out.suffix.lower() != ".png":
        raise ConfigError("resumable output must be .png", where="--out", found=asked.out)


# ---- the three ways --------------------------------------------------------------------------------------------------


def _one(generator: Generator, asked: Prediction) -> int:
    """The images of one prompt."""
    images = open_images(asked.images)
    generated = generator.generate(images, asked.prompts[0], save_interrupted=asked.save_interrupted)
    paths, steps = save_images(generated.images, asked.out), generated.interrupted_after
    ended = "[bold green]done[/]" if steps is None else f"[yellow]interrupted after {plural(steps, 'step')}[/]"
    size = f"{generated.images[0].width}×{generated.images[0].height}"
    console().print(f"{ended}: {_named(paths)}, {size}", highlight=False)
    return 0 if steps is None else INTERRUPTED


def _many(settings: Config, generator: Generator, asked: Prediction) -> int:
    """A PNG for each prompt, or for each row of the source; what is there already is not generated again."""
    problems: list[Problem] = []
    if asked.source is None:
        open_images(asked.images)  # one that cannot be read is an error of the command, not of every prompt
        jobs = jobs_of_prompts(asked.out.stem, asked.images, asked.prompts)
        folder, grid = asked.out.parent, asked.out.with_stem(f"{asked.out.stem}-compare")
    else:
        needs_control = generator.model.takes_controls
        jobs, problems = jobs_of(asked.source, settings.data, needs_control=needs_control, prompts=asked.prompts)
        folder, grid = asked.out, asked.out / "compare.png"
    print_problems(problems)
    if problems and settings.data.on_error == "stop":
        console().print("nothing was generated; fix these rows, or skip them with --set data.on_error=skip")
        return FAILED
    pages = image_paths(grid, math.ceil(len(jobs) / ROWS_ON_A_PAGE)) if asked.compare else ()
    done = generate_jobs(generator, jobs, folder, compare=asked.compare, pages=pages)
    there = f", {len(done.skipped)} there already" if done.skipped else ""
    console().print(
        f"[bold green]done[/]: {plural(len(done.written), 'new image')} in {escape(str(folder))}{there}",
        highlight=False,
    )
    if asked.compare:
        rows = compared(jobs, folder, with_lora=bool(asked.loras), failed=done.failed)
        _print_grid(_save_grid([row for _, row in rows], [job.prompt for job, _ in rows], grid))
    print_problems(done.failed)
    return FAULTS if problems or done.failed else 0


def _from_cache(settings: Config, generator: Generator, asked: Prediction, path: str) -> int:
    """The samples of a cache that --key names."""
    cache = open_configured(settings.cache, path)
    samples = [find_sample(cache, key) for key in asked.keys]
    rows, paths = [], []
    generated = generate_samples(generator, cache, samples, compare=asked.compare)
    for out, row in zip(image_paths(asked.out, len(samples)), generated, strict=True):
        image = row.with_lora or row.without_lora
        assert image is not None
        paths += save_images([image], out)
        rows.append(row)
    console().print(f"[bold green]done[/]: {_named(paths)}", highlight=False)
    if asked.compare:
        grid = asked.out.with_stem(f"{asked.out.stem}-compare")
        _print_grid(_save_grid(rows, [sample.prompt for sample in samples], grid))
    return 0


def _save_grid(rows: Sequence[Row], captions: Sequence[str], path: Path) -> list[Path]:
    """The rows side by side, on as many pages as it takes."""
    starts = range(0, len(rows), ROWS_ON_A_PAGE)
    pages = [compare_grid(rows[i : i + ROWS_ON_A_PAGE], captions[i : i + ROWS_ON_A_PAGE]) for i in starts]
    return save_images(pages, path)


def _print_grid(paths: Sequence[Path]) -> None:
    if paths:
        console().print(f"side by side: {_named(paths)}", highlight=False)


def _named(paths: Sequence[Path]) -> str:
    """The paths as rich prints them, brackets and all."""
    return escape(", ".join(map(str, paths)))
