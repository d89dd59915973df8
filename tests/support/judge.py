"""The reference for the contents of a cache: a stock diffusers pipeline that runs one step on the original images.

The inputs of its transformer are recorded. One correction from outside: diffusers 0.42 does not pass
`mm_token_type_ids` to the text encoder (huggingface/diffusers issue 14194). The reference for targets, which no
pipeline encodes, is plain arithmetic around the stock VAE.

`assert_same` has the tolerances. The processor chooses the kernel, and the kernel the order
of a sum: by instruction set, number of threads, shape of the operands. Two computations of one function on one machine
therefore differ in their last digits as soon as their shapes differ: a prompt on a cached prefix and the whole prompt,
two- and three-dimensional convolutions, a batch and its samples. `torch.equal` is for the same kernels on the same
shapes, and for what is only moved or cast.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import QwenImageEditPipeline, QwenImageEditPlusPipeline, QwenImagePipeline
from diffusers.models.autoencoders.autoencoder_kl_qwenimage import QwenImageUpsample
from diffusers.models.autoencoders.autoencoder_kl_qwenimage21 import QwenImage21Upsample
from PIL import Image
from torch import Tensor
from transformers import Qwen2Tokenizer, Qwen2VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from qwen_cache import open_cache
from qwen_cache.format.cache import Cache, Sample

from .commands import run
from .photographs import photograph

TinyModel = Callable[[str], Path]
Size = tuple[int, int]

PIPELINES = {
    "edit": QwenImageEditPipeline,
    "edit-plus": QwenImageEditPlusPipeline,
    "edit-2511": QwenImageEditPlusPipeline,
    "t2i": QwenImagePipeline,
}
EXACT = 1e-12
"""Relative, float64. Ten thousand units of 2^-53: only another function is further away."""
TOLERANCE = 2**-15
"""Relative, float32, 3e-5. A sum of k products, rounded to u = 2^-24 in any order, is off by about u·sqrt(k), because
roundings are independent; n such layers are off by u·sqrt(k·n), and two computations by twice that. Here k is at most
1176 (a patch of the vision tower) and n about 60: 2·u·sqrt(70000) = 2^-15. Measured with AVX-512 and AVX2: 1e-6."""
AS_FAR = 2.0
"""bfloat16: the limit of our distance from the exact result, relative to stock's. Both round as often and as coarsely,
but in different operations. Lengths of two random errors of 64 independent values have a ratio that varies by
1/sqrt(64) = 12 %, so 2 is five deviations away; of the longest of many rows it varies by less still. Measured with
AVX-512 and with AVX2: 0.99 to 1.01. With shape-dependent kernels (`tests.other_kernels`): 0.8 to 1.2; with every
product off by a digit of bfloat16 as well: 0.8 to 1.5. AMX was not measured."""
VAE_AREA, CONDITION_AREA = 1024 * 1024, 384 * 384
SMALL_AREA = {VAE_AREA: 128 * 128, CONDITION_AREA: 112 * 112}
PHOTOGRAPHS = ("china.jpg", "flower.jpg", "chelsea.png", "coffee.png", "astronaut.png")


# ---- the reference ---------------------------------------------------------------------------------------------------


class StockProcessor(Qwen2VLProcessor):
    """The stock processor without its video half, which needs torchvision."""

    def __init__(self, image_processor=None, tokenizer=None, chat_template=None, **kwargs):
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


@cache
def stock_pipeline(folder: Path, variant: str, dtype: torch.dtype = torch.float32, *, corrected: bool = True) -> Any:
    parts = {}
    if variant != "t2i":
        images = Qwen2VLImageProcessorPil.from_pretrained(folder / "processor")
        parts["processor"] = StockProcessor(images, Qwen2Tokenizer.from_pretrained(folder / "tokenizer"))
    pipeline = PIPELINES[variant].from_pretrained(folder, dtype=dtype, **parts)
    pipeline.set_progress_bar_config(disable=True)
    if corrected:
        pipeline.text_encoder.register_forward_pre_hook(pass_token_types, with_kwargs=True)
    return pipeline


@cache
def exact_pipeline(folder: Path, variant: str) -> Any:
    """The stock pipeline in float64 on weights rounded to bfloat16: bfloat16 without rounding of activations."""
    pipeline = stock_pipeline.__wrapped__(folder, variant, torch.bfloat16)
    for part in (pipeline.text_encoder, pipeline.vae):
        torch.nn.Module.to(part, torch.float64)
    return pipeline


@cache
def without_images(pipeline: Any) -> Any:
    """The stock pipeline of text to image, of the parts of one that edits images."""
    parts = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    bare = PIPELINES["t2i"](**{name: getattr(pipeline, name) for name in parts})
    bare.set_progress_bar_config(disable=True)
    return bare


@contextmanager
def without_float32() -> Iterator[None]:
    """Keep float64 in the VAE's upsampling, which copies values through float32."""
    plain = torch.nn.Upsample.forward
    with patch.object(QwenImageUpsample, "forward", plain), patch.object(QwenImage21Upsample, "forward", plain):
        yield


def pass_token_types(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Pass which tokens are an image's, as the pipeline should; without it, positions are 1-D."""
    return args, kwargs | {"mm_token_type_ids": (kwargs["input_ids"] == encoder.config.image_token_id).int()}


@dataclass(frozen=True)
class TransformerInputs:
    """Inputs of a pipeline's transformer for one sample: `[Sc, 64]`, twice `[L, D]`, and `(1, h, w)` per control."""

    control_latents: Tensor
    prompt_embeds: Tensor
    empty_prompt_embeds: Tensor
    control_shapes: list[tuple[int, int, int]]


@torch.no_grad()
def transformer_inputs(pipeline: Any, controls: Sequence[Image.Image], prompt: str) -> TransformerInputs:
    """Run the pipeline for one step, with and without the prompt."""
    calls: list[dict[str, Any]] = []

    def record(**inputs: Any) -> tuple[Tensor]:
        calls.append(inputs)
        return (torch.zeros_like(inputs["hidden_states"]),)

    one_image = isinstance(pipeline, QwenImageEditPipeline)  # with a list it would not resize for the text encoder
    images = {"image": controls[0] if one_image else list(controls)} if controls else {}
    with patch.object(pipeline.transformer, "forward", record):
        pipeline(
            prompt=prompt,
            negative_prompt="",
            num_inference_steps=1,
            sigmas=[0.5],  # the default for one step divides by zero
            output_type="latent",
            **images,
        )
    with_prompt, without = calls
    assert with_prompt["encoder_hidden_states_mask"] is None
    target, *shapes = with_prompt["img_shapes"][0]
    return TransformerInputs(
        with_prompt["hidden_states"][0, target[1] * target[2] :],
        with_prompt["encoder_hidden_states"][0],
        without["encoder_hidden_states"][0],
        shapes,
    )


@torch.no_grad()
def stock_image(pipeline: Any, latents: torch.Tensor, h: int, w: int) -> np.ndarray:  # type: ignore[type-arg]
    """The last lines of the stock pipelines."""
    vae, size = pipeline.vae, (16 * h, 16 * w)
    z = pipeline._unpack_latents(latents[None], *size, pipeline.vae_scale_factor).to(vae.dtype)
    mean = torch.tensor(vae.config.latents_mean).view(1, vae.config.z_dim, 1, 1, 1).to(z.dtype)
    std = 1.0 / torch.tensor(vae.config.latents_std).view(1, vae.config.z_dim, 1, 1, 1).to(z.dtype)
    image = vae.decode(z / std + mean, return_dict=False)[0][:, :, 0]
    return np.asarray(pipeline.image_processor.postprocess(image, output_type="pil")[0])


@torch.no_grad()
def plain_latents(vae: Any, image: Image.Image, size: Size) -> Tensor:
    """`[1, 16, H/8, W/8]`: the unpacked latents of `image` at `size`, by definition."""
    values = np.asarray(image.resize(size, Image.Resampling.LANCZOS), dtype=np.float32) / 255
    pixels = (2 * torch.from_numpy(values) - 1).permute(2, 0, 1)[None, :, None]
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()[:, :, 0]
    mean, std = (torch.tensor(v).to(vae.dtype) for v in (vae.config.latents_mean, vae.config.latents_std))
    return (latents - mean[:, None, None]) / std[:, None, None]


def plain_tokens(latents: Tensor) -> Tensor:
    """`[S, 64]` of `[1, 16, H/8, W/8]`: 2×2 patches in raster order, each as (channel, row, column)."""
    patches = latents[0].unfold(1, 2, 2).unfold(2, 2, 2)
    return patches.permute(1, 2, 0, 3, 4).reshape(-1, 64)


def assert_same(ours: Tensor, stock: Tensor, exact: Tensor | None = None) -> None:
    """Equal up to rounding; in bfloat16, by the distance to `exact`."""
    assert (ours.shape, ours.dtype) == (stock.shape, stock.dtype)
    if ours.dtype == torch.bfloat16:
        assert exact is not None, "bfloat16 needs a more exact reference"
        assert relative(ours, exact) <= AS_FAR * relative(stock, exact)
    else:
        assert relative(ours, stock) <= (EXACT if ours.dtype == torch.float64 else TOLERANCE)


def relative(a: Tensor, b: Tensor) -> float:
    """The largest error of a row (a token), relative to its length."""
    a, b = a.double(), b.double()
    error = float(((a - b).norm(dim=-1) / b.norm(dim=-1)).max())
    return math.inf if math.isnan(error) else error


def small_options(variant: str) -> list[str]:
    condition = SMALL_AREA[VAE_AREA if variant == "edit" else CONDITION_AREA]
    sizes = {"vae_image_size": SMALL_AREA[VAE_AREA], "condition_image_size": condition}
    return [word for name, area in sizes.items() for word in ("--set", f"data.{name}={area}")]


# ---- building --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A target, its controls, its prompt."""

    target: Image.Image
    controls: tuple[Image.Image, ...]
    prompt: str


def image(name: str, size: Size, mode: str = "RGB") -> Image.Image:
    return photograph(name).resize(size).convert(mode)


def case(sizes: Sequence[Size], prompt: str, mode: str = "RGB") -> Case:
    """A photograph for each size, the target first."""
    images = [image(name, size, mode) for name, size in zip(PHOTOGRAPHS, sizes, strict=False)]
    return Case(images[0], tuple(images[1:]), prompt)


def write_source(folder: Path, cases: dict[str, Case]) -> Path:
    """A table of `cases`, with their images beside it."""
    folder.mkdir(parents=True)
    lines = []
    for name, it in cases.items():
        controls = {f"{name}-control{i}.png": control for i, control in enumerate(it.controls)}
        for file, content in {f"{name}.png": it.target, **controls}.items():
            content.save(folder / file)
        row = {"target": f"{name}.png", "prompt": it.prompt} | ({"control": list(controls)} if controls else {})
        lines.append(json.dumps(row, ensure_ascii=False))
    (folder / "metadata.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def build_cache(folder: Path, cases: dict[str, Case], model: Path, *options: str) -> Cache:
    source = write_source(folder / "source", cases)
    result = run("qwen-cache", "build", source, "--out", folder / "shards", "--model", model, *options)
    assert result.code == 0, result.stderr
    return open_cache(folder / "shards")


def by_name(opened: Cache) -> dict[str, Sample]:
    return {sample.name: sample for sample in opened}


def stock_tensors(pipeline: Any, it: Case, img_shapes: Sequence[tuple[int, int, int]]) -> dict[str, Tensor]:
    """Every tensor of a sample of these shapes, by name."""
    inputs = transformer_inputs(pipeline, [control.convert("RGB") for control in it.controls], it.prompt)
    (_, h, w), *control_shapes = img_shapes
    assert control_shapes == inputs.control_shapes
    target = plain_tokens(plain_latents(pipeline.vae, it.target.convert("RGB"), (16 * w, 16 * h)))
    tensors = {"prompt_embeds": inputs.prompt_embeds, "empty_prompt_embeds": inputs.empty_prompt_embeds}
    return tensors | {"image_latents": target} | ({"control_latents": inputs.control_latents} if it.controls else {})


def assert_matches_stock(sample: Sample, it: Case, folder: Path, variant: str) -> None:
    """Compare every tensor of `sample`, built from `it` by the model in `folder`, with stock's.

    A sample without controls is encoded as by the pipeline of text to image.
    """
    dtype = sample["prompt_embeds"].dtype

    def tensors(pipeline: Any) -> dict[str, Tensor]:
        pipeline = pipeline if it.controls or variant == "t2i" else without_images(pipeline)
        return stock_tensors(pipeline, it, sample.img_shapes)

    stock = tensors(stock_pipeline(folder, variant, dtype))
    exact = tensors(exact_pipeline(folder, variant)) if dtype == torch.bfloat16 else {}
    assert stock.keys() <= sample.tensors().keys()
    for name, expected in stock.items():
        assert_same(sample[name], expected, exact.get(name))


# ---- samples ---------------------------------------------------------------------------------------------------------

LONG = " ".join(f"Then move the {i}th cup to the left of the plate, and keep its shadow." for i in range(40))
PROMPTS = {
    "chinese": "把天空变成橙色，并保留第一张图片里的倒影。",
    "arabic": "اجعل السماء برتقالية واحتفظ بالانعكاس",
    "emoji": "add 🦊🏽‍🚀 and ❤️ in the corner",
    "braces": "write {0} and {} on the wall, 100 % of it\n\nin two lines",
    "long": LONG,
    "empty": "",
}
SHAPES: dict[str, list[Size]] = {
    "square": [(128, 128), (256, 256)],
    "tall": [(90, 400), (60, 300)],
    "wide": [(400, 90), (640, 100)],
    "odd": [(517, 333), (333, 517)],
    "minute": [(16, 9), (7, 5)],
    "sliver": [(26, 900), (900, 26)],
}
SEVERAL: dict[str, list[Size]] = {
    "two": [(128, 128), (333, 517), (640, 100)],
    "three": [(160, 107), (107, 160), (60, 300), (300, 300)],
    "four": [(107, 160), (160, 107), (333, 517), (107, 160), (128, 128)],
}
