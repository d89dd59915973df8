"""Qwen-Image-2.1: an image generated from the cache is the one that stock generates from images and prompt.

As in test_inference_cached.py, of the 20B family. The cache has no rows at the slots of images; what is put there has
no influence, so that with the cached rows of text in stock's own rows the latents are equal, bit for bit.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor, nn

from qwen_cache.encode.vae import decode_images, load_vae
from qwen_cache.errors import TrainError
from qwen_cache.format.cache import Sample
from qwen_cache.models.family import QWEN_IMAGE_21
from qwen_cache.models.folder import open_model
from qwen_cache.settings.sections import TrainConfig, ValidationConfig
from qwen_train.inference.cached import generate_cached, initial_latents
from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
from qwen_train.training.validation import ValidationImages, evaluating, noise, torch_generator
from qwen_train.weights import prepare_for_training

from .support.commands import run
from .support.judge import TOLERANCE, Case, TinyModel, build_cache, by_name, case, image, relative
from .support.qwen_image_21 import RESOLUTION, SMALL_21, stock_pipeline_21, transparent

STEPS, SEED = 3, 7
CASES = {
    "t2i": case([(160, 107)], "a pagoda, 黑白"),
    "one": Case(transparent("china.jpg", (150, 100)), (transparent("flower.jpg", (90, 160)),), "make it 黑白"),
    "three": Case(
        image("china.jpg", (128, 128)),
        (transparent("flower.jpg", (333, 517)), image("chelsea.png", (160, 107)), image("coffee.png", (64, 64))),
        "put the cat beside the flower",
    ),
}
CPU = torch.device("cpu")
Cached = Callable[..., tuple[Sample, Any]]


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Cached:
    """`cached("one", torch.float32)`: the sample of CASES, and the stock pipeline."""
    made: dict[torch.dtype, dict[str, Sample]] = {}

    def get(name: str, dtype: torch.dtype = torch.float32) -> tuple[Sample, Any]:
        model = tiny_model("qwen-image-21")
        if dtype not in made:
            options = (*SMALL_21, "--dtype", str(dtype).removeprefix("torch."))
            made[dtype] = by_name(build_cache(tmp_path_factory.mktemp("cache"), CASES, model, *options))
        return made[dtype][name], stock_pipeline_21(model, dtype)

    return get


def stock(pipeline: Any, sample: Sample, it: Case, **arguments: Any) -> Any:
    """The latents with which the pipeline ends, at the target's size."""
    _, h, w = sample.img_shapes[0]
    return pipeline(
        **({"image": list(it.controls)} if it.controls else {}),
        **{"prompt": it.prompt, "num_inference_steps": STEPS, "output_type": "latent", **arguments},
        output_resolution=RESOLUTION,
        height=16 * h,
        width=16 * w,
        generator=torch.Generator().manual_seed(SEED),
    ).images[0]


def ours(
    pipeline: Any, sample: Sample, dtype: torch.dtype = torch.float32, transformer: Any = None, **arguments: Any
) -> Tensor:
    return generate_cached(
        sample,
        transformer or pipeline.transformer,
        FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config),
        **{"num_inference_steps": STEPS, **arguments},
        family=QWEN_IMAGE_21,
        latents=initial_latents(sample, SEED, dtype, QWEN_IMAGE_21),
        device=CPU,
        dtype=dtype,
    )


# ---- the latents -----------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("use_kv_cache", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("name", CASES)
def test_they_are_the_stock_pipelines_of_the_images_and_the_prompt(
    name: str, guidance: float, use_kv_cache: bool, cached: Cached
) -> None:
    sample, pipeline = cached(name)
    negative = {"negative_prompt": "", "true_cfg_scale": guidance} if guidance > 1 else {}
    expected = stock(pipeline, sample, CASES[name], **negative, use_kv_cache=use_kv_cache)
    found = ours(pipeline, sample, true_cfg_scale=guidance, use_kv_cache=use_kv_cache)
    assert relative(found, expected) < TOLERANCE


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("name", ["three", "t2i", "one"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("use_kv_cache", [True, False])
@pytest.mark.parametrize("guidance", [3.0, 1.0])
def test_from_the_same_rows_of_text_they_are_the_stock_pipelines_bit_for_bit(
    guidance: float, use_kv_cache: bool, dtype: torch.dtype, name: str, cached: Cached
) -> None:
    """Its rows at the slots of images are its own, ours are empty."""
    sample, pipeline = cached(name, dtype)
    texts = iter([sample["prompt_embeds"], sample["empty_prompt_embeds"]])
    encode, prepare = pipeline._get_qwen_prompt_embeds, pipeline.prepare_latents

    def with_cached_text(*arguments: Any) -> Any:
        embeds, mask, is_image = encode(*arguments)
        embeds[~is_image] = next(texts)
        return embeds, mask, is_image

    def with_cached_controls(*arguments: Any) -> Any:
        latents, controls = prepare(*arguments)  # its own noise
        # Laid out in memory as ours, because torch's kernels depend on it.
        return latents.contiguous(), None if controls is None else sample["control_latents"][None].clone()

    negative = {"negative_prompt": "", "true_cfg_scale": guidance} if guidance > 1 else {}
    with patch.multiple(pipeline, _get_qwen_prompt_embeds=with_cached_text, prepare_latents=with_cached_controls):
        expected = stock(pipeline, sample, CASES[name], **negative, use_kv_cache=use_kv_cache)
    found = ours(pipeline, sample, dtype, true_cfg_scale=guidance, use_kv_cache=use_kv_cache)
    assert torch.equal(found, expected)


def test_the_steps_after_the_first_read_what_it_kept(cached: Cached) -> None:
    sample, pipeline = cached("one")
    modes: list[Any] = []
    forward = pipeline.transformer.forward

    def recorded(**inputs: Any) -> Any:
        modes.append((inputs["kv_cache_mode"], id(inputs["kv_cache"])))
        return forward(**inputs)

    with patch.object(pipeline.transformer, "forward", recorded):
        ours(pipeline, sample, true_cfg_scale=2.0)
    assert [mode for mode, _ in modes] == ["extract"] * 2 + ["cached"] * 4
    assert len({kept for _, kept in modes}) == 2  # one for each prompt
    assert [kept for _, kept in modes[::2]] == [modes[0][1]] * STEPS


def test_what_is_given_changes_the_latents_as_in_stock(cached: Cached) -> None:
    sample, pipeline = cached("one")
    plain = ours(pipeline, sample)
    for arguments in ({"sigmas": [1.0, 0.8, 0.1]}, {"num_inference_steps": 5}):
        found = ours(pipeline, sample, **arguments)
        assert relative(found, stock(pipeline, sample, CASES["one"], **arguments)) < TOLERANCE
        assert relative(found, plain) > 1e-3
    guided = ours(pipeline, sample, true_cfg_scale=3.0)
    other = stock(pipeline, sample, CASES["one"], negative_prompt="blurry", true_cfg_scale=3.0)
    assert relative(guided, other) > 1e-3


@pytest.mark.parametrize("layout", ["packed", pytest.param("padded", marks=pytest.mark.slow)])
def test_the_transformer_in_training_generates_the_same(layout: str, cached: Cached, tiny_model: TinyModel) -> None:
    """With LoRA and gradient checkpointing, as validation finds it: a LoRA begins as nothing."""
    sample, pipeline = cached("three")
    folder = tiny_model("qwen-image-21") / "transformer"
    transformer: Any = QwenImage21MultiResTransformer2DModel.from_pretrained(folder)
    settings = TrainConfig(layout=layout, gradient_checkpointing=True)
    prepare_for_training(transformer, settings)
    with evaluating(transformer):
        found = [ours(pipeline, sample, transformer=transformer, true_cfg_scale=scale) for scale in (1.0, 3.0)]
    for scale, each in zip((1.0, 3.0), found, strict=True):
        assert relative(each, ours(pipeline, sample, true_cfg_scale=scale)) < TOLERANCE


def test_a_transformer_of_several_processes_is_looked_into(cached: Cached) -> None:
    class DistributedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, **inputs: Any) -> Any:
            return self.module(**inputs)

    sample, pipeline = cached("one")
    wrapped = DistributedDataParallel(pipeline.transformer)
    assert torch.equal(ours(pipeline, sample, transformer=wrapped), ours(pipeline, sample))


def test_guidance_without_the_empty_prompt_is_refused(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    sample, pipeline = cached("t2i")
    monkeypatch.delitem(sample.row.meta.tensors, "empty_prompt_embeds")
    with pytest.raises(TrainError, match=r"guidance needs the embeddings of the empty prompt.*scale=2.0"):
        ours(pipeline, sample, true_cfg_scale=2.0)


# ---- validation and decoding -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_validation_images_are_those_of_the_stock_pipeline(guidance: float, cached: Cached) -> None:
    sample, pipeline = cached("three")
    config = ValidationConfig(num_images=1, num_inference_steps=STEPS)
    images = ValidationImages((sample,), config, 1, dict(pipeline.scheduler.config), QWEN_IMAGE_21)
    found = images.generate(sample, pipeline.transformer, CPU, torch.float32, guidance)
    given = {"latents": noise(sample, torch_generator(sample, "image"))[None]}
    given |= {"negative_prompt": "", "true_cfg_scale": guidance} if guidance > 1 else {}
    assert relative(found, stock(pipeline, sample, CASES["three"], **given)) < TOLERANCE


def test_the_image_is_the_stock_pipelines(cached: Cached, tiny_model: TinyModel) -> None:
    sample, pipeline = cached("one")
    vae = load_vae(open_model(str(tiny_model("qwen-image-21")), ("vae",)), CPU, torch.float32)
    (found,) = decode_images(vae, ours(pipeline, sample), sample.img_shapes[:1])
    expected = stock(pipeline, sample, CASES["one"], output_type="pil")
    assert found.mode == expected.mode == "RGBA"
    assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= 1


def test_latents_of_validation_are_decoded_to_transparent_pngs(
    cached: Cached, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The generated image and the target; and of several controls each."""
    sample, pipeline = cached("three")
    latents = {"target": ours(pipeline, sample), "controls": sample["control_latents"]}
    shapes = {"target": sample.img_shapes[:1], "controls": sample.img_shapes[1:]}
    for name, each in latents.items():
        metadata = {"img_shapes": json.dumps(shapes[name])}
        save_file({"latents": each.contiguous()}, tmp_path / f"{name}.safetensors", metadata)
    model = tiny_model("qwen-image-21")
    options = ("--model", model, "--vae-device", "cpu", "--set", "predict.dtype=float32")
    result = run("qwen-train", "decode", tmp_path, *options)
    assert result.code == 0, result.stderr
    assert "4 new images" in result.stderr
    expected = stock(pipeline, sample, CASES["three"], output_type="pil")
    found = Image.open(tmp_path / "target.png")
    assert found.mode == "RGBA"
    assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= 1
    for i, (_, h, w) in enumerate(shapes["controls"], 1):
        decoded = Image.open(tmp_path / ("controls.png" if i == 1 else f"controls-{i}.png"))
        assert (decoded.mode, decoded.size) == ("RGBA", (16 * w, 16 * h))
        alpha = np.asarray(decoded.getchannel("A")).astype(int)
        assert (alpha.max() - alpha.min() > 100) == (i == 1)  # only the first is transparent in places
