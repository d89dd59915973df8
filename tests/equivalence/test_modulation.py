"""The tabulated modulation: the same training without a third of the weights.

The judge is the same model with those weights, in bfloat16. A table is computed for all timesteps at once, so its sums
may be in another order. Two sums of k = 64 products in float32 differ by about 2·2^-24·sqrt(k) = 1e-6, and round to
different neighbours, 2^-8 apart, in 1e-6 / 2^-8 of all values: 2.4e-4; four times that is allowed (OTHERS). What the
model makes of it is judged by float32, as all of bfloat16 (`transformer_judge.assert_as_near`).
"""

from __future__ import annotations

import errno
import functools
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jaxtyping
import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState, PartialState
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from qwen_cache.errors import ModelError, QwenCacheError, TrainError
from qwen_cache.settings.load import load_config
from qwen_train import weights
from qwen_train.flow import NoiseSchedule, sample_u
from qwen_train.lora.adapter import add_lora
from qwen_train.memory.prediction import predict_memory
from qwen_train.memory.sizes import SampleSize
from qwen_train.model import loading
from qwen_train.model.combinations import check_tabulation
from qwen_train.model.compilation import compile_blocks
from qwen_train.model.loading import TabulatedTransformer2DModel, TimestepRows, tabulate, timesteps_from
from qwen_train.model.transformer import QwenImageMultiResTransformer2DModel
from qwen_train.training import prepare
from tests.support.commands import refused
from tests.support.judge import AS_FAR
from tests.support.paths import load_tool
from tests.support.runs import LORA, SMALL, Trainer, by_two, column, differences, outcome
from tests.support.transformer_judge import (
    COUNTS,
    TINY,
    Run,
    Sample,
    assert_as_near,
    output_error,
    random_samples,
    run_batched,
    stock_model,
)

OTHERS = 1e-3  # how many values of a table may be the neighbours of the layers' own
LOSS = 1e-2  # relative; a loss is a mean over thousands of values that err by 2^-8 or so
SCHEDULE = NoiseSchedule()
VALIDATED = {"train.validation_split": 0.7, "validation.validation_steps": 1, "validation.num_images": 1}
BF16 = {**SMALL, "train.mixed_precision": "bf16", "optimizer.learning_rate": 0.01, "train.batch_size": 2, **VALIDATED}
BF16 |= {"validation.images_every_steps": 2, "validation.num_inference_steps": 3}


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    PartialState()
    yield tmp_path / "home" / "qwen-cache" / "modulation"
    AcceleratorState._reset_state(reset_partial_state=True)


def saved(folder: Path, shard_size: str = "1GB", **config: Any) -> Path:
    """The judge's model, but for `norm_out.linear`, whose weights are all the same there."""
    model = stock_model(**config)
    torch.nn.init.normal_(model.norm_out.linear.weight, std=0.1)
    torch.nn.init.normal_(model.norm_out.linear.bias, std=0.2)
    model.save_pretrained(folder, max_shard_size=shard_size)
    return folder


def with_lora(model: Any) -> Any:
    """An adapter whose update is not zero, the same in every model."""
    torch.manual_seed(2)
    add_lora(model, load_config(None, []).train.lora)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def with_weights(folder: Path) -> Any:
    return QwenImageMultiResTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)


def without_weights(folder: Path, sigmas: tuple[float, ...] = ()) -> Any:
    model = TabulatedTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    tabulate(model, folder, SCHEDULE, [0.0, *sigmas])
    return model


def trained(model: Any, layout: str = "padded", *, checkpointing: bool = False) -> Run:
    """Outputs and gradients of the adapter, as training makes them: the adapter in float32, products in bfloat16."""
    model.layout = layout
    if checkpointing:
        model.train()
        weights.checkpoint_blocks(model, range(0, len(model.transformer_blocks), 2))
    with torch.autocast("cpu", torch.bfloat16):
        return run_batched(model, random_samples(*COUNTS, dtype=torch.bfloat16))


def in_float32(folder: Path, layout: str) -> Run:
    """The same with nothing rounded but the weights, the inputs and the timesteps."""
    samples = [
        Sample(s.images, s.image.float(), s.text.float(), s.sigma.bfloat16().float(), s.loss_weight.float())
        for s in random_samples(*COUNTS, dtype=torch.bfloat16)
    ]
    model = with_lora(with_weights(folder).float())
    model.layout = layout
    return run_batched(model, samples)


# ---- equal to running them -------------------------------------------------------------------------------------------


@pytest.mark.fast_cases(3)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("zero_cond_t", [False, True])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_outputs_and_gradients_are_those_with_the_weights(
    tmp_path: Path, layout: str, zero_cond_t: bool, checkpointing: bool
) -> None:
    folder = saved(tmp_path / "model", zero_cond_t=zero_cond_t)
    expected = trained(with_lora(with_weights(folder)), layout, checkpointing=checkpointing)
    found = trained(with_lora(without_weights(folder)), layout, checkpointing=checkpointing)
    assert_as_near(found, expected, in_float32(folder, layout))


MUTANTS: dict[str, Callable[[int], int]] = {
    "the neighbouring row": lambda bits: bits + 1 if 0 < bits < 0x3F80 else bits,
    "another row for zero": lambda bits: bits or 0x3F80,
}


@pytest.mark.fast_cases(2)
@pytest.mark.parametrize("mutant", MUTANTS)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_another_row_would_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, layout: str, mutant: str) -> None:
    folder = saved(tmp_path / "model", zero_cond_t=True)
    expected, row = trained(with_lora(with_weights(folder)), layout), TimestepRows._row
    monkeypatch.setattr(TimestepRows, "_row", lambda self, bits, t: row(self, MUTANTS[mutant](bits), t))
    found, exact = trained(with_lora(without_weights(folder)), layout), in_float32(folder, layout)
    assert output_error(found, exact) > 2 * AS_FAR * output_error(expected, exact)


def test_every_row_is_what_the_layers_give(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    stock, rows, timesteps = with_weights(folder), without_weights(folder).time_text_embed, timesteps_from(0.02)
    with torch.no_grad():
        embedding = stock.time_text_embed(timesteps, timesteps)
        layers = [layer for block in stock.transformer_blocks for layer in (block.img_mod, block.txt_mod)]
        layers.append(torch.nn.Sequential(stock.norm_out.silu, stock.norm_out.linear))
        expected = torch.cat([layer(embedding) for layer in layers], dim=1)
    found = rows(timesteps, embedding)
    assert (found != expected).float().mean() < OTHERS
    torch.testing.assert_close(found, expected, rtol=2**-7, atol=1e-5)  # one digit, or what a sum of terms of 1 errs by


def test_timesteps_are_all_that_can_occur() -> None:
    """Every noise level from the schedule's last to 1, as bfloat16 rounds it; and zero."""
    timesteps = timesteps_from(0.02)
    rounded = torch.linspace(0.02, 1, 1_000_001, dtype=torch.float64).float().bfloat16().unique()
    assert timesteps.tolist() == [0.0, *rounded.tolist()]
    assert len(rounded) == 733
    generator = torch.Generator().manual_seed(0)
    sigmas = [SCHEDULE.sigma(sample_u(generator, "logit_normal", logit_std=9.0), 4096) for _ in range(10_000)]
    assert set(torch.tensor(sigmas).bfloat16().tolist()) <= set(timesteps.tolist())


def test_other_timesteps_get_a_table_of_their_own(tmp_path: Path, cache_folder: Path) -> None:
    folder = saved(tmp_path / "model")
    stock, rows = with_weights(folder), without_weights(folder, (0.001, 0.5, 1e-6, 0.001)).time_text_embed
    assert sorted(len(np.load(path)) for path in cache_folder.glob("*.npy")) == [2, 734]
    timesteps = torch.tensor([1e-6, 0.5, 0.001]).bfloat16()
    embedding = stock.time_text_embed(timesteps, timesteps)
    expected = stock.transformer_blocks[0].img_mod(embedding)
    torch.testing.assert_close(rows(timesteps, embedding)[:, : expected.shape[1]], expected, rtol=2**-7, atol=1e-5)


# ---- what it saves ---------------------------------------------------------------------------------------------------


def size(model: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))


def test_the_weights_are_not_there(tmp_path: Path) -> None:
    folder, width = saved(tmp_path / "model"), TINY["num_attention_heads"] * TINY["attention_head_dim"]
    model = without_weights(folder)
    modulation_weights = (2 * TINY["num_layers"] * 6 + 2) * (width + 1) * width
    embedder_weights = (256 + 1) * width + (width + 1) * width
    assert size(with_weights(folder)) - size(model) == 2 * (modulation_weights + embedder_weights)
    assert not [name for name in model.state_dict() if "_mod" in name or name.startswith(("norm_out", "time_text"))]


@pytest.mark.slow
def test_the_real_configuration_takes_13_6_gb_less() -> None:
    config = load_tool("bench_memory").transformer_config(  # type: ignore[attr-defined]
        layers=60, heads=24, head_dim=128, width=3584, out_channels=16
    )
    batch = [SampleSize(((1, 64, 64), (1, 64, 64)), 1500)]
    whole, less = (
        predict_memory(config, load_config(None, [f"train.tabulated_modulation={on}"]), batch)
        for on in ("false", "true")
    )
    assert whole.weights - less.weights == pytest.approx(13.6e9, rel=0.005)
    assert abs(whole.activations - less.activations) < 0.01 * whole.activations


def test_the_weights_of_the_prediction_are_those_of_the_model(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    settings = load_config(None, ["train.tabulated_modulation=true"])
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    found = predict_memory(config, settings, [SampleSize(((1, 4, 4),), 5)], "cpu")
    assert found.weights == size(without_weights(folder))


# ---- the file --------------------------------------------------------------------------------------------------------


def tables(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_file_follows_from_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However they are stored in files; nothing of it is made twice."""
    made = {}
    for name, shard_size in {"one": "1GB", "many": "50KB"}.items():
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"home of {name}"))
        without_weights(saved(tmp_path / name, shard_size))
        made[name] = tables(tmp_path / f"home of {name}" / "qwen-cache" / "modulation")
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 1
    assert made["one"] == made["many"]
    assert len(made["one"]) == 1
    monkeypatch.setattr(loading, "_make", lambda *_: pytest.fail("made again"))
    without_weights(tmp_path / "one")


@pytest.mark.parametrize("layer", ["transformer_blocks.2.txt_mod.1.bias", "norm_out.linear.weight"])
def test_other_weights_have_another_file(tmp_path: Path, cache_folder: Path, layer: str) -> None:
    folder = saved(tmp_path / "model")
    without_weights(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[layer].view(-1)[-1] += 1
    save_file(tensors, file, {"format": "pt"})
    without_weights(folder)
    first, second = tables(cache_folder).values()
    assert first != second


def flip(data: bytes) -> bytes:
    return data[:50_000] + bytes([data[50_000] ^ 1]) + data[50_001:]


@pytest.mark.parametrize("damage", [flip, lambda data: data[:-1], lambda data: b"", lambda data: b"short"])
def test_a_damaged_file_is_made_again(tmp_path: Path, cache_folder: Path, damage: Callable[[bytes], bytes]) -> None:
    folder = saved(tmp_path / "model")
    without_weights(folder)
    ((name, data),) = tables(cache_folder).items()
    (cache_folder / name).write_bytes(damage(data))
    without_weights(folder)
    assert tables(cache_folder) == {name: data}


def test_the_file_of_another_model_is_not_trusted(tmp_path: Path, cache_folder: Path) -> None:
    ours, theirs = saved(tmp_path / "ours"), saved(tmp_path / "theirs", joint_attention_dim=64)
    without_weights(ours)
    ((name, data),) = tables(cache_folder).items()
    without_weights(theirs)
    (other,) = tables(cache_folder).keys() - {name}
    (cache_folder / name).write_bytes((cache_folder / other).read_bytes())
    without_weights(ours)
    assert tables(cache_folder)[name] == data


def test_a_table_that_cannot_be_kept_is_refused(tmp_path: Path, cache_folder: Path) -> None:
    folder = saved(tmp_path / "model")
    cache_folder.parent.mkdir(parents=True)
    cache_folder.write_text("a file")
    with pytest.raises(TrainError, match=r"the table cannot be written \(found File exists\)\n.*XDG_CACHE_HOME"):
        without_weights(folder)


def test_nothing_is_left_of_a_table_for_which_there_is_no_room(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(TrainError, match=r"the table cannot be written \(found No space left on device\)"):
        without_weights(saved(tmp_path / "model"))
    assert not list(cache_folder.iterdir())


def test_missing_weights_are_named(tmp_path: Path, cache_folder: Path) -> None:
    folder = saved(tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    model = TabulatedTransformer2DModel.from_pretrained(folder, torch_dtype=torch.bfloat16)
    tensors = load_file(file)
    del tensors["norm_out.linear.bias"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(ModelError, match=r"weights cannot be read.*found norm_out.linear.bias"):
        tabulate(model, folder, SCHEDULE)
    assert not cache_folder.exists()


# ---- refused ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.method": "full"}, "is for frozen weights (found train.method=full)"),
        ({"train.mixed_precision": "no"}, "too many timesteps for a table (found train.mixed_precision=no)"),
        ({"train.lora.target_modules": ["to_q", "img_mod.1"]}, "found transformer_blocks.0.img_mod.1"),
        ({"train.lora.target_modules": ["linear"]}, "found norm_out.linear"),
        ({"train.lora.target_modules": ["linear_2"]}, "found time_text_embed.timestep_embedder.linear_2"),
        ({"train.lora.target_modules": r".*\.1\.txt_mod\..*"}, "found transformer_blocks.1.txt_mod.1"),
        ({"train.lora.target_modules": "all-linear"}, "found transformer_blocks.0.img_mod.1"),
    ],
)
def test_what_a_table_cannot_do_is_refused(train: Trainer, changes: dict[str, Any], message: str) -> None:
    result = train.try_(settings={**BF16, "train.tabulated_modulation": True, **changes})
    refused(result, message, "set train.tabulated_modulation=false")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "this transformer was saved quantised"),
        ({"use_additional_t_cond": True}, "depends on more than the timestep"),
    ],
)
def test_a_model_that_has_no_table_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(QwenCacheError, match=message):
        check_tabulation(load_config(None, []).train, {**TINY, **config})


def test_targets_that_are_no_expression_are_left_to_peft(train: Trainer) -> None:
    settings = {**BF16, "train.tabulated_modulation": True, "train.lora.target_modules": "(to_q"}
    refused(train.try_(settings=settings), "train.lora.target_modules: missing )")


def test_a_schedule_without_end_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "model")
    with pytest.raises(ModelError, match=r"too many for a table \(expected shift_terminal above 0\)"):
        tabulate(TabulatedTransformer2DModel.from_pretrained(folder), folder, NoiseSchedule(shift_terminal=None))


@pytest.mark.parametrize(
    ("timestep", "message"),
    [
        (torch.tensor([0.5, 0.001]).bfloat16(), r"does not have this timestep \(found 0.000999451\)"),
        (torch.tensor([0.5]), r"is for bfloat16 \(found torch.float32\)"),
    ],
)
def test_a_timestep_that_is_not_in_the_table_is_named(tmp_path: Path, timestep: torch.Tensor, message: str) -> None:
    model = without_weights(saved(tmp_path / "model"))
    with pytest.raises(TrainError, match=message):
        model.time_text_embed(timestep, timestep)


def test_it_is_not_saved_as_a_whole(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="lacks its modulation weights"):
        without_weights(saved(tmp_path / "model")).save_pretrained(tmp_path / "saved")


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["padded", pytest.param("packed", marks=pytest.mark.slow)])
def test_a_run_learns_and_measures_the_same(train: Trainer, layout: str) -> None:
    """Validation too, whose noise levels go below the schedule's last."""
    settings = {**BF16, "train.layout": layout}
    whole = train(settings=settings, out="whole")
    out = train(settings=settings, train__tabulated_modulation=True)
    for name in ("loss", "validation_loss", "validation_loss_q1"):
        assert column(out, name) == pytest.approx(column(whole, name), rel=LOSS)
    (generated,) = (load_file(path) for path in (out / "validation" / "step-2").iterdir())
    (expected,) = (load_file(path) for path in (whole / "validation" / "step-2").iterdir())
    assert (generated["latents"] - expected["latents"]).norm() < 0.02 * expected["latents"].norm()
    found, wanted = load_file(out / LORA), load_file(whole / LORA)
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in wanted.items()}


@pytest.mark.slow
def test_a_resumed_run_is_the_uninterrupted_one(train: Trainer) -> None:
    """Bit for bit on one machine; the first finds no table, the second does."""
    settings = {**BF16, "train.tabulated_modulation": True, "train.lora.lora_dropout": 0.3}
    whole = outcome(train(settings=settings, out="whole"))
    train(settings=settings, train__max_steps=1)
    resumed = outcome(train("--resume", settings=settings))
    assert [name for name in differences(resumed, whole) if not name.startswith("checkpoint-1/")] == []


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # the compiler looks at it
def test_compiled_blocks_learn_the_same(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's part is another in each block, and must not make another graph of it."""
    settings = {**SMALL, "train.mixed_precision": "bf16", "train.max_steps": 1, "train.compile": True}
    monkeypatch.setattr(prepare, "compile_blocks", functools.partial(compile_blocks, backend="aot_eager"))
    losses, graphs = [], []
    for tabulated in (False, True):
        torch.compiler.reset()
        counters.clear()
        jaxtyping.config.update("jaxtyping_disable", True)
        try:
            out = train(settings=settings, train__tabulated_modulation=tabulated, out=f"out {tabulated}")
        finally:
            jaxtyping.config.update("jaxtyping_disable", False)
        losses.append(column(out, "loss"))
        graphs.append(counters["stats"]["unique_graphs"])
    assert losses[1] == pytest.approx(losses[0], rel=LOSS)
    assert graphs[1] <= graphs[0]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", pytest.param("fp8", marks=pytest.mark.slow)])
def test_a_quantised_base_learns_with_a_table_too(train: Trainer, kind: str) -> None:
    settings = {**BF16, "train.max_steps": 1}
    changes = {"model.quantization": kind, "train.tabulated_modulation": True}
    plain, quantised = (
        column(train(settings={**settings, **each}, out=f"out{len(each)}"), "loss") for each in ({}, changes)
    )
    assert quantised == pytest.approx(plain, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_learn_what_one_does(train: Trainer, cache_folder: Path, fsdp: bool) -> None:
    """And end with the table that one makes."""
    settings = {**BF16, "train.tabulated_modulation": True, "train.batch_size": 1}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    expected = tables(cache_folder)
    for path in cache_folder.iterdir():
        path.unlink()
    out = by_two(train, settings=settings, train__fsdp=fsdp, out="two")
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=LOSS)
    assert tables(cache_folder) == expected
