"""Many images with the model loaded once: jobs, with and without the LoRAs, and samples of a cache.

The prompts of all missing images are encoded before the transformer is loaded. Refused: a row with the name of the
comparison, and a cache of another model.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from qwen_cache.encode.vae import decode_images
from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.models.family import Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.places import File
from qwen_cache.storage.remembered import file_digest
from qwen_cache.terminal import console, counting
from qwen_cache.text import plain
from qwen_train.data.mixture import Mixture
from qwen_train.data.planning import check_cache, unusual_controls
from qwen_train.inference.cached import generate_cached, guidance_from_cache, initial_latents
from qwen_train.inference.comparison import Comparison, check_comparison
from qwen_train.inference.devices import memory_for
from qwen_train.inference.generator import Generator
from qwen_train.inference.grid import Row
from qwen_train.inference.images import open_images
from qwen_train.inference.jobs import (
    COMPONENTS,
    GenerateJob,
    JobResults,
    control_images,
    output_paths,
    pending_jobs,
    run_jobs,
)
from qwen_train.inference.prompts import PromptEncoder
from qwen_train.inference.settings import Sampling, check_count, with_defaults
from qwen_train.lora.files import WeightedLora
from qwen_train.signals import Signals

WITHOUT = "-without-lora"


def generate_jobs(
    generator: Generator, jobs: Sequence[GenerateJob], folder: Path, *, comparison: Path | None = None
) -> JobResults:
    """Write a PNG for each job to `folder`; for a `comparison`, also one without the LoRAs, named -without-lora.

    The caller writes the file `comparison` afterwards. Raises ConfigError or SourceError before loading the model if an
    output would overwrite something else.
    """
    for job in jobs:
        check_count(generator.model, len(job.controls))
    passes = _passes(generator, jobs, comparison is not None)
    check_paths([job for each, _ in passes for job in each], folder, comparison)
    todo = [job for each, inputs in passes for job in pending_jobs(each, folder, inputs)]
    embeds = encode(generator, todo)

    def generated(job: GenerateJob) -> Image.Image:
        if job.name not in embeds:
            what = "the image existed before and is missing now"
            raise SourceError(what, where=job.name, do="run the same command again")
        encoded = embeds[job.name]
        if isinstance(encoded, SourceError):
            raise encoded
        on_device = {name: tensor.to(generator.devices.transformer) for name, tensor in encoded.items()}
        images = control_images(job, generator.model.family)
        return generator.call_pipeline(images, on_device, one_of_many=True).images[0]

    results = JobResults([], [], [])
    for number, (each, inputs) in enumerate(passes):
        if number and todo:
            generator.pipeline.disable_lora()
        new = run_jobs(each, generated, folder, inputs)
        results = JobResults(results.written + new.written, results.skipped + new.skipped, results.failed + new.failed)
    return results


def _passes(
    generator: Generator, jobs: Sequence[GenerateJob], compare: bool
) -> list[tuple[list[GenerateJob], dict[str, Any]]]:
    """The jobs, and with `compare` again without the LoRAs; each pass with the inputs of its images."""
    plain: dict[str, Any] = {
        "model": fingerprint(generator.model),
        "quantization": generator.quantization,
        "predict": settings_that_matter(generator.model, generator.config),
    }
    passes = [(list(jobs), {**plain, **loras_that_matter(generator.loras, merge=generator.merge)})]
    if compare and generator.loras:
        passes.append(([replace(job, name=job.name + WITHOUT) for job in jobs], plain))
    return passes


def check_paths(jobs: Sequence[GenerateJob], folder: Path, comparison: Path | None) -> None:
    """Raise an error if the comparison or an image would overwrite another one, a control or a target."""
    if comparison and os.path.lexists(comparison):
        check_comparison(comparison)
    paths = {path.resolve() for path in output_paths(jobs, folder)}
    if comparison and comparison.resolve() in paths:
        raise SourceError("a row has the name of the comparison", where=comparison, do="rename the row")
    for job in jobs:
        for image in (*job.controls, *([job.target] if job.target else [])):
            if isinstance(image, File) and Path(str(image)).resolve() in paths:
                raise ConfigError("the result would replace a source image", where=image, do="name another --out")


def encode(generator: Generator, jobs: Sequence[GenerateJob]) -> dict[str, dict[str, torch.Tensor] | SourceError]:
    """The pipeline's arguments in place of each job's prompts, on the CPU.

    The encoder goes to its device once, for all of them, and is freed. A job whose images cannot be read or encoded has
    the error instead, and fails later.
    """
    encoder = PromptEncoder(generator.model, generator.devices.text, generator.dtype, generator.config.offload)
    embeds: dict[str, dict[str, torch.Tensor] | SourceError] = {}
    with counting("encoding prompts", len(jobs)) as advance:
        for job in jobs:
            try:
                images = control_images(job, generator.model.family)
                prompts = job.prompt, generator.negative_prompt
                embeds[job.name] = encoder.arguments(images, *prompts, generator.condition_area)
            except SourceError as error:
                embeds[job.name] = error
            advance(1)
    encoder.free()
    return embeds


def compared(
    jobs: Sequence[GenerateJob], folder: Path, family: Family, *, with_lora: bool, failed: Sequence[Problem]
) -> Iterator[Comparison]:
    """The generated images of each job that has all of them, with its controls and target."""
    titles = {"with LoRA": "", "without LoRA": WITHOUT} if with_lora else {"without LoRA": ""}
    failed_names = {
        name for job in jobs for name in (job.name, job.name + WITHOUT) if any(_is_of(p, name) for p in failed)
    }
    for job in jobs:
        files = {title: folder / f"{job.name}{suffix}.png" for title, suffix in titles.items()}
        if not all(path.is_file() for path in files.values()) or failed_names & {job.name, job.name + WITHOUT}:
            continue
        images = dict(zip(files, open_images(list(files.values()), family), strict=True))
        target = control_images(replace(job, controls=(job.target,)), family)[0] if job.target else None
        row = Row(tuple(control_images(job, family)), images["without LoRA"], images.get("with LoRA"), target)
        yield Comparison(job.name, job.prompt, row, files)


def _is_of(problem: Problem, name: str) -> bool:
    return problem.where == name or problem.where.startswith(f"{name}: ")


def loras_that_matter(loras: Sequence[WeightedLora], *, merge: bool) -> dict[str, Any]:
    """The LoRAs by their content; {} without any."""
    return {"loras": [[file_digest(lora.file), lora.weight] for lora in loras], "merge": merge} if loras else {}


def settings_that_matter(model: ModelFolder, config: PredictConfig) -> dict[str, Any]:
    """The settings that affect an image, with the model's defaults."""
    sigmas = Sampling.of(model, config).sigmas
    config = with_defaults(model, config).model_copy(update={"sigmas": sigmas and list(sigmas)})
    unused = {"offload", *model.family.not_in_predict}
    unused |= {"true_cfg_scale"} if config.negative_prompt is None else set()
    return config.model_dump(mode="json", exclude=unused | ({"num_inference_steps"} if sigmas else set()))


def fingerprint(model: ModelFolder) -> str:
    """The hash of a model's file names, sizes and times; reading the files would take longer than generating."""
    folders = [model.component(name) for name in COMPONENTS if (model.path / name).is_dir()]
    files = [(folder.name, path) for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    files += [("transformer", Path(model.transformer))] if model.transformer else []
    stats = [(component, path.name, path.stat()) for component, path in files]
    return content_hash(
        json.dumps([[component, name, s.st_size, s.st_mtime_ns] for component, name, s in stats]).encode()
    )


# ---- from a cache ----------------------------------------------------------------------------------------------------


def generate_samples(generator: Generator, cache: Cache, samples: Sequence[Sample], *, compare: bool) -> Iterator[Row]:
    """Generate each sample; with `compare`, also without the LoRAs, and decode its own images."""
    model, config, devices = generator.model, generator.config, generator.devices
    sampling = generator.sampling
    guidance = guidance_from_cache(config.negative_prompt, sampling.true_cfg_scale)
    check_cache(Mixture.of(cache), model, model.transformer_config)
    with_controls = sum(len(sample.img_shapes) > 1 for sample in samples)
    if with_controls and (note := unusual_controls(model, with_controls, len(samples))):
        console().print(plain(note), markup=False)
    pipeline = generator.pipeline
    passes = 2 if compare and generator.loras else 1
    with Signals() as signals, counting("generating", len(samples) * passes * generator.steps) as advance:

        def on_step(_: int) -> None:
            advance(1)
            if signals.stop:
                raise KeyboardInterrupt

        def generated(sample: Sample) -> Image.Image:
            with memory_for("denoising", devices.transformer):
                latents = generate_cached(
                    sample,
                    pipeline.transformer,
                    FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config),
                    family=model.family,
                    num_inference_steps=sampling.num_inference_steps,
                    true_cfg_scale=guidance,
                    sigmas=sampling.sigmas,
                    use_kv_cache=sampling.use_kv_cache,
                    latents=initial_latents(sample, config.seed, generator.dtype, model.family),
                    device=devices.transformer,
                    dtype=generator.dtype,
                    on_step=on_step,
                )
            return decode_images(pipeline.vae, latents, sample.img_shapes[:1])[0]

        for sample in samples:
            row = Row(with_lora=generated(sample)) if generator.loras else Row(without_lora=generated(sample))
            if passes == 2:
                pipeline.disable_lora()
                row = replace(row, without_lora=generated(sample))
                pipeline.enable_lora()
            yield with_cached_images(row, sample, pipeline.vae) if compare else row
    pipeline.maybe_free_model_hooks()


def with_cached_images(row: Row, sample: Sample, vae: Any) -> Row:
    """The row with its sample's decoded controls and, if there is one, target."""
    target, controls = sample.img_shapes[:1], sample.img_shapes[1:]
    decoded = decode_images(vae, sample["control_latents"], controls) if controls else []
    targets = decode_images(vae, sample["image_latents"], target) if "image_latents" in sample else [None]
    return replace(row, controls=tuple(decoded), target=targets[0])
