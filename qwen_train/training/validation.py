"""Validation: loss and images."""

from __future__ import annotations

import heapq
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
import xxhash
from diffusers.schedulers.scheduling_flow_match_euler_discrete import FlowMatchEulerDiscreteScheduler
from jaxtyping import Float
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor

from qwen_cache.errors import ConfigError
from qwen_cache.format.cache import Sample
from qwen_cache.format.sample import LATENT_CHANNELS, ImgShapes, token_count
from qwen_cache.models.family import Family
from qwen_cache.models.loading import from_config
from qwen_cache.settings.load import Config
from qwen_cache.settings.sections import ValidationConfig
from qwen_cache.storage.files import make_folder, unless_in_use, write_durably
from qwen_cache.storage.remembered import sealed
from qwen_cache.terminal import plural
from qwen_train.data.batches import Batch, Batches, NoiseDraw, NoisedSample, collate
from qwen_train.data.checks import no_empty_prompt
from qwen_train.data.samples import Mixture
from qwen_train.data.validation_cache import validation_strengths
from qwen_train.inference.cached import generate_cached, initial_latents
from qwen_train.lora.adapter import TRAINED as ADAPTER
from qwen_train.lora.adapter import at_strength
from qwen_train.run import (
    EDIT_MASK,
    LEVELS,
    LIKENESS_NAME,
    LOSS,
    LOSSES,
    PAIR_LOSSES,
    PREFERENCE_ACCURACY,
    PREFERENCE_MARGIN,
    SAMPLE_LOSSES,
    STEP,
    TRAINED,
    VALIDATION,
)

T = TypeVar("T")
WRITTEN = re.compile(
    rf"({STEP.pattern}|target|controls)/[0-9a-f]{{32}}(-[0-9]+)?\.(safetensors|png)"
    rf"|({SAMPLE_LOSSES}|{PAIR_LOSSES})/{STEP.pattern}\.json|{re.escape(LIKENESS_NAME)}"
)
"""The files that a run and its commands write into its folder for validation (`run`)."""

# ---- validation ------------------------------------------------------------------------------------------------------
# Validation on held-out samples: their loss.
#
# Noise and noise levels depend only on a sample's key, so losses are comparable between runs with any seed and
# settings, and training's random state is not touched. A run that holds out no samples is refused.


@dataclass(frozen=True)
class Validation:
    """The samples for validation, in the order of their keys, and the settings."""

    samples: tuple[Sample, ...]
    config: ValidationConfig
    edit_mask_weight: float
    family: Family
    directed: bool = False
    """True if the two prompts of sliders are needed."""

    def measures_loss(self, step: int, max_steps: int) -> bool:
        """True if the loss is measured after this step; step 0 is before training."""
        every = self.config.validation_steps
        return every is not None and (step % every == 0 or step == max_steps)

    def losses(
        self, loss_of: Callable[[Batch], Tensor], accelerator: Any, *, rejected: bool = False
    ) -> Float[Tensor, "N 4"]:
        """The loss of each sample of all processes in each quarter of the noise levels, or of its `rejected` image.

        One sample at a time: a sample's loss then does not depend on others, and it takes less memory than training.
        """
        losses = torch.zeros(len(self.samples), LEVELS, dtype=torch.float64)
        for i, is_filler in rank_samples(range(len(self.samples)), accelerator):
            for level, noised in enumerate(noised_samples(self.samples[i], rejected=rejected)):
                batch = collate([noised], self.edit_mask_weight, family=self.family, directed=self.directed)
                loss = float(loss_of(batch))
                losses[i, level] = 0.0 if is_filler else loss
        return accelerator.reduce(losses.to(accelerator.device)) if accelerator.num_processes > 1 else losses

    def write(self, out: Path, step: int, losses: Float[Tensor, "N 4"], pairs: Float[Tensor, "N 4"] | None) -> None:
        """Write the losses to `out`/validation/losses, and those of `pairs` beside it, by the keys of their samples."""
        keys = [sample.key for sample in self.samples]
        for name, each in {SAMPLE_LOSSES: losses, PAIR_LOSSES: pairs}.items():
            if each is not None:
                make_folder(out / VALIDATION / name)
                data = json.dumps(dict(zip(keys, each.tolist(), strict=True))).encode("utf-8")
                write_durably(out / VALIDATION / name / f"step-{step}.json", data)


def mean_losses(losses: Float[Tensor, "N 4"]) -> dict[str, float]:
    """The means over the samples: overall, and per quarter of the noise levels."""
    means = losses.mean(dim=0).tolist()
    return {LOSS: sum(means) / LEVELS, **dict(zip(LOSSES, means, strict=True))}


def preferences(gained: Float[Tensor, "N 4"]) -> dict[str, float]:
    """The accuracy of preference, and its margin, from how much more targets `gained` than rejected images.

    The margin of a pair is how much more the LoRA has added to the loss of the rejected image than to that of the
    target, as a mean over the noise levels; the accuracy is the share of pairs with a positive one, where 0 counts
    half. It is 0.5 before training.
    """
    margins = -gained.mean(dim=1)
    accuracy = (margins > 0).double() + (margins == 0).double() / 2
    return {PREFERENCE_ACCURACY: float(accuracy.mean()), PREFERENCE_MARGIN: float(margins.mean())}


def make_validation(config: Config, batches: Batches) -> Validation | None:
    """The validation that qwen.yaml schedules; None without any."""
    settings = config.validation
    if settings.validation_steps is None:
        return None
    samples = held_out(config, batches, settings.num_samples)
    directed = config.train.slider.direction == "prompts"
    return Validation(samples, settings, config.train.edit_mask_weight, batches.family, directed)


def held_out(config: Config, batches: Batches, count: int) -> tuple[Sample, ...]:
    """The first `count` held-out samples in the order of their keys; ConfigError without any."""
    if not config.train.validation_split:
        raise ConfigError(
            "validation needs held-out samples, and there are none",
            found=f"train.validation_split={config.train.validation_split}",
            do="set train.validation_split, such as 0.05, or remove the section validation",
        )
    samples = first_by_key(batches, batches.validation, count)
    if not samples:
        raise ConfigError(
            "validation needs held-out samples, and the only ones are of a cache with teacher: true",
            found=f"train.validation_split={config.train.validation_split}",
            do="raise train.validation_split",
        )
    return samples


def first_by_key(batches: Batches, positions: NDArray[np.int64], count: int) -> tuple[Sample, ...]:
    """The first `count` samples at these positions of the cache by their keys, which do not depend on its order.

    None of a teacher's cache: their images are not what is learnt.
    """
    keys = batches.cache.column("key").take(positions).to_pylist()
    own = (pair for pair in zip(keys, positions.tolist(), strict=True) if not batches.cache.of_cache(pair[1]).teacher)
    return tuple(batches.cache[i] for _, i in heapq.nsmallest(count, own))


def forget_validation(folder: Path, step: int) -> None:
    """Remove the losses and images of steps after `step`, which a resumed run repeats; before the first step all.

    Else `best`, the report and the tracker would have those of a run that was killed among those of this one. Files
    that no run writes stay: a folder of this name may hold a source, or a cache.
    """
    own = folder / VALIDATION
    for path in [*own.glob("*"), *own.glob("*/*")]:
        if not WRITTEN.fullmatch(path.relative_to(own).as_posix()):
            continue
        match = STEP.fullmatch(path.stem) or STEP.fullmatch(path.parent.name)
        if step == 0 or (match and int(match[1]) > step):
            with unless_in_use():
                path.unlink(missing_ok=True)
            with suppress(OSError):  # it has other files yet
                path.parent.rmdir()


@contextmanager
def evaluating(transformer: Any) -> Iterator[None]:
    """Disable dropout and gradients while entered."""
    transformer.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        transformer.train()


def rank_samples(samples: Sequence[T], accelerator: Any) -> Iterator[tuple[T, bool]]:
    """The samples of this rank, or their numbers, and whether each is a filler, whose result is discarded.

    Fillers give every rank the same number of samples: ranks that hold shards of the weights must run in step.
    """
    for first in range(0, len(samples), accelerator.num_processes):
        i = first + accelerator.process_index
        yield samples[i % len(samples)], i >= len(samples)


def torch_generator(sample: Sample, use: str) -> torch.Generator:
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"{use} {sample.key}".encode()) >> 1)


def noise(sample: Sample, generator: torch.Generator) -> Float[Tensor, "S 64"]:
    """Noise for the target, whether the sample has one or it is to be generated."""
    return torch.randn(token_count(sample.img_shapes[:1]), LATENT_CHANNELS, generator=generator)


def noised_samples(sample: Sample, *, rejected: bool = False) -> Iterator[NoisedSample]:
    """The sample at each of its noise levels, at an offset within their quarters that depends on its key.

    With `rejected` its rejected image at the same levels.
    """
    generator = torch_generator(sample, "loss")
    offset = float(torch.rand((), generator=generator))
    for level in range(LEVELS):
        state = generator.get_state()
        draw = NoiseDraw((level + offset) / LEVELS, noise(sample, generator))
        noised = NoisedSample(sample, (draw,), without_caption=False)
        yield noised.rejected(state) if rejected else noised


# ---- validation images -----------------------------------------------------------------------------------------------
# Images that are generated during training: of held-out or trained samples, and of all of a validation cache.
#
# Their noise depends only on the sample, so the images of all steps and runs can be compared, and training's random
# state is not touched. No VAE is needed: images are stored as latents for `qwen-train decode`.


@dataclass(frozen=True)
class ValidationImages:
    """The samples to generate, those of the cache in training first, and the settings."""

    samples: tuple[Sample, ...]
    config: ValidationConfig
    max_steps: int
    scheduler: dict[str, Any]
    """The model's scheduler_config.json."""
    family: Family
    trained: frozenset[str] = frozenset()
    """The keys of those that are trained."""
    strengths: Sequence[float] = (1.0,)
    """The strengths of the LoRA; several with a single scale."""

    @property
    def count(self) -> int:
        """Images at a time."""
        return len(self.samples) * len(self.config.true_cfg_scale) * len(self.strengths)

    @property
    def summary(self) -> str:
        """How many images are generated, when and how, in words."""
        scales = self.config.true_cfg_scale
        count = plural(self.count, "image")
        guided = f" at true_cfg_scale {' and '.join(f'{scale:g}' for scale in scales)}" if scales != [1] else ""
        every = plural(self.config.images_every_steps, "step")
        weights = ", ".join(f"{each:g}" for each in self.strengths)
        guided += f" at lora_weight {weights}" if self.strengths != (1,) else ""
        return f"{count}{guided}, before training, every {every} and after the last"

    def due(self, step: int) -> bool:
        """True if images are generated after this step; step 0 is before training."""
        return step % self.config.images_every_steps == 0 or step == self.max_steps

    def write(self, folder: Path, step: int, transformer: Any, accelerator: Any, dtype: torch.dtype) -> None:
        """Write the latents of all images to `folder`/validation/step-N, targets and controls beside it.

        Each process generates its share. With several scales or strengths a file has one image for each.
        """
        scales, told = self.config.true_cfg_scale, dict[str, str]()
        if len(scales) > 1:
            told = {"true_cfg_scale": json.dumps(scales)}
        elif self.strengths != (1.0,):
            told = {"lora_weight": json.dumps(self.strengths)}
        for sample, is_filler in rank_samples(self.samples, accelerator):
            images = []
            for strength in self.strengths:
                with at_strength(transformer, ADAPTER, strength):
                    images += [self.generate(sample, transformer, accelerator.device, dtype, each) for each in scales]
            if is_filler:
                continue
            target, controls = sample.img_shapes[:1], sample.img_shapes[1:]
            at = folder / VALIDATION / f"step-{step}"
            save_latents(at, sample, torch.cat(images), target * len(images), told)
            if "image_latents" in sample:
                words = {TRAINED: "true"} if sample.key in self.trained else {}
                mask = {EDIT_MASK: sample[EDIT_MASK]} if EDIT_MASK in sample else {}
                save_latents(folder / VALIDATION / "target", sample, sample["image_latents"], target, words, mask)
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
        return noise(sample, torch_generator(sample, "image"))


def make_validation_images(
    config: Config, batches: Batches, cache: Mixture | None, scheduler: dict[str, Any]
) -> ValidationImages | None:
    """The images that qwen.yaml schedules, of the cache in training and of the validation cache; None without any."""
    settings = config.validation
    samples = cached_images(config, batches)
    without, scale = [it.name for it in samples if "empty_prompt_embeds" not in it], max(settings.true_cfg_scale)
    if scale > 1 and without:
        found = f"sample {without[0]}, validation.true_cfg_scale={scale}"
        raise no_empty_prompt("guidance", batches.cache.folder, found, "validation.true_cfg_scale=1")
    samples += tuple(cache[i] for i in range(len(cache))) if cache is not None else ()
    if not samples:
        return None
    samples = tuple({sample.key: sample for sample in samples}.values())  # that cache may have held-out ones, too
    trained = trained_of(batches, [sample.key for sample in samples])
    strengths = validation_strengths(config)
    return ValidationImages(samples, settings, config.train.max_steps, scheduler, batches.family, trained, strengths)


def trained_of(batches: Batches, keys: Sequence[str]) -> frozenset[str]:
    """The keys among `keys` that are trained; none where samples are known only once they are encoded."""
    if not batches.cache.has_index:
        return frozenset()
    trained = batches.cache.column("key").take(batches.training)
    return frozenset(trained.filter(pc.is_in(trained, pa.array(keys))).to_pylist())


def cached_images(config: Config, batches: Batches) -> tuple[Sample, ...]:
    """The samples of validation.num_images: held-out ones, or trained ones in a run that holds out none."""
    count = config.validation.num_images
    if not count:
        return ()
    if config.train.validation_split:
        return held_out(config, batches, count)
    return first_by_key(batches, batches.training, count)


def save_latents(
    folder: Path,
    sample: Sample,
    latents: Float[Tensor, "S 64"],
    img_shapes: ImgShapes,
    words: Mapping[str, str] = MappingProxyType({}),
    others: Mapping[str, Tensor] = MappingProxyType({}),
) -> None:
    """Write packed latents of one or more images, with what `qwen-train decode`, `best` and the report need."""
    make_folder(folder)
    metadata = {"img_shapes": json.dumps(img_shapes), "name": sample.name, "prompt": sample.prompt, **words}
    data = save({name: each.cpu().contiguous() for name, each in {"latents": latents, **others}.items()}, metadata)
    write_durably(folder / f"{sample.key}.safetensors", *sealed(data))
