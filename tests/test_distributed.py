"""Several processes train what one does: two over gloo on the CPU, with all weights each (DDP) or in parts (FSDP2).

The judge is one process that accumulates the same batches, within what the order of sums in float32 makes; and, for
stopping and resuming, the same two processes, bit for bit. FSDP2 here is the code that runs on GPUs.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import QwenImage21Transformer2DModel, QwenImageTransformer2DModel
from safetensors.torch import load_file, save_file
from torch.torch_version import TorchVersion

from qwen_cache.models.folder import open_model
from qwen_cache.storage.files import locked
from qwen_train import weights
from qwen_train.training import checkpoint
from qwen_train.weights import load_transformer

from .support.runs import (
    LORA,
    SMALL,
    Trainer,
    by_two,
    column,
    differences,
    relative_error,
    torchrun,
    two,
    written,
)
from .support.single_files import weights_of, write_gguf, write_safetensors

pytestmark = pytest.mark.slow
sharded_integers = pytest.mark.skipif(TorchVersion(torch.__version__) < weights.TORCH, reason="an older torch")

AVERAGE = "pytorch_lora_weights_ema.safetensors"
STEPS = {
    **SMALL,
    "train.batch_size": 3,
    "train.ema_decay": 0.5,
    "train.checkpointing_steps": 1,
    "optimizer.learning_rate": 0.01,
    "optimizer.eps": 1e-3,  # a small one makes whole steps of gradients that are nothing but rounding
}


def result(out: Path, method: str, stock: Any = QwenImageTransformer2DModel) -> dict[str, torch.Tensor]:
    """The weights that the run left, their average too."""
    if method == "lora":
        return {f"{name} {key}": t for name in (LORA, AVERAGE) for key, t in load_file(out / name).items()}
    folders = [out / name for name in ("transformer", "transformer_ema")]
    models = {folder.name: stock.from_pretrained(folder) for folder in folders}
    return {f"{name} {key}": t for name, model in models.items() for key, t in model.state_dict().items()}


@pytest.mark.parametrize("method", ["lora", "full"])
@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one_and_one_continues_where_they_stopped(train: Trainer, method: str, fsdp: bool) -> None:
    settings = {**STEPS, "train.method": method}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings, train__fsdp=fsdp, train__max_steps=2)
    assert [step for step, _ in checkpoint.checkpoints(out)] == [1, 2]
    train("--resume", settings=settings, train__gradient_accumulation_steps=2)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert column(out, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-4)
    assert relative_error(result(out, method), result(one, method)) < 1e-5


def held_share(said: str) -> float:
    """The share of all weights that the first process says it holds."""
    found = re.search(r"sharded +this process holds ([\d.]+) (\wB) of ([\d.]+) (\wB) of weights", said)
    assert found, said
    held, whole = (
        float(number) * {"k": 1e3, "M": 1e6}[unit[0]] for number, unit in (found.group(1, 2), found.group(3, 4))
    )
    return held / whole


@sharded_integers
@pytest.mark.parametrize(("kind", "processes"), [("int8", 4), ("nf4", 2), ("int8_convrot", 2), ("fp8_w8a8", 2)])
def test_quantised_weights_in_parts_are_trained_as_whole_ones(train: Trainer, kind: str, processes: int) -> None:
    """And one process continues where several stopped, each of which held its part of the bytes."""
    settings = {**STEPS, "model.quantization": kind, "train.batch_size": 1}
    one = train(settings=settings, train__gradient_accumulation_steps=processes, out="one")
    done = two(train, settings=settings, train__fsdp=True, train__max_steps=2, processes=processes)
    assert done.returncode == 0, done.stderr
    assert held_share(done.stderr) <= 1 / processes + 0.05
    assert re.search(r"memory +about [\d.]+ \wB: frozen weights ", done.stderr), done.stderr
    out = train("--resume", settings=settings, train__gradient_accumulation_steps=processes)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert relative_error(result(out, "lora"), result(one, "lora")) < 1e-5


@pytest.mark.parametrize(("fsdp", "method"), [(False, "lora"), (True, "lora"), (True, "full")], ids=str)
def test_two_processes_equal_one_with_draws_of_qwen_image_21(train_21: Trainer, method: str, fsdp: bool) -> None:
    settings = {**STEPS, "train.method": method, "train.noise_draws": 2, "train.max_steps": 2}
    one = train_21(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train_21, settings=settings, train__fsdp=fsdp)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    found, expected = (result(each, method, QwenImage21Transformer2DModel) for each in (out, one))
    assert relative_error(found, expected) < 1e-5


ROUNDED = {"train.stochastic_rounding": True, "train.mixed_precision": "bf16", "train.ema_decay": 0}


@pytest.mark.parametrize(
    ("fsdp", "method", "changes"),
    [
        (False, "lora", {}),
        (True, "lora", {}),
        (True, "full", {}),
        (True, "lora", {"model.quantization": "int8"}),
        (True, "full", ROUNDED),
        (False, "full", ROUNDED),
    ],
    ids=["ddp", "fsdp2", "fsdp2, full", "fsdp2, int8", "fsdp2, full, rounded", "ddp, full, rounded"],
)
def test_two_stopped_processes_resume_bit_for_bit(
    train: Trainer, fsdp: bool, method: str, changes: dict[str, Any]
) -> None:
    """With dropout, which each draws for itself, and rounding at random, in which all draw the same."""
    if changes is ROUNDED:
        pytest.importorskip("torchao")
    settings = {**STEPS, "train.fsdp": fsdp, "train.method": method, "train.lora.lora_dropout": 0.3, **changes}
    whole = written(by_two(train, settings=settings, out="whole"))
    by_two(train, settings=settings, train__max_steps=2)
    assert differences(written(by_two(train, "--resume", settings=settings)), whole) == []


@pytest.mark.parametrize(("fsdp", "method"), [(False, "lora"), (True, "full")], ids=["ddp", "fsdp2, full"])
def test_two_processes_equal_one_with_an_optimizer_of_two_modes(train: Trainer, fsdp: bool, method: str) -> None:
    """All evaluate and save between steps, and one continues where two stopped."""
    pytest.importorskip("schedulefree")
    settings = {name: value for name, value in STEPS.items() if name not in ("train.ema_decay", "optimizer.eps")}
    settings |= {"train.method": method, "optimizer.name": "schedulefree.AdamWScheduleFree"}
    settings |= {"optimizer.arguments": {"eps": STEPS["optimizer.eps"]}, "train.batch_size": 1}
    settings |= {"train.validation_split": 0.4, "validation.validation_steps": 1}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings, train__fsdp=fsdp, train__max_steps=2)
    train("--resume", settings=settings, train__gradient_accumulation_steps=2)
    for name in ("loss", "validation_loss"):
        assert column(out, name) == pytest.approx(column(one, name), rel=1e-5)
    weights = "transformer/*.safetensors" if method == "full" else LORA
    found, expected = (load_file(next(each.glob(weights))) for each in (out, one))
    assert relative_error(found, expected) < 1e-5


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_two_processes_equal_one_with_a_teacher_for_one_of_them(train_mixed: Trainer, fsdp: bool) -> None:
    """In some steps one process alone has a sample with the teacher; both have a frozen second LoRA."""
    assistant = train_mixed.folder / "assistant.safetensors"
    layer, generator = "transformer.transformer_blocks.0.attn.to_q", torch.Generator().manual_seed(1)
    tensors = {"lora_A": torch.randn(2, 64, generator=generator), "lora_B": torch.randn(64, 2, generator=generator)}
    save_file({f"{layer}.{name}.weight": tensor for name, tensor in tensors.items()}, assistant)
    settings = {**STEPS, "train.batch_size": 1, "train.max_steps": 4, "train.assistant_lora": str(assistant)}
    batches = train_mixed.prepared(settings=settings, out="planned").batches
    taught = [bool(batches.batch(i).taught) for i in range(8)]
    assert any(one != other for one, other in zip(taught[::2], taught[1::2], strict=True))
    one = train_mixed(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train_mixed, settings=settings, train__fsdp=fsdp)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert relative_error(result(out, "lora"), result(one, "lora")) < 1e-5


def test_what_all_processes_refuse_is_told_once(train: Trainer) -> None:
    """A second run, a folder that cannot be made, a damaged checkpoint, settings: the first process speaks."""
    out = train(settings=STEPS, train__max_steps=1)
    with locked(out / ".lock"):
        done = torchrun(train, "--resume", settings=STEPS)
    of_torchrun = 'Traceback (most recent call last):\n  File "<frozen runpy>"'
    assert done.stderr.count(of_torchrun) == 1, done.stderr
    done.stderr = done.stderr.replace(of_torchrun, "")
    told_once(done, f"{out}: another run is writing to this folder (found process {os.getpid()} on ")
    told_once(two(train, settings=STEPS), f"{out}: this folder already holds a run (found checkpoint-1)")
    command = f"`torchrun --nproc-per-node 2 -m qwen_train run --resume --out {out} --set train.max_steps=3`"
    told_once(two(train, "--resume", settings=STEPS, train__seed=1), f"→ {command} continues the run")
    file = out / "checkpoint-1" / LORA
    told_once(two(train, settings=STEPS, out=file / "out"), f"{file}: Not a directory")
    file.write_bytes(file.read_bytes()[:-2] + b"\1\1")
    done = two(train, "--resume", settings=STEPS)
    told_once(done, f"{file}: this file was changed after it was written")


def told_once(done: subprocess.CompletedProcess[str], message: str) -> None:
    """The run failed with this one message."""
    assert (done.returncode, done.stderr.count(message), done.stderr.count("error: ")) == (1, 1, 1), done.stderr
    assert "Traceback" not in done.stderr, done.stderr


ONE_FAILS = """
import os, sys
from pathlib import Path
from qwen_cache.errors import ConfigError
from qwen_train.training import prepare, start
rank, which, where = os.environ["RANK"], sys.argv.pop(1), sys.argv.pop(1)

def failing(function):
    def fail(*arguments, **options):
        if rank == which:
            raise ConfigError("this machine lacks something", where=f"process {rank}", do="look at it")
        return function(*arguments, **options)
    return fail

if where == "preflight":
    start.check_tracker = failing(start.check_tracker)
else:
    prepare.load_transformer = failing(prepare.load_transformer)
from qwen_train.cli import main
main()
"""


@pytest.mark.parametrize(("rank", "where"), [("1", "preflight"), ("0", "loading"), ("1", "loading")])
def test_an_error_of_one_process_is_told_by_it_and_ends_all(train: Trainer, rank: str, where: str) -> None:
    """Before torch is loaded, and after: no process waits for the others, or ends in a traceback of gloo."""
    program = train.folder / "one_fails.py"
    program.write_text(ONE_FAILS, encoding="utf-8")
    done = two(train, settings=STEPS, program=[program, rank, where])
    told_once(done, f"error: process {rank}: this machine lacks something\n  → look at it")
    left = {path.name for path in (train.folder / "out").glob("*")}
    assert left <= {".lock"}  # of a process that torchrun ended before it removed its new folder


def test_only_the_first_process_speaks_and_both_stop(train: Trainer) -> None:
    """On a machine without accelerators gloo connects them, which nothing has to ask for."""
    program = train.folder / "stopped.py"
    program.write_text(STOPPED, encoding="utf-8")
    done = torchrun(train, settings=STEPS, program=[program])
    assert done.returncode == 1, done.stderr
    for said in ("steps    3 of 4 samples", "stopped after step 1; to continue:", "interrupted", "training ━"):
        assert done.stderr.count(said) == 1, done.stderr
    assert f"  torchrun --nproc-per-node 2 -m qwen_train run --resume --out {train.folder / 'out'}\n" in done.stderr
    finished = torchrun(train, "--resume", settings=STEPS)
    assert (finished.returncode, finished.stderr.count("done: ")) == (0, 1), finished.stderr


STOPPED = """
import os, signal
from qwen_train import train as training
compute = training.compute_loss

def stopping(*arguments):
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGTERM)
    return compute(*arguments)

training.compute_loss = stopping
from qwen_train.cli import main
main()
"""


def test_weights_stored_in_bfloat16_are_trained_in_float32(train: Trainer, tmp_path: Path) -> None:
    """Though they are loaded as they are stored, which processes of a machine share."""
    train.model = Path(shutil.copytree(train.model, tmp_path / "model"))
    stored = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer", torch_dtype=torch.bfloat16)
    stored.save_pretrained(train.model / "transformer")
    settings = {**STEPS, "train.method": "full", "train.max_steps": 2}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings, train__fsdp=True)
    found = load_transformer(
        open_model(str(train.model), ("transformer",)), train.config(settings=settings, train__fsdp=True)
    )
    assert found.dtype == torch.bfloat16
    assert {tensor.dtype for tensor in result(out, "full").values()} == {torch.float32}
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert relative_error(result(out, "full"), result(one, "full")) < 1e-5


def test_processes_drop_out_differently(train: Trainer) -> None:
    out = by_two(train, settings=STEPS, train__lora__lora_dropout=0.3, train__max_steps=1)
    state = json.loads((out / "checkpoint-1" / "state.json").read_text(encoding="utf-8"))
    tensors = load_file(out / "checkpoint-1" / "state.safetensors")
    first, second = (tensors[f"random.{rank}.cpu"] for rank in range(len(state["random"]["list"])))
    assert not torch.equal(first, second)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer.name": "adafactor"}, "adafactor cannot be used with train.fsdp"),
    ],
)
def test_what_cannot_be_in_parts_is_refused(train: Trainer, changes: dict[str, Any], message: str) -> None:
    done = two(train, settings={**STEPS, "train.fsdp": True, **changes})
    assert done.returncode != 0
    assert f"error: {message}" in done.stderr


@sharded_integers
@pytest.mark.parametrize("kind", ["fp8", "nf4"])
def test_quantised_weights_in_parts_are_continued_by_more_processes(train: Trainer, kind: str) -> None:
    """A step by one process, one by two and one by four are the steps of one."""
    settings = {**STEPS, "train.batch_size": 1, "train.fsdp": True, "model.quantization": kind}
    one = train(settings=settings, train__gradient_accumulation_steps=4, out="one")
    out = train(settings=settings, train__gradient_accumulation_steps=4, train__max_steps=1)
    for step, processes in ((2, 2), (3, 4)):
        changes = {"train__gradient_accumulation_steps": 4 // processes, "train__max_steps": step}
        by_two(train, "--resume", settings=settings, processes=processes, **changes)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert column(out, "grad_norm") == pytest.approx(column(one, "grad_norm"), rel=1e-4)
    assert relative_error(result(out, "lora"), result(one, "lora")) < 1e-5


@sharded_integers
@pytest.mark.parametrize("layout", ["rows", "convrot", "Q8_0"])
def test_a_quantised_file_in_parts_is_trained_as_a_whole_one(train: Trainer, layout: str) -> None:
    """In fp8, in int8 that is rotated, and of GGUF."""
    file = train.folder / ("a.gguf" if layout == "Q8_0" else "a.safetensors")
    if layout == "Q8_0":
        pytest.importorskip("gguf")
        write_gguf(file, weights_of(train.model), layout)
    else:
        write_safetensors(file, weights_of(train.model), layout)
    settings = {**STEPS, "model.transformer": str(file), "train.max_steps": 2}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    done = two(train, settings=settings, train__fsdp=True)
    assert done.returncode == 0, done.stderr
    assert held_share(done.stderr) <= 0.55
    out = train.folder / "out"
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
    assert relative_error(result(out, "lora"), result(one, "lora")) < 1e-5


TOGETHER: dict[str, dict[str, Any]] = {
    "tabulated": {"train.tabulated_modulation": True},
    "compiled": {"train.compile": True},
    "every second block": {"train.gradient_checkpointing": 2},
}


@sharded_integers
@pytest.mark.parametrize("name", TOGETHER)
def test_quantised_weights_in_parts_go_with_other_settings(train: Trainer, name: str) -> None:
    program = train.folder / "compiled.py"
    program.write_text(COMPILED, encoding="utf-8")
    settings = {**STEPS, "train.mixed_precision": "bf16", "model.quantization": "int8", "train.max_steps": 2}
    changes = {**settings, **TOGETHER[name]}
    plain = by_two(train, settings={**changes, "train.compile": False}, out="plain")
    done = two(train, settings=changes, train__fsdp=True, program=[program])
    assert done.returncode == 0, done.stderr
    assert ("compiled graphs: " in done.stderr) is (name == "compiled")
    assert column(train.folder / "out", "loss") == pytest.approx(column(plain, "loss"), rel=0.02)


COMPILED = """
import functools, sys
import jaxtyping
jaxtyping.config.update("jaxtyping_disable", True)
from torch._dynamo.utils import counters
from qwen_train.model.compilation import compile_blocks
from qwen_train.training import prepare
prepare.compile_blocks = functools.partial(compile_blocks, backend="aot_eager")
from qwen_train.cli import main
try:
    main()
finally:
    if counters["stats"]["unique_graphs"]:
        print("compiled graphs: ", counters["stats"]["unique_graphs"], file=sys.stderr)
"""


@pytest.mark.parametrize("fsdp", [False, True], ids=["ddp", "fsdp2"])
def test_weights_rounded_at_random_are_near_those_of_one_process(train: Trainer, fsdp: bool) -> None:
    """Not equal: gradients in bfloat16 are summed in another order. All draw the same, so most weights are equal."""
    pytest.importorskip("torchao")
    settings = {**STEPS, **ROUNDED, "train.method": "full", "train.max_steps": 2, "optimizer.learning_rate": 1e-4}
    one = by_two(train, settings=settings, train__gradient_accumulation_steps=2, out="one", processes=1)
    out = by_two(train, settings=settings, train__fsdp=fsdp)
    (ours,), (its,) = (list((each / "transformer").glob("*.safetensors")) for each in (out, one))
    found, expected = load_file(ours), load_file(its)
    same = sum(int((found[name] == expected[name]).sum()) for name in expected)
    assert same > 0.97 * sum(tensor.numel() for tensor in expected.values())
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=0.02)


@pytest.mark.parametrize("changes", [{"train.offload_blocks": 2}, {"train.fsdp": True}], ids=["blocks", "fsdp2"])
def test_blocks_and_activations_in_the_hosts_memory_in_two_processes(train: Trainer, changes: dict[str, Any]) -> None:
    settings = {**STEPS, **changes, "train.offload_activations": True}
    plain, found = by_two(train, settings=STEPS, out="plain"), by_two(train, settings=settings)
    assert column(found, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
    assert relative_error(result(found, "lora"), result(plain, "lora")) < 1e-5


def test_a_quantised_base_in_two_processes(train: Trainer) -> None:
    """Frozen weights are not sent around: each process has read them."""
    settings = {**STEPS, "model.quantization": "int8_convrot"}
    one = train(settings=settings, train__gradient_accumulation_steps=2, out="one")
    out = by_two(train, settings=settings)
    assert column(out, "loss") == pytest.approx(column(one, "loss"), rel=1e-5)
