"""Validation on samples that are never trained: their loss, and images that the transformer draws of them.

Noise and noise levels follow from a sample's key alone, so what is measured can be compared between runs, whatever
their seed and settings; nothing that training draws at random is touched. No VAE is needed: an image is left as
latents, which `qwen-train decode` decodes. Refused is a run that sets no samples aside.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from safetensors.torch import save
from torch import Tensor

from qwen_cache.errors import ConfigError, TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import ImgShapes
from qwen_cache.settings.load import Config
from qwen_cache.settings.train import ValidationConfig
from qwen_cache.storage.durable import write_durably
from qwen_train.data.batches import Batch, Batches, Drawn, collate
from qwen_train.inference.cached import FOLDER, draw_cached

LEVELS = 4
"""Noise levels at which a sample is measured: one in each quarter of 0..1, where in it the key decides."""
LOSS = "validation_loss"
LOSSES = tuple(f"{LOSS}_q{i + 1}" for i in range(LEVELS))
"""Of each quarter, from little noise to much."""


@dataclass(frozen=True)
class Validation:
    """The samples that a run is measured by, in the order of their keys, and how."""

    samples: tuple[Sample, ...]
    config: ValidationConfig
    edit_mask_weight: float
    scheduler: dict[str, Any]
    """The model's scheduler_config.json."""

    def measures(self, step: int) -> bool:
        return self.config.validation_steps is not None and step % self.config.validation_steps == 0

    def draws(self, step: int) -> bool:
        return bool(self.config.num_images) and step % self.config.images_every_steps == 0

    def losses(self, loss_of: Callable[[Batch], Tensor], accelerator: Any) -> dict[str, float]:
        """The mean loss, and that of each quarter of the noise levels, over the samples of all processes.

        One sample at a time: what one costs does not depend on others, and training needs more memory for it.
        """
        sums = torch.zeros(LEVELS, dtype=torch.float64)
        for sample, counts in turns(self.samples[: self.config.num_samples], accelerator):
            for level, drawn in enumerate(draw(sample)):
                loss = float(loss_of(collate([drawn], self.edit_mask_weight)))
                sums[level] += loss if counts else 0.0
        sums = accelerator.reduce(sums.to(accelerator.device)) if accelerator.num_processes > 1 else sums
        means = (sums / min(len(self.samples), self.config.num_samples)).tolist()
        return {LOSS: sum(means) / LEVELS, **dict(zip(LOSSES, means, strict=True))}

    def images(self, folder: Path, step: int, transformer: Any, accelerator: Any, dtype: torch.dtype) -> None:
        """Draw images, and leave their latents in `folder`/validation/step-N; beside it, once, what is cached."""
        for sample, counts in turns(self.samples[: self.config.num_images], accelerator):
            latents = self.image(sample, transformer, accelerator.device, dtype)
            if not counts:
                continue
            target, controls = sample.img_shapes[:1], sample.img_shapes[1:]
            save_latents(folder / FOLDER / f"step-{step}", sample, latents, target)
            save_latents(folder / FOLDER / "target", sample, sample["image_latents"], target)
            if controls:
                save_latents(folder / FOLDER / "controls", sample, sample["control_latents"], controls)

    def image(
        self, sample: Sample, transformer: Any, device: torch.device, dtype: torch.dtype
    ) -> Float[Tensor, "S 64"]:
        """The latents that the stock pipeline would end with, from the cached embeddings and control latents."""
        return draw_cached(
            sample,
            transformer,
            FlowMatchEulerDiscreteScheduler.from_config(self.scheduler),
            num_inference_steps=self.config.num_inference_steps,
            true_cfg_scale=self.config.true_cfg_scale,
            latents=noise(sample, generator_of(sample, "image")),
            device=device,
            dtype=dtype,
        )


def make_validation(config: Config, batches: Batches, scheduler: dict[str, Any]) -> Validation | None:
    """What qwen.yaml asks for; None where it asks for nothing."""
    settings = config.validation
    if settings.validation_steps is None and not settings.num_images:
        return None
    if not config.train.validation_split:
        raise ConfigError(
            "validation needs samples that are not trained, and there are none",
            found=f"train.validation_split={config.train.validation_split}",
            do="set train.validation_split, such as 0.05, or leave out the section validation",
        )
    wanted = max(settings.num_samples if settings.validation_steps else 0, settings.num_images)
    samples = tuple(batches.cache[i] for i in by_key(batches)[:wanted])
    without = [sample.name for sample in samples if "empty_prompt_embeds" not in sample.row.meta.tensors]
    if settings.num_images and settings.true_cfg_scale > 1 and without:
        raise TrainError(
            "guidance needs the embeddings of the empty prompt, which this cache lacks",
            where=batches.cache.folder,
            found=f"sample {without[0]}, validation.true_cfg_scale={settings.true_cfg_scale}",
            do="set validation.true_cfg_scale=1, or run `qwen-cache build` on the images",
        )
    return Validation(samples, settings, config.train.edit_mask_weight, scheduler)


def by_key(batches: Batches) -> list[int]:
    """The samples that are set aside, in an order that does not depend on how they lie in the cache."""
    keys = batches.cache.column("key").take(batches.validation).to_pylist()
    return [int(i) for _, i in sorted(zip(keys, batches.validation, strict=True))]


@contextmanager
def evaluating(transformer: Any) -> Iterator[None]:
    """Without dropout and gradients."""
    transformer.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        transformer.train()


def turns(samples: Sequence[Sample], accelerator: Any) -> Iterator[tuple[Sample, bool]]:
    """The samples of one process, and whether they count.

    All have equally many, some of them again, because processes that hold weights in parts have to go side by side.
    """
    for first in range(0, len(samples), accelerator.num_processes):
        i = first + accelerator.process_index
        yield samples[i % len(samples)], i < len(samples)


def generator_of(sample: Sample, use: str) -> torch.Generator:
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{use} {sample.key}".encode()) >> 1)


def noise(sample: Sample, generator: torch.Generator) -> Float[Tensor, "S 64"]:
    return torch.randn(sample.row.meta.tensors["image_latents"].shape, generator=generator)


def draw(sample: Sample) -> Iterator[Drawn]:
    """The sample at each of its noise levels."""
    generator = generator_of(sample, "loss")
    place = float(torch.rand((), generator=generator))
    for level in range(LEVELS):
        yield Drawn(sample, (level + place) / LEVELS, noise(sample, generator), without_caption=False)


def save_latents(folder: Path, sample: Sample, latents: Float[Tensor, "S 64"], img_shapes: ImgShapes) -> None:
    """Packed latents of one or more images, with what `qwen-train decode` needs to know of them."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"img_shapes": json.dumps(img_shapes), "name": sample.name, "prompt": sample.prompt}
    write_durably(folder / f"{sample.key}.safetensors", save({"latents": latents.cpu().contiguous()}, about))
