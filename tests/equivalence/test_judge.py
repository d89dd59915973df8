"""The judge of bfloat16 notices every wrong model that the judges of float32 do.

Each wrong result is made by the stock modules in bfloat16, so that it has all the rounding that a right one has, and
has to be further from the exact one than a right one may be. What is right passes.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from qwen_cache.encode import vae as tiles
from qwen_cache.encode.vae import Window, for_single_frames
from qwen_train.model import transformer
from tests.support.judge import (
    AS_FAR,
    TinyModel,
    assert_same,
    exact_pipeline,
    image,
    plain_latents,
    plain_tokens,
    relative,
    stock_pipeline,
    transformer_inputs,
)
from tests.support.text_encoder import stock_embeds
from tests.support.transformer_judge import (
    multi_res_model,
    output_error,
    random_samples,
    run_batched,
    run_in_float32,
    run_singly,
    stock_model,
)
from tests.support.transformer_mutants import MASK_MUTANTS, ROPE_MUTANTS
from tests.support.vae import image as random_image
from tests.support.vae import noise, random_vae

VARIANT, BFLOAT16 = "edit-plus", torch.bfloat16


@pytest.fixture
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model(VARIANT)


def assert_caught(wrong: dict[str, Tensor], right: Tensor, exact: Tensor) -> None:
    """`right` passes, and nothing of `wrong` does."""
    assert_same(right, right, exact)
    allowed = AS_FAR * relative(right, exact)
    margins = {name: relative(tensor, exact) / allowed for name, tensor in wrong.items()}
    print({name: f"{margin:.1f}" for name, margin in margins.items()})  # how many times what is allowed
    assert not {name: margin for name, margin in margins.items() if margin <= 1}


# ---- what a cache holds ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_wrong_embeddings_are_caught(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Traps 9, 10, 19 and 23."""
    pipeline, prompt = stock_pipeline(folder, VARIANT, BFLOAT16), "make it blue"
    shown = image("china.jpg", (112, 112))
    wrong = {
        "one-dimensional positions": stock_embeds(
            stock_pipeline(folder, VARIANT, BFLOAT16, corrected=False), [shown], prompt
        ),
        "another image": stock_embeds(pipeline, [image("flower.jpg", (112, 112))], prompt),
        "resized twice": stock_embeds(pipeline, [shown.resize((64, 64)).resize((112, 112))], prompt),
        "mirrored": stock_embeds(pipeline, [shown.transpose(Image.Transpose.FLIP_LEFT_RIGHT)], prompt),
        "another word": stock_embeds(pipeline, [shown], "make it glue"),
    }
    with monkeypatch.context() as patch:
        template = pipeline.prompt_template_encode.replace("user's requirements", "user's instructions")
        assert template != pipeline.prompt_template_encode
        patch.setattr(pipeline, "prompt_template_encode", template)
        wrong["another template"] = stock_embeds(pipeline, [shown], prompt)
    right, exact = (stock_embeds(each, [shown], prompt) for each in (pipeline, exact_pipeline(folder, VARIANT)))
    wrong = {name: tensor[-len(right) :] for name, tensor in wrong.items()}
    assert_caught(wrong, right, exact)


def test_a_wrong_empty_prompt_is_caught(folder: Path, small_areas: None) -> None:
    """Trap 19: of another image; and zeros."""
    pipelines = stock_pipeline(folder, VARIANT, BFLOAT16), exact_pipeline(folder, VARIANT)
    china, flower = image("china.jpg", (150, 100)), image("flower.jpg", (150, 100))
    right, exact = (transformer_inputs(each, [china], "make it blue").empty_prompt_embeds for each in pipelines)
    other = transformer_inputs(pipelines[0], [flower], "make it blue").empty_prompt_embeds
    assert_caught({"of another image": other, "zeros": torch.zeros_like(right)}, right, exact)


def mean_and_std(vae: Any) -> tuple[Tensor, Tensor]:
    return tuple(
        torch.tensor(v).to(vae.dtype)[:, None, None] for v in (vae.config.latents_mean, vae.config.latents_std)
    )


@torch.no_grad()
def test_wrong_latents_are_caught(folder: Path) -> None:
    """Traps 10, 11, 13 and 14."""
    vae, original, size = stock_pipeline(folder, VARIANT, BFLOAT16).vae, image("china.jpg", (333, 517)), (96, 96)
    latents, exact = (plain_latents(each, original, size) for each in (vae, exact_pipeline(folder, VARIANT).vae))
    mean, std = mean_and_std(vae)
    resized = original.resize(size, Image.Resampling.LANCZOS)
    pixels = torch.from_numpy(2 * np.asarray(resized, dtype=np.float32) / 255 - 1).permute(2, 0, 1)[None, :, None]
    torch.manual_seed(0)
    sampled = vae.encode(pixels.to(BFLOAT16)).latent_dist.sample()[:, :, 0]
    wrong = {
        "sampled": (sampled - mean) / std,
        "not normalised": latents * std + mean,
        "normalised twice": (latents - mean) / std,
        "mirrored": latents.flip(-1),
        "sides swapped": latents.mT,
        "shifted by one value": latents.roll(1, dims=-1),
        "channels in another order": latents.roll(1, dims=1),
        "resized twice": plain_latents(vae, original.resize((48, 48)), size),
        "resized without antialiasing": plain_latents(vae, original.resize(size, Image.Resampling.NEAREST), size),
    }
    tokens = {name: plain_tokens(each) for name, each in wrong.items()}
    tokens["packed as (row, column, channel)"] = plain_tokens(latents).view(-1, 16, 2, 2).permute(0, 2, 3, 1).flatten(1)
    assert_caught(tokens, plain_tokens(latents), plain_tokens(exact))


def only_its_own(path: Sequence[Window], start: int, stop: int) -> tuple[int, int]:
    """In place of `tiles.reach`: a tile that sees nothing around it."""
    stride = math.prod(window.stride for window in path)
    return math.floor(stride * start), math.ceil(stride * stop)


@pytest.mark.slow
@torch.no_grad()
def test_tiles_without_a_halo_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder and the decoder, in tiles."""
    stock = random_vae(base_dim=8).bfloat16()
    exact, ours = random_vae(base_dim=8).bfloat16().double(), for_single_frames(random_vae(base_dim=8).bfloat16())
    pixels, latents = random_image(96, 192).bfloat16(), noise(96, 192).bfloat16()
    cases: dict[str, tuple[Callable[..., Tensor], Tensor, Tensor, Tensor]] = {
        "encoder": (
            tiles.encode_in_tiles,
            pixels,
            stock.encode(pixels).latent_dist.parameters,
            exact.encode(pixels.double()).latent_dist.parameters,
        ),
        "decoder": (
            tiles.decode_in_tiles,
            latents,
            stock.decode(latents).sample,
            exact.decode(latents.double()).sample,
        ),
    }
    for part, (run, given, right, truth) in cases.items():
        assert_same(run(ours, given, 64), right, truth)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "reach", only_its_own)
            assert_caught({f"no halo in the {part}": run(ours, given, 64)}, right, truth)


# ---- the transformer -------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_wrong_positions_and_masks_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traps 2, 3, 5, 6, 7 and 15, in a batch of mixed sizes."""
    mutants = {name: (case, "rotary_embeddings", new) for name, (case, new) in ROPE_MUTANTS.items()} | MASK_MUTANTS
    stock = stock_model(zero_cond_t=True).bfloat16()
    model, in_float32 = multi_res_model(stock).bfloat16(), copy.deepcopy(stock)
    margins = {}
    for case, mutants_of in groupby(
        sorted(mutants.items(), key=lambda each: str(each[1][0])), key=lambda each: each[1][0]
    ):
        samples = random_samples(*case, dtype=BFLOAT16)
        exact = run_in_float32(in_float32, samples)
        allowed = AS_FAR * output_error(run_singly(stock, samples), exact)
        assert output_error(run_batched(model, samples), exact) <= allowed
        for name, (_, attribute, replacement) in mutants_of:
            with monkeypatch.context() as patch:
                patch.setattr(transformer, attribute, replacement)
                margins[name] = output_error(run_batched(model, samples, fill=0.0), exact) / allowed
    assert margins.keys() == mutants.keys()
    print({name: f"{margin:.1f}" for name, margin in margins.items()})
    assert not {name: margin for name, margin in margins.items() if margin <= 1}
