"""Draw with what was trained: the stock pipeline, each part on the device that was named.

The prompt is encoded by the encoder of the cache, because the stock Edit pipelines of diffusers 0.42 give Qwen2.5-VL
one-dimensional positions under transformers 5; so training and inference agree. Everything after it is the stock
pipeline.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import torch
from diffusers import AutoencoderKLQwenImage, FlowMatchEulerDiscreteScheduler, QwenImageTransformer2DModel
from PIL import Image

from qwen_cache.config import PredictConfig
from qwen_cache.console import plural
from qwen_cache.encode.images import open_rgb
from qwen_cache.encode.loading import load_whole
from qwen_cache.encode.sizes import Size, calculate_dimensions
from qwen_cache.encode.template import TEMPLATES, VAE_IMAGE_SIZE
from qwen_cache.encode.text import TextEncoder
from qwen_cache.encode.tiles import VaeThatFits
from qwen_cache.format.errors import ConfigError, SourceError, TrainError
from qwen_cache.format.sample import PIXELS_PER_TOKEN
from qwen_cache.model_folder import ModelFolder
from qwen_train.decode import decode_latents
from qwen_train.export import find_lora
from qwen_train.model.weights import quantization_options


@dataclass(frozen=True)
class Devices:
    """Where each part runs."""

    vae: torch.device
    text: torch.device
    transformer: torch.device


def predict(
    model: ModelFolder,
    pictures: Sequence[Image.Image],
    prompt: str,
    config: PredictConfig,
    devices: Devices,
    lora: Path | None = None,
    quantization: str = "none",
) -> Image.Image:
    """The picture that the model draws for `prompt` about `pictures` (RGB); its transformer quantised or not."""
    check_pictures(model, pictures)
    lora_file = find_lora(lora) if lora is not None else None
    dtype = getattr(torch, config.dtype)
    embeds = encode_prompts(model, pictures, prompt, config.negative_prompt, devices, dtype)
    pipeline = load_pipeline(model, devices, dtype, quantization)
    check_steps(config.num_inference_steps, pipeline.scheduler)
    if lora_file is not None:
        load_lora_weights(pipeline, lora_file)
    width, height = output_size(pictures, config)
    latents = pipeline(
        **({"image": list(pictures) if len(pictures) > 1 else pictures[0]} if pictures else {}),
        **embeds,
        true_cfg_scale=config.true_cfg_scale if config.negative_prompt is not None else 1.0,
        num_inference_steps=config.num_inference_steps,
        height=height,
        width=width,
        generator=torch.Generator().manual_seed(config.seed),
        output_type="latent",
    ).images
    return decode_latents(pipeline.vae, latents, (width, height))


def open_pictures(paths: Sequence[Path]) -> list[Image.Image]:
    """The control pictures, as a build opens them."""
    pictures = []
    for path in paths:
        try:
            pictures.append(open_rgb(path.read_bytes(), str(path)))
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror}", where=path) from None
    return pictures


def check_pictures(model: ModelFolder, pictures: Sequence[Image.Image]) -> None:
    """As many as the pipeline takes."""
    most = model.max_controls
    if model.takes_controls and not pictures:
        raise ConfigError(f"{model.pipeline} edits a picture", do="give one with --image")
    if most is not None and len(pictures) > most:
        raise ConfigError(
            f"{model.pipeline} takes {plural(most, 'picture')}", found=len(pictures), do="leave out some --image"
        )


def check_steps(steps: int, scheduler: Any) -> None:
    """The stock scheduler divides 0 by 0 when it stretches a single step to `shift_terminal`."""
    if steps == 1 and scheduler.config.shift_terminal:
        raise ConfigError("one step is too few for this model's scheduler", found="--steps 1", do="use at least 2")


def encode_prompts(
    model: ModelFolder,
    pictures: Sequence[Image.Image],
    prompt: str,
    negative_prompt: str | None,
    devices: Devices,
    dtype: torch.dtype,
) -> dict[str, torch.Tensor]:
    """`prompt_embeds` and, where one is given, `negative_prompt_embeds`, with their masks, for the pipeline."""
    encoder = TextEncoder(model, devices.text, dtype)
    area = TEMPLATES[model.pipeline].condition_image_size
    seen = [p.resize(calculate_dimensions(area, p.size), Image.Resampling.LANCZOS) for p in pictures]
    arguments: dict[str, torch.Tensor] = {}
    for name, text in (("prompt_embeds", prompt), ("negative_prompt_embeds", negative_prompt)):
        if text is not None:
            embeds = encoder.encode_whole(seen, text)[None].to(devices.transformer)
            arguments |= {name: embeds, f"{name}_mask": embeds.new_ones(embeds.shape[:2], dtype=torch.long)}
    return arguments


def load_pipeline(model: ModelFolder, devices: Devices, dtype: torch.dtype, quantization: str = "none") -> Any:
    """The stock pipeline without its text encoder, the other parts where they belong."""
    stock = getattr(diffusers, model.pipeline)

    class Placed(stock):  # type: ignore[misc, valid-type]
        """The stock pipeline, with tensors moved at the seam between transformer and VAE."""

        @property
        def _execution_device(self) -> torch.device:
            return devices.transformer

        def _encode_vae_image(self, image: torch.Tensor, generator: Any) -> torch.Tensor:
            latents: torch.Tensor = super()._encode_vae_image(image.to(devices.vae), generator)
            return latents.to(devices.transformer)

    vae = load_whole(AutoencoderKLQwenImage, model.part("vae"), torch_dtype=dtype).to(devices.vae)
    folder = model.part("transformer")
    options = quantization_options(folder, quantization, dtype)
    transformer = load_whole(QwenImageTransformer2DModel, folder, torch_dtype=dtype, **options)
    parts = {"text_encoder": None, "tokenizer": None} | ({"processor": None} if model.takes_controls else {})
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model.part("scheduler"))
    pipeline = Placed(scheduler=scheduler, vae=vae, transformer=transformer.to(devices.transformer), **parts)
    pipeline.vae = VaeThatFits(vae)
    return pipeline


def load_lora_weights(pipeline: Any, file: Path) -> None:
    """Load a LoRA by the stock loader."""
    try:
        pipeline.load_lora_weights(str(file.parent), weight_name=file.name)
    except (ValueError, RuntimeError, KeyError) as error:
        raise TrainError(f"the LoRA does not fit this model: {str(error).splitlines()[0]}", where=file) from None
    if not getattr(pipeline.transformer, "peft_config", None):  # the stock loader only warns
        raise TrainError("the LoRA does not fit this model: none of its weights belong to the transformer", where=file)


def output_size(pictures: Sequence[Image.Image], config: PredictConfig) -> Size:
    """Width and height of the result: those asked for, else the pipelines' own: about 1024² as the last picture is."""
    size = pictures[-1].size if pictures else (1, 1)
    width, height = calculate_dimensions(VAE_IMAGE_SIZE, size)
    width, height = config.width or width, config.height or height
    return width // PIXELS_PER_TOKEN * PIXELS_PER_TOKEN, height // PIXELS_PER_TOKEN * PIXELS_PER_TOKEN
