"""Qwen-Image-2.1: a batch of mixed sizes, with K noise draws, gives what the stock model gives for each draw alone.

Outputs and gradients, in both layouts and by every kind of attention. Mutants of the code under test show that the
judge would notice each mistake that it is there for.
"""

from __future__ import annotations

import doctest
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jaxtyping
import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21KVCache, QwenImage21Transformer2DModel
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from qwen_cache.errors import ModelError, TrainError
from qwen_train.model.qwen_image_21 import attention, joint_row, transformer
from qwen_train.model.qwen_image_21.attention import QwenImage21MultiResAttnProcessor
from qwen_train.model.qwen_image_21.transformer import QwenImage21MultiResTransformer2DModel
from tests.support.judge import AS_FAR, TOLERANCE
from tests.support.transformer_21_judge import (
    CASES_21,
    COUNTS_21,
    LORA_21,
    MIXED_21,
    SWAPPED_21,
    TEXTS_21,
    TINY_21,
    batch_of,
    multi_res_model,
    random_samples,
    run_batched,
    run_in_float32,
    run_singly,
    stock_batch,
    stock_model,
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

LAYERS = TINY_21["num_layers"]


@pytest.fixture(params=["padded", "packed"])
def layout(request: pytest.FixtureRequest) -> str:
    return request.param


# ---- equal to the stock model ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draws", [1, 2, 4])
@pytest.mark.parametrize("case", CASES_21)
def test_batch_equals_stock_singles(layout: str, case: str, draws: int) -> None:
    stock, samples = stock_model(), random_samples(*CASES_21[case], draws=draws)
    assert_equal(run_batched(multi_res_model(stock, layout), samples), run_singly(stock, samples))


@pytest.mark.parametrize("draws", [1, 3])
def test_nan_in_the_padding_reaches_nothing(layout: str, draws: int) -> None:
    stock, samples = stock_model(), random_samples(*MIXED_21, draws=draws)
    assert_equal(run_batched(multi_res_model(stock, layout), samples, fill=math.nan), run_singly(stock, samples))


def test_draws_equal_separate_passes(layout: str) -> None:
    """Of our own model, the passes in the other shape of `timestep`."""
    model, samples = multi_res_model(stock_model(), layout), random_samples(*COUNTS_21, draws=3)
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
    stock, samples = stock_model(), random_samples(*TEXTS_21)
    shared = {"img_shapes": [[1, 4, 6], [1, 6, 4]]}
    assert_equal(run_batched(multi_res_model(stock, layout), samples, **shared), run_singly(stock, samples))


def test_gradient_checkpointing(layout: str) -> None:
    stock, samples = stock_model(), random_samples(*COUNTS_21, draws=2)
    model = multi_res_model(stock, layout).train()
    model.enable_gradient_checkpointing()
    assert_equal(run_batched(model, samples), run_singly(stock, samples))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_lora_gradients(layout: str, checkpointing: bool) -> None:
    stock, samples = stock_model(), random_samples(*MIXED_21, draws=2)
    model = multi_res_model(stock, layout)
    for each in (stock, model):
        each.add_adapter(LORA_21)
    model.load_state_dict(stock.state_dict())
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    found = run_batched(model, samples)
    assert_equal(found, run_singly(stock, samples))
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


def test_autocast_is_as_near_to_float32_as_the_stock_model(layout: str) -> None:
    stock = stock_model()
    samples = [replace(s, sigma=s.sigma.bfloat16().float()) for s in random_samples(*COUNTS_21, draws=2)]
    exact = run_singly(stock, samples)
    with torch.autocast("cpu", torch.bfloat16):
        singly, batched = run_singly(stock, samples), run_batched(multi_res_model(stock, layout), samples)
    assert_as_near(batched, singly, exact)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_for_successive_mixtures(layout: str) -> None:
    stock = stock_model()
    model = multi_res_model(stock, layout)
    model.compile_repeated_blocks(backend="aot_eager")
    for case in (MIXED_21, CASES_21["a condition image larger than its target"]):
        samples = random_samples(*case, draws=2)
        assert_equal(run_batched(model, samples), run_singly(stock, samples))
    assert counters["stats"]["unique_graphs"], "nothing was compiled"


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    """Without the shape checks of the test runner, which the compiler cannot see through."""
    torch.compiler.reset()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


# ---- kinds of attention ----------------------------------------------------------------------------------------------


def by_definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int,
    max_k: int,
    *,
    window_size: tuple[int, int],
) -> Tensor:
    """What `varlen_attn` computes: sequence by sequence; window (-1, 0) is causal, aligned to the last key."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    outputs, lengths = [], []
    for (q0, q1), (k0, k1) in zip(pairwise(cu_seq_q.tolist()), pairwise(cu_seq_k.tolist()), strict=True):
        lengths.append((q1 - q0, k1 - k0))
        scores = torch.einsum("qhd,khd->hqk", query[q0:q1], key[k0:k1]) / math.sqrt(query.shape[-1])
        visible = torch.ones(lengths[-1], dtype=torch.bool)
        if window_size == (-1, 0):
            visible = visible.tril(lengths[-1][1] - lengths[-1][0])
        weights = scores.masked_fill(~visible, -math.inf).softmax(dim=-1)
        outputs.append(torch.einsum("hqk,khd->qhd", weights, value[k0:k1]))
    assert (max_q, max_k) == (max(q for q, _ in lengths), max(k for _, k in lengths))
    assert (int(cu_seq_q[-1]), int(cu_seq_k[-1])) == (len(query), len(key))
    return torch.cat(outputs)


@pytest.mark.parametrize("draws", [1, 3])
@pytest.mark.parametrize("case", ["none, one, two and three condition images", "nothing to pad"])
def test_variable_length_kernel(layout: str, case: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself runs on CUDA only; here its definition stands for it."""
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: by_definition)
    monkeypatch.setattr(attention, "dispatch_attention_fn", lambda *_, **__: pytest.fail("two kernels"))
    stock, samples = stock_model(), random_samples(*CASES_21[case], draws=draws)
    assert_equal(run_batched(multi_res_model(stock, layout), samples), run_singly(stock, samples))


def test_kernel_calls_do_not_grow_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without condition images: texts in one call, draws in another; in the last layer only draws."""
    calls = []
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: lambda *a, **k: calls.append(k) or by_definition(*a, **k))
    samples = random_samples(*[([(4, 4 + i)], [], 3 + i) for i in range(5)], draws=2)
    multi_res_model(stock_model(), "packed")(**batch_of(samples))
    assert [call["window_size"] for call in calls] == [*[(-1, 0), (-1, -1)] * (LAYERS - 1), (-1, -1)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("draws", [1, 3])
def test_flex_attention(layout: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, it computes all scores, and on the CPU gradients too, which its check refuses."""
    made, create = [], flex_attention.create_block_mask
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, **k: made.append(a) or create(*a, **k))
    stock, samples = stock_model(), random_samples(*COUNTS_21, draws=draws)
    expected, model = run_singly(stock, samples), multi_res_model(stock, layout)
    model.set_attention_backend("flex")
    assert_equal(run_batched(model, samples), expected)
    assert len(made) == 2, "one mask for the row, and one for the last block's draws"


def test_a_chosen_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: lambda *_, **__: pytest.fail("another kernel"))
    chosen, dispatch = [], attention.dispatch_attention_fn
    monkeypatch.setattr(
        attention, "dispatch_attention_fn", lambda *a, **k: chosen.append(k["backend"]) or dispatch(*a, **k)
    )
    model = multi_res_model(stock_model(), "packed")
    model.set_attention_backend("_native_math")
    run_batched(model, random_samples(*MIXED_21))
    assert set(chosen) == {AttentionBackendName._NATIVE_MATH}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("draws", [1, 3])
def test_variable_length_kernel_on_cuda(layout: str, draws: int, dtype: torch.dtype) -> None:
    """Output and gradients of the attention, on the same rounded inputs, against segments in float32."""
    samples = random_samples(*COUNTS_21, draws=draws)
    row = rows_of(samples, layout, torch.device("cuda"))
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(1, row.length, 2, 64, generator=generator).to("cuda", dtype) for _ in range(3)]

    def run(cast: torch.dtype, attend: Callable[..., Tensor], how: Callable[..., Tensor]) -> Tensor:
        leaves = [x.to(cast).requires_grad_() for x in inputs]
        output = how(*leaves, row, attend)
        (output.float() ** 2).sum().backward()
        return torch.cat([x.flatten().double() for x in (output, *(leaf.grad for leaf in leaves))])

    assert attention.flash_takes(*inputs)
    segments = (attention.dispatch_attention_fn, attention.segmented_attention)
    exact, singly = run(torch.float32, *segments), run(dtype, *segments)
    kernel = run(dtype, attention.varlen_kernel(), attention.varlen_attention)
    assert distance(kernel, exact) <= AS_FAR * distance(singly, exact)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has gradients on CUDA only")
@pytest.mark.slow
def test_compiled_flex_attention_on_cuda(layout: str) -> None:
    samples = random_samples(*COUNTS_21, draws=2)
    row, device = rows_of(samples, layout, torch.device("cuda")), torch.device("cuda")
    mask, _ = attention.block_masks(row, device)
    inputs = [torch.randn(1, row.length, 2, 64, device=device) for _ in range(3)]
    found = torch.compile(flex_attention.flex_attention)(*(x.transpose(1, 2) for x in inputs), block_mask=mask)
    expected = attention.segmented_attention(*inputs, row, attention.dispatch_attention_fn)
    assert distance(found.transpose(1, 2), expected) < 1e-2  # with TF32, whose unit is 2^-11


def rows_of(samples: list[Any], layout: str, device: torch.device) -> joint_row.JointRow:
    batch = batch_of(samples)
    model = multi_res_model(stock_model(), layout)
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes")
    inputs = [batch[name].to(device) if isinstance(batch[name], Tensor) else batch[name] for name in names]
    return model._read_batch(*inputs, batch["image_positions"])[0]


# ---- what is computed ------------------------------------------------------------------------------------------------


def test_last_block_and_output_are_for_draws_only(layout: str) -> None:
    model, samples = multi_res_model(stock_model(), layout), random_samples(*COUNTS_21, draws=2)
    rows: dict[str, int] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm):
            module.register_forward_hook(
                lambda _, args, out, name=name: rows.update({name: rows.get(name, 0) + out.numel() // out.shape[-1]})
            )
    run_batched(model, samples, fill=math.nan)
    tokens = sum(s.draws[..., 0].numel() for s in samples)
    lengths = [len(s.image) + len(s.text) for s in samples]
    every = sum(lengths) if layout == "packed" else len(samples) * max(lengths)
    last = f"transformer_blocks.{LAYERS - 1}"
    for name in (f"{last}.attn.to_q", f"{last}.attn.to_out.0", f"{last}.img_norm2", f"{last}.img_mlp.out", "proj_out"):
        assert rows[name] == tokens
    for name in (f"{last}.attn.to_k", f"{last}.attn.to_v", "transformer_blocks.0.attn.to_q"):
        assert rows[name] == every
    assert rows["norm_out.norm"] == tokens
    assert rows["modulation.1"] == 2 * len(samples) + 1  # a row per draw, and one of t = 0
    assert rows["txt_in.in_layer"] == sum(len(s.text) for s in samples)


def test_draws_cost_less_than_passes() -> None:
    """Products of matrices: four draws with three condition images against four passes."""
    flops = []
    for draws in (1, 4):
        [sample] = random_samples(([(8, 8)] * 4, [2, 2, 2], 6), draws=draws)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            multi_res_model(stock_model(num_layers=12), "packed")(**batch_of([sample]))
        flops.append(counter.get_total_flops())
    assert flops[1] / (4 * flops[0]) < 0.5


def test_forward_on_the_meta_device(layout: str) -> None:
    """As memory is predicted: no tensor of the device has values, and the text mask is on the CPU."""
    with torch.device("meta"):
        model = QwenImage21MultiResTransformer2DModel(**TINY_21)
    model.layout = layout
    samples = random_samples(*COUNTS_21, draws=2)
    names = ("hidden_states", "encoder_hidden_states", "timestep")
    batch = batch_of(samples)
    velocity = model(**{**batch, **{name: batch[name].to("meta") for name in names}}).sample
    velocity.sum().backward()
    assert velocity.device.type == "meta"
    assert velocity.shape == (*batch["hidden_states"].shape[:2], 8)


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


def test_modules_that_stay_unquantised_are_all_but_the_blocks() -> None:
    model = stock_model()
    outside = {name.partition(".")[0] for name, _ in model.named_parameters()} - {"transformer_blocks"}
    assert outside == set(QwenImage21MultiResTransformer2DModel.NOT_QUANTISED)


def test_example_in_the_docstring() -> None:
    results = doctest.testmod(transformer)
    assert results.attempted > 0
    assert results.failed == 0


# ---- the judge notices -----------------------------------------------------------------------------------------------

ROTARY, INTERLEAVED, RUNS, NORM_OUT = (
    transformer.rotary_embedding,
    transformer.interleaved,
    joint_row.modulation_runs,
    transformer.norm_out,
)
PREFIX, DRAWS = attention.prefix_attention, attention.draws_attention


def text_padding_counted(pos_embed: Any, images: Any, sample: Any, device: Any) -> Tensor:
    """Positions after the text as if three padded rows belonged to it."""
    longer = ROTARY(pos_embed, images, replace(sample, prefix=(*sample.prefix, (3, True))), device)
    return torch.cat([longer[: sample.prefix_length], longer[sample.prefix_length + 3 :]])


def prefix_modulated_as_draws(samples: Any) -> joint_row.Runs:
    """The prefix by the timestep of the first draw; `draw_runs` finds the draws by their runs, so these stay."""
    runs, zero = [], sum(sample.draws for sample in samples)
    for i, sample in enumerate(samples):
        draws = [(sample.target, i * sample.draws + k) for k in range(sample.draws)]
        runs += [(sample.prefix_length, i * sample.draws), *draws, (sample.padding, zero)]
    return [run for run in runs if run[0]]


MUTANTS: dict[str, tuple[Any, Any, str, Callable[..., Any]]] = {
    "text sees what follows": (
        MIXED_21,
        attention,
        "prefix_attention",
        lambda q, k, v, segment, *rest: PREFIX(q, k, v, replace(segment, is_text=False), *rest),
    ),
    "prefix sees the draws": (
        MIXED_21,
        attention,
        "prefix_attention",
        lambda q, k, v, segment, row, attend: attend(q, k, v),
    ),
    "condition images see only themselves": (
        MIXED_21,
        attention,
        "prefix_attention",
        lambda q, k, v, segment, row, attend: (
            PREFIX(q, k, v, segment, row, attend)
            if segment.is_text
            else attend(q, *(x[:, segment.span[0] : segment.span[1]] for x in (k, v)))
        ),
    ),
    "draws see each other": (
        MIXED_21,
        attention,
        "draws_attention",
        lambda q, k, v, sample, attend: DRAWS(q, k, v, replace(sample, draws=1, target=sample.draw_tokens), attend),
    ),
    "draws do not see the text": (
        MIXED_21,
        attention,
        "draws_attention",
        lambda q, k, v, sample, attend: DRAWS(
            q,
            *(x[:, sample.prefix[0][0] :] for x in (k, v)),
            replace(sample, prefix=sample.prefix[1:]),
            attend,
        ),
    ),
    "text padding counted": (TEXTS_21, transformer, "rotary_embedding", text_padding_counted),
    "sizes of another sample": (
        SWAPPED_21,
        transformer,
        "rotary_embedding",
        lambda pos_embed, images, *rest: ROTARY(pos_embed, [(1, 8, 12)] * 2, *rest),
    ),
    "image position of another sample": (
        SWAPPED_21,
        transformer,
        "interleaved",
        lambda images, positions, text: INTERLEAVED(images, [text - position for position in positions], text),
    ),
    "prefix modulated as draws": (MIXED_21, joint_row, "modulation_runs", prefix_modulated_as_draws),
    "last norm by another draw": (
        MIXED_21,
        transformer,
        "norm_out",
        lambda module, x, temb, row: NORM_OUT(module, x, torch.cat([temb[:-1].roll(1, dims=0), temb[-1:]]), row),
    ),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_judge_notices(layout: str, mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    specification, module, name, replacement = MUTANTS[mutant]
    stock, samples = stock_model(), random_samples(*specification, draws=2)
    expected = run_singly(stock, samples)
    monkeypatch.setattr(module, name, replacement)
    found = run_batched(multi_res_model(stock, layout), samples, fill=0.0)
    assert output_error(found, expected) > MIN_MUTANT_ERROR
    assert gradient_error(found, expected) > MIN_MUTANT_ERROR


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_judge_notices_a_wrong_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that see each other, in flex_attention's mask."""
    segments = joint_row.JointSample.draw_segments.func

    def seeing_all(sample: Any) -> Any:
        return [replace(segment, keys=((0, sample.length - sample.padding),)) for segment in segments(sample)]

    stock, samples = stock_model(), random_samples(*MIXED_21, draws=2)
    expected, model = run_singly(stock, samples), multi_res_model(stock, "packed")
    model.set_attention_backend("flex")
    monkeypatch.setattr(joint_row.JointSample, "draw_segments", property(seeing_all))
    with torch.no_grad():
        output = model(**batch_of(samples)).sample
    rows = [row[len(s.conditions) : len(s.image)] for s, row in zip(samples, output, strict=True)]
    assert output_error(Run(rows, {}), expected) > MIN_MUTANT_ERROR


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
