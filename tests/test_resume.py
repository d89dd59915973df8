"""A run that died anywhere, with any method and optimizer, resumes as if it had not, or says why it cannot.

The judge is the run that was not interrupted, bit for bit, in float32 on the CPU. A process that dies leaves what is on
disk and nothing else, and so does an exception here that nothing catches; tests/test_train.py kills real processes.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.distributed.tensor import Shard, distribute_tensor

from qwen_cache.errors import TrainError
from qwen_cache.settings.load import load_config
from qwen_cache.storage import files
from qwen_cache.storage.files import LockHeldError, locked
from qwen_cache.storage.remembered import write_checksums
from qwen_train import train as training
from qwen_train import weights
from qwen_train.model.placement import assign
from qwen_train.run import Launch, only_run
from qwen_train.training import checkpoint, prepare, start

from .support.commands import refused
from .support.crash import Crash
from .support.marks import slow
from .support.ranks import second_of_two
from .support.runs import EVERYTHING_RANDOM, IMAGES, LORA, Trainer, column, differences, metrics, run_training, written

STEPS = 3
DYING = {**EVERYTHING_RANDOM, "train.max_steps": STEPS, "train.checkpointing_steps": 1, "train.ema_decay": 0.9}
WAYS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "full": {"train.method": "full"},
    "adamw8bit": {"optimizer.name": "adamw8bit", "optimizer.arguments": {"min_8bit_size": 16}},
    "adafactor": {"optimizer.name": "adafactor"},
    "prodigy": {"optimizer.name": "prodigy", "optimizer.learning_rate": 1},
    "import path": {"optimizer.name": "torch.optim.RAdam"},
    "rslora and dora": {"train.lora.use_rslora": True, "train.lora.use_dora": True},
}


def dying_in(batch: int, patch: pytest.MonkeyPatch) -> None:
    """Let the process die while it works on that batch, counted from 0."""
    batches, compute_loss = itertools.count(), training.compute_loss

    def die(*arguments: Any) -> torch.Tensor:
        if next(batches) == batch:
            raise Crash
        return compute_loss(*arguments)

    patch.setattr(training, "compute_loss", die)


@pytest.fixture(scope="module")
def uninterrupted(
    built: Callable[..., Path], tiny_model: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, object]]:
    made: dict[str, dict[str, object]] = {}

    def run(way: str) -> dict[str, object]:
        if way not in made:
            folder = tmp_path_factory.mktemp("uninterrupted")
            trainer = Trainer(built("edit-plus"), tiny_model("edit-plus"), folder)
            made[way] = written(trainer(settings=DYING | WAYS[way]))
        return made[way]

    return run


EVERY_STEP = [(way, step) for way in ("adamw", "full") for step in range(STEPS)]
FAST = [("adamw", 2), ("full", 1)]


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("way", "step"),
    FAST + [slow(*case) for case in [*EVERY_STEP, *((way, 2) for way in WAYS)] if case not in FAST],
)
def test_dead_in_any_step_and_resumed_equals_uninterrupted(
    train: Trainer, uninterrupted: Callable[[str], dict[str, object]], way: str, step: int
) -> None:
    """In the second batch of a step, so that gradients are lost as well."""
    if way == "prodigy":
        pytest.importorskip("prodigyopt")
    settings = DYING | WAYS[way]
    with pytest.MonkeyPatch.context() as patch:
        dying_in(2 * step + 1, patch)
        with pytest.raises(Crash):
            train.try_(settings=settings)
    assert [number for number, _ in checkpoint.checkpoints(train.folder / "out")] == list(range(1, step + 1))[-3:]
    assert differences(written(train("--resume", settings=settings)), uninterrupted(way)) == []


@pytest.mark.slow
def test_the_ways_are_different(uninterrupted: Callable[[str], dict[str, object]]) -> None:
    """Or the test above would say nothing of some."""
    losses = [tuple(uninterrupted(way)["loss"]) for way in WAYS if way != "prodigy"]  # type: ignore[arg-type]
    assert len(set(losses)) == len(losses)


def test_each_process_draws_its_own_dropout_also_after_a_resume(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the states in the checkpoint, or with new ones for another number of processes."""
    run: Any = SimpleNamespace(fixed={"seed": 0}, consumed_samples=5)

    def begun(rank: int) -> torch.Tensor:
        monkeypatch.setattr("accelerate.utils.random.AcceleratorState", lambda: SimpleNamespace(process_index=rank))
        accelerator: Any = SimpleNamespace(prepare_optimizer=lambda optimizer: SimpleNamespace(train=lambda: None))
        prepare.start_run(load_config(None), torch.nn.Linear(1, 1), accelerator, {})
        return torch.get_rng_state()

    def resumed(rank: int, processes: int) -> torch.Tensor:
        here = SimpleNamespace(num_processes=processes, process_index=rank)
        monkeypatch.setattr(checkpoint, "PartialState", lambda: here)
        checkpoint._set_random_state([{"cpu": state} for state in states], run)
        return torch.get_rng_state()

    with torch.random.fork_rng():
        states = [begun(rank) for rank in range(2)]
        assert not torch.equal(*states)
        assert all(torch.equal(resumed(rank, 2), states[rank]) for rank in range(2))
        three = [resumed(rank, 3) for rank in range(3)]
        run.consumed_samples = 50
        three.append(resumed(0, 3))
    assert len({state.numpy().tobytes() for state in (*states, *three)}) == 6


def test_an_optimizers_state_is_restored_as_it_was() -> None:
    """Moments in float32 of weights in bfloat16, which torch would round; tuples, which JSON does not have. It was made
    by one kernel, on an accelerator, and is continued on the CPU."""
    weight = torch.nn.Parameter(torch.ones(2, 2, dtype=torch.bfloat16))
    state = {0: {"step": torch.tensor(1.0), "exp_avg": torch.full((2, 2), 1.001), "exp_avg_sq": torch.ones(2, 2)}}
    optimizer = torch.optim.AdamW([weight])
    group = {**optimizer.state_dict()["param_groups"][0], "betas": [0.5, 0.75], "fused": True}
    checkpoint._load_optimizer(optimizer, {"state": deepcopy(state), "param_groups": [group]})
    assert optimizer.param_groups[0]["betas"] == (0.5, 0.75)
    assert optimizer.param_groups[0]["fused"] is None
    found = optimizer.state[weight]
    assert {name: value.dtype for name, value in found.items()} == dict.fromkeys(state[0], torch.float32)
    assert all(torch.equal(found[name], value) for name, value in state[0].items())


def test_a_process_restores_its_part_of_weights_and_moments() -> None:
    """The files that a checkpoint has are whole."""
    weight = torch.nn.Parameter(torch.arange(12.0).view(4, 3))
    whole = torch.optim.AdamW([weight], lr=0.1)
    weight.square().sum().backward()
    whole.step()
    with second_of_two() as mesh:
        part = torch.nn.Parameter(distribute_tensor(torch.zeros(4, 3), mesh, [Shard(0)], src_data_rank=None))
        optimizer = torch.optim.AdamW([part])
        assign(part, weight.detach())
        checkpoint._load_optimizer(optimizer, deepcopy(whole.state_dict()))
        found, expected = optimizer.state[part], whole.state[weight]
        assert torch.equal(part.to_local(), weight[2:])  # type: ignore[attr-defined]
        assert all(torch.equal(found[name].to_local(), expected[name][2:]) for name in ("exp_avg", "exp_avg_sq"))
        assert found["step"] == 1


@pytest.mark.fast_cases(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"optimizer.name": "adafactor"}, "another optimizer.name"),
        ({"train.method": "full"}, "another train.method"),
        ({"train.lora.use_rslora": True}, "another train.lora.use_rslora"),
    ],
)
def test_resuming_as_something_else_is_refused(train: Trainer, change: dict[str, Any], message: str) -> None:
    train(settings=EVERYTHING_RANDOM, train__max_steps=1)
    refused(train.try_("--resume", settings={**EVERYTHING_RANDOM, **change}), "checkpoint-1", message)


@pytest.mark.parametrize(("method", "library"), [("lora", True), slow("lora", False), slow("full", False)])
def test_a_full_disk_stops_the_run_and_keeps_the_checkpoint_before(
    train: Trainer,
    uninterrupted: Callable[[str], dict[str, object]],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    library: bool,
) -> None:
    """The disk is full when the second checkpoint has its weights and the optimizer's state is to be written; the
    safetensors library has an error of its own for that."""
    settings = {**DYING, "train.method": method}
    save_file, calls = checkpoint.save_file, itertools.count()

    def full_disk(tensors: dict[str, torch.Tensor], path: Path) -> None:
        if next(calls) == 1:
            path.write_bytes(b"half of it")
            message = "No space left on device"
            raise SafetensorError(message) if library else OSError(errno.ENOSPC, message)
        save_file(tensors, path)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        result = train.try_(settings=settings)
    out = train.folder / "out"
    refused(result, str(out), "checkpoint-2 cannot be written: No space left on device", "checkpoint-1 is kept")
    assert sorted(path.name for path in out.iterdir() if "checkpoint" in path.name) == ["checkpoint-1"]
    resumed = written(train("--resume", settings=settings))
    assert differences(resumed, uninterrupted("full" if method == "full" else "adamw")) == []


def test_a_result_that_cannot_be_written_is_said_and_written_by_resuming(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*arguments: Any) -> None:
        if arguments[2].parent == train.folder / "out":
            raise OSError(numbers[-1], os.strerror(numbers.pop()))
        write(*arguments)

    write, numbers = checkpoint.write_weights, [errno.EROFS, errno.ENOSPC]
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_weights", failing)
        told = "the result cannot be written: No space left on device", "free disk space; checkpoint-3 is kept"
        refused(train.try_(), *told)
        told = "Read-only file system", "check the disk, and that you may write to this folder; checkpoint-3 is kept"
        refused(train.try_("--resume"), *told)
    assert not (train.folder / "out" / LORA).exists()
    out = train("--resume")
    assert (out / LORA).read_bytes() == (out / "checkpoint-3" / LORA).read_bytes()
    assert len(metrics(out)) == 3


def test_a_checkpoint_of_full_training_with_a_weight_missing_is_refused(train: Trainer) -> None:
    """Written so: damage is found before."""
    settings = {**EVERYTHING_RANDOM, "train.method": "full", "train.max_steps": 1}
    (file,) = (train(settings=settings) / "checkpoint-1" / "transformer").glob("*.safetensors")
    weights = load_file(file)
    checkpoint.save_file({name: weight for name, weight in weights.items() if name != "img_in.bias"}, file)
    write_checksums(file.parent.parent)
    refused(train.try_("--resume", settings={**settings, "train.max_steps": 2}), "weights are missing", "img_in.bias")


@pytest.mark.slow
def test_settings_of_the_optimizer_that_changed_count_from_the_checkpoint_on(train: Trainer) -> None:
    """The judge of the schedule is a run that had it from the begin."""
    schedule = {"lr_scheduler.name": "linear", "lr_scheduler.warmup_steps": 1, "optimizer.learning_rate": 5e-3}
    settings = {**DYING, "train.ema_decay": 0, "optimizer.learning_rate": 1e-3}
    plain = train(settings=settings, out="plain")
    always = train(settings=settings | schedule, out="always")
    train(settings=settings, train__max_steps=2)
    result = train.try_("--resume", settings=settings | schedule, optimizer__weight_decay=0.5)
    assert result.code == 0, result.stderr
    rates = column(train.folder / "out", "learning_rate")
    assert rates == column(plain, "learning_rate")[:2] + column(always, "learning_rate")[2:]
    said = " ".join(result.stderr.split())
    assert f"from here on: train.max_steps 2 → {STEPS}" in said
    assert (
        "optimizer.learning_rate 0.001 → 0.005, optimizer.weight_decay 0.01 → 0.5, lr_scheduler.name cosine → linear"
        in said
    )
    saved = [(train.folder / "out" / f"checkpoint-{step}" / "state.json").read_text() for step in (2, 3)]
    assert ['["weight_decay", 0.5]' in text for text in saved] == [False, True]


def test_a_run_has_nothing_that_an_earlier_one_left_of_the_steps_that_it_trains(train: Trainer) -> None:
    """Left by one that was killed before its first checkpoint, or after its last. Files of others in a folder
    `validation`, such as a source or a cache, stay: a run may write into the folder of a project."""
    settings = {**IMAGES, "validation.validation_steps": 1, "validation.num_images": 1, "train.validation_split": 0.5}
    whole, out = train(settings=settings, out="whole"), train.folder / "out"
    others = {Path("validation", name) for name in ("street.png", "cache.json", "step-9/a.png", "target/cat.png")}
    for path in others:
        (out / path).parent.mkdir(parents=True, exist_ok=True)
        (out / path).write_text("another's")

    def validated(folder: Path) -> set[Path]:
        found = {path.relative_to(folder) for path in (folder / "validation").rglob("*") if path.is_file()}
        assert folder == whole or others <= found
        return found - others

    def leave(step: int) -> None:
        for path in (whole / "validation" / "step-2").iterdir():
            left = out / "validation" / f"step-{step}" / path.name
            left.parent.mkdir(parents=True, exist_ok=True)
            left.write_bytes(path.read_bytes())
        (out / "validation" / "losses").mkdir(exist_ok=True)
        (out / "validation" / "losses" / f"step-{step}.json").write_text('{"a": [1, 1, 1, 1]}')

    leave(0)
    leave(9)
    (out / "metrics.jsonl").write_text('{"step": 0, "validation_loss": 5}\n{"step": 9, "validation_loss": 1}\n')
    train(settings=settings, train__max_steps=1)
    assert [line["step"] for line in metrics(out)] == [0, 1]
    assert validated(out) == {path for path in validated(whole) if "step-2" not in str(path)}
    leave(9)
    train("--resume", settings=settings)
    assert validated(out) == validated(whole)
    assert column(out, "validation_loss") == column(whole, "validation_loss")


# ---- damage ----------------------------------------------------------------------------------------------------------


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1 << at % 8
    file.write_bytes(data)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("method", ["lora", slow("full")])
def test_one_changed_bit_anywhere_in_a_checkpoint_is_found(
    train: Trainer, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(weights, "MAX_SHARD_SIZE", "400KB")
    settings = {**DYING, "train.method": method, "train.max_steps": 2}
    out = train(settings=settings)
    folder, whole = out / "checkpoint-2", files_of(out / "checkpoint-2")
    assert len(whole) == 5 if method == "lora" else len(whole) > 10
    do = "remove checkpoint-2; checkpoint-1 is whole, and --resume continues from it"
    for file in whole:
        data, size = file.read_bytes(), file.stat().st_size
        for at in (0, 9, size // 3, size // 2, 2 * size // 3, size - 2, size - 1):
            flip(file, at)
            with pytest.raises(TrainError) as error:
                checkpoint.load_checkpoint(folder, None)  # type: ignore[arg-type]  # refused before it is needed
            assert (error.value.where, error.value.do) == (file, do)
            file.write_bytes(data)
        file.unlink()
        with pytest.raises(TrainError, match="a file is missing") as error:
            checkpoint.load_checkpoint(folder, None)  # type: ignore[arg-type]
        assert error.value.where == file
        file.write_bytes(data)
    flip(folder / "state.safetensors", 5000)
    refused(train.try_("--resume", settings=settings), str(folder / "state.safetensors"), "was changed after", do)
    shutil.rmtree(folder)
    assert train.try_("--resume", settings=settings).code == 0


def test_what_to_do_about_damage_names_the_newest_whole_checkpoint(train: Trainer) -> None:
    out = train(settings=DYING, train__ema_decay=0, train__checkpoints_total_limit=0, train__max_steps=4)
    for step, do in (
        (4, "remove checkpoint-4; checkpoint-3 is whole, and --resume continues from it"),
        (3, "remove checkpoint-4, checkpoint-3; checkpoint-2 is whole, and --resume continues from it"),
        (2, "remove checkpoint-4, checkpoint-3, checkpoint-2; checkpoint-1 is whole, and --resume continues from it"),
        (1, "no earlier checkpoint is whole: start again with another train.output_dir"),
    ):
        flip(out / f"checkpoint-{step}" / LORA, 500)
        with pytest.raises(TrainError) as error:
            checkpoint.load_checkpoint(out / "checkpoint-4", None)  # type: ignore[arg-type]
        assert error.value.where == out / "checkpoint-4" / LORA
        assert error.value.do == do
    shutil.rmtree(out / "checkpoint-4")
    shutil.copytree(out / "checkpoint-1", out / "checkpoint-4")
    (strange := out / "checkpoint-4" / "._state.json").touch()
    with pytest.raises(TrainError, match="remove this file, if it came there by mistake; else") as error:
        checkpoint.load_checkpoint(out / "checkpoint-4", None)  # type: ignore[arg-type]
    assert (error.value.where, error.value.what) == (strange, "checksums.json does not list this file")
    (out / "checkpoint-4" / "checksums.json").unlink()
    refused(
        train.try_("--resume", settings=DYING, train__ema_decay=0, train__max_steps=4),
        "checkpoint-4/checksums.json: a file is missing",
        "if an earlier version wrote it, which had no checksums.json, finish the run with that version; else no",
    )


def other_states(state: dict[str, Any]) -> Iterator[Any]:
    """Contents that no version of state.json has; the checksums are right."""
    yield from (None, 1, "x", [], {}, {"fixed": state["fixed"]})
    strange = (None, -1, 1.5, 10**30, 1e999, "x", [], {}, {"tensor": "no"}, {"list": 3}, {"dict": [[[], 1]]}, [[1]])
    for name in state.keys() - {"origin"}:  # which only names the model in a message
        yield {key: value for key, value in state.items() if key != name}
        if name != "fixed":
            yield from ({**state, name: value} for value in strange if (name, value) != ("random", []))


def test_no_content_of_state_json_ends_in_a_traceback(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Any] = []
    prepare = training.prepare
    monkeypatch.setattr(training, "prepare", lambda *a: runs.append(prepare(*a)) or runs[-1])
    path = train(settings=DYING, train__max_steps=1) / "checkpoint-1" / "state.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    texts = [*map(json.dumps, other_states(state)), "", "{", 100_000 * "[", 100_000 * '{"list":']
    deep = 400 * '{"list": [' + "1" + 400 * "]}"
    for other in [*texts, json.dumps({**state, "random": None}).replace('"random": null', f'"random": {deep}')]:
        path.write_text(other, encoding="utf-8")
        write_checksums(path.parent)
        with pytest.raises(TrainError, match=r"cannot restore|was trained with another") as error:
            checkpoint.load_checkpoint(path.parent, runs[0].run)
        assert error.value.where == path


def test_a_run_that_is_done_says_so(train: Trainer) -> None:
    train(settings=DYING, train__max_steps=2)
    for steps in (1, 2):
        result = train.try_("--resume", settings=DYING, train__max_steps=steps)
        assert result.code == 0
        assert "after step 2: nothing is left to train; raise train.max_steps" in " ".join(result.stderr.split())
        assert "elapsed" not in result.stderr, "no progress line of nothing"


# ---- settings --------------------------------------------------------------------------------------------------------


def test_all_differences_are_told_at_once_with_the_command_that_continues(train: Trainer) -> None:
    """The command drops what is refused and keeps what may change; it needs no other setting of the run."""
    out = train(settings=DYING, train__max_steps=1)
    changed = {"train.lora.rank": 3, "train.seed": 7, "train.batch_size": 3, "optimizer.learning_rate": 0.5}
    result = train.try_("--resume", settings=DYING | changed, train__max_steps=2)
    was = "expected train.seed 0, train.batch_size 2, train.lora.rank 16"
    found = "found train.seed 7, train.batch_size 3, train.lora.rank 3"
    told = f"with another train.seed, train.batch_size, train.lora.rank, so it cannot be resumed ({was}, {found})"
    refused(result, f"error: {out / 'checkpoint-1' / 'state.json'}: this checkpoint was trained {told}")
    command = result.stderr.partition("→ `")[2].partition("` continues the run; or start a new run with another")[0]
    assert command == f"qwen-train run --resume --out {out} --set train.max_steps=2 --set optimizer.learning_rate=0.5"
    result = run_training(*shlex.split(command)[2:])
    assert result.code == 0, result.stderr
    assert "from here on: train.max_steps 1 → 2, optimizer.learning_rate 0.01 → 0.5" in " ".join(result.stderr.split())


def test_a_resumed_run_has_its_own_settings_and_tells_what_the_file_says(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """qwen.yaml of the working directory was edited since: told, and applied when it is named."""
    monkeypatch.chdir(train.folder)
    file = train.folder / "qwen.yaml"
    file.write_text("train: {max_steps: 1, output_dir: out, ema_decay: 0.5, lora: {rank: 2}}", encoding="utf-8")
    train.try_(settings={"train.mixed_precision": "no", "logging.report_to": "none", "train.batch_size": 2})
    file.write_text("train: {max_steps: 2, output_dir: out, lora: {rank: 2}}", encoding="utf-8")
    result = run_training("--resume")
    assert result.code == 0, result.stderr
    said = " ".join(result.stderr.split())
    told = (
        "this run's settings are kept, not those of qwen.yaml: train.max_steps 1 (not 2); --config qwen.yaml applies "
    )
    assert told + "the file this run's settings are kept, which qwen.yaml does not have: " in said
    assert " train.batch_size 2, train.ema_decay 0.5, " in said
    assert "; --set changes them" in said
    assert column(train.folder / "out", "step") == [1]
    own = train.folder / "out" / "qwen.yaml"
    old = own.read_text(encoding="utf-8").replace("loss_reduction: per_sample", "loss_mean: samples")
    assert "loss_mean" in old
    own.write_text(old, encoding="utf-8")  # of an earlier version
    result = run_training("--resume", "--config", "qwen.yaml", "--set", "train.loss_reduction=per_token")
    assert result.code == 0, result.stderr
    said = " ".join(result.stderr.split())
    assert "from here on: train.max_steps 1 → 2, train.loss_reduction per_sample → per_token" in said
    assert " train.ema_decay 0.5, " in said
    assert "not as in qwen.yaml" not in said  # it is applied
    assert column(train.folder / "out", "step") == [1, 2]


def test_a_run_whose_settings_were_damaged_says_what_to_do(train: Trainer) -> None:
    out = train(settings=DYING, train__max_steps=1)
    (out / "qwen.yaml").write_text("train: {max_step: 2}", encoding="utf-8")
    do = "correct it; or remove it, and give the run's settings again"
    refused(train.try_("--resume", settings=DYING), f"{out / 'qwen.yaml'}: unknown key train.max_step\n  → {do}")
    (out / "qwen.yaml").unlink()
    told = "`qwen-train run --resume --out", "--set train.batch_size=2` continues the run"
    refused(train.try_("--resume", settings=DYING, train__batch_size=3), *told)
    train("--resume", settings=DYING, train__max_steps=2)


# ---- the same transformer --------------------------------------------------------------------------------------------


def test_another_transformer_of_the_same_shapes_is_refused(train: Trainer) -> None:
    """The same one is taken from any path; others are refused, also under the same path."""
    digest = json.loads((train(settings=DYING, train__max_steps=1) / "checkpoint-1" / "state.json").read_text())
    same = digest["fixed"]["transformer"]
    name, train.model = train.model.name, Path(shutil.copytree(train.model, train.folder / "moved"))
    assert train.try_("--resume", settings=DYING, train__max_steps=2).code == 0
    (file,) = (train.model / "transformer").glob("*.safetensors")
    flip(file, file.stat().st_size - 2)
    result = train.try_("--resume", settings=DYING)
    refused(result, "checkpoint-2/state.json: this checkpoint was trained with another transformer")
    refused(result, f"(expected moved, xxh3-128 {same}, found moved, xxh3-128 ")
    refused(result, "restore the transformer, whose content has changed, or start a new run with another --out")
    shutil.rmtree(train.folder / "out" / "checkpoint-2")
    refused(train.try_("--resume", settings=DYING), f"(expected {name}, xxh3-128 {same}, found moved, xxh3-128 ")


def test_other_weights_by_quantisation_are_refused(train: Trainer) -> None:
    train(settings=DYING, train__max_steps=1)
    result = train.try_("--resume", settings=DYING, model__quantization="int8")
    refused(result, "trained with another model.quantization", "(expected none, found int8)")


# ---- one run in a folder ---------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_at_once_and_told_of_the_first(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first is in its first batch; it holds the lock before that, and lets it go however it ends."""
    out, seen, compute_loss = train.folder / "out", list[str](), training.compute_loss

    def second(*arguments: Any) -> torch.Tensor:
        with pytest.raises(TrainError) as error, only_run(out, Launch()):
            pytest.fail("two runs in a folder")
        seen.append(str(error.value))
        return compute_loss(*arguments)

    monkeypatch.setattr(training, "compute_loss", second)
    train(train__max_steps=1)
    assert seen == [
        f"{out}: another run is writing to this folder (found process {os.getpid()} on {os.uname().nodename})\n"
        "  → wait for it, or stop it first; or name another folder with --out"
    ]
    assert not (out / ".lock").exists()
    assert {path.stat().st_mode for path in out.rglob("*") if path.is_file()} == {(out / "qwen.yaml").stat().st_mode}
    into_the_cache = train.try_(train__output_dir=str(train.cache))
    refused(into_the_cache, f"{train.cache}: this folder is a cache\n  → name another with --out")
    with pytest.MonkeyPatch.context() as patch:
        dying_in(0, patch)
        with pytest.raises(Crash):
            train.try_("--resume", train__max_steps=2)
    with locked(out / ".lock"):
        refused(train.try_("--resume"), "another run is writing to this folder", f"process {os.getpid()}")
    train("--resume")


def test_the_lock_comes_before_the_look_for_checkpoints(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def look(out: Path) -> list[tuple[int, Path]]:
        with pytest.raises(LockHeldError), locked(out / ".lock"):
            pytest.fail("two hold the lock")
        raise Crash

    monkeypatch.setattr(start, "checkpoints", look)
    with pytest.raises(Crash):
        train.try_()
    assert list(train.folder.iterdir()) == []


def test_programs_that_a_run_starts_do_not_hold_its_lock(tmp_path: Path) -> None:
    with locked(tmp_path / ".lock", remove=True):
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, close_fds=False)
    with child, locked(tmp_path / ".lock"):
        child.kill()


@pytest.mark.parametrize("windows", [False, True])
def test_a_lock_file_that_was_removed_meanwhile_locks_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, windows: bool
) -> None:
    """Its holder ends between the opening and the locking of another process, which then has the lock of no file."""
    path, open_ = tmp_path / ".lock", os.open

    def opened(*arguments: Any) -> int:
        descriptor = open_(*arguments)
        path.unlink()
        return descriptor

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", opened)
        with pytest.raises(LockHeldError), locked(path):
            pytest.fail("the lock of a removed file")
    monkeypatch.setattr(files, "WINDOWS", windows)
    with locked(path, remove=True):
        assert path.exists()
    assert not path.exists()


def test_without_locks_a_run_goes_ahead_and_says_so(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> bool:
        raise OSError(errno.ENOTSUP, os.strerror(errno.ENOTSUP))

    monkeypatch.setattr("filelock.lock_descriptor", refuse)
    result = train.try_(train__max_steps=1)
    assert result.code == 0, result.stderr
    out = train.folder / "out"
    warning = f"warning: {out}: files cannot be locked here (Operation not supported): start no second run in it"
    assert warning in " ".join(result.stderr.split())
    assert not (out / ".lock").exists()


def test_a_checkpoint_of_another_run_is_not_replaced(train: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be one where files cannot be locked."""
    (other := train.folder / "out" / "checkpoint-1").mkdir(parents=True)
    monkeypatch.setattr(start, "checkpoints", lambda _: [])
    result = train.try_(train__max_steps=1)
    refused(result, "checkpoint-1 cannot be written: another run has written it", "stop the other run")
    assert list(other.iterdir()) == []


# ---- on the disk -----------------------------------------------------------------------------------------------------


def test_older_checkpoints_are_removed_when_the_new_one_is_on_the_disk(
    train: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, events, rmtree, sync = train.folder / "out", list[str](), shutil.rmtree, files.sync_folder
    monkeypatch.setattr(shutil, "rmtree", lambda path, **more: (events.append(f"-{path.name}"), rmtree(path, **more)))
    monkeypatch.setattr(files, "sync_folder", lambda path: (events.append(path.name), sync(path)))
    train(train__max_steps=2, train__checkpointing_steps=1, train__checkpoints_total_limit=1)
    removed = "-.checkpoint-1.removed.tmp"
    assert events[events.index(removed) - 2 :][:3] == ["out", "-.checkpoint-2.old", removed]
    assert (out / "checkpoint-2").is_dir()


@pytest.mark.parametrize("renames", [0, 1])
def test_a_death_while_a_folder_is_replaced_leaves_one_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    calls, replace, path = itertools.count(), os.replace, tmp_path / "transformer"

    def dying(source: Path, target: Path) -> None:
        if next(calls) == renames:
            raise Crash
        replace(source, target)

    def write(text: str) -> None:
        with files.whole_folder(path) as folder:
            (folder / "weights").write_text(text, encoding="utf-8")

    write("old")
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", dying)
        with pytest.raises(Crash):
            write("new")
    with pytest.raises(OSError, match="full"), files.whole_folder(path):
        raise OSError("full")
    assert [each.name for each in tmp_path.iterdir()] == ["transformer"]
    assert (path / "weights").read_text(encoding="utf-8") == "old"
