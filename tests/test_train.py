"""`qwen-train run`: it learns, it can be stopped anywhere, it does what a plain loop does, and it says what is wrong.

The judges: a loop over the stock transformer and one sample at a time; the run that was not interrupted, bit for bit;
the learning rate's formula. Nothing but the transformer may be loaded, which a process of its own shows.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState
from diffusers import QwenImageTransformer2DModel
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors.torch import load_file, save_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from qwen_cache import open_cache
from qwen_cache.format.directory import commit
from qwen_cache.format.identity import content_hash, dataset_identity
from qwen_cache.format.index import write_index
from qwen_cache.format.manifest import IndexFile, Manifest, Recipe
from qwen_cache.settings.load import Config, load_config
from qwen_cache.storage.remembered import write_checksums
from qwen_cache.terminal import human_bytes
from qwen_train import train as training
from qwen_train.data.batches import Batches
from qwen_train.memory.plan import largest_batch
from qwen_train.memory.prediction import predict_memory
from qwen_train.model.combinations import with_layout
from qwen_train.run import Launch, ToEncode
from qwen_train.training import checkpoint
from qwen_train.training.start import Start

from .support import processes
from .support.commands import command, refused, run
from .support.crash import Crash
from .support.marks import slow
from .support.runs import (
    EVERYTHING_RANDOM,
    LORA,
    SMALL,
    Trainer,
    column,
    differences,
    outcome,
    relative_error,
    run_training,
    send,
)


@pytest.fixture(autouse=True)
def fresh_accelerate() -> Iterator[None]:
    """accelerate keeps device and precision for the life of a process, in which a user trains once."""
    AcceleratorState._reset_state(reset_partial_state=True)
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# ---- what a run leaves -----------------------------------------------------------------------------------------------


def test_a_run_leaves_lora_metrics_settings_checkpoint_and_curves(train: Trainer) -> None:
    changes = {"settings": EVERYTHING_RANDOM, "logging__report_to": "tensorboard", "train__max_steps": 4}
    train.page = True
    out = train(**changes)
    assert sorted(path.name for path in out.iterdir()) == [
        "about.json",
        "checkpoint-4",
        "logs",
        "metrics.jsonl",
        LORA,
        "qwen.yaml",
        "report.html",
    ]
    saved = sorted(path.name for path in (out / "checkpoint-4").iterdir())
    assert saved == ["checksums.json", LORA, "state.json", "state.safetensors"]
    assert (out / LORA).read_bytes() == (out / "checkpoint-4" / LORA).read_bytes()
    assert column(out, "step") == [1, 2, 3, 4]
    assert load_config(out / "qwen.yaml") == train.config(**changes, train__layout="padded", train__compile=False)
    curves = EventAccumulator(str(out / "logs")).Reload()
    assert curves.Tags()["scalars"]
    for name in ("loss", "learning_rate", "grad_norm"):
        assert [event.step for event in curves.Scalars(name)] == [1, 2, 3, 4]
        assert [event.value for event in curves.Scalars(name)] == pytest.approx(column(out, name), rel=1e-6)


def test_the_saved_settings_repeat_the_run_bit_for_bit(train: Trainer) -> None:
    first = train.once(settings=EVERYTHING_RANDOM)
    again = train.folder / "again"
    result = run_training("--config", first / "qwen.yaml", "--set", f"train.output_dir={again}")
    assert result.code == 0, result.stderr
    assert differences(outcome(again), outcome(first)) == []
    other = train(settings=EVERYTHING_RANDOM, train__seed=1, train__max_steps=1, out="other")
    assert column(other, "loss") != column(first, "loss")[:1], "nothing depends on the seed"


def test_only_every_nth_step_is_logged(train: Trainer) -> None:
    assert column(train(train__max_steps=5, logging__logging_steps=2), "step") == [2, 4]


def test_the_loss_falls(train: Trainer) -> None:
    out = train(
        train__max_steps=12, train__batch_size=4, optimizer__learning_rate=0.02, train__gradient_checkpointing=False
    )
    losses = column(out, "loss")
    assert sum(losses[-4:]) < 0.8 * sum(losses[:4])


@pytest.mark.parametrize("batch_size", [slow(2), 3])
def test_equals_a_plain_loop_over_the_stock_transformer(train: Trainer, batch_size: int) -> None:
    """AdamW, clipping, accumulation and the order of samples: written out, one unpadded sample at a time.

    With batches of three, a step is one of three and one of a single sample, which counts no more than the others.
    """
    settings = {
        **SMALL,
        "train.batch_size": batch_size,
        "train.gradient_accumulation_steps": 2,
        "train.caption_dropout": 0.5,
    }
    settings |= {"train.lora.rank": 4, "train.lora.lora_alpha": 12, "train.max_grad_norm": 0.02}
    settings |= {"optimizer.learning_rate": 0.01, "optimizer.weight_decay": 0.5, "optimizer.betas": [0.8, 0.9]}
    settings |= {"train.max_steps": 2}
    out = train(settings=settings)
    start = get_peft_model_state_dict(train.prepared(settings=settings, out="start").transformer)

    stock = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer").requires_grad_(False)
    stock.add_adapter(LoraConfig(r=4, lora_alpha=12, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    set_peft_model_state_dict(stock, start)
    parameters = [p for p in stock.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=0.01, weight_decay=0.5, betas=(0.8, 0.9))
    draws = train.batches(settings=settings)
    losses, norms = [], []
    for step in range(2):
        optimizer.zero_grad()
        total = 0.0
        for position in range(4 * step, 4 * step + 4):
            loss = single_loss(stock, draws, position) / 4
            loss.backward()
            total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(parameters, 0.02).item())
        optimizer.step()

    trained = {name.removeprefix("transformer."): t for name, t in load_file(out / LORA).items()}
    expected = get_peft_model_state_dict(stock)
    assert column(out, "loss") == pytest.approx(losses, rel=1e-5)
    assert column(out, "grad_norm") == pytest.approx(norms, rel=1e-4)
    assert min(norms) > 0.02, "nothing was clipped"
    assert relative_error(trained, expected) < 1e-4
    assert relative_error(start, expected) > 0.01, "nothing was learnt"


def single_loss(stock: QwenImageTransformer2DModel, draws: Batches, position: int) -> torch.Tensor:
    noised = draws.sample_noise(position)
    sample, noise, sigma = noised.sample, noised.draws[0].noise, noised.draws[0].sigma
    clean = sample["image_latents"]
    velocity = stock(
        hidden_states=torch.cat([(1 - sigma) * clean + sigma * noise, sample["control_latents"]])[None],
        encoder_hidden_states=sample["empty_prompt_embeds" if noised.without_caption else "prompt_embeds"][None],
        timestep=torch.tensor([sigma]),
        img_shapes=[list(sample.img_shapes)],
        return_dict=False,
    )[0][0, : len(clean)]
    return torch.nn.functional.mse_loss(velocity, noise - clean)


# ---- equal ways to the same result -----------------------------------------------------------------------------------


def test_accumulating_two_batches_equals_one_batch_of_both(train: Trainer) -> None:
    """A large eps, because AdamW with a small one makes whole steps of gradients that are nothing but rounding."""
    changes = {"optimizer__learning_rate": 0.1, "optimizer__eps": 1e-3}
    one = train(**changes, train__batch_size=2)
    two = train(**changes, train__gradient_accumulation_steps=2, out="accumulated")
    for name in ("loss", "grad_norm"):
        assert column(two, name) == pytest.approx(column(one, name), rel=1e-4)
    assert relative_error(load_file(two / LORA), load_file(one / LORA)) < 1e-4


def test_gradient_checkpointing_changes_memory_not_the_result(train: Trainer) -> None:
    """With dropout too: what is recomputed has to drop the same again."""
    changes = {"train__batch_size": 2, "train__lora__lora_dropout": 0.5, "optimizer__learning_rate": 0.01}
    plain = train(**changes, train__gradient_checkpointing=False)
    recomputed = train(**changes, train__gradient_checkpointing=True, out="recomputed")
    assert column(recomputed, "loss") == pytest.approx(column(plain, "loss"), rel=1e-5)
    assert relative_error(load_file(recomputed / LORA), load_file(plain / LORA)) < 1e-5


@pytest.mark.slow
def test_bf16_holds_frozen_weights_in_bfloat16_and_trains_in_float32(train: Trainer) -> None:
    full = train(out="full")
    half = train(train__mixed_precision="bf16")
    assert {tensor.dtype for tensor in load_file(half / LORA).values()} == {torch.float32}
    state = load_file(half / "checkpoint-3" / "state.safetensors")
    assert {tensor.dtype for name, tensor in state.items() if name.startswith("optimizer")} == {torch.float32}
    assert column(half, "loss") == pytest.approx(column(full, "loss"), rel=0.02)
    assert column(half, "loss") != pytest.approx(column(full, "loss"), rel=1e-5)
    AcceleratorState._reset_state(reset_partial_state=True)
    transformer = train.prepared(train__mixed_precision="bf16", out="frozen").transformer
    for name, parameter in transformer.named_parameters():
        assert parameter.dtype == (torch.float32 if "lora" in name else torch.bfloat16), name
        assert parameter.requires_grad == ("lora" in name), name


def test_mixed_precision_no_needs_no_quotes(train: Trainer) -> None:
    """YAML 1.1 reads a bare `no` as false; the setting is called so nevertheless."""
    settings = train.folder / "qwen.yaml"
    settings.write_text("train:\n  mixed_precision: no\n", encoding="utf-8")
    assert load_config(settings).train.mixed_precision == "no"
    assert load_config(None, ["train.mixed_precision=no"]).train.mixed_precision == "no"


@pytest.mark.parametrize("name", [slow("constant_with_warmup"), slow("linear"), "cosine"])
def test_learning_rate_follows_its_schedule_by_optimizer_steps(train: Trainer, name: str) -> None:
    """Not by batches, of which there are two in a step."""
    out = train(
        train__max_steps=6,
        train__gradient_accumulation_steps=2,
        optimizer__learning_rate=0.01,
        lr_scheduler__name=name,
        lr_scheduler__warmup_steps=2,
    )
    decay = {
        "constant_with_warmup": lambda done: 1.0,
        "linear": lambda done: 1 - done,
        "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
    }[name]
    expected = [0.0, 0.005, *(0.01 * decay(i / 4) for i in range(4))]
    assert column(out, "learning_rate") == pytest.approx(expected, rel=1e-6)


def test_how_many_have_a_mask_is_said_where_masks_count(train: Trainer) -> None:
    said = [train.try_(train__edit_mask_weight=weight, out=str(weight)).stderr for weight in (1, 2)]
    assert ["masks    1 of 4 samples" in text for text in said] == [False, True]


def test_edit_mask_weight_changes_the_loss_of_the_sample_with_a_mask_alone(train: Trainer) -> None:
    changes = {"train__max_steps": 4, "optimizer__learning_rate": 1e-9, "train__caption_dropout": 0.0}
    plain = column(train(**changes), "loss")
    weighted = column(train(**changes, train__edit_mask_weight=5.0, out="weighted"), "loss")
    names = [train.batches(**changes).sample_noise(position).sample.name for position in range(4)]
    assert sorted(names) == ["cat", "china", "cup", "flower"]
    for name, a, b in zip(names, plain, weighted, strict=True):
        assert (a == pytest.approx(b, rel=1e-5)) == (name != "cup"), name


# ---- stop and resume -------------------------------------------------------------------------------------------------


@pytest.fixture
def uninterrupted(train: Trainer) -> dict[str, object]:
    return outcome(train.once(settings=EVERYTHING_RANDOM))


@pytest.mark.slow
@pytest.mark.parametrize("in_batch", [0, 1, 2, 3])
def test_stopped_in_any_batch_and_resumed_equals_uninterrupted(
    train: Trainer, uninterrupted: dict[str, object], monkeypatch: pytest.MonkeyPatch, in_batch: int
) -> None:
    """Bit for bit: weights, optimizer, learning rate, random numbers, metrics; also from the middle of a step."""
    with monkeypatch.context() as patched:
        send(patched, signal.SIGTERM, in_batch)
        assert train.try_(settings=EVERYTHING_RANDOM).code == 130
    assert differences(outcome(train("--resume", settings=EVERYTHING_RANDOM)), uninterrupted) == []


@pytest.mark.slow
def test_stopped_after_every_single_step_equals_uninterrupted(
    train: Trainer, uninterrupted: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (1, 2):
        with monkeypatch.context() as patched:
            send(patched, signal.SIGINT, in_batch=1)
            assert train.try_("--resume", settings=EVERYTHING_RANDOM).code == 130
        assert [number for number, _ in checkpoint.checkpoints(train.folder / "out")][-1] == step
    assert differences(outcome(train("--resume", settings=EVERYTHING_RANDOM)), uninterrupted) == []


@pytest.mark.parametrize(
    ("number", "in_batch"),
    [(signal.SIGINT, 2), slow(signal.SIGTERM, 3), slow(signal.SIGINT, 3), slow(signal.SIGTERM, 2)],
)
def test_a_signal_finishes_the_step_saves_it_and_says_how_to_continue(
    train: Trainer,
    uninterrupted: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    in_batch: int,
) -> None:
    """By a command that needs none of the settings: the run has its own."""
    handler = signal.getsignal(number)
    send(monkeypatch, number, in_batch)
    result = train.try_(settings=EVERYTHING_RANDOM)
    assert result.code == 130
    said, command = result.stderr.splitlines()[-3:-1]
    assert said == "stopped after step 2; to continue:"
    assert [step for step, _ in checkpoint.checkpoints(train.folder / "out")] == [2]
    assert column(train.folder / "out", "step") == [1, 2]
    assert not (train.folder / "out" / LORA).exists(), "an unfinished run must not look finished"
    assert signal.getsignal(number) == handler
    monkeypatch.undo()
    continued = run_training(*shlex.split(command)[2:])
    assert continued.code == 0, continued.stderr
    assert differences(outcome(train.folder / "out"), uninterrupted) == []


def test_a_second_signal_stops_at_once(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    send(monkeypatch, signal.SIGINT, in_batch=2, times=2)
    assert train.try_(settings=EVERYTHING_RANDOM, train__checkpointing_steps=1).code == 130
    assert [step for step, _ in checkpoint.checkpoints(train.folder / "out")] == [1]


KILLED = """
import itertools, os, signal, sys
from qwen_train.cli import main

calls, last, replace = itertools.count(), int(sys.argv.pop(1)), os.replace

def replace_or_die(*arguments):
    if next(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)
    replace(*arguments)

os.replace = replace_or_die
main()
"""
"""`qwen-train` that is killed before it gives the n-th file its name."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_killed_at_a_random_moment_and_resumed_equals_uninterrupted(train: Trainer, seed: int) -> None:
    """All in processes of their own: in one that has compiled, other kernels may run."""
    changes = {"settings": EVERYTHING_RANDOM, "train__max_steps": 6, "train__checkpointing_steps": 1}

    def start(last: int, *options: str, **more: Any) -> int:
        arguments = [*map(str, train.arguments(**changes, **more)), *options]
        return processes.run([sys.executable, "-c", KILLED, str(last), *arguments], capture_output=True).returncode

    assert start(-1, out="uninterrupted") == 0
    expected = outcome(train.folder / "uninterrupted")
    assert start(random.Random(seed).randrange(5, 20)) == -signal.SIGKILL
    assert start(-1, "--resume") == 0
    out = train.folder / "out"
    assert differences(outcome(out), expected) == []
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    "renames",
    [slow(0), slow(1), slow(2), slow(3), 4],
    ids=["weights", "state.safetensors", "state.json", "checksums.json", "the whole"],
)
def test_a_crash_while_saving_leaves_the_checkpoint_before_it(
    train: Trainer, uninterrupted: dict[str, object], monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Before any of the files of a checkpoint, and the checkpoint itself, have their names."""
    calls, replace = itertools.count(), os.replace

    def crash(source: Path, target: Path) -> None:
        if "checkpoint-2" in str(target) and next(calls) == renames:
            raise Crash
        replace(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", crash)
        with pytest.raises(Crash):
            train.try_(settings=EVERYTHING_RANDOM, train__checkpointing_steps=1)
    out = train.folder / "out"
    assert [step for step, _ in checkpoint.checkpoints(out)] == [1]
    train("--resume", settings=EVERYTHING_RANDOM, train__checkpointing_steps=1)
    assert differences(outcome(out), uninterrupted) == []
    assert not [path.name for path in out.iterdir() if path.name.startswith(".")]


@pytest.mark.slow
def test_resuming_on_the_same_samples_stored_in_another_way_is_exact(
    train: Trainer, uninterrupted: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The content of the cache counts, not its format or location."""
    with monkeypatch.context() as patched:
        send(patched, signal.SIGTERM, in_batch=3)
        assert train.try_(settings=EVERYTHING_RANDOM).code == 130
    assert run("qwen-cache", "merge", train.cache, "--out", tmp_path / "small", "--compression", "zstd").code == 0
    train.cache = tmp_path / "small"
    assert differences(outcome(train("--resume", settings=EVERYTHING_RANDOM)), uninterrupted) == []


def test_resuming_a_finished_run_changes_nothing(train: Trainer) -> None:
    before = outcome(train())
    assert differences(outcome(train("--resume")), before) == []
    assert [path.name for path in train.folder.glob("out/checkpoint-*")] == ["checkpoint-3"]


def test_resume_without_a_checkpoint_begins(train: Trainer) -> None:
    assert column(train("--resume"), "step") == [1, 2, 3]


@pytest.mark.parametrize(("limit", "kept"), [slow(1, [5]), (2, [4, 5]), slow(0, [1, 2, 3, 4, 5])])
def test_only_the_newest_checkpoints_are_kept(train: Trainer, limit: int, kept: list[int]) -> None:
    out = train(train__max_steps=5, train__checkpointing_steps=1, train__checkpoints_total_limit=limit)
    assert sorted(int(path.name.removeprefix("checkpoint-")) for path in out.glob("checkpoint-*")) == kept


@pytest.mark.slow
def test_checkpoints_are_ordered_by_number(train: Trainer) -> None:
    """Step 10 comes after step 9, though not in the alphabet."""
    out = train(train__max_steps=10, train__checkpointing_steps=3, train__checkpoints_total_limit=2)
    assert {path.name for path in out.glob("checkpoint-*")} == {"checkpoint-9", "checkpoint-10"}
    result = train.try_("--resume", train__max_steps=11)
    assert "resume   after step 10" in result.stderr
    assert column(out, "step") == list(range(1, 12))


# ---- what is refused -------------------------------------------------------------------------------------------------


def test_a_second_run_into_the_same_folder_is_refused(train: Trainer) -> None:
    before = outcome(train())
    out = str(train.folder / "out")
    refused(
        train.try_(),
        out,
        "already holds a run (found checkpoint-3)",
        f"`qwen-train run --resume --out {out}`, or start",
    )
    assert differences(outcome(train.folder / "out"), before) == []


def test_resuming_on_another_cache_is_refused(train: Trainer, built: Callable[..., Path]) -> None:
    before = outcome(train(train__max_steps=1))
    first, train.cache = train.cache, built("edit-plus", ("--set", "data.vae_image_size=9216"))
    result = train.try_("--resume", train__max_steps=4)
    do = f"`qwen-train run --resume --out {train.folder / 'out'} --set train.max_steps=4` continues the run; or start"
    refused(result, do)
    identities = open_cache(first).identity, open_cache(train.cache).identity
    refused(result, "checkpoint-1", "another cache", f"(expected {identities[0]}, found {identities[1]})")
    assert differences(outcome(train.folder / "out"), before) == []


def test_resuming_with_other_batches_is_refused(train: Trainer) -> None:
    """Which samples were trained is known by their number alone, so the batches must be the same."""
    before = train.config(train__batch_size=2).train
    out = train(train__batch_size=2, train__max_steps=1)
    others = {"batch_size": 3, "max_tokens": 5000, "bucketing_window": 7, "drop_last": True, "layout": "packed"}
    for name, value in others.items():
        result = train.try_("--resume", **{"train__batch_size": 2, f"train__{name}": value})
        was = "padded" if name == "layout" else getattr(before, name)
        change = f"(expected {'none, or without effect' if was is None else was}, found {value})"
        refused(result, str(out / "checkpoint-1"), f"trained with another train.{name}", change)
    assert column(out, "step") == [1]


def test_a_checkpoint_that_does_not_say_how_batches_were_made_is_refused(train: Trainer) -> None:
    path = train(train__max_steps=1) / "checkpoint-1" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    del state["fixed"]["train.batch_size"]
    path.write_text(json.dumps(state), encoding="utf-8")
    write_checksums(path.parent)
    refused(
        train.try_("--resume"), "trained with another train.batch_size", "(expected none, or without effect, found 1)"
    )


def test_resuming_with_more_accumulation_loses_and_repeats_no_sample(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three samples are trained before; the next batch begins with the fourth."""
    seen: list[str] = []
    compute = training.compute_loss
    monkeypatch.setattr(
        training, "compute_loss", lambda model, batch, *more: (seen.extend(batch.keys), compute(model, batch, *more))[1]
    )
    train()
    train("--resume", train__gradient_accumulation_steps=5, train__bucketing_window=2, train__max_steps=4)
    assert len(seen) == 8
    keys = sorted(sample.key for sample in open_cache(train.cache))
    assert sorted(seen[:4]) == sorted(seen[4:]) == keys


def test_an_output_folder_that_is_a_file_is_refused(train: Trainer) -> None:
    (train.folder / "out").write_text("mine", encoding="utf-8")
    refused(train.try_(), str(train.folder / "out"))
    assert (train.folder / "out").read_text(encoding="utf-8") == "mine"


def test_a_cache_for_another_pipeline_is_refused(train: Trainer, built: Callable[..., Path]) -> None:
    train.cache = built("edit", ("--on-error", "skip"))  # one sample has two controls, which this model does not take
    refused(train.try_(), str(train.cache), "(expected QwenImageEditPlusPipeline, found QwenImageEditPipeline)")
    assert not (train.folder / "out").exists()


def test_a_cache_of_another_width_is_refused(train: Trainer) -> None:
    model = train.folder / "model"
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("transformer", "vae", "text_encoder"))
    transformer = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer")
    QwenImageTransformer2DModel.from_config({**transformer.config, "joint_attention_dim": 32}).save_pretrained(
        model / "transformer"
    )
    train.model = model
    refused(train.try_(), str(train.cache), "(expected width 32, found width 64)")


def test_a_transformer_of_other_latents_is_refused(train: Trainer) -> None:
    model = train.folder / "model"
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("transformer", "vae", "text_encoder"))
    transformer = QwenImageTransformer2DModel.from_pretrained(train.model / "transformer")
    QwenImageTransformer2DModel.from_config({**transformer.config, "in_channels": 128}).save_pretrained(
        model / "transformer"
    )
    train.model = model
    refused(train.try_(), str(model / "transformer"), "(expected in_channels 64, found in_channels 128)")
    assert not (train.folder / "out").exists()


def test_missing_weights_are_refused(train: Trainer) -> None:
    """diffusers fills them in at random with no more than a warning."""
    model = train.folder / "model"
    shutil.copytree(train.model, model, ignore=shutil.ignore_patterns("vae", "text_encoder"))
    (file,) = (model / "transformer").glob("*.safetensors")
    weights = load_file(file)
    del weights["transformer_blocks.1.attn.to_k.bias"]
    save_file(weights, file, {"format": "pt"})
    train.model = model
    refused(train.try_(), str(model / "transformer"), "(found transformer_blocks.1.attn.to_k.bias)")
    file.unlink()
    refused(train.try_(), str(model / "transformer"), "cannot be loaded")


def test_a_missing_cache_model_or_settings_file_is_refused(train: Trainer) -> None:
    model, train.model = train.model, train.folder / "nowhere"
    refused(train.try_(), str(train.model), "no such folder")
    train.model, train.cache = model, train.folder / "nowhere"
    refused(train.try_(), str(train.cache), "no such folder", "qwen-cache build")
    refused(train.try_("--config", "absent.yaml"), "absent.yaml", "no such file")


def test_an_empty_cache_is_refused(train: Trainer) -> None:
    index = write_index([], 2)
    recipe = Recipe(open_cache(train.cache).recipe.recipe, 0, dataset_identity([]))
    train.cache = train.folder / "empty"
    train.cache.mkdir()
    commit(train.cache, Manifest(2, {"default": recipe}, IndexFile(0, len(index), content_hash(index)), ()), index, [])
    refused(train.try_(), str(train.cache), "the cache has no samples", "qwen-cache build")


def test_damaged_bytes_stop_the_run(train: Trainer) -> None:
    shards, train.cache = train.cache, train.folder / "damaged"
    shutil.copytree(shards, train.cache)
    row = train.batches().sample_noise(2).sample.row
    shard = train.cache / row.shard
    data = bytearray(shard.read_bytes())
    data[row.entry.data] ^= 1
    shard.write_bytes(data)
    refused(train.try_(), row.shard, f"image_latents of sample {row.label}", "[F14]")


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        ("train.max_step=5", ["unknown key train.max_step", "did you mean train.max_steps?"]),
        ("train.lr=5", ["unknown key train.lr", "did you mean optimizer.learning_rate?"]),
        ("train.learning_rate=5", ["unknown key train.learning_rate", "did you mean optimizer.learning_rate?"]),
        ("train.lora_rank=5", ["unknown key train.lora_rank", "did you mean train.lora.rank?"]),
        ("train.lora=5", ["train.lora: is a section, with settings of its own (found 5)"]),
        ("train.lora.alpha=5", ["unknown key train.lora.alpha", "did you mean train.lora.lora_alpha?"]),
        ("optimiser.learning_rate=1", ["unknown key optimiser", "did you mean optimizer?"]),
        ("train.max_steps=many", ["train.max_steps: not a valid value (expected an integer", ", found many)"]),
        ("train.max_steps=0", ["train.max_steps: not a valid value (expected greater than 0, found 0)"]),
        (
            "train.max_grad_norm=-1",
            ["train.max_grad_norm: not a valid value (expected greater than or equal to 0, found -1)"],
        ),
        ("train.lora.lora_dropout=1.5", ["train.lora.lora_dropout", "less than or equal to 1", "found 1.5)"]),
        ("train.mode_scale=5", ["train.mode_scale", "found 5)"]),  # draws beyond 0..1, noise levels beyond 1
        ("train.seed=-1", ["train.seed", "found -1)"]),
        ("optimizer.betas=[0.9, 1.0]", ["optimizer.betas.1", "less than 1", "found 1.0)"]),
        ("train.max_steps", ["--set takes section.key=value", "(found train.max_steps)"]),
        (
            "train={min_timestep: 500, max_timestep: 500}",
            ["train.max_timestep leaves no timestep (expected above 500, train.min_timestep, found 500)"],
        ),
        (
            "train.max_timestep=20",
            ["leaves no timestep (expected above 20, the lowest of this model, on a scale of 1000, found 20)"],
        ),
        ("train.seed.more=1", ["train.seed", "expected an integer"]),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(train: Trainer, setting: str, parts: list[str]) -> None:
    refused(train.try_("--set", setting), *parts)
    assert not (train.folder / "out").exists()


def test_a_wrong_key_in_the_file_names_the_file_and_the_nearest_key(train: Trainer) -> None:
    settings = train.folder / "mine.yaml"
    settings.write_text(yaml.safe_dump({"train": {"max_step": 5}}), encoding="utf-8")
    refused(train.try_("--config", str(settings)), str(settings), "unknown key train.max_step", "train.max_steps?")


def test_a_sample_larger_than_the_budget_is_refused_by_name(train: Trainer) -> None:
    sizes = {s.name: (sum(h * w for _, h, w in s.img_shapes), len(s["prompt_embeds"])) for s in open_cache(train.cache)}
    name, (image, text) = max(sizes.items(), key=lambda item: sum(item[1]))
    result = train.try_(train__max_tokens=image + text - 1)
    refused(result, f"sample {name} alone exceeds train.max_tokens", f"at most {image + text - 1:,} tokens")
    refused(result, f"found {image + text:,}: {image:,} of its images, {text:,} of its text", "set train.max_tokens=")
    assert not (train.folder / "out").exists()
    assert column(train(train__max_tokens=image + text), "step") == [1, 2, 3]


def test_the_memory_of_the_largest_batch_is_said_before_training(train: Trainer) -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    result = run("qwen-train", *train.arguments(train__batch_size=2, train__max_steps=1))
    assert result.code == 0, result.stderr
    transformer = json.loads((train.model / "transformer" / "config.json").read_text(encoding="utf-8"))
    config, batches = with_layout(train.config(train__batch_size=2), "cpu"), train.batches(train__batch_size=2)
    memory = predict_memory(transformer, config, largest_batch(batches.cache, batches.config, batches)[0], "cpu")
    named = {"frozen weights": memory.weights, "trained weights": memory.trained, "gradients": memory.gradients}
    named |= {"optimizer": memory.optimizer, "activations": memory.activations}
    assert sum(named.values()) == memory.total
    parts = ", ".join(f"{name} {human_bytes(size)}" for name, size in named.items())
    assert f"memory   about {human_bytes(memory.total)}: {parts}\n" in result.stderr


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_batches_and_their_padding_are_said_before_training(train: Trainer, layout: str) -> None:
    cache = open_cache(train.cache)
    images = [sum(h * w for _, h, w in sample.img_shapes) for sample in cache]
    texts = [len(sample["prompt_embeds"]) for sample in cache]
    valid = sum(images) + sum(texts)
    tokens = valid if layout == "packed" else 4 * (max(images) + max(texts))
    result = train.try_(train__batch_size=4, train__gradient_accumulation_steps=2, train__layout=layout)
    padding = 100 * (1 - valid / tokens)
    line = f"batches  1 per epoch of at most 4 samples, {tokens:,} tokens on average, padding {padding:.1f} %"
    assert line in result.stderr
    assert "steps    3 of 8 samples: 6.0 epochs" in result.stderr
    assert padding == 0 or layout == "padded"


@pytest.mark.parametrize("target_modules", [["to_query"], ["norm_q"], ["to_q", "to_query"], "to_(q", []])
def test_target_modules_that_name_nothing_trainable_are_refused(train: Trainer, target_modules: object) -> None:
    """Each of the names: one that is misspelt among others would go untrained in silence."""
    result = train.try_(train__lora__target_modules=target_modules)
    refused(result, "train.lora.target_modules", "name linear layers of the transformer, such as to_q")


def test_a_loss_that_is_no_number_names_the_samples(train: Trainer) -> None:
    """A learning rate beyond all bounds ruins the weights in the first step, so that the second step's loss is NaN."""
    changes = {"optimizer__learning_rate": 1e30, "train__batch_size": 2, "train__checkpointing_steps": 1}
    result = train.try_(**changes)
    samples = map(open_cache(train.cache).__getitem__, train.batches(**changes).batch(2).keys)
    names = ", ".join(f"{sample.name} ({sample.key[:12]})" for sample in samples)
    refused(result, "the loss of step 2 is not a number", f"nan for the samples {names}", "optimizer.learning_rate")
    assert column(train.folder / "out", "step") == [1]
    assert not (train.folder / "out" / LORA).exists()


@pytest.mark.parametrize("arguments", [["run", "--no-such-option"], ["no-such-command"]])
def test_a_wrong_command_line_is_a_message_and_exit_code_2(arguments: list[str]) -> None:
    result = command("qwen-train", *arguments, fresh=False)
    assert result.code == 2
    assert arguments[-1] in result.stderr
    assert "Traceback" not in result.stderr


# ---- what is loaded --------------------------------------------------------------------------------------------------


TRAINING = """
import sys
import qwen_cache.trainers.convert
print("importing", *sys.modules)
from qwen_cache.storage.remembered import write_checksums
from qwen_cache.settings.load import load_config
from qwen_train.train import train
train(load_config(None, sys.argv[3:], cache__path=sys.argv[1], model__path=sys.argv[2]))
print("training", *sys.modules)
"""


def within(modules: list[str], packages: tuple[str, ...]) -> list[str]:
    return sorted(name for name in modules if any(name == p or name.startswith((f"{p}.", f"{p}_")) for p in packages))


@pytest.mark.slow
def test_training_loads_no_encoder_and_no_pipeline(train: Trainer) -> None:
    """And other trainers' caches are imported without either library of models."""
    _, cache, _, model, *assignments = map(str, train.arguments(logging__report_to="tensorboard"))
    done = subprocess.run(
        [sys.executable, "-c", TRAINING, cache, model, *assignments[1::2]],
        cwd=train.folder,
        check=True,
        capture_output=True,
        text=True,
    )
    modules = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines() if " torch " in line}
    assert within(modules["importing"], ("diffusers", "transformers", "qwen_cache.encode")) == []
    assert (train.folder / "out" / LORA).exists()
    forbidden = ("diffusers.models.autoencoders", "diffusers.pipelines", "transformers.models.qwen2_5_vl")
    assert within(modules["training"], (*forbidden, "qwen_cache.encode", "torchvision")) == []
    assert "diffusers.models.transformers.transformer_qwenimage" in modules["training"]


def test_options_of_run_are_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over --set and qwen.yaml. The result of --json has the last metrics. Without CACHE, data.source is encoded."""
    from qwen_train.training import start

    seen: list[Start] = []

    @contextmanager
    def starting(config: Config, launch: Launch, *, resume: bool, to_encode: ToEncode | None) -> Iterator[Start]:
        seen.append(Start(config, launch, cast(Any, None), None, to_encode, None, None, ""))
        yield seen[-1]

    def train_started(start: Start) -> Path:
        start.out.mkdir()
        (start.out / "metrics.jsonl").write_text('{"step": 1, "loss": 3}\n{"step": 2, "loss": 2}\n')
        return start.out / "lora"

    monkeypatch.setattr(start, "starting", starting)
    monkeypatch.setattr(training, "train_started", train_started)
    monkeypatch.chdir(tmp_path)
    Path("qwen.yaml").write_text("train: {max_steps: 5, caches: [{path: a}]}", encoding="utf-8")
    result = run(
        "qwen-train", "run", "shards", "--out", "mine", "--max-steps", "7", "--learning-rate", "5e-5", "--rank", "8",
        "--batch-size", "3", "--set", "train.max_steps=6", "--json",
    )  # fmt: skip
    assert result.code == 0, result.stderr
    changed = {"train.output_dir": "mine", "train.max_steps": 7, "train.lora.rank": 8, "train.batch_size": 3}
    assert seen[0].config.flat() == Config().flat() | changed | {"optimizer.learning_rate": 5e-5}
    lora = str(Path("mine", "lora"))
    metrics = {"step": 2, "loss": 2}
    assert json.loads(result.stdout) == {"result": lora, "output_dir": "mine", "metrics": metrics}
    assert run("qwen-train", "run", "--encode-on-the-fly", "--set", "data.source=a").code == 0
    assert run("qwen-train", "run", "b", "--encode-on-the-fly", "--set", "data.source=a", "--out", "other").code == 0
    assert run("qwen-train", "run", "c", "--encode-at", "http://host:1", "--out", "at").code == 0
    assert [start.to_encode for start in seen] == [None, ToEncode("a"), ToEncode("b"), ToEncode("c", "http://host:1")]
    both = run("qwen-train", "run", "c", "--encode-at", "http://host:1", "--encode-on-the-fly")
    assert "exclude each other" in both.stderr
