"""A batch of mixed sizes gives what the stock model gives for each sample alone: outputs and gradients.

Everything here holds for both layouts. Mutants of the code under test show that the judge would notice each mistake
that it is there for.
"""

from __future__ import annotations

import doctest
import inspect
import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImageTransformer2DModel
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from torch.utils.checkpoint import checkpoint

from qwen_cache.errors import ModelError, TrainError
from qwen_cache.models.family import QWEN_IMAGE
from qwen_train.model import attention, transformer
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel, QwenMultiResAttnProcessor
from tests.support.judge import TOLERANCE
from tests.support.transformer_judge import (
    CASES,
    COUNTS,
    LORA,
    MIN_MUTANT_ERROR,
    MIXED,
    TEXTS,
    TINY,
    Run,
    assert_as_near,
    assert_equal,
    batch_of,
    distance,
    gradient_error,
    multi_res_model,
    output_error,
    padded,
    random_samples,
    run_batched,
    run_in_float32,
    run_singly,
    stock_model,
    stock_run,
)
from tests.support.transformer_mutants import (
    MASK_MUTANTS,
    ROPE_MUTANTS,
)

# ---- equal to the stock model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
@pytest.mark.parametrize("case", CASES)
def test_batch_equals_stock_singles(layout: str, case: str, zero_cond_t: bool) -> None:
    model = multi_res_model(stock_model(zero_cond_t=zero_cond_t), layout)
    found = run_batched(model, random_samples(*CASES[case]))
    assert_equal(found, stock_run(CASES[case], zero_cond_t=zero_cond_t))


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
def test_nan_in_the_padding_reaches_nothing(layout: str, zero_cond_t: bool) -> None:
    model = multi_res_model(stock_model(zero_cond_t=zero_cond_t), layout)
    found = run_batched(model, random_samples(*MIXED), fill=math.nan)
    assert_equal(found, stock_run(MIXED, zero_cond_t=zero_cond_t))


@pytest.mark.parametrize("attention_mask", ["none", "all true"])
def test_without_padding_attention_gets_no_mask(
    layout: str, attention_mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = []
    dispatch = attention.dispatch_attention_fn
    monkeypatch.setattr(
        attention, "dispatch_attention_fn", lambda *a, **k: seen.append(k.get("attn_mask")) or dispatch(*a, **k)
    )
    model, samples = multi_res_model(stock_model(), layout), random_samples(*CASES["nothing to pad"])
    overridden = {"encoder_hidden_states_mask": None} if attention_mask == "none" else {}
    assert_equal(run_batched(model, samples, **overridden), stock_run(CASES["nothing to pad"]))
    assert seen == [None] * TINY["num_layers"] * (len(samples) if layout == "packed" else 1)


@pytest.mark.parametrize(
    "shapes", [[(1, 6, 4), (1, 4, 6)], [[1, 6, 4], [1, 4, 6]]], ids=["tuples", "lists, as in JSON"]
)
def test_one_list_of_images_serves_the_whole_batch(layout: str, shapes: list[Any]) -> None:
    model, samples = multi_res_model(stock_model(), layout), random_samples(*TEXTS)
    assert_equal(run_batched(model, samples, img_shapes=shapes), stock_run(TEXTS))


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
def test_precomputed_rope_of_each_sample(layout: str, zero_cond_t: bool) -> None:
    """Positions that stretch farther than the model's own, of which only the stock model on the other side knows."""
    stock, samples = stock_model(zero_cond_t=zero_cond_t), random_samples(*COUNTS)
    model = multi_res_model(stock, layout)
    stock.pos_embed = QwenEmbedRope(theta=500, axes_dim=list(TINY["axes_dims_rope"]), scale_rope=True)
    tables = [stock.pos_embed([s.images], max_txt_seq_len=len(s.text), device="cpu") for s in samples]
    rotary = tuple(padded(list(rows), math.nan) for rows in zip(*tables, strict=True))
    expected = run_singly(stock, samples)
    assert_equal(run_batched(model, samples, image_rotary_emb=rotary), expected)
    assert output_error(run_batched(model, samples), expected) > MIN_MUTANT_ERROR


def test_text_mask_with_holes_equals_stock_with_that_mask(layout: str) -> None:
    stock, samples = stock_model(), random_samples(([(6, 4)], 6), ([(4, 3), (3, 2)], 6))
    masks = torch.tensor([[1, 0, 1, 1, 0, 1], [0, 1, 1, 0, 0, 0]])
    with torch.no_grad():
        found = multi_res_model(stock, layout)(**{**batch_of(samples), "encoder_hidden_states_mask": masks}).sample
        for sample, mask, row in zip(samples, masks, found, strict=True):
            alone = stock(**{**batch_of([sample]), "encoder_hidden_states_mask": mask[None]}).sample[0]
            assert distance(row[: len(sample.image)], alone) < TOLERANCE


def test_additional_t_cond_belongs_to_its_sample(layout: str) -> None:
    stock, samples = stock_model(use_additional_t_cond=True), random_samples(*MIXED)
    conditions = torch.tensor([0, 1, 1])
    found = run_batched(multi_res_model(stock, layout), samples, additional_t_cond=conditions)
    for i, sample in enumerate(samples):
        alone = run_singly(stock, [sample], additional_t_cond=conditions[i : i + 1])
        assert distance(found.outputs[i], alone.outputs[0]) < TOLERANCE


@pytest.mark.parametrize("zero_cond_t", [False, True], ids=["edit", "edit-2511"])
def test_gradient_checkpointing_keeps_the_mask(layout: str, zero_cond_t: bool) -> None:
    model = multi_res_model(stock_model(zero_cond_t=zero_cond_t), layout).train()
    model.enable_gradient_checkpointing()
    assert_equal(run_batched(model, random_samples(*MIXED)), stock_run(MIXED, zero_cond_t=zero_cond_t))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients(layout: str, checkpointing: bool) -> None:
    stock, samples = stock_model(), random_samples(*MIXED)
    model = multi_res_model(stock, layout)
    stock.add_adapter(LORA)
    model.add_adapter(LORA)
    model.load_state_dict(stock.state_dict())
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    found, expected = run_batched(model, samples), run_singly(stock, samples)
    assert_equal(found, expected)
    assert found.gradients["transformer_blocks.0.attn.add_k_proj.lora_A.default.weight"].any()
    assert all("lora_" in name for name in found.gradients)


def test_lora_scale_is_that_of_the_stock_model(layout: str) -> None:
    stock, samples = stock_model(), random_samples(*MIXED)
    model = multi_res_model(stock, layout)
    stock.add_adapter(LORA)
    model.add_adapter(LORA)
    model.load_state_dict(stock.state_dict())
    scaled = run_singly(stock, samples, attention_kwargs={"scale": 0.25})
    assert_equal(run_batched(model, samples, attention_kwargs={"scale": 0.25}), scaled)
    assert output_error(run_batched(model, samples), scaled) > MIN_MUTANT_ERROR


def test_bfloat16_is_as_near_to_float32_as_the_stock_model(layout: str) -> None:
    """Rounding differs with the shape of every product, so the measure is float32."""
    samples, stock = random_samples(*MIXED, dtype=torch.bfloat16), stock_model().bfloat16()
    exact = run_in_float32(stock_model().bfloat16(), samples)
    batched = run_batched(multi_res_model(stock, layout).bfloat16(), samples)
    assert_as_near(batched, run_singly(stock, samples), exact)


# ---- the judge notices -----------------------------------------------------------------------------------------------


def neighbours_modulation(model: QwenImageMultiResTransformer2DModel) -> None:
    forward = model.time_text_embed.forward
    model.time_text_embed.forward = lambda *arguments: forward(*arguments).roll(1, dims=0)


def checkpoint_without_mask(model: QwenImageMultiResTransformer2DModel) -> None:
    model.enable_gradient_checkpointing()
    model._gradient_checkpointing_func = lambda block, *inputs: checkpoint(
        block, *inputs[:5], {"attention_mask": None}, inputs[6], use_reentrant=False
    )


def with_rows_rolled(packing: attention.Packing, name: str) -> attention.Packing:
    """Each run with the modulation of the run before it."""
    runs = getattr(packing, name).runs
    lengths, rows = zip(*runs, strict=True)
    rolled = list(zip(lengths, rows[-1:] + rows[:-1], strict=True))
    return replace(packing, **{name: attention.ModulationRows.of(rolled, torch.device("cpu"))})


def with_index_rolled(packing: attention.Packing) -> attention.Packing:
    return replace(packing, image_index=packing.image_index.roll(1))


def bounds_off_by_one(text: Any, image: Any, packing: attention.Packing, *rest: Any) -> Any:
    """The first sample gets a token of the second one's text, which loses it."""
    first, second, *others = packing.text_lengths
    return PACKED_ATTENTION(text, image, replace(packing, text_lengths=[first + 1, second - 1, *others]), *rest)


PACKING = attention.Packing.of
PACKED_ATTENTION = attention.packed_attention
SCATTER = transformer.scatter
NORM_OUT = transformer.norm_out
SCALED = attention.scaled

PACKING_MUTANTS = {
    "text padding packed too": lambda image, text, *rest: PACKING(image, torch.ones_like(text), *rest),
    "control images modulated as targets": lambda image, text, targets, *rest: PACKING(image, text, None, *rest),
    "neighbour's target length": lambda image, text, targets, *rest: PACKING(
        image, text, targets[1:] + targets[:1], *rest
    ),
    "image modulated by another sample": lambda *batch: with_rows_rolled(PACKING(*batch), "image_rows"),
    "text modulated by another sample": lambda *batch: with_rows_rolled(PACKING(*batch), "text_rows"),
    "gathered off by one": lambda *batch: with_index_rolled(PACKING(*batch)),
}
ROW_MUTANTS = {
    "attention across samples": (
        attention,
        "packed_attention",
        lambda text, image, packing, attend, _: attention.padded_attention(text, image, None, attend),
    ),
    "attention to one token of the next sample": (attention, "packed_attention", bounds_off_by_one),
    "scattered off by one": (transformer, "scatter", lambda row, *rest: SCATTER(row.roll(1, dims=1), *rest)),
    "last norm by another sample": (
        transformer,
        "norm_out",
        lambda module, x, temb, lengths: NORM_OUT(module, x, temb.roll(1, dims=0), lengths),
    ),
    "gate of another sample": (
        attention,
        "scaled",
        lambda x, factor, offset, rows: SCALED(x, factor.roll(1, 0) if offset is None else factor, offset, rows),
    ),
}


def assert_caught(specification: Any, layout: str) -> None:
    model = multi_res_model(stock_model(zero_cond_t=True), layout)
    found = run_batched(model, random_samples(*specification), fill=0.0)
    expected = stock_run(specification, zero_cond_t=True)
    assert output_error(found, expected) > MIN_MUTANT_ERROR
    assert gradient_error(found, expected) > MIN_MUTANT_ERROR


@pytest.mark.parametrize("mutant", ROPE_MUTANTS)
def test_judge_notices_wrong_positions(layout: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification, replacement = ROPE_MUTANTS[mutant]
    monkeypatch.setattr(transformer, "rotary_embeddings", replacement)
    assert_caught(specification, layout)


@pytest.mark.parametrize("mutant", MASK_MUTANTS)
def test_judge_notices_wrong_masks(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification, name, replacement = MASK_MUTANTS[mutant]
    monkeypatch.setattr(transformer, name, replacement)
    assert_caught(specification, "padded")


@pytest.mark.parametrize("mutant", PACKING_MUTANTS)
def test_judge_notices_wrong_packing(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention.Packing, "of", PACKING_MUTANTS[mutant])
    assert_caught(COUNTS, "packed")


@pytest.mark.parametrize("mutant", ROW_MUTANTS)
def test_judge_notices_mixed_up_rows(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*ROW_MUTANTS[mutant])
    assert_caught(COUNTS, "packed")


@pytest.mark.parametrize(
    ("layout", "mutant"),
    [
        ("padded", neighbours_modulation),
        ("packed", neighbours_modulation),
        ("padded", checkpoint_without_mask),
    ],
)
def test_judge_notices_a_wrong_model(layout: str, mutant: Callable[[Any], None]) -> None:
    model = multi_res_model(stock_model(), layout)
    mutant(model)
    found, expected = run_batched(model, random_samples(*MIXED)), stock_run(MIXED)
    assert output_error(found, expected) > MIN_MUTANT_ERROR
    assert gradient_error(found, expected) > MIN_MUTANT_ERROR


def test_judge_notices_padding_that_is_not_zeroed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformer, "zero_padding", lambda x, valid: x)
    model, samples = multi_res_model(stock_model()), random_samples(*MIXED)
    with pytest.raises(AssertionError, match="padded outputs are not zero"):
        run_batched(model, samples)
    expected = stock_run(MIXED)
    output = model(**batch_of(samples, fill=math.nan)).sample
    rows = [row[: len(sample.image)] for sample, row in zip(samples, output, strict=True)]
    assert output_error(Run(rows, {}), expected) == math.inf


# ---- what surrounds the forward pass ---------------------------------------------------------------------------------


def test_signatures_are_those_of_the_stock_model() -> None:
    for method in ("__init__", "forward"):
        ours, stock = (
            inspect.signature(getattr(cls, method)).parameters
            for cls in (QwenImageMultiResTransformer2DModel, QwenImageTransformer2DModel)
        )
        own = {"image_rotary_emb"} if method == "forward" else set()
        assert {p.name for p in ours.values() if p.kind is p.KEYWORD_ONLY} == own
        assert [(p.name, p.default, p.kind) for p in ours.values() if p.name not in own] == [
            (p.name, p.default, p.kind) for p in stock.values()
        ]


def test_saved_model_is_a_stock_model(layout: str, tmp_path: Path) -> None:
    original, samples = stock_model(zero_cond_t=True), random_samples(*MIXED)
    original.save_pretrained(tmp_path / "stock")
    model = QwenImageMultiResTransformer2DModel.from_pretrained(tmp_path / "stock")
    model.layout = layout
    assert all(isinstance(processor, QwenMultiResAttnProcessor) for processor in model.attn_processors.values())
    model.save_pretrained(tmp_path / "ours")

    configs = [json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("stock", "ours")]
    assert configs[1]["_class_name"] == "QwenImageTransformer2DModel"
    assert {**configs[1], "_name_or_path": None} == {**configs[0], "_name_or_path": None}
    weights = [(tmp_path / folder / "diffusion_pytorch_model.safetensors").read_bytes() for folder in ("stock", "ours")]
    assert weights[0] == weights[1]

    reloaded = QwenImageTransformer2DModel.from_pretrained(tmp_path / "ours")
    assert_equal(run_batched(model, samples), run_singly(reloaded, samples))


@pytest.mark.slow
def test_import_loads_no_pipeline_and_no_autoencoder() -> None:
    program = "import sys, qwen_train.model.transformer; print(*sys.modules, sep='\\n')"
    modules = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout.split()
    assert "diffusers.models.transformers.transformer_qwenimage" in modules
    unwanted = ("diffusers.pipelines", "diffusers.models.autoencoders", "transformers.models.qwen2_5_vl")
    assert [name for name in modules if name.startswith((*unwanted, "qwen_cache.encode"))] == []


def test_example_in_the_docstring() -> None:
    results = doctest.testmod(transformer)
    assert results.attempted > 0
    assert results.failed == 0


# ---- refusals --------------------------------------------------------------------------------------------------------

TWO = [([(6, 4), (4, 6)], 5), ([(4, 4)], 3)]  # 48 and 16 image tokens


@pytest.mark.parametrize(
    ("overridden", "message"),
    [
        (
            {"img_shapes": [[(1, 6, 4), (1, 4, 6)]]},
            "img_shapes: one list of images per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"img_shapes": [[(1, 6, 4)], [(1, 4, 4)]]},
            "hidden_states: img_shapes and hidden_states disagree: the longest sample has the images [(1, 6, 4)] "
            "(expected 24 image tokens, found 48)\n"
            "  → give the target and every control image of each sample: img_shapes=[[(1, h, w), ...], ...]",
        ),
        (
            {"img_shapes": [(1, 6, 4), (1, 4, 4)]},
            "the longest sample has the images [(1, 6, 4), (1, 4, 4)] (expected 40 image tokens, found 48)",
        ),
        (
            {"img_shapes": [[(1, 6, 4), (1, 4, 6)], []]},
            "img_shapes: a sample's images cannot be read (expected [(1, h, w), ...] for the whole batch, or one such "
            "list per sample, found [])",
        ),
        ({"img_shapes": [(6, 4), (4, 6)]}, "a sample's images cannot be read"),
        ({"img_shapes": [[(1, 6, 4), (1, 4, 6)], (1, 4, 4)]}, "found (1, 4, 4))"),
        ({"img_shapes": [[(1, 6, 4), (1, 4, 6)], [(1, 4, 0)]]}, "found [(1, 4, 0)])"),
        ({"img_shapes": []}, "(expected 2 samples, as in hidden_states, found 0)"),
        (
            {"encoder_hidden_states_mask": torch.ones(2, 4)},
            "encoder_hidden_states_mask: the text mask does not fit the text (expected shape (2, 5), found (2, 4))",
        ),
        (
            {"timestep": torch.rand(1)},
            "timestep: one row per sample is needed (expected 2 samples, as in hidden_states, found 1)",
        ),
        (
            {"encoder_hidden_states": torch.rand(3, 5, 48)},
            "encoder_hidden_states: one row per sample is needed (expected 2 samples, as in hidden_states, found 3)",
        ),
        ({"img_shapes": None}, "forward needs encoder_hidden_states, timestep and img_shapes (found None)"),
        ({"guidance": torch.ones(2)}, "forward: guidance is not supported (expected None, found Tensor)"),
        (
            {"controlnet_block_samples": [torch.zeros(2, 48, 64)]},
            "forward: controlnet_block_samples is not supported (expected None, found list)",
        ),
        (
            {"attention_kwargs": {"attention_mask": torch.ones(2, 53)}},
            "attention_kwargs: the attention mask follows from img_shapes and encoder_hidden_states_mask "
            "(expected no attention_mask)",
        ),
        ({"attention_kwargs": {"packing": None}}, "(expected no packing)"),
        (
            {"image_rotary_emb": (torch.zeros(2, 48, 16), torch.zeros(5, 16, dtype=torch.complex64))},
            "image_rotary_emb: the precomputed RoPE does not fit the batch (expected (image, text) of shapes "
            "(2, 48, 16) and (2, 5, 16) in complex64, found (2, 48, 16) in float32, (5, 16) in complex64)",
        ),
    ],
)
def test_contradictory_batch_is_refused(layout: str, overridden: dict[str, Any], message: str) -> None:
    model = multi_res_model(stock_model(), layout)
    with pytest.raises(TrainError) as refusal:
        model(**{**batch_of(random_samples(*TWO)), **overridden})
    assert message in str(refusal.value)


def test_text_beyond_the_rope_table_is_refused(layout: str) -> None:
    """The table has 4096 rows; beside an image 10 tokens high, text starts at row 5."""
    model = multi_res_model(stock_model(), layout)
    [fits] = random_samples(([(10, 2)], 4091))
    with torch.no_grad():
        model(**batch_of([fits]))
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(([(2, 2)], 3), ([(10, 2)], 4092))))
    assert str(refusal.value) == (
        "encoder_hidden_states: the text is longer than the RoPE table beside images of [(1, 10, 2)] "
        "(expected at most 4091 text tokens, found 4092)\n  → shorten the text or the images"
    )
    assert QWEN_IMAGE.longest_text([(1, 10, 2), (1, 4, 9)]) == 4091


@pytest.mark.parametrize("backend", ["flash_varlen", "_flash_varlen_3", "sage_varlen"])
def test_attention_backend_that_would_misread_the_mask_is_refused(backend: str) -> None:
    model = multi_res_model(stock_model())
    for processor in model.attn_processors.values():
        processor._attention_backend = backend  # set_attention_backend asks for the package first
    with pytest.raises(TrainError) as refusal:
        model(**batch_of(random_samples(*TWO)))
    assert str(refusal.value) == (
        "attention backend: this attention backend misreads padding between text and image (expected one that takes a "
        f"mask, such as native, found {backend})\n"
        '  → call set_attention_backend("native"), set the layout to "packed", or make batches of one size'
    )


def test_layered_checkpoint_is_refused() -> None:
    with pytest.raises(ModelError) as refusal:
        QwenImageMultiResTransformer2DModel(**TINY, use_layer3d_rope=True)
    assert str(refusal.value) == (
        "config.json: layered checkpoints use other image positions (expected use_layer3d_rope false, "
        "found true)\n  → load a Qwen-Image or Qwen-Image-Edit transformer"
    )


def test_processor_refuses_the_stock_model() -> None:
    stock, [sample] = stock_model(), random_samples(([(4, 4)], 3))
    stock.set_attn_processor(QwenMultiResAttnProcessor())
    with pytest.raises(ModelError, match="works only inside QwenImageMultiResTransformer2DModel"):
        stock(**batch_of([sample]))
