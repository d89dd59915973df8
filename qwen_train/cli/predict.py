"""`qwen-train predict` as people see it: one picture, several prompts, every row of a source, or samples of a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.markup import escape

from qwen_cache.cli.build import print_problems
from qwen_cache.console import FAILED, FAULTS, INTERRUPTED, console, plural
from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import open_cache
from qwen_cache.grounding.phrase import parse
from qwen_cache.models.folder import ModelFolder, open_model
from qwen_cache.settings.load import Config
from qwen_cache.sources.detect import Problem
from qwen_cache.sources.images import open_rgb_file
from qwen_train.inference.cached import find_sample
from qwen_train.inference.devices import Devices
from qwen_train.inference.grid import Row, compare_grid
from qwen_train.inference.jobs import jobs_of, jobs_of_prompts
from qwen_train.inference.loras import WeightedLora
from qwen_train.inference.many import PARTS, PARTS_FOR_A_CACHE, compared, draw_jobs, draw_samples
from qwen_train.inference.predict import picture_format, places, predict, save_pictures

ROWS_ON_A_PAGE = 25
WAYS = (("--prompt",), ("--image", "--prompt"), ("--source",), ("--prompt", "--source"), ("--from-cache",))
"""What says together what to draw."""


@dataclass(frozen=True)
class Asked:
    """What the command was given besides settings and devices."""

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


def run_predict(settings: Config, devices: Devices, asked: Asked) -> int:
    """Draw what was asked for; the exit code."""
    check(settings, asked)
    asked = replace(asked, prompts=[parse(prompt)[0] for prompt in asked.prompts])
    parts = PARTS if asked.cache is None else PARTS_FOR_A_CACHE
    model = open_model(settings.model.path, parts, settings.model.revision)
    how = {"loras": asked.loras, "merge": asked.merge, "quantization": settings.model.quantization}
    if asked.cache is not None:
        return _from_cache(settings, model, devices, asked, how)
    if asked.source is not None or len(asked.prompts) > 1 or asked.compare:
        return _many(settings, model, devices, asked, how)
    return _one(settings, model, devices, asked, how)


def check(settings: Config, asked: Asked) -> None:
    """Refuse what does not go together, before anything is read."""
    given = {"--image": asked.images, "--prompt": asked.prompts, "--source": asked.source, "--from-cache": asked.cache}
    ways = tuple(name for name, value in given.items() if value)
    if ways not in WAYS:
        expected = "; or ".join(" and ".join(way) for way in WAYS)
        raise ConfigError("this does not say what to draw", expected=expected, found=" and ".join(ways) or "nothing")
    if bool(asked.cache) != bool(asked.keys):
        raise ConfigError(
            "--from-cache CACHE goes with --key KEY", do="name a sample; `qwen-cache inspect --html` lists them"
        )
    if asked.compare and asked.merge:
        raise ConfigError("a merged LoRA cannot be left out again", found="--compare and --merge", do="choose one")
    config, one = settings.predict, len(asked.prompts) == 1 and not (asked.compare or asked.source)
    if config.num_images_per_prompt > 1 and not one:
        raise ConfigError("several pictures are of one prompt", found=f"--num-images {config.num_images_per_prompt}")
    if asked.save_interrupted and not one:
        raise ConfigError("--save-interrupted is for one picture", do="leave it out: what was drawn is kept")
    if asked.source and asked.out.suffix:
        raise ConfigError("--source draws into a folder", where="--out", found=asked.out, do="give --out FOLDER")
    if (
        asked.source
        and Path(asked.source).is_dir()
        and asked.out.resolve().is_relative_to(Path(asked.source).resolve())
    ):
        raise ConfigError("what is drawn would be drawn about the next time", where="--out", do="name another folder")
    if not asked.source:
        check_place(asked, config.num_images_per_prompt)
    if not asked.source and not one and not asked.cache and asked.out.suffix.lower() != ".png":
        raise ConfigError("pictures that can be gone on with are .png", where="--out", found=asked.out)


def check_place(asked: Asked, pictures: int) -> None:
    """--out can be written, and is none of the pictures that are drawn about."""
    picture_format(asked.out)
    asked.out.parent.mkdir(parents=True, exist_ok=True)
    given = {image.resolve() for image in asked.images}
    for place in places(asked.out, max(pictures, len(asked.keys))):
        if place.is_dir():
            raise ConfigError("a folder is in the place of the picture", where=place, do="name another --out")
        if place.resolve() in given:
            raise ConfigError("the picture would be drawn over the one that it is about", where=place)


def _one(settings: Config, model: ModelFolder, devices: Devices, asked: Asked, how: dict[str, Any]) -> int:
    pictures, config = [open_rgb_file(path) for path in asked.images], settings.predict
    drawn = predict(model, pictures, asked.prompts[0], config, devices, save_interrupted=asked.save_interrupted, **how)
    paths, steps = save_pictures(drawn.pictures, asked.out), drawn.interrupted_after
    ended = "[bold green]done[/]" if steps is None else f"[yellow]interrupted after {plural(steps, 'step')}[/]"
    size = f"{drawn.pictures[0].width}×{drawn.pictures[0].height}"
    console().print(f"{ended}: {_named(paths)}, {size}", highlight=False)
    return 0 if steps is None else INTERRUPTED


def _many(settings: Config, model: ModelFolder, devices: Devices, asked: Asked, how: dict[str, Any]) -> int:
    """A PNG for each prompt, or for each row of the source; what is there already is not drawn again."""
    problems: list[Problem] = []
    if asked.source is None:
        for path in asked.images:
            open_rgb_file(path)  # one that cannot be read is an error of the command, not of every prompt
        jobs = jobs_of_prompts(asked.out.stem, asked.images, asked.prompts)
        folder, grid = asked.out.parent, asked.out.with_stem(f"{asked.out.stem}-compare")
    else:
        jobs, problems = jobs_of(asked.source, settings.data, needs_control=model.takes_controls, prompts=asked.prompts)
        folder, grid = asked.out, asked.out / "compare.png"
    print_problems(tuple(problems))
    if problems and settings.data.on_error == "stop":
        console().print("nothing was drawn; mend these rows, or leave them out with --set data.on_error=skip")
        return FAILED
    pages = places(grid, math.ceil(len(jobs) / ROWS_ON_A_PAGE))
    done = draw_jobs(
        model,
        jobs,
        folder,
        settings.predict,
        devices,
        compare=asked.compare,
        pages=pages if asked.compare else (),
        **how,
    )
    there = f", {len(done.skipped)} there already" if done.skipped else ""
    console().print(
        f"[bold green]done[/]: {plural(len(done.written), 'new picture')} in {escape(str(folder))}{there}",
        highlight=False,
    )
    if asked.compare:
        rows = compared(jobs, folder, with_lora=bool(asked.loras), failed=done.failed)
        _print_grid(_save_grid([row for _, row in rows], [job.prompt for job, _ in rows], grid))
    print_problems(tuple(done.failed))
    return FAULTS if problems or done.failed else 0


def _from_cache(settings: Config, model: ModelFolder, devices: Devices, asked: Asked, how: dict[str, Any]) -> int:
    assert asked.cache is not None
    cache = open_cache(asked.cache, recipe=settings.cache.recipe)
    samples = [find_sample(cache, key) for key in asked.keys]
    rows, paths = [], []
    for place, row in zip(
        places(asked.out, len(samples)),
        draw_samples(model, cache, samples, settings.predict, devices, compare=asked.compare, **how),
        strict=True,
    ):
        picture = row.with_lora or row.without_lora
        assert picture is not None
        paths += save_pictures([picture], place)
        rows.append(row)
    console().print(f"[bold green]done[/]: {_named(paths)}", highlight=False)
    if asked.compare:
        grid = asked.out.with_stem(f"{asked.out.stem}-compare")
        _print_grid(_save_grid(rows, [sample.prompt for sample in samples], grid))
    return 0


def _save_grid(rows: Sequence[Row], captions: Sequence[str], path: Path) -> list[Path]:
    """On as many pages as it takes."""
    starts = range(0, len(rows), ROWS_ON_A_PAGE)
    pages = [compare_grid(rows[i : i + ROWS_ON_A_PAGE], captions[i : i + ROWS_ON_A_PAGE]) for i in starts]
    return save_pictures(pages, path)


def _print_grid(paths: Sequence[Path]) -> None:
    if paths:
        console().print(f"side by side: {_named(paths)}", highlight=False)


def _named(paths: Sequence[Path]) -> str:
    """As rich prints them, brackets and all."""
    return escape(", ".join(map(str, paths)))
