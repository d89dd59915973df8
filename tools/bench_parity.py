"""Other ways to generate with a LoRA, and how far each is from `qwen-train predict`: a table for each model.

    python tools/bench_parity.py [t2i edit edit-plus edit-2511 qwen-image-21]

A random LoRA on a tiny model in float32, two controls if it takes them, 20 steps with guidance, the same noise, areas
of 128² in place of 1024² with the shift of 1024². The columns are the relative difference (of norms) of the velocity at
the first step and of the latents after the last, and the mean difference of the pixels in levels of 255. The first row
is the image without the LoRA: a difference as large as that is as large as all that the LoRA does. On random weights,
this tells what differs, not how it looks.

Rows of ComfyUI compute by its rules on the stock transformer, since ComfyUI itself does not run here. They are those of
Comfy-Org/ComfyUI (comfy_extras/nodes_qwen.py at ed26919, comfy_extras/nodes_cfg.py at dd2bb67, comfy/model_sampling.py
at 2fd2083, comfy/supported_models.py at 01f03bb) and, an earlier state, comfyanonymous/ComfyUI
(comfy/ldm/qwen_image/model.py at 01f4512, comfy/text_encoders/qwen_vl.py at 0ac7426, comfy/model_base.py at 003617c).
`ReferenceLatent` and the scheduler `simple` were read in copies without a commit.
"""

from __future__ import annotations

import contextlib
import io
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from unittest.mock import patch

import diffusers
import numpy as np
import peft
import torch
import transformers
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from diffusers.pipelines.qwenimage21 import pipeline_qwenimage21
from make_demo_data import photograph
from make_tiny_model import VARIANTS, make_tiny_model
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import Qwen2Tokenizer, Qwen2VLProcessor, Qwen3VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import PredictConfig
from qwen_train.flow import NoiseSchedule
from qwen_train.inference import pipeline as predict_pipeline
from qwen_train.inference.generator import Generator
from qwen_train.inference.images import COMPONENTS
from qwen_train.lora.adapter import lora_weights, write_lora
from qwen_train.lora.export import export
from qwen_train.lora.files import WeightedLora
from qwen_train.model.loading import stock_class

CONTROLS = {"t2i": 0, "edit": 1, "edit-plus": 2, "edit-2511": 2, "qwen-image-21": 2}
PIXELS = {1024**2: 128**2, 384**2: 112**2}
"""Small areas in place of the pipelines' own."""
PROMPT, NEGATIVE, SCALE, STEPS, SEED = "make it night, and keep the 黑白 sign", " ", 4.0, 20, 7
WIDTH, HEIGHT = 128, 128
MU = NoiseSchedule().mu(1024**2 // 256)
"""The published schedulers' shift at 1024²."""
COMFYUI_SHIFTS = {"qwen-image-21": 0.69}
"""The shift of `comfy/supported_models.py`, as mu; 1.15 for the 20B models."""
LIST = "the control in a list: `image=[image]`"
AS_IT_IS = "stock diffusers, prompts encoded by it"
Context = AbstractContextManager[Any]
Rule = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""The guided velocity, of the velocities of both prompts, the latents and the noise level."""


@dataclass(frozen=True)
class Generated:
    """An image on the way."""

    velocity: Tensor
    """At the first step, with guidance."""
    latents: Tensor
    pixels: np.ndarray[Any, Any]

    def difference(self, other: Generated) -> tuple[float, float, float]:
        """Relative differences of velocity and latents; mean difference of the pixels in levels."""
        relative = (_relative(getattr(self, name), getattr(other, name)) for name in ("velocity", "latents"))
        return *relative, float(np.abs(self.pixels.astype(float) - other.pixels).mean())


def _relative(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


# ---- models ----------------------------------------------------------------------------------------------------------


class EditProcessor(Qwen2VLProcessor):  # type: ignore[misc]
    """The stock processor without its video half, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **named: Any):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **named)


class Processor21(Qwen3VLProcessor):  # type: ignore[misc]
    """The stock processor without its video half, which needs torchvision."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **named: Any):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **named)


def stock_pipeline(folder: Path) -> Any:
    """diffusers' pipeline as `from_pretrained` makes it."""
    parts: dict[str, Any] = {}
    if (folder / "processor").is_dir():
        if "21" in folder.name:
            parts["processor"] = Processor21.from_pretrained(folder / "processor")
        else:
            images = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
            parts["processor"] = EditProcessor(images, Qwen2Tokenizer.from_pretrained(folder / "tokenizer"))
    pipeline = diffusers.DiffusionPipeline.from_pretrained(folder, dtype=torch.float32, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def write_random_lora(model: Path, folder: Path) -> Path:
    """A random LoRA of all attention layers, as a run writes it, with an alpha that is not its rank."""
    transformer = stock_class(model / "transformer").from_pretrained(model / "transformer")
    torch.manual_seed(1)
    layers = "to_q|to_k|to_v|to_out.0|add_q_proj|add_k_proj|add_v_proj|to_add_out".replace(".", r"\.")
    settings = {"r": 4, "lora_alpha": 2, "target_modules": rf".*\.({layers})", "init_lora_weights": False}
    transformer.add_adapter(peft.LoraConfig(**settings))
    folder.mkdir()
    write_lora(transformer, lora_weights(transformer), folder / "pytorch_lora_weights.safetensors", {})
    return folder


@contextmanager
def small_areas() -> Iterator[None]:
    """The pipelines' own rule for sizes, at small areas."""
    modules = (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus, pipeline_qwenimage21, predict_pipeline)
    with contextlib.ExitStack() as stack:
        for module in modules:
            rule: Callable[..., Any] = module.calculate_dimensions

            def small(area: int, shape: Any, rule: Callable[..., Any] = rule) -> Any:
                return rule(PIXELS.get(area, area), shape)

            stack.enter_context(patch.object(module, "calculate_dimensions", small))
        yield


@dataclass
class Case:
    """A model, its LoRA and its controls."""

    kind: str
    model: Path
    lora: Path
    images: list[Image.Image]

    @cached_property
    def stock(self) -> Any:
        """diffusers' pipeline with the LoRA."""
        pipeline = stock_pipeline(self.model)
        pipeline.load_lora_weights(str(self.lora))
        return pipeline

    @property
    def corrected(self) -> Context:
        """Tells the text encoder which tokens are an image's, as `predict` does and diffusers 0.42 does not."""
        if self.kind not in ("edit", "edit-plus", "edit-2511"):
            return contextlib.nullcontext()
        return prompts_as_trained(self.stock)

    def predict(self, quantization: Any = "none", *, loras: bool = True, **settings: Any) -> Generated:
        """The image of `qwen-train predict`."""
        sampled: dict[str, Any] = {"num_inference_steps": STEPS, "seed": SEED, "height": HEIGHT, "width": WIDTH}
        sampled |= {"negative_prompt": NEGATIVE, "true_cfg_scale": SCALE, "dtype": "float32"}
        model = open_model(str(self.model), COMPONENTS)
        devices = predict_pipeline.choose("cpu", None, None, None)
        file = WeightedLora(self.lora / "pytorch_lora_weights.safetensors", 1.0)
        options: dict[str, Any] = {"merge": settings.pop("merge", False), "quantization": quantization}
        config = PredictConfig(**{**sampled, **settings})
        generator = Generator(model, config, devices, [file] if loras else [], **options)
        pipeline = generator.pipeline if self.images else generator.pipeline.without_images
        with recorded(pipeline) as calls, contextlib.redirect_stderr(io.StringIO()):
            image = generator.generate(self.images, PROMPT).images[0]
        return Generated(calls[0][0], calls[-1][1], np.asarray(image))

    def diffusers(self, pipeline: Any | None = None, rule: Rule | None = None, **changes: Any) -> Generated:
        """The image of the stock pipeline."""
        pipeline = self.stock if pipeline is None else pipeline
        arguments: dict[str, Any] = {"prompt": PROMPT, "negative_prompt": NEGATIVE, "true_cfg_scale": SCALE}
        arguments |= {"num_inference_steps": STEPS, "height": HEIGHT, "width": WIDTH}
        arguments |= {"image": self.images if self.images[1:] else self.images[0]} if self.images else {}
        arguments |= {"generator": torch.Generator().manual_seed(SEED)}
        with recorded(pipeline, rule) as calls:
            image = pipeline(**arguments | changes).images[0]
        return Generated(calls[0][0][:1], calls[-1][1][:1], np.asarray(image))


@contextmanager
def recorded(pipeline: Any, rule: Rule | None = None) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The velocity and the next latents of each step; with `rule`, the guidance is that of `rule`."""
    steps, step = list[tuple[Tensor, Tensor]](), pipeline.scheduler.step
    velocities: list[Tensor] = []
    hook = pipeline.transformer.register_forward_hook(lambda *call: velocities.append(call[2][0]))

    def spy(velocity: Tensor, t: Tensor, latents: Tensor, **named: Any) -> Any:
        if rule is not None:
            conditional, negative = (each[:, : latents.shape[1]] for each in velocities)
            velocity = rule(conditional, negative, latents, float(t) / 1000)
        velocities.clear()
        result = step(velocity, t, latents, **named)
        steps.append((velocity.clone(), result[0].clone()))
        return result

    try:
        with patch.object(pipeline.scheduler, "step", spy):
            yield steps
    finally:
        hook.remove()


# ---- ways ------------------------------------------------------------------------------------------------------------


@contextmanager
def prompts_as_trained(pipeline: Any) -> Iterator[None]:
    def pass_types(encoder: Any, args: Any, named: dict[str, Any]) -> Any:
        return args, named | {"mm_token_type_ids": (named["input_ids"] == encoder.config.image_token_id).int()}

    hook = pipeline.text_encoder.register_forward_pre_hook(pass_types, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def schedule(pipeline: Any, shift: float) -> Iterator[None]:
    """A fixed shift without the stretch to a lowest level: ComfyUI's scheduler `simple`."""
    changes = {"use_dynamic_shifting": False, "shift": shift, "shift_terminal": None}
    fixed = FlowMatchEulerDiscreteScheduler.from_config({**pipeline.scheduler.config, **changes})
    with patch.object(pipeline, "scheduler", fixed):
        yield


def plain(conditional: Tensor, negative: Tensor, latents: Tensor, sigma: float) -> Tensor:
    return negative + SCALE * (conditional - negative)


def by_channels(tokens: Tensor) -> Tensor:
    """`[1, S, 16, 4]`: the channels of each latent of a token."""
    return tokens.unflatten(-1, (16, 4))


def cfg_norm(conditional: Tensor, negative: Tensor, latents: Tensor, sigma: float) -> Tensor:
    """ComfyUI's CFGNorm: the estimate of the clean latents is made no longer than the conditional one's."""
    clean, guided = (latents - sigma * each for each in (conditional, plain(conditional, negative, latents, sigma)))
    ratio = by_channels(clean).norm(dim=-2, keepdim=True) / by_channels(guided).norm(dim=-2, keepdim=True)
    return (latents - (by_channels(guided) * ratio.clamp(max=1)).flatten(-2)) / sigma


def cfg_norm_before(conditional: Tensor, negative: Tensor, latents: Tensor, sigma: float) -> Tensor:
    """ComfyUI's CFGNorm with pre_cfg: as diffusers, but for each latent in place of each token of 2×2."""
    guided = plain(conditional, negative, latents, sigma)
    lengths = (by_channels(each).norm(dim=-2, keepdim=True) for each in (conditional, guided))
    before, after = lengths
    return (by_channels(guided) * (before / after)).flatten(-2)


@contextmanager
def references(pipeline: Any) -> Iterator[None]:
    """Controls as TextEncodeQwenImageEditPlus resizes them: by areas, to sides that are multiples of 8."""

    def dimensions(area: int, ratio: float) -> tuple[int, int]:
        width = math.sqrt(PIXELS[area] * ratio)
        unit = 8 if area == 1024**2 else 1
        return round(width / unit) * unit, round(width / ratio / unit) * unit

    def resized(image: Image.Image, height: int, width: int) -> Tensor:
        pixels = torch.from_numpy(np.asarray(image, np.float32) / 255).permute(2, 0, 1)[None]
        return interpolate(pixels, (height, width), mode="area")

    def for_text(image: Image.Image, height: int, width: int) -> Image.Image:
        return Image.fromarray((resized(image, height, width)[0].permute(1, 2, 0) * 255).round().byte().numpy())

    def for_vae(image: Image.Image, height: int, width: int) -> Tensor:
        return 2 * resized(image, height, width) - 1

    with (
        patch.object(pipeline_qwenimage_edit_plus, "calculate_dimensions", dimensions),
        patch.object(pipeline.image_processor, "resize", for_text),
        patch.object(pipeline.image_processor, "preprocess", for_vae),
    ):
        yield


@contextmanager
def text_after_the_target(pipeline: Any) -> Iterator[None]:
    """Text positions that begin after the target, as in ComfyUI, in place of after the largest image."""
    rope = pipeline.transformer.pos_embed

    def forward(video_fhw: Any, device: Any = None, max_txt_seq_len: Any = None) -> tuple[Tensor, Tensor]:
        (_, height, width), *_ = shapes = video_fhw[0]
        images, _ = type(rope).forward(rope, [shapes], device=device, max_txt_seq_len=max_txt_seq_len)
        begin = max(height // 2, width // 2)
        return images, rope.pos_freqs[begin : begin + int(max_txt_seq_len)]

    with patch.object(rope, "forward", forward):
        yield


def other_ways(case: Case, folder: Path) -> Iterator[tuple[str, Generated]]:
    """Each with its name."""
    pipeline, kind, is_21 = case.stock, case.kind, case.kind == "qwen-image-21"

    def comfyui(way: Context, **changes: Any) -> Generated:
        with case.corrected, way:
            return case.diffusers(**changes)

    yield "`predict` without the LoRA", case.predict(loras=False)
    if kind in ("edit", "edit-plus", "edit-2511"):
        yield AS_IT_IS, case.diffusers()
        with case.corrected:
            yield "stock diffusers, prompts as trained", case.diffusers()
    else:
        yield AS_IT_IS, case.diffusers()
    comfy = stock_pipeline(case.model)
    comfy.load_lora_weights(str(export(case.lora, "comfyui", folder / "comfyui.safetensors")))
    with prompts_as_trained(comfy) if not is_21 and kind != "t2i" else contextlib.nullcontext():
        yield "the same with the file of `export --to comfyui`", case.diffusers(comfy)
    yield "`predict --merge`", case.predict(merge=True)
    yield "`predict` in bfloat16", case.predict(dtype="bfloat16")
    yield "`predict` in bfloat16, int8 transformer", case.predict("int8", dtype="bfloat16")
    yield "without a negative prompt: no guidance", case.predict(negative_prompt=None)
    yield "the empty negative prompt in place of one space", case.predict(negative_prompt="")
    if kind == "t2i":
        long = f"{PROMPT}. " * 4
        prompts = {"prompt": [PROMPT, long], "negative_prompt": [NEGATIVE, NEGATIVE]}
        generators = [torch.Generator().manual_seed(seed) for seed in (SEED, 8)]
        yield "beside a longer prompt in one call", case.diffusers(**prompts, generator=generators)
    if kind == "edit":
        with case.corrected:
            yield LIST, case.diffusers(image=case.images)
    if not is_21:
        yield "guidance without the rescaling of norms", comfyui(contextlib.nullcontext(), rule=plain)
        yield "ComfyUI: CFGNorm", comfyui(contextlib.nullcontext(), rule=cfg_norm)
        yield "ComfyUI: CFGNorm with pre_cfg", comfyui(contextlib.nullcontext(), rule=cfg_norm_before)
    default = COMFYUI_SHIFTS.get(kind, 1.15)
    yield f"ComfyUI: its shift, e^{default}", comfyui(schedule(pipeline, math.exp(default)))
    yield "ComfyUI: ModelSamplingAuraFlow with e^mu", comfyui(schedule(pipeline, math.exp(MU)))
    if kind in ("edit-plus", "edit-2511"):
        yield "ComfyUI: controls by TextEncodeQwenImageEditPlus", comfyui(references(pipeline))
        yield "ComfyUI: text positions after the target", comfyui(text_after_the_target(pipeline))


def table(kind: str, folder: Path) -> Iterator[str]:
    """Lines."""
    sizes = ((288, 224), (224, 288))
    names = ("china.jpg", "coffee.png")
    images = [photograph(name).convert("RGB").resize(size) for name, size in zip(names, sizes, strict=True)]
    model = make_tiny_model(folder / kind, kind)
    scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(model / "scheduler")
    scheduler.register_to_config(base_shift=MU, max_shift=MU)
    scheduler.save_pretrained(model / "scheduler")
    case = Case(kind, model, write_random_lora(model, folder / f"lora-{kind}"), images[: CONTROLS[kind]])
    with small_areas():
        reference = case.predict()
        yield f"{kind} | velocity | latents | pixels"
        yield "--- | --- | --- | ---"
        for name, generated in other_ways(case, folder / f"lora-{kind}"):
            velocity, latents, pixels = generated.difference(reference)
            yield f"{name} | {velocity:.1e} | {latents:.1e} | {pixels:.2f}"


def main() -> int:
    diffusers.utils.logging.disable_progress_bar()
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        for kind in sys.argv[1:] or VARIANTS:
            for line in table(kind, Path(folder)):
                print(line, flush=True)
            print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
