"""The stock pipelines of diffusers, each component on its own device.

Arguments and results are the stock pipelines', bit for bit on the same devices. Only two things are overridden: the
moves of tensors between components, and the text encoder (prompts.py), which is loaded for the first prompt, never for
`prompt_embeds`. An image too large for the memory of the VAE's device is processed in tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from diffusers import (
    AutoencoderKLQwenImage,
    FlowMatchEulerDiscreteScheduler,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.family import PipelineName
from qwen_cache.models.folder import ModelFolder
from qwen_cache.models.loading import load_whole
from qwen_cache.settings.inference import PredictConfig
from qwen_train.flow import NoiseSchedule
from qwen_train.inference.devices import Devices, check_offload, memory_for
from qwen_train.inference.loras import WeightedLora, load_loras
from qwen_train.inference.prompts import PromptEncoder
from qwen_train.model.modulation import TabulatedTransformer2DModel, tabulate
from qwen_train.model.stock import stock_class
from qwen_train.weights import quantization_options

Prompt = str | list[str] | None


def load_pipeline(
    model: ModelFolder,
    config: PredictConfig,
    devices: Devices,
    *,
    quantization: str = "none",
    loras: Sequence[WeightedLora] = (),
    merge: bool = False,
) -> Any:
    """The model's pipeline, called like the stock one; the text encoder is not loaded yet.

    Only the settings `dtype`, `offload` and `tabulated_modulation` are used here; the others apply to the call.
    """
    offload, tabulated, dtype = config.offload, config.tabulated_modulation, torch_dtype(config.dtype)
    check_offload(offload, devices)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model.component("scheduler"))
    with memory_for("loading the VAE", devices.vae):
        vae = PlacedVae(load_whole(AutoencoderKLQwenImage, model.component("vae"), torch_dtype=dtype), devices.vae)
        if offload == "none":
            vae.to(devices.vae)
    folder = model.component("transformer")
    kind = TabulatedTransformer2DModel if tabulated else stock_class(folder)
    options = quantization_options(folder, quantization, dtype, TabulatedTransformer2DModel.NOT_QUANTISED)
    with memory_for("loading the transformer", devices.transformer):
        transformer = load_whole(kind, folder, torch_dtype=dtype, **options)
        if tabulated:
            tabulate(transformer, folder, NoiseSchedule.of_config(scheduler.config))
        if offload == "none":
            transformer.to(devices.transformer)
        parts = {"text_encoder": None, "tokenizer": None} | ({"processor": None} if model.takes_controls else {})
        pipeline = PIPELINES[model.pipeline](scheduler=scheduler, vae=vae, transformer=transformer, **parts)
        pipeline.devices = devices
        pipeline.prompt_encoder = PromptEncoder(model, devices.text, dtype, offload)
        load_loras(pipeline, loras, merge)
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=devices.transformer)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=devices.transformer)
    return pipeline


class PlacedVae(nn.Module):
    """The stock VAE: moves its inputs to its device, and processes an image too large for it in tiles."""

    def __init__(self, vae: Any, vae_device: torch.device) -> None:
        super().__init__()
        self.vae, self.vae_device = vae, vae_device

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("vae"), name)

    @apply_forward_hook  # type: ignore[untyped-decorator]
    def encode(self, pixels: Tensor) -> Any:
        with memory_for("encoding an image", self.vae_device):
            return VaeThatFits(self.vae).encode(pixels.to(self.vae_device))

    @apply_forward_hook  # type: ignore[untyped-decorator]
    def decode(self, latents: Tensor, return_dict: bool = True) -> Any:
        with memory_for("decoding the image", self.vae_device):
            return VaeThatFits(self.vae).decode(latents.to(self.vae_device), return_dict)


class Placed:
    """A mixin for the stock pipelines: devices and the prompt encoder."""

    devices: Devices
    prompt_encoder: PromptEncoder
    # Not offloaded layer by layer: the VAE is small, and tiling needs its weights on the device.
    _exclude_from_cpu_offload: ClassVar[list[str]] = ["vae"]

    @property
    def _execution_device(self) -> torch.device:
        return self.devices.transformer

    def free_encoder(self) -> None:
        """Free the text encoder's memory until the next prompt."""
        self.prompt_encoder.free()

    def _embed(self, prompt: Prompt, image: Any, device: Any, dtype: Any) -> tuple[Tensor, Tensor]:
        """Encode prompts in place of the stock text encoder."""
        prompts = prompt if isinstance(prompt, list) else [prompt or ""]
        images = [] if image is None else image if isinstance(image, list) else [image]
        embeds, mask = self.prompt_encoder.embed(prompts, images)
        device = device or self._execution_device
        return embeds.to(device=device, dtype=dtype), mask.to(device)


class PlacedEdit(Placed):
    """A mixin for the Edit pipelines."""

    def _get_qwen_prompt_embeds(
        self, prompt: Prompt = None, image: Any = None, device: Any = None, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        return self._embed(prompt, image, device, dtype)

    def _encode_vae_image(self, image: Tensor, generator: Any) -> Tensor:
        latents: Tensor = super()._encode_vae_image(image, generator)  # type: ignore[misc]  # of the stock pipeline
        return latents.to(self._execution_device)


class PlacedEditPipeline(PlacedEdit, QwenImageEditPipeline):  # type: ignore[misc]  # diffusers is not typed for mypy
    """Qwen-Image-Edit."""


class PlacedEditPlusPipeline(PlacedEdit, QwenImageEditPlusPipeline):  # type: ignore[misc]
    """Qwen-Image-Edit-2509 and 2511."""


class PlacedTextPipeline(Placed, QwenImagePipeline):  # type: ignore[misc]
    """Qwen-Image."""

    def _get_qwen_prompt_embeds(
        self, prompt: Prompt = None, device: Any = None, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        return self._embed(prompt, None, device, dtype)


PIPELINES: dict[PipelineName, type[Any]] = {
    "QwenImageEditPipeline": PlacedEditPipeline,
    "QwenImageEditPlusPipeline": PlacedEditPlusPipeline,
    "QwenImagePipeline": PlacedTextPipeline,
}
