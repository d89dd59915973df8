"""Compiled blocks: two graphs for every batch, with the outputs and gradients of the stock model.

The backend "eager" runs what dynamo has captured, "aot_eager" its forward and backward graphs too; neither makes C++.
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from peft import LoraConfig
from torch._dynamo.exc import FailOnRecompileLimitHit
from torch._dynamo.utils import counters

from qwen_cache.errors import ConfigError, ModelError
from qwen_cache.settings.load import Config, load_config
from qwen_train.memory.prediction import attention_bytes
from qwen_train.memory.sizes import SampleSize
from qwen_train.model import compilation, joint_row, segments
from qwen_train.model.attention import QwenImageMultiResTransformerBlock as Block
from qwen_train.model.compilation import compile_blocks, with_compile
from qwen_train.model.placement import offload_blocks
from qwen_train.model.saved_tensors import OffloadedInputs
from qwen_train.weights import checkpoint_blocks, freeze_unreached, recomputed_blocks
from tests.support import transformer_21_judge as judge_21
from tests.support import transformer_judge as judge
from tests.support.marks import slow
from tests.support.paths import load_tool
from tests.support.transformer_judge import adapted, assert_equal

pytestmark = [
    pytest.mark.skipif(
        torch.torch_version.TorchVersion(torch.__version__) < compilation.TORCH, reason="an older torch"
    ),
    pytest.mark.usefixtures("fresh_compiler"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CASES = {
    "20B": [judge.MIXED, judge.COUNTS, judge.COUNTS[1:2], judge.SWAPPED, judge.MIXED[:1]],
    "2.1": [
        judge_21.MIXED_21,
        judge_21.COUNTS_21,
        judge_21.COUNTS_21[2:3],
        judge_21.SWAPPED_21,
        judge_21.COUNTS_21[:1],
    ],
}
LORAS = {
    family: LoraConfig(r=4, lora_alpha=4, init_lora_weights=False, target_modules=targets)
    for family, targets in {"20B": ["to_q", "add_k_proj", "to_add_out"], "2.1": ["to_q", "img_mlp.out"]}.items()
}
"""Few targets, for the compiler traces each: the gradients of the first block have passed through all that follows."""
JUDGES: dict[str, Any] = {"20B": (judge, LORAS["20B"]), "2.1": (judge_21, LORAS["2.1"])}


# ---- graphs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "layout", "zero_cond_t", "draws"),
    [
        ("20B", "packed", True, 1),
        slow("20B", "packed", False, 1),
        slow("20B", "padded", True, 1),
        ("2.1", "packed", False, 1),
        slow("2.1", "packed", False, 3),
        slow("2.1", "padded", False, 1),
    ],
)
def test_two_graphs_serve_every_batch(family: str, layout: str, zero_cond_t: bool, draws: int) -> None:
    """The last block, whose text or prefix nothing uses, and the others; a batch of one sample is no other.

    In the padded layout one sample is a dimension of 1, which has graphs of its own. Passes without gradients have as
    many. Blocks that move to host memory have the same graphs, and on the same kernels the same results to the bit.
    """
    its, lora = JUDGES[family]
    batches = [its.random_samples(*case, **({"draws": draws} if family == "2.1" else {})) for case in CASES[family]]
    stock = its.stock_model(num_layers=4, **({"zero_cond_t": True} if zero_cond_t else {}))
    model = its.multi_res_model(stock, layout)
    adapted(stock, lora)
    adapted(model, lora)
    freeze_unreached(model)
    at_addresses_of_buffers(model)
    checkpoint_blocks(model, range(4))
    compile_blocks(model, backend="eager")
    runs, graphs = [], []
    for samples in batches:
        expected, found = its.run_singly(stock, samples), its.run_batched(model, samples)
        without = [name for name, p in model.named_parameters() if p.requires_grad == (p.grad is None)]
        assert without == [], "a zero in place of no gradient would let weight decay shrink what nothing uses"
        unreached = expected.gradients.keys() - found.gradients.keys()
        assert all(not expected.gradients[name].any() for name in unreached)
        assert_equal(found, judge.Run(expected.outputs, {name: expected.gradients[name] for name in found.gradients}))
        runs.append(found)
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == ([2, 2, 2, 2, 2] if layout == "packed" or family == "2.1" else [2, 2, 4, 4, 4])
    with torch.no_grad():
        for samples in batches:
            model(**its.batch_of(samples))
    assert counters["stats"]["unique_graphs"] == 2 * graphs[-1]
    model.offloaded_inputs = OffloadedInputs()
    offload_blocks(model, 3, torch.device("cpu"))
    for samples, expected in zip(batches, runs, strict=True):
        assert_identical(its.run_batched(model, samples), expected)
    assert counters["stats"]["unique_graphs"] == 2 * graphs[-1]


def at_addresses_of_buffers(model: Any) -> None:
    """Parameters at addresses for which a CPU chooses its kernels, as those of a buffer."""
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def assert_identical(found: Any, expected: Any) -> None:
    assert all(torch.equal(a, b) for a, b in zip(found.outputs, expected.outputs, strict=True))
    assert found.gradients.keys() == expected.gradients.keys()
    assert all(torch.equal(found.gradients[name], each) for name, each in expected.gradients.items())


def compiled(lora: LoraConfig, *, layers: int, backend: str, recomputed: bool = True) -> Any:
    model = judge.multi_res_model(judge.stock_model(num_layers=layers), "packed")
    adapted(model, lora)
    freeze_unreached(model)
    checkpoint_blocks(model, range(layers if recomputed else 0))
    compile_blocks(model, backend=backend)
    return model


def test_a_call_of_the_stock_model_is_not_compiled() -> None:
    """Qwen-Image-2.1 makes such calls for images during training."""
    stock = judge_21.stock_model()
    model = judge_21.multi_res_model(stock, "packed")
    compile_blocks(model, backend="eager")
    (sample,) = judge_21.random_samples(*judge_21.COUNTS_21[1:2])
    batch = judge_21.stock_batch(sample)
    with torch.no_grad():
        assert torch.equal(model(**batch, return_dict=False)[0], stock(**batch, return_dict=False)[0])
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "every", "blocks", "activations"),
    [
        ("20B", 1, 3, True),
        ("20B", 2, 4, True),
        ("20B", 0, 3, False),
        ("2.1", 1, 3, False),
        ("2.1", 2, 5, True),
    ],
)
def test_blocks_in_host_memory_have_the_same_graphs_and_results(
    family: str, every: int, blocks: int, activations: bool
) -> None:
    """To the bit, on the same kernels: compiled blocks read their weights from the two buffers, and what autograd saves
    of them comes back for the backward pass. `every` n-th block is recomputed, 0 for none."""
    its, lora = JUDGES[family]
    specifications = CASES[family][:2]
    runs, graphs = [], []
    for offloaded, kept in ((0, None), (blocks, OffloadedInputs() if activations else None)):
        torch.compiler.reset()
        counters.clear()
        model = its.multi_res_model(its.stock_model(num_layers=5), "packed")
        adapted(model, lora)
        freeze_unreached(model)
        at_addresses_of_buffers(model)
        checkpoint_blocks(model, recomputed_blocks(every, 5))
        compile_blocks(model, backend="aot_eager")
        model.offloaded_inputs = kept
        if offloaded:
            offload_blocks(model, offloaded, torch.device("cpu"))
        runs.append([its.run_batched(model, its.random_samples(*each)) for each in specifications])
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] > 0
    for expected, found in zip(*runs, strict=True):
        assert_identical(found, expected)


@pytest.mark.slow
def test_a_recomputed_block_keeps_its_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run decides by `attention_bytes` whether it fits."""
    kept, forward = [], segments._forward

    def counted(*inputs: Any) -> Any:
        results = forward(*inputs)
        kept.append(sum(result.nbytes for result in results))
        return results

    monkeypatch.setattr(segments, "_forward", counted)
    samples = judge.random_samples(*judge.MIXED)
    model = compiled(LoraConfig(r=2, target_modules=["to_q"]), layers=1, backend="aot_eager")
    judge.run_batched(model, samples)
    assert len(kept) == len(samples)
    settings = load_config(None, ["train.mixed_precision=no", "train.layout=packed"])
    sizes = [SampleSize(sample.images, len(sample.text)) for sample in samples]
    model_config = {**model.config, "_class_name": "QwenImageTransformer2DModel"}
    assert sum(kept) == attention_bytes(model_config, settings, sizes)


def test_too_many_graphs_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """One for a pass with gradients, and one without."""
    monkeypatch.setattr(compilation, "GRAPHS", 1)
    monkeypatch.setattr(Block, "forward", lambda _, image, text, *__, **___: (text, image))  # is soon traced
    model = compiled(judge.LORA, layers=1, backend="eager", recomputed=False)
    batch = judge.batch_of(judge.random_samples(*judge.MIXED))
    with torch._dynamo.config.patch(recompile_limit=1):
        model(**batch)
        with torch.no_grad(), pytest.raises(FailOnRecompileLimitHit):
            model(**batch)


def test_another_attention_backend_is_refused() -> None:
    model = judge.multi_res_model(judge.stock_model(), "packed")
    model.set_attention_backend("_native_math")
    with pytest.raises(ModelError, match="compiled blocks compute attention themselves"):
        compile_blocks(model)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # inductor's import
def test_a_compiled_block_has_few_kernels_and_little_traffic(capsys: pytest.CaptureFixture[str]) -> None:
    """Counted by tools/bench_graph.py. What tools/roofline.py computes with, is what is counted."""
    counter: Any = load_tool("bench_graph")
    counted = {
        "eager": counter.count_eager(),
        "compiled": counter.count_compiled(recomputed=False),
        "recomputed": counter.count_compiled(recomputed=True),
    }
    forward, backward = counted["compiled"].values()
    assert forward.kernels <= 29, "one cast more, of what attention returns, makes 30"
    assert backward.kernels <= 25
    assert forward.units <= 55
    assert backward.units <= 65
    roofline: Any = load_tool("roofline")
    for way, passes in counted.items():
        assert [each.units for each in passes.values()] == pytest.approx(roofline.UNITS[way], rel=0.05), way
    graphs = counter.count_graphs(4)
    assert graphs == {"batches": 4, "graphs": 2, "breaks": 0}
    counter.show(
        {"block": {way: {name: c._asdict() for name, c in of.items()} for way, of in counted.items()}}
        | {"graphs": graphs}
    )
    assert f"| compiled | {forward.kernels} | {backward.kernels} |" in capsys.readouterr().out


# ---- the operation ---------------------------------------------------------------------------------------------------


def inputs_of(row: joint_row.JointRow, of: segments.Segments, dtype: torch.dtype) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    lengths = sum(row.query_lengths), row.length, row.length
    tensors = [torch.randn(length, 2, 8, generator=generator, dtype=dtype).requires_grad_() for length in lengths]
    return [*tensors, *of]


def rows(draws: int) -> list[tuple[joint_row.JointRow, segments.Segments]]:
    """The row of a batch with texts between images, and that of its last block."""
    model = judge_21.multi_res_model(judge_21.stock_model(), "packed")
    batch = judge_21.batch_of(judge_21.random_samples(*judge_21.COUNTS_21, draws=draws))
    names = ("hidden_states", "encoder_hidden_states", "encoder_hidden_states_mask", "timestep", "img_shapes")
    row = model._read_batch(*(batch[name] for name in names), batch["image_positions"])[0]
    last = replace(row, only_draws=True)
    return [(row, row.attention), (last, row.draws_attention)]


@pytest.mark.parametrize("draws", [1, 3])
def test_the_operation_is_the_attention_of_segments(draws: int) -> None:
    from qwen_train.model.qwen_image_21 import dispatch_attention_fn, segmented_attention

    for row, of in rows(draws):
        inputs = inputs_of(row, of, torch.float64)
        expected = segmented_attention(*(x[None] for x in inputs[:3]), row, dispatch_attention_fn)
        found = segments.in_segments(*(x[None] for x in inputs[:3]), of)
        assert judge.distance(found, expected) < 1e-12
        weight = torch.randn(found.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        gradients = [torch.autograd.grad((x * weight).sum(), inputs[:3]) for x in (expected, found)]
        assert all(judge.distance(b, a) < 1e-12 for a, b in zip(*gradients, strict=True))


def test_the_operation_keeps_the_compilers_contract() -> None:
    """Its schema, its shapes without data, and its backward pass."""
    for row, of in rows(2):
        torch.library.opcheck(segments.segments, tuple(inputs_of(row, of, torch.float32)))


@pytest.mark.parametrize("draws", [1, 3])
def test_calls_of_the_variable_length_kernel(draws: int) -> None:
    """The kernel runs on CUDA alone. It gets what the uncompiled model gives it, whose calls others test."""
    for row, of in rows(draws):
        calls = segments._calls(*of, together=True)
        begins = [0, *itertools.accumulate(row.lengths)]
        assert len(calls) == len(row.varlen_calls)
        for call, expected in zip(calls, row.varlen_calls, strict=True):
            assert [x.tolist() for x in call.bounds] == [x.tolist() for x in expected.bounds]
            assert (call.longest, call.is_text, call.lengths) == (expected.longest, expected.is_text, expected.lengths)
            keys = [(begins[i] + begin, begins[i] + end) for i, (begin, end) in expected.keys]
            assert call.keys == keys
        asked = sorted(span for call in calls for span in call.queries)
        assert asked[0][0] == 0
        assert all(before[1] == after[0] for before, after in itertools.pairwise(asked))


# ---- train.compile ---------------------------------------------------------------------------------------------------


GPU = torch.device("cuda")


def chosen(run: Path | None = None, *, device: torch.device = GPU, steps: int = 1000, **train: Any) -> tuple[bool, str]:
    config, reason = with_compile(Config(train=train), device, steps, run)
    return config.train.compile, reason


def test_auto_compiles_where_it_is_worth_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(compilation, "runs_flash", lambda _: True)
    monkeypatch.setattr(compilation, "has_compiler", lambda: True)
    assert chosen() == (True, "")
    assert chosen(steps=200) == (True, "")
    assert chosen(steps=199) == (False, "fewer than 200 steps are left")
    assert chosen(offload_blocks=3) == (False, "train.offload_blocks moves the weights")
    assert chosen(lora={"lora_dropout": 0.1}) == (False, "the adapter has dropout")
    assert chosen(compile=False) == (False, "")
    assert chosen(device=torch.device("cpu")) == (False, "")
    assert chosen(device=torch.device("cpu"), compile=True) == (True, "")
    (tmp_path / "qwen.yaml").write_text(yaml.safe_dump({"train": {"compile": True}}), "utf-8")
    assert chosen(tmp_path, steps=10) == (True, ""), "as the run began"
    assert chosen(tmp_path, compile=False) == (False, "")
    monkeypatch.setattr(compilation, "has_compiler", lambda: False)
    assert chosen() == (False, "there is no Triton, or no C compiler")
    monkeypatch.setattr(compilation, "TORCH", "99.0")
    assert chosen() == (False, "compiled blocks need torch 99.0; older ones make a graph for each batch")
    monkeypatch.undo()
    monkeypatch.setattr(compilation, "runs_flash", lambda _: False)
    why = "compiled blocks need a CUDA device from Ampere on, and train.mixed_precision=bf16"
    assert chosen() == (False, why)
    assert chosen(tmp_path) == (False, why)
    with pytest.raises(ConfigError, match=f"train.compile=true: {why}"):
        chosen(compile=True)
