"""The cells of `predict --grid`, with one loading of the model: each is what `predict` with its values generates.

The prompt is encoded once. Another weight scales the loaded LoRA, another checkpoint replaces it; the base weights
stay. Cells are PNGs that a second run skips, as those of other jobs, and cells of equal inputs (a weight of 0 at every
checkpoint) are generated once. All settings and LoRAs are checked before anything large is loaded.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from PIL import Image

from qwen_cache.html.grid import HEIGHT, make_grid, thumbnail
from qwen_cache.models.family import Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.sources.places import File
from qwen_train.inference.generator import Generator, check_paths, fingerprint, loras_that_matter, settings_that_matter
from qwen_train.inference.images import (
    Axis,
    Cell,
    GenerateJob,
    JobResults,
    control_images,
    inputs_hash,
    open_images,
    pending_jobs,
    recorded_hash,
    run_jobs,
)
from qwen_train.inference.pipeline import (
    Devices,
    Sampling,
    check_count,
    check_loras,
    check_settings,
    encode_prompts,
    replace_loras,
    set_weights,
)
from qwen_train.lora.files import WeightedLora

MOST_PIXELS = 50_000_000
"""Pixels of the cells in the image of all of them; titles add a third at most, and Pillow warns about 89 million."""
NEGATIVE = "negative_"
"""What the arguments of a negative prompt begin with."""


def grid_generator(
    model: ModelFolder, cells: Sequence[Cell], devices: Devices, *, merge: bool, quantization: str
) -> Generator:
    """The generator of all cells; raises the errors of Generator for each of them, before anything is loaded."""
    for cell in cells:
        check_settings(model, cell.config, devices)
    sets: dict[tuple[Path, ...], tuple[WeightedLora, ...]] = {}
    for cell in sorted(cells, key=lambda cell: any(lora.weight != 1 for lora in cell.loras)):  # an OFT takes only 1
        if cell.loras:
            sets[_files(cell.loras)] = cell.loras
    first, *others = list(sets.values()) or [()]
    tabulated = cells[0].config.tabulated_modulation
    for loras in others:
        check_loras(model, loras, merge, quantization, tabulated=tabulated)
    return Generator(model, cells[0].config, devices, loras=first, merge=merge, quantization=quantization)


def cell_jobs(
    generator: Generator, cells: Sequence[Cell], stem: str, images: Sequence[Path], prompt: str
) -> list[GenerateJob]:
    """The job of each cell, with all inputs of its image."""
    base = {"model": fingerprint(generator.model), "quantization": generator.quantization}
    controls = tuple(File(path) for path in images)
    return [
        GenerateJob(
            cell.name(stem),
            controls,
            prompt,
            inputs={
                **base,
                "predict": settings_that_matter(generator.model, cell.config),
                **loras_that_matter(cell.loras, merge=generator.merge),
            },
        )
        for cell in cells
    ]


def check_cells(generator: Generator, jobs: Sequence[GenerateJob], folder: Path, whole: Path) -> None:
    """Raise ConfigError or SourceError if a cell or the image `whole` would overwrite something else."""
    check_count(generator.model, len(jobs[0].controls))
    check_paths(jobs, folder, whole)


def generate_cells(
    generator: Generator, cells: Sequence[Cell], jobs: Sequence[GenerateJob], folder: Path
) -> JobResults:
    """Write the cells that are missing, each to its own PNG; those of one checkpoint together."""
    todo = pending_jobs(jobs, folder, {})
    of_job = {job.name: cell for job, cell in zip(jobs, cells, strict=True)}
    images = control_images(jobs[0], generator.model.family)
    embeds = _encode(generator, [of_job[job.name] for job in todo], images, jobs[0].prompt) if todo else {}
    active = ActiveLoras(generator)

    def generated(job: GenerateJob) -> Image.Image:
        if (same := _same_image(job, jobs, folder)) is not None:
            return open_images([same], generator.model.family)[0]
        cell = of_job[job.name]
        active.use(cell.loras)
        guided = _is_guided(generator, cell)
        own = {name: tensor for name, tensor in embeds.items() if guided or not name.startswith(NEGATIVE)}
        return generator.call_pipeline(images, own, config=cell.config, one_of_many=True).images[0]

    ordered = sorted(jobs, key=lambda job: [str(file) for file in _files(of_job[job.name].loras)])
    return run_jobs(ordered, generated, folder, {})


def finished(jobs: Sequence[GenerateJob], folder: Path) -> dict[str, Path]:
    """The images that are whole and of these inputs, by the names of their jobs."""
    missing = {job.name for job in pending_jobs(jobs, folder, {})}
    return {job.name: folder / f"{job.name}.png" for job in jobs if job.name not in missing}


def _encode(
    generator: Generator, cells: Sequence[Cell], images: Sequence[Image.Image], prompt: str
) -> dict[str, torch.Tensor]:
    """The arguments in place of the prompts; the negative prompt's, too, if a cell is guided."""
    guided = any(_is_guided(generator, cell) for cell in cells)
    config = generator.config
    return encode_prompts(
        generator.model,
        images,
        prompt,
        config.negative_prompt if guided else None,
        generator.devices,
        generator.dtype,
        config.offload,
        area=generator.condition_area,
    )


def _is_guided(generator: Generator, cell: Cell) -> bool:
    return cell.config.negative_prompt is not None and Sampling.of(generator.model, cell.config).true_cfg_scale > 1


def _same_image(job: GenerateJob, jobs: Sequence[GenerateJob], folder: Path) -> Path | None:
    """The image of another cell with the same inputs, if there is one already."""
    paths = [folder / f"{other.name}.png" for other in jobs if other is not job and other.inputs == job.inputs]
    there = (path for path in paths if os.path.lexists(path))
    return next((path for path in there if recorded_hash(path) == inputs_hash(job, {})), None)


def _files(loras: Sequence[WeightedLora]) -> tuple[Path, ...]:
    return tuple(lora.file for lora in loras)


@dataclass
class ActiveLoras:
    """The LoRAs of a generator's pipeline, changed without loading the transformer again."""

    generator: Generator
    _loaded: Sequence[WeightedLora] = field(init=False)
    _enabled: bool = True

    def __post_init__(self) -> None:
        self._loaded = self.generator.loras

    def use(self, loras: Sequence[WeightedLora]) -> None:
        """Load them in place of others, or give those that are loaded their weights, or turn them off if there are
        none."""
        pipeline = self.generator.pipeline
        if not loras:
            if self._loaded and self._enabled:
                pipeline.disable_lora()
            self._enabled = False
            return
        if _files(loras) != _files(self._loaded):
            replace_loras(pipeline, loras, self.generator.config.offload)
        else:
            if not self._enabled:
                pipeline.enable_lora()
            if tuple(loras) != tuple(self._loaded):
                set_weights(pipeline, loras)
        self._loaded, self._enabled = loras, True


# ---- all cells in one image ------------------------------------------------------------------------------------------


def cells_side_by_side(axes: Sequence[Axis], paths: Sequence[Path], prompt: str, family: Family) -> Image.Image:
    """The first axis from left to right, the second downwards, and the prompt below."""
    columns, rows = len(axes[0].values), len(axes[1].values) if axes[1:] else 1
    (first,) = open_images(paths[:1], family)
    height = thumbnail_height(columns, rows, first.width / first.height)
    small = [_no_higher(open_images([path], family)[0], height) for path in paths]
    captions = axes[1].titles() if axes[1:] else [""]
    captions[-1] = f"{captions[-1]}\n{prompt}"
    table = [small[row * columns : (row + 1) * columns] for row in range(rows)]
    return make_grid(axes[0].titles(), table, captions, height)


def _no_higher(image: Image.Image, height: int) -> Image.Image:
    """The image as it is, or its thumbnail: all of them are in memory at once."""
    return thumbnail(image, height) if image.height > height else image


def thumbnail_height(columns: int, rows: int, ratio: float) -> int:
    """The height of a cell of this ratio of width to height, so that all of them have MOST_PIXELS at most."""
    return min(HEIGHT, math.isqrt(int(MOST_PIXELS / (columns * rows * ratio))))
