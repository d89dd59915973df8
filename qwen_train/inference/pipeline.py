"""The stock pipelines of diffusers, each component on its own device.

Arguments and results are the stock pipelines', bit for bit on the same devices. Only two things are overridden: the
moves of tensors between components, and the text encoder (prompts.py), which is loaded for the first prompt, never for
`prompt_embeds`, and leaves a shared device before VAE and transformer come. An image too large for the memory of the
VAE's device is processed in tiles. Editing pipelines take images; `without_images` is the pipeline that takes none.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, ClassVar

import torch
from diffusers import (
    QwenImage21Pipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from diffusers.utils.accelerate_utils import apply_forward_hook
from torch import Tensor, nn

from qwen_cache.encode.vae import VaeThatFits, vae_class
from qwen_cache.models.devices import torch_dtype
from qwen_cache.models.encoders import load_whole
from qwen_cache.models.family import PipelineName
from qwen_cache.models.folder import ModelFolder, check_component
from qwen_cache.settings.sections import PredictConfig
from qwen_train.flow import NoiseSchedule
from qwen_train.inference.devices import Devices, Offload, check_offload, memory_for
from qwen_train.inference.loras import load_loras
from qwen_train.inference.prompts import Embedded, PromptEncoder
from qwen_train.inference.settings import load_scheduler
from qwen_train.lora.files import WeightedLora
from qwen_train.model.modulation import TabulatedTransformer2DModel, tabulate
from qwen_train.model.stock import stock_class, trained_class
from qwen_train.weights import load_file, quantization_options

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

    Only the settings `dtype`, `offload` and `tabulated_modulation` are used here; the others apply to the call. Raises
    ModelError for a damaged transformer.
    """
    offload, tabulated, dtype = config.offload, config.tabulated_modulation, torch_dtype(config.dtype)
    check_offload(offload, devices)
    folder = model.component("transformer")
    if model.transformer is None:
        check_component(folder)
    scheduler = load_scheduler(model)
    with memory_for("loading the VAE", devices.vae):
        vae = PlacedVae(load_whole(vae_class(model), model.component("vae"), torch_dtype=dtype), devices.vae)
        if offload == "none":
            vae.to(devices.vae)
    stock = stock_class(folder)
    kind = TabulatedTransformer2DModel if tabulated else stock
    whole = trained_class({"_class_name": stock.__name__}, folder).NOT_QUANTISED
    place, offloaded = devices.transformer, offload != "none"
    with memory_for("loading the transformer", place):
        if model.transformer is None:
            options = quantization_options(folder, quantization, dtype, whole, place, offloaded=offloaded)
            transformer = load_whole(kind, folder, torch_dtype=dtype, **options)
        else:
            transformer = load_file(kind, model, dtype, quantization, place, offloaded=offloaded).requires_grad_(False)
        if tabulated:
            tabulate(transformer, model.transformer_weights, NoiseSchedule.of_config(scheduler.config))
        if offload == "none":
            transformer.to(devices.transformer)
        parts: dict[str, Any] = dict.fromkeys(part for part in model.facts.encoder_parts if part != "vae")
        if model.facts.tokenizer == "processor":
            parts |= {"processor": NoProcessor(), "sample_sigmas": model.sample_sigmas and list(model.sample_sigmas)}
        pipeline = PIPELINES[model.pipeline](scheduler=scheduler, vae=vae, transformer=transformer, **parts)
        pipeline.devices = devices
        pipeline.prompt_encoder = PromptEncoder(model, devices.text, dtype, offload)
        load_loras(pipeline, loras, merge)
    _enable_offload(pipeline, offload)
    return pipeline


def replace_loras(pipeline: Any, loras: Sequence[WeightedLora], offload: Offload) -> None:
    """Load other LoRAs in place of the pipeline's, which are not merged; the base weights are not loaded again."""
    with memory_for("loading the transformer", pipeline.devices.transformer):
        if offload != "none":
            pipeline.remove_all_hooks()  # they would keep the weights of the layers that they know
        pipeline.unload_lora_weights()
        load_loras(pipeline, loras)
    _enable_offload(pipeline, offload)


def _enable_offload(pipeline: Any, offload: Offload) -> None:
    if offload == "model":
        pipeline.enable_model_cpu_offload(device=pipeline.devices.transformer)
    elif offload == "sequential":
        pipeline.enable_sequential_cpu_offload(device=pipeline.devices.transformer)


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

    @property
    def without_images(self) -> Any:
        """The pipeline that generates from prompts alone."""
        return self

    def free_encoder(self) -> None:
        """Free the text encoder's memory until the next prompt."""
        self.prompt_encoder.free()

    def prepare_latents(self, *args: Any, **named: Any) -> Any:
        """The stock method, with which a pipeline's work begins after all prompts: the encoder makes room for it."""
        self.prompt_encoder.leave()
        return super().prepare_latents(*args, **named)  # type: ignore[misc]  # of the stock pipeline

    def _embed(self, prompt: Prompt, image: Any, device: Any, dtype: Any = None) -> Embedded:
        """Encode prompts in place of the stock text encoder."""
        prompts = prompt if isinstance(prompt, list) else [prompt or ""]
        images = [] if image is None else image if isinstance(image, list) else [image]
        embeds, mask, is_image = self.prompt_encoder.embed(prompts, images)
        device = device or self._execution_device
        return Embedded(embeds.to(device=device, dtype=dtype), mask.to(device), is_image.to(device))


class PlacedImages(Placed):
    """A mixin for the pipelines that take images."""

    def _encode_vae_image(self, image: Tensor, generator: Any) -> Tensor:
        latents: Tensor = super()._encode_vae_image(image, generator)  # type: ignore[misc]  # of the stock pipeline
        return latents.to(self._execution_device)


class PlacedEdit(PlacedImages):
    """A mixin for the Edit pipelines."""

    scheduler: Any  # of the stock pipeline, like all of these
    vae: Any
    transformer: Any
    maybe_free_model_hooks: Any

    @cached_property
    def without_images(self) -> PlacedTextPipeline:
        """Qwen-Image's pipeline with the same components, LoRAs and offloading."""
        parts = {"scheduler": self.scheduler, "vae": self.vae, "transformer": self.transformer}
        text = PlacedTextPipeline(**parts, text_encoder=None, tokenizer=None)
        text.devices, text.prompt_encoder = self.devices, self.prompt_encoder
        text.maybe_free_model_hooks = self.maybe_free_model_hooks  # a module has the hooks of one pipeline
        return text

    def _get_qwen_prompt_embeds(
        self, prompt: Prompt = None, image: Any = None, device: Any = None, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        return self._embed(prompt, image, device, dtype)[:2]


class PlacedEditPipeline(PlacedEdit, QwenImageEditPipeline):  # type: ignore[misc]  # diffusers is not typed for mypy
    """Qwen-Image-Edit."""


class PlacedEditPlusPipeline(PlacedEdit, QwenImageEditPlusPipeline):  # type: ignore[misc]
    """Qwen-Image-Edit-2509 and 2511."""


class PlacedTextPipeline(Placed, QwenImagePipeline):  # type: ignore[misc]
    """Qwen-Image."""

    def _get_qwen_prompt_embeds(
        self, prompt: Prompt = None, device: Any = None, dtype: Any = None
    ) -> tuple[Tensor, Tensor]:
        return self._embed(prompt, None, device, dtype)[:2]


class NoProcessor:
    """Takes the place of Qwen-Image-2.1's processor: the constructor counts tokens for the stock text encoder alone."""

    def __init__(self) -> None:
        self.tokenizer = self

    def apply_chat_template(self, messages: Any, **options: Any) -> list[list[int]]:
        return [[]]

    def encode(self, text: str) -> list[int]:
        return [0]


class PlacedQwenImage21Pipeline(PlacedImages, QwenImage21Pipeline):  # type: ignore[misc]
    """Qwen-Image-2.1. Embeddings of images can be given too, with a mask of their rows, which stock never passes on."""

    _image_rows: Sequence[tuple[Tensor | None, Tensor | None]] = ()
    """The given embeddings, and which of their rows are images."""

    def __call__(
        self,
        *args: Any,
        image_pad_mask: Tensor | None = None,
        negative_image_pad_mask: Tensor | None = None,
        **named: Any,
    ) -> Any:
        """The stock call; the masks go with `prompt_embeds` and `negative_prompt_embeds`, given by name."""
        given = (named.get("prompt_embeds"), named.get("negative_prompt_embeds"))
        self._image_rows = tuple(zip(given, (image_pad_mask, negative_image_pad_mask), strict=True))
        try:
            return super().__call__(*args, **named)
        finally:
            self._image_rows = ()

    def encode_prompt(self, *args: Any, **named: Any) -> Any:
        embeds = named.get("prompt_embeds")
        if embeds is not None and named.get("image_pad_mask") is None:
            named["image_pad_mask"] = next((mask for given, mask in self._image_rows if given is embeds), None)
        return super().encode_prompt(*args, **named)

    def _get_qwen_prompt_embeds(
        self, prompt: Prompt = None, image: Any = None, device: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        return self._embed(prompt, image, device)


PIPELINES: dict[PipelineName, type[Any]] = {
    "QwenImageEditPipeline": PlacedEditPipeline,
    "QwenImageEditPlusPipeline": PlacedEditPlusPipeline,
    "QwenImagePipeline": PlacedTextPipeline,
    "QwenImage21Pipeline": PlacedQwenImage21Pipeline,
}
