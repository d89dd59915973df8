"""The stock pipelines with parts on their own devices: settings, prompts, LoRAs."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from accelerate import cpu_offload
from diffusers import (
    FlowMatchEulerDiscreteScheduler,
    QwenImage21Pipeline,
    QwenImageEditPipeline,
    QwenImageEditPlusPipeline,
    QwenImagePipeline,
)
from diffusers.utils.accelerate_utils import apply_forward_hook
from diffusers.utils.torch_utils import empty_device_cache
from PIL import Image
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from qwen_cache.encode.text import TextEncoder
from qwen_cache.encode.vae import VaeThatFits, load_vaes
from qwen_cache.errors import ConfigError, DeviceError, SourceError, TrainError, first_line
from qwen_cache.models.devices import choose_device, is_accelerator, torch_dtype
from qwen_cache.models.family import Family, PipelineName
from qwen_cache.models.folder import ModelFolder, check_component
from qwen_cache.models.hardware import Kind
from qwen_cache.models.loading import from_config, load_whole
from qwen_cache.models.quantization import check_quantization
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.sources.images import over_white
from qwen_cache.sources.sizes import calculate_dimensions
from qwen_cache.terminal import console
from qwen_cache.text import plain
from qwen_train.flow import NoiseSchedule
from qwen_train.lora.export import add_to_weights, attach, check_fit
from qwen_train.lora.files import LORA, OFT, AdapterType, WeightedLora, check_base, origin_of, type_of_names
from qwen_train.lora.reader import read_lora
from qwen_train.model.combinations import check_model
from qwen_train.model.loading import TabulatedTransformer2DModel, stock_class, tabulate
from qwen_train.weights import folder_options, load_file, quantize_blocks

# ---- devices ---------------------------------------------------------------------------------------------------------
# The devices of a pipeline's components, and advice when a device has too little memory.
#
# Refused: offloading without an accelerator, and offloading of components on several devices.

Offload = Literal["none", "model", "sequential"]
"""Which weights wait in host memory: none, those of idle components, or those of idle layers."""

FIXES = {
    "encoding the prompt": "run the text encoder elsewhere with --text-device, for example on the cpu, or use "
    "--offload sequential",
    "loading the transformer": "set model.quantization=int8, or use --offload sequential",
    "denoising": "lower --height, --width or --num-images-per-prompt, set model.quantization=int8, or use "
    "--offload sequential",
    "loading the VAE": "run it elsewhere with --vae-device, for example on the cpu",
    "encoding an image": "run the VAE elsewhere with --vae-device, for example on the cpu, or use --offload model",
    "decoding the image": "run the VAE elsewhere with --vae-device, for example on the cpu, use --offload model, "
    "or lower --height, --width or --num-images-per-prompt",
}
"""Advice, by the operation that ran out of memory."""


@dataclass(frozen=True)
class Devices:
    """The device of each component."""

    vae: torch.device
    text: torch.device
    transformer: torch.device


def choose(device: str, vae: str | None, text: str | None, transformer: str | None) -> Devices:
    """The devices named on the command line; `device` is the default."""
    named = {"--vae-device": vae, "--text-device": text, "--transformer-device": transformer}
    return Devices(*(choose_device(name or device, option if name else "--device") for option, name in named.items()))


def check_offload(offload: Offload, devices: Devices) -> None:
    """Raise ConfigError unless VAE and transformer take turns on one accelerator."""
    if offload == "none":
        return
    name = f"predict.offload={offload}"
    if devices.transformer.type == "cpu":
        do = "leave it out: on the CPU all weights are in host memory anyway"
        raise ConfigError(f"{name} is for an accelerator", found="the transformer on the cpu", do=do)
    if devices.vae != devices.transformer:
        raise ConfigError(
            f"with {name}, VAE and transformer take turns on one device",
            found=f"{devices.vae} and {devices.transformer}",
            do="name the same device for --vae-device and --transformer-device, or leave --offload out",
        )


@contextmanager
def memory_for(doing: str, device: torch.device) -> Iterator[None]:
    """Turn an out-of-memory error into a DeviceError with advice; `doing` is a key of FIXES."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise DeviceError(f"{device} has too little memory for {doing}", found=reason, do=FIXES[doing]) from None


# ---- settings --------------------------------------------------------------------------------------------------------
# The settings of `predict` for a model: what is not given has the pipeline's default, what does not fit is refused.
#
# A distilled model (`sample_sigmas` in its model_index.json) is sampled at its own noise levels, as in the stock
# pipeline, which then ignores the number of steps: here a number is refused, since it would have no effect. Refused
# too, before anything large is loaded: settings that the model's pipeline does not have, guidance without a negative
# prompt, a negative prompt without guidance, sides below one step of the model's, and more images than it takes.


@dataclass(frozen=True)
class Sampling:
    """How a model is sampled. Make one with `Sampling.of`."""

    num_inference_steps: int
    sigmas: tuple[float, ...] | None
    """The noise levels that are given, or saved with the model; None for evenly spaced ones."""
    true_cfg_scale: float
    use_kv_cache: bool

    @staticmethod
    def of(model: ModelFolder, config: PredictConfig) -> Sampling:
        """The settings with the model's defaults."""
        config = with_defaults(model, config)
        sigmas = tuple(config.sigmas) if config.sigmas else model.sample_sigmas
        steps, scale = config.num_inference_steps, config.true_cfg_scale
        assert steps is not None
        assert scale is not None
        return Sampling(len(sigmas) if sigmas else steps, sigmas, scale, config.use_kv_cache is not False)


def with_defaults(model: ModelFolder, config: PredictConfig) -> PredictConfig:
    """The settings, with the pipeline's default for each that is None and has one."""
    defaults = model.family.predict_defaults
    return config.model_copy(update={name: value for name, value in defaults.items() if getattr(config, name) is None})


def condition_area(model: ModelFolder, config: PredictConfig) -> int:
    """About the pixels of an image for the text encoder."""
    resolution = with_defaults(model, config).output_resolution
    return model.template.condition_image_size if resolution is None else resolution**2


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_settings(model: ModelFolder, config: PredictConfig, devices: Devices) -> None:
    """Raise ConfigError or ModelError for settings that this model cannot take."""
    check_offload(config.offload, devices)
    family = model.family
    for name, reason in family.not_in_predict.items():
        value = getattr(config, name)
        if value != PredictConfig.model_fields[name].default:
            raise ConfigError(
                f"{family.name} has no predict.{name}: {reason}",
                found=f"predict.{name}={json.dumps(value)}",
                do="leave it out",
            )

    # Steps that would be ignored, or that end in 0 / 0.
    saved = None if config.sigmas else model.sample_sigmas
    steps = config.num_inference_steps
    if saved and steps is not None:
        raise ConfigError(
            "this model is distilled for its own noise levels, so the number of steps would be ignored",
            expected=f"sample_sigmas of its model_index.json: {', '.join(f'{sigma:g}' for sigma in saved)}",
            found=f"predict.num_inference_steps={steps}",
            do="leave it out, or give other noise levels with --sigmas",
        )
    sigmas = config.sigmas or saved
    last = sigmas[-1] if sigmas else 1 / Sampling.of(model, config).num_inference_steps
    scheduler = load_scheduler(model)
    if last == 1 and scheduler.config.shift_terminal:  # stretched by the stock scheduler, it would be 0 / 0
        found = f"--sigmas {last:g}" if config.sigmas else "sample_sigmas 1" if saved else "--num-inference-steps 1"
        what = "the last sigma must be below 1" if sigmas else "one step is too few for this model's scheduler"
        raise ConfigError(what, found=found, do="end with a smaller sigma" if sigmas else "use at least 2")

    # Sides that the pipeline would round down.
    for name, side in (("height", config.height), ("width", config.width)):
        if side is not None and side % family.pixels_per_step:
            below = side // family.pixels_per_step * family.pixels_per_step
            above = below + family.pixels_per_step
            raise ConfigError(
                f"the sides of {family.name} are multiples of {family.pixels_per_step} pixels",
                expected=f"{below} or {above}" if below else f"{above} or more",
                found=f"predict.{name}={side}",
            )

    transformer = model.transformer_config
    if config.tabulated_modulation:
        check_model(transformer)
        if config.dtype != "bfloat16":
            what = "predict.tabulated_modulation needs bfloat16: in float32 there are too many timesteps for a table"
            raise ConfigError(what, found=f"predict.dtype={config.dtype}", do="set one of them back to its default")
    distilled, given = transformer.get("guidance_embeds", False), config.guidance_scale
    if distilled and given is None:
        raise ConfigError(
            "this model is guidance-distilled: it needs predict.guidance_scale", do="give --guidance-scale"
        )
    if given is not None and not distilled:
        raise ConfigError(
            "this model is not guidance-distilled: the guidance scale would be ignored",
            found=f"predict.guidance_scale={given:g}",
            do="leave it out; use --true-cfg-scale with --negative-prompt",
        )
    is_ignored = config.true_cfg_scale is None and family.predict_defaults["true_cfg_scale"] <= 1
    if config.negative_prompt is not None and is_ignored:
        raise ConfigError(
            f"{family.name} generates without guidance by default, which would ignore the negative prompt",
            found=f"predict.negative_prompt={json.dumps(config.negative_prompt, ensure_ascii=False)}",
            do="give --true-cfg-scale too, such as 4, or leave the negative prompt out",
        )


def load_scheduler(model: ModelFolder) -> FlowMatchEulerDiscreteScheduler:
    """The model's scheduler; ModelError if its settings cannot be read."""
    return from_config(FlowMatchEulerDiscreteScheduler, model.scheduler_config)


# ---- prompts ---------------------------------------------------------------------------------------------------------
# Prompts for the stock pipelines, encoded by the cache's text encoder, so that training and inference agree.
#
# Under transformers 5, diffusers 0.42's Edit pipelines give Qwen2.5-VL one-dimensional positions; here it gets the
# positions that it was trained with. Everything else equals the pipelines: the same modules on the same shapes. The
# encoder is loaded on first use, stays on its device for all prompts, and then is freed or leaves, so that no device
# holds it together with the transformer.


def encode_prompts(
    model: ModelFolder,
    images: Sequence[Image.Image],
    prompt: str,
    negative_prompt: str | None,
    devices: Devices,
    dtype: torch.dtype,
    offload: Offload = "none",
    *,
    area: int,
) -> dict[str, Tensor]:
    """The pipeline's arguments in place of the prompts, on the transformer's device; see `PromptEncoder.arguments`.

    The encoder is freed.
    """
    encoder = PromptEncoder(model, devices.text, dtype, offload)
    embeds = encoder.arguments(images, prompt, negative_prompt, area)
    encoder.free()
    return {name: tensor.to(devices.transformer) for name, tensor in embeds.items()}


class Embedded(NamedTuple):
    """Encoded prompts, padded on the right."""

    embeds: Tensor
    """`[B, L, D]`"""
    mask: Tensor
    """`[B, L]`: 1 where there is a token."""
    is_image: Tensor
    """`[B, L]`: where it is a token of an image."""


@dataclass
class PromptEncoder:
    """The text encoder: loaded on first use, kept until it is freed.

    With `offload` of `model` its weights are on the device from a prompt until `leave`; of `sequential`, one layer's.
    """

    model: ModelFolder
    device: torch.device
    dtype: torch.dtype
    offload: Offload = "none"
    _encoder: TextEncoder | None = None

    def arguments(
        self, images: Sequence[Image.Image], prompt: str, negative_prompt: str | None, area: int
    ) -> dict[str, Tensor]:
        """A pipeline's arguments in place of the prompts for `images` of any size, resized to about `area` pixels.

        They are `prompt_embeds` and `prompt_embeds_mask`, for Qwen-Image-2.1 also `image_pad_mask`; with a negative
        prompt also the same, named `negative_…`.
        """
        resized = [p.resize(calculate_dimensions(area, p.size), Image.Resampling.LANCZOS) for p in images]
        arguments: dict[str, Tensor] = {}
        for kind, text in (("", prompt), ("negative_", negative_prompt)):
            if text is not None:
                embeds, mask, is_image = self.embed([text], resized)
                arguments |= {f"{kind}prompt_embeds": embeds, f"{kind}prompt_embeds_mask": mask}
                arguments |= {f"{kind}image_pad_mask": is_image} if self.model.family.joint_sequence else {}
        return arguments

    def embed(self, prompts: Sequence[str], images: Sequence[Image.Image]) -> Embedded:
        """The prompts about the resized `images`, padded as in the pipelines.

        In Qwen-Image-2.1 all prompts share all images, whose transparency is laid over white. In the 20B family images
        are split evenly over the prompts; ValueError if that is impossible.
        """
        shared = self.model.family.joint_sequence
        images = [over_white(image) for image in images] if shared else images
        per_prompt, remainder = divmod(len(images), len(prompts))
        if not shared and (remainder or per_prompt > (self.model.max_controls or len(images))):
            raise ValueError(f"{len(images)} images for {len(prompts)} prompts of a {self.model.pipeline}")
        with memory_for("encoding the prompt", self.device):
            encoder = self._load()
            encoded = [
                encoder.encode_whole(images if shared else images[i * per_prompt : (i + 1) * per_prompt], prompt)
                for i, prompt in enumerate(prompts)
            ]
        masks = [row.new_ones(len(row), dtype=torch.long) for row, _ in encoded]
        rows, slots = ([each[i] for each in encoded] for i in range(2))
        return Embedded(*(pad_sequence(each, batch_first=True) for each in (rows, masks, slots)))

    def leave(self) -> None:
        """Make room on the device: weights that are offloaded as a whole wait in host memory for the next prompt."""
        if self._encoder is not None and self._moves_whole:
            self._encoder.model.to("cpu")
            empty_device_cache(self.device.type)

    def free(self) -> None:
        """Free the encoder's memory."""
        self._encoder = None
        gc.collect()
        empty_device_cache(self.device.type)

    @property
    def _offloads(self) -> bool:
        return self.offload != "none" and is_accelerator(self.device)

    @property
    def _moves_whole(self) -> bool:
        return self._offloads and self.offload == "model"

    def _load(self) -> TextEncoder:
        if self._encoder is None:
            by_layer = self._offloads and self.offload == "sequential"
            encoder = TextEncoder(self.model, torch.device("cpu") if by_layer else self.device, self.dtype)
            if by_layer:
                encoder.run_on(self.device)  # its weights come layer by layer
                cpu_offload(encoder.model, self.device)
            self._encoder = encoder
        elif self._moves_whole:
            self._encoder.model.to(self.device)
        return self._encoder


# ---- loras -----------------------------------------------------------------------------------------------------------
# LoRAs of a pipeline: added by the stock loader, each with a weight; as adapters, or merged into the base weights.
#
# A LoKr, LoHa or OFT, which the stock pipelines do not load, is added by peft, in float32. Refused before anything
# large is loaded: a file that `lora/reader.py` refuses, a LoRA of another base (the error names the first layer that
# does not fit), a weight for an OFT, which has no scale, several types at once without merging, and merging into
# quantised weights, which would round the LoRA away. Pickles are never opened.

UNPACKED = "generate with the unquantised model, or with model.quantization=int8 or fp8"
UNREADABLE = (ValueError, RuntimeError, KeyError, OSError, SafetensorError)


def check_loras(
    model: ModelFolder, loras: Sequence[WeightedLora], merge: bool, quantization: str, *, tabulated: bool = False
) -> None:
    """Raise an error unless every LoRA fits this model's transformer; of the model, only config.json is read."""
    if not loras:
        if merge:
            raise ConfigError("there is nothing to merge", found="--merge", do="name a LoRA with --lora")
        return
    folder = model.component("transformer")
    kind = TabulatedTransformer2DModel if tabulated else stock_class(folder)
    config = model.transformer_config
    if merge and (quantization != "none" or "quantization_config" in config):
        do = "generate without --merge, or merge into the unquantised model: `qwen-train export --to merged`"
        raise ConfigError("a LoRA merged into quantised weights would be rounded away", found="--merge", do=do)
    with torch.device("meta"):
        transformer = from_config(kind, config)
    layers = {
        name: (layer.out_features, layer.in_features)
        for name, layer in transformer.named_modules()
        if isinstance(layer, nn.Linear)
    }
    kinds = {lora.file: _type(lora.file) for lora in loras}
    if len(titles := sorted({each.title for each in kinds.values()})) > 1 and not merge:
        do = "add --merge, which merges one after the other"
        raise ConfigError("adapters of several types need --merge", found=", ".join(titles), do=do)
    for lora in loras:
        if kinds[lora.file] == OFT and lora.weight != 1:
            raise ConfigError("an OFT has no scale", where=lora.file, expected="weight 1", found=lora.weight)
    for lora in loras:
        check_base(kinds[lora.file], quantization, config, lora.file, UNPACKED)
        check_fit(read_lora(lora.file), layers, f"{lora.file}: ")
        origin = origin_of(lora.file)
        if origin.get("pipeline", model.pipeline) != model.pipeline:
            base = f"{origin.get('model')} ({origin['pipeline']})"
            what = (
                f"trained on {base}, but used with {model.pipeline}: expect images that differ from those in training"
            )
            text = f"warning: {plain(lora.file)}: {plain(what)}"
            console().print(text, style="yellow", markup=False)


def load_loras(pipeline: Any, loras: Sequence[WeightedLora], merge: bool = False) -> None:
    """Load the LoRAs with the stock loader, other types by peft, and merge them if `merge`."""
    names = _adapter_names(loras)
    if any(_type(lora.file) != LORA for lora in loras):
        _load_by_peft(pipeline, dict(zip(names, loras, strict=True)), merge)
        return
    for name, lora in zip(names, loras, strict=True):
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Already found a `peft_config`")  # several are intended
                state, settings = read_lora(lora.file).prefixed()
                pipeline.load_lora_into_transformer(
                    state, pipeline.transformer, adapter_name=name, metadata=settings, _pipeline=pipeline
                )
        except UNREADABLE as error:
            raise TrainError(f"the LoRA cannot be loaded: {first_line(error)}", where=lora.file) from None
    if loras:
        set_weights(pipeline, loras)
    if merge:
        pipeline.fuse_lora(adapter_names=names)
        pipeline.unload_lora_weights()


def set_weights(pipeline: Any, loras: Sequence[WeightedLora]) -> None:
    """Give the LoRAs that `load_loras` has loaded, and not merged, other weights; none is an OFT."""
    pipeline.set_adapters(_adapter_names(loras), [lora.weight for lora in loras])


def _adapter_names(loras: Sequence[WeightedLora]) -> list[str]:
    return [f"lora_{number}" for number in range(1, len(loras) + 1)]


def _load_by_peft(pipeline: Any, loras: dict[str, WeightedLora], merge: bool) -> None:
    """Add adapters of one type, or merge adapters of any type one after the other."""
    for name, lora in loras.items():
        try:
            if merge:
                add_to_weights(read_lora(lora.file), pipeline.transformer, lora.weight)
            else:
                attach(read_lora(lora.file), pipeline.transformer, name)
        except UNREADABLE as error:
            raise TrainError(f"the LoRA cannot be loaded: {first_line(error)}", where=lora.file) from None
    if merge:
        return
    if _type(next(iter(loras.values())).file) == OFT:
        pipeline.transformer.set_adapter(list(loras))
    else:
        set_weights(pipeline, list(loras.values()))


def _type(file: Path) -> AdapterType:
    """LoRA for what cannot be read, too: reading says why."""
    try:
        with safe_open(file, framework="np") as opened:
            return type_of_names(opened.keys())
    except UNREADABLE:
        return LORA


# ---- pipeline --------------------------------------------------------------------------------------------------------
# The stock pipelines of diffusers, each component on its own device.
#
# Arguments and results are the stock pipelines', bit for bit on the same devices. Only two things are overridden: the
# moves of tensors between components, and the text encoder (prompts.py), which is loaded for the first prompt, never
# for `prompt_embeds`, and leaves a shared device before VAE and transformer come. An image too large for the memory of
# the VAE's device is processed in tiles. Editing pipelines take images; `without_images` is the pipeline that takes
# none.

Prompt = str | list[str] | None


def load_pipeline(
    model: ModelFolder,
    config: PredictConfig,
    devices: Devices,
    *,
    quantization: Kind = "none",
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
        vae = PlacedVae(*load_vaes(model, dtype), devices.vae)
        if offload == "none":
            vae.to(devices.vae)
    stock = stock_class(folder)
    kind = TabulatedTransformer2DModel if tabulated else stock
    place = devices.transformer
    check_quantization(quantization, "model.quantization", place)
    with memory_for("loading the transformer", place):
        if model.transformer is None:
            options = folder_options(folder, quantization, place)
            transformer = load_whole(kind, folder, torch_dtype=dtype, **options)
        else:
            transformer = load_file(kind, model, dtype, quantization).requires_grad_(False)
        quantize_blocks(transformer, quantization, place, offloaded=offload != "none")
        if tabulated:
            tabulate(transformer, model.transformer_weights, NoiseSchedule.of_config(scheduler.config))
        if offload == "none":
            transformer.to(devices.transformer)
        transformer.register_forward_pre_hook(partial(_check_text_length, model.family), with_kwargs=True)
        parts: dict[str, Any] = dict.fromkeys(part for part in model.facts.encoder_parts if part != "vae")
        if model.facts.tokenizer == "processor":
            parts |= {"processor": NoProcessor(), "sample_sigmas": model.sample_sigmas and list(model.sample_sigmas)}
        pipeline = PIPELINES[model.pipeline](scheduler=scheduler, vae=vae, transformer=transformer, **parts)
        pipeline.devices = devices
        pipeline.prompt_encoder = PromptEncoder(model, devices.text, dtype, offload)
        load_loras(pipeline, loras, merge)
    _enable_offload(pipeline, offload)
    return pipeline


def _check_text_length(family: Family, _: nn.Module, args: object, arguments: Mapping[str, Any]) -> None:
    """SourceError if a pipeline calls its transformer with a text that is longer than the RoPE table beside the images.

    A forward pre-hook, since the pipeline alone knows all sizes; torch's own error would end all other images too.
    """
    sizes, length = arguments["img_shapes"][0], arguments["encoder_hidden_states"].shape[1]
    most = family.longest_text([sizes[-1], *sizes[:-1]] if family.target_last else sizes)
    if length > most and "img_mask" in arguments:  # among its rows are those of images
        length = int((~arguments["img_mask"][0]).sum())
    if length > most:
        what = f"the text has {length} tokens, the transformer takes {most} beside images of these sizes"
        raise SourceError(what, do="shorten the prompt")


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
    """The stock VAE: moves its inputs to its device, and processes an image too large for it in tiles.

    `other` decodes in its place, if there is one.
    """

    def __init__(self, vae: Any, other: Any | None, vae_device: torch.device) -> None:
        super().__init__()
        self.vae, self.other, self.vae_device = vae, other, vae_device

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
            vae = self.vae if self.other is None else self.other
            return VaeThatFits(vae).decode(latents.to(self.vae_device), return_dict)


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
