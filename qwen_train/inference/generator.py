"""Generating images with the stock pipelines: one, and lists of jobs with one loading of the model."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from qwen_cache.encode.vae import decode_images
from qwen_cache.errors import ConfigError, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.hardware import Kind
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.detect import Readable
from qwen_cache.sources.places import File
from qwen_cache.storage.remembered import file_digest
from qwen_cache.terminal import console, counting
from qwen_cache.text import plain
from qwen_train.data.checks import check_cache, unusual_controls
from qwen_train.data.samples import Mixture
from qwen_train.inference.cached import generate_cached, guidance_from_cache, initial_latents
from qwen_train.inference.images import (
    COMPONENTS,
    Cell,
    Comparison,
    GenerateJob,
    Row,
    Work,
    check_comparison,
    check_count,
    control_images,
    open_images,
)
from qwen_train.inference.pipeline import (
    Devices,
    PromptEncoder,
    Sampling,
    check_loras,
    check_settings,
    condition_area,
    encode_prompts,
    load_pipeline,
    memory_for,
    replace_loras,
    set_weights,
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
NEGATIVE = "negative_"
"""The beginning of the arguments of a negative prompt."""


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
    quantization: Kind = "none"
    """The transformer's, on loading."""

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
        check_count(self.model.facts, len(images))
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


# ---- jobs ------------------------------------------------------------------------------------------------------------
# All jobs with one loading of each model: the prompts of the images that are missing are encoded first, each once, and
# the encoder is freed; then the pipeline is loaded, and only its LoRAs are changed between jobs. A sample of a cache
# needs no encoder.

Encoded = dict[tuple[tuple[Readable, ...], str], dict[str, torch.Tensor] | SourceError]
"""The pipeline's arguments in place of prompts, on the CPU, or an error, by control images and prompt."""


def generator_of(
    model: ModelFolder, cells: Sequence[Cell], devices: Devices, *, merge: bool, quantization: Kind
) -> Generator:
    """The generator of all cells; raises the errors of Generator for each of them, before anything is loaded."""
    for cell in cells[1:]:
        check_settings(model, cell.config, devices)
    sets: dict[tuple[Path, ...], tuple[WeightedLora, ...]] = {}
    for cell in sorted(cells, key=lambda cell: any(lora.weight != 1 for lora in cell.loras)):  # an OFT takes only 1
        if cell.loras:
            sets[cell.files] = cell.loras
    first, *others = list(sets.values()) or [()]
    tabulated = cells[0].config.tabulated_modulation
    for loras in others:
        check_loras(model, loras, merge, quantization, tabulated=tabulated)
    return Generator(model, cells[0].config, devices, loras=first, merge=merge, quantization=quantization)


def check_jobs(
    generator: Generator, jobs: Sequence[GenerateJob], paths: Sequence[Path | None], whole: Path | None
) -> None:
    """Raise an error if the pipeline cannot take a job, or if an image, or `whole`, which shows all of them, would
    overwrite another one, a control or a target."""
    for job in jobs:
        check_count(generator.model.facts, len(job.controls))
    if whole and os.path.lexists(whole):
        check_comparison(whole)
    resolved = {path.resolve() for path in paths if path}
    if whole and whole.resolve() in resolved:
        raise SourceError("a row has the name of the comparison", where=whole, do="rename the row")
    for job in jobs:
        for image in (*job.controls, *([job.target] if job.target else [])):
            if isinstance(image, File) and Path(str(image)).resolve() in resolved:
                raise ConfigError("the result would replace a source image", where=image, do="name another --out")


def check_samples(generator: Generator, cache: Cache, jobs: Sequence[GenerateJob]) -> None:
    """Raise an error if samples of a cache cannot be generated with this model and guidance; print what is unusual."""
    guidance_from_cache(generator.config.negative_prompt, generator.sampling.true_cfg_scale)
    check_cache(Mixture.of(cache), generator.model, generator.model.transformer_config)
    with_controls = sum(job.sample is not None and len(job.sample.img_shapes) > 1 for job in jobs)
    if with_controls and (note := unusual_controls(generator.model, with_controls, len(jobs))):
        console().print(plain(note), markup=False)


def generate_jobs(generator: Generator, work: Work) -> None:
    """Carry out the jobs whose images are missing."""
    readable = [job for job, _, digest in work.pending if not isinstance(digest, SourceError)]
    embeds = encode(generator, [job for job in readable if job.sample is None])
    active = ActiveLoras(generator)
    # The cells of one checkpoint together; without a grid, all with the LoRAs and then all without.
    work.pending.sort(key=lambda each: [str(file) for file in each[0].cell.files] if each[0].cell.values else [])

    def generated(job: GenerateJob) -> Image.Image:
        if job.sample is not None:
            active.use(job.cell.loras)
            return generate_sample(generator, job.sample, job.cell.config)
        encoded = embeds[job.controls, job.prompt]
        if isinstance(encoded, SourceError):
            raise encoded
        active.use(job.cell.loras)
        own = {
            name: tensor.to(generator.devices.transformer)
            for name, tensor in encoded.items()
            if is_guided(generator.model, job.cell.config) or not name.startswith(NEGATIVE)
        }
        images = control_images(job, generator.model.family)
        return generator.call_pipeline(images, own, config=job.cell.config, one_of_many=True).images[0]

    work.run(generated)
    if work.images:
        generator.pipeline.maybe_free_model_hooks()


def is_guided(model: ModelFolder, config: PredictConfig) -> bool:
    """True if the negative prompt takes part."""
    return config.negative_prompt is not None and Sampling.of(model, config).true_cfg_scale > 1


def encode(generator: Generator, jobs: Sequence[GenerateJob]) -> Encoded:
    """Encode each prompt of the jobs once; the negative prompt too, if a job is guided.

    The encoder goes to its device once, for all of them, and is freed. Where images cannot be read or encoded, there is
    the error instead, with which each job fails later; that of a grid is raised, since all cells would fail.
    """
    embeds: Encoded = {}
    prompts = {(job.controls, job.prompt): job for job in jobs}
    if not prompts:
        return embeds
    guided = any(is_guided(generator.model, job.cell.config) for job in jobs)
    negative = generator.config.negative_prompt if guided else None
    encoder = PromptEncoder(generator.model, generator.devices.text, generator.dtype, generator.config.offload)
    with counting("encoding prompts", len(prompts)) as advance:
        for key, job in prompts.items():
            try:
                images = control_images(job, generator.model.family)
                embeds[key] = encoder.arguments(images, job.prompt, negative, generator.condition_area)
            except SourceError as error:
                if job.cell.values:
                    raise
                embeds[key] = error
            advance(1)
    encoder.free()
    return embeds


@dataclass
class ActiveLoras:
    """The LoRAs of a generator's pipeline, changed without loading the transformer again."""

    generator: Generator
    _enabled: bool = True

    def __post_init__(self) -> None:
        self._loaded = tuple(self.generator.loras)

    def use(self, loras: tuple[WeightedLora, ...]) -> None:
        """Load them in place of others, or give those that are loaded their weights, or turn them off if there are
        none."""
        pipeline = self.generator.pipeline
        if not loras:
            if self._loaded and self._enabled:
                pipeline.disable_lora()
            self._enabled = False
            return
        if [lora.file for lora in loras] != [lora.file for lora in self._loaded]:
            replace_loras(pipeline, loras, self.generator.config.offload)
        else:
            if not self._enabled:
                pipeline.enable_lora()
            if loras != self._loaded:
                set_weights(pipeline, loras)
        self._loaded, self._enabled = loras, True


def generate_sample(generator: Generator, sample: Sample, config: PredictConfig) -> Image.Image:
    """The image of a sample of a cache; KeyboardInterrupt after a signal."""
    pipeline, family = generator.pipeline, generator.model.family
    sampling, device = Sampling.of(generator.model, config), generator.devices.transformer
    with Signals() as signals, counting("generating", sampling.num_inference_steps, transient=True) as advance:

        def on_step(_: int) -> None:
            advance(1)
            if signals.stop:
                raise KeyboardInterrupt

        with memory_for("denoising", device):
            latents = generate_cached(
                sample,
                pipeline.transformer,
                FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config),
                family=family,
                num_inference_steps=sampling.num_inference_steps,
                true_cfg_scale=guidance_from_cache(config.negative_prompt, sampling.true_cfg_scale),
                sigmas=sampling.sigmas,
                use_kv_cache=sampling.use_kv_cache,
                latents=initial_latents(sample, config.seed, generator.dtype, family),
                device=device,
                dtype=generator.dtype,
                on_step=on_step,
            )
        image = decode_images(pipeline.vae, latents, sample.img_shapes[:1])[0]
        if signals.stop:  # while the image was decoded
            raise KeyboardInterrupt
    return image


def comparisons(generator: Generator, work: Work, count: int) -> Iterator[Comparison]:
    """The first `count` jobs whose images exist with and without the LoRAs, with controls and target.

    The others are the same jobs without the LoRAs, if there are any.
    """
    family, done = generator.model.family, {*work.written, *work.skipped}
    for number, job in enumerate(work.jobs[:count]):
        both = slice(number, None, count)
        titles = ["with LoRA", "without LoRA"] if job.cell.loras else ["without LoRA"]
        files = {title: path for title, path in zip(titles, work.paths[both], strict=True) if path}
        if job.sample is None:
            if not done.issuperset(files.values()):
                continue
            images = open_images(list(files.values()), family)
            controls = control_images(job, family)
            targets = control_images(replace(job, controls=(job.target,)), family) if job.target else [None]
        else:
            images, sample, vae = work.images[both], job.sample, generator.pipeline.vae
            shapes = sample.img_shapes
            controls = decode_images(vae, sample["control_latents"], shapes[1:]) if shapes[1:] else []
            targets = decode_images(vae, sample["image_latents"], shapes[:1]) if "image_latents" in sample else [None]
        shown = dict(zip(titles, images, strict=True))
        row = Row(tuple(controls), shown["without LoRA"], shown.get("with LoRA"), targets[0])
        yield Comparison(job.sample.name if job.sample else job.name, job.prompt, row, files)


# ---- the inputs of an image ------------------------------------------------------------------------------------------


def inputs_of(generator: Generator) -> Callable[[GenerateJob], dict[str, Any]]:
    """A function that returns the inputs of a job's image besides prompt and controls: the model by its files' times,
    LoRAs by their content, settings."""
    model = {"model": fingerprint(generator.model), "quantization": generator.quantization}
    digest = cache(file_digest)

    def inputs(job: GenerateJob) -> dict[str, Any]:
        loras = [[digest(lora.file), lora.weight] for lora in job.cell.loras]
        merged = {"loras": loras, "merge": generator.merge} if loras else {}
        return {**model, "predict": settings_that_matter(generator.model, job.cell.config), **merged}

    return inputs


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
    singles = {"transformer": model.transformer, "text_encoder": model.text_encoder}
    files += [(component, Path(name)) for component, name in singles.items() if name]
    files += [("decoder", path) for path in sorted(model.other_vae.iterdir())] if model.other_vae else []
    stats = [(component, path.name, path.stat()) for component, path in files]
    return content_hash(
        json.dumps([[component, name, s.st_size, s.st_mtime_ns] for component, name, s in stats]).encode()
    )
