"""Qwen-Image-2.1: a batch of mixed sizes, with K noise draws, gives what the stock model gives for each draw alone.

Outputs and gradients, in both layouts. Mutants of the code under test show that the judge would notice each mistake
that it is there for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from qwen_train.model import joint_row, qwen_image_21
from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
from tests.support.judge import TOLERANCE
from tests.support.marks import slow
from tests.support.transformer_21_judge import (
    CASES_21,
    COUNTS_21,
    LORA_21,
    MIXED_21,
    SWAPPED_21,
    TEXTS_21,
    Sample,
    batch_of,
    multi_res_model,
    random_samples,
    run_batched,
    run_in_float32,
    run_singly,
    stock_model,
    stock_run,
)
from tests.support.transformer_judge import (
    MIN_MUTANT_ERROR,
    Run,
    assert_as_near,
    assert_equal,
    distance,
    gradient_error,
    output_error,
)

# ---- equal to the stock model ----------------------------------------------------------------------------------------


@cache
def unchanged(layout: str) -> QwenImage21MultiResTransformer2DModel:
    """The model with the stock model's weights, for tests that only run it."""
    return multi_res_model(stock_model(), layout)


@pytest.mark.parametrize("draws", [1, slow(2), 4])
@pytest.mark.parametrize("case", CASES_21)
def test_batch_equals_stock_singles(layout: str, case: str, draws: int) -> None:
    samples = random_samples(*CASES_21[case], draws=draws)
    assert_equal(run_batched(unchanged(layout), samples), stock_run(CASES_21[case], draws))


@pytest.mark.parametrize("draws", [1, 3])
def test_nan_in_the_padding_reaches_nothing(layout: str, draws: int) -> None:
    samples = random_samples(*MIXED_21, draws=draws)
    assert_equal(run_batched(unchanged(layout), samples, fill=math.nan), stock_run(MIXED_21, draws))


def test_draws_equal_separate_passes(layout: str) -> None:
    """The passes of our own model in the other shape of `timestep`."""
    model, samples = unchanged(layout), random_samples(*COUNTS_21, draws=3)
    found = run_batched(model, samples)
    passes = [run_batched(model, [sample.with_draw(k) for sample in samples]) for k in range(3)]
    outputs = [torch.cat(rows) for rows in zip(*(one.outputs for one in passes), strict=True)]
    gradients = {name: sum(one.gradients[name] for one in passes) for name in found.gradients}
    assert_equal(found, Run(outputs, gradients))


def test_one_draw_in_a_column_is_the_same(layout: str) -> None:
    model, samples = multi_res_model(stock_model(), layout), random_samples(*MIXED_21)
    batch = batch_of(samples)
    column = {**batch, "timestep": batch["timestep"][:, None]}
    with torch.no_grad():
        assert torch.equal(model(**column).sample, model(**batch).sample)


def test_every_parameter_gets_a_gradient(layout: str) -> None:
    """`UNREACHED` is empty, though the last block computes the draws only."""
    found = run_batched(multi_res_model(stock_model(), layout), random_samples(*MIXED_21))
    assert [name for name, gradient in found.gradients.items() if not gradient.any()] == []
    assert QwenImage21MultiResTransformer2DModel.UNREACHED == ()


def test_text_on_the_left_and_holes_in_its_mask(layout: str) -> None:
    """Text rows are those that the mask marks, wherever they are."""
    stock, [sample] = stock_model(), random_samples(([(4, 6), (6, 4)], [2], 4))
    text = torch.full((1, 7, 48), math.nan).index_copy(1, torch.tensor([1, 2, 4, 6]), sample.text[None])
    mask = torch.tensor([[0, 1, 1, 0, 1, 0, 1]])
    changed = {"encoder_hidden_states": text, "encoder_hidden_states_mask": mask}
    assert_equal(run_batched(multi_res_model(stock, layout), [sample], **changed), run_singly(stock, [sample]))


def test_a_sample_without_text(layout: str) -> None:
    """The stock model takes no prompt of zero rows, so the judge is the batch of this sample alone."""
    model, samples = (
        multi_res_model(stock_model(), layout),
        random_samples(([(4, 6)], [], 5), ([(3, 2), (3, 3)], [0], 0)),
    )
    with torch.no_grad():
        found = model(**batch_of(samples)).sample[1, :15]
        alone = model(**batch_of(samples[1:])).sample[0]
    assert distance(found, alone) < TOLERANCE


def test_one_list_of_images_serves_the_whole_batch(layout: str) -> None:
    model, samples = multi_res_model(stock_model(), layout), random_samples(*TEXTS_21)
    shared = {"img_shapes": [[1, 4, 6], [1, 6, 4]]}
    assert_equal(run_batched(model, samples, **shared), stock_run(TEXTS_21))


def test_gradient_checkpointing(layout: str) -> None:
    model = multi_res_model(stock_model(), layout).train()
    model.enable_gradient_checkpointing()
    assert_equal(run_batched(model, random_samples(*COUNTS_21, draws=2)), stock_run(COUNTS_21, 2))


@cache
def stock_with_lora() -> tuple[dict[str, Tensor], Run]:
    """The stock model's weights with those of an adapter, and its run of two draws."""
    stock = stock_model()
    stock.add_adapter(LORA_21)
    return stock.state_dict(), run_singly(stock, random_samples(*MIXED_21, draws=2))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients(layout: str, checkpointing: bool) -> None:
    weights, expected = stock_with_lora()
    model = multi_res_model(stock_model(), layout)
    model.add_adapter(LORA_21)
    model.load_state_dict(weights)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    found = run_batched(model, random_samples(*MIXED_21, draws=2))
    assert_equal(found, expected)
    assert all("lora_" in name for name in found.gradients)


def test_lora_scale_is_that_of_the_stock_model(layout: str) -> None:
    stock, samples = stock_model(), random_samples(*MIXED_21)
    model = multi_res_model(stock, layout)
    for each in (stock, model):
        each.add_adapter(LORA_21)
    model.load_state_dict(stock.state_dict())
    scaled = run_singly(stock, samples, attention_kwargs={"scale": 0.25})
    assert_equal(run_batched(model, samples, attention_kwargs={"scale": 0.25}), scaled)
    assert output_error(run_batched(model, samples), scaled) > MIN_MUTANT_ERROR


def test_bfloat16_is_as_near_to_float32_as_the_stock_model(layout: str) -> None:
    """Rounding differs with the shape of every product, so the measure is float32."""
    samples, stock = random_samples(*MIXED_21, draws=2, dtype=torch.bfloat16), stock_model().bfloat16()
    exact = run_in_float32(stock_model().bfloat16(), samples)
    batched = run_batched(multi_res_model(stock, layout).bfloat16(), samples)
    assert_as_near(batched, run_singly(stock, samples), exact)


@pytest.fixture(scope="module")
def autocast() -> tuple[list[Sample], Run, Run]:
    """Samples, what the stock model makes of them under autocast, and in float32."""
    samples = [replace(s, sigma=s.sigma.bfloat16().float()) for s in random_samples(*COUNTS_21, draws=2)]
    stock = stock_model()
    exact = run_singly(stock, samples)
    with torch.autocast("cpu", torch.bfloat16):
        return samples, run_singly(stock, samples), exact


def test_autocast_is_as_near_to_float32_as_the_stock_model(
    layout: str, autocast: tuple[list[Sample], Run, Run]
) -> None:
    samples, singly, exact = autocast
    with torch.autocast("cpu", torch.bfloat16):
        batched = run_batched(unchanged(layout), samples)
    assert_as_near(batched, singly, exact)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does so with an autograd.Function
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_for_successive_mixtures(layout: str, real_aot_eager: Callable[..., Any]) -> None:
    stock = stock_model()
    model = multi_res_model(stock, layout)
    model.compile_repeated_blocks(backend=real_aot_eager)
    for case in (MIXED_21, CASES_21["a condition image larger than its target"]):
        samples = random_samples(*case, draws=2)
        assert_equal(run_batched(model, samples), run_singly(stock, samples))
    assert counters["stats"]["unique_graphs"], "nothing was compiled"


# ---- the judge notices -----------------------------------------------------------------------------------------------

ROTARY, INTERLEAVED, RUNS, NORM_OUT = (
    qwen_image_21.rotary_embedding,
    qwen_image_21.interleaved,
    joint_row.modulation_runs,
    qwen_image_21.norm_out,
)
PREFIX, DRAWS = qwen_image_21.prefix_attention, qwen_image_21.draws_attention


def text_padding_counted(pos_embed: Any, images: Any, sample: Any) -> Tensor:
    """Positions after the text as if three padded rows belonged to it."""
    longer = ROTARY(pos_embed, images, replace(sample, prefix=(*sample.prefix, (3, True))))
    return torch.cat([longer[: sample.prefix_length], longer[sample.prefix_length + 3 :]])


def prefix_modulated_as_draws(samples: Any) -> joint_row.Runs:
    """The prefix by the timestep of the first draw; the draws keep theirs."""
    runs, zero = [], sum(sample.draws for sample in samples)
    for i, sample in enumerate(samples):
        draws = [(sample.target, i * sample.draws + k) for k in range(sample.draws)]
        runs += [(sample.prefix_length, i * sample.draws), *draws, (sample.padding, zero)]
    return [run for run in runs if run[0]]


MUTANTS: dict[str, tuple[Any, Any, str, Callable[..., Any]]] = {
    "text sees what follows": (
        MIXED_21,
        qwen_image_21,
        "prefix_attention",
        lambda q, k, v, segment, *rest: PREFIX(q, k, v, replace(segment, is_text=False), *rest),
    ),
    "prefix sees the draws": (
        MIXED_21,
        qwen_image_21,
        "prefix_attention",
        lambda q, k, v, segment, row, attend: attend(q, k, v),
    ),
    "condition images see only themselves": (
        MIXED_21,
        qwen_image_21,
        "prefix_attention",
        lambda q, k, v, segment, row, attend: (
            PREFIX(q, k, v, segment, row, attend)
            if segment.is_text
            else attend(q, *(x[:, segment.span[0] : segment.span[1]] for x in (k, v)))
        ),
    ),
    "draws see each other": (
        MIXED_21,
        qwen_image_21,
        "draws_attention",
        lambda q, k, v, sample, attend: DRAWS(q, k, v, replace(sample, draws=1, target=sample.draw_tokens), attend),
    ),
    "draws do not see the text": (
        MIXED_21,
        qwen_image_21,
        "draws_attention",
        lambda q, k, v, sample, attend: DRAWS(
            q,
            *(x[:, sample.prefix[0][0] :] for x in (k, v)),
            replace(sample, prefix=sample.prefix[1:]),
            attend,
        ),
    ),
    "text padding counted": (TEXTS_21, qwen_image_21, "rotary_embedding", text_padding_counted),
    "sizes of another sample": (
        SWAPPED_21,
        qwen_image_21,
        "rotary_embedding",
        lambda pos_embed, images, *rest: ROTARY(pos_embed, [(1, 8, 12)] * 2, *rest),
    ),
    "image position of another sample": (
        SWAPPED_21,
        qwen_image_21,
        "interleaved",
        lambda images, positions, text: INTERLEAVED(images, [text - position for position in positions], text),
    ),
    "prefix modulated as draws": (MIXED_21, joint_row, "modulation_runs", prefix_modulated_as_draws),
    "last norm by another draw": (
        MIXED_21,
        qwen_image_21,
        "norm_out",
        lambda module, x, temb, row: NORM_OUT(module, x, torch.cat([temb[:-1].roll(1, dims=0), temb[-1:]]), row),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_judge_notices(layout: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification, module, name, replacement = MUTANTS[mutant]
    expected = stock_run(specification, 2)
    monkeypatch.setattr(module, name, replacement)
    found = run_batched(unchanged(layout), random_samples(*specification, draws=2), fill=0.0)
    assert output_error(found, expected) > MIN_MUTANT_ERROR
    assert gradient_error(found, expected) > MIN_MUTANT_ERROR
