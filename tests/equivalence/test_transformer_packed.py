"""The packed layout computes on valid tokens only, and CUDA's variable-length kernel gets the right rows of it."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.normalization import RMSNorm
from torch import Tensor

from qwen_cache.errors import ModelError
from qwen_train.model import attention
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from tests.support.judge import AS_FAR, TOLERANCE
from tests.support.transformer_judge import (
    COUNTS,
    TINY,
    assert_equal,
    batch_of,
    distance,
    multi_res_model,
    random_samples,
    run_batched,
    run_singly,
    stock_model,
)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_no_layer_sees_padding(checkpointing: bool) -> None:
    model, samples = multi_res_model(stock_model(zero_cond_t=True), "packed"), random_samples(*COUNTS)
    if checkpointing:
        model.train().enable_gradient_checkpointing()
    rows: dict[str, set[int]] = {}
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.LayerNorm | RMSNorm):
            module.register_forward_hook(
                lambda _, args, out, name=name: rows.setdefault(name, set()).add(out.numel() // out.shape[-1])
            )
    run_batched(model, samples, fill=math.nan)

    heads, batch = TINY["num_attention_heads"], len(samples)
    image, text = sum(len(sample.image) for sample in samples), sum(len(sample.text) for sample in samples)
    for name in ("img_in", "proj_out", "transformer_blocks.0.img_norm1", "transformer_blocks.2.img_mlp.net.2"):
        assert rows[name] == {image}
    for name in ("txt_norm", "txt_in", "transformer_blocks.0.txt_norm2", "transformer_blocks.1.txt_mlp.net.0.proj"):
        assert rows[name] == {text}
    assert rows["transformer_blocks.1.attn.to_q"] == rows["transformer_blocks.1.attn.to_out.0"] == {image}
    assert rows["transformer_blocks.1.attn.norm_added_k"] == {heads * text}
    assert rows["transformer_blocks.0.img_mod.1"] == {2 * batch}  # by the timestep, and by zero
    assert rows["transformer_blocks.0.txt_mod.1"] == {batch}


def test_a_sample_without_text() -> None:
    samples = random_samples(([(4, 6)], 5), ([(3, 3)], 4))
    batch = {**batch_of(samples), "encoder_hidden_states_mask": torch.tensor([[True] * 5, [False] * 5])}
    with torch.no_grad():
        outputs = [multi_res_model(stock_model(), layout)(**batch).sample for layout in ("padded", "packed")]
    assert distance(outputs[1], outputs[0]) < TOLERANCE


@pytest.mark.parametrize("layout", ["dense", "Packed"])
def test_unknown_layout_is_refused(layout: str) -> None:
    model = multi_res_model(stock_model())
    with pytest.raises(ModelError) as refusal:
        model.layout = layout
    assert str(refusal.value) == f"layout: no such layout (expected padded or packed, found {layout})"
    assert model.layout == "padded"


def test_layout_is_no_part_of_the_configuration() -> None:
    model = multi_res_model(stock_model(), "packed")
    assert "layout" not in model.config
    assert "packed" not in model.to_json_string()
    assert QwenImageMultiResTransformer2DModel.from_config(model.config).layout == "padded"


# ---- attention of packed rows ----------------------------------------------------------------------------------------


def by_definition(
    query: Tensor, key: Tensor, value: Tensor, cu_seq_q: Tensor, cu_seq_k: Tensor, max_q: int, max_k: int
) -> Tensor:
    """The promise of torch's kernel for `[N, heads, dim]`: `bounds[i]` to `bounds[i + 1]` is a sequence."""
    assert cu_seq_q.dtype == cu_seq_k.dtype == torch.int32
    bounds = cu_seq_q.tolist()
    assert bounds == cu_seq_k.tolist()
    assert (bounds[0], bounds[-1]) == (0, len(query))
    assert max_q == max_k == max(b - a for a, b in pairwise(bounds))
    sequence = torch.repeat_interleave(torch.arange(len(bounds) - 1), cu_seq_q.diff())
    scores = torch.einsum("qhd,khd->hqk", query, key) / math.sqrt(query.shape[-1])
    scores = scores.masked_fill(sequence[:, None] != sequence, -math.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(dim=-1), value)


def test_variable_length_kernel_gets_whole_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel itself runs on CUDA only; here its definition stands for it."""
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: by_definition)
    monkeypatch.setattr(attention, "dispatch_attention_fn", lambda *_, **__: pytest.fail("two kernels"))
    stock, samples = stock_model(zero_cond_t=True), random_samples(*COUNTS)
    assert_equal(run_batched(multi_res_model(stock, "packed"), samples), run_singly(stock, samples))


def test_a_chosen_backend_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "flash_takes", lambda *_: True)
    monkeypatch.setattr(attention, "varlen_kernel", lambda: lambda *_: pytest.fail("another kernel"))
    chosen, dispatch = [], attention.dispatch_attention_fn
    monkeypatch.setattr(
        attention, "dispatch_attention_fn", lambda *a, **k: chosen.append(k["backend"]) or dispatch(*a, **k)
    )
    stock, samples = stock_model(), random_samples(*COUNTS)
    model = multi_res_model(stock, "packed")
    model.set_attention_backend("_native_math")
    assert_equal(run_batched(model, samples), run_singly(stock, samples))
    assert set(chosen) == {AttentionBackendName._NATIVE_MATH}


@pytest.mark.parametrize("backend", ["flash_varlen", "sage_varlen"])
def test_backends_that_misread_masks_get_none(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused under padding only: in the packed layout there is no mask to misread."""
    calls = []
    monkeypatch.setattr(
        attention, "dispatch_attention_fn", lambda q, k, v, **kwargs: calls.append(kwargs) or torch.zeros_like(q)
    )
    model = multi_res_model(stock_model(), "packed")
    for processor in model.attn_processors.values():
        processor._attention_backend = backend  # set_attention_backend asks for the package first
    model(**batch_of(random_samples(*COUNTS)))
    assert {(call["backend"], call.get("attn_mask")) for call in calls} == {(backend, None)}


def test_kernel_is_for_cuda_in_half_precision() -> None:
    on_cpu = torch.zeros(1, 8, 2, 32, dtype=torch.bfloat16)
    assert not attention.flash_takes(on_cpu, on_cpu, on_cpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the variable-length kernel needs CUDA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_variable_length_kernel_equals_single_calls_on_cuda(dtype: torch.dtype) -> None:
    """Forward and backward, on the same rounded inputs, against float32."""
    image_lengths, text_lengths = [40, 16, 97], [5, 11, 1]
    packing = attention.Packing.of(
        torch.arange(97) < torch.tensor(image_lengths)[:, None],
        torch.arange(11) < torch.tensor(text_lengths)[:, None],
        None,
        torch.device("cuda"),
    )
    generator = torch.Generator().manual_seed(0)
    lengths = [sum(text_lengths)] * 3 + [sum(image_lengths)] * 3
    inputs = [torch.randn(1, length, 2, 64, generator=generator).to("cuda", dtype) for length in lengths]

    def run(cast: torch.dtype, use_varlen: bool) -> Tensor:
        leaves = [x.detach().to(cast, copy=True).requires_grad_() for x in inputs]
        attend = attention.dispatch_attention_fn
        outputs = attention.packed_attention(leaves[:3], leaves[3:], packing, attend, use_varlen)
        sum((output.float() ** 2).sum() for output in outputs).backward()
        return torch.cat([x.flatten().double() for x in (*outputs, *(leaf.grad for leaf in leaves))])

    assert attention.flash_takes(*inputs[:3])
    exact, singly, kernel = run(torch.float32, False), run(dtype, False), run(dtype, True)
    assert distance(kernel, exact) <= AS_FAR * distance(singly, exact)
