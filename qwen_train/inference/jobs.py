"""Many images in one go: several prompts about the same images, or all rows of a source, one PNG for each.

A PNG carries the hash of all that decides it: the prompt, the bytes of the images, the settings. One that is there
with the same hash is not drawn again, so that a run that was killed goes on where it was; one with another hash is
drawn anew. None is ever half written. Refused, before anything is drawn: a file in the way that was not made here, and
names that are the same or lead out of the folder. A job whose image cannot be read is reported; the others go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image, PngImagePlugin

from qwen_cache.console import counting
from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.identity import canonical_json, content_hash
from qwen_cache.settings.data import DataConfig
from qwen_cache.sources.detect import Readable, Row, read_source
from qwen_cache.sources.images import open_rgb
from qwen_cache.sources.places import File
from qwen_cache.storage.durable import WINDOWS, write_durably
from qwen_cache.storage.url import location

CHUNK = "qwen-train job"
"""The key of the PNG's text chunk with the hash."""
NO_NAME_ON_WINDOWS = frozenset('<>:"|?*')
LONGEST_PART = 240
"""Bytes of a part of a name: file systems take 255, of which the extension and the temporary name need some."""


@dataclass(frozen=True)
class Job:
    """An image that is to be drawn."""

    name: str
    """Of its file, without `.png`; slashes make folders."""
    controls: tuple[Readable, ...]
    prompt: str
    target: Readable | None = None
    """What it should look like, where that is known; to compare with, it decides nothing."""


@dataclass(frozen=True)
class Done:
    """What became of the jobs."""

    written: list[Path]
    skipped: list[Path]
    """Those that were there."""
    failed: list[Problem]


def jobs_of(
    source: str, config: DataConfig, *, needs_control: bool, prompts: Sequence[str] = ()
) -> tuple[list[Job], list[Problem]]:
    """A job for each row of a source as `qwen-cache build` reads it, and what is wrong with the other rows.

    An editing model's rows need no target. With `prompts`, each row is drawn with each of them, whatever its own are.
    """
    rows, problems = read_source(
        location(source),
        needs_control=needs_control,
        needs_target=not needs_control,
        needs_prompt=not prompts,
        allow_empty_prompt=config.allow_empty_prompt or bool(prompts),
    )
    jobs = [Job(row.name, row.controls, row.prompt, _target(row)) for row in rows]
    if not prompts:
        return jobs, problems
    once: dict[str, Job] = {}  # whatever its captions
    for row, job in zip(rows, jobs, strict=True):
        once.setdefault(row.where, job)
    named = [(f"-{i}" if prompts[1:] else "", prompt) for i, prompt in enumerate(prompts, 1)]
    return [
        replace(job, name=job.name + end, prompt=prompt) for job in once.values() for end, prompt in named
    ], problems


def _target(row: Row) -> Readable | None:
    """None where the first control stands in its place."""
    return None if row.controls and row.target == row.controls[0] else row.target


def jobs_of_prompts(name: str, pictures: Sequence[Path], prompts: Sequence[str]) -> list[Job]:
    """A job for each prompt about the same images: `name`, or, of several, `name-1`, `name-2`, …"""
    controls = tuple(File(path) for path in pictures)
    names = [name] if len(prompts) == 1 else [f"{name}-{i}" for i in range(1, len(prompts) + 1)]
    return [Job(each, controls, prompt) for each, prompt in zip(names, prompts, strict=True)]


def images_of(job: Job) -> list[Image.Image]:
    """Its controls, as a build opens them."""
    return [open_rgb(image.read(), str(image)) for image in job.controls]


def run_jobs(
    jobs: Sequence[Job], draw: Callable[[Job], Image.Image], out_folder: Path, about: Mapping[str, Any]
) -> Done:
    """Draw what is not there yet into `out_folder`, one PNG for each job.

    `about` is all that decides an image besides its job: model, LoRA, settings, seed, as JSON has it.
    """
    paths = paths_of(jobs, out_folder)
    there = {path: hash_in(path) for path in paths if os.path.lexists(path)}
    written: list[Path] = []
    skipped: list[Path] = []
    failed: list[Problem] = []
    with counting("images", len(jobs)) as advance:
        for job, path in zip(jobs, paths, strict=True):
            try:
                digest = hash_of(job, about)
                if there.get(path) == digest:
                    skipped.append(path)
                else:
                    write_image(path, draw(job), digest)
                    written.append(path)
            except SourceError as error:
                where = job.name if error.where is None else f"{job.name}: {error.where}"
                failed.append(Problem(where, error.fault, error.do or "restore it"))
            advance(1)
    return Done(written, skipped, failed)


def waiting(jobs: Sequence[Job], out_folder: Path, about: Mapping[str, Any]) -> list[Job]:
    """Those that `run_jobs` will draw; what cannot be read it will report."""
    found = []
    for job, path in zip(jobs, paths_of(jobs, out_folder), strict=True):
        with suppress(SourceError):
            if not os.path.lexists(path) or hash_in(path) != hash_of(job, about):
                found.append(job)
    return found


def hash_of(job: Job, about: Mapping[str, Any]) -> str:
    """Of everything that decides the image; its name does not."""
    controls = [content_hash(image.read()) for image in job.controls]
    return content_hash(canonical_json({"prompt": job.prompt, "controls": controls, "about": dict(about)}))


def marked(digest: str) -> PngImagePlugin.PngInfo:
    """What a PNG says of what it was drawn from."""
    text = PngImagePlugin.PngInfo()
    text.add_text(CHUNK, digest)
    return text


def write_image(path: Path, image: Image.Image, digest: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = BytesIO()
    image.save(data, "PNG", pnginfo=marked(digest))
    write_durably(path, data.getvalue())


# ---- the folder ------------------------------------------------------------------------------------------------------


def paths_of(jobs: Sequence[Job], folder: Path) -> list[Path]:
    """Where each image goes: apart from all others, and inside the folder."""
    paths = [folder / f"{checked(job.name)}.png" for job in jobs]
    taken: dict[str, str] = {}
    for job, path in zip(jobs, paths, strict=True):
        alike = str(path).casefold()  # some file systems do not tell A from a
        if alike in taken:
            raise SourceError(
                "two images would have the same file",
                where=path,
                found=f"{taken[alike]} and {job.name}",
                do="rename one of them in the source",
            )
        taken[alike] = job.name
    for way in dict.fromkeys(parent for path in paths for parent in path.parents):
        if str(way).casefold() in taken or (os.path.lexists(way) and not way.is_dir()):
            raise SourceError("a file is in the way of a folder", where=way, do="rename it, or name another --out")
    return paths


def checked(name: str) -> str:
    """A name that stays in its folder."""
    parts = name.split("/")
    if not name or "\0" in name or "\\" in name or any(part in ("", ".", "..") for part in parts):
        raise SourceError(
            "this name does not stay in the folder of the images",
            where=repr(name),
            expected="a path without .., that begins in it",
            do="rename it in the source, or move the table to a folder above its images",
        )
    if WINDOWS and (lacking := sorted(set(name) & NO_NAME_ON_WINDOWS)):
        raise SourceError(
            "Windows has no file of this name", where=name, found=" ".join(lacking), do="rename it in the source"
        )
    if any(len(os.fsencode(part)) > LONGEST_PART for part in parts):
        raise SourceError("this name is too long for a file", where=name, expected=f"{LONGEST_PART} bytes at most")
    return name


def hash_in(path: Path) -> str | None:
    """What an image of ours was drawn from; None where it is damaged."""
    try:
        with Image.open(path, formats=["PNG"]) as image:
            digest = image.info.get(CHUNK)
            if isinstance(digest, str):
                return digest if is_whole(image) else None
    except (OSError, ValueError, Image.DecompressionBombError):
        pass
    raise ConfigError(
        "there is a file that `qwen-train` did not draw, and that would be overwritten",
        where=path,
        do="move it, or name another --out",
    )


def is_whole(image: Image.Image) -> bool:
    try:
        image.verify()
    except (OSError, SyntaxError, ValueError):
        return False
    return True
