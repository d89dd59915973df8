"""The same equality under what trainers do to a model: compile it, autocast, quantise it, wrap what they hold already.

`torch.compile` runs with backend "aot_eager": it captures, differentiates and recompiles as always, but makes no C++,
which takes minutes on a CPU.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module
from accelerate.state import AcceleratorState
from diffusers import QwenImageTransformer2DModel, TorchAoConfig
from peft import get_peft_model
from torch._dynamo.utils import counters

from qwen_cache.errors import ModelError
from qwen_train.model import transformer
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from tests.support.commands import run
from tests.support.transformer_judge import (
    CASES,
    COUNTS,
    LORA,
    MIXED,
    TINY,
    Run,
    Sample,
    assert_as_near,
    assert_equal,
    multi_res_model,
    output_error,
    random_samples,
    run_batched,
    run_singly,
    stock_model,
)

Stock = QwenImageTransformer2DModel


# ---- torch.compile and autocast --------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")  # dynamo does so with an autograd.Function
@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.slow
def test_compiled_whole_for_successive_mixtures(layout: str, real_aot_eager: Callable[..., Any]) -> None:
    stock = stock_model(zero_cond_t=True, num_layers=2)
    model = multi_res_model(stock, layout)
    model.compile(backend=real_aot_eager)
    for case in (MIXED, CASES["a control larger than its target"]):
        samples = random_samples(*case)
        assert_equal(run_batched(model, samples), run_singly(stock, samples))
    assert counters["stats"]["unique_graphs"], "nothing was compiled"


@pytest.fixture(scope="module")
def autocast() -> tuple[list[Sample], Run, Run]:
    """Samples, what the stock model makes of them under autocast, and in float32."""
    samples = [replace(sample, sigma=sample.sigma.bfloat16().float()) for sample in random_samples(*COUNTS)]
    stock = stock_model(zero_cond_t=True)
    exact = run_singly(stock, samples)
    with torch.autocast("cpu", torch.bfloat16):
        return samples, run_singly(stock, samples), exact


def test_autocast_is_as_near_to_float32_as_the_stock_model(
    layout: str, autocast: tuple[list[Sample], Run, Run]
) -> None:
    """Rounding differs with the shape of every product, so the measure is float32."""
    samples, singly, exact = autocast
    with torch.autocast("cpu", torch.bfloat16):
        batched = run_batched(multi_res_model(stock_model(zero_cond_t=True), layout), samples)
    assert_as_near(batched, singly, exact)


# ---- quantised weights -----------------------------------------------------------------------------------------------


def torchao_load(kind: str, folder: Path) -> Callable[[type[Stock]], Any]:
    quantization = pytest.importorskip("torchao.quantization")
    config = {"int8": quantization.Int8WeightOnlyConfig, "fp8": quantization.Float8WeightOnlyConfig}[kind]
    return lambda cls: cls.from_pretrained(
        folder, quantization_config=TorchAoConfig(config()), torch_dtype=torch.float32
    )


def bitsandbytes_load(folder: Path) -> Callable[[type[Stock]], Any]:
    """Blocks in 4 bits. diffusers asks for a GPU before it loads such weights, so they are put in by hand."""
    bnb = pytest.importorskip("bitsandbytes")

    def in_4_bits(layer: torch.nn.Linear) -> Any:
        quantised = bnb.nn.Linear4bit(
            layer.in_features, layer.out_features, quant_type="nf4", compute_dtype=torch.float32
        )
        quantised.load_state_dict(layer.state_dict())
        return quantised.to("cpu")

    def load(cls: type[Stock]) -> Any:
        model = cls.from_pretrained(folder)
        for module in list(model.transformer_blocks.modules()):
            for name, child in list(module.named_children()):
                if type(child) is torch.nn.Linear:
                    setattr(module, name, in_4_bits(child))
        return model

    return load


@pytest.mark.fast_cases(1)
@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
@pytest.mark.parametrize(
    "wrapped", [pytest.param(False, marks=pytest.mark.slow), True], ids=["from_pretrained", "from_stock"]
)
@pytest.mark.parametrize("kind", ["int8", "fp8", "nf4"])
def test_lora_on_quantised_weights(layout: str, kind: str, wrapped: bool, tmp_path: Path) -> None:
    stock_model(zero_cond_t=True).save_pretrained(tmp_path)
    load = bitsandbytes_load(tmp_path) if kind == "nf4" else torchao_load(kind, tmp_path)
    models = [load(Stock), load(Stock if wrapped else QwenImageMultiResTransformer2DModel)]
    for model in models:
        model.requires_grad_(False)
        torch.manual_seed(0)
        model.add_adapter(LORA)
    stock, ours = models[0], QwenImageMultiResTransformer2DModel.from_stock(models[1]) if wrapped else models[1]
    ours.layout = layout
    samples = random_samples(*COUNTS)
    expected = run_singly(stock, samples)
    assert_equal(run_batched(ours, samples), expected)
    assert output_error(run_singly(stock_model(zero_cond_t=True), samples), expected) > 1e-3, "nothing was quantised"


# ---- the trainer -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_trainer_computes_the_same_in_either_layout(
    built: Callable[[str], Path], tiny_model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three steps of two samples of other sizes, from one seed."""
    losses, packed_calls, scatter = {}, [], transformer.scatter
    monkeypatch.setattr(transformer, "scatter", lambda *a: packed_calls.append(a) or scatter(*a))
    for layout in ("padded", "packed"):
        out = tmp_path / layout
        settings = {"output_dir": out, "layout": layout, "max_steps": 3, "batch_size": 2, "mixed_precision": "no"}
        options = [word for name, value in settings.items() for word in ("--set", f"train.{name}={value}")]
        model = tiny_model("edit-plus")
        result = run(
            "qwen-train", "run", built("edit-plus"), "--model", model, *options, "--set", "logging.report_to=none"
        )
        assert result.code == 0, result.stderr
        losses[layout] = [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines()]
        assert bool(packed_calls) == (layout == "packed")
        AcceleratorState._reset_state(reset_partial_state=True)
    assert len(losses["padded"]) == 3
    assert losses["packed"] == pytest.approx(losses["padded"], rel=1e-4)


# ---- around a model that is there already ----------------------------------------------------------------------------


def test_from_stock_keeps_the_parameters(layout: str) -> None:
    stock, samples = stock_model(zero_cond_t=True), random_samples(*COUNTS)
    expected, parameters = run_singly(stock, samples), dict(stock.named_parameters())
    model = QwenImageMultiResTransformer2DModel.from_stock(stock)
    model.layout = layout
    assert model is stock
    assert all(parameters[name] is parameter for name, parameter in model.named_parameters())
    assert_equal(run_batched(model, samples), expected)


def test_from_stock_below_a_peft_model(layout: str) -> None:
    """An existing adapter continues to be trained by an existing optimizer."""
    wrapped, samples = get_peft_model(stock_model(), LORA), random_samples(*MIXED)
    expected = run_singly(wrapped.base_model.model, samples)
    optimizer = torch.optim.SGD([p for p in wrapped.parameters() if p.requires_grad], lr=1.0)
    model = QwenImageMultiResTransformer2DModel.from_stock(wrapped.base_model.model)
    model.layout = layout
    found = run_batched(wrapped, samples)
    assert_equal(
        Run(found.outputs, {n.removeprefix("base_model.model."): g for n, g in found.gradients.items()}), expected
    )
    before = copy.deepcopy(model.state_dict())
    optimizer.step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)


def test_names_by_which_others_find_the_blocks() -> None:
    """Device maps, FSDP and `compile_repeated_blocks` go by the name of the class."""
    model = multi_res_model(stock_model())
    names = [type(block).__name__ for block in model.transformer_blocks]
    assert names == model._no_split_modules * len(names) == model._repeated_blocks * len(names)


def test_from_stock_keeps_the_attention_backend() -> None:
    stock = stock_model()
    stock.set_attention_backend("_native_math")
    model = QwenImageMultiResTransformer2DModel.from_stock(stock)
    assert {str(p._attention_backend.value) for p in model.attn_processors.values()} == {"_native_math"}


def hooked() -> Any:
    model = stock_model()
    add_hook_to_module(model.transformer_blocks[1], ModelHook())
    return model


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (hooked, "a hook on transformer_blocks.1"),
        (lambda: multi_res_model(stock_model()), "QwenImageMultiResTransformer2DModel"),
        (lambda: torch.nn.Linear(2, 2), "Linear"),
    ],
)
def test_from_stock_refuses_what_is_not_plain(make: Callable[[], Any], found: str) -> None:
    with pytest.raises(ModelError) as refusal:
        QwenImageMultiResTransformer2DModel.from_stock(make())
    assert str(refusal.value) == (
        "only a plain QwenImageTransformer2DModel can become one for mixed sizes (expected no offloading hooks, "
        f"context parallelism or FSDP on it yet, found {found})\n  → call from_stock right after from_pretrained"
    )


def test_from_stock_refuses_a_layered_model_and_leaves_it_alone() -> None:
    stock = Stock(**TINY, use_layer3d_rope=True)
    with pytest.raises(ModelError, match="layered checkpoints"):
        QwenImageMultiResTransformer2DModel.from_stock(stock)
    assert type(stock) is Stock
