"""The promises of a cache about its values: they are those of stock diffusers with the same encoders.

These are for a cache adapter (`qwen_cache.conformance.cache`) whose encoders are those of a folder in diffusers'
format, of any size, which `--encoders` names. One row is encoded: a target of 1152×896 pixels, and the controls that
the folder's pipeline takes: none, one, or two of 1152×896 and 896×1152. These are sizes that stock inference does not
change, and the target is expected at its own size. Latents are `[S, 64]`, or `[16, H, W]` of one image.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from PIL import Image
from torch import Tensor

from qwen_cache.conformance.cache import NO_EMPTY_PROMPT, Row, Workplace
from qwen_cache.conformance.model import CONFIG
from qwen_cache.models.encoders import make_processor

SIZES = ((1152, 896), (1152, 896), (896, 1152))
"""Width and height of the target and of each control."""
CONTROLS = {"QwenImagePipeline": 0, "QwenImageEditPipeline": 1, "QwenImageEditPlusPipeline": 2}
PROMPT = "make the sky red"
TOLERANCE = 0.05
"""Relative. With tiny encoders, bfloat16 is off by 0.015, and an image scaled twice or without antialiasing by 0.1."""


@dataclass(frozen=True)
class Compared:
    """The tensors of a row from the adapter, and those of stock diffusers."""

    found: Mapping[str, Tensor]
    expected: Sequence[Mapping[str, Tensor]]
    """Any of these is right: with the text encoder's positions in three dimensions, and without."""

    def assert_same(self, name: str) -> None:
        """AssertionError unless the tensor is that of stock diffusers, up to rounding."""
        found = tokens(self.found[name]) if "latents" in name else self.found[name].squeeze()
        expected = [each[name] for each in self.expected]
        shape = expected[0].shape
        assert found.shape == shape, f"{name}: {[*found.shape]}, not {[*shape]} as in stock diffusers"
        error = min(float((found.double() - each.double()).norm() / each.double().norm()) for each in expected)
        assert error < TOLERANCE, f"{name} is off by {error:.1g} of its norm"


def compare(place: Workplace, encoders: Path) -> Compared:
    """One row, encoded by the adapter of the workplace and by stock diffusers.

    Raises:
        ValueError: the folder is not of a pipeline whose controls are known here.
    """
    kind = str(json.loads((encoders / "model_index.json").read_text(encoding="utf-8"))["_class_name"])
    if kind not in CONTROLS:
        raise ValueError(f"--encoders {encoders}: {kind} is none of {', '.join(CONTROLS)}")
    images = row_images()[: 1 + CONTROLS[kind]]
    files = [place.folder / f"{i}.png" for i in range(len(images))]
    for file, image in zip(files, images, strict=True):
        image.save(file)
    (found,) = place.encode(Row("row", PROMPT, files[0], tuple(files[1:])))
    pipeline, (target, *controls) = stock_pipeline(encoders, kind), images
    latents = {"image_latents": target_latents(pipeline.vae, target)}
    expected = [latents | transformer_inputs(pipeline, controls)]
    if controls:
        pipeline.text_encoder.register_forward_pre_hook(_with_token_types, with_kwargs=True)
        expected.append(latents | transformer_inputs(pipeline, controls))
    return Compared(found, expected)


def row_images() -> list[Image.Image]:
    """The target and the controls."""
    return [_image(seed, size) for seed, size in enumerate(SIZES)]


def _image(seed: int, size: tuple[int, int]) -> Image.Image:
    """An image with detail at every scale, so that each way of scaling it gives another result."""
    generator, pixels = np.random.default_rng(seed), np.zeros((size[1], size[0], 3), np.float32)
    for cells in (4, 64, 1024):
        coarse = Image.fromarray(generator.integers(0, 255, (cells, cells, 3), np.uint8))
        pixels += np.asarray(coarse.resize(size, Image.Resampling.BICUBIC)) / 3
    return Image.fromarray(pixels.astype(np.uint8))


# ---- stock diffusers -------------------------------------------------------------------------------------------------


class Recorder(QwenImageTransformer2DModel):  # type: ignore[misc]  # diffusers is not typed for mypy
    """A transformer that keeps its inputs."""

    def __init__(self) -> None:
        super().__init__(**CONFIG)
        self.inputs: list[dict[str, Any]] = []

    def forward(self, **inputs: Any) -> tuple[Tensor]:
        self.inputs.append(inputs)
        return (torch.zeros_like(inputs["hidden_states"]),)


def stock_pipeline(folder: Path, kind: str) -> Any:
    """The pipeline with the encoders of the folder, in float32 on the CPU, and a `Recorder`."""
    parts: dict[str, Any] = {"transformer": Recorder()}
    if CONTROLS[kind]:
        parts["processor"] = make_processor("qwen2_5_vl", folder / "processor")
    pipeline = getattr(diffusers, kind).from_pretrained(folder, dtype=torch.float32, **parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


@torch.no_grad()
def transformer_inputs(pipeline: Any, controls: Sequence[Image.Image]) -> dict[str, Tensor]:
    """The inputs of the transformer in one step with the prompt, and with the empty prompt."""
    one_image = CONTROLS[type(pipeline).__name__] == 1  # a list it would not scale for the text encoder
    images = {"image": controls[0] if one_image else list(controls)} if controls else {}
    pipeline.transformer.inputs.clear()
    # the default noise levels of one step divide by zero
    pipeline(prompt=PROMPT, negative_prompt="", num_inference_steps=1, sigmas=[0.5], output_type="latent", **images)
    with_prompt, without = pipeline.transformer.inputs
    _, height, width = with_prompt["img_shapes"][0][0]
    inputs = {
        "prompt_embeds": with_prompt["encoder_hidden_states"][0],
        "empty_prompt_embeds": without["encoder_hidden_states"][0],
    }
    return inputs | ({"control_latents": with_prompt["hidden_states"][0, height * width :]} if controls else {})


def _with_token_types(encoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Which tokens are an image's: diffusers 0.42 does not pass it (huggingface/diffusers issue 14194)."""
    return args, kwargs | {"mm_token_type_ids": (kwargs["input_ids"] == encoder.config.image_token_id).int()}


@torch.no_grad()
def target_latents(vae: Any, image: Image.Image) -> Tensor:
    """`[S, 64]`: the mode of the posterior, normalised by mean and deviation of the VAE's configuration."""
    pixels = torch.from_numpy(np.asarray(image, dtype=np.float32)) / 127.5 - 1
    latents = vae.encode(pixels.permute(2, 0, 1)[None, :, None]).latent_dist.mode()[0, :, 0]
    mean, std = (torch.tensor(values)[:, None, None] for values in (vae.config.latents_mean, vae.config.latents_std))
    return tokens((latents - mean) / std)


def tokens(latents: Tensor) -> Tensor:
    """`[S, 64]` of latents `[16, H, W]`: 2×2 patches in raster order, each as (channel, row, column). Packed latents
    stay as they are, and axes of length 1 are ignored; AssertionError for other shapes."""
    latents = latents.squeeze()
    if latents.ndim == 3 and len(latents) == CONFIG["out_channels"]:
        latents = latents.unfold(1, 2, 2).unfold(2, 2, 2).permute(1, 2, 0, 3, 4).flatten(2).flatten(0, 1)
    assert latents.ndim == 2, f"latents {[*latents.shape]} are neither [S, 64] nor [16, H, W]"
    return latents


# ---- the promises ----------------------------------------------------------------------------------------------------


def stock_latents(compared: Compared) -> None:
    """The target's latents are normalised once, and packed in raster order."""
    compared.assert_same("image_latents")


def stock_control_latents(compared: Compared) -> None:
    """The controls' latents are of the size that inference gives them; height and width are not exchanged."""
    if "control_latents" not in compared.expected[0]:
        pytest.skip("the pipeline takes no control")
    compared.assert_same("control_latents")


def stock_embeddings(compared: Compared) -> None:
    """The template of this pipeline without its first tokens; controls at the text encoder's size, antialiased."""
    compared.assert_same("prompt_embeds")


def stock_empty_prompt(compared: Compared) -> None:
    """The empty prompt is the pipeline's `negative_prompt=""`."""
    if "empty_prompt_embeds" not in compared.found:
        pytest.skip(NO_EMPTY_PROMPT)
    compared.assert_same("empty_prompt_embeds")


PROMISES: dict[str, Callable[[Compared], None]] = {
    check.__name__.replace("_", " "): check
    for check in (stock_latents, stock_control_latents, stock_embeddings, stock_empty_prompt)
}
