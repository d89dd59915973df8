"""Batch generation: several prompts for the same images, or all rows of a source, one PNG each.

A PNG records the hash of its inputs: prompt, bytes of the control images, settings. An existing PNG with the same hash
is skipped, so a killed run continues where it stopped; one with another hash is generated again. Each is written
atomically. Refused before anything is generated: a file in the way that was not generated here, and names that are
equal or lead out of the folder. A job whose image cannot be read is reported; the others continue.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.models.family import Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import DataConfig
from qwen_cache.sources.captions import PLACEHOLDER, Captions, parse
from qwen_cache.sources.detect import Readable, read_source, reading
from qwen_cache.sources.images import open_rgb, open_rgba
from qwen_cache.sources.places import File
from qwen_cache.storage.files import WINDOWS, make_folder, write_durably
from qwen_cache.storage.remote import location
from qwen_cache.terminal import console, counting
from qwen_cache.text import plain

COMPONENTS_FOR_A_CACHE = ("vae", "transformer", "scheduler")
COMPONENTS = (*COMPONENTS_FOR_A_CACHE, "text_encoder", "tokenizer", "processor")
"""The folders of a model that generating needs: from a cached sample, and from prompts."""
CHUNK = "qwen-train job"
"""The key of the PNG text chunk with the hash."""
NO_NAME_ON_WINDOWS = frozenset('<>:"|?*')
PAGE_HASH = "by itself"
"""Instead of a hash, in an image that belongs to no job: a single image, or a comparison."""
LONGEST_COMPONENT = 240
"""Bytes of a path component: file systems take 255, minus room for the extension and the temporary name."""


@dataclass(frozen=True)
class GenerateJob:
    """An image to generate."""

    name: str
    """The file name without `.png`; slashes create folders."""
    controls: tuple[Readable, ...]
    prompt: str
    target: Readable | None = None
    """The target if known, only for comparison; it does not affect the image."""
    inputs: Mapping[str, Any] = field(default_factory=dict)
    """Inputs that this image does not share with the others, as JSON, such as another seed."""


@dataclass(frozen=True)
class JobResults:
    """The results of a list of jobs."""

    written: list[Path]
    skipped: list[Path]
    """Images that already existed."""
    failed: list[Problem]


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
    placeholder."""
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


def control_images(job: GenerateJob, family: Family) -> list[Image.Image]:
    """The job's control images, opened as in a build."""
    open_image = {"RGB": open_rgb, "RGBA": open_rgba}[family.image_mode]
    return [open_image(image.read(), str(image)) for image in job.controls]


def run_jobs(
    jobs: Sequence[GenerateJob],
    generate: Callable[[GenerateJob], Image.Image],
    out_folder: Path,
    inputs: Mapping[str, Any],
) -> JobResults:
    """Generate missing and outdated images into `out_folder`, one PNG for each job.

    `inputs` are the inputs that all images share, besides their jobs, as JSON: model, LoRA, settings, seed.
    """
    paths = output_paths(jobs, out_folder)
    existing = {path: recorded_hash(path) for path in paths if os.path.lexists(path)}
    written: list[Path] = []
    skipped: list[Path] = []
    failed: list[Problem] = []
    with counting("images", len(jobs)) as advance:
        for job, path in zip(jobs, paths, strict=True):
            try:
                digest = inputs_hash(job, inputs)
                if existing.get(path) == digest:
                    skipped.append(path)
                else:
                    write_image(path, generate(job), digest)
                    written.append(path)
            except SourceError as error:
                where = job.name if error.where is None else f"{job.name}: {error.where}"
                failed.append(Problem(where, error.fault, error.do or "restore it"))
            advance(1)
    return JobResults(written, skipped, failed)


def pending_jobs(jobs: Sequence[GenerateJob], out_folder: Path, inputs: Mapping[str, Any]) -> list[GenerateJob]:
    """The jobs that `run_jobs` will generate; it reports those that cannot be read."""
    pending = []
    for job, path in zip(jobs, output_paths(jobs, out_folder), strict=True):
        with suppress(SourceError):
            if not os.path.lexists(path) or recorded_hash(path) != inputs_hash(job, inputs):
                pending.append(job)
    return pending


def inputs_hash(job: GenerateJob, inputs: Mapping[str, Any]) -> str:
    """The hash of all inputs of the image; its name is not among them."""
    controls = [content_hash(image.read()) for image in job.controls]
    return content_hash(canonical_json({"prompt": job.prompt, "controls": controls, "about": {**inputs, **job.inputs}}))


def png_metadata(digest: str) -> PngImagePlugin.PngInfo:
    """The PNG metadata that records the hash of an image's inputs."""
    text = PngImagePlugin.PngInfo()
    text.add_text(CHUNK, digest)
    return text


def write_image(path: Path, image: Image.Image, digest: str) -> None:
    make_folder(path.parent)
    data = BytesIO()
    image.save(data, "PNG", pnginfo=png_metadata(digest))
    write_durably(path, data.getvalue())


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
                return digest if is_intact(image) else None
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


def is_intact(image: Image.Image) -> bool:
    try:
        image.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return True
