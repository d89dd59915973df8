"""An image generated from the cache is the one that the stock pipeline generates from images and prompt.

The judge is the stock pipeline from the original images, at the sizes of the cache. The cache's encoders differ from
the pipeline's within the rounding (one frame of the VAE in two dimensions, the prompt on a kept prefix); where exactly
the cached rows replace them, the generated image is the same bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus
from torch import Tensor

from qwen_cache import open_cache
from qwen_cache.encode.vae import decode_images, load_vae
from qwen_cache.errors import ConfigError, QwenCacheError, TrainError
from qwen_cache.format.cache import Cache, Sample, find_sample
from qwen_cache.models.family import QWEN_IMAGE
from qwen_cache.models.folder import open_model
from qwen_train.inference.cached import generate_cached, guidance_from_cache, initial_latents

from .support.judge import (
    SMALL_AREA,
    TOLERANCE,
    Case,
    build_cache,
    by_name,
    case,
    relative,
    small_options,
    stock_pipeline,
)

TinyModel = Callable[[str], Path]
STEPS, SEED = 3, 7
CASES = {
    "t2i": case([(160, 107)], "a pagoda, 黑白"),
    "edit": case([(107, 160), (107, 160)], "make it 黑白"),
    "edit-plus": case([(160, 107), (333, 517), (160, 107)], "put the cat beside the flower"),
    "edit-2511": case([(128, 128), (107, 160), (160, 160)], "put the cat beside the flower"),
    "edit-2511 without a control": case([(160, 107)], "a pagoda, 黑白"),
}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def small_areas() -> Any:
    with pytest.MonkeyPatch.context() as monkeypatch:
        for module in (pipeline_qwenimage_edit, pipeline_qwenimage_edit_plus):
            stock = module.calculate_dimensions
            monkeypatch.setattr(module, "calculate_dimensions", lambda area, ratio, f=stock: f(SMALL_AREA[area], ratio))
        yield


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory, tiny_model: TinyModel) -> Callable[..., tuple[Sample, Any]]:
    """`cached("edit", torch.float32)`: the sample of CASES, and the stock pipeline that takes its images."""
    made: dict[tuple[str, torch.dtype], Sample] = {}

    def get(variant: str, dtype: torch.dtype = torch.float32) -> tuple[Sample, Any]:
        name = variant.removesuffix(" without a control")
        model, stock_name = tiny_model(name), name if CASES[variant].controls else "t2i"
        if (variant, dtype) not in made:
            options = (*small_options(name), "--dtype", str(dtype).removeprefix("torch."))
            options += ("--set", "data.allow_no_control=true")
            built = build_cache(tmp_path_factory.mktemp("cache"), {"x": CASES[variant]}, model, *options)
            made[variant, dtype] = built[0]
        return made[variant, dtype], stock_pipeline(model, stock_name, dtype)

    return get


def stock(pipeline: Any, sample: Sample, it: Case, **arguments: Any) -> Any:
    """The latents with which the pipeline ends, at the target's size."""
    one_image = len(it.controls) == 1
    image_argument = {"image": it.controls[0] if one_image else list(it.controls)} if it.controls else {}
    given = {"prompt": it.prompt} if "prompt_embeds" not in arguments else {}
    _, h, w = sample.img_shapes[0]
    return pipeline(
        **image_argument,
        **{**given, "num_inference_steps": STEPS, "true_cfg_scale": 1.0, "output_type": "latent", **arguments},
        height=16 * h,
        width=16 * w,
        generator=torch.Generator().manual_seed(SEED),
    ).images[0]


def ours(pipeline: Any, sample: Sample, dtype: torch.dtype = torch.float32, **arguments: Any) -> Tensor:
    return generate_cached(
        sample,
        pipeline.transformer,
        FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config),
        **{"num_inference_steps": STEPS, **arguments},
        family=QWEN_IMAGE,
        latents=initial_latents(sample, SEED, dtype, QWEN_IMAGE),
        device=CPU,
        dtype=dtype,
    )


# ---- the drawing -----------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("variant", CASES)
def test_it_is_the_stock_pipelines_of_the_images_and_the_prompt(
    variant: str, guidance: float, cached: Callable[..., tuple[Sample, Any]], small_areas: None
) -> None:
    sample, pipeline = cached(variant)
    negative = {"negative_prompt": "", "true_cfg_scale": guidance} if guidance > 1 else {}
    expected = stock(pipeline, sample, CASES[variant], **negative)
    found = ours(pipeline, sample, true_cfg_scale=guidance)
    if not CASES[variant].controls:  # nothing is encoded in other pieces than there
        assert torch.equal(found, expected)
    assert relative(found, expected) < TOLERANCE


@pytest.mark.fast_cases(6)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", CASES)
def test_from_the_same_rows_it_is_the_stock_pipelines_bit_for_bit(
    variant: str, dtype: torch.dtype, guidance: float, cached: Callable[..., tuple[Sample, Any]], small_areas: None
) -> None:
    sample, pipeline = cached(variant, dtype)
    embeds = {"prompt_embeds": sample["prompt_embeds"]}
    embeds |= {"negative_prompt_embeds": sample["empty_prompt_embeds"]} if guidance > 1 else {}
    rows = {name: each[None].clone() for name, each in embeds.items()}
    masks = {f"{name}_mask": torch.ones(each.shape[:2], dtype=torch.long) for name, each in rows.items()}
    prepare = pipeline.prepare_latents

    def with_cached_controls(*arguments: Any) -> Any:  # its own noise
        found = prepare(*arguments)
        return (found[0], sample["control_latents"][None].clone()) if isinstance(found, tuple) else found

    with patch.object(pipeline, "prepare_latents", with_cached_controls):
        expected = stock(pipeline, sample, CASES[variant], **rows, **masks, true_cfg_scale=guidance)
    assert torch.equal(ours(pipeline, sample, dtype, true_cfg_scale=guidance), expected)


def test_guidance_goes_away_from_the_empty_prompt_and_no_other(
    cached: Callable[..., tuple[Sample, Any]], small_areas: None
) -> None:
    sample, pipeline = cached("edit-plus")
    found = ours(pipeline, sample, true_cfg_scale=3.0)
    blank = stock(pipeline, sample, CASES["edit-plus"], negative_prompt=" ", true_cfg_scale=3.0)
    assert relative(found, blank) > 1e-3
    assert relative(found, ours(pipeline, sample)) > 1e-3


def test_sigmas_can_be_given(cached: Callable[..., tuple[Sample, Any]], small_areas: None) -> None:
    sample, pipeline = cached("edit-plus")
    sigmas = [1.0, 0.8, 0.1]  # the first and the last are stretched to 1 and shift_terminal anyway
    expected = stock(pipeline, sample, CASES["edit-plus"], sigmas=sigmas)
    found = ours(pipeline, sample, sigmas=sigmas)
    assert relative(found, expected) < TOLERANCE
    assert relative(found, ours(pipeline, sample)) > 1e-3


def test_each_step_is_told_and_may_be_the_last(cached: Callable[..., tuple[Sample, Any]]) -> None:
    sample, pipeline = cached("edit")
    seen: list[int] = []
    whole = ours(pipeline, sample, on_step=seen.append)
    assert seen == [1, 2, 3]
    assert torch.equal(whole, ours(pipeline, sample))
    after: list[Tensor] = []
    stock_step = FlowMatchEulerDiscreteScheduler.step

    def recorded(*arguments: Any, **options: Any) -> Any:
        after.append(stock_step(*arguments, **options)[0])
        return (after[-1],)

    with patch.object(FlowMatchEulerDiscreteScheduler, "step", recorded):
        stopped = ours(pipeline, sample, on_step=lambda done: done == 2)
    assert len(after) == 2
    assert torch.equal(stopped, after[1][0])


def test_a_transformer_that_generates_a_second_image_begins_again(cached: Callable[..., tuple[Sample, Any]]) -> None:
    """With one scheduler for all of them."""
    sample, pipeline = cached("edit")
    scheduler = FlowMatchEulerDiscreteScheduler.from_config(pipeline.scheduler.config)
    latents = initial_latents(sample, 1, torch.float32, QWEN_IMAGE)
    settings = {"family": QWEN_IMAGE, "num_inference_steps": 2, "latents": latents}
    one, two = (
        generate_cached(sample, pipeline.transformer, scheduler, **settings, device=CPU, dtype=torch.float32)
        for _ in range(2)
    )
    assert torch.equal(one, two)


def test_guidance_without_the_empty_prompt_is_refused(
    cached: Callable[..., tuple[Sample, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sample, pipeline = cached("edit")
    monkeypatch.delitem(sample.row.meta.tensors, "empty_prompt_embeds")
    with pytest.raises(TrainError, match=r"sample x: guidance needs the embeddings of the empty prompt.*scale=2.0"):
        ours(pipeline, sample, true_cfg_scale=2.0)
    assert ours(pipeline, sample).isfinite().all()


def test_the_negative_prompt_decides_about_guidance_as_in_the_pipelines() -> None:
    assert guidance_from_cache(None, 4.0) == 1.0
    assert guidance_from_cache("", 4.0) == 4.0
    with pytest.raises(
        ConfigError, match=r"the only negative prompt in a cache \(found predict.negative_prompt='blurry'\)"
    ):
        guidance_from_cache("blurry", 4.0)


def test_the_image_is_the_stock_pipelines(
    cached: Callable[..., tuple[Sample, Any]], tiny_model: TinyModel, small_areas: None
) -> None:
    sample, pipeline = cached("edit-plus")
    vae = load_vae(open_model(str(tiny_model("edit-plus")), ("vae",)), CPU, torch.float32)
    (found,) = decode_images(vae, ours(pipeline, sample), sample.img_shapes[:1])
    expected = stock(pipeline, sample, CASES["edit-plus"], output_type="pil")
    assert np.abs(np.asarray(found).astype(int) - np.asarray(expected)).max() <= 1
    other = stock(pipeline, sample, CASES["edit-plus"], output_type="pil", prompt="another")
    assert np.abs(np.asarray(found).astype(int) - np.asarray(other)).max() > 1


def test_cached_latents_of_several_images_are_decoded_each_by_itself(
    cached: Callable[..., tuple[Sample, Any]], tiny_model: TinyModel
) -> None:
    """To show the controls beside the generated image; the tiny VAE keeps a coarse image."""
    sample, _ = cached("edit-plus")
    vae = load_vae(open_model(str(tiny_model("edit-plus")), ("vae",)), CPU, torch.float32)
    decoded = decode_images(vae, sample["control_latents"], sample.img_shapes[1:])
    assert [image.size for image in decoded] == [(16 * w, 16 * h) for _, h, w in sample.img_shapes[1:]]
    for image, control in zip(decoded, CASES["edit-plus"].controls, strict=True):
        errors = [
            np.abs(np.asarray(image).astype(int) - np.asarray(other.resize(image.size))).mean()
            for other in (control, *CASES["edit-plus"].controls)
        ]
        assert errors[0] == min(errors)
        assert max(errors) > 2 * min(errors), errors


# ---- the sample ------------------------------------------------------------------------------------------------------


@pytest.fixture
def opened(built: Callable[..., Path]) -> Cache:
    return open_cache(built("edit-plus"))


def test_a_sample_is_found_by_key_the_beginning_of_it_or_name(opened: Cache) -> None:
    for sample in opened:
        for which in (sample.key, sample.key[:4], sample.key[:20].upper(), sample.name):
            assert find_sample([opened], which)[1].key == sample.key
    assert by_name(opened).keys() == {"china", "flower", "cat", "cup"}


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("chinna", "(found chinna)\n  → did you mean china?"),
        ("000000", "no sample has this name, key or start of a key (found 000000)\n  → name one, such as c"),
        ("", "no sample has this name, key or start of a key"),
    ],
)
def test_what_names_no_sample_is_refused_with_names_like_it(which: str, message: str, opened: Cache) -> None:
    with pytest.raises(ConfigError) as error:
        find_sample([opened], which)
    assert message in str(error.value)
    assert str(opened.folder) in str(error.value)


def test_what_names_several_samples_is_refused_with_their_keys(opened: Cache) -> None:
    keys, names = [f"abcdef{i}{'0' * 25}" for i in range(2)], ["cat", "cat"]
    table = opened.table.slice(0, 2)
    for column, values in (("key", keys), ("name", names)):
        table = table.set_column(table.column_names.index(column), column, [values])
    two = Cache(opened.folder, opened.manifest, opened.recipe_name, table, opened.copies)
    for which in ("cat", "abcdef"):
        with pytest.raises(QwenCacheError) as error:
            find_sample([two], which)
        assert f"several samples match (found cat ({keys[0]}), cat ({keys[1]}))" in str(error.value)
