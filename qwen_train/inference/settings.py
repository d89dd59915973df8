"""The settings of `predict` for a model: what is not given has the pipeline's default, what does not fit is refused.

A distilled model (`sample_sigmas` in its model_index.json) is sampled at its own noise levels, as in the stock
pipeline, which then ignores the number of steps: here a number is refused, since it would have no effect. Refused too,
before anything large is loaded: settings that the model's pipeline does not have, guidance without a negative prompt,
a negative prompt without guidance, sides below one step of the model's, and more images than it takes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from diffusers import FlowMatchEulerDiscreteScheduler

from qwen_cache.errors import ConfigError
from qwen_cache.models.encoders import from_config
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.sections import PredictConfig
from qwen_cache.terminal import plural
from qwen_train.inference.devices import Devices, check_offload
from qwen_train.model.modulation import check_model


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
    _check_names(model, config)
    _check_steps(model, config)
    _check_sides(model, config)
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
    if config.negative_prompt is not None and config.true_cfg_scale is None:
        _check_default_guidance(model, config.negative_prompt)


def _check_names(model: ModelFolder, config: PredictConfig) -> None:
    """Raise ConfigError for a setting that the model's pipeline does not have."""
    for name, reason in model.family.not_in_predict.items():
        value = getattr(config, name)
        if value != PredictConfig.model_fields[name].default:
            raise ConfigError(
                f"{model.family.name} has no predict.{name}: {reason}",
                found=f"predict.{name}={json.dumps(value)}",
                do="leave it out",
            )


def load_scheduler(model: ModelFolder) -> FlowMatchEulerDiscreteScheduler:
    """The model's scheduler; ModelError if its settings cannot be read."""
    return from_config(FlowMatchEulerDiscreteScheduler, model.scheduler_config)


def _check_steps(model: ModelFolder, config: PredictConfig) -> None:
    """Raise ConfigError for steps that would be ignored, or that end in 0 / 0."""
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


def _check_sides(model: ModelFolder, config: PredictConfig) -> None:
    """Raise ConfigError for a side that the pipeline would round down."""
    step = model.family.pixels_per_step
    for name in ("height", "width"):
        side = getattr(config, name)
        if side is not None and side % step:
            below = side // step * step
            raise ConfigError(
                f"the sides of {model.family.name} are multiples of {step} pixels",
                expected=f"{below} or {below + step}" if below else f"{step} or more",
                found=f"predict.{name}={side}",
            )


def _check_default_guidance(model: ModelFolder, negative_prompt: str) -> None:
    """Raise ConfigError for a negative prompt that the pipeline's default would ignore."""
    if model.family.predict_defaults["true_cfg_scale"] <= 1:
        raise ConfigError(
            f"{model.family.name} generates without guidance by default, which would ignore the negative prompt",
            found=f"predict.negative_prompt={json.dumps(negative_prompt, ensure_ascii=False)}",
            do="give --true-cfg-scale too, such as 4, or leave the negative prompt out",
        )


def check_count(model: ModelFolder, images: int) -> None:
    """Raise ConfigError if the pipeline takes fewer control images."""
    most = model.max_controls
    if most is not None and images > most:
        raise ConfigError(f"{model.pipeline} takes {plural(most, 'image')}", found=images, do="give fewer")
