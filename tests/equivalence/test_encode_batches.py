"""Encoding together changes nothing but the last digits: a build in batches is what the stock pipelines compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel

from qwen_cache.encode.lanes import Batcher
from qwen_cache.encode.text import TextEncoder, TextRequest
from qwen_cache.encode.vae import VaeEncoder
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from tests.support.judge import (
    PHOTOGRAPHS,
    PROMPTS,
    Case,
    Size,
    TinyModel,
    assert_matches_stock,
    assert_same,
    build_cache,
    by_name,
    case,
    image,
    small_options,
)
from tests.support.text_encoder import images, recording

CONTROLS: list[list[Size]] = [[(150, 100)], [(90, 200)], [(150, 100), (200, 90)], [(128, 128)], [(60, 60), (90, 160)]]
IN_BATCHES = ["--set", "cache.vae_batch_pixels=100000", "--set", "cache.text_batch_tokens=2000"]


def mixture(variant: str) -> dict[str, Case]:
    """Mixed shapes, numbers of controls and lengths of prompts; two samples are about the same images."""
    controls = {"t2i": [[]] * 5, "edit": [sizes[:1] for sizes in CONTROLS]}.get(variant, CONTROLS)
    prompts = [PROMPTS["chinese"], "make it blue", PROMPTS["emoji"], "cut", PROMPTS["braces"]]
    cases = {
        name: Case(image(name, (128, 128 - 32 * (i % 2))), case([(1, 1), *sizes], "").controls, prompt)
        for i, (name, sizes, prompt) in enumerate(zip(PHOTOGRAPHS, controls, prompts, strict=True))
    }
    return cases | {"again": case([(128, 96), *controls[0]], "the same image, something else")}


@pytest.mark.slow
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize(
    "variant", [pytest.param("t2i", marks=pytest.mark.slow), pytest.param("edit", marks=pytest.mark.slow), "edit-plus"]
)
def test_a_build_in_batches_is_what_the_pipelines_compute(variant: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    cases, model = mixture(variant), tiny_model(variant)
    encoded: list[int] = []
    encode = VaeEncoder.encode

    def count(self: VaeEncoder, pixels: Any) -> Any:
        encoded.append(len(pixels))
        return encode(self, pixels)

    with recording(Qwen2_5_VLTextModel) as passes, patch.object(VaeEncoder, "encode", count):
        built = build_cache(tmp_path, cases, model, "--dtype", "float32", *small_options(variant), *IN_BATCHES)
    rows = [len(call["inputs_embeds"]) for call in passes]
    assert max(encoded) > 1
    assert max(rows) > 2
    samples = by_name(built)
    for name, it in cases.items():
        assert_matches_stock(samples[name], it, model, variant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_texts_about_different_numbers_of_images_can_go_together(dtype: torch.dtype, tiny_model: TinyModel) -> None:
    """Prefixes of 1 to 4 images in one pass, each prompt at its own positions, next to prompts of other lengths."""
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    cpu = torch.device("cpu")
    alone, together = (TextEncoder(model, cpu, dtype, tokens) for tokens in (1, 10_000))
    exact = None
    if dtype == torch.bfloat16:
        exact = TextEncoder(model, cpu, dtype)
        exact.model.double()
    inputs = [alone.inputs(images(count)) for count in (2, 1, 4, 3)]
    requests = [TextRequest(inputs[i % 4], prompt[:200], ()) for i, prompt in enumerate(PROMPTS.values())]
    with recording(Qwen2_5_VLTextModel) as passes:
        batch = together.encode(requests)
    assert [len(call["inputs_embeds"]) for call in passes] == [4, 4 + len(requests)]
    for each, ours in zip(requests, batch, strict=True):
        (one,), (truth,) = alone.encode([each]), exact.encode([each]) if exact else [None]
        for name in ("prefix", "prompt", "empty"):
            assert_same(getattr(ours, name), getattr(one, name), getattr(truth, name, None))


def test_images_that_were_just_read_are_not_read_again(tiny_model: TinyModel) -> None:
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    encoder = TextEncoder(model, torch.device("cpu"), torch.float32, 10_000)
    first, second = encoder.inputs(images(1)), encoder.inputs(images(2))
    with recording(Qwen2_5_VLTextModel) as passes:
        one, other = encoder.encode([TextRequest(each, "make it blue", ()) for each in (first, second)])
        (again,) = encoder.encode([TextRequest(second, "make it red", ())])
        (back,) = encoder.encode([TextRequest(first, "make it blue", ())])
    assert [len(call["inputs_embeds"]) for call in passes] == [2, 4, 1, 1, 2]
    assert torch.equal(again.prefix, other.prefix)
    assert torch.equal(again.empty, other.empty)
    assert_same(back.prompt, one.prompt)


def test_no_pass_is_longer_than_its_bound(tiny_model: TinyModel) -> None:
    """Ten prompts about one image: as many at once as the keys and values of eight batches have room for."""
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    encoder = TextEncoder(model, torch.device("cpu"), torch.float32, 100)
    prefixes = encoder.read([encoder.inputs(images(1))])
    with recording(Qwen2_5_VLTextModel) as passes:
        encoder.embed(prefixes, [(0, "make it blue", None)] * 10)
    rows = [len(call["inputs_embeds"]) for call in passes]
    each = prefixes.lengths[0] + passes[0]["inputs_embeds"].shape[1]
    assert sum(rows) == 10
    assert max(rows) * each <= 8 * 100 < (max(rows) + 1) * each


def test_a_batch_is_of_eight_samples_at_most(tiny_model: TinyModel, tmp_path: Path) -> None:
    """However much a device has room for: half of what is in flight, so that the other half is decoded meanwhile."""
    controls = [image("china.jpg", (64 + i, 64)) for i in range(9)]
    cases = {f"{i}": Case(controls[0], (control,), f"number {i}") for i, control in enumerate(controls)}
    sizes: list[int] = []
    encode = TextEncoder.encode

    def count(self: TextEncoder, requests: Any) -> Any:
        sizes.append(len(requests))
        return encode(self, requests)

    much = ["--set", "cache.text_batch_tokens=1000000"]
    with patch.object(TextEncoder, "encode", count):
        build_cache(tmp_path, cases, tiny_model("edit-plus"), *small_options("edit-plus"), *much)
    assert sizes == [8, 1]


def test_by_default_a_cpu_encodes_one_by_one(tiny_model: TinyModel, tmp_path: Path) -> None:
    """So that on one machine a cache is the same, byte for byte, however its build was interrupted."""
    most: list[int] = []
    make = Batcher.__init__

    def remember(self: Any, lanes: Any, bound: int) -> None:
        most.append(bound)
        make(self, lanes, bound)

    with patch.object(Batcher, "__init__", remember):
        build_cache(tmp_path, {"it": case([(64, 64), (64, 64)], "x")}, tiny_model("edit-plus"), *small_options("edit"))
    assert most == [1, 1]


def test_images_of_one_shape_go_through_the_vae_together(tiny_model: TinyModel) -> None:
    model = open_model(str(tiny_model("edit-plus")), ENCODER_PARTS)
    vae = VaeEncoder(model, torch.device("cpu"), torch.float32, 10**6)
    pixels = [vae.pixels(image(name, (128, 96)), (128, 96)) for name in ("china.jpg", "flower.jpg", "coffee.png")]
    for together, each in zip(vae.encode(pixels), pixels, strict=True):
        (alone,) = vae.encode([each])
        assert together.shape == alone.shape == (48, 64)
        assert_same(together, alone)
