"""`train.attention`: which kernel a run takes, that each gives attention by its definition, and what replaces one.

Without a GPU, kernels are imitated on the CPU under torch's own schemas, by the formulas of attention and its gradient:
what is shown there is which segments a kernel gets, how they are sliced, and how gradients are added. Those of a GPU
are held against float64.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.models.attention_dispatch import AttentionBackendName
from peft import LoraConfig
from torch import Tensor
from torch._dynamo.utils import counters

from qwen_cache.errors import ConfigError
from qwen_cache.settings.sections import TrainConfig
from qwen_train.model import attention, kernels, qwen_image_21, segments
from qwen_train.model.compilation import compile_blocks
from qwen_train.model.joint_row import JointSample
from qwen_train.model.kernels import KERNELS, Choice, choose_kernel, refuse_kernel
from qwen_train.model.segments import Segment, Segments
from qwen_train.weights import checkpoint_blocks, freeze_unreached
from tests.support import transformer_21_judge as judge_21
from tests.support import transformer_judge as judge
from tests.support.judge import AS_FAR
from tests.support.marks import slow
from tests.support.transformer_judge import adapted

CPU = torch.device("cpu")
Calls = list[list[Segment]]


def independent(*lengths: int) -> Calls:
    """One call of samples that see themselves."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return [[Segment(span, False, (span,)) for span in spans]]


def joint(*prefix: tuple[int, bool], target: int, draws: int = 1) -> Calls:
    """The calls of a sample of Qwen-Image-2.1 with text before, between and after images."""
    return [[segment] for segment in JointSample(prefix, target, draws).segments]


CASES: dict[str, Calls] = {
    "one": independent(40),
    "ragged": independent(1, 17, 40, 23),
    "long": independent(40, 23, 31),
    "text before and after an image": joint((5, True), (30, False), (7, True), target=24),
    "long text, three draws": joint((20, True), (18, False), (3, True), target=24, draws=3),
}
SHORT = {"LONG": 20, "SHORTEST": 4}
"""In place of 1024 and 64."""
BY_CUDNN = {
    "one": [(40, 40)],
    "ragged": [],
    "long": [(40, 40), (23, 23), (31, 31)],
    "text before and after an image": [(30, 35), (24, 66)],
    "long text, three draws": [(20, 20), (18, 38), (24, 65), (24, 65), (24, 65)],
}
"""The lengths of queries and keys that cuDNN gets: neither short text, nor text that sees more than itself."""


# ---- by definition ---------------------------------------------------------------------------------------------------


def by_definition(query: Tensor, key: Tensor, value: Tensor, calls: Calls) -> Tensor:
    """Attention of `[n, heads, dim]`, head by head."""
    output = torch.zeros_like(query)
    for segment in (segment for members in calls for segment in members):
        begin, end = segment.span
        seen = torch.cat([torch.arange(*span) for span in segment.keys]).to(query.device)
        place = torch.arange(len(seen), device=query.device)
        hidden = place > torch.arange(len(seen) - (end - begin), len(seen), device=query.device)[:, None]
        heads = []
        for i in range(query.shape[1]):
            scores = query[begin:end, i] @ key[seen, i].T / math.sqrt(query.shape[-1])
            scores = scores.masked_fill(hidden, -math.inf) if segment.is_text else scores
            heads.append(scores.softmax(-1) @ value[seen, i])
        output = output.index_copy(0, torch.arange(begin, end, device=query.device), torch.stack(heads, dim=1))
    return output


def operation(kernel: kernels.Kernel) -> Callable[..., Tensor]:
    def run(query: Tensor, key: Tensor, value: Tensor, calls: Calls) -> Tensor:
        output: Tensor = segments.segments(query, key, value, *Segments.of(calls, query.device, kernel))[0]
        return output

    return run


def row_of(calls: Calls) -> int:
    return max(segment.span[1] for members in calls for segment in members)


def inputs_of(calls: Calls, heads: int, dim: int, dtype: torch.dtype, device: torch.device = CPU) -> list[Tensor]:
    """Rows whose heads come first in memory, as nothing in the models has them."""
    random = torch.Generator().manual_seed(0)
    rows = [torch.randn(heads, row_of(calls), dim, generator=random, dtype=torch.float32) for _ in range(4)]
    return [row.to(device, dtype).transpose(0, 1) for row in rows]


def results(how: Callable[..., Tensor], inputs: Sequence[Tensor], calls: Calls, *, expanded: bool) -> list[Tensor]:
    """Output and gradients; the gradient of the output is one number with strides of zero, or the last input."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    output = how(*leaves, calls)
    gradient = torch.ones((), dtype=output.dtype, device=output.device).expand_as(output) if expanded else inputs[3]
    return [output.detach(), *torch.autograd.grad(output, leaves, gradient)]


# ---- imitated kernels ------------------------------------------------------------------------------------------------


def attend(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp `[..., n]` of `[..., n, dim]`."""
    scores = (query @ key.mT / math.sqrt(query.shape[-1])).masked_fill(hidden, -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def differentiate(*inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients, from what the forward pass gave: its output and its log-sum-exp."""
    gradient, query, key, value, output, lse, hidden = inputs
    scale = 1 / math.sqrt(query.shape[-1])
    weights = (query @ key.mT * scale).masked_fill(hidden, -math.inf).sub(lse[..., None]).exp()
    of_scores = weights * (gradient @ value.mT - (gradient * output).sum(-1, keepdim=True)) * scale
    return of_scores @ key, of_scores.mT @ query, weights.mT @ gradient


def hidden_keys(queries: int, keys: int, causal: bool, *, first: int) -> Tensor:
    """True for keys that a causal query does not see, if the first query sees the key `first`."""
    return torch.ones(queries, keys, dtype=torch.bool).triu(first + 1) & causal


class Imitation:
    """CUDA's kernels on the CPU, and the lengths of queries and keys of every call."""

    def __init__(self) -> None:
        self.calls: dict[str, list[tuple[int, int]]] = {name: [] for name in KERNELS}
        self.broken: dict[str, Exception] = {}

    def called(self, name: str, *lengths: tuple[int, int]) -> None:
        self.calls[name] += lengths
        if error := self.broken.pop(name, None):
            raise error

    def cudnn(self, query: Tensor, key: Tensor, value: Tensor, bias: Any, lse: bool, *rest: Any) -> tuple[Any, ...]:
        dropout, causal, *_ = (*rest, 0.0, False)[:2] if len(rest) < 2 else rest
        assert (bias, lse, dropout) == (None, True, 0.0)
        assert all(x.transpose(1, 2).is_contiguous() for x in (query, key, value))
        lengths = query.shape[2], key.shape[2]
        assert lengths[1] > 1, "cuDNN takes no single key"
        self.called("cudnn", lengths)
        output, sums = attend(query.double(), key.double(), value.double(), hidden_keys(*lengths, causal, first=0))
        like_query = torch.empty_like(query).copy_(output)
        seed = torch.zeros((), dtype=torch.int64)
        sums = sums[..., None].to(torch.promote_types(query.dtype, torch.float32))
        return like_query, sums, None, None, *lengths, seed, seed, None

    def cudnn_backward(self, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, lse, _, _, bias, bounds, _, queries, keys, dropout, causal = inputs
        assert all(x.transpose(1, 2).is_contiguous() for x in tensors)
        assert lse.is_contiguous()
        assert lse.shape == (1, tensors[1].shape[1], queries, 1)
        assert (bias, bounds, dropout) == (None, None, 0.0)
        self.called("cudnn", (queries, keys))
        hidden = hidden_keys(queries, keys, causal, first=0)
        found = differentiate(*(x.double() for x in tensors), lse[..., 0].double(), hidden)
        of = tensors[1:4]
        return tuple(torch.empty_like(x).copy_(y) for x, y in zip(of, found, strict=True))  # type: ignore[return-value]

    def varlen(self, name: str, tensors: Sequence[Tensor], bounds: Sequence[Tensor], causal: bool) -> Iterator[Any]:
        """The tokens of each sequence, and what is hidden there: aligned to the last key."""
        of_queries, of_keys = (list(zip(x.tolist(), x.tolist()[1:], strict=False)) for x in bounds)
        lengths = [(q[1] - q[0], k[1] - k[0]) for q, k in zip(of_queries, of_keys, strict=True)]
        self.called(name, *((q, k) for q, k in lengths if q))
        assert (of_queries[-1][1], of_keys[-1][1]) == (len(tensors[0]), len(tensors[1]))
        for asked, seen, (q, k) in zip(of_queries, of_keys, lengths, strict=True):
            if q:
                yield slice(*asked), slice(*seen), hidden_keys(q, k, causal, first=k - q)

    def varlen_forward(self, name: str, *inputs: Any) -> tuple[Tensor, Tensor]:
        query, key, value, bounds, causal = inputs
        output, lse = torch.zeros_like(query), query.new_zeros(query.shape[1], len(query), dtype=torch.float64)
        for asked, seen, hidden in self.varlen(name, (query, key), bounds, causal):
            by_head = (x.double().transpose(0, 1) for x in (query[asked], key[seen], value[seen]))
            found, lse[:, asked] = attend(*by_head, hidden)
            output[asked] = found.transpose(0, 1).to(query.dtype)
        return output, lse.to(torch.promote_types(query.dtype, torch.float32))

    def varlen_backward(self, name: str, *inputs: Any) -> tuple[Tensor, Tensor, Tensor]:
        gradient, query, key, value, output, lse, bounds, causal = inputs
        found = torch.zeros_like(query), torch.zeros_like(key), torch.zeros_like(value)
        for asked, seen, hidden in self.varlen(name, (query, key), bounds, causal):
            rows = gradient[asked], query[asked], key[seen], value[seen], output[asked]
            by_head = (x.double().transpose(0, 1) for x in rows)
            pieces = differentiate(*by_head, lse[:, asked].double(), hidden)
            for total, where, piece in zip(found, (asked, seen, seen), pieces, strict=True):
                total[where] = piece.transpose(0, 1).to(query.dtype)
        return found

    def flash(self, *inputs: Any, window_size_left: int, window_size_right: int, **_: Any) -> tuple[Any, ...]:
        query, key, value, of_queries, of_keys, _, _, dropout, causal, _ = inputs
        assert (dropout, window_size_left, window_size_right) == (0.0, -1, 0 if causal else -1)
        output, lse = self.varlen_forward("flash", query, key, value, (of_queries, of_keys), causal)
        seed = torch.zeros(2, dtype=torch.uint64)
        return output, lse, seed, seed[:0], output[:0]

    def flash_backward(self, *inputs: Any, **_: Any) -> tuple[Tensor, Tensor, Tensor]:
        *tensors, of_queries, of_keys, _, _, _, causal, _, _ = inputs
        return self.varlen_backward("flash", *tensors, (of_queries, of_keys), causal)

    @property
    def flash_attn_interface(self) -> SimpleNamespace:
        """The functions of hopper/flash_attn_interface.py of flash-attention, as they are called there."""

        def forward(q: Tensor, k: Tensor, v: Tensor, *, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, **rest: Any) -> Any:
            assert rest.keys() == {"max_seqlen_q", "max_seqlen_k", "softmax_scale", "causal"}
            output, lse = self.varlen_forward("fa3", q, k, v, (cu_seqlens_q, cu_seqlens_k), rest["causal"])
            return output, lse, output[:0], lse[:0]

        def backward(*inputs: Any, deterministic: bool) -> None:
            *tensors, of_queries, of_keys, used, used_keys, _, _, dq, dk, dv, scale, causal = inputs
            assert (used, used_keys, deterministic) == (None, None, False)
            assert scale == pytest.approx(1 / math.sqrt(dq.shape[-1]))
            found = self.varlen_backward("fa3", *tensors, (of_queries, of_keys), causal)
            for x, y in zip((dq, dk, dv), found, strict=True):
                x.copy_(y)

        return SimpleNamespace(_flash_attn_forward=forward, _flash_attn_backward=backward)


@contextmanager
def imitating(imitation: Imitation) -> Iterator[None]:
    library = torch.library.Library("aten", "IMPL")
    library.impl("_scaled_dot_product_cudnn_attention", imitation.cudnn, "CPU")
    library.impl("_scaled_dot_product_cudnn_attention_backward", imitation.cudnn_backward, "CPU")
    library.impl("_flash_attention_forward", imitation.flash, "CPU")
    library.impl("_flash_attention_backward", imitation.flash_backward, "CPU")
    try:
        yield
    finally:
        library._destroy()


@pytest.fixture
def imitation(monkeypatch: pytest.MonkeyPatch) -> Iterator[Imitation]:
    made = Imitation()
    for name, value in SHORT.items():
        monkeypatch.setattr(segments, name, value)
    monkeypatch.setattr(segments, "runs_flash", lambda _: True)
    monkeypatch.setattr(kernels, "_failed", set())
    monkeypatch.setitem(sys.modules, kernels.FA3, made.flash_attn_interface)  # type: ignore[misc]
    with imitating(made):
        yield made


@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_is_attention_by_its_definition(
    kernel: kernels.Kernel, name: str, expanded: bool, imitation: Imitation
) -> None:
    calls = CASES[name]
    inputs = inputs_of(calls, 2, 8, torch.float64)
    found = results(operation(kernel), inputs, calls, expanded=expanded)
    expected = results(by_definition, inputs, calls, expanded=expanded)
    for ours, exact in zip(found, expected, strict=True):
        assert judge.distance(ours, exact) < 1e-12
    everything = Counter((segment.length, segment.key_length) for members in calls for segment in members)
    by_cudnn = Counter(BY_CUDNN[name]) if kernel == "cudnn" else Counter[tuple[int, int]]()
    assert Counter(imitation.calls["cudnn"]) == by_cudnn + by_cudnn, "forward and backward"
    others = everything - by_cudnn
    assert Counter(imitation.calls["fa3" if kernel == "fa3" else "flash"]) == others + others


# ---- where a kernel fails --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("passes", ["forward", "backward"])
@pytest.mark.parametrize("kernel", ["cudnn", "fa3"])
def test_a_kernel_that_fails_is_replaced_with_one_line(
    kernel: kernels.Kernel, passes: str, imitation: Imitation, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the middle of a pass: flash attention takes over output and log-sum-exp."""
    calls = CASES["long"]
    inputs, fail = inputs_of(calls, 2, 8, torch.float64), RuntimeError("no engine\nsecond line")
    table = kernels.FORWARD if passes == "forward" else kernels.BACKWARD
    work, failing = table[kernel], iter([fail])

    def failing_once(*inputs: Any) -> Any:
        if error := next(failing, None):
            raise error
        return work(*inputs)

    table[kernel] = failing_once
    try:
        found = [results(operation(kernel), inputs, calls, expanded=False) for _ in range(2)]
    finally:
        table[kernel] = work
    expected = results(by_definition, inputs, calls, expanded=False)
    for each in found:
        assert all(judge.distance(ours, exact) < 1e-12 for ours, exact in zip(each, expected, strict=True))
    title = kernels.TITLES[kernel]
    line = f"attention by {title} failed (no engine): flash attention from here on\n"
    assert capsys.readouterr().err == line
    assert imitation.calls[kernel] == ([] if passes == "forward" else [(40, 40), (23, 23), (31, 31)])


def test_too_little_memory_is_no_fault_of_the_kernel(imitation: Imitation) -> None:
    imitation.broken["cudnn"] = torch.OutOfMemoryError("CUDA out of memory")
    calls = CASES["long"]
    inputs = inputs_of(calls, 2, 8, torch.float64)
    with pytest.raises(torch.OutOfMemoryError):
        operation("cudnn")(*inputs[:3], calls)
    assert operation("cudnn")(*inputs[:3], calls).isfinite().all()
    assert not imitation.calls["flash"]


def test_deterministic_gradients_are_those_of_flash_attention(imitation: Imitation) -> None:
    """cuDNN adds in any order."""
    calls = CASES["one"]
    torch.use_deterministic_algorithms(True)
    try:
        results(operation("cudnn"), inputs_of(calls, 2, 8, torch.float64), calls, expanded=False)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (imitation.calls["cudnn"], imitation.calls["flash"]) == ([(40, 40)], [(40, 40)])


def test_a_kernel_is_checked_before_it_is_taken(imitation: Imitation, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "PROBED", (24, 37))
    check = lambda kernel: kernels.checked(Choice(kernel, "why"), CPU, 2, 8)  # noqa: E731
    assert check("flash") == ("flash", "why")
    assert not any(imitation.calls.values()), "there is nothing to compare"
    assert check("cudnn") == ("cudnn", "why")
    assert check("fa3") == ("fa3", "why")
    imitation.broken["cudnn"] = RuntimeError("no engine")
    assert check("cudnn") == ("flash", "cuDNN failed: no engine")
    monkeypatch.setitem(
        kernels.BACKWARD, "cudnn", lambda *inputs: tuple(1.05 * x for x in kernels._cudnn_backward(*inputs))
    )
    assert check("cudnn") == ("flash", "cuDNN gave other values, 5.0% away")
    monkeypatch.setitem(kernels.FORWARD, "fa3", lambda *inputs: tuple(x * math.nan for x in kernels._fa3(*inputs)))
    assert check("fa3") == ("flash", "FlashAttention-3 gave other values, nan% away")
    monkeypatch.delitem(kernels.FORWARD, "fa3")
    monkeypatch.setitem(kernels.FORWARD, "fa3", kernels._fa3)
    monkeypatch.setitem(sys.modules, kernels.FA3, None)  # type: ignore[arg-type]
    assert check("fa3").reason.startswith("FlashAttention-3 failed: import of flash_attn_interface halted")


# ---- the choice ------------------------------------------------------------------------------------------------------

TOO_FEW = "are too few for cuDNN, which prepares each length"


@pytest.mark.parametrize(
    ("setting", "capability", "lengths", "samples", "chosen"),
    [
        ("auto", (9, 0), 62, 1000, "cuDNN: 1000 samples of 62 lengths"),
        ("auto", (9, 0), 1, 16, "cuDNN: 16 samples of 1 length"),
        (
            "auto",
            (9, 0),
            63,
            1000,
            "flash: 1000 samples of 63 lengths are too few for cuDNN, which prepares each length",
        ),
        ("auto", (10, 0), 62, 1000, "cuDNN: 1000 samples of 62 lengths"),
        *(("auto", capability, 1, 1000, "flash") for capability in ((8, 0), (8, 6), (8, 9), (11, 0), (12, 0))),
        ("flash", (9, 0), 1, 1000, "flash"),
        ("cudnn", (8, 6), 9999, 1, "cuDNN"),
        ("fa3", (9, 0), 9999, 1, "FlashAttention-3"),
    ],
)
def test_the_kernel_follows_from_the_device_and_the_lengths(
    setting: Any, capability: tuple[int, int], lengths: int, samples: int, chosen: str
) -> None:
    assert str(choose_kernel(setting, capability, lengths, samples)) == chosen


@pytest.mark.parametrize(
    ("setting", "capability", "changes", "expected", "found"),
    [
        ("cudnn", None, {}, "a CUDA GPU of compute capability 8.0 or newer", "no CUDA GPU"),
        ("cudnn", (7, 5), {}, "a CUDA GPU of compute capability 8.0 or newer", "compute capability 7.5"),
        ("cudnn", (9, 0), {"mixed_precision": "no"}, "train.mixed_precision=bf16", "no"),
        ("cudnn", (9, 0), {"by_segments": False}, "train.layout=packed", "padded"),
        ("fa3", None, {}, "a CUDA GPU of compute capability 9.0 (H100, H200)", "no CUDA GPU"),
        ("fa3", (10, 0), {}, "a CUDA GPU of compute capability 9.0 (H100, H200)", "compute capability 10.0"),
        (
            "fa3",
            (9, 0),
            {},
            "the package flash_attn_interface, from the folder hopper of flash-attention",
            "not installed",
        ),
    ],
)
def test_a_kernel_that_cannot_run_is_refused(
    setting: Any, capability: Any, changes: dict[str, Any], expected: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "capability_of", lambda _: capability)
    monkeypatch.setattr(kernels, "find_spec", lambda _: None)
    by_segments = changes.pop("by_segments", True)
    with pytest.raises(ConfigError) as refusal:
        refuse_kernel(TrainConfig(attention=setting, **changes), CPU, by_segments=by_segments)
    error = refusal.value
    assert (error.what, error.expected, error.found, error.do) == (
        f"train.attention={setting} cannot run",
        expected,
        found,
        "set train.attention=auto",
    )
    for free in ("auto", "flash"):
        refuse_kernel(TrainConfig(attention=free, mixed_precision="no"), CPU, by_segments=False)


def test_a_kernel_that_can_run_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "capability_of", lambda _: (9, 0))
    monkeypatch.setattr(kernels, "find_spec", lambda _: SimpleNamespace())
    for setting in ("cudnn", "fa3"):
        refuse_kernel(TrainConfig(attention=setting), CPU, by_segments=True)


# ---- in the models ---------------------------------------------------------------------------------------------------

JUDGES: dict[str, Any] = {
    "20B": (judge, judge.LORA, [judge.MIXED, judge.COUNTS[1:2], judge.SWAPPED]),
    "2.1": (judge_21, judge_21.LORA_21, [judge_21.MIXED_21, judge_21.COUNTS_21[2:3], judge_21.SWAPPED_21]),
}


@pytest.mark.parametrize(
    ("kernel", "family", "compiled"),
    [
        *((kernel, family, False) for kernel in ("cudnn", "fa3") for family in JUDGES),
        ("cudnn", "2.1", True),
        slow("cudnn", "20B", True),
        slow("fa3", "20B", True),
        slow("fa3", "2.1", True),
    ],
)
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
def test_models_by_another_kernel_are_stock(
    kernel: str, family: str, compiled: bool, imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eager and compiled, with gradient checkpointing; still two graphs for every batch. Compiled ones have a smaller
    LoRA, since the compiler takes longest for its layers."""
    for module in (attention, qwen_image_21):
        monkeypatch.setattr(module, "flash_takes", lambda *_: True)
        monkeypatch.setattr(module, "varlen_kernel", lambda: pytest.fail("another kernel"))
    its, lora, batches = JUDGES[family]
    targets = ["to_q", "add_k_proj", "to_add_out"] if family == "20B" else ["to_q", "to_v"]
    lora = LoraConfig(r=4, init_lora_weights=False, target_modules=targets) if compiled else lora
    stock = its.stock_model()
    model = its.multi_res_model(stock, "packed")
    model.attention_kernel = kernel
    adapted(stock, lora)
    adapted(model, lora)
    freeze_unreached(model)
    checkpoint_blocks(model, range(3))
    if compiled:
        compile_blocks(model, backend="eager")
    for case in batches:
        samples = its.random_samples(*case)
        expected, found = its.run_singly(stock, samples), its.run_batched(model, samples)
        its_gradients = {name: expected.gradients[name] for name in found.gradients}
        judge.assert_equal(found, judge.Run(expected.outputs, its_gradients))
    assert imitation.calls[kernel]
    assert counters["stats"]["unique_graphs"] == (2 if compiled else 0)


@pytest.mark.parametrize("family", JUDGES)
def test_a_chosen_backend_comes_before_the_kernel(
    family: str, imitation: Imitation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (attention, qwen_image_21):
        monkeypatch.setattr(module, "flash_takes", lambda *_: True)
    its, _, batches = JUDGES[family]
    model = its.multi_res_model(its.stock_model(), "packed")
    model.attention_kernel = "cudnn"
    model.set_attention_backend(AttentionBackendName._NATIVE_MATH.value)
    its.run_batched(model, its.random_samples(*batches[0]))
    assert not any(imitation.calls.values())


# ---- on a GPU --------------------------------------------------------------------------------------------------------

GPU = torch.device("cuda")
REAL: dict[str, Calls] = {
    "ragged": independent(77, 640, 1100, 4346, 8642),
    "long": independent(1024, 1379, 4346),
    "one": independent(4346),
    "one token": independent(1),
    "one token among others": independent(1, 1100, 1),
    "Qwen-Image-2.1": joint((7, True), (1024, False), (127, True), target=4096),
    "Qwen-Image-2.1, draws": joint((1100, True), (1024, False), (27, True), target=1024, draws=3),
}
HEADS, DIM = 24, 128


def on_gpu(kernel: kernels.Kernel) -> Callable[..., Tensor]:
    """The operation with this kernel; the test is skipped where it cannot run."""
    try:
        refuse_kernel(TrainConfig(attention=kernel), GPU, by_segments=True)
    except ConfigError as error:
        pytest.skip(str(error))
    kernels._failed.clear()
    return operation(kernel)


def distances(found: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    return [judge.distance(x.double(), y) for x, y in zip(found, exact, strict=True)]


def assert_as_near_as_flash(how: Callable[..., Tensor], inputs: Sequence[Tensor], calls: Calls, expanded: bool) -> None:
    exact = results(by_definition, [x.double() for x in inputs], calls, expanded=expanded)
    flash = distances(results(operation("flash"), inputs, calls, expanded=expanded), exact)
    ours = distances(results(how, inputs, calls, expanded=expanded), exact)
    assert not kernels._failed
    assert all(a <= AS_FAR * b for a, b in zip(ours, flash, strict=True)), (ours, flash)
    assert max(ours) < kernels.AS_NEAR


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's kernels")
@pytest.mark.parametrize("expanded", [False, True])
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_on_cuda_are_as_near_to_float64_as_flash(kernel: kernels.Kernel, name: str, expanded: bool) -> None:
    """Rows whose heads come first in memory, and a gradient with strides of zero."""
    how, calls = on_gpu(kernel), REAL[name]
    assert_as_near_as_flash(how, inputs_of(calls, HEADS, DIM, torch.bfloat16, GPU), calls, expanded)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's kernels")
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_sample_on_cuda_is_alone_what_it_is_in_a_batch(kernel: kernels.Kernel) -> None:
    how, lengths = on_gpu(kernel), (1379, 4346, 1100)
    inputs = inputs_of(independent(*lengths), HEADS, DIM, torch.bfloat16, GPU)
    together = results(how, inputs, independent(*lengths), expanded=False)
    begin = 0
    for length in lengths:
        alone = results(how, [x[begin : begin + length] for x in inputs], independent(length), expanded=False)
        for ours, its in zip((x[begin : begin + length] for x in together), alone, strict=True):
            assert judge.distance(ours.double(), its.double()) < kernels.AS_NEAR / 4, "2^-8 is the unit of bfloat16"
        begin += length


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's kernels")
@pytest.mark.parametrize("kernel", KERNELS)
def test_kernels_on_cuda_repeat_themselves(kernel: kernels.Kernel) -> None:
    """Outputs always; gradients if torch is told so, else but for the order of sums."""
    how, calls = on_gpu(kernel), REAL["long"]
    inputs = inputs_of(calls, HEADS, DIM, torch.bfloat16, GPU)
    once, again = (results(how, inputs, calls, expanded=False) for _ in range(2))
    assert torch.equal(once[0], again[0])
    assert max(distances(once, [x.double() for x in again])) < kernels.AS_NEAR / 4
    torch.use_deterministic_algorithms(True)
    try:
        once, again = (results(how, inputs, calls, expanded=False) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA's kernels")
@pytest.mark.parametrize("kernel", ["cudnn", "fa3"])
def test_the_check_before_a_run_passes_on_cuda(kernel: kernels.Kernel) -> None:
    on_gpu(kernel)
    for heads in (24, 32):
        assert kernels.distance_from_flash(kernel, GPU, heads, DIM) < kernels.AS_NEAR
