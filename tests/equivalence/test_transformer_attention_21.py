"""Qwen-Image-2.1: every kind of attention gives what the stock model gives, and computes no more than it must.

The CPU runs segments through SDPA; the variable-length kernel is replaced by its definition, and runs itself on CUDA.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from torch import Tensor
from torch.nn.attention import flex_attention
from torch.utils.flop_counter import FlopCounterMode

from qwen_train.model import joint_row, qwen_image_21
from qwen_train.model.qwen_image_21 import QwenImage21MultiResTransformer2DModel
from tests.support.judge import AS_FAR
from tests.support.marks import slow
from tests.support.transformer_21_judge import (
    CASES_21,
    COUNTS_21,
    MIXED_21,
    TINY_21,
    batch_of,
    multi_res_model,
    random_samples,
    run_batched,
    stock_model,
    stock_run,
)
from tests.support.transformer_judge import (
    MIN_MUTANT_ERROR,
    Run,
    assert_equal,
    distance,
    output_error,
)

LAYERS = TINY_21["num_layers"]


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
    """The result of `varlen_attn`, sequence by sequence; window (-1, 0) is causal, aligned to the last key."""
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
    monkeypatch.setattr(qwen_image_21, "flash_takes", lambda *_: True)
    monkeypatch.setattr(qwen_image_21, "varlen_kernel", lambda: by_definition)
    monkeypatch.setattr(qwen_image_21, "dispatch_attention_fn", lambda *_, **__: pytest.fail("two kernels"))
    model, samples = multi_res_model(stock_model(), layout), random_samples(*CASES_21[case], draws=draws)
    assert_equal(run_batched(model, samples), stock_run(CASES_21[case], draws))


def test_kernel_calls_do_not_grow_with_the_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without condition images: texts in one call, draws in another; in the last layer only draws."""
    calls = []
    monkeypatch.setattr(qwen_image_21, "flash_takes", lambda *_: True)
    monkeypatch.setattr(
        qwen_image_21, "varlen_kernel", lambda: lambda *a, **k: calls.append(k) or by_definition(*a, **k)
    )
    samples = random_samples(*[([(4, 4 + i)], [], 3 + i) for i in range(5)], draws=2)
    multi_res_model(stock_model(), "packed")(**batch_of(samples))
    assert [call["window_size"] for call in calls] == [*[(-1, 0), (-1, -1)] * (LAYERS - 1), (-1, -1)]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("draws", [slow(1), 3])
def test_flex_attention(layout: str, draws: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, it computes all scores, and on the CPU gradients too, which its check refuses."""
    made, create = [], flex_attention.create_block_mask
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    monkeypatch.setattr(flex_attention, "create_block_mask", lambda *a, **k: made.append(a) or create(*a, **k))
    model, samples = multi_res_model(stock_model(), layout), random_samples(*COUNTS_21, draws=draws)
    expected = stock_run(COUNTS_21, draws)
    model.set_attention_backend("flex")
    assert_equal(run_batched(model, samples), expected)
    assert len(made) == 2, "one mask for the row, and one for the last block's draws"


def test_a_chosen_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qwen_image_21, "flash_takes", lambda *_: True)
    monkeypatch.setattr(qwen_image_21, "varlen_kernel", lambda: lambda *_, **__: pytest.fail("another kernel"))
    chosen, dispatch = [], qwen_image_21.dispatch_attention_fn
    monkeypatch.setattr(
        qwen_image_21, "dispatch_attention_fn", lambda *a, **k: chosen.append(k["backend"]) or dispatch(*a, **k)
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
        leaves = [x.detach().to(cast, copy=True).requires_grad_() for x in inputs]
        output = how(*leaves, row, attend)
        (output.float() ** 2).sum().backward()
        return torch.cat([x.flatten().double() for x in (output, *(leaf.grad for leaf in leaves))])

    assert qwen_image_21.flash_takes(*inputs)
    segments = (qwen_image_21.dispatch_attention_fn, qwen_image_21.segmented_attention)
    exact, singly = run(torch.float32, *segments), run(dtype, *segments)
    kernel = run(dtype, qwen_image_21.varlen_kernel(), qwen_image_21.varlen_attention)
    assert distance(kernel, exact) <= AS_FAR * distance(singly, exact)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="flex_attention has gradients on CUDA only")
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's import
@pytest.mark.slow
def test_compiled_flex_attention_on_cuda(layout: str) -> None:
    samples = random_samples(*COUNTS_21, draws=2)
    row, device = rows_of(samples, layout, torch.device("cuda")), torch.device("cuda")
    mask, _ = qwen_image_21.block_masks(row, device)
    inputs = [torch.randn(1, row.length, 2, 64, device=device) for _ in range(3)]
    found = torch.compile(flex_attention.flex_attention)(*(x.transpose(1, 2) for x in inputs), block_mask=mask)
    expected = qwen_image_21.segmented_attention(*inputs, row, qwen_image_21.dispatch_attention_fn)
    real = torch.cat([torch.arange(sample.length) < sample.length - sample.padding for sample in row.samples])
    assert distance(found.transpose(1, 2)[:, real], expected[:, real]) < 1e-2  # with TF32, whose unit is 2^-11


def rows_of(samples: list[Any], layout: str, device: torch.device) -> joint_row.JointRow:
    batch = batch_of(samples)
    model = multi_res_model(stock_model(), layout)
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes")
    inputs = [batch[name].to(device) if isinstance(batch[name], Tensor) else batch[name] for name in names]
    return model._read_batch(*inputs, batch["image_positions"])[0]


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.usefixtures("fresh_compiler")
def test_judge_notices_a_wrong_block_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws that see each other, in flex_attention's mask."""
    segments = joint_row.JointSample.draw_segments.func

    def seeing_all(sample: Any) -> Any:
        return [replace(segment, keys=((0, sample.length - sample.padding),)) for segment in segments(sample)]

    model, samples = multi_res_model(stock_model(), "packed"), random_samples(*MIXED_21, draws=2)
    expected = stock_run(MIXED_21, 2)
    model.set_attention_backend("flex")
    monkeypatch.setattr(joint_row.JointSample, "draw_segments", property(seeing_all))
    with torch.no_grad():
        output = model(**batch_of(samples)).sample
    rows = [row[len(s.conditions) : len(s.image)] for s, row in zip(samples, output, strict=True)]
    assert output_error(Run(rows, {}), expected) > MIN_MUTANT_ERROR


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
    """Memory is predicted so: no tensor of the device has values, and the text mask is on the CPU."""
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
