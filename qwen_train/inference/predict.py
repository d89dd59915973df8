"""Draw with what was trained: prompts first, then the stock pipeline, each part on the device that was named.

The text encoder has gone before the transformer comes, so that no device holds both. What cannot be drawn is refused
before anything large is loaded. A signal ends the drawing after the step in hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image

from qwen_cache.console import counting, plural
from qwen_cache.errors import ConfigError
from qwen_cache.models.folder import ModelFolder
from qwen_cache.settings.inference import PredictConfig
from qwen_cache.storage.durable import write_durably
from qwen_train.inference.devices import Devices, check_offload, memory_for
from qwen_train.inference.jobs import marked
from qwen_train.inference.loras import WeightedLora, check_loras
from qwen_train.inference.pipeline import load_pipeline
from qwen_train.inference.prompts import encode_prompts
from qwen_train.model.modulation import check_model
from qwen_train.signals import Signals

FORMATS = ("PNG", "JPEG", "WEBP", "TIFF", "BMP")
ARGUMENTS = {
    *("num_inference_steps", "sigmas", "guidance_scale"),
    *("num_images_per_prompt", "max_sequence_length", "height", "width"),
}
"""Of `predict` in qwen.yaml: what the pipelines take by the same name."""


@dataclass(frozen=True)
class Drawn:
    """The pictures, and after how many steps they were interrupted, if they were."""

    pictures: list[Image.Image]
    interrupted_after: int | None = None


def predict(
    model: ModelFolder,
    pictures: Sequence[Image.Image],
    prompt: str,
    config: PredictConfig,
    devices: Devices,
    *,
    loras: Sequence[WeightedLora] = (),
    merge: bool = False,
    quantization: str = "none",
    save_interrupted: bool = False,
) -> Drawn:
    """What the model draws for `prompt` about `pictures` (RGB); its transformer quantised or not, with LoRAs or not."""
    check_count(model, len(pictures))
    check_settings(model, config, devices)
    check_loras(model, loras, merge, quantization, tabulated=config.tabulated_modulation)
    dtype = getattr(torch, config.dtype)
    negative_prompt = config.negative_prompt if config.true_cfg_scale > 1 else None
    embeds = encode_prompts(model, pictures, prompt, negative_prompt, devices, dtype, config.offload)
    pipeline = load_pipeline(model, config, devices, quantization=quantization, loras=loras, merge=merge)
    return draw(pipeline, pictures, embeds, config, save_interrupted=save_interrupted)


def draw(
    pipeline: Any,
    pictures: Sequence[Image.Image],
    embeds: Mapping[str, torch.Tensor],
    config: PredictConfig,
    *,
    save_interrupted: bool = False,
    one_of_many: bool = False,
) -> Drawn:
    """Call the pipeline. The first signal ends it after the step in hand, with its picture as it is then, or none."""
    pipeline.set_progress_bar_config(disable=True)
    done = 0
    steps = len(config.sigmas or ()) or config.num_inference_steps
    with Signals() as signals, counting("drawing", steps, transient=one_of_many) as advance:

        def on_step_end(pipeline: Any, step: int, timestep: Any, tensors: dict[str, Any]) -> dict[str, Any]:
            nonlocal done
            done += 1
            advance(1)
            if signals.stop and not save_interrupted:
                raise KeyboardInterrupt
            pipeline._interrupt = signals.stop
            return {}

        with memory_for("denoising", pipeline.devices.transformer):
            images = pipeline(
                **({"image": list(pictures) if len(pictures) > 1 else pictures[0]} if pictures else {}),
                **embeds,
                **config.model_dump(include=ARGUMENTS),
                true_cfg_scale=config.true_cfg_scale if config.negative_prompt is not None else 1.0,
                generator=torch.Generator().manual_seed(config.seed),
                callback_on_step_end=on_step_end,
            ).images
        if signals.stop and not save_interrupted:  # while the picture was decoded
            raise KeyboardInterrupt
    return Drawn(images, done if pipeline.interrupt else None)


# ---- what is drawn about ---------------------------------------------------------------------------------------------


def check_count(model: ModelFolder, pictures: int) -> None:
    """As many as the pipeline takes."""
    most = model.max_controls
    if model.takes_controls and not pictures:
        raise ConfigError(f"{model.pipeline} edits a picture", do="give one with --image")
    if most is not None and pictures > most:
        raise ConfigError(f"{model.pipeline} takes {plural(most, 'picture')}", found=pictures, do="leave some out")


def check_settings(model: ModelFolder, config: PredictConfig, devices: Devices) -> None:
    """What this model cannot do with these settings."""
    check_offload(config.offload, devices)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model.part("scheduler"))
    last = config.sigmas[-1] if config.sigmas else 1 / config.num_inference_steps
    if last == 1 and scheduler.config.shift_terminal:  # the stock scheduler would divide 0 by 0 when it stretches that
        found = f"--sigmas {last:g}" if config.sigmas else "--steps 1"
        what = "the last sigma is below 1" if config.sigmas else "one step is too few for this model's scheduler"
        raise ConfigError(what, found=found, do="end with a smaller one" if config.sigmas else "use at least 2")
    transformer = json.loads((model.part("transformer") / "config.json").read_text(encoding="utf-8"))
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
            do="leave it out; --true-cfg-scale guides it, with --negative-prompt",
        )


def check_guidance(config: PredictConfig, true_cfg_scale: float | None) -> None:
    """The stock pipelines draw without guidance when there is no negative prompt; who types a scale wants it."""
    if true_cfg_scale is not None and true_cfg_scale > 1 and config.negative_prompt is None:
        raise ConfigError(
            "without a negative prompt there is nothing to guide away from",
            found=f"--true-cfg-scale {true_cfg_scale:g}",
            do='give one: --negative-prompt " "',
        )


# ---- where pictures go -----------------------------------------------------------------------------------------------


def picture_format(out: Path) -> str:
    """As its name ends."""
    extensions = Image.registered_extensions()
    found = extensions.get(out.suffix.lower())
    if found not in FORMATS:
        raise ConfigError("no format for pictures", where="--out", expected=".png, .jpg or .webp", found=out)
    return found


def places(out: Path, count: int) -> list[Path]:
    """Of so many pictures: `out`, or with numbers (out-1.png, out-2.png) where there are several."""
    return [out] if count == 1 else [out.with_stem(f"{out.stem}-{number}") for number in range(1, count + 1)]


def save_pictures(pictures: Sequence[Image.Image], out: Path) -> list[Path]:
    """Write them to their places; none is ever half written.

    A PNG says that it was drawn here, so that `run_jobs` may draw it anew.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    kind, paths = picture_format(out), places(out, len(pictures))
    for path, picture in zip(paths, pictures, strict=True):
        data = BytesIO()
        picture.save(data, kind, **({"pnginfo": marked("by itself")} if kind == "PNG" else {}))
        write_durably(path, data.getvalue())
    return paths
