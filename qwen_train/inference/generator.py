"""Generate images: encode prompts, then run the stock pipeline, each component on its device.

The text encoder is freed before the transformer is loaded, so no device holds both. Settings, LoRAs and the number of
images are checked before anything large is loaded. A signal ends the generation after the current step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from PIL import Image

from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.terminal import counting
from qwen_train.inference.devices import Devices, memory_for
from qwen_train.inference.loras import check_loras
from qwen_train.inference.pipeline import load_pipeline
from qwen_train.inference.prompts import encode_prompts
from qwen_train.inference.settings import Sampling, check_count, check_settings, condition_area
from qwen_train.lora.files import WeightedLora
from qwen_train.signals import Signals

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
