"""The stock Qwen-Image-2.1 pipeline without torchvision, and what it feeds its transformer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from diffusers import QwenImage21Pipeline
from PIL import Image
from torch import Tensor
from transformers import Qwen3VLProcessor

from qwen_cache.format.cache import Sample

from .judge import Case, Size, assert_same, image

RESOLUTION = 128
"""`output_resolution` of the pipeline; `data.vae_image_size` is its square."""
SMALL_21 = ["--set", f"data.vae_image_size={RESOLUTION**2}"]


class ImageOnlyQwen3VLProcessor(Qwen3VLProcessor):  # type: ignore[misc]
    """The stock processor without its video half, which needs torchvision.

    `from_pretrained` finds the tokenizer, the chat template and the image processor, Qwen2VLImageProcessorPil.
    """

    def __init__(
        self, image_processor: Any = None, tokenizer: Any = None, chat_template: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(image_processor, tokenizer, None, chat_template=chat_template, **kwargs)


def stock_qwen_image_21(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    """The stock pipeline of a Qwen-Image-2.1 folder, loaded again at each call."""
    processor = ImageOnlyQwen3VLProcessor.from_pretrained(folder / "processor")
    pipeline = QwenImage21Pipeline.from_pretrained(folder, dtype=dtype, processor=processor)
    pipeline.transformer.requires_grad_(False)  # as ours is: torch takes another kernel for weights with gradients
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def transparent(name: str, size: Size, mode: str = "RGBA") -> Image.Image:
    """A photograph with a hole, half-transparent stripes and an opaque rest."""
    alpha = np.full(size[::-1], 255, np.uint8)
    alpha[: size[1] // 3], alpha[size[1] // 2 :: 8] = 0, 128
    cut = image(name, size)
    cut.putalpha(Image.fromarray(alpha))
    return cut.convert(mode)


@cache
def stock_pipeline_21(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    return stock_qwen_image_21(folder, dtype)


@cache
def exact_pipeline_21(folder: Path) -> Any:
    """The stock pipeline in float64 on weights rounded to bfloat16: bfloat16 without rounding of activations."""
    pipeline = stock_qwen_image_21(folder, torch.bfloat16)
    for part in (pipeline.text_encoder, pipeline.vae):
        torch.nn.Module.to(part, torch.float64)
    return pipeline


@dataclass(frozen=True)
class TransformerInputs21:
    """The transformer's inputs for one sample, as far as it reads them."""

    control_latents: Tensor
    prompt_embeds: Tensor
    """The rows of text."""
    empty_prompt_embeds: Tensor
    image_positions: tuple[int, ...]
    img_shapes: list[tuple[int, int, int]]
    """The conditions, then the target."""


@torch.no_grad()
def transformer_inputs_21(pipeline: Any, controls: Sequence[Image.Image], prompt: str) -> TransformerInputs21:
    """Run the pipeline for one step, with the prompt and with the empty one."""
    calls: list[dict[str, Any]] = []

    def record(**inputs: Any) -> tuple[Tensor]:
        calls.append(inputs)
        return (torch.zeros_like(inputs["hidden_states"]),)

    with patch.object(pipeline.transformer, "forward", record):
        pipeline(
            prompt=prompt,
            negative_prompt="",
            true_cfg_scale=2.0,
            sigmas=[0.5],  # the default for one step divides by zero
            output_type="latent",
            output_resolution=RESOLUTION,
            **({"image": list(controls)} if controls else {}),
        )
    with_prompt, _ = calls
    assert with_prompt["encoder_hidden_states_mask"] is None
    *conditions, target = with_prompt["img_shapes"][0]
    rows, empty_rows = ([each["encoder_hidden_states"][0], each["img_mask"][0]] for each in calls)
    is_image = rows[1][: len(rows[0])]
    begins = [i for i in range(len(is_image)) if is_image[i] and not is_image[i - 1]]
    assert len(begins) == len(conditions)
    return TransformerInputs21(
        with_prompt["hidden_states"][0, : -target[1] * target[2]],
        rows[0][~is_image],
        empty_rows[0][~empty_rows[1][: len(empty_rows[0])]],
        tuple(int((~is_image[:begin]).sum()) for begin in begins),
        [*conditions, target],
    )


@torch.no_grad()
def plain_tokens_21(vae: Any, image: Image.Image, size: Size) -> Tensor:
    """`[S, 64]`: the latents of `image` (RGBA) at `size`, by definition."""
    values = np.asarray(image.convert("RGBA").resize(size, Image.Resampling.LANCZOS), dtype=np.float32) / 255
    pixels = (2 * torch.from_numpy(values) - 1).permute(2, 0, 1)[None, :, None]
    latents = vae.encode(pixels.to(vae.dtype)).latent_dist.mode()[0, :, 0]
    mean, std = (torch.tensor(v).to(vae.dtype) for v in (vae.config.latents_mean, vae.config.latents_std))
    return ((latents - mean[:, None, None]) / std[:, None, None]).flatten(1).T


def stock_tensors_21(pipeline: Any, it: Case, sample: Sample) -> dict[str, Tensor]:
    """Every tensor of a sample of these images, by name; positions and sizes are compared here."""
    inputs = transformer_inputs_21(pipeline, it.controls, it.prompt)
    (_, h, w), *controls = sample.img_shapes
    assert controls == inputs.img_shapes[:-1]
    assert sample.row.meta.image_positions == inputs.image_positions
    tensors = {"prompt_embeds": inputs.prompt_embeds, "empty_prompt_embeds": inputs.empty_prompt_embeds}
    tensors |= {"control_latents": inputs.control_latents} if controls else {}
    return tensors | {"image_latents": plain_tokens_21(pipeline.vae, it.target, (16 * w, 16 * h))}


def assert_matches_stock_21(sample: Sample, it: Case, folder: Path) -> None:
    """Compare every tensor of `sample`, built from `it` by the model in `folder`, with stock's."""
    dtype = sample["prompt_embeds"].dtype
    stock = stock_tensors_21(stock_pipeline_21(folder, dtype), it, sample)
    exact = stock_tensors_21(exact_pipeline_21(folder), it, sample) if dtype == torch.bfloat16 else {}
    assert stock.keys() == sample.row.meta.tensors.keys() - {"thumbnails", "edit_mask", "attention"}
    for name, expected in stock.items():
        assert_same(sample[name], expected, exact.get(name))
