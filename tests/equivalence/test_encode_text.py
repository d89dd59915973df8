"""Embeddings in a cache: the pipelines' tokens, pixels and positions, for any prompt, at the price of one pass.

The judge is the stock pipeline's `encode_prompt`, which encodes every prompt by itself from the first token on, with
three-dimensional positions passed in from outside; and positions counted by hand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from diffusers import QwenImagePipeline
from PIL import Image
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import (
    Qwen2_5_VisionTransformerPretrainedModel,
    Qwen2_5_VLModel,
    Qwen2_5_VLTextModel,
)

from qwen_cache.encode.text import TextEncoder
from qwen_cache.errors import ModelError
from qwen_cache.models.encoders import ImageOnlyQwen2VLProcessor
from qwen_cache.models.family import PIPELINES as KNOWN
from qwen_cache.models.folder import ENCODER_PARTS, open_model
from tests.support.judge import (
    LONG,
    PIPELINES,
    PROMPTS,
    Case,
    Size,
    TinyModel,
    assert_matches_stock,
    assert_same,
    build_cache,
    by_name,
    case,
    exact_pipeline,
    image,
    relative,
    small_options,
    stock_pipeline,
    transformer_inputs,
)
from tests.support.text_encoder import images, recording, stock_embeds

TextEncoders = Callable[..., TextEncoder]
NUMBERS = [("t2i", 0), ("edit", 1), ("edit-plus", 1), ("edit-plus", 2), ("edit-plus", 4), ("edit-2511", 3)]
"""Variants, each with numbers of images."""


@pytest.fixture(scope="module")
def text_encoder(tiny_model: TinyModel) -> TextEncoders:
    @cache
    def load(variant: str, dtype: torch.dtype = torch.float32) -> TextEncoder:
        return TextEncoder(open_model(str(tiny_model(variant)), ENCODER_PARTS), torch.device("cpu"), dtype)

    return load


def slow(values: tuple[Any, ...]) -> Any:
    """The parameters of a twin of a faster test."""
    return pytest.param(*values, marks=pytest.mark.slow)


def our_embeds(encoder: TextEncoder, controls: list[Image.Image], *prompts: str) -> list[Tensor]:
    """`[L, D]` of each prompt, all on one prefix."""
    prefixes = encoder.read([encoder.inputs(controls)])
    rests = encoder.embed(prefixes, [(0, p, None) for p in prompts])
    return [torch.cat([prefixes.embeds[0], rest.embeds]) for rest in rests]


# ---- tokens ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize(("variant", "count"), NUMBERS)
def test_the_tokens_are_the_pipelines_and_so_is_what_is_dropped(
    variant: str, count: int, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """Trap 9: text-to-image, edit and edit-plus have templates of their own."""
    pipeline = stock_pipeline(tiny_model(variant), variant)
    for prompt in (prompt[:400] for prompt in PROMPTS.values()):
        with recording(Qwen2_5_VLModel) as calls:
            (encoded,) = our_embeds(text_encoder(variant), images(count), prompt)
            stock_embeds(pipeline, images(count), prompt)
        *pieces, stock = (call["input_ids"] for call in calls)
        ours = torch.cat(pieces, dim=1)
        assert torch.equal(ours, stock)
        assert len(encoded) == ours.shape[1] - pipeline.prompt_template_encode_start_idx
    decoded = pipeline.tokenizer.decode(ours[0])
    assert sum(decoded.count(f"Picture {i}: ") for i in range(1, 9)) == (
        count if variant in ("edit-plus", "edit-2511") else 0
    )
    assert decoded.count("<|vision_end|>") == count


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("variant", PIPELINES)
def test_the_recipe_names_what_the_pipeline_drops(variant: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    pipeline = stock_pipeline(tiny_model(variant), variant)
    cases = {"it": case([(100, 100)] if variant == "t2i" else [(100, 100), (100, 100)], "make it blue")}
    recipe = build_cache(tmp_path, cases, tiny_model(variant), *small_options(variant)).recipe.recipe
    assert recipe["drop_idx"] == pipeline.prompt_template_encode_start_idx == (34 if variant == "t2i" else 64)
    assert recipe.get("positions") == (None if variant == "t2i" else "mrope-3d")


def test_text_to_image_keeps_as_many_tokens_as_the_pipeline() -> None:
    defaults = inspect.signature(QwenImagePipeline.__call__).parameters
    assert KNOWN["QwenImagePipeline"].template.max_length == defaults["max_sequence_length"].default


@pytest.mark.parametrize("word", ["<|im_end|>", "<|im_start|>user", "<|vision_start|>", "<|vision_end|>"])
def test_special_tokens_in_a_prompt_do_not_move_the_prefix(
    word: str, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    prompts = [f"write {word} on the wall", "", f"paint {word} twice: {word}"]
    pipeline = stock_pipeline(tiny_model("edit-plus"), "edit-plus")
    for prompt, ours in zip(prompts, our_embeds(text_encoder("edit-plus"), images(2), *prompts), strict=True):
        assert_same(ours, stock_embeds(pipeline, images(2), prompt))


def test_the_end_of_a_long_instruction_about_three_images_is_there(
    text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """Trap 12: no limit counts the images' tokens first and then has no room for the words."""
    encoder, pipeline = text_encoder("edit-plus"), stock_pipeline(tiny_model("edit-plus"), "edit-plus")
    three, seven = our_embeds(encoder, images(3), f"{LONG} Number 3", f"{LONG} Number 7")
    after = len(pipeline.tokenizer("3<|im_end|>\n<|im_start|>assistant\n").input_ids)
    assert len(three) == len(seven) > 1024
    assert_same(three[:-after], seven[:-after])
    assert float((three - seven)[-after:].norm(dim=-1).min()) > 0
    assert_same(three, stock_embeds(pipeline, images(3), f"{LONG} Number 3"))


@pytest.mark.parametrize("variant", ["t2i", "edit"])
def test_a_prompt_alone_equals_its_row_of_a_padded_batch(
    variant: str, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """Trap 8: the mask is None where all is valid, and there only; what is stored has no padding."""
    pipeline, prompts = stock_pipeline(tiny_model(variant), variant), [PROMPTS["chinese"], "make it blue"]
    arguments = {"image": images(1) * 2} if variant == "edit" else {}
    with torch.no_grad():
        embeds, mask = pipeline.encode_prompt(prompts, **arguments)
    assert mask[0].all()
    assert not mask[1].all()
    for i, prompt in enumerate(prompts):
        (ours,) = our_embeds(text_encoder(variant), images(len(arguments)), prompt)
        assert_same(ours, embeds[i][mask[i].bool()])
        assert_same(ours, stock_embeds(pipeline, images(len(arguments)), prompt))


# ---- pixels ----------------------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("variant", ["edit", "edit-plus"])
def test_the_vision_tower_sees_the_pixels_that_the_pipeline_shows_it(
    variant: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Trap 10: Lanczos from the original to the condition size, then the processor's own; not from the VAE's pixels."""
    sizes = [(300, 200), (333, 517)] if variant == "edit" else [(300, 200), (1201, 803), (333, 517)]
    it = case(sizes, "make it blue")
    with recording(Qwen2_5_VisionTransformerPretrainedModel) as calls:
        build_cache(tmp_path, {"it": it}, tiny_model(variant), "--dtype", "float32", *small_options(variant))
        transformer_inputs(stock_pipeline(tiny_model(variant), variant), it.controls, it.prompt)
    ours, *stock = (call["hidden_states"] for call in calls)
    assert len(stock) == 2  # it encodes the images for the empty prompt once more
    assert torch.equal(ours, stock[0])


# ---- positions -------------------------------------------------------------------------------------------------------


def counted_positions(token_is_image: list[bool], grids: list[tuple[int, int]]) -> Tensor:
    """`[3, 1, L]`: words count on in all axes; an image's tokens lie at (time, row, column) from where it begins."""
    positions, start, i = [], 0, 0
    left = list(grids)
    while i < len(token_is_image):
        if token_is_image[i]:
            height, width = left.pop(0)
            positions += [(start, start + row, start + column) for row in range(height) for column in range(width)]
            start, i = start + max(height, width), i + height * width
        else:
            positions.append((start, start, start))
            start, i = start + 1, i + 1
    return torch.tensor(positions).T[:, None]


@pytest.mark.parametrize(("variant", "count"), [("edit", 1), ("edit-plus", 1), ("edit-plus", 4)])
def test_positions_are_three_dimensional(variant: str, count: int, text_encoder: TextEncoders) -> None:
    """Trap 23: for the prompt, and for the empty prompt, which continues behind the images."""
    encoder = text_encoder(variant)
    image_token = encoder.processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    with recording(Qwen2_5_VLTextModel) as model_calls, recording(Qwen2_5_VLModel) as calls:
        our_embeds(encoder, images(count), "make it blue", "")
    positions, ids = [call["position_ids"] for call in model_calls], [call["input_ids"] for call in calls]
    merged = [(h // 2, w // 2) for _, h, w in calls[0]["image_grid_thw"].tolist()]
    for i in (1, 2):
        is_image = torch.cat([ids[0], ids[i]], dim=1)[0] == image_token
        expected = counted_positions(is_image.tolist(), merged)
        assert torch.equal(torch.cat([positions[0], positions[i]], dim=2), expected)
        _, rows, columns = expected[:, 0, is_image]
        assert not torch.equal(rows, columns)


def test_a_processor_without_token_types_is_refused(text_encoder: TextEncoders) -> None:
    """Trap 23: transformers would fall back to one-dimensional positions and say nothing."""
    call = ImageOnlyQwen2VLProcessor.__call__

    def forget(self: Any, **inputs: Any) -> Any:
        output = call(self, **inputs)
        del output["mm_token_type_ids"]
        return output

    with (
        patch.object(ImageOnlyQwen2VLProcessor, "__call__", forget),
        pytest.raises(ModelError, match="no mm_token_type_ids: positions would silently be one-dimensional"),
    ):
        text_encoder("edit-plus").inputs(images(1))


@pytest.mark.parametrize("variant", ["edit", "edit-plus", "edit-2511"])
def test_the_uncorrected_pipeline_says_something_else(
    variant: str, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """Trap 23: why the judge corrects it, and why `predict` has to pass embeddings of ours."""
    (ours,) = our_embeds(text_encoder(variant), images(1), "make it blue")
    right, uncorrected = (
        stock_embeds(stock_pipeline(tiny_model(variant), variant, corrected=corrected), images(1), "make it blue")
        for corrected in (True, False)
    )
    assert_same(ours, right)
    assert relative(ours, uncorrected) > 0.1


# ---- the shared prefix -----------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "count"), [*NUMBERS[:2], NUMBERS[4], *map(slow, (*NUMBERS[2:4], NUMBERS[5]))])
def test_every_prompt_equals_a_full_pass_of_its_own(
    variant: str, count: int, dtype: torch.dtype, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """In bfloat16 as near to the exact result; and bit for bit the same whatever was embedded before it."""
    prompts = ["make it blue", *(prompt[:200] for prompt in PROMPTS.values()), "make it blue"]
    encoder, folder = text_encoder(variant, dtype), tiny_model(variant)
    together = our_embeds(encoder, images(count), *prompts)
    for prompt, ours in zip(prompts, together, strict=True):
        stock = stock_embeds(stock_pipeline(folder, variant, dtype), images(count), prompt)
        in_bfloat16 = dtype == torch.bfloat16
        exact = stock_embeds(exact_pipeline(folder, variant), images(count), prompt) if in_bfloat16 else None
        assert_same(ours, stock, exact)
        (alone,) = our_embeds(encoder, images(count), prompt)
        assert torch.equal(ours, alone)  # in passes of one prompt: the same shapes


@pytest.mark.fast_cases(4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("variant", "count"), NUMBERS)
def test_in_one_pass_the_embeddings_are_the_pipelines_bit_for_bit(
    variant: str, count: int, dtype: torch.dtype, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """`predict` generates with the same modules on the same shapes."""
    ours = text_encoder(variant, dtype).encode_whole(images(count), PROMPTS["chinese"])[0]
    stock = stock_embeds(stock_pipeline(tiny_model(variant), variant, dtype), images(count), PROMPTS["chinese"])
    assert torch.equal(ours, stock)


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(("variant", "size"), [("edit", (1024, 1024)), ("edit-plus", (384, 384))])
def test_two_prompts_cost_as_much_as_one(
    variant: str, size: Size, text_encoder: TextEncoders, tiny_model: TinyModel
) -> None:
    """Counted in tokens that go through the language model, at the pipelines' sizes; the vision tower runs once."""
    controls, prompt = [image("china.jpg", size)], "Make it look like late autumn"
    with recording(Qwen2_5_VLTextModel) as stock:
        stock_embeds(stock_pipeline(tiny_model(variant), variant), controls, prompt)
    with recording(Qwen2_5_VLTextModel) as ours, recording(Qwen2_5_VisionTransformerPretrainedModel) as vision:
        our_embeds(text_encoder(variant), controls, prompt, "")
    one_pass, both = (sum(call["inputs_embeds"].shape[1] for call in calls) for calls in (stock, ours))
    assert (len(stock), len(ours), len(vision)) == (1, 3, 1)
    assert one_pass < both < 1.05 * one_pass


def test_lm_head_is_never_run(tiny_model: TinyModel, tmp_path: Path) -> None:
    """The pipelines run it over every token, and throw away what it says."""
    pipeline = stock_pipeline(tiny_model("edit-plus"), "edit-plus")
    words = pipeline.text_encoder.lm_head.out_features
    runs: list[nn.Module] = []

    def count(module: nn.Module, _: Any) -> None:
        if isinstance(module, nn.Linear) and module.out_features == words:
            runs.append(module)

    handle = register_module_forward_pre_hook(count)
    try:
        cases = {"it": case([(150, 100), (100, 150)], "make it blue")}
        build_cache(tmp_path, cases, tiny_model("edit-plus"), *small_options("edit-plus"))
        assert not runs
        stock_embeds(pipeline, images(1), "make it blue")
        assert len(runs) == 1
    finally:
        handle.remove()


@pytest.mark.fast_cases(1)
@pytest.mark.usefixtures("small_areas")
@pytest.mark.parametrize("variant", ["edit", "edit-plus"])
def test_the_empty_prompt_is_about_the_images_in_both_formats(
    variant: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Trap 19: it equals the encoder on (images, ""), not on a dummy image, and is no zeros."""
    controls = {name: image(f"{name}.jpg", (150, 100)) for name in ("china", "flower")}
    cases = {name: Case(control, (control,), "make it blue") for name, control in controls.items()}
    options = ["--dtype", "float32", *small_options(variant)]
    v1, v2 = (
        by_name(build_cache(tmp_path / form, cases, tiny_model(variant), "--format", form, *options))
        for form in ("v1", "v2")
    )
    for name, it in cases.items():
        fed = transformer_inputs(stock_pipeline(tiny_model(variant), variant), it.controls, it.prompt)
        stock = fed.empty_prompt_embeds
        assert_same(v1[name].stored("empty_prompt_embeds"), stock)
        assert_same(v2[name]["empty_prompt_embeds"], stock)
        rest = v2[name].stored("empty_prompt_embeds")
        assert_same(rest, stock[-len(rest) :])
        assert_same(v2[name]["prompt_embeds"][: len(stock) - len(rest)], stock[: -len(rest)])
        assert len(rest) < 0.5 * len(stock)
    assert relative(v2["china"]["empty_prompt_embeds"], v2["flower"]["empty_prompt_embeds"]) > 0.1


@pytest.mark.usefixtures("small_areas")
def test_samples_with_the_same_instruction_keep_their_own_embeddings(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Trap 1: the embeddings of an edit contain its images, so the prompt alone is no key."""
    target = image("coffee.png", (150, 100))
    controls = {name: image(f"{name}.jpg", (150, 100)) for name in ("china", "flower")}
    cases = {name: Case(target, (control,), "make it blue") for name, control in controls.items()}
    model = tiny_model("edit-plus")
    samples = by_name(build_cache(tmp_path, cases, model, "--dtype", "float32", *small_options("edit-plus")))
    assert samples["china"].key != samples["flower"].key
    for tensor in ("prompt_embeds", "empty_prompt_embeds", "control_latents"):
        assert relative(samples["china"][tensor], samples["flower"][tensor]) > 0.1
    for name, it in cases.items():
        assert_matches_stock(samples[name], it, model, "edit-plus")
