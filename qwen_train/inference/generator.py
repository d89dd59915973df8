"""Generating images: one, from cached samples, and many."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache
from jaxtyping import Bool, Float
from PIL import Image
from torch import Tensor

from qwen_cache.encode.vae import decode_images
from qwen_cache.errors import ConfigError, Problem, SourceError
from qwen_cache.format.cache import Cache, Sample
from qwen_cache.format.identity import content_hash
from qwen_cache.format.sample import LATENT_CHANNELS, token_count
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.family import Family
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.places import File
from qwen_cache.storage.remembered import file_digest
from qwen_cache.terminal import console, counting
from qwen_cache.text import plain
from qwen_train.data.samples import Mixture, check_cache, no_empty_prompt, unusual_controls
from qwen_train.flow import NoiseSchedule
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


# ---- cached ----------------------------------------------------------------------------------------------------------
# Generation from a cache: a sample's embeddings and control latents replace its prompt and images.
#
# Only the transformer is needed: diffusers' own, or the one in training, which takes the stock call too. The loop
# repeats the stock pipelines' operations one by one, so equal noise and inputs give an equal result. Validation uses it
# too, so it imports neither a pipeline nor a VAE. Refused: an ambiguous sample name; and guidance, if the cache lacks
# the empty prompt, which is the only negative prompt that it can have.

TOKENS_PER_SLOT = 4
"""Latents of Qwen-Image-2.1 for a token of its text encoder: 2×2."""


@torch.no_grad()
def generate_cached(
    sample: Sample,
    transformer: Any,
    scheduler: Any,
    *,
    family: Family,
    num_inference_steps: int,
    true_cfg_scale: float = 1.0,
    sigmas: Sequence[float] | None = None,
    use_kv_cache: bool = True,
    latents: Float[Tensor, "S 64"],
    device: torch.device,
    dtype: torch.dtype,
    on_step: Callable[[int], object] | None = None,
) -> Float[Tensor, "S 64"]:
    """The target latents that the stock pipeline would generate from the cached embeddings and control latents.

    `latents` is the initial noise. A `true_cfg_scale` above 1 guides away from the empty prompt. With `use_kv_cache`,
    Qwen-Image-2.1 keeps keys and values of text and control images from the first step on. `on_step` gets the number of
    finished steps and ends the generation by returning True. Raises TrainError for guidance without an empty prompt.
    """
    tokens = token_count(sample.img_shapes[:1])
    levels = np.linspace(1.0, 1 / num_inference_steps, num_inference_steps) if sigmas is None else sigmas
    mu = NoiseSchedule.of_config(scheduler.config).mu(tokens)
    scheduler.set_timesteps(sigmas=levels, device=device, mu=mu)
    scheduler.set_begin_index(0)
    latents = latents[None].to(device, dtype)
    controls = sample["control_latents"][None].to(latents) if len(sample.img_shapes) > 1 else latents[:, :0]
    prompts = [prompt.to(latents) for prompt in prompts_of(sample, true_cfg_scale)]
    parts = [(transformer, sample, prompt, controls) for prompt in prompts]
    joint = family.joint_sequence
    conditions = [JointCondition(*each, use_kv_cache) if joint else Condition(*each) for each in parts]
    for step, t in enumerate(scheduler.timesteps, 1):
        sigma = t.expand(1).to(dtype) / 1000
        velocity, *others = [condition.velocity(latents, sigma) for condition in conditions]
        for negative in others:
            velocity = conditions[0].guided(velocity, negative, true_cfg_scale)
        latents = scheduler.step(velocity, t, latents, return_dict=False)[0].to(dtype)
        if on_step is not None and on_step(step) is True:
            break
    return latents[0]


def prompts_of(sample: Sample, true_cfg_scale: float) -> Iterator[Float[Tensor, "L D"]]:
    """The embeddings of the prompt and, with guidance, of the empty prompt."""
    yield sample["prompt_embeds"]
    if true_cfg_scale > 1:
        if "empty_prompt_embeds" not in sample:
            found = f"true_cfg_scale={true_cfg_scale}"
            raise no_empty_prompt("guidance", f"sample {sample.name}", found, "true_cfg_scale=1")
        yield sample["empty_prompt_embeds"]


@dataclass
class Condition:
    """One prompt and the controls of a sample, for a transformer of the 20B family."""

    transformer: Any
    sample: Sample
    prompt: Float[Tensor, "L D"]
    controls: Float[Tensor, "1 Sc 64"]

    def velocity(self, latents: Float[Tensor, "1 S 64"], sigma: Float[Tensor, " 1"]) -> Float[Tensor, "1 S 64"]:
        """The transformer's prediction for the target."""
        velocity: Tensor = self.transformer(
            hidden_states=torch.cat([latents, self.controls], dim=1),
            encoder_hidden_states=self.prompt[None],
            timestep=sigma,
            img_shapes=[list(self.sample.img_shapes)],
            return_dict=False,
        )[0]
        return velocity[:, : latents.shape[1]]

    @staticmethod
    def guided(velocity: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance, at the length of `velocity`."""
        guided: Tensor = negative + scale * (velocity - negative)
        rescaled: Tensor = guided * (velocity.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        return rescaled


@dataclass
class JointCondition(Condition):
    """One prompt and the controls of a sample, for a transformer of Qwen-Image-2.1."""

    use_kv_cache: bool
    """Keep keys and values of text and controls after the first step."""
    _kept: QwenImage21KVCache | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self._rows, is_image = rows_with_slots(self.sample, self.prompt)
        slots = is_image.new_ones(token_count(self.sample.img_shapes[:1]) // TOKENS_PER_SLOT)
        self._img_mask = torch.cat([is_image, slots])[None].to(self.prompt.device)

    def velocity(self, latents: Float[Tensor, "1 S 64"], sigma: Float[Tensor, " 1"]) -> Float[Tensor, "1 S 64"]:
        target, *controls = self.sample.img_shapes
        mode, model = None, getattr(self.transformer, "module", self.transformer)  # DistributedDataParallel's
        if self.use_kv_cache and model.config.causal_condition:
            mode = "cached" if self._kept else "extract"
            self._kept = self._kept or QwenImage21KVCache(len(model.transformer_blocks))
        velocity: Tensor = self.transformer(
            hidden_states=torch.cat([self.controls, latents], dim=1),
            encoder_hidden_states=self._rows[None],
            timestep=sigma,
            img_shapes=[[*controls, target]],
            img_mask=self._img_mask,
            kv_cache=self._kept,
            kv_cache_mode=mode,
            return_dict=False,
        )[0]
        return velocity[:, -latents.shape[1] :]

    @staticmethod
    def guided(velocity: Tensor, negative: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance."""
        return negative + scale * (velocity - negative)


def rows_with_slots(sample: Sample, text: Float[Tensor, "L D"]) -> tuple[Float[Tensor, "N D"], Bool[Tensor, " N"]]:
    """The cached rows of text with empty rows at the controls' slots, and which rows are slots.

    What the text encoder gave there does not matter: the transformer replaces these rows by the controls' latents.
    """
    rows, is_image, begin = [], [], 0
    for position, (_, h, w) in zip(sample.row.meta.image_positions, sample.img_shapes[1:], strict=True):
        slots = h * w // TOKENS_PER_SLOT
        rows += [text[begin:position], text.new_zeros(slots, text.shape[1])]
        is_image += [False] * (position - begin) + [True] * slots
        begin = position
    rows.append(text[begin:])
    is_image += [False] * (len(text) - begin)
    return torch.cat(rows), torch.tensor(is_image)


def guidance_from_cache(negative_prompt: str | None, true_cfg_scale: float) -> float:
    """The `true_cfg_scale` for a cached sample: 1 without a negative prompt, as in the pipelines."""
    if negative_prompt:
        raise ConfigError(
            "the empty prompt is the only negative prompt in a cache",
            found=f"predict.negative_prompt={negative_prompt!r}",
            do='set predict.negative_prompt="", or generate from the images with --image',
        )
    return 1.0 if negative_prompt is None else true_cfg_scale


def initial_latents(sample: Sample, seed: int, dtype: torch.dtype, family: Family) -> Float[Tensor, "S 64"]:
    """The noise that the stock pipeline samples for the target from `torch.Generator().manual_seed(seed)`.

    It is sampled in the pipeline's dtype, as there, and on the CPU, so that it is equal for every device.
    """
    (_, h, w), channels = sample.img_shapes[0], family.latent_channels
    patch = isqrt(LATENT_CHANNELS // channels)
    shape = (1, 1, channels, patch * h, patch * w)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)
    return noise.view(channels, h, patch, w, patch).permute(1, 3, 0, 2, 4).reshape(h * w, LATENT_CHANNELS)


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
