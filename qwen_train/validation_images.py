"""Images that are generated during training: of held-out samples, and of all samples of a validation cache.

Their noise depends only on the sample, so the images of all steps and runs can be compared, and training's random state
is not touched. No VAE is needed: images are stored as latents for `qwen-train decode`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import ImgShapes
from qwen_cache.models.encoders import from_config
from qwen_cache.models.family import Family
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ValidationConfig
from qwen_cache.storage.files import make_folder, write_durably
from qwen_cache.storage.remembered import sealed
from qwen_cache.terminal import plural
from qwen_train.data.batches import Batches
from qwen_train.data.mixture import Mixture
from qwen_train.data.planning import no_empty_prompt
from qwen_train.inference.cached import generate_cached, initial_latents
from qwen_train.latents import SCALES, VALIDATION
from qwen_train.validation import generator_of, held_out, noise, rank_samples


@dataclass(frozen=True)
class ValidationImages:
    """The samples to generate, held-out ones first, and the settings."""

    samples: tuple[Sample, ...]
    config: ValidationConfig
    max_steps: int
    scheduler: dict[str, Any]
    """The model's scheduler_config.json."""
    family: Family

    @property
    def summary(self) -> str:
        """How many images are generated, when and how, in words."""
        scales = self.config.true_cfg_scale
        count = plural(len(self.samples) * len(scales), "image")
        guided = f" at true_cfg_scale {' and '.join(f'{scale:g}' for scale in scales)}" if scales != [1] else ""
        every = plural(self.config.images_every_steps, "step")
        return f"{count}{guided}, before training, every {every} and after the last"

    def due(self, step: int) -> bool:
        """Whether images are generated after this step; step 0 is before training."""
        return step % self.config.images_every_steps == 0 or step == self.max_steps

    def write(self, folder: Path, step: int, transformer: Any, accelerator: Any, dtype: torch.dtype) -> None:
        """Write the latents of all images to `folder`/validation/step-N, targets and controls beside it.

        Each process generates its share. With several scales a file has one image for each.
        """
        scales = self.config.true_cfg_scale
        for sample, is_filler in rank_samples(self.samples, accelerator):
            images = [self.generate(sample, transformer, accelerator.device, dtype, scale) for scale in scales]
            if is_filler:
                continue
            target, controls = sample.img_shapes[:1], sample.img_shapes[1:]
            latents, words = torch.cat(images), {SCALES: json.dumps(scales)} if len(scales) > 1 else {}
            save_latents(folder / VALIDATION / f"step-{step}", sample, latents, target * len(scales), **words)
            if "image_latents" in sample:
                save_latents(folder / VALIDATION / "target", sample, sample["image_latents"], target)
            if controls:
                save_latents(folder / VALIDATION / "controls", sample, sample["control_latents"], controls)

    def generate(
        self, sample: Sample, transformer: Any, device: torch.device, dtype: torch.dtype, true_cfg_scale: float
    ) -> Float[Tensor, "S 64"]:
        """The latents that the stock pipeline would generate from the cached embeddings and control latents."""
        return generate_cached(
            sample,
            transformer,
            from_config(FlowMatchEulerDiscreteScheduler, self.scheduler),
            family=self.family,
            num_inference_steps=self.config.num_inference_steps,
            true_cfg_scale=true_cfg_scale,
            latents=self.initial_latents(sample, dtype),
            device=device,
            dtype=dtype,
        )

    def initial_latents(self, sample: Sample, dtype: torch.dtype) -> Float[Tensor, "S 64"]:
        """The noise of the sample's seed, as in `predict` with that seed; without one it follows from the key."""
        if (seed := sample.seed) is not None:
            return initial_latents(sample, seed, dtype, self.family)
        return noise(sample, generator_of(sample, "image"))


def make_validation_images(
    config: Config, batches: Batches, cache: Mixture | None, scheduler: dict[str, Any]
) -> ValidationImages | None:
    """The images that qwen.yaml schedules, of held-out samples and of the validation cache; None without any."""
    settings = config.validation
    samples = held_out(config, batches, settings.num_images) if settings.num_images else ()
    without, scale = [it.name for it in samples if "empty_prompt_embeds" not in it], max(settings.true_cfg_scale)
    if scale > 1 and without:
        found = f"sample {without[0]}, validation.true_cfg_scale={scale}"
        raise no_empty_prompt("guidance", batches.cache.folder, found, "validation.true_cfg_scale=1")
    samples += tuple(cache[i] for i in range(len(cache))) if cache is not None else ()
    if not samples:
        return None
    samples = tuple({sample.key: sample for sample in samples}.values())  # that cache may have held-out ones, too
    return ValidationImages(samples, settings, config.train.max_steps, scheduler, batches.family)


def save_latents(
    folder: Path, sample: Sample, latents: Float[Tensor, "S 64"], img_shapes: ImgShapes, **words: str
) -> None:
    """Write packed latents of one or more images, with the metadata that `qwen-train decode` and the report need."""
    make_folder(folder)
    metadata = {"img_shapes": json.dumps(img_shapes), "name": sample.name, "prompt": sample.prompt, **words}
    data = save({"latents": latents.cpu().contiguous()}, metadata)
    write_durably(folder / f"{sample.key}.safetensors", *sealed(data))
