"""The weights that are loaded and trained: every weight, or an adapter on a frozen base, quantised or not.

The judges: the stock transformer that `from_pretrained` makes of what was saved; the same base quantised by diffusers;
the run without checkpointing or compiling. `torch.compile` runs with backend "aot_eager", which makes no C++.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from diffusers import QwenImageTransformer2DModel, TorchAoConfig
from safetensors.torch import load_file
from torch.nn.functional import scaled_dot_product_attention
from torchao.quantization import Int8WeightOnlyConfig

from qwen_cache import open_cache
from qwen_cache.errors import ModelError
from qwen_cache.models.folder import open_model
from qwen_cache.models.quantization import Nf4Linear, QuantizedLinear
from qwen_cache.settings.sections import PredictConfig
from qwen_train import train as training
from qwen_train import weights
from qwen_train.inference.pipeline import choose, load_pipeline
from qwen_train.lora.export import Lora, merge
from qwen_train.memory import pieces
from qwen_train.memory.choice import Choice
from qwen_train.memory.step import OPTIMIZER_STATE, ROUNDED_STATE
from qwen_train.model import compilation
from qwen_train.model.attention import QwenImageMultiResTransformerBlock as Block
from qwen_train.training import prepare

from .support.commands import refused
from .support.judge import TOLERANCE
from .support.marks import slow
from .support.outputs import output, relative_error
from .support.runs import EVERYTHING_RANDOM, LORA, SMALL, Trainer, column, compiling, train_compiled

UNREACHED = ("attn.to_add_out", "attn.add_q_proj", "attn.norm_added_q", "txt_mlp")
FULL = {**SMALL, "train.method": "full", "optimizer.learning_rate": 0.01}


@pytest.fixture
def prepared(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The result of `prepare` for each run."""
    runs: list[Any] = []
    prepare = training.prepare
    monkeypatch.setattr(training, "prepare", lambda *a: runs.append(prepare(*a)) or runs[-1])
    yield runs
    AcceleratorState._reset_state(reset_partial_state=True)


def stock(folder: Path, **options: Any) -> QwenImageTransformer2DModel:
    return QwenImageTransformer2DModel.from_pretrained(folder, **options).eval()


# ---- every weight ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharded", [slow(False), True])
def test_full_training_leaves_a_transformer_that_the_stock_class_loads(
    train: Trainer, prepared: list[Any], monkeypatch: pytest.MonkeyPatch, sharded: bool
) -> None:
    if sharded:
        monkeypatch.setattr(weights, "MAX_SHARD_SIZE", "400KB")
    out = train(settings=FULL, train__ema_decay=0.9)
    assert (len(list((out / "transformer").glob("*.safetensors"))) > 1) == sharded
    assert not (out / LORA).exists()
    sample = open_cache(train.cache)[0]
    expected = output(prepared[0].run.transformer.eval(), sample)
    for folder in (out / "transformer", out / "checkpoint-3" / "transformer"):
        assert relative_error(output(stock(folder), sample), expected) < TOLERANCE
    for folder in (train.model / "transformer", out / "transformer_ema"):
        assert relative_error(output(stock(folder), sample), expected) > 1e-3


def test_full_training_trains_all_that_a_gradient_reaches(train: Trainer) -> None:
    """The last block's text goes nowhere: DDP would wait for gradients of what computes it, and AdamW let it decay."""
    out = train(settings=FULL, train__mixed_precision="bf16", train__max_steps=2)
    before = stock(train.model / "transformer").state_dict()
    after = stock(out / "checkpoint-2" / "transformer").state_dict()
    last = len(QwenImageTransformer2DModel.from_pretrained(out / "transformer").transformer_blocks) - 1
    unreached = tuple(f"transformer_blocks.{last}.{name}" for name in UNREACHED)
    for name, weight in before.items():
        assert torch.equal(weight, after[name]) == name.startswith(unreached), name


def test_full_training_in_bf16_keeps_float32_and_leaves_bfloat16(train: Trainer) -> None:
    half = train(settings=FULL, train__mixed_precision="bf16", optimizer__learning_rate=1e-3)
    (masters,) = (half / "checkpoint-3" / "transformer").glob("*.safetensors")
    (result,) = (half / "transformer").glob("*.safetensors")
    kept, left = load_file(masters), load_file(result)
    assert {weight.dtype for weight in kept.values()} == {torch.float32}
    assert all(torch.equal(left[name], weight.bfloat16()) for name, weight in kept.items())
    full = train(settings=FULL, optimizer__learning_rate=1e-3, out="full")
    assert column(half, "loss") == pytest.approx(column(full, "loss"), rel=0.02)
    assert column(half, "loss") != pytest.approx(column(full, "loss"), rel=1e-5)


def test_a_changed_result_is_refused_wherever_it_is_loaded(train: Trainer) -> None:
    model, out = train.folder / "model", train(settings=FULL, train__max_steps=1)
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("transformer"))
    shutil.copytree(out / "transformer", model / "transformer")
    (file,) = (model / "transformer").glob("*.safetensors")
    train.model = model
    train(out="whole", train__max_steps=1)
    file.write_bytes(file.read_bytes()[:-2] + b"\1\1")
    do = "restore the folder from a copy; if it was changed on purpose, remove its checksums.json"
    refused(train.try_(out="changed"), f"{file}: this file was changed after it was written (expected xxh3-128", do)
    opened = open_model(str(model), ("transformer", "vae", "scheduler"))
    for load in (
        lambda: load_pipeline(opened, PredictConfig(), choose("cpu", None, None, None)),
        lambda: merge(Lora({}, {}, {}), train.folder / "merged", opened),
    ):
        with pytest.raises(ModelError, match="was changed after it was written"):
            load()


# ---- quantised bases -------------------------------------------------------------------------------------------------


@pytest.fixture
def saved_in_8_bits(train: Trainer) -> Path:
    """A model folder whose transformer was saved quantised."""
    model = train.folder / "quantised"
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("transformer"))
    config = TorchAoConfig(Int8WeightOnlyConfig())
    stock(train.model / "transformer", quantization_config=config).save_pretrained(model / "transformer")
    return model


def test_a_quantised_folder_is_not_quantised_again(train: Trainer, saved_in_8_bits: Path) -> None:
    train.model = saved_in_8_bits
    result = train.try_(model__quantization="fp8")
    found = "found quant_method torchao in config.json"
    refused(result, "model.quantization=fp8 is for weights that are not quantised yet", found, "quantization=none")


def quantised_linears(transformer: Any) -> Counter[str]:
    """How many linear layers of each part have quantised weights."""
    packed = (QuantizedLinear, Nf4Linear)
    names = (name for name, module in transformer.named_modules() if isinstance(module, packed))
    return Counter(name.split(".")[0] for name in names)


@pytest.mark.parametrize("kind", ["nf4", "int8_convrot", slow("int8"), slow("fp8"), slow("fp8_w8a8")])
def test_a_lora_on_quantised_weights_learns_from_their_values(train: Trainer, prepared: list[Any], kind: str) -> None:
    out = train(model__quantization=kind, optimizer__learning_rate=0.02)
    transformer = prepared[0].run.transformer
    assert quantised_linears(transformer).keys() == {"transformer_blocks"}
    sample, plain = open_cache(train.cache)[0], train.once(optimizer__learning_rate=0.02)
    transformer.disable_adapters()
    error = relative_error(output(transformer.eval(), sample), output(stock(train.model / "transformer"), sample))
    assert 1e-4 < error < (0.3 if kind == "nf4" else 0.1)
    assert column(out, "loss") == pytest.approx(column(plain, "loss"), rel=0.05)
    assert column(out, "loss") != pytest.approx(column(plain, "loss"), rel=1e-6)
    assert {weight.dtype for weight in load_file(out / LORA).values()} == {torch.float32}


@pytest.mark.filterwarnings("ignore:TorchaoLoraLinear was instantiated without:UserWarning")
def test_a_folder_saved_quantised_loads_so_by_itself(
    train: Trainer, prepared: list[Any], saved_in_8_bits: Path
) -> None:
    train.model = saved_in_8_bits
    train()
    assert quantised_linears(prepared[0].run.transformer)["transformer_blocks"] > 0


def test_full_training_of_quantised_weights_is_refused(train: Trainer, saved_in_8_bits: Path) -> None:
    refused(
        train.try_(settings=FULL, model__quantization="int8"),
        "train.method=full cannot train quantised weights (found model.quantization=int8)",
        "set train.method=lora, or model.quantization=none",
    )
    train.model = saved_in_8_bits
    refused(train.try_(settings=FULL), str(train.model), "found quant_method torchao in config.json")


def test_dora_on_quantised_weights_is_refused(train: Trainer) -> None:
    result = train.try_(model__quantization="int8", train__lora__use_dora=True)
    refused(result, "train.lora.use_dora is for unquantised weights")


# ---- checkpointing and compiling -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("setting", "calls"), [slow(False, [1, 1]), slow(True, [2, 2]), slow(1, [2, 2]), (2, [2, 1])])
def test_every_nth_block_is_recomputed_with_the_same_result(
    train: Trainer, prepared: list[Any], monkeypatch: pytest.MonkeyPatch, setting: bool | int, calls: list[int]
) -> None:
    """With dropout too, which has to drop the same again."""
    plain = train.once(settings=EVERYTHING_RANDOM, train__gradient_checkpointing=False)
    counted: Counter[int] = Counter()
    forward = Block.forward
    monkeypatch.setattr(Block, "forward", lambda block, *a: (counted.update([id(block)]), forward(block, *a))[1])
    out = train(settings=EVERYTHING_RANDOM, train__gradient_checkpointing=setting)
    blocks = prepared[-1].run.transformer.transformer_blocks
    assert [counted[id(block)] / 6 for block in blocks] == calls  # in six batches
    assert column(out, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)


def test_all_blocks_are_recomputed_where_the_plan_was_wrong(
    train: Trainer, prepared: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step that ran out of memory is repeated, whatever it had done."""
    settings = {**EVERYTHING_RANDOM, "train.lora.lora_dropout": 0.0, "train.max_steps": 2}
    plain = train.once(settings=settings)
    monkeypatch.setattr(prepare, "total_memory", lambda _: 1)
    any_size = pieces.Measured(1, 1, 1, dict.fromkeys(OPTIMIZER_STATE, 1), dict.fromkeys(ROUNDED_STATE, 1), 1)
    monkeypatch.setattr(pieces, "step", lambda *arguments: [any_size] * len(pieces.depths(*arguments[:2])))
    monkeypatch.setattr(
        prepare, "choose", lambda found, *_: Choice([next(each for each in found if each.recomputed == 1)], found[0])
    )
    counts, compute_loss = [], training.compute_loss

    def runs_out(transformer: Any, *inputs: Any) -> Any:
        counts.append(len(prepared[-1].run.transformer.recomputed_blocks))
        if len(counts) == 4:  # in the second batch of the second step
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute_loss(transformer, *inputs)

    monkeypatch.setattr(training, "compute_loss", runs_out)
    result = train.try_(settings=settings, train__gradient_checkpointing="auto", out="out")
    out = train.folder / "out"
    batches = 2 * len(column(plain, "loss"))
    assert counts == [1] * 4 + [2] * (batches - 2)
    for name in ("loss", "grad_norm"):
        assert column(out, name) == pytest.approx(column(plain, name), rel=1e-5)
    assert "1 of 2 blocks are recomputed" in result.stderr
    assert "step 2 ran out of memory: more is recomputed from here on" in result.stderr


SMALL_BLOCKS = {**EVERYTHING_RANDOM, "train.lora.lora_dropout": 0.0, "train.max_steps": 2, "train.seed": 3}
"""Runs with `small_blocks` alone, which share the plain one."""


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of few operations, one of them attention: the compiler takes a fifth of the time. They train `to_q`."""

    def forward(block: Any, image: torch.Tensor, text: torch.Tensor, *_: Any, **__: Any) -> Any:
        q = block.attn.to_q(image).unflatten(-1, (2, -1)).transpose(1, 2)
        return text, image + scaled_dot_product_attention(q, q, q).transpose(1, 2).flatten(2)

    monkeypatch.setattr(Block, "forward", forward)


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < compilation.TORCH, reason="an older torch")
def test_a_run_that_cannot_compile_goes_on(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """An explicit train.compile=true is an error."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no such compiler")

    plain = train.once(settings=SMALL_BLOCKS)
    monkeypatch.setattr(compilation, "_reason_against", lambda *_: "")
    with compiling(monkeypatch, broken):
        result = train.try_(settings=SMALL_BLOCKS)
        explicit = train.try_(settings=SMALL_BLOCKS, train__compile=True, out="explicit")
    assert "step 1 could not be compiled (no such compiler)" in result.stderr
    assert column(train.folder / "out", "loss") == column(plain, "loss")
    refused(explicit, "the blocks could not be compiled", "found no such compiler", "set train.compile=false")


@pytest.mark.usefixtures("small_blocks")
@pytest.mark.skipif(torch.torch_version.TorchVersion(torch.__version__) < compilation.TORCH, reason="an older torch")
@pytest.mark.parametrize(
    ("capacity", "is_known", "kept"),
    [(1 << 50, True, [True, True, False]), slow(1, True, [False] * 3), slow(1 << 50, False, [False] * 3)],
)
def test_compiled_blocks_keep_their_attention_while_it_fits(
    train: Trainer,
    prepared: list[Any],
    monkeypatch: pytest.MonkeyPatch,
    capacity: int,
    is_known: bool,
    kept: list[bool],
) -> None:
    """The step that ran out of memory is repeated without. `is_known`: the memory can be predicted."""

    def unknown(*_: Any, **__: Any) -> None:
        raise ModelError("unknown quantisation: its memory cannot be predicted")

    if not is_known:
        monkeypatch.setattr("qwen_train.memory.choice.predict_memory", unknown)
    plain = train.once(settings=SMALL_BLOCKS)
    monkeypatch.setattr(prepare, "total_memory", lambda _: capacity)
    found, compute_loss = [], training.compute_loss

    def runs_out(transformer: Any, *inputs: Any) -> Any:
        found.append(prepared[-1].run.transformer.keeps_attention)
        if found == [True, True]:  # in the second batch of the first step
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return compute_loss(transformer, *inputs)

    monkeypatch.setattr(training, "compute_loss", runs_out)
    with compiling(monkeypatch, "eager"):
        result = train.try_(settings=SMALL_BLOCKS, train__compile=True, train__gradient_checkpointing=True)
    assert found[:3] == kept
    assert not any(found[3:])
    assert ("step 1 ran out of memory: more is recomputed from here on" in result.stderr) == kept[0]
    assert column(train.folder / "out", "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
@pytest.mark.parametrize("method", ["lora", "full"])
def test_compiled_blocks_learn_the_same(train: Trainer, monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    settings = {**EVERYTHING_RANDOM, "train.method": method, "train.lora.lora_dropout": 0.0}
    plain = train.once(settings=settings)
    compiled = train_compiled(train, monkeypatch, settings)
    assert column(compiled, "loss") == pytest.approx(column(plain, "loss"), rel=1e-4)


def test_the_folder_names_the_stock_class(train: Trainer) -> None:
    out = train(settings=FULL, train__max_steps=1)
    config = json.loads((out / "transformer" / "config.json").read_text(encoding="utf-8"))
    assert config["_class_name"] == "QwenImageTransformer2DModel"
