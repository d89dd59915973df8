"""Generating images with the stock pipelines: one, and many with one loading of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from qwen_cache.encode.vae import decode_images
from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.family import Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.places import File
from qwen_cache.storage.remembered import file_digest
from qwen_cache.terminal import console, counting
from qwen_cache.text import plain
from qwen_train.data.samples import Mixture, check_cache, unusual_controls
from qwen_train.inference.cached import (
    generate_cached,
    guidance_from_cache,
    initial_latents,
)
from qwen_train.inference.images import (
    COMPONENTS,
    Comparison,
    GenerateJob,
    JobResults,
    Row,
    check_comparison,
    control_images,
    open_images,
    output_paths,
    pending_jobs,
    run_jobs,
)
from qwen_train.inference.pipeline import (
    Devices,
    PromptEncoder,
    Sampling,
    check_count,
    check_loras,
    check_settings,
    condition_area,
    encode_prompts,
    load_pipeline,
    memory_for,
    with_defaults,
)
from qwen_train.lora.files import WeightedLora
from qwen_train.run import Signals

# ---- generator -------------------------------------------------------------------------------------------------------
# Generate images: encode prompts, then run the stock pipeline, each component on its device.
#
# The text encoder is freed before the transformer is loaded, so no device holds both. Settings, LoRAs and the number of
# images are checked before anything large is loaded. A signal ends the generation after the current step.

ARGUMENTS = {
    *("sigmas", "guidance_scale", "num_images_per_prompt", "max_sequence_length"),
    *("height", "width", "output_resolution", "use_kv_cache"),
}
"""The settings of `predict` that the pipelines take under the same name, if they are given."""


@dataclass(frozen=True)
class GeneratedImages:
    """The result of one call."""

    images: list[Image.Image]
    """`predict.num_images_per_prompt` images, RGB or for Qwen-Image-2.1 RGBA; unfinished ones after an interruption."""
    interrupted_after: int | None = None
    """The number of denoising steps before an interruption; None if all steps were made."""


@dataclass(frozen=True)
class Generator:
    """A model with its LoRAs, settings and devices. Nothing large is loaded before the first image.

    Raises:
        ConfigError: settings that exclude each other or that this model cannot take.
        ModelError: `tabulated_modulation` with a model that cannot use it.
        TrainError: a file that is not a LoRA, or a LoRA of another base.
    """

    model: ModelFolder
    config: PredictConfig
    """The section `predict` of qwen.yaml."""
    devices: Devices
    loras: Sequence[WeightedLora] = ()
    merge: bool = False
    """Add the LoRAs to the weights before generating."""
    quantization: str = "none"
    """The transformer's, on loading: none, int8, fp8 or nf4."""

    def __post_init__(self) -> None:
        check_settings(self.model, self.config, self.devices)
        tabulated = self.config.tabulated_modulation
        check_loras(self.model, self.loras, self.merge, self.quantization, tabulated=tabulated)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which all components compute."""
        return torch_dtype(self.config.dtype)

    @property
    def steps(self) -> int:
        """Denoising steps of an image."""
        return self.sampling.num_inference_steps

    @cached_property
    def sampling(self) -> Sampling:
        """Steps, noise levels and guidance, with the model's defaults."""
        return Sampling.of(self.model, self.config)

    @property
    def negative_prompt(self) -> str | None:
        """The negative prompt of the settings; None if guidance is off (`true_cfg_scale` of 1 or less)."""
        return self.config.negative_prompt if self.sampling.true_cfg_scale > 1 else None

    @property
    def condition_area(self) -> int:
        """About the pixels of an image for the text encoder."""
        return condition_area(self.model, self.config)

    @cached_property
    def pipeline(self) -> Any:
        """The stock pipeline with VAE, transformer and LoRAs; loaded on first access (ModelError, DeviceError)."""
        return load_pipeline(
            self.model,
            self.config,
            self.devices,
            quantization=self.quantization,
            loras=self.loras,
            merge=self.merge,
        )

    def generate(
        self, images: Sequence[Image.Image], prompt: str, *, save_interrupted: bool = False
    ) -> GeneratedImages:
        """Generate from `prompt` and the control `images`, with the seed of the settings.

        Images are of any size, RGB or for Qwen-Image-2.1 also RGBA. Without any, an editing model is called as
        Qwen-Image's pipeline calls its transformer, which has the same inputs.

        The first signal (SIGINT or SIGTERM) ends the generation after the current step: with unfinished images if
        `save_interrupted`, else with KeyboardInterrupt.

        Raises:
            ConfigError: more images than the pipeline takes.
            DeviceError: too little memory on a device.
            ModelError: weights that are missing or cannot be loaded.
        """
        check_count(self.model, len(images))
        embeds = encode_prompts(
            self.model,
            images,
            prompt,
            self.negative_prompt,
            self.devices,
            self.dtype,
            self.config.offload,
            area=self.condition_area,
        )
        return self.call_pipeline(images, embeds, save_interrupted=save_interrupted)

    def call_pipeline(
        self,
        images: Sequence[Image.Image],
        embeds: Mapping[str, torch.Tensor],
        *,
        config: PredictConfig | None = None,
        save_interrupted: bool = False,
        one_of_many: bool = False,
    ) -> GeneratedImages:
        """Generate like `generate`, from encoded prompts; the number of images is not checked.

        Args:
            images: the control images.
            embeds: the pipeline's arguments in place of the prompts, such as `prompt_embeds` `[1, L, D]` and
                `prompt_embeds_mask` `[1, L]` (see `PromptEncoder.arguments`), on the transformer's device.
            config: the settings of this call in place of the generator's, such as another seed; not checked.
            save_interrupted: return unfinished images after a signal, instead of raising KeyboardInterrupt.
            one_of_many: remove the progress line at the end.
        """
        pipeline = self.pipeline if images else self.pipeline.without_images
        config, steps = config or self.config, 0
        sampling = Sampling.of(self.model, config)
        pipeline.set_progress_bar_config(disable=True)
        with (
            Signals() as signals,
            counting("generating", sampling.num_inference_steps, transient=one_of_many) as advance,
        ):

            def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
                nonlocal steps
                steps += 1
                advance(1)
                if signals.stop and not save_interrupted:
                    raise KeyboardInterrupt
                pipeline._interrupt = signals.stop
                return {}

            with memory_for("denoising", pipeline.devices.transformer):
                generated = pipeline(
                    **({"image": list(images) if len(images) > 1 else images[0]} if images else {}),
                    **embeds,
                    **config.model_dump(include=ARGUMENTS, exclude_none=True),
                    num_inference_steps=sampling.num_inference_steps,
                    true_cfg_scale=sampling.true_cfg_scale if config.negative_prompt is not None else 1.0,
                    generator=torch.Generator().manual_seed(config.seed),
                    callback_on_step_end=on_step_end,
                ).images
            if signals.stop and not save_interrupted:  # while the image was decoded
                raise KeyboardInterrupt
        return GeneratedImages(generated, steps if pipeline.interrupt else None)


# ---- many ------------------------------------------------------------------------------------------------------------
# Many images with the model loaded once: jobs, with and without the LoRAs, and samples of a cache.
#
# The prompts of all missing images are encoded before the transformer is loaded. Refused: a row with the name of the
# comparison, and a cache of another model.

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
    files += [("decoder", path) for path in sorted(model.other_vae.iterdir())] if model.other_vae else []
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
