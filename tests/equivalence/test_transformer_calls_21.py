"""Qwen-Image-2.1: the model answers stock calls, is saved as a stock model, and refuses what contradicts itself."""

from __future__ import annotations

import doctest
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache, QwenImage21Transformer2DModel

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.models.family import QWEN_IMAGE_21
from qwen_train.model import qwen_image_21
from qwen_train.model.qwen_image_21 import QwenImage21MultiResAttnProcessor, QwenImage21MultiResTransformer2DModel
from tests.support.judge import TOLERANCE
from tests.support.transformer_21_judge import (
    MIXED_21,
    TINY_21,
    batch_of,
    multi_res_model,
    random_samples,
    run_batched,
    run_singly,
    stock_batch,
    stock_model,
)
from tests.support.transformer_judge import (
    assert_equal,
    distance,
)

LAYERS = TINY_21["num_layers"]


# ---- stock calls -----------------------------------------------------------------------------------------------------


def test_with_img_mask_it_is_the_stock_model(layout: str) -> None:
    stock, [sample] = stock_model(), random_samples(([(4, 6), (2, 2), (6, 4)], [2, 5], 7))
    batch = stock_batch(sample)
    text_length = batch["encoder_hidden_states"].shape[1]
    batch["encoder_hidden_states_mask"] = torch.arange(text_length)[None] < text_length - 1
    with torch.no_grad():
        assert torch.equal(multi_res_model(stock, layout)(**batch).sample, stock(**batch).sample)


def test_key_value_cache_of_the_stock_model() -> None:
    stock, [sample] = stock_model(), random_samples(([(4, 6), (6, 4)], [2], 7))
    batch, results = stock_batch(sample), []
    with torch.no_grad():
        for model in (stock, multi_res_model(stock)):
            cache = QwenImage21KVCache(LAYERS)
            model(**batch, kv_cache=cache, kv_cache_mode="extract")
            later = {**batch, "timestep": batch["timestep"] / 2}
            results.append(model(**later, kv_cache=cache, kv_cache_mode="cached").sample)
        whole = stock(**later).sample[:, -24:]
    assert torch.equal(*results)
    assert distance(results[1], whole) < TOLERANCE


def test_saved_model_is_a_stock_model(tmp_path: Path) -> None:
    stock_model().save_pretrained(tmp_path / "stock")
    model = QwenImage21MultiResTransformer2DModel.from_pretrained(tmp_path / "stock")
    model.save_pretrained(tmp_path / "ours")
    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "ours")]
    assert configs[1]["_class_name"] == "QwenImage21Transformer2DModel"
    assert {**configs[1], "_name_or_path": None} == {**configs[0], "_name_or_path": None}
    weights = [(tmp_path / folder / "diffusion_pytorch_model.safetensors").read_bytes() for folder in ("stock", "ours")]
    assert weights[0] == weights[1]


def test_from_stock_keeps_parameters_and_backend(layout: str) -> None:
    stock, samples = stock_model(), random_samples(*MIXED_21)
    expected, parameters = run_singly(stock, samples), dict(stock.named_parameters())
    stock.set_attention_backend("_native_math")
    model = QwenImage21MultiResTransformer2DModel.from_stock(stock)
    model.layout = layout
    assert model is stock
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    processors = model.attn_processors.values()
    assert all(isinstance(processor, QwenImage21MultiResAttnProcessor) for processor in processors)
    assert {processor._attention_backend.value for processor in processors} == {"_native_math"}
    assert_equal(run_batched(model, samples), expected)


def test_names_by_which_others_find_the_blocks() -> None:
    """Device maps, FSDP and `compile_repeated_blocks` go by the name of the class."""
    model = multi_res_model(stock_model())
    names = [type(block).__name__ for block in model.transformer_blocks]
    assert names == model._no_split_modules * len(names) == model._repeated_blocks * len(names)


def test_example_in_the_docstring() -> None:
    results = doctest.testmod(qwen_image_21)
    assert results.attempted > 0
    assert results.failed == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

TWO = [([(4, 6), (6, 4)], [2], 5), ([(4, 4)], [], 3)]  # 24 + 2 * 24 and 2 * 16 image tokens
POSITIONS = "\n  → give, per sample, the number of text rows before each condition image"


@pytest.mark.parametrize(
    ("overridden", "message"),
    [
        (
            {"img_shapes": [[(1, 4, 6), (1, 6, 4)]]},
            "img_shapes: one list of images per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"img_shapes": [[(1, 6, 4)], [(1, 4, 4)]]},
            "hidden_states: img_shapes, timestep and hidden_states disagree: the longest sample has the images "
            "[(1, 6, 4)], the target last, with 2 noise draws (expected 48 image tokens, found 72)\n"
            "  → give every condition image, then the target once per column of timestep",
        ),
        ({"timestep": torch.rand(2)}, "with 1 noise draws (expected 48 image tokens, found 72)"),
        ({"timestep": torch.rand(2, 3)}, "with 3 noise draws (expected 96 image tokens, found 72)"),
        (
            {"timestep": torch.rand(2, 2, 1)},
            "timestep: the timesteps cannot be read (expected [B], or [B, K] for K noise draws, found shape (2, 2, 1))",
        ),
        ({"timestep": torch.rand(())}, "the timesteps cannot be read"),
        ({"timestep": torch.rand(2, 0)}, "found shape (2, 0)"),
        (
            {"timestep": torch.rand(1, 2)},
            "timestep: one row per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"encoder_hidden_states": torch.rand(3, 5, 48)},
            "encoder_hidden_states: one row per sample is needed (expected 2 samples, as in hidden_states, found 3)",
        ),
        (
            {"encoder_hidden_states_mask": torch.ones(2, 4)},
            "encoder_hidden_states_mask: the text mask does not fit the text (expected shape (2, 5), found (2, 4))",
        ),
        (
            {"image_positions": None},
            "image_positions: there are condition images, so their positions are needed (expected one list per "
            "sample, found None)" + POSITIONS,
        ),
        (
            {"image_positions": [[2]]},
            "image_positions: one list of positions per sample is needed (expected 2 samples, as in hidden_states, "
            "found 1)" + POSITIONS,
        ),
        (
            {"image_positions": [[2], [3]]},
            "image_positions: sample 1 needs one per condition image (expected 0, found [3])" + POSITIONS,
        ),
        (
            {"image_positions": [[6], []]},
            "image_positions: sample 0 has images outside its text or out of order (expected numbers of text rows "
            "before each image, from 0 to 5, none less than the one before, found [6])" + POSITIONS,
        ),
        ({"image_positions": [[-1], []]}, "from 0 to 5, none less than the one before, found [-1])"),
        ({"img_shapes": None}, "forward needs timestep and img_shapes (found None)"),
        ({"timestep": None}, "forward needs timestep and img_shapes (found None)"),
        (
            {"kv_cache_mode": "extract"},
            "forward: kv_cache_mode is for calls with img_mask (expected None, found str)",
        ),
    ],
)
def test_contradictory_batch_is_refused(layout: str, overridden: dict[str, Any], message: str) -> None:
    model = multi_res_model(stock_model(), layout)
    with pytest.raises(TrainError) as refusal:
        model(**{**batch_of(random_samples(*TWO, draws=2)), **overridden})
    assert message in str(refusal.value)


def test_images_out_of_order_are_refused() -> None:
    batch = batch_of(random_samples(([(2, 2), (2, 2), (4, 4)], [1, 3], 4)))
    with pytest.raises(TrainError, match=r"sample 0 has images outside its text or out of order.*found \[3, 1\]"):
        multi_res_model(stock_model())(**{**batch, "image_positions": [[3, 1]]})


def test_positions_beyond_the_rope_table_are_refused(layout: str) -> None:
    """The table has 8192 positions; a condition image 8 tokens wide takes 8 of them, and the target one."""
    model = multi_res_model(stock_model(num_layers=1), layout)
    [fits] = random_samples(([(2, 8), (2, 2)], [0], 8183))
    with torch.no_grad():
        model(**batch_of([fits]))
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(([(2, 2)], [], 3), ([(2, 8), (2, 2)], [0], 8184))))
    assert str(refusal.value) == (
        "encoder_hidden_states: the text is longer than the RoPE table beside condition images of [(1, 2, 8)] "
        "(expected at most 8183 text rows, found 8184)\n  → shorten the text or the images"
    )
    assert QWEN_IMAGE_21.longest_text([(1, 9, 9), (1, 2, 8)]) == 8183, "a cache has the target first"
    with pytest.raises(
        TrainError, match=r"larger than the RoPE table \(expected sides of at most 2048 tokens, found 2049\)"
    ):
        model(**batch_of(random_samples(([(1, 2049)], [], 3))))


def test_prefix_that_depends_on_the_timestep_is_refused() -> None:
    stock = stock_model(causal_condition=False)
    for make in (
        lambda: QwenImage21MultiResTransformer2DModel(**TINY_21, causal_condition=False),
        lambda: QwenImage21MultiResTransformer2DModel.from_stock(stock),
    ):
        with pytest.raises(ModelError) as refusal:
            make()
        assert str(refusal.value) == (
            "config.json: the prefix of this checkpoint depends on the timestep, so noise draws cannot share it "
            "(expected causal_condition true, found false)\n  → load a Qwen-Image-2.1 transformer"
        )
    assert type(stock) is QwenImage21Transformer2DModel


@pytest.mark.parametrize("backend", ["flash_varlen", "_flash_varlen_3", "sage_varlen"])
def test_backend_that_would_misread_the_mask_is_refused(layout: str, backend: str) -> None:
    """Only if there is a mask: text after an image."""
    model = multi_res_model(stock_model(), layout)
    for processor in model.attn_processors.values():
        processor._attention_backend = backend  # set_attention_backend asks for the package first
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(*MIXED_21)))
    assert str(refusal.value) == (
        "attention backend: this attention backend misreads the causal mask of text after an image (expected one that "
        f'takes a mask, such as native, found {backend})\n  → call set_attention_backend("native")'
    )
